"""Tiny GGUF files, written the way llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

BYTES = sorted(ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "a b"]
TOKENS = SPECIAL + BYTES + [merge.replace(" ", "") for merge in MERGES] + ["<think>"]
TYPES = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 16, 64, 96, 2
VOCABULARY = len(TOKENS)

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
}
GEMMA3_NAMES = GGUF_NAMES | {
    "model.layers.{}.post_attention_layernorm": "blk.{}.post_attention_norm",
    "model.layers.{}.pre_feedforward_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.post_feedforward_layernorm": "blk.{}.post_ffw_norm",
}


def gguf_name(hf_name: str, arch: str = "llama") -> str:
    stem, _, kind = hf_name.rpartition(".")
    parts = stem.split(".")
    layer = parts[2] if parts[:2] == ["model", "layers"] else ""
    pattern = ".".join("{}" if i == 2 and layer else part for i, part in enumerate(parts))
    names = GEMMA3_NAMES if arch == "gemma3" else GGUF_NAMES
    return f"{names[pattern].format(layer)}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def random_weights(seed: int = 0, vocabulary: int = VOCABULARY) -> dict[str, np.ndarray]:
    """Weights of a tied llama model under Hugging Face names."""
    rng = np.random.default_rng(seed)
    q, kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (q, HIDDEN),
            "self_attn.k_proj": (kv, HIDDEN),
            "self_attn.v_proj": (kv, HIDDEN),
            "self_attn.o_proj": (HIDDEN, q),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    return {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def metadata(arch: str = "llama") -> dict[str, Any]:
    """All metadata of a tiny model; None in an override removes a key."""
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": NUM_HEADS,
        f"{arch}.attention.head_count_kv": NUM_KV_HEADS,
        f"{arch}.attention.key_length": HEAD_DIM,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 100000.0,
        f"{arch}.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    arch: str = "llama",
    weights: dict[str, np.ndarray] | None = None,
    quantize: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    split: int = 0,
    **overrides: Any,
) -> Path:
    """Write a GGUF file. `weights` under Hugging Face names; `overrides` of metadata, with `__` for `.`. split: most tensors of a part."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    fields = metadata(arch) | {key.replace("__", "."): value for key, value in overrides.items()}
    for key, value in fields.items():
        _add(writer, key, value)
    for name, array in (random_weights() if weights is None else weights).items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleave(array, fields[f"{arch}.attention.head_count{'_kv' if 'k_proj' in name else ''}"])
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        kind = (quantize or {}).get(name)
        if kind is None:
            writer.add_tensor(gguf_name(name, arch), array)
        else:
            writer.add_tensor(gguf_name(name, arch), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
