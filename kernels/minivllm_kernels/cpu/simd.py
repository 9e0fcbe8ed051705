"""SIMD vectors for numba: LLVM intrinsics for loads, FMA, shuffles, conversions."""

# Generated from nbs/numba_kernels/cpu/simd.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models, register_default
from numba.core.errors import TypingError
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin

__all__ = [
    "EXP_TERMS", "F32", "I8", "I16", "I32", "I64", "LN2_HIGH", "LN2_LOW", "LOG2_E", "ROUNDER", "Vector",
    "address", "as_bf16", "ask_for", "broadcast", "call", "claim", "const", "exp", "exponential", "field",
    "floats_at", "fma", "fold_lanes", "fold_together", "ints_at", "keep", "largest", "load", "load_each",
    "load_halves", "load_unzipped", "load_vector", "load_words", "maximum", "move", "multiply_add", "narrow",
    "number", "peek", "plus", "prefetch", "prefetch_rows", "primitive", "relax", "root", "shuffle", "splat",
    "store", "store_fields", "store_pairs", "tile_fields", "tile_fma", "tile_load", "tile_outer",
    "tile_scaled", "tile_store", "tile_totals", "tile_zeros", "total", "transpose", "vec", "whole_numbers",
    "widen", "zip_lanes", "zip_pairs",
]  # fmt: skip

"""LLVM vector code for numba kernels on the CPU: a register type, and a few dozen things to do with registers.

Every function here exists inside `@njit` code only. `lanes`, counts of rows and numbers of bits must be compile-time constants.
An *array* is a numba array or a `CPointer`; elements are float32, bf16 stored as uint16, or int8. An *index* counts
elements from the start, whatever the shape, and is not checked.
"""

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


class Vector(types.Type):
    """float32 numbers in one register, or in several if the machine's registers are narrower."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")


@register_default(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(F32, fe_type.lanes))


primitive = intrinsic(prefer_literal=True)


def number(ty: Any, what: str) -> int:
    """The value of a compile-time constant."""
    if not isinstance(ty, types.IntegerLiteral):
        raise TypingError(f"{what} must be a compile-time constant, got {ty}")
    return ty.literal_value


def vec(lanes: int, element: Any = F32) -> Any:
    return ir.VectorType(element, lanes)


def const(x: float, lanes: int, element: Any = F32) -> Any:
    return ir.Constant(vec(lanes, element), [x] * lanes)


def shuffle(b: Any, x: Any, y: Any, pick: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(vec(len(pick), I32), pick))


def broadcast(b: Any, x: Any, lanes: int) -> Any:
    undefined = ir.Constant(vec(lanes, x.type), ir.Undefined)
    return shuffle(b, b.insert_element(undefined, x, ir.Constant(I32, 0)), undefined, [0] * lanes)


def plus(b: Any, index: Any, offset: int) -> Any:
    return b.add(index, ir.Constant(I64, offset)) if offset else index


def address(c: Any, b: Any, ty: Any, value: Any, index: Any, element: Any) -> Any:
    """Pointer to element `index` of an array or pointer, seen as a pointer to `element`."""
    data = value if isinstance(ty, types.CPointer) else c.make_array(ty)(c, b, value).data
    return b.bitcast(b.gep(data, [index]), element.as_pointer())


def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z: one instruction with one rounding where the machine has it, else two (never a library call)."""
    fn = ir.FunctionType(x.type, [x.type] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, fn, f"llvm.fmuladd.v{x.type.count}f32"), [x, y, z])


def widen(b: Any, bits16: Any, lanes: int) -> Any:
    return b.bitcast(b.shl(b.zext(bits16, vec(lanes, I32)), const(16, lanes, I32)), vec(lanes))


def narrow(b: Any, x: Any, lanes: int) -> Any:
    """float32 to bf16, to nearest even; any NaN becomes 0x7fc0."""
    bits = b.bitcast(x, vec(lanes, I32))
    odd = b.and_(b.lshr(bits, const(16, lanes, I32)), const(1, lanes, I32))
    rounded = b.lshr(b.add(b.add(bits, odd), const(0x7FFF, lanes, I32)), const(16, lanes, I32))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), const(0x7FC0, lanes, I32), rounded), vec(lanes, I16))


def load_vector(c: Any, b: Any, ty: Any, value: Any, index: Any, lanes: int) -> Any:
    if ty.dtype == types.float32:
        return b.load(address(c, b, ty, value, index, vec(lanes)), align=4)
    if ty.dtype == types.uint16:
        return widen(b, b.load(address(c, b, ty, value, index, vec(lanes, I16)), align=2), lanes)
    if ty.dtype == types.int8:
        return b.sitofp(b.load(address(c, b, ty, value, index, vec(lanes, I8)), align=1), vec(lanes))
    raise TypingError(f"cannot load a vector of {ty.dtype}: float32, uint16 (bf16) or int8")


@primitive
def load(typing: Any, array: Any, index: Any, lanes: Any) -> Any:
    """`lanes` consecutive elements from `index`, as float32."""
    n = number(lanes, "lanes")
    return signature(Vector(n), array, types.int64, lanes), lambda c, b, s, a: load_vector(c, b, array, a[0], a[1], n)


@primitive
def store(typing: Any, array: Any, index: Any, x: Any) -> Any:
    """Write a vector to float32 elements, or rounded to bf16 ones."""

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        if array.dtype == types.float32:
            b.store(a[2], address(c, b, array, a[0], a[1], vec(x.lanes)), align=4)
        else:
            b.store(narrow(b, a[2], x.lanes), address(c, b, array, a[0], a[1], vec(x.lanes, I16)), align=2)
        return c.get_dummy_value()

    if array.dtype not in (types.float32, types.uint16):
        raise TypingError(f"cannot store a vector to {array.dtype}: float32 or uint16 (bf16)")
    return signature(types.void, array, types.int64, x), emit


@primitive
def as_bf16(typing: Any, x: Any) -> Any:
    """A vector rounded as `store` rounds to bf16, float32 still."""
    return signature(x, x), lambda c, b, s, a: widen(b, narrow(b, a[0], x.lanes), x.lanes)


@primitive
def zip_pairs(typing: Any, into: Any, to: Any, source: Any, first: Any, second: Any, lanes: Any) -> Any:
    """Write `lanes` elements of 16 bits from `first` and as many from `second` on, one of each in turn."""
    n = number(lanes, "lanes")

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        x, y = (b.load(address(c, b, source, a[2], at, vec(n, I16)), align=2) for at in (a[3], a[4]))
        turns = [i // 2 + n * (i % 2) for i in range(2 * n)]
        b.store(shuffle(b, x, y, turns), address(c, b, into, a[0], a[1], vec(2 * n, I16)), align=2)
        return c.get_dummy_value()

    return signature(types.void, into, types.int64, source, types.int64, types.int64, lanes), emit


@primitive
def transpose(typing: Any, into: Any, to: Any, into_stride: Any, source: Any, at: Any, stride: Any, lanes: Any) -> Any:
    """`into[to + d * into_stride + i] = source[at + i * stride + d]` for all `i` and `d` below `lanes`, a power of 2. Both hold the same kind
    of elements; strides count these. Two vectors at a time are zipped; as many rounds as `lanes` has bits, and rows are columns."""
    n = number(lanes, "lanes")

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        kind = vec(n, c.get_data_type(into.dtype))

        def row(array: Any, value: Any, first: Any, step: Any, i: int) -> Any:
            return address(c, b, array, value, b.add(first, b.mul(step, ir.Constant(I64, i))), kind)

        rows = [b.load(row(source, a[3], a[4], a[5], i), align=2) for i in range(n)]
        low = [i // 2 + n * (i % 2) for i in range(n)]
        high = [i + n // 2 for i in low]
        for _ in range(n.bit_length() - 1):
            pairs = [(rows[i], rows[i + n // 2]) for i in range(n // 2)]
            rows = [shuffle(b, x, y, half) for x, y in pairs for half in (low, high)]
        for d, column in enumerate(rows):
            b.store(column, row(into, a[0], a[1], a[2], d), align=2)
        return c.get_dummy_value()

    if into.dtype != source.dtype:
        raise TypingError(f"cannot transpose {source.dtype} into {into.dtype}")
    i64 = types.int64
    return signature(types.void, into, i64, i64, source, i64, i64, lanes), emit


@primitive
def move(typing: Any, into: Any, to: Any, source: Any, at: Any) -> Any:
    """`into[to] = source[at]`: one number, float32 or bf16 on either side, rounded as `store` does."""

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        if into.dtype == source.dtype:
            element = c.get_data_type(into.dtype)
            b.store(b.load(address(c, b, source, a[2], a[3], element)), address(c, b, into, a[0], a[1], element))
            return c.get_dummy_value()
        x = load_vector(c, b, source, a[2], a[3], 1)
        if into.dtype == types.float32:
            b.store(x, address(c, b, into, a[0], a[1], vec(1)), align=4)
        else:
            b.store(narrow(b, x, 1), address(c, b, into, a[0], a[1], vec(1, I16)), align=2)
        return c.get_dummy_value()

    return signature(types.void, into, types.int64, source, types.int64), emit


@primitive
def splat(typing: Any, x: Any, lanes: Any) -> Any:
    """The same float32 in every lane."""
    n = number(lanes, "lanes")
    return signature(Vector(n), types.float32, lanes), lambda c, b, s, a: broadcast(b, a[0], n)


@primitive
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z."""
    return signature(x, x, y, z), lambda c, b, s, a: multiply_add(b, *a)


@primitive
def root(typing: Any, x: Any) -> Any:
    """The square root of each lane, rounded correctly."""

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        fn = ir.FunctionType(a[0].type, [a[0].type])
        return b.call(cgutils.get_or_insert_function(b.module, fn, f"llvm.sqrt.v{x.lanes}f32"), [a[0]])

    return signature(x, x), emit


@primitive
def maximum(typing: Any, x: Any, y: Any) -> Any:
    """The larger one, lane by lane; `y` where either is NaN."""
    return signature(x, x, y), lambda c, b, s, a: b.select(b.fcmp_ordered(">", a[0], a[1]), a[0], a[1])


@primitive
def keep(typing: Any, x: Any, first: Any, last: Any, other: Any) -> Any:
    """Lanes `first <= i < last` of `x`; `other` in the rest, even where `x` is NaN."""

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        lane = ir.Constant(vec(x.lanes, I32), list(range(x.lanes)))
        low, high = (broadcast(b, b.trunc(a[i], I32), x.lanes) for i in (1, 2))
        inside = b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<", lane, high))
        return b.select(inside, a[0], broadcast(b, a[3], x.lanes))

    return signature(x, x, types.int64, types.int64, types.float32), emit


def _operator(python: Any, instruction: str) -> None:
    """Give a Python operator a meaning for two vectors: one LLVM instruction."""

    @infer_global(python)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(python, Vector, Vector)
    def lower(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return getattr(b, instruction)(*args)


for _python, _instruction in (("add", "fadd"), ("sub", "fsub"), ("mul", "fmul"), ("truediv", "fdiv")):
    _operator(getattr(operator, _python), _instruction)


def fold_lanes(b: Any, x: Any, combine: Any) -> Any:
    while x.type.count > 1:
        half = x.type.count // 2
        low, high = (shuffle(b, x, x, list(range(i, i + half))) for i in (0, half))
        x = combine(low, high)
    return b.extract_element(x, ir.Constant(I32, 0))


@primitive
def largest(typing: Any, x: Any) -> Any:
    """The largest lane, a float32."""
    return signature(types.float32, x), lambda c, b, s, a: fold_lanes(
        b, a[0], lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q)
    )


@primitive
def total(typing: Any, x: Any) -> Any:
    """The sum of the lanes, a float32."""
    return signature(types.float32, x), lambda c, b, s, a: fold_lanes(b, a[0], b.fadd)


LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
ROUNDER = 1.5 * 2**23 + 127
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exponential(b: Any, x: Any) -> Any:
    n = x.type.count
    shifted = multiply_add(b, x, const(LOG2_E, n), const(ROUNDER, n))
    whole = b.fsub(shifted, const(ROUNDER, n))
    r = multiply_add(b, whole, const(-LN2_HIGH, n), x)
    r = multiply_add(b, whole, const(-LN2_LOW, n), r)
    p = const(EXP_TERMS[0], n)
    for term in EXP_TERMS[1:]:
        p = multiply_add(b, p, r, const(term, n))
    p = b.fadd(multiply_add(b, p, b.fmul(r, r), r), const(1.0, n))
    power = b.bitcast(b.shl(b.bitcast(shifted, vec(n, I32)), const(23, n, I32)), vec(n))
    return b.select(b.fcmp_ordered(">", x, const(-80.0, n)), b.fmul(p, power), const(0.0, n))


@primitive
def exp(typing: Any, x: Any) -> Any:
    """e to the power of each lane, to 2 units in the last place, for lanes up to 80; 0 below -80."""
    return signature(x, x), lambda c, b, s, a: exponential(b, a[0])


@primitive
def floats_at(typing: Any, where: Any, bits: Any) -> Any:
    """An address (int64) as a pointer to bf16 (`bits` 16), float32 (32) or int8 (8) elements."""
    element = {8: types.int8, 16: types.uint16, 32: types.float32}[number(bits, "bits")]
    ty = types.CPointer(element)
    return signature(ty, types.int64, bits), lambda c, b, s, a: b.inttoptr(a[0], c.get_value_type(ty))


@primitive
def ints_at(typing: Any, where: Any, bits: Any) -> Any:
    """An address (int64) as a pointer to int32 or int64 elements."""
    ty = types.CPointer({32: types.int32, 64: types.int64}[number(bits, "bits")])
    return signature(ty, types.int64, bits), lambda c, b, s, a: b.inttoptr(a[0], c.get_value_type(ty))


@primitive
def claim(typing: Any, counter: Any, index: Any, count: Any) -> Any:
    """Add `count` to an int64 that threads share; gives what it was before. Also a fence between the threads."""
    return signature(types.int64, counter, types.int64, types.int64), lambda c, b, s, a: b.atomic_rmw(
        "add", address(c, b, counter, a[0], a[1], I64), a[2], "seq_cst"
    )


@primitive
def peek(typing: Any, counter: Any, index: Any) -> Any:
    """An int64 that other threads change, as it is now; all that they wrote before they changed it can be seen."""
    return signature(types.int64, counter, types.int64), lambda c, b, s, a: b.load_atomic(
        address(c, b, counter, a[0], a[1], I64), "seq_cst", 8
    )


@primitive
def relax(typing: Any, x86: Any) -> Any:
    """A short rest in a loop that waits, which leaves the core to whoever shares it. Nothing where `x86` is 0: others know no such
    instruction, or it does nothing."""
    rests = number(x86, "x86") != 0

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        if rests:
            rest = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, rest, "llvm.x86.sse2.pause"), [])
        return c.get_dummy_value()

    return signature(types.void, x86), emit


@primitive
def call(typing: Any, function: Any, argument: Any, second: Any) -> Any:
    """Call the machine code at an address with two int64, for instance another kernel with the address of its arguments. Code that
    takes one does not look at the second."""

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        entry = ir.FunctionType(ir.VoidType(), [I64, I64])
        b.call(b.inttoptr(a[0], entry.as_pointer()), [a[1], a[2]])
        return c.get_dummy_value()

    return signature(types.void, types.int64, types.int64, types.int64), emit


def ask_for(b: Any, pointer: Any) -> None:
    fn = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    ask = cgutils.get_or_insert_function(b.module, fn, "llvm.prefetch.p0")
    b.call(ask, [pointer, ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)])  # to read, keep near, data


@primitive
def prefetch(typing: Any, array: Any, index: Any, size: Any) -> Any:
    """Ask for `size` bytes (a constant) from element `index` on, 64 at a time; harmless if nothing is there."""
    n = number(size, "size")

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        start = address(c, b, array, a[0], a[1], I8)
        for offset in range(0, n, 64):
            ask_for(b, b.gep(start, [ir.Constant(I64, offset)]))
        return c.get_dummy_value()

    return signature(types.void, array, types.int64, size), emit


@primitive
def prefetch_rows(typing: Any, array: Any, index: Any, stride: Any, rows: Any) -> Any:
    """Ask for the cache line of element `index + r * stride`, for each of `rows` rows."""
    n = number(rows, "rows")

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        for r in range(n):
            ask_for(b, address(c, b, array, a[0], b.add(a[1], b.mul(a[2], ir.Constant(I64, r))), I8))
        return c.get_dummy_value()

    return signature(types.void, array, types.int64, types.int64, rows), emit


@primitive
def tile_zeros(typing: Any, count: Any, lanes: Any) -> Any:
    """A tile of `count` vectors of zeros."""
    n, width = number(count, "count"), number(lanes, "lanes")
    ty = types.UniTuple(Vector(width), n)
    return signature(ty, count, lanes), lambda c, b, s, a: c.make_tuple(b, ty, [const(0.0, width)] * n)


@primitive
def tile_load(typing: Any, array: Any, index: Any, stride: Any, rows: Any, columns: Any, lanes: Any) -> Any:
    """Tile of `rows` x `columns` vectors: row `r` starts at `index + r * stride`, its columns lie next to each other."""
    n, m, width = number(rows, "rows"), number(columns, "columns"), number(lanes, "lanes")
    ty = types.UniTuple(Vector(width), n * m)

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        starts = [b.add(a[1], b.mul(a[2], ir.Constant(I64, r))) for r in range(n)]
        at = [plus(b, start, i * width) for start in starts for i in range(m)]
        return c.make_tuple(b, ty, [load_vector(c, b, array, a[0], i, width) for i in at])

    return signature(ty, array, types.int64, types.int64, rows, columns, lanes), emit


@primitive
def tile_store(typing: Any, array: Any, index: Any, stride: Any, columns: Any, tile: Any) -> Any:
    """The reverse of `tile_load`, to float32 elements."""
    m, width = number(columns, "columns"), tile.dtype.lanes

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        for i in range(tile.count):
            at = plus(b, b.add(a[1], b.mul(a[2], ir.Constant(I64, i // m))), i % m * width)
            b.store(b.extract_value(a[4], i), address(c, b, array, a[0], at, vec(width)), align=4)
        return c.get_dummy_value()

    return signature(types.void, array, types.int64, types.int64, columns, tile), emit


@primitive
def tile_fma(typing: Any, tile: Any, array: Any, index: Any, stride: Any, vectors: Any) -> Any:
    """Add `array[index + r * stride] * vectors[i]` to the vector in row `r`, column `i`. `array` is float32."""
    m = vectors.count

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        columns, out = [b.extract_value(a[4], i) for i in range(m)], []
        for r in range(tile.count // m):
            at = b.add(a[2], b.mul(a[3], ir.Constant(I64, r)))
            x = broadcast(b, b.load(address(c, b, array, a[1], at, F32), align=4), vectors.dtype.lanes)
            out += [multiply_add(b, x, columns[i], b.extract_value(a[0], r * m + i)) for i in range(m)]
        return c.make_tuple(b, tile, out)

    return signature(tile, tile, array, types.int64, types.int64, vectors), emit


@primitive
def tile_outer(typing: Any, tile: Any, rows: Any, columns: Any) -> Any:
    """Add `rows[r] * columns[i]`, lane by lane, to the vector in row `r`, column `i`."""
    m = columns.count

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        x, y = ([b.extract_value(t, i) for i in range(ty.count)] for t, ty in ((a[1], rows), (a[2], columns)))
        out = [multiply_add(b, x[i // m], y[i % m], b.extract_value(a[0], i)) for i in range(tile.count)]
        return c.make_tuple(b, tile, out)

    return signature(tile, tile, rows, columns), emit


@primitive
def tile_scaled(typing: Any, tile: Any, other: Any, columns: Any) -> Any:
    """Add `other[r, i] * columns[i]`, lane by lane, to the vector in row `r`, column `i`; `other` is a tile of the same shape."""
    m = columns.count

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        scales = [b.extract_value(a[2], i) for i in range(m)]
        pairs = [(b.extract_value(a[1], i), b.extract_value(a[0], i)) for i in range(tile.count)]
        return c.make_tuple(b, tile, [multiply_add(b, x, scales[i % m], y) for i, (x, y) in enumerate(pairs)])

    return signature(tile, tile, other, columns), emit


def fold_together(b: Any, vectors: list[Any]) -> Any:
    """A vector whose lane `i` is the sum of the lanes of `vectors[i]`, added in the order of `total`.

    Two vectors are folded at a time, into the halves of one; then two such, into its quarters.
    """
    lanes = vectors[0].type.count
    size = lanes
    while size > 1:
        if len(vectors) % 2:
            vectors = [*vectors, vectors[-1]]
        half = size // 2
        low = [i for start in range(0, 2 * lanes, size) for i in range(start, start + half)]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [b.fadd(shuffle(b, x, y, low), shuffle(b, x, y, [i + half for i in low])) for x, y in pairs]
        size = half
    return vectors[0]


@primitive
def tile_totals(typing: Any, array: Any, index: Any, stride: Any, columns: Any, tile: Any) -> Any:
    """Store the sum over the lanes of the vector in row `r`, column `i` to float32 `array[index + r * stride + i]`."""
    m, width = number(columns, "columns"), tile.dtype.lanes

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        vectors = [b.extract_value(a[4], i) for i in range(tile.count)]
        for first in range(0, tile.count, width):
            sums = fold_together(b, vectors[first : first + width])
            for i in range(first, min(first + width, tile.count)):
                at = plus(b, b.add(a[1], b.mul(a[2], ir.Constant(I64, i // m))), i % m)
                value = b.extract_element(sums, ir.Constant(I32, i - first))
                b.store(value, address(c, b, array, a[0], at, F32), align=4)
        return c.get_dummy_value()

    return signature(types.void, array, types.int64, types.int64, columns, tile), emit


@primitive
def load_each(typing: Any, array: Any, starts: Any, first: Any, shift: Any, count: Any, lanes: Any) -> Any:
    """`count` vectors, the i-th from `starts[first + i] + shift`. `starts` holds int64 indices."""
    n, width = number(count, "count"), number(lanes, "lanes")
    ty = types.UniTuple(Vector(width), n)

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        at = [b.load(address(c, b, starts, a[1], plus(b, a[2], i), I64), align=8) for i in range(n)]
        return c.make_tuple(b, ty, [load_vector(c, b, array, a[0], b.add(i, a[3]), width) for i in at])

    return signature(ty, array, starts, types.int64, types.int64, count, lanes), emit


@primitive
def load_unzipped(typing: Any, array: Any, index: Any, count: Any, lanes: Any) -> Any:
    """`count * lanes` consecutive bf16, `count` even: vectors 0 and 1 are the even and the odd ones of the first pair."""
    n, width = number(count, "count"), number(lanes, "lanes")
    ty = types.UniTuple(Vector(width), n)

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        out = []
        for i in range(0, n, 2):
            words = b.load(address(c, b, array, a[0], plus(b, a[1], i * width), vec(width, I32)), align=2)
            out.append(b.bitcast(b.shl(words, const(16, width, I32)), vec(width)))
            out.append(b.bitcast(b.and_(words, const(0xFFFF0000, width, I32)), vec(width)))
        return c.make_tuple(b, ty, out)

    if array.dtype != types.uint16:
        raise TypingError(f"load_unzipped reads bf16 (uint16), got {array.dtype}")
    return signature(ty, array, types.int64, count, lanes), emit


@primitive
def load_halves(typing: Any, array: Any, index: Any, stride: Any, rows: Any, odd: Any, lanes: Any) -> Any:
    """One vector a row: the even (`odd` 0) or odd (1) ones of `2 * lanes` bf16 from `index + r * stride`."""
    n, width, which = number(rows, "rows"), number(lanes, "lanes"), number(odd, "odd")
    ty = types.UniTuple(Vector(width), n)

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        out = []
        for r in range(n):
            at = b.add(a[1], b.mul(a[2], ir.Constant(I64, r)))
            words = b.load(address(c, b, array, a[0], at, vec(width, I32)), align=2)
            if which:
                words = b.and_(words, const(0xFFFF0000, width, I32))
            else:
                words = b.shl(words, const(16, width, I32))
            out.append(b.bitcast(words, vec(width)))
        return c.make_tuple(b, ty, out)

    return signature(ty, array, types.int64, types.int64, rows, odd, lanes), emit


@primitive
def zip_lanes(typing: Any, x: Any, y: Any) -> Any:
    """x0 y0 x1 y1 ..., as two vectors."""
    pick = [j for i in range(x.lanes) for j in (i, x.lanes + i)]
    ty = types.UniTuple(x, 2)
    return signature(ty, x, y), lambda c, b, s, a: c.make_tuple(
        b, ty, [shuffle(b, a[0], a[1], pick[: x.lanes]), shuffle(b, a[0], a[1], pick[x.lanes :])]
    )


def field(b: Any, words: Any, i: int, bits: int) -> Any:
    """Field `i` of int32 words as float32, times `2 ** (bits * i)`; the top field, which would be read as a sign, times one."""
    lanes = words.type.count
    if bits * (i + 1) == 32:
        return b.sitofp(b.lshr(words, const(bits * i, lanes, I32)), vec(lanes))
    return b.sitofp(b.and_(words, const(((1 << bits) - 1) << bits * i, lanes, I32)), vec(lanes))


def load_words(c: Any, b: Any, ty: Any, value: Any, index: Any, count: int, lanes: int) -> list[Any]:
    at = [plus(b, index, i * lanes) for i in range(count)]
    return [b.load(address(c, b, ty, value, i, vec(lanes, I32)), align=4) for i in at]


@primitive
def tile_fields(
    typing: Any, tile: Any, x: Any, index: Any, stride: Any, words: Any, at: Any, columns: Any, bits: Any
) -> Any:
    """Add `x[index + r * stride + f]` times field `f` of the words in column `i` to row `r`, column `i`, for every field.

    `x` is float32, `words` int32; see `field` for what the fields are multiplied with.
    """
    m, n, lanes = number(columns, "columns"), number(bits, "bits"), tile.dtype.lanes

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        out = [b.extract_value(a[0], i) for i in range(tile.count)]
        some = load_words(c, b, words, a[4], a[5], m, lanes)
        rows = [b.add(a[2], b.mul(a[3], ir.Constant(I64, r))) for r in range(tile.count // m)]
        for f in range(32 // n):
            fields = [field(b, w, f, n) for w in some]
            for r, row in enumerate(rows):
                number = broadcast(b, b.load(address(c, b, x, a[1], plus(b, row, f), F32), align=4), lanes)
                for i in range(m):
                    out[r * m + i] = multiply_add(b, number, fields[i], out[r * m + i])
        return c.make_tuple(b, tile, out)

    return signature(tile, tile, x, types.int64, types.int64, words, types.int64, columns, bits), emit


def whole_numbers(b: Any, words: Any, bits: int) -> list[Any]:
    """All fields of int32 words, as float32."""
    lanes = words.type.count
    mask = const((1 << bits) - 1, lanes, I32)
    low = [b.and_(b.lshr(words, const(first, lanes, I32)), mask) for first in range(0, 32, bits)]
    return [b.sitofp(x, vec(lanes)) for x in low]


@primitive
def store_fields(
    typing: Any, out: Any, to: Any, stride: Any, words: Any, at: Any, bits: Any, step: Any, low: Any
) -> Any:
    """Write `field f * step + low` of one vector of words to float32 `out` from `to + f * stride`, for every field."""
    n, lanes = number(bits, "bits"), step.lanes

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        (some,) = load_words(c, b, words, a[3], a[4], 1, lanes)
        for f, x in enumerate(whole_numbers(b, some, n)):
            where = b.add(a[1], b.mul(a[2], ir.Constant(I64, f)))
            b.store(multiply_add(b, x, a[6], a[7]), address(c, b, out, a[0], where, vec(lanes)), align=4)
        return c.get_dummy_value()

    return signature(types.void, out, types.int64, types.int64, words, types.int64, bits, step, low), emit


@primitive
def store_pairs(
    typing: Any, out: Any, to: Any, stride: Any, words: Any, at: Any, bits: Any, step: Any, low: Any
) -> Any:
    """The same to bf16 `out`, fields 2 f and 2 f + 1 next to each other from `to + f * stride`; halves are rounded up."""
    n, lanes = number(bits, "bits"), step.lanes

    def emit(c: Any, b: Any, s: Any, a: Any) -> Any:
        (some,) = load_words(c, b, words, a[3], a[4], 1, lanes)
        half, high = const(0x8000, lanes, I32), const(0xFFFF0000, lanes, I32)
        numbers = [b.bitcast(multiply_add(b, x, a[6], a[7]), vec(lanes, I32)) for x in whole_numbers(b, some, n)]
        rounded = [b.add(x, half) for x in numbers]
        for f in range(0, len(rounded), 2):
            pair = b.or_(b.lshr(rounded[f], const(16, lanes, I32)), b.and_(rounded[f + 1], high))
            where = b.add(a[1], b.mul(a[2], ir.Constant(I64, f // 2)))
            b.store(pair, address(c, b, out, a[0], where, vec(lanes, I32)), align=2)
        return c.get_dummy_value()

    return signature(types.void, out, types.int64, types.int64, words, types.int64, bits, step, low), emit
