"""PoolingParams for embedding requests."""

# Generated from nbs/sampling/pooling.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minivllm.sampling.params import (
    ALLOWED,
    FLAG,
    NONE,
    Allowed,
    CheckedParams,
    InvalidParameter,
    RequestOutputKind,
    integer,
    one_of,
)

__all__ = ["POOLING_TYPES", "PoolingParams", "cosine"]

POOLING_TYPES = ("mean", "last")


@dataclass(frozen=True, kw_only=True)
class PoolingParams(CheckedParams):
    """How the hidden states of a prompt become one vector; vLLM's names.

    pooling_type: the "mean" over all tokens, or the "last" token's. dimensions: keep only the first so many numbers (of use with
    models trained for that). normalize: scale to length 1, after cutting. truncate_prompt_tokens: keep only the last so many tokens
    of the prompt; -1 as many as fit.
    """

    pooling_type: str = "mean"
    dimensions: int | None = None
    normalize: bool = True
    truncate_prompt_tokens: int | None = None

    allowed: ClassVar[dict[str, Allowed]] = {
        "pooling_type": one_of(POOLING_TYPES),
        "dimensions": NONE | integer(1),
        "normalize": FLAG,
        "truncate_prompt_tokens": ALLOWED["truncate_prompt_tokens"],
    }
    output_kind: ClassVar[RequestOutputKind] = RequestOutputKind.FINAL_ONLY
    structured_outputs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None
    num_children: ClassVar[int] = 1

    def verify(self, hidden_size: int | None) -> None:
        """Check against the model, as far as its size is known. Raises InvalidParameter."""
        if hidden_size is not None and self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidParameter("dimensions", self.dimensions, f"at most the {hidden_size} that this model has")


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors: 1 for the same direction, 0 for a right angle."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return float(dot / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5)
