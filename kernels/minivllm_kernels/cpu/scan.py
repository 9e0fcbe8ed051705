"""CPU kernel for the SSD recurrence (Mamba-2), on states in the blocks of a cache."""

# Generated from nbs/numba_kernels/cpu/scan.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, NEXT, OWN
from minivllm_kernels.cpu.simd import claim, exp, floats_at, fma, ints_at, load, splat, store, total

__all__ = [
    "SSD_A", "SSD_B", "SSD_BEGINS", "SSD_C", "SSD_D", "SSD_DT", "SSD_GROUPS", "SSD_HEADS", "SSD_OUT",
    "SSD_READ", "SSD_STATES", "SSD_STRIDE", "SSD_WRITE", "SSD_X", "ssd",
]  # fmt: skip

(
    SSD_X,
    SSD_DT,
    SSD_A,
    SSD_B,
    SSD_C,
    SSD_D,
    SSD_OUT,
    SSD_STATES,
    SSD_STRIDE,
    SSD_READ,
    SSD_WRITE,
    SSD_BEGINS,
    SSD_HEADS,
    SSD_GROUPS,
) = range(OWN, OWN + 14)
"""Arguments of `ssd`. Addresses of float32 arrays: x [T, heads, P], dt [T, heads], A [heads], B and C [T, groups, N], D [heads], the
result [T, heads, P], and the states of block 0; numbers from one block to the next. Addresses of int64 arrays: the blocks that
each of S sequences reads (-1: none, its state is 0) and writes, and its first token [S + 1]. Heads and groups. The work items are
heads of sequences."""


def ssd(head_dim: int, state_size: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that takes each sequence's tokens through its state, one after the other."""
    P, N, L = head_dim, state_size, lanes

    def body(args):
        x, dt, A = floats_at(args[SSD_X], 32), floats_at(args[SSD_DT], 32), floats_at(args[SSD_A], 32)
        B, C, D = floats_at(args[SSD_B], 32), floats_at(args[SSD_C], 32), floats_at(args[SSD_D], 32)
        out, states = floats_at(args[SSD_OUT], 32), floats_at(args[SSD_STATES], 32)
        read, write, begins = ints_at(args[SSD_READ], 64), ints_at(args[SSD_WRITE], 64), ints_at(args[SSD_BEGINS], 64)
        heads, groups, zero = args[SSD_HEADS], args[SSD_GROUPS], splat(np.float32(0), L)
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            s, h = item // heads, item % heads
            source, to = read[s] * args[SSD_STRIDE] + h * P * N, write[s] * args[SSD_STRIDE] + h * P * N
            fresh = read[s] < 0
            for t in range(begins[s], begins[s + 1]):
                step = dt[t * heads + h]
                decay = exp(splat(step * A[h], L))
                at = (t * groups + h // (heads // groups)) * N
                for p in range(P):
                    value = x[(t * heads + h) * P + p]
                    added, y = splat(step * value, L), zero
                    for i in range(0, N, L):
                        old = zero if fresh else load(states, source + p * N + i, L)
                        new = fma(added, load(B, at + i, L), old * decay)
                        store(states, to + p * N + i, new)
                        y = fma(new, load(C, at + i, L), y)
                    out[(t * heads + h) * P + p] = total(y) + D[h] * value
                source, fresh = to, False

    return body
