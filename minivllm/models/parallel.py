"""What a rank holds of a layer, and the sums and concatenations that join the parts."""

# Generated from nbs/models/parallel.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Share", "Split", "SplitBlock", "TensorGroup"]


class Share(NamedTuple):
    """Which part of a model a rank holds.

    Attributes:
        rank, size: the rank's number among those that share each layer.
        by_expert: a rank holds whole experts of a mixture, instead of a part of each.
    """

    rank: int = 0
    size: int = 1
    by_expert: bool = False

    def divide(self, what: str, count: int) -> int:
        """How many of `count` a rank holds.

        Raises:
            ValueError: they cannot be divided equally; says what.
        """
        if count % self.size:
            raise ValueError(f"{count} {what} cannot be split among {self.size} ranks equally")
        return count // self.size

    def rows(self, count: int) -> tuple[int, int]:
        """(start, length) of this rank's rows of a vocabulary; the last ranks may have fewer."""
        each = -(-count // self.size)
        start = min(self.rank * each, count)
        return start, min(each, count - start)


class Split(NamedTuple):
    """How a linear layer is cut.

    Attributes:
        by: `outputs` or `inputs`.
        pieces: of a part whose rows are not cut as one: (rows, ranks that hold the same rows) of each piece.
    """

    by: str
    pieces: Mapping[str, tuple[tuple[int, int], ...]] = {}


@dataclass(frozen=True)
class SplitBlock:
    """What a rank computes of a block. spec: smaller. splits: of its linear layers; of blocks within it, their own `SplitBlock`."""

    spec: Any
    splits: Mapping[str, Any]


class TensorGroup:
    """The ranks that hold every layer together, seen from one of them.

    Args:
        share: which part this rank has.
        group: the processes, as torch.distributed knows them; None for all.

    Attributes:
        calls, bytes: of all joins so far; bytes of what this rank put in.
    """

    def __init__(self, share: Share, group: Any = None) -> None:
        self.share, self._group = share, group
        self.calls = self.bytes = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have, in place. The same bits on every rank."""
        self._count(x)
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[T, n] to [T, size * n], the parts side by side in the order of ranks."""
        self._count(x)
        parts = [torch.empty_like(x) for _ in range(self.share.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, -1)

    def embed(self, rows: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
        """Embeddings [T, hidden_size] of tokens [T], of which each rank holds some rows: it brings zeros for the others."""
        start, length = self.share.rows(vocab_size)
        local = token_ids - start
        theirs = (local < 0) | (local >= length)
        x = rows[local.masked_fill(theirs, 0)].masked_fill_(theirs[:, None], 0)
        return self.all_reduce(x)

    def _count(self, x: Tensor) -> None:
        self.calls += 1
        self.bytes += x.nbytes
