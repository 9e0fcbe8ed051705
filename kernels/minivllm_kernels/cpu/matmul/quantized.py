"""CPU matmul by int8 and int4 weights, and their dequantization."""

# Generated from nbs/numba_kernels/cpu/matmul/quantized.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT
from minivllm_kernels.cpu.matmul.bf16 import jit, make_give, tile_vectors
from minivllm_kernels.cpu.matmul.quantized_layout import (
    BIAS,
    BLOCK,
    FACTORS,
    FIRST,
    GROUP,
    INPUTS,
    OUT,
    OUTPUTS,
    PADDED,
    ROWS,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    STRIDE,
    WIDE,
    WORDS,
    X,
)
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

__all__ = ["multiply", "widen"]

"""Product of few rows with a quantized weight, and the weight written out for many rows.

Sums are float32, in an order that does not depend on the number of rows: a row's result is bit-identical in any batch.
"""

ZERO = np.float32(0)


def make_tile(rows: int, vectors: int, bits: int, lanes: int) -> Any:
    """A function for `rows` rows and `vectors * lanes` outputs at once."""
    V, L, SUMS, FIELDS, BITS, BYTES = vectors, lanes, rows * vectors, 32 // bits, bits, 4 * vectors * lanes

    @jit
    def tile(x, at, mean, padded, group, words, word, scales, scale, sums, to):
        """sums[to + r * BLOCK] = x[r] . outputs; x begins at `at`, its sums over the groups at `mean`."""
        w, totals, groups = word, tile_zeros(SUMS, L), (padded + group - 1) // group
        for g in range(groups):
            even, odd = tile_zeros(SUMS, L), tile_zeros(SUMS, L)
            for k in range(g * group, min(g * group + group, padded), 2 * FIELDS):
                prefetch(words, w + 16 * BLOCK, BYTES)
                prefetch(words, w + 17 * BLOCK, BYTES)
                even = tile_fields(even, x, at + k, padded, words, w, V, BITS)
                odd = tile_fields(odd, x, at + k + FIELDS, padded, words, w + BLOCK, V, BITS)
                w += 2 * BLOCK
            step = tile_load(scales, scale + 2 * g * BLOCK, 0, 1, V, L)
            low = tile_load(scales, scale + (2 * g + 1) * BLOCK, 0, 1, V, L)
            totals = tile_scaled(tile_scaled(totals, even, step), odd, step)
            totals = tile_fma(totals, x, mean + g, groups, low)
        tile_store(sums, to, BLOCK, V, totals)

    return tile


def multiply(bits: int, x_bits: int, lanes: int, registers: int) -> Callable[[Any], None]:
    """Body of the kernel for weights of `bits` and rows of `x_bits`. Arguments: `cpu_quantizing`."""
    L, SCALE_BITS = lanes, 16 if bits == 4 else 32
    V1, V2, V4, V8 = (tile_vectors(n, lanes, registers) for n in (1, 2, 4, 8))
    tile1, tile2, tile4, tile8 = (make_tile(n, v, bits, lanes) for n, v in ((1, V1), (2, V2), (4, V4), (8, V8)))

    @jit
    def take_row(args, x, source, mine, to, means, mean):
        """A row as float32, padded with zeros, divided as the fields want it; and its sum over each group."""
        inputs, padded, group, factors = args[INPUTS], args[PADDED], args[GROUP], floats_at(args[FACTORS], 32)
        whole = inputs // L * L
        for k in range(0, whole, L):
            store(mine, to + k, load(x, source + k, L))
        for k in range(whole, inputs):
            move(mine, to + k, x, source + k)
        for k in range(inputs, padded):
            mine[to + k] = ZERO
        for first in range(0, padded, group):
            sums = splat(ZERO, L)
            for k in range(first, min(first + group, padded), L):
                some = load(mine, to + k, L)
                sums = sums + some
                store(mine, to + k, some * load(factors, k % 16, L))
            means[mean + first // group] = total(sums)

    give = make_give(OUT, BIAS, OUTPUTS, x_bits, lanes)

    def body(args):
        memory = args[SCRATCH] + claim(args, ENTERED, 1) * args[SCRATCH_BYTES]
        x, words, scales = floats_at(args[X], x_bits), ints_at(args[WORDS], 32), floats_at(args[SCALES], SCALE_BITS)
        rows, padded, group = args[ROWS], args[PADDED], args[GROUP]
        groups, ready = (padded + group - 1) // group, False
        sums, mine = floats_at(memory, 32), floats_at(memory + 4 * 8 * BLOCK, 32)
        means = (rows + 7) // 8 * 8 * padded
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            if not ready:
                for r in range((rows + 7) // 8 * 8):
                    take_row(args, x, min(r, rows - 1) * args[INPUTS], mine, r * padded, mine, means + r * groups)
                ready = True
            word, scale = item * padded * bits, item * groups * 2 * BLOCK
            for r in range(0, rows, 8):
                left, at, mean = rows - r, r * padded, means + r * groups
                if left == 1:
                    for n in range(0, BLOCK, V1 * L):
                        tile1(mine, at, mean, padded, group, words, word + n, scales, scale + n, sums, n)
                elif left == 2:
                    for n in range(0, BLOCK, V2 * L):
                        tile2(mine, at, mean, padded, group, words, word + n, scales, scale + n, sums, n)
                elif left <= 4:
                    for n in range(0, BLOCK, V4 * L):
                        tile4(mine, at, mean, padded, group, words, word + n, scales, scale + n, sums, n)
                else:
                    for n in range(0, BLOCK, V8 * L):
                        tile8(mine, at, mean, padded, group, words, word + n, scales, scale + n, sums, n)
                for i in range(min(left, 8)):
                    give(args, floats_at(memory + 4 * i * BLOCK, 32), r + i, item * BLOCK)

    return body


def widen(bits: int, x_bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that writes out blocks of a weight as numbers of `x_bits`. Arguments: `cpu_quantizing`."""
    L, BITS, SCALE_BITS = lanes, bits, 16 if bits == 4 else 32

    @jit
    def write(args, item, k, n, words, at, step, low):
        """The fields of one vector of words: inputs from `k`, outputs from `n` of block `item`."""
        out, stride, first = floats_at(args[OUT], x_bits), args[STRIDE], item * BLOCK + n
        if x_bits == 32:
            store_fields(out, k * stride + first, stride, words, at, BITS, step, low)
        else:
            wide = args[WIDE]
            to = first // wide * wide * stride + first % wide * 2 + k * wide
            store_pairs(out, to, 2 * wide, words, at, BITS, step, low)

    def body(args):
        words, scales = ints_at(args[WORDS], 32), floats_at(args[SCALES], SCALE_BITS)
        padded, group = args[PADDED], args[GROUP]
        groups = (padded + group - 1) // group
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            word, scale = (args[FIRST] + item) * padded * bits, (args[FIRST] + item) * groups * 2 * BLOCK
            for g in range(groups):
                for n in range(0, BLOCK, L):
                    step = load(scales, scale + 2 * g * BLOCK + n, L)
                    low = load(scales, scale + (2 * g + 1) * BLOCK + n, L)
                    for k in range(g * group, min(g * group + group, padded), 32 // BITS):
                        write(args, item, k, n, words, word + k * bits + n, step, low)

    return body
