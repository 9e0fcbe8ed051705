"""CPU matmul of a few rows by a packed bf16 weight."""

# Generated from nbs/numba_kernels/cpu/matmul/bf16.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

from numba import njit

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT
from minivllm_kernels.cpu.matmul.layout import (
    BIAS,
    BLOCK,
    INPUTS,
    ITEM,
    OUT,
    OUTPUTS,
    PADDED,
    ROWS,
    SCRATCH,
    SCRATCH_BYTES,
    WEIGHT,
    X,
)
from minivllm_kernels.cpu.simd import (
    as_bf16,
    claim,
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

__all__ = ["jit", "make_give", "make_tile", "multiply", "tile_vectors"]

"""Product of few bf16 rows with a weight in oneDNN's order: x [rows, inputs] times weights, each read once.

Sums are float32, in an order that does not depend on the number of rows: a row's result is bit-identical in any batch.
"""

jit = njit(error_model="numpy")


def tile_vectors(rows: int, lanes: int, registers: int) -> int:
    """Vectors of outputs in a tile of `rows` rows: even and odd sums fill half the registers."""
    return max(1, min(ITEM // lanes, registers // 4 // rows))


def make_tile(rows: int, vectors: int, lanes: int) -> Any:
    """A function for `rows` rows and `vectors * lanes` outputs at once."""
    V, L, SUMS, STEP, BYTES = vectors, lanes, rows * vectors, 2 * lanes, 4 * vectors * lanes

    @jit
    def tile(x, at, inputs, weight, start, stride, sums, to):
        """sums[to + r * ITEM + n] = x[r] . outputs n; x begins at `at`, the outputs' first pair of inputs at `w`."""
        w, even, odd = start, tile_zeros(SUMS, L), tile_zeros(SUMS, L)
        for k in range(0, inputs, 2):
            prefetch(weight, w + 16 * stride, BYTES)
            even = tile_fma(even, x, at + k, inputs, load_halves(weight, w, STEP, V, 0, L))
            odd = tile_fma(odd, x, at + k + 1, inputs, load_halves(weight, w, STEP, V, 1, L))
            w += stride
        tile_store(sums, to, ITEM, V, tile_outer(even, odd, (splat(1.0, L),)))

    return tile


def make_give(out_at: int, bias_at: int, outputs_at: int, bits: int, lanes: int, out_bits: int = 0) -> Any:
    """A function that writes one row of an item's sums with the bias, rounded to `bits`; the first three are places among the arguments.
    ``out_bits``: of what they are written to, `bits` if 0."""
    out_bits = out_bits or bits
    put_many, put_one = (_make_put(n, bits < out_bits) for n in (lanes, 1))

    @jit
    def give(args, sums, row, first):
        out, bias, outputs = floats_at(args[out_at], out_bits), args[bias_at], args[outputs_at]
        to, n = row * outputs + first, min(outputs - first, ITEM)
        whole = n // lanes * lanes
        for i in range(0, whole, lanes):
            put_many(out, to + i, sums, i, bias, first + i)
        for i in range(whole, n):
            put_one(out, to + i, sums, i, bias, first + i)

    return give


def _make_put(lanes: int, rounded: bool) -> Any:
    @jit
    def put(out, to, sums, i, bias, at):
        value = load(sums, i, lanes)
        if bias != 0:
            value = value + load(floats_at(bias, 32), at, lanes)
        store(out, to, as_bf16(value) if rounded else value)

    return put


def multiply(out_bits: int, lanes: int, registers: int) -> Callable[[Any], None]:
    """Body of the kernel. Arguments: `cpu_packing`. ``out_bits``: of the results, which are rounded to bf16."""
    L = lanes
    V1, V2, V4, V8 = (tile_vectors(n, lanes, registers) for n in (1, 2, 4, 8))
    tile1, tile2, tile4, tile8 = (make_tile(n, v, lanes) for n, v in ((1, V1), (2, V2), (4, V4), (8, V8)))

    give = make_give(OUT, BIAS, OUTPUTS, 16, lanes, out_bits)

    def body(args):
        memory = args[SCRATCH] + claim(args, ENTERED, 1) * args[SCRATCH_BYTES]
        x, weight = floats_at(args[X], 16), floats_at(args[WEIGHT], 16)
        rows, inputs, block = args[ROWS], args[INPUTS], args[BLOCK]
        sums, mine = floats_at(memory, 32), floats_at(memory + 4 * 8 * ITEM, 32)
        ready = False
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            if not ready:
                for r in range((rows + 7) // 8 * 8):
                    for k in range(0, inputs, L):
                        store(mine, r * inputs + k, load(x, min(r, rows - 1) * inputs + k, L))
                ready = True
            first = item * ITEM
            w, stride = first // block * block * args[PADDED] + first % block * 2, 2 * block
            for r in range(0, rows, 8):
                left, at = rows - r, r * inputs
                if left == 1:
                    for n in range(0, ITEM, V1 * L):
                        tile1(mine, at, inputs, weight, w + 2 * n, stride, sums, n)
                elif left == 2:
                    for n in range(0, ITEM, V2 * L):
                        tile2(mine, at, inputs, weight, w + 2 * n, stride, sums, n)
                elif left <= 4:
                    for n in range(0, ITEM, V4 * L):
                        tile4(mine, at, inputs, weight, w + 2 * n, stride, sums, n)
                else:
                    for n in range(0, ITEM, V8 * L):
                        tile8(mine, at, inputs, weight, w + 2 * n, stride, sums, n)
                for i in range(min(left, 8)):
                    give(args, floats_at(memory + 4 * i * ITEM, 32), r + i, first)

    return body
