"""How much of the engine's time does the GPU compute? 256 requests on a GPU, with random weights in Qwen3-0.6B's shape.

    python benchmarks/engine_gpu.py [--output FOLDER] [--requests 256] [--no-transformers]

Prompts of 100 to 1,024 tokens and outputs of 100 to 1,024, drawn at random; all are there at the start. Prints output
tokens a second, the share of the wall time that the GPU spends from a step's copy to its choice (CUDA events), where
a step's time goes on the host, what recording a trace costs, and transformers' continuous batching on the same requests.
"""

import argparse
import gc
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_step import QWEN3

from minivllm import LLM, SamplingParams


def tokenizer() -> Any:
    """One token for each byte: the engine detokenises what it serves."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {s: i for i, s in enumerate(symbols)} | {f"<{i}>": i for i in range(256, QWEN3["vocab_size"])}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<257>")


def model_folder(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({**QWEN3, "bos_token_id": 256, "eos_token_id": 257}))
    tokenizer().save_pretrained(folder)
    return folder


def workload(count: int) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(0)
    lens = rng.integers(100, 1025, (count, 2))
    return [(rng.integers(0, 256, prompt).tolist(), int(output)) for prompt, output in lens]


class Stopwatch:
    """Wraps methods and adds up the time that the host spends in them, without those that they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[float] = []

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open.append(0.0)
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[name] += spent - self._open.pop()
                if self._open:
                    self._open[-1] += spent

        setattr(owner, method, timed)


class GpuTime:
    """Time from the copy of a step's arrays to the choice of its tokens, on the GPU's own clock."""

    def __init__(self, runner: Any) -> None:
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        forward, send, choose = runner._forward, runner.buffer.send, runner.sampler._choose

        def begin() -> None:
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            self.pairs.append(pair)  # type: ignore[arg-type]
            send()

        def layers(*args: Any) -> Any:
            result = forward(*args)
            self.pairs[-1][1].record()  # again behind the choice, if the step makes one
            return result

        def end(*args: Any) -> Any:
            result = choose(*args)
            self.pairs[-1][1].record()
            return result

        runner.buffer.send, runner._forward, runner.sampler._choose = begin, layers, end

    def seconds(self) -> float:
        torch.cuda.synchronize()
        total = sum(a.elapsed_time(b) for a, b in self.pairs) / 1e3
        self.pairs.clear()
        return total


def generate(llm: LLM, work: list[tuple[list[int], int]]) -> float:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in work]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def ours(folder: Path, work: list[tuple[list[int], int]], eager: bool = False) -> dict[str, Any]:
    llm = LLM(
        str(folder), load_format="dummy", dtype="bfloat16", device="cuda", max_model_len=2048, enforce_eager=eager,
        max_num_seqs=256, enable_prefix_caching=False,
    )  # fmt: skip
    tokens = sum(n for _, n in work)
    generate(llm, work)  # compiles kernels, captures graphs
    core = llm.llm_engine.core
    plain, recorded = [], []
    for _ in range(2):  # by turns
        plain.append(generate(llm, work))
        with llm.record():
            recorded.append(generate(llm, work))
    wall, traced = min(plain), min(recorded)
    result: dict[str, Any] = {
        "seconds": wall,
        "tokens_s": tokens / wall,
        "traced_s": traced,
        "trace_cost": traced / wall - 1,
    }
    runner, watch = core.executor.runner, Stopwatch()
    watch.wrap(core.scheduler, "schedule", "schedule")
    watch.wrap(core.scheduler, "update", "update")
    watch.wrap(runner, "_update_rows", "rows")
    watch.wrap(runner.batch, "prepare", "prepare")
    watch.wrap(runner, "_forward", "plan and launch")
    watch.wrap(runner, "_sample", "logits, sample, append")
    watch.wrap(runner.sampler, "_choose", "launch of the choice")
    watch.wrap(llm.llm_engine.output_processor, "process_outputs", "detokenize, outputs")
    gpu, before = GpuTime(runner), core.scheduler.step
    timed = generate(llm, work)
    steps = core.scheduler.step - before
    result |= {"timed_s": timed, "steps": steps, "step_gpu_s": gpu.seconds(), "graphs": len(runner.graphs or ())}
    result["host_ms_a_step"] = {name: 1e3 * s / steps for name, s in watch.seconds.items()}
    result["host_ms_a_step"]["everything else"] = 1e3 * (timed - sum(watch.seconds.values())) / steps
    return result


def transformers_tokens_s(folder: Path, work: list[tuple[list[int], int]], limit: int) -> dict[str, Any]:
    """transformers' continuous batching, on the first `limit` requests, outputs cut to 128 tokens: it is slow."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    model = (
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="paged|sdpa").cuda().eval()
    )
    settings = GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True)
    start = time.perf_counter()
    answers = model.generate_batch(inputs=[p for p, _ in work[:limit]], generation_config=settings)
    seconds = time.perf_counter() - start
    made = sum(len(a.generated_tokens) for a in answers.values())
    return {"requests": limit, "output_tokens": made, "seconds": seconds, "tokens_s": made / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for engine_gpu-CARD.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: torch sees no NVIDIA GPU here")
        return
    card, work = torch.cuda.get_device_name(), workload(args.requests)
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name))
        found = ours(folder, work)
        print(
            f"{card}: {args.requests} requests, {sum(len(p) for p, _ in work)} prompt and {sum(n for _, n in work)} output tokens"
        )
        print(
            f"{found['tokens_s']:.0f} output tokens/s, {found['seconds']:.2f} s, {found['graphs']} graphs; with a trace {found['trace_cost']:+.1%}"
        )
        share = found["step_gpu_s"] / found["seconds"]
        print(
            f"on the GPU from the copy to the choice of each step: {found['step_gpu_s']:.2f} s, {share:.0%} of the wall time"
        )
        print(
            f"{found['steps']} steps of {1e3 * found['timed_s'] / found['steps']:.2f} ms; on the host, each without what it calls:"
        )
        for part, ms in found["host_ms_a_step"].items():
            print(f"  {part:24} {ms:7.3f} ms")
        result: dict[str, Any] = {"card": card, "requests": args.requests, "engine": found, "gpu_share": share}
        if not args.no_transformers:
            gc.collect()
            torch.cuda.empty_cache()
            peer = transformers_tokens_s(folder, work, min(64, args.requests))
            result["transformers"] = peer
            print(
                f"transformers' continuous batching: {peer['tokens_s']:.0f} output tokens/s on {peer['requests']} requests cut to 128 tokens"
            )
    if args.output:
        (args.output / f"engine_gpu-{card.lower().replace(' ', '-')}.json").write_text(
            json.dumps(result, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
