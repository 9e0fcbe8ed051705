"""LoRA adapters of tiny models, made and merged by PEFT."""

import copy
from pathlib import Path
from typing import Any

import torch
from tiny_models import hf_model

from minivllm import SamplingParams

NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
SIZES: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 32, "num_gpu_blocks": 200}

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
    import peft  # here: it imports a dozen models of transformers

    wrapped = peft.get_peft_model(copy.deepcopy(hf_model(model)), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3 / parameter.shape[-1] ** 0.5
    wrapped.save_pretrained(folder)
    return wrapped.merge_and_unload()


def prompts_of(name: str) -> list[list[int]]:
    """Two that begin alike for every adapter, and one of its own."""
    generator = torch.Generator().manual_seed(len(name))
    shared = list(range(40, 76))
    return [shared + [7], shared + [9, 11], torch.randint(0, 250, (21,), generator=generator).tolist()]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()
