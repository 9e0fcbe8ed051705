"""Input batch: persistent per-request rows, block tables, arrays of a step."""

# Generated from nbs/runtime/input_batch.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from minivllm.attention.backend import AttentionBatch

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def round_lengths(lengths: Int64) -> Int64:
    """Planned lengths of sequences whose real length only the device knows. They take few different values, so that a plan lasts."""
    return -(-lengths // 64) * 64


class BlockTable:
    """Block ids of every row, for one KV cache group. ``ids``: int32 [max_num_rows, max_blocks]; unused entries are stale."""

    def __init__(self, max_num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.ids = np.zeros((max_num_rows, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_rows, np.int32)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks after those that the row has. Raises IndexError if the longest request may not have so many blocks."""
        start = int(self.num_blocks[row])
        end = start + len(block_ids)
        if end > self.ids.shape[1]:
            raise IndexError(f"row {row} has {start} blocks and gets {len(block_ids)}; at most {self.ids.shape[1]} fit")
        self.ids[row, start:end] = block_ids
        self.num_blocks[row] = end

    def clear(self, row: int) -> None:
        self.num_blocks[row] = 0

    def of(self, row: int) -> Int32:
        """The blocks of a row, a view that holds until the next step."""
        return self.ids[row, : self.num_blocks[row]]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """How the tokens of a step lie: the same in the next step, if it has the same requests with the same counts. ``B`` requests, ``T`` tokens.

    request_ids: the B requests. rows: int64 [B], their rows. counts: int64 [B], their tokens in this step. starts: int64 [B + 1],
    where they begin among the T. row_of_token, place: int64 [T], each token's row, and how far it stands after the first of its
    request. The attention has Q queries. query_rows: int64 [Q], their rows. query_ends: int64 [Q], the place among the T of each one's
    last token. query_start_loc: int32 [Q + 1]. A draft token, and the token before the first, is a query by itself.
    """

    request_ids: list[str]
    rows: Int64
    counts: Int64
    starts: Int64
    row_of_token: Int64
    place: Int64
    query_rows: Int64
    query_ends: Int64
    query_start_loc: Int32


_NAMES = [field.name for field in fields(StepLayout)]
_VALUES = attrgetter(*_NAMES)


@dataclass(frozen=True, slots=True)
class StepInputs(StepLayout):
    """The arrays of one step, in scheduling order.

    token_ids, positions: int64 [T]. attention: one AttentionBatch for each KV cache group. last_token: int64 [B], index into the T
    tokens of each request's last one. samples: bool [B], whether a new token is sampled: the last scheduled token is the last known
    one, or a draft token, and the row draws.
    """

    token_ids: Int64
    positions: Int64
    attention: list[AttentionBatch]
    last_token: Int64
    samples: npt.NDArray[np.bool_]


def _layout(rows: Int64, num_scheduled: dict[str, int], drafts: Container[str]) -> StepLayout:
    """drafts: requests with draft tokens."""
    counts = np.fromiter(num_scheduled.values(), np.int64, len(rows))
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    row_of_token, begins = np.repeat(rows, counts), np.zeros(starts[-1], np.bool_)
    if drafts:
        begins |= np.repeat(np.fromiter((r in drafts for r in num_scheduled), np.bool_, len(rows)), counts)
    begins[starts[:-1]] = True
    queries = np.append(np.flatnonzero(begins), starts[-1])
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    of_queries = row_of_token[queries[:-1]], queries[1:] - 1, queries.astype(np.int32)
    return StepLayout(list(num_scheduled), rows, counts, starts, row_of_token, place, *of_queries)


class InputBatch:
    """What the model runner remembers of every running request, as numpy rows that never move.

    token_ids: int32 [max_num_seqs, max_model_len], all known tokens. num_tokens, num_computed: int64 [max_num_seqs].
    draws: bool [max_num_seqs], False for a request that gets no tokens (it wants a vector, or failed).
    block_tables: one for each KV cache group.
    awaited: for a request whose tokens another rank samples: (the step, how many draft tokens it verifies).
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_sizes: Sequence[int]) -> None:
        self.row_of: dict[str, int] = {}
        self.awaited: dict[str, tuple[int, int]] = {}
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.draws = np.zeros(max_num_seqs, np.bool_)
        self.block_tables = [BlockTable(max_num_seqs, max_model_len, size) for size in block_sizes]
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._last: tuple[object, StepLayout] | None = (
            None  # the last step's, as long as no request gets or loses a row
        )

    def __len__(self) -> int:
        return len(self.row_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.row_of

    def add(
        self, request_id: str, token_ids: Sequence[int], num_computed: int, block_ids: Sequence[Sequence[int]]
    ) -> int:
        """Give a request a row, and return it.

        Args:
            token_ids: prompt and output so far.
            block_ids: one list for each KV cache group.
        """
        if request_id in self.row_of:
            raise ValueError(f"request {request_id!r} already has a row")
        row, self._last = self._free_rows.pop(), None
        self.row_of[request_id] = row
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_computed[row] = num_computed
        self.draws[row] = True
        self.append_blocks(request_id, block_ids)
        return row

    def append_blocks(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        row = self.row_of[request_id]
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            if ids:
                table.append(row, ids)

    def drop(self, request_id: str) -> None:
        """Take a row back. A request that never got one (aborted while it waited) is no error."""
        row, self._last = self.row_of.pop(request_id, None), None
        self.awaited.pop(request_id, None)
        if row is None:
            return
        for table in self.block_tables:
            table.clear(row)
        self._free_rows.append(row)

    def prepare(
        self, num_scheduled: dict[str, int], drafts: dict[str, list[int]] | None = None, ahead: bool = False
    ) -> StepInputs:
        """Arrays for one step.

        Args:
            num_scheduled: {request_id: number of tokens}, in scheduling order; each at least 1.
            drafts: the draft tokens among them, which are a request's last.
            ahead: the device knows the tokens and corrects the lengths; they are planned so that few steps need another plan.
        """
        key = (*num_scheduled.items(), *(drafts or ()))
        if self._last is None or self._last[0] != key:  # most steps have the requests of the one before
            rows = np.fromiter((self.row_of[r] for r in num_scheduled), np.int64, len(num_scheduled))
            self._last = key, _layout(rows, num_scheduled, drafts or {})
        layout = self._last[1]
        if drafts:
            self._write(drafts)
        rows, of_token = layout.rows, layout.row_of_token
        positions = self.num_computed[of_token] + layout.place
        lengths, attention = positions[layout.query_ends] + 1, []
        lengths = (round_lengths(lengths) if ahead else lengths).astype(np.int32)
        for table in self.block_tables:
            size, longest = table.block_size, max(1, int(table.num_blocks[rows].max()))
            slots = table.ids[of_token, positions // size].astype(np.int64) * size + positions % size
            blocks = table.ids[layout.query_rows, :longest]
            attention.append(AttentionBatch(layout.query_start_loc, lengths, blocks, slots))
        token_ids = self.token_ids[of_token, positions].astype(np.int64)
        samples = (self.num_computed[rows] + layout.counts >= self.num_tokens[rows]) & self.draws[rows]
        shared: dict[str, Any] = dict(zip(_NAMES, _VALUES(layout), strict=True))
        last_token = layout.starts[1:] - 1
        return StepInputs(
            **shared,
            token_ids=token_ids,
            positions=positions,
            attention=attention,
            last_token=last_token,
            samples=samples,
        )

    def _write(self, drafts: dict[str, list[int]]) -> None:
        """Put draft tokens after the known ones, without counting them."""
        for request_id, token_ids in drafts.items():
            row = self.row_of[request_id]
            known = self.num_tokens[row]
            self.token_ids[row, known : known + len(token_ids)] = token_ids

    def accept(self, request_id: str, num_drafts: int, token_ids: Sequence[int]) -> None:
        """After a step with draft tokens: append what was sampled, and take back what was computed for the others."""
        row = self.row_of[request_id]
        known = self.num_tokens[row]
        self.token_ids[row, known : known + len(token_ids)] = token_ids[: self.token_ids.shape[1] - known]
        self.num_tokens[row] = known + len(token_ids)
        self.num_computed[row] -= num_drafts + 1 - len(token_ids)

    def append_tokens(self, rows: Int64, token_ids: Int64) -> Int64:
        """Append a token to each of ``rows`` and return the places. A row that is full (``max_model_len``) keeps its tokens."""
        places = self.num_tokens[rows]
        self.set_tokens(rows, places, token_ids)
        self.num_tokens[rows] = places + 1
        return places

    def set_tokens(self, rows: Int64, places: Int64, token_ids: Int64) -> None:
        """Write one token into each of ``rows``, unless its place is past the end of a full row."""
        fits = places < self.token_ids.shape[1]
        self.token_ids[rows[fits], places[fits]] = token_ids[fits]
