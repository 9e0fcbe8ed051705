"""Kernel decorator: one source for numba.cuda, its simulator and PTX."""

# Generated from nbs/numba_kernels/cuda/simt.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba import cuda

from minivllm_kernels.cuda import warp
from minivllm_kernels.cuda.warp import SIM, fmax, shfl_xor, types

__all__ = [
    "HALVES", "LOG2E", "MOST_BLOCKS", "NEG", "NUMPY", "CudaKernel", "Half", "device", "f32", "group_sum",
    "half_ops", "i32", "i64", "kernel", "kernel_maker", "numba_types", "u32", "warp_max", "warp_sum",
]  # fmt: skip


@dataclass(frozen=True)
class Half:
    """The operations of one 16-bit float: unpack a word (low, high), pack two float32, multiply matrices, the maxima of two words."""

    lo: Any
    hi: Any
    pack: Any
    mma: Any
    maximum: Any = None


HALVES = {
    "bfloat16": Half(warp.bf16_lo, warp.bf16_hi, warp.pack_bf16, warp.mma_bf16, warp.max_bf16),
    "float16": Half(warp.f16_lo, warp.f16_hi, warp.pack_f16, warp.mma_f16, warp.max_f16),
}


def half_ops(dtype: str) -> Half:
    """The operations of `dtype`: "bfloat16" or "float16"."""
    if dtype not in HALVES:
        raise ValueError(f"kernels are built for {' and '.join(HALVES)}, not for {dtype!r}")
    return HALVES[dtype]


NUMPY: dict[str, Any] = {"u16": np.uint16, "u32": np.uint32, "i32": np.int32, "i64": np.int64, "f32": np.float32}


def _numba(kind: str) -> Any:
    return getattr(types, NUMPY[kind].__name__)


f32, i32, i64, u32 = (NUMPY[kind] if SIM else _numba(kind) for kind in ("f32", "i32", "i64", "u32"))
NEG = -(2.0**100)
LOG2E = 1.4426950408889634


def numba_types(signature: str) -> list[Any]:
    """numba types of a signature such as "u32* i32* f32 i64"; a kernel sees a map as a pointer to it."""
    kinds = ["u32*" if kind == "map" else kind for kind in signature.split()]
    return [types.CPointer(_numba(a[:-1])) if a.endswith("*") else _numba(a) for a in kinds]


def device(function: Callable, early: bool = False) -> Any:
    """Decorator of a function that kernels call. LLVM always inlines it, because arrays in registers cannot be passed by a real call.

    early: numba inlines it instead, before types are known and anew for each call. That takes longer to compile.
    """
    how = {"inline": "always"} if early else {"forceinline": True, "fastmath": True}
    return function if SIM else cuda.jit(device=True, **how)(function)


@device
def warp_sum(x):
    """The sum over the 32 lanes of a warp, in every lane."""
    for step in range(5):
        x += shfl_xor(x, 16 >> step)
    return x


@device
def warp_max(x):
    """The maximum over the 32 lanes of a warp, in every lane."""
    for step in range(5):
        x = fmax(x, shfl_xor(x, 16 >> step))
    return x


def group_sum(lanes: int) -> Any:
    """A device function: the sum over groups of `lanes` neighbouring lanes, a power of two."""
    STEPS = lanes.bit_length() - 1

    @device
    def sum_of_group(x):
        for step in range(STEPS):
            x += shfl_xor(x, 1 << step)
        return x

    return sum_of_group


class Pointer:
    """What a kernel gets for an array in the simulator: flat, and every index is checked."""

    __slots__ = ("array", "size")

    def __init__(self, array: np.ndarray):
        self.array, self.size = array.reshape(-1), array.size
        if array.size and not np.shares_memory(self.array, array):
            raise ValueError("a kernel needs a contiguous array: a copy would lose its writes")

    def check(self, index: int) -> None:
        """An index outside the array is an error, as it is for compute-sanitizer."""
        if not 0 <= index < self.size:
            raise IndexError(f"kernel index {index} outside an array of {self.size}")

    def __getitem__(self, index: int) -> Any:
        self.check(index)
        return self.array[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self.check(index)
        self.array[index] = value


def _lock_shared_arrays() -> None:
    from numba.cuda.simulator import kernelapi

    unlocked, lock = kernelapi.FakeCUDAShared.array, threading.Lock()

    def array(self, shape, dtype, *more):
        if shape == 0:
            return unlocked(self, shape, dtype, *more)
        caller = sys._getframe(1)
        key = (caller.f_code.co_filename, caller.f_lineno)
        with lock:
            if key not in self._allocations:
                self._allocations[key] = np.empty(shape, dtype)
            return self._allocations[key]

    kernelapi.FakeCUDAShared.array = array


if SIM:
    _lock_shared_arrays()


_call_types: dict[tuple, Any] = {}


def _exchanged(cc: tuple[int, int]) -> list[tuple[Any, str, Any]]:
    """What is exchanged in numba while it compiles, as (owner, name, new value). It compiles a third faster so, to the same PTX.

    - For each function that a kernel calls numba asks the current GPU for its capability, which would start CUDA. The answer is `cc` instead.
    - It asks several times for the type of each operation, and tries dozens of candidates each time. Here it remembers.
    - It compares options often, and reads them one by one.
    - It looks for closures, overloads to be inlined, and array expressions. Kernels have none.
    """
    from numba.cuda import dispatcher
    from numba.cuda.core import targetconfig, typed_passes, untyped_passes

    def call_type(function, context, args, kws):
        key = function, context, tuple(args), tuple(kws.items()), targetconfig.ConfigStack.top_or_none()
        if key not in _call_types:
            _call_types[key] = types.BaseFunction.get_call_type(function, context, args, kws)
        return _call_types[key]

    @functools.cache
    def defaults(kind):
        return {name: option.default for name, option in kind.options.items()}

    passes = untyped_passes.InlineClosureLikes, typed_passes.InlineOverloads, typed_passes.NopythonRewrites
    return [
        (dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=cc)),
        (types.Function, "get_call_type", call_type),
        (targetconfig.TargetConfig, "values", lambda options: defaults(options.__class__) | options._values),
        *((skipped, "run_pass", lambda self, state: False) for skipped in passes),
    ]


@contextmanager
def _compiling(cc: tuple[int, int]) -> Iterator[None]:
    """Compile with the garbage collector off, for compute capability `cc`, and with some of numba exchanged.

    The collector would scan the compiler's objects again and again, and a kernel would take half as long again.
    """
    from numba.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:
        was_on, exchanged = gc.isenabled(), _exchanged(cc)
        before = [getattr(owner, name) for owner, name, _ in exchanged]
        for owner, name, new in exchanged:
            setattr(owner, name, new)
        gc.disable()
        try:
            yield
        finally:
            for (owner, name, _), old in zip(exchanged, before, strict=True):
                setattr(owner, name, old)
            if was_on:
                gc.enable()


MOST_BLOCKS = 2**31 - 1  # that a grid can have in x


@dataclass(frozen=True, eq=False)
class CudaKernel:
    """A kernel before compilation.

    name: unique among kernels and parameters (it names the cached machine code).
    signature: argument types, as in "u32* i32* f32": words, 32-bit and 64-bit integers, floats, pointers to them (or to
    u16), and "map", a tensor map of 128 bytes.
    threads: threads per block. min_blocks: blocks that must fit on a multiprocessor at once (bounds the registers; 0: free).
    shared_bytes: dynamic shared memory per block.
    hopper_only: it has instructions (wgmma, setmaxnreg) that compute capability 9.0 has and no later one.
    cluster: neighbouring blocks that start together and reach each other's shared memory; a grid is a multiple of it.
    early_blocks: the largest grid, in x, with which it may start early; with a larger one it starts when the kernel before has ended.
    maker: the function that made the kernel, and its arguments: with them another process can make it again. None if unknown.
    """

    name: str
    function: Callable
    signature: str
    threads: int
    min_blocks: int = 0
    shared_bytes: int = 0
    hopper_only: bool = False
    cluster: int = 1
    early_blocks: int = MOST_BLOCKS
    maker: tuple[Callable[..., "CudaKernel"], tuple, dict[str, Any]] | None = None

    def simulate(self, grid: tuple[int, int], *arguments: Any) -> None:
        """Run in numba's simulator; arrays are NumPy arrays of the pointed-to type, changed in place."""
        if not SIM:
            raise RuntimeError(
                "set NUMBA_ENABLE_CUDASIM=1 before importing minivllm_kernels to run kernels without a GPU"
            )
        kinds = self.signature.split()
        if len(arguments) != len(kinds):
            raise TypeError(f"{self.name} takes {len(kinds)} arguments ({self.signature}), not {len(arguments)}")
        given = [Pointer(a) if kind.endswith("*") else NUMPY[kind](a) for kind, a in zip(kinds, arguments)]
        cuda.jit(self.function)[grid, self.threads, 0, self.shared_bytes](*given)

    def ptx(self, cc: tuple[int, int] = (9, 0)) -> str:
        """PTX text for compute capability `cc`. Needs numba-cuda and its compiler wheels, but no GPU."""
        if SIM:
            raise RuntimeError("no PTX in the simulator: unset NUMBA_ENABLE_CUDASIM")
        if self.hopper_only and cc != (9, 0):
            raise ValueError(f"kernel {self.name} runs on compute capability 9.0 only, not on {cc[0]}.{cc[1]}")
        signature, target = types.void(*numba_types(self.signature)), (*cc, "a") if self.hopper_only else cc
        with _compiling(cc):
            text, _ = cuda.compile(
                self.function, signature, cc=target, device=False, abi="numba", output="ptx", fastmath=True
            )
        for index, kind in enumerate(self.signature.split()):
            text = _map_by_value(text, index) if kind == "map" else text
        return _with_bounds(
            text if cc >= (9, 0) else _without_overlap(text), self.threads, self.min_blocks, self.cluster
        )


def _without_overlap(text: str) -> str:
    """Remove instructions that cards before Hopper do not have. Only kernels that overlap need them."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if "griddepcontrol." not in line)


def _map_by_value(text: str, index: int) -> str:
    """Let pointer parameter `index` of a PTX text be 128 bytes that travel with the launch, and the pointer their address."""
    pointer = r"\.param \.u64 (?:\.ptr (?:\.align \d+ )?)?"
    found = re.search(rf"{pointer}(\w+_param_{index})\b", text)
    if found is None:
        raise ValueError(f"the PTX has no pointer as parameter {index}")
    text = re.sub(rf"{pointer}{found[1]}\b", f".param .align 64 .b8 {found[1]}[128]", text)
    load = rf"ld\.param\.[ub]64\s+(%rd\d+), \[{found[1]}\];"
    return re.sub(load, rf"mov.b64 \1, {found[1]};\n\tcvta.param.u64 \1, \1;", text)


def _with_bounds(text: str, threads: int, min_blocks: int, cluster: int = 1) -> str:
    """Add launch bounds to the entry of a PTX text: ptxas fits its registers to them, and the driver starts clusters."""
    at = text.index(")\n{", text.index(".visible .entry")) + 1
    bounds = f"\n.maxntid {threads}, 1, 1\n" + (f".minnctapersm {min_blocks}\n" if min_blocks else "")
    bounds += f".explicitcluster\n.reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else ""
    return text[:at] + bounds + text[at:]


def kernel(
    signature: str,
    threads: int,
    name: str,
    min_blocks: int = 0,
    shared_bytes: int = 0,
    hopper_only: bool = False,
    cluster: int = 1,
    early_blocks: int = MOST_BLOCKS,
) -> Callable[[Callable], CudaKernel]:
    """Decorator: describe a Python function as a kernel (see `CudaKernel`)."""
    return lambda function: CudaKernel(
        name, function, signature, threads, min_blocks, shared_bytes, hopper_only, cluster, early_blocks
    )


def kernel_maker(make: Callable[..., CudaKernel]) -> Callable[..., CudaKernel]:
    """Decorator of a module-level function that returns a kernel: each is made once and notes its `maker`. Arguments must be hashable and picklable."""

    @functools.cache
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> CudaKernel:
        return replace(make(*args, **kwargs), maker=(made, args, kwargs))

    return made
