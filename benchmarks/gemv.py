"""Which product is fastest for few rows? Prints microseconds of cuBLAS and of our kernels, for each layer and number of rows.

    python benchmarks/gemv.py [--output FOLDER] [--rows 1 2 4 8 16 32 64]
    python benchmarks/gemv.py --formats bf16 fp8 int4 [--output FOLDER] [--rows 1 4 16]

"fma" computes on the plain units and takes one row, "mma" on the matrix units and takes up to 16; "auto" is what `ops.gemv` takes for more. A gated layer ends in
silu(gate) * up: for cuBLAS by a kernel of its own. The layers are those of Qwen3-0.6B. Times are medians over replays of a CUDA graph that goes through copies of the weight, so
that nothing is read from L2; the floor is the time in which a copy measured in the same run moves the weight's bytes.

With --formats: our kernels on the layers of Qwen3-8B, for weights of 16, 8 and 4 bits (int4 in groups of 128, fp8 in blocks of 128), as the share that
they reach of the bandwidth of a kernel which only reads; the bytes are those of the weight with its scales.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from kernels import CUDA, L2, copy_bandwidth, median_ms, read_bandwidth, replayed
from minivllm.models.linear.cuda import CUDAPackedWeight, packed
from minivllm.models.linear.grouped import GroupedWeight
from minivllm.models.linear.scaled import FP8, ScaledWeight
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
    for way in ("cublas", *(("fma", "mma") if rows == 1 else ("mma",) if rows <= 16 else ("auto",))):
        if way == "auto" and not ops.takes_rows(weights[0], rows, gated):
            continue  # torch multiplies
        calls = [partial(cublas, w) if way == "cublas" else partial(ops.gemv, x, w, gated, way) for w in weights]
        error = ((calls[0]().double() - exact).norm() / exact.norm()).item()
        if not error < (8e-3 if gated else 4e-3):
            raise SystemExit(f"{way}, {size} x {features}, {rows} rows: relative error {error}")
        replay, count = replayed(calls)
        found[way] = 1e3 * median_ms(replay, 15, count)
    return found


QWEN3_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}


def random_weight(size: int, features: int, kind: str) -> torch.Tensor | CUDAPackedWeight:
    if kind == "bf16":
        return (torch.randn(size, features, device=CUDA) / features**0.5).bfloat16()
    scale = (torch.rand(size, features // 128, device=CUDA) + 0.5) / features**0.5
    if kind == "int4":
        q = torch.randint(256, (size, features // 2), dtype=torch.uint8, device=CUDA)
        return packed(GroupedWeight(q, scale.bfloat16()), torch.bfloat16)
    return packed(ScaledWeight(torch.randn(size, features, device=CUDA).to(FP8), scale, 128), torch.bfloat16)


def of_read_bandwidth(formats: list[str], rows: list[int], output: Path | None) -> None:
    """A line for each layer of Qwen3-8B and format, a column for each number of rows."""
    card, read, table = torch.cuda.get_device_name(), read_bandwidth(), []
    print(f"{card}, read {read:.0f} GB/s\nlayer   format       MB", *(f"{n:6} rows, us" for n in rows))
    for name, (size, features) in QWEN3_8B.items():
        for kind in formats:
            first = random_weight(size, features, kind)
            nbytes = first.nbytes
            weights = [first, *(random_weight(size, features, kind) for _ in range(max(7, L2 // nbytes)))]
            dense = (first if kind == "bf16" else first.dequantize()).double()
            shown = []
            for count in rows:
                x = torch.randn(count, features, device=CUDA).bfloat16()
                calls = [partial(ops.gemv, x, w) if kind == "bf16" else partial(w.apply, x) for w in weights]
                exact = x.double() @ dense.t()
                error = ((calls[0]().double() - exact).norm() / exact.norm()).item()
                if not error < 4e-3:
                    raise SystemExit(f"{kind}, {size} x {features}, {count} rows: relative error {error}")
                replay, inner = replayed(calls)
                us = 1e3 * median_ms(replay, 15, inner)
                share = nbytes / us / 1e3 / read
                table.append(
                    {"layer": name, "format": kind, "rows": count, "us": us, "of_read": share, "bytes": nbytes}
                )
                shown.append(f"{us:8.2f} ({share:.2f})")
            print(f"{name:8}{kind:6} {nbytes / 1e6:8.1f}", *shown, flush=True)
    for kind in formats:
        for count in rows:
            mine = [row for row in table if row["format"] == kind and row["rows"] == count]
            share = sum(row["bytes"] for row in mine) / sum(row["us"] for row in mine) / 1e3 / read
            print(f"all four layers, {kind}, {count} rows: {share:.2f} of the read bandwidth")
    if output:
        result = {"card": card, "read_gb_s": read, "rows": table}
        (output / f"gemv_quantized-{card.lower().replace(' ', '-')}.json").write_text(
            json.dumps(result, indent=1) + "\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--formats", nargs="+", choices=("bf16", "fp8", "int4"), help="compare these instead")
    parser.add_argument("--output", type=Path, help="folder for gemv-CARD.json, or gemv_quantized-CARD.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: torch sees no NVIDIA GPU here")
        return
    if args.formats:
        of_read_bandwidth(args.formats, args.rows, args.output)
        return
    card, copy, table = torch.cuda.get_device_name(), copy_bandwidth(), []
    print(f"{card}, copy {copy:.0f} GB/s\nlayer     rows  floor us   cublas      fma      mma     auto")
    for name, (size, features) in LAYERS.items():
        for rows in args.rows:
            floor = 2 * size * features / copy / 1e3
            us = microseconds(size, features, rows, name == "gate_up")
            table.append({"layer": name, "rows": rows, "floor_us": floor, "us": us})
            shown = [f"{us[way]:8.2f}" if way in us else "       -" for way in ("cublas", "fma", "mma", "auto")]
            print(f"{name:8} {rows:5} {floor:9.2f}", *shown, flush=True)
    if args.output:
        name = f"gemv-{card.lower().replace(' ', '-')}.json"
        result = {"card": card, "copy_gb_s": copy, "rows": table}
        (args.output / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
