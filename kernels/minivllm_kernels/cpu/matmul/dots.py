"""Dot products of 8-bit numbers in vector registers: VNNI, multiply-add of pairs, plain."""

# Generated from nbs/numba_kernels/cpu/matmul/dots.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any

from llvmlite import ir
from numba import types

from minivllm_kernels.cpu.matmul.layout import FOURS, ITEM, PAIRS, PLAIN, SPAN
from minivllm_kernels.cpu.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Array,
    Const,
    Int,
    Tile,
    Vec,
    Vector,
    broadcast,
    call_llvm,
    const,
    multiply_add,
    plus,
    primitive,
    row_at,
    shuffle,
    vec,
)

"""Dot products of unsigned weights and signed activations of 8 bits. int32 sums travel in a `Tile`, as bits."""

NIBBLES = 0x0F0F0F0F
_MULTIPLY_BYTES = {16: "x86.avx512.pmaddubs.w.512", 8: "x86.avx2.pmadd.ub.sw"}
_ADD_PAIRS = {16: "x86.avx512.pmaddw.d.512", 8: "x86.avx2.pmadd.wd"}
_LOOK_UP = {16: "x86.avx512.pshuf.b.512", 8: "x86.avx2.pshuf.b"}


def nibbles_of(b: Any, words: Any, half: int) -> Any:
    """The low (`half` 0) or the high four bits of each byte, as bytes."""
    lanes = words.type.count
    return b.and_(b.lshr(words, const(4, lanes, I32)) if half else words, const(NIBBLES, lanes, I32))


def look_up(b: Any, places: Any, table: Any, unit: int) -> Any:
    """The table's entry for each byte of `places`: one shuffle, or sixteen comparisons where there is none."""
    lanes = places.type.count
    places = b.bitcast(places, vec(4 * lanes, I8))
    if unit == PLAIN:
        out = const(0, 4 * lanes, I8)
        for i in range(16):
            entry = broadcast(b, b.extract_element(table, ir.Constant(I32, i)), 4 * lanes)
            out = b.select(b.icmp_unsigned("==", places, const(i, 4 * lanes, I8)), entry, out)
    else:
        all_lanes = shuffle(b, table, table, [i % 16 for i in range(4 * lanes)])
        out = call_llvm(b, _LOOK_UP[lanes], places.type, all_lanes, places)
    return b.bitcast(out, vec(lanes, I32))


def bytes_of(b: Any, words: Any, bits: int, table: Any, unit: int) -> list[Any]:
    """The weights of words as registers of bytes, four neighbouring inputs to a lane."""
    if bits == 8:
        return [words]
    parts = [nibbles_of(b, words, half) for half in (0, 1)]
    return parts if table is None else [look_up(b, part, table, unit) for part in parts]


class _Plain:
    """Byte by byte, in 32 bits: any CPU."""

    def __init__(self, b: Any, sums: list[Any], wide: bool) -> None:
        self.b, self.sums, self.lanes = b, sums, sums[0].type.count

    def weights(self, u: Any) -> list[Any]:
        b, lanes = self.b, self.lanes
        return [b.and_(b.lshr(u, const(8 * j, lanes, I32)), const(255, lanes, I32)) for j in range(4)]

    def row(self, where: Any) -> list[Any]:
        b, at = self.b, self.b.bitcast(where, I8.as_pointer())
        some = [b.load(b.gep(at, [ir.Constant(I64, j)])) for j in range(4)]
        return [broadcast(b, b.sext(x, I32), self.lanes) for x in some]

    def add(self, i: int, weights: list[Any], row: list[Any]) -> None:
        for w, x in zip(weights, row, strict=True):
            self.sums[i] = self.b.add(self.sums[i], self.b.mul(w, x))

    def result(self) -> list[Any]:
        return self.sums


class _Fours(_Plain):
    """VNNI: four products and their sum in one instruction."""

    def weights(self, u: Any) -> Any:
        return u

    def row(self, where: Any) -> Any:
        return broadcast(self.b, self.b.load(where, align=4), self.lanes)

    def add(self, i: int, weights: Any, row: Any) -> None:
        name = f"x86.avx512.vpdpbusd.{32 * self.lanes}"
        self.sums[i] = call_llvm(self.b, name, weights.type, self.sums[i], weights, row)


class _Pairs(_Fours):
    """Two products and their sum in 16 bits. A product of 4 and 8 bits is at most 15 * 127, so that eight steps fit; a weight of 8 bits
    is its low and its high four bits."""

    def __init__(self, b: Any, sums: list[Any], wide: bool) -> None:
        super().__init__(b, sums, wide)
        self.wide = wide
        self.parts = [[const(0, 2 * self.lanes, I16)] * len(sums) for _ in range(1 + wide)]

    def weights(self, u: Any) -> list[Any]:
        parts = [nibbles_of(self.b, u, half) for half in (0, 1)] if self.wide else [u]
        return [self.b.bitcast(x, vec(4 * self.lanes, I8)) for x in parts]

    def row(self, where: Any) -> Any:
        return self.b.bitcast(super().row(where), vec(4 * self.lanes, I8))

    def add(self, i: int, weights: Any, row: Any) -> None:
        for sums, w in zip(self.parts, weights, strict=True):
            products = call_llvm(self.b, _MULTIPLY_BYTES[self.lanes], sums[i].type, w, row)
            sums[i] = self.b.add(sums[i], products)

    def result(self) -> list[Any]:
        for sums, factor in zip(self.parts, (1, 16)):
            for i, x in enumerate(sums):
                factors = const(factor, 2 * self.lanes, I16)
                whole = call_llvm(self.b, _ADD_PAIRS[self.lanes], self.sums[i].type, x, factors)
                self.sums[i] = self.b.add(self.sums[i], whole)
        return self.sums


_UNITS = {PLAIN: _Plain, PAIRS: _Pairs, FOURS: _Fours}


@primitive(lambda tile, **_: tile)
def tile_dots(
    b,
    tile: Tile,
    x: Array,
    index: Int,
    stride: Int,
    words: Array,
    at: Int,
    columns: Const,
    bits: Const,
    table: Array,
    coded: Const,
    unit: Const,
    span: Const,
):
    """Add the dot products of `span` inputs to int32 sums: row `r`'s bytes from int32 element `index + r * stride` of `x`, times the
    weights of the words in column `i`. `coded`: a weight is an entry of `table`, 16 bytes."""
    lanes, rows = tile[0].type.count, [row_at(b, index, stride, r) for r in range(len(tile) // columns)]
    codes = table.read(ir.Constant(I64, 0), vec(16, I8), 1) if coded else None
    work = _UNITS[unit](b, [b.bitcast(t, vec(lanes, I32)) for t in tile], bits == 8 or bool(coded))
    per_word = 8 // bits
    for w in range(span // (4 * per_word)):
        some = [words.read(plus(b, at, w * ITEM + i * lanes), vec(lanes, I32), 4) for i in range(columns)]
        parts = [bytes_of(b, one, bits, codes, unit) for one in some]
        for half in range(per_word):
            weights = [work.weights(part[half]) for part in parts]
            for r, row in enumerate(rows):
                numbers = work.row(x.address(plus(b, row, w * per_word + half), I32))
                for i in range(columns):
                    work.add(r * columns + i, weights[i], numbers)
    return [b.bitcast(x, vec(lanes)) for x in work.result()]


@primitive(lambda rows, columns, lanes, **_: types.UniTuple(Vector(lanes), rows * columns))
def tile_spread(b, array: Array, index: Int, stride: Int, rows: Const, columns: Const, lanes: Const):
    """Tile whose row `r` holds `array[index + r * stride]` in every lane, 32 bits as they are."""
    some = (b.bitcast(array.read(row_at(b, index, stride, r), I32, 4), F32) for r in range(rows))
    return [x for one in some for x in [broadcast(b, one, lanes)] * columns]


@primitive(lambda tile, **_: tile)
def tile_rescaled(b, tile: Tile, dots: Tile, array: Array, index: Int, stride: Int, columns: Tile):
    """Add int32 `dots[r, i]` times `array[index + r * stride] * columns[i]` to the vector in row `r`, column `i`."""
    out, m, lanes = [], len(columns), tile[0].type.count
    for r in range(len(tile) // m):
        x = broadcast(b, array.read(row_at(b, index, stride, r), F32, 4), lanes)
        for i in range(m):
            whole = b.sitofp(b.bitcast(dots[r * m + i], vec(lanes, I32)), vec(lanes))
            out.append(multiply_add(b, whole, b.fmul(x, columns[i]), tile[r * m + i]))
    return out


@primitive(lambda count, lanes, **_: types.UniTuple(Vector(lanes), count))
def halves(b, array: Array, index: Int, count: Const, lanes: Const, unit: Const):
    """`count` vectors of float16 numbers. A CPU without instructions for them moves the bits, and a product puts the exponent right."""
    found = []
    for i in range(count):
        bits = array.read(plus(b, index, i * lanes), vec(lanes, I16), 2)
        if unit == PLAIN:
            bits = b.zext(bits, vec(lanes, I32))
            size = b.shl(b.and_(bits, const(0x7FFF, lanes, I32)), const(13, lanes, I32))
            size = b.bitcast(b.fmul(b.bitcast(size, vec(lanes)), const(2.0**112, lanes)), vec(lanes, I32))
            sign = b.shl(b.and_(bits, const(0x8000, lanes, I32)), const(16, lanes, I32))
            found.append(b.bitcast(b.or_(size, sign), vec(lanes)))
        else:
            found.append(b.fpext(b.bitcast(bits, vec(lanes, ir.HalfType())), vec(lanes)))
    return found


@primitive(lambda where, x: x)
def round_bytes(b, where: Int, x: Vec):
    """Write a vector of numbers from -127 to 127 to bytes at an address, rounded to the nearest; gives the rounded numbers."""
    lanes = x.type.count
    shifted = b.fadd(x, const(1.5 * 2**23, lanes))  # the whole number stands in the lowest bits
    b.store(
        b.trunc(b.bitcast(shifted, vec(lanes, I32)), vec(lanes, I8)),
        b.inttoptr(where, vec(lanes, I8).as_pointer()),
        align=1,
    )
    return b.fsub(shifted, const(1.5 * 2**23, lanes))


def fields_of(b: Any, words: Any, bits: int, table: Any) -> list[tuple[Any, int]]:
    """The weights of words, for each input a vector of bits and where in the mantissa of a float32 they stand."""
    lanes, coded = words.type.count, table is not None
    shifted = {
        by: b.shl(words, const(by, lanes, I32)) if by > 0 else b.lshr(words, const(-by, lanes, I32))
        for by in (() if coded or bits == 8 else (12, 4, -4, -12))
    }
    if shifted:  # inputs 0 to 3 in the low halves of the bytes, 4 to 7 in the high ones
        return [(x, place) for place in (12, 16) for x in shifted.values()]
    places = bytes_of(b, words, bits, table, FOURS)
    return [
        (b.shl(x, const(by, lanes, I32)) if by > 0 else b.lshr(x, const(-by, lanes, I32)), 15)
        for x in places
        for by in (15, 7, -1, -9)
    ]


@primitive(types.void)
def unpack_pairs(
    b, into: Int, words: Array, at: Int, bits: Const, table: Array, coded: Const, zero: Const, steps: Tile, lows: Tile
):
    """Write the weights of `SPAN` inputs and `ITEM` outputs as bf16 to an address: pairs of inputs, for all outputs, then the next pair.

    Bits that stand in the mantissa of a number from 1 to 2 are a float32 already; one multiply-add makes `(u - zero) * step + low` of it.
    """
    codes = table.read(ir.Constant(I64, 0), vec(16, I8), 1) if coded else None
    lanes, width, per_word = steps[0].type.count, 8 if coded else bits, 32 // bits
    for v, (step, low) in enumerate(zip(steps, lows, strict=True)):
        base, scaled = multiply_add(b, const(-float(zero), lanes), step, low), {}
        for place in (15,) if width == 8 else (12, 16):
            factor = b.fmul(step, const(2.0 ** (23 - place), lanes))
            scaled[place] = factor, b.fsub(base, factor)
        for w in range(SPAN // per_word):
            word = words.read(plus(b, at, w * ITEM + v * lanes), vec(lanes, I32), 4)
            found = []
            for x, place in fields_of(b, word, bits, codes):
                x = b.and_(x, const((1 << width) - 1 << place, lanes, I32))
                x = b.bitcast(b.or_(x, const(0x3F800000, lanes, I32)), vec(lanes))
                x = b.bitcast(multiply_add(b, x, *scaled[place]), vec(lanes, I32))
                found.append(b.add(x, const(0x8000, lanes, I32)))
            for i in range(0, per_word, 2):
                first = b.lshr(found[i], const(16, lanes, I32))
                pair = b.or_(first, b.and_(found[i + 1], const(0xFFFF0000, lanes, I32)))
                to = b.add(into, ir.Constant(I64, 4 * ((w * per_word + i) // 2 * ITEM + v * lanes)))
                b.store(pair, b.inttoptr(to, pair.type.as_pointer()), align=4)
