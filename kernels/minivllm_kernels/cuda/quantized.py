"""CUDA matmul of up to 16 rows by a weight of 4 or 8 bits, packed in the order of the tensor cores."""

# Generated from nbs/numba_kernels/cuda/quantized.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm_kernels.cuda.simt import CudaKernel, cuda, device, f32, half_ops, i32, i64, kernel, u32
from minivllm_kernels.cuda.warp import (
    atomic_inc,
    grid_release,
    grid_wait,
    instruction,
    ldcg2,
    ldg128,
    ldg128_stream,
    prmt,
    stg128,
)

KINDS = ("int4", "int8", "fp8")


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
        if self.kind not in KINDS or self.features % self.step:
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

    tiles: of 16 outputs, of a warp. across: warps of a block beside each other. along: warps of a block that share the inputs.
    depth: steps of a warp whose weights are under way at once. split: blocks that share the inputs.
    """

    tiles: int
    across: int
    along: int
    depth: int
    split: int = 1
    min_blocks: int = 1

    @property
    def outputs(self) -> int:
        """Of a block."""
        return 16 * self.tiles * self.across

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.across * self.along

    @property
    def name(self) -> str:
        """For the names of kernels."""
        return f"{self.tiles}x{self.across}x{self.along}_d{self.depth}_s{self.split}_b{self.min_blocks}"


SIGNATURE = "u32* u32* u32* u32* f32* i32* i32 i32 i32 i32"
"""out, x, weight, scales, sums and arrivals of blocks; rows; outputs; words from one row of x, and of out, to the next."""


@device
def _sum_of(sums, base, stride, count):
    """The sum of sums[base], sums[base + stride], ... of `count`."""
    a = sums[base]
    for part in range(1, count):
        a += sums[base + part * stride]
    return a


def _step(format: Format, tiles: int, blocks: int, whole: bool) -> tuple[Any, Any, Any]:
    """Device functions of a warp with `tiles` times 16 outputs and `blocks` times 8 rows: fetch a step, multiply by it, and add up."""
    STEP, W, GROUP, GROUPED = format.step, format.scale_words, format.group, format.group < format.features
    STEPS, GROUPS, MT, TILES, WHOLE = format.steps, format.groups, tiles, blocks, whole
    HALVES, SLICES, SPANS = STEP // 32, STEP // 16, 2 if GROUPED and GROUP < STEP else 1
    mma = half_ops(format.dtype).mma
    matrix, zero_points, factors = decoder(format)

    @device
    def fetch(kept, held, weight, scales, w_at, s_at, step, slot):
        """Bring the weights of a step, and their scales."""
        step = step if WHOLE else min(step, STEPS - 1)
        for m in range(MT):
            a = ldg128_stream(weight, w_at + (step + m * STEPS) * 128)
            for i in range(4):
                kept[(slot * MT + m) * 4 + i] = a[i]
            if GROUPED:
                for s in range(SPANS * W):
                    at = s_at + (step * STEP // GROUP + s // W + m * GROUPS) * (8 * W) + s % W
                    held[(slot * MT + m) * SPANS * W + s] = scales[at]

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
    def multiply(totals, acc, kept, held, seen, slot, m):
        """A step: for each 16 inputs an mma for 8 rows."""
        for h in range(HALVES):
            at = ((slot * MT + m) * SPANS + (h if SPANS == 2 else 0)) * W if GROUPED else m * W
            z = zero_points(held, at)
            for i in range(2):
                a = matrix(kept, (slot * MT + m) * SLICES + 2 * h + i, z)
                for tile in range(TILES):
                    k, b = (m * TILES + tile) * 4, (tile * HALVES + h) * 4 + 2 * i
                    c = mma(a[0], a[1], a[2], a[3], seen[b], seen[b + 1], acc[k], acc[k + 1], acc[k + 2], acc[k + 3])
                    acc[k] = c[0]
                    acc[k + 1] = c[1]
                    acc[k + 2] = c[2]
                    acc[k + 3] = c[3]
            if GROUPED and (SPANS == 2 or h == HALVES - 1):
                scaled(totals, acc, held, at, m)

    return fetch, multiply, scaled


def _finish(dtype: str, rows: int, tiling: Tiling) -> Any:
    """A device function: add what the warps of a block have, and the blocks that share inputs, and write it."""
    WK, SPLIT, BN, THREADS, ROWS = tiling.along, tiling.split, tiling.outputs, tiling.threads, rows
    TILES, PAIRS, SIZE = rows // 8, BN // 2, BN * rows
    pack = half_ops(dtype).pack

    @device
    def write(out, partial, arrivals, sums, arrived, count, size, out_s):
        tid, mine = cuda.threadIdx.x, i64(cuda.blockIdx.x * SPLIT + cuda.blockIdx.y) * SIZE
        for p in range(tid, PAIRS * ROWS, THREADS):
            r, o = p % ROWS, p // ROWS * 2
            n = cuda.blockIdx.x * BN + o
            if r < count and n < size:
                base = (o // 16 * TILES + r // 8) * 128 + o % 16 * 8 + r % 8
                a, b = _sum_of(sums, base, SIZE, WK), _sum_of(sums, base + 8, SIZE, WK)
                if SPLIT > 1:
                    partial[mine + 2 * p] = a
                    partial[mine + 2 * p + 1] = b
                else:
                    out[i64(r) * out_s + n // 2] = pack(a, b)
        if SPLIT > 1:
            cuda.threadfence()
            cuda.syncthreads()
            if tid == 0:
                arrived[0] = atomic_inc(arrivals, cuda.blockIdx.x)
            cuda.syncthreads()
            if arrived[0] == SPLIT - 1:
                cuda.threadfence()
                if tid == 0:
                    arrivals[cuda.blockIdx.x] = 0  # ready for the next launch
                mine -= i64(cuda.blockIdx.y) * SIZE
                for p in range(tid, PAIRS * ROWS, THREADS):
                    r, n = p % ROWS, cuda.blockIdx.x * BN + p // ROWS * 2
                    if r < count and n < size:
                        a, b = f32(0.0), f32(0.0)
                        for y in range(SPLIT):
                            v = ldcg2(partial, mine + y * SIZE + 2 * p)
                            a += v[0]
                            b += v[1]
                        out[i64(r) * out_s + n // 2] = pack(a, b)

    return write


@functools.cache
def quantized_gemv(format: Format, rows: int, tiling: Tiling) -> CudaKernel:
    """out [rows, N] = x [rows, features] @ weight.T for up to `rows` rows, 8 or 16, and even N. Grid (ceil(N / tiling.outputs), tiling.split).

    Sums are float32, and in the same order whatever other rows there are.
    """
    if rows not in (8, 16):
        raise ValueError(f"no such kernel: rows {rows} (8, 16)")
    W, GROUPED, STEPS, GROUPS = format.scale_words, format.group < format.features, format.steps, format.groups
    MT, WM, WK, DEPTH, HALVES = tiling.tiles, tiling.across, tiling.along, tiling.depth, format.step // 32
    PLACES = tiling.split * WK
    ROUNDS = -(-STEPS // (PLACES * DEPTH))
    WHOLE, TILES = STEPS == ROUNDS * PLACES * DEPTH, rows // 8
    KEPT, SCALES = DEPTH * MT * 4, MT * W * (DEPTH * (2 if format.group < format.step else 1) if GROUPED else 1)
    SUMS, SEEN, ALL = MT * TILES * 4, TILES * HALVES * 4, tiling.outputs * WK * rows
    fetch, multiply, scaled = _step(format, MT, TILES, WHOLE)
    finish = _finish(format.dtype, rows, tiling)

    @kernel(SIGNATURE, tiling.threads, f"quantized_gemv_{format.name}_r{rows}_{tiling.name}", tiling.min_blocks)
    def matmul(out, x, weight, scales, partial, arrivals, count, size, x_s, out_s):
        tid = cuda.threadIdx.x
        warp, g, t = tid // 32, tid % 32 // 4, tid % 4
        tile = i64(min(cuda.blockIdx.x * WM + warp % WM, (size + 16 * MT - 1) // (16 * MT) - 1) * MT)
        place = cuda.blockIdx.y * WK + warp // WM
        w_at, s_at = tile * (STEPS * 128) + tid % 32 * 4, (tile * GROUPS * 8 + g) * W
        x0, x1 = i64(min(g, count - 1)) * x_s + t * 4, i64(min(8 + g, count - 1)) * x_s + t * 4
        sums = cuda.shared.array(ALL, f32)
        arrived = cuda.shared.array(1, i32)
        kept = cuda.local.array(KEPT, u32)
        held = cuda.local.array(SCALES, u32)
        seen = cuda.local.array(SEEN, u32)
        acc = cuda.local.array(SUMS, f32)
        totals = cuda.local.array(SUMS, f32)
        for i in range(SUMS):
            acc[i] = f32(0.0)
            totals[i] = f32(0.0)
        grid_release()
        for slot in range(DEPTH):
            fetch(kept, held, weight, scales, w_at, s_at, place + slot * PLACES, slot)
        if not GROUPED:
            for m in range(MT):
                for w in range(W):
                    held[m * W + w] = scales[s_at + m * 8 * W + w]
        grid_wait()
        for round_ in range(ROUNDS):
            for slot in range(DEPTH):
                step = place + (round_ * DEPTH + slot) * PLACES
                if WHOLE or step < STEPS:
                    for r in range(TILES):
                        for h in range(HALVES):
                            b = ldg128(x, (x0 if r == 0 else x1) + (step * HALVES + h) * 16)
                            for i in range(4):
                                seen[(r * HALVES + h) * 4 + i] = b[i]
                    for m in range(MT):
                        multiply(totals, acc, kept, held, seen, slot, m)
                if round_ + 1 < ROUNDS:
                    fetch(kept, held, weight, scales, w_at, s_at, step + DEPTH * PLACES, slot)
        if not GROUPED:
            for m in range(MT):
                scaled(totals, acc, held, m * W, m)
        for i in range(MT * TILES):
            base = ((warp * MT * TILES + i) * 16 + g) * 8 + 2 * t
            sums[base] = totals[i * 4]
            sums[base + 1] = totals[i * 4 + 1]
            sums[base + 64] = totals[i * 4 + 2]
            sums[base + 65] = totals[i * 4 + 3]
        cuda.syncthreads()
        finish(out, partial, arrivals, sums, arrived, count, size, out_s)

    return matmul


def choose_tiling(format: Format, outputs: int, rows: int, multiprocessors: int) -> Tiling:
    """How a matmul of up to 16 rows is dealt out."""
    return Tiling(1, 1, 8, 8)


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
