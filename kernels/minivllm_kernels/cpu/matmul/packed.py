"""CPU matmul of a few rows by a packed bf16 weight."""

# Generated from nbs/numba_kernels/cpu/matmul/packed.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.gemv import jit, make_take_rows, make_write_row, matmul_loop
from minivllm_kernels.cpu.matmul.layout import ITEM, TILE_ROWS
from minivllm_kernels.cpu.simd import (
    floats_at,
    load,
    load_halves,
    prefetch,
    splat,
    store,
    tile_fma,
    tile_outer,
    tile_store,
    tile_zeros,
)

"""Matmul of a few bf16 rows by a weight in oneDNN's packed order. Each weight is read once."""


def tile_vectors(rows: int, lanes: int, registers: int) -> int:
    """Vectors of outputs in a tile of `rows` rows: even and odd sums fill half the registers."""
    return max(1, min(ITEM // lanes, registers // 4 // rows))


@jit
def find_outputs(args, item):
    """First output of an item, its end, and the floats from one row of sums to the next."""
    return item * ITEM, item * ITEM + min(args[layout.OUTPUTS] - item * ITEM, ITEM), ITEM


def make_tile(rows: int, vectors: int, lanes: int) -> Any:
    """A function for `rows` rows and the outputs of an item, `vectors * lanes` at once."""
    V, L, SUMS, STEP, BYTES = vectors, lanes, rows * vectors, 2 * lanes, 4 * vectors * lanes

    @jit
    def tile(args, item, mine, r, sums):
        """sums[i * ITEM + n] = mine[r + i] . weight[item * ITEM + n]. A pair of inputs has `stride` numbers."""
        weight, inputs = floats_at(args[layout.WEIGHT], 16), args[layout.INPUTS]
        block, first = args[layout.BLOCK], item * ITEM
        start, stride, at = first // block * block * args[layout.PADDED] + first % block * 2, 2 * block, r * inputs
        for n in range(0, ITEM, V * L):
            w, even, odd = start + 2 * n, tile_zeros(SUMS, L), tile_zeros(SUMS, L)
            for k in range(0, inputs, 2):
                prefetch(weight, w + 16 * stride, BYTES)
                even = tile_fma(even, mine, at + k, inputs, load_halves(weight, w, STEP, V, 0, L))
                odd = tile_fma(odd, mine, at + k + 1, inputs, load_halves(weight, w, STEP, V, 1, L))
                w += stride
            tile_store(sums, n, ITEM, V, tile_outer(even, odd, (splat(1.0, L),)))

    return tile


def matmul(out_bits: int, lanes: int, registers: int) -> Callable[[Any], None]:
    """Body of the kernel. Arguments: see `layout.PackedMatmul`. ``out_bits``: of the results, which are rounded to bf16."""
    L = lanes
    tiles = [make_tile(n, tile_vectors(n, lanes, registers), lanes) for n in TILE_ROWS]

    @jit
    def take_row(args, row, mine, r):
        x, inputs = floats_at(args[layout.X], 16), args[layout.INPUTS]
        for k in range(0, inputs, L):
            store(mine, r * inputs + k, load(x, row * inputs + k, L))

    return matmul_loop(find_outputs, make_take_rows(take_row), tiles, make_write_row(lanes, 16, out_bits))
