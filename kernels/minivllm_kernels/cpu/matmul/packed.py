"""CPU matmul of a few rows by a packed bf16 weight."""

# Generated from nbs/numba_kernels/cpu/matmul/packed.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.gemv import jit, make_take_rows, make_write_row, matmul_loop
from minivllm_kernels.cpu.matmul.layout import ITEM, TILE_ROWS, prefetch_distance
from minivllm_kernels.cpu.simd import (
    floats_at,
    load,
    load_halves,
    prefetch_rows,
    splat,
    store,
    tile_fma,
    tile_outer,
    tile_store,
    tile_zeros,
)

"""Matmul of a few bf16 rows by a weight in oneDNN's packed order. Each weight is read once."""


def tile_vectors(rows: int, lanes: int, registers: int, item: int = ITEM) -> int:
    """Vectors of outputs in a tile of `rows` rows: even and odd sums fill half the registers."""
    return max(1, min(item // lanes, registers // 4 // rows))


@jit
def find_outputs(args, item):
    """First output of an item, its end, and the floats from one row of sums to the next."""
    return item * ITEM, item * ITEM + min(args[layout.OUTPUTS] - item * ITEM, ITEM), ITEM


def make_tile(rows: int, vectors: int, lanes: int, block: int) -> Any:
    """A function for `rows` rows and the outputs of an item, `vectors * lanes` at once."""
    V, L, SUMS, STEP, BLOCK = vectors, lanes, rows * vectors, 2 * lanes, block
    LINES, (NEAR, _) = -(-vectors * lanes // 16), prefetch_distance()
    AHEAD = 1024  # 2048 bytes: an AMD Zen 4 reads these weights 1.1 times as fast as with 4096 (a page)

    @jit
    def tile(args, item, mine, r, sums):
        """sums[i * BLOCK + n] = mine[r + i] . weight[item * BLOCK + n]."""
        weight, inputs = floats_at(args[layout.WEIGHT], 16), args[layout.INPUTS]
        start, at = item * BLOCK * args[layout.PADDED], r * inputs
        for n in range(0, BLOCK, V * L):
            w, even, odd = start + 2 * n, tile_zeros(SUMS, L), tile_zeros(SUMS, L)
            for k in range(0, inputs, 2):
                prefetch_rows(weight, w + AHEAD, 32, LINES, NEAR)
                even = tile_fma(even, mine, at + k, inputs, load_halves(weight, w, STEP, V, 0, L))
                odd = tile_fma(odd, mine, at + k + 1, inputs, load_halves(weight, w, STEP, V, 1, L))
                w += 2 * BLOCK
            tile_store(sums, n, BLOCK, V, tile_outer(even, odd, (splat(1.0, L),)))

    return tile


def matmul(out_bits: int, lanes: int, registers: int, block: int) -> Callable[[Any], None]:
    """Body of the kernel. Arguments: see `layout.PackedMatmul`. ``out_bits``: of the results, which are rounded to bf16. ``block``: outputs
    of a block, which are a work item: threads that shared one would fetch each other's halves of its cache lines."""
    L, BLOCK = lanes, block
    tiles = [make_tile(n, tile_vectors(n, lanes, registers, block), lanes, block) for n in TILE_ROWS]

    @jit
    def find_outputs_of_block(args, item):
        return item * BLOCK, min(item * BLOCK + BLOCK, args[layout.OUTPUTS]), BLOCK

    @jit
    def take_row(args, row, mine, r):
        x, inputs = floats_at(args[layout.X], 16), args[layout.INPUTS]
        for k in range(0, inputs, L):
            store(mine, r * inputs + k, load(x, row * inputs + k, L))

    return matmul_loop(find_outputs_of_block, make_take_rows(take_row), tiles, make_write_row(lanes, 16, out_bits))
