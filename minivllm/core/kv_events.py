"""KV cache events for routers: blocks stored, removed, cleared."""

# Generated from nbs/core/kv_events.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import compress, groupby
from typing import Any

from minivllm.core.config import KVCacheSpec
from minivllm.core.encoder_cache import block_keys
from minivllm.core.events import Event
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler

BlockHash = bytes | int


class _WireEvent:
    """Fields to a map; those that vLLM declares without a default are always sent."""

    __slots__ = ()

    def to_wire(self) -> dict[str, Any]:
        """The map that is sent."""
        wire: dict[str, Any] = {"type": type(self).__name__}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name in _ALWAYS or value is not None:
                wire[field.name] = value
        return wire


_ALWAYS = frozenset(["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"])


@dataclass(frozen=True, slots=True)
class BlockStored(_WireEvent):
    """Blocks became reusable: consecutive blocks of one prefix.

    Attributes:
        block_hashes: 32 bytes each; vLLM may send whole numbers.
        parent_block_hash: of the block before the first, None at the start of a text.
        token_ids: the tokens that they hold.
        block_size: tokens per block.
        lora_id: None from us; adapters are named by `lora_name`.
        medium: where the blocks are.
        lora_name: the adapter, or None.
        extra_keys: per block, what else is hashed with its tokens (adapter, image hashes, salt), or None.
        group_idx: the KV cache group.
        kv_cache_spec_kind, kv_cache_spec_sliding_window: how the layers of the group attend.
        locality, ownership, session_id: read and passed on, never set by us.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved(_WireEvent):
    """Blocks were forgotten. The fields are those of `BlockStored`."""

    block_hashes: list[BlockHash]
    medium: str | None = "GPU"
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared(_WireEvent):
    """Everything was forgotten."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def event_from_wire(wire: Any) -> KVEvent:
    """Read an event: a map, or an array as vLLM sent before. Fields that only a newer version knows are passed over.

    Raises:
        ValueError: not an event of a known kind, or a field is missing.
    """
    if isinstance(wire, dict):
        kind, values = wire.get("type"), wire
    elif isinstance(wire, list | tuple) and wire:
        kind = wire[0]
        values = dict(zip((field.name for field in fields(_KINDS.get(kind, AllBlocksCleared))), wire[1:], strict=False))
    else:
        raise ValueError(f"a KV event is a map or an array, got {wire!r}")
    if kind not in _KINDS:
        raise ValueError(f"a KV event is one of {', '.join(_KINDS)}; got {kind!r}")
    known = {field.name for field in fields(_KINDS[kind])}
    try:
        return _KINDS[kind](**{name: value for name, value in values.items() if name in known})
    except TypeError as error:
        raise ValueError(f"{kind}: {error}") from error


def _runs(positions: tuple[int, ...], hashes: tuple[bytes, ...]) -> Iterable[list[tuple[int, bytes]]]:
    """Positions and hashes, cut where positions are not consecutive."""
    numbered = enumerate(zip(positions, hashes, strict=True))
    for _, run in groupby(numbered, key=lambda item: item[1][0] - item[0]):
        yield [pair for _, pair in run]


def _stored(request: Request, run: list[tuple[int, bytes]], group: int, spec: KVCacheSpec) -> BlockStored:
    first, last, size = run[0][0], run[-1][0], spec.block_size
    keys = [key for key in (request.lora_name, *request.extra_keys) if key is not None]
    salted = [*keys, request.cache_salt] if request.cache_salt is not None else keys
    media = [block_keys(request.mm_features, position * size, (position + 1) * size) for position, _ in run]
    places = zip(run, media, strict=True)
    extra = [[*(salted if position == 0 else keys), *inside] or None for (position, _), inside in places]
    return BlockStored(
        block_hashes=[name for _, name in run],
        parent_block_hash=request.block_hashes[first - 1] if first else None,
        token_ids=request.all_token_ids[first * size : (last + 1) * size],
        block_size=size,
        lora_name=request.lora_name,
        extra_keys=extra,
        group_idx=group,
        kv_cache_spec_kind=spec.rules.event_kind,
        kv_cache_spec_sliding_window=spec.window if spec.kind == "sliding_window" else None,
    )


class KVEventTap:
    """Collects a scheduler's KV events.

    Args:
        scheduler: the scheduler whose events to collect, from now on.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.specs = [group.spec for group in scheduler.kv_cache_manager.groups]
        self._events: list[tuple[Event, Request | None]] = []
        self._of_block: dict[int, tuple[int, bytes]] = {}
        self._count: Counter[tuple[int, bytes]] = Counter()
        for block in scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                self._add(block.block_id, block.group, block.block_hash)
        scheduler.subscribe(self)

    def __call__(self, event: Event) -> None:
        if event[0] == "cache":
            self._events.append((event, self.scheduler.requests[event[1]]))
        elif event[0] in ("evict", "uncache", "reset"):
            self._events.append((event, None))

    def close(self) -> None:
        """Stop listening."""
        self.scheduler.unsubscribe(self)

    def take(self) -> list[KVEvent]:
        """The KV events since the last call."""
        events, self._events = self._events, []
        found: list[KVEvent] = []
        for event, request in events:
            if request is not None:
                found += self._store(event, request)
            elif event[0] == "reset":
                self._of_block.clear()
                self._count.clear()
                found.append(AllBlocksCleared())
            else:
                found += self._remove([event[1]] if event[0] == "evict" else event[3])
        return found

    def _add(self, block: int, group: int, name: bytes) -> bool:
        """Note what a block holds. Returns whether it is the first to hold it."""
        self._of_block[block] = key = group, name
        self._count[key] += 1
        return self._count[key] == 1

    def _store(self, event: Event, request: Request) -> list[BlockStored]:
        _, _, group, positions, blocks, hashes = event
        new = [self._add(block, group, name) for block, name in zip(blocks, hashes, strict=True)]
        positions, hashes = (tuple(compress(values, new)) for values in (positions, hashes))
        return [_stored(request, run, group, self.specs[group]) for run in _runs(positions, hashes)]

    def _remove(self, blocks: Iterable[int]) -> Iterable[BlockRemoved]:
        for block in blocks:
            group, name = key = self._of_block.pop(block)
            self._count[key] -= 1
            if not self._count[key]:
                del self._count[key]
                yield BlockRemoved([name], group_idx=group)
