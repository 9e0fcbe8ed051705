"""Which product is fastest for few rows? Prints microseconds of cuBLAS and of our kernels, for each layer and number of rows.

    python benchmarks/gemv.py [--output FOLDER] [--rows 1 2 4 8 16]

"fma" computes on the plain units and takes one row, "mma" on the matrix units. A gated layer ends in silu(gate) * up: for cuBLAS
by a kernel of its own. The layers are those of Qwen3-0.6B. Times are medians over replays of a CUDA graph that goes through copies of the weight, so
that nothing is read from L2; the floor is the time in which a copy measured in the same run moves the weight's bytes.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from kernels import CUDA, L2, copy_bandwidth, median_ms, replayed
from minivllm_kernels.cuda import ops

LAYERS = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "lm_head": (151936, 1024),
}


def microseconds(size: int, features: int, rows: int, gated: bool) -> dict[str, float]:
    copies = min(64, 1 + L2 // (2 * size * features))
    weights = [(torch.randn(size, features, device=CUDA) / features**0.5).to(torch.bfloat16) for _ in range(copies)]
    x = torch.randn(rows, features, device=CUDA).to(torch.bfloat16)
    exact = x.double() @ weights[0].double().t()
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = gate.sigmoid() * gate * up

    def cublas(weight: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, weight.t())
        return ops.silu_mul(product) if gated else product

    found = {}
    for way in ("cublas", "fma", "mma"):
        if way == "fma" and rows > 1:
            continue
        calls = [partial(cublas, w) if way == "cublas" else partial(ops.gemv, x, w, gated, way) for w in weights]
        error = ((calls[0]().double() - exact).norm() / exact.norm()).item()
        if not error < (8e-3 if gated else 4e-3):
            raise SystemExit(f"{way}, {size} x {features}, {rows} rows: relative error {error}")
        replay, count = replayed(calls)
        found[way] = 1e3 * median_ms(replay, 15, count)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--output", type=Path, help="folder for gemv-CARD.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: torch sees no NVIDIA GPU here")
        return
    card, copy, table = torch.cuda.get_device_name(), copy_bandwidth(), []
    print(f"{card}, copy {copy:.0f} GB/s\nlayer     rows  floor us   cublas      fma      mma")
    for name, (size, features) in LAYERS.items():
        for rows in args.rows:
            floor = 2 * size * features / copy / 1e3
            us = microseconds(size, features, rows, name == "gate_up")
            table.append({"layer": name, "rows": rows, "floor_us": floor, "us": us})
            shown = [f"{us[way]:8.2f}" if way in us else "       -" for way in ("cublas", "fma", "mma")]
            print(f"{name:8} {rows:5} {floor:9.2f}", *shown, flush=True)
    if args.output:
        name = f"gemv-{card.lower().replace(' ', '-')}.json"
        result = {"card": card, "copy_gb_s": copy, "rows": table}
        (args.output / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
