"""Work items of CUDA attention for one step: split-KV decode and prefill tiles."""

# Generated from nbs/numba_kernels/cuda/planning.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "BLOCK_SIZES", "FIELDS", "FIXED_CHUNK", "HEAD_DIMS", "MAX_GROUP", "MAX_ITEMS", "MAX_PARTS", "TILE",
    "TILE_CONTEXT", "TILE_FIRST", "TILE_FLOOR", "TILE_QUERIES", "TILE_ROW", "TILE_SEQ", "WORK_END",
    "WORK_FIRST", "WORK_FIRST_SLOT", "WORK_PARTS", "WORK_PLANNED", "WORK_ROW", "WORK_SEQ", "WORK_SLOT",
    "AttentionShape", "DecodePlan", "cut", "equal_sizes", "item_rungs", "plan_decode", "plan_prefill",
    "shape_unsupported", "split_at_chunks",
]  # fmt: skip

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MAX_GROUP = 16
TILE = 16  # tokens that one warp takes at a time in decode: the M of an mma
MAX_ITEMS = 65535  # blocks that a grid may have in its second dimension
MAX_PARTS = 64  # pieces that one sequence may be cut into


@dataclass(frozen=True)
class AttentionShape:
    """What an attention kernel is compiled for.

    dtype: of Q, K, V and the output, "bfloat16" or "float16". head_dim: elements of a head.
    group: query heads that share a KV head. block_size: tokens in a cache block.
    soft_cap: scores pass through `cap * tanh(score / cap)`. fp8_kv: K and V lie in the cache as e4m3, a byte each.
    int8_kv: they lie there as int8; after a block's K, and after its V, come their scales, float32 [KV heads, block_size].
    """

    dtype: str
    head_dim: int
    group: int
    block_size: int
    soft_cap: bool = False
    fp8_kv: bool = False
    int8_kv: bool = False

    def __post_init__(self) -> None:
        if (reason := shape_unsupported(self.dtype, self.head_dim, self.group, self.block_size)) is not None:
            raise ValueError(reason)

    @property
    def name(self) -> str:
        """A short name, part of the names of kernels."""
        extra = ("_cap" if self.soft_cap else "") + ("_fp8" if self.fp8_kv else "") + ("_int8" if self.int8_kv else "")
        return f"{self.dtype}_d{self.head_dim}_g{self.group}_b{self.block_size}{extra}"


def shape_unsupported(dtype: str, head_dim: int, group: int, block_size: int) -> str | None:
    """Why no kernel can be built for this shape, in words; None if one can."""
    if dtype not in ("bfloat16", "float16"):
        return f"the CUDA kernels are built for bfloat16 and float16, not for {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not built: the CUDA kernels know {', '.join(map(str, HEAD_DIMS))}"
    if not 1 <= group <= MAX_GROUP:
        return f"{group} query heads a KV head: the CUDA kernels know 1 to {MAX_GROUP}"
    if block_size not in BLOCK_SIZES:
        return f"block_size {block_size}: the CUDA kernels know {', '.join(map(str, BLOCK_SIZES))}"
    return None


WORK_SEQ, WORK_ROW, WORK_FIRST, WORK_END, WORK_SLOT, WORK_FIRST_SLOT, WORK_PARTS, WORK_PLANNED = range(8)
"""Fields of a work item, int32 each. SEQ: row of the block table, or -1 for no work. ROW: row of q and of the output.
FIRST, END: tokens [first, end). SLOT: where the partial goes, or -1 when the item is a whole sequence.
FIRST_SLOT, PARTS: all slots of the sequence. PLANNED: END, which the device may correct."""
FIELDS = 8  # int32 from one work item, or tile, to the next


@dataclass(frozen=True)
class DecodePlan:
    """Work items for single-token rows, in the order in which they start, and the launch that suits them.

    items: int32 [n, 8], fields `WORK_...`. slots: partial results to make room for. warps: warps per block.
    """

    items: np.ndarray
    slots: int
    warps: int


def cut(
    rows: np.ndarray, seqs: np.ndarray, first: np.ndarray, end: np.ndarray, size: np.ndarray | int
) -> tuple[np.ndarray, int]:
    """Work items [n, 8] for token ranges [first, end), in pieces of `size` tiles and a last one of what is left; and the number of slots."""
    start = first // TILE
    tiles = -(-end // TILE) - start
    parts = -(-tiles // size)
    split = parts > 1
    slots = np.where(split, parts, 0)
    first_slot = np.cumsum(slots) - slots
    which = np.repeat(np.arange(len(rows)), parts)
    piece = np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)
    size = np.broadcast_to(size, tiles.shape)[which]
    low = start[which] + piece * size
    items = np.zeros((len(which), FIELDS), np.int32)
    items[:, WORK_SEQ], items[:, WORK_ROW] = seqs[which], rows[which]
    items[:, WORK_FIRST] = np.maximum(low * TILE, first[which])
    items[:, WORK_END] = np.minimum((low + size) * TILE, end[which])
    items[:, WORK_SLOT] = np.where(split[which], first_slot[which] + piece, -1)
    items[:, WORK_FIRST_SLOT], items[:, WORK_PARTS] = first_slot[which], parts[which]
    return items, int(slots.sum())


def equal_sizes(tiles: np.ndarray, chunk: np.ndarray | int) -> np.ndarray:
    """The size of equal pieces of at most `chunk` tiles, for each sequence."""
    return -(-tiles // -(-tiles // chunk))


WAVES = ((8, 1, 8), (4, 3, 8), (2, 6, 8))
"""(warps per block, blocks per multiprocessor, tiles below which a piece is not worth its overhead)."""
WIDE_WAVES = ((4, 2, 4), (2, 4, 8))
"""The same for head_dim 256, which takes more registers."""


def choose_sizes(
    tiles: np.ndarray, heads: int, multiprocessors: int, max_warps: int
) -> tuple[int, np.ndarray, np.ndarray | int]:
    """(warps, sizes, turns) for sequences of `tiles` tiles, each read once per KV head: tiles of a piece, and which sequences start first."""
    longest, total = int(tiles.max()), int(tiles.sum()) * heads
    least_chunk = -(-longest // MAX_PARTS)
    for warps, resident, least in WAVES if max_warps == 8 else WIDE_WAVES:
        slots = resident * multiprocessors
        if len(tiles) * heads > slots:
            continue
        chunk = _smallest_chunk(tiles, heads, slots, min(least, longest))
        if chunk <= max(2 * -(-total // slots), least):
            return warps, equal_sizes(tiles, max(chunk, least_chunk)), 0
    slots = 3 * multiprocessors
    cap = max(16, -(-total // slots))
    chunk = max(cap if longest > 2 * cap else longest, least_chunk)
    return 4, *_stagger(tiles, chunk, slots / heads)


LEAST_PIECE = 8  # tiles below which a piece of one of several waves is not worth its overhead


def _stagger(tiles: np.ndarray, chunk: int, wave: float) -> tuple[np.ndarray, np.ndarray]:
    """(sizes, turns) when `wave` items per KV head run at once, in several waves.

    A third of the first wave are the longest sequences, a third are two thirds of a sequence, and a third are what was left of those. So blocks
    end at different times ever after, and while some start and wait for their first tile, the others keep the memory busy. The shortest
    sequences come last, in quarters.
    """
    sizes, turns = equal_sizes(tiles, chunk), np.full(len(tiles), 2)
    order = np.argsort(-tiles, kind="stable")
    cut_already = np.count_nonzero(tiles > chunk)
    turns[order[:cut_already]] = 0
    whole = order[cut_already:]
    if len(whole) >= 2 * wave:
        third, last = math.ceil(wave / 3), math.ceil(wave / 4)
        middle = (len(whole) - last) // 2
        turns[whole[:third]], turns[whole[middle : middle + third]] = 0, 1
        for which, parts in ((whole[middle : middle + third], 1.5), (whole[-last:], 4)):
            sizes[which] = np.maximum(np.ceil(tiles[which] / parts), LEAST_PIECE)
    return sizes, turns


def _smallest_chunk(tiles: np.ndarray, heads: int, slots: int, low: int) -> int:
    """The smallest chunk, at least `low`, whose items fit into `slots`."""
    high = int(tiles.max())
    low = max(low, -(-int(tiles.sum()) * heads // slots))  # fewer would not fit even if nothing were rounded up
    while low < high:
        middle = (low + high) // 2
        if int((-(-tiles // middle)).sum()) * heads <= slots:
            high = middle
        else:
            low = middle + 1
    return low


FIXED_CHUNK = 32  # tiles of a piece in the batch-invariant mode


def _fixed_sizes(tiles: np.ndarray) -> tuple[int, np.ndarray, int]:
    return 4, equal_sizes(tiles, np.maximum(FIXED_CHUNK, -(-tiles // MAX_PARTS))), 0


@functools.lru_cache(maxsize=16)
def _layout(
    start: bytes, tiles: bytes, heads: int, multiprocessors: int, max_warps: int, batch_invariant: bool
) -> DecodePlan:
    """Work items in whole tiles, the largest of each turn first; SEQ and ROW are the number of the sequence. Cached: with few sequences, most
    steps have the same tiles as the step before.

    start, tiles: int64, the first tile of each sequence (nothing if they are all 0) and how many there are.
    """
    count = np.frombuffer(tiles, np.int64)
    low = np.frombuffer(start, np.int64) if start else np.zeros_like(count)
    warps, sizes, turns = (
        _fixed_sizes(count) if batch_invariant else choose_sizes(count, heads, multiprocessors, max_warps)
    )
    every = np.arange(len(count))
    items, slots = cut(every, every, low * TILE, (low + count) * TILE, sizes)
    turn = np.broadcast_to(turns, count.shape)[items[:, WORK_SEQ]]
    items = items[np.lexsort((items[:, WORK_FIRST] - items[:, WORK_END], turn))]
    if len(items) > MAX_ITEMS:
        raise ValueError(f"a launch takes at most {MAX_ITEMS} work items, and {len(count)} sequences make {len(items)}")
    items.setflags(write=False)
    return DecodePlan(items, slots, warps)


def plan_decode(
    seq_lens: Sequence[int] | np.ndarray,
    *,
    heads: int,
    rows: np.ndarray | None = None,
    seqs: np.ndarray | None = None,
    first: np.ndarray | None = None,
    multiprocessors: int = 132,
    max_warps: int = 8,
    batch_invariant: bool = False,
) -> DecodePlan:
    """Work items for one query token in each sequence.

    seq_lens: tokens of each sequence with the new one. heads: blocks that read each item (KV heads, times two for groups
    over 8). rows, seqs: row of q and of the block table for each (default 0, 1, 2 ...). first: the first token that each sees
    (default 0; later under a sliding window). max_warps: `decode.max_warps(shape)`.
    """
    end = np.asarray(seq_lens, np.int64)
    if end.size == 0 or end.min() < 1:
        raise ValueError("plan_decode needs at least one sequence, and each must have at least one token")
    tiles, start = -(-end // TILE), b""
    if first is not None:
        first = np.asarray(first, np.int64)
        tiles, start = tiles - first // TILE, (first // TILE).tobytes()
    layout = _layout(start, tiles.tobytes(), heads, multiprocessors, max_warps, batch_invariant)
    items, which = layout.items.copy(), layout.items[:, WORK_SEQ]
    if seqs is not None:
        items[:, WORK_SEQ] = np.asarray(seqs)[which]
    if rows is not None:
        items[:, WORK_ROW] = np.asarray(rows)[which]
    if first is not None:
        items[:, WORK_FIRST] = np.maximum(items[:, WORK_FIRST], first[which])
    items[:, WORK_END] = np.minimum(items[:, WORK_END], end[which])
    items[:, WORK_PLANNED] = items[:, WORK_END]
    return DecodePlan(items, layout.slots, layout.warps)


@functools.cache
def item_rungs(num_seqs: int, heads: int, multiprocessors: int = 132, max_warps: int = 8) -> tuple[int, ...]:
    """Sizes to pad a list of work items to, ascending: what fills the card once at each width of `WAVES`, one item per sequence, and what
    `_stagger` makes of them.

    The largest is enough for any `plan_decode` of up to `num_seqs` sequences, whatever their lengths.
    """
    waves = WAVES if max_warps == 8 else WIDE_WAVES
    filled = {max(1, resident * multiprocessors // heads) for _, resident, _ in waves}
    wave = 3 * multiprocessors / heads
    staggered = num_seqs + math.ceil(wave / 3) + 3 * math.ceil(wave / 4)
    return tuple(sorted({*filled, num_seqs, staggered, max(*filled, staggered + math.ceil(wave))}))


TILE_SEQ, TILE_ROW, TILE_QUERIES, TILE_CONTEXT, TILE_FIRST, TILE_FLOOR = range(6)
"""Fields of a prefill tile, int32 each. SEQ: row of the block table. ROW: the sequence's first row in q. QUERIES: its
query tokens. CONTEXT: tokens before them. FIRST: first (query, head) row of the tile. FLOOR: keys before it are
seen by no query (chunked local attention)."""


def plan_prefill(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    *,
    rows: np.ndarray,
    seqs: np.ndarray,
    group: int,
    tile_rows: int,
    floor: np.ndarray | int = 0,
) -> np.ndarray:
    """Tiles int32 [n, 8] (fields `TILE_...`) for sequences whose last `query_lens` tokens are queries."""
    query_lens, seq_lens = np.asarray(query_lens, np.int64), np.asarray(seq_lens, np.int64)
    if (query_lens < 1).any() or (query_lens > seq_lens).any():
        raise ValueError("each sequence needs between 1 and seq_len query tokens")
    count = -(-query_lens * group // tile_rows)
    which = np.repeat(np.arange(len(count)), count)
    index = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    tiles = np.zeros((len(which), FIELDS), np.int32)
    tiles[:, TILE_SEQ], tiles[:, TILE_ROW] = np.asarray(seqs)[which], np.asarray(rows)[which]
    tiles[:, TILE_QUERIES], tiles[:, TILE_CONTEXT] = query_lens[which], (seq_lens - query_lens)[which]
    tiles[:, TILE_FIRST] = index * tile_rows
    tiles[:, TILE_FLOOR] = np.broadcast_to(floor, count.shape)[which]
    last_query = np.minimum((tiles[:, TILE_FIRST] + tile_rows) // group, tiles[:, TILE_QUERIES])
    last_key = tiles[:, TILE_CONTEXT] + last_query
    return tiles[np.argsort(-last_key, kind="stable")]


def split_at_chunks(
    query_lens: np.ndarray, seq_lens: np.ndarray, rows: np.ndarray, chunk: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut queries at multiples of `chunk`: (query_lens, seq_lens, rows, which sequence, first key) of the pieces."""
    start, end = seq_lens - query_lens, seq_lens
    pieces = (end - 1) // chunk - start // chunk + 1
    which = np.repeat(np.arange(len(pieces)), pieces)
    floor = (start[which] // chunk + np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * chunk
    low, high = np.maximum(floor, start[which]), np.minimum(floor + chunk, end[which])
    return high - low, high, rows[which] + low - start[which], which, floor
