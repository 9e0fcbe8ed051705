"""Families with state-space layers: Mamba, Mamba-2, Jamba, Bamba, LFM2, Granite 4 hybrids, Qwen3-Next."""

# Generated from nbs/models/families/state.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minivllm.models.families.moe import (
    GRANITE_STACKED,
    STACKED,
    qwen_mlps,
    read_experts,
    read_granite_experts,
    stacked_experts,
)
from minivllm.models.mixers.base import TokenMixerSpec
from minivllm.models.mixers.conv import ShortConvSpec
from minivllm.models.mixers.delta import DeltaNetSpec
from minivllm.models.mixers.mamba1 import Mamba1Spec
from minivllm.models.mixers.mamba2 import Mamba2Spec
from minivllm.models.mixers.mlp import GatedMLPSpec
from minivllm.models.mixers.moe import MoESpec, RouterSpec
from minivllm.models.mixers.state import NoMLPSpec, StateMixerSpec
from minivllm.models.spec import (
    ConfigReader,
    DecoderSpec,
    LayerSpec,
    MTPSpec,
    Unpack,
    WeightNames,
    family,
    read_attention,
    read_common,
    read_layer_types,
    read_mlp,
)

LONGEST = 1 << 17
"""Positions of a model whose config names no limit, since it needs none."""
_BACKBONE = WeightNames(
    embedding="backbone.embeddings.weight", final_norm="backbone.norm_f.weight", layer="backbone.layers.{}."
)


def read_dt_limit(r: ConfigReader) -> tuple[float, float]:
    """Bounds of step sizes. JSON has no infinity: it is spelled as a bare word, or as transformers 5 does."""
    low, high = r.get("time_step_limit") or (0.0, math.inf)
    return tuple(float(x["__float__"]) if isinstance(x, dict) else float(x) for x in (low, high))  # type: ignore[return-value]


def _mixers_alone(r: ConfigReader, mixer: StateMixerSpec, eps: float, **common: Any) -> DecoderSpec:
    """A model whose layers have one block and no MLP."""
    r.only("hidden_act", "silu", "swish")
    r.skip(
        "time_step_min", "time_step_max", "time_step_floor", "residual_in_fp32", "rescale_prenorm_residual", "rms_norm"
    )
    layer = LayerSpec(mixer=mixer, mlp=NoMLPSpec(), mixer_norm="norm", mlp_norm=None)
    layers = (layer,) * r.need("num_hidden_layers")
    return DecoderSpec(**read_common(r, eps_name=None, eps=eps, **common), layers=layers, names=_BACKBONE)


@family("Mamba2ForCausalLM", "mamba2")
def mamba2(r: ConfigReader) -> DecoderSpec:
    """Mamba-2: nothing but state-space layers."""
    r.assume(max_position_embeddings=LONGEST, hidden_size=4096, vocab_size=32768, num_hidden_layers=64)
    r.skip("time_step_rank", "chunk_size")
    hidden, heads, head_dim = r.need("hidden_size"), r.get("num_heads", 128), r.get("head_dim", 64)
    if heads * head_dim != r.get("expand", 2) * hidden:
        raise ValueError(
            f"{heads} heads of {head_dim} are not expand * hidden_size = {r.get('expand', 2) * hidden} numbers"
        )
    eps = r.get("layer_norm_epsilon", 1e-5)
    mixer = Mamba2Spec(
        prefix="mixer.", num_heads=heads, head_dim=head_dim, num_groups=r.get("n_groups", 8),
        state_size=r.get("state_size", 128), kernel=r.get("conv_kernel", 4), bias=r.get("use_bias", False),
        conv_bias=r.get("use_conv_bias", True), eps=eps, dt_limit=read_dt_limit(r),
    )  # fmt: skip
    return _mixers_alone(r, mixer, eps)


@family("MambaForCausalLM", "mamba")
def mamba(r: ConfigReader) -> DecoderSpec:
    """Mamba: nothing but selective scans."""
    r.assume(max_position_embeddings=LONGEST, hidden_size=768, vocab_size=50280, num_hidden_layers=32)
    r.skip("time_step_scale", "time_step_init_scheme", "use_mambapy", "use_associative_scan", "fused_add_norm")
    r.skip("d_inner", "d_model", "n_layer", "intermediate_size", "ssm_cfg", "pad_vocab_size_multiple")
    hidden, rank, eps = r.need("hidden_size"), r.get("time_step_rank", "auto"), r.get("layer_norm_epsilon", 1e-5)
    mixer = Mamba1Spec(
        prefix="mixer.", channels=int(r.get("expand", 2) * hidden), state_size=r.get("state_size", 16),
        rank=-(-hidden // 16) if rank == "auto" else rank, kernel=r.get("conv_kernel", 4), bias=r.get("use_bias", False),
        conv_bias=r.get("use_conv_bias", True),
    )  # fmt: skip
    return _mixers_alone(r, mixer, eps, tied=True)


def mixers_by_type(r: ConfigReader, types: list[str], kinds: Mapping[str, TokenMixerSpec]) -> list[TokenMixerSpec]:
    """The mixer of each layer. kinds: by the names that the config may use.

    Raises:
        ValueError: another name, or not one for each layer.
    """
    if len(types) != r.need("num_hidden_layers"):
        raise ValueError(f"{len(types)} layer types for {r.need('num_hidden_layers')} layers")
    if unknown := set(types) - set(kinds):
        raise ValueError(f"layer types {sorted(unknown)} are not supported; supported: {', '.join(kinds)}")
    return [kinds[kind] for kind in types]


@family("Lfm2ForCausalLM", "lfm2")
def lfm2(r: ConfigReader) -> DecoderSpec:
    """LFM2: short convolutions, and attention in some layers."""
    r.skip("block_dim", "conv_dim", "conv_dim_out", "num_heads", "theta", "block_norm_eps", "use_pos_enc")
    r.skip("conv_use_xavier_init", "block_use_xavier_init", "block_mlp_init_scale", "block_out_init_scale")
    r.only("block_use_swiglu", True)
    size, count = r.get("block_ff_dim") or r.get("intermediate_size", 12288), r.need("num_hidden_layers")
    factor, multiple = r.get("block_ffn_dim_multiplier", 1.0), r.get("block_multiple_of", 256)
    r.get("intermediate_size")
    if r.get("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        size = size if factor is None else -(-int(factor * size) // multiple) * multiple
    part = {name: f"feed_forward.{weight}" for name, weight in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
    mlp = GatedMLPSpec(intermediate_size=size, **part)  # type: ignore[arg-type]
    r.assume(max_position_embeddings=128_000)
    names: dict[str, Any] = {f"{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"} | {
        "o": "self_attn.out_proj"
    }
    attention = read_attention(r, num_kv_heads=8, theta=1e6, qk_norm=True, **names)
    conv = ShortConvSpec(
        prefix="conv.", channels=r.need("hidden_size"), kernel=r.get("conv_L_cache", 3), bias=r.get("conv_bias", False)
    )
    full = r.get("full_attn_idxs")
    full = range(count) if full is None else full
    types = r.get("layer_types") or ["full_attention" if i in full else "conv" for i in range(count)]
    mixers = mixers_by_type(r, types, {"conv": conv, "full_attention": attention})
    norms = {"mixer_norm": "operator_norm", "mlp_norm": "ffn_norm"}
    common = read_common(r, tied=True, eps=1e-5, eps_name="norm_eps")
    tied = r.get("tie_embedding")
    return DecoderSpec(
        **common | ({} if tied is None else {"tie_word_embeddings": tied}),
        layers=tuple(LayerSpec(mixer=mixer, mlp=mlp, **norms) for mixer in mixers),  # type: ignore[arg-type]
        names=WeightNames(final_norm="model.embedding_norm.weight"),
    )


def hybrid_kinds(mamba: TokenMixerSpec, attention: TokenMixerSpec) -> dict[str, TokenMixerSpec]:
    """Mixers by the names that hybrids' configs have for them."""
    return {"mamba": mamba, "linear_attention": mamba, "attention": attention, "full_attention": attention}


def read_mamba2(r: ConfigReader, **fields: Any) -> Mamba2Spec:
    """Mamba-2 of a hybrid, with the fields that IBM's and others' configs have for it. fields: more of `Mamba2Spec`."""
    heads, expand = r.get("mamba_n_heads", 128), r.get("mamba_expand", 2)
    head_dim = r.get("mamba_d_head", 64)
    inner = expand * r.need("hidden_size")
    head_dim = inner // heads if head_dim == "auto" else head_dim
    if heads * head_dim != inner:
        raise ValueError(f"{heads} heads of {head_dim} are not mamba_expand * hidden_size = {inner} numbers")
    r.get("mamba_chunk_size")
    return Mamba2Spec(
        prefix="mamba.", num_heads=heads, head_dim=head_dim, num_groups=r.get("mamba_n_groups", 1),
        state_size=r.get("mamba_d_state", 256), kernel=r.get("mamba_d_conv", 4), bias=r.get("mamba_proj_bias", False),
        conv_bias=r.get("mamba_conv_bias", True), eps=r.get("rms_norm_eps", 1e-6), dt_limit=read_dt_limit(r), **fields,
    )  # fmt: skip


@family("GraniteMoeHybridForCausalLM", "granitemoehybrid")
def granitemoehybrid(r: ConfigReader) -> DecoderSpec:
    """Granite 4: Mamba-2 and some attention, mostly without positions; experts and a shared one, or that one alone."""
    r.assume(intermediate_size=11008, max_position_embeddings=2048)
    bias, count = r.get("attention_bias", False), r.need("num_hidden_layers")
    rope: dict[str, Any] = {} if r.only("position_embedding_type", None, "rope", "nope") == "rope" else {"rope": None}
    r.skip("rope_parameters", "rope_theta", "rope_scaling", "normalization_function", "init_method")
    attention = read_attention(r, qkv_bias=bias, o_bias=bias, scale=r.get("attention_multiplier", 1.0), **rope)
    types = r.get("layer_types") or r.get("layers_block_type") or ["mamba"] * count
    mixers = mixers_by_type(r, types, hybrid_kinds(read_mamba2(r), attention))
    r.skip("layers_block_type", "intermediate_size")
    size = r.get("shared_intermediate_size", 1024)
    mlp = read_mlp(r, intermediate_size=size, gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear")
    block: GatedMLPSpec | MoESpec = mlp
    r.skip("num_experts_per_tok")  # not read without experts
    if r.get("num_local_experts", 8):
        block = read_granite_experts(r, r.get("intermediate_size", 11008), shared=mlp)
    scale = r.get("residual_multiplier", 1.0)
    return DecoderSpec(
        **read_common(r),
        layers=tuple(LayerSpec(mixer=mixer, mlp=block, residual_scale=scale) for mixer in mixers),
        embedding_scale=r.get("embedding_multiplier", 1.0),
        logits_scale=1 / r.get("logits_scaling", 1.0),
        unpack=GRANITE_STACKED,
    )


_FEED_FORWARD = {part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}


@family("BambaForCausalLM", "bamba")
def bamba(r: ConfigReader) -> DecoderSpec:
    """Bamba: Mamba-2, and attention on half of each head's numbers in a few layers."""
    bias, count, full = r.get("attention_bias", False), r.need("num_hidden_layers"), r.get("attn_layer_indices") or ()
    r.assume(max_position_embeddings=262144, rms_norm_eps=1e-5, mamba_d_head="auto")
    r.only("mlp_bias", False), r.get("num_logits_to_keep"), r.get("z_loss_coefficient")
    attention = read_attention(r, num_kv_heads=8, part=0.5, qkv_bias=bias, o_bias=bias)
    types = r.get("layer_types") or r.get("layers_block_type")
    types = types or ["full_attention" if i in full else "linear_attention" for i in range(count)]
    mixers, mlp = mixers_by_type(r, types, hybrid_kinds(read_mamba2(r), attention)), read_mlp(r, **_FEED_FORWARD)
    return DecoderSpec(
        **read_common(r, eps=1e-5),
        layers=tuple(LayerSpec(mixer=mixer, mlp=mlp, mlp_norm="pre_ff_layernorm") for mixer in mixers),
        names=WeightNames(final_norm="model.final_layernorm.weight"),
    )


@family("JambaForCausalLM", "jamba")
def jamba(r: ConfigReader) -> DecoderSpec:
    """Jamba: selective scans with norms, attention without positions, and experts in every other layer."""
    count, hidden, rank = r.need("num_hidden_layers"), r.need("hidden_size"), r.get("mamba_dt_rank", "auto")
    r.assume(max_position_embeddings=262144)
    r.skip("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
    r.skip("layer_types", "layers_block_type", "layers_num_experts")  # the layers are those of the periods below
    r.only("sliding_window", None)
    scan = Mamba1Spec(
        prefix="mamba.", channels=r.get("mamba_expand", 2) * hidden, state_size=r.get("mamba_d_state", 16),
        rank=-(-hidden // 16) if rank == "auto" else rank, kernel=r.get("mamba_d_conv", 4),
        bias=r.get("mamba_proj_bias", False), conv_bias=r.get("mamba_conv_bias", True), norm_eps=r.get("rms_norm_eps", 1e-6),
    )  # fmt: skip
    attention, mlp = read_attention(r, num_kv_heads=8, rope=None), read_mlp(r, **_FEED_FORWARD)
    router = RouterSpec(top_k=r.get("num_experts_per_tok", 2), name="feed_forward.router")
    names = {part: name.replace("forward.", "forward.experts.{}.") for part, name in _FEED_FORWARD.items()}
    moe = read_experts(r, 16, mlp.intermediate_size, router)
    moe = replace(moe, expert=replace(moe.expert, **dict[str, Any](names)))
    every, first = r.get("attn_layer_period", 8), r.get("attn_layer_offset", 4)
    expert_every, expert_first = r.get("expert_layer_period", 2), r.get("expert_layer_offset", 1)
    layers = [
        LayerSpec(
            mixer=attention if i % every == first else scan,
            mlp=moe if i % expert_every == expert_first and moe.num_experts > 1 else mlp,
            mlp_norm="pre_ff_layernorm",
        )
        for i in range(count)
    ]
    final = WeightNames(final_norm="model.final_layernorm.weight")
    unpack = stacked_experts("feed_forward.experts", names)
    return DecoderSpec(**read_common(r), layers=tuple(layers), names=final, unpack=unpack)


def gated_query(head_dim: int, kind: str) -> Unpack:
    """A matmul that holds, head by head, a query and the gate of the head's output."""

    def parts(tensor: Tensor) -> dict[str, Tensor]:
        q, gate = tensor.unflatten(0, (-1, 2, head_dim)).transpose(0, 1)
        return {f"self_attn.q_proj.{kind}": q.flatten(0, 1), f"self_attn.q_gate.{kind}": gate.flatten(0, 1)}

    return Unpack(f"self_attn.q_proj.{kind}", parts)


def _ungrouped(prefix: str, num_k_heads: int, parts: dict[str, tuple[int, ...]]) -> tuple[Unpack, ...]:
    """Checkpoints have the rows of both matmuls key head by key head; here all queries come first, then all keys, and so on.

    parts: by the matmul's name, how many rows each part of a key head has.
    """

    def rule(name: str, sizes: tuple[int, ...]) -> Unpack:
        def reorder(weight: Tensor) -> dict[str, Tensor]:
            split = weight.unflatten(0, (num_k_heads, -1)).split(sizes, 1)
            return {f"{prefix}{name}.weight": torch.cat([part.flatten(0, 1) for part in split])}

        return Unpack(f"{prefix}{name}.weight", reorder, rows=True)

    return tuple(rule(name, sizes) for name, sizes in parts.items())


@family("Qwen3NextForCausalLM", "qwen3_next")
def qwen3_next(r: ConfigReader) -> DecoderSpec:
    """Qwen3-Next: three gated delta nets to one attention layer with a gate, and experts."""
    bias = r.get("attention_bias", False)
    attention = read_attention(
        r, head_dim=256, num_kv_heads=2, part=0.25, qkv_bias=bias, o_bias=bias, qk_norm=True, gate="self_attn.q_gate"
    )
    delta = DeltaNetSpec(
        prefix="linear_attn.", num_k_heads=r.get("linear_num_key_heads", 16), num_v_heads=r.get("linear_num_value_heads", 32),
        k_dim=r.get("linear_key_head_dim", 128), v_dim=r.get("linear_value_head_dim", 128),
        kernel=r.get("linear_conv_kernel_dim", 4), eps=r.get("rms_norm_eps", 1e-6),
    )  # fmt: skip
    many = delta.num_v_heads // delta.num_k_heads
    rows = {"in_proj_qkvz": (*(delta.k_dim,) * 2, *(many * delta.v_dim,) * 2), "in_proj_ba": (many, many)}
    types = read_layer_types(r, r.get("full_attention_interval", 4), "linear_attention")
    mixers = mixers_by_type(r, types, {"linear_attention": delta, "full_attention": attention})
    router = RouterSpec(top_k=r.get("num_experts_per_tok", 10), normalize=r.get("norm_topk_prob", True))
    names = {part: f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    r.assume(intermediate_size=5632)
    shared = read_mlp(r, intermediate_size=r.get("shared_expert_intermediate_size", 512), **names)
    moe = read_experts(r, 512, r.get("moe_intermediate_size", 512), router)
    moe = replace(moe, shared=shared, shared_gate="mlp.shared_expert_gate")
    return DecoderSpec(
        **read_common(r),
        layers=tuple(LayerSpec(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, qwen_mlps(r, moe), strict=True)),
        norm_offset=True,
        unpack=(
            *STACKED,
            *(gated_query(attention.head_dim, kind) for kind in ("weight", "bias")),
            *_ungrouped(delta.prefix, delta.num_k_heads, rows),
        ),
        ignored=("mtp.",),
        mtp=MTPSpec(
            spec=LayerSpec(mixer=attention, mlp=moe),
            layer="mtp.layers.{}.",
            embedding_norm="mtp.pre_fc_norm_embedding.weight",
            hidden_norm="mtp.pre_fc_norm_hidden.weight",
            fuse="mtp.fc.weight",
            final_norm="mtp.norm.weight",
            passes_normed=True,
        ),
    )
