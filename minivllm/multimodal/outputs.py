"""Encoder outputs in the model runner, and the rows of a step that they fill."""

# Generated from nbs/multimodal/outputs.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minivllm.attention.backend import AttentionBatch
from minivllm.core.encoder_cache import MultiModalFeatureSpec
from minivllm.core.output import SchedulerOutput
from minivllm.models.decoder import Media
from minivllm.multimodal.mrope import StepTokens


class MediaEncoder(Protocol):
    """Turns pictures and the like into embeddings."""

    def encode(self, features: Sequence[MultiModalFeatureSpec]) -> list[Tensor]:
        """The embeddings of each, [its num_embeds, hidden_size]."""
        ...


class StepRows(StepTokens, Protocol):
    """What is asked of a step besides its tokens."""

    @property
    def attention(self) -> list[AttentionBatch]: ...


class EncoderOutputs:
    """The outputs that the scheduler has asked for and not dropped.

    Args:
        encoder: None if the model reads text alone; then only embeddings can come.
        dtype, device: of the model.

    Attributes:
        outputs: by identifier, [num_embeds, hidden_size].
        features: of requests whose media are not computed yet.
    """

    def __init__(self, encoder: MediaEncoder | None, dtype: torch.dtype, device: torch.device) -> None:
        self.encoder, self.dtype, self.device = encoder, dtype, device
        self.outputs: dict[str, Tensor] = {}
        self.features: dict[str, tuple[MultiModalFeatureSpec, ...]] = {}

    def update(self, output: SchedulerOutput) -> None:
        """Drop and encode what a decision says."""
        for name in output.free_encoder_mm_hashes:
            self.outputs.pop(name, None)
        raw = [feature for feature in output.scheduled_encoder_inputs if "embeds" not in feature.data]
        for feature in output.scheduled_encoder_inputs:
            if (given := feature.data.get("embeds")) is not None:
                self.outputs[feature.identifier] = self._keep(torch.from_numpy(given))
        if raw:
            assert self.encoder is not None, "the input processor lets no media through"
            for feature, rows in zip(raw, self.encoder.encode(raw), strict=True):
                self.outputs[feature.identifier] = self._keep(rows)

    def _keep(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, self.dtype)

    def gather(self, step: StepRows) -> Media | None:
        """The rows of a step that encoder outputs fill; None if there are none. Media that lie behind are forgotten.

        Ranges that see both ways inside themselves are noted in the step's attention batches.
        """
        rows, values, last_key = list[npt.NDArray[np.int64]](), list[Tensor](), step.positions
        for i, name in enumerate(step.request_ids):
            if name not in self.features:
                continue
            begin, end = int(step.starts[i]), int(step.starts[i + 1])
            first, last = int(step.positions[begin]), int(step.positions[end - 1]) + 1
            for feature in self.features[name]:
                place = feature.mm_position
                inside = np.arange(max(first, place.offset), min(last, place.end))
                if not len(inside):
                    continue
                if feature.whole:
                    last_key = last_key.copy() if last_key is step.positions else last_key
                    last_key[inside - first + begin] = place.end - 1
                if place.is_embed is None:
                    which = inside - place.offset
                else:
                    mask = np.frombuffer(place.is_embed, np.uint8)
                    inside = inside[mask[inside - place.offset] == 1]
                    which = (np.cumsum(mask, dtype=np.int64) - 1)[inside - place.offset]
                rows.append(inside - first + begin)
                values.append(self.outputs[feature.identifier][torch.from_numpy(which).to(self.device)])
            if last >= self.features[name][-1].mm_position.end:
                del self.features[name]
        if not rows:
            return None
        for batch in step.attention if last_key is not step.positions else ():
            batch.last_key = last_key
        return Media(torch.from_numpy(np.concatenate(rows)).to(self.device), torch.cat(values))
