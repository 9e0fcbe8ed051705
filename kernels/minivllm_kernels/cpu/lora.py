"""CPU kernels for LoRA: shrink and expand, rows grouped by adapter."""

# Generated from nbs/numba_kernels/cpu/lora.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT, OWN
from minivllm_kernels.cpu.matmul.amx import LEFT, RIGHT, SUMS, instruct, pointer, tiles_begin, tiles_end
from minivllm_kernels.cpu.matmul.layout import TILE
from minivllm_kernels.cpu.simd import (
    I16,
    I64,
    Array,
    Const,
    Int,
    add_to,
    claim,
    floats_at,
    fma,
    ints_at,
    load,
    prefetch,
    primitive,
    splat,
    store,
    tile_fma,
    tile_load,
    tile_outer,
    tile_totals,
    tile_zeros,
    vec,
)  # fmt: skip

jit = njit(error_model="numpy")
RANKS = 8
"""Rows of an A that are multiplied at once. Ranks are padded to a multiple of it."""
AT_ONCE = 16
"""Rows of x of one work item of `shrink`."""
(ORDER, SLOTS, USED, RANK_OF, PARTS, RANK) = range(OWN, OWN + 6)
"""Arguments of both kernels. Addresses, of int64 numbers: the rows that have an adapter, sorted by slot; the slot of each; how many
they are; the ranks. Then the number of parts, and the rank that there is room for."""
(SHRINK_X, SHRINK_A, SHRINK_H, SHRINK_INPUTS) = range(OWN + 6, OWN + 10)
"""Further arguments of `shrink`. The work items are `AT_ONCE` rows and `RANKS` ranks."""
(EXPAND_H, EXPAND_B, EXPAND_OUT, EXPAND_OUTPUTS, EXPAND_CHUNKS) = range(OWN + 6, OWN + 11)
"""Further arguments of `expand`. The work items are chunks of outputs; of each, int64: first, end, and part."""


def shrink(w_bits: int, x_bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel for `h = x A^T`. ``w_bits``, ``x_bits``: of A and of x. ``lanes``: divides the inputs."""
    L, ROWS, N, SUMS = lanes, AT_ONCE, RANKS // 2, 4 * (RANKS // 2)

    @jit
    def one(args, x, a, h, j, w, first, width):
        order, inputs, products = ints_at(args[ORDER], 64), args[SHRINK_INPUTS], tile_zeros(N, L)
        at = order[j] * inputs
        for k in range(0, inputs, L):
            some = tile_load(a, w + k, inputs, N, 1, L)
            products = tile_outer(products, tile_load(x, at + k, 0, 1, 1, L), some)
        tile_totals(h, j * width + first, width, N, products)

    @jit
    def four(args, x, a, h, j, w, first, width):
        """The same for four rows of one adapter, which is read once for them."""
        order, inputs, products = ints_at(args[ORDER], 64), args[SHRINK_INPUTS], tile_zeros(SUMS, L)
        r0, r1, r2, r3 = order[j] * inputs, order[j + 1] * inputs, order[j + 2] * inputs, order[j + 3] * inputs
        for k in range(0, inputs, L):
            some = tile_load(a, w + k, inputs, N, 1, L)
            rows = (load(x, r0 + k, L), load(x, r1 + k, L), load(x, r2 + k, L), load(x, r3 + k, L))
            products = tile_outer(products, rows, some)
        tile_totals(h, j * width + first, width, N, products)

    def body(args):
        x, a, h = floats_at(args[SHRINK_X], x_bits), floats_at(args[SHRINK_A], w_bits), floats_at(args[SHRINK_H], 32)
        slots, used, inputs = ints_at(args[SLOTS], 64), ints_at(args[USED], 64), args[SHRINK_INPUTS]
        ranks, width = ints_at(args[RANK_OF], 64), args[PARTS] * args[RANK]
        tiles = width // RANKS
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            j, first = item // tiles * ROWS, item % tiles * RANKS
            part, r, end = first // args[RANK], first % args[RANK], min(j + ROWS, used[0])
            while j < end:
                slot = slots[j]
                count = 4 if j + 4 <= end and slots[j + 3] == slot else 1
                if r < ranks[slot * args[PARTS] + part]:
                    for n in range(first, first + RANKS, N):
                        w = (slot * width + n) * inputs
                        if count == 4:
                            four(args, x, a, h, j, w, n, width)
                        else:
                            one(args, x, a, h, j, w, n, width)
                j += count

    return body


def expand(w_bits: int, out_bits: int, lanes: int) -> Callable[[Any], None]:
    """Body of the kernel for `out += h B^T`. ``w_bits``, ``out_bits``: of B and of out. ``lanes``: divides every chunk."""
    L = lanes

    @jit
    def add(out, at, s):
        store(out, at, load(out, at, L) + s)

    @jit
    def some(args, h, b, out, j, count, first, w, n):
        """Add to one vector of outputs, for `count` rows of one adapter."""
        order, outputs, width = ints_at(args[ORDER], 64), args[EXPAND_OUTPUTS], args[PARTS] * args[RANK]
        for i in range(count):
            total = splat(np.float32(0), L)
            for r in range(ints_at(args[RANK_OF], 64)[first]):
                total = fma(splat(h[j * width + i * width + w[0] + r], L), load(b, w[1] + r * outputs + n, L), total)
            add(out, order[j + i] * outputs + n, total)

    @jit
    def four(args, h, b, out, j, first, w, n):
        """Add to four vectors of outputs, for four rows of one adapter: its weights are read once for all of them."""
        order, outputs, width = ints_at(args[ORDER], 64), args[EXPAND_OUTPUTS], args[PARTS] * args[RANK]
        t = tile_zeros(16, L)
        for r in range(ints_at(args[RANK_OF], 64)[first]):
            t = tile_fma(t, h, j * width + w[0] + r, width, tile_load(b, w[1] + r * outputs + n, 0, 1, 4, L))
        r0, r1, r2, r3 = (
            order[j] * outputs + n,
            order[j + 1] * outputs + n,
            order[j + 2] * outputs + n,
            order[j + 3] * outputs + n,
        )
        add(out, r0, t[0]), add(out, r0 + L, t[1]), add(out, r0 + 2 * L, t[2]), add(out, r0 + 3 * L, t[3])
        add(out, r1, t[4]), add(out, r1 + L, t[5]), add(out, r1 + 2 * L, t[6]), add(out, r1 + 3 * L, t[7])
        add(out, r2, t[8]), add(out, r2 + L, t[9]), add(out, r2 + 2 * L, t[10]), add(out, r2 + 3 * L, t[11])
        add(out, r3, t[12]), add(out, r3 + L, t[13]), add(out, r3 + 2 * L, t[14]), add(out, r3 + 3 * L, t[15])

    def body(args):
        h, b, out = (
            floats_at(args[EXPAND_H], 32),
            floats_at(args[EXPAND_B], w_bits),
            floats_at(args[EXPAND_OUT], out_bits),
        )
        slots, used = ints_at(args[SLOTS], 64), ints_at(args[USED], 64)
        chunks, outputs = ints_at(args[EXPAND_CHUNKS], 64), args[EXPAND_OUTPUTS]
        while True:
            item = claim(args, NEXT, 1)
            if item >= args[COUNT]:
                break
            begin, end, part = chunks[3 * item], chunks[3 * item + 1], chunks[3 * item + 2]
            j = 0
            while j < used[0]:
                slot = slots[j]
                count = 4 if j + 4 <= used[0] and slots[j + 3] == slot else 1
                first, w, n = slot * args[PARTS] + part, (part * args[RANK], slot * args[RANK] * outputs), begin
                while count == 4 and n + 4 * L <= end:
                    four(args, h, b, out, j, first, w, n)
                    n += 4 * L
                for at in range(n, end, L):
                    some(args, h, b, out, j, count, first, w, at)
                j += count

    return body


(
    TILE_X,
    TILE_A,
    TILE_INPUTS,
    TILE_B,
    TILE_OUT,
    TILE_OUTPUTS,
    TILE_CHUNKS,
    NUM_CHUNKS,
    STARTS,
    FOR_SHRINK,
    FOR_EXPAND,
) = range(OWN + 6, OWN + 17)
(TILE_SCRATCH, TILE_SCRATCH_BYTES) = range(OWN + 17, OWN + 19)
"""Further arguments of `tile_lora`. `STARTS`: address of the groups, int64, where each begins among the sorted rows, and where the last one ends
(`USED` is followed by the number of groups). Two configurations of the unit, see `lora_configs`. Scratch memory, and its bytes for each thread."""
AT_ONCE_OUT, WIDE, STEP = 4 * TILE, 2 * TILE, 4 * TILE
"""Outputs that `tile_lora` computes at once; inputs of a tile; inputs of a step of `tiles_shrink`."""


def lora_configs(width: int) -> np.ndarray:
    """uint8 [17, 64]: configurations of the tile unit for 0 to 16 rows of `width` bytes: four sums, two tiles of rows, two of weights."""
    configs = np.zeros((TILE + 1, 64), np.uint8)
    configs[:, 0] = 1
    for rows, config in enumerate(configs):
        config[48:56] = (rows, rows, rows, rows, rows, rows, width // 4, width // 4)
        config[16:32:2] = np.array([64, 64, 64, 64, width, width, 64, 64]) * (config[48:56] > 0)
    return configs


@primitive(types.void)
def copy_words(b, into: Array, to: Int, source: Array, at: Int, count: Const):
    """Copy `count` numbers of 16 bits as they are."""
    into.write(to, source.read(at, vec(count, I16), 2), 2)


@primitive(types.void)
def tiles_shrink(b, x: Int, stride: Int, a: Int):
    """Add the products of 64 inputs with 16 rows of an A to the first two sums: half of the inputs to each, so that neither waits."""
    for i in range(2):
        instruct(b, "tileloadd64", LEFT + i, pointer(b, x, ir.Constant(I64, 64 * i)), stride)
        instruct(b, "tileloadd64", RIGHT + i, pointer(b, a, ir.Constant(I64, 1024 * i)), ir.Constant(I64, 64))
        instruct(b, "tdpbf16ps", SUMS + i, LEFT + i, RIGHT + i)


@primitive(types.void)
def tiles_expand(b, h: Int, stride: Int, weight: Int, size: Int, count: Const):
    """Add the products of 16 ranks with `count` tiles of a B, `size` bytes from one to the next, to the first sums."""
    instruct(b, "tileloadd64", LEFT, pointer(b, h, ir.Constant(I64, 0)), stride)
    for v in range(count):
        there = pointer(b, weight, b.mul(size, ir.Constant(I64, v)))
        instruct(b, "tileloadd64", RIGHT + v % 2, there, ir.Constant(I64, 64))
        instruct(b, "tdpbf16ps", SUMS + v, LEFT, RIGHT + v % 2)


@primitive(types.void)
def tiles_write(b, where: Int, count: Const):
    """Write the first `count` sums side by side, as rows of `16 * count` float32."""
    for v in range(count):
        instruct(b, "tilestored64", SUMS + v, pointer(b, where, ir.Constant(I64, 64 * v)), ir.Constant(I64, 64 * count))


@primitive(types.void)
def tiles_zero(b, count: Const):
    """The first `count` sums begin with zeros."""
    for v in range(count):
        instruct(b, "tilezero", SUMS + v)


@jit
def even_step(order, j, end):
    """The distance between neighbouring rows from j to end of `order`, if it is the same for all; else 0."""
    step = order[j + 1] - order[j] if end - j > 1 else 1
    for i in range(j + 1, end):
        if order[i] - order[i - 1] != step:
            return 0
    return step


@jit
def tile_shrink(args, rows, h, sums, j, end, slot, fresh):
    """h [rows of the group, parts * rank] = x A^T, for the ranks that the adapter has. All but the sums are bf16; `rows`, `h`, `sums`: addresses.
    fresh: the thread's previous item had another adapter, so this one is prefetched."""
    order, ranks, inputs = ints_at(args[ORDER], 64), ints_at(args[RANK_OF], 64), args[TILE_INPUTS]
    result, done = floats_at(h, 16), floats_at(sums, 32)
    width, room, step = args[PARTS] * args[RANK], args[RANK], even_step(order, j, end)
    x, stride = args[TILE_X] + 2 * order[j] * inputs, 2 * step * inputs
    if step == 0:  # a tile needs rows that are equally far apart
        here, there = floats_at(rows, 16), floats_at(args[TILE_X], 16)
        for i in range(end - j):
            for k in range(0, inputs, WIDE):
                copy_words(here, i * inputs + k, there, order[j + i] * inputs + k, WIDE)
        x, stride = rows, 2 * inputs
    tiles_begin(args[FOR_SHRINK] + 64 * (end - j))
    for n in range(0, width, TILE):
        if n % room < ranks[slot * args[PARTS] + n // room]:
            a = args[TILE_A] + 2 * (slot * width + n) * inputs
            ahead = floats_at(a, 16)
            tiles_zero(2)
            for k in range(0, inputs, STEP):
                if fresh:
                    prefetch(ahead, TILE * (k + 2 * STEP), 2048)
                tiles_shrink(x + 2 * k, stride, a + WIDE * k)
            tiles_write(sums, 2)
            for i in range(end - j):
                store(result, i * width + n, load(done, i * WIDE, TILE) + load(done, i * WIDE + TILE, TILE))


def tile_lora(out_bits: int) -> Callable[[Any], None]:
    """Body of the kernel for `out += x A^T B^T` by the tile unit. Inputs are a multiple of 64, outputs of each chunk and room for ranks of 16.

    The work items are groups. ``out_bits``: of out.
    """
    L = TILE

    def make(count: int) -> Any:
        @jit
        def some(args, out, sums, j, end, h, b, n, rank, fresh):
            """Compute `count` tiles of outputs from n on, for the rows of one group. h is not written beyond the rank, so it is not read there."""
            order, outputs, room = ints_at(args[ORDER], 64), args[TILE_OUTPUTS], args[RANK]
            tiles_zero(count)
            for r in range(0, rank, L):
                tiles_expand(h + 2 * r, 2 * args[PARTS] * room, b + 2 * (n * room + L * r), 2 * L * room, count)
            tiles_write(sums, count)
            done, ahead = floats_at(sums, 32), floats_at(b, 16)
            if fresh:
                for at in range((n + count * L) * room, (n + 2 * count * L) * room, 1024):
                    prefetch(ahead, at, 2048)
            for i in range(end - j):
                at = order[j + i] * outputs + n
                for c in range(0, count * L, L):
                    add_to(out, at + c, load(done, i * count * L + c, L))

        return some

    four, single = make(4), make(1)

    def body(args):
        rows = args[TILE_SCRATCH] + claim(args, ENTERED, 1) * args[TILE_SCRATCH_BYTES]
        outputs, room, parts = args[TILE_OUTPUTS], args[RANK], args[PARTS]
        h = rows + 2 * L * args[TILE_INPUTS]
        sums, out = h + 2 * L * parts * room, floats_at(args[TILE_OUT], out_bits)
        slots, used, starts = ints_at(args[SLOTS], 64), ints_at(args[USED], 64), ints_at(args[STARTS], 64)
        chunks, ranks = ints_at(args[TILE_CHUNKS], 64), ints_at(args[RANK_OF], 64)
        last_slot = -1
        while True:
            group = claim(args, NEXT, 1)
            if group >= used[1]:
                break
            j, end = starts[group], starts[group + 1]
            slot = slots[j]
            fresh, last_slot = slot != last_slot, slot
            tile_shrink(args, rows, h, sums, j, end, slot, fresh)
            tiles_begin(args[FOR_EXPAND] + 64 * (end - j))
            b = args[TILE_B] + 2 * slot * outputs * room
            for chunk in range(args[NUM_CHUNKS]):
                n, last, part = chunks[3 * chunk], chunks[3 * chunk + 1], chunks[3 * chunk + 2]
                rank = ranks[slot * parts + part]
                if rank > 0:
                    mine = h + 2 * part * room
                    while n + AT_ONCE_OUT <= last:
                        four(args, out, sums, j, end, mine, b, n, rank, fresh)
                        n += AT_ONCE_OUT
                    for at in range(n, last, L):
                        single(args, out, sums, j, end, mine, b, at, rank, fresh)
        tiles_end()

    return body
