"""The events of a trace: their schema, the state that they rebuild, and the fold."""

# Generated from nbs/core/events.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

Event = tuple[Any, ...]
TRACE_VERSION = 2
SCHEMA = {
    kind: tuple(fields.split())
    for kind, fields in {
        "step": "step time",
        "add": "request num_prompt max_tokens arrival priority user prompt output number",
        "attributes": "request values",
        "admit": "request num_computed num_cached",
        "alloc": "request group blocks",
        "hit": "request group blocks",
        "cache": "request group positions blocks hashes",
        "uncache": "request group blocks",
        "skip": "request group start end blocks",
        "free": "request group blocks",
        "evict": "block hash",
        "preempt": "request mode needed_by chosen_by",
        "swap_out": "request pairs",
        "free_cpu": "request blocks",
        "schedule": "num_scheduled",
        "update": "time tokens step",
        "finish": "request reason stop_reason",
        "reset": "",
        "wait": "request reason",
        "chunk": "request num_tokens wanted reason",
        "order": "requests policy",
        "policy_error": "message",
        "note": "label value policy",
        "draft": "tokens",
        "rollback": "num_rejected",
        "lora_load": "adapter slot",
        "lora_evict": "adapter slot",
        "verify": "drafts step",
        "encode": "request modality identifier num_embeds",
        "encoder_evict": "identifier",
        "experts": "step loads",
        "kv_load": "request group blocks hashes",
        "kv_save": "group blocks hashes",
        "kv_wait": "request num_external",
        "kv_arrive": "request num_computed",
        "kv_keep": "request blocks",
        "kv_release": "owner blocks",
        "route": "request time replica candidates reason",
    }.items()
}
_OPTIONAL = {"update": (None,), "verify": (None,)}
EVENTS: dict[str, Any] = {  # a NamedTuple per kind: `kind`, then the fields
    kind: namedtuple(kind, ("kind", *fields), defaults=_OPTIONAL.get(kind, ())) for kind, fields in SCHEMA.items()
}


def named(event: Event) -> Any:
    """A recorded event with its fields by name: a tuple of its kind in `EVENTS`, with None for optional fields that it lacks. Raises KeyError for an unknown kind."""
    return EVENTS[event[0]](*event)


class EventReader:
    """Hands each event to the method of its kind, such as `_on_alloc(request, group, blocks)`. Kinds without a method are skipped."""

    def __init_subclass__(cls) -> None:
        unknown = [name for name in vars(cls) if name.startswith("_on_") and name[4:] not in SCHEMA]
        if unknown:
            raise TypeError(f"{cls.__name__}.{unknown[0]}: there is no such event; there are {', '.join(SCHEMA)}")

    def __init__(self) -> None:
        self._handlers = {kind: getattr(self, f"_on_{kind}") for kind in SCHEMA if hasattr(self, f"_on_{kind}")}

    def feed(self, event: Event) -> None:
        """Read one event."""
        handler = self._handlers.get(event[0])
        if handler is not None:
            handler(*event[1:])


@dataclass(slots=True)
class RequestSnapshot:
    """One unfinished request in a rebuilt state. `tables` has one list of block ids per KV cache group."""

    status: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    cpu_blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """The scheduler's state at one moment, as plain data.

    Attributes:
        requests: the unfinished ones.
        waiting: request ids in queue order (new at the end, preempted at the front).
        running: request ids in the order in which they are scheduled.
        remote: ids of requests whose blocks are being filled from elsewhere, or are filled while the request waits to run.
        kept: blocks of ended requests that are still being copied, by request id.
        ref_cnt: per physical block.
        hashes: per physical block; None if it holds nothing reusable.
        free: free blocks in the order of reuse.
        cpu_free: free blocks of the swap pool, in the order of reuse.
        loras: adapter of each slot that has one.
        encoder_cache: embeddings of each encoder output that is kept, by identifier.
    """

    num_groups: int
    requests: dict[str, RequestSnapshot]
    waiting: list[str]
    running: list[str]
    ref_cnt: list[int]
    hashes: list[bytes | None]
    free: list[int]
    cpu_free: list[int]
    loras: dict[int, str] = field(default_factory=dict)
    encoder_cache: dict[str, int] = field(default_factory=dict)
    remote: list[str] = field(default_factory=list)
    kept: dict[str, list[int]] = field(default_factory=dict)

    @staticmethod
    def empty(num_blocks: int, num_groups: int = 1, num_cpu_blocks: int = 0) -> State:
        """A state in which nothing has happened. `num_blocks` counts the null block."""
        return State(
            num_groups, {}, [], [], [0] * num_blocks, [None] * num_blocks,
            list(range(1, num_blocks)), list(range(1, num_cpu_blocks + 1)),
        )  # fmt: skip

    def copy(self) -> State:
        """A deep copy."""
        requests = {
            r: replace(s, tables=[list(t) for t in s.tables], cpu_blocks=list(s.cpu_blocks))
            for r, s in self.requests.items()
        }
        return State(
            self.num_groups, requests, list(self.waiting), list(self.running),
            list(self.ref_cnt), list(self.hashes), list(self.free), list(self.cpu_free), dict(self.loras),
            dict(self.encoder_cache), list(self.remote), {r: list(blocks) for r, blocks in self.kept.items()},
        )  # fmt: skip

    def queue(self, status: str) -> list[str]:
        """The queue that holds requests of this status: `running`, `remote` or `waiting`."""
        return {"RUNNING": self.running, "WAITING_FOR_REMOTE_KVS": self.remote}.get(status, self.waiting)

    def owners(self, block_id: int) -> list[str]:
        """The requests whose tables hold a block."""
        return [r for r, s in self.requests.items() if any(block_id in table for table in s.tables)]


class Fold(EventReader):
    """Applies events to a state. `state()` gives a copy of the present one.

    Attributes:
        now: the state itself; its free lists are filled in by `state()` only.
        num_cached_free: free blocks whose content could be reused.
    """

    def __init__(self, start: State) -> None:
        super().__init__()
        self.now = start.copy()
        self._free = OrderedDict.fromkeys(start.free)
        self._cpu_free = OrderedDict.fromkeys(start.cpu_free)
        self.num_cached_free = sum(start.hashes[block] is not None for block in start.free)

    def apply(self, event: Event) -> None:
        """Apply one event. Raises ValueError for an unknown kind or a change that is impossible in this state."""
        handler = self._handlers.get(event[0])
        if handler is None:
            raise ValueError(f"unknown event {event[0]!r}; this version knows {', '.join(sorted(self._handlers))}")
        try:
            handler(*event[1:])
        except (KeyError, IndexError) as error:
            raise ValueError(f"event {event} is impossible here: {error!r}") from error

    def state(self) -> State:
        """The state as it is now (a copy)."""
        self.now.free, self.now.cpu_free = list(self._free), list(self._cpu_free)
        return self.now.copy()

    @property
    def free_blocks(self) -> Collection[int]:
        """The free blocks in the order of reuse, without a copy."""
        return self._free.keys()

    @property
    def num_used(self) -> int:
        """Blocks that some request holds."""
        return len(self.now.ref_cnt) - 1 - len(self._free)

    def _ignore(self, *fields: Any) -> None:
        pass

    _on_attributes = _on_step = _on_wait = _on_chunk = _on_draft = _on_verify = _on_note = _on_order = (
        _on_policy_error
    ) = _on_experts = _on_kv_load = _on_kv_save = _on_route = _ignore

    def _on_add(self, request: str, num_prompt: int, *fields: Any) -> None:
        output = fields[5]
        tables: list[list[int]] = [[] for _ in range(self.now.num_groups)]
        self.now.requests[request] = RequestSnapshot("WAITING", num_prompt, num_prompt + len(output), tables=tables)
        self.now.waiting.append(request)

    def _on_admit(self, request: str, num_computed: int, num_cached: int) -> None:
        state = self.now.requests[request]
        self.now.queue(state.status).remove(request)
        self.now.running.append(request)
        state.status, state.num_computed_tokens, state.num_cached_tokens = "RUNNING", num_computed, num_cached

    def _on_preempt(self, request: str, mode: str, needed_by: str, chosen_by: str) -> None:
        state = self.now.requests[request]
        if (queue := self.now.queue(state.status)) is not self.now.waiting:
            queue.remove(request)
            self.now.waiting.insert(0, request)
        state.status = "SWAPPED" if mode == "swap" else "PREEMPTED"
        if mode != "swap":
            state.num_computed_tokens = 0

    def _on_lora_load(self, adapter: str, slot: int) -> None:
        self.now.loras[slot] = adapter

    def _on_lora_evict(self, adapter: str, slot: int) -> None:
        del self.now.loras[slot]

    def _on_encode(self, request: str, modality: str, identifier: str, num_embeds: int) -> None:
        self.now.encoder_cache[identifier] = num_embeds

    def _on_encoder_evict(self, identifier: str) -> None:
        del self.now.encoder_cache[identifier]

    def _on_schedule(self, num_scheduled: dict[str, int]) -> None:
        for request, n in num_scheduled.items():
            self.now.requests[request].num_computed_tokens += n

    def _on_update(self, time: float, tokens: dict[str, tuple[int, ...]], step: int | None = None) -> None:
        for request, new in tokens.items():
            self.now.requests[request].num_tokens += len(new)

    def _on_rollback(self, num_rejected: dict[str, int]) -> None:
        for request, n in num_rejected.items():
            self.now.requests[request].num_computed_tokens -= n

    def _on_finish(self, request: str, reason: str, stop_reason: Any) -> None:
        status = self.now.requests.pop(request).status
        self.now.queue(status).remove(request)

    def _on_kv_wait(self, request: str, num_external: int) -> None:
        self.now.waiting.remove(request)
        self.now.remote.append(request)
        self.now.requests[request].status = "WAITING_FOR_REMOTE_KVS"

    def _on_kv_arrive(self, request: str, num_computed: int) -> None:
        self.now.requests[request].num_computed_tokens = num_computed

    def _on_kv_keep(self, request: str, blocks: tuple[int, ...]) -> None:
        its = self.now.requests[request]
        its.tables, self.now.kept[request] = [[] for _ in its.tables], list(blocks)

    def _on_kv_release(self, owner: str, blocks: tuple[int, ...]) -> None:
        del self.now.kept[owner]
        self._release(blocks)

    def _on_alloc(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].tables[group].extend(blocks)
        for block in blocks:
            if block:
                del self._free[block]
                self.now.ref_cnt[block] = 1

    def _on_hit(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].tables[group].extend(blocks)
        for block in blocks:
            if block:
                if self.now.hashes[block] is None:
                    raise ValueError(f"request {request} shares block {block}, which holds nothing reusable")
                if self.now.ref_cnt[block] == 0:
                    del self._free[block]
                    self.num_cached_free -= 1
                self.now.ref_cnt[block] += 1

    def _on_cache(
        self, request: str, group: int, positions: tuple[int, ...], blocks: tuple[int, ...], hashes: tuple[bytes, ...]
    ) -> None:
        for block, name in zip(blocks, hashes, strict=True):
            self.now.hashes[block] = name

    def _on_uncache(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.now.hashes[block] = None

    def _release(self, blocks: Iterable[int]) -> None:
        uncached = []
        for block in blocks:
            self.now.ref_cnt[block] -= 1
            if self.now.ref_cnt[block] == 0:
                self._free[block] = None
                if self.now.hashes[block] is None:
                    uncached.append(block)
                else:
                    self.num_cached_free += 1
        for block in reversed(uncached):
            self._free.move_to_end(block, last=False)

    def _on_free(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].tables[group] = []
        self._release(blocks)

    def _on_skip(self, request: str, group: int, start: int, end: int, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].tables[group][start:end] = [0] * (end - start)
        self._release(blocks)

    def _on_evict(self, block: int, hash: bytes) -> None:
        self.now.hashes[block] = None
        self.num_cached_free -= 1
        self._free.move_to_end(block, last=False)

    def _on_reset(self) -> None:
        self.now.hashes = [None] * len(self.now.hashes)
        self.num_cached_free = 0

    def _on_swap_out(self, request: str, pairs: tuple[tuple[int, int], ...]) -> None:
        for _, cpu in pairs:
            del self._cpu_free[cpu]
        self.now.requests[request].cpu_blocks = [cpu for _, cpu in pairs]

    def _on_free_cpu(self, request: str, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].cpu_blocks = []
        for block in reversed(blocks):
            self._cpu_free[block] = None
            self._cpu_free.move_to_end(block, last=False)


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace was recorded with. Plain values only.

    Attributes:
        version: version of the events; a file of another version is refused.
        block_size, num_blocks, num_cpu_blocks: tokens per block, GPU blocks with the null block, CPU blocks.
        num_groups: KV cache groups.
        groups: for each of them `{"spec": fields of its KVCacheSpec, "layers": numbers}`; empty if the layers are not known.
        policy, policy_arguments: its name, and what it was made with (see `arguments_of`).
        preemption: "recompute" or "swap".
        settings: fields of `SchedulerConfig` and `CacheConfig`.
    """

    version: int = TRACE_VERSION
    block_size: int = 16
    num_blocks: int = 2
    num_groups: int = 1
    num_cpu_blocks: int = 0
    policy: str = "FCFS"
    settings: dict[str, Any] = field(default_factory=dict)
    policy_arguments: dict[str, Any] = field(default_factory=dict)
    preemption: str = "recompute"
    groups: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Recording:
    """What was recorded: a header, the state when recording began, the events since, and what ranks did (see `Trace`)."""

    header: TraceHeader
    start: State
    events: list[Event] = field(default_factory=list)
    ranks: list[tuple[int, str, float, float, int]] = field(default_factory=list)


class FoldReader(EventReader):
    """An `EventReader` that sees a fold: when a method is called, `fold` is as it was before the event.

    Attributes:
        header, fold: set by `read`.
        step: recorded steps are counted from 0; -1 before the first.
    """

    header: TraceHeader
    fold: Fold
    step = -1

    def begin(self) -> None:
        """Called before the first event."""

    def end_step(self) -> None:
        """Called after the last event of each recorded step."""


def read(recording: Recording, *readers: FoldReader) -> Fold:
    """Fold a recording once for all readers. Returns the fold at its end."""
    fold = Fold(recording.start)
    for reader in readers:
        reader.header, reader.fold = recording.header, fold
        reader.begin()
    for event in recording.events:
        if event[0] == "step":
            for reader in readers:
                if reader.step >= 0:
                    reader.end_step()
                reader.step += 1
        for reader in readers:
            reader.feed(event)
        fold.apply(event)
    for reader in readers:
        if reader.step >= 0:
            reader.end_step()
    return fold


def by_step(events: Iterable[Event]) -> Iterator[tuple[int, list[Event]]]:
    """The events of each recorded step, counted from 0; first, as step -1, those before all steps."""
    step, of_step = -1, list[Event]()
    for event in events:
        if event[0] == "step":
            yield step, of_step
            step, of_step = step + 1, []
        of_step.append(event)
    yield step, of_step
