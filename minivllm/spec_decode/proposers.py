"""Proposers of draft tokens: the protocol, prompt n-grams, suffix matching over earlier answers."""

# Generated from nbs/spec_decode/proposers.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from minivllm.spec_decode.rejection import Draft

__all__ = [
    "DraftRequest", "DraftView", "NgramProposer", "Proposer", "RepeatProposer", "SuffixProposer", "Tokens",
    "find_matches", "follow",
]  # fmt: skip

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request as a proposer sees it.

    Attributes:
        request_id: its name; a new request may have it when this one has ended.
        token_ids: int32 [n], prompt and output; a read-only view that is valid during the call.
        num_prompt_tokens: how many of them are the prompt.
        most: draft tokens that the next step can use, at least 1.
        params: its sampling parameters.
        seed: of its random numbers.
    """

    request_id: str
    token_ids: Tokens
    num_prompt_tokens: int
    most: int
    params: Any
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DraftView:
    """The step as a proposer sees it.

    Attributes:
        step: counts the calls from 0.
        batch_size: requests that sampled in the step before, and so will in the next, if nothing comes between.
        acceptance: by request, the share of its draft tokens that was accepted of late.
    """

    step: int
    batch_size: int
    acceptance: dict[str, float]


class Proposer(Protocol):
    """Guesses the next tokens of requests. It may have `finish(request_id)`, which is called when a request has ended."""

    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> Sequence[Draft | Sequence[int]]:
        """A draft for each request, in order; an empty one for no guess. What is longer than `most` is cut."""
        ...


def find_matches(text: Tokens, tail: Tokens, longest: int) -> tuple[int, npt.NDArray[np.intp]]:
    """Where the longest possible end of `tail` stands in `text`, with something behind it.

    Returns:
        Its length, 0 to `longest`, and the places of its last token in `text`, in order.
    """
    size, ends = 0, np.flatnonzero(text[:-1] == tail[-1])
    places = ends
    while len(places):
        size, ends = size + 1, places
        if size == min(longest, len(tail)):
            break
        places = ends[ends >= size]
        places = places[text[places - size] == tail[-1 - size]]
    return size, ends


class NgramProposer:
    """What followed the longest n-gram, of `shortest` to `longest` tokens, at its last place in the request's own tokens.

    The idea is prompt lookup decoding (Saxena 2023); names of its settings are vLLM's.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest

    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> list[list[int]]:
        return [self.guess(request.token_ids, request.most) for request in requests]

    def guess(self, tokens: Tokens, most: int) -> list[int]:
        """Up to `most` tokens behind `tokens`."""
        size, ends = find_matches(tokens, tokens, self.longest)
        if size < self.shortest:
            return []
        behind = int(ends[-1]) + 1
        period = len(tokens) - behind
        return [int(tokens[behind + i % period]) for i in range(most)]


def follow(text: Tokens, ends: npt.NDArray[np.intp], most: int, least_prob: float) -> tuple[list[int], float]:
    """Go on from all these places by majority.

    Returns:
        At most `most` tokens, as long as they are right by an estimated chance of `least_prob`; and how many of them
        will be right by that estimate.
    """
    draft: list[int] = []
    prob, expected = 1.0, 0.0
    ends = ends[ends + 1 < len(text)]
    while len(draft) < most and len(ends):
        following = text[ends + 1]
        values, counts = np.unique(following, return_counts=True)
        best = int(counts.argmax())
        prob *= float(counts[best]) / len(ends)
        if prob < least_prob or values[best] < 0:
            break
        draft.append(int(values[best]))
        expected += prob
        ends = ends[following == values[best]] + 1
        ends = ends[ends + 1 < len(text)]
    return draft, expected


class SuffixProposer:
    """Follows the majority behind all places of the longest match, in the request's own tokens or in earlier answers.

    Of the two drafts that with more tokens that will be right by its estimate is taken. Settings are those of `SpeculativeConfig`.
    The idea is suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), whose trees answer the same questions.
    """

    def __init__(self, depth: int, factor: float, least_prob: float, cached_requests: int) -> None:
        self.depth, self.factor, self.least_prob = depth, factor, least_prob
        self._earlier: deque[Tokens] = deque(maxlen=cached_requests)
        self._all: Tokens = np.zeros(0, np.int32)  # the earlier answers, a -1 behind each
        self._answers: dict[str, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> list[list[int]]:
        return [self.guess(request) for request in requests]

    def guess(self, request: DraftRequest) -> list[int]:
        """A draft for one request."""
        tokens = request.token_ids
        if self._earlier.maxlen:
            answer = self._answers.setdefault(request.request_id, [])
            answer += tokens[request.num_prompt_tokens + len(answer) :].tolist()
        found = [self._follow(tokens, tokens, request.most), self._follow(self._all, tokens, request.most)]
        return max(found, key=lambda draft: draft[1])[0]

    def _follow(self, text: Tokens, tail: Tokens, most: int) -> tuple[list[int], float]:
        size, ends = find_matches(text, tail, self.depth - 1)
        return follow(text, ends, min(most, int(size * self.factor), self.depth - size), self.least_prob)

    def finish(self, request_id: str) -> None:
        """Remember the answer of a request that has ended, instead of the oldest one if there are enough."""
        if answer := self._answers.pop(request_id, None):
            self._earlier.append(np.array([*answer, -1], np.int32))
            self._all = np.concatenate(self._earlier)


class RepeatProposer:
    """Guesses that the newest token comes again and again."""

    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> list[list[int]]:
        return [[int(request.token_ids[-1])] * request.most for request in requests]
