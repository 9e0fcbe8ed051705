"""CPU matmul of one or a few rows by a row-major weight."""

# Generated from nbs/numba_kernels/cpu/matmul/gemv.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

from numba import njit

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT
from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.layout import TILE_ROWS, row_stride, tile_outputs
from minivllm_kernels.cpu.program import Program
from minivllm_kernels.cpu.simd import (
    as_bf16,
    claim,
    floats_at,
    ints_at,
    load,
    load_halves,
    load_unzipped,
    prefetch_rows,
    store,
    tile_load,
    tile_outer,
    tile_totals,
    tile_zeros,
)

__all__ = ["WIDTH", "filled", "group_of", "jit", "make_take_rows", "make_write_row", "matmul", "matmul_loop"]

"""The loop that the CPU's matmuls share, and the matmul by a row-major weight.

Each weight is read once. Sums are float32, in an order that does not depend on the number of rows: a row's result is
bit-identical in any batch.
"""

jit = njit(error_model="numpy")
WIDTH = Program.WIDTH


@jit
def filled(rows):
    """How many row places are read for this many rows: tiles have 1, 2, 4 or 8."""
    return rows if rows <= 2 else 4 if rows <= 4 else (rows + 7) // 8 * 8


@jit
def group_of(args, item):
    """The arguments of the group that an item belongs to, the item's number in it, and the first item of the next group."""
    if args[layout.GROUPS] == 0:
        return args, item, args[COUNT]
    group, number = divmod(item, args[layout.ITEMS])
    return ints_at(args[layout.GROUPS] + 8 * WIDTH * group, 64), number, item - number + args[layout.ITEMS]


def make_write_row(lanes: int, bits: int, out_bits: int = 0) -> Any:
    """A function that writes one row of an item's sums: with the bias, rounded to `bits`. ``out_bits``: of the memory that it
    writes to, `bits` if 0."""
    out_bits = out_bits or bits
    write_many, write_one = (_make_write(n, bits < out_bits) for n in (lanes, 1))

    @jit
    def write_row(args, sums, row, begin, count):
        out, bias, to = floats_at(args[layout.OUT], out_bits), args[layout.BIAS], row * args[layout.OUTPUTS] + begin
        whole = count // lanes * lanes
        for i in range(0, whole, lanes):
            write_many(out, to + i, sums, i, bias, begin + i)
        for i in range(whole, count):
            write_one(out, to + i, sums, i, bias, begin + i)

    return write_row


def _make_write(lanes: int, rounded: bool) -> Any:
    @jit
    def write(out, to, sums, i, bias, n):
        value = load(sums, i, lanes)
        if bias != 0:
            value = value + load(floats_at(bias, 32), n, lanes)
        store(out, to, as_bf16(value) if rounded else value)

    return write


def matmul_loop(find_outputs: Any, take_rows: Any, tiles: Any, write_row: Any, margin: int = 0) -> Any:
    """Body of a matmul kernel: each thread claims items until none is left.

    Args:
        find_outputs: `(args, item)` to the item's first output, its end, and the floats from one row of sums to the next.
        take_rows: `(args, where)` prepares the rows at an address in the thread's memory, or finds them, and gives what tiles need.
        tiles: for 1, 2, 4 and 8 rows, `(args, item, mine, r, sums)` computes an item for the rows from `r` on.
        write_row: from `make_write_row`.
        margin: floats before an item's sums that a tile may write, too.
    """
    tile1, tile2, tile4, tile8 = tiles

    @jit
    def do_item(args, item, mine, memory):
        rows, (begin, end, stride), sums = args[layout.ROWS], find_outputs(args, item), floats_at(memory, 32)
        for r in range(0, rows, 8):
            left = rows - r
            if left == 1:
                tile1(args, item, mine, r, sums)
            elif left == 2:
                tile2(args, item, mine, r, sums)
            elif left <= 4:
                tile4(args, item, mine, r, sums)
            else:
                tile8(args, item, mine, r, sums)
            for i in range(min(left, 8)):
                write_row(args, floats_at(memory + 4 * (i * stride + margin), 32), r + i, begin, end - begin)

    def body(args):
        memory = args[layout.SCRATCH] + claim(args, ENTERED, 1) * args[layout.SCRATCH_BYTES]
        item = claim(args, NEXT, 1)
        while item < args[COUNT]:
            group, number, after = group_of(args, item)
            mine = take_rows(group, memory + 4 * 8 * find_outputs(group, number)[2])
            while item < after:
                do_item(group, group_of(args, item)[1], mine, memory)
                item = claim(args, NEXT, 1)

    return body


def make_take_rows(take_row: Any) -> Any:
    """For `matmul_loop`: each thread has a copy of all rows as float32. `take_row`: `(args, row, mine, r)` writes a row to place `r`."""

    @jit
    def take_rows(args, where):
        mine, rows = floats_at(where, 32), args[layout.ROWS]
        for r in range(filled(rows)):
            take_row(args, min(r, rows - 1), mine, r)
        return mine

    return take_rows


MARGIN = row_stride(0) // 2


@jit
def _find_outputs(args, item):
    chunk = args[layout.CHUNK]
    return item * chunk, min(item * chunk + chunk, args[layout.OUTPUTS]), chunk + 2 * MARGIN


def make_tile(rows: int, outputs: int, bits: int, lanes: int) -> Any:
    """A function for `rows` rows and the outputs of an item, `outputs` at once."""
    L, N, SUMS = lanes, outputs, rows * outputs

    @jit
    def tile(args, item, mine, r, sums):
        """sums[i * stride + n] = mine[r + i] . weight[n]."""
        weight, inputs, last = floats_at(args[layout.WEIGHT], bits), args[layout.INPUTS], args[layout.OUTPUTS] - N
        begin, end, stride = _find_outputs(args, item)
        at = r * inputs
        for n in range(begin, end, N):
            first = min(n, last)
            w, products = first * inputs, tile_zeros(SUMS, L)
            if bits == 16:
                for k in range(0, inputs, 2 * L):
                    prefetch_rows(weight, w + N * inputs + k, inputs, N, 3)
                    even = load_halves(weight, w + k, inputs, N, 0, L)
                    odd = load_halves(weight, w + k, inputs, N, 1, L)
                    products = tile_outer(products, tile_load(mine, at + k, inputs, rows, 1, L), even)
                    products = tile_outer(products, tile_load(mine, at + k + L, inputs, rows, 1, L), odd)
            else:
                for k in range(0, inputs, L):
                    prefetch_rows(weight, w + N * inputs + k, inputs, N, 3)
                    some = tile_load(weight, w + k, inputs, N, 1, L)
                    products = tile_outer(products, tile_load(mine, at + k, inputs, rows, 1, L), some)
            tile_totals(sums, first - begin + MARGIN, stride, N, products)

    return tile


def matmul(bits: int, lanes: int, registers: int) -> Callable[[Any], None]:
    """Body of the kernel for weights and rows of `bits` (32 or 16). Arguments: see `layout.RowMajorMatmul`."""
    L, STEP = lanes, 2 * lanes if bits == 16 else lanes
    tiles = [make_tile(n, tile_outputs(n, registers), bits, lanes) for n in TILE_ROWS]

    @jit
    def take_row(args, row, mine, r):
        """A row as float32, in the order in which the weights will come."""
        x, inputs = floats_at(args[layout.X], bits), args[layout.INPUTS]
        for k in range(0, inputs, STEP):
            if bits == 16:
                even, odd = load_unzipped(x, row * inputs + k, 2, L)
                store(mine, r * inputs + k, even)
                store(mine, r * inputs + k + L, odd)
            else:
                store(mine, r * inputs + k, load(x, row * inputs + k, L))

    return matmul_loop(_find_outputs, make_take_rows(take_row), tiles, make_write_row(lanes, bits), MARGIN)
