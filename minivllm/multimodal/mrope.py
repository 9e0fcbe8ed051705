"""Three positions a token: time, row and column (M-RoPE)."""

# Generated from nbs/multimodal/mrope.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from minivllm.core.encoder_cache import MultiModalFeatureSpec

Int64 = npt.NDArray[np.int64]


def mrope_positions(features: Sequence[MultiModalFeatureSpec], num_tokens: int) -> tuple[Int64, int]:
    """The positions of a prompt, [3, num_tokens], and what is added to a later token's index to get its position (0 or less).

    Args:
        features: those with a `grid` are pictures; the tokens of others get positions as text does.
    """
    positions, done, at = np.empty((3, num_tokens), np.int64), 0, 0  # next: tokens without one, the next position
    for feature in features:
        if feature.grid is None:
            continue
        begin, end, (rows, columns) = feature.mm_position.offset, feature.mm_position.end, feature.grid
        positions[:, done:begin] = np.arange(at, at + begin - done)
        at += begin - done
        positions[0, begin:end] = at
        positions[1, begin:end] = at + np.arange(rows).repeat(columns)
        positions[2, begin:end] = at + np.tile(np.arange(columns), rows)
        done, at = end, at + max(rows, columns)
    positions[:, done:] = np.arange(at, at + num_tokens - done)
    return positions, at - done


class StepTokens(Protocol):
    """What is asked of a step (`StepInputs` of the runtime): requests laid end to end."""

    @property
    def request_ids(self) -> list[str]: ...

    @property
    def counts(self) -> Int64: ...

    @property
    def starts(self) -> Int64: ...

    @property
    def positions(self) -> Int64: ...


class MRope:
    """The positions of the requests that hold pictures.

    Attributes:
        prompts: by request, [3, prompt tokens].
        ahead: by request, what is added to the index of a token behind the prompt.
    """

    def __init__(self) -> None:
        self.prompts: dict[str, Int64] = {}
        self.ahead: dict[str, int] = {}

    def add(self, request_id: str, features: Sequence[MultiModalFeatureSpec], num_prompt_tokens: int) -> None:
        """Remember a request, if it holds pictures."""
        if any(feature.grid is not None for feature in features):
            self.prompts[request_id], self.ahead[request_id] = mrope_positions(features, num_prompt_tokens)

    def drop(self, request_id: str) -> None:
        """Forget a request, known or not."""
        self.prompts.pop(request_id, None)
        self.ahead.pop(request_id, None)

    def positions(self, step: StepTokens) -> Int64:
        """Of a step's tokens, [3, T]; [T] if each token has three equal ones."""
        ahead = np.array([self.ahead.get(name, 0) for name in step.request_ids], np.int64)
        flat = step.positions + np.repeat(ahead, step.counts)
        full = flat
        for i, name in enumerate(step.request_ids):
            begin, prompt = int(step.starts[i]), self.prompts.get(name)
            if prompt is None or (first := int(step.positions[begin])) >= prompt.shape[1]:
                continue
            full = np.tile(flat, (3, 1)) if full is flat else full
            inside = prompt[:, first : first + int(step.counts[i])]
            full[:, begin : begin + inside.shape[1]] = inside
        return full
