"""CPU kernels for add + RMS norm, SiLU gate, rotary embedding and argmax."""

# Generated from nbs/numba_kernels/cpu/pointwise.ipynb; after an edit here run `python -m minivllm.literate write-back`.

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
    largest,
    load,
    maximum,
    root,
    splat,
    store,
    total,
)

__all__ = ["LARGEST_OUT", "LARGEST_SIZE", "LARGEST_X", "first_largest"]

"""What stands between the matmuls of a decoder on a CPU, each as one kernel. Sums are float32; a row's result does not depend
on other rows."""

AT_ONCE = OWN
"""First argument of the kernels for rows: how many rows a thread claims at once. While
other threads claim too, a claim takes as long as a short row; and rows that one thread takes stay in its core's cache."""
(NORM_X, NORM_RESIDUAL, NORM_WEIGHT, NORM_OUT, NORM_SIZE, NORM_ADD) = range(OWN + 1, OWN + 7)
"""Arguments of `add_norm`: addresses of x, the residual stream, the weight and the result; numbers in a row; whether x is
added to the stream first. The work items are rows."""


def add_norm(bits: int, lanes: int, eps_bits: int) -> Callable[[Any], None]:
    """Body of the kernel that adds x to the residual stream, in place, and gives the stream's RMS norm.

    ``bits``: of all arrays, 32 (float32) or 16 (bf16). ``eps_bits``: the float32 that is added to the mean square, as an int.
    """
    L, eps = lanes, np.array(eps_bits, np.int32).view(np.float32).item()

    def body(args):
        x, stream = floats_at(args[NORM_X], bits), floats_at(args[NORM_RESIDUAL], bits)
        weight, out, size = floats_at(args[NORM_WEIGHT], bits), floats_at(args[NORM_OUT], bits), args[NORM_SIZE]
        while True:
            begin = claim(args, NEXT, args[AT_ONCE])
            if begin >= args[COUNT]:
                break
            for row in range(begin, min(begin + args[AT_ONCE], args[COUNT])):
                at, squares = row * size, splat(np.float32(0), L)
                for i in range(at, at + size, L):
                    if args[NORM_ADD] != 0:
                        store(stream, i, load(x, i, L) + load(stream, i, L))
                    value = load(stream, i, L)
                    squares = fma(value, value, squares)
                mean = splat(total(squares) / np.float32(size) + np.float32(eps), L)
                scale = splat(np.float32(1), L) / root(mean)
                for i in range(0, size, L):
                    store(out, at + i, load(stream, at + i, L) * scale * load(weight, i, L))

    return body


(APART_X, APART_Y, APART_OUT, APART_SIZE, APART_STRIDE) = range(OWN + 1, OWN + 6)
"""Arguments of `add_apart`: addresses of x, of y or 0, and of the result; numbers in a row, and from one row of the result to the
next. The work items are rows."""


def add_apart(bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that writes x + y, or x alone, to rows that may lie apart."""
    L = lanes

    def body(args):
        x, y, out = floats_at(args[APART_X], bits), floats_at(args[APART_Y], bits), floats_at(args[APART_OUT], bits)
        size = args[APART_SIZE]
        while True:
            begin = claim(args, NEXT, args[AT_ONCE])
            if begin >= args[COUNT]:
                break
            for row in range(begin, min(begin + args[AT_ONCE], args[COUNT])):
                at, to = row * size, row * args[APART_STRIDE]
                for i in range(0, size, L):
                    value = load(x, at + i, L)
                    if args[APART_Y] != 0:
                        value = value + load(y, at + i, L)
                    store(out, to + i, value)

    return body


(GATED_X, GATED_OUT, GATED_SIZE) = range(OWN + 1, OWN + 4)
"""Arguments of `gated_silu`: addresses of the rows of gate and up, side by side, and of the result; numbers in a row of the
result. The work items are rows."""


def gated_silu(bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel for `silu(gate) * up`."""
    L = lanes

    def body(args):
        x, out, size = floats_at(args[GATED_X], bits), floats_at(args[GATED_OUT], bits), args[GATED_SIZE]
        one, least = splat(np.float32(1), L), splat(np.float32(-80), L)
        while True:
            begin = claim(args, NEXT, args[AT_ONCE])
            if begin >= args[COUNT]:
                break
            for row in range(begin, min(begin + args[AT_ONCE], args[COUNT])):
                for i in range(0, size, L):
                    gate, up = load(x, row * 2 * size + i, L), load(x, row * 2 * size + size + i, L)
                    power = exp(splat(np.float32(0), L) - maximum(gate, least))
                    store(out, row * size + i, gate / (one + power) * up)

    return body


(SORT_IDS, SORT_PLACES, SORT_CHOICES, SORT_COUNTS, SORT_EXPERTS, SORT_NEXT) = range(OWN, OWN + 6)
"""Arguments of `sort_choices`: addresses (int64, all of them) of the expert of each choice, and of the place that it gets; number of
choices; address of how often each expert was chosen; number of experts; address of as much memory again. There is one work item."""


def sort_choices() -> Callable[[Any], None]:
    """Body of the kernel that sorts choices by expert; choices of the same expert keep their order."""

    def body(args):
        ids, places = ints_at(args[SORT_IDS], 64), ints_at(args[SORT_PLACES], 64)
        counts, following = ints_at(args[SORT_COUNTS], 64), ints_at(args[SORT_NEXT], 64)
        for e in range(args[SORT_EXPERTS]):
            counts[e] = 0
        for i in range(args[SORT_CHOICES]):
            counts[ids[i]] += 1
        before = 0
        for e in range(args[SORT_EXPERTS]):
            following[e] = before
            before += counts[e]
        for i in range(args[SORT_CHOICES]):
            places[i] = following[ids[i]]
            following[ids[i]] += 1

    return body


(MOE_X, MOE_PLACES, MOE_OUT, MOE_SIZE, MOE_TOP, MOE_WEIGHTS) = range(OWN + 1, OWN + 7)
"""Arguments of `copy_rows` and `add_rows`: addresses of the rows, of the place (int64) of each token's choices, and of the result;
numbers in a row; choices of a token; address of their weights (float32). The work items are tokens."""


def copy_rows(bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that copies each token to the places of its choices."""
    L = lanes

    def body(args):
        x, out, size = floats_at(args[MOE_X], bits), floats_at(args[MOE_OUT], bits), args[MOE_SIZE]
        places, top = ints_at(args[MOE_PLACES], 64), args[MOE_TOP]
        while True:
            begin = claim(args, NEXT, args[AT_ONCE])
            if begin >= args[COUNT]:
                break
            for row in range(begin, min(begin + args[AT_ONCE], args[COUNT])):
                for j in range(row * top, row * top + top):
                    for i in range(0, size, L):
                        store(out, places[j] * size + i, load(x, row * size + i, L))

    return body


def add_rows(bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel for the sum of a token's chosen rows, each times its weight."""
    L = lanes

    def body(args):
        x, out, size = floats_at(args[MOE_X], bits), floats_at(args[MOE_OUT], bits), args[MOE_SIZE]
        places, weights, top = ints_at(args[MOE_PLACES], 64), floats_at(args[MOE_WEIGHTS], 32), args[MOE_TOP]
        while True:
            begin = claim(args, NEXT, args[AT_ONCE])
            if begin >= args[COUNT]:
                break
            for row in range(begin, min(begin + args[AT_ONCE], args[COUNT])):
                for i in range(0, size, L):
                    value = splat(np.float32(0), L)
                    for j in range(row * top, row * top + top):
                        value = fma(load(x, places[j] * size + i, L), splat(weights[j], L), value)
                    store(out, row * size + i, value)

    return body


(ROPE_X, ROPE_COS, ROPE_SIN, ROPE_Q, ROPE_K, ROPE_STRIDE, ROPE_HEADS, ROPE_KV_HEADS, ROPE_NORM) = range(
    OWN + 1, OWN + 10
)
"""Arguments of `rotate`: addresses of the rows (query heads, key heads, anything), of cosine and sine [rows, head_dim], and of
the rotated queries and keys; numbers from one row to the next; query and key heads; address of the weights
[query and key heads, head_dim] of an RMS norm of each head, or 0. The work items are rows."""


def rotate(head_dim: int, bits: int, lanes: int, eps_bits: int) -> Callable[[Any], None]:
    """Body of the kernel that norms query and key heads, if there are weights for that, and rotates their pairs
    (i, i + head_dim / 2), into arrays of their own. ``eps_bits``: as for `add_norm`."""
    D, HALF, L, eps = head_dim, head_dim // 2, lanes, np.array(eps_bits, np.int32).view(np.float32).item()

    @njit(error_model="numpy")
    def scale_of(x, at):
        """One over the root of the mean square of a head."""
        squares = splat(np.float32(0), L)
        for i in range(at, at + D, L):
            squares = fma(load(x, i, L), load(x, i, L), squares)
        return splat(np.float32(1), L) / root(splat(total(squares) / np.float32(D) + np.float32(eps), L))

    def body(args):
        x, cos, sin = floats_at(args[ROPE_X], bits), floats_at(args[ROPE_COS], bits), floats_at(args[ROPE_SIN], bits)
        queries, keys = floats_at(args[ROPE_Q], bits), floats_at(args[ROPE_K], bits)
        heads, kv_heads, normed = args[ROPE_HEADS], args[ROPE_KV_HEADS], args[ROPE_NORM] != 0
        weight, scale = floats_at(args[ROPE_NORM], bits), splat(np.float32(1), L)
        while True:
            begin = claim(args, NEXT, args[AT_ONCE])
            if begin >= args[COUNT]:
                break
            for row in range(begin, min(begin + args[AT_ONCE], args[COUNT])):
                for h in range(heads + kv_heads):
                    at = row * args[ROPE_STRIDE] + h * D
                    if normed:
                        scale = scale_of(x, at)
                    for i in range(0, HALF, L):
                        low, high = load(x, at + i, L), load(x, at + HALF + i, L)
                        if normed:
                            low = low * scale * load(weight, h * D + i, L)
                            high = high * scale * load(weight, h * D + HALF + i, L)
                        a = fma(high, load(sin, row * D + i, L), low * load(cos, row * D + i, L))
                        b = fma(low, load(sin, row * D + HALF + i, L), high * load(cos, row * D + HALF + i, L))
                        if h < heads:
                            to = (row * heads + h) * D + i
                            store(queries, to, a)
                            store(queries, to + HALF, b)
                        else:
                            to = (row * kv_heads + h - heads) * D + i
                            store(keys, to, a)
                            store(keys, to + HALF, b)

    return body


(LARGEST_X, LARGEST_OUT, LARGEST_SIZE) = range(OWN, OWN + 3)
"""Arguments of `first_largest`: addresses of float32 rows and of an int64 for each; numbers in a row. The work items are rows."""


def first_largest(lanes: int) -> Callable[[Any], None]:
    """Body of the kernel that finds the place of a row's largest number, the first of equals; -1 if none is finite, or one is NaN or plus
    infinity. A row has `lanes` numbers at least."""
    L, PART, INF = lanes, 64 * lanes, np.float32(np.inf)
    LEAST = np.finfo(np.float32).min

    def body(args):
        x, out, size = floats_at(args[LARGEST_X], 32), ints_at(args[LARGEST_OUT], 64), args[LARGEST_SIZE]
        zero, least = splat(np.float32(0), L), splat(LEAST, L)
        while True:
            row = claim(args, NEXT, 1)
            if row >= args[COUNT]:
                break
            at, end = row * size, (row + 1) * size
            best, there, odd = -INF, end, zero
            for start in range(at, end, PART):
                high = splat(-INF, L)
                for i in range(start, min(start + PART, end), L):
                    value = load(x, min(i, end - L), L)  # the last ones may be looked at twice
                    high = maximum(value, high)
                    odd = fma(maximum(least, value), zero, odd)  # NaN, once there was one or plus infinity
                if largest(high) > best:
                    best, there = largest(high), start
            while there < end and x[there] != best:
                there += 1
            out[row] = there - at if there < end and total(odd) == 0 else -1

    return body
