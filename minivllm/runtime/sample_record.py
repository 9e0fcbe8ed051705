"""Records the logits and sampler stages of one token."""

# Generated from nbs/runtime/sample_record.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.state import RequestView

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """What the sampler saw when it chose one token.

    Attributes:
        logits: float32 [V], before any stage.
        params: the request's.
        prompt_token_ids: its prompt.
        output_token_ids: what it had sampled before.
        seed: seed of its random numbers.
    """

    logits: npt.NDArray[np.float32]
    params: SamplingParams
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    seed: int

    def explain(
        self,
        sampler: Sampler | None = None,
        grammar: GrammarCompiler | None = None,
        tokenizer: Any = None,
        top: int = 5,
    ) -> pd.DataFrame:
        """The stages of the token: see `Sampler.explain` for the columns.

        Args:
            sampler: the engine's, if it has its own stages.
            grammar: for a request with structured outputs.
            tokenizer: to show tokens as texts.
        """
        matcher = None
        if self.params.structured_outputs is not None:
            assert grammar is not None, "a request with structured outputs ran, so there was a compiler"
            matcher = grammar.matcher(self.params.structured_outputs)
        return (sampler or Sampler()).explain(
            torch.from_numpy(self.logits),
            self.params,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            seed=self.seed,
            matcher=matcher,
            tokenizer=tokenizer,
            top=top,
        )


SampleLog = dict[tuple[str, int], SampleRecord]
"""Records by request id and position in the output, counted from 0."""


def log_samples(
    log: SampleLog, views: list[RequestView], logits: Tensor, drafts: Sequence[Sequence[int]] | None = None
) -> None:
    """Keep what the sampler is about to see.

    Args:
        logits: [R, V], a row for each view, and one more for each of its draft tokens.
        drafts: the draft tokens of each view.
    """
    rows = iter(logits.to("cpu", torch.float32, copy=True).numpy())
    for view, draft in zip(views, drafts or [()] * len(views), strict=True):
        for guessed in range(len(draft) + 1):
            output = (*view.output_token_ids, *draft[:guessed])
            log[view.request_id, len(output)] = SampleRecord(
                next(rows), view.params, tuple(view.prompt_token_ids), output, view.seed
            )


def forget_samples(log: SampleLog, view: RequestView, count: int) -> None:
    """Drop the records of the first `count` places after a request's output: they followed draft tokens that were rejected."""
    for place in range(count):
        log.pop((view.request_id, len(view.output_token_ids) + place), None)
