"""What do LoRA adapters cost on a GPU? Microseconds of a layer, and tokens a second of 64 requests, as a share of the base model's.

    python benchmarks/lora_gpu.py [--output FOLDER] [--rank 16] [--adapters 0 1 16] [--rows 1 4 16 64 256 2048] [--no-engine]

The layer table: what adapters of rank `--rank` add to the base's matmul, in the shapes of Qwen3-0.6B, 16 adapters mixed: ours (two kernels, torch's
grouped matmuls above FEW_ROWS rows) and a loop over the adapters in torch; "base" is the matmul that they are added to. Medians over replays of a CUDA graph (the loop:
of calls) that goes through copies of the weights. The engine table: Qwen3-0.6B with random weights, greedy, one base engine and one with adapters,
by turns, every second round in reverse.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from engine_gpu import model_folder
from lora import tokens_per_second, write_adapter

from kernels import CUDA, L2, median_ms, replayed
from minivllm import LLM, LoRARequest
from minivllm.lora.adapter import LoRAWeights, lora_targets
from minivllm.lora.linear import FEW_ROWS, LoRABatch, LoRALinear
from minivllm.models.linear.layer import Linear

LAYERS = {
    "qkv": (1024, {"q": 2048, "k": 1024, "v": 1024}),
    "o": (2048, {"o": 1024}),
    "gate_up": (1024, {"gate": 3072, "up": 3072}),
    "down": (3072, {"down": 1024}),
}
SLOTS = 16


def adapted(inputs: int, parts: dict[str, int], rank: int, batch: LoRABatch) -> LoRALinear:
    layer = Linear(inputs, parts, dtype=torch.bfloat16, device=CUDA, method="gemv")
    layer.method.weights["weight"].normal_(0, inputs**-0.5)
    method = LoRALinear(layer, batch, SLOTS, rank, invariant=False)
    for slot in range(SLOTS):
        method.set_slot(
            slot,
            {
                part: LoRAWeights(torch.randn(rank, inputs) / inputs**0.5, torch.randn(outputs, rank))
                for part, outputs in parts.items()
            },
        )
    return method


def layer_microseconds(inputs: int, parts: dict[str, int], rank: int, rows: int) -> dict[str, float]:
    """Of the base's matmul, and of what each way adds to it."""
    batch, size = LoRABatch(4096, CUDA), inputs * sum(parts.values())
    methods = [adapted(inputs, parts, rank, batch) for _ in range(min(16, 1 + L2 // (2 * size)))]
    x = torch.randn(rows, inputs, device=CUDA).bfloat16()
    slots = np.random.default_rng(0).integers(0, SLOTS, rows) if rows <= FEW_ROWS else np.sort(np.arange(rows) % SLOTS)
    batch.set(slots)
    out = methods[0].base.apply(x)

    def by_kernels(method: LoRALinear) -> None:
        method._kernels.add(x, out)

    def by_loop(method: LoRALinear) -> None:
        for slot, some in batch.groups:
            method._add(slot, some, x, out)

    found = {}
    ways: dict[str, Any] = {"base": lambda m: m.base.apply(x), "ours": by_kernels, "loop": by_loop}
    for name, way in ways.items():
        calls = [partial(way, method) for method in methods]
        if name == "loop":
            found[name] = 1e3 * median_ms(lambda calls=calls: [call() for call in calls], 10, len(calls))
        else:
            replay, count = replayed(calls)
            found[name] = 1e3 * median_ms(replay, 15, count)
    return found


def engines(args: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    folder = model_folder(root)
    sizes = {"load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_model_len": 1024, "max_num_seqs": 64, "num_gpu_blocks": 6000}  # fmt: skip
    base = LLM(str(folder), **sizes)
    most = max(args.adapters)
    engine = LLM(str(folder), enable_lora=True, max_loras=most, max_lora_rank=args.rank, **sizes)
    targets = lora_targets(engine.llm_engine.core.executor.runner.model.spec)
    loras = [
        LoRARequest(f"adapter-{i}", i + 1, str(write_adapter(root / f"adapter-{i}", targets, args.rank)))
        for i in range(most)
    ]
    kinds = {"base": (base, [None])} | {str(n): (engine, loras[:n] or [None]) for n in args.adapters}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(args.rounds + 1):  # the first compiles kernels, captures graphs and loads adapters
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            llm, mix = kinds[name]
            rates[name].append(tokens_per_second(llm, args.requests, args.tokens, mix))
    graphs = engine.llm_engine.core.executor.runner.graphs
    print(f"{args.requests} requests, {args.tokens} tokens each, rank {args.rank}; {len(graphs or ())} graphs\nadapters  tokens/s  of base  median ratio")  # fmt: skip
    table, best = [], {name: max(each[1:]) for name, each in rates.items()}
    for name, each in rates.items():
        ratio = median(mine / base for mine, base in zip(each[1:], rates["base"][1:], strict=True))
        print(f"{name:>8}  {best[name]:8.0f}  {best[name] / best['base']:7.2f}  {ratio:12.2f}", flush=True)
        table.append({"adapters": name, "tokens_s": best[name], "median_ratio": ratio})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 2048])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 16])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--no-engine", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for lora-CARD.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: torch sees no NVIDIA GPU here")
        return
    card, table = torch.cuda.get_device_name(), []
    print(f"{card}, rank {args.rank}, {SLOTS} adapters mixed, microseconds\nlayer     rows     base     ours     loop")
    for name, (inputs, parts) in LAYERS.items():
        for rows in args.rows:
            us = layer_microseconds(inputs, parts, args.rank, rows)
            table.append({"layer": name, "rows": rows, "us": us})
            print(f"{name:8} {rows:5}", *(f"{us[way]:8.2f}" for way in ("base", "ours", "loop")), flush=True)
    result: dict[str, Any] = {"card": card, "rank": args.rank, "rows": table}
    if not args.no_engine:
        with tempfile.TemporaryDirectory() as name:
            result["engine"] = engines(args, Path(name))
    if args.output:
        (args.output / f"lora-{card.lower().replace(' ', '-')}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
