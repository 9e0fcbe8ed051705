"""Where keys and values lie.

Question: attention on a CPU wants to read sixteen keys at once.
"""

# Generated from nbs/4_kernels/23_cpu_cache.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=552f2e1ed103 module=712d08f1ef8f

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cpu_kernel import OWN
from minivllm_kernels.cpu_vector import claim, floats_at, ints_at, load, move, store

__all__ = [
    "KEYS",
    "PAIRS",
    "SLOTS",
    "SOURCE",
    "STRIDE_K",
    "STRIDE_V",
    "TARGET",
    "VALUES",
    "WORDS",
    "WRITE_CACHE",
    "WRITE_HEADS",
    "copy",
    "split_cache",
    "write",
]


# %% nbs/4_kernels/23_cpu_cache.ipynb #split_cache
"""Writing to and copying blocks of the CPU kernels' KV cache.

A layer's cache is `[1, num_blocks, kv_heads, 2, head_dim * block_size]`, bf16 (as uint16) or float32. Inside a block
and head, keys are `[head_dim, block_size]`, values `[block_size, head_dim]`.
"""


def split_cache(cache: np.ndarray, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of a cache: keys [num_blocks, kv_heads, head_dim, block_size], values [.., block_size, head_dim]."""
    blocks, heads = cache.shape[1:3]
    keys, values = cache[0, :, :, 0], cache[0, :, :, 1]
    return keys.reshape(blocks, heads, head_dim, -1), values.reshape(blocks, heads, -1, head_dim)


# %% nbs/4_kernels/23_cpu_cache.ipynb #write
(KEYS, VALUES, STRIDE_K, STRIDE_V, SLOTS, WRITE_CACHE, WRITE_HEADS) = range(OWN, OWN + 7)
"""Arguments of `write`: addresses of k and v, numbers from one token to the next in each, address of the slots (int64),
address of the cache, key-value heads. The work items are tokens."""


def write(head_dim: int, block_size: int, bits: int, kv_bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that stores keys and values of `bits` in a cache of `kv_bits`. Negative slots are left out."""
    part = head_dim * block_size

    def body(args):
        k, v, slots = floats_at(args[KEYS], bits), floats_at(args[VALUES], bits), ints_at(args[SLOTS], 64)
        cache, heads = floats_at(args[WRITE_CACHE], kv_bits), args[WRITE_HEADS]
        while True:
            begin = claim(args, 0, 8)
            if begin >= args[1]:
                break
            for token in range(begin, min(begin + 8, args[1])):
                if slots[token] < 0:
                    continue
                block, place = slots[token] // block_size, slots[token] % block_size
                for h in range(heads):
                    to = (block * heads + h) * 2 * part
                    source = token * args[STRIDE_K] + h * head_dim
                    for d in range(head_dim):
                        move(cache, to + d * block_size + place, k, source + d)
                    to += part + place * head_dim
                    source = token * args[STRIDE_V] + h * head_dim
                    for d in range(0, head_dim, lanes):
                        store(cache, to + d, load(v, source + d, lanes))

    return body


# %% nbs/4_kernels/23_cpu_cache.ipynb #copy
(SOURCE, TARGET, WORDS, PAIRS) = range(OWN, OWN + 4)
"""Arguments of `copy`: addresses of two caches, 8-byte words of a block, address of the pairs (int64 [n, 2]: block in the
source, block in the target). The work items are pairs; no block may be both read and written."""


def copy() -> Callable[[Any], None]:
    """Body of the kernel that copies blocks."""

    def body(args):
        source, target, pairs = ints_at(args[SOURCE], 64), ints_at(args[TARGET], 64), ints_at(args[PAIRS], 64)
        words = args[WORDS]
        while True:
            i = claim(args, 0, 1)
            if i >= args[1]:
                break
            a, b = pairs[2 * i] * words, pairs[2 * i + 1] * words
            for w in range(words):
                target[b + w] = source[a + w]

    return body
