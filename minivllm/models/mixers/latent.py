"""Multi-head latent attention over a compressed cache, as a block of a layer."""

# Generated from nbs/models/mixers/latent.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minivllm.attention.backend import AttentionSpec
from minivllm.core.config import KVCacheSpec
from minivllm.models.linear.layer import Linear
from minivllm.models.mixers.base import Builder, LinearSpec, Mixer, MixerSpec, TokenMixerSpec, register_mixer
from minivllm.models.ops.base import ForwardContext
from minivllm.models.parallel import Share, Split, SplitBlock
from minivllm.models.rope import RopeSpec, apply_rope


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(TokenMixerSpec):
    """Parameters of `LatentAttention`. Names of weights are DeepSeek's.

    Attributes:
        num_heads: query heads.
        rank: numbers of the latent.
        nope_dim, rope_dim, v_dim: numbers of a head: of its query without and with positions, and of its value.
        q_rank: numbers of the compressed vector that queries come from; None for directly from the input.
        rope: the rotation, of `rope_dim` numbers.
        scale: factor on the scores.
        bias: whether the matmuls that compress, and the output, have one.
        eps: that of the norms of compressed vectors.
    """

    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None
    rope: RopeSpec | None
    scale: float
    bias: bool = False
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Numbers of a query head."""
        return self.nope_dim + self.rope_dim

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        latent, q = {"self_attn.kv_a_proj_with_mqa": self.rank + self.rope_dim}, self.num_heads * self.head_dim
        o = LinearSpec(self.num_heads * self.v_dim, {"self_attn.o_proj": hidden_size}, self.bias)
        if self.q_rank is None:
            whole = LinearSpec(hidden_size, {"self_attn.q_proj": q})
            return {"q": whole, "compress": LinearSpec(hidden_size, latent, self.bias), "o": o}
        both = LinearSpec(hidden_size, {"self_attn.q_a_proj": self.q_rank} | latent, self.bias)
        return {"compress": both, "q": LinearSpec(self.q_rank, {"self_attn.q_b_proj": q}), "o": o}

    def split(self, share: Share) -> SplitBlock:
        """See `MixerSpec`. A rank has some heads; the latents, which all heads read, lie in the cache of every rank."""
        mine = share.piece(self.num_heads)
        q = "self_attn.q_proj" if self.q_rank is None else "self_attn.q_b_proj"
        splits = {"q": Split("outputs", {q: (mine,)}), "o": Split("inputs", {"self_attn.o_proj": (mine,)})}
        sizes = {"query heads": (mine.total, mine.room * share.size)}
        return SplitBlock(replace(self, num_heads=mine.room), splits, sizes)

    def vectors(self) -> dict[str, int]:
        q = {} if self.q_rank is None else {"self_attn.q_a_layernorm": self.q_rank}
        return q | {"self_attn.kv_a_layernorm": self.rank}

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        expand = {"self_attn.kv_b_proj.weight": (self.num_heads * (self.nope_dim + self.v_dim), self.rank)}
        return MixerSpec.weight_shapes(self, hidden_size) | expand

    def attention_spec(self, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> AttentionSpec:
        """See `TokenMixerSpec`. One key head for all query heads."""
        sizes: dict[str, Any] = {"num_heads": self.num_heads, "num_kv_heads": 1, "head_dim": self.rank + self.rope_dim}
        how: dict[str, Any] = {"scale": self.scale, "block_size": block_size, "dtype": dtype, "kv_dtype": kv_dtype}
        return AttentionSpec(**sizes, **how, value_dim=self.rank)

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        return KVCacheSpec("latent", block_size, 1, self.rank + self.rope_dim, None, dtype_bytes)


@register_mixer(LatentAttentionSpec)
class LatentAttention(Mixer):
    """Compress; rotate and cache; attend with queries brought to the latents; expand; output matmul.

    Attributes:
        expand: [num_heads, nope_dim + v_dim, rank], the matrices of keys and values.
    """

    spec: LatentAttentionSpec
    q: Linear
    compress: Linear
    o: Linear

    def __init__(self, spec: LatentAttentionSpec, builder: Builder) -> None:
        super().__init__(spec, builder)
        self.backend, norms, self.shard = builder.backend, replace(builder, norm_eps=spec.eps), self.o.share
        self.q_norm = None if spec.q_rank is None else norms.norm(spec.q_rank)
        self.kv_norm = norms.norm(spec.rank)
        shape = (spec.num_heads, spec.nope_dim + spec.v_dim, spec.rank)
        self.expand = torch.empty(shape, dtype=builder.dtype, device=builder.device)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[T, hidden_size] to the same shape; writes the step's latents into this layer's cache."""
        s, kv_cache, plan = self.spec, context.kv_caches[self.cache], context.plans[self.group]
        *compressed, latent, k_rope = self.compress(x).split([s.q_rank or 0, s.rank, s.rope_dim], 1)
        q = self.q(x if self.q_norm is None else self.q_norm(compressed[0].contiguous()))
        q, q_rope = q.view(len(x), s.num_heads, -1).split((s.nope_dim, s.rope_dim), 2)
        rope = torch.cat((q_rope, k_rope[:, None]), 1)
        if (rotation := context.rotations[self.rotation]) is not None:
            rope = apply_rope(rope, *rotation.cos_sin)
        key = torch.cat((self.kv_norm(latent.contiguous())[:, None], rope[:, -1:]), -1)
        self.backend.write(key, key, kv_cache, plan.slot_mapping)
        query = torch.cat((self._by_head("thn,hnr->thr", q, self.expand[:, : s.nope_dim]), rope[:, :-1]), -1)
        out = self.backend.attend(query, kv_cache, plan)
        return self.o(self._by_head("thr,hvr->thv", out, self.expand[:, s.nope_dim :]).flatten(1))

    def _by_head(self, how: str, x: Tensor, weight: Tensor) -> Tensor:
        """A matmul for each head."""
        if self.ops.batch_invariant:  # how a batch of matmuls rounds may depend on the number of rows
            return torch.cat([torch.einsum(how, row, weight) for row in x.split(1)])
        return torch.einsum(how, x, weight)

    def _load_expand(self, tensor: Tensor) -> None:
        mine = tensor if self.shard is None else self.shard.cut("self_attn.o_proj", tensor, 0)
        self.expand.flatten(0, 1).copy_(mine)

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
        yield from Mixer.targets(self)
        yield "self_attn.kv_b_proj.weight", self._load_expand
        for name, norm in (("q_a_layernorm", self.q_norm), ("kv_a_layernorm", self.kv_norm)):
            for kind, load in () if norm is None else norm.targets():
                yield f"self_attn.{name}.{kind}", load
