"""Warp and tensor-core primitives in plain Python, for the simulator."""

# Generated from nbs/numba_kernels/cuda/warp_sim.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["WAIT_SECONDS", "Warp", "exchange"]


# %% nbs/numba_kernels/cuda/warp_sim.ipynb #Warp
WAIT_SECONDS = 120.0  # a lane that never arrives (a divergent shuffle) becomes an error instead of a hang


class Warp:
    """A barrier for the lanes of one warp, and two boards on which each lane leaves a value."""

    def __init__(self, lanes: int):
        self.barrier = threading.Barrier(lanes, action=self.join)
        self.boards: list[list] = [[None] * lanes, [None] * lanes]
        self.results: list[Any] = [None, None]
        self.together: Callable[[list], Any] = list
        self.turn = 0  # the board in use; the last lane to arrive changes it while the others wait

    def join(self) -> None:
        """Work on the values of all lanes, once, when the last has arrived."""
        self.results[self.turn] = self.together(self.boards[self.turn])
        self.turn ^= 1


_lock = threading.Lock()


def exchange(value: Any, together: Callable[[list], Any] = list) -> tuple[Any, int]:
    """Leave `value` for the warp and wait for the others: (together(every lane's value), my lane)."""
    thread: Any = threading.current_thread()
    block = thread._manager
    index, lane = divmod(thread.thread_id, 32)
    warps = block.__dict__.setdefault("_warps", {})
    if index not in warps:
        with _lock:
            if index not in warps:
                threads = int(np.prod(block._block_dim))
                warps[index] = Warp(min(32, threads - 32 * index))
    warp = warps[index]
    turn = warp.turn
    warp.boards[turn][lane] = value
    warp.together = together
    warp.barrier.wait(WAIT_SECONDS)
    return warp.results[turn], lane


# %% nbs/numba_kernels/cuda/warp_sim.ipynb #shfl_xor
def shfl_xor(value, mask):
    """float32 of lane `lane ^ mask`."""
    board, lane = exchange(np.float32(value))
    return board[lane ^ int(mask)]


# %% nbs/numba_kernels/cuda/warp_sim.ipynb #_float_of_bits
def _float_of_bits(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def _bf16_bits(x) -> int:
    bits = int(np.float32(x).view(np.uint32))
    if (bits & 0x7F800000) == 0x7F800000 and bits & 0x7FFFFF:
        return 0x7FFF  # NaN stays NaN
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def bf16_lo(word):
    """float32 of the low bfloat16 of a word."""
    return _float_of_bits((int(word) << 16) & 0xFFFFFFFF)


def bf16_hi(word):
    """float32 of the high bfloat16 of a word."""
    return _float_of_bits(int(word) & 0xFFFF0000)


def pack_bf16(lo, hi):
    """A word of two bfloat16, rounded to nearest even."""
    return np.uint32(_bf16_bits(lo) | (_bf16_bits(hi) << 16))


def f16_lo(word):
    """float32 of the low float16 of a word."""
    return np.float32(np.uint16(int(word) & 0xFFFF).view(np.float16))


def f16_hi(word):
    """float32 of the high float16 of a word."""
    return np.float32(np.uint16(int(word) >> 16).view(np.float16))


def pack_f16(lo, hi):
    """A word of two float16, rounded to nearest even."""
    low, high = (int(np.float16(x).view(np.uint16)) for x in (lo, hi))
    return np.uint32(low | (high << 16))


def _e4m3_bits(x) -> int:
    x = float(x)
    if math.isnan(x):
        return 0x7F
    size = min(abs(x), 448.0)
    exponent = math.frexp(max(size, 2.0**-6))[1] - 1  # below 2 ** -6 numbers are as far apart as there
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    return sign | ((exponent + 6) * 8 + round(size * 2.0 ** (3 - exponent)))


def pack_e4m3(lo, hi):
    """Two e4m3 in the low half of a word, rounded to nearest even; what is beyond +-448 becomes +-448."""
    return np.uint32(_e4m3_bits(lo) | (_e4m3_bits(hi) << 8))


def _f16_of_e4m3(code: int) -> int:
    if code & 0x7F == 0x7F:
        return 0x7FFF
    bits = np.uint16((code & 0x80) << 8 | (code & 0x7F) << 7)  # the exponent is 8 too small
    return int((bits.view(np.float16) * np.float16(256)).view(np.uint16))


def e4m3_lo(word):
    """A word of two float16 from the two e4m3 in the low half of a word."""
    return np.uint32(_f16_of_e4m3(int(word) & 255) | _f16_of_e4m3(int(word) >> 8 & 255) << 16)


def e4m3_hi(word):
    """A word of two float16 from the two e4m3 in the high half of a word."""
    return e4m3_lo(int(word) >> 16)


# %% nbs/numba_kernels/cuda/warp_sim.ipynb #_mma
def _mma(unpack):
    def product(board):
        words = np.array(board, np.uint32)  # [lane, (a0 a1 a2 a3 b0 b1)]
        pairs = unpack(words).reshape(8, 4, 6, 2)  # [g, t, word, (low, high)]
        a = np.zeros((16, 16), np.float32)
        b = np.zeros((16, 8), np.float32)
        for word, (row, k) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
            a[row : row + 8, k : k + 8] = pairs[:, :, word].reshape(8, 8)
        for half in range(2):
            b[8 * half : 8 * half + 8] = pairs[:, :, 4 + half].reshape(8, 8).T
        return a @ b

    def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        d, lane = exchange((a0, a1, a2, a3, b0, b1), product)
        g, t = lane // 4, (lane % 4) * 2
        return c0 + d[g, t], c1 + d[g, t + 1], c2 + d[g + 8, t], c3 + d[g + 8, t + 1]

    return mma


mma_bf16 = _mma(lambda words: np.stack([words << 16, words & 0xFFFF0000], -1).view(np.float32))
mma_f16 = _mma(lambda words: words.view(np.float16).astype(np.float32))


def movmatrix(word):
    """Transpose an 8x8 matrix of 16-bit values that the warp holds one word a lane."""
    board, lane = exchange(int(word))
    row, column = lane // 4, (lane % 4) * 2

    def element(r, c):
        return (board[r * 4 + c // 2] >> (16 * (c & 1))) & 0xFFFF

    return np.uint32(element(column, row) | (element(column + 1, row) << 16))


def prmt(a, b, selector):
    """Pick four bytes out of the eight of (a, b), one selector nibble a byte."""
    source = [(int(a) >> (8 * i)) & 255 for i in range(4)] + [(int(b) >> (8 * i)) & 255 for i in range(4)]
    return np.uint32(sum(source[(int(selector) >> (4 * i)) & 7] << (8 * i) for i in range(4)))


# %% nbs/numba_kernels/cuda/warp_sim.ipynb #fmax
def fmax(a, b):
    """The larger of two float32."""
    return max(a, b)


def exp2(x):
    """2 ** x in float32."""
    return np.float32(np.exp2(np.float32(x)))


def rsqrt(x):
    """1 / sqrt(x) in float32."""
    return np.float32(1 / np.sqrt(np.float32(x)))


def ldg128(pointer, index):
    """Four words from `pointer[index]`; on the GPU one 16-byte load."""
    return tuple(pointer[index + k] for k in range(4))


ldg128_stream = ldg128


def ldg64_stream(pointer, index):
    """Two words from `pointer[index]`; on the GPU one 8-byte load."""
    return pointer[index], pointer[index + 1]


def stg128(pointer, index, words):
    """Store four words at `pointer[index]`."""
    for k in range(4):
        pointer[index + k] = words[k]


def ldcg2(pointer, index):
    """Two float32 that another block may have written."""
    return pointer[index], pointer[index + 1]


def grid_wait():
    """Wait until the kernel before has ended, and see what it wrote."""


def grid_release():
    """Let the next kernel begin, as far as its own `grid_wait`."""


def atomic_inc(pointer, index):
    """Add one to `pointer[index]`; the value before."""
    with _lock:
        old = int(pointer[index])
        pointer[index] = old + 1
    return old


def smem_addr(array):
    """The address of a shared array, in whatever form `cp_async16` and `ldmatrix_x4` take."""
    return array


def cp_async16(base, offset, pointer, index):
    """Start copying 16 bytes to byte `offset` of the shared array `base`."""
    for k in range(4):
        base[int(offset) // 4 + k] = pointer[index + k]


def cp_commit():
    """Close a group of started copies."""


def cp_wait_older():
    """Wait until all groups of copies but the newest have arrived."""


def _ldmatrix(transpose: bool):
    def gather(board):
        shared = np.asarray(board[0][0], np.uint32)
        at = np.array([offset for _, offset in board]) // 4
        rows = shared[at[:, None] + np.arange(4)].view(np.uint16).reshape(4, 8, 8)
        rows = np.ascontiguousarray(rows.transpose(0, 2, 1)) if transpose else rows
        return rows.reshape(4, 32, 2).view(np.uint32)[..., 0]  # [matrix, lane]

    def load(base, offset):
        words, lane = exchange((base, int(offset)), gather)
        return words[0, lane], words[1, lane], words[2, lane], words[3, lane]

    return load


def sts128(base, offset, a, b, c, d):
    """Store four words at byte `offset` of the shared array `base`."""
    for k, word in enumerate((a, b, c, d)):
        base[int(offset) // 4 + k] = word


ldmatrix_x4 = _ldmatrix(False)
ldmatrix_x4_trans = _ldmatrix(True)
