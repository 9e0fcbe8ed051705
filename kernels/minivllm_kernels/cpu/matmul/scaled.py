"""CPU matmul by weights of fp8 or int8 with scales."""

# Generated from nbs/numba_kernels/cpu/matmul/scaled.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.gemv import jit, make_take_rows, make_write_row, matmul_loop
from minivllm_kernels.cpu.matmul.layout import ITEM, TILE_ROWS, prefetch_distance
from minivllm_kernels.cpu.matmul.packed import find_outputs, tile_vectors
from minivllm_kernels.cpu.simd import (
    floats_at,
    largest,
    load,
    maximum,
    prefetch_rows,
    rounded,
    splat,
    store,
    tile_fma,
    tile_load,
    tile_outer,
    tile_scaled,
    tile_store,
    tile_zeros,
)

"""Matmul by a weight of fp8 or int8 with scales. Sums are float32, in an order that does not depend on the number of rows: a row's
result is bit-identical in any batch."""

TINY = np.float32(1e-10)


def make_take_row(bits: int, x_bits: int, lanes: int) -> Any:
    """A function that writes a row as float32, rounded to numbers of `bits` (see `simd.rounded`) times a step."""
    L, MOST = lanes, np.float32(448 if bits == 8 else 127)

    @jit
    def take_row(args, row, mine, r):
        x, inputs, together = floats_at(args[layout.X], x_bits), args[layout.INPUTS], args[layout.TOGETHER]
        at, to = row * inputs, r * inputs
        for g in range(0, inputs, together):
            if args[layout.STEP] != 0:
                step = splat(floats_at(args[layout.STEP], 32)[0], L)
            else:
                top = splat(TINY, L)
                for k in range(g, g + together, L):
                    some = load(x, at + k, L)
                    top = maximum(maximum(some, splat(np.float32(0), L) - some), top)
                step = splat(largest(top) / MOST, L)
            for k in range(g, g + together, L):
                store(mine, to + k, rounded(load(x, at + k, L) / step, bits) * step)

    return take_row


def make_tile(rows: int, bits: int, lanes: int, registers: int) -> Any:
    """A function for `rows` rows and the outputs of an item, some vectors at once."""
    V, L = tile_vectors(rows, lanes, registers), lanes
    SUMS, (NEAR, AHEAD) = rows * V, prefetch_distance()

    @jit
    def tile(args, item, mine, r, sums):
        """sums[i * ITEM + n] = mine[r + i] . weight[item * ITEM + n]."""
        weight, scales = floats_at(args[layout.WEIGHT], bits), floats_at(args[layout.SCALES], 32)
        inputs, block = args[layout.INPUTS], args[layout.SCALE_BLOCK]
        for n in range(0, ITEM, V * L):
            w, scale, at = item * inputs * ITEM + n, item * (inputs // block) * ITEM + n, r * inputs
            totals = tile_zeros(SUMS, L)
            for _ in range(0, inputs, block):
                even, odd = tile_zeros(SUMS, L), tile_zeros(SUMS, L)
                for _ in range(0, block, 2):
                    prefetch_rows(weight, w + AHEAD, 0, 1, NEAR)
                    even = tile_fma(even, mine, at, inputs, tile_load(weight, w, 0, 1, V, L))
                    odd = tile_fma(odd, mine, at + 1, inputs, tile_load(weight, w + ITEM, 0, 1, V, L))
                    w, at = w + 2 * ITEM, at + 2
                steps = tile_load(scales, scale, 0, 1, V, L)
                totals = tile_scaled(totals, tile_outer(even, odd, (splat(np.float32(1), L),)), steps)
                scale += ITEM
            tile_store(sums, n, ITEM, V, totals)

    return tile


def matmul(bits: int, rounds: int, x_bits: int, row_lanes: int, lanes: int, registers: int) -> Callable[[Any], None]:
    """Body of the kernel. Arguments: see `layout.ScaledMatmul`.

    Args:
        bits: 8 for fp8, -8 for int8.
        rounds: 1 if rows are rounded, too.
        x_bits: of rows and results.
        row_lanes: numbers of a row that are loaded at once.
    """
    tiles = [make_tile(n, bits, lanes, registers) for n in TILE_ROWS]

    @jit
    def copy_row(args, row, mine, r):
        x, inputs = floats_at(args[layout.X], x_bits), args[layout.INPUTS]
        for k in range(0, inputs, row_lanes):
            store(mine, r * inputs + k, load(x, row * inputs + k, row_lanes))

    take_row = make_take_row(bits, x_bits, row_lanes) if rounds else copy_row
    return matmul_loop(find_outputs, make_take_rows(take_row), tiles, make_write_row(lanes, x_bits))
