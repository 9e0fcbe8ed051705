"""CPU matmul of one or a few rows by a row-major weight."""

# Generated from nbs/numba_kernels/cpu/matmul/gemv.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

from numba import njit

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT
from minivllm_kernels.cpu.matmul.plain import (
    BIAS,
    CHUNK,
    INPUTS,
    OUT,
    OUTPUTS,
    ROWS,
    SCALES,
    SCRATCH,
    SCRATCH_BYTES,
    TILES,
    WEIGHT,
    X,
    row_stride,
    tile_outputs,
)
from minivllm_kernels.cpu.simd import (
    claim,
    floats_at,
    load,
    load_halves,
    load_unzipped,
    move,
    prefetch_rows,
    store,
    tile_load,
    tile_outer,
    tile_totals,
    tile_zeros,
)

__all__ = ["multiply"]

"""Matrix products for few rows, at the speed of memory: x [rows, K] times weights [N, K], each read once.

Weights are bf16, float32, or int8 with one scale a row. Sums are float32, in an order that does not depend on the number
of rows: a row's result is bit-identical in any batch.
"""

jit = njit(error_model="numpy")


def make_tile(rows: int, outputs: int, w_bits: int, lanes: int) -> Any:
    """A function for `rows` rows and `outputs` outputs at once."""
    L, SUMS = lanes, rows * outputs

    @jit
    def tile(x, at, weight, first, inputs, sums, to, stride):
        """sums[to + r * stride + n] = x[r] . weight[first + n]; x begins at `at`."""
        products = tile_zeros(SUMS, L)
        w = first * inputs
        if w_bits == 16:
            for k in range(0, inputs, 2 * L):
                prefetch_rows(weight, w + outputs * inputs + k, inputs, outputs)
                even, odd = (
                    load_halves(weight, w + k, inputs, outputs, 0, L),
                    load_halves(weight, w + k, inputs, outputs, 1, L),
                )
                products = tile_outer(products, tile_load(x, at + k, inputs, rows, 1, L), even)
                products = tile_outer(products, tile_load(x, at + k + L, inputs, rows, 1, L), odd)
        else:
            for k in range(0, inputs, L):
                prefetch_rows(weight, w + outputs * inputs + k, inputs, outputs)
                some = tile_load(weight, w + k, inputs, outputs, 1, L)
                products = tile_outer(products, tile_load(x, at + k, inputs, rows, 1, L), some)
        tile_totals(sums, to, stride, outputs, products)

    return tile


def multiply(w_bits: int, x_bits: int, lanes: int, registers: int) -> Callable[[Any], None]:
    """Body of the kernel for weights of `w_bits` (32, 16 or 8) and rows of `x_bits`. Arguments: `cpu_products`."""
    L, STEP = lanes, 2 * lanes if w_bits == 16 else lanes
    N1, N2, N4, N8 = (tile_outputs(n, registers) for n in TILES)
    tile1, tile2, tile4, tile8 = (make_tile(n, tile_outputs(n, registers), w_bits, lanes) for n in TILES)
    EXTRA = row_stride(0) // 2

    @jit
    def take_row(x, at, inputs, row, to):
        """A row as float32, in the order in which the weights will come."""
        for k in range(0, inputs, STEP):
            if w_bits == 16:
                even, odd = load_unzipped(x, at + k, 2, L)
                store(row, to + k, even)
                store(row, to + k + L, odd)
            else:
                store(row, to + k, load(x, at + k, L))

    @jit
    def give(args, sums, row, begin, end, stride):
        """One row of sums, scaled, with the bias, rounded."""
        out, bias, scales = floats_at(args[OUT], x_bits), floats_at(args[BIAS], 32), floats_at(args[SCALES], 32)
        to, whole = row * args[OUTPUTS], begin + (end - begin) // L * L
        for n in range(begin, whole, L):
            value = load(sums, n - begin, L)
            if args[SCALES] != 0:
                value = value * load(scales, n, L)
            if args[BIAS] != 0:
                value = value + load(bias, n, L)
            store(out, to + n, value)
        for n in range(whole, end):
            if args[SCALES] != 0:
                sums[n - begin] *= scales[n]
            if args[BIAS] != 0:
                sums[n - begin] += bias[n]
            move(out, to + n, sums, n - begin)

    def body(args):
        memory = args[SCRATCH] + claim(args, ENTERED, 1) * args[SCRATCH_BYTES]
        x, weight = floats_at(args[X], x_bits), floats_at(args[WEIGHT], w_bits)
        rows, inputs, outputs, chunk = args[ROWS], args[INPUTS], args[OUTPUTS], args[CHUNK]
        stride = chunk + 2 * EXTRA
        sums, mine = floats_at(memory, 32), floats_at(memory + 4 * 8 * stride, 32)
        ready = False
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            if not ready:
                for r in range((rows + 7) // 8 * 8):
                    take_row(x, min(r, rows - 1) * inputs, inputs, mine, r * inputs)
                ready = True
            begin, end = item * chunk, min(item * chunk + chunk, outputs)
            for r in range(0, rows, 8):
                left = rows - r
                n = begin
                while n < end:
                    if left == 1:
                        first = min(n, outputs - N1)
                        tile1(mine, r * inputs, weight, first, inputs, sums, first - begin + EXTRA, stride)
                        n += N1
                    elif left == 2:
                        first = min(n, outputs - N2)
                        tile2(mine, r * inputs, weight, first, inputs, sums, first - begin + EXTRA, stride)
                        n += N2
                    elif left <= 4:
                        first = min(n, outputs - N4)
                        tile4(mine, r * inputs, weight, first, inputs, sums, first - begin + EXTRA, stride)
                        n += N4
                    else:
                        first = min(n, outputs - N8)
                        tile8(mine, r * inputs, weight, first, inputs, sums, first - begin + EXTRA, stride)
                        n += N8
                for i in range(min(left, 8)):
                    give(args, floats_at(memory + 4 * (i * stride + EXTRA), 32), r + i, begin, end, stride)

    return body
