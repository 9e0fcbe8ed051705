"""Tiny Medusa heads and an EAGLE layer for the tiny Llama, in folders as the engine reads them."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import checkpoint, hf_model

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


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    sizes = {"num_heads": MOST, "num_hidden_layers": 1}
    config = hf_model("llama-tied-biased").config.to_dict() | {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLM"],
    }
    return {
        "medusa": write(root / "shared", sizes, medusa_tensors(False)),
        "medusa-own": write(root / "own", sizes, medusa_tensors(True)),
        "eagle": write(root / "eagle", config, eagle_tensors()),
    }
