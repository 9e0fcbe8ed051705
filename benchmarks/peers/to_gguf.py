"""A Llama-like Hugging Face folder as a GGUF file of one dtype, for llama.cpp: the same weights, nothing quantised.

python to_gguf.py FOLDER FILE [bfloat16|float32]      (needs gguf and numpy, no torch)
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors as float32."""
    data = np.memmap(path, np.uint8, "r")
    size = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + size]))
    out = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        raw = np.array(data[8 + size + start : 8 + size + end])
        if entry["dtype"] == "BF16":
            numbers = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            numbers = raw.view({"F32": "<f4", "F16": "<f2"}[entry["dtype"]]).astype(np.float32)
        out[name] = numbers.reshape(entry["shape"])
    return out


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def main() -> None:
    folder, target = Path(sys.argv[1]), sys.argv[2]
    dtype = sys.argv[3] if len(sys.argv) > 3 else "bfloat16"
    config, vocabulary = (json.loads((folder / f).read_text()) for f in ("config.json", "tokenizer.json"))
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(hidden // heads)
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    tokens = sorted(vocabulary["model"]["vocab"], key=vocabulary["model"]["vocab"].get)
    known = {entry["id"]: entry["content"] for entry in vocabulary["added_tokens"]}
    tokens = [known.get(i, token) for i, token in enumerate(tokens)]
    tokens += [known.get(i, f"<unused{i}>") for i in range(len(tokens), config["vocab_size"])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in vocabulary["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in known else 1 for i in range(len(tokens))])
    writer.add_token_merges(merges)
    kind = gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" else gguf.GGMLQuantizationType.F32
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_safetensors(file).items():
            for part, count in (("q_proj", heads), ("k_proj", config["num_key_value_heads"])):
                if f"{part}.weight" in name:  # GGUF keeps the halves of a rotation interleaved
                    tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
            tensor = np.ascontiguousarray(tensor)
            if tensor.ndim > 1 and dtype == "bfloat16":
                writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
            else:
                writer.add_tensor(gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
