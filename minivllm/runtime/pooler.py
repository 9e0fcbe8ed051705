"""Pools hidden states of a prompt into an embedding."""

# Generated from nbs/runtime/pooler.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.sampling.pooling import PoolingParams

__all__ = ["Pooler", "finish_vector"]


@dataclass(slots=True)
class _Entry:
    params: PoolingParams
    num_tokens: int
    done: int = 0
    total: Tensor | None = None


class Pooler:
    """Gathers the hidden states of requests that want a vector, chunk by chunk.

    Sums are kept in float64, so that how a prompt was cut into chunks leaves no trace in float32.

    Attributes:
        entries: {request id: what is known of it}.
    """

    def __init__(self) -> None:
        self.entries: dict[str, _Entry] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.entries

    def add(self, request_id: str, params: PoolingParams, num_tokens: int, num_computed: int) -> None:
        """Expect a request, or expect it back: from the beginning, or from where a swapped one had come to."""
        entry = self.entries.get(request_id)
        if entry is None or entry.done != num_computed:
            self.entries[request_id] = _Entry(params, num_tokens, num_computed)

    def drop(self, request_id: str) -> None:
        """Forget a request; an unknown one is no error."""
        self.entries.pop(request_id, None)

    def take(self, request_id: str, hidden: Tensor) -> list[float] | None:
        """Take the hidden states [n, H] of its next n tokens. Returns the vector when the prompt is complete."""
        entry = self.entries[request_id]
        entry.done += len(hidden)
        if entry.params.pooling_type == "mean":
            part = hidden.to(torch.float64).sum(0)
            entry.total = part if entry.total is None else entry.total + part
        if entry.done < entry.num_tokens:
            return None
        whole = hidden[-1].to(torch.float64) if entry.total is None else entry.total / entry.num_tokens
        return finish_vector(whole, entry.params)


def finish_vector(vector: Tensor, params: PoolingParams) -> list[float]:
    """Cut and scale a float64 [H], and round it to float32."""
    vector = vector[: params.dimensions]
    if params.normalize:
        vector = vector / torch.linalg.vector_norm(vector).clamp_min(1e-12)
    numbers: list[float] = vector.to(torch.float32).tolist()
    return numbers
