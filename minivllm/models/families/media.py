"""Families that read pictures or hear: LLaVA, Gemma 3, Idefics 3, Qwen2.5-VL, Qwen2-Audio."""

# Generated from nbs/models/families/media.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import replace
from typing import Any

from minivllm.models.spec import ConfigReader, DecoderSpec, MediaSpec, family, spec_from_config

_TOWER = ("vision_tower.", "audio_tower.", "multi_modal_projector.", "vision_model.", "connector.", "visual.")
_TEXT = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}
_DECODERS = {"qwen2_5_vl_text": "qwen2"}  # model types of decoders that are another's under a new name


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
    full["model_type"] = _DECODERS.get(full["model_type"], full["model_type"])
    return {name: value for name, value in full.items() if name != "architectures"}


def surrounded(r: ConfigReader, *fields: str, token: str, modality: str = "image", whole: bool = False) -> DecoderSpec:
    """The spec of the text model, told what surrounds it.

    Args:
        fields: those of the configuration that the encoder reads, besides `vision_config` or `audio_config`.
        token: the configuration's name for the id of a placeholder.
        modality: what the encoder reads.
        whole: a picture's tokens see each other in both directions.
    """
    r.skip("audio_config" if modality == "audio" else "vision_config", *fields)
    spec = spec_from_config(text_config(r))
    token_id = r.get(token) if r.get(token) is not None else r.need(f"{modality}_token_id")
    if not 0 <= token_id < spec.vocab_size:
        raise ValueError(f"{token} is {token_id}; token ids are 0..{spec.vocab_size - 1}")
    media = MediaSpec(config=r.config, token_id=token_id, modality=modality, whole=whole)
    return replace(spec, family=r.family, media=media, rename=text_name)


@family("LlavaForConditionalGeneration", "llava")
def llava(r: ConfigReader) -> DecoderSpec:
    """LLaVA 1.5 and its kin: CLIP or SigLIP, two linear layers, any of our decoders."""
    r.only("projector_hidden_act", "gelu", "gelu_pytorch_tanh", "relu")
    fields = ("vision_feature_layer", "vision_feature_select_strategy", "image_seq_length", "multimodal_projector_bias")
    return surrounded(r, *fields, "ignore_index", token="image_token_index")


@family("Gemma3ForConditionalGeneration", "gemma3")
def gemma3_vision(r: ConfigReader) -> DecoderSpec:
    """Gemma 3 from 4B on: SigLIP, pooled to a fixed number of tokens, which see each other in both directions."""
    spec = surrounded(r, "boi_token_index", "eoi_token_index", token="image_token_index", whole=True)
    tokens = r.get("mm_tokens_per_image", 256)
    windows = [w for layer in spec.layers if (w := layer.mixer.sliding_window) is not None]  # type: ignore[attr-defined]
    if windows and tokens > min(windows):
        raise ValueError(f"mm_tokens_per_image={tokens} is more than the sliding window of {min(windows)}")
    mixers = [replace(layer.mixer, sees_ahead=True) for layer in spec.layers]  # type: ignore[type-var]
    return replace(spec, layers=tuple(replace(x, mixer=m) for x, m in zip(spec.layers, mixers, strict=True)))


@family("Idefics3ForConditionalGeneration", "idefics3")
def idefics3(r: ConfigReader) -> DecoderSpec:
    """Idefics 3: tiles and a view of the whole, SigLIP, pixel shuffle, Llama."""
    return surrounded(r, "scale_factor", "_pad_token_id", token="image_token_id")


@family("SmolVLMForConditionalGeneration", "smolvlm")
def smolvlm(r: ConfigReader) -> DecoderSpec:
    """SmolVLM: as Idefics 3."""
    return idefics3(r)


@family("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl")
def qwen2_5_vl(r: ConfigReader) -> DecoderSpec:
    """Qwen2.5-VL: pictures of any shape, a tower with window attention, and three positions per token (M-RoPE)."""
    marks = tuple(f"{kind}_token_id" for kind in ("image", "video", "vision_start", "vision_end", "vision"))
    config = {name: r.get(name) for name in r.config}  # all are read: the reader below checks what is left over
    if "text_config" not in config:  # published files mix the text model's fields with the others
        text = {name: config.pop(name) for name in list(config) if name not in ("vision_config", "model_type", *marks)}
        config |= {"text_config": text, "tie_word_embeddings": text.get("tie_word_embeddings", False)}
    config["text_config"] = {"model_type": "qwen2_5_vl_text", **config["text_config"]}
    reader = ConfigReader(config, r.family)
    spec = surrounded(reader, *marks, token="image_token_id")
    reader.finish()
    return spec


@family("Qwen2AudioForConditionalGeneration", "qwen2_audio")
def qwen2_audio(r: ConfigReader) -> DecoderSpec:
    """Qwen2-Audio: Whisper's encoder, one linear layer, Qwen2."""
    return surrounded(r, "ignore_index", token="audio_token_index", modality="audio")
