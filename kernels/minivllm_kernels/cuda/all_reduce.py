"""One-shot all-reduce: a kernel that reads the memory of the other GPUs."""

# Generated from nbs/numba_kernels/cuda/all_reduce.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cuda.launch import driver
from minivllm_kernels.cuda.simt import CudaKernel, Half, cuda, device, f32, half_ops, i64, kernel, kernel_maker, u32
from minivllm_kernels.cuda.warp import grid_release, grid_wait, instruction, ldg128, stg128


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


def share_memory(address: int) -> bytes:
    """What another process needs to open memory of this one's GPU: the handle of an allocation, and how far into it the address lies."""
    call, lib = driver().check, driver().cuda
    handle, start = _Handle(), ctypes.c_uint64()
    call(lib.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)), "sharing memory with other processes")
    call(
        lib.cuMemGetAddressRange_v2(ctypes.byref(start), None, ctypes.c_uint64(address)), "finding where memory begins"
    )
    return bytes(handle) + (address - start.value).to_bytes(8, "little")


def open_memory(shared: bytes) -> int:
    """The address of what another process has shared. It stays open until `close_memory`, or until this process ends.

    Raises:
        CudaError: it is gone, or this GPU cannot read the other's memory.
    """
    address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(shared[:64])
    code = driver().cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, ctypes.c_uint(1))  # with peer access
    driver().check(code, "opening the memory of another process's GPU")
    return int(address.value or 0) + int.from_bytes(shared[64:], "little")


def close_memory(address: int, shared: bytes) -> None:
    """Undo one `open_memory(shared)`, which returned the address. No kernel may be reading there. Raises CudaError."""
    start = ctypes.c_uint64(address - int.from_bytes(shared[64:], "little"))
    driver().check(driver().cuda.cuIpcCloseMemHandle(start), "closing the memory of another process's GPU")


class PeerMemory:
    """A zeroed buffer on each rank's GPU that the kernels of all ranks can read and write.

    It stays until the process ends: a rank may still be reading when another has no more use for its own.

    Args:
        rank: this one's number.
        size: bytes.
        exchange: takes this rank's handle and returns every rank's, in the order of ranks. All ranks must call it.

    Attributes:
        addresses: of the buffers, as this process sees them.

    Raises:
        CudaError: memory cannot be shared.
    """

    def __init__(self, rank: int, size: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        call, lib = driver().check, driver().cuda
        own = ctypes.c_uint64()
        call(lib.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(size)), f"allocating {size} bytes")
        call(lib.cuMemsetD8_v2(own, ctypes.c_ubyte(0), ctypes.c_size_t(size)), "clearing memory")
        call(lib.cuCtxSynchronize(), "clearing memory")
        address = int(own.value or 0)
        shared = exchange(share_memory(address))
        self.addresses = [address if other == rank else open_memory(data) for other, data in enumerate(shared)]


POLLS = 1 << 26
"""How often a rank looks for another's flag before it gives up."""


def _words(address: Any, count: int) -> Any:
    return (ctypes.c_uint32 * count).from_address(int(address))


@instruction("ld.acquire.sys.global.u32 $0, [$1];", "u32", "i64", effect=True)
def load_acquire(address):
    """The word at an address; what its writer wrote before it can be read from now on."""
    time.sleep(1e-4)  # the other ranks want the processor
    return np.uint32(_words(address, 1)[0])


@instruction("st.release.sys.global.u32 [$0], $1;", "", "i64 u32", effect=True)
def store_release(address, word):
    """Write a word that a GPU may see only after everything that was written before it."""
    _words(address, 1)[0] = int(word)


@instruction("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", "u32 u32 u32 u32", "i64", effect=True)
def load_there(address):
    """Four words from an address, on whatever GPU it is."""
    return tuple(np.uint32(word) for word in _words(address, 4))


@instruction("st.global.v4.u32 [$0], {$1,$2,$3,$4};", "", "i64 u32 u32 u32 u32", effect=True)
def store_there(address, a, b, c, d):
    """Four words to an address."""
    _words(address, 4)[:] = [int(a), int(b), int(c), int(d)]


@instruction("trap;", effect=True)
def trap():
    """End the kernel with an error."""
    raise RuntimeError("a rank waited too long for another")


@instruction("mov.b32 $0, $1;", "f32", "u32")
def _as_float(word):
    return np.uint32(word).view(np.float32)


@instruction("mov.b32 $0, $1;", "u32", "f32")
def _as_word(x):
    return np.float32(x).view(np.uint32)


@device
def _nothing(word):
    return f32(0.0)


@device
def _pack_one(x, nothing):
    return _as_word(x)


def number_ops(dtype: str) -> Half:
    """How a word is unpacked to float32 and packed: as two numbers, or, for `float32`, as one and a zero."""
    return Half(_as_float, _nothing, _pack_one, None) if dtype == "float32" else half_ops(dtype)


BLOCKS, THREADS, MOST_RANKS = 128, 512, 8
_ROW = 64  # bytes of a block's flags: one from each rank, then its own epoch
_EPOCH = 4 * MOST_RANKS
_HEAD = BLOCKS * _ROW


def region_pieces(most_bytes: int, threads: int = THREADS) -> int:
    """Pieces of 16 bytes that a region has room for, if no message is longer than `most_bytes`."""
    return max(threads, -(-most_bytes // (16 * BLOCKS)))


def buffer_bytes(room: int) -> int:
    """Bytes of a rank's buffer: flags, and for each block two regions of `room` pieces."""
    return _HEAD + 2 * BLOCKS * room * 16


def split_pieces(pieces: int, threads: int = THREADS) -> tuple[int, int]:
    """(blocks, pieces of a block) for a message."""
    blocks = min(BLOCKS, -(-pieces // threads))
    return blocks, -(-pieces // blocks)


ALL_REDUCE_SIGNATURE = "u32* i64* i32 i32 i32 i32"
"""x; addresses of the ranks' buffers; this rank; pieces of 16 bytes in x, of a block, and that a region has room for."""


@kernel_maker
def one_shot(dtype: str, ranks: int, threads: int = THREADS, polls: int = POLLS) -> CudaKernel:
    """x = the sum of what the ranks have, in place. Grid (blocks, 1), with the same arguments on every rank."""
    if not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"the all-reduce kernel is for 2 to {MOST_RANKS} ranks, not for {ranks}")
    ops = number_ops(dtype)
    lo, hi, pack = ops.lo, ops.hi, ops.pack
    WORDS = 4 * ranks

    @device
    def add(words, k):
        a = lo(words[k])
        b = hi(words[k])
        for r in range(1, ranks):
            a += lo(words[4 * r + k])
            b += hi(words[4 * r + k])
        return pack(a, b)

    @device
    def wait(flag, before):
        looks = 0
        while load_acquire(flag) == before:
            looks += 1
            if looks > polls:
                trap()

    name = f"all_reduce_{dtype}_{ranks}" + (f"_t{threads}_p{polls}" if (threads, polls) != (THREADS, POLLS) else "")

    @kernel(ALL_REDUCE_SIGNATURE, threads, name)
    def reduce(x, buffers, rank, pieces, each, room):
        tid, block = cuda.threadIdx.x, i64(cuda.blockIdx.x)
        there = cuda.local.array(ranks, i64)
        words = cuda.local.array(WORDS, u32)
        grid_release()
        for r in range(ranks):
            there[r] = buffers[r]
        row = block * _ROW
        mine = buffers[rank]
        grid_wait()
        epoch = load_acquire(mine + row + _EPOCH)
        region = _HEAD + (i64(epoch & u32(1)) * BLOCKS + block) * room * 16
        first = block * each
        count = min(i64(each), pieces - first)
        for c in range(tid, count, threads):
            w = ldg128(x, (first + c) * 4)
            store_there(mine + region + c * 16, w[0], w[1], w[2], w[3])
        cuda.syncthreads()
        if tid < ranks:
            store_release(buffers[tid] + row + i64(rank) * 4, u32(epoch + u32(1)))
            wait(mine + row + tid * 4, epoch)
        cuda.syncthreads()
        if tid == 0:
            store_release(mine + row + _EPOCH, u32(epoch + u32(1)))
        for c in range(tid, count, threads):
            for r in range(ranks):
                w = load_there(there[r] + region + c * 16)
                for k in range(4):
                    words[4 * r + k] = w[k]
            stg128(x, (first + c) * 4, (add(words, 0), add(words, 1), add(words, 2), add(words, 3)))

    return reduce
