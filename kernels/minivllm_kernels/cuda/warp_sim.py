"""A simulated warp: threads of numba's CUDA simulator that exchange values at a barrier."""

# Generated from nbs/numba_kernels/cuda/warp_sim.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

SIM = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("0", "")
"""Whether the environment variable NUMBA_ENABLE_CUDASIM was set before the import: kernels run in the simulator."""
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
            warps.setdefault(index, Warp(min(32, int(np.prod(block._block_dim)) - 32 * index)))
    warp = warps[index]
    turn = warp.turn
    warp.boards[turn][lane] = value
    warp.together = together
    warp.barrier.wait(WAIT_SECONDS)
    return warp.results[turn], lane


def shfl_xor(value, mask):
    """float32 of lane `lane ^ mask`."""
    board, lane = exchange(np.float32(value))
    return board[lane ^ int(mask)]


def bf16_bits(x) -> int:
    """The 16 bits of a float32 rounded to the nearest even bfloat16; NaN stays NaN."""
    bits = int(np.float32(x).view(np.uint32))
    if (bits & 0x7F800000) == 0x7F800000 and bits & 0x7FFFFF:
        return 0x7FFF
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def e4m3_bits(x) -> int:
    """The 8 bits of a float32 rounded to the nearest even e4m3; what is beyond +-448 becomes +-448."""
    x = float(x)
    if math.isnan(x):
        return 0x7F
    size = min(abs(x), 448.0)
    exponent = math.frexp(max(size, 2.0**-6))[1] - 1  # below 2 ** -6 numbers are as far apart as there
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    return sign | ((exponent + 6) * 8 + round(size * 2.0 ** (3 - exponent)))


def f16_bits_of_e4m3(code: int) -> int:
    """The float16 of an e4m3, both as bits."""
    if code & 0x7F == 0x7F:
        return 0x7FFF
    bits = np.uint16((code & 0x80) << 8 | (code & 0x7F) << 7)  # the exponent is 8 too small
    return int((bits.view(np.float16) * np.float16(256)).view(np.uint16))


def _mma(unpack):
    def multiply(board):
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
        """A [16, 16] @ B [16, 8] + C [16, 8], spread over the warp."""
        d, lane = exchange((a0, a1, a2, a3, b0, b1), multiply)
        g, t = lane // 4, (lane % 4) * 2
        return c0 + d[g, t], c1 + d[g, t + 1], c2 + d[g + 8, t], c3 + d[g + 8, t + 1]

    return mma


mma_bf16 = _mma(lambda words: np.stack([words << 16, words & 0xFFFF0000], -1).view(np.float32))
mma_f16 = _mma(lambda words: words.view(np.float16).astype(np.float32))


def movmatrix(word):
    """Transpose an 8x8 matrix of 16-bit values, of which each lane of the warp holds one word."""
    board, lane = exchange(int(word))
    row, column = lane // 4, (lane % 4) * 2

    def element(r, c):
        return (board[r * 4 + c // 2] >> (16 * (c & 1))) & 0xFFFF

    return np.uint32(element(column, row) | (element(column + 1, row) << 16))


def _ldmatrix(transpose: bool):
    def gather(board):
        shared = np.asarray(board[0][0], np.uint32)
        at = np.array([offset for _, offset in board]) // 4
        rows = shared[at[:, None] + np.arange(4)].view(np.uint16).reshape(4, 8, 8)
        rows = np.ascontiguousarray(rows.transpose(0, 2, 1)) if transpose else rows
        return rows.reshape(4, 32, 2).view(np.uint32)[..., 0]  # [matrix, lane]

    def load(base, offset):
        """A word of each of four 8x8 matrices in shared memory; lane i names the address of row i."""
        words, lane = exchange((base, int(offset)), gather)
        return words[0, lane], words[1, lane], words[2, lane], words[3, lane]

    return load


ldmatrix_x4 = _ldmatrix(False)
ldmatrix_x4_trans = _ldmatrix(True)
