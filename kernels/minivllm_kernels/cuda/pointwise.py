"""CUDA kernels for add + RMS norm, rotary embedding with cache write, SiLU gate, argmax."""

# Generated from nbs/numba_kernels/cuda/pointwise.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from typing import Any

from minivllm_kernels.cuda.cache import head_lanes, head_writer, load_head_words
from minivllm_kernels.cuda.simt import (
    LOG2E,
    CudaKernel,
    cuda,
    device,
    f32,
    group_sum,
    half_ops,
    i32,
    i64,
    kernel,
    kernel_maker,
    u32,
    warp_max,
    warp_sum,
)
from minivllm_kernels.cuda.warp import (
    as_f32,
    as_word,
    exp2,
    fmax,
    fmax_or_nan,
    grid_release,
    grid_wait,
    ldg128,
    ldg128_stream,
    rsqrt,
    shfl_xor,
    stg128,
)

EARLY_ROWS = 16
"""The most rows with which these kernels start early. With more, a step is no faster, or is slower."""
NORM_SIGNATURE = "u32* u32* u32* u32* f32 i32 i32 i32"
"""out, residual, x, weight; eps; 1 if there is a residual to add; words from one row of x and of out to the next."""


@kernel_maker
def add_rms_norm(dtype: str, hidden: int) -> CudaKernel:
    """residual += x; out = rms_norm(residual) * weight. Grid (tokens, 1). Without residual: out = rms_norm(x) * weight."""
    if hidden % 8 or not 8 <= hidden <= 16384:
        raise ValueError(f"hidden size {hidden}: the norm kernel takes multiples of 8 up to 16384")
    CHUNKS = hidden // 8  # 16-byte pieces of a row
    THREADS = min(512, -(-CHUNKS // 32) * 32)
    EACH, WARPS = -(-CHUNKS // THREADS), THREADS // 32
    N4, N8 = EACH * 4, EACH * 8
    half = half_ops(dtype)
    lo, hi, pack = half.lo, half.hi, half.pack

    @device
    def add(a, b):
        return pack(lo(a) + lo(b), hi(a) + hi(b))

    @device
    def scaled(v, i, scale, gain):
        return pack(v[i] * scale * lo(gain), v[i + 1] * scale * hi(gain))

    @kernel(NORM_SIGNATURE, threads=THREADS, name=f"add_rms_norm_{dtype}_{hidden}", early_blocks=EARLY_ROWS)
    def norm(out, residual, x, weight, eps, with_residual, x_s, out_s):
        tid = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x)
        sums = cuda.shared.array(WARPS, f32)
        v = cuda.local.array(N8, f32)
        gains = cuda.local.array(N4, u32)
        s = f32(0.0)
        grid_release()
        for c in range(EACH):
            at = min(tid + c * THREADS, CHUNKS - 1) * 4
            g = ldg128_stream(weight, at)
            for w in range(4):
                gains[c * 4 + w] = g[w]
        grid_wait()
        for c in range(EACH):
            at = (tid + c * THREADS) * 4
            if tid + c * THREADS < CHUNKS:
                a = ldg128(x, row * x_s + at)
                if with_residual != 0:
                    b = ldg128(residual, row * (hidden // 2) + at)
                    a = (add(a[0], b[0]), add(a[1], b[1]), add(a[2], b[2]), add(a[3], b[3]))
                    stg128(residual, row * (hidden // 2) + at, a)
                for w in range(4):
                    v[c * 8 + 2 * w] = lo(a[w])
                    v[c * 8 + 2 * w + 1] = hi(a[w])
                for w in range(8):
                    s += v[c * 8 + w] * v[c * 8 + w]
        s = warp_sum(s)
        if tid % 32 == 0:
            sums[tid // 32] = s
        cuda.syncthreads()
        s = f32(0.0)
        for w in range(WARPS):
            s += sums[w]
        scale = rsqrt(s / f32(hidden) + eps)
        for c in range(EACH):
            at = (tid + c * THREADS) * 4
            if tid + c * THREADS < CHUNKS:
                i, g = c * 8, c * 4
                y0 = scaled(v, i, scale, gains[g])
                y1 = scaled(v, i + 2, scale, gains[g + 1])
                y2 = scaled(v, i + 4, scale, gains[g + 2])
                y3 = scaled(v, i + 6, scale, gains[g + 3])
                stg128(out, row * out_s + at, (y0, y1, y2, y3))

    return norm


ROPE_SIGNATURE = " ".join(
    ["u32* u32* u32* u32* u32*"]  # qkv, kc and vc (the K and the V cache), weight of the q norm, of the k norm
    + ["u32* i64* i64*"]  # table float32 [positions, D] of D/2 cosines then D/2 sines; positions; slots
    + ["f32 f32 f32"]  # eps; of an fp8 cache: 1 / scale of K, of V
    + ["i64 i32 i32"]  # s_blk, s_tok, s_head: words from one block, token, KV head to the next in the cache
)
ROPE_THREADS = 128


def rope_grid(tokens: int, all_heads: int, head_dim: int) -> tuple[int, int]:
    """The grid of `rope_and_cache`."""
    return tokens, -(-all_heads * head_lanes(head_dim) // ROPE_THREADS)


@kernel_maker
def rope_and_cache(
    dtype: str, heads: int, kv_heads: int, head_dim: int, block_size: int, norm: bool, kind: str | None = None
) -> CudaKernel:
    """Norm (if `norm`) and rotate q and k, write k and v to the cache; kind: as in `cache.head_writer`.

    qkv [T, (heads + 2 kv_heads) * head_dim] keeps the rotated q; its k and v parts are only read. Grid: `rope_grid`.
    """
    D, W, HW, LANES = head_dim, head_dim // 2, head_dim // 4, head_lanes(head_dim)
    ALL, BS, NORM, THREADS = heads + 2 * kv_heads, block_size, norm, ROPE_THREADS
    half = half_ops(dtype)
    lo, hi, pack, head_sum = half.lo, half.hi, half.pack, group_sum(LANES)
    write = head_writer(dtype, head_dim, kind)
    name = f"rope_and_cache_{dtype}_h{heads}_{kv_heads}_d{head_dim}_b{block_size}" + ("_norm" if norm else "")

    @device
    def rotate(words, v, cosines, sines):
        for i in range(4):
            c0, c1, s0, s1 = (
                as_f32(cosines[2 * i]), as_f32(cosines[2 * i + 1]), as_f32(sines[2 * i]), as_f32(sines[2 * i + 1])
            )  # fmt: skip
            a0, a1, b0, b1 = v[2 * i], v[2 * i + 1], v[8 + 2 * i], v[9 + 2 * i]
            words[i] = pack(a0 * c0 - b0 * s0, a1 * c1 - b1 * s1)
            words[4 + i] = pack(b0 * c0 + a0 * s0, b1 * c1 + a1 * s1)

    @kernel(ROPE_SIGNATURE, threads=THREADS, name=name + (f"_{kind}" if kind else ""), early_blocks=EARLY_ROWS)
    def rope(qkv, kc, vc, q_weight, k_weight, table, positions, slots, eps, k_inverse, v_inverse, s_blk, s_tok, s_head):
        tok = cuda.blockIdx.x
        unit = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        head = min(unit // LANES, ALL - 1)
        lane = unit % LANES
        mine = unit < ALL * LANES and lane * 4 < HW  # all lanes of a warp take part in its sums
        at = min(lane * 4, HW - 4)
        gains = cuda.local.array(8, u32)
        words = cuda.local.array(8, u32)
        cosines = cuda.local.array(8, u32)
        sines = cuda.local.array(8, u32)
        v = cuda.local.array(16, f32)
        grid_release()
        if NORM:
            load_head_words(gains, q_weight if head < heads else k_weight, at, HW + at)
        grid_wait()
        base = i64(tok) * (ALL * W) + head * W + at
        slot = slots[tok]
        turn = positions[tok] * D + 2 * at
        load_head_words(words, qkv, base, base + HW)
        load_head_words(cosines, table, turn, turn + 4)
        load_head_words(sines, table, turn + W, turn + W + 4)
        s = f32(0.0)
        for i in range(8):
            v[2 * i] = lo(words[i])
            v[2 * i + 1] = hi(words[i])
            if mine:
                s += v[2 * i] * v[2 * i] + v[2 * i + 1] * v[2 * i + 1]
        if NORM:
            scale = rsqrt(head_sum(s) / f32(D) + eps)
            for i in range(8):
                v[2 * i] *= scale * lo(gains[i])
                v[2 * i + 1] *= scale * hi(gains[i])
        cache, inverse, h = kc, k_inverse, head - heads
        if head < heads + kv_heads:
            rotate(words, v, cosines, sines)
        else:
            cache, inverse, h = vc, v_inverse, head - heads - kv_heads
        if head < heads and mine:
            stg128(qkv, base, (words[0], words[1], words[2], words[3]))
            stg128(qkv, base + HW, (words[4], words[5], words[6], words[7]))
        to = (slot // BS) * s_blk + (slot % BS) * s_tok + h * s_head
        scale_at = (slot // BS) * s_blk + BS * s_tok + h * BS + slot % BS
        write(cache, to, scale_at, words, inverse, lane, mine and head >= heads and slot >= 0)

    return rope


SILU_THREADS = 128


@device
def _silu_times(gate, up):
    return gate / (f32(1.0) + exp2(gate * f32(-LOG2E))) * up


@functools.cache
def silu_word(dtype: str) -> Any:
    """A device function: silu(gate) * up for the two numbers of a word each."""
    half = half_ops(dtype)
    lo, hi, pack = half.lo, half.hi, half.pack

    @device
    def silu(gate, up):
        return pack(_silu_times(lo(gate), lo(up)), _silu_times(hi(gate), hi(up)))

    return silu


@kernel_maker
def silu_mul(dtype: str, size: int) -> CudaKernel:
    """out [T, size] = silu(x[:, :size]) * x[:, size:]. Grid (tokens, ceil(size / (8 * SILU_THREADS)))."""
    if size % 8:
        raise ValueError(f"size {size}: the activation kernel takes multiples of 8")
    silu = silu_word(dtype)

    @kernel("u32* u32*", threads=SILU_THREADS, name=f"silu_mul_{dtype}_{size}", early_blocks=EARLY_ROWS)
    def multiply(out, x):
        row = i64(cuda.blockIdx.x)
        e = (cuda.blockIdx.y * SILU_THREADS + cuda.threadIdx.x) * 4
        grid_release()
        grid_wait()
        if e * 2 >= size:
            return
        a = ldg128(x, row * size + e)
        b = ldg128(x, row * size + size // 2 + e)
        y = (silu(a[0], b[0]), silu(a[1], b[1]), silu(a[2], b[2]), silu(a[3], b[3]))
        stg128(out, row * (size // 2) + e, y)

    return multiply


LARGEST_THREADS = 1024
LARGEST_HELD = 4  # pieces of 16 bytes that a thread has under way


def _unpacker(dtype: str) -> tuple[int, Any, Any]:
    """(numbers in a word, device function that gives one of them as float32, device function: the largest number of four words or NaN)."""
    if dtype == "float32":

        @device
        def whole(word, second):
            return as_f32(word)

        @device
        def largest_of_four(kept, at):
            high = fmax_or_nan(as_f32(kept[at]), as_f32(kept[at + 1]))
            return fmax_or_nan(high, fmax_or_nan(as_f32(kept[at + 2]), as_f32(kept[at + 3])))

        return 1, whole, largest_of_four
    half = half_ops(dtype)
    lo, hi, maximum = half.lo, half.hi, half.maximum

    @device
    def one_of_two(word, second):
        return hi(word) if second else lo(word)

    @device
    def largest_of_eight(kept, at):
        high = maximum(maximum(kept[at], kept[at + 1]), maximum(kept[at + 2], kept[at + 3]))
        return fmax_or_nan(lo(high), hi(high))

    return 2, one_of_two, largest_of_eight


@kernel_maker
def first_largest(dtype: str) -> CudaKernel:
    """out int64 [rows]: the place of each row's largest number, the first of equals; -1 if that is infinite or the row has a NaN.

    dtype: of x, "bfloat16", "float16" or "float32". A row is `pieces` times 16 bytes. Grid (rows, 1).
    """
    EACH, unpack, peak = _unpacker(dtype)
    THREADS, WARPS, HELD, WORDS = LARGEST_THREADS, LARGEST_THREADS // 32, LARGEST_HELD, 4 * LARGEST_HELD

    @kernel("i64* u32* i32 i32", LARGEST_THREADS, f"first_largest_{dtype}")
    def find(out, x, pieces, x_s):
        tid = cuda.threadIdx.x
        row = i64(cuda.blockIdx.x) * x_s
        tops = cuda.shared.array(WARPS, f32)
        firsts = cuda.shared.array(WARPS, f32)
        kept = cuda.local.array(WORDS, u32)
        best = as_f32(u32(0xFF800000))
        top = best  # NaN, once there was one
        place = i32(0)
        grid_release()
        grid_wait()
        for begin in range(tid, pieces, HELD * THREADS):
            for c in range(HELD):
                a = ldg128(x, row + min(begin + c * THREADS, pieces - 1) * 4)
                for w in range(4):
                    kept[c * 4 + w] = a[w]
            for c in range(HELD):
                high = peak(kept, c * 4)
                top = fmax_or_nan(top, high)
                if high > best:
                    best = high
                    place = i32(min(begin + c * THREADS, pieces - 1))
        for step in range(5):
            top = fmax_or_nan(top, shfl_xor(top, 16 >> step))
        if tid % 32 == 0:
            tops[tid // 32] = top
        cuda.syncthreads()
        for w in range(WARPS):
            top = fmax_or_nan(top, tops[w])
        first = f32(-(1 << 30))  # minus a place: the largest is the first
        if best == top:
            first = f32(-place)
        first = warp_max(first)
        if tid % 32 == 0:
            firsts[tid // 32] = first
        cuda.syncthreads()
        if tid == 0:
            for w in range(WARPS):
                first = fmax(first, firsts[w])
            found = i64(-1)
            if as_word(top) & u32(0x7FFFFFFF) < u32(0x7F800000):
                word = i32(-first) * 4
                for i in range(4 * EACH):
                    if found < 0 and unpack(x[row + word + i // EACH], i % EACH) == top:
                        found = i64(word) * EACH + i
            out[cuda.blockIdx.x] = found

    return find
