"""Gated MLP, as a block of a layer."""

# Generated from nbs/models/mixers/mlp.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from minivllm.models.linear.layer import Linear
from minivllm.models.mixers.base import Builder, LinearSpec, Mixer, MixerSpec, register_mixer
from minivllm.models.ops.torch import ACTIVATIONS
from minivllm.models.parallel import Piece, Share, Split, SplitBlock


def check_mlp(spec: "GatedMLPSpec | MLPSpec") -> None:
    """Raise ValueError for parameters that no MLP can have."""
    spec.check_counts("intermediate_size")
    if spec.activation not in ACTIVATIONS:
        raise ValueError(f"activation {spec.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")


@dataclass(frozen=True, kw_only=True)
class GatedMLPSpec(MixerSpec):
    """Parameters of `GatedMLP`.

    Attributes:
        intermediate_size: numbers inside.
        activation: a name in `ACTIVATIONS`.
        bias: whether all three linear layers have one.
        gate, up, down: names of the weights in a checkpoint, after the layer's prefix.
        gate_up: name of the weight that holds gate and up below each other, if the checkpoint has it so.
    """

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate_up: str | None = None

    def __post_init__(self) -> None:
        check_mlp(self)

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        inner = self.intermediate_size
        parts = {self.gate: inner, self.up: inner} if self.gate_up is None else {self.gate_up: 2 * inner}
        return {
            "gate_up": LinearSpec(hidden_size, parts, self.bias),
            "down": LinearSpec(inner, {self.down: hidden_size}, self.bias),
        }

    def split(self, share: Share) -> SplitBlock:
        """See `MixerSpec`. A rank has some of the numbers inside."""
        mine = share.piece(self.intermediate_size)
        pieces = {} if self.gate_up is None else {self.gate_up: (mine, mine)}
        splits = {"gate_up": Split("outputs", pieces), "down": Split("inputs")}
        return SplitBlock(replace(self, intermediate_size=mine.room), splits, _sizes(mine, share))


def _sizes(mine: Piece, share: Share) -> dict[str, tuple[int, int]]:
    return {"numbers inside the MLP": (mine.total, mine.room * share.size)}


class _Activated(Mixer):
    """What MLPs have in common."""

    down: Linear

    def __init__(self, spec: "GatedMLPSpec | MLPSpec", builder: Builder) -> None:
        super().__init__(spec, builder)
        self.activation = spec.activation


@register_mixer(GatedMLPSpec)
class GatedMLP(_Activated):
    """`down(activation(gate(x)) * up(x))`, gate and up as one matmul (Shazeer, 2020)."""

    capturable = True
    gate_up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] to the same shape."""
        return self.down(self.ops.gated_linear(x, self.gate_up, self.activation))

    def compute(self, x: Tensor, gate_up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> Tensor:
        """The same with other matmuls, for instance those of several experts at once."""
        return down(self.ops.gated_linear(x, gate_up, self.activation))


@dataclass(frozen=True, kw_only=True)
class MLPSpec(MixerSpec):
    """Parameters of `MLP`. Attributes as those of `GatedMLPSpec`."""

    intermediate_size: int
    activation: str
    bias: bool = False
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"

    def __post_init__(self) -> None:
        check_mlp(self)

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        return {
            "up": LinearSpec(hidden_size, {self.up: self.intermediate_size}, self.bias),
            "down": LinearSpec(self.intermediate_size, {self.down: hidden_size}, self.bias),
        }

    def split(self, share: Share) -> SplitBlock:
        """See `MixerSpec`. A rank has some of the numbers inside."""
        mine = share.piece(self.intermediate_size)
        splits = {"up": Split("outputs"), "down": Split("inputs")}
        return SplitBlock(replace(self, intermediate_size=mine.room), splits, _sizes(mine, share))


@register_mixer(MLPSpec)
class MLP(_Activated):
    """`down(activation(up(x)))`."""

    capturable = True
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] to the same shape."""
        return self.down(self.ops.activate(self.up(x), self.activation))


@dataclass(frozen=True, kw_only=True)
class ClampedMLPSpec(GatedMLPSpec):
    """Parameters of `ClampedMLP`. limit: bounds the gate from above, and the signal on both sides."""

    activation: str = "quick_gelu"
    limit: float = 7.0


@register_mixer(ClampedMLPSpec)
class ClampedMLP(GatedMLP):
    """`down((up + 1) * activation(gate))`, both clamped."""

    capturable = True
    spec: ClampedMLPSpec

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] to the same shape."""
        return self.compute(x, self.gate_up, self.down)

    def compute(self, x: Tensor, gate_up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]) -> Tensor:
        gate, up = gate_up(x).chunk(2, -1)
        limit = self.spec.limit
        return down((up.clamp(-limit, limit) + 1) * self.ops.activate(gate.clamp(max=limit), self.activation))
