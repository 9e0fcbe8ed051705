"""GGUF reader: metadata, dequantization, conversion to a Hugging Face folder."""

# Generated from nbs/models/gguf.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

__all__ = [
    "GGUFError", "config_from_gguf", "convert_gguf", "llama3_factors", "merges_from_scores", "read_gguf",
    "rope_scaling", "split_parts", "token_ids", "tokenizer_from_gguf", "write_safetensors",
]  # fmt: skip


class GGUFError(ValueError):
    """A GGUF file that we cannot turn into a Hugging Face folder; the message names the key or the tensor."""


@dataclass(frozen=True)
class GGUFFile:
    """One GGUF file, opened and memory-mapped.

    `metadata` maps a key (`llama.block_count`) to a Python value: int, float, bool, str or a list of them.
    `tensors` maps a tensor name (`blk.0.attn_q.weight`) to the reader's record of it; nothing is decoded yet.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value `key`, or `{architecture}.{key}`: most keys carry the architecture as a prefix."""
        return self.metadata.get(f"{self.architecture}.{key}", self.metadata.get(key, default))

    def need(self, key: str) -> Any:
        """Like `get`, but a missing key is an error that names it."""
        value = self.get(key)
        if value is None:
            raise GGUFError(f"{self.path}: the metadata key {self.architecture}.{key} is missing")
        return value


_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


def split_parts(path: Path) -> list[Path]:
    """All parts of a model that llama.cpp has split into several files, given any of them; a whole file is its only part.

    Raises:
        GGUFError: parts are missing; names them.
    """
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    stem, count = named.groups()
    parts = [path.with_name(f"{stem}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise GGUFError(f"{path} is one of {len(parts)} parts, of which {', '.join(missing[:5])} are not there")
    return parts


def read_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file, or any part of one that was split. Raises `GGUFError` when it is not one, when parts of it are missing or do not belong
    together, or when it has big-endian numbers."""
    parts = [_read_part(part) for part in split_parts(Path(path))]
    first, tensors = parts[0], dict[str, Any]()
    if "general.architecture" not in first.metadata:
        raise GGUFError(f"{path}: the metadata key general.architecture is missing")
    for number, part in enumerate(parts):
        place = part.metadata.get("split.no", 0), part.metadata.get("split.count", 1)
        if place != (number, len(parts)):
            raise GGUFError(
                f"{part.path}: split.no and split.count are {place}, which a file of this name does not have: the parts of a model are"
                " called NAME-00001-of-00003.gguf and so on"
            )
        for name, tensor in part.tensors.items():
            if tensors.setdefault(name, tensor) is not tensor:
                raise GGUFError(f"{part.path}: another part holds the tensor {name} too")
    if len(tensors) != (total := first.metadata.get("split.tensors.count", len(tensors))):
        raise GGUFError(f"{path}: the parts hold {len(tensors)} tensors, not the {total} of split.tensors.count")
    return GGUFFile(first.path, first.metadata, tensors)


def _read_part(path: Path) -> GGUFFile:
    from gguf import GGUFEndian, GGUFReader

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OverflowError) as error:
        raise GGUFError(f"{path} is not a readable GGUF file: {error}") from error
    if reader.endianess is not GGUFEndian.LITTLE:
        raise GGUFError(
            f"{path} holds big-endian numbers; that is not implemented, convert it with gguf-convert-endian"
        )
    metadata = {key: _plain(field.contents()) for key, field in reader.fields.items()}
    return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def _plain(value: Any) -> Any:
    """GGUF stores 32-bit floats: read 9.9999997e-06 as the number that was meant, 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_LAYER_TENSORS = LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # not a weight: the Llama 3 stretching of the rotary frequencies


def hf_name(name: str, layer_tensors: dict[str, str] = LAYER_TENSORS) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; `GGUFError` for a name we do not know."""
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer_tensors and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{layer_tensors[parts[2]]}.{parts[3]}"
    raise GGUFError(f"the GGUF tensor {name!r} has no place in a model that we know")


@dataclass(frozen=True)
class Family:
    """How one GGUF architecture maps to one Hugging Face model type."""

    model_type: str
    hf_class: str
    permuted: bool = False  # rotary rows of q and k are interleaved in the file
    biases: tuple[tuple[str, str], ...] = ()  # config fields that say whether a tensor exists
    layer_tensors: dict[str, str] = field(default_factory=lambda: LAYER_TENSORS)
    norm_shift: float = 0.0  # added to every norm weight when the file was made
    merges_by_id: bool = False  # a SentencePiece vocabulary whose order, not its scores, says what is merged first
    keys: frozenset[str] = frozenset()  # metadata of this architecture alone
    config: Callable[[GGUFFile], dict[str, Any]] = lambda gguf: {"hidden_act": "silu"}


def gemma3_config(gguf: GGUFFile) -> dict[str, Any]:
    """What Gemma 3 adds: local layers with a window and another rotation, every sixth layer global."""
    pattern, layers = gguf.get("attention.sliding_window_pattern", 6), gguf.need("block_count")
    local = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in range(layers)]
    # Gemma 3 27B alone scales its scores by the width per head instead of the size of a head; llama.cpp knows it by its depth.
    per_head = gguf.need("embedding_length") // gguf.need("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if layers == 62 else gguf.need("attention.key_length"),
        "sliding_window": gguf.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in local],
        "rope_local_base_freq": gguf.get("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


KNOWN_KEYS = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "expert_count",
    "expert_used_count", "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type", "vocab_size",
}  # fmt: skip
ATTENTION_BIAS = ("attention_bias", "blk.0.attn_q.bias")
FAMILIES = {
    "llama": Family(
        "llama", "LlamaForCausalLM", permuted=True, biases=(ATTENTION_BIAS, ("mlp_bias", "blk.0.ffn_up.bias"))
    ),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", biases=(ATTENTION_BIAS,)),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        layer_tensors=GEMMA3_LAYER_TENSORS,
        norm_shift=1.0,
        merges_by_id=True,
        keys=frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}),
        config=gemma3_config,
    ),
}


def family_of(gguf: GGUFFile) -> Family:
    """The `Family` of a file, or an error that names its architecture and the ones we know."""
    if gguf.architecture not in FAMILIES:
        raise GGUFError(
            f"{gguf.path}: the GGUF architecture {gguf.architecture!r} is not implemented; known: {', '.join(FAMILIES)}"
        )
    if gguf.get("expert_count", 0):
        raise GGUFError(f"{gguf.path}: mixtures of experts ({gguf.get('expert_count')} experts) are not implemented")
    family, prefix = FAMILIES[gguf.architecture], gguf.architecture + "."
    for key, value in gguf.metadata.items():
        if key.startswith(prefix) and key.removeprefix(prefix) not in KNOWN_KEYS | family.keys:
            raise GGUFError(f"{gguf.path}: the metadata key {key} = {value!r} is not implemented")
    return family


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rotary rows of a q or k projection (or bias).

    `rows`: `[num_heads * head_dim, ...]`. Hugging Face rotates element i of a head with element i + head_dim/2, llama.cpp
    with element i + 1, so its converter stores the two halves of each head interleaved.
    """
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


BLOCK_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "Q4_K", "Q5_K", "Q6_K")
"""Types of blocks that `models.quantization.blocks` can multiply by."""


def block_type(name: str) -> str | None:
    """The type that the name of a tensor ends with if it holds blocks, else None."""
    return name.rpartition(".")[2] if name.rpartition(".")[2] in BLOCK_TYPES else None


def stored_names(gguf: GGUFFile, keep_blocks: bool) -> dict[str, str]:
    """Maps each weight's name in the file to its name in the folder, which ends with the block type if blocks are kept."""
    names = {}
    for name, tensor in gguf.tensors.items():
        if name != ROPE_FACTORS:
            kept = keep_blocks and tensor.tensor_type.name in BLOCK_TYPES
            names[name] = hf_name(name, family_of(gguf).layer_tensors)
            names[name] += f".{tensor.tensor_type.name}" if kept else ""
    return names


def iter_tensors(gguf: GGUFFile, keep_blocks: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """Yield `(stored name, float32 array)` for every weight, decoded one at a time, in the order of the file.

    keep_blocks: those of `BLOCK_TYPES` as they are, uint8 [outputs, bytes of a row].
    """
    from gguf.quants import dequantize

    family = family_of(gguf)
    heads = {"attn_q": gguf.need("attention.head_count"), "attn_k": _num_kv_heads(gguf)}
    for name, stored in stored_names(gguf, keep_blocks).items():
        tensor = gguf.tensors[name]
        try:
            array = tensor.data if block_type(stored) else dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise GGUFError(f"{gguf.path}: tensor {name}: type {tensor.tensor_type.name} is not implemented") from error
        kind = name.split(".")[-2]
        if family.permuted and kind in heads:
            array = unpermute(array, heads[kind])
        if kind.endswith("norm") and family.norm_shift:
            array = array - np.float32(family.norm_shift)
        yield stored, np.ascontiguousarray(array, dtype=np.uint8 if block_type(stored) else np.float32)


def _num_kv_heads(gguf: GGUFFile) -> int:
    return gguf.get("attention.head_count_kv") or gguf.need("attention.head_count")


def config_from_gguf(gguf: GGUFFile) -> dict[str, Any]:
    """The `config.json` of a Hugging Face folder, from a GGUF file's metadata and tensor names."""
    family = family_of(gguf)
    hidden, heads = gguf.need("embedding_length"), gguf.need("attention.head_count")
    head_dim = gguf.get("attention.key_length", hidden // heads)
    _check_heads(gguf, head_dim)
    if "token_embd.weight" not in gguf.tensors:
        raise GGUFError(f"{gguf.path}: the tensor token_embd.weight is missing")
    config = {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        "vocab_size": int(gguf.tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": gguf.need("feed_forward_length"),
        "num_hidden_layers": gguf.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _num_kv_heads(gguf),
        "head_dim": head_dim,
        "max_position_embeddings": gguf.need("context_length"),
        "rms_norm_eps": gguf.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.get("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(gguf, head_dim),
        **{field: tensor in gguf.tensors for field, tensor in family.biases},
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": "float32",
    }
    return config | family.config(gguf) | token_ids(gguf)


def _check_heads(gguf: GGUFFile, head_dim: int) -> None:
    """Refuse shapes that `config.json` could not say: uneven heads, or rotation of a part of each head."""
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(gguf.get(key), (list, tuple)):
            raise GGUFError(f"{gguf.path}: {key} differs from layer to layer; that is not implemented")
    for key in ("attention.value_length", "rope.dimension_count"):
        if gguf.get(key, head_dim) != head_dim:
            raise GGUFError(f"{gguf.path}: {key} is {gguf.get(key)} but a head has {head_dim}; that is not implemented")


def token_ids(gguf: GGUFFile) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` (a list when the file also names an end of turn) and `pad_token_id`."""
    ids: dict[str, Any] = {
        name: gguf.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
    }
    ends = [ids["eos_token_id"]] + [gguf.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    return {name: value for name, value in ids.items() if value is not None}


def rope_scaling(gguf: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling` from the metadata (linear, YaRN) or from the Llama 3 frequency factors."""
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, head_dim)
    kind = gguf.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise GGUFError(f"{gguf.path}: rope scaling {kind!r} is not implemented; known: none, linear, yarn")
    scaling = {"rope_type": kind, "factor": gguf.need("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = gguf.need("rope.scaling.original_context_length")
    return scaling


def llama3_factors(theta: float, head_dim: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """By how much Llama 3.1 slows each of its `head_dim / 2` rotary frequencies; float64.

    Waves shorter than `original / high` positions stay, longer than `original / low` are slowed by `factor`, between
    them the two are blended (Llama 3.1's published `apply_scaling`).
    """
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - blend) / factor + blend)


def _llama3_scaling(gguf: GGUFFile, head_dim: int) -> dict[str, Any]:
    """A GGUF keeps only the resulting factors: find the parameters that give them, or refuse."""
    stored = np.asarray(gguf.tensors[ROPE_FACTORS].data, dtype=np.float32)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    expected = llama3_factors(gguf.get("rope.freq_base", 10000.0), head_dim, factor, low, high, original)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise GGUFError(f"{gguf.path}: {ROPE_FACTORS} holds frequency factors that are not Llama 3's; not implemented")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # tokenizer.ggml.token_type

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """What `tokenizer.ggml.pre` stands for: how text is cut before byte-level BPE, and the habits that go with it."""

    split: Any
    ignore_merges: bool = False  # a piece that is a token stays whole, whatever the merges say
    add_bos: bool = False
    normalizer: Any = None


def _regex_split(pattern: str) -> Any:
    pieces = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(_GPT2_SPLIT),
    "smollm": PreTokenizer(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2_SPLIT])),
    "llama-bpe": PreTokenizer(_regex_split(LLAMA3_SPLIT), ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizer(_regex_split(QWEN2_SPLIT), normalizer=normalizers.NFC()),
}
PRE_TOKENIZER_ALIASES = {  # further names that llama.cpp has for the same
    "phi-2": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}


def tokenizer_from_gguf(gguf: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the fast tokenizer and its `tokenizer_config.json` from the vocabulary stored in the file."""
    kind = gguf.get("tokenizer.ggml.model")
    for key in ("add_sep_token", "precompiled_charsmap", "remove_extra_whitespaces"):
        if gguf.get(f"tokenizer.ggml.{key}"):
            raise GGUFError(f"{gguf.path}: the metadata key tokenizer.ggml.{key} is not implemented")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(gguf)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(gguf), True
    else:
        raise GGUFError(f"{gguf.path}: the tokenizer {kind!r} is not implemented; known: gpt2, llama")
    _add_special_tokens(gguf, tokenizer)
    _add_ends(gguf, tokenizer, gguf.get("tokenizer.ggml.add_bos_token", add_bos))
    return tokenizer, _tokenizer_config(gguf)


def _vocabulary(gguf: GGUFFile) -> dict[str, int]:
    types = gguf.get("tokenizer.ggml.token_type") or []
    tokens = gguf.need("tokenizer.ggml.tokens")
    # UNUSED entries only pad the embedding matrix; the original tokenizer does not have them.
    return {token: i for i, token in enumerate(tokens) if i >= len(types) or types[i] != UNUSED}


def _byte_level_bpe(gguf: GGUFFile) -> tuple[Tokenizer, bool]:
    name = gguf.get("tokenizer.ggml.pre", "missing")
    name = PRE_TOKENIZER_ALIASES.get(name, name)
    if name not in PRE_TOKENIZERS:
        known = ", ".join([*PRE_TOKENIZERS, *PRE_TOKENIZER_ALIASES])
        raise GGUFError(f"{gguf.path}: tokenizer.ggml.pre {name!r} is not implemented; known: {known}")
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ")) for merge in gguf.need("tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab=_vocabulary(gguf), merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises nothing more precise
        raise GGUFError(
            f"{gguf.path}: tokenizer.ggml.tokens and tokenizer.ggml.merges make no tokenizer: {error}"
        ) from error
    tokenizer = Tokenizer(model)
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer
    tokenizer.pre_tokenizer = pre.split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece_bpe(gguf: GGUFFile) -> Tokenizer:
    # A run of spaces that was declared a token is stored as plain spaces, but the tokenizer sees them as "▁".
    vocab = {"▁" * len(token) if _is_spaces(token) else token: i for token, i in _vocabulary(gguf).items()}
    by_id = family_of(gguf).merges_by_id
    scores = [-float(i) for i in range(len(vocab))] if by_id else gguf.need("tokenizer.ggml.scores")
    unknown = gguf.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=vocab,
        merges=merges_from_scores(vocab, scores),
        unk_token=None if unknown is None else gguf.need("tokenizer.ggml.tokens")[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gguf.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _is_spaces(token: str) -> bool:
    return bool(token) and not token.strip(" ")


def merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges for a SentencePiece vocabulary: every way to make a token out of two others, best score first."""
    found = []
    for token, i in vocab.items():
        pairs = [(token[:k], token[k:]) for k in range(1, len(token))]
        found += [(-scores[i], i, vocab[a], vocab[b], (a, b)) for a, b in pairs if a in vocab and b in vocab]
    return [merge for *_, merge in sorted(found)]


def _add_special_tokens(gguf: GGUFFile, tokenizer: Tokenizer) -> None:
    """Control tokens are special (hidden when decoding), user-defined ones are only kept whole."""
    tokens, types = gguf.need("tokenizer.ggml.tokens"), gguf.get("tokenizer.ggml.token_type") or []
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(tokens, types, strict=False):
        if kind == CONTROL:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED and not _is_spaces(token):
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_ends(gguf: GGUFFile, tokenizer: Tokenizer, add_bos: bool) -> None:
    """Put bos before and eos after every encoded text, where the file says so."""
    ends = [("bos", add_bos), ("eos", gguf.get("tokenizer.ggml.add_eos_token", False))]
    ids = {end: gguf.need(f"tokenizer.ggml.{end}_token_id") for end, wanted in ends if wanted}
    if not ids:
        return
    names = {end: gguf.need("tokenizer.ggml.tokens")[i] for end, i in ids.items()}
    single = [piece for piece in (names.get("bos"), "$A", names.get("eos")) if piece is not None]
    pair = single + [piece.replace("$A", "$B") + ":1" for piece in single]
    special = [(names[end], ids[end]) for end in ids]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


def _tokenizer_config(gguf: GGUFFile) -> dict[str, Any]:
    tokens = gguf.need("tokenizer.ggml.tokens")
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: gguf.get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.need("context_length"),
        "clean_up_tokenization_spaces": False,
        **{name: tokens[i] for name, i in ids.items() if i is not None},
        **_chat_template(gguf),
    }


def _chat_template(gguf: GGUFFile) -> dict[str, Any]:
    """The default chat template, and those with a name (`tool_use`), as `tokenizer_config.json` spells them."""
    default, prefix = gguf.get("tokenizer.chat_template"), "tokenizer.chat_template."
    named = {key.removeprefix(prefix): text for key, text in gguf.metadata.items() if key.startswith(prefix)}
    if not named:
        return {} if default is None else {"chat_template": default}
    templates = named if default is None else {"default": default} | named
    return {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}


def write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write float32 tensors and blocks to a safetensors file, one at a time, so that only one is in memory.

    The format: 8 bytes with the length of a JSON header, the header (name -> dtype, shape, byte range), the raw bytes.
    `tensors` must yield exactly the names and shapes announced in `shapes`, in that order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size, dtype = (1, "U8") if block_type(name) else (4, "F32")
        start, end = end, end + size * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for (name, shape), (given, array) in zip(shapes.items(), tensors, strict=True):
            kind = np.dtype(np.uint8 if block_type(name) else np.float32)
            if given != name or array.shape != shape or array.dtype != kind:
                raise GGUFError(f"expected {name} {shape} {kind}, got {given} {array.shape} {array.dtype}")
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def convert_gguf(
    path: str | Path,
    folder: str | Path,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
    keep_blocks: bool = False,
) -> None:
    """Write a GGUF file as a Hugging Face folder: `model.safetensors`, `config.json`, tokenizer, generation config.

    Weights become float32. Every quantised value is exact in it (not in bfloat16), so a model loaded from the folder
    computes with the same numbers in any program. With `keep_blocks`, blocks of `BLOCK_TYPES` are copied as they are,
    and only minivllm reads the folder. `progress(iterable, total)` may wrap the loop over tensors (a progress bar).
    Raises `GGUFError` for anything in the file that has no equivalent, before the weights are written.
    """
    gguf, folder = read_gguf(path), Path(folder)
    config, (tokenizer, tokenizer_config) = config_from_gguf(gguf), tokenizer_from_gguf(gguf)
    names = stored_names(gguf, keep_blocks)
    shapes = {stored: _shape(gguf.tensors[name], bool(block_type(stored))) for name, stored in names.items()}
    if any(map(block_type, shapes)):
        config["quantization_config"] = {"quant_method": "gguf"}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", token_ids(gguf))
    tensors: Iterable[tuple[str, np.ndarray]] = iter_tensors(gguf, keep_blocks)
    write_safetensors(folder / "model.safetensors", shapes, progress(tensors, len(shapes)) if progress else tensors)
    _write_json(folder / "config.json", config)


def _shape(tensor: Any, as_blocks: bool) -> tuple[int, ...]:
    if as_blocks:
        return tuple(tensor.data.shape)
    return tuple(int(n) for n in reversed(tensor.shape))  # GGUF lists the fastest dimension first


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
