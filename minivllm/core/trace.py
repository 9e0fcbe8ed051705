"""Trace of scheduler events: recording, state at any step, invariants."""

# Generated from nbs/core/trace.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple

__all__ = [
    "REASONS", "TRACE_VERSION", "Added", "Event", "EventReader", "Fold", "RequestState", "State", "Trace",
    "TraceError", "TraceHeader", "find_fault",
]  # fmt: skip


# %% nbs/core/trace.ipynb #code-7cbc30
Event = tuple[Any, ...]
TRACE_VERSION = 2


class Added(NamedTuple):
    """What an `add` event says, after its kind. `prompt`: token ids, or None; `output`: tokens that it had already."""

    request: str
    num_prompt: int
    max_tokens: int
    arrival: float
    priority: int
    user: Any
    prompt: Any
    output: Any
    number: int


class EventReader:
    """Hands each event to the method of its kind, `_on_alloc(request, group, blocks)` say. Kinds without a method mean nothing here."""

    def __init__(self) -> None:
        self._handlers = {name[4:]: getattr(self, name) for name in dir(type(self)) if name.startswith("_on_")}

    def feed(self, event: Event) -> None:
        """Take in one event."""
        handler = self._handlers.get(event[0])
        if handler is not None:
            handler(*event[1:])

    def feed_all(self, events: Iterable[Event]) -> None:
        """Take in many."""
        for event in events:
            self.feed(event)


# %% nbs/core/trace.ipynb #RequestState
@dataclass(slots=True)
class RequestState:
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
        ref_cnt: per physical block.
        hashes: per physical block, None where nothing reusable is held.
        free: free blocks in the order of reuse.
        cpu_free: free blocks of the swap pool, likewise.
    """

    num_groups: int
    requests: dict[str, RequestState]
    waiting: list[str]
    running: list[str]
    ref_cnt: list[int]
    hashes: list[bytes | None]
    free: list[int]
    cpu_free: list[int]

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
            list(self.ref_cnt), list(self.hashes), list(self.free), list(self.cpu_free),
        )  # fmt: skip

    def owners(self, block_id: int) -> list[str]:
        """The requests whose tables hold a block."""
        return [r for r, s in self.requests.items() if any(block_id in table for table in s.tables)]


# %% nbs/core/trace.ipynb #Fold
class Fold:
    """Applies events to a state. `state()` gives a copy of where it stands.

    Attributes:
        now: the state itself; its free lists are filled in by `state()` only.
        num_cached_free: free blocks whose content could be reused.
    """

    def __init__(self, start: State) -> None:
        self.now = start.copy()
        self._free = OrderedDict.fromkeys(start.free)
        self._cpu_free = OrderedDict.fromkeys(start.cpu_free)
        self.num_cached_free = sum(start.hashes[block] is not None for block in start.free)
        self._handlers = {name[4:]: getattr(self, name) for name in dir(type(self)) if name.startswith("_do_")}

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

    def _ignore(self, *args: Any) -> None:
        pass

    _do_attributes = _do_step = _do_wait = _do_chunk = _do_note = _do_order = _do_policy_error = _ignore

    # %% nbs/core/trace.ipynb #Fold-_do_add
    def _do_add(self, *fields: Any) -> None:
        new = Added(*fields)
        tables: list[list[int]] = [[] for _ in range(self.now.num_groups)]
        state = RequestState("WAITING", new.num_prompt, new.num_prompt + len(new.output), tables=tables)
        self.now.requests[new.request] = state
        self.now.waiting.append(new.request)

    def _do_admit(self, request: str, num_computed: int, num_cached: int) -> None:
        state = self.now.requests[request]
        self.now.waiting.remove(request)
        self.now.running.append(request)
        state.status, state.num_computed_tokens, state.num_cached_tokens = "RUNNING", num_computed, num_cached

    def _do_preempt(self, request: str, mode: str, needed_by: str, chosen_by: str) -> None:
        state = self.now.requests[request]
        self.now.running.remove(request)
        self.now.waiting.insert(0, request)
        state.status = "SWAPPED" if mode == "swap" else "PREEMPTED"
        if mode != "swap":
            state.num_computed_tokens = 0

    def _do_schedule(self, num_scheduled: dict[str, int]) -> None:
        for request, n in num_scheduled.items():
            self.now.requests[request].num_computed_tokens += n

    def _do_update(self, time: float, tokens: dict[str, tuple[int, ...]], step: int | None = None) -> None:
        for request, new in tokens.items():
            self.now.requests[request].num_tokens += len(new)

    def _do_finish(self, request: str, reason: str, stop_reason: Any) -> None:
        status = self.now.requests.pop(request).status
        (self.now.running if status == "RUNNING" else self.now.waiting).remove(request)

    # %% nbs/core/trace.ipynb #Fold-_do_alloc
    def _do_alloc(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].tables[group].extend(blocks)
        for block in blocks:
            if block:
                del self._free[block]
                self.now.ref_cnt[block] = 1

    def _do_hit(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].tables[group].extend(blocks)
        for block in blocks:
            if block:
                if self.now.hashes[block] is None:
                    raise ValueError(f"request {request} shares block {block}, which holds nothing reusable")
                if self.now.ref_cnt[block] == 0:
                    del self._free[block]
                    self.num_cached_free -= 1
                self.now.ref_cnt[block] += 1

    def _do_cache(
        self, request: str, group: int, positions: tuple[int, ...], blocks: tuple[int, ...], hashes: tuple[bytes, ...]
    ) -> None:
        for block, name in zip(blocks, hashes, strict=True):
            self.now.hashes[block] = name

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.now.ref_cnt[block] -= 1
            if self.now.ref_cnt[block] == 0:
                self._free[block] = None
                if self.now.hashes[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self.num_cached_free += 1

    def _do_free(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].tables[group] = []
        self._release(blocks)

    def _do_skip(self, request: str, group: int, start: int, end: int, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].tables[group][start:end] = [0] * (end - start)
        self._release(blocks)

    def _do_evict(self, block: int, name: bytes) -> None:
        self.now.hashes[block] = None
        self.num_cached_free -= 1
        self._free.move_to_end(block, last=False)

    def _do_reset(self) -> None:
        self.now.hashes = [None] * len(self.now.hashes)
        self.num_cached_free = 0

    def _do_swap_out(self, request: str, pairs: tuple[tuple[int, int], ...]) -> None:
        for _, cpu in pairs:
            del self._cpu_free[cpu]
        self.now.requests[request].cpu_blocks = [cpu for _, cpu in pairs]

    def _do_free_cpu(self, request: str, blocks: tuple[int, ...]) -> None:
        self.now.requests[request].cpu_blocks = []
        for block in blocks:
            self._cpu_free[block] = None
            self._cpu_free.move_to_end(block, last=False)


# %% nbs/core/trace.ipynb #TraceHeader
@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace was recorded with. Plain values only.

    Attributes:
        version: of the events; a file of another version is refused.
        block_size, num_blocks, num_cpu_blocks: of the pools, the null block of the first one counted.
        num_groups: KV cache groups.
        groups: for each of them `{"spec": fields of its KVCacheSpec, "layers": numbers}`; empty if no model was told.
        policy, policy_arguments: its name, and what it was made with (see `Policy.arguments`).
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


class Trace:
    """Everything that happened to a scheduler from one moment on.

    Attributes:
        header: versions and settings.
        start: the state when recording began.
        events: the list that grows while the engine runs.
        tokenizer: what turns token ids into text, if the engine left it here. Not saved to files.
        samples: what the sampler saw, by request id and output position, if the engine was asked to keep it. Not saved to files.
    """

    SNAPSHOT_EVERY = 256

    def __init__(self, header: TraceHeader, start: State | None = None) -> None:
        self.header = header
        self.start = start or State.empty(header.num_blocks, header.num_groups, header.num_cpu_blocks)
        self.events: list[Event] = []
        self.samples: dict[tuple[str, int], Any] = {}
        self.tokenizer: Any = None
        self._snapshots: list[tuple[int, State]] = []
        self._step_starts: list[int] = []
        self._scanned = 0

    def __len__(self) -> int:
        return len(self.events)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return (self.header, self.start, self.events) == (other.header, other.start, other.events)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Trace({self.num_steps} steps, {len(self.events)} events, policy {self.header.policy})"

    def _scan(self) -> None:
        """Note where each step begins, for the events that have come since the last scan."""
        for i in range(self._scanned, len(self.events)):
            if self.events[i][0] == "step":
                self._step_starts.append(i)
        self._scanned = len(self.events)

    @property
    def num_steps(self) -> int:
        """Steps recorded."""
        self._scan()
        return len(self._step_starts)

    # %% nbs/core/trace.ipynb #Trace-_end_of
    def _end_of(self, i: int) -> int:
        """The number of events up to the end of the i-th recorded step."""
        return self._step_starts[i + 1] if i + 1 < len(self._step_starts) else len(self.events)

    def at(self, step: int) -> State:
        """The whole state after the i-th recorded step; -1 for the last one.

        Raises:
            IndexError: there is no such step.
        """
        count = self.num_steps
        if not -count <= step < count:
            raise IndexError(f"step {step} of a trace with {count} steps")
        end = self._end_of(step % count)
        return self._fold_to(end)

    def _fold_to(self, end: int) -> State:
        done, state = 0, self.start
        for position, snapshot in self._snapshots:
            if position <= end:
                done, state = position, snapshot
        fold = Fold(state)
        steps = 0
        for i in range(done, end):
            if self.events[i][0] == "step":
                steps += 1
                if steps % self.SNAPSHOT_EVERY == 0 and (not self._snapshots or i > self._snapshots[-1][0]):
                    self._snapshots.append((i, fold.state()))
            fold.apply(self.events[i])
        return fold.state()

    def states(self) -> Iterator[tuple[int, State]]:
        """Every recorded step with the state after it, in order. Cheaper than `at` for all of them."""
        self._scan()
        fold, done = Fold(self.start), 0
        for i in range(len(self._step_starts)):
            for event in self.events[done : self._end_of(i)]:
                fold.apply(event)
            done = self._end_of(i)
            yield i, fold.state()

    # %% nbs/core/trace.ipynb #Trace-TraceError
    def check(self) -> None:
        """Fold the whole trace and test every invariant after every step, and each block table for growing only at its end.

        Raises:
            TraceError: names the first bad event or step.
        """
        self._scan()
        budget = self.header.settings.get("max_num_batched_tokens")
        fold, done, finished = Fold(self.start), 0, set()
        for step in range(-1, len(self._step_starts)):
            end = self._end_of(step) if step >= 0 else (self._step_starts[0] if self._step_starts else len(self.events))
            for i in range(done, end):
                event = self.events[i]
                if event[0] in _OF_A_REQUEST and event[1] in finished:
                    raise TraceError(f"event {i} {event}: the request has finished")
                if event[0] == "finish":
                    finished.add(event[1])
                elif event[0] == "add":
                    finished.discard(event[1])
                if event[0] == "schedule" and budget is not None and sum(event[1].values()) > budget:
                    raise TraceError(f"event {i} {event}: more than the budget of {budget} tokens")
                if event[0] == "update" and (fault := _too_early(fold.now, *event[2:])):
                    raise TraceError(f"event {i} {event}: {fault}")
                try:
                    fold.apply(event)
                except ValueError as error:
                    raise TraceError(f"event {i}: {error}") from error
            done = end
            if fault := find_fault(fold.state()):
                raise TraceError(f"after step {step} (event {end - 1}): {fault}")

    # %% nbs/core/trace.ipynb #Trace-why
    def why(self, request_id: str, step: int | None = None) -> list[str]:
        """What happened to a request and the reasons for it, in plain words, one line per event.

        Args:
            step: only what happened in this recorded step; None for the whole life.

        Raises:
            KeyError: the trace has no such request.
        """
        lines, now, known = [], -1, request_id in self.start.requests
        for event in self.events:
            kind = event[0]
            if kind == "step":
                now += 1
            elif kind == "schedule" or kind == "update":
                counts = event[1 if kind == "schedule" else 2]
                if request_id in counts:
                    what = counts[request_id]
                    text = (
                        f"{what} token{'s' * (what != 1)} scheduled" if kind == "schedule" else f"sampled {list(what)}"
                    )
                    if step is None or now == step:
                        lines.append(f"step {now}: {text}")
            elif len(event) > 1 and event[1] == request_id:
                known = True
                told = _tell(event)
                if told and (step is None or now == step):
                    lines.append(f"step {now}: {told}" if now >= 0 else told)
        if not known:
            raise KeyError(f"no request {request_id!r} in this trace")
        return lines

    # %% nbs/core/trace.ipynb #Trace-to_pandas
    def to_pandas(self) -> dict[str, Any]:
        """Tidy tables `steps`, `requests`, `blocks`, `tokens` and `decisions`: see `minivllm.core.trace_tables`."""
        from minivllm.core.trace_tables import tables

        return tables(self)

    def save(self, path: Any, drop_samples: bool = False) -> None:
        """Write to a file, `.jsonl` (JSON lines) or `.parquet`: see `minivllm.core.trace_files`. `drop_samples`: without the logits."""
        from minivllm.core.trace_files import save

        save(self, path, drop_samples)

    @staticmethod
    def load(path: Any) -> Trace:
        """Read a file that `save` wrote."""
        from minivllm.core.trace_files import load

        return load(path)

    def to_perfetto(self, path: Any) -> None:
        """Write a file that opens in Perfetto (ui.perfetto.dev): requests as tracks, steps, counters."""
        from minivllm.core.trace_files import save_perfetto

        save_perfetto(self, path)

    # %% nbs/core/trace.ipynb #Trace-show
    def show(self, tokenizer: Any = None, other: Any = None) -> Any:
        """All linked views of the run on one cursor, for a notebook; `.save("run.html")` writes a page without a kernel: see `minivllm.viz`.

        Args:
            tokenizer: anything with `decode(token_ids)`, to show the tokens of a block as text; None takes `self.tokenizer`.
            other: a second run of the same requests (a trace, or the path of one), to compare this one with.
        """
        return _pictures("page").show(self, tokenizer, other=other)

    def plot_blocks(self, step: int = -1, ax: Any = None) -> Any:
        """Every KV block after a step, drawn with matplotlib; returns the axes."""
        return _pictures("block_map").BlockMap(self).plot(ax, step=step)

    def plot_timeline(self, ax: Any = None) -> Any:
        """What each request did in each step, drawn with matplotlib; returns the axes."""
        return _pictures("timeline").Timeline(self).plot(ax)

    def plot_prefix_tree(self, ax: Any = None) -> Any:
        """The cached prefixes as a tree, drawn with matplotlib; returns the axes."""
        return _pictures("prefix_tree").PrefixTree(self).plot(ax)

    def plot_waste(self, ax: Any = None) -> Any:
        """Memory lost to fragmentation over time, drawn with matplotlib; returns the axes."""
        return _pictures("waste").Waste(self).plot(ax)


# %% nbs/core/trace.ipynb #Trace-TraceError
class TraceError(ValueError):
    """A trace that contradicts itself. Says at which event."""


_OF_A_REQUEST = frozenset(
    ("attributes", "wait", "admit", "chunk", "preempt", "alloc", "hit", "cache", "skip", "free", "swap_out", "free_cpu")
)


def _too_early(state: State, gained: dict[str, tuple[int, ...]], step: int | None = None) -> str | None:
    """Tokens are sampled from the last known token only: all before it must have been computed.

    step: given if a later one has been decided already. It may go on from these tokens, or have preempted the request.
    """
    for name in gained:
        request = state.requests.get(name)
        if request is None or (step is not None and request.status != "RUNNING"):
            continue
        ahead = request.num_computed_tokens - request.num_tokens
        if ahead and not (step is not None and ahead == 1):
            return f"{name} gained a token, but {request.num_computed_tokens} of its {request.num_tokens} tokens are computed"
    return None


def find_fault(state: State, ahead: int = 0) -> str | None:
    """What contradicts itself in a state, or None: owners against reference counts, free lists, queues, progress.

    ahead: steps that were decided on tokens that are not known yet.
    """
    counts = [0] * len(state.ref_cnt)
    for request in state.requests.values():
        for table in request.tables:
            for block in table:
                if block:
                    counts[block] += 1
        if not 0 <= request.num_computed_tokens <= request.num_tokens + ahead:
            return f"{request.num_computed_tokens} tokens computed of {request.num_tokens}"
    for block, (count, ref) in enumerate(zip(counts, state.ref_cnt, strict=True)):
        if count != ref:
            return f"block {block} has ref_cnt {ref} but stands in {count} block tables"
    free = set(state.free)
    if len(free) != len(state.free):
        return "a block is twice in the free list"
    for block in range(1, len(counts)):
        if (block in free) != (counts[block] == 0):
            return f"block {block} with ref_cnt {counts[block]} is {'' if block in free else 'not '}in the free list"
    copies = [*state.cpu_free, *(block for request in state.requests.values() for block in request.cpu_blocks)]
    if len(set(copies)) < len(copies):
        return "a block of the swap pool has two owners, or is both owned and free"
    if set(state.waiting) & set(state.running):
        return f"requests both waiting and running: {set(state.waiting) & set(state.running)}"
    if set(state.waiting) | set(state.running) != set(state.requests):
        return "the queues and the unfinished requests differ"
    return None


# %% nbs/core/trace.ipynb #Trace-why
REASONS = {
    "max_num_seqs": "as many requests were running as max_num_seqs allows",
    "budget": "the token budget of the step was used up",
    "no_blocks": "too few KV blocks were free",
    "after_preemption": "a running request had just lost its blocks; nobody is admitted in such a step",
    "max_num_partial_prefills": "as many prompts were half done as max_num_partial_prefills allows",
    "no_chunked_prefill": "the rest of the budget is too small for the whole prompt, and enable_chunked_prefill is off",
    "behind": "another request was first in the queue and had to wait",
    "policy": "the policy gave it no tokens",
    "long_prefill_token_threshold": "long_prefill_token_threshold caps every request's share",
}


def _tell(event: Event) -> str | None:
    kind = event[0]
    if kind == "add":
        return f"arrived with {event[2]} prompt tokens"
    if kind == "attributes":
        return "asked for " + ", ".join(f"{name}={value!r}" for name, value in event[2].items())
    if kind == "wait":
        return f"waited: {REASONS.get(event[2], event[2])}"
    if kind == "chunk":
        return f"got {event[2]} of {event[3]} tokens: {REASONS.get(event[4], event[4])}"
    if kind == "admit":
        return f"started, {event[3]} tokens cached" if event[3] else "started"
    if kind == "preempt":
        return f"preempted ({event[2]}): request {event[3]} needed blocks and none were free; chosen by {event[4]}"
    if kind == "finish":
        return f"finished: {event[2]}"
    if kind in ("alloc", "hit"):
        blocks = f"block{'s' if len(event[3]) > 1 else ''} {', '.join(map(str, event[3]))}"
        return f"{'took' if kind == 'alloc' else 'shared'} {blocks}"
    return None


# %% nbs/core/trace.ipynb #Trace-show
def _pictures(module: str) -> Any:
    """A module of `minivllm.viz`, which stands on this one: by name and when asked for, so that the core loads alone."""
    return import_module(f"minivllm.viz.{module}")
