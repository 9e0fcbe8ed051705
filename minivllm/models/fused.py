"""Fused GPU variants of norm, MLP, rotary embedding and attention layers."""

# Generated from nbs/models/fused.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.attention.backend import Plan
from minivllm.attention.numba_cuda import NumbaCudaBackend, cuda_ops
from minivllm.models.decoder import Attention, Decoder, RopeTable
from minivllm.models.gpu_linear import few_rows
from minivllm.models.layers import GatedMLP, RMSNorm
from minivllm.models.rope import Rope

__all__ = ["FusedMLP", "FusedNorm", "become", "fuse"]

Part = TypeVar("Part")


def become(cls: type[Part], part: Any) -> Part:
    """An object of class `cls` with the attributes of `part`, whose class it was derived from, or the other way round."""
    new = cls.__new__(cls)
    for one in type(part).__mro__:
        for name in getattr(one, "__slots__", ()):
            setattr(new, name, getattr(part, name))
    return new


class FusedNorm(RMSNorm):
    """Adds to the residual stream and norms the sum in one kernel."""

    __slots__ = ()

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return cuda_ops().rms_norm(x, self.weight, self.eps, residual), x if residual is None else residual


class FusedMLP(GatedMLP):
    """`silu(gate) * up` by one kernel: for few rows by that of the product."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.gate_up
        if layer.kernel == "gemv" and layer.bias is None and few_rows(x):
            return self.down(cuda_ops().gemv(x, layer.weight, gated=True))
        return self.down(cuda_ops().silu_mul(layer(x)))


class FusedRope(Rope):
    """Stands for `Rope`: gives the table of all positions, float32 [length, dim], half cosines, half sines, and the positions."""

    def __init__(self, rope: Rope, length: int) -> None:
        self.spec, half = rope.spec, rope.spec.dim // 2
        cos, sin = rope(torch.arange(length, device=rope.inv_freq.device), torch.float32)
        self.table = torch.cat((cos[:, 0, :half], sin[:, 0, half:]), -1).contiguous()

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.table, positions


class FusedAttention(Attention):
    """Head norms, rotation and cache write in one kernel."""

    __slots__ = ()

    def __call__(self, x: Tensor, rope: RopeTable, kv_cache: Tensor, plan: Plan) -> Tensor:
        if rope is None:
            return super().__call__(x, rope, kv_cache, plan)
        norm, (table, positions) = self.qk_norm, rope
        q = cuda_ops().rope_and_cache(
            self.qkv(x),
            kv_cache,
            table,
            positions,
            plan.slot_mapping,
            num_heads=self.num_heads,
            q_weight=None if norm is None else norm.q_weight[0],
            k_weight=None if norm is None else norm.k_weight[0],
            eps=0.0 if norm is None else norm.eps,
            k_scale=self.backend.scales.k,
            v_scale=self.backend.scales.v,
        )
        return self.o(self.backend.attend(q, kv_cache, plan).view(x.shape[0], -1))


def fuse(decoder: Decoder, max_model_len: int) -> int:
    """Exchange parts of a decoder on a GPU for fused ones; for positions below `max_model_len`. Gives the number exchanged.

    Nothing happens unless the attention backend is one of the CUDA kernels.
    """
    if not isinstance(decoder.backend, NumbaCudaBackend):
        return 0
    count = 0
    rotates = all(rope is None or rope.spec.dim == decoder.spec.head_dim for rope in decoder.ropes)
    rotates = rotates and all(_rotation_fits(layer.attention, decoder.dtype) for layer in decoder.layers)
    if rotates:
        decoder.ropes = [None if rope is None else FusedRope(rope, max_model_len) for rope in decoder.ropes]
    for layer in decoder.layers:
        for name in ("attention_norm", "mlp_norm"):
            if _norm_fits(norm := getattr(layer, name), decoder.dtype):
                setattr(layer, name, become(FusedNorm, norm))
                count += 1
        if layer.mlp.activation is F.silu and decoder.spec.intermediate_size % 8 == 0:
            layer.mlp = become(FusedMLP, layer.mlp)
            count += 1
        if rotates:
            layer.attention = become(FusedAttention, layer.attention)
            count += 1
    if _norm_fits(decoder.final_norm, decoder.dtype):
        decoder.final_norm = become(FusedNorm, decoder.final_norm)
        count += 1
    return count


def _norm_fits(norm: RMSNorm, dtype: torch.dtype) -> bool:
    size = norm.shape[0]
    return norm.weight.dtype == dtype and size % 8 == 0 and size <= 16384


def _rotation_fits(attention: Attention, dtype: torch.dtype) -> bool:
    return attention.qk_norm is None or attention.qk_norm.weight.dtype == dtype
