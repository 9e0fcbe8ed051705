"""Adapter folders that are refused, by name, and the registry's keys."""

import copy
import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import hf_config, hf_model

from minivllm.lora import store
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
from minivllm.models.families.registry import spec_from_config

SPEC = spec_from_config(hf_config("llama").to_dict())
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
    adapter = load_adapter("a", check_adapter(write(tmp_path / "a"), SPEC, 8), torch.float32)
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
        ({"r": 0}, "r must be a whole number above 0, it is 0"),
        ({"r": 2.9}, "r must be a whole number above 0, it is 2.9"),
        ({"r": True}, "r must be"),
        ({"r": float("inf")}, "r must be"),
        ({"r": None}, "r must be"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number above 0, it is nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be"),
        ({"lora_alpha": 10**400}, "lora_alpha must be"),
        ({"lora_alpha": "4"}, "lora_alpha must be"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must be whole numbers above 0"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern must be"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern must be finite numbers above 0"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "alpha_pattern must be"),
        ({"use_rslora": "no"}, "use_rslora must be true or false"),
        ({"target_modules": "(q_proj"}, "target_modules must be a list of names or a regular expression"),
        ({"target_modules": [1]}, "target_modules must be"),
        ({"target_modules": 7}, "target_modules must be"),
        ({"exclude_modules": {"q_proj": 1}}, "exclude_modules must be"),
        ({"layers_to_transform": "0"}, "layers_to_transform must be a layer's number or a list of them"),
        ({"layers_to_transform": [0.0]}, "layers_to_transform must be"),
        ({"r": 4}, "want [4, 72]"),
        ({"rank_pattern": {"q_proj": 3}}, "want [3, 72]"),
        ({"target_modules": ["q_proj"]}, "layers.1.self_attn.q_proj is one of target_modules"),
        ({"target_modules": r".*\.0\..*(q|k)_proj"}, "layers.0.self_attn.k_proj is one of target_modules"),
    ],
)
def test_a_config_that_is_refused(tmp_path, config, words):
    with pytest.raises(AdapterError) as error:
        check_adapter(write(tmp_path / "a", config), SPEC, 8)
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
        check_adapter(write(tmp_path / "a", None, tensors), SPEC, 8)
    assert words in str(error.value)


def test_too_large_a_rank(tmp_path):
    with pytest.raises(AdapterError, match="has rank 2, at most max_lora_rank=1"):
        check_adapter(write(tmp_path / "a"), SPEC, 1)


def test_numbers_that_are_not_finite(tmp_path):
    checked = check_adapter(
        write(tmp_path / "a", None, {f"{PREFIX}.q_proj.lora_B.weight": torch.full((96, 2), 7e4)}), SPEC, 8
    )
    load_adapter("a", checked, torch.float32)
    with pytest.raises(AdapterError, match=r"not finite in torch\.float16"):
        load_adapter("a", checked, torch.float16)


def test_a_file_that_was_cut(tmp_path):
    folder = write(tmp_path / "a")
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])
    with pytest.raises(AdapterError, match="not a whole safetensors file"):
        check_adapter(folder, SPEC, 8)


def test_pickles_and_missing_files(tmp_path):
    folder = write(tmp_path / "a")
    os.rename(folder / WEIGHTS, tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match="there is no"):
        check_adapter(folder, SPEC, 8)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle file"):
        check_adapter(folder, SPEC, 8)
    (folder / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match="a link that leaves its folder"):
        check_adapter(folder, SPEC, 8)
    with pytest.raises(AdapterError, match="no adapter folder"):
        check_adapter(tmp_path / "nowhere", SPEC, 8)


def test_the_hubs_cache_may_link_to_its_blobs(tmp_path):
    repository = tmp_path / "models--x"
    real, snapshot = (
        write(repository / "blobs" if repository.mkdir() is None else tmp_path),
        repository / "snapshots" / "c0ffee",
    )
    snapshot.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        (snapshot / name).symlink_to(real / name)
    assert check_adapter(snapshot, SPEC, 8).ranks == {"model.layers.0.self_attn.q_proj": 2}


def test_rank_and_scale_are_those_of_peft(tmp_path):
    """Against the scaling that PEFT's own layers have."""
    settings = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj", "up_proj"], "use_rslora": True,
                "rank_pattern": {"o_proj": 7, r".*\.1\.mlp\.up_proj": 2}, "alpha_pattern": {r"layers\.[12]\..*": 11}}  # fmt: skip
    import peft  # here: it imports a dozen models of transformers

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
    registry = AdapterRegistry(SPEC, 8)
    first = registry.add(LoRARequest("sql", 1, str(folder)))
    assert registry.add(LoRARequest("sql", 1, str(folder))) is first
    with pytest.raises(AdapterError, match="is not the adapter of this name"):
        registry.add(LoRARequest("sql", 2, str(folder)))
    with pytest.raises(AdapterError, match="lora_int_id 1 belongs to adapter 'sql'"):
        registry.add(LoRARequest("other", 1, str(folder)))
    assert registry.remove(1) and not registry.remove(1)
    tensors = load_file(folder / WEIGHTS)
    save_file({name: x + 1 for name, x in tensors.items()}, folder / WEIGHTS)
    second = registry.add(LoRARequest("sql", 1, str(folder))).key
    assert second != first.key
    registry.remove(1)
    save_file(tensors, folder / WEIGHTS)
    # the first contents again: their blocks are right
    assert registry.add(LoRARequest("sql", 1, str(folder))).key == first.key


def test_no_name_gives_the_key_of_another_adapter(tmp_path):
    """A key is the name and a digest of the files, from the first adapter of a name on."""
    folder = write(tmp_path / "a")
    contents = hashlib.sha256((folder / CONFIG).read_bytes() + (folder / WEIGHTS).read_bytes()).hexdigest()
    keys = set()
    for number, name in enumerate(("sql", "sql@2", f"sql@{contents[:32]}"), 1):
        registry = AdapterRegistry(SPEC, 8)
        registry.add(LoRARequest("sql", 9, str(write(tmp_path / "b", {"lora_alpha": 8}))))
        registry.remove(9)
        keys.add(registry.add(LoRARequest(name, number, str(folder))).key)
    assert keys == {f"{name}@{contents[:32]}" for name in ("sql", "sql@2", f"sql@{contents[:32]}")}


def test_the_registry_may_be_asked_while_adapters_are_added(tmp_path):
    registry, faults, stop = AdapterRegistry(SPEC, 8), [], threading.Event()
    folder = str(write(tmp_path / "a"))

    def ask():
        while not stop.is_set():
            try:
                registry.ids(), registry.by_id(0)
            except RuntimeError as error:
                faults.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    readers = [threading.Thread(target=ask) for _ in range(2)]
    try:
        for reader in readers:
            reader.start()
        for number in range(1, 200):
            registry.add(LoRARequest(f"a{number}", number, folder))
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for reader in readers:
            reader.join()
    assert not faults and registry.ids() == set(range(1, 200))


def test_a_slow_disk_does_not_stall_other_adapters(tmp_path, monkeypatch):
    """While one adapter's files are read, the registry answers and takes others."""
    registry, begun, go_on = AdapterRegistry(SPEC, 8), threading.Event(), threading.Event()
    slow, fast = write(tmp_path / "slow"), write(tmp_path / "fast")
    digest = store.check_adapter

    def check(path, *about):
        if path == str(slow):
            begun.set()
            assert go_on.wait(30)
        return digest(path, *about)

    monkeypatch.setattr(store, "check_adapter", check)
    both = [threading.Thread(target=registry.add, args=(LoRARequest("slow", 1, str(slow)),)) for _ in range(2)]
    for thread in both:
        thread.start()
    assert begun.wait(30)
    answers = []
    other = threading.Thread(
        target=lambda: answers.append((registry.add(LoRARequest("fast", 2, str(fast))), registry.ids()))
    )
    other.start()
    other.join(20)
    stalled = other.is_alive()
    go_on.set()
    for thread in (*both, other):
        thread.join()
    assert not stalled and answers[0][1] == {2}
    assert registry.ids() == {1, 2}


def moe_adapter(folder: Path, model: str, modules: dict[str, tuple[int, int]], **config: Any) -> Path:
    """An adapter of rank 2 of these modules, (outputs, inputs), of layer 1."""
    tensors: dict[str, Any] = dict.fromkeys((f"{PREFIX}.q_proj.lora_A.weight", f"{PREFIX}.q_proj.lora_B.weight"))
    for name, (outputs, inputs) in modules.items():
        at = f"base_model.model.model.layers.1.{name}"
        tensors |= {f"{at}.lora_A.weight": torch.ones(2, inputs), f"{at}.lora_B.weight": torch.ones(outputs, 2)}
    return write(folder, {"target_modules": list(modules), **config}, tensors)


@pytest.mark.parametrize(
    ("model", "module", "words"),
    [
        ("qwen3-moe", "mlp.experts.3.gate_proj", "adapters of experts are not implemented"),
        ("qwen3-moe", "mlp.experts", "adapters of experts are not implemented"),
        ("qwen2-moe", "mlp.shared_expert.down_proj", "adapters of experts are not implemented"),
        ("deepseek-v3", "mlp.shared_experts.up_proj", "adapters of experts are not implemented"),
        ("deepseek-v3", "self_attn.kv_b_proj", "adapters of kv_b_proj are not implemented"),
        ("deepseek-v3", "self_attn.k_proj", "this base model has no layer 'model.layers.1.self_attn.k_proj'"),
    ],
)
def test_what_cannot_have_an_adapter(tmp_path, model, module, words):
    spec = spec_from_config(hf_config(model).to_dict())
    with pytest.raises(AdapterError) as error:
        check_adapter(moe_adapter(tmp_path / "a", model, {module: (72, 72)}), spec, 8)
    assert words in str(error.value)


@pytest.mark.parametrize("with_router", [False, True])
def test_all_linear_may_leave_out_the_router(tmp_path, with_router):
    """PEFT takes a router for a linear layer in some models and not in others."""
    spec = spec_from_config(hf_config("qwen3-moe").to_dict())
    tensors: dict[str, Any] = dict.fromkeys((f"{PREFIX}.q_proj.lora_A.weight", f"{PREFIX}.q_proj.lora_B.weight"))
    modules = dict(list(lora_targets(spec).items())[2:])
    routers = {module for module in modules if module.endswith("mlp.gate")}
    for module, (outputs, inputs) in modules.items():
        if with_router or module not in routers:
            at = f"base_model.model.{module}"
            tensors |= {f"{at}.lora_A.weight": torch.ones(2, inputs), f"{at}.lora_B.weight": torch.ones(outputs, 2)}
    folder = write(tmp_path / "a", {"target_modules": "all-linear"}, tensors)
    ranks = check_adapter(folder, spec, 8).ranks
    assert len(routers) == 3 and ranks.keys() == modules.keys() - (set() if with_router else routers)
