"""Quantized weights as values, and the method that multiplies by them."""

# Generated from nbs/models/linear/grouped.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.linear.base import LinearMethod

Matmul = Callable[[Tensor, Tensor], Tensor]
"""x [T, inputs] and a weight [outputs, inputs] to [T, outputs]."""


class QuantizedWeight(ABC):
    """A weight [outputs, inputs] in fewer bits, as a value that takes the place of a tensor."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """[outputs, inputs]."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """float32 [outputs, inputs]."""

    @abstractmethod
    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Some outputs (dim 0) or some inputs (dim 1).

        Raises:
            ValueError: the format cannot be cut there.
        """

    @abstractmethod
    def __getitem__(self, rows: Any) -> Self:
        """Outputs by a slice or by their numbers, as of a tensor."""

    @abstractmethod
    def joined(self, below: Self) -> Self | None:
        """This weight with the outputs of another one below its own, or None if the two cannot be one value."""

    def apply(self, x: Tensor, matmul: Matmul = F.linear) -> Tensor:
        """x [T, inputs] to [T, outputs], by writing the weight out: the reference of every kernel."""
        return matmul(x, self.dequantize().to(x.dtype))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it keeps in memory."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[type-var]


class RepackedWeight(QuantizedWeight):
    """A weight in the order of a kernel: `words` and `scales`. Slices and values are taken from `unpacked()`."""

    words: Tensor
    scales: Tensor
    _shape: torch.Size

    @abstractmethod
    def unpacked(self) -> QuantizedWeight:
        """The weight as it came."""

    @property
    def shape(self) -> torch.Size:
        return self._shape

    def dequantize(self) -> Tensor:
        return self.unpacked().dequantize()

    def narrow(self, dim: int, start: int, length: int) -> Any:
        return self.unpacked().narrow(dim, start, length)

    def __getitem__(self, rows: Any) -> Any:
        return self.unpacked()[rows]

    def joined(self, below: Any) -> None:
        """None: a packed weight cannot be joined."""

    def tensors(self) -> dict[str, Tensor]:
        return {"words": self.words, "scales": self.scales}


BLOCK = 32
"""Columns that share a scale after a cut between inputs in another order: the fewest that all kernels take."""


@dataclass(frozen=True, eq=False)
class GroupedWeight(QuantizedWeight):
    """A weight in groups of neighbouring columns that share a scale.

    Attributes:
        q: uint8 [outputs, columns / 2], two numbers of 4 bits per byte, the first one in the low bits; or int8
            [outputs, columns].
        scale: float32, float16 or bfloat16 [outputs, groups]; `columns / groups` columns share one.
        low: the same shape; added after the multiplication. With it 4 bits are 0 to 15, without -8 to 7.
        codes: float32 [16], the numbers that 4 bits stand for; None if they stand for themselves. Goes without `low`.
        order: int64 [columns], the input that each column belongs to; None for input i at column i. `inputs` marks a
            column that belongs to none, whose input is zero (see `narrow`).
        inputs: how many the weight has; None for as many as columns.
    """

    q: Tensor
    scale: Tensor
    low: Tensor | None = None
    codes: Tensor | None = None
    order: Tensor | None = None
    inputs: int | None = None

    def __post_init__(self) -> None:
        if self.q.dtype not in (torch.uint8, torch.int8) or self.q.dim() != 2 or self.scale.dim() != 2:
            raise ValueError(f"q must be uint8 or int8 with 2 dimensions, got {self.q.dtype} {tuple(self.q.shape)}")
        outputs, groups = self.scale.shape
        if outputs != self.q.shape[0] or groups < 1 or self.columns % groups:
            raise ValueError(
                f"scales {tuple(self.scale.shape)} do not divide {self.q.shape[0]} x {self.columns} numbers"
            )
        if self.low is not None and self.low.shape != self.scale.shape:
            raise ValueError(
                f"low must have the shape of scale, {tuple(self.scale.shape)}, got {tuple(self.low.shape)}"
            )
        if self.codes is not None and (self.bits != 4 or self.low is not None or self.codes.shape != (16,)):
            raise ValueError("codes are 16 numbers for 4 bits without a low")
        if self.order is not None and self.order.shape != (self.columns,):
            raise ValueError(f"order must have {self.columns} numbers, got {tuple(self.order.shape)}")

    @property
    def bits(self) -> int:
        return 4 if self.q.dtype == torch.uint8 else 8

    @property
    def columns(self) -> int:
        return self.q.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.columns // self.scale.shape[1]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.q.shape[0], self.columns if self.inputs is None else self.inputs))

    def numbers(self) -> Tensor:
        """float32 [outputs, columns]: what q stands for, before scale and low."""
        if self.bits == 8:
            return self.q.float()
        q = unpack_nibbles(self.q)
        if self.codes is not None:
            return self.codes[q.int()]
        return q.float() if self.low is not None else q.float() - 8

    def dequantize(self) -> Tensor:
        each = self.numbers().unflatten(1, (-1, self.group)) * self.scale.float().unsqueeze(-1)
        if self.low is not None:
            each += self.low.float().unsqueeze(-1)
        weight = each.flatten(1)
        if self.order is None:
            return weight
        whole = weight.new_zeros(self.shape[0], self.shape[1] + 1)  # columns of no input go to the last one
        whole[:, self.order] = weight
        return whole[:, :-1]

    def arrange(self, x: Tensor) -> Tensor:
        """Activations [T, inputs] in the order of the columns, [T, columns]."""
        if self.order is None:
            return x
        x = x if self.columns == self.shape[1] else F.pad(x, (0, 1))
        return x.index_select(1, self.order)

    def __getitem__(self, rows: Any) -> Self:
        low = None if self.low is None else self.low[rows]
        return replace(self, q=self.q[rows], scale=self.scale[rows], low=low)

    def narrow(self, dim: int, start: int, length: int) -> Self:
        if dim == 0:
            return self[start : start + length]
        if self.order is not None:
            return self._narrow_ordered(start, length)
        group = math.gcd(self.group, start, length)
        if self.bits == 4 and group % 2:
            raise ValueError(
                f"weights of 4 bits in groups of {self.group} cannot be cut at input {start}, or {length} later"
            )
        finer, first, numbers = self.group // group, start // group, length // group
        cut = {n: t.repeat_interleave(finer, 1)[:, first : first + numbers] for n, t in self._per_group().items()}
        return replace(self, q=self.q[:, start * self.bits // 8 : (start + length) * self.bits // 8], **cut)  # type: ignore[arg-type]

    def _per_group(self) -> dict[str, Tensor]:
        return {"scale": self.scale} | ({} if self.low is None else {"low": self.low})

    def _narrow_ordered(self, start: int, length: int) -> Self:
        assert self.order is not None
        kept = ((self.order >= start) & (self.order < start + length)).nonzero().flatten()
        group = kept // self.group
        counts = group.bincount(minlength=self.scale.shape[1])
        blocks = -(-counts // BLOCK)
        empty = (BLOCK * blocks - counts).cumsum(0) - (BLOCK * blocks - counts)  # columns of none, before a group
        place = torch.arange(len(kept), device=kept.device) + empty[group]
        columns = kept.new_zeros(BLOCK * int(blocks.sum())).index_copy_(0, place, kept)
        order = torch.full_like(columns, length).index_copy_(0, place, self.order[kept] - start)
        q = self.q[:, columns] if self.bits == 8 else pack_nibbles(unpack_nibbles(self.q)[:, columns])
        cut = {name: each.repeat_interleave(blocks, 1) for name, each in self._per_group().items()}
        return replace(self, q=q, order=order, inputs=length, **cut)

    def joined(self, below: Self) -> Self | None:
        same = (self.shape[1], self.columns, self.bits, self.group, self.low is None)
        if same != (below.shape[1], below.columns, below.bits, below.group, below.low is None):
            return None
        for mine, other in ((self.codes, below.codes), (self.order, below.order)):
            if (mine is None) != (other is None) or (
                mine is not None and other is not None and not torch.equal(mine, other)
            ):
                return None
        both = {name: torch.cat((getattr(self, name), getattr(below, name))) for name in ("q", *self._per_group())}
        return replace(self, **both)  # type: ignore[arg-type]


def pack_nibbles(q: Tensor) -> Tensor:
    """uint8 [..., columns], each below 16, to uint8 [..., columns / 2]."""
    return q[..., ::2] | q[..., 1::2] << 4


def unpack_nibbles(q: Tensor) -> Tensor:
    """uint8 [..., columns / 2] to uint8 [..., columns]."""
    return torch.stack((q & 15, q >> 4), -1).flatten(-2)


class StoredLinear(LinearMethod):
    """Multiplies by a weight that its checkpoint brought quantized, and that stays as it came.

    Args:
        parts: outputs of each part of the layer.
        matmul: torch's, for weights that are written out.

    Attributes:
        loaded: the weight of each part, [outputs, inputs]: quantized, or a tensor.
        values: the same with neighbours joined; from `process_weights_after_loading` on.
    """

    capturable = True

    def __init__(self, parts: Mapping[str, int], dtype: torch.dtype, matmul: Matmul = F.linear) -> None:
        super().__init__()
        self.parts, self.dtype, self._matmul = dict(parts), dtype, matmul
        self.loaded: dict[str, QuantizedWeight | Tensor] = {}
        self.values: list[QuantizedWeight | Tensor] = []

    def create_weights(
        self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """See `LinearMethod`. Weights come as values, by `loaded`."""
        self.weights = {"bias": torch.empty(outputs, dtype=dtype, device=device)} if bias else {}

    def process_weights_after_loading(self) -> None:
        if not self.loaded:
            return  # nothing was loaded anew
        self.values = join([self.loaded[part] for part in self.parts])
        self.loaded = {}

    def apply(self, x: Tensor) -> Tensor:
        out = [self.multiply(x, i) for i in range(len(self.values))]
        whole = out[0] if len(out) == 1 else torch.cat(out, 1)
        return whole if self.bias is None else whole + self.bias

    def multiply(self, x: Tensor, index: int) -> Tensor:
        """x [T, inputs] by `values[index]`."""
        value = self.values[index]
        return self._matmul(x, value) if isinstance(value, Tensor) else value.apply(x, self._matmul)

    @property
    def weight(self) -> Tensor:
        values = self.values or [self.loaded[part] for part in self.parts]
        whole = [value if isinstance(value, Tensor) else value.dequantize() for value in values]
        return torch.cat([part.to(self.dtype) for part in whole])

    @property
    def memory(self) -> Tensor | None:
        value = self.values[0] if len(self.values) == 1 else None
        if isinstance(value, RepackedWeight):
            return value.words
        return value.q if isinstance(value, GroupedWeight) else None


def join(values: Sequence[QuantizedWeight | Tensor]) -> list[QuantizedWeight | Tensor]:
    """Weights of the same inputs, with neighbours of one kind made one."""
    out: list[QuantizedWeight | Tensor] = []
    for value in values:
        last = out[-1] if out else None
        both: QuantizedWeight | Tensor | None = None
        if isinstance(last, Tensor) and isinstance(value, Tensor):
            both = torch.cat((last, value))
        elif isinstance(last, QuantizedWeight) and type(last) is type(value):
            both = last.joined(value)
        out[-1:] = [both] if both is not None else [*out[-1:], value]
    return out
