"""CPU kernels for LoRA: shrink and expand, rows grouped by adapter."""

# Generated from nbs/numba_kernels/cpu/lora.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from minivllm_kernels.cpu.compile import COUNT, NEXT, OWN
from minivllm_kernels.cpu.simd import (
    claim,
    floats_at,
    fma,
    ints_at,
    load,
    splat,
    store,
    tile_fma,
    tile_load,
    tile_outer,
    tile_totals,
    tile_zeros,
)  # fmt: skip

__all__ = [
    "AT_ONCE", "EXPAND_B", "EXPAND_CHUNKS", "EXPAND_H", "EXPAND_OUT", "EXPAND_OUTPUTS", "ORDER", "PARTS",
    "RANK", "RANKS", "RANK_OF", "SHRINK_A", "SHRINK_H", "SHRINK_INPUTS", "SHRINK_X", "SLOTS", "USED",
    "expand", "jit", "shrink",
]  # fmt: skip

jit = njit(error_model="numpy")
RANKS = 8
"""Rows of an A that are multiplied at once. Ranks are padded to a multiple of it."""
AT_ONCE = 16
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
    L, ROWS, N, SUMS = lanes, AT_ONCE, RANKS // 2, 4 * (RANKS // 2)

    @jit
    def one(args, x, a, h, j, w, first, width):
        order, inputs, products = ints_at(args[ORDER], 64), args[SHRINK_INPUTS], tile_zeros(N, L)
        at = order[j] * inputs
        for k in range(0, inputs, L):
            some = tile_load(a, w + k, inputs, N, 1, L)
            products = tile_outer(products, tile_load(x, at + k, 0, 1, 1, L), some)
        tile_totals(h, j * width + first, width, N, products)

    @jit
    def four(args, x, a, h, j, w, first, width):
        """The same for four rows of one adapter, which is read once for them."""
        order, inputs, products = ints_at(args[ORDER], 64), args[SHRINK_INPUTS], tile_zeros(SUMS, L)
        r0, r1, r2, r3 = order[j] * inputs, order[j + 1] * inputs, order[j + 2] * inputs, order[j + 3] * inputs
        for k in range(0, inputs, L):
            some = tile_load(a, w + k, inputs, N, 1, L)
            rows = (load(x, r0 + k, L), load(x, r1 + k, L), load(x, r2 + k, L), load(x, r3 + k, L))
            products = tile_outer(products, rows, some)
        tile_totals(h, j * width + first, width, N, products)

    def body(args):
        x, a, h = floats_at(args[SHRINK_X], x_bits), floats_at(args[SHRINK_A], w_bits), floats_at(args[SHRINK_H], 32)
        slots, used, inputs = ints_at(args[SLOTS], 64), ints_at(args[USED], 64), args[SHRINK_INPUTS]
        ranks, width = ints_at(args[RANK_OF], 64), args[PARTS] * args[RANK]
        tiles = width // RANKS
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            j, first = item // tiles * ROWS, item % tiles * RANKS
            part, r, end = first // args[RANK], first % args[RANK], min(j + ROWS, used[0])
            while j < end:
                slot = slots[j]
                count = 4 if j + 4 <= end and slots[j + 3] == slot else 1
                if r < ranks[slot * args[PARTS] + part]:
                    for n in range(first, first + RANKS, N):
                        w = (slot * width + n) * inputs
                        if count == 4:
                            four(args, x, a, h, j, w, n, width)
                        else:
                            one(args, x, a, h, j, w, n, width)
                j += count

    return body


def expand(w_bits: int, out_bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel for `out += h B^T`. ``w_bits``, ``out_bits``: of B and of out. ``lanes``: divides every chunk."""
    L = lanes

    @jit
    def add(out, at, s):
        store(out, at, load(out, at, L) + s)

    @jit
    def some(args, h, b, out, j, count, first, w, n):
        """One vector of outputs, of `count` rows of one adapter."""
        order, outputs, width = ints_at(args[ORDER], 64), args[EXPAND_OUTPUTS], args[PARTS] * args[RANK]
        for i in range(count):
            total = splat(np.float32(0), L)
            for r in range(ints_at(args[RANK_OF], 64)[first]):
                total = fma(splat(h[j * width + i * width + w[0] + r], L), load(b, w[1] + r * outputs + n, L), total)
            add(out, order[j + i] * outputs + n, total)

    @jit
    def four(args, h, b, out, j, first, w, n):
        """Four vectors of outputs, of four rows of one adapter, which is read once for them."""
        order, outputs, width = ints_at(args[ORDER], 64), args[EXPAND_OUTPUTS], args[PARTS] * args[RANK]
        t = tile_zeros(16, L)
        for r in range(ints_at(args[RANK_OF], 64)[first]):
            t = tile_fma(t, h, j * width + w[0] + r, width, tile_load(b, w[1] + r * outputs + n, 0, 1, 4, L))
        r0, r1, r2, r3 = (
            order[j] * outputs + n,
            order[j + 1] * outputs + n,
            order[j + 2] * outputs + n,
            order[j + 3] * outputs + n,
        )
        add(out, r0, t[0]), add(out, r0 + L, t[1]), add(out, r0 + 2 * L, t[2]), add(out, r0 + 3 * L, t[3])
        add(out, r1, t[4]), add(out, r1 + L, t[5]), add(out, r1 + 2 * L, t[6]), add(out, r1 + 3 * L, t[7])
        add(out, r2, t[8]), add(out, r2 + L, t[9]), add(out, r2 + 2 * L, t[10]), add(out, r2 + 3 * L, t[11])
        add(out, r3, t[12]), add(out, r3 + L, t[13]), add(out, r3 + 2 * L, t[14]), add(out, r3 + 3 * L, t[15])

    def body(args):
        h, b, out = (
            floats_at(args[EXPAND_H], 32),
            floats_at(args[EXPAND_B], w_bits),
            floats_at(args[EXPAND_OUT], out_bits),
        )
        slots, used = ints_at(args[SLOTS], 64), ints_at(args[USED], 64)
        chunks, outputs = ints_at(args[EXPAND_CHUNKS], 64), args[EXPAND_OUTPUTS]
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            begin, end, part = chunks[3 * item], chunks[3 * item + 1], chunks[3 * item + 2]
            j = 0
            while j < used[0]:
                slot = slots[j]
                count = 4 if j + 4 <= used[0] and slots[j + 3] == slot else 1
                first, w, n = slot * args[PARTS] + part, (part * args[RANK], slot * args[RANK] * outputs), begin
                while count == 4 and n + 4 * L <= end:
                    four(args, h, b, out, j, first, w, n)
                    n += 4 * L
                for at in range(n, end, L):
                    some(args, h, b, out, j, count, first, w, at)
                j += count

    return body
