"""Weights of 8 bits whose activations are rounded too: fp8 per tensor, channel or block, and int8."""

# Generated from nbs/models/linear/scaled.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.linear.grouped import Matmul, QuantizedWeight

FP8 = torch.float8_e4m3fn
LARGEST = {FP8: 448.0, torch.int8: 127.0}
"""The largest number of a format, to which the largest of a scale's numbers is brought."""


def round_to(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """x / scale, as the nearest number of `FP8` or int8; what is beyond the largest becomes the largest."""
    limit = LARGEST[dtype]
    x = (x.float() / scale).clamp(-limit, limit)
    return x.to(dtype) if dtype == FP8 else x.round().to(dtype)


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that brings the largest of the last dimension, which is kept with size 1, to the largest number of a format."""
    return x.abs().amax(-1, keepdim=True).float().clamp(min=1e-10) / LARGEST[dtype]


@dataclass(frozen=True, eq=False)
class ScaledWeight(QuantizedWeight):
    """A weight of fp8 or int8, and how the activations that it multiplies are rounded.

    Attributes:
        q: float8_e4m3fn or int8 [outputs, inputs].
        scale: float32 [outputs, blocks]: each output has a scale for every `block` inputs.
        block: inputs that share a scale; all of them if that is as many.
        activations: `none` (they stay), `token` (a scale for each), `group` (a scale for every `block` numbers of each), or
            `static` (`input_scale` for all).
        input_scale: float32 [1].
    """

    q: Tensor
    scale: Tensor
    block: int
    activations: str = "none"
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.q.dtype not in LARGEST or self.q.dim() != 2:
            raise ValueError(f"q must be float8_e4m3fn or int8 with 2 dimensions, got {self.q.dtype}")
        want = (self.q.shape[0], -(-self.q.shape[1] // self.block))
        if tuple(self.scale.shape) != want:
            raise ValueError(f"scale must have shape {want}, got {tuple(self.scale.shape)}")
        if self.activations not in ("none", "token", "group", "static"):
            raise ValueError(f"activations must be none, token, group or static, got {self.activations!r}")
        if (self.activations == "static") != (self.input_scale is not None):
            raise ValueError("input_scale goes with static activations")

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    def dequantize(self) -> Tensor:
        each = self.scale.repeat_interleave(self.block, 1)[:, : self.q.shape[1]]
        return self.q.float() * each

    def round_activations(self, x: Tensor) -> Tensor:
        """x [T, inputs] as the matmul sees it, in the same dtype."""
        if self.activations == "none":
            return x
        if self.activations == "group":
            whole = F.pad(x, (0, -x.shape[1] % self.block)).unflatten(1, (-1, self.block))
            scale = scale_of(whole, self.q.dtype)
            return (round_to(whole, self.q.dtype, scale).float() * scale).flatten(1)[:, : x.shape[1]].to(x.dtype)
        scale = scale_of(x, self.q.dtype) if self.input_scale is None else self.input_scale
        return (round_to(x, self.q.dtype, scale).float() * scale).to(x.dtype)

    def apply(self, x: Tensor, matmul: Matmul = F.linear) -> Tensor:
        return matmul(self.round_activations(x), self.dequantize().to(x.dtype))

    def __getitem__(self, rows: Any) -> Self:
        return replace(self, q=self.q[rows], scale=self.scale[rows])

    def narrow(self, dim: int, start: int, length: int) -> Self:
        if dim == 0:
            return self[start : start + length]
        q, block = self.q[:, start : start + length], self.block
        if self.scale.shape[1] == 1:
            return replace(self, q=q, block=length)
        if start % block or (length % block and start + length != self.q.shape[1]):
            raise ValueError(f"blocks of {block} inputs cannot be cut at input {start}, or {length} later")
        return replace(self, q=q, scale=self.scale[:, start // block : -(-(start + length) // block)])

    def joined(self, below: Self) -> Self | None:
        same = (self.q.dtype, self.q.shape[1], self.block, self.activations)
        if same != (below.q.dtype, below.q.shape[1], below.block, below.activations):
            return None
        if self.input_scale is not None and not torch.equal(self.input_scale, below.input_scale):  # type: ignore[arg-type]
            return None
        return replace(self, q=torch.cat((self.q, below.q)), scale=torch.cat((self.scale, below.scale)))


def quantize_channels(weight: Tensor, dtype: torch.dtype, activations: str = "token") -> ScaledWeight:
    """A weight [outputs, inputs] rounded, with a scale for each output."""
    scale = scale_of(weight, dtype)
    return ScaledWeight(round_to(weight, dtype, scale), scale, weight.shape[1], activations)
