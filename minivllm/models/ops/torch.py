"""LayerOps in plain torch: the ones to read, and the oracle for the others."""

# Generated from nbs/models/ops/torch.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.ops.base import AttentionHeads, LayerOps
from minivllm.models.rope import Rotation, apply_rope

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class TorchOps(LayerOps):
    """See `LayerOps`."""

    name: ClassVar[str] = "torch"
    capturable = True

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == weight.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def add_into(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        if residual is None:
            out.copy_(x)
        else:
            torch.add(x, residual, out=out)

    def rope_and_cache(
        self, layer: AttentionHeads, qkv: Tensor, kv_cache: Tensor, slot_mapping: Tensor, rotation: Rotation | None
    ) -> Tensor:
        heads, num_heads = qkv.view(qkv.shape[0], -1, layer.head_dim), layer.num_heads
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        if rotation is not None:
            qk = apply_rope(qk, *rotation.cos_sin)
        q, k = qk.split((num_heads, num_kv_heads), dim=1)
        layer.backend.write(k, v, kv_cache, slot_mapping)
        return q

    def gated_linear(self, x: Tensor, gate_up: Callable[[Tensor], Tensor], activation: str) -> Tensor:
        gate, up = gate_up(x).chunk(2, -1)
        return self.activate(gate, activation).mul_(up)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        function = ACTIVATIONS[activation]
        if self.batch_invariant and x.device.type == "cpu" and len(x):
            # on all rows at once, a vectorised function splits them among threads, and rounds the last few numbers of
            # each thread's share with other instructions than the rest
            return torch.stack([function(row) for row in x])
        return function(x)

    def moe_permute(self, x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        order = ids.flatten().argsort(stable=True)
        counts = (ids.flatten() == torch.arange(num_experts, device=x.device)[:, None]).sum(1)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=x.device)
        return x.index_select(0, order // ids.shape[1]), places.view_as(ids), counts

    def moe_unpermute(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        first, *others = rows[places].unbind(1)
        total = first * weights[:, :1]
        for part, weight in zip(others, weights.unbind(1)[1:], strict=True):
            total += part * weight[:, None]
        return total.to(rows.dtype)

    def argmax(self, logits: Tensor) -> Tensor:
        values, ids = logits.max(-1)
        return torch.where(values.abs() < torch.inf, ids, -1)  # `isfinite` is four calls, which a GPU's host feels
