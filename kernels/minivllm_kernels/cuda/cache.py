"""CUDA kernels that write K and V to cache slots and copy blocks."""

# Generated from nbs/numba_kernels/cuda/cache.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any

from minivllm_kernels.cuda.simt import CudaKernel, cuda, device, f32, half_ops, i64, kernel, kernel_maker, u32
from minivllm_kernels.cuda.warp import (
    as_word,
    fmax_or_nan,
    ldg128,
    pack_e4m3,
    pack_int8,
    prmt,
    shfl_xor,
    stg128,
)

RESHAPE_SIGNATURE = " ".join(
    ["u32* u32* u32* u32* i64*"]  # k, v, k cache, v cache, slots
    + ["f32 f32"]  # of an fp8 cache: 1 / scale of K, of V
    + ["i32 i32 i32 i32"]  # words from one token to the next in k and v; words of all heads, of a head
    + ["i64 i32 i32"]  # words from one block, token, head to the next in the cache
)


@kernel_maker
def reshape_and_cache(block_size: int, threads: int = 128, to_fp8: str | None = None) -> CudaKernel:
    """Scatter the rows of k and v to their slots. Grid (tokens, 1). to_fp8: the dtype of k and v if the
    cache is e4m3; None if the cache has their dtype."""
    BS = block_size
    EACH = 4 if to_fp8 is None else 8  # words that become 16 bytes of the cache
    NARROWER = EACH // 4

    if to_fp8 is None:

        @device
        def move(cache, to, x, at, inverse):
            stg128(cache, to, ldg128(x, at))
    else:
        half = half_ops(to_fp8)
        lo, hi = half.lo, half.hi

        @device
        def narrow(a, b, inverse):
            low = pack_e4m3(lo(a) * inverse, hi(a) * inverse)
            return prmt(low, pack_e4m3(lo(b) * inverse, hi(b) * inverse), u32(0x5410))

        @device
        def move(cache, to, x, at, inverse):
            a = ldg128(x, at)
            b = ldg128(x, at + 4)
            low = narrow(a[0], a[1], inverse), narrow(a[2], a[3], inverse)
            stg128(cache, to, (*low, narrow(b[0], b[1], inverse), narrow(b[2], b[3], inverse)))

    name = f"reshape_and_cache_b{block_size}_t{threads}" + (f"_{to_fp8}_fp8" if to_fp8 else "")

    @kernel(RESHAPE_SIGNATURE, threads=threads, name=name)
    def write(k, v, kc, vc, slots, k_inverse, v_inverse, k_s, v_s, words, head_words, s_blk, s_tok, s_head):
        tok = cuda.blockIdx.x
        slot = slots[tok]
        if slot < 0:
            return
        base = (slot // BS) * s_blk + (slot % BS) * s_tok
        for e in range(cuda.threadIdx.x * EACH, words, cuda.blockDim.x * EACH):
            to = base + (e // head_words) * s_head + e % head_words // NARROWER
            move(kc, to, k, i64(tok) * k_s + e, k_inverse)
            move(vc, to, v, i64(tok) * v_s + e, v_inverse)

    return write


def int8_writer(dtype: str, head_dim: int) -> Any:
    """A device function: a warp rounds a head and writes it to a cache of int8, and the head's scale.

    Lane l has words l, l + 32 .. of the head's first half in `pairs[0::2]`, of its second half in `pairs[1::2]`; zeros past the end. The
    cache is seen as u16: `at` is where the head begins, `scale_at` where its scale does.
    """
    HALF = head_dim // 4  # words
    N = -(-HALF // 32) * 2
    half = half_ops(dtype)
    lo, hi = half.lo, half.hi

    @device
    def write(cache, at, scale_at, pairs, lane):
        peak = f32(1e-30)
        for i in range(N):
            peak = fmax_or_nan(peak, fmax_or_nan(lo(pairs[i]), -lo(pairs[i])))
            peak = fmax_or_nan(peak, fmax_or_nan(hi(pairs[i]), -hi(pairs[i])))
        for step in range(5):
            peak = fmax_or_nan(peak, shfl_xor(peak, 16 >> step))
        inverse = f32(127.0) / peak
        for i in range(N):
            word = lane + 32 * (i // 2)
            if word < HALF:
                cache[at + word + HALF * (i % 2)] = pack_int8(lo(pairs[i]) * inverse, hi(pairs[i]) * inverse)
        if lane == 0:
            scale = as_word(peak / f32(127.0))
            cache[scale_at] = scale & u32(0xFFFF)
            cache[scale_at + 1] = scale >> u32(16)

    return write


INT8_WARPS = 4


@kernel_maker
def reshape_and_cache_int8(dtype: str, kv_heads: int, head_dim: int, block_size: int) -> CudaKernel:
    """Round the rows of k and v and scatter them to their slots. Grid (tokens, ceil(2 kv_heads / INT8_WARPS))."""
    HEADS, BS, HALF, W, EACH = kv_heads, block_size, head_dim // 4, head_dim // 2, -(-head_dim // 128)
    N, WARPS, BLOCK = 2 * EACH, INT8_WARPS, block_size * kv_heads * (head_dim // 2 + 2)
    store = int8_writer(dtype, head_dim)

    @kernel(
        "u32* u32* u16* u16* i64* i32 i32", 32 * WARPS, f"reshape_and_cache_int8_{dtype}_h{HEADS}_d{head_dim}_b{BS}"
    )
    def write(k, v, kc, vc, slots, k_s, v_s):
        slot = slots[cuda.blockIdx.x]
        head = cuda.blockIdx.y * WARPS + cuda.threadIdx.x // 32
        lane = cuda.threadIdx.x % 32
        if slot < 0 or head >= 2 * HEADS:
            return
        x, cache, row, h = k, kc, i64(cuda.blockIdx.x) * k_s, head
        if head >= HEADS:
            x, cache, row, h = v, vc, i64(cuda.blockIdx.x) * v_s, head - HEADS
        pairs = cuda.local.array(N, u32)
        for i in range(N):
            word = lane + 32 * (i // 2)
            pairs[i] = u32(0)
            if word < HALF:
                pairs[i] = x[row + h * W + word + HALF * (i % 2)]
        block = slot // BS * BLOCK
        scale_at = block + BS * HEADS * W + (h * BS + slot % BS) * 2
        store(cache, block + (slot % BS * HEADS + h) * W, scale_at, pairs, lane)

    return write


COPY_SIGNATURE = "u32* u32* i64* i64 i64 i64"
"""source, destination, pairs (source block, destination block), words from K to V in each, words of a block."""


@kernel_maker
def copy_blocks(threads: int = 256) -> CudaKernel:
    """Copy blocks between two caches, or within one. Grid (blocks that share a pair, pairs); K, then V."""

    @kernel(COPY_SIGNATURE, threads=threads, name=f"copy_blocks_t{threads}")
    def copy(source, target, pairs, source_half, target_half, words):
        pair = cuda.blockIdx.y
        a = pairs[pair * 2] * words
        b = pairs[pair * 2 + 1] * words
        start = (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) * 4
        step = cuda.gridDim.x * cuda.blockDim.x * 4
        for e in range(start, words, step):
            stg128(target, b + e, ldg128(source, a + e))
            stg128(target, b + target_half + e, ldg128(source, a + source_half + e))

    return copy
