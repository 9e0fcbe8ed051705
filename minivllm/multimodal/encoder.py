"""Vision or audio tower and projector: built by transformers, loaded from our checkpoint reader."""

# Generated from nbs/multimodal/encoder.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.core.encoder_cache import MultiModalFeatureSpec
from minivllm.models.families.media import text_name
from minivllm.models.loading import CheckpointError, LoadedModel, dummy_tensors, iter_tensors
from minivllm.models.spec import MediaSpec

_SMALL = {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "layer_types": None}


def build_tower(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """transformers' model without its language model. Its weights are not set."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    text = {k: v for k, v in config["text_config"].items() if k not in ("layer_types", "dtype", "torch_dtype")}
    special = {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    given = {k: v for k, v in config.items() if k not in ("model_type", "dtype", "torch_dtype", "architectures")}
    small = given | special | {"text_config": text | special | _SMALL}
    auto = AutoModelForSeq2SeqLM if "audio_config" in config else AutoModelForImageTextToText
    tower = auto.from_config(AutoConfig.for_model(config["model_type"], **small), dtype=dtype).model
    for name in ("language_model", "text_model"):
        if hasattr(tower, name):
            delattr(tower, name)
    return tower.eval().requires_grad_(False)


def tower_name(name: str) -> str:
    """A tensor's name without what differs between versions of transformers."""
    return name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")


def load_tower(model: LoadedModel, tower: nn.Module, dtype: str) -> None:
    """Fill a tower.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape; names it.
    """
    wanted = {tower_name(name): parameter for name, parameter in tower.state_dict().items()}
    missing = set(wanted)
    for name, tensor in _tower_tensors(model, wanted, dtype):
        if name not in wanted:
            raise CheckpointError(f"{model.path}: the encoder has no place for the tensor {name!r}")
        if wanted[name].shape != tensor.shape:
            shapes = tuple(wanted[name].shape), tuple(tensor.shape)
            raise CheckpointError(f"{model.path}: tensor {name!r} must have shape {shapes[0]}, got {shapes[1]}")
        wanted[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise CheckpointError(f"{model.path}: the checkpoint lacks {', '.join(sorted(missing)[:5])}")


def _tower_tensors(model: LoadedModel, wanted: dict[str, Tensor], dtype: str) -> Iterator[tuple[str, Tensor]]:
    if model.load_format == "dummy":
        shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        yield from dummy_tensors(shapes, model.seed, next(iter(wanted.values())).device)
        return
    own = [r for r in model.records if text_name(r.name) is None and not r.name.endswith("position_ids")]
    for name, tensor in iter_tensors(own, dtype):
        yield tower_name(name), tensor


class TowerEncoder:
    """Encodes pictures or clips with a tower. See `MediaEncoder`."""

    def __init__(self, tower: nn.Module, device: torch.device) -> None:
        self.tower, self.device = tower.to(device), device

    @torch.inference_mode()
    def encode(self, features: Sequence[MultiModalFeatureSpec]) -> list[Tensor]:
        """The embeddings of each, [its num_embeds, hidden_size]."""
        return [self._encode(feature) for feature in features]

    def _encode(self, feature: MultiModalFeatureSpec) -> Tensor:
        inputs = {name: torch.from_numpy(array).to(self.device) for name, array in feature.data.items()}
        dtype = next(self.tower.parameters()).dtype
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        if feature.modality == "audio":
            rows = self._sound(**inputs)
        else:
            found = self.tower.get_image_features(**inputs).pooler_output  # type: ignore[operator]
            rows = torch.cat([part.flatten(0, -2) for part in found])
        if len(rows) != feature.mm_position.num_embeds:
            raise ValueError(
                f"the encoder gave {len(rows)} embeddings for {feature.mm_position.num_embeds} placeholders"
            )
        return rows

    def _sound(self, input_features: Tensor, attention_mask: Tensor) -> Tensor:
        """Of one clip: mel frames [1, bins, frames], and 1 for each frame [1, frames] that is no padding."""
        tower: Any = self.tower
        frames, count = tower.audio_tower._get_feat_extract_output_lengths(attention_mask.sum())
        padding = torch.arange((attention_mask.shape[-1] - 2) // 2 + 1, device=self.device) >= frames
        mask = torch.zeros(1, 1, 1, len(padding), dtype=input_features.dtype, device=self.device)
        mask[..., padding] = torch.finfo(mask.dtype).min
        hidden = tower.audio_tower(input_features, attention_mask=mask).last_hidden_state
        return tower.multi_modal_projector(hidden)[0, : int(count)]


def load_encoder(model: LoadedModel, spec: MediaSpec, dtype: torch.dtype, device: torch.device) -> TowerEncoder:
    """Build and fill the encoder of a model. Raises CheckpointError."""
    tower = build_tower(spec.config, dtype).to(device)
    load_tower(model, tower, str(dtype).removeprefix("torch."))
    return TowerEncoder(tower, device)
