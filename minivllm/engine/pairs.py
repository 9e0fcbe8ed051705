"""Pairs of texts: their prompts, and their scores."""

# Generated from nbs/engine/pairs.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.core.config import PoolingFacts
from minivllm.sampling.params import check_text
from minivllm.sampling.pooling import cosine


@dataclass(frozen=True)
class Pairs:
    """Pairs of texts, as the engine computes them.

    Attributes:
        prompts: what to pool.
        places: for each pair, the indices of its two vectors among the results; None if each prompt is a pair.
    """

    prompts: list[dict[str, Any]]
    places: list[tuple[int, int]] | None

    def scores(self, pooled: Sequence[list[float]]) -> list[float]:
        """One number per pair. pooled: the result of each prompt."""
        if self.places is None:
            return [scores[0] for scores in pooled]
        return [cosine(pooled[i], pooled[j]) for i, j in self.places]


def make_pairs(
    tokenizer: Any, facts: PoolingFacts, first: Sequence[str], second: Sequence[str], keep: int | None
) -> Pairs:
    """Prompts for pairs of texts.

    Args:
        tokenizer: the model's; None for none.
        facts: the model's.
        first: one text for all of `second`, or as many.
        keep: most tokens of a pair that is read at once; None for no cut.

    Raises:
        ValueError: the model scores no pairs, or there are not as many texts on both sides.
    """
    if "score" not in facts.tasks:
        labels = f"its {len(facts.labels)} classes are no score" if facts.labels else "its head is for single tokens"
        raise ValueError(f"this model cannot score pairs: {labels}; it can {', '.join(facts.tasks)}")
    if not second or len(first) not in (1, len(second)):
        raise ValueError(
            f"{len(first)} first and {len(second)} second texts make no pairs: give one first text, or as many"
        )
    if not facts.labels:
        places = [(i if len(first) > 1 else 0, len(first) + i) for i in range(len(second))]
        return Pairs([{"prompt": text} for text in (*first, *second)], places)
    if tokenizer is None:
        raise ValueError("this engine has no tokenizer, and a pair of texts needs one")
    prompts = []
    for a, b in zip(list(first) * (len(second) if len(first) == 1 else 1), second, strict=True):
        check_text(a, "prompt")
        check_text(b, "prompt")
        found = tokenizer(a, text_pair=b, truncation=keep is not None, max_length=keep, return_token_type_ids=True)
        prompt = {"prompt": f"{a}\n{b}", "prompt_token_ids": found["input_ids"]}
        types = {"token_type_ids": found["token_type_ids"]} if facts.token_types > 1 else {}
        prompts.append(prompt | types)
    return Pairs(prompts, None)
