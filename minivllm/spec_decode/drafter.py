"""Drafter: asks the proposer, checks what it says, and cuts drafts to the length that pays."""

# Generated from nbs/spec_decode/drafter.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minivllm.core.speculative import PROPOSERS, SpeculativeConfig
from minivllm.spec_decode.draft_model import DraftHost, load_draft_model
from minivllm.spec_decode.eagle3 import load_eagle3
from minivllm.spec_decode.heads import load_eagle, load_medusa
from minivllm.spec_decode.mtp import load_mtp
from minivllm.spec_decode.proposers import (
    DraftRequest,
    DraftView,
    HiddenStates,
    NgramProposer,
    Proposer,
    RepeatProposer,
    SuffixProposer,
)
from minivllm.spec_decode.rejection import Draft

logger = logging.getLogger("minivllm.spec_decode")


class Acceptance:
    """By request, the chance that a draft token is right if those before it were, learned from its earlier drafts.

    KEEP: the factor by which older counts are multiplied when a draft is counted. FADE: the same for a step without a draft. PRIOR: how many trials the
    average of all requests counts for.
    """

    KEEP, FADE, PRIOR = 0.9, 0.98, 2.0

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # successes and trials
        self._all = (3.0, 5.0)

    def __getitem__(self, request_id: str) -> float:
        successes, trials = self._counts.get(request_id, (0.0, 0.0))
        return (successes + self.PRIOR * self._all[0] / self._all[1]) / (trials + self.PRIOR)

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Count a step of the request with `num_drafted` draft tokens, or none."""
        keep, trials = (self.KEEP, num_accepted + (num_accepted < num_drafted)) if num_drafted else (self.FADE, 0)
        before = self._counts.get(request_id, (0.0, 0.0))
        self._counts[request_id] = keep * before[0] + num_accepted, keep * before[1] + trials
        if num_drafted:
            keep = 1 - (1 - self.KEEP) / 10
            self._all = keep * self._all[0] + num_accepted, keep * self._all[1] + trials

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._counts.pop(request_id, None)


class StepCost:
    """Seconds of a step by its number of tokens, from the last steps.

    RECENT: how many times are kept for a size; their median counts. STALE: steps after which a time is forgotten. GROWTH: a guess for
    steps with more tokens than were tried: twice as many cost this share more, little enough for a try. EXACT: the first step
    of each number of tokens up to this one is not counted, since it may compile or be captured; above, the first of each size.
    """

    RECENT, STALE, GROWTH, EXACT = 5, 1000, 0.3, 128

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._tried: set[int] = set()
        self._step = 0

    @staticmethod
    def size(tokens: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The sizes that these numbers of tokens count as: exact up to 8, then in steps of an eighth."""
        counts = np.asarray(tokens)
        grain = 1 << np.maximum(0, np.frexp(counts - 1)[1].astype(np.int64) - 3)
        return -(-counts // grain) * grain

    def observe(self, tokens: int, seconds: float) -> None:
        """Count a step of this many tokens."""
        self._step, size = self._step + 1, int(self.size(tokens))
        first = tokens if tokens <= self.EXACT else size
        if first not in self._tried:
            self._tried.add(first)
            return
        self._times.setdefault(size, deque(maxlen=self.RECENT)).append(seconds)
        self._seen[size] = self._step
        for old in [size for size, seen in self._seen.items() if self._step - seen > self.STALE]:
            del self._times[old], self._seen[old]

    def may_try(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which of these numbers, in order, to choose from: the first, whole sizes and the last, since few sizes are soon known and
        captured; up to one size more than was timed of late."""
        sizes, most = self.size(tokens), self.size(max(8, *self._times) + 1)
        sizes[[0, -1]] = tokens[[0, -1]]
        may: npt.NDArray[np.bool_] = (sizes == tokens) & (tokens <= most)
        return may

    def knows(self, tokens: int) -> bool:
        """Whether steps of this many tokens were timed of late."""
        return int(self.size(tokens)) in self._times

    def seconds(self, tokens: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """Estimated seconds of steps with these numbers of tokens."""
        sizes = sorted(self._times)
        known = np.maximum.accumulate([median(self._times[size]) for size in sizes])
        further = np.maximum(0, np.asarray(tokens) / sizes[-1] - 1)
        return np.interp(tokens, sizes, known) + self.GROWTH * known[-1] * further


class DraftLength:
    """Chooses how many draft tokens a step carries: as many as give the most tokens per second.

    A proposer that takes more time than its drafts save is not asked for some steps: for 1, then 3, 7, and at most `LONGEST_PAUSE`, or
    as many as keep its share of the time at `ASKING`. It is asked again because text that can be guessed may come at any moment.

    Attributes:
        cost: what steps cost, from what the model runner observes.
    """

    MARGIN = 1.02  # gains below this are noise
    KEEP, LONGEST_PAUSE, ASKING = 0.9, 64, 0.01  # KEEP: as in `Acceptance`

    def __init__(self) -> None:
        self.cost = StepCost()
        self._saved = 0.0  # seconds saved per step in which the proposer was asked, on average
        self._pause = self._left = 0  # steps: the last pause, and what is left of it

    def asks(self, batch_size: int) -> bool:
        """Whether to ask the proposer in this step. Called once a step."""
        if self._left:
            self._left -= 1
            return False
        return self.cost.knows(batch_size)

    def choose(
        self, chances: Sequence[float], lengths: Sequence[int], batch_size: int, seconds: float = 0.0
    ) -> list[int]:
        """How many tokens of each draft to keep.

        Args:
            chances: for each request, the chance that a draft token is right if those before it were.
            lengths: tokens of each draft.
            batch_size: requests in the step, those without a draft included.
            seconds: what the proposer took to make them.
        """
        if not self.cost.knows(batch_size):
            return [0] * len(lengths)
        of = np.repeat(np.arange(len(lengths)), lengths)
        places = np.concatenate([np.arange(1, n + 1) for n in lengths])
        right = np.asarray(chances, np.float64)[of] ** places
        order = np.argsort(-right, kind="stable")
        gained = batch_size + np.concatenate([[0.0], np.cumsum(right[order])])
        tokens = batch_size + np.arange(len(gained))
        cost = self.cost.seconds(tokens) + seconds
        rate = gained / cost
        best = int(np.where(self.cost.may_try(tokens), rate, 0).argmax())
        if rate[best] < self.MARGIN * rate[0]:
            best = 0
        plain = float(cost[0]) - seconds
        self._account(float(gained[best]) / batch_size * plain - float(cost[best]), plain, seconds)
        return np.bincount(of[order[:best]], minlength=len(lengths)).tolist()

    def _account(self, saved: float, plain: float, seconds: float) -> None:
        """Count the seconds that a step saves by its drafts, the proposer's `seconds` taken off. plain: seconds of a step without."""
        self._saved = self.KEEP * self._saved + (1 - self.KEEP) * saved
        if self._saved < (least := -self.ASKING * plain):
            self._pause = min(2 * self._pause + 1, self.LONGEST_PAUSE, math.ceil(seconds / (self.ASKING * plain)))
            self._left, self._saved = self._pause, least  # the next answer decides
        elif saved > 0:
            self._pause = 0


def make_proposer(config: SpeculativeConfig, host: DraftHost | None = None) -> Proposer:
    """The proposer that a configuration names. host: needed by those with layers."""
    if not isinstance(config.method, str):
        return config.method
    if config.method in ("ngram", "ngram_gpu"):  # the latter in steps that the host waits for
        return NgramProposer(*config.lookup)
    if config.method == "suffix":
        return SuffixProposer(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            config.suffix_decoding_max_cached_requests,
        )
    if config.method == "synthetic":
        return RepeatProposer()
    loaders: dict[str, Callable[[Any], Proposer]] = {
        "draft_model": load_draft_model,
        "medusa": load_medusa,
        "eagle": load_eagle,
        "eagle3": load_eagle3,
        "mtp": load_mtp,
    }
    if config.method in loaders and host is not None:
        return loaders[config.method](host)
    if config.method not in PROPOSERS:
        raise ValueError(f"no proposer for the speculative method {config.method!r}")
    return PROPOSERS[config.method](config)


class Drafter:
    """Makes the drafts of a model runner.

    Args:
        proposer: where they come from.
        config: what the user said.
        vocab_size: token ids are below this.
        length: chooses how many are used; None to use all.

    Attributes:
        problem: what the proposer did wrong; None as long as it is called.
        acceptance: how often the requests' drafts are right.
        uses_blocks: the proposer wants `DraftRequest.blocks`.
    """

    def __init__(
        self, proposer: Proposer, config: SpeculativeConfig, vocab_size: int, length: DraftLength | None = None
    ) -> None:
        self.proposer, self.config, self.vocab_size, self.length = proposer, config, vocab_size, length
        self.problem: Exception | None = None
        self.acceptance = Acceptance()
        self._finish: Callable[[str, Sequence[int]], None] = getattr(proposer, "finish", lambda *about: None)
        self._forget: Callable[[str], None] = getattr(proposer, "forget", lambda request_id: None)
        self._read: Callable[[Sequence[HiddenStates]], None] | None = getattr(proposer, "read", None)
        self.uses_blocks: bool = getattr(proposer, "uses_blocks", False)
        self._drafts: dict[str, Draft] = {}
        self._step = 0

    def propose(self, asked: Iterable[DraftRequest], batch_size: int) -> dict[str, list[int]]:
        """Draft tokens by request. asked: only looked at if the proposer is. batch_size: requests that are expected in the next step."""
        self._drafts = {}
        if self.problem is not None or not (self.length is None or self.length.asks(batch_size)):
            return {}
        start = time.perf_counter()
        if not (requests := list(asked)):
            return {}
        view = DraftView(self._step, batch_size, {r.request_id: self.acceptance[r.request_id] for r in requests})
        self._step += 1
        try:
            drafts = self._checked(self.proposer.propose(requests, view), requests)
        except Exception as error:  # noqa: BLE001 - a proposer may raise anything
            self._give_up(error)
            return {}
        lengths = [len(draft.token_ids) for draft in drafts]
        if self.length is not None:
            took = time.perf_counter() - start
            lengths = self.length.choose(list(view.acceptance.values()), lengths, batch_size, took)
        for request, draft, n in zip(requests, drafts, lengths, strict=True):
            if n:
                self._drafts[request.request_id] = Draft(draft.token_ids[:n], draft.probs)
        return {name: list(draft.token_ids) for name, draft in self._drafts.items()}

    def _checked(self, said: Any, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Drafts as they can be used. Raises ValueError or TypeError that says what is wrong."""
        if said is None or len(said) != len(requests):
            got = "None" if said is None else f"{len(said)} drafts"
            raise ValueError(f"propose() must return a draft for each of {len(requests)} requests, returned {got}")
        drafts = []
        for request, answer in zip(requests, said, strict=True):
            draft = answer if isinstance(answer, Draft) else Draft(answer)
            token_ids = [int(token) for token in draft.token_ids[: request.most]]
            if wrong := [token for token in token_ids if not 0 <= token < self.vocab_size]:
                raise ValueError(f"propose() drafted token {wrong[0]}; the vocabulary has {self.vocab_size}")
            self._check_probs(draft.probs, len(token_ids))
            drafts.append(Draft(token_ids, draft.probs))
        return drafts

    def _check_probs(self, probs: Any, num_tokens: int) -> None:
        if probs is None:
            return
        if not isinstance(probs, Tensor) or not probs.is_floating_point():
            kind = probs.dtype if isinstance(probs, Tensor) else type(probs).__name__
            raise TypeError(f"propose() gave probs of {kind}, not a torch tensor of floats")
        if probs.ndim != 2 or probs.shape[1] != self.vocab_size or len(probs) < num_tokens:
            raise ValueError(
                f"propose() gave probs of shape {list(probs.shape)} for {num_tokens} tokens, not [{num_tokens}, {self.vocab_size}]"
            )

    def scheduled(self, request_id: str, token_ids: Sequence[int]) -> Draft:
        """The draft that is verified: the scheduler may have cut it, and a replay may bring another."""
        draft = self._drafts.get(request_id, Draft())
        known = list(draft.token_ids[: len(token_ids)]) == list(token_ids)
        return Draft(token_ids, draft.probs if known else None)

    def finish(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request has ended, with this answer."""
        self.acceptance.forget(request_id)
        if self.problem is not None:
            return
        try:
            self._finish(request_id, token_ids)
            self._forget(request_id)
        except Exception as error:  # noqa: BLE001 - a proposer may raise anything
            self._give_up(error)

    @property
    def reads(self) -> bool:
        """Whether the proposer wants the target's hidden states."""
        return self._read is not None and self.problem is None

    def read(self, states: Sequence[HiddenStates]) -> None:
        """Hand the proposer what the target has computed."""
        assert self._read is not None
        try:
            self._read(states)
        except Exception as error:  # noqa: BLE001 - a proposer may raise anything
            self._give_up(error)

    def preempt(self, request_id: str) -> None:
        """A request has lost its blocks."""
        if self.problem is None:
            try:
                self._forget(request_id)
            except Exception as error:  # noqa: BLE001 - a proposer may raise anything
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.problem = error
        logger.exception("the proposer has failed, and is not called again; the engine goes on without drafts")

    def observe(self, batch_size: int, drafts: dict[str, int], accepted: dict[str, int], seconds: float | None) -> None:
        """Learn from a step.

        Args:
            batch_size: requests that sampled.
            drafts: how many draft tokens each of them carried.
            accepted: how many were right.
            seconds: what the step took; None if it computed something else as well.
        """
        for name, drafted in drafts.items():
            self.acceptance.observe(name, drafted, accepted[name])
        if seconds is not None and self.length is not None:
            self.length.cost.observe(batch_size + sum(drafts.values()), seconds)


def make_drafter(config: SpeculativeConfig, vocab_size: int, host: DraftHost | None = None) -> Drafter:
    """A drafter with the proposer and the choice of lengths that the configuration asks for."""
    length = DraftLength() if config.dynamic_length else None
    return Drafter(make_proposer(config, host), config, vocab_size, length)
