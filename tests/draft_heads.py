"""Tiny Medusa heads, an EAGLE-1 and an EAGLE-3 layer for the tiny Llama, and checkpoints that bring a layer to draft with."""

import json
import shutil
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import checkpoint, hf_model, tiny_model_path  # noqa: F401 - a fixture

MOST = 3
H, V = 72, 264


def write(folder, config: dict[str, Any], tensors: dict[str, torch.Tensor]):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def medusa_tensors(own: bool, names: str = "vllm") -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    tensors = {}
    for i in range(MOST):
        tensors[f"blocks.{i}.layers.0.weight" if names == "vllm" else f"{i}.0.linear.weight"] = (
            torch.randn(H, H, generator=g) / 6
        )
        tensors[f"blocks.{i}.layers.0.bias" if names == "vllm" else f"{i}.0.linear.bias"] = (
            torch.randn(H, generator=g) / 3
        )
        if own:
            tensors[f"lm_heads.{i}.weight" if names == "vllm" else f"{i}.1.weight"] = torch.randn(40, H, generator=g)
    if own and names == "vllm":
        tensors["token_map"] = torch.randperm(V, generator=g)[:40]
    return tensors


def eagle_tensors() -> dict[str, torch.Tensor]:
    """A layer of another tiny model, under EAGLE's names, and a matrix in front of it."""
    layer = {
        n.removeprefix("model."): t for n, t in checkpoint(hf_model("llama-tied-biased")).items() if ".layers.2." in n
    }
    layer = {n.replace("layers.2.", "layers.0."): t for n, t in layer.items() if "input_layernorm" not in n}
    g = torch.Generator().manual_seed(4)
    return layer | {"fc.weight": torch.randn(H, 2 * H, generator=g) / 9, "fc.bias": torch.randn(H, generator=g) / 9}


EAGLE3_KNOWN = 150
EAGLE3_TAPS = (1, 3, 2)


def eagle3_tensors(plain: bool = False) -> dict[str, torch.Tensor]:
    """As in the published files, under their names; plain: with the target's output layer and the authors' choice of streams."""
    layer = {
        n.replace("model.layers.1.", "midlayer."): t
        for n, t in checkpoint(hf_model("llama")).items()
        if ".layers.1." in n
    }
    g = torch.Generator().manual_seed(6)
    for name in ("q_proj", "k_proj", "v_proj"):
        old = layer[f"midlayer.self_attn.{name}.weight"]
        layer[f"midlayer.self_attn.{name}.weight"] = torch.cat([old, torch.randn(old.shape, generator=g) / 9], 1)
    norms = {name: 1 + torch.randn(H, generator=g) / 4 for name in ("midlayer.hidden_norm.weight", "norm.weight")}
    layer |= norms | {"fc.weight": torch.randn(H, 3 * H, generator=g) / 15}
    if plain:
        return layer
    token_map = torch.randperm(V, generator=g)[:EAGLE3_KNOWN].sort().values
    t2d = torch.zeros(V, dtype=torch.bool).index_fill(0, token_map, True)
    output = torch.randn(EAGLE3_KNOWN, H, generator=g)
    return layer | {"d2t": token_map - torch.arange(EAGLE3_KNOWN), "t2d": t2d, "lm_head.weight": output}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    sizes = {"num_heads": MOST, "num_hidden_layers": 1}
    config = hf_model("llama-tied-biased").config.to_dict() | {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLM"],
    }
    plain = hf_model("llama").config.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    more = {"draft_vocab_size": EAGLE3_KNOWN, "eagle_config": {"eagle_aux_hidden_state_layer_ids": EAGLE3_TAPS}}
    eagle3 = plain | more | {"architectures": ["Eagle3LlamaForCausalLM"]}
    return {
        "medusa": write(root / "shared", sizes, medusa_tensors(False)),
        "medusa-own": write(root / "own", sizes, medusa_tensors(True)),
        "eagle": write(root / "eagle", config, eagle_tensors()),
        "eagle3": write(root / "eagle3", eagle3, eagle3_tensors()),
        "eagle3-plain": write(root / "eagle3-plain", plain, eagle3_tensors(True)),
    }


LAST = 3
NAMES = {  # by family: what the layer's tensors begin with; norm of the embedding and of the state, matrix, last norm
    "deepseek-v3": ("model.layers.4.", *(f"model.layers.4.{n}" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))),
    "qwen3-next-attention": ("mtp.layers.0.", *(f"mtp.{n}" for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))),
}  # fmt: skip


def mtp_tensors(name: str) -> dict[str, torch.Tensor]:
    """The model's last layer again, with norms and a matrix of its own."""
    g, (prefix, embedding_norm, hidden_norm, fuse, final_norm) = torch.Generator().manual_seed(5), NAMES[name]
    old = f"model.layers.{LAST}."
    layer = {n.replace(old, prefix): t for n, t in checkpoint(hf_model(name)).items() if n.startswith(old)}
    norms = {f"{n}.weight": 1 + torch.randn(H, generator=g) / 4 for n in (embedding_norm, hidden_norm, final_norm)}
    return layer | norms | {f"{fuse}.weight": torch.randn(H, 2 * H, generator=g) / 9}


@pytest.fixture(scope="session")
def with_layer(tiny_model_path, tmp_path_factory):  # noqa: F811
    """A function from a model's name to a folder of it that holds the layer too."""

    @cache
    def folder(name):
        path = tmp_path_factory.mktemp("mtp") / name
        shutil.copytree(tiny_model_path(name), path)
        file = path / "model.safetensors"
        shared = {}
        if name == "deepseek-v3":  # copies of what the model has
            shared = {f"model.layers.4.{n}.weight": torch.zeros(3) for n in ("embed_tokens", "shared_head.head")}
        save_file({n: t.contiguous().clone() for n, t in (load_file(file) | mtp_tensors(name) | shared).items()}, file)
        return path

    return folder
