"""DecoderSpec, and model families that build it from a Hugging Face config."""

# Generated from nbs/models/spec.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minivllm.attention.state import LayerCacheSpec
from minivllm.core.config import KVCacheSpec
from minivllm.models.linear.grouped import QuantizedWeight
from minivllm.models.mixers.attention import SelfAttentionSpec
from minivllm.models.mixers.base import MixerSpec, TokenMixerSpec
from minivllm.models.mixers.mlp import GatedMLPSpec
from minivllm.models.parallel import Share
from minivllm.models.pooling import PoolerSpec
from minivllm.models.rope import RopeSpec, rope_from_parameters

__all__ = [
    "FAMILIES", "GEMMA_NORMS", "ConfigReader", "DecoderSpec", "Family", "LayerSpec", "MTPSpec", "MediaSpec",
    "NamedWeight", "Unpack", "WeightNames", "family", "qwen2", "read_attention", "read_common",
    "read_layer_types", "read_mlp", "read_rope", "read_rope_of_type", "read_window_per_layer",
    "spec_from_config", "windowed_layers", "windows_from_types",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer as a value: two blocks, each after a norm and added to the residual stream.

    Attributes:
        mixer: parameters of the block in which tokens see each other.
        mlp: parameters of the block in which each token is by itself.
        mixer_norm, mlp_norm: names, after the layer's prefix, of the norms before the blocks; None for none.
        mixer_post_norm, mlp_post_norm: names of the norms after them; None for none.
        parallel: both blocks read the stream as it comes into the layer, and their sum is added to it. Without a
            `mlp_norm` they share the norm.
        residual_scale: factor on what is added to the stream; not together with post norms or `parallel`.
        post_norm: the norms come after what each block gives was added to the stream (Vaswani et al., 2017).

    Raises:
        ValueError: fields that no layer implements together.
    """

    mixer: TokenMixerSpec
    mlp: MixerSpec
    mixer_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    mixer_post_norm: str | None = None
    mlp_post_norm: str | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    post_norm: bool = False

    def __post_init__(self) -> None:
        post_norms, scaled = self.mixer_post_norm or self.mlp_post_norm, self.residual_scale != 1.0
        if self.post_norm and (self.parallel or scaled or post_norms):
            raise ValueError("a layer with post_norm is not parallel, and has no residual_scale and no further norms")
        if self.parallel and (scaled or post_norms):
            raise ValueError("a layer cannot be parallel and have a residual_scale or post norms")
        if scaled and post_norms:
            raise ValueError(f"a layer cannot have residual_scale={self.residual_scale} and post norms")

    def norms(self) -> dict[str, str]:
        """The norms of the layer: {attribute: name in a checkpoint}."""
        names = ("mixer_norm", "mixer_post_norm", "mlp_norm", "mlp_post_norm")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """Names in a checkpoint of the tensors outside of the layers, and the prefix of a layer's tensors, `{}` for its number.

    Attributes:
        positions: learned position embeddings; None for none.
        prefix: what names begin with in some checkpoints of a family, and not in others.
        token_types: the embeddings that tell a first text from a second; None for none.
        embedding_norm: a norm of the embeddings; None for none.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str | None = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    positions: str | None = None
    prefix: str = ""
    token_types: str | None = None
    embedding_norm: str | None = None


@dataclass(frozen=True)
class Unpack:
    """A tensor of a checkpoint that is kept there in another form than here.

    Attributes:
        suffix: what its name ends with.
        parts: gives the tensors that it becomes, by the suffixes that replace this one in their names.
        rows: it only reorders the rows (outputs), so the `B` of an adapter must be reordered by it too.
    """

    suffix: str
    parts: Callable[[Tensor], Mapping[str, Tensor]]
    rows: bool = False


@dataclass(frozen=True, kw_only=True)
class MTPSpec:
    """A layer that predicts one token more (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Attributes:
        spec: the layer's.
        layer: what the names of its tensors begin with in a checkpoint.
        embedding_norm, hidden_norm, fuse, final_norm: names of the other tensors: norms of a token's embedding and of the state that
            led to it, the matrix [H, 2 H] that makes one of both, the norm after the layer.
        count: how many such layers a checkpoint holds.
        passes_normed: after its own guess the layer reads its state as it is after the final norm; else as it is before.
        skips_first: the token after the first place is not read.
    """

    spec: LayerSpec
    layer: str
    embedding_norm: str
    hidden_norm: str
    fuse: str
    final_norm: str
    count: int = 1
    passes_normed: bool = False
    skips_first: bool = False


@dataclass(frozen=True, kw_only=True)
class MediaSpec:
    """What surrounds the decoder of a model that reads pictures, or hears.

    Attributes:
        config: the whole Hugging Face config.
        token_id: id of the placeholders that the embeddings of a picture or clip replace.
        modality: `image` or `audio`.
        whole: a picture's tokens see each other in both directions, so they must be computed in one step.
    """

    config: dict[str, Any]
    token_id: int
    modality: str = "image"
    whole: bool = False


NamedWeight = tuple[str, Tensor | QuantizedWeight]


def _rows(rule: Unpack, weight: QuantizedWeight) -> dict[str, QuantizedWeight]:
    """Apply a rule that takes or reorders a tensor's rows to a quantized weight, by applying it to the rows' numbers."""
    parts = rule.parts(torch.arange(weight.shape[0])[:, None])
    if not all(rows.dim() == 2 and rows.shape[1] == 1 for rows in parts.values()):
        raise ValueError("it is quantized, and cannot be turned")
    return {name: weight[rows.flatten()] for name, rows in parts.items()}


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Everything that `Decoder` needs to know to build itself.

    Attributes:
        family: name of the function that made it, for messages.
        vocab_size, hidden_size: the usual sizes.
        layers: one per layer.
        max_position_embeddings: as the configuration says.
        norm_eps: the epsilon of every norm.
        norm_offset: norms multiply by `1 + weight`, in float32 (Gemma).
        layer_norm, norm_bias: norms are layer norms, with a bias or without; else RMS norms.
        position_offset: rows of the learned position embeddings, if there are any, before that of position 0.
        logits_scale: factor on logits.
        logits_soft_cap: `cap * tanh(x / cap)` on logits; None for none.
        embedding_scale: factor on the embeddings.
        tie_word_embeddings: the output layer is the embedding.
        names: names of the checkpoint's tensors outside of the layers.
        unpack: rules for its tensors that have another form than `weight_shapes` says.
        media: the encoder and its placeholders; None for a model of text alone.
        rename: from a checkpoint's name of a tensor to ours, None for one that is not the decoder's; None if they are equal.
        token_types: rows of the token type embeddings. A token of type t has the id `t * vocab_size + id`.
        pooler: what follows the hidden states of a model that predicts no tokens; None for one that does.
        ignored: beginnings of the names of tensors that a checkpoint may hold, and that are not used.
        mtp: the layer that a checkpoint may hold besides the model's own to draft tokens with; None for none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: int
    norm_eps: float
    norm_offset: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    position_offset: int = 0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    tie_word_embeddings: bool = False
    names: WeightNames = field(default_factory=WeightNames)
    unpack: tuple[Unpack, ...] = field(default=(), compare=False)
    mtp: MTPSpec | None = None
    media: MediaSpec | None = field(default=None, compare=False)
    rename: Callable[[str], str | None] | None = field(default=None, compare=False)
    ignored: tuple[str, ...] = ()
    token_types: int = 0
    pooler: PoolerSpec | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def ropes(self) -> list[RopeSpec | None]:
        """The different rotations of the layers, in the order in which they first occur."""
        return list(dict.fromkeys(layer.mixer.rope for layer in self.layers))

    @property
    def max_model_len(self) -> int:
        """Longest sequence that every layer's rotation was meant for."""
        return min((rope.max_length for rope in self.ropes if rope is not None), default=self.max_position_embeddings)

    def _mixers(self, share: Share | None) -> list[TokenMixerSpec]:
        """The token mixers; of one rank, if a share is given. Raises ValueError if they cannot be split so."""
        if share is None:
            return [layer.mixer for layer in self.layers]
        return [layer.mixer.split(share).spec for layer in self.layers]

    def padding(self, share: Share) -> str:
        """In words, what is padded with zeros so that ranks have equal parts, and how much that adds; empty for nothing."""
        found: dict[str, tuple[int, int]] = {}
        for layer in self.layers:
            found |= layer.mixer.split(share).padded() | layer.mlp.split(share).padded()
        return ", ".join(f"{count} {what} padded to {n} (+{n / count - 1:.0%})" for what, (count, n) in found.items())

    @property
    def whole_prompts(self) -> bool:
        """Whether attention goes both ways."""
        return self.layers[0].mixer.kv_cache_spec(1, 1).kind == "encoder_only"

    def attention_specs(
        self, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, share: Share | None = None
    ) -> list[LayerCacheSpec]:
        """What each layer asks of the attention backend. kv_dtype: see `AttentionSpec`. share: then that of one rank."""
        return [mixer.attention_spec(block_size, dtype, kv_dtype) for mixer in self._mixers(share)]

    def kv_cache_specs(self, block_size: int, dtype_bytes: int = 4, share: Share | None = None) -> list[KVCacheSpec]:
        """What each layer asks of the KV cache manager. `dtype_bytes` is the size of one stored number. share: then that of one rank."""
        return [mixer.kv_cache_spec(block_size, dtype_bytes) for mixer in self._mixers(share)]

    def stage_shapes(self, layers: range, share: Share | None = None) -> dict[str, tuple[int, ...]]:
        """`weight_shapes` of the pipeline stage that has these layers."""
        n, shapes = self.names, self.weight_shapes(share)
        others = tuple(n.layer.format(i) for i in range(self.num_layers) if i not in layers)
        first, last = layers.start == 0, layers.stop == self.num_layers
        if not first and not (last and self.tie_word_embeddings):
            others += (n.embedding,)
        if not last:
            others += (n.head, *([] if n.final_norm is None else [n.final_norm.removesuffix("weight")]))
        return {name: shape for name, shape in shapes.items() if not name.startswith(others)}

    def weight_shapes(self, share: Share | None = None) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint of this model holds; with a share, of what one rank keeps of it."""
        n, hidden = self.names, self.hidden_size
        vocabulary = (self.vocab_size if share is None else -(-self.vocab_size // share.size), hidden)
        shapes: dict[str, tuple[int, ...]] = {n.embedding: vocabulary}
        if n.positions is not None:
            shapes[n.positions] = (self.max_position_embeddings + self.position_offset, hidden)
        if n.token_types is not None:
            shapes[n.token_types] = (self.token_types, hidden)
        kinds = ("weight", "bias") if self.norm_bias else ("weight",)
        for norm in filter(None, (n.embedding_norm, n.final_norm)):
            shapes |= {f"{norm.removesuffix('weight')}{kind}": (hidden,) for kind in kinds}
        if self.pooler is not None:
            shapes |= self.pooler.weight_shapes(hidden, self.norm_bias)
        elif not self.tie_word_embeddings:
            shapes[n.head] = vocabulary
        for i, layer in enumerate(self.layers):
            norms = {f"{name}.{kind}": (hidden,) for name in layer.norms().values() for kind in kinds}
            blocks = (b if share is None else b.split(share).spec for b in (layer.mixer, layer.mlp))
            for part in (*(block.weight_shapes(hidden) for block in blocks), norms):
                shapes |= {n.layer.format(i) + name: shape for name, shape in part.items()}
        return shapes

    def full_name(self, name: str) -> str | None:
        """A checkpoint's name of a tensor with the prefix that it may lack; None for one that is not used."""
        if self.rename is not None:
            return self.rename(name)
        heads = () if self.pooler is None else self.pooler.weight_shapes(1, True)
        if name == self.names.head or name in heads:
            return name if self.pooler is None or name in heads else None
        full = name if name.startswith(self.names.prefix) else self.names.prefix + name
        return full if full in heads or not full.startswith(self.ignored) else None

    def unpacked(self, weights: Iterable[NamedWeight]) -> Iterator[NamedWeight]:
        """A checkpoint's tensors in the form of `weight_shapes`. Of a quantized weight, rows can be taken and reordered.

        Raises:
            ValueError: a tensor cannot be taken apart; names it.
        """
        for given, tensor in weights:
            name = self.full_name(given)
            if name is None:
                continue
            rule = next((rule for rule in self.unpack if name.endswith(rule.suffix)), None)
            if rule is None:
                yield name, tensor
                continue
            try:
                parts = _rows(rule, tensor) if isinstance(tensor, QuantizedWeight) else rule.parts(tensor)
            except (RuntimeError, ValueError, IndexError) as error:
                shape = tuple(getattr(tensor, "shape", ()))
                raise ValueError(
                    f"{self.family}: tensor {name!r} of shape {shape} cannot be taken apart: {error}"
                ) from None
            yield from ((name.removesuffix(rule.suffix) + part, value) for part, value in parts.items())

    def mtp_layer(self) -> "DecoderSpec":
        """The layer that drafts tokens as a decoder by itself, without its own embedding and output layer.

        Raises:
            ValueError: there is none, or there are several.
        """
        if self.mtp is None or self.mtp.count != 1:
            has = "no layer" if self.mtp is None else f"{self.mtp.count} layers"
            raise ValueError(f"{self.family}: a checkpoint of this model has {has} to draft with; it must be one")
        names = WeightNames(embedding="-", final_norm=self.mtp.final_norm, head="-.head", layer=self.mtp.layer)
        alone = {"vocab_size": 1, "tie_word_embeddings": True, "ignored": (), "mtp": None, "rename": None}
        return replace(self, layers=(self.mtp.spec,), names=names, **alone)  # type: ignore[arg-type]

    def num_parameters(self, share: Share | None = None) -> int:
        """Numbers in a checkpoint; a tied output layer counts once. share: of one rank."""
        return sum(math.prod(shape) for shape in self.weight_shapes(share).values())


_NEUTRAL_FIELDS = """
    _attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern architectures
    attention_dropout attention_probs_dropout_prob activation_dropout attn_implementation attn_pdrop auto_map aux_loss_alpha bos_token_id cache_implementation do_sample dtype early_stopping embd_pdrop
    eos_token_id ep_size finetuning_task hidden_dropout hidden_dropout_prob id2label initializer_range is_llama_config keys_to_ignore_at_inference label2id length_penalty
    layerdrop max_length max_new_tokens min_length model_type name_or_path num_beam_groups num_beams num_return_sequences dropout
    embedding_dropout residual_dropout summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj classifier_dropout init_std
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type repetition_penalty resid_pdrop
    return_dict router_aux_loss_coef router_jitter_noise seq_aux
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
        self._names: dict[str, str] = {}
        self._defaults: dict[str, Any] = {}

    def rename(self, **names: str) -> None:
        """Say what the family's configs call a field: `usual_name="its_name"`."""
        self._names |= names

    def assume(self, **values: Any) -> None:
        """Say what the family's fields are if a config does not have them."""
        self._defaults |= values

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value (which may be None, if the config says so), or `default` if there is no such field."""
        if name not in self.config:
            name = self._names.get(name, name)
        self._taken.add(name)
        return self.config.get(name, self._defaults.get(name, default))

    def need(self, name: str) -> Any:
        """The field's value.

        Raises:
            ValueError: there is none.
        """
        value = self.get(name)
        if value is None:
            raise ValueError(f"the config has no {name!r}")
        return value

    def only(self, name: str, *allowed: Any) -> Any:
        """The field's value, which must be one of `allowed`, the first if there is no such field.

        Raises:
            ValueError: it is another; names it.
        """
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"config field {name}={value!r} is not supported; supported: {', '.join(map(repr, allowed))}"
            )
        return value

    def skip(self, *names: str) -> None:
        """Read fields that change nothing here: initialisation, training, repeats of other fields."""
        for name in names:
            self.get(name)

    def finish(self) -> None:
        """Refuse fields that were not read and are neither neutral nor switched off (null, false, 0 or empty).

        Raises:
            ValueError: names the field and its value.
        """
        for name, value in self.config.items():
            if name not in self._taken and name not in _NEUTRAL and value:
                raise ValueError(
                    f"config field {name}={value!r} is not supported;"
                    f" override it with None if the model is known to work without it"
                )


Family = Callable[[ConfigReader], DecoderSpec]
FAMILIES: dict[str, Family] = {}
"""From the name in a config's `architectures` to the function that makes the spec."""
_ARCHITECTURE_OF: dict[str, str] = {}


def family(architecture: str, model_type: str) -> Callable[[Family], Family]:
    """Register a family under its architecture, and the `model_type` of configs that name none. A decorator."""

    def register(make: Family) -> Family:
        FAMILIES[architecture], _ARCHITECTURE_OF[model_type] = make, architecture
        return make

    return register


def spec_from_config(hf_config: dict[str, Any]) -> DecoderSpec:
    """The spec of the model that a `config.json` describes, of a family that is registered.

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
    try:
        spec = FAMILIES[names[0]](reader)
        reader.finish()
    except ValueError as error:
        raise ValueError(f"{names[0]}: {error}") from None
    return spec


def read_rope(
    r: ConfigReader,
    head_dim: int,
    max_position: int,
    default_theta: float = 10000.0,
    part: float | None = None,
    default: dict[str, Any] | None = None,
) -> RopeSpec:
    """The rotation, from `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta` (before).

    part: share of a head that is rotated if the config has no such field, in a family where it may be less than all.
    default: parameters if the config has neither of the first two.
    """
    parameters, old = r.get("rope_parameters"), r.get("rope_scaling")
    parameters, theta = old or parameters or default or {}, r.get("rope_theta")
    if part is not None:
        parameters = dict(parameters)
        given = parameters.pop("partial_rotary_factor", None), r.get("partial_rotary_factor"), part
        head_dim = int(head_dim * next(factor for factor in given if factor is not None))
    return rope_from_parameters(
        parameters,
        theta=default_theta if theta is None else theta,
        dim=head_dim,
        max_position=max_position,
        original_max_position=r.get("original_max_position_embeddings"),
    )


def read_common(
    r: ConfigReader, *, tied: bool = False, eps: float = 1e-6, eps_name: str | None = "rms_norm_eps"
) -> dict[str, Any]:
    """The fields that all families share, under the names of `DecoderSpec`.

    Args:
        tied, eps: if the config has no such field.
        eps_name: name of the field with the norms' epsilon; None if the family has none.
    """
    return {
        "family": r.family,
        "vocab_size": r.need("vocab_size"),
        "hidden_size": r.need("hidden_size"),
        "max_position_embeddings": r.need("max_position_embeddings"),
        "norm_eps": eps if eps_name is None else r.get(eps_name, eps),
        "tie_word_embeddings": r.get("tie_word_embeddings", tied),
    }


def read_attention(
    r: ConfigReader,
    *,
    head_dim: int | None = None,
    num_kv_heads: int | None = None,
    theta: float = 10000.0,
    part: float | None = None,
    default_rope: dict[str, Any] | None = None,
    **fields: Any,
) -> SelfAttentionSpec:
    """Self-attention with one rotation for all layers.

    Args:
        head_dim, num_kv_heads, theta, part: what transformers assumes if the config has no such field; None for the rule
            (`hidden_size / num_attention_heads`, and as many as query heads).
        default_rope: see `read_rope`.
        fields: more of `SelfAttentionSpec`; a `rope` among them is taken instead of the one in the config.
    """
    num_heads = r.need("num_attention_heads")
    dim = r.get("head_dim", head_dim) or r.need("hidden_size") // num_heads
    if "rope" not in fields:
        fields["rope"] = read_rope(r, dim, r.need("max_position_embeddings"), theta, part, default_rope)
    kv_heads = r.get("num_key_value_heads", num_kv_heads) or num_heads
    return SelfAttentionSpec(num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim, **fields)


def read_mlp(r: ConfigReader, **fields: Any) -> GatedMLPSpec:
    """The gated MLP. fields: more of `GatedMLPSpec`."""
    fields.setdefault("activation", r.get("hidden_act", "silu"))
    fields.setdefault("intermediate_size", r.need("intermediate_size"))
    return GatedMLPSpec(**fields)


def read_window_per_layer(r: ConfigReader) -> list[int | None]:
    """Qwen's rule: `layer_types`, or a window from layer `max_window_layers` on; nothing without `use_sliding_window`."""
    count = r.need("num_hidden_layers")
    start, types = r.get("max_window_layers", 28), r.get("layer_types")
    window, used = r.get("sliding_window", 4096), r.get("use_sliding_window", False)
    window = window if used else None
    if types is None:
        return [window if i >= start else None for i in range(count)]
    return windows_from_types(r, types, window)


def read_layer_types(r: ConfigReader, every: int, usual: str = "sliding_attention") -> list[str]:
    """`layer_types` of the config; without it, `full_attention` for each `every`-th layer and `usual` for the others."""
    given, count = r.get("layer_types"), r.need("num_hidden_layers")
    return given or [usual if (i + 1) % every else "full_attention" for i in range(count)]


def windows_from_types(r: ConfigReader, types: list[str], window: int | None) -> list[int | None]:
    """A window per layer, from the config's `layer_types`.

    Raises:
        ValueError: unknown type, wrong number of them, or a sliding layer without a window.
    """
    if len(types) != r.need("num_hidden_layers"):
        raise ValueError(f"{len(types)} layer_types for {r.need('num_hidden_layers')} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer type {kind!r} is not supported; full_attention, sliding_attention are")
    if "sliding_attention" in types and window is None:
        raise ValueError("layer_types has sliding_attention, but there is no sliding_window")
    return [window if kind == "sliding_attention" else None for kind in types]


@family("LlamaForCausalLM", "llama")
def llama(r: ConfigReader) -> DecoderSpec:
    """Llama 1 to 3, SmolLM2 and others that use their architecture."""
    bias = r.get("attention_bias", False)
    attention = read_attention(r, qkv_bias=bias, o_bias=bias)
    layer = LayerSpec(mixer=attention, mlp=read_mlp(r, bias=r.get("mlp_bias", False)))
    return DecoderSpec(**read_common(r), layers=(layer,) * r.need("num_hidden_layers"))


@family("MistralForCausalLM", "mistral")
def mistral(r: ConfigReader) -> DecoderSpec:
    """Mistral 7B: a window on every layer."""
    attention = read_attention(r, num_kv_heads=8, sliding_window=r.get("sliding_window", 4096))
    layer = LayerSpec(mixer=attention, mlp=read_mlp(r))
    return DecoderSpec(**read_common(r), layers=(layer,) * r.need("num_hidden_layers"))


def windowed_layers(attention: SelfAttentionSpec, mlp: MixerSpec, windows: list[int | None]) -> tuple[LayerSpec, ...]:
    """Layers that differ in nothing but their window."""
    return tuple(LayerSpec(mixer=replace(attention, sliding_window=window), mlp=mlp) for window in windows)


@family("Qwen2ForCausalLM", "qwen2")
def qwen2(r: ConfigReader) -> DecoderSpec:
    """Qwen 2 and 2.5: a bias on queries, keys and values."""
    attention = read_attention(r, num_kv_heads=32, qkv_bias=True)
    return DecoderSpec(**read_common(r), layers=windowed_layers(attention, read_mlp(r), read_window_per_layer(r)))


@family("Qwen3ForCausalLM", "qwen3")
def qwen3(r: ConfigReader) -> DecoderSpec:
    """Qwen 3: no bias, but a norm on every query and key head."""
    bias = r.get("attention_bias", False)
    attention = read_attention(r, head_dim=128, num_kv_heads=32, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return DecoderSpec(**read_common(r), layers=windowed_layers(attention, read_mlp(r), read_window_per_layer(r)))


def read_rope_of_type(
    r: ConfigReader, kind: str, head_dim: int, max_position: int, theta: float, local_theta: float | None
) -> RopeSpec:
    """Gemma 3 has a rotation for global layers and one for local ones; old files stretch the global one only.

    theta, local_theta: if the config has no such fields; None for the same.
    """
    parameters = (r.get("rope_parameters") or {}).get(kind) or {}
    global_theta = r.get("rope_theta", theta)
    local_theta = global_theta if local_theta is None else r.get("rope_local_base_freq", local_theta)
    scaling = r.get("rope_scaling") or {}
    if kind == "sliding_attention":
        return rope_from_parameters(parameters, theta=local_theta, dim=head_dim, max_position=max_position)
    return rope_from_parameters(parameters | scaling, theta=global_theta, dim=head_dim, max_position=max_position)


GEMMA_NORMS: dict[str, Any] = {
    "mlp_norm": "pre_feedforward_layernorm",
    "mixer_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


@family("Gemma3ForCausalLM", "gemma3_text")
def gemma3(r: ConfigReader) -> DecoderSpec:
    """Gemma 3, text only: norms before and after, `1 + weight`, local layers with another rotation."""
    common = read_common(r, tied=True)
    bias, scale = r.get("attention_bias", False), r.get("query_pre_attn_scalar", 256) ** -0.5
    sizes: dict[str, Any] = {
        "head_dim": 256,
        "num_kv_heads": 4,
        "scale": scale,
        "soft_cap": r.get("attn_logit_softcapping"),
    }
    attention = read_attention(r, rope=None, qkv_bias=bias, o_bias=bias, qk_norm=True, **sizes)
    types = read_layer_types(r, r.get("sliding_window_pattern", 6))
    lengths = (attention.head_dim, common["max_position_embeddings"])
    ropes = {kind: read_rope_of_type(r, kind, *lengths, 1e6, 1e4) for kind in ("full_attention", "sliding_attention")}
    mlp = read_mlp(r, activation=r.get("hidden_activation", "gelu_pytorch_tanh"))
    windows = zip(types, windows_from_types(r, types, r.get("sliding_window", 4096)), strict=True)
    layers = [replace(attention, rope=ropes[kind], sliding_window=window) for kind, window in windows]
    return DecoderSpec(
        **common,
        layers=tuple(LayerSpec(mixer=mixer, mlp=mlp, **GEMMA_NORMS) for mixer in layers),
        norm_offset=True,
        logits_soft_cap=r.get("final_logit_softcapping"),
        embedding_scale=common["hidden_size"] ** 0.5,
    )
