"""CPU prefill attention on the tile unit (AMX)."""

# Generated from nbs/numba_kernels/cpu/tile_attention.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any

from minivllm_kernels.cpu import planning
from minivllm_kernels.cpu.attention import ZERO, jit, make_next_tile, make_online_softmax
from minivllm_kernels.cpu.matmul.amx import tiles_begin, tiles_clear, tiles_end, tiles_load, tiles_multiply, tiles_store
from minivllm_kernels.cpu.matmul.layout import TILE
from minivllm_kernels.cpu.planning import CPUAttentionShape
from minivllm_kernels.cpu.simd import floats_at, ints_at, splat, store, zip_pairs

__all__ = ["make_split_by_tiles"]

"""Attention for several tokens of a request at once on AMX. Scores and results are float32; what is multiplied
is bf16, the softmax's weights too."""

PAIR_BYTES = 8 * TILE
"""Bytes of a pair of inputs for the outputs of two tiles: what the unit multiplies with in one go."""


def make_packing(s: CPUAttentionShape) -> tuple[Any, Any]:
    D, BS, PART, WIDE = s.head_dim, s.block_size, s.part, 2 * TILE
    PANEL = D * WIDE

    @jit
    def pack_keys(cache, table, block, count, head, stride, packed):
        """Pairs of dimensions side by side, for 32 keys at a time: [64 / 32][head_dim / 2][32][2]."""
        for j in range(0, count * BS, TILE):
            source = head + table[block + j // BS] * stride + j % BS
            to = j // WIDE * PANEL + j % WIDE * 2
            for d in range(0, D, 2):
                zip_pairs(packed, to + d * WIDE, cache, source + d * BS, source + (d + 1) * BS, TILE)

    @jit
    def pack_values(cache, table, block, low, high, head, stride, packed):
        """Pairs of keys side by side, for 32 dimensions at a time: [64 / 32][head_dim / 32][16][32][2]. Values of masked keys are packed as zeros:
        memory may hold NaN there, and a weight of zero times NaN is NaN."""
        for j in range(0, 2 * WIDE, 2):
            to = j // WIDE * PANEL + j % WIDE * WIDE
            if low <= j and j + 1 < high:
                source = head + PART + table[block + j // BS] * stride + j % BS * D
                for d in range(0, D, TILE):
                    at = to + d // WIDE * WIDE * WIDE + d % WIDE * 2
                    zip_pairs(packed, at, cache, source + d, source + D + d, TILE)
            else:
                for d in range(0, D, WIDE):
                    for i in range(0, 2 * WIDE, TILE):
                        store(packed, to + d * WIDE + i, splat(ZERO, TILE))
                for k in range(2):
                    if low <= j + k < high:
                        source = head + PART + table[block + j // BS] * stride + (j % BS + k) * D
                        for d in range(D):
                            packed[to + d // WIDE * WIDE * WIDE + d % WIDE * 2 + k] = cache[source + d]

    return pack_keys, pack_values


def make_block(s: CPUAttentionShape, count: int) -> Any:
    """A function for a block of rows of `count` tiles."""
    D, L, T, STATE, STRIDE, PANEL = s.head_dim, s.lanes, s.tile, s.state, s.score_stride, 4 * s.head_dim * TILE
    online_softmax = make_online_softmax(s)

    @jit
    def do_block(queries, keys, values, scores, weights, result, rows, t, first, last, r, scale, cap):
        for k in range(0, T, 2 * TILE):
            tiles_clear(count)
            panel = keys + k // (2 * TILE) * PANEL
            for d in range(0, D, 2 * TILE):
                tiles_multiply(queries + 2 * d, 2 * D, panel + d // 2 * PAIR_BYTES, PAIR_BYTES, count, 0, 0)
            tiles_store(scores + 4 * k, 4 * STRIDE, count)
        all_scores, all_weights, results = floats_at(scores, 32), floats_at(weights, 16), floats_at(result, 32)
        for i in range(rows):
            see, end_see, at, to, row = first[r + i] - t, last[r + i] - t, i * STRIDE, i * T, i * STATE
            seen = min(max((end_see + L - 1) // L, 0), T // L)
            online_softmax(all_scores, at, all_weights, to, results, row, see, end_see, scale, cap, 0, seen)
            for c in range(seen, T // L):
                store(all_weights, to + c * L, splat(ZERO, L))
        for d in range(0, D, 2 * TILE):
            tiles_load(result + 4 * d, 4 * STATE, count)
            for k in range(0, T, 2 * TILE):
                panel = values + k // (2 * TILE) * PANEL + d // 2 * PAIR_BYTES
                tiles_multiply(weights + 2 * k, 2 * T, panel, PAIR_BYTES, count, 0, 0)
            tiles_store(result + 4 * d, 4 * STATE, count)

    return do_block


def make_split_by_tiles(s: CPUAttentionShape) -> Any:
    """`attention.make_split` with AMX: a function that computes one split."""
    D, BS, STATE, T, SPLIT, G, PART = s.head_dim, s.block_size, s.state, s.tile, s.split, s.group, s.part
    ROWS, BITS = s.max_row_block, s.kv_bits
    QUERIES, RESULT, SCORES, KEYS, VALUES, WEIGHTS = (
        s.offsets[name] for name in ("queries", "result", "scores", "keys", "values", "weights")
    )
    (pack_keys, pack_values), (table_of, find_next_tile, prefetch_part) = make_packing(s), make_next_tile(s)
    one, two = make_block(s, 1), make_block(s, 2)

    @jit
    def do_split(args, mine, it, h, split, after, first, last):
        items, cache = ints_at(args[planning.ITEMS], 32), floats_at(args[planning.CACHE], BITS)
        stride = args[planning.BLOCK_STRIDE]
        table, factors = table_of(args, it), floats_at(args[planning.FACTORS], 32)
        keys, values, head = floats_at(mine + KEYS, 16), floats_at(mine + VALUES, 16), h * 2 * PART
        tokens = items[it + planning.TOKENS]
        rows, end = tokens * G, min(items[it + planning.POSITION] + tokens, (split + 1) * SPLIT)
        for t in range(max(first[0], split * SPLIT) // T * T, end, T):
            seen = min(end - t, T)
            pack_keys(cache, table, t // BS, (seen + BS - 1) // BS, head, stride, keys)
            pack_values(cache, table, t // BS, max(first[0] - t, 0) // BS * BS, seen, head, stride, values)
            next_table, next_block, next_h, next_blocks = find_next_tile(args, it, h, after, t)
            for j in range(next_blocks):
                prefetch_part(cache, next_h * 2 * PART + next_table[next_block + j] * stride)
                prefetch_part(cache, next_h * 2 * PART + next_table[next_block + j] * stride + PART)
            for r in range(0, rows, ROWS):
                n = min(rows - r, ROWS)
                if last[r + n - 1] <= t or first[r] >= t + T:
                    continue
                tiles_begin(args[planning.CONFIGS] + 64 * n)
                where = mine + QUERIES + 2 * r * D, mine + KEYS, mine + VALUES, mine + SCORES, mine + WEIGHTS
                result = mine + RESULT + 4 * r * STATE
                if n <= TILE:
                    one(*where, result, n, t, first, last, r, factors[0], factors[1])
                else:
                    two(*where, result, n, t, first, last, r, factors[0], factors[1])
        tiles_end()

    return do_split
