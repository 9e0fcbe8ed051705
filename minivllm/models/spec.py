"""DecoderSpec, and model families that build it from a Hugging Face config."""

# Generated from nbs/models/spec.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from minivllm.attention.backend import AttentionSpec
from minivllm.core.config import KVCacheSpec
from minivllm.models.layers import ACTIVATIONS
from minivllm.models.rope import RopeSpec, rope_from_parameters

__all__ = [
    "FAMILIES", "ConfigReader", "DecoderSpec", "Family", "LayerSpec", "WeightNames", "family",
    "spec_from_config",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer may have of its own.

    Attributes:
        rope: its rotation, or None for no positions at all.
        sliding_window: see `AttentionSpec`.
        chunk: see `AttentionSpec`.
    """

    rope: RopeSpec | None
    sliding_window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """What a checkpoint calls its tensors. A norm whose name is None does not exist; `{}` is the layer's number."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_post_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    mlp_post_norm: str | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Everything that `Decoder` needs to know to build itself.

    Attributes:
        family: name of the function that made it, for messages.
        vocab_size, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: the usual sizes.
        layers: one per layer.
        max_position_embeddings: as the configuration says.
        norm_eps: of every RMS norm.
        norm_offset: norms multiply by `1 + weight`, in float32 (Gemma).
        activation: of the gated MLP.
        qkv_bias, o_bias, mlp_bias: which products have a bias.
        qk_norm: norm of each query and key head before the rotation.
        attention_scale: factor on the scores.
        attention_soft_cap, logits_soft_cap: `cap * tanh(x / cap)` on scores and on logits; None for none.
        embedding_scale: factor on the embeddings.
        tie_word_embeddings: the output layer is the embedding.
        names: of the checkpoint's tensors.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    norm_eps: float
    activation: str
    attention_scale: float
    norm_offset: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    names: WeightNames = field(default_factory=WeightNames)

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "num_layers",
        )
        for name in (*sizes, "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{self.family}: {name} must be a whole number of at least 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.family}: {self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads equally"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"{self.family}: activation {self.activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def max_model_len(self) -> int:
        """Longest sequence that every layer's rotation was meant for."""
        lengths = [layer.rope.max_length for layer in self.layers if layer.rope is not None]
        return min(lengths, default=self.max_position_embeddings)

    def attention_specs(
        self, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> list[AttentionSpec]:
        """What each layer asks of the attention backend. kv_dtype: see `AttentionSpec`."""
        return [
            AttentionSpec(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.attention_scale,
                block_size=block_size,
                dtype=dtype,
                sliding_window=layer.sliding_window,
                chunk=layer.chunk,
                soft_cap=self.attention_soft_cap,
                kv_dtype=kv_dtype,
            )
            for layer in self.layers
        ]

    def kv_cache_specs(self, block_size: int, dtype_bytes: int = 4) -> list[KVCacheSpec]:
        """What each layer asks of the KV cache manager. `dtype_bytes` is the size of one stored number."""
        specs = []
        for layer in self.layers:
            kind = "full"
            window = None
            if layer.sliding_window is not None:
                kind, window = "sliding_window", layer.sliding_window
            elif layer.chunk is not None:
                kind, window = "chunked_local", layer.chunk
            specs.append(KVCacheSpec(kind, block_size, self.num_kv_heads, self.head_dim, window, dtype_bytes))
        return specs

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this model holds."""
        n, hidden, inner = self.names, self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {n.embedding: (self.vocab_size, hidden), n.final_norm: (hidden,)}
        if not self.tie_word_embeddings:
            shapes[n.head] = (self.vocab_size, hidden)
        products = [
            (n.q, q, hidden, self.qkv_bias),
            (n.k, kv, hidden, self.qkv_bias),
            (n.v, kv, hidden, self.qkv_bias),
            (n.o, hidden, q, self.o_bias),
            (n.gate, inner, hidden, self.mlp_bias),
            (n.up, inner, hidden, self.mlp_bias),
            (n.down, hidden, inner, self.mlp_bias),
        ]
        norms = [
            (name, hidden) for name in (n.attention_norm, n.attention_post_norm, n.mlp_norm, n.mlp_post_norm) if name
        ]
        if self.qk_norm:
            norms += [(n.q_norm, self.head_dim), (n.k_norm, self.head_dim)]
        for i in range(self.num_layers):
            layer = n.layer.format(i)
            for name, rows, columns, bias in products:
                shapes[f"{layer}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (rows,)
            for name, size in norms:
                shapes[f"{layer}{name}.weight"] = (size,)
        return shapes

    def num_parameters(self) -> int:
        """Numbers in a checkpoint; a tied output layer counts once."""
        return sum(math.prod(shape) for shape in self.weight_shapes().values())


_NEUTRAL_FIELDS = """
    _attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern architectures
    attention_dropout attn_implementation bos_token_id cache_implementation do_sample dtype early_stopping eos_token_id
    finetuning_task id2label initializer_range is_llama_config keys_to_ignore_at_inference label2id length_penalty
    max_length max_new_tokens min_length model_type name_or_path num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states pad_token_id pretraining_tp problem_type repetition_penalty return_dict
    task_specific_params temperature tokenizer_class top_k top_p torch_dtype transformers.js_config transformers_version
    typical_p unsloth_fixed unsloth_version use_cache
"""
_NEUTRAL = frozenset(_NEUTRAL_FIELDS.split())
"""Fields that do not change what the layers compute: names, training, tokens, defaults of generation."""


class ConfigReader:
    """A Hugging Face config of which every field must be understood.

    A family function takes the fields that it implements; `finish` refuses the config if anything is left over.
    """

    def __init__(self, config: dict[str, Any], family: str) -> None:
        self.config, self.family = config, family
        self._taken: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value (which may be None, if the config says so), or `default` if there is no such field."""
        self._taken.add(name)
        return self.config.get(name, default)

    def need(self, name: str) -> Any:
        """The field's value.

        Raises:
            ValueError: there is none.
        """
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.family}: the config has no {name!r}")
        return value

    def finish(self) -> None:
        """Refuse what nobody took, unless it is neutral or switched off (null, false, 0 or empty).

        Raises:
            ValueError: names the field and its value.
        """
        for name, value in self.config.items():
            if name not in self._taken and name not in _NEUTRAL and value:
                raise ValueError(
                    f"{self.family}: config field {name}={value!r} is not supported;"
                    f" override it with None if the model is known to work without it"
                )


Family = Callable[[ConfigReader], DecoderSpec]
FAMILIES: dict[str, Family] = {}
"""From the name in a config's `architectures` to the function that makes the spec."""


def family(*architectures: str) -> Callable[[Family], Family]:
    """Register a family under the architectures that it serves. A decorator."""

    def register(make: Family) -> Family:
        FAMILIES.update(dict.fromkeys(architectures, make))
        return make

    return register


_ARCHITECTURE_OF = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def spec_from_config(hf_config: dict[str, Any]) -> DecoderSpec:
    """The spec of the model that a `config.json` describes.

    Args:
        hf_config: the parsed file, of transformers 5 or older.

    Raises:
        ValueError: unknown architecture, unsupported field or value; names it.
    """
    model_type = hf_config.get("model_type")
    names = hf_config.get("architectures") or [_ARCHITECTURE_OF.get(model_type or "", "")]
    if names[0] not in FAMILIES:
        what = f"architecture {names[0]!r}" if names[0] else f"model_type {model_type!r}"
        raise ValueError(f"{what} is not supported; supported architectures: {', '.join(FAMILIES)}")
    reader = ConfigReader(hf_config, names[0])
    spec = FAMILIES[names[0]](reader)
    reader.finish()
    return spec


def read_rope(r: ConfigReader, head_dim: int, max_position: int) -> RopeSpec:
    """The rotation, from `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (before)."""
    parameters, old = r.get("rope_parameters") or {}, r.get("rope_scaling")
    parameters = old or parameters
    theta = r.get("rope_theta")
    return rope_from_parameters(
        parameters,
        theta=10000.0 if theta is None else theta,
        dim=head_dim,
        max_position=max_position,
        original_max_position=r.get("original_max_position_embeddings"),
    )


def read_common(
    r: ConfigReader, *, head_dim: int | None = None, num_kv_heads: int | None = None, tied: bool = False
) -> dict[str, Any]:
    """The fields that all families share, under the names of `DecoderSpec`.

    Args:
        head_dim, num_kv_heads, tied: what transformers assumes if the config has no such field; None for the rule
            (`hidden_size / num_attention_heads`, and as many as query heads).
    """
    num_heads, hidden = r.need("num_attention_heads"), r.need("hidden_size")
    head_dim = r.get("head_dim", head_dim) or hidden // num_heads
    return {
        "family": r.family,
        "vocab_size": r.need("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": r.need("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": r.get("num_key_value_heads", num_kv_heads) or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": r.need("max_position_embeddings"),
        "norm_eps": r.get("rms_norm_eps", 1e-6),
        "activation": r.get("hidden_act", "silu"),
        "attention_scale": head_dim**-0.5,
        "tie_word_embeddings": r.get("tie_word_embeddings", tied),
    }


def read_window_per_layer(r: ConfigReader, default_start: int = 28) -> list[int | None]:
    """Qwen's rule: `layer_types`, or a window from layer `max_window_layers` on; nothing without `use_sliding_window`."""
    count = r.need("num_hidden_layers")
    start, window, types = (
        r.get("max_window_layers", default_start),
        r.get("sliding_window", 4096),
        r.get("layer_types"),
    )
    window = window if r.get("use_sliding_window", False) else None
    if types is None:
        return [window if i >= start else None for i in range(count)]
    return windows_from_types(r, types, window)


def windows_from_types(r: ConfigReader, types: list[str], window: int | None) -> list[int | None]:
    """A window per layer, from the config's `layer_types`.

    Raises:
        ValueError: unknown type, wrong number of them, or a sliding layer without a window.
    """
    if len(types) != r.need("num_hidden_layers"):
        raise ValueError(f"{r.family}: {len(types)} layer_types for {r.need('num_hidden_layers')} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"{r.family}: layer type {kind!r} is not supported; full_attention, sliding_attention are")
    if "sliding_attention" in types and window is None:
        raise ValueError(f"{r.family}: layer_types has sliding_attention, but there is no sliding_window")
    return [window if kind == "sliding_attention" else None for kind in types]


@family("LlamaForCausalLM")
def llama(r: ConfigReader) -> DecoderSpec:
    """Llama 1 to 3, SmolLM2 and whoever else uses their architecture."""
    common = read_common(r)
    layer = LayerSpec(rope=read_rope(r, common["head_dim"], common["max_position_embeddings"]))
    bias = r.get("attention_bias", False)
    return DecoderSpec(
        **common,
        layers=(layer,) * r.need("num_hidden_layers"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.get("mlp_bias", False),
    )


@family("MistralForCausalLM")
def mistral(r: ConfigReader) -> DecoderSpec:
    """Mistral 7B: a window on every layer."""
    common = read_common(r, num_kv_heads=8)
    rope = read_rope(r, common["head_dim"], common["max_position_embeddings"])
    layer = LayerSpec(rope=rope, sliding_window=r.get("sliding_window", 4096))
    return DecoderSpec(**common, layers=(layer,) * r.need("num_hidden_layers"))


@family("Qwen2ForCausalLM")
def qwen2(r: ConfigReader) -> DecoderSpec:
    """Qwen 2 and 2.5: a bias on queries, keys and values."""
    common = read_common(r, num_kv_heads=32)
    rope = read_rope(r, common["head_dim"], common["max_position_embeddings"])
    layers = tuple(LayerSpec(rope=rope, sliding_window=window) for window in read_window_per_layer(r))
    return DecoderSpec(**common, layers=layers, qkv_bias=True)


@family("Qwen3ForCausalLM")
def qwen3(r: ConfigReader) -> DecoderSpec:
    """Qwen 3: no bias, but a norm on every query and key head."""
    common = read_common(r, head_dim=128, num_kv_heads=32)
    rope = read_rope(r, common["head_dim"], common["max_position_embeddings"])
    layers = tuple(LayerSpec(rope=rope, sliding_window=window) for window in read_window_per_layer(r))
    bias = r.get("attention_bias", False)
    return DecoderSpec(**common, layers=layers, qkv_bias=bias, o_bias=bias, qk_norm=True)


def read_gemma3_rope(r: ConfigReader, kind: str, head_dim: int, max_position: int) -> RopeSpec:
    """Gemma 3 has a rotation for global layers and one for local ones; old files stretch the global one only."""
    parameters = (r.get("rope_parameters") or {}).get(kind) or {}
    global_theta, local_theta = r.get("rope_theta", 1e6), r.get("rope_local_base_freq", 1e4)
    scaling = r.get("rope_scaling") or {}
    if kind == "sliding_attention":
        return rope_from_parameters(parameters, theta=local_theta, dim=head_dim, max_position=max_position)
    return rope_from_parameters(parameters | scaling, theta=global_theta, dim=head_dim, max_position=max_position)


@family("Gemma3ForCausalLM")
def gemma3(r: ConfigReader) -> DecoderSpec:
    """Gemma 3, text only: norms before and after, `1 + weight`, local layers with a rotation of their own."""
    common = read_common(r, head_dim=256, num_kv_heads=4, tied=True)
    count, every = r.need("num_hidden_layers"), r.get("sliding_window_pattern", 6)
    types = r.get("layer_types")
    if types is None:
        types = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)]
    windows = windows_from_types(r, types, r.get("sliding_window", 4096))
    sizes = (common["head_dim"], common["max_position_embeddings"])
    ropes = {kind: read_gemma3_rope(r, kind, *sizes) for kind in ("full_attention", "sliding_attention")}
    bias = r.get("attention_bias", False)
    common["activation"] = r.get("hidden_activation", "gelu_pytorch_tanh")
    common["attention_scale"] = r.get("query_pre_attn_scalar", 256) ** -0.5
    return DecoderSpec(
        **common,
        layers=tuple(LayerSpec(rope=ropes[t], sliding_window=w) for t, w in zip(types, windows, strict=True)),
        norm_offset=True,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        attention_soft_cap=r.get("attn_logit_softcapping"),
        logits_soft_cap=r.get("final_logit_softcapping"),
        embedding_scale=common["hidden_size"] ** 0.5,
        names=WeightNames(
            attention_post_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        ),
    )
