"""CPU kernels for recurrences (SSD, delta rule, short convolution), on states in the blocks of a cache."""

# Generated from nbs/numba_kernels/cpu/scan.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, NEXT, OWN
from minivllm_kernels.cpu.simd import claim, exp, floats_at, fma, ints_at, load, splat, store, total

(
    SSD_X,
    SSD_DT,
    SSD_A,
    SSD_B,
    SSD_C,
    SSD_D,
    SSD_OUT,
    SSD_STATES,
    SSD_STRIDE,
    SSD_READ,
    SSD_WRITE,
    SSD_BEGINS,
    SSD_HEADS,
    SSD_GROUPS,
) = range(OWN, OWN + 14)
"""Arguments of `ssd`. Addresses of float32 arrays: x [T, heads, P], dt [T, heads], A [heads], B and C [T, groups, N], D [heads], the
result [T, heads, P], and the states of block 0; numbers from one block to the next. Addresses of int64 arrays: the blocks that
each of S sequences reads (-1: none, its state is 0) and writes, and its first token [S + 1]. Heads and groups. The work items are
heads of sequences."""


def ssd(head_dim: int, state_size: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that takes each sequence's tokens through its state, one after the other."""
    P, N, L = head_dim, state_size, lanes

    def body(args):
        x, dt, A = floats_at(args[SSD_X], 32), floats_at(args[SSD_DT], 32), floats_at(args[SSD_A], 32)
        B, C, D = floats_at(args[SSD_B], 32), floats_at(args[SSD_C], 32), floats_at(args[SSD_D], 32)
        out, states = floats_at(args[SSD_OUT], 32), floats_at(args[SSD_STATES], 32)
        read, write, begins = ints_at(args[SSD_READ], 64), ints_at(args[SSD_WRITE], 64), ints_at(args[SSD_BEGINS], 64)
        heads, groups, zero = args[SSD_HEADS], args[SSD_GROUPS], splat(np.float32(0), L)
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            s, h = item // heads, item % heads
            source, to = read[s] * args[SSD_STRIDE] + h * P * N, write[s] * args[SSD_STRIDE] + h * P * N
            fresh = read[s] < 0
            for t in range(begins[s], begins[s + 1]):
                step = dt[t * heads + h]
                decay = exp(splat(step * A[h], L))
                at = (t * groups + h // (heads // groups)) * N
                for p in range(P):
                    value = x[(t * heads + h) * P + p]
                    added, y = splat(step * value, L), zero
                    for i in range(0, N, L):
                        old = zero if fresh else load(states, source + p * N + i, L)
                        new = fma(added, load(B, at + i, L), old * decay)
                        store(states, to + p * N + i, new)
                        y = fma(new, load(C, at + i, L), y)
                    out[(t * heads + h) * P + p] = total(y) + D[h] * value
                source, fresh = to, False

    return body


(
    DELTA_Q,
    DELTA_K,
    DELTA_V,
    DELTA_DECAY,
    DELTA_BETA,
    DELTA_OUT,
    DELTA_STATES,
    DELTA_STRIDE,
    DELTA_READ,
    DELTA_WRITE,
    DELTA_BEGINS,
    DELTA_HEADS,
) = range(OWN, OWN + 12)
"""Arguments of `delta`. Addresses of float32 arrays: q and k [T, heads, K], v [T, heads, V], logarithms of the decays and shares
beta [T, heads], the result [T, heads, V]; the rest as in `ssd`."""


def delta(k_dim: int, v_dim: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that takes each sequence's tokens through its state by the gated delta rule."""
    K, V, L = k_dim, v_dim, lanes

    def body(args):
        q, k, v = floats_at(args[DELTA_Q], 32), floats_at(args[DELTA_K], 32), floats_at(args[DELTA_V], 32)
        decays, betas = floats_at(args[DELTA_DECAY], 32), floats_at(args[DELTA_BETA], 32)
        out, states = floats_at(args[DELTA_OUT], 32), floats_at(args[DELTA_STATES], 32)
        read, write = ints_at(args[DELTA_READ], 64), ints_at(args[DELTA_WRITE], 64)
        begins, heads, zero = ints_at(args[DELTA_BEGINS], 64), args[DELTA_HEADS], splat(np.float32(0), L)
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            s, h = item // heads, item % heads
            source, to = read[s] * args[DELTA_STRIDE] + h * K * V, write[s] * args[DELTA_STRIDE] + h * K * V
            fresh = read[s] < 0
            for t in range(begins[s], begins[s + 1]):
                at = t * heads + h
                decay, beta = exp(splat(decays[at], L)), splat(betas[at], L)
                for i in range(0, V, L):
                    held = zero
                    if not fresh:
                        for j in range(K):
                            held = fma(load(states, source + j * V + i, L) * decay, splat(k[at * K + j], L), held)
                    change, y = (load(v, at * V + i, L) - held) * beta, zero
                    for j in range(K):
                        old = zero if fresh else load(states, source + j * V + i, L) * decay
                        new = fma(splat(k[at * K + j], L), change, old)
                        store(states, to + j * V + i, new)
                        y = fma(new, splat(q[at * K + j], L), y)
                    store(out, at * V + i, y)
                source, fresh = to, False

    return body


(
    CONV_U,
    CONV_WEIGHT,
    CONV_BIAS,
    CONV_OUT,
    CONV_STATES,
    CONV_STRIDE,
    CONV_READ,
    CONV_WRITE,
    CONV_BEGINS,
    CONV_CHANNELS,
    CONV_PARTS,
) = range(OWN, OWN + 11)
"""Arguments of `conv`. Addresses of float32 arrays: inputs [T, channels], weights [channels, K], the bias [channels] or 0, the result
[T, channels]; states and sequences as in `ssd`. Channels, and parts that they are cut into. The work items are parts of sequences."""


def conv(taps: int) -> Callable[[Any], None]:
    """Body of the kernel that takes each sequence's tokens through a causal convolution of each channel. taps: the size of it."""
    K = taps

    def body(args):
        u, weight, bias = floats_at(args[CONV_U], 32), floats_at(args[CONV_WEIGHT], 32), floats_at(args[CONV_BIAS], 32)
        out, states = floats_at(args[CONV_OUT], 32), floats_at(args[CONV_STATES], 32)
        read, write = ints_at(args[CONV_READ], 64), ints_at(args[CONV_WRITE], 64)
        begins, channels, parts = ints_at(args[CONV_BEGINS], 64), args[CONV_CHANNELS], args[CONV_PARTS]
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            s, part = item // parts, item % parts
            source, to, fresh = read[s] * args[CONV_STRIDE], write[s] * args[CONV_STRIDE], read[s] < 0
            for t in range(begins[s], begins[s + 1]):
                for c in range(part * channels // parts, (part + 1) * channels // parts):
                    new = u[t * channels + c]
                    y = new * weight[c * K + K - 1]
                    if args[CONV_BIAS]:
                        y += bias[c]
                    for j in range(K - 1):
                        old = np.float32(0) if fresh else states[source + c * (K - 1) + j]
                        y += old * weight[c * K + j]
                        if j:
                            states[to + c * (K - 1) + j - 1] = old
                    if K > 1:
                        states[to + c * (K - 1) + K - 2] = new
                    out[t * channels + c] = y
                source, fresh = to, False

    return body
