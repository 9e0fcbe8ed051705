"""CPU matmul by weights of 8 and 4 bits, in groups: whole numbers for few rows, tiles of bf16 for many."""

# Generated from nbs/numba_kernels/cpu/matmul/quantized.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT, OWN
from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.amx import make_pass, make_write_rows, tiles_begin, tiles_end, tiles_load
from minivllm_kernels.cpu.matmul.dots import halves, round_bytes, tile_dots, tile_rescaled, tile_spread, unpack_pairs
from minivllm_kernels.cpu.matmul.gemv import filled, jit, make_write_row, matmul_loop
from minivllm_kernels.cpu.matmul.layout import ITEM, SPAN, TILE, TILE_ROWS, prefetch_distance
from minivllm_kernels.cpu.matmul.packed import find_outputs, tile_vectors
from minivllm_kernels.cpu.simd import (
    claim,
    floats_at,
    fma,
    ints_at,
    largest,
    load,
    maximum,
    move,
    prefetch_rows,
    splat,
    tile_fma,
    tile_load,
    tile_store,
    tile_zeros,
    total,
)

__all__ = ["matmul", "matmul_by_tiles", "round_rows"]

"""Matmul by a quantized weight. `matmul` rounds rows to 8 bits, with a step for each group of inputs. The dot product of a group is exact,
and the groups are added in one order: its result for a row is bit-identical in any batch. `matmul_by_tiles` does not round them, and
its sums differ."""

ZERO, FULL, TINY = np.float32(0), np.float32(127), np.float32(1e-30)


def make_take_row(x_bits: int, group: int, zero: int, lanes: int) -> Any:
    """A function `(args, row, block, r)` that writes a row to place `r` of a block of rows, as bytes.

    After the bytes of all rows come three numbers per group and row: the step, `-zero` times the sum of the bytes (int32), and that
    sum times the step. A number that is not finite makes the step NaN."""
    G, L = group, lanes

    @jit
    def take_group(source, first, to, behind):
        top, wrong = splat(ZERO, L), splat(ZERO, L)
        for k in range(0, G, L):
            some = load(source, first + k, L)
            top = maximum(maximum(some, splat(ZERO, L) - some), top)
            wrong = fma(some, splat(ZERO, L), wrong)
        size = largest(top)
        inverse = FULL / size if size > TINY else ZERO
        sums = splat(ZERO, L)
        for k in range(0, G, L):
            sums = sums + round_bytes(to + k, load(source, first + k, L) * splat(inverse, L))
        numbers, whole, count = floats_at(behind, 32), ints_at(behind, 32), total(sums)
        step = (size / FULL if size > TINY else ZERO) + total(wrong)
        numbers[0], whole[TILE], numbers[2 * TILE] = step, np.int32(-zero * count), step * count

    @jit
    def take_row(args, row, block, r):
        x, inputs, padded = floats_at(args[layout.X], x_bits), args[layout.INPUTS], args[layout.PADDED]
        to, behind, whole = block + r * args[layout.ROW_BYTES], numbers_of(args, block) + 4 * r, inputs // G
        for g in range(whole):
            take_group(x, row * inputs + g * G, to + g * G, behind + g * NUMBERS * 4)
        if whole * G < padded:
            last = floats_at(to + padded, 32)
            for k in range(G):
                if whole * G + k < inputs:
                    move(last, k, x, row * inputs + whole * G + k)
                else:
                    last[k] = ZERO
            take_group(last, 0, to + whole * G, behind + whole * NUMBERS * 4)

    return take_row


NUMBERS = 3 * TILE
"""Numbers of 32 bits that a group of a block of rows has."""


@jit
def numbers_of(args, block):
    """Address of the numbers of a block's first group."""
    return block + TILE * args[layout.ROW_BYTES]


@jit
def block_of(args, rounded, row):
    """Address of the block that a row is in."""
    return rounded + row // TILE * args[layout.ROWS_BYTES]


def round_rows(x_bits: int, group: int, zero: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that rounds rows once for all threads. Work items are rows; the last one fills places behind it."""
    take_row = make_take_row(x_bits, group, zero, lanes)

    def body(args):
        while True:
            place = claim(args, NEXT, 1)
            if place >= args[COUNT]:
                break
            block = block_of(args, args[layout.ROUNDED], place)
            take_row(args, min(place, args[layout.ROWS] - 1), block, place % TILE)

    return body


(TAKE_X, TAKE_ORDER, TAKE_OUT, TAKE_INPUTS, TAKE_COLUMNS) = range(OWN, OWN + 5)
"""Arguments of `take_columns`: addresses of the rows, of the input (int64) of each column, and of the result; inputs and columns of a
row. The work items are rows."""


def take_columns(bits: int) -> Callable[[Any], None]:
    """Body of the kernel that brings the inputs of each row into the order of the columns. A column whose entry is the number of inputs
    has no input and becomes zero."""

    def body(args):
        x, out, order = floats_at(args[TAKE_X], bits), floats_at(args[TAKE_OUT], bits), ints_at(args[TAKE_ORDER], 64)
        inputs, columns = args[TAKE_INPUTS], args[TAKE_COLUMNS]
        while True:
            row = claim(args, NEXT, 1)
            if row >= args[COUNT]:
                break
            for k in range(columns):
                if order[k] < inputs:
                    out[row * columns + k] = x[row * inputs + order[k]]
                else:
                    out[row * columns + k] = 0

    return body


def make_steps(vectors: int, lanes: int, scale_bits: int, unit: int) -> Any:
    """A function that reads a vector of steps or lows."""
    V, L = vectors, lanes

    @jit
    def read(args, at):
        if scale_bits == 16:
            return halves(floats_at(args[layout.SCALES], 16), at, V, L, unit)
        return tile_load(floats_at(args[layout.SCALES], 32), at, 0, 1, V, L)

    return read


def make_tile(rows: int, form: tuple[int, int, int, int, int], unit: int, lanes: int, registers: int) -> Any:
    """A function for `rows` rows and the outputs of an item. `form`: see `matmul`."""
    BITS, CODED, PARTS, SCALE_BITS, G = form
    V, L, S = tile_vectors(rows, lanes, registers), lanes, min(SPAN, G)
    ROWS, SUMS, WORDS, read = rows, rows * V, BITS * S // 32, make_steps(V, lanes, SCALE_BITS, unit)
    LINES, (NEAR, ahead) = -(-V * lanes // 16), prefetch_distance()
    AHEAD = ahead // 4

    @jit
    def tile(args, item, mine, r, sums):
        """sums[i * ITEM + n] = row r + i . weight[item * ITEM + n]."""
        words, padded, groups = ints_at(args[layout.WEIGHT], 32), args[layout.PADDED], args[layout.PADDED] // G
        stride, shift, block = args[layout.ROW_BYTES] // 4, args[layout.SHIFT], block_of(args, mine, r)
        x, numbers, codes = ints_at(block, 32), floats_at(numbers_of(args, block), 32), ints_at(args[layout.CODES], 32)
        for n in range(0, ITEM, V * L):
            w, totals = item * (padded * BITS) + n, tile_zeros(SUMS, L)
            scale, at = item * ((groups - 1 >> shift) + 1) * PARTS * ITEM + n, r % TILE
            for g in range(groups):
                dots, first = tile_spread(numbers, at + TILE, 1, ROWS, V, L), r % TILE * stride + g * (G // 4)
                for k in range(first, first + G // 4, S // 4):
                    for line in range(WORDS):
                        prefetch_rows(words, w + line * ITEM + AHEAD, 16, LINES, NEAR)
                    dots = tile_dots(dots, x, k, stride, words, w, V, BITS, codes, CODED, unit, S)
                    w += WORDS * ITEM
                here = scale + (g >> shift) * PARTS * ITEM
                totals = tile_rescaled(totals, dots, numbers, at, 1, read(args, here))
                if PARTS == 2:
                    totals = tile_fma(totals, numbers, at + 2 * TILE, 1, read(args, here + ITEM))
                at += NUMBERS
            tile_store(sums, n, ITEM, V, totals)

    return tile


def matmul(
    bits: int,
    coded: int,
    parts: int,
    scale_bits: int,
    group: int,
    zero: int,
    x_bits: int,
    out_bits: int,
    unit: int,
    lanes: int,
    registers: int,
) -> Callable[[Any], None]:
    """Body of the kernel for vector registers. Arguments: see `layout.QuantizedMatmul`.

    Args:
        bits: of a stored weight; `coded`: 1 if it is a place in a table of 16 bytes.
        parts: 1 for steps alone, 2 for steps and lows, of `scale_bits`.
        group: inputs of a row that are rounded together.
        zero: the stored number minus the signed one.
        unit: see `layout.host_unit`.
    """
    take_row, form = make_take_row(x_bits, group, zero, lanes), (bits, coded, parts, scale_bits, group)
    tiles = [make_tile(n, form, unit, lanes, registers) for n in TILE_ROWS]

    @jit
    def take_rows(args, where):
        if args[layout.ROUNDED] != 0:
            return args[layout.ROUNDED]
        for r in range(filled(args[layout.ROWS])):
            take_row(args, min(r, args[layout.ROWS] - 1), where, r)
        return where

    return matmul_loop(find_outputs, take_rows, tiles, make_write_row(lanes, x_bits, out_bits))


def matmul_by_tiles(
    bits: int, coded: int, parts: int, scale_bits: int, group: int, zero: int, out_bits: int, unit: int
) -> Callable[[Any], None]:
    """Body of the kernel for the tile unit, for many rows of bf16. An item's weights are written out as bf16, some inputs at a time, for all
    rows. On bytes the sums would have to leave the tile unit after every group to be scaled, which takes longer than the matmul.

    Args:
        bits, coded, parts, scale_bits, group, zero, unit: see `matmul`.
        out_bits: of the results.
    """
    LINES, LINE, PANEL = SPAN * bits // 32, 4 * ITEM, layout.PANEL
    write_rows, read = make_write_rows(out_bits), make_steps(2, TILE, scale_bits, unit)
    one, two, one_more, two_more = (make_pass(n, pairs) for pairs in (LINES, 0) for n in (1, 2))

    @jit
    def unpack(args, item, first, end, panel):
        words, codes, padded = ints_at(args[layout.WEIGHT], 32), ints_at(args[layout.CODES], 32), args[layout.PADDED]
        scale = item * ((padded // group - 1 >> args[layout.SHIFT]) + 1) * parts * ITEM
        for k in range(first, end, SPAN):
            here = scale + (k // group >> args[layout.SHIFT]) * parts * ITEM
            steps = read(args, here)
            lows = read(args, here + ITEM) if parts == 2 else tile_zeros(2, TILE)
            at = item * (padded * bits) + k // SPAN * LINES * ITEM
            unpack_pairs(panel + (k - first) * 2 * ITEM, words, at, bits, codes, coded, zero, steps, lows)

    @jit
    def do_item(args, item, following, panel, sums):
        """`following`: the item whose weights are prefetched at the end."""
        inputs, rows, stride = args[layout.INPUTS], args[layout.ROWS], 2 * args[layout.INPUTS]
        for first in range(0, inputs, PANEL):
            end = min(first + PANEL, inputs)
            unpack(args, item, first, end, panel)
            next_item, k = (item, end) if end < inputs else (following, 0)
            ahead = args[layout.WEIGHT] + 4 * (next_item * (args[layout.PADDED] * bits) + k // SPAN * LINES * ITEM)
            for r in range(0, rows, 2 * TILE):
                left, x, to = min(rows - r, 2 * TILE), args[layout.X] + r * stride + 2 * first, sums + r * LINE
                tiles_begin(args[layout.CONFIGS] + 64 * left)
                if first > 0:
                    if left <= TILE:
                        tiles_load(to, LINE, 1)
                    else:
                        tiles_load(to, LINE, 2)
                steps = (end - first) // SPAN
                if left <= TILE:
                    if r == 0:
                        one(x, stride, panel, LINE, steps, to, ahead)
                    else:
                        one_more(x, stride, panel, LINE, steps, to, ahead)
                elif r == 0:
                    two(x, stride, panel, LINE, steps, to, ahead)
                else:
                    two_more(x, stride, panel, LINE, steps, to, ahead)
        write_rows(args, sums, 0, rows, item * ITEM)

    def body(args):
        panel = args[layout.SCRATCH] + claim(args, ENTERED, 1) * args[layout.SCRATCH_BYTES]
        item = claim(args, NEXT, 1)
        while item < args[COUNT]:
            following = claim(args, NEXT, 1)
            do_item(args, item, min(following, args[COUNT] - 1), panel, panel + 2 * PANEL * ITEM)
            item = following
        tiles_end()

    return body
