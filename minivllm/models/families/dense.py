"""Dense families: OLMo, Gemma 2, Phi, Granite, GLM, Cohere, StableLM, Falcon, GPT, OPT."""

# Generated from nbs/models/families/dense.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minivllm.models.mixers.attention import SelfAttentionSpec
from minivllm.models.mixers.mlp import MLPSpec
from minivllm.models.spec import (
    GEMMA_NORMS,
    ConfigReader,
    DecoderSpec,
    LayerSpec,
    Unpack,
    WeightNames,
    family,
    read_attention,
    read_common,
    read_layer_types,
    read_mlp,
    read_rope_of_type,
    windowed_layers,
    windows_from_types,
)

__all__ = ["dropped", "grouped_qkv", "neighbours_rotated", "sideways"]


def neighbours_rotated(attention: SelfAttentionSpec) -> tuple[Unpack, ...]:
    """For a checkpoint that rotates the pairs (2 i, 2 i + 1): bring the rows of q and k into the order of (i, i + dim / 2)."""
    dim = attention.head_dim if attention.rope is None else attention.rope.dim
    order = torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2), torch.arange(dim, attention.head_dim)))

    def rule(name: str) -> Unpack:
        heads = (-1, attention.head_dim)
        return Unpack(name, lambda t: {name: t.unflatten(0, heads)[:, order].reshape(t.shape)}, rows=True)

    return tuple(rule(f"{name}.{kind}") for name in (attention.q, attention.k) for kind in ("weight", "bias"))


def grouped_qkv(name: str, attention: SelfAttentionSpec) -> tuple[Unpack, ...]:
    """For one matrix with the rows of each key-value head together: its queries, the key, the value."""

    def parts(kind: str) -> Callable[[Tensor], dict[str, Tensor]]:
        def split(t: Tensor) -> dict[str, Tensor]:
            heads = t.unflatten(0, (attention.num_kv_heads, -1, attention.head_dim))
            q, k, v = heads[:, :-2], heads[:, -2], heads[:, -1]
            names = (attention.q, attention.k, attention.v)
            return {f"{n}.{kind}": x.reshape(-1, *t.shape[1:]) for n, x in zip(names, (q, k, v), strict=True)}

        return split

    return tuple(Unpack(f"{name}.{kind}", parts(kind)) for kind in ("weight", "bias"))


def sideways(*names: str) -> tuple[Unpack, ...]:
    """For matrices [inputs, outputs]."""

    def rule(name: str) -> Unpack:
        return Unpack(name, lambda t: {name: t.T})

    return tuple(rule(f"{name}.weight") for name in names)


def dropped(*suffixes: str) -> tuple[Unpack, ...]:
    """For tables that some checkpoints carry and that follow from the config."""
    return tuple(Unpack(suffix, lambda t: {}) for suffix in suffixes)


@family("SmolLM3ForCausalLM", "smollm3")
def smollm3(r: ConfigReader) -> DecoderSpec:
    """SmolLM3: a Llama with layers that have no positions."""
    count, every, bias = r.need("num_hidden_layers"), r.get("no_rope_layer_interval", 4), r.get("attention_bias", False)
    marks = r.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
    window = r.get("sliding_window") if r.get("use_sliding_window", False) else None
    types = r.get("layer_types") or ["sliding_attention" if window and not mark else "full_attention" for mark in marks]
    attention = read_attention(r, num_kv_heads=4, theta=2e6, qkv_bias=bias, o_bias=bias)
    r.get("max_window_layers")  # which layers have a window is said by `layer_types` alone
    windows = windows_from_types(r, types, window)
    layers = windowed_layers(attention, read_mlp(r, bias=r.get("mlp_bias", False)), windows)
    bare = windowed_layers(replace(attention, rope=None), layers[0].mlp, windows)
    chosen = tuple(layer if mark else none for layer, none, mark in zip(layers, bare, marks, strict=True))
    return DecoderSpec(**read_common(r, tied=True), layers=chosen)


@family("MinistralForCausalLM", "ministral")
def ministral(r: ConfigReader) -> DecoderSpec:
    """Ministral: Mistral with a window on some layers."""
    window = r.get("sliding_window", 4096)
    types = r.get("layer_types") or ["sliding_attention" if window else "full_attention"] * r.need("num_hidden_layers")
    attention = read_attention(r, num_kv_heads=8)
    return DecoderSpec(
        **read_common(r), layers=windowed_layers(attention, read_mlp(r), windows_from_types(r, types, window))
    )


def read_olmo(r: ConfigReader, **fields: Any) -> tuple[SelfAttentionSpec, dict[str, Any]]:
    """Attention, and the names of norms, of OLMo 2 and 3."""
    bias = r.get("attention_bias", False)
    attention = read_attention(r, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_over_projection=True, **fields)
    norms = {"mixer_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
    return attention, {"mixer_norm": None, "mlp_norm": None, **norms}


@family("Olmo2ForCausalLM", "olmo2")
def olmo2(r: ConfigReader) -> DecoderSpec:
    """OLMo 2."""
    attention, norms = read_olmo(r)
    layer = LayerSpec(mixer=attention, mlp=read_mlp(r), **norms)
    return DecoderSpec(**read_common(r, eps=1e-5), layers=(layer,) * r.need("num_hidden_layers"))


@family("Olmo3ForCausalLM", "olmo3")
def olmo3(r: ConfigReader) -> DecoderSpec:
    """OLMo 3: three layers with a window to one without; only the latter's rotation may be stretched."""
    common, types = read_common(r, eps=1e-5), read_layer_types(r, 4)
    attention, norms = read_olmo(r, rope=None)
    sizes = (attention.head_dim, common["max_position_embeddings"])
    ropes = {kind: read_rope_of_type(r, kind, *sizes, 5e5, None) for kind in set(types)}
    windows = zip(types, windows_from_types(r, types, r.get("sliding_window", 4096)), strict=True)
    mixers = [replace(attention, rope=ropes[kind], sliding_window=window) for kind, window in windows]
    return DecoderSpec(**common, layers=tuple(LayerSpec(mixer=m, mlp=read_mlp(r), **norms) for m in mixers))


@family("Gemma2ForCausalLM", "gemma2")
def gemma2(r: ConfigReader) -> DecoderSpec:
    """Gemma 2: soft caps on scores and logits, a window on every other layer."""
    common, bias = read_common(r, tied=True), r.get("attention_bias", False)
    scale, cap = r.get("query_pre_attn_scalar", 256) ** -0.5, r.get("attn_logit_softcapping", 50.0)
    sizes = {"head_dim": 256, "num_kv_heads": 4, "scale": scale, "soft_cap": cap, "qkv_bias": bias, "o_bias": bias}
    mlp = read_mlp(r, activation=r.get("hidden_activation", "gelu_pytorch_tanh"))
    windows = windows_from_types(r, read_layer_types(r, 2), r.get("sliding_window", 4096))
    layers = windowed_layers(read_attention(r, **sizes), mlp, windows)
    return DecoderSpec(
        **common,
        layers=tuple(replace(layer, **GEMMA_NORMS) for layer in layers),
        norm_offset=True,
        logits_soft_cap=r.get("final_logit_softcapping", 30.0),
        embedding_scale=common["hidden_size"] ** 0.5,
    )


def read_glm(r: ConfigReader, **norms: Any) -> DecoderSpec:
    """GLM 4: half of a head is rotated, by neighbours; gate and up are one matrix."""
    bias = r.get("attention_bias", True)
    attention = read_attention(r, head_dim=128, num_kv_heads=2, part=0.5, qkv_bias=bias)
    layer = LayerSpec(mixer=attention, mlp=read_mlp(r, gate_up="mlp.gate_up_proj"), **norms)
    common, layers = read_common(r, eps=1.5625e-07), (layer,) * r.need("num_hidden_layers")
    return DecoderSpec(**common, layers=layers, unpack=neighbours_rotated(attention))


@family("GlmForCausalLM", "glm")
def glm(r: ConfigReader) -> DecoderSpec:
    """GLM-4 of 2024."""
    return read_glm(r)


@family("Glm4ForCausalLM", "glm4")
def glm4(r: ConfigReader) -> DecoderSpec:
    """GLM-4 of 2025: norms after the blocks too."""
    return read_glm(r, mixer_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")


@family("Phi3ForCausalLM", "phi3")
def phi3(r: ConfigReader) -> DecoderSpec:
    """Phi 3 and 4: Q, K and V are one matrix, gate and up another."""
    attention = read_attention(r, part=1.0, qkv="self_attn.qkv_proj", sliding_window=r.get("sliding_window"))
    layer = LayerSpec(mixer=attention, mlp=read_mlp(r, gate_up="mlp.gate_up_proj"))
    return DecoderSpec(**read_common(r, eps=1e-5), layers=(layer,) * r.need("num_hidden_layers"))


@family("GraniteForCausalLM", "granite")
def granite(r: ConfigReader) -> DecoderSpec:
    """Granite: four constants in place of initialisation tricks."""
    bias = r.get("attention_bias", False)
    attention = read_attention(r, qkv_bias=bias, o_bias=bias, scale=r.get("attention_multiplier", 1.0))
    mlp, scale = read_mlp(r, bias=r.get("mlp_bias", False)), r.get("residual_multiplier", 1.0)
    return DecoderSpec(
        **read_common(r),
        layers=(LayerSpec(mixer=attention, mlp=mlp, residual_scale=scale),) * r.need("num_hidden_layers"),
        embedding_scale=r.get("embedding_multiplier", 1.0),
        logits_scale=1 / r.get("logits_scaling", 1.0),
    )


def read_layer_norm(
    r: ConfigReader, name: str | None = "layer_norm_eps", *, bias: bool = True, tied: bool = False
) -> dict[str, Any]:
    """As `read_common`, for a model with layer norms. name: name of the field with their epsilon; None for none."""
    return read_common(r, eps=1e-5, eps_name=name, tied=tied) | {"layer_norm": True, "norm_bias": bias}


def read_cohere(r: ConfigReader, **fields: Any) -> tuple[dict[str, Any], LayerSpec]:
    """The common fields of Cohere's models, and a layer."""
    r.only("use_qk_norm", False)
    for name in ("use_parallel_block", "use_gated_activation", "use_embedding_sharing", "use_parallel_embedding"):
        r.only(name, True, *([False] if name == "use_parallel_embedding" else []))  # the last is about training
    r.only("position_embedding_type", "rope_gptj")
    r.only("rotary_pct", 1.0)
    bias = r.get("attention_bias", False)
    attention = read_attention(r, qkv_bias=bias, o_bias=bias, **fields)
    common = read_layer_norm(r, bias=False, tied=True) | {"logits_scale": r.get("logit_scale", 0.0625)}
    if longest := r.get("model_max_length"):  # Command R was trained for more than its `max_position_embeddings`
        common["max_position_embeddings"] = longest
        if attention.rope is not None and attention.rope.kind == "default":
            attention = replace(attention, rope=replace(attention.rope, max_position=longest))
    layer = LayerSpec(mixer=attention, mlp=read_mlp(r), mlp_norm=None, parallel=True)
    return common | {"unpack": neighbours_rotated(attention)}, layer


@family("CohereForCausalLM", "cohere")
def cohere(r: ConfigReader) -> DecoderSpec:
    """Command R."""
    common, layer = read_cohere(r, theta=5e5)
    return DecoderSpec(**common, layers=(layer,) * r.need("num_hidden_layers"))


@family("Cohere2ForCausalLM", "cohere2")
def cohere2(r: ConfigReader) -> DecoderSpec:
    """Command R7B and A: layers with a window are rotated, layers without have no positions."""
    common, layer = read_cohere(r)
    every = r.get("sliding_window_pattern", r.get("layer_switch", 4))
    r.only("order_of_interleaved_layers", "local_attn_first")
    windows = windows_from_types(r, read_layer_types(r, every), r.get("sliding_window", 4096))
    rotated: Any = layer.mixer
    mixers = [replace(rotated, sliding_window=window) if window else replace(rotated, rope=None) for window in windows]
    return DecoderSpec(**common, layers=tuple(replace(layer, mixer=mixer) for mixer in mixers))


@family("StableLmForCausalLM", "stablelm")
def stablelm(r: ConfigReader) -> DecoderSpec:
    """StableLM: a quarter of a head is rotated."""
    attention = read_attention(r, num_kv_heads=32, part=0.25, qkv_bias=r.get("use_qkv_bias", False))
    parallel = r.get("use_parallel_residual", False)
    names: dict[str, Any] = {"mlp_norm": None, "parallel": True} if parallel else {}
    layer = LayerSpec(mixer=attention, mlp=read_mlp(r), **names)
    return DecoderSpec(**read_layer_norm(r), layers=(layer,) * r.need("num_hidden_layers"))


@family("Starcoder2ForCausalLM", "starcoder2")
def starcoder2(r: ConfigReader) -> DecoderSpec:
    """StarCoder 2: biases everywhere, an MLP without a gate."""
    common, bias = read_layer_norm(r, "norm_epsilon", tied=True), r.get("use_bias", True)
    r.only("norm_type", "layer_norm"), r.only("mlp_type", "default"), r.get("rms_norm_eps")  # the last is not read
    attention = read_attention(r, num_kv_heads=2, qkv_bias=bias, o_bias=bias, sliding_window=r.get("sliding_window"))
    activation = r.get("hidden_act", "gelu_pytorch_tanh")
    names = {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    mlp = MLPSpec(intermediate_size=r.need("intermediate_size"), activation=activation, bias=bias, **names)
    return DecoderSpec(**common, layers=(LayerSpec(mixer=attention, mlp=mlp),) * r.need("num_hidden_layers"))


@family("FalconForCausalLM", "falcon")
def falcon(r: ConfigReader) -> DecoderSpec:
    """Falcon, with rotations: one key-value head for all, or some, or one for each query head."""
    r.rename(hidden_act="activation", intermediate_size="ffn_hidden_size")
    r.assume(max_position_embeddings=2048)
    heads, hidden, bias = r.need("num_attention_heads"), r.need("hidden_size"), r.get("bias", False)
    new, multi = r.get("new_decoder_architecture", False), r.get("multi_query", True)
    kv_heads = r.get("num_kv_heads") or heads
    kv_heads = kv_heads if new else 1 if multi else heads
    names: dict[str, Any] = {part: f"self_attention.{part}" for part in "qkv"} | {"o": "self_attention.dense"}
    attention = read_attention(r, num_kv_heads=kv_heads, qkv_bias=bias, o_bias=bias, **names)
    sizes = {"intermediate_size": r.get("intermediate_size") or 4 * hidden, "activation": r.get("hidden_act", "gelu")}
    mlp = MLPSpec(**sizes, bias=bias, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
    parallel, norms = r.get("parallel_attn", True), r.get("num_ln_in_parallel_attn") or (2 if new else 1)
    own: dict[str, Any] = {"mixer_norm": "ln_attn", "mlp_norm": "ln_mlp"} if norms == 2 else {"mlp_norm": None}
    layer = LayerSpec(mixer=attention, mlp=mlp, **({"parallel": True} | own if parallel else {}))
    base = {"embedding": "word_embeddings.weight", "final_norm": "ln_f.weight", "layer": "h.{}."}
    return DecoderSpec(
        **read_layer_norm(r, "layer_norm_epsilon", tied=True),
        layers=(layer,) * r.need("num_hidden_layers"),
        names=WeightNames(**{key: f"transformer.{name}" for key, name in base.items()}, prefix="transformer."),
        unpack=grouped_qkv("self_attention.query_key_value", attention) + dropped("rotary_emb.inv_freq"),
    )


@family("GPTNeoXForCausalLM", "gpt_neox")
def gpt_neox(r: ConfigReader) -> DecoderSpec:
    """GPT-NeoX and Pythia."""
    r.rename(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    bias, parallel = r.get("attention_bias", True), r.get("use_parallel_residual", True)
    names: dict[str, Any] = {part: f"attention.{part}" for part in "qkv"} | {"o": "attention.dense"}
    attention = read_attention(r, part=0.25, qkv_bias=bias, o_bias=bias, **names)
    sizes = {"intermediate_size": r.need("intermediate_size"), "activation": r.get("hidden_act", "gelu")}
    mlp = MLPSpec(**sizes, bias=True, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
    names = {"embedding": "embed_in.weight", "final_norm": "final_layer_norm.weight", "layer": "layers.{}."}
    names = {key: f"gpt_neox.{name}" for key, name in names.items()}
    return DecoderSpec(
        **read_layer_norm(r),
        layers=(LayerSpec(mixer=attention, mlp=mlp, parallel=parallel),) * r.need("num_hidden_layers"),
        names=WeightNames(**names, head="embed_out.weight"),
        unpack=grouped_qkv("attention.query_key_value", attention)
        + dropped("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    )


@family("GPT2LMHeadModel", "gpt2")
def gpt2(r: ConfigReader) -> DecoderSpec:
    """GPT-2."""
    r.rename(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    inner = r.get("n_inner") or 4 * r.need("hidden_size")
    scale = None if r.get("scale_attn_weights", True) else 1.0
    r.get("n_ctx")  # the same as n_positions, in old files
    attention = read_attention(
        r, rope=None, scale=scale, qkv="attn.c_attn", o="attn.c_proj", qkv_bias=True, o_bias=True
    )
    activation = r.get("activation_function", "gelu_new")
    mlp = MLPSpec(intermediate_size=inner, activation=activation, bias=True, up="mlp.c_fc", down="mlp.c_proj")
    layer = LayerSpec(mixer=attention, mlp=mlp, mixer_norm="ln_1", mlp_norm="ln_2")
    names = {"embedding": "wte.weight", "final_norm": "ln_f.weight", "layer": "h.{}.", "positions": "wpe.weight"}
    return DecoderSpec(
        **read_layer_norm(r, "layer_norm_epsilon", tied=True),
        layers=(layer,) * r.need("num_hidden_layers"),
        names=WeightNames(**{key: f"transformer.{name}" for key, name in names.items()}, prefix="transformer."),
        unpack=sideways("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        + dropped(".attn.bias", ".attn.masked_bias"),
    )


@family("OPTForCausalLM", "opt")
def opt(r: ConfigReader) -> DecoderSpec:
    """OPT, of all sizes but 350M, whose norms stand elsewhere."""
    r.only("do_layer_norm_before", True)
    r.only("_remove_final_layer_norm", False)
    r.only("layer_norm_elementwise_affine", True)
    r.only("word_embed_proj_dim", r.need("hidden_size"))
    r.get("prefix")  # a default of pipelines: text before the prompt
    bias = r.get("enable_bias", True)
    attention = read_attention(r, rope=None, qkv_bias=bias, o_bias=bias, o="self_attn.out_proj")
    sizes = {"intermediate_size": r.get("ffn_dim", 3072), "activation": r.get("activation_function", "relu")}
    mlp = MLPSpec(**sizes, bias=bias, up="fc1", down="fc2")
    layer = LayerSpec(mixer=attention, mlp=mlp, mixer_norm="self_attn_layer_norm", mlp_norm="final_layer_norm")
    names = {"embedding": "embed_tokens.weight", "final_norm": "final_layer_norm.weight", "layer": "layers.{}."}
    names |= {"positions": "embed_positions.weight"}
    return DecoderSpec(
        **read_layer_norm(r, None, tied=True),
        layers=(layer,) * r.need("num_hidden_layers"),
        names=WeightNames(**{key: f"model.decoder.{name}" for key, name in names.items()}, prefix="model."),
        position_offset=2,
    )
