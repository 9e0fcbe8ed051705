"""A checkpoint that lacks something, or holds something else, is refused with the tensor's or field's name, before any request runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import random_weights, write_gguf
from tiny_models import hf_model, save_pooling_model, save_tiny_model, tiny_tokenizer
from tiny_vlms import save_vlm

from minivllm import LLM

Tensors = dict[str, torch.Tensor]


def shards(name: str, folder: Path) -> Path:
    hf_model(name).save_pretrained(folder, max_shard_size="200KB")
    tiny_tokenizer().save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


KINDS: dict[str, tuple[Callable[[str, Path], Path], str, str]] = {
    "dense": (save_tiny_model, "llama", "model.layers.2.mlp.up_proj.weight"),
    "sharded": (shards, "llama", "model.layers.3.self_attn.k_proj.weight"),
    "fused": (save_tiny_model, "phi3", "model.layers.0.self_attn.qkv_proj.weight"),
    "turned": (save_tiny_model, "gpt2", "transformer.h.1.attn.c_attn.weight"),
    "experts": (save_tiny_model, "qwen3-moe", "model.layers.3.mlp.experts.5.gate_proj.weight"),
    "router": (save_tiny_model, "mixtral", "model.layers.0.block_sparse_moe.gate.weight"),
    "latent attention": (save_tiny_model, "deepseek-v3", "model.layers.2.self_attn.kv_b_proj.weight"),
    "sinks": (save_tiny_model, "gpt-oss", "model.layers.1.self_attn.sinks"),
    "states": (save_tiny_model, "mamba2", "backbone.layers.1.mixer.A_log"),
    "encoder": (save_pooling_model, "BertModel", "encoder.layer.1.output.dense.weight"),
    "classifier": (save_pooling_model, "RobertaForSequenceClassification", "classifier.out_proj.weight"),
    "pictures": (save_vlm, "llava", "language_model.model.layers.1.self_attn.v_proj.weight"),
    "tower": (save_vlm, "llava", "multi_modal_projector.linear_1.weight"),
}


def change(folder: Path, name: str, how: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """One tensor of a folder's checkpoint, which keeps its index if it has one."""
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    full = next(n for file in folder.glob("*.safetensors") for n in load_file(file) if n.endswith(name))
    file = folder / names.pop(full, "model.safetensors")
    tensors = load_file(file)
    if (tensor := how(tensors.pop(full))) is not None:
        tensors[full] = tensor.contiguous()
    elif index.is_file():
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_missing_or_of_another_shape(kind: str, tmp_path: Path):
    save, model, name = KINDS[kind]
    parts = name.split(".")
    known = ".*".join(parts[-3:] if "qkv_proj" not in name and "c_attn" not in name else parts[-2:]).replace(
        "proj.*", ".*"
    )
    for i, how in enumerate((lambda tensor: None, lambda tensor: tensor[:-1])):
        folder = save(model, tmp_path / str(i))
        change(folder, name, how)
        with pytest.raises(ValueError, match=known):
            LLM(str(folder), dtype="float32", num_gpu_blocks=64)


@pytest.mark.parametrize(
    ("model", "fields", "named"),
    [
        ("llama", {"hidden_act": "mish"}, "mish"),
        ("llama", {"num_attention_heads": 5}, "5 query heads"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor"),
        ("llama", {"clip_qkv": 8.0}, "clip_qkv"),
        ("qwen2-window", {"layer_types": ["full_attention"]}, "layer_types"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts of 8"),
        ("deepseek-v3", {"n_group": 3}, "8 experts, 3 groups"),
        ("llama4", {"layer_types": ["windowed"] * 4}, "windowed"),
        ("mamba2", {"num_heads": 3}, "3 heads"),
        ("llama", {"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_field_that_cannot_be(model: str, fields: dict[str, Any], named: str, tmp_path: Path):
    folder = save_tiny_model(model, tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(ValueError, match=named):
        LLM(str(folder), dtype="float32", num_gpu_blocks=64)


def test_a_gguf_file_that_lacks_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    weights = random_weights()
    del weights["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks model.layers.1.mlp.down_proj.weight"):
        LLM(str(write_gguf(tmp_path / "m.gguf", weights=weights)), num_gpu_blocks=64)


@pytest.mark.parametrize(("model_type", "name"), [("whisper", "Whisper"), ("t5", "T5"), ("bart", "Bart")])
def test_an_encoder_decoder_is_named(model_type: str, name: str, tmp_path: Path):
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    config.architectures = [f"{name}ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{name}ForConditionalGeneration is an encoder-decoder .*cross-attention"):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, num_gpu_blocks=64)
