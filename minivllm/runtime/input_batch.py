"""Input batch: persistent per-request rows, block tables, arrays of a step."""

# Generated from nbs/runtime/input_batch.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minivllm.attention.backend import AttentionBatch

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


def round_lengths(lengths: Int64) -> Int64:
    """The lengths that are planned for sequences of which the device alone knows how long they are: few of them, so that a plan lasts."""
    return -(-lengths // 64) * 64


class BlockTable:
    """Block ids of every row, for one KV cache group. ``ids``: int32 [max_num_rows, max_blocks]; unused entries are stale."""

    def __init__(self, max_num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.ids = np.zeros((max_num_rows, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_rows, np.int32)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks behind those that the row has. Raises IndexError if they are more than the longest request may have."""
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
class StepInputs:
    """The arrays of one step, in scheduling order. ``B`` requests, ``T`` tokens.

    request_ids: the B requests. rows: int64 [B], their rows. counts: int64 [B], their tokens in this step. starts: int64 [B + 1],
    where they begin among the T. row_of_token, place: int64 [T], of each token the row, and how far it stands behind the first of its
    request. token_ids, positions: int64 [T]. attention: one AttentionBatch for each KV cache group; a
    draft token, and the token before the first, is a separate request there.
    last_token: int64 [B], index into the T tokens of each request's last one.
    samples: bool [B], whether a new token is sampled: the last scheduled token is the last known one, or a draft token, and the
    row draws.
    """

    request_ids: list[str]
    rows: Int64
    counts: Int64
    starts: Int64
    row_of_token: Int64
    place: Int64
    token_ids: Int64
    positions: Int64
    attention: list[AttentionBatch]
    last_token: Int64
    samples: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the arrays of a step have in common with the next step of the same requests with the same counts. As in `StepInputs`, and:

    of, last: int64 [Q], of the queries of the attention: the row, and which of the T tokens is the last. begins: int32 [Q + 1].
    """

    key: tuple[object, ...]
    request_ids: list[str]
    rows: Int64
    counts: Int64
    starts: Int64
    row_of_token: Int64
    place: Int64
    of: Int64
    last: Int64
    begins: Int32


def _shape(key: tuple[object, ...], rows: Int64, num_scheduled: dict[str, int], drafts: Container[str]) -> _Shape:
    """drafts: requests each of whose tokens is one query, which attends to what stands before it."""
    counts = np.fromiter(num_scheduled.values(), np.int64, len(rows))
    starts = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    row_of_token, begins_one = np.repeat(rows, counts), np.zeros(starts[-1], np.bool_)
    if drafts:
        begins_one |= np.repeat(np.fromiter((r in drafts for r in num_scheduled), np.bool_, len(rows)), counts)
    begins_one[starts[:-1]] = True
    begins = np.append(np.flatnonzero(begins_one), starts[-1])
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    queries = row_of_token[begins[:-1]], begins[1:] - 1, begins.astype(np.int32)
    return _Shape(key, list(num_scheduled), rows, counts, starts, row_of_token, place, *queries)


class InputBatch:
    """What the model runner remembers of every running request, as numpy rows that never move.

    token_ids: int32 [max_num_seqs, max_model_len], all known tokens. num_tokens, num_computed: int64 [max_num_seqs].
    draws: bool [max_num_seqs], False for a request that gets no tokens (it wants a vector, or failed).
    block_tables: one for each KV cache group.
    awaited: of a request whose tokens another rank samples: (the step, how many draft tokens it verifies).
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
        self._last: _Shape | None = None  # of the last step, as long as no request gets or loses a row

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
        key, shape = (*num_scheduled.items(), *(drafts or ())), self._last
        if shape is None or shape.key != key:  # most steps have the requests of the one before
            rows = np.fromiter((self.row_of[r] for r in num_scheduled), np.int64, len(num_scheduled))
            self._last = shape = _shape(key, rows, num_scheduled, drafts or {})
        computed = self.num_computed[shape.rows]
        if drafts:
            self._write(drafts)
        positions = self.num_computed[shape.row_of_token] + shape.place
        lengths, attention = positions[shape.last] + 1, []
        lengths = (round_lengths(lengths) if ahead else lengths).astype(np.int32)
        for table in self.block_tables:
            size, longest = table.block_size, max(1, int(table.num_blocks[shape.rows].max()))
            slots = table.ids[shape.row_of_token, positions // size].astype(np.int64) * size + positions % size
            attention.append(AttentionBatch(shape.begins, lengths, table.ids[shape.of, :longest], slots))
        return StepInputs(
            request_ids=shape.request_ids,
            rows=shape.rows,
            counts=shape.counts,
            starts=shape.starts,
            row_of_token=shape.row_of_token,
            place=shape.place,
            token_ids=self.token_ids[shape.row_of_token, positions].astype(np.int64),
            positions=positions,
            attention=attention,
            last_token=shape.starts[1:] - 1,
            samples=(computed + shape.counts >= self.num_tokens[shape.rows]) & self.draws[shape.rows],
        )

    def _write(self, drafts: dict[str, list[int]]) -> None:
        """Put draft tokens behind the known ones, without counting them."""
        for request_id, token_ids in drafts.items():
            row = self.row_of[request_id]
            known = self.num_tokens[row]
            self.token_ids[row, known : known + len(token_ids)] = token_ids

    def accept(self, request_id: str, num_drafts: int, token_ids: Sequence[int]) -> None:
        """After `advance` over a step with draft tokens: append what was sampled, and take back what was computed for the others."""
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
