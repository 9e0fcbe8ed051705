"""Pictures to arrays, placeholders and ranges, with a cache."""

# Generated from nbs/multimodal/processor.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.core.encoder_cache import MultiModalFeatureSpec, PlaceholderRange
from minivllm.models.spec import MediaSpec
from minivllm.multimodal.images import MediaError, as_image
from minivllm.multimodal.inputs import check_embeds, embeds_feature


@dataclass(frozen=True)
class Item:
    """One picture, processed.

    Attributes:
        identifier: of the pixels, the processor and the model.
        data: arrays that the encoder reads.
        text: what takes the place of the marker.
        count: placeholders in it, and embeddings that the encoder gives.
    """

    identifier: str
    data: Mapping[str, np.ndarray]
    text: str
    count: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.data.values())


@dataclass(frozen=True)
class Rules:
    """What a family does with a picture.

    Attributes:
        marker: stands for a picture in a prompt.
        count: placeholders of a picture, of its arrays.
        text: what the marker becomes, of the arrays and the placeholders of one view.
        wrap: the same for embeddings that the user gives, of all placeholders; None if they are not supported.
        options: for the image processor.
        inputs: names of the arrays that the encoder reads.
    """

    marker: str
    count: Callable[[Mapping[str, np.ndarray]], int]
    text: Callable[[Mapping[str, np.ndarray], str], str]
    wrap: Callable[[str], str] | None = None
    options: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("pixel_values",)


def llava_rules(config: dict[str, Any], tokenizer: Any, placeholder: str) -> Rules:
    """A placeholder a patch; with CLIP's class token, or without."""
    vision = config["vision_config"]
    default = config.get("vision_feature_select_strategy", "default") == "default"
    extra = int("clip" in vision.get("model_type", "clip_vision_model")) - int(default)

    def count(data: Mapping[str, np.ndarray]) -> int:
        height, width = data["pixel_values"].shape[-2:]
        return (height // vision["patch_size"]) * (width // vision["patch_size"]) + extra

    return Rules(placeholder, count, lambda data, run: run, lambda run: run)


def gemma3_rules(config: dict[str, Any], tokenizer: Any, placeholder: str) -> Rules:
    """A fixed number of placeholders between two marks and empty lines."""
    begin, end = (tokenizer.convert_ids_to_tokens(config[f"{name}_token_index"]) for name in ("boi", "eoi"))

    def wrap(run: str) -> str:
        return f"\n\n{begin}{run}{end}\n\n"

    return Rules(begin, lambda data: config.get("mm_tokens_per_image", 256), lambda data, run: wrap(run), wrap)


def idefics3_rules(config: dict[str, Any], tokenizer: Any, placeholder: str) -> Rules:
    """Tiles in rows, then a view of the whole, or that alone; `run` is the placeholders of one view."""
    vision, around, whole = config["vision_config"], "<fake_token_around_image>", "<global-img>"

    def views(data: Mapping[str, np.ndarray]) -> tuple[int, int]:
        return int(np.ravel(data["rows"])[0]), int(np.ravel(data["cols"])[0])

    def count(data: Mapping[str, np.ndarray]) -> int:
        rows, columns = views(data)
        side = data["pixel_values"].shape[-1] // vision["patch_size"] // config.get("scale_factor", 2)
        return side * side * (rows * columns + 1)

    def text(data: Mapping[str, np.ndarray], run: str) -> str:
        rows, columns = views(data)
        one = run[: len(run) // (rows * columns + 1)]
        lines = ("".join(f"{around}<row_{r + 1}_col_{c + 1}>{one}" for c in range(columns)) for r in range(rows))
        tiles = "".join(f"{line}\n" for line in lines)
        return f"{tiles}\n{around}{whole}{one}{around}" if rows else f"{around}{whole}{one}{around}"

    inputs = ("pixel_values", "pixel_attention_mask")
    return Rules(placeholder, count, text, options=("return_row_col_info",), inputs=inputs)


RULES = {"llava": llava_rules, "gemma3": gemma3_rules, "idefics3": idefics3_rules, "smolvlm": idefics3_rules}


class MediaProcessor:
    """Makes a request's inputs of pictures.

    Args:
        path: folder of the model.
        spec: what surrounds its decoder.
        tokenizer: of the model.
        limits: most inputs of a prompt by modality, {"image": n}.
        cache_bytes: of processed pictures to keep.

    Attributes:
        hits: pictures that were found in the cache.
    """

    def __init__(
        self, path: str, spec: MediaSpec, tokenizer: Any, hidden_size: int | None,
        limits: Mapping[str, int] | None = None, cache_bytes: int = 1 << 30,
    ) -> None:  # fmt: skip
        from transformers import AutoImageProcessor

        kind = spec.config["model_type"]
        try:
            self.images = AutoImageProcessor.from_pretrained(path)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"{path}: no image processor can be made: {error}") from error
        if getattr(self.images, "do_pan_and_scan", None):
            raise ValueError(f"{path}: do_pan_and_scan is not supported")
        self.spec, self.tokenizer, self.hidden_size = spec, tokenizer, hidden_size
        self.placeholder = tokenizer.convert_ids_to_tokens(spec.image_token_id)
        if self.placeholder is None:
            raise ValueError(f"{path}: the tokenizer has no token {spec.image_token_id}, which stands for pictures")
        self.rules = RULES[kind](spec.config, tokenizer, self.placeholder)
        self.limits, self.hits = dict(limits or {}), 0
        settings = json.dumps(self.images.to_dict(), sort_keys=True, default=str)
        self._salt = hashlib.sha256(f"{path} {settings}".encode()).digest()
        self._cache: OrderedDict[str, Item] = OrderedDict()
        self._room = self._cache_bytes = cache_bytes

    def load(self, data: Any) -> list[Item]:
        """The inputs of a prompt, processed.

        Args:
            data: {"image": one or a list}, each a PIL image, a uint8 array or a path (see `as_image`), or a tensor of embeddings
                [tokens, hidden_size].

        Raises:
            TypeError, ValueError: says which one is wrong, and what is allowed.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"multi_modal_data must be a dict such as {{'image': ...}}, got {type(data).__name__}")
        for modality in data:
            if modality != "image":
                raise ValueError(f"multi_modal_data: this model takes 'image' alone, got {modality!r}")
        given = data.get("image", [])
        listed = list(given) if isinstance(given, list | tuple) else [given]
        if len(listed) > self.limits.get("image", len(listed)):
            raise ValueError(f"{len(listed)} images in one prompt; limit_mm_per_prompt allows {self.limits['image']}")
        items = []
        for i, value in enumerate(listed):
            try:
                items.append(self._embeds(value) if hasattr(value, "detach") else self._image(value))
            except (TypeError, ValueError, OSError) as error:
                kind = TypeError if isinstance(error, TypeError) else MediaError
                raise kind(f"image {i}: {error}") from error
        return items

    def _embeds(self, value: Any) -> Item:
        if self.rules.wrap is None:
            raise TypeError("embeddings in the place of a picture are not supported by this model")
        rows = check_embeds(value, self.hidden_size, "embeddings of an image")
        name = embeds_feature(rows, 0, "image").identifier
        return Item(name, {"embeds": rows}, self.rules.wrap(self.placeholder * len(rows)), len(rows))

    def _image(self, value: Any) -> Item:
        picture = as_image(value)
        name = hashlib.sha256(self._salt + repr(picture.size).encode() + picture.tobytes()).hexdigest()
        if name in self._cache:
            self._cache.move_to_end(name)
            self.hits += 1
            return self._cache[name]
        made = self.images(images=[picture], return_tensors="np", **dict.fromkeys(self.rules.options, True))
        arrays = {key: np.asarray(array) for key, array in made.items()}
        count = self.rules.count(arrays)
        text = self.rules.text(arrays, self.placeholder * count)
        item = Item(name, {key: arrays[key] for key in self.rules.inputs if key in arrays}, text, count)
        self._cache[name] = item
        self._room -= item.nbytes
        while self._room < 0:
            self._room += self._cache.popitem(last=False)[1].nbytes
        return item

    def expand(self, prompt: str | Sequence[int], items: Sequence[Item]) -> Any:
        """A prompt, text or token ids, with the markers replaced.

        Raises:
            ValueError: there are not as many markers as pictures.
        """
        rules = self.rules
        marker = self.tokenizer.convert_tokens_to_ids(rules.marker)
        found = prompt.count(rules.marker) if isinstance(prompt, str) else sum(token == marker for token in prompt)
        if found != len(items):
            raise ValueError(
                f"the prompt has {found} times {rules.marker!r}, which stands for an image, and there are {len(items)} images"
            )
        if isinstance(prompt, str):
            parts = prompt.split(rules.marker)
            return parts[0] + "".join(item.text + part for item, part in zip(items, parts[1:], strict=True))
        queue, token_ids = iter(items), list[int]()
        for token in prompt:
            token_ids += (
                self.tokenizer.encode(next(queue).text, add_special_tokens=False) if token == marker else [token]
            )
        return token_ids

    def place(self, token_ids: Sequence[int], items: Sequence[Item]) -> tuple[MultiModalFeatureSpec, ...]:
        """The inputs of a request, from its token ids after `expand`.

        Raises:
            ValueError: there are more or fewer placeholders than the pictures have.
        """
        places = np.flatnonzero(np.asarray(token_ids) == self.spec.image_token_id)
        if len(places) != (total := sum(item.count for item in items)):
            raise ValueError(f"the prompt has {len(places)} tokens {self.placeholder!r}, and its images need {total}")
        features, done = [], 0
        for item in items:
            own, done = places[done : done + item.count], done + item.count
            start, end = int(own[0]), int(own[-1]) + 1
            mask = None if end - start == len(own) else np.isin(np.arange(start, end), own).astype(np.uint8).tobytes()
            where = PlaceholderRange(start, end - start, mask)
            features.append(MultiModalFeatureSpec(item.identifier, "image", where, dict(item.data), self.spec.whole))
        return tuple(features)
