"""Did a change of the CUDA kernels change their speed or their results? Prints a table of time ratios, after / before.

    git archive REVISION kernels | tar -x -C before
    python benchmarks/kernels_before_after.py --before before/kernels [--after kernels] [--only decode]

Both folders hold a package `minivllm_kernels`; each is copied and renamed, so that both live in one process. All kernels are
compiled first, in parallel. Then each case runs both on the same inputs, in turn: 15 rounds of a CUDA graph that goes through
copies of its inputs, so that nothing is read from L2. The table has the median ratio of the rounds, and `again`, the ratio
of the first package to itself: differences below that are noise. The exit code is 1 if any result differs by more than
a few roundings (relative error 1e-3) or holds a NaN, and 2 if any case is slower by more than `--limit`.
"""

import argparse
import concurrent.futures
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

CUDA = torch.device("cuda", 0)
L2 = 200 << 20  # bytes to have between two uses of the same memory
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
BLOCK = 16


def renamed(folder: Path, name: str, target: Path) -> None:
    """Copy the package of `folder` to `target` under another name."""
    source = folder / "minivllm_kernels"
    if not source.is_dir():
        raise SystemExit(f"{folder} holds no folder minivllm_kernels")
    for path in source.rglob("*.py"):
        copy = target / name / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("minivllm_kernels", name))


def module(package: str, name: str) -> ModuleType:
    """A module of the CUDA kernels, in a package of today's layout or of the flat one before."""
    inner = importlib.util.find_spec(f"{package}.cuda") is not None
    return importlib.import_module(f"{package}.cuda.{name}" if inner else f"{package}.{name}")


def compiled(task: tuple) -> str:
    """Compile one kernel into the cache; runs in a process of its own."""
    path, package, name, factory, arguments = task
    sys.path.insert(0, path)
    if name in ("decode", "prefill"):
        shape, *rest = arguments
        arguments = (module(package, "planning").AttentionShape(*shape), *rest)
    kernel = getattr(module(package, name), factory)(*arguments)
    module(package, "launch").cached_ptx(kernel, (9, 0))
    return f"{package} {kernel.name}"


@dataclass
class Case:
    """One line of the table.

    make: from a package's ops and planning to the calls of one pass over the inputs; each returns its result.
    """

    name: str
    make: Callable[[ModuleType, ModuleType], list[Callable[[], torch.Tensor]]]


# ----------------------------------------------------------------------------------------------------- the cases
def attention(name: str, dim: int, group: int, kv_heads: int, query: np.ndarray, seq: np.ndarray, fp8: bool) -> Case:
    """Attention over a cache with shuffled blocks."""

    def make(ops: ModuleType, planning: ModuleType) -> list[Callable]:
        rng, generator = np.random.default_rng(0), torch.Generator(CUDA).manual_seed(0)
        need = -(-seq // BLOCK)
        order = rng.permutation(np.arange(1, need.sum() + 1)).astype(np.int32)
        table, ends = np.zeros((len(seq), need.max()), np.int32), np.cumsum(need)
        for row, n, end in zip(table, need, ends):
            row[:n] = order[end - n : end]
        size = (2, int(need.sum()) + 1, BLOCK, kv_heads, dim)
        nbytes = int(np.prod(size)) * (1 if fp8 else 2)
        numbers = torch.randn(size, device=CUDA, dtype=BF16, generator=generator)
        cache = numbers.to(FP8) if fp8 else numbers
        caches = [cache] + [cache.clone() for _ in range(min(16, -(-L2 // nbytes)) - 1)]
        starts = np.cumsum([0, *query]).astype(np.int32)
        q = torch.randn(int(starts[-1]), group * kv_heads, dim, device=CUDA, dtype=BF16, generator=generator)
        shape = planning.AttentionShape("bfloat16", dim, group, BLOCK, False, fp8)
        plan = ops.plan_attention(
            shape, kv_heads=kv_heads, query_start_loc=starts, seq_lens=seq.astype(np.int32), block_table=table,
            slot_mapping=np.zeros(starts[-1], np.int64), scale=dim**-0.5, device=CUDA,
        )  # fmt: skip
        out = torch.full_like(q, torch.nan)
        return [lambda c=c: ops.paged_attention(q, c, plan, out) for c in caches]

    return Case(name, make)


def decode_cases() -> list[Case]:
    shapes = [(128, 2, False, (1, 16, 64, 256)), (64, 3, False, (1, 16, 64, 256)), (128, 4, True, (1, 16, 64, 256))]
    shapes += [(dim, group, False, (16, 256)) for dim in (64, 128) for group in (1, 4, 8)] + [(64, 2, True, (16, 256))]
    cases = []
    for (dim, group, fp8, batches), context in itertools.product(shapes, (1024, 4096)):
        for batch in batches:
            name = f"decode d{dim} g{group}{' fp8' if fp8 else ''} batch {batch} x {context}"
            cases.append(attention(name, dim, group, 8, np.ones(batch, int), np.full(batch, context), fp8))
    return cases


def prefill_cases() -> list[Case]:
    sizes = {"8 x 1024": (8, 1024, 1024), "8 x 4096": (8, 4096, 4096), "1 x 16384": (1, 16384, 16384)}
    sizes["8 x 512 on 8k"] = (8, 512, 8704)
    cases = []
    for dim, group, fp8 in ((128, 2, False), (128, 4, False), (64, 3, False), (128, 4, True)):
        for name, (batch, new, total) in sizes.items():
            full = f"prefill d{dim} g{group}{' fp8' if fp8 else ''} {name}"
            cases.append(attention(full, dim, group, 8, np.full(batch, new), np.full(batch, total), fp8))
    return cases


def small_cases() -> list[Case]:
    def of(name: str, inputs: Callable[[], tuple], call: Callable[..., torch.Tensor], copies: int = 4) -> Case:
        def make(ops: ModuleType, planning: ModuleType) -> list[Callable]:
            torch.manual_seed(0)
            sets = [inputs() for _ in range(copies)]
            return [lambda s=s: call(ops, *s) for s in sets]

        return Case(name, make)

    def kv(dtype: torch.dtype) -> tuple:
        cache = torch.zeros(2, 4096, BLOCK, 8, 128, device=CUDA, dtype=BF16).to(dtype)
        k, v = (torch.randn(8192, 8, 128, device=CUDA, dtype=BF16) for _ in "kv")
        return k, v, cache, torch.randperm(4096 * BLOCK, device=CUDA)[:8192]

    def write(ops: ModuleType, k, v, cache, slots) -> torch.Tensor:
        ops.reshape_and_cache(k, v, cache, slots)
        return cache

    def copy_inputs() -> tuple:
        order = torch.randperm(4095, device=CUDA)[:2000] + 1
        cache = torch.randn(2, 4096, BLOCK, 8, 128, device=CUDA, dtype=BF16)
        return cache, torch.stack([order[:1000], order[1000:]], 1)

    def copy(ops: ModuleType, cache, pairs) -> torch.Tensor:
        ops.copy_blocks(cache, cache, pairs)
        return cache

    def norm_inputs(tokens: int, hidden: int) -> tuple:
        return tuple(torch.randn(s, device=CUDA, dtype=BF16) for s in ((tokens, hidden), (tokens, hidden), (hidden,)))

    def rope_inputs(tokens: int, dtype: torch.dtype) -> tuple:
        _, _, cache, slots = kv(dtype)
        qkv = torch.randn(tokens, 32 * 128, device=CUDA, dtype=BF16)
        weights = [torch.randn(128, device=CUDA, dtype=BF16) for _ in range(2)]
        table = torch.randn(4096, 128, device=CUDA)
        return qkv, cache, table, torch.randint(4096, (tokens,), device=CUDA), slots[:tokens], *weights

    def rope(ops: ModuleType, qkv, cache, table, positions, slots, q_weight, k_weight) -> torch.Tensor:
        more = {"num_heads": 16, "q_weight": q_weight, "k_weight": k_weight}
        ops.rope_and_cache(qkv.clone(), cache, table, positions, slots, **more)  # q is rotated in place
        return cache

    cases = [of("cache write, 8192 tokens", lambda: kv(BF16), write), of("cache write, fp8", lambda: kv(FP8), write)]
    cases.append(of("copy 1000 blocks", copy_inputs, copy, 1))
    for tokens, hidden in ((8192, 4096), (64, 1024), (1, 1024)):
        call = lambda ops, x, residual, weight: ops.rms_norm(x, weight, 1e-6, residual.clone())
        cases.append(of(f"norm {tokens} x {hidden}", lambda t=tokens, h=hidden: norm_inputs(t, h), call))
        gate = lambda t=tokens, h=hidden: (torch.randn(t, 4 * h, device=CUDA, dtype=BF16),)
        cases.append(of(f"silu {tokens} x {2 * hidden}", gate, lambda ops, x: ops.silu_mul(x)))
    for tokens, dtype in ((8192, BF16), (64, BF16), (64, FP8)):
        name = f"rope and cache, {tokens} tokens{' fp8' if dtype == FP8 else ''}"
        cases.append(of(name, lambda t=tokens, d=dtype: rope_inputs(t, d), rope))
    for name, (size, features, gated) in GEMV.items():
        for rows in (1, 2, 8, 16):
            inputs = lambda s=size, f=features, r=rows: (
                torch.randn(r, f, device=CUDA, dtype=BF16),
                (torch.randn(s, f, device=CUDA) / f**0.5).to(BF16),
            )
            call = lambda ops, x, weight, g=gated: ops.gemv(x, weight, g)
            copies = min(32, 1 + L2 // (2 * size * features))
            cases.append(of(f"gemv {name}, {rows} rows", inputs, call, copies))
    return cases


GEMV = {
    "qkv": (4096, 1024, False),
    "down": (1024, 3072, False),
    "gate_up": (6144, 1024, True),
    "head": (151936, 1024, False),
}


# ------------------------------------------------------------------------------------------------- compile, time
def compile_all(folders: list[tuple[str, str]]) -> None:
    """PTX of the kernels that the cases will ask for, in as many processes as the machine has cores."""
    tasks = []
    for path, package in folders:
        for dim, group, fp8 in DECODE_SHAPES:
            shape = ("bfloat16", dim, group, BLOCK, False, fp8)
            tasks += [(path, package, "decode", "mma_split_kv", (shape, warps)) for warps in (2, 4, 8)]
        for dim, group, fp8 in PREFILL_SHAPES:
            warps = 8 if dim > 64 else 4
            shape = ("bfloat16", dim, group, BLOCK, False, fp8)
            tasks.append((path, package, "prefill", "mma_tiles", (shape, warps)))
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
        done = list(pool.map(compiled, tasks))
    print(f"compiled {len(done)} kernels in {time.perf_counter() - start:.0f} s")


DECODE_SHAPES = [(128, 2, False), (64, 3, False), (128, 4, True), (64, 2, True)]
DECODE_SHAPES += [(dim, group, False) for dim in (64, 128) for group in (1, 4, 8)]
PREFILL_SHAPES = [(128, 2, False), (128, 4, False), (64, 3, False), (128, 4, True)]


def captured(calls: list[Callable]) -> tuple[torch.cuda.CUDAGraph, int]:
    """One CUDA graph of the calls, repeated to at least 4, and how many it holds."""
    calls = calls * -(-4 // len(calls))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph, len(calls)


def milliseconds(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def numbers_of(x: torch.Tensor) -> torch.Tensor:
    return x.float().flatten()


def run(case: Case, packages: list[tuple[ModuleType, ModuleType]], rounds: int) -> dict[str, Any]:
    """Time and compare one case."""
    calls = [case.make(*package) for package in packages]
    before, after = (numbers_of(call[0]()).clone() for call in calls)
    size = before.norm()
    error = ((after - before).norm() / size).item() if size else float(after.norm())
    differing = (after != before).float().mean().item()
    graphs = [captured(c) for c in calls]
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds + 3):
        for kept, graph in zip(times, (graphs[0], graphs[1], graphs[0])):
            kept.append(milliseconds(*graph))
    first, new, again = (kept[3:] for kept in times)
    ratio = statistics.median(n / ((a + b) / 2) for n, a, b in zip(new, first, again))
    noise = statistics.median(b / a for a, b in zip(first, again))
    right = bool(torch.isfinite(after).all()) and error < 1e-3
    row = {"case": case.name, "before_us": 1e3 * statistics.median(first), "after_us": 1e3 * statistics.median(new)}
    return row | {"ratio": ratio, "again": noise, "error": error, "differing": differing, "right": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a folder that holds minivllm_kernels")
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[1] / "kernels")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=1.03, help="largest ratio that is not called slower")
    args = parser.parse_args()
    if args.before is None or not torch.cuda.is_available():
        print("not run:", "no --before given" if args.before is None else "torch sees no NVIDIA GPU here")
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("MINIVLLM_CACHE", f"{folder}/cache")
        names = ["minivllm_kernels_before", "minivllm_kernels_after"]
        for path, name in zip((args.before, args.after), names):
            renamed(path, name, Path(folder))
        sys.path.insert(0, folder)
        cases = [c for c in decode_cases() + prefill_cases() + small_cases() if args.only in c.name]
        if not args.only or any("decode" in c.name or "prefill" in c.name for c in cases):
            compile_all([(folder, name) for name in names])
        packages = [(module(name, "ops"), module(name, "planning")) for name in names]
        start, rows = time.perf_counter(), []
        for case in cases:
            rows.append(run(case, packages, args.rounds))
            torch.cuda.empty_cache()
    print(
        f"{torch.cuda.get_device_name()}: {len(rows)} cases in {time.perf_counter() - start:.0f} s; ratio = after / before"
    )
    print(f"{'case':34} {'before us':>10} {'after us':>10} {'ratio':>7} {'again':>7} {'error':>9} {'differing':>9}")
    for row in sorted(rows, key=lambda r: -r["ratio"]):
        mark = "" if row["right"] else "  WRONG"
        mark += "  SLOWER" if row["ratio"] > max(args.limit, row["again"]) else ""
        print(
            f"{row['case']:34} {row['before_us']:10.2f} {row['after_us']:10.2f} {row['ratio']:7.3f} {row['again']:7.3f}"
            f" {row['error']:9.1e} {row['differing']:9.1e}{mark}"
        )
    wrong = [row for row in rows if not row["right"]]
    slower = [row for row in rows if row["ratio"] > max(args.limit, row["again"])]
    ratios = [row["ratio"] for row in rows]
    print(
        f"median ratio {statistics.median(ratios):.3f}, largest {max(ratios):.3f}; {len(wrong)} wrong, {len(slower)} slower"
    )
    raise SystemExit(1 if wrong else 2 if slower else 0)


if __name__ == "__main__":
    main()
