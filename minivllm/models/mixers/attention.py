"""Self-attention over a paged KV cache, as a block of a layer."""

# Generated from nbs/models/mixers/attention.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from minivllm.attention.backend import FP8, AttentionSpec, KVScales
from minivllm.core.config import KVCacheSpec
from minivllm.models.layers import ProjectionQKNorm, QKNorm
from minivllm.models.linear.layer import Linear
from minivllm.models.mixers.base import Builder, LinearSpec, Mixer, MixerSpec, TokenMixerSpec, register_mixer
from minivllm.models.ops.base import ForwardContext
from minivllm.models.parallel import Share, Split, SplitBlock
from minivllm.models.rope import RopeSpec


@dataclass(frozen=True, kw_only=True)
class SelfAttentionSpec(TokenMixerSpec):
    """Parameters of `SelfAttention`.

    Attributes:
        num_heads, num_kv_heads, head_dim: query heads, key-value heads, and the size of each.
        rope: the rotation, or None for no positions at all.
        scale: factor on the scores; None for `head_dim ** -0.5`.
        sliding_window, chunk, soft_cap, sees_ahead: see `AttentionSpec`.
        qkv_bias, o_bias: which linear layers have a bias.
        qk_norm: an RMS norm of queries and keys before the rotation; of each head, or with `qk_norm_over_projection` of
            all query heads as one vector, and all key heads as another. Its weights are ones unless `learned_qk_norm`.
        temperature: (floor, scale): queries at position p are multiplied by `1 + scale * log(1 + (p + 1) // floor)` (Nakanishi, 2025).
        q, k, v, o, q_norm, k_norm: names of the weights in a checkpoint, after the layer's prefix.
        gate, sinks: names of a matmul whose sigmoid multiplies what comes out of the attention, and of the sinks (see `AttentionBackend`).
        qkv: name of the weight that holds those of q, k and v below each other, if the checkpoint has it so.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    scale: float | None = None
    sliding_window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_over_projection: bool = False
    learned_qk_norm: bool = True
    temperature: tuple[int, float] | None = None
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: str | None = None
    sinks: str | None = None
    sees_ahead: bool = False
    gate: str | None = None

    def __post_init__(self) -> None:
        self.check_counts("num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads equally")

    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = {self.q: q, self.k: kv, self.v: kv} if self.qkv is None else {self.qkv: q + 2 * kv}
        gate = {} if self.gate is None else {"gate": LinearSpec(hidden_size, {self.gate: q}, self.qkv_bias)}
        o = LinearSpec(q, {self.o: hidden_size}, self.o_bias)
        return {"qkv": LinearSpec(hidden_size, parts, self.qkv_bias), **gate, "o": o}

    def split(self, share: Share) -> SplitBlock:
        """See `MixerSpec`. A rank has some query heads, and the key-value heads that belong to them; see `rank_heads`."""
        if self.qk_norm_over_projection:
            raise ValueError("a norm over all heads (qk_norm_over_projection) cannot be split among ranks")
        q, k, copies = share.heads(self.num_heads, self.num_kv_heads)
        pieces = {self.q: (q,), self.k: (k,), self.v: (k,)} if self.qkv is None else {self.qkv: (q, k, k)}
        splits = {"qkv": Split("outputs", pieces), "o": Split("inputs", {self.o: (q,)})}
        if self.gate is not None:
            splits["gate"] = Split("outputs", {self.gate: (q,)})
        kv_heads = self.num_kv_heads, k.room * share.size // copies
        sizes = {"query heads": (self.num_heads, q.room * share.size), "key-value heads": kv_heads}
        return SplitBlock(replace(self, num_heads=q.room, num_kv_heads=k.room), splits, sizes)

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        sinks = {} if self.sinks is None else {self.sinks: (self.num_heads,)}
        return MixerSpec.weight_shapes(self, hidden_size) | sinks

    def vectors(self) -> dict[str, int]:
        if not (self.qk_norm and self.learned_qk_norm):
            return {}
        heads = (self.num_heads, self.num_kv_heads) if self.qk_norm_over_projection else (1, 1)
        return {self.q_norm: heads[0] * self.head_dim, self.k_norm: heads[1] * self.head_dim}

    def attention_spec(self, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            block_size=block_size,
            dtype=dtype,
            sliding_window=self.sliding_window,
            chunk=self.chunk,
            soft_cap=self.soft_cap,
            kv_dtype=kv_dtype,
            sinks=self.sinks is not None,
            sees_ahead=self.sees_ahead,
        )

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        kind = "full"
        if self.sliding_window is not None:
            kind = "sliding_window"
        elif self.chunk is not None:
            kind = "chunked_local"
        window = self.sliding_window or self.chunk
        return KVCacheSpec(kind, block_size, self.num_kv_heads, self.head_dim, window, dtype_bytes)


@register_mixer(SelfAttentionSpec)
class SelfAttention(Mixer):
    """QKV matmul; head norms, rotation and cache write; attention; output matmul."""

    capturable = True
    spec: SelfAttentionSpec
    qkv: Linear
    gate: Linear | None = None
    o: Linear

    def __init__(self, spec: SelfAttentionSpec, builder: Builder) -> None:
        super().__init__(spec, builder)
        self.backend, self.kv_dtype, self.shard = builder.backend, builder.kv_dtype, self.o.share
        self.sinks: Tensor | None = None
        if spec.sinks is not None:
            self.sinks = torch.empty(spec.num_heads, dtype=builder.dtype, device=builder.device)
            self.backend = self.backend.with_sinks(self.sinks)
        self.qk_norm: QKNorm | None = None
        if spec.qk_norm:
            how = {"dtype": builder.dtype, "device": builder.device, "offset": builder.norm_offset}
            sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
            kind = ProjectionQKNorm if spec.qk_norm_over_projection else QKNorm
            self.qk_norm = kind(*sizes, builder.norm_eps, **how)  # type: ignore[arg-type]
            self.qk_norm.weight.fill_(1)
        self.num_heads, self.head_dim = spec.num_heads, spec.head_dim
        self._scales: dict[str, float] = {}

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[T, hidden_size] to the same shape; writes the step's keys and values into this layer's cache."""
        kv_cache, plan = context.kv_caches[self.cache], context.plans[self.group]
        rotation = context.rotations[self.rotation]
        q = self.ops.rope_and_cache(self, self.qkv(x), kv_cache, plan.slot_mapping, rotation)
        if self.spec.temperature is not None:
            q = q * _temperatures(context.positions, *self.spec.temperature)[:, None, None].to(q.dtype)
        out = self.backend.attend(q, kv_cache, plan).reshape(x.shape[0], -1)
        return self.o(out if self.gate is None else out * torch.sigmoid(self.gate(x)))

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        yield from Mixer.targets(self)
        if self.spec.sinks is not None and self.sinks is not None:
            yield self.spec.sinks, self._load_sinks
        if (norm := self.qk_norm) is not None and self.spec.learned_qk_norm:
            yield f"{self.spec.q_norm}.weight", partial(norm.load, norm.q_weight)
            yield f"{self.spec.k_norm}.weight", partial(norm.load, norm.k_weight)

    def _load_sinks(self, tensor: Tensor) -> None:
        assert self.sinks is not None
        self.sinks.copy_(tensor if self.shard is None else self.shard.cut(self.spec.o, tensor, 0))

    def optional_targets(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """The scales of an fp8 cache: one number each, beside the layer's weights or within those of keys and values."""
        for part, name in (("k", self.spec.k), ("v", self.spec.v)):
            for place in (name.rpartition(".")[0], name):
                yield f"{place}.{part}_scale", partial(self._load_scale, part)

    def _load_scale(self, part: str, tensor: Tensor) -> None:
        scale = float(tensor) if tensor.numel() == 1 else math.nan
        if not 0 < scale < math.inf:
            raise ValueError(f"must be one number above 0, got {tensor.tolist()}")
        self._scales[part] = scale

    def process_weights_after_loading(self) -> None:
        """See `Mixer`. A missing scale takes the value of the other one, or 1. A cache of another dtype than fp8 has none."""
        if self.kv_dtype == FP8 and self._scales:
            k, v = self._scales.get("k"), self._scales.get("v")
            self.backend = self.backend.scaled(KVScales(k or v or 1.0, v or k or 1.0))

    def renew(self) -> None:
        if self.kv_dtype == FP8 and self._scales:
            self.backend = self.backend.scaled(KVScales(1.0, 1.0))
        self._scales = {}


def _temperatures(positions: Tensor, floor: int, scale: float) -> Tensor:
    """Factors on the queries, float32 [T]; see `SelfAttentionSpec`."""
    return torch.log1p(torch.floor((positions.float() + 1) / floor)) * scale + 1
