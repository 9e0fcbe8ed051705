"""Stop strings found in streamed text, and detection of repeated patterns."""

# Generated from nbs/engine/stop_strings.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.sampling.params import RepetitionDetectionParams

__all__ = ["StopMatch", "StopStrings", "ends_in_loop"]


# %% nbs/engine/stop_strings.ipynb #StopMatch
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


# %% nbs/engine/stop_strings.ipynb #ends_in_loop
def ends_in_loop(token_ids: Sequence[int], rule: RepetitionDetectionParams) -> bool:
    """Whether the tokens end in ``min_count`` copies of a pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens."""
    for size in range(max(1, rule.min_pattern_size), rule.max_pattern_size + 1):
        span = size * rule.min_count
        if span > len(token_ids):
            return False
        if list(token_ids[-span:]) == list(token_ids[-size:]) * rule.min_count:
            return True
    return False
