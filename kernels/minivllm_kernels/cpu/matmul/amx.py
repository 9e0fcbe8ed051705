"""AMX tile matmul primitives: load, multiply, store 16 x 16 tiles of bf16."""

# Generated from nbs/numba_kernels/cpu/matmul/amx.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT
from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.gemv import group_of, jit, make_write_row
from minivllm_kernels.cpu.matmul.layout import ITEM, TILE
from minivllm_kernels.cpu.simd import (
    I8,
    I64,
    Const,
    Int,
    ask_for,
    call_llvm,
    claim,
    floats_at,
    load,
    prefetch,
    primitive,
    store,
)

__all__ = [
    "make_pass", "make_write_rows", "matmul", "move_sums", "tiles_begin", "tiles_clear", "tiles_end",
    "tiles_load", "tiles_multiply", "tiles_store",
]  # fmt: skip

"""Matmul of bf16 rows by a weight in oneDNN's order by the CPU's tile unit (Intel AMX). Sums are float32, in an order that does
not depend on the number of rows: a row's result is bit-identical in any batch."""

SUMS, LEFT, RIGHT = 0, 4, 6
"""Tile registers: sums of row tile `r` and output tile `v` in `SUMS + 2 * r + v`, rows in `LEFT + r`, weights in `RIGHT + v`."""


def instruct(b: Any, name: str, *operands: Any) -> None:
    """Emit an instruction of the tile unit. Operands: a Python int for a register, else a value of LLVM's."""
    values = [ir.Constant(I8, x) if isinstance(x, int) else x for x in operands]
    call_llvm(b, f"x86.{name}", ir.VoidType(), *values)


def pointer(b: Any, where: Any, offset: Any) -> Any:
    return b.inttoptr(b.add(where, offset), I8.as_pointer())


@primitive(types.void)
def tiles_begin(b, config: Int):
    """Tell the tile unit how large each register is, by the 64 bytes at an address. All numbers in them become zero."""
    instruct(b, "ldtilecfg", pointer(b, config, ir.Constant(I64, 0)))


@primitive(types.void)
def tiles_end(b):
    """Leave the tile unit, so that the system need not save its registers."""
    instruct(b, "tilerelease")


@primitive(types.void)
def tiles_multiply(b, x: Int, x_stride: Int, weight: Int, weight_stride: Int, count: Const, ahead: Int, pairs: Const):
    """Add the matmuls of `count` tiles of rows and two of weights to the sums. Addresses, and bytes from one row to the next.
    `ahead`: address of weights to prefetch, `pairs` pairs of inputs."""
    lines = [(pair, 64 * v) for pair in range(pairs) for v in range(2)]
    for v in range(2):
        instruct(b, "tileloadd64", RIGHT + v, pointer(b, weight, ir.Constant(I64, 4 * TILE * v)), weight_stride)
    for r in range(count):
        below = b.mul(x_stride, ir.Constant(I64, TILE * r))
        instruct(b, "tileloadd64", LEFT + r, pointer(b, x, below), x_stride)
        for v in range(2):
            instruct(b, "tdpbf16ps", SUMS + 2 * r + v, LEFT + r, RIGHT + v)
            # in one burst they would take all fill buffers, and the next tiles would wait for memory
            for pair, offset in lines[2 * r + v :: 2 * count]:
                below = b.mul(weight_stride, ir.Constant(I64, pair))
                ask_for(b, pointer(b, ahead, b.add(below, ir.Constant(I64, offset))), near=2)


def move_sums(b: Any, instruction: str, where: Any, stride: Any, count: int) -> None:
    """Move the sums of `count` tiles of rows from or to rows of float32."""
    for r in range(count):
        below = b.mul(stride, ir.Constant(I64, TILE * r))
        for v in range(2):
            at = pointer(b, where, b.add(below, ir.Constant(I64, 4 * TILE * v)))
            instruct(b, instruction, SUMS + 2 * r + v, at, stride)


@primitive(types.void)
def tiles_store(b, where: Int, stride: Int, count: Const):
    """Write the sums of `count` tiles of rows to rows of float32 at an address, `stride` bytes from one to the next."""
    move_sums(b, "tilestored64", where, stride, count)


@primitive(types.void)
def tiles_load(b, where: Int, stride: Int, count: Const):
    """Begin with sums that lie in memory, as `tiles_store` writes them."""
    move_sums(b, "tileloadd64", where, stride, count)


@primitive(types.void)
def tiles_clear(b, count: Const):
    """Begin with sums of zero."""
    for i in range(2 * count):
        instruct(b, "tilezero", SUMS + i)


def make_pass(count: int, pairs: int) -> Any:
    """A function for `count` tiles of rows and two of outputs. pairs: how many pairs of inputs are prefetched with each tile."""

    @jit
    def run_pass(x, x_stride, weight, weight_stride, steps, sums, ahead):
        """`steps` tiles of inputs, one after the other. ahead: address of the weights to prefetch."""
        for _ in range(steps):
            tiles_multiply(x, x_stride, weight, weight_stride, count, ahead, pairs)
            x += 4 * TILE
            weight += TILE * weight_stride
            ahead += pairs * weight_stride
        tiles_store(sums, 4 * ITEM, count)

    return run_pass


def make_write_rows(out_bits: int) -> Any:
    """A function that writes rows of sums, `count` from row `r` on, to the results. ``out_bits``: see `packed.matmul`."""
    write_row = make_write_row(TILE, 16, out_bits)

    @jit
    def write_rows(args, sums, r, count, first):
        outputs, to = args[layout.OUTPUTS], floats_at(args[layout.OUT], out_bits)
        if out_bits == 16 and outputs - first >= ITEM and args[layout.BIAS] == 0:
            for i in range(count):
                mine, at = floats_at(sums + 4 * i * ITEM, 32), (r + i) * outputs + first
                store(to, at, load(mine, 0, TILE))
                store(to, at + TILE, load(mine, TILE, TILE))
        else:
            for i in range(count):
                write_row(args, floats_at(sums + 4 * i * ITEM, 32), r + i, first, min(outputs - first, ITEM))

    return write_rows


def matmul(out_bits: int) -> Callable[[Any], None]:
    """Body of the kernel. Arguments: see `layout.PackedMatmul`; inputs are a multiple of `2 * TILE`. ``out_bits``: see `packed.matmul`."""
    (one, two), (one_of_two, two_of_two) = ((make_pass(n, pairs) for n in (1, 2)) for pairs in (TILE, TILE // 2))
    write_rows, ROW = make_write_rows(out_bits), out_bits // 8 * ITEM

    @jit
    def weight_of(args, item):
        all_args, number, _ = group_of(args, item)
        block, first = all_args[layout.BLOCK], number * ITEM
        return all_args[layout.WEIGHT] + 2 * (first // block * block * all_args[layout.PADDED] + first % block * 2)

    @jit
    def do_item(args, item, sums, weight, ahead):
        """ahead: address of the weights of the next item, which are prefetched meanwhile."""
        rows, block, first = args[layout.ROWS], args[layout.BLOCK], item * ITEM
        stride, steps = 2 * args[layout.INPUTS], args[layout.INPUTS] // (2 * TILE)
        for r in range(0, rows, 2 * TILE):
            left = min(rows - r, 2 * TILE)
            tiles_begin(args[layout.CONFIGS] + 64 * left)
            for i in range(left):  # in the cache by the time that the sums are there
                prefetch(floats_at(args[layout.OUT], out_bits), (r + i) * args[layout.OUTPUTS] + first, ROW)
            x = args[layout.X] + r * stride
            if rows > 2 * TILE:
                if left <= TILE:
                    one_of_two(x, stride, weight, 4 * block, steps, sums, ahead)
                else:
                    two_of_two(x, stride, weight, 4 * block, steps, sums, ahead)
                ahead += steps * TILE // 2 * 4 * block
            elif left <= TILE:
                one(x, stride, weight, 4 * block, steps, sums, ahead)
            else:
                two(x, stride, weight, 4 * block, steps, sums, ahead)
            write_rows(args, sums, r, left, first)

    def body(args):
        sums = args[layout.SCRATCH] + claim(args, ENTERED, 1) * args[layout.SCRATCH_BYTES]
        begin = claim(args, NEXT, args[layout.AT_ONCE])
        while begin < args[COUNT]:
            end, following = min(begin + args[layout.AT_ONCE], args[COUNT]), claim(args, NEXT, args[layout.AT_ONCE])
            for item in range(begin, end):
                group, number, _ = group_of(args, item)
                after = item + 1 if item + 1 < end else min(following, args[COUNT] - 1)
                do_item(group, number, sums, weight_of(args, item), weight_of(args, after))
            begin = following
        tiles_end()

    return body
