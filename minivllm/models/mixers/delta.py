"""Gated delta net (Qwen3-Next), as a block of a layer."""

# Generated from nbs/models/mixers/delta.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.state import StateView
from minivllm.models.mixers.base import LinearSpec, register_mixer
from minivllm.models.mixers.scan import by_head, conv_scan, conv_step, delta_chunk, delta_step, in_chunks
from minivllm.models.mixers.state import StateMixer, StateMixerSpec, States
from minivllm.models.ops.base import InPlace


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec(StateMixerSpec):
    """Parameters of `DeltaNet`.

    Attributes:
        num_k_heads, num_v_heads: heads of queries and keys, and of values; each of the first serves several of the second.
        k_dim, v_dim: numbers of each.
        kernel: inputs that the convolution sees.
        eps: of the norm of each head's output.
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
        """See `MixerSpec`."""
        values = self.num_v_heads * self.v_dim
        into = {f"{self.prefix}in_proj_qkvz": self.channels + values, f"{self.prefix}in_proj_ba": 2 * self.num_v_heads}
        out = LinearSpec(values, {f"{self.prefix}out_proj": hidden_size})
        return {"in_proj": LinearSpec(hidden_size, into), "out_proj": out}

    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `StateMixerSpec`."""
        heads, conv = (self.num_v_heads,), (self.channels, 1, self.kernel)
        return {"conv1d.weight": conv, "A_log": heads, "dt_bias": heads, "norm.weight": (self.v_dim,)}

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """See `StateMixerSpec`."""
        return (self.channels, self.kernel - 1), (self.num_v_heads, self.k_dim, self.v_dim)


def delta_scan(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_recurrence` in chunks."""
    return in_chunks(delta_chunk, parts[:-1], parts[-1])


@register_mixer(DeltaNetSpec)
class DeltaNet(StateMixer):
    """Convolve; correct what the state holds for a key; read it; norm and gate."""

    spec: DeltaNetSpec
    steps, scans = (conv_step, delta_step), (conv_scan, delta_scan)

    def kernels(self, views: list[StateView]) -> tuple[InPlace | None, ...]:
        """See `StateMixer`."""
        return self.ops.conv(views[0]), self.ops.delta(views[1])

    def mix(self, u: Tensor, states: States, *forms: Callable) -> tuple[Tensor, States]:
        conv, delta = forms
        s, w, many = self.spec, self.extra, self.spec.num_v_heads // self.spec.num_k_heads
        qkvz, ba = u.split((u.shape[1] - 2 * s.num_v_heads, 2 * s.num_v_heads), 1)
        qkvz, ba = qkvz.unflatten(1, (s.num_k_heads, -1)), ba.unflatten(1, (s.num_k_heads, -1))
        *qkv, z = (x.flatten(1) for x in qkvz.split((s.k_dim, s.k_dim, many * s.v_dim, many * s.v_dim), 2))
        b, a = (x.flatten(1).float() for x in ba.chunk(2, 2))
        mixed, last_inputs = conv(torch.cat(qkv, 1), states[0], w["conv1d.weight"][:, 0], None)
        q, k, v = F.silu(mixed).split([x.shape[1] for x in qkv], 1)
        q, k = (by_head(x.unflatten(1, (-1, s.k_dim)), s.num_v_heads) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        log_decay = -w["A_log"].float().exp() * F.softplus(a + w["dt_bias"].float())
        y, state = delta(q * s.k_dim**-0.5, k, v.unflatten(1, (-1, s.v_dim)), log_decay, b.sigmoid(), states[1])
        y = F.rms_norm(y, y.shape[-1:], None, s.eps) * w["norm.weight"].float()
        return (y.flatten(1) * F.silu(z.float())).to(u.dtype), (last_inputs, state)
