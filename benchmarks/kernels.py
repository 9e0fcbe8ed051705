"""How fast are the CUDA kernels? Prints ratios to the card's own copy bandwidth and to torch's attention.

    python benchmarks/kernels.py [--output FOLDER]

Decode: bytes of K and V, as they lie in the cache, over the time, against a device-to-device copy (read plus write counted) measured in the same
run, and against torch's scaled_dot_product_attention on contiguous K and V of the same lengths. Prefill: against
torch's flash attention, causal, on contiguous K and V. Each time is the median of CUDA events around graph replays
(decode) or calls (prefill); every replay uses the next of several caches, so that nothing is read from L2.
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

from minivllm.attention.backend import FP8, AttentionBatch, AttentionSpec, int8_parts
from minivllm.attention.numba_cuda import NumbaCudaBackend
from minivllm_kernels.cuda import ops

CUDA = torch.device("cuda", 0)
L2 = 200 << 20  # bytes to have between two uses of the same cache


def median_ms(call: Callable[[], Any], repeats: int = 30, inner: int = 1) -> float:
    """Median time of `call` in milliseconds; `inner` is how many pieces of work one call holds."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times)


def replayed(calls: list[Callable[[], Any]]) -> tuple[Callable[[], Any], int]:
    """One CUDA graph of several calls, repeated to at least 8, and how many it holds."""
    calls = calls * -(-8 // len(calls))
    torch.cuda.synchronize()  # what the calls read was made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay, len(calls)


def copy_bandwidth() -> float:
    """GB/s of a large device-to-device copy, bytes read plus bytes written: the better of a copy and a kernel."""
    a, b = (torch.empty(1 << 30, dtype=torch.uint8, device=CUDA) for _ in range(2))
    a.random_()
    ways = (lambda: b.copy_(a), lambda: torch.bitwise_not(a.view(torch.int32), out=b.view(torch.int32)))
    return max(2 * a.numel() / median_ms(way, 20) / 1e6 for way in ways)


def read_bandwidth() -> float:
    """GB/s that a kernel reaches which only reads: the best of a few reductions over 2 GB."""
    a = torch.randint(1 << 30, (1 << 29,), dtype=torch.int32, device=CUDA)
    floats = a.view(torch.float32)
    ways = (floats.sum, a.amax, lambda: floats.view(2048, -1).sum(1), lambda: a.view(2048, -1).amax(1))
    return max(a.nbytes / median_ms(way, 50) / 1e6 for way in ways)


def random_batch(query_lens: np.ndarray, seq_lens: np.ndarray, block: int) -> tuple[AttentionBatch, int]:
    need = -(-seq_lens // block)
    order = np.random.default_rng(0).permutation(np.arange(1, need.sum() + 1)).astype(np.int32)
    table = np.zeros((len(need), need.max()), np.int32)
    for s, (n, end) in enumerate(zip(need, np.cumsum(need))):
        table[s, :n] = order[end - n : end]
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    return AttentionBatch(starts, seq_lens.astype(np.int32), table, np.zeros(starts[-1], np.int64)), int(need.sum()) + 1


def make_spec(
    heads: int, kv_heads: int, dim: int, kv_dtype: torch.dtype | None = None, block_size: int = 16
) -> AttentionSpec:
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "block_size": block_size}
    return AttentionSpec(**sizes, scale=dim**-0.5, dtype=torch.bfloat16, kv_dtype=kv_dtype)


def random_cache(blocks: int, spec: AttentionSpec) -> torch.Tensor:
    backend = NumbaCudaBackend()
    numbers = torch.randn(backend.kv_cache_shape(blocks, spec), device=CUDA, dtype=spec.dtype)
    if spec.kv_dtype == torch.int8:
        cache = (40 * numbers).clamp_(-127, 127).to(torch.int8)
        int8_parts(cache)[1].fill_(1 / 40)
        return cache
    return numbers.to(backend.kv_cache_dtype(spec))


def decode_row(name: str, spec: AttentionSpec, lens: np.ndarray, copy: float) -> dict:
    backend, batch = NumbaCudaBackend(), len(lens)
    step, blocks = random_batch(np.ones(batch, int), lens, spec.block_size)
    *_, kv_heads, numbers = backend.kv_cache_shape(blocks, spec)  # with the scales of int8
    kv_bytes = int(lens.sum()) * kv_heads * numbers * 2 * backend.kv_cache_dtype(spec).itemsize
    copies = min(16, -(-L2 // kv_bytes))
    caches = [random_cache(blocks, spec) for _ in range(copies)]
    q = torch.randn(batch, spec.num_heads, spec.head_dim, device=CUDA, dtype=spec.dtype)
    plan = backend.plan(step, spec, CUDA)
    out = torch.empty_like(q)
    calls = [lambda c=c: ops.paged_attention(q, c, plan.device_plan, out) for c in caches]
    replay, inner = replayed(calls)
    ours = median_ms(replay, 20, inner)
    del caches, replay
    row = {
        "case": name, "kv_mb": kv_bytes / 1e6, "ms": ours, "gb_s": kv_bytes / ours / 1e6,
        "of_copy": kv_bytes / ours / 1e6 / copy, "warps": plan.device_plan.decode_kernel.threads // 32, "items": len(plan.device_plan.items),
    }  # fmt: skip
    if lens.min() == lens.max():
        size = (batch, spec.num_kv_heads, int(lens[0]), spec.head_dim)
        pairs = [[torch.randn(size, device=CUDA, dtype=spec.dtype) for _ in "kv"] for _ in range(copies)]
        replay, inner = replayed(
            [lambda k=k, v=v: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True) for k, v in pairs]
        )
        row["sdpa_ms"] = median_ms(replay, 20, inner)
        row["of_sdpa_time"] = ours / row["sdpa_ms"]
    return row


def prefill_row(name: str, spec: AttentionSpec, query_lens: np.ndarray, seq_lens: np.ndarray) -> dict:
    backend = NumbaCudaBackend()
    step, blocks = random_batch(query_lens, seq_lens, spec.block_size)
    cache = random_cache(blocks, spec)
    tokens = int(query_lens.sum())
    q = torch.randn(tokens, spec.num_heads, spec.head_dim, device=CUDA, dtype=spec.dtype)
    plan = backend.plan(step, spec, CUDA)
    ours = median_ms(lambda: ops.paged_attention(q, cache, plan.device_plan), 20)
    pairs = sum(int(n * s - n * (n - 1) // 2) for n, s in zip(query_lens, seq_lens))
    row = {"case": name, "ms": ours, "tflop_s": 4 * pairs * spec.num_heads * spec.head_dim / ours / 1e9}
    if (query_lens == seq_lens).all() and query_lens.min() == query_lens.max():
        size = (len(query_lens), -1, spec.num_heads, spec.head_dim)
        qs = q.view(size).transpose(1, 2)
        k, v = (torch.randn(len(query_lens), spec.num_kv_heads, int(seq_lens[0]), spec.head_dim, device=CUDA, dtype=spec.dtype) for _ in "kv")  # fmt: skip
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            row["flash_ms"] = median_ms(
                lambda: F.scaled_dot_product_attention(qs, k, v, is_causal=True, enable_gqa=True), 20
            )
        row["of_flash_speed"] = row["flash_ms"] / ours
    return row


def small_rows(copy: float) -> list[dict]:
    tokens, heads, dim = 8192, 8, 128
    cache = torch.zeros(2, 4096, 16, heads, dim, device=CUDA, dtype=torch.bfloat16)
    narrow = torch.zeros_like(cache, dtype=FP8)
    whole = torch.zeros(2, 4096, 16, heads, dim + 4, device=CUDA, dtype=torch.int8)
    k, v = (torch.randn(tokens, heads, dim, device=CUDA, dtype=torch.bfloat16) for _ in "kv")
    slots = torch.randperm(4096 * 16, device=CUDA)[:tokens]
    x, residual = (torch.randn(tokens, 4096, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    gate_up = torch.randn(tokens, 2 * 8192, device=CUDA, dtype=torch.bfloat16)
    order = torch.randperm(4095, device=CUDA)[:2000] + 1
    pairs = torch.stack([order[:1000], order[1000:]], 1)
    weight = torch.ones(4096, device=CUDA, dtype=torch.bfloat16)
    work = {
        "reshape_and_cache 8192 tokens": (lambda: ops.reshape_and_cache(k, v, cache, slots), 4 * k.nbytes),
        "reshape_and_cache to fp8": (lambda: ops.reshape_and_cache(k, v, narrow, slots), 3 * k.nbytes),
        "reshape_and_cache to int8": (lambda: ops.reshape_and_cache(k, v, whole, slots), 3 * k.nbytes),
        "copy_blocks 1000 pairs": (lambda: ops.copy_blocks(cache, cache, pairs), 2 * 1000 * 2 * cache[0, 0].nbytes),
        "rms_norm + residual 8192 x 4096": (lambda: ops.rms_norm(x, weight, 1e-6, residual), 4 * x.nbytes),
        "silu_mul 8192 x 8192": (lambda: ops.silu_mul(gate_up), gate_up.nbytes * 3 // 2),
    }
    rows = []
    for name, (call, moved) in work.items():
        replay, inner = replayed([call])
        ms = median_ms(replay, 20, inner)
        rows.append({"case": name, "ms": ms, "gb_s": moved / ms / 1e6, "of_copy": moved / ms / 1e6 / copy})
    return rows


def host_row() -> dict:
    """Microseconds of host time of one attention call (checks and launch), and of planning a step."""
    import time

    spec, backend = make_spec(32, 8, 128), NumbaCudaBackend()
    step, blocks = random_batch(np.ones(64, int), np.full(64, 512), 16)
    cache = torch.zeros(backend.kv_cache_shape(blocks, spec), device=CUDA, dtype=spec.dtype)
    q = torch.zeros(64, 32, 128, device=CUDA, dtype=spec.dtype)
    plan = backend.plan(step, spec, CUDA)

    def timed(call: Callable[[], Any]) -> float:
        best = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                call()
            best.append((time.perf_counter() - start) / 20 * 1e6)
        return statistics.median(best)

    return {
        "case": "host, batch 64",
        "attend_us": timed(lambda: backend.attend(q, cache, plan)),
        "plan_us": timed(lambda: backend.plan(step, spec, CUDA)),
    }


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    print("  ".join(f"{key:>15}" if key != "case" else f"{key:34}" for key in keys))
    for row in rows:
        cells = [row.get(key, "") for key in keys]
        print(
            "  ".join(
                f"{c:15.3f}" if isinstance(c, float) else f"{c:>15}" if i else f"{c:34}" for i, c in enumerate(cells)
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the results to kernels-CARD.json in this folder")
    arguments = parser.parse_args()
    if (reason := ops.device_unsupported(CUDA)) is not None:
        print(f"not run, this benchmark needs a GPU: {reason}")
        return
    torch.manual_seed(0)
    copy = copy_bandwidth()
    name = torch.cuda.get_device_name(CUDA)
    print(f"{name}: copy {copy:.0f} GB/s (read plus write); torch {torch.__version__}")
    llama, qwen, small = make_spec(32, 8, 128), make_spec(16, 8, 128), make_spec(9, 3, 64)
    rng = np.random.default_rng(0)
    ragged = np.exp(rng.uniform(np.log(16), np.log(16384), 64)).astype(int)
    decode = [
        decode_row(f"32/8/128 batch {b} context {n}", llama, np.full(b, n), copy)
        for b, n in (
            (1, 2048),
            (1, 8192),
            (16, 512),
            (16, 2048),
            (16, 8192),
            (64, 512),
            (64, 2048),
            (256, 512),
            (256, 2048),
        )
    ]
    decode.append(decode_row("32/8/128 ragged 64 (16..16k)", llama, ragged, copy))
    decode.append(decode_row("16/8/128 batch 64 context 1024", qwen, np.full(64, 1024), copy))
    decode.append(decode_row("9/3/64 batch 256 context 2048", small, np.full(256, 2048), copy))
    decode.append(decode_row("8/4/256 batch 64 context 2048", make_spec(8, 4, 256), np.full(64, 2048), copy))
    narrow = {"int8": torch.int8} | ({"fp8": FP8} if ops.fp8_unsupported(CUDA) is None else {})
    for kind, dtype in narrow.items():  # against SDPA on K and V of 16 bits
        large, tiny = make_spec(32, 8, 128, dtype), make_spec(9, 3, 64, dtype)
        sizes = ((1, 8192), (16, 2048), (64, 2048), (256, 2048))
        decode += [decode_row(f"32/8/128 batch {b} context {n} {kind}", large, np.full(b, n), copy) for b, n in sizes]
        decode.append(decode_row(f"9/3/64 batch 256 context 2048 {kind}", tiny, np.full(256, 2048), copy))
    show("decode attention", decode)
    prefill = [
        prefill_row("32/8/128 16 x 1024", llama, np.full(16, 1024), np.full(16, 1024)),
        prefill_row("32/8/128 1 x 8192", llama, np.full(1, 8192), np.full(1, 8192)),
        prefill_row("32/8/128 8 x 256 on 4096", llama, np.full(8, 256), np.full(8, 4096)),
        prefill_row("9/3/64 16 x 1024", small, np.full(16, 1024), np.full(16, 1024)),
    ]
    for kind, dtype in narrow.items():
        lens = np.full(16, 1024)
        prefill.append(prefill_row(f"32/8/128 16 x 1024 {kind}", make_spec(32, 8, 128, dtype), lens, lens))
    show("prefill attention", prefill)
    others = small_rows(copy)
    show("cache and pointwise", others)
    host = [host_row()]
    show("host time", host)
    if arguments.output is not None:
        result = {"card": name, "torch": torch.__version__, "copy_gb_s": copy}
        result |= {"decode": decode, "prefill": prefill, "other": others, "host": host}
        arguments.output.mkdir(parents=True, exist_ok=True)
        card = name.lower().replace(" ", "-")
        (arguments.output / f"kernels-{card}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
