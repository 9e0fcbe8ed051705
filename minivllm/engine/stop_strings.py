"""Stop strings found in streamed text, and detection of repeated patterns."""

# Generated from nbs/engine/stop_strings.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.sampling.params import RepetitionDetectionParams


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found in the text at ``text[start:end]``."""

    stop: str
    start: int
    end: int


class StopStrings:
    """Finds stop strings in a text that grows piece by piece.

    Reading character by character, the first stop string that is complete wins, and of several that end at the same character the longest. So the
    result does not depend on how the text is cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)

    def find(self, text: str, new_from: int) -> StopMatch | None:
        """The match that ends first within ``text[new_from:]``; the text before ``new_from`` was searched already."""
        best: StopMatch | None = None
        for stop in self.stops:
            start = text.find(stop, max(new_from - len(stop) + 1, 0))
            if start < 0:
                continue
            match = StopMatch(stop, start, start + len(stop))
            if best is None or (match.end, match.start) < (best.end, best.start):
                best = match
        return best

    def held_back(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a stop string that is not complete yet."""
        longest = min(len(text), max(map(len, self.stops)) - 1)
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self.stops):
                return length
        return 0


REPETITION_STOP_REASON = "repetition_detected"


def repeated_pattern_size(token_ids: Sequence[int], params: RepetitionDetectionParams) -> int | None:
    """The smallest pattern size p such that the tokens end in min_count copies of one pattern of p tokens, or None."""
    total = len(token_ids)
    for p in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        compared = p * (params.min_count - 1)
        if p + compared > total:
            return None
        if all(token_ids[i] == token_ids[i - p] for i in range(total - 1, total - 1 - compared, -1)):
            return p
    return None
