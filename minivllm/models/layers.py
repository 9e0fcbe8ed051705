"""Norms of hidden states, and of query and key heads."""

# Generated from nbs/models/layers.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.module import Module
from minivllm.models.ops.base import LayerOps


class RMSNorm(Module):
    """`x / rms(x) * weight` (Zhang and Sennrich, 2019), by the ops of the model.

    Args:
        size: size of the last dimension.
        eps: added to the mean square.
        ops: that compute it.
        dtype, device: those of the activations.
        offset: checkpoints hold `weight - 1` (Gemma). The weight is then float32, and so is the multiplication by it.
    """

    capturable = True

    def __init__(
        self, size: int, eps: float, ops: LayerOps, *, dtype: torch.dtype, device: torch.device, offset: bool = False
    ) -> None:
        self.eps, self.ops, self.offset = eps, ops, offset
        self.weight = torch.empty(size, dtype=torch.float32 if offset else dtype, device=device)

    def load(self, tensor: Tensor) -> None:
        """Take the weight from a checkpoint."""
        self.weight.copy_(tensor.float() + 1 if self.offset else tensor)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x [T, size] to the residual stream [T, size], in place, and norm the sum: (normed, stream).

        x: a layer's output; or the embeddings, with no residual yet.
        """
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """(kind of a tensor in a checkpoint, function that loads it)."""
        yield "weight", self.load


class QKNorm(Module):
    """RMS norm of every query and key head by itself, both in one go.

    Args:
        num_heads, num_kv_heads: query heads, then key heads, along dimension 1.
        head_dim, eps, dtype, device, offset: as for `RMSNorm`.

    Attributes:
        q_weight, k_weight: [num_heads, head_dim] and [num_kv_heads, head_dim]: one weight for all heads of a kind, repeated.
    """

    capturable = True

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        offset: bool = False,
    ) -> None:
        self.eps, self.offset = eps, offset
        shape, dtype = (num_heads + num_kv_heads, head_dim), torch.float32 if offset else dtype
        self.weight = torch.empty(shape, dtype=dtype, device=device)
        self.q_weight, self.k_weight = self.weight[:num_heads], self.weight[num_heads:]

    def load(self, weight: Tensor, tensor: Tensor) -> None:
        """Take `q_weight` or `k_weight` from a checkpoint."""
        weight.copy_(tensor.float() + 1 if self.offset else tensor)

    def __call__(self, qk: Tensor) -> Tensor:
        """[T, num_heads + num_kv_heads, head_dim] to the same shape and dtype."""
        shape = self.weight.shape[1:]
        if qk.dtype == self.weight.dtype:
            return F.rms_norm(qk, shape, None, self.eps).mul_(self.weight)
        return F.rms_norm(qk.float(), shape, None, self.eps).mul_(self.weight).to(qk.dtype)


class ProjectionQKNorm(QKNorm):
    """RMS norm of all query heads as one vector, and of all key heads as another (OLMo 2).

    Attributes:
        q_weight, k_weight: [num_heads * head_dim] and [num_kv_heads * head_dim].
    """

    capturable = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.q_weight, self.k_weight = self.q_weight.flatten(), self.k_weight.flatten()

    def __call__(self, qk: Tensor) -> Tensor:
        """[T, num_heads + num_kv_heads, head_dim] to the same shape and dtype."""
        weights = (self.q_weight, self.k_weight)
        parts = qk.flatten(1).split([len(weight) for weight in weights], 1)
        normed = [F.rms_norm(x.float(), w.shape, None, self.eps) * w for x, w in zip(parts, weights, strict=True)]
        return torch.cat(normed, 1).view(qk.shape).to(qk.dtype)


class LayerNorm(Module):
    """`(x - mean(x)) / std(x) * weight + bias` (Ba et al., 2016). Args as for `RMSNorm`; bias: whether there is one."""

    capturable = True

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, bias: bool) -> None:
        self.eps, self.weight = eps, torch.empty(size, dtype=dtype, device=device)
        self.bias = torch.empty_like(self.weight) if bias else None

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        """See `RMSNorm.targets`."""
        yield "weight", self.weight.copy_
        if self.bias is not None:
            yield "bias", self.bias.copy_

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.add`."""
        residual = x if residual is None else residual.add_(x)
        return self(residual), residual


class NoNorm(Module):
    """Stands where a layer has no norm."""

    capturable = True

    def __call__(self, x: Tensor) -> Tensor:
        """The same tensor."""
        return x

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.add`. Both results are the stream; what reads the first must not write to it."""
        residual = x if residual is None else residual.add_(x)
        return residual, residual


class Scale(Module):
    """Multiplies by a constant."""

    capturable = True

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] to the same shape."""
        return x * self.factor
