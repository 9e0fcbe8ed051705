"""CUDA matmul of up to 16 rows by a weight, on CUDA cores and on tensor cores."""

# Generated from nbs/numba_kernels/cuda/gemv.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass

from minivllm_kernels.cuda.pointwise import silu_word
from minivllm_kernels.cuda.simt import CudaKernel, cuda, device, f32, half_ops, i64, kernel, kernel_maker, u32
from minivllm_kernels.cuda.warp import grid_release, grid_wait, ldg128, ldg128_stream, shfl_xor

GEMV_SIGNATURE = "u32* u32* u32* i32 i32 i32 i32"
"""out, x, weight; rows; outputs; words from one row of x, and of out, to the next."""
FMA_WARPS = 4  # of a block
HELD_WORDS = 64  # of weights in a thread's registers


@device
def _sum_of(sums, base, stride, count):
    """The sum of sums[base], sums[base + stride], ... of `count`."""
    a = sums[base]
    for part in range(1, count):
        a += sums[base + part * stride]
    return a


def _rounds(each: int, most: int) -> tuple[int, int]:
    """The fewest rounds in which a thread reads `each` pieces of weights, at most `most` per round: (rounds, pieces per round)."""
    rounds = -(-each // most)
    return rounds, -(-each // rounds)


@kernel_maker
def fma_gemv(dtype: str, features: int, split: int, gated: bool = False) -> CudaKernel:
    """out [1, N] = x [1, features] @ weight [N, features].T, for even N. `split` warps share 2 rows of the weight, or 4 if gated.

    gated: the weight is [2 N, features], and out = silu(the first N) * the other N. Both are rounded first, as they are for `silu_mul`.
    Grid (ceil(N split / (2 FMA_WARPS)), 1).
    """
    if features % 8 or split not in (1, 2, 4):
        raise ValueError(f"no such kernel: features {features} (a multiple of 8), split {split} (1, 2, 4)")
    CHUNKS = features // 8  # 16-byte pieces of a row
    WORDS, OUT, SPLIT, GATED = features // 2, 4 if gated else 2, split, gated
    ROUNDS, HELD = _rounds(-(-CHUNKS // (32 * SPLIT)), HELD_WORDS // 4 // OUT)
    WHOLE = CHUNKS == ROUNDS * HELD * 32 * SPLIT
    GROUPS, ALL, KEPT = FMA_WARPS // SPLIT, FMA_WARPS * OUT, 4 * HELD * OUT
    half = half_ops(dtype)
    lo, hi, pack, silu = half.lo, half.hi, half.pack, silu_word(dtype)

    @device
    def fetch(kept, weight, first, size, place):
        for c in range(HELD):
            at = min(place + c * (32 * SPLIT), CHUNKS - 1) * 4
            for o in range(OUT):
                row = min(first + o % 2, size - 1) + o // 2 * size
                a = ldg128_stream(weight, i64(row) * WORDS + at)
                for i in range(4):
                    kept[(c * OUT + o) * 4 + i] = a[i]

    @kernel(GEMV_SIGNATURE, 32 * FMA_WARPS, f"fma_gemv_{dtype}_k{features}_s{split}" + ("_gated" if gated else ""))
    def matmul(out, x, weight, count, size, x_s, out_s):
        tid = cuda.threadIdx.x
        warp = tid // 32
        first = (cuda.blockIdx.x * GROUPS + warp // SPLIT) * 2
        place = warp % SPLIT * 32 + tid % 32
        sums = cuda.shared.array(ALL, f32)
        acc = cuda.local.array(OUT, f32)
        kept = cuda.local.array(KEPT, u32)
        for o in range(OUT):
            acc[o] = f32(0.0)
        grid_release()
        fetch(kept, weight, first, size, place)
        grid_wait()
        for round_ in range(ROUNDS):
            if round_ > 0:
                fetch(kept, weight, first, size, place)
            for c in range(HELD):
                at = place + c * (32 * SPLIT)
                if WHOLE or at < CHUNKS:
                    b = ldg128(x, at * 4)
                    for i in range(4):
                        for o in range(OUT):
                            w = kept[(c * OUT + o) * 4 + i]
                            acc[o] += lo(w) * lo(b[i])
                            acc[o] += hi(w) * hi(b[i])
            place += HELD * 32 * SPLIT
        for step in range(5):
            for o in range(OUT):
                acc[o] += shfl_xor(acc[o], 16 >> step)
        if tid % 32 == 0:
            for o in range(OUT):
                sums[warp * OUT + o] = acc[o]
        cuda.syncthreads()
        n = cuda.blockIdx.x * GROUPS + tid
        if tid < GROUPS and 2 * n < size:
            base = tid * SPLIT * OUT
            word = pack(_sum_of(sums, base, OUT, SPLIT), _sum_of(sums, base + 1, OUT, SPLIT))
            if GATED:
                up = pack(_sum_of(sums, base + 2, OUT, SPLIT), _sum_of(sums, base + 3, OUT, SPLIT))
                word = silu(word, up)
            out[n] = word

    return matmul


MMA_ROWS = (8, 16)
"""Numbers of rows that `mma_gemv` is built for; a batch takes the next larger one."""
X_WORDS = 64  # of x in a thread's registers


def mma_warps(split: int) -> int:
    """Warps of a block of `mma_gemv`: few, so that many blocks fit on a multiprocessor."""
    return max(4, split)


@kernel_maker
def mma_gemv(dtype: str, features: int, rows: int, split: int, gated: bool = False) -> CudaKernel:
    """As `fma_gemv`, for up to `rows` rows. `split` warps share 16 rows of the weight, 8 and 8 if gated.

    Grid (ceil(rows of the weight * split / (16 mma_warps(split))), 1).
    """
    if features % 8 or rows not in MMA_ROWS or split not in (1, 2, 4, 8, 16):
        raise ValueError(
            f"no such kernel: features {features} (a multiple of 8), rows {rows} (8, 16), split {split} (1, 2, 4, 8, 16)"
        )
    CHUNKS, WORDS, SPLIT, TILES, GATED = features // 8, features // 2, split, rows // 8, gated
    held = HELD_WORDS if split < 16 else HELD_WORDS - 16  # 16 warps have 128 registers each
    ROUNDS, STEPS = _rounds(-(-CHUNKS // (4 * SPLIT)), held // 8)  # steps of 4 lanes
    ONCE = min(STEPS, X_WORDS // 4 // TILES)
    WHOLE = CHUNKS == ROUNDS * STEPS * 4 * SPLIT
    WARPS = mma_warps(split)
    GROUPS, THREADS, STRIDE = WARPS // SPLIT, 32 * WARPS, 128 * TILES
    KEPT, SEEN, SUMS, ALL, ROWS = 8 * STEPS, 4 * TILES * ONCE, 4 * TILES, WARPS * STRIDE, rows
    NEW, PAIRS = 8 if gated else 16, 4 if gated else 8
    half = half_ops(dtype)
    mma, pack, silu = half.mma, half.pack, silu_word(dtype)
    name = f"mma_gemv_{dtype}_k{features}_r{rows}_s{split}" + ("_gated" if gated else "")

    @device
    def fetch(kept, weight, low, high, place):
        for u in range(STEPS):
            at = min(place + u * (4 * SPLIT), CHUNKS - 1) * 4
            a = ldg128_stream(weight, low + at)
            b = ldg128_stream(weight, high + at)
            for i in range(4):
                kept[u * 8 + 2 * i] = a[i]
                kept[u * 8 + 2 * i + 1] = b[i]

    @kernel(GEMV_SIGNATURE, THREADS, name, min_blocks=1)
    def matmul(out, x, weight, count, size, x_s, out_s):
        warp = cuda.threadIdx.x // 32
        g = cuda.threadIdx.x % 32 // 4
        first = (cuda.blockIdx.x * GROUPS + warp // SPLIT) * NEW + g
        low = i64(min(first, size - 1)) * WORDS
        high = i64(size + min(first, size - 1) if GATED else min(first + 8, size - 1)) * WORDS
        place = warp % SPLIT * 4 + cuda.threadIdx.x % 4
        sums = cuda.shared.array(ALL, f32)
        kept = cuda.local.array(KEPT, u32)
        seen = cuda.local.array(SEEN, u32)
        acc = cuda.local.array(SUMS, f32)
        for i in range(SUMS):
            acc[i] = f32(0.0)
        grid_release()
        fetch(kept, weight, low, high, place)
        grid_wait()
        for round_ in range(ROUNDS):
            if round_ > 0:
                fetch(kept, weight, low, high, place)
            for begin in range(0, STEPS, ONCE):
                for v in range(ONCE):
                    if begin + v < STEPS:
                        at = place + (begin + v) * (4 * SPLIT)
                        inside = WHOLE or at < CHUNKS
                        at = at * 4 if inside else 0
                        for tile in range(TILES):
                            b = ldg128(x, i64(min(tile * 8 + g, count - 1)) * x_s + at)
                            for i in range(4):
                                seen[(v * TILES + tile) * 4 + i] = b[i] if inside else u32(0)
                for v in range(ONCE):
                    if begin + v < STEPS:
                        for tile in range(TILES):
                            i = tile * 4
                            c = (acc[i], acc[i + 1], acc[i + 2], acc[i + 3])
                            for h in range(2):
                                k = (begin + v) * 8 + 4 * h
                                b = (v * TILES + tile) * 4 + 2 * h
                                x0, x1 = seen[b], seen[b + 1]
                                c = mma(kept[k], kept[k + 1], kept[k + 2], kept[k + 3], x0, x1, c[0], c[1], c[2], c[3])
                            acc[i] = c[0]
                            acc[i + 1] = c[1]
                            acc[i + 2] = c[2]
                            acc[i + 3] = c[3]
            place += STEPS * 4 * SPLIT
        for tile in range(TILES):
            base = ((warp * TILES + tile) * 16 + g) * 8 + 2 * (cuda.threadIdx.x % 4)
            sums[base] = acc[tile * 4]
            sums[base + 1] = acc[tile * 4 + 1]
            sums[base + 64] = acc[tile * 4 + 2]
            sums[base + 65] = acc[tile * 4 + 3]
        cuda.syncthreads()
        for p in range(cuda.threadIdx.x, GROUPS * PAIRS * ROWS, THREADS):
            r = p % ROWS
            o = p // ROWS % PAIRS * 2
            group = p // ROWS // PAIRS
            n = (cuda.blockIdx.x * GROUPS + group) * NEW + o
            if r < count and n < size:
                base = (group * SPLIT * TILES + r // 8) * 128 + o * 8 + r % 8
                word = pack(_sum_of(sums, base, STRIDE, SPLIT), _sum_of(sums, base + 8, STRIDE, SPLIT))
                if GATED:
                    base += 64
                    up = pack(_sum_of(sums, base, STRIDE, SPLIT), _sum_of(sums, base + 8, STRIDE, SPLIT))
                    word = silu(word, up)
                out[i64(r) * out_s + n // 2] = word

    return matmul


FMA_BUSY, MMA_BUSY = 16, 6  # warps that a multiprocessor should have at least
LONG_BUSY = 8  # of `mma_gemv`, if a row is too long for four warps to hold in two rounds


@dataclass(frozen=True)
class Gemv:
    """A kernel for a matmul, and the blocks to launch it with."""

    kernel: CudaKernel
    blocks: int


def _split(tasks: int, splits: tuple[int, ...], wanted: int) -> int:
    """Warps that share each of `tasks` parts of a weight: the first of `splits` that gives `wanted` warps, else the last."""
    return next((split for split in splits if tasks * split >= wanted), splits[-1])


def choose_gemv(
    dtype: str, features: int, size: int, rows: int, multiprocessors: int, *, gated: bool = False, kind: str = "auto"
) -> Gemv:
    """The kernel for up to 16 rows and a weight [size, features]: "fma" for one row, "mma" for more.

    The shares were chosen by measurement; one warp alone for a part of a weight was never the best.
    """
    kind = ("fma" if rows == 1 else "mma") if kind == "auto" else kind
    built = next((n for n in {"fma": (1,), "mma": MMA_ROWS}.get(kind, ()) if n >= rows), None)
    if built is None:
        raise ValueError(f'no such kernel: "fma" takes one row, "mma" up to 16; asked for {kind!r} and {rows}')
    if kind == "fma":
        tasks, held = size // (4 if gated else 2), HELD_WORDS // (16 if gated else 8)
        short = _rounds(-(-features // 512), held)[0] <= 2  # with more rounds two warps took more than twice as long
        split = _split(tasks, (2, 4) if short else (4,), FMA_BUSY * multiprocessors)
        return Gemv(fma_gemv(dtype, features, split, gated), -(-tasks * split // FMA_WARPS))
    tasks, busy = -(-size // 16), MMA_BUSY if features <= 4 * HELD_WORDS * 8 else LONG_BUSY
    split = _split(tasks, (4, 8, 16), busy * multiprocessors)
    return Gemv(mma_gemv(dtype, features, built, split, gated), -(-tasks * split // mma_warps(split)))
