"""Attention both ways, without a cache, as a block of a layer."""

# Generated from nbs/models/mixers/encoder.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minivllm.attention.backend import AttentionSpec
from minivllm.attention.encoder import EncoderBackend
from minivllm.core.config import KVCacheSpec
from minivllm.models.mixers.attention import SelfAttention, SelfAttentionSpec
from minivllm.models.mixers.base import Builder, register_mixer
from minivllm.models.ops.base import ForwardContext


@dataclass(frozen=True, kw_only=True)
class EncoderAttentionSpec(SelfAttentionSpec):
    """Parameters of `EncoderAttention`: those of self-attention. sliding_window: a token sees this many tokens on either side."""

    def attention_spec(self, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> AttentionSpec:
        """See `TokenMixerSpec`. The window is the layer's own affair: all layers share one plan."""
        spec = super().attention_spec(block_size, dtype, kv_dtype)
        return replace(spec, causal=False, sliding_window=None)

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        return KVCacheSpec("encoder_only", block_size, self.num_kv_heads, self.head_dim, None, dtype_bytes)


@register_mixer(EncoderAttentionSpec)
class EncoderAttention(SelfAttention):
    """QKV matmul, rotation, attention of all tokens of a prompt to each other, output matmul."""

    def __init__(self, spec: EncoderAttentionSpec, builder: Builder) -> None:
        super().__init__(spec, builder)
        self.backend = backend = EncoderBackend()
        backend.window = spec.sliding_window

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[T, hidden_size] to the same shape."""
        kv = x.new_empty(2, len(x), self.spec.num_kv_heads, self.head_dim)
        caches = [kv] * (self.cache + 1)  # this layer's lives as long as the call; no other is read
        return super().__call__(x, replace(context, kv_caches=caches))
