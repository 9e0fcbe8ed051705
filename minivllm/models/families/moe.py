"""Families with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GPT-OSS, Llama 4."""

# Generated from nbs/models/families/moe.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from minivllm.models.families.dense import granite, neighbours_rotated
from minivllm.models.families.media import text_config, text_name
from minivllm.models.mixers.attention import SelfAttentionSpec
from minivllm.models.mixers.base import MixerSpec
from minivllm.models.mixers.mlp import ClampedMLPSpec, GatedMLPSpec
from minivllm.models.mixers.moe import MoESpec, RouterSpec
from minivllm.models.spec import (
    ConfigReader,
    DecoderSpec,
    LayerSpec,
    Unpack,
    family,
    read_attention,
    read_common,
    read_layer_types,
    read_mlp,
    read_window_per_layer,
    spec_from_config,
    windowed_layers,
    windows_from_types,
)

__all__ = ["EXPERT_NAMES", "GRANITE_STACKED", "STACKED", "each_expert", "read_experts", "stacked_experts"]

EXPERT_NAMES: dict[str, Any] = {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
"""The usual names of an expert's weights, by the fields of `GatedMLPSpec`."""


def each_expert(suffix: str, *names: str) -> Unpack:
    """A tensor [E, sum of outputs, inputs] that holds equal parts of all experts, by the names of the parts, `{}` for the number."""

    def parts(tensor: Tensor) -> dict[str, Tensor]:
        experts = enumerate(tensor.unbind())
        return {
            name.format(e): part
            for e, expert in experts
            for name, part in zip(names, expert.chunk(len(names)), strict=True)
        }

    return Unpack(suffix, parts)


def stacked_experts(
    module: str, names: Mapping[str, str] = EXPERT_NAMES, gate_up: str = "gate_up_proj", down: str = "down_proj"
) -> tuple[Unpack, Unpack]:
    """Experts in two tensors of a module, as transformers 5 keeps them in memory and may save them. names: those of each expert's weights."""
    gate, up, out = (f"{names[part]}.weight" for part in ("gate", "up", "down"))
    return each_expert(f"{module}.{gate_up}", gate, up), each_expert(f"{module}.{down}", out)


STACKED = stacked_experts("mlp.experts")
_GRANITE_ROUTER = "block_sparse_moe.router.layer"
GRANITE_STACKED = (
    *stacked_experts("block_sparse_moe", gate_up="input_linear.weight", down="output_linear.weight"),
    *stacked_experts("block_sparse_moe.experts"),
    Unpack("block_sparse_moe.router.weight", lambda t: {f"{_GRANITE_ROUTER}.weight": t}),
)


def read_experts(
    r: ConfigReader, count: int, size: int, router: RouterSpec, *, field: str = "num_experts", **fields: Any
) -> MoESpec:
    """Experts with the usual names.

    Args:
        count: how many, if the config has no such field.
        size: numbers inside each.
        field: what the family's configs call their number. Other spellings, which some tools write, must agree with it.
        fields: more of `MoESpec`.
    """
    expert = GatedMLPSpec(intermediate_size=size, activation=r.get("hidden_act", "silu"), **EXPERT_NAMES)
    spellings = (field, "num_experts", "num_local_experts", "n_routed_experts")
    number = next((n for n in map(r.get, spellings) if n is not None), count)
    for name in spellings:
        r.only(name, number, None)
    return MoESpec(num_experts=number, router=router, expert=expert, **fields)


@family("MixtralForCausalLM", "mixtral")
def mixtral(r: ConfigReader) -> DecoderSpec:
    """Mixtral: Mistral with experts, under its own names."""
    router = RouterSpec(top_k=r.get("num_experts_per_tok", 2), normalize=True, name="block_sparse_moe.gate")
    moe = read_experts(r, 8, r.need("intermediate_size"), router, field="num_local_experts")
    weights = {"gate": "w1", "up": "w3", "down": "w2"}
    names: dict[str, Any] = {part: f"block_sparse_moe.experts.{{}}.{name}" for part, name in weights.items()}
    attention = read_attention(r, num_kv_heads=8, theta=1e6, sliding_window=r.get("sliding_window"))
    layer = LayerSpec(mixer=attention, mlp=replace(moe, expert=replace(moe.expert, **names)))
    gate = Unpack("mlp.gate.weight", lambda tensor: {"block_sparse_moe.gate.weight": tensor})
    unpack = (gate, *stacked_experts("mlp.experts", names))
    return DecoderSpec(**read_common(r, eps=1e-5), layers=(layer,) * r.need("num_hidden_layers"), unpack=unpack)


def qwen_mlps(r: ConfigReader, moe: MoESpec) -> list[MixerSpec]:
    """Experts or a plain MLP, for each layer."""
    step, dense, mlp = r.get("decoder_sparse_step", 1), r.get("mlp_only_layers") or [], read_mlp(r)
    count = r.need("num_hidden_layers")
    return [moe if i not in dense and (i + 1) % step == 0 else mlp for i in range(count)]


@family("Qwen2MoeForCausalLM", "qwen2_moe")
def qwen2_moe(r: ConfigReader) -> DecoderSpec:
    """Qwen 1.5 and 2 with experts; a shared expert with a gate."""
    router = RouterSpec(top_k=r.get("num_experts_per_tok", 4), normalize=r.get("norm_topk_prob", False))
    names = {part: f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
    shared = read_mlp(r, intermediate_size=r.get("shared_expert_intermediate_size", 5632), **names)
    size = r.get("moe_intermediate_size", 1408)
    moe = read_experts(r, 60, size, router, shared=shared, shared_gate="mlp.shared_expert_gate")
    attention = read_attention(r, num_kv_heads=16, qkv_bias=r.get("qkv_bias", True))
    windows = zip(qwen_mlps(r, moe), read_window_per_layer(r), strict=True)
    layers = tuple(LayerSpec(mixer=replace(attention, sliding_window=window), mlp=mlp) for mlp, window in windows)
    return DecoderSpec(**read_common(r), layers=layers, unpack=STACKED)


@family("Qwen3MoeForCausalLM", "qwen3_moe")
def qwen3_moe(r: ConfigReader) -> DecoderSpec:
    """Qwen 3 with experts."""
    router = RouterSpec(top_k=r.get("num_experts_per_tok", 8), normalize=r.get("norm_topk_prob", False))
    moe = read_experts(r, 128, r.get("moe_intermediate_size", 768), router)
    window = r.get("sliding_window", 4096) if r.get("use_sliding_window", False) else None
    bias = r.get("attention_bias", False)
    attention = read_attention(r, num_kv_heads=4, qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_window=window)
    r.get("max_window_layers")  # its window, if there is one, is on every layer
    layers = tuple(LayerSpec(mixer=attention, mlp=mlp) for mlp in qwen_mlps(r, moe))
    return DecoderSpec(**read_common(r), layers=layers, unpack=STACKED)


@family("OlmoeForCausalLM", "olmoe")
def olmoe(r: ConfigReader) -> DecoderSpec:
    """OLMoE: 64 experts, and a norm over whole queries and keys."""
    router = RouterSpec(top_k=r.get("num_experts_per_tok", 8), normalize=r.get("norm_topk_prob", False))
    moe = read_experts(r, 64, r.get("intermediate_size", 2048), router)
    bias = r.get("attention_bias", False)
    attention = read_attention(r, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_over_projection=True)
    layers = (LayerSpec(mixer=attention, mlp=moe),) * r.need("num_hidden_layers")
    return DecoderSpec(**read_common(r, eps=1e-5), layers=layers, unpack=STACKED)


def read_granite_experts(r: ConfigReader, size: int, **fields: Any) -> MoESpec:
    """Granite's experts, of `size` numbers. fields: more of `MoESpec`."""
    router = RouterSpec(top_k=r.get("num_experts_per_tok", 2), normalize=True, name=_GRANITE_ROUTER)
    return read_experts(r, 8, size, router, field="num_local_experts", **fields)


@family("GraniteMoeForCausalLM", "granitemoe")
def granitemoe(r: ConfigReader) -> DecoderSpec:
    """Granite with experts, which its checkpoints stack."""
    moe, base = read_granite_experts(r, r.need("intermediate_size")), granite(r)
    layers = tuple(replace(layer, mlp=moe) for layer in base.layers)
    return replace(base, layers=layers, unpack=GRANITE_STACKED)


def lying_experts(suffix: str, *names: str) -> tuple[Unpack, ...]:
    """As `each_expert`, for a tensor [E, inputs, outputs] in which the parts alternate, and its bias [E, outputs].

    Or, in the tensor's place, a list of quantized weights [outputs, inputs] under the tensor's name followed by `_blocks`.
    """

    def parts(kind: str, stacked: Callable[[Any], Any]) -> Callable[[Tensor], dict[str, Tensor]]:
        def split(tensor: Tensor) -> dict[str, Tensor]:
            experts, count = enumerate(stacked(tensor)), len(names)
            return {f"{name.format(e)}.{kind}": x[i::count] for e, x in experts for i, name in enumerate(names)}

        return split

    weight = Unpack(suffix, parts("weight", lambda tensor: tensor.transpose(1, 2)))
    same = {"bias": "bias", "blocks": "weight"}
    return weight, *(Unpack(f"{suffix}_{end}", parts(kind, lambda stack: stack)) for end, kind in same.items())


@family("GptOssForCausalLM", "gpt_oss")
def gpt_oss(r: ConfigReader) -> DecoderSpec:
    """GPT-OSS: sinks, a window on every other layer, clamped experts."""
    r.only("swiglu_alpha", 1.702)
    r.only("hidden_act", "silu")
    bias, types = r.get("attention_bias", True), read_layer_types(r, 2)
    sizes: dict[str, Any] = {"head_dim": 64, "num_kv_heads": 8, "theta": 150000.0}
    stretched = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    attention = read_attention(r, qkv_bias=bias, o_bias=bias, sinks="self_attn.sinks", default_rope=stretched, **sizes)
    router = RouterSpec(top_k=r.get("num_experts_per_tok", 4), normalize=True, bias=True, name="mlp.router")
    r.only("experts_per_token", router.top_k), r.get("initial_context_length")  # the rotation says it too
    limit, size = r.get("swiglu_limit", 7.0), r.need("intermediate_size")
    expert = ClampedMLPSpec(intermediate_size=size, bias=True, limit=limit, **EXPERT_NAMES)
    moe = replace(read_experts(r, 128, size, router, field="num_local_experts"), expert=expert)
    windows = windows_from_types(r, types, r.get("sliding_window", 128))
    return DecoderSpec(
        **read_common(r, eps=1e-5),
        layers=windowed_layers(attention, moe, windows),
        unpack=lying_experts("mlp.experts.gate_up_proj", EXPERT_NAMES["gate"], EXPERT_NAMES["up"])
        + lying_experts("mlp.experts.down_proj", EXPERT_NAMES["down"]),
    )


def read_llama4_mixers(r: ConfigReader) -> list[SelfAttentionSpec]:
    """Attention of each layer: rotated and in chunks, or without positions."""
    count, every = r.need("num_hidden_layers"), r.get("no_rope_layer_interval", 4)
    chunk = r.get("attention_chunk_size", 8192)
    marks = r.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    types = r.get("layer_types") or ["chunked_attention" if mark and chunk else "full_attention" for mark in marks]
    if (unknown := set(types) - {"chunked_attention", "full_attention"}) or not len(types) == len(marks) == count:
        raise ValueError(
            f"layer_types {sorted(unknown)}, {len(types)} of them, and {len(marks)} no_rope_layers for {count} layers"
        )
    bias, sizes = r.get("attention_bias", False), dict[str, Any](head_dim=128, num_kv_heads=8, theta=5e5)
    rotated = read_attention(
        r, qkv_bias=bias, o_bias=bias, qk_norm=r.get("use_qk_norm", True), learned_qk_norm=False, **sizes
    )
    floor, scale = r.get("floor_scale", 8192), r.get("attn_scale", 0.1)
    temperature = (floor, scale) if r.get("attn_temperature_tuning", True) else None
    bare = replace(rotated, rope=None, qk_norm=False, temperature=temperature)
    chunks = [chunk if kind == "chunked_attention" else None for kind in types]
    return [replace(rotated if mark else bare, chunk=size) for mark, size in zip(marks, chunks, strict=True)]


@family("Llama4ForCausalLM", "llama4_text")
def llama4(r: ConfigReader) -> DecoderSpec:
    """Llama 4, text only: chunks, layers without positions, a shared expert."""
    parts, step, count = ("gate", "up", "down"), r.get("interleave_moe_layer_step", 1), r.need("num_hidden_layers")
    names: dict[str, Any] = {part: f"feed_forward.{part}_proj" for part in parts}
    dense = read_mlp(r, intermediate_size=r.get("intermediate_size_mlp", 16384), **names)
    shared = read_mlp(r, **{part: f"feed_forward.shared_expert.{part}_proj" for part in parts})
    sparse = range(step - 1, count, step) if r.get("moe_layers") is None else r.get("moe_layers")
    top_k = r.get("num_experts_per_tok", 1)
    router = RouterSpec(top_k=top_k, score="sigmoid", on_input=True, name="feed_forward.router")
    moe = read_experts(r, 16, r.need("intermediate_size"), router, field="num_local_experts", shared=shared)
    mixers = enumerate(read_llama4_mixers(r))
    rules = stacked_experts("feed_forward.experts")
    layers = tuple(LayerSpec(mixer=mixer, mlp=moe if i in sparse else dense) for i, mixer in mixers)
    stacks = tuple(Unpack(rule.suffix, lambda t, rule=rule: rule.parts(t.transpose(1, 2))) for rule in rules)  # type: ignore[misc]
    unpack = stacks + neighbours_rotated(layers[0].mixer)  # type: ignore[arg-type]
    return DecoderSpec(**read_common(r, eps=1e-5), layers=layers, unpack=unpack)


@family("Llama4ForConditionalGeneration", "llama4")
def llama4_published(r: ConfigReader) -> DecoderSpec:
    """Llama 4 as it is published, of which the text model is run; pictures are refused."""
    r.skip("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")
    return replace(spec_from_config(text_config(r)), family=r.family, rename=text_name)
