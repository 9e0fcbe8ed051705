"""CPU KV cache layout, with K transposed inside a block; write and copy kernels."""

# Generated from nbs/numba_kernels/cpu/cache.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from minivllm_kernels.cpu.compile import OWN
from minivllm_kernels.cpu.planning import INT8
from minivllm_kernels.cpu.simd import (
    claim,
    floats_at,
    ints_at,
    largest,
    load,
    maximum,
    move,
    splat,
    store,
    total,
    transpose,
)

"""Writing to and copying blocks of the CPU kernels' KV cache.

A layer's cache is `[1, num_blocks, kv_heads, 2, head_dim * block_size]`: bf16 (as uint16), float32, or fp8 (e4m3, as uint8). Inside a block
and head, keys are `[head_dim, block_size]`, values `[block_size, head_dim]`. In an
int8 cache each of the two is followed by the scales of its tokens, float32 `[block_size]`: `(head_dim + 4) * block_size` bytes in all.
"""


def split_cache(cache: np.ndarray, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of a cache: keys [num_blocks, kv_heads, head_dim, block_size], values [.., block_size, head_dim]."""
    blocks, heads = cache.shape[1:3]
    keys, values = cache[0, :, :, 0], cache[0, :, :, 1]
    return keys.reshape(blocks, heads, head_dim, -1), values.reshape(blocks, heads, -1, head_dim)


(KEYS, VALUES, STRIDE_K, STRIDE_V, SLOTS, WRITE_CACHE, WRITE_HEADS, WRITE_SCALES) = range(OWN, OWN + 8)
"""Arguments of `write`: addresses of k and v, numbers from one token to the next in each, address of the slots (int64),
address of the cache, key-value heads; for an fp8 cache, address of what the numbers are multiplied by (float32 [2], for keys and
for values). The work items are tokens."""
jit = njit(error_model="numpy")


def write(head_dim: int, block_size: int, bits: int, kv_bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that stores keys and values of `bits` in a cache of `kv_bits`. Negative slots are left out.

    Keys of `lanes` tokens in neighbouring slots are transposed in registers; other keys are written number by number.
    """
    NUMBERS, RUN, FP8, SCALED = head_dim * block_size, lanes if bits == kv_bits else 1, kv_bits == 8, kv_bits == INT8
    part, (ZERO, ONE, LEAST, MOST) = NUMBERS + 4 * block_size * SCALED, np.array([0, 1, 1e-30, 127], np.float32)

    @jit
    def move_key(cache, to, k, source, _stride, _factor):
        for d in range(head_dim):
            move(cache, to + d * block_size, k, source + d)

    @jit
    def round_key(cache, to, k, source, _stride, factor):
        for d in range(head_dim):
            store(cache, to + d * block_size, load(k, source + d, 1) * splat(factor, 1))

    @jit
    def move_value(cache, to, v, source, _factor):
        for d in range(0, head_dim, lanes):
            store(cache, to + d, load(v, source + d, lanes))

    @jit
    def round_value(cache, to, v, source, factor):
        for d in range(0, head_dim, lanes):
            store(cache, to + d, load(v, source + d, lanes) * splat(factor, lanes))

    @jit
    def write_square(cache, to, k, source, stride, _factor):
        for d in range(0, head_dim, lanes):
            transpose(cache, to + d * block_size, block_size, k, source + d, stride, lanes)

    write_key, write_value = (round_key, round_value) if FP8 or SCALED else (move_key, move_value)
    write_keys = write_square if bits == kv_bits else write_key

    @jit
    def take_scale(scales, to, x, source):
        """Store the scale of a head's int8 numbers, NaN if one of the inputs is not finite; returns its inverse, by which the largest
        input becomes 127."""
        peak, wrong = splat(LEAST, lanes), splat(ZERO, lanes)
        for d in range(0, head_dim, lanes):
            part = load(x, source + d, lanes)
            peak = maximum(maximum(part, splat(ZERO, lanes) - part), peak)
            wrong = wrong + (part - part)
        top = largest(peak) + total(wrong)
        scales[to] = top / MOST
        return MOST / top

    @jit
    def run_of(slots, token, end):
        """How many tokens are written together, from this one on."""
        first = slots[token]
        if first < 0 or first % RUN != 0 or token + RUN > end:
            return 1
        for i in range(1, RUN):
            if slots[token + i] != first + i:
                return 1
        return RUN

    def body(args):
        k, v, slots = floats_at(args[KEYS], bits), floats_at(args[VALUES], bits), ints_at(args[SLOTS], 64)
        cache, heads = floats_at(args[WRITE_CACHE], kv_bits), args[WRITE_HEADS]
        stride_k, stride_v, factor_k, factor_v = args[STRIDE_K], args[STRIDE_V], ONE, ONE
        scales = floats_at(args[WRITE_CACHE], 32)
        if FP8:
            factors = floats_at(args[WRITE_SCALES], 32)
            factor_k, factor_v = factors[0], factors[1]
        at_once = 8 if args[1] <= 64 else 64
        while True:
            token = claim(args, 0, at_once)
            if token >= args[1]:
                break
            end = min(token + at_once, args[1])
            while token < end:
                run = run_of(slots, token, end)
                block, place = slots[token] // block_size, slots[token] % block_size
                for h in range(heads if slots[token] >= 0 else 0):
                    to, source = (block * heads + h) * 2 * part, token * stride_k + h * head_dim
                    if SCALED:
                        factor_k = take_scale(scales, (to + NUMBERS) // 4 + place, k, source)
                    if run > 1:
                        write_keys(cache, to + place, k, source, stride_k, factor_k)
                    else:
                        write_key(cache, to + place, k, source, stride_k, factor_k)
                    for i in range(run):
                        to_value, source = to + part + (place + i) * head_dim, (token + i) * stride_v + h * head_dim
                        if SCALED:
                            factor_v = take_scale(scales, (to + part + NUMBERS) // 4 + place, v, source)
                        write_value(cache, to_value, v, source, factor_v)
                token += run

    return body


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
