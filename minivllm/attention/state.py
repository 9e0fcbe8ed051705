"""States of state-space layers in the blocks of a KV cache: their layout, and the plan of a step."""

# Generated from nbs/attention/state.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec, Plan, as_bytes
from minivllm.attention.step_buffer import StepBuffer


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """What one state-space layer keeps of a request; the counterpart of `AttentionSpec`. vLLM has a class of this name.

    Attributes:
        shapes, dtypes: those of the parts of a state.
        block_size: tokens between two checkpoints.
        dtype: that of the layer's activations.
        ring: how many blocks of a request its states are written to in turn, see `StateRules`.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    block_size: int
    dtype: torch.dtype
    ring: int = 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each part begins in a block, and where the last ends, in bytes. All begin at multiples of 64."""
        offsets = [0]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            offsets.append(offsets[-1] + -(-math.prod(shape) * dtype.itemsize // 64) * 64)
        return tuple(offsets)

    @property
    def num_bytes(self) -> int:
        """Bytes of a state."""
        return self.offsets[-1]

    def planner(
        self, backend: AttentionBackend, device: torch.device, buffer: StepBuffer | None = None
    ) -> "Callable[[AttentionBatch], StatePlan]":
        """See `AttentionSpec.planner`."""
        return partial(plan_states, spec=self, device=device)


LayerCacheSpec = AttentionSpec | MambaSpec


def backend_needs(specs: Iterable[LayerCacheSpec]) -> set[AttentionSpec]:
    """The attention specs that a backend must support for these layers; for states alone, some attention in their dtype."""
    specs = set(specs)
    attention = {spec for spec in specs if isinstance(spec, AttentionSpec)}
    least: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "scale": 1.0, "block_size": 16}
    return attention or {AttentionSpec(**least, dtype=spec.dtype) for spec in specs}


def cache_layout(
    backend: AttentionBackend, specs: Iterable[LayerCacheSpec], num_blocks: int
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a cache tensor that layers of these specs share: attention's, if there is any, and bytes if not."""
    states = list[MambaSpec]()
    for spec in specs:
        if isinstance(spec, AttentionSpec):
            return backend.kv_cache_shape(num_blocks, spec), backend.kv_cache_dtype(spec)
        states.append(spec)
    return (1, num_blocks, max(spec.num_bytes for spec in states)), torch.uint8


class StateView:
    """One part of the states in a cache tensor, by block.

    Attributes:
        pages: uint8 [halves, num_blocks, bytes]: the cache.
        start, shape, dtype: where the part begins in a block, and what it is.
    """

    def __init__(self, cache: Tensor, spec: MambaSpec, part: int) -> None:
        self.pages = as_bytes(cache).view(torch.uint8).flatten(2)
        self.start, self.shape, self.dtype = spec.offsets[part], spec.shapes[part], spec.dtypes[part]
        self.end = self.start + math.prod(self.shape) * self.dtype.itemsize

    @property
    def place(self) -> tuple[int, int] | None:
        """Address of the part in block 0, and numbers from one block to the next; None if they are not float32 or in both halves."""
        halves, stride, _ = self.pages.stride()
        half, start = divmod(self.start, self.pages.shape[2])
        whole = start + self.end - self.start <= self.pages.shape[2]
        if self.dtype != torch.float32 or stride % 4 or not whole:
            return None
        return self.pages.data_ptr() + half * halves + start, stride // 4

    def _places(self) -> list[tuple[Tensor, slice]]:
        """For each half that has bytes of the part: [num_blocks, bytes] of the cache, and which bytes of the part they are."""
        places, size = [], self.pages.shape[2]
        for i, half in enumerate(self.pages):
            first, last = max(self.start, i * size), min(self.end, (i + 1) * size)
            if first < last:
                part = slice(first - self.start, last - self.start)
                places.append((half[:, first - i * size : last - i * size], part))
        return places

    def read(self, blocks: Tensor) -> Tensor:
        """`[R, *shape]` of R blocks; int64 [R]."""
        found = [half.index_select(0, blocks) for half, _ in self._places()]
        data = found[0] if len(found) == 1 else torch.cat(found, 1)
        return data.view(self.dtype).view(len(blocks), *self.shape)

    def write(self, blocks: Tensor, states: Tensor) -> None:
        """Put `[R, *shape]` into R different blocks."""
        data = states.to(self.dtype).reshape(len(blocks), -1).contiguous().view(torch.uint8)
        for half, part in self._places():
            half.index_copy_(0, blocks, data[:, part])


class Piece(NamedTuple):
    """Tokens `start` to `end` - 1 of a step, which read the state in block `read` (-1: they begin the request) and write to `write`."""

    start: int
    end: int
    read: int
    write: int


@dataclass(frozen=True)
class Sequences:
    """Which tokens update which states in a recurrence: S sequences, laid end to end.

    Attributes:
        read, write: int64 [S], the blocks of their states, before and after; -1 to read none.
        begins: int64 [S + 1], the first token of each.
        single: they have one token each. If not, there is one sequence.
        fresh: nothing is read: the state before is 0.
    """

    read: Tensor
    write: Tensor
    begins: Tensor
    single: bool = True
    fresh: bool = False


Rows = Tensor | slice


@dataclass
class StatePlan(Plan):
    """The plan of a group of state-space layers.

    Attributes:
        rows: int64 [D]: the decodes, tokens that are the only ones of a request and that start from its state.
        decodes: the same tokens, as sequences.
        pieces: what follows them, in order.
        sequences: each piece as a sequence.
    """

    spec: MambaSpec  # type: ignore[assignment]
    rows: Tensor
    decodes: Sequences
    pieces: list[Piece]
    sequences: list[Sequences]

    @cached_property
    def runs(self) -> list[tuple[Rows, Sequences]]:
        """The parts of the step that are worked on together: which tokens, and as which sequences."""
        decodes: list[tuple[Rows, Sequences]] = [(self.rows, self.decodes)] if len(self.rows) else []
        return decodes + [(slice(p.start, p.end), s) for p, s in zip(self.pieces, self.sequences, strict=True)]

    @cached_property
    def tokens(self) -> list[tuple[Rows, Sequences]]:
        """As `runs`, with every token by itself."""
        d, found = self.decodes, list[tuple[Rows, Sequences]]()
        for i, row in enumerate(self.rows.tolist()):
            found.append((slice(row, row + 1), Sequences(d.read[i : i + 1], d.write[i : i + 1], d.begins[:2])))
        for piece, whole in zip(self.pieces, self.sequences, strict=True):
            one = replace(whole, single=True, begins=torch.arange(2, device=whole.read.device))
            for t in range(piece.start, piece.end):
                found.append((slice(t, t + 1), one))
                one = replace(one, read=one.write, fresh=False)
        return found


def cut_pieces(start: int, first: int, end: int, table: np.ndarray, size: int) -> list[Piece]:
    """The pieces of a request whose tokens of this step begin at `start` in the batch and are positions `first` to `end` - 1.

    table: its blocks: one for every `size` tokens, with null blocks where no checkpoint is kept, or a single one.
    """

    def block(place: int) -> int:
        return int(table[min(place // size, len(table) - 1)])

    inner = range((first // size + 1) * size, end, size)
    cuts = [place for place in inner if block(place - 1) not in (0, block(place))]
    begins, ends = [first, *cuts], [*cuts, end]
    return [
        Piece(start + a - first, start + b - first, block(a - 1) if a else -1, block(b - 1))
        for a, b in zip(begins, ends, strict=True)
    ]


def ring_pieces(start: int, first: int, end: int, table: np.ndarray, ring: int) -> list[Piece]:
    """As `cut_pieces`, for a table whose `ring` blocks keep the last states: a piece for each token, if all of them can be kept."""
    begins = range(first, end) if first and end - first <= ring else [first]
    ends = [*begins[1:], end]
    return [
        Piece(start + a - first, start + b - first, int(table[(a - 1) % ring]) if a else -1, int(table[(b - 1) % ring]))
        for a, b in zip(begins, ends, strict=True)
    ]


def plan_states(batch: AttentionBatch, spec: MambaSpec, device: torch.device) -> StatePlan:
    """Plan a step. Slots are not used: a state fills its block from the start, so there is no offset."""
    starts, table, size, ring = batch.query_start_loc, batch.block_table, spec.block_size, spec.ring
    first = batch.seq_lens - batch.query_lens
    number, last = np.arange(len(first)), table.shape[1] - 1

    def block(place: np.ndarray) -> np.ndarray:
        return table[number, place % ring if ring > 1 else np.minimum(place // size, last)]

    read, write = block(np.maximum(first - 1, 0)), block(batch.seq_lens - 1)
    single, cutter = (batch.query_lens == 1) & (first > 0), cut_pieces if ring == 1 else ring_pieces
    cut = {
        r: cutter(int(starts[r]), int(first[r]), int(batch.seq_lens[r]), table[r], size if ring == 1 else ring)
        for r in np.flatnonzero(~single).tolist()
    }
    moving = np.flatnonzero(single & (read != write)).tolist()
    written = {*write[single].tolist(), *(p.write for pieces in cut.values() for p in pieces)} if moving else ()
    for r in moving:
        if read[r] in written:  # another request writes it now
            single[r], cut[r] = False, [Piece(int(starts[r]), int(starts[r]) + 1, int(read[r]), int(write[r]))]
    pieces = [piece for r in sorted(cut) for piece in cut[r]]
    arrays = [*(x[single] for x in (starts[:-1], read, write)), np.arange(single.sum() + 1)]
    arrays.append(np.array([(p.read, p.write, 0, p.end - p.start) for p in pieces]).reshape(-1, 4))
    rows, of, to, begins, each = (torch.from_numpy(x.astype(np.int64)).to(device) for x in arrays)
    sequences = [
        Sequences(row[:1], row[1:2], row[2:], single=False, fresh=piece.read < 0)
        for row, piece in zip(each, pieces, strict=True)
    ]
    return StatePlan(spec, torch.empty(0), rows, Sequences(of, to, begins), pieces, sequences)
