"""PoolingParams for embedding requests."""

# Generated from nbs/sampling/pooling.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from minivllm.core.config import PoolingFacts
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

POOLING_TYPES = ("mean", "cls", "last")
TASKS = ("embed", "token_embed", "classify", "token_classify", "score")


@dataclass(frozen=True, kw_only=True)
class PoolingParams(CheckedParams):
    """Which result a request wants, and how it is made of the prompt's hidden states; vLLM's names. None: as the model was trained.

    Attributes:
        task: a name in `TASKS`; None for the model's usual one.
        pooling_type: the "mean" over all tokens, or the hidden state of the first ("cls") or the "last".
        dimensions: keep only this many numbers of a vector, the first ones (of use with models trained for that).
        normalize: scale a vector to length 1, after cutting.
        use_activation: class scores are probabilities, not logits.
        truncate_prompt_tokens: keep this many tokens of the prompt, -1 as many as fit: the last ones, or the first ones of a
            model that predicts no tokens.
    """

    task: str | None = None
    pooling_type: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None

    allowed: ClassVar[dict[str, Allowed]] = {
        "task": NONE | one_of(TASKS),
        "pooling_type": NONE | one_of(POOLING_TYPES),
        "dimensions": NONE | integer(1),
        "normalize": NONE | FLAG,
        "use_activation": NONE | FLAG,
        "truncate_prompt_tokens": ALLOWED["truncate_prompt_tokens"],
    }
    output_kind: ClassVar[RequestOutputKind] = RequestOutputKind.FINAL_ONLY
    structured_outputs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None
    num_children: ClassVar[int] = 1

    @property
    def reads_prefix(self) -> bool:
        """Whether a cached prefix may be used: the result does not need its hidden states."""
        return self.pooling_type == "last" and not str(self.task).startswith("token_")

    @property
    def embeds(self) -> bool:
        """Whether a vector is wanted, not class scores."""
        return self.task in ("embed", "token_embed")

    def resolved(self, facts: PoolingFacts, hidden_size: int | None) -> "PoolingParams":
        """A copy with the model's own values in the place of None, checked against the model.

        Args:
            facts: the model's.
            hidden_size: None if it is not known.

        Raises:
            InvalidParameter: the model cannot do this.
        """
        task = self.task or facts.tasks[0]
        if task not in facts.tasks:
            raise InvalidParameter("task", task, f"one that this model can do: {', '.join(facts.tasks)}")
        if task == "score":
            task = "classify" if facts.labels else "embed"
        pooling = self.pooling_type or facts.pooling_type
        if facts.labels and pooling != facts.pooling_type:
            raise InvalidParameter(
                "pooling_type", pooling, f"{facts.pooling_type!r}, which this classifier was trained with"
            )
        normalize = facts.normalize if self.normalize is None else self.normalize
        activate = self.use_activation is not False
        resolved = replace(self, task=task, pooling_type=pooling, normalize=normalize, use_activation=activate)
        unused = ("use_activation",) if resolved.embeds else ("dimensions", "normalize")
        for name in unused:
            if getattr(self, name) is not None:
                raise InvalidParameter(name, getattr(self, name), f"left out for the task {task!r}")
        if (size := self.dimensions) is not None:
            if hidden_size is not None and size > hidden_size:
                raise InvalidParameter("dimensions", size, f"at most the {hidden_size} that this model has")
            if facts.matryoshka_dimensions and size not in facts.matryoshka_dimensions:
                allowed = (
                    f"one of those that this model was trained for: {', '.join(map(str, facts.matryoshka_dimensions))}"
                )
                raise InvalidParameter("dimensions", size, allowed)
        return resolved


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors: 1 for the same direction, 0 for a right angle."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return float(dot / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5)
