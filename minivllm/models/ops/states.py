"""Recurrences on states in the blocks of a cache, in plain torch."""

# Generated from nbs/models/ops/states.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.state import Sequences, StateView
from minivllm.core.module import Module
from minivllm.models.mixers.scan import (
    by_head,
    conv_scan,
    conv_step,
    delta_scan,
    delta_step,
    selective_scan,
    selective_step,
    ssd_scan,
    ssd_step,
)


def _through(step, scan, args: tuple[Any, ...], states: StateView, where: Sequences) -> Tensor:
    """Read states, pass them after the arguments to one of two forms of a recurrence, write the new ones."""
    if where.fresh:  # the block holds anything
        before = torch.zeros((len(where.write), *states.shape), dtype=states.dtype, device=where.write.device)
    else:
        before = states.read(where.read)
    y, after = step(*args, before) if where.single else scan(*args, before[0])
    states.write(where.write, after if where.single else after[None])
    return y


class Fixed(NamedTuple):
    """The small weights of a recurrence, float32.

    Attributes:
        bias: is added to the step sizes before softplus.
        A: how fast states decay; below 0.
        D: the input's own way past the state; the delta rule has none.
        limits: [2], of the step sizes; of SSD alone.
    """

    bias: Tensor
    A: Tensor
    D: Tensor = torch.empty(0)
    limits: Tensor = torch.empty(0)


class StateOps(Module):
    """What a layer that keeps states computes between its matmuls, see `LayerOps.states`. These are torch's: the ones to read.

    Activations [T, ...] are in the model's dtype, as the layer's matmul left them; small weights and states are float32. Every
    recurrence gets the part of the cache that it reads and changes, `states`, and the sequences of the tokens, `where`.
    """

    capturable = True

    def conv(
        self,
        u: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: StateView,
        where: Sequences,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """A causal convolution of each channel, then a SiLU; with gates, between two multiplications and without it.

        Args:
            u: [T, C]. weight: [K, C]. bias: [C] or None. gates: two of [T, C]. states: [K - 1, C].

        Returns:
            [T, C], in the dtype of u.
        """
        x = u.float() if gates is None else u.float() * gates[0].float()
        y = self.run_conv(x, weight, bias, states, where)
        return (F.silu(y) if gates is None else y * gates[1].float()).to(u.dtype)

    def run_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, states: StateView, where: Sequences) -> Tensor:
        """`conv_step` or `conv_scan`, on states in the cache; as the following ones in float32."""
        return _through(conv_step, conv_scan, (x, weight, bias), states, where)

    def run_ssd(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: StateView, where: Sequences
    ) -> Tensor:
        """`ssd_step` or `ssd_scan`."""
        return _through(ssd_step, ssd_scan, (x, dt, A, B, C, D), states, where)

    def run_selective(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: StateView, where: Sequences
    ) -> Tensor:
        """`selective_step` or `selective_scan`."""
        return _through(selective_step, selective_scan, (x, dt, A, B, C, D), states, where)

    def run_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: StateView, where: Sequences
    ) -> Tensor:
        """`delta_step` or `delta_scan`. decay: its logarithm."""
        return _through(delta_step, delta_scan, (q, k, v, decay, beta), states, where)

    def ssd(self, xBC: Tensor, dt: Tensor, fixed: Fixed, groups: int, states: StateView, where: Sequences) -> Tensor:
        """SSD.

        Args:
            xBC: [T, H P + 2 groups N]. dt: [T, H], before softplus. fixed: of [H]. states: [H, P, N].

        Returns:
            float32 [T, H, P].
        """
        heads, P, N = states.shape
        x, B, C = xBC.float().split((heads * P, groups * N, groups * N), 1)
        x, B, C = x.unflatten(1, (heads, P)), B.unflatten(1, (groups, N)), C.unflatten(1, (groups, N))
        steps = F.softplus(dt.float() + fixed.bias).clamp(*fixed.limits)
        return self.run_ssd(x, steps, fixed.A, B, C, fixed.D, states, where)

    def selective(
        self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, fixed: Fixed, states: StateView, where: Sequences
    ) -> Tensor:
        """The selective scan, and the gate after it.

        Args:
            x, dt, z: [T, I]; dt before softplus, z before SiLU. B, C: [T, N]. fixed: of [I], A: [N, I]. states: [N, I].

        Returns:
            [T, I], in the dtype of x.
        """
        steps = F.softplus(dt.float() + fixed.bias)
        y = self.run_selective(x.float(), steps, fixed.A, B.float(), C.float(), fixed.D, states, where)
        return (y * F.silu(z.float())).to(x.dtype)

    def delta(
        self, qkv: Tensor, b: Tensor, a: Tensor, fixed: Fixed, k_heads: int, states: StateView, where: Sequences
    ) -> Tensor:
        """The gated delta rule.

        Args:
            qkv: [T, 2 k_heads K + H V]: queries, keys, values. b: [T, H], before sigmoid. a: [T, H], step sizes before softplus.
                fixed: of [H]. states: [H, K, V].

        Returns:
            float32 [T, H, V].
        """
        heads, K, V = states.shape
        q, k, v = qkv.float().split((k_heads * K, k_heads * K, heads * V), 1)
        q, k = (by_head(x.unflatten(1, (k_heads, K)), heads) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        log_decay, beta = fixed.A * F.softplus(a.float() + fixed.bias), b.float().sigmoid()
        return self.run_delta(q * K**-0.5, k, v.unflatten(1, (heads, V)), log_decay, beta, states, where)

    def gated_norm(self, y: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
        """Multiply y by SiLU of z and norm each group, or norm first. y may be overwritten.

        Args:
            y: float32 [T, groups, size]. z: [T, groups * size]. weight: [groups or 1, size].

        Returns:
            As z.
        """
        gate = F.silu(z.float()).view_as(y)
        y = F.rms_norm(y * gate if gate_first else y, y.shape[-1:], None, eps) * weight
        return (y if gate_first else y * gate).flatten(1).to(z.dtype)

    def contiguous(self, x: Tensor) -> Tensor:
        """Rows of a view [T, n] next to each other, for a matmul."""
        return x.contiguous()
