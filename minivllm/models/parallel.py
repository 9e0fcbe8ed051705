"""The part of a layer that a rank holds, and the sums and concatenations that join the parts."""

# Generated from nbs/models/parallel.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm.core.config import rank_heads


class Piece(NamedTuple):
    """A rank's part of rows that lie together in a checkpoint's tensor, counted in any unit, such as heads.

    Attributes:
        total: how many there are.
        start, length: the rank's.
        room: how many it has room for; those beyond `length` are zeros.
    """

    total: int
    start: int
    length: int
    room: int


class Share(NamedTuple):
    """Which part of a model a rank holds.

    Attributes:
        rank, size: the rank's number among those that share each layer.
        by_expert: a rank holds whole experts of a mixture, instead of a part of each.
        all_to_all: then each rank routes some of the tokens, and sends them to the ranks of their experts; see `MoE`.
    """

    rank: int = 0
    size: int = 1
    by_expert: bool = False
    all_to_all: bool = False

    def rows(self, count: int) -> tuple[int, int]:
        """(start, length) of this rank's rows of a vocabulary; the last ranks may have fewer."""
        return self.piece(count)[1:3]

    def piece(self, count: int) -> Piece:
        """This rank's part of `count`; what the last ranks lack is padded."""
        each = -(-count // self.size)
        start = min(self.rank * each, count)
        return Piece(count, start, min(each, count - start), each)

    def heads(self, queries: int, keys: int) -> tuple[Piece, Piece, int]:
        """The query heads and the key-value heads of this rank, and how many ranks hold the same of these; see `rank_heads`."""
        mine, group = rank_heads(queries, keys, self.size), queries // keys
        owner, copy = divmod(self.rank, mine.copies)
        first, end = (min((owner + i) * mine.keys, keys) for i in (0, 1))
        start = min(first * group + copy * mine.queries, end * group)
        q = Piece(queries, start, min(mine.queries, end * group - start), mine.queries)
        return q, Piece(keys, first, end - first, mine.keys), mine.copies


class Split(NamedTuple):
    """How a linear layer is cut.

    Attributes:
        by: `outputs` or `inputs`.
        pieces: those of a part that is not cut as one, or not equally.
    """

    by: str
    pieces: Mapping[str, tuple[Piece, ...]] = {}


@dataclass(frozen=True)
class SplitBlock:
    """The part of a block that a rank computes.

    Attributes:
        spec: a spec of the same kind with smaller numbers.
        splits: how its linear layers are cut; for each block within it, a `SplitBlock`.
        sizes: what is padded if it does not divide: (how many there are, how many all ranks have).
    """

    spec: Any
    splits: Mapping[str, Any]
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def padded(self) -> dict[str, tuple[int, int]]:
        """The sizes that differ, those of blocks within it included."""
        inner = [block.padded() for block in self.splits.values() if isinstance(block, SplitBlock)]
        mine = {what: both for what, both in self.sizes.items() if both[0] != both[1]}
        return {what: both for found in (mine, *inner) for what, both in found.items()}


class Stage:
    """A pipeline stage, seen from one rank: which layers it has, and the ranks of the stages before and after it.

    Args:
        layers: numbers of the layers.
        is_first, is_last: whether there is no stage before it, or after it.
        before, behind: ranks in torch.distributed.
    """

    def __init__(self, layers: range, is_first: bool, is_last: bool, before: int = -1, behind: int = -1) -> None:
        self.layers, self.is_first, self.is_last = layers, is_first, is_last
        self.before, self.behind = before, behind
        self._sent: tuple[Any, Tensor] | None = None

    def send(self, x: Tensor, residual: Tensor | None) -> None:
        """Hand both tensors [T, hidden_size] to the next stage, zeros for no residual. They are on their way when this returns."""
        if self._sent is not None:
            self._sent[0].wait()
        both = torch.stack((x, torch.zeros_like(x) if residual is None else residual))
        self._sent = dist.isend(both, self.behind), both  # which must live until it has arrived

    def receive(self, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """What the stage before has sent. like: `[*, hidden_size]`, with the dtype and device of the results."""
        both = like.new_empty(2, tokens, like.shape[-1])
        dist.recv(both, self.before)
        return both[0], both[1]


class Adder(Protocol):
    """Adds up tensors of the ranks without torch.distributed."""

    def takes(self, x: Tensor) -> bool:
        """Whether it can add up tensors like this one. All ranks must say the same."""
        ...

    def __call__(self, x: Tensor) -> None:
        """x becomes the sum of the ranks' tensors: the same bits on every rank."""
        ...


class TensorGroup:
    """The ranks that hold every layer together, seen from one of them.

    Args:
        share: which part this rank has.
        group: the processes, as torch.distributed knows them; None for all.
        adder: adds up what it takes; None for nothing.

    Attributes:
        calls, bytes: the number of joins so far, and the bytes that this rank put in.
    """

    def __init__(self, share: Share, group: Any = None, adder: Adder | None = None) -> None:
        self.share, self._group, self._adder = share, group, adder
        self.calls = self.bytes = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have, in place. The same bits on every rank."""
        self._count(x)
        if self._adder is not None and self._adder.takes(x):
            self._adder(x)
        else:
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[T, n] to [T, size * n], the parts side by side in the order of ranks."""
        self._count(x)
        parts = [torch.empty_like(x) for _ in range(self.share.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, -1)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has set it."""
        return [bool(flag) for flag in self._most(flags)]

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return self._most([number])[0]

    def _most(self, numbers: Sequence[int]) -> list[int]:
        on_gpu = dist.get_backend(self._group) == "nccl"
        found = torch.tensor(numbers, dtype=torch.int64, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found.tolist()

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

    def all_to_all(self, x: Tensor, there: Sequence[int], here: Sequence[int]) -> Tensor:
        """x [sum(there), n] has rows for each rank in turn, as many as `there` says; gives [sum(here), n], those that each rank had for
        this one."""
        self._count(x)
        out = x.new_empty(sum(here), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), list(here), list(there), group=self._group)
        return out


class Spans:
    """When methods of some objects ran.

    Attributes:
        found: (name, start by `time.perf_counter`, seconds, bytes that went in) of each call.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, float, float, int]] = []
        self._watched: list[tuple[Any, str]] = []

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Note the calls of a method of one object from now on."""
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            size = args[0].nbytes if args and isinstance(args[0], Tensor) else 0
            self.found.append((name, start, time.perf_counter() - start, size))
            return result

        setattr(owner, method, timed)
        self._watched.append((owner, method))

    def stop(self) -> list[tuple[str, float, float, int]]:
        """Note nothing more. Returns what was found."""
        for owner, name in self._watched:
            delattr(owner, name)
        self._watched.clear()
        return self.found
