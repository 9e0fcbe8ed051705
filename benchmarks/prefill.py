"""How fast is prefill attention? Prints TFLOP/s of our two fast rungs and of torch's attention by cuDNN and FlashAttention 2.

    python benchmarks/prefill.py [--output FOLDER] [--rounds 3]

Ours read a cache of shuffled blocks; cuDNN and FlashAttention get K and V contiguous, and are left out where there is a
cached prefix, because their causal mask cannot express it. Only what the mask leaves is counted. Times are those of the
GPU: medians over replays of a CUDA graph of eight calls, and of several rounds in which the ways take turns.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import CUDA, make_spec, median_ms, random_batch, random_cache, replayed
from minivllm.attention.numba_cuda import NumbaCudaBackend
from minivllm_kernels.cuda import ops

SIZES = [  # query heads, KV heads, head_dim, block size, sequences, new tokens, all tokens
    (32, 8, 128, 16, 1, 8192, 8192),
    (32, 8, 128, 16, 1, 16384, 16384),
    (32, 8, 128, 16, 4, 4096, 4096),
    (32, 8, 128, 16, 16, 1024, 1024),
    (32, 8, 128, 16, 8, 256, 4096),
    (16, 8, 128, 16, 8, 4096, 4096),
    (16, 8, 128, 16, 1, 16384, 16384),
    (16, 8, 128, 16, 8, 1024, 1024),
    (16, 8, 128, 16, 8, 512, 8704),
    (32, 8, 128, 16, 64, 256, 256),
    (32, 8, 128, 128, 1, 8192, 8192),
    (28, 4, 128, 16, 4, 4096, 4096),
    (9, 3, 64, 16, 16, 1024, 1024),
    (32, 8, 64, 16, 4, 4096, 4096),
    (32, 8, 96, 16, 4, 4096, 4096),
    (8, 4, 256, 16, 4, 4096, 4096),
]


def by_rung_three(call: Callable[[], Any]) -> Any:
    """What a call gives with `mma.sync` in place of `wgmma`."""
    chosen = ops.hopper_unsupported
    ops.hopper_unsupported = lambda *_: "the benchmark wants rung 3"
    try:
        return call()
    finally:
        ops.hopper_unsupported = chosen


def ways(heads: int, kv_heads: int, dim: int, block: int, batch: int, new: int, total: int) -> dict[str, Callable]:
    """Calls that compute the same attention."""
    spec, backend = make_spec(heads, kv_heads, dim, block_size=block), NumbaCudaBackend()
    step, blocks = random_batch(np.full(batch, new), np.full(batch, total), block)
    cache = random_cache(blocks, spec)
    q = torch.randn(batch * new, heads, dim, device=CUDA, dtype=spec.dtype)
    fast = backend.plan(step, spec, CUDA).device_plan
    slow = by_rung_three(lambda: backend.plan(step, spec, CUDA)).device_plan
    found: dict[str, Callable] = {"mma": lambda: ops.paged_attention(q, cache, slow)}
    if fast.prefill_kernel is not slow.prefill_kernel:
        found["wgmma"] = lambda: ops.paged_attention(q, cache, fast)
    if new == total:
        table = torch.from_numpy(step.block_table).long().to(CUDA)
        k, v = (x[table].flatten(1, 2)[:, :total].transpose(1, 2).contiguous() for x in cache)
        qs = q.view(batch, new, heads, dim).transpose(1, 2).contiguous()

        def sdpa(kind: SDPBackend) -> Any:
            with sdpa_kernel(kind):
                return F.scaled_dot_product_attention(qs, k, v, is_causal=True, enable_gqa=True)

        for name, kind in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            try:
                sdpa(kind)
            except RuntimeError as error:  # a shape that it does not take
                print(f"{name} does not compute {heads}/{kv_heads}/{dim}: {str(error).splitlines()[0]}")
            else:
                found[name] = lambda kind=kind: sdpa(kind)
    return found


def row(rounds: int, *sizes: int) -> dict:
    heads, kv_heads, dim, block, batch, new, total = sizes
    calls = ways(*sizes)
    graphs = {name: replayed([call]) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in calls:
            replay, inner = graphs[name]
            times[name].append(median_ms(replay, 5, inner))
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    flops = 4 * dim * heads * batch * (new * total - new * (new - 1) // 2)
    context = f" on {total - new}" if total > new else ""
    found = {"case": f"{heads}/{kv_heads}/{dim} {batch} x {new}{context}", "block": block}
    found |= {f"{name}_tflop_s": flops / ms / 1e9 for name, ms in medians.items()}
    if "wgmma" in medians:
        found["of_mma"] = medians["mma"] / medians["wgmma"]
        found |= {f"of_{name}": medians[name] / medians["wgmma"] for name in ("cudnn", "flash") if name in medians}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the results to prefill-CARD.json in this folder")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if (reason := ops.device_unsupported(CUDA)) is not None:
        print(f"not run, this benchmark needs a GPU: {reason}")
        return
    torch.manual_seed(0)
    name = torch.cuda.get_device_name(CUDA)
    a, b = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in "ab")
    matmul = 2 * 8192**3 / median_ms(lambda: a @ b) / 1e9
    print(f"{name}, torch {torch.__version__}: bf16 matmul {matmul:.0f} TFLOP/s")
    columns = ["wgmma_tflop_s", "mma_tflop_s", "cudnn_tflop_s", "flash_tflop_s", "of_mma", "of_cudnn", "of_flash"]
    print(f"{'case':30} block  " + " ".join(f"{column.removesuffix('_tflop_s'):>9}" for column in columns))
    rows = []
    for sizes in SIZES:
        found = row(arguments.rounds, *sizes)
        rows.append(found)
        cells = [f"{found[c]:9.{2 if c[:3] == 'of_' else 0}f}" if c in found else " " * 9 for c in columns]
        print(f"{found['case']:30} {found['block']:5}  " + " ".join(cells), flush=True)
    if arguments.output is not None:
        result = {"card": name, "torch": torch.__version__, "matmul_tflop_s": matmul, "prefill": rows}
        arguments.output.mkdir(parents=True, exist_ok=True)
        card = name.lower().replace(" ", "-")
        (arguments.output / f"prefill-{card}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
