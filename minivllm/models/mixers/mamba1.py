"""Mamba (selective scan), as a block of a layer."""

# Generated from nbs/models/mixers/mamba1.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass

from torch import Tensor

from minivllm.attention.state import Sequences, StateView
from minivllm.models.linear.layer import Linear
from minivllm.models.mixers.base import LinearSpec, register_mixer
from minivllm.models.mixers.state import StateMixer, StateMixerSpec
from minivllm.models.ops.states import Fixed


@dataclass(frozen=True, kw_only=True)
class Mamba1Spec(StateMixerSpec):
    """Parameters of `Mamba1`.

    Attributes:
        channels: numbers that have a state; state_size: numbers of each state.
        rank: numbers from which the step sizes are made.
        kernel: inputs that the convolution sees.
        bias, conv_bias: whether the first and the last matmul, and the convolution, have one.
        norm_eps: that of the norms of the step size, B and C (Jamba); None for no norms.
    """

    channels: int
    state_size: int
    rank: int
    kernel: int
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        self.check_counts("channels", "state_size", "rank", "kernel")

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        """See `MixerSpec`. The step sizes' bias is not the matmul's: it is added in float32."""
        shapes = {
            "in_proj": (hidden_size, 2 * self.channels, self.bias),
            "x_proj": (self.channels, self.rank + 2 * self.state_size, False),
            "dt_proj": (self.rank, self.channels, False),
            "out_proj": (self.channels, hidden_size, self.bias),
        }
        return {name: LinearSpec(i, {f"{self.prefix}{name}": o}, bias) for name, (i, o, bias) in shapes.items()}

    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        channels: tuple[int, ...] = (self.channels,)
        shapes = {"conv1d.weight": (*channels, 1, self.kernel), "A_log": (*channels, self.state_size), "D": channels}
        shapes |= {"dt_proj.bias": channels} | ({"conv1d.bias": channels} if self.conv_bias else {})
        norms = {"dt_layernorm.weight": (self.rank,)}
        norms |= {f"{part}_layernorm.weight": (self.state_size,) for part in "bc"}
        return shapes if self.norm_eps is None else shapes | norms

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """See `StateMixerSpec`: the convolution's last inputs, and `state_size` numbers for each channel."""
        return (self.kernel - 1, self.channels), (self.state_size, self.channels)


@register_mixer(Mamba1Spec)
class Mamba1(StateMixer):
    """Convolve; let the state decay, add to it and read it; gate."""

    capturable = True
    spec: Mamba1Spec
    x_proj: Linear
    dt_proj: Linear

    def mix(self, u: Tensor, views: list[StateView], where: Sequences) -> Tensor:
        s, w, ops = self.spec, self.wide, self.ops.states
        x, z = u.chunk(2, 1)
        x = ops.conv(x, w["conv1d.weight"], w.get("conv1d.bias"), views[0], where)
        parts = self.x_proj(x).split((s.rank, s.state_size, s.state_size), 1)
        if s.norm_eps is not None:
            norms = (self.extra[f"{part}_layernorm.weight"] for part in ("dt", "b", "c"))
            parts = tuple(self.ops.rms_norm(part, w, s.norm_eps) for part, w in zip(parts, norms, strict=True))
        dt, B, C = parts
        dt = self.dt_proj(ops.contiguous(dt))
        return ops.selective(x, dt, B, C, z, Fixed(w["dt_proj.bias"], w["A"], w["D"]), views[1], where)
