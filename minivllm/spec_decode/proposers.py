"""Proposers of draft tokens: the protocol, prompt n-grams, suffix matching over earlier answers."""

# Generated from nbs/spec_decode/proposers.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minivllm.spec_decode.rejection import Draft

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
        seed: seed of its random numbers.
        blocks: int32, the KV blocks of its tokens, for a proposer that `uses_blocks`; else none.
    """

    request_id: str
    token_ids: Tokens
    num_prompt_tokens: int
    most: int
    params: Any
    seed: int = 0
    blocks: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What the target computed of one request in a step, less what was rejected.

    Attributes:
        request: all its tokens, at least one of them after these places; `most` is 0.
        start: the first place.
        hidden: [n, hidden_size], after the last norm; then, in each row, the streams of the target's `taps`, if the proposer has
            set some. Valid during the call.
    """

    request: DraftRequest
    start: int
    hidden: Tensor

    @property
    def end(self) -> int:
        """The place after the last one."""
        return self.start + len(self.hidden)


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
    """Guesses the next tokens of requests. After an error it is not called again.

    It may have `finish(request_id, token_ids)`, which hears the answer of a request that has ended (nothing if it was preempted then);
    `forget(request_id)`, which hears of one that has ended or lost its blocks; `uses_blocks = True`, see `DraftRequest.blocks`; and
    `read(states)`, which gets the `HiddenStates` of every step before it is asked.
    """

    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> Sequence[Draft | Sequence[int]]:
        """A draft for each request, in order; an empty one for no guess. What is longer than `most` is cut."""
        ...


def find_matches(
    text: Tokens, tail: Tokens, longest: int, ends: npt.NDArray[np.intp] | None = None
) -> tuple[int, npt.NDArray[np.intp]]:
    """Where the longest possible end of `tail` stands in `text` with at least one token after it.

    Args:
        ends: the places of the last token of `tail`, if they are known.

    Returns:
        Its length, 0 to `longest`, and the places of its last token in `text`, in order.
    """
    size, ends = 0, np.flatnonzero(text[:-1] == tail[-1]) if ends is None else ends
    places = ends
    while len(places):
        size, ends = size + 1, places
        if size == min(longest, len(tail)):
            break
        places = ends[np.searchsorted(ends, size) :]
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
        """Up to `most` tokens that may follow `tokens`."""
        size, ends = find_matches(tokens, tokens, self.longest)
        if size < self.shortest:
            return []
        behind = int(ends[-1]) + 1
        period = len(tokens) - behind
        return [int(tokens[behind + i % period]) for i in range(most)]


def follow(text: Tokens, ends: npt.NDArray[np.intp], most: int, least_prob: float) -> tuple[list[int], float]:
    """Go on from all these places by majority.

    Returns:
        At most `most` tokens: the draft ends before the estimated chance that all of it is right falls below `least_prob`. And the
        number of its tokens that are right by that estimate.
    """
    draft: list[int] = []
    prob, expected = 1.0, 0.0
    ends = ends[ends + 1 < len(text)][-1000:]  # the newest, which are enough to tell a majority
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


class AnswerIndex:
    """The newest answers, one after the other, and where each token stands in them.

    Args:
        most: answers that are kept.

    Attributes:
        text: int32, the answers, with a -1 after each.
    """

    def __init__(self, most: int) -> None:
        self.most, self.text = most, np.zeros(0, np.int32)
        self._answers: deque[Tokens] = deque()
        self._start = 0  # of `text`, counted from the first answer of all
        self._places: dict[int, tuple[array[int], array[int]]] = {}  # of a token, counted so, and the tokens before it

    def add(self, token_ids: Sequence[int]) -> None:
        """Keep an answer, instead of the oldest one if there are enough."""
        if len(self._answers) == self.most:
            oldest = self._answers.popleft()
            self._start, self.text = self._start + len(oldest), self.text[len(oldest) :]
            for token in set(oldest[:-1].tolist()):
                places, before = self._places[token]
                gone = bisect_left(places, self._start)
                del places[:gone], before[:gone]
                if not places:
                    del self._places[token]
        last = -1
        for place, token in enumerate(token_ids, self._start + len(self.text)):
            places, before = self._places.setdefault(token, (array("q"), array("q")))
            places.append(place)
            before.append(last)
            last = token
        self._answers.append(np.array([*token_ids, -1], np.int32))
        self.text = np.concatenate(self._answers)

    def places(self, last: int, token: int) -> npt.NDArray[np.intp]:
        """The places of the token after `last` in `text`, in order; if there are none, all its places."""
        if token not in self._places:
            return np.zeros(0, np.intp)
        places, before = (np.frombuffer(each, np.int64) for each in self._places[token])
        found = places[before == last]
        return (found if len(found) else places) - self._start


class SuffixProposer:
    """Follows the majority after all places of the longest match, in the request's own tokens or in earlier answers.

    Of the two drafts, the one with the larger estimated number of right tokens is taken. Settings are those of `SpeculativeConfig`.
    The idea is suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), whose trees answer the same questions.
    """

    def __init__(self, depth: int, factor: float, least_prob: float, cached_requests: int) -> None:
        self.depth, self.factor, self.least_prob = depth, factor, least_prob
        self.earlier = AnswerIndex(cached_requests)

    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> list[list[int]]:
        return [self.guess(request) for request in requests]

    def guess(self, request: DraftRequest) -> list[int]:
        """A draft for one request."""
        tokens, earlier = request.token_ids, self.earlier
        found, tail = [], [-2, *tokens[-2:].tolist()]
        for text, ends in ((tokens, None), (earlier.text, earlier.places(*tail[-2:]))):
            size, ends = find_matches(text, tokens, self.depth - 1, ends)
            most = min(request.most, int(size * self.factor), self.depth - size)
            found.append(follow(text, ends, most, self.least_prob))
        return max(found, key=lambda draft: draft[1])[0]

    def finish(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Remember the answer of a request that has ended."""
        if token_ids and self.earlier.most:
            self.earlier.add(token_ids)


class RepeatProposer:
    """Guesses that the newest token comes again and again."""

    def propose(self, requests: Sequence[DraftRequest], view: DraftView) -> list[list[int]]:
        return [[int(request.token_ids[-1])] * request.most for request in requests]
