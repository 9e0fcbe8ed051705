"""Sampling parameters of all running requests as batched columns."""

# Generated from nbs/sampling/state.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minivllm.sampling.params import SamplingParams
from minivllm.sampling.random import as_seed, uniforms

__all__ = ["NO_LOGPROBS", "Array", "Matcher", "RequestView", "SamplingBatch", "SamplingState"]

Array = npt.NDArray[Any]
NO_LOGPROBS = -2

COLUMNS: dict[str, type] = {
    "greedy": np.bool_,
    "temperature": np.float32,
    "min_p": np.float32,
    "top_k": np.int64,
    "top_p": np.float64,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "repetition_penalty": np.float32,
    "penalised": np.bool_,
    "min_tokens": np.int64,
    "seed": np.uint64,
    "num_output_tokens": np.int64,
    "logprobs": np.int64,
    "unusual": np.bool_,  # has parameters that are not a number: bias, allowed ids, bad words, grammar, own transforms
}


def column_values(params: SamplingParams, seed: int, num_output_tokens: int) -> dict[str, Any]:
    """The entries of one request's row, one per column. `top_k` 0, `top_p` 1 and `min_p` 0 mean off."""
    greedy = params.is_greedy
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    unusual = (params.logit_bias, params.allowed_token_ids, params.bad_words, params.structured_outputs)
    return {
        "greedy": greedy,
        "temperature": 1.0 if greedy else params.temperature,
        "min_p": 0.0 if greedy else params.min_p,
        "top_k": 0 if greedy else min(params.top_k, 2**62),  # more than any vocabulary has
        "top_p": 1.0 if greedy else params.top_p,
        "presence_penalty": penalties[0],
        "frequency_penalty": penalties[1],
        "repetition_penalty": penalties[2],
        "penalised": penalties != (0.0, 0.0, 1.0),
        "min_tokens": params.min_tokens,
        "seed": as_seed(seed),
        "num_output_tokens": num_output_tokens,
        "logprobs": NO_LOGPROBS if params.logprobs is None else params.logprobs,
        "unusual": any(unusual) or bool(params.logits_processors) or bool(params.extra_args),
    }


class Matcher(Protocol):
    """What the state needs of a grammar: which tokens may come next, and the news that one came."""

    def fill(self, bitmask_row: npt.NDArray[np.int32]) -> None:
        """Set the bits of the allowed next tokens in int32 [ceil(V / 32)], lowest bit first."""

    def accept(self, token_id: int) -> bool:
        """Move on by one token; False when the grammar does not allow it."""


@dataclass(slots=True)
class RequestView:
    """One request as its transforms see it. `output_token_ids` grows; transforms must not change anything here."""

    request_id: str
    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    seed: int
    row: int
    matcher: Matcher | None = None
    error: str | None = None
    transforms: list[Any] | None = None  # its own, made when it is first sampled


class TokenCounts:
    """The tokens that each penalised row has seen: ids, how often in the output, whether in the prompt.

    Arrays [slots, capacity] that double when they are full; entries at or after `length[slot]` mean nothing.
    """

    def __init__(self) -> None:
        self.ids = np.zeros((4, 256), np.int64)
        self.in_output = np.zeros((4, 256), np.int32)
        self.in_prompt = np.zeros((4, 256), np.bool_)
        self.length = np.zeros(4, np.int64)
        self.slot: dict[int, int] = {}
        self._place: dict[int, dict[int, int]] = {}

    def add(self, row: int, prompt: Iterable[int]) -> None:
        """Give `row` a slot and list the tokens of its prompt."""
        used = set(self.slot.values())
        slot = next(i for i in range(len(used) + 1) if i not in used)
        tokens = list(dict.fromkeys(prompt))
        while slot >= len(self.length):
            self._grow(2 * len(self.length), self.ids.shape[1])
        while len(tokens) > self.ids.shape[1]:
            self._grow(len(self.length), 2 * self.ids.shape[1])
        self.slot[row], self._place[row] = slot, {token: at for at, token in enumerate(tokens)}
        n = self.length[slot] = len(tokens)
        self.ids[slot, :n], self.in_output[slot, :n], self.in_prompt[slot, :n] = tokens, 0, True

    def append(self, row: int, token: int) -> None:
        """One more `token` in the output of `row`."""
        slot, place = self.slot[row], self._place[row]
        at = place.setdefault(token, len(place))
        if at == self.length[slot]:
            if at == self.ids.shape[1]:
                self._grow(len(self.length), 2 * at)
            self.ids[slot, at], self.in_output[slot, at], self.in_prompt[slot, at] = token, 0, False
            self.length[slot] = at + 1
        self.in_output[slot, at] += 1

    def _grow(self, slots: int, capacity: int) -> None:
        add_slots, add_capacity = slots - self.ids.shape[0], capacity - self.ids.shape[1]
        for name in ("ids", "in_output", "in_prompt"):
            setattr(self, name, np.pad(getattr(self, name), ((0, add_slots), (0, add_capacity))))
        self.length = np.pad(self.length, (0, add_slots))

    def remove(self, row: int) -> None:
        """Free the slot of `row`, if it has one."""
        self.slot.pop(row, None)
        self._place.pop(row, None)


class SamplingState:
    """The parameters of all running requests, as columns. Rows stay put from `add` to `remove`.

    max_num_seqs: the number of rows. vocab_size: the width of the logits. device: where the batch's tensors live.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self.columns: dict[str, Array] = {name: np.zeros(max_num_seqs, kind) for name, kind in COLUMNS.items()}
        self.counts = TokenCounts()
        self.requests: dict[str, RequestView] = {}
        self._free = list(range(max_num_seqs))[::-1]
        self._batch: SamplingBatch | None = None
        self._looking: tuple[bool, Array] | None = None  # of all requests: see `looks_back`

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        seed: int | None,
        matcher: Matcher | None = None,
    ) -> None:
        """Give a request a row. After a preemption it is added again, with the output it had.

        seed: used when `params.seed` is None, and needed then. matcher: that of the compiled grammar, needed with structured outputs; this
        call moves it past the output tokens. ValueError when something is missing or the request cannot be added.
        """
        self._check(request_id, params, seed, matcher)
        row = self._free.pop()
        used = params.seed if params.seed is not None else seed
        assert used is not None
        self.requests[request_id] = RequestView(request_id, params, prompt_token_ids, [], used, row, matcher)
        self._batch = self._looking = None
        try:
            for name, value in column_values(params, used, 0).items():
                self.columns[name][row] = value
            if self.columns["penalised"][row]:
                self.counts.add(row, prompt_token_ids)
            for token in output_token_ids:
                self.append(request_id, token)
        except BaseException:
            self.remove(request_id)
            raise

    def _check(self, request_id: str, params: SamplingParams, seed: int | None, matcher: Matcher | None) -> None:
        if request_id in self.requests:
            raise ValueError(f"request {request_id!r} already has a row")
        if not self._free:
            raise ValueError(f"all {len(self.columns['seed'])} rows (max_num_seqs) are taken; remove a request first")
        if params.seed is None and seed is None:
            raise ValueError(f"request {request_id!r} has no seed; give it one from sampling.random.RequestSeeds")
        if params.bad_words and params.bad_words_token_ids is None:
            raise ValueError(f"request {request_id!r}: bad_words need SamplingParams.update_from_tokenizer first")
        if params.structured_outputs is not None and matcher is None:
            raise ValueError(f"request {request_id!r}: structured_outputs need the matcher of a compiled grammar")

    def append(self, request_id: str, token_id: int) -> None:
        """A request has produced one more token."""
        view = self.requests[request_id]
        self.columns["num_output_tokens"][view.row] += 1
        self.arrive(view, token_id)

    def arrive(self, view: RequestView, token_id: int) -> None:
        """Name a token that `num_output_tokens` counts already: the model runner counts a token before the host knows it."""
        view.output_token_ids.append(token_id)
        if self.columns["penalised"][view.row]:
            self.counts.append(view.row, token_id)
        if view.matcher is not None and view.error is None and not view.matcher.accept(token_id):
            view.error = (
                f"the grammar does not allow token {token_id} after {len(view.output_token_ids) - 1} output tokens"
            )

    def remove(self, request_id: str) -> None:
        """Free the row of a request that finished, was aborted or was preempted. Unknown ids raise KeyError."""
        row = self.requests.pop(request_id).row
        self.counts.remove(row)
        self._free.append(row)
        self._batch = self._looking = None

    def looks_back(self) -> bool:
        """Whether the next token of any request depends on which tokens it has, or how many."""
        if self._looking is None:
            rows = np.fromiter((view.row for view in self.requests.values()), np.int64, len(self.requests))
            looks = bool((self.columns["penalised"] | self.columns["unusual"])[rows].any())
            self._looking = looks, rows[self.columns["min_tokens"][rows] > 0]
        looks, counting = self._looking
        early = self.columns["min_tokens"][counting] > self.columns["num_output_tokens"][counting]
        return looks or bool(early.any())

    def batch(self, request_ids: Sequence[str]) -> "SamplingBatch":
        """The rows of these requests, in this order. KeyError for a request without a row."""
        ids = list(request_ids)
        if self._batch is None or self._batch.request_ids != ids:
            requests = [self.requests[request_id] for request_id in ids]
            rows = np.fromiter((view.row for view in requests), np.int64, len(ids))
            looks_back = bool((self.columns["penalised"] | self.columns["unusual"])[rows].any())
            self._batch = SamplingBatch(self, ids, requests, rows, looks_back)
        return self._batch


@dataclass(slots=True)
class SamplingBatch:
    """The rows of one step, in the order of the logits.

    Attributes:
        requests: a RequestView per row.
        looks_back: whether a choice depends on which tokens the outputs hold: penalties, bad words, grammars, own transforms.
        prepared: a cache of what each sampler and stage derived from the params; it lives as long as the set of requests.
    """

    state: SamplingState
    request_ids: list[str]
    requests: list[RequestView]
    rows: Array
    looks_back: bool
    prepared: dict[Any, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def vocab_size(self) -> int:
        return self.state.vocab_size

    @property
    def device(self) -> torch.device:
        return self.state.device

    def column(self, name: str) -> Array:
        """The values of one column now, [R], numpy."""
        return self.state.columns[name][self.rows]

    def uniforms(self) -> Tensor:
        """The random number in [0, 1) that draws the next token of each row, float64 [R] on the device."""
        u = uniforms(self.column("seed"), self.column("num_output_tokens"))
        return torch.from_numpy(u).to(self.device, non_blocking=True)

    def tensor(self, name: str, rows: Array | None = None) -> Tensor:
        """The values of one column now, [R] or those at the batch positions `rows`, on the device."""
        values = self.column(name)
        return torch.from_numpy(values if rows is None else values[rows]).to(self.device, non_blocking=True)
