"""KV cache events for routers: blocks stored, removed, cleared."""

# Generated from nbs/core/kv_events.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from minivllm.core.events import Event
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "KVEvent", "KVEventTap"]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became reusable: consecutive blocks of one prefix.

    Attributes:
        block_hashes: their names, 32 bytes each.
        parent_block_hash: the name of the block before the first, None at the start of a text.
        token_ids: the tokens that they hold.
        block_size: tokens per block.
        lora_id: always None; adapters are named by `lora_name`.
        medium: where the blocks are.
        lora_name: the adapter, or None.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None

    def to_wire(self) -> list[Any]:
        """The array that is sent."""
        return [
            "BlockStored",
            self.block_hashes,
            self.parent_block_hash,
            self.token_ids,
            self.block_size,
            self.lora_id,
            self.medium,
            self.lora_name,
        ]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks were forgotten."""

    block_hashes: list[bytes]
    medium: str | None = "GPU"

    def to_wire(self) -> list[Any]:
        """The array that is sent."""
        return ["BlockRemoved", self.block_hashes, self.medium]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Everything was forgotten."""

    def to_wire(self) -> list[Any]:
        """The array that is sent."""
        return ["AllBlocksCleared"]


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def kv_events(events: Iterable[Event], requests: Callable[[str], Request | None], block_size: int) -> list[KVEvent]:
    """The KV events among trace events.

    Args:
        events: trace events, oldest first.
        requests: finds an unfinished or just finished request by id.
        block_size: tokens per block.
    """
    found: list[KVEvent] = []
    for event in events:
        if event[0] == "cache":
            _, request_id, _, positions, _, names = event
            request = requests(request_id)
            if request is not None:
                found += [_stored(request, run, block_size) for run in _runs(positions, names)]
        elif event[0] == "evict":
            found.append(BlockRemoved([event[2]]))
        elif event[0] == "reset":
            found.append(AllBlocksCleared())
    return found


def _runs(positions: tuple[int, ...], names: tuple[bytes, ...]) -> Iterable[list[tuple[int, bytes]]]:
    """Positions and names, cut where positions are not consecutive."""
    run: list[tuple[int, bytes]] = []
    for position, name in zip(positions, names, strict=True):
        if run and position != run[-1][0] + 1:
            yield run
            run = []
        run.append((position, name))
    if run:
        yield run


def _stored(request: Request, run: list[tuple[int, bytes]], block_size: int) -> BlockStored:
    first, last = run[0][0], run[-1][0]
    return BlockStored(
        block_hashes=[name for _, name in run],
        parent_block_hash=request.block_hashes[first - 1] if first else None,
        token_ids=request.all_token_ids[first * block_size : (last + 1) * block_size],
        block_size=block_size,
        lora_name=request.lora_name,
    )


class KVEventTap:
    """Collects a scheduler's KV events.

    Args:
        scheduler: whose events to collect, from now on.
    """

    KINDS = ("cache", "evict", "reset")

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._events: list[Event] = []
        self._requests: dict[str, Request] = {}
        scheduler.subscribe(self)

    def __call__(self, event: Event) -> None:
        if event[0] in self.KINDS:
            self._events.append(event)
            if event[0] == "cache":
                self._requests[event[1]] = self.scheduler.requests[event[1]]

    def close(self) -> None:
        """Stop listening."""
        self.scheduler.unsubscribe(self)

    def take(self) -> list[KVEvent]:
        """The KV events since the last call."""
        events, self._events = self._events, []
        made = kv_events(events, self._requests.get, self.scheduler.cache.block_size)
        self._requests.clear()
        return made
