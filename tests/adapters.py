"""LoRA adapters of tiny models, made and merged by PEFT."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import hf_model

VARIANTS: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "patterns": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["k_proj", "o_proj", "up_proj"],
        "rank_pattern": {"o_proj": 9, r"model\.layers\.1\..*up_proj": 5},
        "alpha_pattern": {"layers.2.self_attn.k_proj": 30},
    },
    "query-only": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]},
    "gate-only": {"r": 8, "lora_alpha": 16, "target_modules": ["gate_proj"]},
    "regex": {"r": 4, "lora_alpha": 12, "target_modules": r"model\.layers\.[02]\.mlp\.(up|down)_proj"},
    "some-layers": {"r": 5, "lora_alpha": 9, "target_modules": ["v_proj", "gate_proj"], "layers_to_transform": [1, 3]},
    "ends": {"r": 6, "lora_alpha": 6, "target_modules": ["embed_tokens", "lm_head", "o_proj"]},
}
"""PEFT's settings, by a name."""


def peft_adapter(model: str, settings: dict[str, Any], folder: Path, seed: int) -> Any:
    """Save an adapter of a tiny model in `folder`; gives the merged transformers model."""
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(copy.deepcopy(hf_model(model)), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 / parameter.shape[-1] ** 0.5
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload()
