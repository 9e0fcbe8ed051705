"""CUDA kernels that write K and V to cache slots and copy blocks."""

# Generated from nbs/numba_kernels/cuda/cache.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools

from minivllm_kernels.cuda.simt import CudaKernel, cuda, device, half_ops, i64, kernel, u32
from minivllm_kernels.cuda.warp import ldg128, pack_e4m3, prmt, stg128

RESHAPE_SIGNATURE = " ".join(
    ["u32* u32* u32* u32* i64*"]  # k, v, k cache, v cache, slots
    + ["f32 f32"]  # of an fp8 cache: 1 / scale of K, of V
    + ["i32 i32 i32 i32"]  # words from one token to the next in k and v; words of all heads, of a head
    + ["i64 i32 i32"]  # words from one block, token, head to the next in the cache
)


@functools.cache
def reshape_and_cache(block_size: int, threads: int = 128, to_fp8: str | None = None) -> CudaKernel:
    """Scatter the rows of k and v to their slots. Grid (tokens, 1). to_fp8: dtype of k and v, for a cache of e4m3;
    None for a cache of their own dtype, whatever it is."""
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


COPY_SIGNATURE = "u32* u32* i64* i64 i64 i64"
"""source, destination, pairs (source block, destination block), words from K to V in each, words of a block."""


@functools.cache
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
