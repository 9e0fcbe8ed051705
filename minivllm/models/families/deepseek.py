"""DeepSeek-V2 and V3: latent attention, shared experts, routing limited to groups."""

# Generated from nbs/models/families/deepseek.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from dataclasses import replace
from typing import Any

import torch

from minivllm.models.families.moe import STACKED, read_experts
from minivllm.models.mixers.latent import LatentAttentionSpec
from minivllm.models.mixers.moe import RouterSpec
from minivllm.models.spec import (
    ConfigReader,
    DecoderSpec,
    LayerSpec,
    MTPSpec,
    Unpack,
    family,
    read_common,
    read_mlp,
    read_rope,
)

__all__ = ["read_deepseek", "read_latent_attention", "rotated_last"]


def read_latent_attention(r: ConfigReader) -> LatentAttentionSpec:
    """Attention of DeepSeek-V2 and later."""
    nope, rotated = r.get("qk_nope_head_dim", 128), r.get("qk_rope_head_dim", 64)
    r.get("qk_head_dim"), r.get("head_dim"), r.get("num_key_value_heads")  # the sum; the rotated part; all heads
    rope, scale = read_rope(r, rotated, r.need("max_position_embeddings")), (nope + rotated) ** -0.5
    if rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
    return LatentAttentionSpec(
        num_heads=r.need("num_attention_heads"),
        rank=r.get("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=rotated,
        v_dim=r.get("v_head_dim", 128),
        q_rank=r.get("q_lora_rank", 1536),
        rope=rope,
        scale=scale,
        bias=r.get("attention_bias", False),
    )


def rotated_last(suffix: str, unit: int, rotated: int) -> Unpack:
    """Checkpoints rotate neighbours: bring the last rows of every `unit` rows into the order of halves."""
    first = unit - rotated
    order = torch.cat((torch.arange(first), torch.arange(first, unit, 2), torch.arange(first + 1, unit, 2)))
    return Unpack(suffix, lambda t: {suffix: t.unflatten(0, (-1, unit))[:, order].reshape(t.shape)}, rows=True)


def read_deepseek(r: ConfigReader, router: RouterSpec, count: int, first_dense: int, bias: bool = False) -> DecoderSpec:
    """The spec of V2 and V3, as far as they agree.

    Args:
        count, first_dense: experts, and layers without them, if the config does not say.
        bias: whether every MLP but the routed experts has one.
    """
    attention = read_latent_attention(r)
    size, shared = r.get("moe_intermediate_size", 2048), r.get("n_shared_experts", 1)
    names: dict[str, Any] = {part: f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    always = read_mlp(r, intermediate_size=size * shared, bias=bias, **names)
    moe = read_experts(r, count, size, router, field="n_routed_experts", shared=always)
    r.only("moe_layer_freq", 1)
    dense, layers = r.get("first_k_dense_replace", first_dense), r.need("num_hidden_layers")
    mlp, unpack = read_mlp(r, bias=bias), list(STACKED)
    if r.get("rope_interleave", True):
        a = attention
        for name, unit in (
            ("q_proj", a.head_dim), ("q_b_proj", a.head_dim), ("kv_a_proj_with_mqa", a.rank + a.rope_dim)
        ):  # fmt: skip
            unpack += tuple(rotated_last(f"self_attn.{name}.{k}", unit, a.rope_dim) for k in ("weight", "bias"))
    specs = tuple(LayerSpec(mixer=attention, mlp=mlp if i < dense else moe) for i in range(layers))
    return DecoderSpec(**read_common(r), layers=specs, unpack=tuple(unpack))


@family("DeepseekV2ForCausalLM", "deepseek_v2")
def deepseek_v2(r: ConfigReader) -> DecoderSpec:
    """DeepSeek-V2: softmax, and groups by their best expert."""
    r.assume(moe_intermediate_size=1407, n_shared_experts=2)
    limited = r.only("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    groups, top_groups = r.get("n_group"), r.get("topk_group")
    r.only("scoring_func", "softmax")
    r.get("norm_topk_prob")  # not read by the model
    router = RouterSpec(
        top_k=r.need("num_experts_per_tok"),
        scale=r.get("routed_scaling_factor", 1.0),
        groups=groups if limited else 1,
        top_groups=top_groups if limited else 1,
        float32=True,
    )
    return read_deepseek(r, router, 64, 0, r.get("mlp_bias", False))


@family("DeepseekV3ForCausalLM", "deepseek_v3")
def deepseek_v3(r: ConfigReader) -> DecoderSpec:
    """DeepSeek-V3 and R1: sigmoid, a correction for the choice, groups by their two best."""
    r.only("topk_method", "noaux_tc")
    r.only("scoring_func", "sigmoid")
    router = RouterSpec(
        top_k=r.get("num_experts_per_tok", 8),
        score="sigmoid",
        normalize=r.get("norm_topk_prob", True),
        epsilon=1e-20,
        scale=r.get("routed_scaling_factor", 2.5),
        groups=r.get("n_group", 8),
        top_groups=r.get("topk_group", 4),
        group_score=2,
        float32=True,
        correction="mlp.gate.e_score_correction_bias",
    )
    spec, count = read_deepseek(r, router, 256, 3), r.get("num_nextn_predict_layers", 1) or 0
    names = [spec.names.layer.format(spec.num_layers + i) for i in range(count)]
    if not names:
        return spec
    parts = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "fuse": "eh_proj", "final_norm": "shared_head.norm"}
    tensors: dict[str, Any] = {part: f"{names[0]}{name}.weight" for part, name in parts.items()}
    mtp = MTPSpec(spec=spec.layers[-1], layer=names[0], count=count, skips_first=True, **tensors)
    return replace(spec, mtp=mtp, ignored=tuple(names))
