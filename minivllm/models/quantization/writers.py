"""Quantized checkpoints written: compressed-tensors (int4, int8, fp8) and GGUF (Q8_0, Q4_0)."""

# Generated from nbs/models/quantization/writers.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minivllm.models.linear.grouped import GroupedWeight, pack_nibbles
from minivllm.models.linear.scaled import FP8, quantize_channels
from minivllm.models.loading import SINGLE, CheckpointError, LoadedModel
from minivllm.models.spec import DecoderSpec


def linear_names(spec: DecoderSpec) -> dict[str, int]:
    """The weights of the layers' matmuls by their names in a checkpoint, and their inputs."""
    names: dict[str, int] = {}
    for i, layer in enumerate(spec.layers):
        mlps = [*getattr(layer.mlp, "experts", [layer.mlp]), getattr(layer.mlp, "shared", None)]
        for block in (layer.mixer, *(mlp for mlp in mlps if mlp is not None)):
            for linear in block.linears(spec.hidden_size).values():
                names |= {f"{spec.names.layer.format(i)}{part}.weight": linear.inputs for part in linear.parts}
    return names


def group_scales(weight: Tensor, group: int, bits: int) -> Tensor:
    """[outputs, groups]: what brings the largest magnitude of each group to the largest number, in the dtype of the weight."""
    return (weight.float().unflatten(1, (-1, group)).abs().amax(-1) / ((1 << bits - 1) - 1)).to(weight.dtype)


def symmetric(q: Tensor, scale: Tensor, bits: int) -> GroupedWeight:
    """Whole numbers [outputs, inputs], -8 to 7 or -128 to 127, with a scale for each group."""
    return GroupedWeight(pack_nibbles((q + 8).to(torch.uint8)) if bits == 4 else q.to(torch.int8), scale)


def round_groups(weight: Tensor, group: int, bits: int = 4) -> GroupedWeight:
    """The nearest numbers of 4 or 8 bits, symmetric around zero.

    Args:
        weight: [outputs, inputs]; scales get its dtype.
        group: inputs that share a scale; divides their number.
    """
    scale, end = group_scales(weight, group, bits), 1 << bits - 1
    step = scale.float().masked_fill(scale == 0, 1).repeat_interleave(group, 1)
    return symmetric((weight.float() / step).round().clamp(-end, end - 1), scale, bits)


def _int4(weight: Tensor | GroupedWeight, group: int) -> dict[str, Tensor]:
    rounded = round_groups(weight, group) if isinstance(weight, Tensor) else weight
    words = rounded.q.view(torch.int32)  # eight numbers, the first one in the lowest bits
    return {"weight_packed": words, "weight_scale": rounded.scale, "weight_shape": torch.tensor(weight.shape)}


def _bytes(dtype: torch.dtype) -> Callable[[Any, int], dict[str, Tensor]]:
    def write(weight: Tensor, group: int) -> dict[str, Tensor]:
        rounded = quantize_channels(weight, dtype)
        return {"weight": rounded.q, "weight_scale": rounded.scale}

    return write


_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
COMPRESSED: dict[str, tuple[str, dict[str, Any], Callable[[Any, int], dict[str, Tensor]]]] = {
    "int4": ("pack-quantized", {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}, _int4),
    "int8": (
        "int-quantized",
        {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {**_TOKEN, "type": "int"}},
        _bytes(torch.int8),
    ),
    "fp8": (
        "float-quantized",
        {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {**_TOKEN, "type": "float"}},
        _bytes(FP8),
    ),
}
"""For each of our formats: compressed-tensors' name, the settings of the scheme, and what writes a weight."""


Calibration = Callable[[int], Mapping[str, GroupedWeight]]
"""From a group size to weights of 4 bits by their names, for instance by GPTQ."""


def write_compressed(
    model: LoadedModel, folder: Path, format: str, group: int | None = None, calibration: Calibration | None = None
) -> None:
    """Write a folder in compressed-tensors' format.

    Args:
        format: a name in `COMPRESSED`.
        group: inputs that share a scale, for int4; None for the largest of 128, 64 and 32 that divides all inputs.
        calibration: what rounds the weights, for int4; None for the nearest numbers.

    Raises:
        CheckpointError: the model cannot be written so; says why.
    """
    kind, scheme, write = COMPRESSED[format]
    names = _writable(model, folder)
    sizes = (128, 64, 32) if group is None else (group,)
    fits = [size for size in sizes if size % 8 == 0 and not any(inputs % size for inputs in names.values())]
    if format == "int4" and not fits:
        raise CheckpointError(f"{model.name}: no group size of {sizes} divides {sorted(set(names.values()))} inputs")
    size = fits[0] if format == "int4" else None
    rounded = calibration(fits[0]) if calibration is not None and format == "int4" else {}
    state: dict[str, Tensor] = {}
    for name, tensor in model.weights("float32"):
        if name in names:
            stem = name.removesuffix("weight")
            state |= {stem + end: t.contiguous() for end, t in write(rounded.get(name, tensor), size or 0).items()}
        else:
            state[name] = tensor.clone()
    _copy_files(model.path, folder)
    save_file(state, folder / SINGLE, {"format": "pt"})
    weights = {"symmetric": True, "strategy": "channel", "dynamic": False, "group_size": size} | scheme["weights"]
    groups = {
        "group_0": {"targets": ["Linear"], "format": kind, "input_activations": None, **scheme, "weights": weights}
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": groups,
    }
    config = model.hf_config | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _writable(model: LoadedModel, folder: Path) -> dict[str, int]:
    """`linear_names` of a model that can be rounded, and an empty folder to write it to."""
    if model.quantization:
        method = model.quantization.get("quant_method")
        raise CheckpointError(f"{model.name} is quantized already ({method}): rounding twice would lose twice")
    names, there = linear_names(model.spec), {record.name for record in model.records}
    if missing := sorted(set(names) - there):
        raise CheckpointError(
            f"{model.name}: the checkpoint keeps {missing[0]} in another form; rounding such checkpoints is not implemented"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty")
    return names


def _copy_files(source: Path, target: Path) -> None:
    """Everything but weights and configuration: the tokenizer, the licence, defaults of generation."""
    for file in source.iterdir():
        skipped = file.name == "config.json" or file.name.startswith(("model", "minivllm_source", "."))
        if file.is_file() and not skipped and file.suffix not in (".safetensors", ".bin", ".gguf"):
            shutil.copy(file, target / file.name)


_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}


def gguf_metadata(model: LoadedModel) -> dict[str, Any]:
    """What a GGUF file says of a model besides its weights.

    Raises:
        CheckpointError: a family, a rotation or a tokenizer that is not implemented.
    """
    config, arch = model.hf_config, model.hf_config.get("model_type")
    if arch not in ("llama", "qwen2", "qwen3"):
        raise CheckpointError(f"writing GGUF is implemented for llama, qwen2 and qwen3, not for {arch!r}")
    mixers = {layer.mixer for layer in model.spec.layers}
    mixer: Any = mixers.pop()
    if mixers or mixer.rope.kind != "default" or mixer.sliding_window is not None:
        raise CheckpointError(f"{model.name}: writing GGUF with stretched rotations or windows is not implemented")
    metadata: dict[str, Any] = {"general.name": model.path.name}
    metadata |= {f"{arch}.{key}": config.get(name, config["num_attention_heads"]) for name, key in _SIZES.items()}
    head = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    metadata |= {f"{arch}.{key}": mixer.head_dim for key in head}
    metadata |= {
        f"{arch}.rope.freq_base": float(mixer.rope.theta),
        f"{arch}.attention.layer_norm_rms_epsilon": float(model.spec.norm_eps),
    }
    return metadata | tokenizer_metadata(model)


def tokenizer_metadata(model: LoadedModel) -> dict[str, Any]:
    """The vocabulary of a byte-level BPE tokenizer.

    Raises:
        CheckpointError: another kind of tokenizer, or one that cuts text in a way that GGUF has no name for.
    """
    from minivllm.models.gguf import CONTROL, PRE_TOKENIZERS, USER_DEFINED

    file = model.path / "tokenizer.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    cut = found["pre_tokenizer"]
    names = [name for name, pre in PRE_TOKENIZERS.items() if _as_json(pre.split) == cut]
    if found["model"]["type"] != "BPE" or not names:
        raise CheckpointError(
            f"{file}: writing GGUF is implemented for byte-level BPE cut like {', '.join(PRE_TOKENIZERS)}"
        )
    added = {token["id"]: token for token in found["added_tokens"]}
    ids = {i: token for token, i in found["model"]["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    size = max(model.spec.vocab_size, max(ids) + 1)
    special = {i: CONTROL if token["special"] else USER_DEFINED for i, token in added.items()}
    merges = [m if isinstance(m, str) else " ".join(m) for m in found["model"]["merges"]]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": names[0],
        "tokenizer.ggml.tokens": [ids.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [special.get(i, 1 if i in ids else 5) for i in range(size)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }
    for name in ("bos", "eos", "pad"):
        value = (model.hf_config | model.generation_config).get(f"{name}_token_id")
        for key, token in zip(("eos", "eot"), value, strict=False) if isinstance(value, list) else [(name, value)]:
            if token is not None:
                metadata[f"tokenizer.ggml.{'padding' if key == 'pad' else key}_token_id"] = int(token)
    settings = model.path / "tokenizer_config.json"
    template = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    return metadata | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _as_json(pre_tokenizer: Any) -> Any:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    return json.loads(tokenizer.to_str())["pre_tokenizer"]


GGUF_TYPES = {"gguf-q8_0": "Q8_0", "gguf-q4_0": "Q4_0"}


def write_gguf(model: LoadedModel, file: Path, format: str) -> None:
    """Write a GGUF file: matmuls in a type of `GGUF_TYPES`, embeddings and output layer in Q8_0, the rest float32.

    Raises:
        CheckpointError: the model cannot be written so; says why.
    """
    import gguf

    kinds, names = gguf.GGMLQuantizationType, _writable(model, file.parent)
    metadata, arch = gguf_metadata(model), model.hf_config["model_type"]
    writer = gguf.GGUFWriter(file, arch)
    types = gguf.GGUFValueType
    of = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING, list: types.ARRAY}
    for key, value in metadata.items():
        writer.add_key_value(key, value, of[type(value)])
    mixer: Any = model.spec.layers[0].mixer
    heads = {mixer.q: mixer.num_heads, mixer.k: mixer.num_kv_heads}
    for name, tensor in model.weights("float32"):
        rows = tensor.float()
        stem, _, _ = name.rpartition(".")
        count = next((n for part, n in heads.items() if stem.endswith(part)), 0)
        if count and arch == "llama":  # halves of a head to neighbours
            rows = rows.unflatten(0, (count, 2, -1)).transpose(1, 2).reshape(rows.shape)
        array, target = rows.contiguous().numpy(), _gguf_name(name)
        if array.ndim == 1:
            writer.add_tensor(target, array)
            continue
        kind = kinds[GGUF_TYPES[format] if name in names else "Q8_0"]
        writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    from minivllm.models.gguf import LAYER_TENSORS, MODEL_TENSORS

    ours = {hf: gguf for gguf, hf in MODEL_TENSORS.items()}
    if name in ours:
        return ours[name]
    parts, layer = name.split("."), {hf: gguf for gguf, hf in LAYER_TENSORS.items()}
    return f"blk.{parts[2]}.{layer['.'.join(parts[3:-1])]}.{parts[-1]}"
