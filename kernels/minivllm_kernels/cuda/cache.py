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


def head_lanes(head_dim: int) -> int:
    """Lanes that share a head of 16-bit numbers, a power of two: each has 16 bytes of its first half, and 16 of its second."""
    if head_dim % 16 or not 16 <= head_dim <= 512:
        raise ValueError(f"head_dim {head_dim}: the kernels take multiples of 16 up to 512")
    return 1 << (head_dim // 16 - 1).bit_length()


@device
def load_head_words(to, source, at, second):
    """Eight words of a lane: four from `source[at]` on, then four from `source[second]` on."""
    a = ldg128(source, at)
    b = ldg128(source, second)
    for i in range(4):
        to[i] = a[i]
        to[4 + i] = b[i]


def head_writer(dtype: str, head_dim: int, kind: str | None) -> Any:
    """A device function: the lanes of `head_lanes` write a head to a cache. All lanes of the warp must call it; `mine` says which write.

    kind: None stores `dtype`; "fp8" stores e4m3 of the numbers times `inverse`; "int8" stores int8 and the head's scale.
    words: four of the head's first half, from word 4 * lane on, then four of its second half.
    """
    LANES, HALF, INT8 = head_lanes(head_dim), head_dim // (4 if kind is None else 8), kind == "int8"
    half = half_ops(dtype)
    lo, hi, narrow, STEPS = half.lo, half.hi, pack_int8 if INT8 else pack_e4m3, LANES.bit_length() - 1

    @device
    def whole(cache, at, scale_at, words, inverse, lane, mine):
        if mine:
            stg128(cache, at + 4 * lane, (words[0], words[1], words[2], words[3]))
            stg128(cache, at + HALF + 4 * lane, (words[4], words[5], words[6], words[7]))

    @device
    def narrowed(cache, at, scale_at, words, inverse, lane, mine):
        if INT8:
            peak = f32(1e-30)
            for i in range(8):
                if mine:
                    peak = fmax_or_nan(peak, fmax_or_nan(lo(words[i]), -lo(words[i])))
                    peak = fmax_or_nan(peak, fmax_or_nan(hi(words[i]), -hi(words[i])))
            for step in range(STEPS):
                peak = fmax_or_nan(peak, shfl_xor(peak, 1 << step))
            inverse = f32(127.0) / peak
            if mine and lane == 0:
                cache[scale_at] = as_word(peak / f32(127.0))
        if mine:
            for i in range(4):
                a = narrow(lo(words[2 * i]) * inverse, hi(words[2 * i]) * inverse)
                b = narrow(lo(words[2 * i + 1]) * inverse, hi(words[2 * i + 1]) * inverse)
                cache[at + i // 2 * HALF + 2 * lane + i % 2] = prmt(a, b, u32(0x5410))

    return whole if kind is None else narrowed


INT8_THREADS = 128


@kernel_maker
def reshape_and_cache_int8(dtype: str, kv_heads: int, head_dim: int, block_size: int) -> CudaKernel:
    """Round the rows of k and v and scatter them to their slots. Grid (tokens, ceil(2 kv_heads head_lanes / INT8_THREADS))."""
    HEADS, BS, W, LANES, THREADS = kv_heads, block_size, head_dim // 2, head_lanes(head_dim), INT8_THREADS
    HW, BLOCK, write = W // 2, BS * kv_heads * (head_dim + 4) // 4, head_writer(dtype, head_dim, "int8")

    @kernel("u32* u32* u32* u32* i64* i32 i32", THREADS, f"reshape_and_cache_int8_{dtype}_h{HEADS}_d{head_dim}_b{BS}")
    def scatter(k, v, kc, vc, slots, k_s, v_s):
        slot = slots[cuda.blockIdx.x]
        unit = cuda.blockIdx.y * THREADS + cuda.threadIdx.x
        head = min(unit // LANES, 2 * HEADS - 1)
        lane = unit % LANES
        mine = unit < 2 * HEADS * LANES and lane * 4 < HW and slot >= 0
        x, cache, row, h = k, kc, i64(cuda.blockIdx.x) * k_s, head
        if head >= HEADS:
            x, cache, row, h = v, vc, i64(cuda.blockIdx.x) * v_s, head - HEADS
        words = cuda.local.array(8, u32)
        at = row + h * W + min(lane * 4, HW - 4)
        load_head_words(words, x, at, at + HW)
        block = slot // BS * BLOCK
        scale_at = block + BS * HEADS * HW + h * BS + slot % BS
        write(cache, block + (slot % BS * HEADS + h) * HW, scale_at, words, f32(1.0), lane, mine)

    return scatter


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
