"""CPU kernels for LoRA: shrink and expand, rows grouped by adapter."""

# Generated from nbs/numba_kernels/cpu/lora.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, NEXT, OWN
from minivllm_kernels.cpu.simd import (
    claim,
    floats_at,
    fma,
    ints_at,
    load,
    splat,
    store,
    tile_load,
    tile_outer,
    tile_totals,
    tile_zeros,
)  # fmt: skip

__all__ = [
    "AT_ONCE", "EXPAND_B", "EXPAND_CHUNKS", "EXPAND_H", "EXPAND_OUT", "EXPAND_OUTPUTS", "ORDER", "PARTS",
    "RANK", "RANKS", "RANK_OF", "SHRINK_A", "SHRINK_H", "SHRINK_INPUTS", "SHRINK_X", "SLOTS", "USED",
    "expand", "shrink",
]  # fmt: skip

RANKS = 8
"""Rows of an A that are multiplied at once. Ranks are padded to a multiple of it."""
AT_ONCE = 4
"""Rows of x of one work item of `shrink`."""
(ORDER, SLOTS, USED, RANK_OF, PARTS, RANK) = range(OWN, OWN + 6)
"""Arguments of both kernels. Addresses, of int64 numbers: the rows that have an adapter, sorted by slot; the slot of each; how many
they are; the ranks. Then the number of parts, and the rank that there is room for."""
(SHRINK_X, SHRINK_A, SHRINK_H, SHRINK_INPUTS) = range(OWN + 6, OWN + 10)
"""Further arguments of `shrink`. The work items are `AT_ONCE` rows and `RANKS` ranks."""
(EXPAND_H, EXPAND_B, EXPAND_OUT, EXPAND_OUTPUTS, EXPAND_CHUNKS) = range(OWN + 6, OWN + 11)
"""Further arguments of `expand`. The work items are chunks of outputs; of each, int64: first, end, and part."""


def shrink(w_bits: int, x_bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel for `h = x A^T`. ``w_bits``, ``x_bits``: of A and of x. ``lanes``: divides the inputs."""
    L = lanes

    def body(args):
        x, a, h = floats_at(args[SHRINK_X], x_bits), floats_at(args[SHRINK_A], w_bits), floats_at(args[SHRINK_H], 32)
        order, slots, used = ints_at(args[ORDER], 64), ints_at(args[SLOTS], 64), ints_at(args[USED], 64)
        ranks, inputs, width = ints_at(args[RANK_OF], 64), args[SHRINK_INPUTS], args[PARTS] * args[RANK]
        tiles = width // RANKS
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            begin, first = item // tiles * AT_ONCE, item % tiles * RANKS
            part, r = first // args[RANK], first % args[RANK]
            for j in range(begin, min(begin + AT_ONCE, used[0])):
                slot = slots[j]
                if r < ranks[slot * args[PARTS] + part]:
                    at, w, products = order[j] * inputs, (slot * width + first) * inputs, tile_zeros(RANKS, L)
                    for k in range(0, inputs, L):
                        some = tile_load(a, w + k, inputs, RANKS, 1, L)
                        products = tile_outer(products, tile_load(x, at + k, 0, 1, 1, L), some)
                    tile_totals(h, j * width + first, 0, RANKS, products)

    return body


def expand(w_bits: int, out_bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel for `out += h B^T`. ``w_bits``, ``out_bits``: of B and of out. ``lanes``: divides every chunk."""
    L = lanes

    def body(args):
        h, b, out = (
            floats_at(args[EXPAND_H], 32),
            floats_at(args[EXPAND_B], w_bits),
            floats_at(args[EXPAND_OUT], out_bits),
        )
        order, slots, used = ints_at(args[ORDER], 64), ints_at(args[SLOTS], 64), ints_at(args[USED], 64)
        ranks, chunks, outputs = ints_at(args[RANK_OF], 64), ints_at(args[EXPAND_CHUNKS], 64), args[EXPAND_OUTPUTS]
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            begin, end, part = chunks[3 * item], chunks[3 * item + 1], chunks[3 * item + 2]
            for j in range(used[0]):
                slot = slots[j]
                count, to = ranks[slot * args[PARTS] + part], order[j] * outputs
                first, w = (j * args[PARTS] + part) * args[RANK], slot * args[RANK] * outputs
                if count > 0:
                    n = begin
                    while n + 4 * L <= end:
                        s0 = s1 = s2 = s3 = splat(np.float32(0), L)
                        for r in range(count):
                            some, at = splat(h[first + r], L), w + r * outputs + n
                            s0, s1 = fma(some, load(b, at, L), s0), fma(some, load(b, at + L, L), s1)
                            s2, s3 = fma(some, load(b, at + 2 * L, L), s2), fma(some, load(b, at + 3 * L, L), s3)
                        store(out, to + n, load(out, to + n, L) + s0)
                        store(out, to + n + L, load(out, to + n + L, L) + s1)
                        store(out, to + n + 2 * L, load(out, to + n + 2 * L, L) + s2)
                        store(out, to + n + 3 * L, load(out, to + n + 3 * L, L) + s3)
                        n += 4 * L
                    for i in range(n, end, L):
                        total = splat(np.float32(0), L)
                        for r in range(count):
                            total = fma(splat(h[first + r], L), load(b, w + r * outputs + i, L), total)
                        store(out, to + i, load(out, to + i, L) + total)

    return body
