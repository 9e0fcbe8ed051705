"""Work items of CPU attention for one step, balanced over threads."""

# Generated from nbs/numba_kernels/cpu/planning.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, OWN, Kernel, kernel, pack
from minivllm_kernels.cpu.matmul.layout import tile_configs
from minivllm_kernels.cpu.program import LAUNCHER, aligned

__all__ = [
    "BEGIN", "BLOCK_STRIDE", "CACHE", "CHUNK", "CLAIMS", "CONFIGS", "COUNTER", "COUNTERS", "END", "FACTORS",
    "FIELDS", "FIRST", "HEADS", "INT8", "ITEMS", "KV_FACTORS", "LAST", "OUT", "PARTS", "POSITION", "Q_STRIDE",
    "ROW", "SCRATCH", "SLOT", "STEP_ARGS", "TABLE", "TABLE_STRIDE", "TOKEN", "TOKENS", "WINDOW", "WORKSPACE",
    "AttentionStep", "CPUAttentionShape", "Q", "attention_kernel", "plan_items",
]  # fmt: skip

"""Shapes and work lists of the CPU attention kernels. Pure numpy: nothing here compiles anything."""


INT8 = -8
"""Takes the place of a number of bits for int8; 8 means e4m3."""


@dataclass(frozen=True)
class CPUAttentionShape:
    """What an attention kernel is compiled for.

    Attributes:
        head_dim: size of a head; a multiple of 4.
        group: query heads per key-value head.
        block_size: tokens of a KV block; a multiple of 4.
        q_bits: of queries and results: 32 (float32) or 16 (bf16).
        kv_bits: of the cache, likewise; 8 for fp8, `INT8` for int8 with a float32 scale for each token and head.
        max_lanes, registers: of the machine, see `simd`.
        tiles: use AMX, see `tiles_problem`.
    """

    head_dim: int
    group: int
    block_size: int
    q_bits: int = 32
    kv_bits: int = 32
    max_lanes: int = 16
    registers: int = 32
    tiles: bool = False

    @staticmethod
    def problem(head_dim: int, block_size: int) -> str | None:
        """Why no kernel can be built for these sizes, or None."""
        if head_dim % 4:
            return f"head_dim {head_dim} is not a multiple of 4"
        if block_size % 4:
            return f"block_size {block_size} is not a multiple of 4"
        if head_dim > 1024 or block_size > 1024:
            return f"head_dim {head_dim} or block_size {block_size} is above 1024"
        return None

    @functools.cached_property
    def lanes(self) -> int:
        """Lanes that divide both sizes, so that no vector has a ragged end."""
        return math.gcd(self.max_lanes, self.head_dim, self.block_size)

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Where the parts of a thread's memory begin, in bytes; `end` is its size, in whole cache lines."""
        rows, panel = self.item_rows, 2 * self.tile * self.tiles
        sizes = {
            "queries": 4 * rows * self.head_dim,
            "result": 4 * rows * self.state,
            "whole": 4 * rows * self.state,
            "scores": 4 * self.max_row_block * self.score_stride,
            "columns": 8 * (self.tile // self.lanes + 8),
            "first": 8 * rows,
            "last": 8 * rows,
            "keys": panel * self.head_dim,
            "values": panel * self.head_dim,
            "weights": panel * self.max_row_block,
        }
        ends = np.cumsum([-(-size // 64) * 64 for size in sizes.values()]).tolist()
        return dict(zip([*sizes, "end"], [0, *ends], strict=True))

    @property
    def tile(self) -> int:
        """Keys between two updates of the softmax: whole blocks, 64 tokens or one block."""
        return self.block_size * max(1, 64 // self.block_size)

    @property
    def split(self) -> int:
        """Keys between two merges. Fixed, so that a row is summed in the same order in every batch."""
        return self.tile * max(1, 256 // self.tile)

    @property
    def part(self) -> int:
        """Numbers that the keys, or the values, of one head take in a block; for int8 the bytes, scales included."""
        return (self.head_dim + 4 * (self.kv_bits == INT8)) * self.block_size

    @property
    def max_row_block(self) -> int:
        """Query rows that are computed at once."""
        return 32 if self.tiles else 12 if self.registers >= 32 else 6

    @property
    def decode_rows(self) -> int:
        """Rows of a row block for a single token: its group, in equal parts if that is too many."""
        return -(-self.group // -(-self.group // self.max_row_block))

    @property
    def item_tokens(self) -> int:
        """Query tokens of a work item."""
        return max(1, 48 // self.group)

    @property
    def item_rows(self) -> int:
        """Query rows of a work item, rounded up to whole row blocks."""
        rows = self.item_tokens * self.group
        return max(-(-rows // n) * n for n in (self.decode_rows, self.max_row_block))

    @property
    def state(self) -> int:
        """float32 numbers of one row's running result."""
        return self.head_dim + 2 * self.lanes

    @property
    def score_stride(self) -> int:
        """float32 numbers of one row of scores: a tile, and room for a tile of registers to stick out."""
        return self.tile + 8 * self.lanes

    @property
    def tiles_problem(self) -> str | None:
        """Why AMX cannot be used for these sizes, or None."""
        if (self.q_bits, self.kv_bits) != (16, 16):
            return "queries and cache are not both bf16"
        if self.head_dim % 32 or self.tile != 64 or self.block_size % 16 or self.lanes != 16:
            return f"head_dim {self.head_dim} and block_size {self.block_size} do not fill tiles"
        return None


FIELDS = 11
TOKEN, TOKENS, POSITION, ROW, BEGIN, END, PARTS, COUNTER, SLOT, FIRST, LAST = range(FIELDS)
"""Columns of a work item: first query token in the step, how many, position of the first in its request, row of the block table;
first split and end of the splits to compute, how many items share the query tokens, number of their counter, their place in the workspace;
first split and end of the splits of all of them."""


def plan_items(
    shape: CPUAttentionShape,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    first_key: Callable[[int], int],
    num_kv_heads: int,
    threads: int,
) -> tuple[np.ndarray, int]:
    """Cut a step into work items; each is done once for every key-value head.

    Args:
        query_start_loc: [B + 1], where each request's query tokens begin in the step.
        seq_lens: [B], tokens of each request after the step.
        first_key: function from a query's position to that of the first key that it sees.
        threads: threads to keep busy.

    Returns:
        int32 [items, FIELDS], the costliest first, and how many splits the workspace must hold per head.
    """
    tiles, size, split = list[tuple[int, ...]](), shape.item_tokens, shape.split
    starts = query_start_loc.tolist()
    for row, (start, end, length) in enumerate(zip(starts, starts[1:], seq_lens.tolist())):
        for token in range(start, end, size):
            tokens, position = min(end - token, size), length - (end - token)
            first, last = first_key(position) // split, -(-(position + tokens) // split)
            tiles.append((token, tokens, position, row, first, last))

    wanted, cuts = 4 * threads, len(tiles) * num_kv_heads
    most = -(-wanted // cuts) if 0 < cuts < wanted else 1
    items, slots = list[tuple[int, ...]](), 0
    for counter, (*tile, first, last) in enumerate(tiles):
        splits = last - first
        parts = min(splits, most)
        for part in range(parts):
            begin, end = first + splits * part // parts, first + splits * (part + 1) // parts
            items.append((*tile, begin, end, parts, counter, slots, first, last))
        slots += splits if parts > 1 else 0
    items.sort(key=lambda item: item[TOKENS] * (item[BEGIN] - item[END]))
    return np.array(items, np.int32).reshape(-1, FIELDS), slots


def plan_claims(items: np.ndarray, num_kv_heads: int, threads: int) -> np.ndarray:
    """Bounds of the claims, int64 [claims + 1]. They count pairs of item and head; the heads of an item are neighbours."""
    cost = items[:, TOKENS].astype(np.int64) * (items[:, END] - items[:, BEGIN])
    done = np.cumsum(np.repeat(cost, num_kv_heads))
    eighths = 8 * threads * done // done[-1:]
    return np.append(0, np.flatnonzero(np.diff(eighths, prepend=0)) + 1)


Q, OUT, CACHE, Q_STRIDE, BLOCK_STRIDE, TABLE, TABLE_STRIDE, ITEMS, CLAIMS, HEADS = range(OWN, OWN + 10)
WINDOW, CHUNK, FACTORS, SCRATCH, WORKSPACE, COUNTERS, CONFIGS, KV_FACTORS = range(OWN + 10, OWN + 18)
STEP_ARGS = (COUNT, *range(BLOCK_STRIDE, CONFIGS + 1))
"""The arguments that are the same in all layers of a step."""


class AttentionStep:
    """Attention of one step, for every layer of a KV cache group.

    Args:
        shape: of the kernel.
        query_start_loc, seq_lens: int [B + 1], int [B], as in `plan_items`.
        block_table: int32 [B, max_blocks].
        num_kv_heads: key-value heads.
        scale: factor on the scores.
        window, chunk: 0, or how far back a token sees, or the size of the chunks that see each other. One of them must be 0.
        soft_cap: 0, or the bound on the scores.
        threads: how many will run it.
    """

    def __init__(
        self,
        shape: CPUAttentionShape,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        block_table: np.ndarray,
        *,
        num_kv_heads: int,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        soft_cap: float = 0.0,
        threads: int = 1,
    ) -> None:
        def first_key(position: int) -> int:
            if window:
                return max(position - window + 1, 0)
            return position // chunk * chunk if chunk else 0

        self.kernel, self.threads = attention_kernel(shape), threads
        self._width = num_kv_heads * shape.group * shape.head_dim
        self.items, slots = plan_items(shape, query_start_loc, seq_lens, first_key, num_kv_heads, threads)
        self.claims = plan_claims(self.items, num_kv_heads, threads)
        self.block_table = np.ascontiguousarray(block_table, np.int32)
        self.factors = np.array([scale, soft_cap], np.float32)
        self.counters = np.zeros(max(1, len(self.items) * num_kv_heads), np.int64)
        self._scratch = aligned(threads * shape.offsets["end"])
        self._workspace = aligned(4 * slots * num_kv_heads * shape.item_rows * shape.state)
        block_stride = 2 * num_kv_heads * shape.part
        arrays = (
            self.block_table,
            self.items,
            self.claims,
            self.factors,
            self._scratch,
            self._workspace,
            self.counters,
        )
        table, items, claims, *memory = (array.ctypes.data for array in arrays)
        heads = block_stride, table, self.block_table.shape[1], items, claims, num_kv_heads
        self.args = pack(
            len(self.claims) - 1, 0, 0, 0, 0, *heads, window, chunk, *memory, tile_configs().ctypes.data, 0
        )

    def run(self, q: int, out: int, cache: int, q_stride: int = 0, kv_factors: int = 0) -> None:
        """Compute a layer.

        Args:
            q, out, cache: addresses of contiguous memory, q and out [T, heads, head_dim].
            q_stride: numbers from one row of q to the next, if more lies between them.
            kv_factors: of an fp8 cache, address of float32 [2]: what keys and values read from it are multiplied by.
        """
        args = self.args
        args[Q], args[OUT], args[CACHE], args[Q_STRIDE] = q, out, cache, q_stride or self._width
        args[KV_FACTORS] = kv_factors
        LAUNCHER.run(self.kernel, args, self.threads)


@functools.cache
def attention_kernel(shape: CPUAttentionShape) -> Kernel:
    """The kernel of this shape; compiled unless the disk has it."""
    return kernel("minivllm_kernels.cpu.attention:attend", *map(int, astuple(shape)))
