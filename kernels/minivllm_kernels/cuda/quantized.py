"""CUDA matmul of up to 16 rows by a weight of 4 or 8 bits, packed in the order of the tensor cores."""

# Generated from nbs/numba_kernels/cuda/quantized.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm_kernels.cuda import warp_sim
from minivllm_kernels.cuda.simt import CudaKernel, cuda, device, f32, half_ops, i32, i64, kernel, u32
from minivllm_kernels.cuda.warp import (
    cp_async16,
    cp_commit,
    grid_release,
    grid_wait,
    instruction,
    ldg128,
    ldg128_stream,
    prmt,
    smem_addr,
    stg128,
)

KINDS = ("int4", "int8", "fp8")
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
        """Inputs of 16 outputs that a warp reads at once, 16 bytes a lane."""
        return 64 if self.kind == "int4" else 32

    @property
    def steps(self) -> int:
        """Of all inputs."""
        return self.features // self.step

    @property
    def groups(self) -> int:
        """Scales of an output."""
        return self.features // self.group

    @property
    def spans(self) -> int:
        """Scales of a step."""
        return 2 if self.groups > 1 and self.group < self.step else 1

    @property
    def scale_words(self) -> int:
        """Words of the scales, and zero points, of two outputs."""
        return 2 if self.zeros or self.scale == "float32" else 1

    @property
    def name(self) -> str:
        """For the names of kernels."""
        zeros = "_zeros" if self.zeros else ""
        return f"{self.kind}_{self.dtype}_k{self.features}_g{self.group}_{self.scale}{zeros}"


_CODES = {"bfloat16": ("bf16", 0x4300, 0x3F80, 4, 0x7B80), "float16": ("f16", 0x6400, 0x3C00, 1, 0x5C00)}
"""PTX name; 128 or 1024, whose lowest bits count ones; one; how far right an exponent of e4m3 goes; what it is too small by then."""


def _twice(half: int) -> int:
    return half << 16 | half


def _read_int4(dtype: str) -> Any:
    """Four bits become the last ones of 128, or 1024; then that and the zero point are taken off."""
    name, magic, one, _, _ = _CODES[dtype]
    half, MAGIC = half_ops(dtype), _twice(magic)
    text = f"mov.b32 one, {_twice(one)};"
    for i in range(4):
        text += f" shr.b32 s, $4, {4 * i}; lop3.b32 s, s, 0xF000F, {MAGIC}, 0xEA; fma.rn.{name}x2 ${i}, s, one, ${5 + i % 2};"

    @instruction(f"{{ .reg .b32 s, one; {text} }}", "u32 u32 u32 u32", "u32 u32 u32")
    def read(word, zero, other):
        """Four pairs; the first and third have one zero point, the others another. See `Format` for how they lie."""
        pairs = [int(word) >> 4 * i & 0x000F000F | MAGIC for i in range(4)]
        return tuple(
            half.pack(half.lo(a) + half.lo(z), half.hi(a) + half.hi(z)) for a, z in zip(pairs, (zero, other) * 2)
        )

    return read


def _read_fp8(dtype: str) -> Any:
    """Sign, exponent and fraction go where they are in `dtype`; the exponent is too small then, which a factor makes good."""
    name, _, _, shift, factor = _CODES[dtype]
    half, SMALL, FACTOR = half_ops(dtype), _twice(0x7F00 >> shift), _twice(factor)
    text = f"mov.b32 f, {FACTOR}; mov.b32 z, 0x80008000;"
    for i in range(4):
        text += f" shl.b32 s, ${4 + i // 2}, {8 - i % 2 * 8}; and.b32 t, s, 0x80008000; shr.b32 s, s, {shift};"
        text += f" lop3.b32 s, s, {SMALL}, t, 0xEA; fma.rn.{name}x2 ${i}, s, f, z;"

    @instruction(f"{{ .reg .b32 s, t, f, z; {text} }}", "u32 u32 u32 u32", "u32 u32")
    def read(word, other):
        """Four pairs: the even and the odd bytes of each word."""
        pairs = [w << at & 0xFFFFFFFF for w in (int(word), int(other)) for at in (8, 0)]
        pairs = [pair & 0x80008000 | pair >> shift & SMALL for pair in pairs]
        return tuple(
            half.pack(half.lo(a) * half.lo(FACTOR), half.hi(a) * half.hi(FACTOR)) for a in map(np.uint32, pairs)
        )

    return read


def _read_int8(dtype: str) -> Any:
    """Each byte becomes the last bits of 2 ** 23."""
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


@instruction("mov.b32 $0, $1;", "f32", "u32")
def as_f32(word):
    """The float32 that a word is."""
    return np.uint32(word).view(np.float32)


@functools.cache
def decoder(format: Format) -> tuple[Any, Any, Any]:
    """Device functions: the words of 16 inputs as matrix A of an mma; and two outputs' zero points and scales."""
    INT4, ZEROS, HALF_SCALE = format.kind == "int4", format.zeros, format.scale != "float32"
    SYMMETRIC = 0x80088008 + _twice(_CODES[format.dtype][1])
    ops = half_ops(format.scale) if HALF_SCALE else None
    lo, hi = (ops.lo, ops.hi) if ops is not None else (as_f32, as_f32)
    read = {"int4": _read_int4, "fp8": _read_fp8, "int8": _read_int8}[format.kind](format.dtype)

    @device
    def matrix(words, at, z):
        if INT4:
            return read(words[at], z[0], z[1])
        return read(words[2 * at], words[2 * at + 1])

    @device
    def zero_points(scales, at):
        if ZEROS:
            return prmt(scales[at + 1], scales[at + 1], u32(0x1010)), prmt(scales[at + 1], scales[at + 1], u32(0x3232))
        return u32(SYMMETRIC), u32(SYMMETRIC)

    @device
    def factors(scales, at):
        if HALF_SCALE:
            return lo(scales[at]), hi(scales[at])
        return as_f32(scales[at]), as_f32(scales[at + 1])

    return matrix, zero_points, factors


@dataclass(frozen=True)
class Tiling:
    """How a matmul is dealt out.

    tiles: of 16 outputs, of a block. warps: of a block; they share the inputs. depth: steps of a warp, one of which is multiplied by while the
    others are under way. blocks: of a multiprocessor. fit: blocks that its registers must be enough for; if these are more, those of the next
    launch can begin to copy before this one has ended.
    """

    tiles: int
    warps: int
    depth: int
    blocks: int
    fit: int

    @property
    def name(self) -> str:
        """For the names of kernels."""
        return f"{self.tiles}x{self.warps}_d{self.depth}_f{self.fit}"


SIGNATURE = "u32* u32* u32* u32* i32 i32 i32 i32"
"""out, x, weight, scales; rows; outputs; words from one row of x, and of out, to the next."""


@instruction(
    "{ .reg .b32 a; add.s32 a, $4, $5; ld.shared.v4.u32 {$0,$1,$2,$3}, [a]; }",
    "u32 u32 u32 u32",
    "u32 i32",
    effect=True,
)
def lds128(base, offset):
    """Four words from byte `offset` of the shared array `base`."""
    return tuple(base[int(offset) // 4 + i] for i in range(4))


@instruction(
    "{ .reg .b32 a; add.s32 a, $0, $1; cp.async.ca.shared.global [a], [$2], 4; }", "", "u32 i32 ptr", effect=True
)
def cp_async4(base, offset, pointer, index):
    """Start copying a word to byte `offset` of the shared array `base`."""
    base[int(offset) // 4] = pointer[index]


@instruction("bar.warp.sync -1;", effect=True)
def warp_sync():
    """The lanes of a warp see what each has written to shared memory."""
    warp_sim.exchange(0)


@functools.cache
def wait_but(groups: int) -> Any:
    """A device function: wait until all groups of copies but the newest `groups` have arrived."""

    @instruction(f"cp.async.wait_group {groups};", effect=True)
    def wait():
        pass

    return wait


def _copy(format: Format, tiling: Tiling) -> Any:
    """A device function: start copying a step, weights and scales, to a slot of the warp's ring.

    w_at, s_at: where they are; of scales that is where those of the tile are, if a warp goes from group to group in no fixed stride.
    """
    STEP, W, GROUP, MT, WARPS, DEPTH = (
        format.step,
        format.scale_words,
        format.group,
        tiling.tiles,
        tiling.warps,
        tiling.depth,
    )
    STEPS, GROUPS, GROUPED = format.steps, format.groups, format.groups > 1
    REGULAR, WHOLE, WORDS = WARPS * STEP % GROUP == 0, STEPS % WARPS == 0, format.spans * format.scale_words

    @device
    def copy(ring, held, weight, scales, w_at, s_at, step, slot):
        lane, at = cuda.threadIdx.x % 32, i32(cuda.threadIdx.x // 32 * DEPTH + slot)
        if WHOLE or step < STEPS:
            for m in range(MT):
                cp_async16(ring, i32(i32(at * (MT * 512)) + i32(m * 512 + lane * 16)), weight, w_at + m * (STEPS * 128))
                if GROUPED and lane % 4 == 0:
                    first = s_at if REGULAR else s_at + i32(step) * STEP // GROUP * (8 * W)
                    for s in range(WORDS):
                        to = i32(i32(at * (MT * WORDS * 32)) + i32((m * 8 + lane // 4) * (WORDS * 4) + s * 4))
                        cp_async4(held, to, scales, first + (m * GROUPS * 8 * W + s // W * 8 * W + s % W))
        cp_commit()

    return copy


def _multiply(format: Format, tiles: int, blocks: int) -> tuple[Any, Any]:
    """Device functions for `tiles` times 16 outputs and `blocks` times 8 rows: multiply by a step, and add up."""
    W, GROUPED, SPANS, HALVES, MT, TILES = (
        format.scale_words,
        format.groups > 1,
        format.spans,
        format.step // 32,
        tiles,
        blocks,
    )
    mma = half_ops(format.dtype).mma
    matrix, zero_points, factors = decoder(format)

    @device
    def scaled(totals, acc, held, at, m):
        """Add the sums of a group, times its scales, and begin anew."""
        f = factors(held, at)
        for tile in range(m * TILES, (m + 1) * TILES):
            totals[4 * tile] += acc[4 * tile] * f[0]
            totals[4 * tile + 1] += acc[4 * tile + 1] * f[0]
            totals[4 * tile + 2] += acc[4 * tile + 2] * f[1]
            totals[4 * tile + 3] += acc[4 * tile + 3] * f[1]
            for i in range(4):
                acc[4 * tile + i] = f32(0.0)

    @device
    def multiply(totals, acc, kept, held, seen):
        """A step: for each 16 inputs an mma for 8 rows."""
        for m in range(MT):
            for h in range(HALVES):
                at = (m * SPANS + (h if SPANS == 2 else 0)) * W
                z = zero_points(held, at)
                for i in range(2):
                    a = matrix(kept, m * (2 * HALVES) + 2 * h + i, z)
                    for tile in range(TILES):
                        k, b = (m * TILES + tile) * 4, (tile * HALVES + h) * 4 + 2 * i
                        c = mma(
                            a[0], a[1], a[2], a[3], seen[b], seen[b + 1], acc[k], acc[k + 1], acc[k + 2], acc[k + 3]
                        )
                        acc[k] = c[0]
                        acc[k + 1] = c[1]
                        acc[k + 2] = c[2]
                        acc[k + 3] = c[3]
                if GROUPED and (SPANS == 2 or h == HALVES - 1):
                    scaled(totals, acc, held, at, m)

    return multiply, scaled


def _finish(dtype: str, rows: int, tiling: Tiling) -> Any:
    """A device function: add what the warps of a block have, and write it."""
    MT, WARPS, TILES, ROWS, PAIRS, THREADS = (
        tiling.tiles,
        tiling.warps,
        rows // 8,
        rows,
        8 * tiling.tiles,
        32 * tiling.warps,
    )
    pack = half_ops(dtype).pack

    @device
    def finish(out, totals, sums, turn, tile, count, size, out_s):
        tid = cuda.threadIdx.x
        warp, g, t = tid // 32, tid % 32 // 4, tid % 4
        for i in range(MT * TILES):
            base = turn + ((warp * MT * TILES + i) * 16 + g) * 8 + 2 * t
            sums[base] = totals[i * 4]
            sums[base + 1] = totals[i * 4 + 1]
            sums[base + 64] = totals[i * 4 + 2]
            sums[base + 65] = totals[i * 4 + 3]
        cuda.syncthreads()
        for p in range(tid, PAIRS * ROWS, THREADS):
            r, o = p % ROWS, p // ROWS * 2
            n = tile * (16 * MT) + o
            if r < count and n < size:
                base = turn + (o // 16 * TILES + r // 8) * 128 + o % 16 * 8 + r % 8
                a, b = f32(0.0), f32(0.0)
                for w in range(WARPS):
                    a += sums[base + w * (MT * TILES * 128)]
                    b += sums[base + w * (MT * TILES * 128) + 8]
                out[i64(r) * out_s + n // 2] = pack(a, b)

    return finish


@functools.cache
def quantized_gemv(format: Format, rows: int, tiling: Tiling) -> CudaKernel:
    """out [rows, N] = x [rows, features] @ weight.T for up to `rows` rows, 8 or 16, and even N. Any grid (blocks, 1).

    Sums are float32, and in the same order whatever other rows there are.
    """
    if rows not in (8, 16) or tiling.depth & (tiling.depth - 1):
        raise ValueError(f"no such kernel: rows {rows} (8, 16), depth {tiling.depth} (a power of two)")
    W, SPANS, GROUPED, STEPS = format.scale_words, format.spans, format.groups > 1, format.steps
    MT, WARPS, DEPTH, HALVES, TILES = tiling.tiles, tiling.warps, tiling.depth, format.step // 32, rows // 8
    EACH, THREADS = -(-STEPS // WARPS), 32 * WARPS
    WHOLE = EACH * WARPS == STEPS
    SLOTS, WORDS = WARPS * DEPTH * MT, SPANS * W
    RING, HELD, SUM = SLOTS * 128, SLOTS * 8 * WORDS if GROUPED else 4, WARPS * MT * TILES * 128
    KEPT, SCALES, SUMS, SEEN = 4 * MT, MT * WORDS, MT * TILES * 4, TILES * HALVES * 4
    TWICE, BOTH = SUM <= 5120, SUM * 2 if SUM <= 5120 else SUM  # then one barrier for a tile is enough
    copy, wait = _copy(format, tiling), wait_but(DEPTH - 2)
    multiply, scaled = _multiply(format, MT, TILES)
    finish, REGULAR = _finish(format.dtype, rows, tiling), WARPS * format.step % format.group == 0
    STRIDE, FIRST = WARPS * format.step // format.group * 8 * W if REGULAR else 0, format.step if REGULAR else 0
    GROUP, GROUPS = format.group, format.groups

    @device
    def start(tile):
        """Where a lane's weights and scales of a tile begin."""
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        w_at = (i64(tile) * (MT * STEPS) + warp) * 128 + lane * 4
        return w_at, (i64(tile) * (MT * GROUPS) + warp * FIRST // GROUP) * (8 * W) + lane // 4 * W

    @kernel(SIGNATURE, THREADS, f"quantized_gemv_{format.name}_r{rows}_{tiling.name}", tiling.fit, RING * 4)
    def matmul(out, x, weight, scales, count, size, x_s, out_s):
        tid = cuda.threadIdx.x
        warp, lane, g, t = tid // 32, tid % 32, tid % 32 // 4, tid % 4
        x0, x1 = i32(min(g, count - 1) * x_s + t * 4), i32(min(8 + g, count - 1) * x_s + t * 4)
        ring = cuda.shared.array(0, U32)
        held = cuda.shared.array(HELD, u32)
        sums = cuda.shared.array(BOTH, f32)
        ring_at, held_at = smem_addr(ring), smem_addr(held)
        kept = cuda.local.array(KEPT, u32)
        factor = cuda.local.array(SCALES, u32)
        seen = cuda.local.array(SEEN, u32)
        acc = cuda.local.array(SUMS, f32)
        totals = cuda.local.array(SUMS, f32)
        grid_release()
        tiles = (size + 16 * MT - 1) // (16 * MT)
        tile, ahead, left, at, turn = i32(cuda.blockIdx.x), i32(cuda.blockIdx.x), i32(EACH), i32(0), i32(0)
        w_at, s_at = start(ahead)
        for j in range(DEPTH - 1):
            if ahead < tiles:
                copy(ring_at, held_at, weight, scales, w_at, s_at, warp + (EACH - left) * WARPS, j)
            else:
                cp_commit()
            w_at, s_at, left = w_at + WARPS * 128, s_at + STRIDE, i32(left - 1)
            if left == 0:
                left, ahead = i32(EACH), i32(ahead + cuda.gridDim.x)
                w_at, s_at = start(ahead)
        grid_wait()
        while tile < tiles:
            for i in range(SUMS):
                acc[i] = f32(0.0)
                totals[i] = f32(0.0)
            x_at = i32(warp * (HALVES * 16))
            for k in range(EACH):
                if WHOLE or warp + k * WARPS < STEPS:
                    for r in range(TILES):
                        for h in range(HALVES):
                            b = ldg128(x, i32((x0 if r == 0 else x1) + x_at) + h * 16)
                            for i in range(4):
                                seen[(r * HALVES + h) * 4 + i] = b[i]
                x_at = i32(x_at + WARPS * HALVES * 16)
                wait()
                if GROUPED:
                    warp_sync()
                slot = i32(warp * DEPTH + (at & (DEPTH - 1)))
                for m in range(MT):
                    a = lds128(ring_at, i32(i32(slot * (MT * 512)) + i32(m * 512 + lane * 16)))
                    for i in range(4):
                        kept[4 * m + i] = a[i]
                    for s in range(WORDS):
                        if GROUPED:
                            factor[m * WORDS + s] = held[
                                i32(i32(slot * (MT * 8 * WORDS)) + i32((m * 8 + g) * WORDS + s))
                            ]
                if ahead < tiles:
                    step = warp + (EACH - left) * WARPS
                    copy(ring_at, held_at, weight, scales, w_at, s_at, step, (at + DEPTH - 1) & (DEPTH - 1))
                else:
                    cp_commit()
                w_at, s_at, left, at = w_at + WARPS * 128, s_at + STRIDE, i32(left - 1), i32(at + 1)
                if left == 0:
                    left, ahead = i32(EACH), i32(ahead + cuda.gridDim.x)
                    w_at, s_at = start(ahead)
                if WHOLE or warp + k * WARPS < STEPS:
                    multiply(totals, acc, kept, factor, seen)
            if not GROUPED:
                for m in range(MT):
                    for w in range(W):
                        factor[m * W + w] = scales[((i64(tile) * MT + m) * 8 + g) * W + w]
                    scaled(totals, acc, factor, m * W, m)
            finish(out, totals, sums, turn, tile, count, size, out_s)
            turn, tile = i32(SUM - turn) if TWICE else turn, i32(tile + cuda.gridDim.x)
            if not TWICE and tile < tiles:
                cuda.syncthreads()

    return matmul


def choose_tiling(outputs: int, multiprocessors: int) -> Tiling:
    """How a matmul of up to 16 rows is dealt out: the best by measurement, whatever the format."""
    return Tiling(2, 8, 4, 2, 2) if outputs > 32 * multiprocessors else Tiling(2, 16, 4, 1, 1)


@functools.cache
def dequantize(format: Format) -> CudaKernel:
    """out [outputs, features] in the dtype of the activations: the weights of output `first`, a multiple of 16, and those behind it.

    Grid (ceil(outputs / 16), ceil(features / (4 format.step))).
    """
    STEP, W, GROUP, K, WARPS = format.step, format.scale_words, format.group, format.features, 4
    STEPS, GROUPS, HALVES = format.steps, format.groups, STEP // 32
    half = half_ops(format.dtype)
    lo, hi, pack = half.lo, half.hi, half.pack
    matrix, zero_points, factors = decoder(format)

    @device
    def times(word, factor):
        return pack(lo(word) * factor, hi(word) * factor)

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
                p, q = matrix(words, 2 * h, z), matrix(words, 2 * h + 1, z)
                for r in range(2):
                    row = cuda.blockIdx.x * 16 + 8 * r + g
                    if row < size:
                        four = (times(p[r], f[r]), times(p[2 + r], f[r]), times(q[r], f[r]), times(q[2 + r], f[r]))
                        stg128(out, (i64(row) * K + step * STEP + 32 * h + lane % 4 * 8) // 2, four)

    return write
