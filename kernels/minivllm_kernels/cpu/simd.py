"""SIMD vectors for numba: LLVM intrinsics for loads, FMA, shuffles, conversions."""

# Generated from nbs/numba_kernels/cpu/simd.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import inspect
import operator
from collections.abc import Callable
from typing import Annotated, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models, register_default
from numba.core.errors import TypingError
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin

"""LLVM vector code for numba kernels on the CPU: a register type, and a few dozen things to do with registers.

Every function here exists inside `@njit` code only. `lanes`, counts of rows and numbers of bits must be compile-time constants.
An *array* is a numba array or a `CPointer`; elements are float32, or bf16 stored as uint16. An *index* counts
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


def row_at(b: Any, index: Any, stride: Any, r: int) -> Any:
    """index + r * stride."""
    return b.add(index, b.mul(stride, ir.Constant(I64, r)))


def call_llvm(b: Any, name: str, result: Any, *values: Any) -> Any:
    """Call one of LLVM's own functions."""
    fn = ir.FunctionType(result, [x.type for x in values])
    return b.call(cgutils.get_or_insert_function(b.module, fn, f"llvm.{name}"), values)


def multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z: one instruction with one rounding where the machine has it, else two (never a library call)."""
    return call_llvm(b, f"fmuladd.v{x.type.count}f32", x.type, x, y, z)


def widen(b: Any, bits16: Any, lanes: int) -> Any:
    return b.bitcast(b.shl(b.zext(bits16, vec(lanes, I32)), const(16, lanes, I32)), vec(lanes))


def narrow(b: Any, x: Any, lanes: int) -> Any:
    """float32 to bf16, to nearest even; any NaN becomes 0x7fc0."""
    bits = b.bitcast(x, vec(lanes, I32))
    odd = b.and_(b.lshr(bits, const(16, lanes, I32)), const(1, lanes, I32))
    rounded = b.lshr(b.add(b.add(bits, odd), const(0x7FFF, lanes, I32)), const(16, lanes, I32))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), const(0x7FC0, lanes, I32), rounded), vec(lanes, I16))


class _BFloat16(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def from_fp8(b: Any, bits8: Any, lanes: int) -> Any:
    """Numbers of e4m3, divided by 256, as float32: moved to the places that a float16 has for sign, exponent and mantissa."""
    bits = b.and_(b.shl(b.sext(bits8, vec(lanes, I16)), const(7, lanes, I16)), const(0xBFFF, lanes, I16))
    nan = b.icmp_unsigned("==", b.and_(bits, const(0x7FFF, lanes, I16)), const(0x3F80, lanes, I16))
    bits = b.select(nan, const(0x7E00, lanes, I16), bits)
    return b.fpext(b.bitcast(bits, vec(lanes, ir.HalfType())), vec(lanes))


def to_fp8(b: Any, x: Any, lanes: int) -> Any:
    """float32 to e4m3, to nearest even; what is beyond +-448 becomes +-448, NaN stays NaN."""
    bits = b.bitcast(x, vec(lanes, I32))
    size, most, least = (
        b.and_(bits, const(0x7FFFFFFF, lanes, I32)),
        const(0x43E00000, lanes, I32),
        const(0x3C800000, lanes, I32),
    )
    nan = b.icmp_unsigned(">", size, const(0x7F800000, lanes, I32))
    size = b.select(b.icmp_unsigned("<", size, most), size, most)
    odd = b.and_(b.lshr(size, const(20, lanes, I32)), const(1, lanes, I32))
    normal = b.lshr(b.add(b.add(size, odd), const(0x7FFFF, lanes, I32)), const(20, lanes, I32))
    normal = b.sub(normal, const(120 << 3, lanes, I32))
    # steps of 2 ** -9 stand in the lowest bits
    shifted = b.fadd(b.bitcast(size, vec(lanes)), const(1.5 * 2**14, lanes))
    small = b.and_(b.bitcast(shifted, vec(lanes, I32)), const(15, lanes, I32))
    code = b.select(b.icmp_unsigned("<", size, least), small, normal)
    code = b.select(nan, const(0x7F, lanes, I32), code)
    sign = b.and_(b.lshr(bits, const(24, lanes, I32)), const(0x80, lanes, I32))
    return b.trunc(b.or_(code, sign), vec(lanes, I8))


def to_int8(b: Any, x: Any, lanes: int) -> Any:
    """float32 of at most +-127 to the nearest whole numbers: they stand in the last bits of 1.5 * 2 ** 23 + x."""
    return b.trunc(b.bitcast(b.fadd(x, const(1.5 * 2**23, lanes)), vec(lanes, I32)), vec(lanes, I8))


class Array:
    """An array or a pointer, as a primitive sees it."""

    def __init__(self, context: Any, builder: Any, ty: Any, value: Any) -> None:
        self.b, self.dtype, self.element = builder, ty.dtype, context.get_data_type(ty.dtype)
        self.data = value if isinstance(ty, types.CPointer) else context.make_array(ty)(context, builder, value).data

    def address(self, index: Any, kind: Any) -> Any:
        """Pointer to element `index`, seen as a pointer to `kind`."""
        return self.b.bitcast(self.b.gep(self.data, [index]), kind.as_pointer())

    def read(self, index: Any, kind: Any, align: int | None = None) -> Any:
        """What lies at element `index`, as it is."""
        return self.b.load(self.address(index, kind), align=align)

    def write(self, index: Any, x: Any, align: int | None = None) -> None:
        """Write `x` to element `index`, as it is."""
        self.b.store(x, self.address(index, x.type), align=align)

    def load(self, index: Any, lanes: int) -> Any:
        """A vector from element `index` on, as float32; fp8 divided by 256."""
        if self.dtype == types.float32:
            return self.read(index, vec(lanes), 4)
        if self.dtype == types.uint16:
            return widen(self.b, self.read(index, vec(lanes, I16), 2), lanes)
        if self.dtype == types.uint8:
            return from_fp8(self.b, self.read(index, vec(lanes, I8), 1), lanes)
        if self.dtype == types.int8:
            return self.b.sitofp(self.b.sext(self.read(index, vec(lanes, I8), 1), vec(lanes, I32)), vec(lanes))
        raise TypingError(f"cannot load a vector of {self.dtype}: float32, uint16 (bf16), uint8 (fp8) or int8")

    def store(self, index: Any, x: Any) -> None:
        """Write a vector from element `index` on: as float32, or rounded to bf16 or fp8."""
        if self.dtype == types.float32:
            self.write(index, x, 4)
        elif self.dtype == types.uint16:
            self.write(index, narrow(self.b, x, x.type.count), 2)
        elif self.dtype == types.uint8:
            self.write(index, to_fp8(self.b, x, x.type.count), 1)
        elif self.dtype == types.int8:
            self.write(index, to_int8(self.b, x, x.type.count), 1)
        else:
            raise TypingError(f"cannot store a vector to {self.dtype}: float32, uint16 (bf16), uint8 (fp8) or int8")


Const = Annotated[int, "constant"]
Int = Annotated[Any, types.int64]
Float = Annotated[Any, types.float32]
Vec = Annotated[Any, "vector"]
Tile = Annotated[list, "tile"]


def _argument(context: Any, builder: Any, kind: Any, ty: Any, value: Any) -> Any:
    if kind is Tile:
        return [builder.extract_value(value, i) for i in range(ty.count)]
    return Array(context, builder, ty, value) if kind is Array else value


def primitive(result: Any) -> Callable[[Callable], Any]:
    """Decorator: a function of kernels, from one that appends its instructions to a builder, its first parameter.

    The annotations of the other parameters say what they take: `Array`; `Int`, `Float` and `Vec`, which are values of LLVM; `Tile`, a
    list of vectors; `Const`, a Python int, which a kernel must know when it is compiled.

    Args:
        result: numba's type of the result, or a function that finds it from the types of the arguments, by their names, and
            the constants. The decorated function gives a value, a list for a tile, or None for `types.void`.
    """

    def decorate(emit: Callable) -> Any:
        _, *parameters = inspect.signature(emit).parameters.values()
        kinds = [p.annotation for p in parameters]

        def describe(typing, *given):
            known = [number(ty, p.name) if p.annotation is Const else ty for p, ty in zip(parameters, given)]
            names = {p.name: what for p, what in zip(parameters, known)}
            returned = result if isinstance(result, types.Type) else result(**names)
            wanted = [kind.__metadata__[0] if kind in (Int, Float) else ty for kind, ty in zip(kinds, given)]

            def generate(context, builder, _signature, values):
                arguments = [
                    what if kind is Const else _argument(context, builder, kind, ty, value)
                    for kind, ty, value, what in zip(kinds, given, values, known)
                ]
                out = emit(builder, *arguments)
                if isinstance(out, list):
                    return context.make_tuple(builder, returned, out)
                return context.get_dummy_value() if out is None else out

            return signature(returned, *wanted), generate

        first = inspect.Parameter("typing", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        describe.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
        describe.__name__, describe.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(prefer_literal=True)(describe)

    return decorate


def _tile(count: int, lanes: int) -> Any:
    return types.UniTuple(Vector(lanes), count)


@primitive(lambda array, index, lanes: Vector(lanes))
def load(b, array: Array, index: Int, lanes: Const):
    """`lanes` consecutive elements from `index`, as float32."""
    return array.load(index, lanes)


@primitive(types.void)
def store(b, array: Array, index: Int, x: Vec):
    """Write a vector to float32 elements, or rounded to bf16 ones."""
    array.store(index, x)


@primitive(types.void)
def add_to(b, array: Array, index: Int, x: Vec):
    """Add a vector to elements in place. bf16 ones are rounded by the CPU's instruction, which takes tiny numbers for zero: for
    CPUs that have it."""
    lanes = x.type.count
    total = b.fadd(array.load(index, lanes), x)
    if array.dtype == types.uint16:
        total = b.bitcast(b.fptrunc(total, ir.VectorType(_BFloat16(), lanes)), vec(lanes, I16))
    array.write(index, total, 2 if array.dtype == types.uint16 else 4)


@primitive(lambda x: x)
def as_bf16(b, x: Vec):
    """A vector rounded as `store` rounds to bf16, float32 still."""
    return widen(b, narrow(b, x, x.type.count), x.type.count)


@primitive(lambda x, bits: x)
def rounded(b, x: Vec, bits: Const):
    """A vector as the nearest numbers of fp8 (`bits` 8), the largest where it is beyond them, or as the nearest whole ones (-8), of at most
    +-127. float32 still."""
    lanes = x.type.count
    if bits == 8:
        return b.fmul(from_fp8(b, to_fp8(b, x, lanes), lanes), const(256.0, lanes))
    most, least = const(127.0, lanes), const(-127.0, lanes)
    x = b.select(b.fcmp_ordered(">", x, most), most, x)
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    return b.fsub(b.fadd(x, const(1.5 * 2**23, lanes)), const(1.5 * 2**23, lanes))


@primitive(types.void)
def zip_pairs(b, into: Array, to: Int, source: Array, first: Int, second: Int, lanes: Const):
    """Write `lanes` elements of 16 bits from `first` and as many from `second` on, one of each in turn."""
    x, y = (source.read(at, vec(lanes, I16), 2) for at in (first, second))
    into.write(to, shuffle(b, x, y, [i // 2 + lanes * (i % 2) for i in range(2 * lanes)]), 2)


@primitive(types.void)
def transpose(b, into: Array, to: Int, into_stride: Int, source: Array, at: Int, stride: Int, lanes: Const):
    """`into[to + d * into_stride + i] = source[at + i * stride + d]` for all `i` and `d` below `lanes`, a power of 2.

    Both hold the same kind of elements; strides count these. Two vectors at a time are zipped; as many rounds as `lanes` has
    bits, and rows are columns.
    """
    if into.dtype != source.dtype:
        raise TypingError(f"cannot transpose {source.dtype} into {into.dtype}")
    rows = [source.read(row_at(b, at, stride, i), vec(lanes, source.element), 2) for i in range(lanes)]
    low = [i // 2 + lanes * (i % 2) for i in range(lanes)]
    high = [i + lanes // 2 for i in low]
    for _ in range(lanes.bit_length() - 1):
        pairs = [(rows[i], rows[i + lanes // 2]) for i in range(lanes // 2)]
        rows = [shuffle(b, x, y, half) for x, y in pairs for half in (low, high)]
    for d, column in enumerate(rows):
        into.write(row_at(b, to, into_stride, d), column, 2)


@primitive(types.void)
def move(b, into: Array, to: Int, source: Array, at: Int):
    """`into[to] = source[at]`: one number, float32 or bf16 on either side, rounded as `store` does."""
    if into.dtype == source.dtype:
        into.write(to, source.read(at, source.element))
    else:
        into.store(to, source.load(at, 1))


@primitive(lambda x, lanes: Vector(lanes))
def splat(b, x: Float, lanes: Const):
    """The same float32 in every lane."""
    return broadcast(b, x, lanes)


@primitive(lambda x, y, z: x)
def fma(b, x: Vec, y: Vec, z: Vec):
    """x * y + z."""
    return multiply_add(b, x, y, z)


@primitive(lambda x: x)
def root(b, x: Vec):
    """The square root of each lane, rounded correctly."""
    return call_llvm(b, f"sqrt.v{x.type.count}f32", x.type, x)


@primitive(lambda x, y: x)
def maximum(b, x: Vec, y: Vec):
    """The larger one, lane by lane; `y` where either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@primitive(lambda x, first, last, other: x)
def keep(b, x: Vec, first: Int, last: Int, other: Float):
    """Lanes `first <= i < last` of `x`; `other` in the rest, even where `x` is NaN."""
    n = x.type.count
    lane = ir.Constant(vec(n, I32), list(range(n)))
    low, high = (broadcast(b, b.trunc(i, I32), n) for i in (first, last))
    inside = b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<", lane, high))
    return b.select(inside, x, broadcast(b, other, n))


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


@primitive(types.float32)
def largest(b, x: Vec):
    """The largest lane, a float32."""
    return fold_lanes(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


@primitive(types.float32)
def total(b, x: Vec):
    """The sum of the lanes, a float32."""
    return fold_lanes(b, x, b.fadd)


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


@primitive(lambda x: x)
def exp(b, x: Vec):
    """e to the power of each lane, to 2 units in the last place, for lanes up to 80; 0 below -80."""
    return exponential(b, x)


_STORED = {-8: types.int8, 8: types.uint8, 16: types.uint16, 32: types.float32}
_FLOATS = {bits: types.CPointer(stored) for bits, stored in _STORED.items()}
_INTS = {32: types.CPointer(types.int32), 64: types.CPointer(types.int64)}


@primitive(lambda where, bits: _FLOATS[bits])
def floats_at(b, where: Int, bits: Const):
    """An address (int64) as a pointer to fp8 (`bits` 8), bf16 (16), float32 (32) or int8 (-8) elements."""
    return b.inttoptr(where, {8: I8, 16: I16, 32: F32}[abs(bits)].as_pointer())


@primitive(lambda where, bits: _INTS[bits])
def ints_at(b, where: Int, bits: Const):
    """An address (int64) as a pointer to int32 or int64 elements."""
    return b.inttoptr(where, ir.IntType(bits).as_pointer())


@primitive(types.int64)
def claim(b, counter: Array, index: Int, count: Int):
    """Add `count` to an int64 that threads share; gives what it was before. Also a fence between the threads."""
    return b.atomic_rmw("add", counter.address(index, I64), count, "seq_cst")


@primitive(types.int64)
def peek(b, counter: Array, index: Int):
    """An int64 that other threads change, as it is now; all that they wrote before they changed it can be seen."""
    return b.load_atomic(counter.address(index, I64), "seq_cst", 8)


@primitive(types.void)
def relax(b, x86: Const):
    """A short rest in a loop that waits, which leaves the core to the other threads on it. Nothing where `x86` is 0: other CPUs know
    no such instruction, or it does nothing."""
    if x86:
        call_llvm(b, "x86.sse2.pause", ir.VoidType())


@primitive(types.void)
def call(b, function: Int, argument: Int, second: Int):
    """Call the machine code at an address with two int64, for instance another kernel with the address of its arguments.
    Code that takes one does not look at the second."""
    entry = ir.FunctionType(ir.VoidType(), [I64, I64])
    b.call(b.inttoptr(function, entry.as_pointer()), [argument, second])


def ask_for(b: Any, pointer: Any, near: int = 3) -> None:
    """Prefetch a cache line. near: 3 for the first cache, 2 for the second."""
    to_read, keep_near, data = (ir.Constant(I32, x) for x in (0, near, 1))
    call_llvm(b, "prefetch.p0", ir.VoidType(), pointer, to_read, keep_near, data)


@primitive(types.void)
def prefetch(b, array: Array, index: Int, size: Const):
    """Ask for `size` bytes (a constant) from element `index` on, 64 at a time; harmless if nothing is there."""
    start = array.address(index, I8)
    for offset in range(0, size, 64):
        ask_for(b, b.gep(start, [ir.Constant(I64, offset)]))


@primitive(types.void)
def prefetch_rows(b, array: Array, index: Int, stride: Int, rows: Const, near: Const):
    """Ask for the cache line of element `index + r * stride`, for each of `rows` rows. near: see `ask_for`."""
    for r in range(rows):
        ask_for(b, array.address(row_at(b, index, stride, r), I8), near)


@primitive(lambda count, lanes: _tile(count, lanes))
def tile_zeros(b, count: Const, lanes: Const):
    """A tile of `count` vectors of zeros."""
    return [const(0.0, lanes)] * count


@primitive(lambda rows, columns, lanes, **_: _tile(rows * columns, lanes))
def tile_load(b, array: Array, index: Int, stride: Int, rows: Const, columns: Const, lanes: Const):
    """Tile of `rows` x `columns` vectors: row `r` starts at `index + r * stride`, its columns lie next to each other."""
    starts = [row_at(b, index, stride, r) for r in range(rows)]
    return [array.load(plus(b, start, i * lanes), lanes) for start in starts for i in range(columns)]


@primitive(types.void)
def tile_store(b, array: Array, index: Int, stride: Int, columns: Const, tile: Tile):
    """The reverse of `tile_load`, to float32 elements."""
    for i, x in enumerate(tile):
        array.write(plus(b, row_at(b, index, stride, i // columns), i % columns * x.type.count), x, 4)


@primitive(lambda tile, **_: tile)
def tile_fma(b, tile: Tile, array: Array, index: Int, stride: Int, vectors: Tile):
    """Add `array[index + r * stride] * vectors[i]` to the vector in row `r`, column `i`. `array` is float32."""
    out, m = [], len(vectors)
    for r in range(len(tile) // m):
        x = broadcast(b, array.read(row_at(b, index, stride, r), F32, 4), vectors[0].type.count)
        out += [multiply_add(b, x, vectors[i], tile[r * m + i]) for i in range(m)]
    return out


@primitive(lambda tile, **_: tile)
def tile_dots(
    b, tile: Tile, rows: Array, at: Int, stride: Int, last: Int, weight: Array, w: Int, vectors: Const, lanes: Const
):
    """Add, to the vector in row `r`, column `i`, the dot products of one pair of bf16, at `rows[at + min(r, last) * stride]`, with each of
    the `lanes` pairs from `weight[w + i * lanes]` on.

    Both arrays have items of 32 bits, a pair each; sums are float32. `lanes` must be 16: the instruction, `vdpbf16ps`, is that of
    a whole register. Only CPUs with AVX-512 BF16 have it, see `layout.host_dots`.
    """
    bf16 = ir.VectorType(_BFloat16(), 2 * lanes)
    columns = [b.bitcast(weight.read(plus(b, w, i * lanes), vec(lanes, I32), 2), bf16) for i in range(vectors)]
    out = []
    for r in range(len(tile) // vectors):
        row = ir.Constant(I64, r)
        row = b.select(b.icmp_signed("<", row, last), row, last)
        pair = b.bitcast(broadcast(b, rows.read(b.add(at, b.mul(row, stride)), I32, 2), lanes), bf16)
        for i, column in enumerate(columns):
            total = tile[r * vectors + i]
            out.append(call_llvm(b, "x86.avx512bf16.dpbf16ps.512", total.type, total, column, pair))
    return out


@primitive(lambda tile, **_: tile)
def tile_outer(b, tile: Tile, rows: Tile, columns: Tile):
    """Add `rows[r] * columns[i]`, lane by lane, to the vector in row `r`, column `i`."""
    m = len(columns)
    return [multiply_add(b, rows[i // m], columns[i % m], x) for i, x in enumerate(tile)]


@primitive(lambda tile, **_: tile)
def tile_scaled(b, tile: Tile, sums: Tile, columns: Tile):
    """Add `sums[r, i] * columns[i]`, lane by lane, to the vector in row `r`, column `i`."""
    m = len(columns)
    return [multiply_add(b, sums[i], columns[i % m], x) for i, x in enumerate(tile)]


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


@primitive(types.void)
def tile_totals(b, array: Array, index: Int, stride: Int, columns: Const, tile: Tile):
    """Store the sum over the lanes of the vector in row `r`, column `i` to float32 `array[index + r * stride + i]`."""
    lanes = tile[0].type.count
    for first in range(0, len(tile), lanes):
        sums = fold_together(b, tile[first : first + lanes])
        for i in range(first, min(first + lanes, len(tile))):
            at = plus(b, row_at(b, index, stride, i // columns), i % columns)
            array.write(at, b.extract_element(sums, ir.Constant(I32, i - first)), 4)


@primitive(lambda count, lanes, **_: _tile(count, lanes))
def load_each(b, array: Array, starts: Array, first: Int, shift: Int, count: Const, lanes: Const):
    """`count` vectors, the i-th from `starts[first + i] + shift`. `starts` holds int64 indices."""
    at = [starts.read(plus(b, first, i), I64, 8) for i in range(count)]
    return [array.load(b.add(i, shift), lanes) for i in at]


def half_of(b: Any, words: Any, odd: int) -> Any:
    """The even or the odd bf16 of a vector of words, as float32."""
    lanes = words.type.count
    bits = b.and_(words, const(0xFFFF0000, lanes, I32)) if odd else b.shl(words, const(16, lanes, I32))
    return b.bitcast(bits, vec(lanes))


@primitive(lambda count, lanes, **_: _tile(count, lanes))
def load_unzipped(b, array: Array, index: Int, count: Const, lanes: Const):
    """`count * lanes` consecutive bf16, `count` even: vectors 0 and 1 are the even and the odd ones of the first pair."""
    if array.dtype != types.uint16:
        raise TypingError(f"load_unzipped reads bf16 (uint16), got {array.dtype}")
    words = (array.read(plus(b, index, i * lanes), vec(lanes, I32), 2) for i in range(0, count, 2))
    return [half_of(b, pair, odd) for pair in words for odd in (0, 1)]


@primitive(lambda rows, lanes, **_: _tile(rows, lanes))
def load_halves(b, array: Array, index: Int, stride: Int, rows: Const, odd: Const, lanes: Const):
    """One vector a row: the even (`odd` 0) or odd (1) ones of `2 * lanes` bf16 from `index + r * stride`."""
    words = (array.read(row_at(b, index, stride, r), vec(lanes, I32), 2) for r in range(rows))
    return [half_of(b, pair, odd) for pair in words]


@primitive(lambda x, y: types.UniTuple(x, 2))
def zip_lanes(b, x: Vec, y: Vec):
    """x0 y0 x1 y1 ..., as two vectors."""
    n = x.type.count
    pick = [j for i in range(n) for j in (i, n + i)]
    return [shuffle(b, x, y, pick[:n]), shuffle(b, x, y, pick[n:])]
