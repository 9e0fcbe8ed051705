"""What do weights of 8 and of 4 bits cost, and what do they gain, on this CPU?

    python benchmarks/quantization.py [quality] [speed] [memory] [--model smollm2] [--rounds 3] [--threads N] [--output FILE]

Quality: perplexity of a fixed text (the beginning of Lewis Carroll's *Alice*, 1865, in alice.txt), and the mean divergence of the
next token's distribution from that of bfloat16, in nats. Speed: output tokens a second of one stream (64 tokens in, 64 out) and of 64
requests at once (64 in, 32 out), medians of rounds in which all formats take turns; memory: of the weights as the engine counts them, and
the peak of a process that loads the model and answers once.

SmolLM2 comes from a file whose layers were rounded to 4 bits in groups of 32, long ago, by others: groups of 32 find its very steps again,
and lose much less than they would of another model. Groups of 64 and 128 show what 4 bits usually cost.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minivllm import LLM, SamplingParams
from minivllm.attention.backend import AttentionBatch

Results = dict[str, dict[str, float]]
TEXT = Path(__file__).with_name("alice.txt")
INT8, INT4 = "int8_per_channel_weight_only", "int4_per_group_weight_only"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": INT8},
    **{
        f"int4, groups of {n}": {"dtype": "bfloat16", "quantization": INT4, "quantization_config": {"group_size": n}}
        for n in (32, 64, 128)
    },
}


@torch.inference_mode()
def log_probabilities(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] in float32: of the token after each one. The engine must be idle: its first blocks are used."""
    runner = llm.llm_engine.core.executor.runner  # type: ignore[attr-defined]
    size, count = llm.config.cache.block_size, len(tokens)
    batch = AttentionBatch(
        query_start_loc=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_table=np.arange(1, -(-count // size) + 1, dtype=np.int32)[None],
        slot_mapping=np.arange(size, size + count),
    )
    plans = [runner.backend.plan(batch, spec, runner.device) for spec in runner.specs]
    hidden = runner.model.forward(torch.tensor(tokens), torch.arange(count), runner.kv_caches, plans)
    llm.reset_prefix_cache()
    return runner.model.compute_logits(hidden).log_softmax(-1)


def rate(llm: LLM, requests: int, new: int, round_: int) -> float:
    """Output tokens a second of so many prompts of 64 tokens, which no earlier round has had."""
    prompts = np.random.default_rng((round_, requests)).integers(1000, 20000, (requests, 64)).tolist()
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return requests * new / (time.perf_counter() - start)


def load(model: str, name: str) -> LLM:
    return LLM(model, max_model_len=1024, max_num_seqs=64, num_gpu_blocks=64 * 7 + 65, **FORMATS[name])


def quality(model: str) -> Results:
    """Perplexity, and how far the distributions are from those of bfloat16."""
    found: Results = {}
    exact: torch.Tensor | None = None
    for name in sorted(FORMATS, key="bfloat16".__ne__):  # that one first
        with load(model, name) as llm:
            tokens = llm.get_tokenizer()(TEXT.read_text()).input_ids
            log_p = log_probabilities(llm, tokens)
        exact = log_p if exact is None else exact
        found[name] = {
            "perplexity": log_p[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).mean().neg().exp().item(),
            "KL to bf16": (exact.exp() * (exact - log_p)).sum(-1).mean().item(),
            "same top token": (exact.argmax(-1) == log_p.argmax(-1)).float().mean().item(),
        }
    return found


def speed(model: str, rounds: int) -> Results:
    """Output tokens a second, medians of rounds in which the formats take turns."""
    llms = {name: load(model, name) for name in FORMATS}
    rates: dict[str, dict[str, list[float]]] = {name: {"1 stream tok/s": [], "64 requests tok/s": []} for name in llms}
    for round_ in range(rounds + 1):  # the first one warms up
        for name, llm in llms.items():
            found = {"1 stream tok/s": rate(llm, 1, 64, round_), "64 requests tok/s": rate(llm, 64, 32, round_)}
            if round_:
                for case, value in found.items():
                    rates[name][case].append(value)
    return {name: {case: statistics.median(values) for case, values in found.items()} for name, found in rates.items()}


def memory(model: str) -> Results:
    """Of the weights, as the engine counts them, and the peak of a process of its own."""
    found: Results = {}
    for name in FORMATS:
        command = [sys.executable, __file__, "--model", model, "--peak", name]
        weights, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
        found[name] = {"weights MB": float(weights), "peak MB": float(peak)}
    return found


def answer_once(model: str, name: str) -> None:
    """What a process of `memory` does."""
    with load(model, name) as llm:
        rate(llm, 1, 8, 0)
        scale = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
        print(llm.config.model.weight_bytes / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale)


DIGITS = {"KL to bf16": 4, "perplexity": 3, "same top token": 3, "weights MB": 0, "peak MB": 0}


def show(results: Results) -> None:
    """A table of what was measured; speeds also as ratios to bfloat16."""
    columns: dict[str, dict[str, str]] = {}
    for column in results["bfloat16"]:
        columns[column] = {name: f"{found[column]:.{DIGITS.get(column, 1)}f}" for name, found in results.items()}
        if column.endswith("tok/s"):
            of = results["bfloat16"][column]
            columns[f"{column.removesuffix(' tok/s')} / bf16"] = {
                n: f"{f[column] / of:.2f}" for n, f in results.items()
            }
    print(" ".join([f"{'':20}", *(f"{column:>{max(9, len(column))}}" for column in columns)]))
    for name in results:
        cells = (f"{found[name]:>{max(9, len(column))}}" for column, found in columns.items())
        print(" ".join([f"{name:20}", *cells]))


def machine() -> str:
    """The model of the CPU."""
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor())  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[], help="quality, speed, memory; all if none is named")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--output", type=Path, help="a JSON file that the figures join")
    parser.add_argument("--peak", choices=FORMATS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.what) - {"quality", "speed", "memory"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: quality, speed, memory")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.peak:
        return answer_once(args.model, args.peak)
    kept: dict[str, Any] = {"machine": machine(), "threads": torch.get_num_threads(), "model": args.model}
    old = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    if any(old.get(key, value) != value for key, value in kept.items()):
        parser.error(f"{args.output} has figures of {old['machine']}, {old['threads']} threads, {old['model']}")
    parts = {
        "quality": lambda: quality(args.model),
        "speed": lambda: speed(args.model, args.rounds),
        "memory": lambda: memory(args.model),
    }
    results: Results = old.get("formats", {name: {} for name in FORMATS})
    for what in args.what or parts:
        for name, found in parts[what]().items():
            results[name] |= found
    print(f"{kept['machine']}, {kept['threads']} threads, {args.model}\n")
    show(results)
    if args.output:
        args.output.write_text(json.dumps(kept | {"formats": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
