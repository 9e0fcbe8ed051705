"""Where does the time go on this CPU? Products and attention against torch and the machine's floors, and a step taken apart.

    python benchmarks/cpu_kernels.py [linear] [attention] [profile] [--dtype bfloat16] [--threads N] [--output FILE]

Floors, measured here: how fast memory is read beyond the caches, and how fast torch multiplies large matrices. A product
cannot be faster than its bytes over the one or its multiplications over the other. Times are the best of several rounds
(linear, attention) or means over steps (profile). Shapes are those of SmolLM2-135M.
"""

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from minivllm.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec
from minivllm.attention.numba_cpu import NumbaCPUBackend
from minivllm.attention.sdpa import SDPABackend
from minivllm.models.linear.cpu import onednn_packs
from minivllm.models.linear.layer import Linear
from minivllm_kernels.cpu.program import Program

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)


def best_ms(call: Callable[[], Any], rounds: int = 9) -> float:
    """Least time of a call in milliseconds."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; floats with three digits."""
    table = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"\n{title}")
    for row in table:
        print("  ".join(f"{x:>{w}}" for x, w in zip(row, widths, strict=True)), flush=True)


def floors(dtype: torch.dtype) -> dict[str, float]:
    """GB/s of reading 512 MB, and GFLOP/s of a large product."""
    many = torch.ones(8192, 16384)  # as a weight, so that it is read by our own kernel, once
    x, read = torch.ones(1, 16384), layer_of(many, "cpu_invariant")
    a = torch.randn(2048, 2048).to(dtype)
    return {
        "read_gb_s": many.nbytes / best_ms(lambda: read(x)) / 1e6,
        "torch_sum_gb_s": many.nbytes / best_ms(many.sum) / 1e6,
        "matmul_gflop_s": 2 * 2048**3 / best_ms(lambda: a @ a, 5) / 1e6,
    }


def layer_of(weight: torch.Tensor, method: str, max_rows: float | None = None) -> Linear:
    """A linear layer; its numba kernel for up to `max_rows` rows, if that is given."""
    kind: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    layer = Linear(weight.shape[1], {"all": weight.shape[0]}, **kind)
    layer.use(method, weight)
    if max_rows is not None:
        layer.method.max_rows = max_rows  # type: ignore[attr-defined]
    return layer


def linear(dtype: torch.dtype, floor: dict[str, float]) -> dict[str, Any]:
    """All matmuls of one step: torch, oneDNN packed, numba, what `auto` takes, and the floor. Milliseconds."""
    copies = {name: LAYERS if name != "head" else 1 for name in SHAPES}
    weights = {name: [torch.randn(s).to(dtype) / 24 for _ in range(copies[name])] for name, s in SHAPES.items()}
    pack = torch.ops.mkldnn._reorder_linear_weight if onednn_packs() else None

    def onednn(weight: torch.Tensor) -> Callable[[torch.Tensor], Any]:
        packed, multiply = pack(weight, 64), torch.ops.mkldnn._linear_pointwise
        return lambda x: multiply(x, packed, None, "none", [], "")

    makers: dict[str, Callable[[torch.Tensor], Callable[[torch.Tensor], Any]]] = {
        "torch": lambda w: lambda x: F.linear(x, w),
        **({"onednn": onednn} if pack else {}),
        "numba": lambda w: layer_of(w, "cpu", 1 << 30),
        "auto": lambda w: layer_of(w, "cpu"),
    }
    kernels = {m: {n: [make(w) for w in weights[n]] for n in SHAPES} for m, make in makers.items()}
    parameters = sum(copies[n] * s[0] * s[1] for n, s in SHAPES.items())
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for rows in ROWS:
            for name, (_, inputs) in SHAPES.items():
                x = torch.randn(rows, inputs).to(dtype)
                for maker in makers:
                    calls = kernels[maker][name]
                    if maker != "numba" or rows <= 64:
                        found[f"{maker}/{name}/{rows}"] = best_ms(lambda c=calls, x=x: [k(x) for k in c], 7)
    table = []
    for rows in ROWS:
        by_bytes = parameters * dtype.itemsize / floor["read_gb_s"] / 1e6
        by_flops = 2 * parameters * rows / floor["matmul_gflop_s"] / 1e6
        totals = [sum(found.get(f"{m}/{n}/{rows}", np.nan) for n in SHAPES) for m in makers]
        table.append([rows, *map(float, totals), float(max(by_bytes, by_flops)), totals[0] / totals[-1]])
    show(f"linear layers of one step, {dtype}, ms", ["rows", *makers, "floor", "torch/auto"], table)
    per_shape = [
        [f"{name} {rows}", *(float(found.get(f"{m}/{name}/{rows}", np.nan)) for m in makers)]
        for name in SHAPES
        for rows in (1, 4, 8, 16, 64)
    ]
    show("by shape (all layers), ms", ["shape rows", *makers], per_shape)
    return found


def attention_batch(requests: int, context: int) -> AttentionBatch:
    """One decode step; every request's blocks lie scattered."""
    blocks = -(-context // BLOCK_SIZE)
    ids = np.random.default_rng(0).permutation(requests * blocks).astype(np.int32) + 1
    table = ids.reshape(requests, blocks)
    last = table[:, (context - 1) // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    starts, lengths = np.arange(requests + 1, dtype=np.int32), np.full(requests, context, np.int32)
    return AttentionBatch(query_start_loc=starts, seq_lens=lengths, block_table=table, slot_mapping=last)


def attention(dtype: torch.dtype, floor: dict[str, float]) -> dict[str, float]:
    """Decode attention of one step, all layers: ours from the pages, gather and SDPA, and the floor of reading K and V."""
    spec = AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )
    found, table = {}, []
    backends: dict[str, AttentionBackend] = {"numba_cpu": NumbaCPUBackend(), "sdpa": SDPABackend()}
    for requests, context in ((1, 192), (1, 2048), (64, 192), (32, 560)):
        batch, times = attention_batch(requests, context), []
        blocks, q = int(batch.block_table.max()) + 1, torch.randn(requests, HEADS, HEAD_DIM).to(dtype)
        for name, backend in backends.items():
            caches = [torch.randn(backend.kv_cache_shape(blocks, spec)).to(dtype) for _ in range(LAYERS)]
            plan = backend.plan(batch, spec, torch.device("cpu"))
            call = lambda b=backend, c=caches, p=plan, q=q: [b.attend(q, cache, p) for cache in c]
            times.append(best_ms(call, 5))
            found[f"{name}/{requests}x{context}"] = times[-1]
        bytes_read = 2 * LAYERS * requests * context * KV_HEADS * HEAD_DIM * dtype.itemsize
        table.append([f"{requests} x {context}", *times, bytes_read / floor["read_gb_s"] / 1e6, times[1] / times[0]])
    show(f"decode attention of one step, {dtype}, ms", ["batch", *backends, "floor", "sdpa/numba_cpu"], table)
    return found


PART_OF_KERNEL = {"matmul": "linear", "attend": "attention", "write": "attention"} | dict.fromkeys(
    ("add_norm", "rotate", "gated_silu"), "norm and rope"
)
PARTS = ("schedule", "prepare", "linear", "attention", "norm and rope", "sample", "output", "rest")


class Stopwatch:
    """Time spent inside functions, by part; a function inside another one counts for itself only."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        self._undo: list[Callable[[], None]] = []

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Replace a method or a module's function by one that is timed."""
        original = getattr(owner, name)
        inside, seconds, clock = self._inside, self.seconds, time.perf_counter

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inside.append(0.0)
            start = clock()
            try:
                return original(*args, **kwargs)
            finally:
                spent = clock() - start
                seconds[part] += spent - inside.pop()
                if inside:
                    inside[-1] += spent

        put = type.__setattr__ if isinstance(owner, type) else setattr  # so that a stopwatch is no change of the model
        put(owner, name, timed)
        self._undo.append(lambda: put(owner, name, original))

    def watch_program(self) -> None:
        """Time each kernel of a program."""

        def timed(program: Program, threads: int) -> None:
            took = program.timed(threads)
            for kernel, seconds in zip(program.kernels, took, strict=True):
                self.seconds[PART_OF_KERNEL[kernel.name]] += seconds
            if self._inside:
                self._inside[-1] += took.sum()

        original = Program.__call__
        Program.__call__ = timed  # type: ignore[method-assign]
        self._undo.append(lambda: setattr(Program, "__call__", original))

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()


def watch_layers(watch: Stopwatch, backend: type) -> None:
    """The parts of a decoder whose kernels are launched one by one."""
    from minivllm.models.layers import RMSNorm
    from minivllm.models.ops.numba_cpu import NumbaCPUOps

    for owner, name, part in (
        (Linear, "__call__", "linear"),
        (backend, "write", "attention"),
        (backend, "attend", "attention"),
        (RMSNorm, "__call__", "norm and rope"),
        (NumbaCPUOps, "add_rms_norm", "norm and rope"),
        (NumbaCPUOps, "gated_linear", "norm and rope"),
        (NumbaCPUOps, "rope_and_cache", "norm and rope"),
    ):
        watch.watch(owner, name, part)


def watch_engine(watch: Stopwatch, backend: type) -> None:
    """The parts of a step outside its layers, by the functions that do them."""
    from minivllm.core.scheduler import Scheduler
    from minivllm.engine.output_processor import OutputProcessor
    from minivllm.models.decoder import Decoder
    from minivllm.models.rope import Rope
    from minivllm.runtime.input_batch import InputBatch
    from minivllm.runtime.model_runner import ModelRunner, PendingStep
    from minivllm.sampling.sampler import Sampler
    from minivllm.sampling.state import SamplingState

    for owner, name, part in (
        (Scheduler, "schedule", "schedule"),
        (ModelRunner, "_update_rows", "prepare"),
        (InputBatch, "prepare", "prepare"),
        (backend, "plan", "prepare"),
        (Rope, "__call__", "norm and rope"),
        (Sampler, "start", "sample"),
        (SamplingState, "batch", "sample"),
        (PendingStep, "result", "sample"),
        (ModelRunner, "_sample", "sample"),
        (Decoder, "compute_logits", "sample"),
        (Scheduler, "update_from_output", "output"),
        (OutputProcessor, "process_outputs", "output"),
    ):
        watch.watch(owner, name, part)
    watch.watch_program()


def profile(dtype: torch.dtype, batches: Sequence[int] = (1, 64), steps: int = 60) -> dict[str, Any]:
    """Where the time of a decode step goes. A stopwatch costs about a microsecond a call, a look at the clock after each kernel of a
    program less; `plain` is the step without all that. Medians over steps."""
    from minivllm import LLM, SamplingParams
    from minivllm.sampling.params import RequestOutputKind

    found: dict[str, Any] = {}
    name = str(dtype).removeprefix("torch.")
    with LLM("smollm2", dtype=name, max_model_len=1024, max_num_seqs=max(batches)) as llm:
        engine = llm.llm_engine
        runner = engine.core.executor.runner  # type: ignore[attr-defined]
        backend, model = type(runner.backend), runner.model
        params = SamplingParams(temperature=0, max_tokens=2 * steps + 40, ignore_eos=True)
        params.output_kind = RequestOutputKind.FINAL_ONLY  # as `LLM.generate` asks for
        for size in batches:
            for i in range(size):
                engine.add_request(
                    f"{size}-{i}", {"prompt_token_ids": [(7 * i + j) % 40000 for j in range(128)]}, params
                )
            for _ in range(20):
                engine.step()
            plain: list[float] = []
            watched: list[dict[str, float]] = []
            watch = Stopwatch()
            for _ in range(steps // 10):  # in turn, since other work on the machine comes and goes
                for timed in (False, True):
                    if timed:
                        watch_engine(watch, backend)
                        if not (model.captured and model.captured._programs.get(size)):
                            watch_layers(watch, backend)
                    for _ in range(10):
                        watch.seconds.clear()
                        start = time.perf_counter()
                        engine.step()
                        took = time.perf_counter() - start
                        if timed:
                            watched.append(watch.seconds | {"rest": took - sum(watch.seconds.values())})
                        else:
                            plain.append(took)
                    watch.stop()
            engine.abort_request([f"{size}-{i}" for i in range(size)])
            engine.step()
            milliseconds = {part: 1e3 * float(np.median([step.get(part, 0.0) for step in watched])) for part in PARTS}
            found[str(size)] = milliseconds | {"plain": 1e3 * float(np.median(plain))}
    table = []
    for part in PARTS:
        row: list[Any] = [part]
        for parts in found.values():
            row += [parts[part], f"{parts[part] / sum(parts[p] for p in PARTS):.1%}"]
        table.append(row)
    outside = {s: 1 - (p["linear"] + p["attention"]) / sum(p[q] for q in PARTS) for s, p in found.items()}
    table.append(["all but linear, attention", *(x for s in found for x in ("", f"{outside[s]:.1%}"))])
    table.append(["step without stopwatch", *(x for p in found.values() for x in (p["plain"], ""))])
    show(f"a decode step, {dtype}, ms", ["part", *(x for s in found for x in (f"batch {s}", "share"))], table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=[], help="linear, attention, profile; all if none is named")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=None, help="default: torch's own choice, the cores at hand")
    parser.add_argument("--output", help="a JSON file to keep the figures in")
    args = parser.parse_args()
    if unknown := set(args.what) - {"linear", "attention", "profile"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: linear, attention, profile")
    if args.threads:
        torch.set_num_threads(args.threads)
    what, dtype = args.what or ["linear", "attention", "profile"], getattr(torch, args.dtype)
    floor = floors(dtype)
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    machine = capabilities.get("cpu_name") or platform.processor()
    print(f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    show("floors", list(floor), [list(floor.values())])
    results: dict[str, Any] = {
        "machine": machine,
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "floors": floor,
    }
    if "linear" in what:
        results["linear"] = linear(dtype, floor)
    if "attention" in what:
        results["attention"] = attention(dtype, floor)
    if "profile" in what:
        results["profile"] = profile(dtype)
    if args.output:
        with open(args.output, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
