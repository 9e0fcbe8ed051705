"""How much of the engine's time does the GPU compute? 256 requests on a GPU, with random weights in Qwen3-0.6B's shape.

    python benchmarks/engine_gpu.py [--output FOLDER] [--requests 256] [--longest 1024] [--no-transformers]

Prompts of 100 to 1,024 tokens and outputs of 100 to 1,024, drawn at random; all are there at the start. Prints, without and
with async scheduling, output tokens a second, the share of the wall time in which the GPU computes, where a step's time
goes on the host, and what recording a trace costs; and transformers' continuous batching on the same requests. The GPU's
time is that from each step's copy to its choice, by CUDA events, in the engine that waits for every step: there no step
can hold time in which the GPU waits for the next one.
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
from minivllm.runtime.model_runner import PendingStep


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


def workload(count: int, longest: int = 1024) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(0)
    lens = rng.integers(100, (1025, longest + 1), (count, 2))
    return [(rng.integers(0, 256, prompt).tolist(), int(output)) for prompt, output in lens]


class Stopwatch:
    """Wraps methods and adds up the time that the host spends in them, without those that they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[float] = []
        self._wrapped: list[tuple[Any, str, Any]] = []

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
        self._wrapped.append((owner, method, inner if isinstance(owner, type) else None))

    def unwrap(self) -> None:
        for owner, method, inner in self._wrapped:
            delattr(owner, method) if inner is None else setattr(owner, method, inner)


class GpuTime:
    """Time from the copy of a step's arrays to the choice of its tokens, on the GPU's own clock."""

    def __init__(self, runner: Any) -> None:
        self.pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        forward, send, choose = runner._forward_buffered, runner.buffer.send, runner.sampler._argmax

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
            if not torch.cuda.is_current_stream_capturing():
                self.pairs[-1][1].record()
            return result

        runner.buffer.send, runner._forward_buffered, runner.sampler._argmax = begin, layers, end

    def seconds(self) -> float:
        torch.cuda.synchronize()
        total = sum(a.elapsed_time(b) for a, b in self.pairs) / 1e3
        self.pairs.clear()
        return total


def generate(llm: LLM, work: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in work]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, [list(output.outputs[0].token_ids) for output in outputs]


def ours(folder: Path, work: list[tuple[list[int], int]], async_scheduling: bool, rounds: int = 2) -> dict[str, Any]:
    llm = LLM(
        str(folder), load_format="dummy", dtype="bfloat16", device="cuda", max_model_len=2048, max_num_seqs=256,
        enable_prefix_caching=False, async_scheduling=async_scheduling,
    )  # fmt: skip
    tokens = sum(n for _, n in work)
    _, said = generate(llm, work)  # compiles kernels, captures graphs
    core = llm.llm_engine.core
    plain, recorded = [], []
    for _ in range(rounds):  # by turns
        plain.append(generate(llm, work)[0])
        with llm.record():
            recorded.append(generate(llm, work)[0])
    wall, traced = min(plain), min(recorded)
    result: dict[str, Any] = {
        "seconds": wall,
        "tokens_s": tokens / wall,
        "traced_s": traced,
        "trace_cost": traced / wall - 1,
        "all_s": [plain, recorded],
        "said": said,
    }
    runner, watch = core.executor.runner, Stopwatch()
    watch.wrap(core.scheduler, "schedule", "schedule")
    watch.wrap(core.scheduler, "update_from_output", "update")
    watch.wrap(runner, "_update_rows", "rows")
    watch.wrap(runner.batch, "prepare", "prepare")
    watch.wrap(runner, "_forward_buffered", "plan and launch")
    watch.wrap(runner, "_sample", "launch of logits and sampling")
    watch.wrap(PendingStep, "result", "wait for the tokens, append")
    watch.wrap(runner.sampler, "_argmax", "launch of the choice")
    watch.wrap(llm.llm_engine.output_processor, "process_outputs", "detokenize, outputs")
    gpu, before = GpuTime(runner), core.scheduler.step
    timed, _ = generate(llm, work)
    steps = core.scheduler.step - before
    result |= {"timed_s": timed, "steps": steps, "step_gpu_s": gpu.seconds(), "graphs": len(runner.graphs or ())}
    result["host_ms_a_step"] = {name: 1e3 * s / steps for name, s in watch.seconds.items()}
    result["host_ms_a_step"]["everything else"] = 1e3 * (timed - sum(watch.seconds.values())) / steps
    watch.unwrap()
    llm.llm_engine.close()
    del llm, core, runner, gpu
    gc.collect()
    torch.cuda.empty_cache()
    return result


def report(name: str, found: dict[str, Any], gpu_s: float) -> None:
    print(f"{name}: {found['tokens_s']:.0f} output tokens/s, {found['seconds']:.2f} s, of which the GPU computes {gpu_s / found['seconds']:.0%};"
          f" with a trace {found['trace_cost']:+.1%}; {found['graphs']} graphs")  # fmt: skip
    print(f"  {found['steps']} steps of {1e3 * found['timed_s'] / found['steps']:.2f} ms; on the host, each without what it calls:")  # fmt: skip
    for part, ms in found["host_ms_a_step"].items():
        print(f"    {part:30} {ms:7.3f} ms")


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
    parser.add_argument("--longest", type=int, default=1024, help="most output tokens of a request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for engine_gpu-CARD.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: torch sees no NVIDIA GPU here")
        return
    card, work = torch.cuda.get_device_name(), workload(args.requests, args.longest)
    with tempfile.TemporaryDirectory() as name:
        folder = model_folder(Path(name))
        print(f"{card}: {args.requests} requests, {sum(len(p) for p, _ in work)} prompt and {sum(n for _, n in work)} output tokens")  # fmt: skip
        waits = ours(folder, work, async_scheduling=False, rounds=args.rounds)
        report("one step after the other", waits, waits["step_gpu_s"])
        overlaps = ours(folder, work, async_scheduling=True, rounds=args.rounds)
        report("async scheduling", overlaps, waits["step_gpu_s"])
        said, same = waits.pop("said"), overlaps.pop("said")
        equal = sum(a == b for a, b in zip(said, same, strict=True))
        print(f"async scheduling: {waits['seconds'] / overlaps['seconds']:.2f} times as fast; {equal} of {len(said)} answers are the same tokens")  # fmt: skip
        result: dict[str, Any] = {
            "card": card, "requests": args.requests, "longest": args.longest, "waits": waits, "async_scheduling": overlaps,
            "gpu_share": {"waits": waits["step_gpu_s"] / waits["seconds"], "async_scheduling": waits["step_gpu_s"] / overlaps["seconds"]},
            "equal_answers": equal,
        }  # fmt: skip
        if not args.no_transformers:
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
