"""Adapter folders that are refused, by name, and the registry's keys."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import hf_config

from minivllm.lora.adapter import (
    CONFIG,
    WEIGHTS,
    AdapterError,
    LoRARequest,
    check_adapter,
    load_adapter,
    lora_targets,
    rank_and_scale,
)
from minivllm.lora.store import AdapterRegistry
from minivllm.models.spec import spec_from_config

TARGETS = lora_targets(spec_from_config(hf_config("llama").to_dict()))
PREFIX = "base_model.model.model.layers.0.self_attn"
BASE = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "base_model_name_or_path": "tiny"}


def write(folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """An adapter of the first layer's queries; `config` and `tensors` change it, a tensor None takes one out."""
    folder.mkdir(exist_ok=True)
    settings = {**BASE, "target_modules": ["layers.0.self_attn.q_proj"], **(config or {})}
    (folder / CONFIG).write_text(json.dumps(settings))
    all_tensors = {
        f"{PREFIX}.q_proj.lora_A.weight": torch.ones(2, 72),
        f"{PREFIX}.q_proj.lora_B.weight": torch.ones(96, 2),
    }
    all_tensors |= tensors or {}
    save_file({name: x for name, x in all_tensors.items() if x is not None}, folder / WEIGHTS)
    return folder


def test_a_good_one(tmp_path):
    adapter = load_adapter("a", check_adapter(write(tmp_path / "a"), TARGETS, 8), torch.float32)
    (module,) = adapter.modules
    assert module == "model.layers.0.self_attn.q_proj"
    assert adapter.modules[module].a.shape == (2, 72)
    assert torch.equal(adapter.modules[module].b, torch.full((96, 2), 2.0))  # alpha / r is in it


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias='all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', it is 'IA3'"),
        ({"a_new_idea": 3}, "a_new_idea=3"),
        ({"r": 0}, "r must be a number above 0"),
        ({"r": 4}, "want [4, 72]"),
        ({"rank_pattern": {"q_proj": 3}}, "want [3, 72]"),
        ({"target_modules": ["q_proj"]}, "layers.1.self_attn.q_proj is one of target_modules"),
        ({"target_modules": r".*\.0\..*(q|k)_proj"}, "layers.0.self_attn.k_proj is one of target_modules"),
    ],
)
def test_a_config_that_is_refused(tmp_path, config, words):
    with pytest.raises(AdapterError) as error:
        check_adapter(write(tmp_path / "a", config), TARGETS, 8)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({f"{PREFIX}.q_proj.lora_A.weight": None}, "has only half of its pair, lora_B"),
        ({f"{PREFIX}.q_proj.lora_A.weight": torch.ones(2, 64)}, "has shape [2, 64]"),
        ({f"{PREFIX}.w_proj.lora_A.weight": torch.ones(2, 64), f"{PREFIX}.w_proj.lora_B.weight": torch.ones(2, 2)},
         "no layer 'model.layers.0.self_attn.w_proj' (the adapter is for 'tiny')"),
        ({"base_model.model.lm_head.weight": torch.ones(264, 72)}, "'base_model.model.lm_head.weight' is no part"),
        ({f"{PREFIX}.q_proj.lora_magnitude_vector": torch.ones(96)}, "lora_magnitude_vector"),
        ({f"{PREFIX}.q_proj.lora_A.weight": torch.ones(2, 72, dtype=torch.int8)}, "dtype I8"),
    ],
)  # fmt: skip
def test_tensors_that_are_refused(tmp_path, tensors, words):
    with pytest.raises(AdapterError) as error:
        check_adapter(write(tmp_path / "a", None, tensors), TARGETS, 8)
    assert words in str(error.value)


def test_too_large_a_rank(tmp_path):
    with pytest.raises(AdapterError, match="has rank 2, at most max_lora_rank=1"):
        check_adapter(write(tmp_path / "a"), TARGETS, 1)


def test_numbers_that_are_not_finite(tmp_path):
    checked = check_adapter(
        write(tmp_path / "a", None, {f"{PREFIX}.q_proj.lora_B.weight": torch.full((96, 2), 7e4)}), TARGETS, 8
    )
    load_adapter("a", checked, torch.float32)
    with pytest.raises(AdapterError, match=r"not finite in torch\.float16"):
        load_adapter("a", checked, torch.float16)


def test_a_file_that_was_cut(tmp_path):
    folder = write(tmp_path / "a")
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])
    with pytest.raises(AdapterError, match="not a whole safetensors file"):
        check_adapter(folder, TARGETS, 8)


def test_pickles_and_missing_files(tmp_path):
    folder = write(tmp_path / "a")
    os.rename(folder / WEIGHTS, tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match="there is no"):
        check_adapter(folder, TARGETS, 8)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle file"):
        check_adapter(folder, TARGETS, 8)
    (folder / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match="a link that leaves its folder"):
        check_adapter(folder, TARGETS, 8)
    with pytest.raises(AdapterError, match="no adapter folder"):
        check_adapter(tmp_path / "nowhere", TARGETS, 8)


def test_the_hubs_cache_may_link_to_its_blobs(tmp_path):
    repository = tmp_path / "models--x"
    real, snapshot = (
        write(repository / "blobs" if repository.mkdir() is None else tmp_path),
        repository / "snapshots" / "c0ffee",
    )
    snapshot.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(real / name)
    assert check_adapter(snapshot, TARGETS, 8).ranks == {"model.layers.0.self_attn.q_proj": 2}


def test_rank_and_scale_are_those_of_peft(tmp_path):
    """Against the scaling that PEFT's own layers have."""
    peft = pytest.importorskip("peft")
    import copy

    from tiny_models import hf_model

    settings = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj", "up_proj"], "use_rslora": True,
                "rank_pattern": {"o_proj": 7, r".*\.1\.mlp\.up_proj": 2}, "alpha_pattern": {r"layers\.[12]\..*": 11}}  # fmt: skip
    model = peft.get_peft_model(copy.deepcopy(hf_model("llama")), peft.LoraConfig(**settings))
    seen = 0
    for name, layer in model.base_model.model.named_modules():
        if hasattr(layer, "lora_A"):
            rank, scale = rank_and_scale(settings, name)
            assert (rank, scale) == (layer.r["default"], pytest.approx(layer.scaling["default"])), name
            seen += 1
    assert seen == 12


def test_the_key_stands_for_the_contents(tmp_path):
    folder = write(tmp_path / "a")
    registry = AdapterRegistry(TARGETS, 8)
    first = registry.add(LoRARequest("sql", 1, str(folder)))
    assert registry.add(LoRARequest("sql", 1, str(folder))) is first
    with pytest.raises(AdapterError, match="is not the adapter of this name"):
        registry.add(LoRARequest("sql", 2, str(folder)))
    with pytest.raises(AdapterError, match="lora_int_id 1 belongs to adapter 'sql'"):
        registry.add(LoRARequest("other", 1, str(folder)))
    assert registry.remove(1) and not registry.remove(1)
    tensors = load_file(folder / WEIGHTS)
    save_file({name: x + 1 for name, x in tensors.items()}, folder / WEIGHTS)
    assert registry.add(LoRARequest("sql", 1, str(folder))).key == "sql@2"
    registry.remove(1)
    save_file(tensors, folder / WEIGHTS)
    assert (
        registry.add(LoRARequest("sql", 1, str(folder))).key == "sql"
    )  # the first contents again: their blocks are right
