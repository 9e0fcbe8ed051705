"""Where a token's K and V go.

Question: the cache is a heap of blocks in any order.
"""

# Generated from nbs/4_kernels/07_cache.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=bb2b55a0e8c9 module=f66f110f0bdb

import functools

from minivllm_kernels.simt import Kernel, cuda, i64, kernel, ldg128, stg128

__all__ = ["COPY_SIGNATURE", "RESHAPE_SIGNATURE", "copy_blocks", "reshape_and_cache"]


# %% nbs/4_kernels/07_cache.ipynb #reshape_and_cache
RESHAPE_SIGNATURE = " ".join(
    ["u32* u32* u32* u32* i64*"]  # k, v, k cache, v cache, slots
    + ["i32 i32 i32 i32"]  # words from one token to the next in k and v; words of all heads; words of a head
    + ["i64 i32 i32"]  # words from one block, token, head to the next in the cache
)


@functools.cache
def reshape_and_cache(block_size: int, threads: int = 128) -> Kernel:
    """Scatter the rows of k and v to their slots. Grid (1, tokens)."""
    BS = block_size

    @kernel(RESHAPE_SIGNATURE, threads=threads, name=f"reshape_and_cache_b{block_size}_t{threads}")
    def write(k, v, kc, vc, slots, k_s, v_s, words, head_words, s_blk, s_tok, s_head):
        tok = cuda.blockIdx.x
        slot = slots[tok]
        if slot < 0:
            return
        base = (slot // BS) * s_blk + (slot % BS) * s_tok
        for e in range(cuda.threadIdx.x * 4, words, cuda.blockDim.x * 4):
            to = base + (e // head_words) * s_head + e % head_words
            stg128(kc, to, ldg128(k, i64(tok) * k_s + e))
            stg128(vc, to, ldg128(v, i64(tok) * v_s + e))

    return write


# %% nbs/4_kernels/07_cache.ipynb #copy_blocks
COPY_SIGNATURE = "u32* u32* i64* i64 i64 i64"
"""source, destination, pairs (source block, destination block), words from K to V in each, words of a block."""


@functools.cache
def copy_blocks(threads: int = 256) -> Kernel:
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
