"""Kernel decorator: one source for numba.cuda, its simulator and PTX."""

# Generated from nbs/numba_kernels/cuda/simt.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

__all__ = [
    "HALVES", "LOG2E", "NEG", "SIM", "Half", "Kernel", "atomic_inc", "cp_async16", "cp_commit",
    "cp_wait_older", "device", "e4m3_hi", "e4m3_lo", "exp2", "f32", "fmax", "grid_release", "grid_wait",
    "half_ops", "i32", "i64", "kernel", "ldcg2", "ldg64_stream", "ldg128", "ldg128_stream", "ldmatrix_x4",
    "ldmatrix_x4_trans", "movmatrix", "numba_types", "pack_e4m3", "prmt", "rsqrt", "shfl_xor", "smem_addr",
    "stg128", "sts128", "u32",
]  # fmt: skip


# %% nbs/numba_kernels/cuda/simt.ipynb #code-ed7682
# True when the environment variable NUMBA_ENABLE_CUDASIM was set before the import: kernels run in the simulator.
SIM = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("0", "")


# %% nbs/numba_kernels/cuda/simt.ipynb #code-1d328e
_warp: Any = importlib.import_module("minivllm_kernels.cuda.warp_sim" if SIM else "minivllm_kernels.cuda.warp")

shfl_xor: Any = _warp.shfl_xor  # float32 of lane ^ mask
movmatrix: Any = _warp.movmatrix  # transpose an 8x8 matrix of 16-bit values held by the warp
prmt: Any = _warp.prmt  # pick 4 bytes of 8
exp2: Any = _warp.exp2
fmax: Any = _warp.fmax
rsqrt: Any = _warp.rsqrt
ldg128: Any = _warp.ldg128  # 4 words, one 16-byte load
ldg128_stream: Any = _warp.ldg128_stream  # the same, for bytes that are read once
stg128: Any = _warp.stg128
ldcg2: Any = _warp.ldcg2  # 2 float32 written by other blocks
atomic_inc: Any = _warp.atomic_inc
grid_wait: Any = _warp.grid_wait  # until the kernel before has ended
grid_release: Any = _warp.grid_release  # the next kernel may begin, up to its grid_wait
smem_addr: Any = _warp.smem_addr
cp_async16: Any = _warp.cp_async16  # 16 bytes global -> shared, asynchronous
cp_commit: Any = _warp.cp_commit
cp_wait_older: Any = _warp.cp_wait_older  # all groups of copies but the newest
ldmatrix_x4: Any = _warp.ldmatrix_x4  # four 8x8 tiles shared -> registers
ldmatrix_x4_trans: Any = _warp.ldmatrix_x4_trans
ldg64_stream: Any = _warp.ldg64_stream  # 2 words, one 8-byte load, of bytes that are read once
sts128: Any = _warp.sts128  # 4 words to shared memory
pack_e4m3: Any = _warp.pack_e4m3  # 2 float32 to 2 numbers of 8 bits
e4m3_lo: Any = _warp.e4m3_lo  # 2 of them to a word of 2 float16: from the low half of a word,
e4m3_hi: Any = _warp.e4m3_hi  # from the high half


# %% nbs/numba_kernels/cuda/simt.ipynb #Half
@dataclass(frozen=True)
class Half:
    """The operations of one 16-bit float: unpack a word (low, high), pack two float32, multiply matrices."""

    lo: Any
    hi: Any
    pack: Any
    mma: Any


HALVES = {
    "bfloat16": Half(_warp.bf16_lo, _warp.bf16_hi, _warp.pack_bf16, _warp.mma_bf16),
    "float16": Half(_warp.f16_lo, _warp.f16_hi, _warp.pack_f16, _warp.mma_f16),
}


def half_ops(dtype: str) -> Half:
    """The operations of `dtype`: "bfloat16" or "float16"."""
    if dtype not in HALVES:
        raise ValueError(f"kernels are built for {' and '.join(HALVES)}, not for {dtype!r}")
    return HALVES[dtype]


# %% nbs/numba_kernels/cuda/simt.ipynb #numba_types
if SIM:
    f32: Any = np.float32
    i32: Any = np.int32
    i64: Any = np.int64
    u32: Any = np.uint32
else:
    from minivllm_kernels.cuda.warp import types as _types

    f32, i32, i64, u32 = _types.float32, _types.int32, _types.int64, _types.uint32

NEG = -(2.0**100)
LOG2E = 1.4426950408889634


def numba_types(signature: str) -> list[Any]:
    """numba types of a signature such as "u32* i32* f32 i64"."""
    from minivllm_kernels.cuda.warp import types

    scalar = {"u16": types.uint16, "u32": types.uint32, "i32": types.int32, "i64": types.int64, "f32": types.float32}
    return [types.CPointer(scalar[a[:-1]]) if a.endswith("*") else scalar[a] for a in signature.split()]


def device(function: Callable) -> Any:
    """A function that kernels call, always inlined (arrays of registers cannot cross a real call)."""
    return function if SIM else cuda.jit(device=True, inline="always")(function)


# %% nbs/numba_kernels/cuda/simt.ipynb #Pointer
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


# %% nbs/numba_kernels/cuda/simt.ipynb #Kernel
@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel before compilation.

    name: unique among kernels and parameters (it names the cached machine code).
    signature: argument types, as in "u32* i32* f32": words, 32-bit and 64-bit integers, floats, pointers to them (or to u16).
    threads: threads a block. min_blocks: blocks that must fit on a multiprocessor at once (bounds the registers; 0: free).
    shared_bytes: dynamic shared memory a block.
    """

    name: str
    function: Callable
    signature: str
    threads: int
    min_blocks: int = 0
    shared_bytes: int = 0

    def simulate(self, grid: tuple[int, int], *arguments: Any) -> None:
        """Run in numba's simulator; arrays are NumPy arrays of the pointed-to type, changed in place."""
        if not SIM:
            raise RuntimeError(
                "set NUMBA_ENABLE_CUDASIM=1 before importing minivllm_kernels to run kernels without a GPU"
            )
        kinds = self.signature.split()
        if len(arguments) != len(kinds):
            raise TypeError(f"{self.name} takes {len(kinds)} arguments ({self.signature}), not {len(arguments)}")
        given = [Pointer(a) if kind.endswith("*") else _scalar(kind, a) for kind, a in zip(kinds, arguments)]
        cuda.jit(self.function)[grid, self.threads, 0, self.shared_bytes](*given)

    def ptx(self, cc: tuple[int, int] = (9, 0)) -> str:
        """PTX text for compute capability `cc`. Needs numba-cuda and its compiler wheels, but no GPU."""
        if SIM:
            raise RuntimeError("no PTX in the simulator: unset NUMBA_ENABLE_CUDASIM")
        from minivllm_kernels.cuda.warp import types

        signature = types.void(*numba_types(self.signature))
        text, _ = cuda.compile(self.function, signature, cc=cc, device=False, abi="numba", output="ptx", fastmath=True)
        return _with_bounds(text if cc >= (9, 0) else _without_overlap(text), self.threads, self.min_blocks)


def _scalar(kind: str, value: Any) -> Any:
    return {"f32": np.float32, "i32": np.int32, "i64": np.int64, "u32": np.uint32}[kind](value)


def _without_overlap(text: str) -> str:
    """Leave out what cards before Hopper do not have, and kernels that start one after the other do not need."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if "griddepcontrol." not in line)


def _with_bounds(text: str, threads: int, min_blocks: int) -> str:
    """Add launch bounds to the entry of a PTX text: ptxas fits its registers to them."""
    at = text.index(")\n{", text.index(".visible .entry")) + 1
    bounds = f"\n.maxntid {threads}, 1, 1\n" + (f".minnctapersm {min_blocks}\n" if min_blocks else "")
    return text[:at] + bounds + text[at:]


def kernel(
    signature: str, threads: int, name: str, min_blocks: int = 0, shared_bytes: int = 0
) -> Callable[[Callable], Kernel]:
    """Decorator: describe a Python function as a kernel (see `Kernel`)."""
    return lambda function: Kernel(name, function, signature, threads, min_blocks, shared_bytes)
