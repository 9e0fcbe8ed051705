"""CPU matmul by weights of 8 and 4 bits, in groups, with activations rounded to 8 bits."""

# Generated from nbs/numba_kernels/cpu/matmul/quantized.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT
from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.amx import tiles_begin, tiles_clear, tiles_end, tiles_multiply, tiles_store
from minivllm_kernels.cpu.matmul.dots import halves, round_bytes, tile_dots, tile_rescaled, tile_spread, unpack_bytes
from minivllm_kernels.cpu.matmul.gemv import filled, jit, make_write_row, matmul_loop
from minivllm_kernels.cpu.matmul.layout import ITEM, SPAN, TILE, TILE_ROWS
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
    prefetch,
    splat,
    store,
    tile_fma,
    tile_load,
    tile_store,
    tile_zeros,
    total,
)

__all__ = ["matmul", "matmul_by_tiles", "round_rows"]

"""Matmul by a quantized weight, with rows rounded to 8 bits, a step for each group of inputs. The dot product of a group is exact,
and the groups are added in one order: a row's result is bit-identical in any batch, and by any of these kernels."""

ZERO, FULL, TINY = np.float32(0), np.float32(127), np.float32(1e-30)


def make_take_row(x_bits: int, group: int, zero: int, lanes: int) -> Any:
    """A function `(args, row, to)` that writes a row to an address: bytes, then for each group its step, `-zero` times its sum of
    bytes (int32), and its sum. What is not finite makes the step NaN."""
    G, L = group, lanes

    @jit
    def take_group(source, first, to, g, groups, behind):
        top, wrong = splat(ZERO, L), splat(ZERO, L)
        for k in range(0, G, L):
            some = load(source, first + k, L)
            top = maximum(maximum(some, splat(ZERO, L) - some), top)
            wrong = fma(some, splat(ZERO, L), wrong)
        size = largest(top)
        inverse = FULL / size if size > TINY else ZERO
        sums = splat(ZERO, L)
        for k in range(0, G, L):
            sums = sums + round_bytes(to + g * G + k, load(source, first + k, L) * splat(inverse, L))
        numbers, whole, count = floats_at(behind, 32), ints_at(behind, 32), total(sums)
        step = (size / FULL if size > TINY else ZERO) + total(wrong)
        numbers[g], whole[groups + g], numbers[2 * groups + g] = step, np.int32(-zero * count), step * count

    @jit
    def take_row(args, row, to):
        x, inputs, padded = floats_at(args[layout.X], x_bits), args[layout.INPUTS], args[layout.PADDED]
        behind, groups, whole = to + padded, padded // G, inputs // G
        for g in range(whole):
            take_group(x, row * inputs + g * G, to, g, groups, behind)
        if whole < groups:
            last = floats_at(behind + 12 * groups, 32)
            for k in range(G):
                if whole * G + k < inputs:
                    move(last, k, x, row * inputs + whole * G + k)
                else:
                    last[k] = ZERO
            take_group(last, 0, to, whole, groups, behind)

    return take_row


def round_rows(x_bits: int, group: int, zero: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that rounds rows once for all threads. Work items are rows; the last one fills places behind it."""
    take_row = make_take_row(x_bits, group, zero, lanes)

    def body(args):
        while True:
            place = claim(args, NEXT, 1)
            if place >= args[COUNT]:
                break
            take_row(args, min(place, args[layout.ROWS] - 1), args[layout.ROUNDED] + place * args[layout.ROW_BYTES])

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
    V, L, WORDS = tile_vectors(rows, lanes, registers), lanes, form[0] * SPAN // 32
    ROWS, SUMS, BYTES, read = rows, rows * V, 4 * V * lanes, make_steps(V, lanes, SCALE_BITS, unit)

    @jit
    def tile(args, item, mine, r, sums):
        """sums[i * ITEM + n] = row r + i . weight[item * ITEM + n]."""
        words, padded, groups = ints_at(args[layout.WEIGHT], 32), args[layout.PADDED], args[layout.PADDED] // G
        stride, shift = args[layout.ROW_BYTES] // 4, args[layout.SHIFT]
        x, numbers, codes = ints_at(mine, 32), floats_at(mine, 32), ints_at(args[layout.CODES], 32)
        at, behind = r * stride, r * stride + padded // 4
        for n in range(0, ITEM, V * L):
            w, totals = item * (padded * BITS) + n, tile_zeros(SUMS, L)
            scale = item * ((groups - 1 >> shift) + 1) * PARTS * ITEM + n
            for g in range(groups):
                dots = tile_spread(numbers, behind + groups + g, stride, ROWS, V, L)
                for k in range(at + g * (G // 4), at + (g + 1) * (G // 4), SPAN // 4):
                    for line in range(WORDS):
                        prefetch(words, w + (16 + line) * ITEM, BYTES)
                    dots = tile_dots(dots, x, k, stride, words, w, V, BITS, codes, CODED, unit)
                    w += WORDS * ITEM
                here = scale + (g >> shift) * PARTS * ITEM
                totals = tile_rescaled(totals, dots, numbers, behind + g, stride, read(args, here))
                if PARTS == 2:
                    totals = tile_fma(totals, numbers, behind + 2 * groups + g, stride, read(args, here + ITEM))
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
        zero: what a stored number is more than the signed one.
        unit: see `layout.host_unit`.
    """
    take_row, form = make_take_row(x_bits, group, zero, lanes), (bits, coded, parts, scale_bits, group)
    tiles = [make_tile(n, form, unit, lanes, registers) for n in TILE_ROWS]

    @jit
    def take_rows(args, where):
        if args[layout.ROUNDED] != 0:
            return args[layout.ROUNDED]
        for r in range(filled(args[layout.ROWS])):
            take_row(args, min(r, args[layout.ROWS] - 1), where + r * args[layout.ROW_BYTES])
        return where

    return matmul_loop(find_outputs, take_rows, tiles, make_write_row(lanes, x_bits, out_bits))


def make_block(count: int, parts: int, group: int) -> Any:
    """A function that multiplies `count` tiles of rows with a group of an item's weights, and adds to the sums."""
    G, WIDTH, LINE = group, min(group, 4 * TILE), 4 * ITEM

    @jit
    def block(rounded, stride, padded, g, weight, dots, sums, step, low):
        tiles_clear(count)
        for k in range(0, G, WIDTH):
            tiles_multiply(rounded + g * G + k, stride, weight + k * ITEM, LINE, count, 1, 0, 0)
        tiles_store(dots, LINE, count)
        numbers, wide, groups = floats_at(rounded + padded, 32), stride // 4, padded // G
        some, whole = floats_at(sums, 32), floats_at(dots, 32)
        for r in range(0, count * TILE, 4):
            tile, at = tile_load(some, r * ITEM, ITEM, 4, 2, TILE), r * wide + g
            tile = tile_rescaled(tile, tile_load(whole, r * ITEM, ITEM, 4, 2, TILE), numbers, at, wide, step)
            if parts == 2:
                tile = tile_fma(tile, numbers, at + 2 * groups, wide, low)
            tile_store(some, r * ITEM, ITEM, 2, tile)

    return block


def matmul_by_tiles(
    bits: int, coded: int, parts: int, scale_bits: int, group: int, zero: int, x_bits: int, out_bits: int, unit: int
) -> Callable[[Any], None]:
    """Body of the kernel for the tile unit, for rows that are rounded already. Otherwise as `matmul`."""
    G, LINES, LINE = group, group * bits // 32, 4 * ITEM
    write_row, read = make_write_row(TILE, x_bits, out_bits), make_steps(2, TILE, scale_bits, unit)
    one, two = make_block(1, parts, group), make_block(2, parts, group)

    @jit
    def do_item(args, item, sums, dots, weight):
        words, padded, rows = ints_at(args[layout.WEIGHT], 32), args[layout.PADDED], args[layout.ROWS]
        groups, stride, shift = padded // G, args[layout.ROW_BYTES], args[layout.SHIFT]
        rounded, codes, clear = args[layout.ROUNDED], ints_at(args[layout.CODES], 32), floats_at(sums, 32)
        for i in range(0, (rows + TILE - 1) // TILE * TILE * ITEM, TILE):
            store(clear, i, splat(ZERO, TILE))
        scale = item * ((groups - 1 >> shift) + 1) * parts * ITEM
        for g in range(groups):
            first, here = item * (padded * bits) + g * LINES * ITEM, scale + (g >> shift) * parts * ITEM
            unpack_bytes(weight, words, first, LINES, bits, codes, coded, zero, TILE)
            for line in range(LINES):
                prefetch(words, first + (LINES + line) * ITEM, LINE)
            step, low = read(args, here), read(args, here + (parts - 1) * ITEM)
            for r in range(0, rows, 2 * TILE):
                place, to = rounded + r * stride, sums + r * LINE
                if rows - r <= TILE:
                    one(place, stride, padded, g, weight, dots, to, step, low)
                else:
                    two(place, stride, padded, g, weight, dots, to, step, low)
        first = item * ITEM
        for r in range(rows):
            write_row(args, floats_at(sums + r * LINE, 32), r, first, min(args[layout.OUTPUTS] - first, ITEM))

    def body(args):
        dots = args[layout.SCRATCH] + claim(args, ENTERED, 1) * args[layout.SCRATCH_BYTES]
        weight = dots + 8 * TILE * ITEM
        tiles_begin(args[layout.CONFIGS])
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            do_item(args, item, weight + G * ITEM, dots, weight)
        tiles_end()

    return body
