"""What is each change for the CPU worth? One change at a time is undone, and decode steps are timed.

    python benchmarks/cpu_changes.py [--batches 1 64] [--rounds 12] [--threads N] [--output FILE]

Every variant is an engine of its own with the same requests, prompts of 128 tokens. They take turns, five steps each, so that other work
on the machine meets them all alike; the median of a variant's steps counts. A ratio above 1 is what the change gains.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from minivllm import LLM, SamplingParams
from minivllm.models.decoder import Decoder
from minivllm.models.linear import cpu as cpu_linear
from minivllm.models.linear.layer import Linear
from minivllm.models.ops.select import make_layer_ops


def linears(decoder: Decoder) -> list[Linear]:
    """Every linear layer of a model."""
    return [*decoder.linears(), decoder.head]


def by_torch(decoder: Decoder) -> None:
    """Matmuls by torch, from weights as they were loaded."""
    for linear in linears(decoder):
        linear.use("torch")


def kernel_by_kernel(decoder: Decoder) -> None:
    """A launch, and Python, for each kernel of a step."""
    decoder._captured = None  # until it is bound again


def by_onednn(decoder: Decoder) -> None:
    """Matmuls by oneDNN, also of a single row. It cannot be part of a program."""
    for linear in linears(decoder):
        if isinstance(linear.method, cpu_linear.CPULinear):
            linear.method.max_rows = 0


def not_fused(decoder: Decoder) -> None:
    """Norms, rotations and gates by torch, an operation at a time."""
    ops = make_layer_ops("torch")
    for part in decoder.all_parts():
        if "ops" in vars(part):
            part.ops = ops


WITHOUT_TILES = "matmuls: without the tile unit"
VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Decoder], None] | None]] = {
    "as it is": ({}, None),
    "a launch for each kernel": ({}, kernel_by_kernel),
    WITHOUT_TILES: ({}, None),
    "matmuls: oneDNN packed, for any number of rows": ({}, by_onednn),
    "matmuls: torch": ({}, by_torch),
    "norms, rotations, gates: torch": ({}, not_fused),
    "attention: gather, then torch": ({"attention_backend": "sdpa"}, None),
    "float32, not bfloat16": ({"dtype": "float32"}, None),
}


def start(name: str, requests: int, tokens: int) -> LLM:
    """An engine with this many requests, past their prompts."""
    arguments, change = VARIANTS[name]
    with patch.object(cpu_linear, "host_tiles", lambda: False) if name == WITHOUT_TILES else nullcontext():
        llm = LLM("smollm2", **{"dtype": "bfloat16"} | arguments, max_model_len=1024, num_gpu_blocks=64 * 40)
    engine = llm.llm_engine
    if change is not None:
        change(engine.core.executor.runner.model)  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(requests):
        prompt = [1000 + (7 * i + j) % 40000 for j in range(128)]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    for _ in range(10):
        engine.step()
    return llm


def measure(requests: int, rounds: int, steps: int = 5) -> dict[str, float]:
    """{variant: milliseconds of a step}."""
    llms = {name: start(name, requests, rounds * steps + 40) for name in VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in llms}
    for _ in range(rounds):
        for name, llm in llms.items():
            for _ in range(steps):
                begin = time.perf_counter()
                llm.llm_engine.step()
                times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--output", type=Path, help="also write the results to this JSON file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found = {str(batch): measure(batch, args.rounds) for batch in args.batches}
    machine = str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor())  # type: ignore[attr-defined]
    print(
        f"{machine}, {torch.get_num_threads()} threads\n\n{'':50}"
        + "".join(f"{f'batch {b}, ms':>15}{'ratio':>8}" for b in found)
    )
    for name in VARIANTS:
        cells = (f"{times[name]:15.2f}{times[name] / times['as it is']:8.2f}" for times in found.values())
        print(f"{name:50}" + "".join(cells))
    if args.output:
        kept = {"machine": machine, "threads": torch.get_num_threads(), "milliseconds": found}
        args.output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
