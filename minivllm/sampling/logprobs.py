"""Log probabilities and ranks of sampled, top and prompt tokens."""

# Generated from nbs/sampling/logprobs.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(slots=True)
class Logprob:
    """The report on one token: its log probability (or logit, by logprobs_mode), its rank from 1, its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class HostCopy:
    """A tensor that is being copied to the host. From a GPU the copy is queued after the kernels; only `wait` blocks.

    A few numbers go through pinned memory that is reused: allocating it takes the host as long as the copy.
    """

    SMALL = 4096
    _free: ClassVar[dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, torch.cuda.Event]]]] = {}

    def __init__(self, x: Tensor) -> None:
        self._here, self._arrived = x, None
        if x.is_cuda:
            kept = self._free.get((x.shape, x.dtype))
            self._here, self._arrived = (
                kept.pop() if kept else (torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.cuda.Event())
            )
            self._here.copy_(x, non_blocking=True)
            self._arrived.record()

    def wait(self) -> Tensor:
        """The tensor, on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
            if self._here.numel() <= self.SMALL:
                pinned, self._here = self._here, self._here.clone()
                self._free.setdefault((pinned.shape, pinned.dtype), []).append((pinned, self._arrived))
            self._arrived = None
        return self._here


def gather_logprobs(values: Tensor, token_ids: Tensor, num_logprobs: Sequence[int]) -> list[dict[int, Logprob]]:
    """Reports for chosen tokens.

    values [R, V] float32: logprobs or logits. token_ids [R] int64: the chosen ones. num_logprobs: for each row, how many
    of the likeliest to report too; -1 means all.
    """
    return PendingLogprobs(values, token_ids, num_logprobs).wait()


class PendingLogprobs:
    """Like `gather_logprobs`, but `wait` gives the result; until then a GPU finds and copies the numbers."""

    def __init__(self, values: Tensor, token_ids: Tensor, num_logprobs: Sequence[int]) -> None:
        vocab_size = values.shape[1]
        self._counts = [vocab_size if n == -1 else min(n, vocab_size) for n in num_logprobs]
        chosen = values.gather(1, token_ids[:, None])
        ranks = (values > chosen).sum(-1) + 1
        top = values.topk(max(self._counts, default=0))
        self._columns = [HostCopy(x) for x in (token_ids, chosen[:, 0], ranks, top.indices, top.values)]

    def wait(self) -> list[dict[int, Logprob]]:
        """The reports."""
        columns = [column.wait().tolist() for column in self._columns]
        return [_report(*row) for row in zip(*columns, self._counts, strict=True)]


def _report(token: int, value: float, rank: int, ids: list[int], values: list[float], count: int) -> dict[int, Logprob]:
    report = {token: Logprob(value, rank)}
    for place in range(count):
        if ids[place] != token:
            report[ids[place]] = Logprob(values[place], place + 1)
    return report


_SLICE = 1 << 22  # floats


def compute_logprobs(logits: Tensor, token_ids: Tensor | Sequence[int], num_logprobs: int) -> list[dict[int, Logprob]]:
    """Log probabilities of given tokens under given logits.

    logits [T, V] float32, left unchanged. token_ids [T]: row t reports on token t, so for a prompt, row t holds the logits that
    follow position t, and token_ids[t] is the token at t + 1. num_logprobs: likeliest tokens to add, -1 all.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    if len(ids) != len(logits):
        raise ValueError(f"logits have {len(logits)} rows, token_ids {len(ids)}: must be equal")
    step = max(1, _SLICE // logits.shape[1])
    out: list[dict[int, Logprob]] = []
    for start in range(0, len(ids), step):
        part = slice(start, start + step)
        values = torch.log_softmax(logits[part], -1)
        out += gather_logprobs(values, ids[part], [num_logprobs] * len(values))
    return out
