"""CPU paged attention kernels: scores, online softmax, weighted values, split-KV merge."""

# Generated from nbs/numba_kernels/cpu/attention.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numba import njit

from minivllm_kernels.cpu import planning
from minivllm_kernels.cpu.compile import COUNT, ENTERED, NEXT
from minivllm_kernels.cpu.matmul.layout import prefetch_distance
from minivllm_kernels.cpu.planning import CPUAttentionShape
from minivllm_kernels.cpu.simd import (
    claim,
    exp,
    floats_at,
    fma,
    ints_at,
    keep,
    largest,
    load,
    load_each,
    load_unzipped,
    maximum,
    prefetch_rows,
    splat,
    store,
    tile_fma,
    tile_load,
    tile_store,
    tile_zeros,
    total,
    zip_lanes,
)

__all__ = ["LOWEST", "ONE", "TWO", "ZERO", "attend", "jit", "make_next_tile", "make_online_softmax"]

"""Paged attention on the CPU: causal, ragged, decode and prefill alike, grouped heads, window, chunks, soft cap."""

LOWEST, ZERO, ONE, TWO = np.float32(-1e30), np.float32(0), np.float32(1), np.float32(2)
jit = njit(error_model="numpy")  # a division by zero must not raise: a kernel cannot report an exception


def vectors_at_once(s: CPUAttentionShape, rows: int) -> int:
    """Vectors of keys that a row block reads at once: enough for six sums."""
    n = 1
    while rows * n < 6 and 2 * n <= min(8, s.tile // s.lanes):
        n *= 2
    return n


def make_scores(s: CPUAttentionShape, rows: int) -> Any:
    D, BS, L, STRIDE, N = s.head_dim, s.block_size, s.lanes, s.score_stride, vectors_at_once(s, rows)
    SUMS = rows * N

    @jit
    def compute_scores(q, at, keys, columns, scores, begin, end):
        """scores[r, c] = q[at + r] . keys of vector c, for `begin` <= c < `end`."""
        for c in range(begin, end, N):
            sums = tile_zeros(SUMS, L)
            for d in range(D):
                sums = tile_fma(sums, q, at + d, D, load_each(keys, columns, c, d * BS, N, L))
            tile_store(scores, c * L, STRIDE, N, sums)

    return compute_scores


def make_online_softmax(s: CPUAttentionShape) -> Any:
    D, L, TILES = s.head_dim, s.lanes, s.tiles
    SUM, MAX = D, D + L

    @jit
    def capped(x, cap):
        """cap * tanh(x / cap)."""
        power = exp(x * splat(TWO / cap, L))
        return splat(cap, L) * (splat(ONE, L) - splat(TWO, L) / (power + splat(ONE, L)))

    @jit
    def online_softmax(scores, at, weights, to, result, row, first, last, scale, cap, begin, end):
        """One step of the online softmax: scores become weights, and the row's result is rescaled to the new maximum. `scale`: factor on the scores with
        AMX, which takes queries as they are."""
        m_old = load(result, row + MAX, L)
        inside = first <= begin * L and last >= end * L
        m_new = m_old
        for c in range(begin, end):
            x = load(scores, at + c * L, L)
            if TILES:
                x = x * splat(scale, L)
            if cap > 0:
                x = capped(x, cap)
            if TILES or cap > 0:
                store(scores, at + c * L, x)
            if not inside:
                x = keep(x, first - c * L, last - c * L, LOWEST)
            m_new = maximum(x, m_new)
        m_new = splat(largest(m_new), L)
        alpha = exp(m_old - m_new)
        total_weight = load(result, row + SUM, L) * alpha
        for c in range(begin, end):
            w = exp(load(scores, at + c * L, L) - m_new)
            if not inside:
                w = keep(w, first - c * L, last - c * L, ZERO)
            store(weights, to + c * L, w)
            total_weight = total_weight + w
        store(result, row + SUM, total_weight)
        store(result, row + MAX, m_new)
        for i in range(0, D, L):
            store(result, row + i, load(result, row + i, L) * alpha)

    return online_softmax


def zipped(s: CPUAttentionShape) -> bool:
    """Whether values are read two to a word, so that sums are held even dimensions first."""
    return s.kv_bits == 16 and s.head_dim // s.lanes % 2 == 0 and not s.tiles


def dimensions_at_once(s: CPUAttentionShape, rows: int) -> int:
    """How many vectors of a value are summed at once: as many as the registers hold for all `rows`."""
    budget, step = (24, 12)[s.registers < 32], 1 + zipped(s)
    fitting = [n for n in range(step, s.head_dim // s.lanes + 1, step) if s.head_dim // s.lanes % n == 0]
    return max([n for n in fitting if rows * n <= budget], default=step)


def make_values(s: CPUAttentionShape, rows: int) -> Any:
    D, BS, L, STATE, STRIDE = s.head_dim, s.block_size, s.lanes, s.state, s.score_stride
    ZIPPED, N, KEYS, STEP = zipped(s), dimensions_at_once(s, rows), s.part, s.block_size // s.lanes

    @jit
    def add_values(weights, values, columns, result, row, begin, end):
        """result[row + r] += weights[r] x values, from block `begin` of the tile up to key `end`."""
        for i in range(0, D, N * L):
            sums = tile_load(result, row + i, STATE, rows, N, L)
            for b in range(begin, (end + BS - 1) // BS):
                at = columns[b * STEP] + KEYS + i
                for j in range(min(end - b * BS, BS)):
                    if ZIPPED:
                        value = load_unzipped(values, at + j * D, N, L)
                    else:
                        value = tile_load(values, at + j * D, 0, 1, N, L)
                    sums = tile_fma(sums, weights, b * BS + j, STRIDE, value)
            tile_store(result, row + i, STATE, N, sums)

    return add_values


def make_scaling(s: CPUAttentionShape) -> Any:
    NUMBERS, L, STEP = s.head_dim * s.block_size, s.lanes, s.block_size // s.lanes

    @jit
    def multiply_by_scales(scores, at, scales, columns, part, begin, end):
        """Scores of the keys of an int8 cache, or weights of its values, times their scales. part: bytes from the keys to what is scaled."""
        for c in range(begin, end):
            # a token takes one byte of a row, and four of the scales
            first = columns[c] + part + NUMBERS + 3 * (c % STEP * L)
            store(scores, at + c * L, load(scores, at + c * L, L) * load(scales, first // 4, L))

    return multiply_by_scales


def make_results(s: CPUAttentionShape) -> tuple[Any, Any]:
    L, STATE, TOP = s.lanes, s.state, s.head_dim + s.lanes

    @jit
    def clear(result, rows):
        for r in range(rows):
            for i in range(0, TOP, L):
                store(result, r * STATE + i, splat(ZERO, L))
            store(result, r * STATE + TOP, splat(LOWEST, L))

    @jit
    def fold(result, other, rows):
        """Fold `other`, over later keys, into `result`."""
        for r in range(0, rows * STATE, STATE):
            a, b = load(result, r + TOP, L), load(other, r + TOP, L)
            top = maximum(a, b)
            a, b = exp(a - top), exp(b - top)
            for i in range(r, r + TOP, L):
                store(result, i, fma(load(result, i, L), a, load(other, i, L) * b))
            store(result, r + TOP, top)

    return clear, fold


def make_ends(s: CPUAttentionShape) -> tuple[Any, Any]:
    D, L, G, STATE, BITS, SUM, ZIPPED = s.head_dim, s.lanes, s.group, s.state, s.q_bits, s.head_dim, zipped(s)
    QUERIES, SCALED, QUERY_BITS, EIGHT = s.offsets["queries"], not s.tiles, 16 if s.tiles else 32, s.kv_bits == 8

    @jit
    def factor(args, which):
        """The factor on the numbers of an fp8 cache: of keys (0) or values (1); 1 for other caches."""
        return floats_at(args[planning.KV_FACTORS], 32)[which] if EIGHT else ONE

    @jit
    def take_queries(args, mine, it, h, row_block, first, last):
        """Copy an item's query rows, scaled unless the tile unit takes them, and note the range of keys that each sees. Returns the
        number of rows, without and with the repeated ones."""
        items, q = ints_at(args[planning.ITEMS], 32), floats_at(args[planning.Q], BITS)
        queries = floats_at(mine + QUERIES, QUERY_BITS)
        scale = splat(floats_at(args[planning.FACTORS], 32)[0] * factor(args, 0) if SCALED else ONE, L)
        rows = items[it + planning.TOKENS] * G
        padded = (rows + row_block - 1) // row_block * row_block
        for r in range(padded):
            row = min(r, rows - 1)
            token = row // G
            source = (items[it + planning.TOKEN] + token) * args[planning.Q_STRIDE] + (h * G + row % G) * D
            for d in range(0, D, L):
                store(queries, r * D + d, load(q, source + d, L) * scale)
            position = items[it + planning.POSITION] + token
            first[r], last[r] = 0, position + 1
            if args[planning.WINDOW] > 0:
                first[r] = max(position - args[planning.WINDOW] + 1, 0)
            elif args[planning.CHUNK] > 0:
                first[r] = position // args[planning.CHUNK] * args[planning.CHUNK]
        return rows, padded

    @jit
    def write_results(args, it, h, result, rows):
        """Divide by the sum of the weights, and round."""
        out, token = floats_at(args[planning.OUT], BITS), ints_at(args[planning.ITEMS], 32)[it + planning.TOKEN]
        for r in range(rows):
            row, to = r * STATE, ((token + r // G) * args[planning.HEADS] + h) * G * D + r % G * D
            norm = splat(factor(args, 1) / total(load(result, row + SUM, L)), L)
            if ZIPPED:
                for d in range(0, D, 2 * L):
                    x, y = zip_lanes(load(result, row + d, L), load(result, row + d + L, L))
                    store(out, to + d, x * norm)
                    store(out, to + d + L, y * norm)
            else:
                for d in range(0, D, L):
                    store(out, to + d, load(result, row + d, L) * norm)

    return take_queries, write_results


def make_next_tile(s: CPUAttentionShape) -> tuple[Any, Any, Any]:
    T, BS, SPLIT, BLOCKS, PART = s.tile, s.block_size, s.split, s.tile // s.block_size, s.part
    LINE, (NEAR, _) = 512 // abs(s.kv_bits), prefetch_distance()

    @jit
    def table_of(args, it):
        row = ints_at(args[planning.ITEMS], 32)[it + planning.ROW]
        return ints_at(args[planning.TABLE] + 4 * args[planning.TABLE_STRIDE] * row, 32)

    @jit
    def find_next_tile(args, it, h, after, t):
        """(block table, first block, head, blocks) of the tile after the one at key `t`; no blocks if there is none."""
        items = ints_at(args[planning.ITEMS], 32)
        keys = items[it + planning.POSITION] + items[it + planning.TOKENS] - t - T
        if keys > 0 or after < 0:
            return table_of(args, it), t // BS + BLOCKS, h, min(BLOCKS, (keys + BS - 1) // BS)
        it, h = after // args[planning.HEADS] * planning.FIELDS, after % args[planning.HEADS]
        block = items[it + planning.BEGIN] * (SPLIT // BS)
        return table_of(args, it), block, h, min(BLOCKS, items[it + planning.POSITION] // BS + 1 - block)

    @jit
    def prefetch_part(cache, at):
        for i in range(0, PART, LINE):
            prefetch_rows(cache, at + i, 0, 1, NEAR)

    return table_of, find_next_tile, prefetch_part


def make_split(s: CPUAttentionShape, row_blocks: tuple[int, int]) -> Any:
    D, BS, L, STATE, T, SPLIT, STRIDE = s.head_dim, s.block_size, s.lanes, s.state, s.tile, s.split, s.score_stride
    PART, STEP, BLOCKS, BITS, G = s.part, BS // L, s.tile // BS, s.kv_bits, s.group
    VECTORS, (ONE_TOKEN, MANY) = s.tile // L + 8, row_blocks
    SCALED, multiply_by_scales = BITS == planning.INT8, make_scaling(s)
    QUERIES, RESULT, SCORES, COLUMNS = (s.offsets[name] for name in ("queries", "result", "scores", "columns"))
    online_softmax, (table_of, find_next_tile, prefetch_part) = make_online_softmax(s), make_next_tile(s)
    token_scores, token_values = make_scores(s, ONE_TOKEN), make_values(s, ONE_TOKEN)
    tokens_scores, tokens_values = token_scores, token_values
    if MANY != ONE_TOKEN:
        tokens_scores, tokens_values = make_scores(s, MANY), make_values(s, MANY)

    @jit
    def find_columns(table, block, count, head, stride, columns):
        """Where each vector of keys of the tile begins; past its end, the last one again."""
        for j in range(count * STEP):
            columns[j] = head + table[block + j // STEP] * stride + j % STEP * L
        for j in range(count * STEP, VECTORS):
            columns[j] = columns[count * STEP - 1]

    @jit
    def do_split(args, mine, it, h, split, after, first, last):
        """Add the attention of an item's rows over one split to the results in this thread's memory, which begins at `mine`.

        after: if this split is the item's last, the thread's next item, whose first tile is prefetched; else -1."""
        queries, scores = floats_at(mine + QUERIES, 32), floats_at(mine + SCORES, 32)
        result, columns = floats_at(mine + RESULT, 32), ints_at(mine + COLUMNS, 64)
        items, cache = ints_at(args[planning.ITEMS], 32), floats_at(args[planning.CACHE], BITS)
        stride, scales = args[planning.BLOCK_STRIDE], floats_at(args[planning.CACHE], 32)
        table, cap = table_of(args, it), floats_at(args[planning.FACTORS], 32)[1]
        single = items[it + planning.TOKENS] == 1
        rows = ONE_TOKEN if single else MANY
        end = min(items[it + planning.POSITION] + items[it + planning.TOKENS], (split + 1) * SPLIT)
        for t in range(max(first[0], split * SPLIT) // T * T, end, T):
            find_columns(table, t // BS, min(BLOCKS, (end - t + BS - 1) // BS), h * 2 * PART, stride, columns)
            next_table, next_block, next_h, next_blocks = find_next_tile(args, it, h, after, t)
            for r in range(0, items[it + planning.TOKENS] * G, rows):
                low, high = max(first[r] - t, 0), min(min(last[r + rows - 1], end) - t, T)
                if high <= 0 or low >= T:
                    continue
                for j in range(next_blocks):
                    prefetch_part(cache, next_h * 2 * PART + next_table[next_block + j] * stride)
                left, right = low // BS * STEP, (high + L - 1) // L
                if single:
                    token_scores(queries, r * D, cache, columns, scores, left, right)
                else:
                    tokens_scores(queries, r * D, cache, columns, scores, left, right)
                for i in range(rows):
                    see, end_see, row = first[r + i] - t, last[r + i] - t, (r + i) * STATE
                    at = i * STRIDE
                    if SCALED:
                        multiply_by_scales(scores, at, scales, columns, 0, left, right)
                    online_softmax(scores, at, scores, at, result, row, see, end_see, ONE, cap, left, right)
                    if SCALED:
                        multiply_by_scales(scores, at, scales, columns, PART, left, right)
                for j in range(next_blocks):
                    prefetch_part(cache, next_h * 2 * PART + next_table[next_block + j] * stride + PART)
                next_blocks = 0
                if single:
                    token_values(scores, cache, columns, result, r * STATE, low // BS, high)
                else:
                    tokens_values(scores, cache, columns, result, r * STATE, low // BS, high)

    return do_split


def make_parts(s: CPUAttentionShape) -> tuple[Any, Any]:
    STATE, L, ROOM = s.state, s.lanes, s.item_rows * s.state * 4
    clear, fold = make_results(s)

    @jit
    def in_workspace(args, it, h, split):
        items = ints_at(args[planning.ITEMS], 32)
        slot = items[it + planning.SLOT] + split - items[it + planning.FIRST]
        return floats_at(args[planning.WORKSPACE] + (slot * args[planning.HEADS] + h) * ROOM, 32)

    @jit
    def leave(args, it, h, split, result, rows):
        place = in_workspace(args, it, h, split)
        for i in range(0, rows * STATE, L):
            store(place, i, load(result, i, L))

    @jit
    def fold_parts(args, it, h, whole, rows):
        """Count a finished part. True if it was the last: then `whole` holds all splits, folded in order."""
        items, counters = ints_at(args[planning.ITEMS], 32), ints_at(args[planning.COUNTERS], 64)
        mine = items[it + planning.COUNTER] * args[planning.HEADS] + h
        if claim(counters, mine, 1) < items[it + planning.PARTS] - 1:
            return False
        counters[mine] = 0
        clear(whole, rows)
        for split in range(items[it + planning.FIRST], items[it + planning.LAST]):
            fold(whole, in_workspace(args, it, h, split), rows)
        return True

    return leave, fold_parts


def make_item(plan: CPUAttentionShape, s: CPUAttentionShape, do_split: Any, row_blocks: tuple[int, int]) -> Any:
    """A function for a work item of a plan. `row_blocks`: how many rows `do_split` works on at a time, of one token and of several."""
    (take_queries, write_results), (clear, fold), (leave, fold_parts) = make_ends(s), make_results(s), make_parts(plan)
    RESULT, WHOLE, FIRST_KEY, LAST_KEY = (s.offsets[name] for name in ("result", "whole", "first", "last"))
    ONE_TOKEN, MANY = row_blocks

    @jit
    def do_item(args, mine, item, more):
        """Compute one work item. `more`: the next item is this thread's as well, so its first tile is prefetched."""
        result, whole = floats_at(mine + RESULT, 32), floats_at(mine + WHOLE, 32)
        items = ints_at(args[planning.ITEMS], 32)
        first, last = ints_at(mine + FIRST_KEY, 64), ints_at(mine + LAST_KEY, 64)
        it, h = item // args[planning.HEADS] * planning.FIELDS, item % args[planning.HEADS]
        begin, end, shared = items[it + planning.BEGIN], items[it + planning.END], items[it + planning.PARTS] > 1
        row_block = ONE_TOKEN if items[it + planning.TOKENS] == 1 else MANY
        rows, padded = take_queries(args, mine, it, h, row_block, first, last)
        after, done = -1, result
        if shared or end - begin > 1:
            done = whole
            clear(whole, rows)
        for split in range(begin, end):
            clear(result, padded)
            if split + 1 == end and more:
                after = item + 1
            do_split(args, mine, it, h, split, after, first, last)
            if shared:
                leave(args, it, h, split, result, rows)
            elif end - begin > 1:
                fold(whole, result, rows)
        if not shared or fold_parts(args, it, h, whole, rows):
            write_results(args, it, h, done, rows)

    return do_item


def attend(*params: Any) -> Callable[[Any], None]:
    """Body of the attention kernel for the fields of a `CPUAttentionShape`, in order. Arguments: `planning.AttentionStep`."""
    s = CPUAttentionShape(*params)
    plain, SIZE = replace(s, tiles=False), s.offsets["end"]
    row_blocks = plain.decode_rows, plain.decode_rows if s.tiles else plain.max_row_block
    one_token = many = make_item(s, plain, make_split(plain, row_blocks), row_blocks)
    if s.tiles:
        from minivllm_kernels.cpu.tile_attention import make_split_by_tiles

        many = make_item(s, s, make_split_by_tiles(s), (1, 1))

    def body(args):
        mine = args[planning.SCRATCH] + claim(args, ENTERED, 1) * SIZE
        items, claims = ints_at(args[planning.ITEMS], 32), ints_at(args[planning.CLAIMS], 64)
        while True:
            run = claim(args, NEXT, 1)
            if run >= args[COUNT]:
                break
            for item in range(claims[run], claims[run + 1]):
                if items[item // args[planning.HEADS] * planning.FIELDS + planning.TOKENS] == 1:
                    one_token(args, mine, item, item + 1 < claims[run + 1])
                else:
                    many(args, mine, item, item + 1 < claims[run + 1])

    return body
