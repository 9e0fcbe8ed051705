"""CPU matmul by int8 and int4 weights, and their dequantization."""

# Generated from nbs/numba_kernels/cpu/matmul/quantized.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, NEXT
from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.gemv import jit, make_write_row, matmul_loop
from minivllm_kernels.cpu.matmul.layout import ITEM, SCALE_BITS, TILE_ROWS
from minivllm_kernels.cpu.matmul.packed import find_outputs, tile_vectors
from minivllm_kernels.cpu.simd import (
    claim,
    floats_at,
    ints_at,
    load,
    move,
    prefetch,
    splat,
    store,
    store_fields,
    store_pairs,
    tile_fields,
    tile_fma,
    tile_load,
    tile_scaled,
    tile_store,
    tile_zeros,
    total,
)

__all__ = ["dequantize", "matmul"]

"""Matmul of a few rows by a quantized weight, and the weight written out for many rows. Each weight is read once."""

ZERO = np.float32(0)


def make_tile(rows: int, vectors: int, bits: int, lanes: int) -> Any:
    """A function for `rows` rows and the outputs of an item, `vectors * lanes` at once."""
    V, L, SUMS, FIELDS, BITS, BYTES = vectors, lanes, rows * vectors, 32 // bits, bits, 4 * vectors * lanes
    BITS_OF_SCALE = SCALE_BITS[bits]

    @jit
    def tile(args, item, mine, r, sums):
        """sums[i * ITEM + n] = mine[r + i] . weight[item * ITEM + n]. The rows' sums over the groups lie behind the rows."""
        words, scales = ints_at(args[layout.WEIGHT], 32), floats_at(args[layout.SCALES], BITS_OF_SCALE)
        padded, group = args[layout.PADDED], args[layout.GROUP]
        groups, at = (padded + group - 1) // group, r * padded
        mean = (args[layout.ROWS] + 7) // 8 * 8 * padded + r * groups
        for n in range(0, ITEM, V * L):
            w, scale, totals = item * padded * BITS + n, item * groups * 2 * ITEM + n, tile_zeros(SUMS, L)
            for g in range(groups):
                even, odd = tile_zeros(SUMS, L), tile_zeros(SUMS, L)
                for k in range(g * group, min(g * group + group, padded), 2 * FIELDS):
                    prefetch(words, w + 16 * ITEM, BYTES)
                    prefetch(words, w + 17 * ITEM, BYTES)
                    even = tile_fields(even, mine, at + k, padded, words, w, V, BITS)
                    odd = tile_fields(odd, mine, at + k + FIELDS, padded, words, w + ITEM, V, BITS)
                    w += 2 * ITEM
                step = tile_load(scales, scale + 2 * g * ITEM, 0, 1, V, L)
                low = tile_load(scales, scale + (2 * g + 1) * ITEM, 0, 1, V, L)
                totals = tile_scaled(tile_scaled(totals, even, step), odd, step)
                totals = tile_fma(totals, mine, mean + g, groups, low)
            tile_store(sums, n, ITEM, V, totals)

    return tile


def matmul(bits: int, x_bits: int, lanes: int, registers: int) -> Callable[[Any], None]:
    """Body of the kernel for weights of `bits` and rows of `x_bits`. Arguments: see `layout.QuantizedMatmul`."""
    L = lanes
    tiles = [make_tile(n, tile_vectors(n, lanes, registers), bits, lanes) for n in TILE_ROWS]

    @jit
    def take_row(args, row, mine, r):
        """A row as float32, padded with zeros, times the factors of the fields; and its sum over each group."""
        x, factors = floats_at(args[layout.X], x_bits), floats_at(args[layout.FACTORS], 32)
        inputs, padded, group = args[layout.INPUTS], args[layout.PADDED], args[layout.GROUP]
        groups, source, to = (padded + group - 1) // group, row * inputs, r * padded
        mean, whole = (args[layout.ROWS] + 7) // 8 * 8 * padded + r * groups, inputs // L * L
        for k in range(0, whole, L):
            store(mine, to + k, load(x, source + k, L))
        for k in range(whole, inputs):
            move(mine, to + k, x, source + k)
        for k in range(inputs, padded):
            mine[to + k] = ZERO
        for g in range(groups):
            sums = splat(ZERO, L)
            for k in range(g * group, min(g * group + group, padded), L):
                some = load(mine, to + k, L)
                sums = sums + some
                store(mine, to + k, some * load(factors, k % 16, L))
            mine[mean + g] = total(sums)

    return matmul_loop(find_outputs, take_row, tiles, make_write_row(lanes, x_bits))


def dequantize(bits: int, x_bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that writes blocks of a weight as numbers of `x_bits`. Arguments: see `layout.QuantizedMatmul`."""
    L, BITS, BITS_OF_SCALE = lanes, bits, SCALE_BITS[bits]

    @jit
    def write(args, item, k, n, words, at, step, low):
        """The fields of one vector of words: inputs from `k`, outputs from `n` of block `item`."""
        out, stride, first = floats_at(args[layout.OUT], x_bits), args[layout.STRIDE], item * ITEM + n
        if x_bits == 32:
            store_fields(out, k * stride + first, stride, words, at, BITS, step, low)
        else:
            wide = args[layout.WIDE]
            to = first // wide * wide * stride + first % wide * 2 + k * wide
            store_pairs(out, to, 2 * wide, words, at, BITS, step, low)

    def body(args):
        words, scales = ints_at(args[layout.WEIGHT], 32), floats_at(args[layout.SCALES], BITS_OF_SCALE)
        padded, group = args[layout.PADDED], args[layout.GROUP]
        groups = (padded + group - 1) // group
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            word, scale = (args[layout.FIRST] + item) * padded * BITS, (args[layout.FIRST] + item) * groups * 2 * ITEM
            for g in range(groups):
                for n in range(0, ITEM, L):
                    step = load(scales, scale + 2 * g * ITEM + n, L)
                    low = load(scales, scale + (2 * g + 1) * ITEM + n, L)
                    for k in range(g * group, min(g * group + group, padded), 32 // BITS):
                        write(args, item, k, n, words, word + k * BITS + n, step, low)

    return body
