"""Detects an output that repeats one pattern."""

# Generated from nbs/sampling/repetition.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence

from minivllm.sampling.params import RepetitionDetectionParams

__all__ = ["REPETITION_STOP_REASON", "repeated_pattern_size"]


# %% nbs/sampling/repetition.ipynb #repeated_pattern_size
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
