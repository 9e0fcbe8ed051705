"""RMS norm, QK norm and gated MLP."""

# Generated from nbs/models/layers.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models import cpu_pointwise
from minivllm.models.linear import Linear

__all__ = ["ACTIVATIONS", "GatedMLP", "QKNorm", "RMSNorm", "row_by_row"]


class RMSNorm:
    """`x / rms(x) * weight`, in float32 inside (Zhang and Sennrich, 2019).

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        dtype, device: of the weight. With `dtype=torch.float32` and a narrower input the product with the weight is
            also in float32, before rounding (Gemma).

    Attributes:
        fused: `add` is one kernel of `cpu_pointwise`, where that has one; set by the model.
    """

    __slots__ = ("eps", "fused", "shape", "weight")

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.eps, self.fused = (size,), eps, False
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add `x` to the residual stream and norm the sum.

        Args:
            x: [T, size], a layer's output; or the embeddings, with no residual yet.
            residual: [T, size], changed in place, or None.

        Returns:
            The normed stream and the stream.
        """
        if self.fused and x.dtype == self.weight.dtype:
            return cpu_pointwise.add_norm(x, residual, self.weight, self.eps)
        residual = x if residual is None else residual.add_(x)
        return self(residual), residual


class QKNorm:
    """RMS norm of every query and key head by itself, both in one go.

    Args:
        num_heads, num_kv_heads: query heads, then key heads, along dimension 1.
        head_dim, eps, dtype, device: as for `RMSNorm`.

    Attributes:
        q_weight, k_weight: [num_heads, head_dim] and [num_kv_heads, head_dim]: one weight for all heads of a kind, repeated.
    """

    __slots__ = ("eps", "k_weight", "q_weight", "shape", "weight")

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.eps = (head_dim,), eps
        self.weight = torch.empty(num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
        self.q_weight, self.k_weight = self.weight[:num_heads], self.weight[num_heads:]

    def __call__(self, qk: Tensor) -> Tensor:
        """[T, num_heads + num_kv_heads, head_dim] to the same shape and dtype."""
        if qk.dtype == self.weight.dtype:
            return F.rms_norm(qk, self.shape, None, self.eps).mul_(self.weight)
        return F.rms_norm(qk.float(), self.shape, None, self.eps).mul_(self.weight).to(qk.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def row_by_row(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same on [T, n], each row by itself, so that a row's bits do not depend on T.

    Applied to all rows at once, a vectorised function splits them among threads, and rounds the last few numbers of each
    part with other instructions than the rest.
    """
    return lambda x: torch.stack([function(row) for row in x])


class GatedMLP:
    """`down(activation(gate(x)) * up(x))`, gate and up as one product (Shazeer, 2020).

    Args:
        hidden_size, intermediate_size: outside and inside.
        activation: a name in `ACTIVATIONS`.
        bias: of all three products.
        dtype, device: of the weights.

    Attributes:
        fused: activation and product are one kernel of `cpu_pointwise`, where that has one; set by the model.
    """

    __slots__ = ("activation", "down", "fused", "gate_up")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        parts = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up = Linear(hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, {"down": hidden_size}, bias=bias, dtype=dtype, device=device)
        self.activation, self.fused = ACTIVATIONS[activation], False

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] to the same shape."""
        both = self.gate_up(x)
        if self.fused and self.activation is F.silu:
            return self.down(cpu_pointwise.gated_silu(both))
        gate, up = both.chunk(2, -1)
        return self.down(self.activation(gate).mul_(up))
