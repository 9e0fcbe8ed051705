"""Pictures and clips to arrays, placeholders and ranges, with a cache."""

# Generated from nbs/multimodal/processor.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minivllm.core.encoder_cache import MultiModalFeatureSpec, PlaceholderRange
from minivllm.models.spec import MediaSpec
from minivllm.multimodal.audio import as_audio
from minivllm.multimodal.images import MediaError, as_image
from minivllm.multimodal.inputs import check_embeds


@dataclass(frozen=True)
class Item:
    """One picture or clip, processed.

    Attributes:
        identifier: of the pixels or samples, the processor and the model.
        data: arrays that the encoder reads.
        text: what takes the place of the marker.
        count: placeholders in it, and embeddings that the encoder gives.
        grid: their rows and columns, where each has its own position.
    """

    identifier: str
    data: Mapping[str, np.ndarray]
    text: str
    count: int
    grid: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.data.values())


@dataclass(frozen=True)
class Rules:
    """What a family does with a picture, or a clip.

    Attributes:
        marker: stands for one in a prompt.
        count: placeholders of one, of its arrays.
        text: what the marker becomes, of the arrays and the placeholders of one view.
        wrap: the same for embeddings that the user gives, of all placeholders; None if they are not supported.
        options: for the image processor or feature extractor.
        inputs: names of the arrays that the encoder reads.
        grid: rows and columns of the placeholders, of the picture's patches [time, rows, columns]; None without M-RoPE.
    """

    marker: str
    count: Callable[[Mapping[str, np.ndarray]], int]
    text: Callable[[Mapping[str, np.ndarray], str], str]
    wrap: Callable[[str], str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ("pixel_values",)
    grid: Callable[[np.ndarray], tuple[int, int]] | None = None


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
    return Rules(placeholder, count, text, options={"return_row_col_info": True}, inputs=inputs)


def qwen2_5_vl_rules(config: dict[str, Any], tokenizer: Any, placeholder: str) -> Rules:
    """A placeholder for each square of patches, as many as the picture's shape gives."""
    side = config["vision_config"].get("spatial_merge_size", 2)

    def grid(patches: np.ndarray) -> tuple[int, int]:
        _, rows, columns = (int(n) for n in np.ravel(patches))
        return rows // side, columns // side

    def count(data: Mapping[str, np.ndarray]) -> int:
        return math.prod(grid(data["image_grid_thw"]))

    inputs = ("pixel_values", "image_grid_thw")
    return Rules(placeholder, count, lambda data, run: run, lambda run: run, inputs=inputs, grid=grid)


def qwen2_audio_rules(config: dict[str, Any], tokenizer: Any, placeholder: str) -> Rules:
    """A placeholder for 40 ms: four frames of the spectrogram, halved by a convolution and by pooling."""

    def count(data: Mapping[str, np.ndarray]) -> int:
        return max(0, ((int(data["attention_mask"].sum()) - 1) // 2 - 1) // 2 + 1)

    options = {"return_attention_mask": True, "padding": "max_length"}
    inputs = ("input_features", "attention_mask")
    return Rules(placeholder, count, lambda data, run: run, lambda run: run, options, inputs)


MAX_RATIO = 200  # of the sides of a picture

RULES = {
    "llava": llava_rules,
    "gemma3": gemma3_rules,
    "idefics3": idefics3_rules,
    "smolvlm": idefics3_rules,
    "qwen2_5_vl": qwen2_5_vl_rules,
    "qwen2_audio": qwen2_audio_rules,
}


class MediaProcessor:
    """Makes a request's inputs of pictures, or of clips.

    Args:
        path: folder of the model.
        spec: what surrounds its decoder.
        tokenizer: of the model.
        limits: most inputs of a prompt by modality, {"image": n}.
        cache_bytes: of processed inputs to keep.
        take_embeds: accept embeddings that an encoder has computed already, in place of pictures or clips.

    Attributes:
        hits: inputs that were found in the cache.
        pictures: the pictures by identifier, for views that show them; None while they are not kept. See `LLMEngine.record`.
    """

    def __init__(
        self, path: str, spec: MediaSpec, tokenizer: Any, hidden_size: int | None,
        limits: Mapping[str, int] | None = None, cache_bytes: int = 1 << 30, take_embeds: bool = False,
    ) -> None:  # fmt: skip
        from transformers import AutoFeatureExtractor, AutoImageProcessor

        kind = spec.config["model_type"]
        try:
            self.reader = (AutoFeatureExtractor if spec.modality == "audio" else AutoImageProcessor).from_pretrained(
                path
            )
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"{path}: no processor of {spec.modality} inputs can be made: {error}") from error
        if getattr(self.reader, "do_pan_and_scan", None):
            raise ValueError(f"{path}: do_pan_and_scan is not supported")
        self.spec, self.tokenizer, self.hidden_size = spec, tokenizer, hidden_size
        self.placeholder = tokenizer.convert_ids_to_tokens(spec.token_id)
        if self.placeholder is None:
            raise ValueError(
                f"{path}: the tokenizer has no token {spec.token_id}, which stands for {spec.modality} inputs"
            )
        self.rules = RULES[kind](spec.config, tokenizer, self.placeholder)
        self.limits, self.hits, self.take_embeds = dict(limits or {}), 0, take_embeds
        self.pictures: dict[str, Any] | None = None
        settings = json.dumps(self.reader.to_dict(), sort_keys=True, default=str)
        self._salt = hashlib.sha256(f"{path} {settings}".encode()).digest()
        self._cache: OrderedDict[str, Item] = OrderedDict()
        self._lock = threading.Lock()
        self._room = self._cache_bytes = cache_bytes

    def load(self, data: Any) -> list[Item]:
        """The inputs of a prompt, processed.

        Args:
            data: {"image": one or a list}, each a PIL image, a uint8 array or a path (see `as_image`), or {"audio": one or a list},
                each an array of samples or (array, samples a second) or a path (see `as_audio`). With `take_embeds` also a tensor of
                embeddings [tokens, hidden_size], or {"image_embeds": that, "image_grid_thw": [time, rows, columns] of its patches}.

        Raises:
            TypeError, ValueError: says which one is wrong, and what is allowed.
        """
        kind = self.spec.modality
        if not isinstance(data, Mapping):
            raise TypeError(f"multi_modal_data must be a dict such as {{{kind!r}: ...}}, got {type(data).__name__}")
        for modality in data:
            if modality != kind:
                raise ValueError(f"multi_modal_data: this model takes {kind!r} alone, got {modality!r}")
        given = data.get(kind, [])
        listed = list(given) if isinstance(given, list) or (isinstance(given, tuple) and kind == "image") else [given]
        if len(listed) > self.limits.get(kind, len(listed)):
            raise ValueError(f"{len(listed)} {kind}s in one prompt; limit_mm_per_prompt allows {self.limits[kind]}")
        items = []
        for i, value in enumerate(listed):
            encoded = hasattr(value, "detach") or isinstance(value, Mapping)
            try:
                items.append(self._embeds(value) if encoded else self._item(value))
            except (TypeError, ValueError, OSError) as error:
                cls = TypeError if isinstance(error, TypeError) else MediaError
                raise cls(f"{kind} {i}: {error}") from error
        return items

    def _embeds(self, value: Any) -> Item:
        rules, patches, name = self.rules, None, f"{self.spec.modality}_embeds"
        if not self.take_embeds:
            raise ValueError(f"{name} are not allowed here (enable_mm_embeds=True, or --enable-mm-embeds, allows them)")
        if rules.wrap is None:
            raise TypeError(f"{name} are not supported by this model")
        if isinstance(value, Mapping):
            if name not in value or set(value) - {name, "image_grid_thw"}:
                raise ValueError(
                    f"embeddings are given as a tensor or as {{{name!r}: tensor}}, got the fields {sorted(value)}"
                )
            value, patches = value[name], value.get("image_grid_thw")
        rows = check_embeds(value, self.hidden_size, name)
        grid = None if rules.grid is None else self._grid(patches, len(rows))
        if rules.grid is None and patches is not None:
            raise ValueError("image_grid_thw: this model's embeddings have no grid")
        identifier = hashlib.sha256(f"{grid} {rows.shape}".encode() + rows.tobytes()).hexdigest()
        return Item(identifier, {"embeds": rows}, rules.wrap(self.placeholder * len(rows)), len(rows), grid)

    def _grid(self, patches: Any, count: int) -> tuple[int, int]:
        """Rows and columns of `count` embeddings. Raises ValueError."""
        given = np.ravel(np.asarray([] if patches is None else patches))
        whole = given.size == 3 and np.issubdtype(given.dtype, np.integer) and given.min() > 0 and given[0] == 1
        assert self.rules.grid is not None
        if not whole or math.prod(grid := self.rules.grid(given)) != count:
            raise ValueError(
                f"{count} embeddings need image_grid_thw=[1, rows, columns], the patches that they were made of, got {given.tolist()}"
            )
        return grid

    def _item(self, value: Any) -> Item:
        """A picture or clip, processed, or found in the cache."""
        if self.spec.modality == "audio":
            sound, rate = as_audio(value, self.reader.sampling_rate, self.reader.n_samples), self.reader.sampling_rate
            content, how = sound.tobytes(), {"raw_speech": sound, "sampling_rate": rate}
        else:
            picture = as_image(value)
            if max(picture.size) > MAX_RATIO * min(picture.size):  # a processor may enlarge the short side to hundreds
                width, height = picture.size
                raise MediaError(
                    f"the picture has {width} x {height} pixels; one side may have at most {MAX_RATIO} times the other's"
                )
            content, how = repr(picture.size).encode() + picture.tobytes(), {"images": [picture]}
        name = hashlib.sha256(self._salt + content).hexdigest()
        if self.pictures is not None and "images" in how:
            self.pictures.setdefault(name, picture)
        with self._lock:  # requests are read in several threads
            if name in self._cache:
                self._cache.move_to_end(name)
                self.hits += 1
                return self._cache[name]
        made = self.reader(return_tensors="np", **how, **self.rules.options)
        item = self._made(name, {key: np.asarray(array) for key, array in made.items()})
        with self._lock:
            if name not in self._cache:  # else another thread has had it processed meanwhile
                self._cache[name] = item
                self._room -= item.nbytes
            while self._room < 0:
                self._room += self._cache.popitem(last=False)[1].nbytes
        return item

    def _made(self, name: str, arrays: Mapping[str, np.ndarray]) -> Item:
        rules = self.rules
        if not (count := rules.count(arrays)):
            raise MediaError(f"the {self.spec.modality} is too short to give an embedding")
        grid = None if rules.grid is None else rules.grid(arrays["image_grid_thw"])
        text = rules.text(arrays, self.placeholder * count)
        return Item(name, {key: arrays[key] for key in rules.inputs if key in arrays}, text, count, grid)

    def expand(self, prompt: str | Sequence[int], items: Sequence[Item]) -> Any:
        """A prompt, text or token ids, with the markers replaced.

        Raises:
            ValueError: there are not as many markers as inputs.
        """
        rules = self.rules
        marker = self.tokenizer.convert_tokens_to_ids(rules.marker)
        found = prompt.count(rules.marker if isinstance(prompt, str) else marker)
        if found != len(items):
            raise ValueError(
                f"the prompt has {found} times {rules.marker!r}, which stands for an {self.spec.modality}, and there are"
                f" {len(items)} {self.spec.modality}s"
            )
        if isinstance(prompt, str):
            parts = prompt.split(rules.marker)
            return parts[0] + "".join(item.text + part for item, part in zip(items, parts[1:], strict=True))
        token_ids, start = list[int](), 0
        for item in items:
            end = prompt.index(marker, start)
            token_ids += (*prompt[start:end], *self.tokenizer.encode(item.text, add_special_tokens=False))
            start = end + 1
        return [*token_ids, *prompt[start:]]

    def place(self, token_ids: Sequence[int], items: Sequence[Item]) -> tuple[MultiModalFeatureSpec, ...]:
        """The inputs of a request, from its token ids after `expand`.

        Raises:
            ValueError: there are more or fewer placeholders than the inputs have.
        """
        places = np.flatnonzero(np.asarray(token_ids) == self.spec.token_id)
        if len(places) != (total := sum(item.count for item in items)):
            raise ValueError(
                f"the prompt has {len(places)} tokens {self.placeholder!r}, and its {self.spec.modality}s need {total}"
            )
        features, done = [], 0
        for item in items:
            own, done = places[done : done + item.count], done + item.count
            start, end = int(own[0]), int(own[-1]) + 1
            mask = None if end - start == len(own) else np.isin(np.arange(start, end), own).astype(np.uint8).tobytes()
            where = PlaceholderRange(start, end - start, mask)
            about = self.spec.modality, where, dict(item.data), self.spec.whole, item.grid
            features.append(MultiModalFeatureSpec(item.identifier, *about))
        return tuple(features)
