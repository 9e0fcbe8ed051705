"""CPU matmul of several bf16 rows by a packed bf16 weight, by dot products of pairs."""

# Generated from nbs/numba_kernels/cpu/matmul/bf16_dots.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT
from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.gemv import group_of, jit, make_write_row
from minivllm_kernels.cpu.matmul.layout import ITEM
from minivllm_kernels.cpu.simd import claim, floats_at, prefetch_rows, tile_dots, tile_store, tile_zeros

"""Matmul of several bf16 rows by a weight in oneDNN's packed order, by dot products of pairs (AVX-512 BF16). Sums are float32, in an
order that does not depend on the number of rows: a row's result is bit-identical in any batch of this kernel."""

LANES, ROWS, NEAR = 16, 8, 2


def make_tile(rows: int) -> Any:
    """A function for `rows` rows and `ITEM` outputs."""
    VECTORS = ITEM // LANES
    SUMS = rows * VECTORS

    @jit
    def tile(x, at, pairs, last, weight, stride, sums, ahead, tiles):
        """sums[i * ITEM + n] = dot product of row min(i, last) and the weights of output n, for i < rows and n < ITEM.

        x, weight: pairs of bf16, as items of 32 bits; row 0 starts at x[at] and has `pairs` items. stride: from a pair of an output to its
        next, in items. sums: float32 [rows, ITEM]. ahead: where weight to prefetch starts, in items; each of `tiles` calls takes its part.
        """
        totals, w = tile_zeros(SUMS, LANES), 0
        for _ in range(pairs // tiles):
            prefetch_rows(weight, ahead, LANES, VECTORS, NEAR)
            ahead += stride
            for _ in range(tiles):
                totals = tile_dots(totals, x, at, pairs, last, weight, w, VECTORS, LANES)
                at, w = at + 1, w + stride
        for _ in range(pairs % tiles):
            totals = tile_dots(totals, x, at, pairs, last, weight, w, VECTORS, LANES)
            at, w = at + 1, w + stride
        tile_store(sums, 0, ITEM, VECTORS, totals)

    return tile


def matmul(out_bits: int) -> Callable[[Any], None]:
    """Body of the kernel. Arguments: see `layout.PackedMatmul`. ``out_bits``: see `packed.matmul`."""
    two, four, six, eight = (make_tile(n) for n in (2, 4, 6, ROWS))
    write_row = make_write_row(LANES, 16, out_bits)

    @jit
    def weight_of(args, item):
        group, number, _ = group_of(args, item)
        return group[layout.WEIGHT] + 2 * number * group[layout.BLOCK] * group[layout.PADDED]

    @jit
    def do_part(args, first, where, ahead, memory):
        """`ITEM` outputs from `first` on, for all rows. where, ahead: addresses of their weights, and of those that come next."""
        rows, pairs, stride = args[layout.ROWS], args[layout.INPUTS] // 2, args[layout.BLOCK]
        x, weight, sums = floats_at(args[layout.X], 32), floats_at(where, 32), floats_at(memory, 32)
        tiles, count, ahead = (rows + ROWS - 1) // ROWS, min(args[layout.OUTPUTS] - first, ITEM), (ahead - where) // 4
        for r in range(0, rows, ROWS):
            last, at = min(rows - r, ROWS) - 1, r * pairs
            if last < 2:
                two(x, at, pairs, last, weight, stride, sums, ahead, tiles)
            elif last < 4:
                four(x, at, pairs, last, weight, stride, sums, ahead, tiles)
            elif last < 6:
                six(x, at, pairs, last, weight, stride, sums, ahead, tiles)
            else:
                eight(x, at, pairs, last, weight, stride, sums, ahead, tiles)
            ahead += pairs // tiles * stride
            for i in range(last + 1):
                write_row(args, floats_at(memory + 4 * ITEM * i, 32), r + i, first, count)

    def body(args):
        memory = args[layout.SCRATCH] + claim(args, ENTERED, 1) * args[layout.SCRATCH_BYTES]
        item = claim(args, NEXT, 1)
        while item < args[COUNT]:
            following = claim(args, NEXT, 1)
            (group, number, _), where = group_of(args, item), weight_of(args, item)
            after, end = weight_of(args, min(following, args[COUNT] - 1)), where + 4 * group[layout.BLOCK]
            first = number * group[layout.BLOCK]
            while where < end and first < group[layout.OUTPUTS]:
                ahead = where + 4 * ITEM if where + 4 * ITEM < end else after
                do_part(group, first, where, ahead, memory)
                where, first = where + 4 * ITEM, first + ITEM
            item = following

    return body
