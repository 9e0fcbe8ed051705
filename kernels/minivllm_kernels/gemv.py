"""What is a matrix product for three requests?

Question: with one to eight tokens in the batch, a linear layer reads its whole weight and does
hardly any arithmetic with it.
"""

# Generated from nbs/4_kernels/08b_gemv.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=7687ed88f337 module=19f1bdf299e0

import functools
from dataclasses import dataclass

from minivllm_kernels.simt import Kernel, cuda, f32, half_ops, i64, kernel, ldg128, ldg128_stream, shfl_xor, u32

__all__ = [
    "FMA_ROWS",
    "FMA_WARPS",
    "GEMV_SIGNATURE",
    "MMA_WARPS",
    "WANTED_WARPS",
    "Gemv",
    "choose_gemv",
    "fma_gemv",
    "fma_split",
    "mma_gemv",
    "mma_split",
]


# %% nbs/4_kernels/08b_gemv.ipynb #fma_gemv
FMA_ROWS = (1, 2, 4)
"""Numbers of rows that `fma_gemv` is built for; a batch takes the next larger one."""
GEMV_SIGNATURE = "u32* u32* u32* i32 i32 i32 i32"
"""out, x, weight; rows; outputs; words from one row of x, and of out, to the next."""
FMA_WARPS, MMA_WARPS = 4, 8  # of a block


@functools.cache
def fma_gemv(dtype: str, features: int, rows: int, outputs: int, split: int) -> Kernel:
    """out [rows, N] = x [rows, features] @ weight [N, features].T, for even N. `split` warps share `outputs` outputs.

    Grid (ceil(N split / (FMA_WARPS outputs)), 1).
    """
    if features % 8 or rows not in FMA_ROWS or outputs not in (2, 4) or rows * outputs > 8 or split not in (1, 2, 4):
        raise ValueError(
            f"no such kernel: features {features} (a multiple of 8), rows {rows} (1, 2, 4), outputs {outputs} (2, 4; sums for at"
            f" most 8 are kept in registers), split {split} (1, 2, 4)"
        )
    CHUNKS = features // 8  # 16-byte pieces of a row
    WORDS, R, OUT, SPLIT = features // 2, rows, outputs, split
    EACH = -(-CHUNKS // (32 * SPLIT))
    WHOLE = CHUNKS % (32 * SPLIT) == 0
    GROUPS, SUMS = FMA_WARPS // SPLIT, OUT * rows
    PAIRS, ALL, UNPACKED = SUMS // 2, FMA_WARPS * SUMS, 8 * OUT
    half = half_ops(dtype)
    lo, hi, pack = half.lo, half.hi, half.pack
    name = f"fma_gemv_{dtype}_k{features}_r{rows}_o{outputs}_s{split}"

    @kernel(GEMV_SIGNATURE, threads=32 * FMA_WARPS, name=name)
    def product(out, x, weight, count, size, x_s, out_s):
        tid = cuda.threadIdx.x
        warp = tid // 32
        first = (cuda.blockIdx.x * GROUPS + warp // SPLIT) * OUT
        sums = cuda.shared.array(ALL, f32)
        acc = cuda.local.array(SUMS, f32)
        w = cuda.local.array(UNPACKED, f32)
        for i in range(SUMS):
            acc[i] = f32(0.0)
        for c in range(EACH):
            at = (c * SPLIT + warp % SPLIT) * 32 + tid % 32
            if WHOLE or at < CHUNKS:
                for o in range(OUT):
                    a = ldg128_stream(weight, i64(min(first + o, size - 1)) * WORDS + at * 4)
                    for i in range(4):
                        w[o * 8 + 2 * i] = lo(a[i])
                        w[o * 8 + 2 * i + 1] = hi(a[i])
                for r in range(R):
                    b = ldg128(x, i64(min(r, count - 1)) * x_s + at * 4)
                    for i in range(4):
                        for o in range(OUT):
                            acc[o * R + r] += w[o * 8 + 2 * i] * lo(b[i])
                            acc[o * R + r] += w[o * 8 + 2 * i + 1] * hi(b[i])
        for step in range(5):
            for i in range(SUMS):
                acc[i] += shfl_xor(acc[i], 16 >> step)
        if tid % 32 == 0:
            for i in range(SUMS):
                sums[warp * SUMS + i] = acc[i]
        cuda.syncthreads()
        if tid < GROUPS * PAIRS:
            group = tid // PAIRS
            r = tid % PAIRS // (OUT // 2)
            o = tid % (OUT // 2) * 2
            n = (cuda.blockIdx.x * GROUPS + group) * OUT + o
            if r < count and n < size:
                a0 = f32(0.0)
                a1 = f32(0.0)
                for part in range(SPLIT):
                    base = (group * SPLIT + part) * SUMS + o * R + r
                    a0 += sums[base]
                    a1 += sums[base + R]
                out[i64(r) * out_s + n // 2] = pack(a0, a1)

    return product


# %% nbs/4_kernels/08b_gemv.ipynb #mma_gemv
@functools.cache
def mma_gemv(dtype: str, features: int, split: int) -> Kernel:
    """out [up to 8, N] = x [up to 8, features] @ weight [N, features].T, for even N. `split` warps share 16 outputs.

    Grid (ceil(N split / (16 MMA_WARPS)), 1).
    """
    if features % 8 or split not in (1, 2, 4, 8):
        raise ValueError(f"no such kernel: features {features} (a multiple of 8), split {split} (1, 2, 4, 8)")
    CHUNKS, WORDS, SPLIT = features // 8, features // 2, split
    EACH = -(-CHUNKS // (16 * SPLIT))  # rounds of four steps of 4 lanes
    WHOLE = CHUNKS % (16 * SPLIT) == 0
    GROUPS, THREADS, ALL = MMA_WARPS // SPLIT, 32 * MMA_WARPS, MMA_WARPS * 128
    half = half_ops(dtype)
    mma, pack = half.mma, half.pack

    @kernel(GEMV_SIGNATURE, threads=THREADS, name=f"mma_gemv_{dtype}_k{features}_s{split}")
    def product(out, x, weight, count, size, x_s, out_s):
        warp = cuda.threadIdx.x // 32
        g = cuda.threadIdx.x % 32 // 4
        t = cuda.threadIdx.x % 4
        first = (cuda.blockIdx.x * GROUPS + warp // SPLIT) * 16
        low = i64(min(first + g, size - 1)) * WORDS
        high = i64(min(first + g + 8, size - 1)) * WORDS
        row = i64(min(g, count - 1)) * x_s
        sums = cuda.shared.array(ALL, f32)
        w = cuda.local.array(48, u32)
        c = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
        for round_ in range(EACH):
            for u in range(4):
                at = ((round_ * 4 + u) * SPLIT + warp % SPLIT) * 4 + t
                inside = WHOLE or at < CHUNKS
                at = at * 4 if inside else 0
                a = ldg128_stream(weight, low + at)
                b = ldg128_stream(weight, high + at)
                v = ldg128(x, row + at)
                for i in range(4):
                    w[u * 12 + i] = a[i]
                    w[u * 12 + 4 + i] = b[i]
                    w[u * 12 + 8 + i] = v[i] if inside else u32(0)
            for u in range(4):
                k = u * 12
                c = mma(w[k], w[k + 4], w[k + 1], w[k + 5], w[k + 8], w[k + 9], c[0], c[1], c[2], c[3])
                c = mma(w[k + 2], w[k + 6], w[k + 3], w[k + 7], w[k + 10], w[k + 11], c[0], c[1], c[2], c[3])
        base = (warp * 16 + g) * 8 + 2 * t
        sums[base] = c[0]
        sums[base + 1] = c[1]
        sums[base + 64] = c[2]
        sums[base + 65] = c[3]
        cuda.syncthreads()
        for p in range(cuda.threadIdx.x, GROUPS * 64, THREADS):
            r = p % 8
            n = (cuda.blockIdx.x * GROUPS + p // 64) * 16 + p % 64 // 8 * 2
            if r < count and n < size:
                a0 = f32(0.0)
                a1 = f32(0.0)
                for part in range(SPLIT):
                    at = (p // 64 * SPLIT + part) * 128 + p % 64 // 8 * 16 + r
                    a0 += sums[at]
                    a1 += sums[at + 8]
                out[i64(r) * out_s + n // 2] = pack(a0, a1)

    return product


# %% nbs/4_kernels/08b_gemv.ipynb #Gemv
WANTED_WARPS = 16  # a multiprocessor


@dataclass(frozen=True)
class Gemv:
    """A kernel for a product, and the blocks to launch it with."""

    kernel: Kernel
    blocks: int


def fma_split(size: int, outputs: int, multiprocessors: int) -> int:
    """Warps that share `outputs` of `size` outputs: as few as fill the card, at most 4."""
    return next((s for s in (1, 2) if size // outputs * s >= WANTED_WARPS * multiprocessors), 4)


def mma_split(size: int, multiprocessors: int) -> int:
    """Warps that share 16 of `size` outputs: as few as fill the card, at most 8."""
    return next((s for s in (1, 2, 4) if size // 16 * s >= WANTED_WARPS * multiprocessors), 8)


def choose_gemv(kind: str, dtype: str, features: int, size: int, rows: int, multiprocessors: int) -> Gemv:
    """The kernel of a kind, "fma" for up to 4 rows or "mma" for up to 8, for a weight [size, features]."""
    if kind == "mma" and rows <= 8:
        split = mma_split(size, multiprocessors)
        return Gemv(mma_gemv(dtype, features, split), -(-size * split // (16 * MMA_WARPS)))
    built = next((n for n in FMA_ROWS if n >= rows), None)
    if kind != "fma" or built is None:
        raise ValueError(f'no such kernel: "fma" takes up to 4 rows, "mma" up to 8; asked for {kind!r} and {rows}')
    outputs = min(4, 8 // built)
    split = fma_split(size, outputs, multiprocessors)
    return Gemv(fma_gemv(dtype, features, built, outputs, split), -(-size * split // (FMA_WARPS * outputs)))
