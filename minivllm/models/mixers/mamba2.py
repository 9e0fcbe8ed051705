"""Mamba-2 (SSD), as a block of a layer."""

# Generated from nbs/models/mixers/mamba2.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.state import StateView
from minivllm.models.mixers.base import Builder, LinearSpec, register_mixer
from minivllm.models.mixers.scan import conv_scan, conv_step, in_chunks, ssd_chunk, ssd_step
from minivllm.models.mixers.state import StateMixer, StateMixerSpec, States
from minivllm.models.ops.base import InPlace


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(StateMixerSpec):
    """Parameters of `Mamba2`.

    Attributes:
        num_heads, head_dim: heads of the recurrence, and numbers of each.
        num_groups: of heads that share B and C.
        state_size: numbers of B and C.
        kernel: inputs that the convolution sees.
        bias, conv_bias: of both matmuls, and of the convolution.
        norm: whether the gated output is normed, each group by itself; eps: of that norm.
        norm_before_gate: it is normed first, and then gated.
        dt_limit: bounds of the step sizes.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int
    bias: bool = False
    conv_bias: bool = True
    norm: bool = True
    norm_before_gate: bool = False
    eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "num_groups", "state_size", "kernel"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
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
        """See `MixerSpec`."""
        into = {f"{self.prefix}in_proj": self.inner + self.channels + self.num_heads}
        out = {f"{self.prefix}out_proj": hidden_size}
        return {"in_proj": LinearSpec(hidden_size, into, self.bias), "out_proj": LinearSpec(self.inner, out, self.bias)}

    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `StateMixerSpec`."""
        shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (self.channels, 1, self.kernel)}
        shapes |= {name: (self.num_heads,) for name in ("A_log", "D", "dt_bias")}
        if self.conv_bias:
            shapes["conv1d.bias"] = (self.channels,)
        return shapes | {"norm.weight": (self.inner,)} if self.norm else shapes

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """See `StateMixerSpec`: the convolution's last inputs, and a matrix for each head."""
        return (self.channels, self.kernel - 1), (self.num_heads, self.head_dim, self.state_size)


def ssd_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`ssd_recurrence` in chunks."""
    return in_chunks(lambda x, dt, B, C, state: ssd_chunk(x, dt, A, B, C, D, state), (x, dt, B, C), state)


@register_mixer(Mamba2Spec)
class Mamba2(StateMixer):
    """Convolve; let the state decay, add to it and read it; gate and norm.

    Attributes:
        A: [num_heads], how fast each state decays; below 0.
        wide: the small weights in float32.
    """

    spec: Mamba2Spec
    steps, scans = (conv_step, ssd_step), (conv_scan, ssd_scan)

    def __init__(self, spec: Mamba2Spec, builder: Builder) -> None:
        super().__init__(spec, builder)
        self.A, self.wide = torch.empty(0), dict[str, Tensor]()

    def process_weights_after_loading(self) -> None:
        """See `Mixer`."""
        self.A, self.wide = -self.extra["A_log"].float().exp(), {k: w.float() for k, w in self.extra.items()}

    def mix(self, u: Tensor, states: States, *forms: Callable) -> tuple[Tensor, States]:
        """From the first matmul to the last, with one form of the convolution and of the recurrence."""
        (conv, ssd), s, w = forms, self.spec, self.wide
        z, xBC, dt = u.split((s.inner, s.channels, s.num_heads), 1)
        xBC, last_inputs = conv(xBC, states[0], w["conv1d.weight"][:, 0], w.get("conv1d.bias"))
        x, B, C = F.silu(xBC).split((s.inner, s.num_groups * s.state_size, s.num_groups * s.state_size), 1)
        x, B, C = x.unflatten(1, (s.num_heads, -1)), *(v.unflatten(1, (s.num_groups, -1)) for v in (B, C))
        dt = F.softplus(dt.float() + w["dt_bias"])
        dt = dt if s.dt_limit == (0.0, math.inf) else dt.clamp(*s.dt_limit)
        y, state = ssd(x, dt, self.A, B, C, w["D"], states[1])
        return self._gate(y.flatten(1), z.float()).to(u.dtype), (last_inputs, state)

    def _gate(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate, and norm each group."""
        s = self.spec
        if not s.norm_before_gate:
            y = y * F.silu(z)
        if s.norm:
            groups = y.unflatten(1, (s.num_groups, -1))
            y = F.rms_norm(groups, groups.shape[-1:], None, s.eps).flatten(1) * self.wide["norm.weight"]
        return y * F.silu(z) if s.norm_before_gate else y

    def kernels(self, views: list[StateView]) -> tuple[InPlace | None, ...]:
        """See `StateMixer`."""
        return self.ops.conv(views[0]), self.ops.ssd(views[1])
