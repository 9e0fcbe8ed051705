"""Families that read pictures: LLaVA, Gemma 3, Idefics 3."""

# Generated from nbs/models/families/media.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import replace
from typing import Any

from minivllm.models.spec import ConfigReader, DecoderSpec, MediaSpec, family, spec_from_config

_TOWER = ("vision_tower.", "multi_modal_projector.", "vision_model.", "connector.")
_TEXT = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}


def text_name(name: str) -> str | None:
    """A checkpoint's name for a tensor of the decoder as the text model's own; None for a tensor of the encoder."""
    if name.removeprefix("model.").startswith(_TOWER):
        return None
    return next((ours + name[len(theirs) :] for theirs, ours in _TEXT.items() if name.startswith(theirs)), name)


def text_config(r: ConfigReader) -> dict[str, Any]:
    """The text model's configuration, with the defaults of its kind.

    Raises:
        ValueError: transformers does not know it.
    """
    from transformers import AutoConfig

    given = dict(r.need("text_config"))
    full = AutoConfig.for_model(given.pop("model_type", "llama"), **given).to_dict()
    tied = r.get("tie_word_embeddings")
    full["tie_word_embeddings"] = given.get(
        "tie_word_embeddings", full.get("tie_word_embeddings") if tied is None else tied
    )
    return {name: value for name, value in full.items() if name != "architectures"}


def seeing(r: ConfigReader, *fields: str, image_token: str, whole: bool = False) -> DecoderSpec:
    """The spec of the text model, told what surrounds it.

    Args:
        fields: of the configuration that the encoder reads, besides `vision_config`.
        image_token: the configuration's name for the id of a picture's placeholder.
        whole: a picture's tokens see each other in both directions.
    """
    for name in ("vision_config", *fields):
        r.get(name)
    spec = spec_from_config(text_config(r))
    token = r.get(image_token) if r.get(image_token) is not None else r.need("image_token_id")
    if not 0 <= token < spec.vocab_size:
        raise ValueError(f"{image_token} is {token}; token ids are 0..{spec.vocab_size - 1}")
    media = MediaSpec(config=r.config, image_token_id=token, whole=whole)
    return replace(spec, family=r.family, media=media, rename=text_name)


@family("LlavaForConditionalGeneration", "llava")
def llava(r: ConfigReader) -> DecoderSpec:
    """LLaVA 1.5 and its kin: CLIP or SigLIP, two linear layers, any of our decoders."""
    r.only("projector_hidden_act", "gelu", "gelu_pytorch_tanh", "relu")
    fields = ("vision_feature_layer", "vision_feature_select_strategy", "image_seq_length", "multimodal_projector_bias")
    return seeing(r, *fields, "ignore_index", image_token="image_token_index")


@family("Gemma3ForConditionalGeneration", "gemma3")
def gemma3_vision(r: ConfigReader) -> DecoderSpec:
    """Gemma 3 from 4B on: SigLIP, pooled to a fixed number of tokens, which see each other in both directions."""
    spec = seeing(r, "boi_token_index", "eoi_token_index", image_token="image_token_index", whole=True)
    tokens = r.get("mm_tokens_per_image", 256)
    windows = [w for layer in spec.layers if (w := layer.mixer.sliding_window) is not None]  # type: ignore[attr-defined]
    if windows and tokens > min(windows):
        raise ValueError(f"mm_tokens_per_image={tokens} is more than the sliding window of {min(windows)}")
    mixers = [replace(layer.mixer, sees_ahead=True) for layer in spec.layers]  # type: ignore[type-var]
    return replace(spec, layers=tuple(replace(x, mixer=m) for x, m in zip(spec.layers, mixers, strict=True)))


@family("Idefics3ForConditionalGeneration", "idefics3")
def idefics3(r: ConfigReader) -> DecoderSpec:
    """Idefics 3: tiles and a view of the whole, SigLIP, pixel shuffle, Llama."""
    return seeing(r, "scale_factor", "_pad_token_id", image_token="image_token_id")


@family("SmolVLMForConditionalGeneration", "smolvlm")
def smolvlm(r: ConfigReader) -> DecoderSpec:
    """SmolVLM: as Idefics 3."""
    return idefics3(r)
