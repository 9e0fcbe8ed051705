"""Mamba-2 (SSD), as a block of a layer."""

# Generated from nbs/models/mixers/mamba2.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.attention.state import Sequences, StateView
from minivllm.models.mixers.base import Builder, LinearSpec, register_mixer
from minivllm.models.mixers.state import StateMixer, StateMixerSpec
from minivllm.models.ops.states import Fixed


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(StateMixerSpec):
    """Parameters of `Mamba2`.

    Attributes:
        num_heads, head_dim: heads of the recurrence, and numbers of each.
        num_groups: groups of heads that share B and C.
        state_size: numbers of B and C.
        kernel: inputs that the convolution sees.
        bias, conv_bias: whether both matmuls, and the convolution, have one.
        eps: that of the norm of the gated output, which norms each group by itself.
        dt_limit: bounds of the step sizes.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    bias: bool = False
    conv_bias: bool = True
    eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        self.check_counts("num_heads", "head_dim", "num_groups", "state_size", "kernel")
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_groups} groups equally")

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """What goes through the convolution."""
        return self.inner + 2 * self.num_groups * self.state_size

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        into = {f"{self.prefix}in_proj": self.inner + self.channels + self.num_heads}
        out = {f"{self.prefix}out_proj": hidden_size}
        return {"in_proj": LinearSpec(hidden_size, into, self.bias), "out_proj": LinearSpec(self.inner, out, self.bias)}

    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (self.channels, 1, self.kernel)}
        shapes |= {name: (self.num_heads,) for name in ("A_log", "D", "dt_bias")}
        if self.conv_bias:
            shapes["conv1d.bias"] = (self.channels,)
        return shapes | {"norm.weight": (self.inner,)}

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """See `StateMixerSpec`: the convolution's last inputs, and a matrix for each head."""
        return (self.kernel - 1, self.channels), (self.num_heads, self.head_dim, self.state_size)


@register_mixer(Mamba2Spec)
class Mamba2(StateMixer):
    """Convolve; let the state decay, add to it and read it; gate and norm.

    Attributes:
        limits: [2], of the step sizes.
    """

    capturable = True
    spec: Mamba2Spec

    def __init__(self, spec: Mamba2Spec, builder: Builder) -> None:
        super().__init__(spec, builder)
        self.limits = torch.tensor(spec.dt_limit, device=builder.device)

    def mix(self, u: Tensor, views: list[StateView], where: Sequences) -> Tensor:
        s, w, ops = self.spec, self.wide, self.ops.states
        z, xBC, dt = u.split((s.inner, s.channels, s.num_heads), 1)
        xBC = ops.conv(xBC, w["conv1d.weight"], w.get("conv1d.bias"), views[0], where)
        y = ops.ssd(xBC, dt, Fixed(w["dt_bias"], w["A"], w["D"], self.limits), s.num_groups, views[1], where)
        weight = w["norm.weight"].view(s.num_groups, -1)
        return ops.gated_norm(y.view(len(u), *weight.shape), z, weight, s.eps, gate_first=True)
