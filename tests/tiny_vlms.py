"""Tiny models that read pictures or hear, with random weights, as Hugging Face folders; and what transformers says of them."""

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
VLMS = ("llava", "llava-siglip", "gemma3", "idefics3", "smolvlm", "qwen2_5_vl", "qwen2_audio")
IDS = {"<image>": 260, "<start_of_image>": 260, "<end_of_image>": 261, "<image_soft_token>": 262}
MARKERS = {"gemma3": "<start_of_image>", "qwen2_audio": "<|AUDIO|>"}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'KIND' %}MARKER"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def marker(name: str) -> str:
    return MARKERS.get(name, "<image>")


def modality(name: str) -> str:
    return "audio" if name == "qwen2_audio" else "image"


def _tokenizer(name: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokens = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokens += [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
    if name == "gemma3":
        tokens = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    tokens[0] = marker(name)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    if name == "gemma3":
        for attribute, token in zip(("boi", "eoi", "image"), tokens, strict=True):
            setattr(tokenizer, f"{attribute}_token", token)
            setattr(tokenizer, f"{attribute}_token_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.chat_template = TEMPLATE.replace("MARKER", marker(name)).replace("KIND", modality(name))
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
    if name == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        tower = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": 4, "window_size": 16,
                 "fullatt_block_indexes": [1], "out_hidden_size": 64}  # fmt: skip
        ids = {"image_token_id": 260, "video_token_id": 261, "vision_start_token_id": 262, "vision_end_token_id": 263}
        return AutoConfig.for_model(name, text_config={**_TEXT, "rope_parameters": rope}, vision_config=tower, **ids)
    if name == "qwen2_audio":
        tower = {"d_model": 32, "encoder_ffn_dim": 48, "encoder_layers": 2, "encoder_attention_heads": 2, "num_mel_bins": 16,
                 "max_source_positions": 100}  # fmt: skip
        return AutoConfig.for_model(
            name, text_config={"model_type": "qwen2", **_TEXT}, audio_config=tower, audio_token_index=260
        )
    text = {"model_type": "llama", **_TEXT}
    return AutoConfig.for_model(name, text_config=text, vision_config=_VISION, scale_factor=2, image_token_id=260)


@cache
def vlm(name: str) -> Any:
    """The transformers model, float32."""
    from transformers import AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    auto = AutoModelForSeq2SeqLM if modality(name) == "audio" else AutoModelForImageTextToText
    model = auto.from_config(_config(name), attn_implementation="eager").eval()
    randomise(model)
    return model


class QwenProcessor:
    """As transformers' own of Qwen2.5-VL, which cannot be made without torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, images: Any, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        made = dict(self.image_processor(images=images, return_tensors="pt")) if images else {}
        for grid in made.get("image_grid_thw", ()):
            text = text.replace("<image>", "#" * (int(grid.prod()) // 4), 1)
        ids = torch.tensor([self.tokenizer(text.replace("#", "<image>")).input_ids])
        return {"input_ids": ids, "mm_token_type_ids": (ids == 260).int(), **made}


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
    if name == "qwen2_5_vl":
        pixels = {"shortest_edge": 64, "longest_edge": 1600}
        return QwenProcessor(t.Qwen2VLImageProcessor(patch_size=4, merge_size=2, size=pixels), tokenizer)
    if name == "qwen2_audio":
        hearing = t.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
        return t.Qwen2AudioProcessor(hearing, tokenizer)
    images = t.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return t.Idefics3Processor(images, tokenizer, image_seq_len=4)


def save_vlm(name: str, folder: Path) -> Path:
    model = vlm(name)
    model.generation_config.eos_token_id = 257
    model.save_pretrained(folder)
    reader = "feature_extractor" if modality(name) == "audio" else "image_processor"
    getattr(processor(name), reader).save_pretrained(folder)
    processor(name).tokenizer.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 5, width // 5, 3), dtype=np.uint8)
    return Image.fromarray(values.repeat(5, 0).repeat(5, 1))


def clip(seed: int, milliseconds: int) -> np.ndarray:
    """A chord at 16,000 samples a second."""
    pitches = np.random.default_rng(seed).uniform(100, 4000, (3, 1))
    return np.sin(2 * np.pi * pitches * np.arange(16 * milliseconds) / 16_000).mean(0).astype(np.float32)


@torch.no_grad()
def greedy(name: str, text: str, images: list[Any], count: int) -> tuple[list[int], list[int], torch.Tensor]:
    """Prompt ids, greedy tokens, and log-probabilities [prompt + count - 1, vocabulary] of transformers' own model and processor."""
    given = {"audio" if modality(name) == "audio" else "images": images or None}
    more = {"sampling_rate": 16_000} if modality(name) == "audio" and images else {}
    model, inputs = vlm(name), dict(processor(name)(**given, **more, text=text, return_tensors="pt"))
    prompt, new = inputs.pop("input_ids"), []
    inputs.pop("attention_mask", None)
    types, kinds = inputs.pop("token_type_ids", None), inputs.pop("mm_token_type_ids", None)
    for _ in range(count):
        ids = torch.cat([prompt, torch.tensor([new], dtype=torch.long)], 1)
        if name == "gemma3":
            base = torch.zeros_like(prompt) if types is None else types
            inputs["token_type_ids"] = torch.nn.functional.pad(base, (0, len(new)))
        if kinds is not None:
            inputs["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, len(new)))
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
        new.append(int(logits[-1].argmax()))
    return prompt[0].tolist(), new, logits.float().log_softmax(-1)
