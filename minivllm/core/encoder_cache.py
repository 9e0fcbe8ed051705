"""Placeholder ranges of media, and the cache of their encoder outputs."""

# Generated from nbs/core/encoder_cache.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Where in a prompt an input's embeddings go.

    Attributes:
        offset: the first token of the range.
        length: tokens of the range.
        is_embed: one byte per token, 1 where an embedding goes and 0 for a token that marks a row or the like; None if all are 1.
    """

    offset: int
    length: int
    is_embed: bytes | None = None

    @property
    def end(self) -> int:
        """The first token after the range."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Embeddings that go there."""
        return self.length if self.is_embed is None else sum(self.is_embed)


@dataclass(frozen=True, slots=True)
class MultiModalFeatureSpec:
    """One input of a request besides its text: a picture, or embeddings that the user gave.

    Attributes:
        identifier: equal for equal contents, and only for these; it goes into the hashes of KV blocks.
        modality: `image`, `audio`, or `prompt_embeds`.
        mm_position: its placeholders.
        data: what the encoder reads, arrays by name; None where nothing is encoded (a simulation, a trace).
        whole: the range must be computed in one step.
        grid: rows and columns of its placeholders, where each has its own position (M-RoPE).
    """

    identifier: str
    modality: str
    mm_position: PlaceholderRange
    data: Any = field(default=None, compare=False, repr=False)
    whole: bool = False
    grid: tuple[int, int] | None = None

    @property
    def bare(self) -> MultiModalFeatureSpec:
        """Without the data."""
        return self if self.data is None else replace(self, data=None)

    def to_tuple(self) -> tuple[Any, ...]:
        """For a trace: plain values, without the data."""
        place = self.mm_position.offset, self.mm_position.length, self.mm_position.is_embed
        return (self.identifier, self.modality, self.whole, *place, *(self.grid or ()))

    @staticmethod
    def from_tuple(values: tuple[Any, ...]) -> MultiModalFeatureSpec:
        """The spec that `to_tuple` was called on, without its data."""
        identifier, modality, whole, offset, length, is_embed, *grid = values
        place, sides = PlaceholderRange(offset, length, is_embed), (grid[0], grid[1]) if grid else None
        return MultiModalFeatureSpec(identifier, modality, place, whole=whole, grid=sides)


class MediaRequest(Protocol):
    """The part of a `Request` that this module reads."""

    request_id: str
    num_prompt_tokens: int
    mm_features: tuple[MultiModalFeatureSpec, ...]


def _inside(features: tuple[MultiModalFeatureSpec, ...], start: int, end: int) -> Iterator[MultiModalFeatureSpec]:
    """The inputs whose ranges have tokens in `start` to `end` - 1."""
    return (f for f in features if f.mm_position.offset < end and f.mm_position.end > start)


def block_keys(features: tuple[MultiModalFeatureSpec, ...], start: int, end: int) -> list[str]:
    """What distinguishes the tokens `start` to `end` - 1 of a prompt from equal ones: the inputs there, and where they begin."""
    return [f"{f.identifier}@{f.mm_position.offset - start}" for f in _inside(features, start, end)]


class EncoderCacheManager:
    """Which encoder outputs the model runner keeps. Sizes are in embeddings.

    Args:
        cache_size: most embeddings kept.
        max_step: most embeddings that are encoded in a step.

    Attributes:
        sizes: embeddings of each output that is kept, by identifier.
        held: by request, the inputs whose outputs it still needs, because their ranges are not computed yet.
        freeable: outputs that no request holds, the oldest first.
        users: unfinished requests with media; 0 means that a step need not look.
    """

    def __init__(self, cache_size: int, max_step: int) -> None:
        self.cache_size, self.max_step = cache_size, max_step
        self.sizes: dict[str, int] = {}
        self.held: dict[str, list[MultiModalFeatureSpec]] = {}
        self.freeable: OrderedDict[str, None] = OrderedDict()
        self.users = 0
        self._holders: dict[str, int] = {}
        self._free = cache_size

    def check(self, request: MediaRequest) -> None:
        """Raises ValueError for an input that can never be encoded."""
        limits = {"encoder_cache_size": self.cache_size, "max_num_encoder_input_tokens": self.max_step}
        for i, feature in enumerate(request.mm_features):
            count = feature.mm_position.num_embeds
            for name, limit in limits.items():
                if count > limit:
                    raise ValueError(f"input {i} ({feature.modality}) takes {count} embeddings; {name}={limit}")

    def fit(self, request: MediaRequest, start: int, n: int, planned: int) -> tuple[int, str]:
        """How many of the `n` tokens from `start` on can be computed, and why not all of them ("" if they can).

        Args:
            planned: embeddings that are encoded in this step already.
        """
        need, kept, fresh = 0, set[str](), set[str]()
        for feature in _inside(request.mm_features, start, start + n):
            name, count, reason = feature.identifier, feature.mm_position.num_embeds, ""
            if name in self.sizes:
                kept.add(name)
            elif name not in fresh:
                fresh.add(name)
                need += count
                reason = "encoder_budget" if planned + need > self.max_step else ""
            room = self._free + sum(self.sizes[other] for other in self.freeable if other not in kept)
            if reason or need > room:
                return max(0, feature.mm_position.offset - start), reason or "encoder_cache"
        return n, ""

    def keep_whole(self, request: MediaRequest, start: int, n: int, budget: int) -> int:
        """`n`, or fewer tokens so that no range that must be computed in one step is split. If the range comes first, all of it
        or nothing: it may exceed any cap but the step's budget."""
        for feature in request.mm_features:
            place = feature.mm_position
            if feature.whole and place.offset < start + n < place.end:
                before = place.offset - start
                return before if before > 0 else place.end - start if place.end - start <= budget else 0
        return n

    def take(self, request: MediaRequest, start: int, n: int) -> tuple[list[MultiModalFeatureSpec], list[str]]:
        """Hold what these tokens need, which must fit. Returns the inputs to encode, and the outputs that are evicted for them."""
        held = self.held.setdefault(request.request_id, [])
        wanted = [f for f in _inside(request.mm_features, start, start + n) if f not in held]
        new = list({f.identifier: f for f in wanted if f.identifier not in self.sizes}.values())
        for feature in wanted:
            self.freeable.pop(feature.identifier, None)
            self._holders[feature.identifier] = self._holders.get(feature.identifier, 0) + 1
        held += wanted
        evicted = []
        for feature in new:
            count = feature.mm_position.num_embeds
            while self._free < count:
                evicted.append(self._evict())
            self.sizes[feature.identifier] = count
            self._free -= count
        return new, evicted

    def _evict(self) -> str:
        name, _ = self.freeable.popitem(last=False)
        self._free += self.sizes.pop(name)
        return name

    def release(self, request: MediaRequest, computed: int) -> None:
        """Release inputs whose ranges end within the first `computed` tokens."""
        held = self.held.get(request.request_id, [])
        for feature in [f for f in held if f.mm_position.end <= computed]:
            held.remove(feature)
            self._holders[feature.identifier] -= 1
            if not self._holders[feature.identifier]:
                del self._holders[feature.identifier]
                self.freeable[feature.identifier] = None
        if not held:
            self.held.pop(request.request_id, None)

    def free(self, request: MediaRequest) -> None:
        """Release all that a request holds."""
        self.release(request, request.num_prompt_tokens)

    def reset(self) -> list[str]:
        """Forget the outputs that no request holds, and return their names."""
        return [self._evict() for _ in range(len(self.freeable))]
