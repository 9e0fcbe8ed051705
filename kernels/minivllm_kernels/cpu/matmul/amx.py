"""AMX tile matmul primitives: load, multiply, store 16 x 16 tiles of bf16."""

# Generated from nbs/numba_kernels/cpu/matmul/amx.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing import signature

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT
from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.gemv import jit, make_write_row
from minivllm_kernels.cpu.matmul.layout import ITEM, TILE
from minivllm_kernels.cpu.simd import I8, I64, claim, floats_at, number, prefetch, primitive

__all__ = [
    "LEFT", "LINES", "RIGHT", "SUMS", "instruct", "make_pass", "matmul", "move_sums", "pointer",
    "tiles_begin", "tiles_clear", "tiles_end", "tiles_load", "tiles_multiply", "tiles_store",
]  # fmt: skip

"""RowMajorMatmul of bf16 rows with a weight in oneDNN's order by the CPU's tile unit (Intel AMX). Sums are float32, in an order that does
not depend on the number of rows: a row's result is bit-identical in any batch."""

SUMS, LEFT, RIGHT = 0, 4, 6
"""Tile registers: sums of row tile `r` and output tile `v` in `SUMS + 2 * r + v`, rows in `LEFT + r`, weights in `RIGHT + v`."""
LINES = 4 * ITEM
"""Bytes of a pair of inputs of an item's outputs."""


def instruct(b: Any, name: str, *operands: Any) -> None:
    """Emit an instruction of the tile unit. Operands: a Python int for a register, else a value of LLVM's."""
    values = [ir.Constant(I8, x) if isinstance(x, int) else x for x in operands]
    fn = ir.FunctionType(ir.VoidType(), [x.type for x in values])
    b.call(cgutils.get_or_insert_function(b.module, fn, f"llvm.x86.{name}"), values)


def pointer(b: Any, where: Any, offset: Any) -> Any:
    return b.inttoptr(b.add(where, offset), I8.as_pointer())


@primitive
def tiles_begin(typing: Any, config: Any) -> Any:
    """Tell the tile unit how large each register is, by the 64 bytes at an address. All numbers in them become zero."""

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        instruct(b, "ldtilecfg", pointer(b, a[0], ir.Constant(I64, 0)))
        return c.get_dummy_value()

    return signature(types.void, types.int64), emit


@primitive
def tiles_end(typing: Any) -> Any:
    """Leave the tile unit, so that the system need not save its registers."""

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        instruct(b, "tilerelease")
        return c.get_dummy_value()

    return signature(types.void), emit


@primitive
def tiles_multiply(typing: Any, x: Any, x_stride: Any, weight: Any, weight_stride: Any, count: Any) -> Any:
    """Add the products of `count` tiles of rows and two of weights to the sums. Addresses, and bytes from one row to the next."""
    n = number(count, "count")

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        for v in range(2):
            instruct(b, "tileloadd64", RIGHT + v, pointer(b, a[2], ir.Constant(I64, 4 * TILE * v)), a[3])
        for r in range(n):
            below = b.mul(a[1], ir.Constant(I64, TILE * r))
            instruct(b, "tileloadd64", LEFT + r, pointer(b, a[0], below), a[1])
            for v in range(2):
                instruct(b, "tdpbf16ps", SUMS + 2 * r + v, LEFT + r, RIGHT + v)
        return c.get_dummy_value()

    return signature(types.void, types.int64, types.int64, types.int64, types.int64, count), emit


def move_sums(instruction: str, count: Any) -> Any:
    """Signature and code of a primitive that moves the sums of `count` tiles of rows from or to rows of float32."""
    n = number(count, "count")

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        for r in range(n):
            below = b.mul(a[1], ir.Constant(I64, TILE * r))
            for v in range(2):
                at = pointer(b, a[0], b.add(below, ir.Constant(I64, 4 * TILE * v)))
                instruct(b, instruction, SUMS + 2 * r + v, at, a[1])
        return c.get_dummy_value()

    return signature(types.void, types.int64, types.int64, count), emit


@primitive
def tiles_store(typing: Any, where: Any, stride: Any, count: Any) -> Any:
    """Write the sums of `count` tiles of rows to rows of float32 at an address, `stride` bytes from one to the next."""
    return move_sums("tilestored64", count)


@primitive
def tiles_load(typing: Any, where: Any, stride: Any, count: Any) -> Any:
    """Begin with sums that lie in memory, as `tiles_store` writes them."""
    return move_sums("tileloadd64", count)


@primitive
def tiles_clear(typing: Any, count: Any) -> Any:
    """Begin with sums of zero."""

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        for i in range(2 * number(count, "count")):
            instruct(b, "tilezero", SUMS + i)
        return c.get_dummy_value()

    return signature(types.void, count), emit


def make_pass(count: int) -> Any:
    """A function for `count` tiles of rows and two of outputs."""

    @jit
    def run_pass(x, x_stride, weight, weight_stride, steps, sums):
        """`steps` tiles of inputs, one after the other."""
        for _ in range(steps):
            ahead = floats_at(weight + 2 * TILE * weight_stride, 16)
            for pair in range(TILE):
                prefetch(ahead, pair * weight_stride // 2, LINES)
            tiles_multiply(x, x_stride, weight, weight_stride, count)
            x += 4 * TILE
            weight += TILE * weight_stride
        tiles_store(sums, 4 * ITEM, count)

    return run_pass


def matmul(out_bits: int) -> Callable[[Any], None]:
    """Body of the kernel. Arguments: see `layout.PackedMatmul`; inputs are a multiple of `2 * TILE`. ``out_bits``: see `packed.matmul`."""
    one, two, write_row = make_pass(1), make_pass(2), make_write_row(TILE, 16, out_bits)

    def body(args):
        sums = args[layout.SCRATCH] + claim(args, ENTERED, 1) * args[layout.SCRATCH_BYTES]
        rows, block, stride, steps = (
            args[layout.ROWS],
            args[layout.BLOCK],
            2 * args[layout.INPUTS],
            args[layout.INPUTS] // (2 * TILE),
        )
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            first = item * ITEM
            weight = args[layout.WEIGHT] + 2 * (first // block * block * args[layout.PADDED] + first % block * 2)
            for r in range(0, rows, 2 * TILE):
                left = min(rows - r, 2 * TILE)
                tiles_begin(args[layout.CONFIGS] + 64 * left)
                if left <= TILE:
                    one(args[layout.X] + r * stride, stride, weight, 4 * block, steps, sums)
                else:
                    two(args[layout.X] + r * stride, stride, weight, 4 * block, steps, sums)
                for i in range(left):
                    write_row(
                        args, floats_at(sums + 4 * i * ITEM, 32), r + i, first, min(first + ITEM, args[layout.OUTPUTS])
                    )
        tiles_end()

    return body
