"""Gated delta net (Qwen3-Next), as a block of a layer."""

# Generated from nbs/models/mixers/delta.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass

from torch import Tensor

from minivllm.attention.state import Sequences, StateView
from minivllm.models.mixers.base import LinearSpec, register_mixer
from minivllm.models.mixers.state import StateMixer, StateMixerSpec
from minivllm.models.ops.states import Fixed


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec(StateMixerSpec):
    """Parameters of `DeltaNet`.

    Attributes:
        num_k_heads, num_v_heads: heads of queries and keys, and of values; each of the first serves several of the second.
        k_dim, v_dim: numbers of each.
        kernel: inputs that the convolution sees.
        eps: that of the norm of each head's output.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    kernel: int
    eps: float

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(f"{self.num_v_heads} value heads cannot share {self.num_k_heads} key heads equally")

    @property
    def channels(self) -> int:
        """What goes through the convolution."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        values = self.num_v_heads * self.v_dim
        into = {f"{self.prefix}in_proj_qkvz": self.channels + values, f"{self.prefix}in_proj_ba": 2 * self.num_v_heads}
        out = LinearSpec(values, {f"{self.prefix}out_proj": hidden_size})
        return {"in_proj": LinearSpec(hidden_size, into), "out_proj": out}

    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        heads, conv = (self.num_v_heads,), (self.channels, 1, self.kernel)
        return {"conv1d.weight": conv, "A_log": heads, "dt_bias": heads, "norm.weight": (self.v_dim,)}

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.kernel - 1, self.channels), (self.num_v_heads, self.k_dim, self.v_dim)


@register_mixer(DeltaNetSpec)
class DeltaNet(StateMixer):
    """Convolve; correct what the state holds for a key; read it; norm and gate."""

    capturable = True
    spec: DeltaNetSpec

    def mix(self, u: Tensor, views: list[StateView], where: Sequences) -> Tensor:
        s, w, ops, heads = self.spec, self.wide, self.ops.states, self.spec.num_v_heads
        qkv, z, b, a = u.split((s.channels, heads * s.v_dim, heads, heads), 1)
        qkv = ops.conv(qkv, w["conv1d.weight"], None, views[0], where)
        y = ops.delta(qkv, b, a, Fixed(w["dt_bias"], w["A"]), s.num_k_heads, views[1], where)
        return ops.gated_norm(y, z, w["norm.weight"][None], s.eps, gate_first=False)
