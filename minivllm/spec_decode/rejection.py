"""Rejection sampler: exact acceptance of draft tokens under every sampling parameter."""

# Generated from nbs/spec_decode/rejection.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.sampling.logprobs import HostCopy, Logprob
from minivllm.sampling.random import uniforms
from minivllm.sampling.sampler import PendingSample, Sampler, SamplerOutput
from minivllm.sampling.state import Array, SamplingBatch
from minivllm.sampling.transforms import draw

NO_DRAFT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses at the next tokens of one request.

    Attributes:
        token_ids: the guesses, in order.
        probs: a torch tensor of floats (no numpy array), [len(token_ids), V] on any device: the distributions that they were drawn
            from; None for plain guesses.
    """

    token_ids: Sequence[int] = ()
    probs: Tensor | None = None


@dataclass(slots=True)
class Verified:
    """What one request got.

    Attributes:
        token_ids: the accepted tokens and one more; fewer if one of them ends the request.
        num_accepted: how many of them were guesses.
        logprobs: a report for each token, or None.
        error: why the request failed, after the tokens that it had got.
        odds: if the sampler `explains`, for each guess up to the first that was rejected: its probability in the target's distribution
            and in the one that it was drawn from (1 for a plain guess). If it was rejected, also the probability in the residual of
            the token that took its place (else None).
        device_drafts: the guesses that were verified, if the device has made them.
    """

    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    odds: list[tuple[float, float, float | None]] = field(default_factory=list)
    device_drafts: list[int] = field(default_factory=list)


class DeviceVerifier(Protocol):
    """Verifies drafts that only the device knows, of requests whose newest tokens only it knows.

    chosen: int64 [2, R], tokens and drafts, if that was done already.
    """

    chosen: Tensor | None

    def uniforms(self, seeds: Array, counts: Array) -> Tensor:
        """As `SamplingBatch.uniforms`. counts: int64 [R], output tokens before each row, as if the host knew all."""
        ...

    def verify(self, token_ids: Tensor) -> HostCopy:
        """Accept the drafts that these tokens, int64 [R], confirm. Returns the drafts, int64 [R], `NO_DRAFT` where there is none."""
        ...


@dataclass(slots=True)
class DraftBatch(SamplingBatch):
    """Rows of a step with drafts: some requests have several.

    offsets: int64 [R], how many draft tokens stand before the row. draft_ids: int64 [R], the token that is to be tested in the row,
    or NO_DRAFT. draft_probs: the distribution that it was drawn from, float32 [V], or None; one for each row.
    verifier: verifies drafts that the device has made; `compared` brings their `draft_ids`.
    """

    offsets: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    draft_ids: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    draft_probs: list[Tensor | None] = field(default_factory=list)
    verifier: DeviceVerifier | None = None
    compared: HostCopy | None = None

    def uniforms(self) -> Tensor:
        if self.verifier is None:
            return SamplingBatch.uniforms(self)
        return self.verifier.uniforms(self.column("seed"), self.column("num_output_tokens"))

    def column(self, name: str) -> Array:
        values = self.state.columns[name][self.rows]
        return values + self.offsets if name == "num_output_tokens" else values


def _rows_of(batch: SamplingBatch, drafts: Sequence[Draft], at: Sequence[tuple[int, int]], said: bool) -> DraftBatch:
    """The rows for these (request, place in its draft) pairs. said: the state knows the draft tokens before the place."""
    of = [i for i, _ in at]
    tested = [place < len(drafts[i].token_ids) for i, place in at]
    probs = [drafts[i].probs if test else None for (i, _), test in zip(at, tested, strict=True)]
    return DraftBatch(
        batch.state,
        [batch.request_ids[i] if said else f"{i}:{place}" for i, place in at],  # a name for each row, for errors
        [batch.requests[i] for i in of],
        batch.rows[of],
        batch.looks_back,
        offsets=np.array([0 if said else place for _, place in at], np.int64),
        draft_ids=np.array(
            [drafts[i].token_ids[place] if test else NO_DRAFT for (i, place), test in zip(at, tested, strict=True)],
            np.int64,
        ),
        draft_probs=[None if q is None else q[place] for q, (_, place) in zip(probs, at, strict=True)],
    )


def _places(drafts: Sequence[Draft]) -> list[tuple[int, int]]:
    """(request, place in its draft) of every row of a step, the place after the draft included."""
    return [(i, place) for i, draft in enumerate(drafts) for place in range(len(draft.token_ids) + 1)]


def choose_by_ratio(logits: Tensor, q: Tensor, x: Tensor, test: Tensor, u: Tensor) -> Tensor:
    """x with a chance of p(x) / q(x), else a token drawn from what p has more than q (Leviathan 2023, Chen 2023).

    Args:
        logits: those of p, float32 [R, V].
        q: float32 [R, V], what x was drawn from.
        x: int64 [R].
        test, u: float64 [R] in [0, 1), for the acceptance and for the other token.
    """
    p = torch.softmax(logits, -1)
    accepted = test * q.gather(1, x[:, None])[:, 0] < p.gather(1, x[:, None])[:, 0]
    rest = (p - q).clamp_(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # nothing is left where p equals q: never rejected
    return torch.where(accepted, x, draw(rest.log(), u)[0])


class RejectionSampler:
    """Verifies draft tokens with the tokens that a sampler chooses: the rule of Leviathan et al. 2023 (arXiv 2211.17192).

    sampler: chooses a token in every row.
    synthetic_acceptance_rate: accept draft tokens by this chance whatever they are, which makes texts wrong; None for the exact rule.
    """

    ACCEPT, SYNTHETIC = 0x5F3759DF, 0x2545F491  # numbers that are independent of those that tokens are drawn with

    def __init__(self, sampler: Sampler, synthetic_acceptance_rate: float | None = None) -> None:
        self.sampler, self.synthetic_acceptance_rate = sampler, synthetic_acceptance_rate
        self.explains = False  # whether `Verified.odds` are wanted, which take a softmax more
        self._odds: list[tuple[float, float, float | None]] = []  # of the rows of a call

    def verify(
        self, logits: Tensor, batch: SamplingBatch, drafts: Sequence[Draft], looks_back: bool = False
    ) -> list[Verified]:
        """Accept a prefix of each draft and choose one more token; all of them are appended to the sampling state.

        Args:
            logits: float32 [sum of (k + 1), V], each request's rows together: the one after its newest token, and those
                after each of its k draft tokens. They are overwritten.
            batch: the requests.
            drafts: one for each request, perhaps an empty one.
            looks_back: the engine's transforms depend on earlier tokens.

        Returns:
            What each request got, in order.
        """
        return self.start(logits, batch, drafts, looks_back)()

    def start(
        self, logits: Tensor, batch: SamplingBatch, drafts: Sequence[Draft], looks_back: bool = False
    ) -> Callable[[], list[Verified]]:
        """As `verify`, but returns a function that waits for a GPU and gives the result; call it once. Choices that look back are
        waited for here."""
        starts = np.cumsum([0, *(len(draft.token_ids) + 1 for draft in drafts)])
        if int(starts[-1]) != len(logits):
            raise ValueError(f"the drafts need {starts[-1]} rows of logits, got {len(logits)}")
        results = [Verified(logprobs=None if view.params.logprobs is None else []) for view in batch.requests]
        if not (looks_back or batch.looks_back):
            at = _places(drafts)
            rows = _rows_of(batch, drafts, at, said=False)
            self.sampler.share_preparation(batch, rows)
            drawn = self._choose(logits, rows)

            def finish() -> list[Verified]:
                self._accept(drawn.finish(), rows, at, results)
                return results

            return finish
        alive, place = list(range(len(results))), 0
        while alive:
            at = [(i, place) for i in alive]
            where = torch.from_numpy(starts[alive] + place).to(logits.device, non_blocking=True)
            rows = _rows_of(batch, drafts, at, said=True)
            alive, place = self._accept(self._choose(logits[where], rows).finish(), rows, at, results), place + 1
        return lambda: results

    def start_on_device(
        self, logits: Tensor | None, batch: SamplingBatch, drafts: Sequence[Draft], verifier: DeviceVerifier
    ) -> Callable[[], list[Verified]]:
        """As `start`, for drafts that the device has made. No choice may look back.

        Args:
            logits: None if the verifier has `chosen` already.
            drafts: how many each request has.
        """
        results = [Verified([], 0, None if view.params.logprobs is None else []) for view in batch.requests]
        at = _places(drafts)
        rows = _rows_of(batch, drafts, at, said=False)
        rows.verifier = verifier
        self.sampler.share_preparation(batch, rows)
        chosen = None if verifier.chosen is None else HostCopy(verifier.chosen)
        drawn = None if logits is None else self._choose(logits, rows)

        def finish() -> list[Verified]:
            if drawn is not None and rows.compared is not None:
                got, compared = drawn.finish(), rows.compared.wait()
            else:
                assert chosen is not None
                token_ids, compared = chosen.wait()[:, : len(rows)]
                got = self.sampler.take(rows, token_ids).finish()
            rows.draft_ids = compared.numpy()
            for (i, _), draft in zip(at, rows.draft_ids.tolist(), strict=True):
                results[i].device_drafts += [draft] if draft != NO_DRAFT else []
            self._accept(got, rows, at, results)
            return results

        return finish

    def _choose(self, logits: Tensor, rows: DraftBatch) -> PendingSample:
        """A token in every row."""
        accept = partial(self._explained if self.explains else self._accept_rows, rows)
        return self.sampler.start(logits, rows, accept=accept)

    def _accept(
        self, drawn: SamplerOutput, rows: DraftBatch, at: Sequence[tuple[int, int]], results: Sequence[Verified]
    ) -> list[int]:
        """Give the requests the tokens that count. Returns the requests that accepted the last of theirs."""
        going = {i for i, place in at if place == results[i].num_accepted}
        for row, ((i, place), token_id) in enumerate(zip(at, drawn.token_ids.tolist(), strict=True)):
            result, view = results[i], rows.requests[row]
            if i not in going or place != result.num_accepted:
                continue
            result.error = drawn.errors.get(rows.request_ids[row])
            if result.error is None:
                result.token_ids.append(token_id)
                if result.logprobs is not None and (report := drawn.logprobs[row]) is not None:
                    result.logprobs.append(report)
                if rows.state.requests.get(view.request_id) is view:  # else it has lost its row while the step ran
                    rows.state.append(view.request_id, token_id)
                if self.explains and rows.draft_ids[row] != NO_DRAFT:
                    result.odds.append(self._odds[row])
                if token_id == rows.draft_ids[row]:
                    result.num_accepted += 1
                    if not view.params.ends_with(token_id):
                        continue
            going.discard(i)
        return sorted(going)

    def _accept_rows(self, batch: DraftBatch, logits: Tensor, token_ids: Tensor) -> Tensor:
        """The draft token where it is accepted, else another. token_ids: int64 [R], what the sampler chose."""
        if batch.verifier is not None:
            batch.compared = batch.verifier.verify(token_ids)
            return token_ids
        if self.synthetic_acceptance_rate is not None:
            return self._by_chance(token_ids, batch, self.synthetic_acceptance_rate)
        sure = batch.column("greedy")
        rows = [i for i, probs in enumerate(batch.draft_probs) if probs is not None and not sure[i]]
        return self._by_ratio(logits, token_ids, batch, rows) if rows else token_ids

    def _explained(self, batch: DraftBatch, logits: Tensor, token_ids: Tensor) -> Tensor:
        """As `_accept_rows`, and keep the odds of each row."""
        chosen, p = self._accept_rows(batch, logits, token_ids), torch.softmax(logits, -1)
        self._odds, greedy = [], batch.column("greedy")
        for i, (guess, token) in enumerate(zip(batch.draft_ids.tolist(), chosen.tolist(), strict=True)):
            q = batch.draft_probs[i]
            if guess == NO_DRAFT:
                self._odds.append((0.0, 0.0, None))
                continue
            rest = p[i].clone()
            if q is None or greedy[i]:
                rest[guess] = 0.0
            else:
                rest = (rest - q.to(rest.device)).clamp_(min=0)
            rejected = token != guess and token >= 0
            share = 1.0 if greedy[i] else float(rest[token] / rest.sum()) if rejected else None
            self._odds.append((float(p[i, guess]), 1.0 if q is None else float(q[guess]), share if rejected else None))
        return chosen

    def _by_ratio(self, logits: Tensor, token_ids: Tensor, batch: DraftBatch, rows: list[int]) -> Tensor:
        """In these rows, the draft token with a chance of p(x) / q(x), else one from what p has more than q."""
        seeds, counts = batch.column("seed")[rows], batch.column("num_output_tokens")[rows]
        u = [uniforms(seed, counts) for seed in (seeds ^ np.uint64(self.ACCEPT), seeds)]
        sent = map(torch.from_numpy, (np.array(rows), batch.draft_ids[rows], *u))
        where, x, *chances = (array.to(logits.device, non_blocking=True) for array in sent)
        q = torch.stack([probs.to(logits.device) for i in rows if (probs := batch.draft_probs[i]) is not None])
        return token_ids.index_copy(0, where, choose_by_ratio(logits[where], q, x, *chances))

    def _by_chance(self, token_ids: Tensor, batch: DraftBatch, rate: float) -> Tensor:
        """In rows with a draft token, that token with a chance of `rate`, else another: the next one of the vocabulary."""
        u = uniforms(batch.column("seed") ^ np.uint64(self.SYNTHETIC), batch.column("num_output_tokens"))
        forced = np.where(u < rate, batch.draft_ids, (batch.draft_ids + 1) % batch.vocab_size)
        forced[batch.draft_ids == NO_DRAFT] = NO_DRAFT
        there = torch.from_numpy(forced).to(token_ids.device, non_blocking=True)
        return torch.where(there == NO_DRAFT, token_ids, there)
