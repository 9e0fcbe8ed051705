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
from minivllm_kernels.cpu.simd import I8, I64, Const, Int, call_llvm, claim, floats_at, prefetch, primitive

__all__ = [
    "make_pass", "matmul", "move_sums", "tiles_begin", "tiles_clear", "tiles_end", "tiles_load",
    "tiles_multiply", "tiles_store",
]  # fmt: skip

"""Matmul of bf16 rows by a weight in oneDNN's order by the CPU's tile unit (Intel AMX). Sums are float32, in an order that does
not depend on the number of rows: a row's result is bit-identical in any batch."""

SUMS, LEFT, RIGHT = 0, 4, 6
"""Tile registers: sums of row tile `r` and output tile `v` in `SUMS + 2 * r + v`, rows in `LEFT + r`, weights in `RIGHT + v`."""
LINES = 4 * ITEM
"""Bytes of a pair of inputs of an item's outputs."""


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
def tiles_multiply(b, x: Int, x_stride: Int, weight: Int, weight_stride: Int, count: Const, whole: Const):
    """Add the matmuls of `count` tiles of rows and two of weights to the sums. Addresses, and bytes from one row to the next.
    `whole`: 0 for bf16 and float32 sums, 1 for signed bytes and int32 sums."""
    for v in range(2):
        instruct(b, "tileloadd64", RIGHT + v, pointer(b, weight, ir.Constant(I64, 4 * TILE * v)), weight_stride)
    for r in range(count):
        below = b.mul(x_stride, ir.Constant(I64, TILE * r))
        instruct(b, "tileloadd64", LEFT + r, pointer(b, x, below), x_stride)
        for v in range(2):
            instruct(b, "tdpbssd" if whole else "tdpbf16ps", SUMS + 2 * r + v, LEFT + r, RIGHT + v)


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


def make_pass(count: int) -> Any:
    """A function for `count` tiles of rows and two of outputs."""

    @jit
    def run_pass(x, x_stride, weight, weight_stride, steps, sums):
        """`steps` tiles of inputs, one after the other."""
        for _ in range(steps):
            ahead = floats_at(weight + 2 * TILE * weight_stride, 16)
            for pair in range(TILE):
                prefetch(ahead, pair * weight_stride // 2, LINES)
            tiles_multiply(x, x_stride, weight, weight_stride, count, 0)
            x += 4 * TILE
            weight += TILE * weight_stride
        tiles_store(sums, 4 * ITEM, count)

    return run_pass


def matmul(out_bits: int) -> Callable[[Any], None]:
    """Body of the kernel. Arguments: see `layout.PackedMatmul`; inputs are a multiple of `2 * TILE`. ``out_bits``: see `packed.matmul`."""
    one, two, write_row = make_pass(1), make_pass(2), make_write_row(TILE, 16, out_bits)

    @jit
    def do_item(args, item, sums):
        rows, block, first = args[layout.ROWS], args[layout.BLOCK], item * ITEM
        stride, steps = 2 * args[layout.INPUTS], args[layout.INPUTS] // (2 * TILE)
        weight = args[layout.WEIGHT] + 2 * (first // block * block * args[layout.PADDED] + first % block * 2)
        for r in range(0, rows, 2 * TILE):
            left = min(rows - r, 2 * TILE)
            tiles_begin(args[layout.CONFIGS] + 64 * left)
            if left <= TILE:
                one(args[layout.X] + r * stride, stride, weight, 4 * block, steps, sums)
            else:
                two(args[layout.X] + r * stride, stride, weight, 4 * block, steps, sums)
            for i in range(left):
                outputs = min(args[layout.OUTPUTS] - first, ITEM)
                write_row(args, floats_at(sums + 4 * i * ITEM, 32), r + i, first, outputs)

    def body(args):
        sums = args[layout.SCRATCH] + claim(args, ENTERED, 1) * args[layout.SCRATCH_BYTES]
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            group, number, _ = group_of(args, item)
            do_item(group, number, sums)
        tiles_end()

    return body
