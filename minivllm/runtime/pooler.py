"""Pools hidden states of a prompt into an embedding."""

# Generated from nbs/runtime/pooler.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minivllm.sampling.pooling import PoolingParams


@dataclass(slots=True)
class _Entry:
    params: PoolingParams
    num_tokens: int
    done: int = 0
    total: Tensor | None = None
    rows: list[Any] = field(default_factory=list)


class Pooler:
    """Gathers the hidden states of requests that want a vector or class scores, chunk by chunk.

    Sums are kept in float64, so that how a prompt was cut into chunks leaves no trace in float32.

    Args:
        head: from hidden states [R, H] to class scores [R, labels]; None in a model that gives vectors.
        activation: applied to the scores, see `PoolingFacts`.

    Attributes:
        entries: {request id: what is known of it}.
    """

    def __init__(self, head: Callable[[Tensor], Tensor] | None = None, activation: str = "softmax") -> None:
        self.head, self.activation = head, activation
        self.entries: dict[str, _Entry] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.entries

    def add(self, request_id: str, params: PoolingParams, num_tokens: int, num_computed: int) -> None:
        """Expect a new request, or a preempted one: it starts again from the beginning or, if it was swapped out, goes on where it was."""
        entry = self.entries.get(request_id)
        if entry is None or entry.done != num_computed:
            self.entries[request_id] = _Entry(params, num_tokens, num_computed)

    def drop(self, request_id: str) -> None:
        """Forget a request; an unknown one is no error."""
        self.entries.pop(request_id, None)

    def take(self, request_id: str, hidden: Tensor) -> list[Any] | None:
        """Take the hidden states [n, H] of its next n tokens.

        Returns:
            When the prompt is complete: a vector or class scores; for a task on single tokens, a list of them.
        """
        entry = self.entries[request_id]
        first, kind = entry.done == 0, entry.params.pooling_type
        entry.done += len(hidden)
        if str(entry.params.task).startswith("token_"):
            entry.rows += self.finish(hidden.to(torch.float64), entry.params)
            return None if entry.done < entry.num_tokens else entry.rows
        if kind == "mean":
            part = hidden.to(torch.float64).sum(0)
            entry.total = part if entry.total is None else entry.total + part
        elif kind == "cls" and first:
            entry.total = hidden[0].to(torch.float64)
        if entry.done < entry.num_tokens:
            return None
        whole = hidden[-1].to(torch.float64) if entry.total is None else entry.total
        found: list[Any] = self.finish((whole / entry.num_tokens if kind == "mean" else whole)[None], entry.params)[0]
        return found

    def finish(self, rows: Tensor, params: PoolingParams) -> list[list[float]]:
        """Pooled hidden states, float64 [R, H], to vectors (cut and scaled) or class scores, in float32."""
        if not params.embeds and self.head is not None:
            rows = self.head(rows)
            if params.use_activation:
                rows = _ACTIVATIONS[self.activation](rows)
        else:
            rows = rows[:, : params.dimensions]
            if params.normalize:
                rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-12)
        numbers: list[list[float]] = rows.to(torch.float32).tolist()
        return numbers


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
