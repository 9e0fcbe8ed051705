"""Encoders (BERT, RoBERTa, XLM-R, ModernBERT), and heads on causal models."""

# Generated from nbs/models/families/encoders.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import replace
from typing import Any

from minivllm.models.mixers.encoder import EncoderAttentionSpec
from minivllm.models.mixers.mlp import GatedMLPSpec, MLPSpec
from minivllm.models.pooling import HeadLayer, PoolerSpec, read_labels
from minivllm.models.spec import (
    FAMILIES,
    ConfigReader,
    DecoderSpec,
    LayerSpec,
    Unpack,
    WeightNames,
    family,
    read_rope_of_type,
)


def pooler_for(
    r: ConfigReader, pooling: str, before: tuple[HeadLayer, ...] = (), last: HeadLayer | None = None
) -> PoolerSpec:
    """The pooler that the architecture's name implies.

    Args:
        pooling: how hidden states are pooled, for vectors and for texts to classify.
        before: layers of a text classifier before the last.
        last: its last layer, with any number of outputs; by default `classifier`.
    """
    r.skip("num_labels", "sentence_transformers", "sbert_ce_default_activation_function", "matryoshka_dimensions")
    per_token = r.family.endswith("ForTokenClassification")
    if not per_token and not r.family.endswith("ForSequenceClassification"):
        return PoolerSpec(pooling_type=pooling)
    about = read_labels(r.config)
    final = (last or HeadLayer("classifier", 0))._replace(outputs=len(about["labels"]))
    return PoolerSpec(pooling_type=pooling, head=(*before, final), per_token=per_token, **about)


def read_bert(r: ConfigReader, prefix: str, **fields: Any) -> DecoderSpec:
    """What BERT and RoBERTa share. fields: more of `DecoderSpec`."""
    hidden, heads, inner = (r.need(name) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    r.only("position_embedding_type", "absolute")
    r.only("is_decoder", False)
    r.only("add_cross_attention", False)
    mixer = EncoderAttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, qkv_bias=True, o_bias=True,
        q="attention.self.query", k="attention.self.key", v="attention.self.value", o="attention.output.dense",
    )  # fmt: skip
    mlp = MLPSpec(
        intermediate_size=inner, activation=r.get("hidden_act", "gelu"), bias=True,
        up="intermediate.dense", down="output.dense",
    )  # fmt: skip
    norms: dict[str, Any] = {"mixer_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
    names = WeightNames(
        embedding=f"{prefix}embeddings.word_embeddings.weight", positions=f"{prefix}embeddings.position_embeddings.weight",
        token_types=f"{prefix}embeddings.token_type_embeddings.weight",
        embedding_norm=f"{prefix}embeddings.LayerNorm.weight", final_norm=None, layer=f"{prefix}encoder.layer.{{}}.",
        prefix=prefix,
    )  # fmt: skip
    old = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}  # of TensorFlow's days
    offset, unused = fields.get("position_offset", 0), ("embeddings.position_ids", "pooler.", "cls.", "lm_head.")
    return DecoderSpec(
        family=r.family, vocab_size=r.need("vocab_size"), hidden_size=hidden, norm_eps=r.get("layer_norm_eps", 1e-12),
        max_position_embeddings=r.need("max_position_embeddings") - offset, layer_norm=True, norm_bias=True,
        layers=(LayerSpec(mixer=mixer, mlp=mlp, post_norm=True, **norms),) * r.need("num_hidden_layers"),
        token_types=r.get("type_vocab_size", 2), names=names, tie_word_embeddings=True,
        ignored=tuple(prefix + name for name in unused),
        unpack=tuple(Unpack(a, lambda t, b=b: {b: t}) for a, b in old.items()), **fields,  # type: ignore[misc]
    )  # fmt: skip


@family("BertForMaskedLM", "bert")
@family("BertForTokenClassification", "bert")
@family("BertForSequenceClassification", "bert")
@family("BertModel", "bert")
def bert(r: ConfigReader) -> DecoderSpec:
    """BERT, MiniLM and others that use its architecture."""
    r.get("tie_word_embeddings")
    before = (HeadLayer("bert.pooler.dense", r.need("hidden_size"), activation="tanh"),)
    pooler = pooler_for(r, "cls", before if r.family.endswith("ForSequenceClassification") else ())
    return read_bert(r, "bert.", pooler=pooler)


@family("XLMRobertaForMaskedLM", "xlm-roberta")
@family("XLMRobertaForTokenClassification", "xlm-roberta")
@family("XLMRobertaForSequenceClassification", "xlm-roberta")
@family("XLMRobertaModel", "xlm-roberta")
@family("RobertaForMaskedLM", "roberta")
@family("RobertaForTokenClassification", "roberta")
@family("RobertaForSequenceClassification", "roberta")
@family("RobertaModel", "roberta")
def roberta(r: ConfigReader) -> DecoderSpec:
    """RoBERTa, and XLM-RoBERTa for many languages."""
    r.get("tie_word_embeddings")
    text = r.family.endswith("ForSequenceClassification")
    before = (HeadLayer("classifier.dense", r.need("hidden_size"), activation="tanh"),) if text else ()
    last = HeadLayer("classifier.out_proj", 0) if text else None
    offset = r.get("pad_token_id", 1) + 1
    return read_bert(r, "roberta.", pooler=pooler_for(r, "cls", before, last), position_offset=offset)


def read_modernbert_layers(r: ConfigReader) -> tuple[LayerSpec, ...]:
    """Layers with a window and its own rotation, and one without at regular intervals."""
    count, every, hidden = r.need("num_hidden_layers"), r.get("global_attn_every_n_layers", 3), r.need("hidden_size")
    heads, bias = r.need("num_attention_heads"), r.get("attention_bias", False)
    longest = r.need("max_position_embeddings")
    types = r.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(count)]
    window = r.get("sliding_window") or r.get("local_attention", 128) // 2
    r.rename(rope_theta="global_rope_theta", rope_local_base_freq="local_rope_theta")
    r.get("local_attention")
    kinds = ("full_attention", "sliding_attention")
    ropes = {kind: read_rope_of_type(r, kind, hidden // heads, longest, 160000.0, 10000.0) for kind in kinds}
    mlp = GatedMLPSpec(
        intermediate_size=r.need("intermediate_size"), activation=r.get("hidden_activation", "gelu"),
        bias=r.get("mlp_bias", False), gate_up="mlp.Wi", down="mlp.Wo",
    )  # fmt: skip
    mixers = [
        EncoderAttentionSpec(
            num_heads=heads, num_kv_heads=heads, head_dim=hidden // heads, qkv_bias=bias, o_bias=bias,
            rope=ropes[kind], sliding_window=window if kind == "sliding_attention" else None,
            qkv="attn.Wqkv", o="attn.Wo",
        )
        for kind in types
    ]  # fmt: skip
    norms = ["attn_norm" if i else None for i in range(count)]
    return tuple(
        LayerSpec(mixer=m, mlp=mlp, mixer_norm=n, mlp_norm="mlp_norm") for m, n in zip(mixers, norms, strict=True)
    )


@family("ModernBertForMaskedLM", "modernbert")
@family("ModernBertForTokenClassification", "modernbert")
@family("ModernBertForSequenceClassification", "modernbert")
@family("ModernBertModel", "modernbert")
def modernbert(r: ConfigReader) -> DecoderSpec:
    """ModernBERT."""
    pooling, activation = r.get("classifier_pooling", "cls"), r.get("classifier_activation", "gelu")
    r.skip("cls_token_id", "sep_token_id", "decoder_bias", "tie_word_embeddings", "sparse_prediction")
    r.skip("sparse_pred_ignore_index", "initializer_cutoff_factor", "deterministic_flash_attn")
    r.skip("repad_logits_with_grad", "reference_compile")
    dense = HeadLayer("head.dense", r.need("hidden_size"), r.get("classifier_bias", False), activation, "head.norm")
    names = WeightNames(
        embedding="model.embeddings.tok_embeddings.weight", embedding_norm="model.embeddings.norm.weight",
        final_norm="model.final_norm.weight", prefix="model.",
    )  # fmt: skip
    return DecoderSpec(
        family=r.family, vocab_size=r.need("vocab_size"), hidden_size=r.need("hidden_size"),
        max_position_embeddings=r.need("max_position_embeddings"), norm_eps=r.get("norm_eps", 1e-5),
        layer_norm=True, norm_bias=r.get("norm_bias", False), layers=read_modernbert_layers(r), names=names,
        tie_word_embeddings=True, pooler=pooler_for(r, pooling, (dense,)), ignored=("model.head.", "model.decoder."),
    )  # fmt: skip


_CAUSAL = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "GPT2")


def with_head(r: ConfigReader) -> DecoderSpec:
    """A causal family's layers, with a classifier's head or none."""
    base = next(name for name in _CAUSAL if r.family.startswith(name))
    spec = FAMILIES["GPT2LMHeadModel" if base == "GPT2" else f"{base}ForCausalLM"](r)
    token = r.family.endswith("ForTokenClassification")
    head = HeadLayer("classifier" if base == "GPT2" and token else "score", 0, bias=token)
    names = replace(spec.names, prefix=spec.names.embedding.partition(".")[0] + ".")
    return replace(spec, names=names, tie_word_embeddings=True, pooler=pooler_for(r, "last", (), head))


for _base in _CAUSAL:
    for _kind in ("Model", "ForSequenceClassification", "ForTokenClassification"):
        FAMILIES[_base + _kind] = with_head
