"""PoolingParams for embedding requests."""

# Generated from nbs/sampling/pooling.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from minivllm.sampling.params import (
    FLAG,
    NONE,
    Allowed,
    InvalidParameter,
    RequestOutputKind,
    integer,
    reject_unknown,
)

__all__ = ["POOLING_TYPES", "PoolingParams", "cosine"]

POOLING_TYPES = ("mean", "last")


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How the hidden states of a prompt become one vector; vLLM's names.

    pooling_type: the "mean" over all tokens, or the "last" token's. dimensions: keep only the first so many numbers (of use with
    models trained for that). normalize: scale to length 1, after cutting. truncate_prompt_tokens: keep only the last so many tokens
    of the prompt; -1 as many as fit.

    A value out of range raises InvalidParameter (a ValueError); an unknown name TypeError.
    """

    pooling_type: str = "mean"
    dimensions: int | None = None
    normalize: bool = True
    truncate_prompt_tokens: int | None = None

    output_kind: ClassVar[RequestOutputKind] = RequestOutputKind.FINAL_ONLY
    structured_outputs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None
    num_children: ClassVar[int] = 1

    def __new__(cls, **given: Any) -> Self:
        reject_unknown(cls.__name__, given, [f.name for f in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if not allowed.test(getattr(self, name)):
                raise InvalidParameter(name, getattr(self, name), allowed.text)

    def verify(self, hidden_size: int | None) -> None:
        """Check against the model, as far as its size is known. Raises InvalidParameter."""
        if hidden_size is not None and self.dimensions is not None and self.dimensions > hidden_size:
            raise InvalidParameter("dimensions", self.dimensions, f"at most the {hidden_size} that this model has")


_ALLOWED = {
    "pooling_type": Allowed(f"one of {', '.join(POOLING_TYPES)}", lambda value: value in POOLING_TYPES),
    "dimensions": NONE | integer(1),
    "normalize": FLAG,
    "truncate_prompt_tokens": NONE | integer(1) | Allowed("-1 (the longest prompt that fits)", integer(-1, -1).test),
}


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors: 1 for the same direction, 0 for a right angle."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return float(dot / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5)
