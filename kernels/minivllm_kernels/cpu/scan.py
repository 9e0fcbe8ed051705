"""CPU kernels for recurrences (SSD, selective scan, delta rule, convolution) on states in a cache."""

# Generated from nbs/numba_kernels/cpu/scan.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from minivllm_kernels.cpu.compile import COUNT, NEXT, OWN
from minivllm_kernels.cpu.simd import (
    claim,
    exp,
    floats_at,
    fma,
    ints_at,
    load,
    maximum,
    prefetch_rows,
    root,
    splat,
    store,
    tile_fma,
    tile_load,
    tile_outer,
    tile_store,
    tile_totals,
    tile_zeros,
    total,
)

(STATES, STRIDE, READ, WRITE, BEGINS, PARTS, AT_ONCE) = range(OWN, OWN + 7)
"""First arguments of a recurrence: address of the states of block 0, float32; numbers from one block to the next; addresses of int64
arrays: the blocks that each of S sequences reads (-1: none, its state is 0) and writes, and its first token [S + 1]; parts of a
sequence, such as its heads; how many parts, neighbours in memory, a thread claims at once. The work items are parts of
sequences."""


MORE = OWN + 7
"""Where the further arguments of each recurrence begin."""


compiled = functools.partial(njit, error_model="numpy")


@compiled()
def ask_for_nothing(args, part, source):
    """Prefetch nothing: the processor fetches a part of a state by itself."""


def through_sequences(step: Callable, ask: Callable = ask_for_nothing) -> Callable[[Any], None]:
    """Body of a kernel that takes each sequence's tokens through its state, one after the other.

    step: compiled; `step(args, token, part, source, to, fresh)` reads the sequence's state from number `source` of the states
    on, or takes 0 for it if it is fresh, and writes to number `to`.
    ask: compiled; `ask(args, part, source)` may prefetch a part of a state while the part before it is worked on.
    """

    def body(args):
        read, write, begins = ints_at(args[READ], 64), ints_at(args[WRITE], 64), ints_at(args[BEGINS], 64)
        while True:
            first = claim(args, NEXT, args[AT_ONCE])
            if first >= args[COUNT]:
                break
            last = min(first + args[AT_ONCE], args[COUNT]) - 1
            for item in range(first, last + 1):
                s, part = item // args[PARTS], item % args[PARTS]
                following = (item + 1) // args[PARTS]
                if item < last and read[following] >= 0:
                    ask(args, (item + 1) % args[PARTS], read[following] * args[STRIDE])
                source, to, fresh = read[s] * args[STRIDE], write[s] * args[STRIDE], read[s] < 0
                for t in range(begins[s], begins[s + 1]):
                    step(args, t, part, source, to, fresh)
                    source, fresh = to, False

    return body


def softplus(lanes: int) -> Callable:
    """A function of kernels: `log(1 + e**x)` of each lane, by 8 terms of the series of twice the inverse hyperbolic tangent of
    `e**-|x| / (2 + e**-|x|)`, which is at most a third."""
    TERMS = tuple(np.float32(1 / n) for n in (15, 13, 11, 9, 7, 5, 3, 1))

    @compiled()
    def of(x):
        zero, two = splat(np.float32(0), lanes), splat(np.float32(2), lanes)
        power = exp(zero - maximum(x, zero - x))
        s = power / (power + two)
        square, series = s * s, zero
        for term in TERMS:
            series = fma(series, square, splat(term, lanes))
        return fma(two * s, series, maximum(x, zero))

    return of


def sigmoid(lanes: int) -> Callable:
    """A function of kernels: `1 / (1 + e**-x)` of each lane."""

    @compiled()
    def of(x):
        zero, one = splat(np.float32(0), lanes), splat(np.float32(1), lanes)
        return one / (one + exp(zero - maximum(x, splat(np.float32(-80), lanes))))

    return of


(SSD_X, SSD_DT, SSD_DT_ROW, SSD_BIAS, SSD_LIMITS, SSD_A, SSD_D, SSD_OUT, SSD_GROUPS) = range(MORE, MORE + 9)
"""Arguments of `ssd`. Addresses of x, B and C side by side [T, heads P + 2 groups N]; of the step sizes before softplus [T, heads], with
a number of elements from one token to the next; of float32 arrays: what is added to them [heads], their limits [2], A and D [heads], the
result [T, heads, P]; groups."""


def ssd(head_dim: int, state_size: int, bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel of SSD. The parts are heads, whose states are [P, N]. Rows of a state are worked on a few at a time, which
    share what is loaded of B and C."""
    P, N, L, X, ROWS = head_dim, state_size, lanes, math.gcd(lanes, head_dim), math.gcd(4, head_dim)
    AHEAD = 2048  # 8 KiB, into the second cache: from 4 to 32 KiB all are as fast, into the first cache none is
    soft = softplus(1)

    @compiled()
    def step(args, t, h, source, to, fresh):
        x, dts = floats_at(args[SSD_X], bits), floats_at(args[SSD_DT], bits)
        bias, limits, A = floats_at(args[SSD_BIAS], 32), floats_at(args[SSD_LIMITS], 32), floats_at(args[SSD_A], 32)
        D, out, states = floats_at(args[SSD_D], 32), floats_at(args[SSD_OUT], 32), floats_at(args[STATES], 32)
        heads, groups = args[PARTS], args[SSD_GROUPS]
        dt = total(soft(load(dts, t * args[SSD_DT_ROW] + h, 1) + load(bias, h, 1)))
        dt = min(max(dt, limits[0]), limits[1])
        decay = exp(splat(dt * A[h], L))
        row, y_at = t * (heads * P + 2 * groups * N), (t * heads + h) * P
        b = row + heads * P + h // (heads // groups) * N
        for p in range(0, P, X):
            store(out, y_at + p, load(x, row + h * P + p, X) * splat(dt, X))
        for p in range(0, P, ROWS):
            y, at = tile_zeros(ROWS, L), (h * P + p) * N
            for i in range(0, N, L):
                prefetch_rows(states, source + at + i + AHEAD, N, ROWS, 2)
                new = tile_fma(tile_zeros(ROWS, L), out, y_at + p, 1, (load(x, b + i, L),))
                if not fresh:
                    new = tile_outer(new, tile_load(states, source + at + i, N, ROWS, 1, L), (decay,))
                tile_store(states, to + at + i, N, 1, new)
                y = tile_outer(y, new, (load(x, b + groups * N + i, L),))
            tile_totals(out, y_at + p, 1, 1, y)
        for p in range(0, P, X):
            store(out, y_at + p, fma(splat(D[h], X), load(x, row + h * P + p, X), load(out, y_at + p, X)))

    return through_sequences(step)


(SCAN_X, SCAN_DT, SCAN_BIAS, SCAN_A, SCAN_B, SCAN_B_ROW, SCAN_C, SCAN_C_ROW, SCAN_D, SCAN_Z, SCAN_Z_ROW) = range(
    MORE, MORE + 11
)
(SCAN_OUT, SCAN_CHANNELS) = range(MORE + 11, MORE + 13)
"""Arguments of `selective`. Addresses of x and of the step sizes before softplus [T, channels]; what is added to them, float32 [channels];
A, float32 [N, channels]; B and C [T, N], D, float32 [channels], and the gate [T, channels], three of them with a number of elements
from one token to the next; the result [T, channels]; channels."""


def selective(state_size: int, bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel of the selective scan, and of the gate after it. The parts are channels; a state is [N, channels]."""
    N, L = state_size, lanes
    soft, gate = softplus(L), sigmoid(L)

    @compiled()
    def step(args, t, part, source, to, fresh):
        x, dts, out = floats_at(args[SCAN_X], bits), floats_at(args[SCAN_DT], bits), floats_at(args[SCAN_OUT], bits)
        Bs, Cs, zs = floats_at(args[SCAN_B], bits), floats_at(args[SCAN_C], bits), floats_at(args[SCAN_Z], bits)
        A, D, bias = floats_at(args[SCAN_A], 32), floats_at(args[SCAN_D], 32), floats_at(args[SCAN_BIAS], 32)
        states, C = floats_at(args[STATES], 32), args[SCAN_CHANNELS]
        strips = C // L
        for strip in range(part * strips // args[PARTS], (part + 1) * strips // args[PARTS]):
            c = strip * L
            dt, value = soft(load(dts, t * C + c, L) + load(bias, c, L)), load(x, t * C + c, L)
            added, y = dt * value, value * load(D, c, L)
            for n in range(N):
                old = splat(np.float32(0), L) if fresh else load(states, source + n * C + c, L)
                grown = old * exp(dt * load(A, n * C + c, L))
                new = fma(added, splat(total(load(Bs, t * args[SCAN_B_ROW] + n, 1)), L), grown)
                store(states, to + n * C + c, new)
                y = fma(new, splat(total(load(Cs, t * args[SCAN_C_ROW] + n, 1)), L), y)
            z = load(zs, t * args[SCAN_Z_ROW] + c, L)
            store(out, t * C + c, y * z * gate(z))

    return through_sequences(step)


(DELTA_X, DELTA_B, DELTA_A, DELTA_ROW, DELTA_BIAS, DELTA_DECAY, DELTA_OUT, DELTA_K_HEADS) = range(MORE, MORE + 8)
"""Arguments of `delta`. Addresses of q, k and v side by side [T, 2 K heads of keys + V heads]; of b and a [T, heads], with a number of
elements from one token to the next; of float32 arrays: what is added to a, and how fast each head decays, below 0 [heads]; the result
[T, heads, V]; heads of keys."""


def delta(k_dim: int, v_dim: int, bits: int, lanes: int, k_lanes: int) -> Callable[[Any], None]:
    """Body of the kernel of the gated delta rule. The parts are heads, whose states are [K, V]."""
    K, V, L = k_dim, v_dim, lanes
    soft, share = softplus(1), sigmoid(1)

    @compiled()
    def over_length(x, at):
        squares = splat(np.float32(0), k_lanes)
        for i in range(0, K, k_lanes):
            part = load(x, at + i, k_lanes)
            squares = fma(part, part, squares)
        return np.float32(1) / total(root(splat(total(squares) + np.float32(1e-6), 1)))

    @compiled()
    def step(args, t, h, source, to, fresh):
        x, out, states = floats_at(args[DELTA_X], bits), floats_at(args[DELTA_OUT], 32), floats_at(args[STATES], 32)
        a, b = floats_at(args[DELTA_A], bits), floats_at(args[DELTA_B], bits)
        bias, rates = floats_at(args[DELTA_BIAS], 32), floats_at(args[DELTA_DECAY], 32)
        heads, k_heads, zero = args[PARTS], args[DELTA_K_HEADS], splat(np.float32(0), L)
        rate = rates[h] * total(soft(load(a, t * args[DELTA_ROW] + h, 1) + load(bias, h, 1)))
        decay = exp(splat(rate, L))
        beta = splat(total(share(load(b, t * args[DELTA_ROW] + h, 1))), L)
        row = t * (2 * k_heads * K + heads * V)
        q = row + h // (heads // k_heads) * K
        k, v, at = q + k_heads * K, row + 2 * k_heads * K + h * V, h * K * V
        q_scale, k_scale = over_length(x, q) * np.float32(K**-0.5), over_length(x, k)
        for i in range(0, V, L):
            held = zero
            if not fresh:
                for j in range(K):
                    key = splat(total(load(x, k + j, 1)) * k_scale, L)
                    held = fma(load(states, source + at + j * V + i, L) * decay, key, held)
            change, y = (load(x, v + i, L) - held) * beta, zero
            for j in range(K):
                old = zero if fresh else load(states, source + at + j * V + i, L) * decay
                new = fma(splat(total(load(x, k + j, 1)) * k_scale, L), change, old)
                store(states, to + at + j * V + i, new)
                y = fma(new, splat(total(load(x, q + j, 1)) * q_scale, L), y)
            store(out, (t * heads + h) * V + i, y)

    return through_sequences(step)


(CONV_U, CONV_ROW, CONV_WEIGHT, CONV_BIAS, CONV_OUT, CONV_CHANNELS, CONV_BEFORE, CONV_AFTER) = range(MORE, MORE + 8)
"""Arguments of `conv`. Addresses of the inputs [T, channels], with a number of elements from one token to the next; of float32 weights
[taps, channels] and the bias [channels], or 0; of the result [T, channels]; channels. With gates: addresses of what the input and
the output are multiplied with, which lie as the inputs do."""


def conv(taps: int, bits: int, lanes: int, gated: int) -> Callable[[Any], None]:
    """Body of the kernel for a causal convolution of each channel; without gates a SiLU follows. The parts are channels."""
    K, L, GATED, BEFORE = taps, lanes, gated != 0, taps - 1
    gate = sigmoid(L)

    @compiled()
    def step(args, t, part, source, to, fresh):
        u, out = floats_at(args[CONV_U], bits), floats_at(args[CONV_OUT], bits)
        before, after = floats_at(args[CONV_BEFORE], bits), floats_at(args[CONV_AFTER], bits)
        weight, bias, states = (
            floats_at(args[CONV_WEIGHT], 32),
            floats_at(args[CONV_BIAS], 32),
            floats_at(args[STATES], 32),
        )
        C, row, strips = args[CONV_CHANNELS], t * args[CONV_ROW], args[CONV_CHANNELS] // L
        for strip in range(part * strips // args[PARTS], (part + 1) * strips // args[PARTS]):
            c = strip * L
            new = load(u, row + c, L)
            if GATED:
                new = new * load(before, row + c, L)
            y = new * load(weight, (K - 1) * C + c, L)
            if args[CONV_BIAS] != 0:
                y = y + load(bias, c, L)
            for j in range(K - 1):
                old = splat(np.float32(0), L) if fresh else load(states, source + j * C + c, L)
                y = fma(old, load(weight, j * C + c, L), y)
                if j > 0:
                    store(states, to + (j - 1) * C + c, old)
            if K > 1:
                store(states, to + (K - 2) * C + c, new)
            y = y * (load(after, row + c, L) if GATED else gate(y))
            store(out, t * C + c, y)

    @compiled()
    def ask(args, part, source):
        states, C, strips = floats_at(args[STATES], 32), args[CONV_CHANNELS], args[CONV_CHANNELS] // L
        for strip in range(part * strips // args[PARTS], (part + 1) * strips // args[PARTS]):
            prefetch_rows(states, source + strip * L, C, BEFORE, 3)

    return through_sequences(step, ask)


(NORM_AT_ONCE, NORM_Y, NORM_Z, NORM_Z_ROW, NORM_WEIGHT, NORM_WEIGHT_STEP, NORM_OUT, NORM_GROUPS) = range(OWN, OWN + 8)
"""Arguments of `gated_norm`: how many groups a thread claims at once; addresses of y, float32 [T, groups, size], overwritten; of the gate
[T, groups, size], with a number of elements from one token to the next; of the weight, float32, with a number of elements from one group to
the next, 0 if they share it; of the result [T, groups, size]; groups. The work items are the groups of all tokens."""


def gated_norm(size: int, bits: int, lanes: int, gate_first: int, eps_bits: int) -> Callable[[Any], None]:
    """Body of the kernel that multiplies each group by the SiLU of its gate, and norms it; or norms it first. `eps_bits`: see `add_norm`."""
    S, L, FIRST, eps = size, lanes, gate_first != 0, np.array(eps_bits, np.int32).view(np.float32).item()
    gate = sigmoid(L)

    def body(args):
        ys, zs, weight = floats_at(args[NORM_Y], 32), floats_at(args[NORM_Z], bits), floats_at(args[NORM_WEIGHT], 32)
        out, groups = floats_at(args[NORM_OUT], bits), args[NORM_GROUPS]
        while True:
            begin = claim(args, NEXT, args[NORM_AT_ONCE])
            if begin >= args[COUNT]:
                break
            for item in range(begin, min(begin + args[NORM_AT_ONCE], args[COUNT])):
                t, g = item // groups, item % groups
                y, z, w, squares = (
                    item * S,
                    t * args[NORM_Z_ROW] + g * S,
                    g * args[NORM_WEIGHT_STEP],
                    splat(np.float32(0), L),
                )
                for i in range(0, S, L):
                    value = load(ys, y + i, L)
                    if FIRST:
                        value = value * load(zs, z + i, L) * gate(load(zs, z + i, L))
                        store(ys, y + i, value)
                    squares = fma(value, value, squares)
                scale = splat(np.float32(1), L) / root(splat(total(squares) / np.float32(S) + np.float32(eps), L))
                for i in range(0, S, L):
                    value = load(ys, y + i, L) * scale * load(weight, w + i, L)
                    if not FIRST:
                        value = value * load(zs, z + i, L) * gate(load(zs, z + i, L))
                    store(out, y + i, value)

    return body


(COPY_X, COPY_ROW, COPY_OUT, COPY_SIZE) = range(OWN, OWN + 4)
"""Arguments of `copy_rows`: address of rows, elements from one to the next, address of the copy, elements of a row. The work items are rows."""


def copy_rows(bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that copies rows next to each other."""

    def body(args):
        x, out, size = floats_at(args[COPY_X], bits), floats_at(args[COPY_OUT], bits), args[COPY_SIZE]
        while True:
            row = claim(args, NEXT, 1)
            if row >= args[COUNT]:
                break
            for i in range(0, size, lanes):
                store(out, row * size + i, load(x, row * args[COPY_ROW] + i, lanes))

    return body
