"""Tiny models that read pictures, with random weights, as Hugging Face folders; and what transformers says of them."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_models import randomise, tiny_tokenizer

_TEXT = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}  # fmt: skip
_VISION = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}  # fmt: skip
VLMS = ("llava", "llava-siglip", "gemma3", "idefics3", "smolvlm")
IDS = {"<image>": 260, "<start_of_image>": 260, "<end_of_image>": 261, "<image_soft_token>": 262}
MARKERS = {"gemma3": "<start_of_image>"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}MARKER"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def marker(name: str) -> str:
    return MARKERS.get(name, "<image>")


def _tokenizer(name: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokens = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokens += [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
    if name == "gemma3":
        tokens = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    if name == "gemma3":
        for attribute, token in zip(("boi", "eoi", "image"), tokens, strict=True):
            setattr(tokenizer, f"{attribute}_token", token)
            setattr(tokenizer, f"{attribute}_token_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.chat_template = TEMPLATE.replace("MARKER", marker(name))
    return tokenizer


def _config(name: str) -> Any:
    from transformers import AutoConfig

    if name.startswith("llava"):
        kind = "clip_vision_model" if name == "llava" else "siglip_vision_model"
        text = {"model_type": "llama" if name == "llava" else "qwen2", **_TEXT}
        strategy = "default" if name == "llava" else "full"
        return AutoConfig.for_model(
            "llava", text_config=text, vision_config={"model_type": kind, **_VISION}, image_token_index=260,
            vision_feature_layer=-2 if name == "llava" else -1, vision_feature_select_strategy=strategy,
        )  # fmt: skip
    if name == "gemma3":
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "query_pre_attn_scalar": 16, "head_dim": 16}  # fmt: skip
        return AutoConfig.for_model(
            "gemma3", text_config={**_TEXT, **layers}, vision_config=_VISION, mm_tokens_per_image=4,
            boi_token_index=260, eoi_token_index=261, image_token_index=262,
        )  # fmt: skip
    text = {"model_type": "llama", **_TEXT}
    return AutoConfig.for_model(name, text_config=text, vision_config=_VISION, scale_factor=2, image_token_id=260)


@cache
def vlm(name: str) -> Any:
    """The transformers model, float32."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(_config(name), attn_implementation="eager").eval()
    randomise(model)
    return model


@cache
def processor(name: str) -> Any:
    """transformers' own processor."""
    import transformers as t

    tokenizer, size = _tokenizer(name), {"height": 32, "width": 32}
    if name == "llava":
        images = t.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size)
        return t.LlavaProcessor(images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1)  # fmt: skip
    if name == "llava-siglip":
        images = t.SiglipImageProcessor(size=size)
        return t.LlavaProcessor(images, tokenizer, patch_size=8, vision_feature_select_strategy="full", num_additional_image_tokens=0)  # fmt: skip
    if name == "gemma3":
        return t.Gemma3Processor(t.Gemma3ImageProcessor(size=size), tokenizer, image_seq_length=4)
    images = t.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return t.Idefics3Processor(images, tokenizer, image_seq_len=4)


def save_vlm(name: str, folder: Path) -> Path:
    model = vlm(name)
    model.generation_config.eos_token_id = 257
    model.save_pretrained(folder)
    processor(name).image_processor.save_pretrained(folder)
    processor(name).tokenizer.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 5, width // 5, 3), dtype=np.uint8)
    return Image.fromarray(values.repeat(5, 0).repeat(5, 1))


@torch.no_grad()
def greedy(name: str, text: str, images: list[Image.Image], count: int) -> tuple[list[int], list[int], torch.Tensor]:
    """Prompt ids, greedy tokens, and log-probabilities [prompt + count - 1, vocabulary] of transformers' own model and processor."""
    model, inputs = vlm(name), dict(processor(name)(images=images or None, text=text, return_tensors="pt"))
    prompt, new = inputs.pop("input_ids"), []
    inputs.pop("attention_mask", None)
    types = inputs.pop("token_type_ids", None)
    for _ in range(count):
        ids = torch.cat([prompt, torch.tensor([new], dtype=torch.long)], 1)
        if name == "gemma3":
            base = torch.zeros_like(prompt) if types is None else types
            inputs["token_type_ids"] = torch.nn.functional.pad(base, (0, len(new)))
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
        new.append(int(logits[-1].argmax()))
    return prompt[0].tolist(), new, logits.float().log_softmax(-1)
