"""Gated short convolution (LFM2), as a block of a layer."""

# Generated from nbs/models/mixers/conv.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass

from torch import Tensor

from minivllm.attention.state import Sequences, StateView
from minivllm.models.mixers.base import LinearSpec, register_mixer
from minivllm.models.mixers.state import StateMixer, StateMixerSpec


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(StateMixerSpec):
    """Parameters of `ShortConv`. channels: numbers of a hidden state; kernel: inputs that the convolution sees; bias: whether matmuls and
    convolution have one."""

    channels: int
    kernel: int
    bias: bool = False

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        into, out = {f"{self.prefix}in_proj": 3 * hidden_size}, {f"{self.prefix}out_proj": hidden_size}
        return {
            "in_proj": LinearSpec(hidden_size, into, self.bias),
            "out_proj": LinearSpec(hidden_size, out, self.bias),
        }

    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        bias: dict[str, tuple[int, ...]] = {"conv.bias": (self.channels,)} if self.bias else {}
        return {"conv.weight": (self.channels, 1, self.kernel)} | bias

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.kernel - 1, self.channels),)


@register_mixer(ShortConvSpec)
class ShortConv(StateMixer):
    """`C * conv(B * x)`, with B, C and x from one matmul."""

    capturable = True

    def mix(self, u: Tensor, views: list[StateView], where: Sequences) -> Tensor:
        B, C, x = u.chunk(3, 1)
        weights = self.wide["conv.weight"], self.wide.get("conv.bias")
        return self.ops.states.conv(x, *weights, views[0], where, gates=(B, C))
