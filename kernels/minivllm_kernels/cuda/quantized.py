"""CUDA matmul of up to 16 rows by a weight of 4 or 8 bits, packed in the order of the tensor cores."""

# Generated from nbs/numba_kernels/cuda/quantized.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm_kernels.cuda.simt import CudaKernel, cuda, device, f32, half_ops, i32, i64, kernel, kernel_maker, u32
from minivllm_kernels.cuda.warp import (
    as_f32,
    cp_commit,
    grid_release,
    grid_wait,
    instruction,
    ldg128_stream,
    prmt,
    smem_addr,
    stg128,
)

KINDS = ("int4", "int8", "fp8")
MOST_BYTES = (8 << 30) - 4
"""Bytes of the largest packed weight: the kernels count its words in an int32."""
U32 = np.dtype(np.uint32)


@dataclass(frozen=True)
class Format:
    """A packed weight, as a kernel is built for it.

    kind: of `KINDS`; fp8 is e4m3. dtype: of the activations, "bfloat16" or "float16". features: inputs, a multiple of `step`.
    group: inputs that share a scale, a multiple of 32 that divides them. scale: "float32", or with 16 bits "bfloat16" or "float16".
    zeros: int4 has a zero point for each scale; without, it is 8.
    """

    kind: str
    dtype: str
    features: int
    group: int
    scale: str
    zeros: bool = False

    def __post_init__(self) -> None:
        if problem := self.problem():
            raise ValueError(f"no such kernel: {problem}")

    def problem(self) -> str | None:
        """Why no kernel can be built for it, or None."""
        for name, value, known in (
            ("kind", self.kind, KINDS), ("dtype", self.dtype, (*_CODES,)), ("scale", self.scale, ("float32", *_CODES)),
        ):  # fmt: skip
            if value not in known:
                return f"{name} must be one of {', '.join(known)}; got {value!r}"
        if self.group < 1:
            return f"group must be at least 1; got {self.group}"
        if self.features % self.step:
            return f"{self.features} inputs are no multiple of {self.step}"
        if self.features % self.group or (self.group % self.step and self.group != 32):
            return f"groups of {self.group} inputs are neither 32 nor a multiple of {self.step} that divides {self.features}"
        if self.zeros and (self.kind != "int4" or self.scale == "float32"):
            return "zero points are those of int4, with scales of 16 bits"
        return None

    @property
    def step(self) -> int:
        """Inputs of 16 outputs that a warp reads at once, 16 bytes per lane."""
        return 64 if self.kind == "int4" else 32

    @property
    def steps(self) -> int:
        """Steps in all inputs."""
        return self.features // self.step

    @property
    def groups(self) -> int:
        """Groups of inputs: an output has a scale for each."""
        return self.features // self.group

    @property
    def scale_words(self) -> int:
        """32-bit words that hold the scales, and zero points, of two outputs for one group."""
        return 2 if self.zeros or self.scale == "float32" else 1

    @property
    def name(self) -> str:
        """A short name, part of the names of kernels."""
        zeros = "_zeros" if self.zeros else ""
        return f"{self.kind}_{self.dtype}_k{self.features}_g{self.group}_{self.scale}{zeros}"


_CODES = {"bfloat16": ("bf16", (3, 0x4180), (3, 0x4180)), "float16": ("f16", (2, 0x5C00), (6, 0x4C00))}
"""PTX name; then, for the first and the second of two outputs that are 8 apart: (the fraction bit that is worth 1 in a number from 16 or 256 on,
the bits of that 16 or 256)."""
_ONE = {"bfloat16": 0x3F80, "float16": 0x3C00}
FP8_UP = {"bfloat16": (64, 120), "float16": (0, 8)}
"""Exponents of two: by which activations are multiplied for fp8, and by which the decoded weights are too small."""


def _twice(half: int) -> int:
    return half << 16 | half


def _read_int4(dtype: str) -> Any:
    """Put four bits into the fraction of 16 or 256, which gives 16 or 256 plus the number. See `Plan.lows` for the surplus."""
    words, text, shifts = _CODES[dtype][1:], "mov.b32 s, $4;", [0]
    for i in range(4):
        at, magic = words[i % 2]
        shifts.append(4 * i + words[0][0] - at)
        if shifts[-1] != shifts[-2]:
            text += f" shf.r.wrap.b32 s, $4, $4, {shifts[-1]};"
        text += f" lop3.b32 ${i}, s, {_twice(15 << at)}, {_twice(magic)}, 0xEA;"

    @instruction(f"{{ .reg .b32 s; {text} }}", "u32 u32 u32 u32", "u32")
    def read(word):
        """Four pairs."""
        word = int(word) | int(word) << 32
        return tuple(
            np.uint32(word >> shifts[1 + i] & _twice(15 << words[i % 2][0]) | _twice(words[i % 2][1])) for i in range(4)
        )

    return read


def _read_fp8(dtype: str) -> Any:
    """Move sign, exponent and fraction to their places in `dtype`. The exponent is then too small, see `FP8_UP`."""
    WIDE = dtype == "float16"
    text = ""
    for i in range(2):
        out = ("a", "b") if WIDE else (f"${2 * i}", f"${2 * i + 1}")
        text += f" shl.b32 s, ${4 + i}, 4; and.b32 {out[0]}, s, 0x87F087F0;"
        text += f" shr.b32 s, ${4 + i}, 8; and.b32 t, ${4 + i}, 0x87808780; lop3.b32 {out[1]}, s, 0x00700070, t, 0xEA;"
        for j in range(2 * WIDE):
            text += f" shl.b32 s, {out[j]}, 3; and.b32 t, {out[j]}, 0x80008000; lop3.b32 ${2 * i + j}, s, 0x3F803F80, t, 0xEA;"

    @instruction(f"{{ .reg .b32 s, t, a, b; {text} }}", "u32 u32 u32 u32", "u32 u32")
    def read(word, other):
        """Four pairs: two of each word."""
        pairs = []
        for w in (int(word), int(other)):
            pairs += [w << 4 & 0x87F087F0, w & 0x87808780 | w >> 8 & 0x00700070]
        if WIDE:
            pairs = [pair & 0x80008000 | pair << 3 & 0x3F803F80 for pair in pairs]
        return tuple(np.uint32(pair) for pair in pairs)

    return read


def _read_int8(dtype: str) -> Any:
    """Put each byte, as 0 to 255, into the last bits of the float32 2 ** 23, and subtract 2 ** 23 + 128."""
    name, half = _CODES[dtype][0], half_ops(dtype)
    text = "mov.b32 f, 0x4B000000;"
    for i in range(4):
        text += f" xor.b32 s, ${4 + i // 2}, 0x80808080;"
        for part, at in (("a", i % 2), ("b", 2 + i % 2)):
            text += (
                f" prmt.b32 s{part}, s, f, {0x7440 + at}; mov.b32 {part}, s{part}; sub.f32 {part}, {part}, 0f4B000080;"
            )
        text += f" cvt.rn.{name}x2.f32 ${i}, b, a;"

    @instruction(f"{{ .reg .b32 s, sa, sb, f; .reg .f32 a, b; {text} }}", "u32 u32 u32 u32", "u32 u32")
    def read(word, other):
        """Four pairs: the even and the odd bytes of each word."""
        signed = [np.array([w], np.uint32).view(np.int8).astype(np.float32) for w in (word, other)]
        return tuple(half.pack(w[i], w[2 + i]) for w in signed for i in range(2))

    return read


def _fma(dtype: str) -> Any:
    half = half_ops(dtype)

    @instruction(f"fma.rn.{_CODES[dtype][0]}x2 $0, $1, $2, $3;", "u32", "u32 u32 u32")
    def fma(a, b, c):
        """a b + c of two pairs."""
        return half.pack(half.lo(a) * half.lo(b) + half.lo(c), half.hi(a) * half.hi(b) + half.hi(c))

    return fma


@functools.cache
def decoder(format: Format) -> tuple[Any, Any, Any]:
    """Device functions: the words of 16 inputs as matrix A of an mma; the numbers that correct two outputs' weights; and their scales."""
    INT4, ZEROS, HALF_SCALE = format.kind == "int4", format.zeros, format.scale != "float32"
    FIRST, SECOND = (_twice(0x8000 + magic + (8 << at)) for at, magic in _CODES[format.dtype][1:])
    ops = half_ops(format.scale) if HALF_SCALE else None
    lo, hi = (ops.lo, ops.hi) if ops is not None else (as_f32, as_f32)
    read = {"int4": _read_int4, "fp8": _read_fp8, "int8": _read_int8}[format.kind](format.dtype)

    @device
    def matrix(words, at):
        if INT4:
            return read(words[at])
        return read(words[2 * at], words[2 * at + 1])

    @device
    def zero_points(scales, at):
        if ZEROS:
            return prmt(scales[at + 1], scales[at + 1], u32(0x1010)), prmt(scales[at + 1], scales[at + 1], u32(0x3232))
        return u32(FIRST), u32(SECOND)

    @device
    def factors(scales, at):
        if HALF_SCALE:
            return lo(scales[at]), hi(scales[at])
        return as_f32(scales[at]), as_f32(scales[at + 1])

    return matrix, zero_points, factors


@dataclass(frozen=True)
class Tiling:
    """How a matmul is divided among blocks and warps.

    tiles: tiles of 16 outputs per block. warps: warps per block, which share the inputs. depth: steps in a warp's ring, a power of two; all
    but one are being copied. blocks: blocks per multiprocessor; its registers must be enough for them.
    """

    tiles: int
    warps: int
    depth: int
    blocks: int

    @property
    def name(self) -> str:
        """For the names of kernels."""
        return f"{self.tiles}x{self.warps}_d{self.depth}_b{self.blocks}"

    def grid(self, outputs: int, multiprocessors: int) -> int:
        """Blocks to launch, at most `blocks` per multiprocessor: the fewest that leave no block with more turns."""
        groups = -(-outputs // (16 * self.tiles))
        return -(-groups // -(-groups // (multiprocessors * self.blocks)))


@dataclass(frozen=True)
class Plan:
    """What a kernel is built for, and the sizes that follow."""

    format: Format
    rows: int
    tiling: Tiling

    @property
    def unit(self) -> int:
        """Steps that a warp takes together: up to 128 inputs, whole groups or a part of one. For 16 rows four steps need too many registers."""
        for steps in (4, 2, 1) if self.rows == 8 else (2, 1):
            inputs, group = steps * self.format.step, self.format.group
            if inputs <= 128 and self.format.steps % steps == 0 and (group % inputs == 0 or inputs % group == 0):
                return steps
        raise AssertionError(f"groups of {self.format.group} neither divide a step nor are made of steps")

    @property
    def fold(self) -> int:
        """Inputs after which the sums are scaled."""
        return min(self.format.group, self.unit * self.format.step)

    @property
    def scales(self) -> int:
        """Scales of a unit, for each tile of outputs."""
        return self.unit * self.format.step // self.fold

    @property
    def blocks(self) -> int:
        """Blocks of eight rows."""
        return self.rows // 8

    @property
    def lows(self) -> int:
        """Tiles of sums that correct for the surplus of int4 weights, which is 16 or 256 plus the zero point.

        Without zero points one tile serves all outputs of a warp; with them each tile of outputs has one. They take one more `mma` each. For
        16 rows that is slower than to subtract the surplus from the weights, so there are none (0), except in groups of 32: registers are short there.
        """
        if self.format.kind != "int4" or (self.rows > 8 and self.fold >= 64):
            return 0
        return self.tiling.tiles if self.format.zeros else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of a unit's weights in a warp's ring."""
        return self.unit * self.tiling.tiles * 512

    @property
    def slot_bytes(self) -> int:
        """Bytes of a unit in a warp's ring: weights, then scales, of which each lane has a copy."""
        scales = self.tiling.tiles * self.scales * self.format.scale_words * 128 if self.format.groups > 1 else 0
        return self.weight_bytes + scales

    @property
    def sum_bytes(self) -> int:
        """Bytes of the warps' sums."""
        return self.tiling.warps * self.tiling.tiles * self.blocks * 8 * COLUMN * 4

    @property
    def ring_bytes(self) -> int:
        """Bytes of the warps' rings."""
        return self.tiling.warps * self.tiling.depth // self.unit * self.slot_bytes

    @property
    def buffers(self) -> int:
        """Buffers of sums. With two, one barrier per tile is enough."""
        return 2 if self.ring_bytes + 2 * self.sum_bytes <= 99 << 10 else 1

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per block."""
        return self.ring_bytes + self.buffers * self.sum_bytes


SIGNATURE = "u32* u32* u32* u32* i32 i32 i32 i32"
"""out, x, weight, scales; rows; outputs; words from one row of x, and of out, to the next."""
COLUMN = 20
"""Words from one row's 16 sums to the next one's: the lanes of a warp write to different banks then."""


def _load_words(count: int, pieces: int, first: int, apart: int) -> Any:
    """A device function: load `pieces` pieces of `count` words from shared memory, the first at byte `first` after base + offset, the others
    `apart` bytes further each."""
    total, vector = count * pieces, {1: "", 2: "v2.", 4: "v4."}[count]
    text = f"{{ .reg .b32 a; add.s32 a, ${total}, ${total + 1};"
    for piece in range(pieces):
        outs = ",".join(f"${i}" for i in range(piece * count, (piece + 1) * count))
        text += f" ld.shared.{vector}u32 {'{' + outs + '}' if count > 1 else outs}, [a+{first + piece * apart}];"

    @instruction(text + " }", "u32 " * total, "u32 i32", effect=True)
    def load(base, offset):
        at = (int(offset) + first) // 4
        words = tuple(base[at + piece * apart // 4 + i] for piece in range(pieces) for i in range(count))
        return words if total > 1 else words[0]

    return load


def _copy_pieces(size: int, places: list[tuple[int, int]]) -> Any:
    """A device function: start copying pieces of `size` bytes. places: for each, its distance in bytes from the pointer and from base + offset."""
    cache = "cg.shared.global.L2::128B" if size == 16 else "ca.shared.global"
    text = " ".join(f"cp.async.{cache} [a+{to}], [$2+{at}], {size};" for at, to in places)

    @instruction(f"{{ .reg .b32 a; add.s32 a, $0, $1; {text} }}", "", "u32 i32 ptr", effect=True)
    def copy(base, offset, pointer, index):
        for at, to in places:
            for i in range(size // 4):
                base[(int(offset) + to) // 4 + i] = pointer[index + at // 4 + i]

    return copy


def _load_x(first: int) -> Any:
    @instruction(f"ld.global.v4.u32 {{$0,$1,$2,$3}}, [$4+{first}];", "u32 u32 u32 u32", "ptr", effect=True)
    def load(pointer, index):
        """Four words, the first at byte `first` after pointer[index]."""
        return tuple(pointer[index + first // 4 + i] for i in range(4))

    return load


_PLACES = (0, COLUMN, 8, COLUMN + 8)
_STORES = "".join(f" st.shared.f32 [a+{4 * at}], ${2 + i};" for i, at in enumerate(_PLACES))


@instruction(f"{{ .reg .b32 a; add.s32 a, $0, $1; {_STORES} }}", "", "u32 i32 f32 f32 f32 f32", effect=True)
def _store_sums(base, offset, a, b, c, d):
    """Store a lane's part of the sums of 16 outputs and 8 rows, row by row."""
    for at, value in zip(_PLACES, (a, b, c, d)):
        base[int(offset) // 4 + at] = np.float32(value).view(np.uint32)


@functools.cache
def wait_but(groups: int) -> Any:
    """A device function: wait until all groups of copies but the newest `groups` have arrived."""

    @instruction(f"cp.async.wait_group {groups};", effect=True)
    def wait():
        pass

    return wait


def _copies(plan: Plan) -> tuple[Any, list[Any], Any]:
    """Device functions: (find a lane's part of a unit, [start copying step s] for each s, move on to the next unit)."""
    format, MT, WARPS, UB, SC = plan.format, plan.tiling.tiles, plan.tiling.warps, plan.unit, plan.scales
    STEPS, GROUPS, W, WEIGHTS = format.steps, format.groups, format.scale_words, plan.weight_bytes
    GROUPED, UNITS = GROUPS > 1, STEPS // UB
    EACH = max(format.group // (UB * format.step), 1)  # units of a group
    places = [((m * GROUPS + c) * 32 * W, WEIGHTS + (m * SC + c) * W * 128) for m in range(MT) for c in range(SC)]
    copy_scales = _copy_pieces(4 * W, places)

    @device
    def place(tile, unit):
        lane = u32(cuda.threadIdx.x) % u32(32)
        group = i32(unit * SC) if EACH == 1 else i32(u32(unit) // u32(EACH))
        scale = i32(i32(tile * GROUPS + group) * (8 * W) + i32(lane // u32(4)) * W)
        return i32(i32(tile * STEPS + unit * UB) * 128 + i32(lane) * 4), scale

    @device
    def advance(unit, ahead, w_at, s_at, last):
        unit, w_at = i32(unit + WARPS), i32(w_at + WARPS * UB * 128)
        if EACH == 1:
            s_at = i32(s_at + WARPS * SC * 8 * W)
        if unit >= UNITS:
            unit, ahead = i32(cuda.threadIdx.x // u32(32)), i32(ahead + cuda.gridDim.x)
            w_at, s_at = place(i32(min(ahead * MT, last)), unit)
        elif EACH > 1:
            _, s_at = place(i32(min(ahead * MT, last)), unit)
        return unit, ahead, w_at, s_at

    def start(s: int) -> Any:
        copy = _copy_pieces(16, [(m * STEPS * 512 + s * 512, (s * MT + m) * 512) for m in range(MT)])

        @device
        def begin(ring, mine, held, here, weight, scales, w_at, s_at):
            copy(ring, i32(mine + here), weight, w_at)
            if GROUPED and s == 0:
                copy_scales(ring, i32(held + here), scales, s_at)

        return begin

    return place, [start(s) for s in range(UB)], advance


def _prefill(plan: Plan, begins: list[Any], advance: Any) -> Any:
    """A device function: start the copies that are to be under way before the first step."""
    begin, BEFORE, STEP = begins[0], plan.tiling.depth - 1, plan.tiling.tiles * 512
    UB, SLOT = plan.unit, plan.slot_bytes

    @device
    def prefill(ring, mine, held, weight, scales, unit, ahead, w_at, s_at, tiles, last):
        here = i32(0)
        for j in range(BEFORE):
            s = j % UB
            if ahead < tiles:
                begin(ring, i32(mine + s * STEP), held, here, weight, scales, i32(w_at + s * 128), s_at)
            cp_commit()
            if s == UB - 1:
                here = i32(here + SLOT)
                unit, ahead, w_at, s_at = advance(unit, ahead, w_at, s_at, last)
        return unit, ahead, w_at, s_at

    return prefill


def _step(plan: Plan, s: int, begins: list[Any], advance: Any, multiply: Any) -> Any:
    """A device function: step `s` of a unit. While it is multiplied, the next x is loaded and a copy into the previous slot is started."""
    format, MT, UB = plan.format, plan.tiling.tiles, plan.unit
    SLOTS = plan.scales * MT * format.scale_words
    LAST, FIRST, GROUPED, KEPT, SEEN = s == UB - 1, s == 0, format.groups > 1, 4 * MT, plan.blocks * format.step // 8
    begin, fetch, wait = begins[s - 1], _fetch(plan, (s + 1) % UB), wait_but(plan.tiling.depth - 2)
    load = _load_words(4, MT, s * MT * 512, 512)
    load_scales = _load_words(format.scale_words, MT * plan.scales, plan.weight_bytes, format.scale_words * 128)

    @device
    def step(registers, given, places, here, before, state, x_at, y_at):
        totals, acc, low, kept, factor, seen, coming = registers
        x, weight, scales = given
        ring, mine, held, x0, x1, tiles, last = places
        unit, ahead, w_at, s_at = state
        to = y_at if LAST else x_at
        fetch(coming, x, i32(x0 + to), i32(x1 + to))
        wait()
        a = load(ring, i32(mine + here))
        for i in range(KEPT):
            kept[i] = a[i]
        if GROUPED and FIRST:
            b = load_scales(ring, i32(held + here))
            if SLOTS == 1:
                factor[0] = b
            else:
                for i in range(SLOTS):
                    factor[i] = b[i]
        if ahead < tiles:
            begin(ring, mine, held, before if FIRST else here, weight, scales, w_at, s_at)
        cp_commit()
        if FIRST:
            unit, ahead, w_at, s_at = advance(unit, ahead, w_at, s_at, last)
        multiply(totals, acc, low, kept, factor, seen, s)
        for i in range(SEEN):
            seen[i] = coming[i]
        return unit, ahead, w_at, s_at

    return step


def _multiply(plan: Plan) -> tuple[Any, Any]:
    """Device functions: multiply by step s of a unit; and add the sums of a group, times its scales, to the totals."""
    format, MT, TILES, FOLD, SC = plan.format, plan.tiling.tiles, plan.blocks, plan.fold, plan.scales
    W, GROUPED, HALVES, INT4 = format.scale_words, format.groups > 1, format.step // 32, format.kind == "int4"
    ZEROS, LOWS, SUBTRACT, ONE = format.zeros, plan.lows, INT4 and not plan.lows, _twice(_ONE[format.dtype])
    multiply_add, fma = half_ops(format.dtype).mma, _fma(format.dtype)
    matrix, zero_points, factors = decoder(format)

    @device
    def scaled(totals, acc, low, held, at, m):
        f = factors(held, at)
        for tile in range(TILES):
            k, c = (m * TILES + tile) * 4, ((m if ZEROS else 0) * TILES + tile) * 4
            for i in range(4):
                totals[k + i] += (acc[k + i] + low[c + i] if LOWS else acc[k + i]) * f[i // 2]
                acc[k + i] = f32(0.0)

    @device
    def mma(acc, k, a, b0, b1):
        c = multiply_add(a[0], a[1], a[2], a[3], b0, b1, acc[k], acc[k + 1], acc[k + 2], acc[k + 3])
        acc[k] = c[0]
        acc[k + 1] = c[1]
        acc[k + 2] = c[2]
        acc[k + 3] = c[3]

    @device
    def multiply(totals, acc, low, kept, held, seen, s):
        for h in range(HALVES):
            end = (s * HALVES + h + 1) * 32  # inputs of the unit so far
            j = (end - 1) // FOLD
            for i in range(2):
                for tile in range(TILES):
                    b = (tile * HALVES + h) * 4 + 2 * i
                    for m in range(LOWS):
                        z = zero_points(held, (m * SC + j) * W)
                        mma(low, (m * TILES + tile) * 4, (z[0], z[1], z[0], z[1]), seen[b], seen[b + 1])
                for m in range(MT):
                    a = matrix(kept, m * (2 * HALVES) + 2 * h + i)
                    if SUBTRACT:
                        z = zero_points(held, (m * SC + j) * W)
                        one = u32(ONE)
                        a = fma(a[0], one, z[0]), fma(a[1], one, z[1]), fma(a[2], one, z[0]), fma(a[3], one, z[1])
                    for tile in range(TILES):
                        b = (tile * HALVES + h) * 4 + 2 * i
                        mma(acc, (m * TILES + tile) * 4, a, seen[b], seen[b + 1])
            if GROUPED and end % FOLD == 0:
                for m in range(MT):
                    scaled(totals, acc, low, held, (m * SC + j) * W, m)
                for i in range(LOWS * TILES * 4):
                    low[i] = f32(0.0)

    return multiply, scaled


def _fetch(plan: Plan, s: int) -> Any:
    """A device function: load the inputs that a lane multiplies in step `s` of a unit, of a row from each block of eight."""
    format, TILES, HALVES = plan.format, plan.blocks, plan.format.step // 32
    one, two, TWO = _load_x(s * HALVES * 64), _load_x((s * HALVES + HALVES - 1) * 64), HALVES == 2
    SCALED, UP = format.kind == "fp8" and format.dtype == "bfloat16", _twice((127 + FP8_UP["bfloat16"][0]) << 7)
    fma = _fma(format.dtype)

    @device
    def put(seen, at, b):
        for i in range(4):
            seen[at + i] = fma(b[i], u32(UP), u32(0x80008000)) if SCALED else b[i]

    @device
    def fetch(seen, x, x0, x1):
        put(seen, 0, one(x, x0))
        if TWO:
            put(seen, 4, two(x, x0))
        if TILES == 2:
            put(seen, 4 * HALVES, one(x, x1))
            if TWO:
                put(seen, 4 * HALVES + 4, two(x, x1))

    return fetch


def _finish(plan: Plan) -> Any:
    """A device function: add the sums of a block's warps and write the result."""
    MT, WARPS, TILES, EACH = plan.tiling.tiles, plan.tiling.warps, plan.blocks, plan.sum_bytes // plan.tiling.warps
    PAIRS, THREADS, FP8 = 8 * MT, 32 * WARPS, plan.format.kind == "fp8"
    pack, load, (up, down) = half_ops(plan.format.dtype).pack, _load_words(2, 1, 0, 0), FP8_UP[plan.format.dtype]
    FACTOR, store, MINE = 2.0 ** (down - up), _store_sums, MT * TILES

    @device
    def finish(out, totals, base, turn, tile, count, size, out_s):
        tid = u32(cuda.threadIdx.x)
        mine = i32(turn + tid // 32 * EACH + tid % 4 * (8 * COLUMN) + tid % 32 // 4 * 4)
        for i in range(MINE):
            k = 4 * i
            store(base, i32(mine + i * (8 * COLUMN * 4)), totals[k], totals[k + 1], totals[k + 2], totals[k + 3])
        cuda.syncthreads()
        for p in range(tid, u32(PAIRS * count), u32(THREADS)):
            r = p // u32(PAIRS)
            pair = p - r * u32(PAIRS)
            n = tile * 16 + i32(pair) * 2
            if n < size:
                block = pair // u32(8) * u32(TILES) + r // u32(8)
                at = i32(
                    turn + i32(block * u32(8 * COLUMN * 4) + r % u32(8) * u32(COLUMN * 4) + pair % u32(8) * u32(8))
                )
                a, b = f32(0.0), f32(0.0)
                for w in range(WARPS):
                    two = load(base, i32(at + w * EACH))
                    a += as_f32(two[0])
                    b += as_f32(two[1])
                if FP8:
                    a, b = a * f32(FACTOR), b * f32(FACTOR)
                out[i64(r) * out_s + n // 2] = pack(a, b)

    return finish


@kernel_maker
def quantized_gemv(format: Format, rows: int, tiling: Tiling) -> CudaKernel:
    """out [rows, N] = x [rows, features] @ weight.T for up to `rows` rows, 8 or 16, and even N of `16 tiling.tiles` or more, padded. Any grid (blocks, 1).

    Sums are float32, and in the same order whatever other rows there are.
    """
    plan = Plan(format, rows, tiling)
    UB, MT, WARPS, DEPTH = plan.unit, tiling.tiles, tiling.warps, tiling.depth
    if rows not in (8, 16) or DEPTH < max(UB, 2) or DEPTH & (DEPTH - 1):
        raise ValueError(f"no such kernel: rows {rows} (8, 16), depth {DEPTH} (a power of two, at least {max(UB, 2)})")
    W, GROUPED, UNITS, X_UNIT = format.scale_words, format.groups > 1, format.steps // UB, UB * format.step // 2
    SLOT, SLOTS, KEPT, SEEN = plan.slot_bytes, DEPTH // UB, 4 * MT, plan.blocks * format.step // 8
    SUMS, LOW = MT * plan.blocks * 4, max(plan.lows, 1) * plan.blocks * 4
    FACTORS, RING, SUM = MT * plan.scales * W, plan.ring_bytes, plan.sum_bytes
    TWICE, ZEROS = plan.buffers == 2, format.zeros
    place, begins, advance = _copies(plan)
    prefill, fetch, finish = _prefill(plan, begins, advance), _fetch(plan, 0), _finish(plan)
    multiply, scaled = _multiply(plan)
    step0, step1, step2, step3 = (_step(plan, min(s, UB - 1), begins, advance, multiply) for s in range(4))
    name = f"quantized_gemv_{format.name}_r{rows}_{tiling.name}"

    @device
    def read_factors(factor, scales, at, g, m):
        for w in range(W):
            factor[m * W + w] = scales[((i64(at) + m) * 8 + g) * W + w]

    @kernel(SIGNATURE, 32 * WARPS, name, tiling.blocks, plan.shared_bytes)
    def matmul(out, x, weight, scales, count, size, x_s, out_s):
        first, lane = i32(cuda.threadIdx.x // u32(32)), i32(cuda.threadIdx.x % u32(32))
        g, t = i32(u32(lane) // u32(4)), i32(u32(lane) % u32(4))
        ring = smem_addr(cuda.shared.array(0, U32))
        kept = cuda.local.array(KEPT, u32)
        factor = cuda.local.array(FACTORS, u32)
        seen = cuda.local.array(SEEN, u32)
        coming = cuda.local.array(SEEN, u32)
        acc = cuda.local.array(SUMS, f32)
        low = cuda.local.array(LOW, f32)
        totals = cuda.local.array(SUMS, f32)
        grid_release()
        tiles = i32((size + 16 * MT - 1) // (16 * MT))
        # the last block's outputs may overlap those of the block before, and are equal there
        last = i32((size + 31) // 32 * 2 - MT)
        mine, held = i32(first * (SLOTS * SLOT) + lane * 16), i32(first * (SLOTS * SLOT) + lane * (4 * W))
        tile, ahead = i32(cuda.blockIdx.x), i32(cuda.blockIdx.x) if first < UNITS else tiles
        turn, here, before, unit = i32(RING), i32(0), i32((SLOTS - 1) * SLOT), first
        w_at, s_at = place(i32(min(ahead * MT, last)), unit)
        state = prefill(ring, mine, held, weight, scales, unit, ahead, w_at, s_at, tiles, last)
        begin = i32(t * 4 + min(first, UNITS - 1) * X_UNIT)
        x0, x1 = i32(min(g, count - 1) * x_s + begin), i32(min(8 + g, count - 1) * x_s + begin)
        grid_wait()
        fetch(seen, x, x0, x1)
        registers, given = (totals, acc, low, kept, factor, seen, coming), (x, weight, scales)
        places, x_at = (ring, mine, held, x0, x1, tiles, last), i32(0)
        for i in range(SUMS):
            acc[i] = f32(0.0)
        for i in range(LOW):
            low[i] = f32(0.0)
        while tile < tiles:
            for i in range(SUMS):
                totals[i] = f32(0.0)
            if ZEROS and not GROUPED:  # the inputs meet the zero points; scales alone can wait, which spares registers
                for m in range(MT):
                    read_factors(factor, scales, i32(min(tile * MT, last)), g, m)
            now = first
            while now < UNITS:
                now = i32(now + WARPS)
                y_at = i32(x_at + WARPS * X_UNIT) if now < UNITS else i32(0)
                state = step0(registers, given, places, here, before, state, x_at, y_at)
                if UB > 1:
                    state = step1(registers, given, places, here, before, state, x_at, y_at)
                if UB > 2:
                    state = step2(registers, given, places, here, before, state, x_at, y_at)
                    state = step3(registers, given, places, here, before, state, x_at, y_at)
                x_at, before, here = y_at, here, i32(here + SLOT)
                if here == SLOTS * SLOT:
                    here = i32(0)
            at = i32(min(tile * MT, last))
            if not GROUPED:
                for m in range(MT):
                    if not ZEROS:
                        read_factors(factor, scales, at, g, m)
                    scaled(totals, acc, low, factor, m * W, m)
                for i in range(LOW):
                    low[i] = f32(0.0)
            finish(out, totals, ring, turn, at, count, size, out_s)
            turn, tile = i32(2 * RING + SUM - turn) if TWICE else turn, i32(tile + cuda.gridDim.x)
            if not TWICE and tile < tiles:
                cuda.syncthreads()

    return matmul


def shared_limit(cc: tuple[int, int]) -> int:
    """Bytes of shared memory that a block can have on a card of this compute capability."""
    little = cc in ((8, 6), (8, 9)) or cc[0] >= 12
    return (99 if little else 163 if cc < (9, 0) else 227) << 10


def choose_tiling(format: Format, outputs: int, rows: int, multiprocessors: int, cc: tuple[int, int]) -> Tiling:
    """How a matmul of up to 16 rows is dealt out, so that the blocks of a multiprocessor have enough shared memory.

    With as much shared memory as compute capability 9.0 has, it is the fastest choice that was measured there and fits the registers.
    """
    tiles, least, int4 = -(-outputs // 32) * 2, Tiling(2, 8, 4, 2), format.kind == "int4"
    if tiles <= 2 * multiprocessors:
        best = Tiling(2, 16, 4, 1)
    elif tiles <= 3 * multiprocessors:
        best = Tiling(3, 8 if int4 else 16, 4, 1)
    else:
        sizes = (3, 2) if not int4 else (4, 3, 2) if rows <= 8 and format.scale_words == 1 else (2,)
        # the fewest tiles for the busiest block
        best = Tiling(min(sizes, key=lambda size: -(-tiles // (2 * multiprocessors * size)) * size), 8, 4, 2)
    room, reserved = shared_limit(cc) + 1024, 1024  # the hardware keeps so much for itself with each block
    for tiling in (best, least, Tiling(2, 16, 4, 1)):
        if tiling.blocks * (Plan(format, 8 if rows <= 8 else 16, tiling).shared_bytes + reserved) <= room:
            return tiling
    return Tiling(2, 8, 4, 1)


@kernel_maker
def dequantize(format: Format) -> CudaKernel:
    """out [outputs, features] in the dtype of the activations: the weights of the outputs from `first` on, a multiple of 16.

    Grid (ceil(outputs / 16), ceil(features / (4 format.step))).
    """
    STEP, W, GROUP, K, WARPS = format.step, format.scale_words, format.group, format.features, 4
    STEPS, GROUPS, HALVES = format.steps, format.groups, STEP // 32
    half, fma = half_ops(format.dtype), _fma(format.dtype)
    lo, hi, pack = half.lo, half.hi, half.pack
    matrix, zero_points, factors = decoder(format)
    one, up = _ONE[format.dtype], {"bfloat16": 0x7B80, "float16": 0x5C00}[format.dtype]
    FACTOR, INT4, INT8 = _twice(one if format.kind == "int4" else up), format.kind == "int4", format.kind == "int8"

    @device
    def times(word, zero, factor):
        number = word if INT8 else fma(word, u32(FACTOR), zero if INT4 else u32(0x80008000))
        return pack(lo(number) * factor, hi(number) * factor)

    @kernel("u32* u32* u32* i32 i32", 32 * WARPS, f"dequantize_{format.name}")
    def write(out, weight, scales, first, size):
        lane, step = cuda.threadIdx.x % 32, cuda.blockIdx.y * WARPS + cuda.threadIdx.x // 32
        g, tile = lane // 4, i64(first // 16 + cuda.blockIdx.x)
        words = cuda.local.array(4, u32)
        held = cuda.local.array(W, u32)
        if step < STEPS:
            a = ldg128_stream(weight, ((tile * STEPS + step) * 32 + lane) * 4)
            for i in range(4):
                words[i] = a[i]
            for h in range(HALVES):
                for w in range(W):
                    held[w] = scales[((tile * GROUPS + (step * STEP + 32 * h) // GROUP) * 8 + g) * W + w]
                z, f = zero_points(held, 0), factors(held, 0)
                p, q = matrix(words, 2 * h), matrix(words, 2 * h + 1)
                for r in range(2):
                    row = cuda.blockIdx.x * 16 + 8 * r + g
                    if row < size:
                        low, high = times(p[r], z[r], f[r]), times(p[2 + r], z[r], f[r])
                        four = (low, high, times(q[r], z[r], f[r]), times(q[2 + r], z[r], f[r]))
                        stg128(out, (i64(row) * K + step * STEP + 32 * h + lane % 4 * 8) // 2, four)

    return write
