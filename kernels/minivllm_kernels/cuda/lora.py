"""CUDA kernels for LoRA: shrink and expand of few rows, grouped by adapter."""

# Generated from nbs/numba_kernels/cuda/lora.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from minivllm_kernels.cuda.simt import CudaKernel, cuda, f32, half_ops, i32, i64, kernel, kernel_maker, u32, warp_sum
from minivllm_kernels.cuda.warp import grid_release, grid_wait, ldg128, stg128

ROWS = 4
"""Rows that a block takes at once: those of one adapter share what is read of it."""
RANKS = 4
"""Rows of an A that a block of `lora_shrink` multiplies with. `room` is a multiple of it."""
SHRINK_THREADS, EXPAND_THREADS = 128, 64
_WARPS = SHRINK_THREADS // 32

SHRINK_SIGNATURE = "f32* u32* u32* i32* i32* i32 i32 i32"
"""h, x, A, work, ranks; parts; room; words from one row of x to the next."""


@kernel_maker
def lora_shrink(dtype: str, features: int) -> CudaKernel:
    """h = x A^T for each row in `work`, with the A of its slot. Grid (ceil(rows / ROWS), parts * room / RANKS).

    Columns of h beyond the rank of a row's adapter are not always written.
    """
    if features % 8:
        raise ValueError(f"features {features}: the kernel takes multiples of 8")
    CHUNKS, WORDS, THREADS = features // 8, features // 2, SHRINK_THREADS
    SUMS, ALL, SEEN = ROWS * RANKS, _WARPS * ROWS * RANKS, 4 * ROWS
    half = half_ops(dtype)
    lo, hi = half.lo, half.hi

    @kernel(SHRINK_SIGNATURE, THREADS, f"lora_shrink_{dtype}_k{features}")
    def shrink(h, x, a, work, ranks, parts, room, x_s):
        tid = cuda.threadIdx.x
        first, n = cuda.blockIdx.x * ROWS, cuda.blockIdx.y * RANKS
        part, width = n // room, parts * room
        sums = cuda.shared.array(ALL, f32)
        acc = cuda.local.array(SUMS, f32)
        seen = cuda.local.array(SEEN, u32)
        slots = cuda.local.array(ROWS, i32)
        at = cuda.local.array(ROWS, i64)
        grid_release()
        grid_wait()
        used = work[0]
        wanted = False
        for i in range(ROWS):
            pair = 2 + 2 * max(min(first + i, used - 1), 0)
            at[i] = i64(work[pair]) * x_s
            slots[i] = work[pair + 1]
            wanted = wanted or (first < used and n - part * room < ranks[slots[i] * parts + part])
        if not wanted:
            return
        for s in range(SUMS):
            acc[s] = f32(0.0)
        for c in range(tid, CHUNKS, THREADS):
            for i in range(ROWS):
                b = ldg128(x, at[i] + c * 4)
                for k in range(4):
                    seen[i * 4 + k] = b[k]
            for q in range(RANKS):
                w = ldg128(a, (i64(slots[0]) * width + n + q) * WORDS + c * 4)
                for i in range(ROWS):
                    if i > 0 and slots[i] != slots[i - 1]:
                        w = ldg128(a, (i64(slots[i]) * width + n + q) * WORDS + c * 4)
                    for k in range(4):
                        acc[i * RANKS + q] += lo(w[k]) * lo(seen[i * 4 + k])
                        acc[i * RANKS + q] += hi(w[k]) * hi(seen[i * 4 + k])
        for s in range(SUMS):
            acc[s] = warp_sum(acc[s])
        if tid % 32 == 0:
            for s in range(SUMS):
                sums[tid // 32 * SUMS + s] = acc[s]
        cuda.syncthreads()
        if tid < SUMS and first + tid // RANKS < used:
            total = sums[tid]
            for warp in range(1, _WARPS):
                total += sums[warp * SUMS + tid]
            h[i64(first + tid // RANKS) * width + n + tid % RANKS] = total

    return shrink


EXPAND_SIGNATURE = "u32* f32* u32* i32* i32* i32* i32 i32 i32 i32"
"""out, h, B, work, ranks, the part of each 8 outputs; parts; room; outputs; words from one row of out to the next."""


@kernel_maker
def lora_expand(dtype: str) -> CudaKernel:
    """out += h B^T, in place, for each row in `work`, with the B of its slot. Ranks are multiples of 8.

    Grid (ceil(rows / ROWS), ceil(outputs / (8 EXPAND_THREADS))).
    """
    KEPT, ONCE = 8 * ROWS, 8
    half = half_ops(dtype)
    lo, hi, pack = half.lo, half.hi, half.pack

    @kernel(EXPAND_SIGNATURE, EXPAND_THREADS, f"lora_expand_{dtype}")
    def expand(out, h, b, work, ranks, part_of, parts, room, outputs, out_s):
        e = cuda.blockIdx.y * EXPAND_THREADS + cuda.threadIdx.x
        first, width = cuda.blockIdx.x * ROWS, parts * room
        acc = cuda.local.array(KEPT, f32)
        slots = cuda.local.array(ROWS, i32)
        counts = cuda.local.array(ROWS, i32)
        grid_release()
        grid_wait()
        used = work[0]
        if first >= used or e * 8 >= outputs:
            return
        part = part_of[e]
        most = i32(0)
        for i in range(ROWS):
            slots[i] = work[3 + 2 * min(first + i, used - 1)]
            counts[i] = ranks[slots[i] * parts + part] if first + i < used else i32(0)
            most = max(most, counts[i])
        for s in range(KEPT):
            acc[s] = f32(0.0)
        for start in range(0, most, ONCE):
            for q in range(ONCE):
                r = start + q
                w = ldg128(b, ((i64(slots[0]) * room + r) * outputs) // 2 + e * 4)
                for i in range(ROWS):
                    if i > 0 and slots[i] != slots[i - 1]:
                        w = ldg128(b, ((i64(slots[i]) * room + r) * outputs) // 2 + e * 4)
                    if r < counts[i]:
                        v = h[i64(first + i) * width + part * room + r]
                        for k in range(4):
                            acc[i * 8 + 2 * k] += v * lo(w[k])
                            acc[i * 8 + 2 * k + 1] += v * hi(w[k])
        for i in range(ROWS):
            if counts[i] > 0:
                at = i64(work[2 + 2 * (first + i)]) * out_s + e * 4
                y = ldg128(out, at)
                s = i * 8
                z0 = pack(lo(y[0]) + acc[s], hi(y[0]) + acc[s + 1])
                z1 = pack(lo(y[1]) + acc[s + 2], hi(y[1]) + acc[s + 3])
                z2 = pack(lo(y[2]) + acc[s + 4], hi(y[2]) + acc[s + 5])
                z3 = pack(lo(y[3]) + acc[s + 6], hi(y[3]) + acc[s + 7])
                stg128(out, at, (z0, z1, z2, z3))

    return expand
