"""Scheduling and eviction policies: FCFS, priority, shortest first, fair share, prefix match."""

# Generated from nbs/core/policy.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, NoReturn

from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.events import EventReader
from minivllm.core.plugins import register
from minivllm.core.request import Request, RequestStatus

__all__ = [
    "FCFS", "LFU", "LRU", "POLICIES", "AdapterFairShare", "Clairvoyant", "Combined", "DeepestFirst",
    "FairShare", "Listener", "LongestPrefixMatch", "Policy", "PolicyError", "PolicyGuard", "Priority",
    "SchedulerView", "Served", "ShortestFirst", "View", "Watchdog", "arguments_of", "combine",
    "ignores_priority", "register_policy",
]  # fmt: skip

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


class View:
    """Reads through to an object; refuses every write. What it hands out is plain, a frozen copy, or a view. Views of one object are equal."""

    __slots__ = ("_target",)

    def __init__(self, target: Any) -> None:
        object.__setattr__(self, "_target", target)

    def __getattr__(self, name: str) -> Any:
        target = object.__getattribute__(self, "_target")
        try:
            value = getattr(target, name)
        except AttributeError:
            known = [n for n in dir(target) if n[0] != "_" and not callable(getattr(target, n, None))]
            raise AttributeError(f"{type(target).__name__} has no {name!r}; it has {', '.join(known)}") from None
        if type(value) in _PLAIN:
            return value
        if callable(value):
            raise AttributeError(f"{name!r} cannot be called through a read-only view")  # noqa: TRY004 - what a missing attribute raises
        return self._freeze(value)

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, (int, float, str, bytes, Enum, View, type(None))):
            return value
        if isinstance(value, (list, tuple)):
            return tuple(value) if _PLAIN.issuperset(map(type, value)) else tuple(map(self._freeze, value))
        if isinstance(value, Mapping):
            return MappingProxyType({key: self._freeze(item) for key, item in value.items()})
        return frozenset(value) if isinstance(value, (set, frozenset)) else View(value)

    def __setattr__(self, name: str, value: Any = None) -> None:
        raise AttributeError(f"a policy's view is read-only: cannot set {name!r}")

    __delattr__ = __setattr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and target_of(self) is target_of(other)

    def __hash__(self) -> int:
        return id(target_of(self))

    def __repr__(self) -> str:
        return f"View({target_of(self)!r})"


def target_of(view: Any) -> Any:
    """What a view shows; None for anything that is not a view."""
    return object.__getattribute__(view, "_target") if isinstance(view, View) else None


class BlockTree:
    """Which cached block goes on from which, kept from the events `cache`, `evict` and `reset`. Blocks that were cached before are not in it."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self.on_reset()

    def on_reset(self) -> None:
        """All content is forgotten."""
        self._filled: dict[int, tuple[Request, int, int]] = {}  # by block: request, group, position
        self._holds: dict[tuple[int, bytes] | None, int] = {}
        self._children: dict[tuple[int, bytes] | None, set[int]] = {}

    def _content(self, block: int, before: int = 0) -> tuple[int, bytes] | None:
        """Group and hash of a block, or of the one `before` it in the same text; None where that is not known."""
        request, group, position = self._filled.get(block, (None, 0, 0))
        return None if request is None or position < before else (group, request.block_hashes[position - before])

    def on_cache(self, request: Request, group: int, positions: Sequence[int], blocks: Sequence[int]) -> None:
        """Blocks of a request became reusable."""
        for position, block in zip(positions, blocks, strict=True):
            self._filled[block] = request, group, position
            self._holds[self._content(block)] = block
            if position:
                self._children.setdefault(self._content(block, 1), set()).add(block)

    def on_evict(self, block: int) -> None:
        """A block's content was forgotten."""
        name, above = self._content(block), self._content(block, 1)
        self._filled.pop(block, None)
        self._holds.pop(name, None)
        if above is not None:
            self._children[above].discard(block)
            if not self._children[above]:
                del self._children[above]

    def parent(self, block: KVCacheBlock) -> KVCacheBlock | None:
        """The block before it, if that is cached."""
        above = self._holds.get(self._content(block.block_id, 1))
        return None if above is None else self._pool.blocks[above]

    def children(self, block: KVCacheBlock) -> list[KVCacheBlock]:
        """The cached blocks that go on from it."""
        return [self._pool.blocks[i] for i in sorted(self._children.get(self._content(block.block_id), ()))]

    def token_ids(self, block: KVCacheBlock) -> tuple[int, ...] | None:
        """Its tokens."""
        if block.block_id not in self._filled:
            return None
        request, _, position = self._filled[block.block_id]
        return tuple(request.all_token_ids[position * self._block_size : (position + 1) * self._block_size])

    def owner(self, block: KVCacheBlock) -> str | None:
        """The user whose request filled it."""
        return self._filled[block.block_id][0].user if block.block_id in self._filled else None


class BlockView(View):
    """A view of a block. With `track_blocks = True` in the policy also `parent`, `children`, `token_ids` and `owner`."""

    __slots__ = ("_tree",)

    def __init__(self, target: KVCacheBlock, tree: BlockTree | None = None) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_tree", tree)

    def __getattr__(self, name: str) -> Any:
        if name not in ("parent", "children", "token_ids", "owner"):
            return super().__getattr__(name)
        if self._tree is None:
            raise AttributeError(f"a block's {name!r} is known to policies with `track_blocks = True` only")
        return self._freeze(getattr(self._tree, name)(target_of(self)))

    def _freeze(self, value: Any) -> Any:
        return BlockView(value, self._tree) if isinstance(value, KVCacheBlock) else super()._freeze(value)


for _name in set(KVCacheBlock.__slots__) - {"prev", "next"}:
    # plain values, read without a detour: eviction keys are asked for often
    setattr(BlockView, _name, property(attrgetter(f"_target.{_name}")))


class Served(NamedTuple):
    """Tokens served to a user: prompt tokens that were computed (each time, if more than once), and tokens that were sampled."""

    prompt: int = 0
    output: int = 0


class SchedulerView:
    """What a policy may know of the scheduler. Read-only.

    Attributes:
        step: number of the step being scheduled.
        now: seconds on the engine's clock.
        budget: tokens left in this step.
        num_running, num_waiting: lengths of the queues.
        running: the running requests, in the order in which they were admitted.
        needed_by: the request that needs blocks; None while none does.
        num_free_blocks, num_blocks: KV blocks that are free, and all of them.
        block_size: tokens per block.
        served: {user: `Served`} since the engine was last idle. Counted at each access.
    """

    __slots__ = ("step", "now", "budget", "num_running", "num_waiting", "num_free_blocks", "num_blocks", "block_size",
                 "needed_by", "_running", "_cached_tokens", "_served", "_note")  # fmt: skip

    _running: Sequence[Request]
    _cached_tokens: Callable[[Request], int]
    _served: Callable[[], dict[str | None, Served]]
    _note: Callable[[str, Any], None]

    def __init__(self, kv: Any, *, running: Sequence[Request] = (), needed_by: Request | None = None,
                 served: Callable[[], dict[str | None, Served]] = dict, note: Callable[[str, Any], None] = lambda label, value: None,
                 **values: Any) -> None:  # fmt: skip
        known = {
            "num_free_blocks": kv.block_pool.num_free, "num_blocks": kv.block_pool.num_blocks, "block_size": kv.block_size,
            "num_running": len(running), "needed_by": needed_by and View(needed_by), "_running": running,
            "_cached_tokens": kv.cached_tokens, "_served": served, "_note": note, "budget": 0, "num_waiting": 0,
        }  # fmt: skip
        for name, value in (known | values).items():
            object.__setattr__(self, name, value)

    __setattr__ = __delattr__ = View.__setattr__

    @property
    def running(self) -> tuple[Any, ...]:
        return tuple(map(View, self._running))

    @property
    def served(self) -> dict[str | None, Served]:
        return self._served()

    def cached_tokens(self, request: Any) -> int:
        """How many tokens at the start of a waiting request are in the prefix cache now."""
        return self._cached_tokens(target_of(request))

    def note(self, label: str, value: Any) -> None:
        """Leave a note in the trace, as the event `("note", label, value, policy)`. `value`: plain, or a dict of plain values."""
        plain = value.values() if isinstance(value, dict) else [value]
        if not isinstance(label, str) or not _PLAIN.issuperset({type(v) for v in plain}) or bytes in map(type, plain):
            raise TypeError(f"a note has a text and a number, text or dict of these, got {label!r} and {value!r}")
        self._note(label, dict(value) if isinstance(value, dict) else value)


class Policy:
    """First come, first served. Override any of the methods.

    All requests and blocks are handed over as read-only views. The scheduler keeps its own promises (budget, reference counts, no
    starvation) whatever a policy answers, and reports a method that raises, or answers with something it was not given, as `PolicyError`.
    """

    key: Callable[[Any], Any] | None = None
    """Optional: a fixed sort key of a request, smallest first. Takes the place of `order`."""

    evict_key: Callable[[Any], Any] | None = None
    """Optional: a sort key of a cached free block that is fixed while it is free; the smallest is evicted first. Takes the place of `evict`."""

    order_per_admission = False
    """Ask `order` again after each admission, not once per step."""

    track_blocks = False
    """Give blocks that are cached from now on `parent`, `children`, `token_ids` and `owner`."""

    @property
    def name(self) -> str:
        """The class name, as traces and error messages give it."""
        return type(self).__name__

    def order(self, waiting: Sequence[Any], view: SchedulerView) -> Sequence[Any]:
        """The waiting requests in the order in which they should be admitted: each of them, once."""
        return waiting

    def chunk(self, request: Any, budget_left: int, view: SchedulerView) -> int:
        """The most tokens this request may get in this step, at least 0. The scheduler never gives more than it needs."""
        return budget_left

    def victim(self, running: Sequence[Any], view: SchedulerView) -> Any:
        """The running request that gives up its blocks when there are none left; the last of them was admitted last."""
        return running[-1]

    def evict(self, free_blocks: Iterator[Any], view: SchedulerView) -> Any:
        """The cached free block to forget, out of an iterator that runs from the least recently used on."""
        return next(free_blocks)

    def on_start(self) -> None:
        """A scheduler begins to ask this policy. What was counted for another one should be forgotten."""

    def on_add(self, request: Any) -> None:
        """A request has arrived."""

    def on_admit(self, request: Any) -> None:
        """A waiting request runs from now on; for the first time if `request.num_preemptions` is 0."""

    def on_preempt(self, request: Any) -> None:
        """A running request has lost its blocks and waits again."""

    def on_tokens(self, request: Any, prompt: int, output: int) -> None:
        """A step has computed `prompt` tokens of a request's prompt, and sampled `output` tokens of its answer."""

    def on_hit(self, request: Any, blocks: Sequence[Any]) -> None:
        """A request that is admitted has found these cached blocks."""

    def on_free(self, request: Any, blocks: Sequence[Any]) -> None:
        """A request has given back these blocks: at its end, when it is preempted, or when its window has passed them."""

    def on_finish(self, request: Any) -> None:
        """A request has ended, in whatever state it was."""


def overrides(policy: Policy, method: str) -> bool:
    """Whether a policy has its own method; if not, it need not be called."""
    return getattr(type(policy), method) is not getattr(Policy, method) or method in vars(policy)


class FCFS(Policy):
    """First come, first served: vLLM's default."""


class Priority(Policy):
    """Smallest `priority` first, ties by arrival. The least urgent running request is preempted, the youngest of several.

    Of requests that also arrived together vLLM preempts the one that runs longest, and two of them can then preempt each other for ever.
    """

    @staticmethod
    def key(request: Any) -> Any:
        return (request.priority, request.arrival_time, request.sequence_number)

    def victim(self, running: Sequence[Any], view: SchedulerView) -> Any:
        return max(running, key=self.key)


class ShortestFirst(Policy):
    """Fewest tokens first, prompt and allowed output together. Short answers do not wait behind long ones."""

    @staticmethod
    def key(request: Any) -> Any:
        return (request.num_prompt_tokens + request.max_tokens, request.sequence_number)


class LongestPrefixMatch(Policy):
    """Most cached tokens first, so that a prefix is used while it is there (SGLang's default)."""

    def order(self, waiting: Sequence[Any], view: SchedulerView) -> Sequence[Any]:
        return sorted(waiting, key=view.cached_tokens, reverse=True)


class FairShare(Policy):
    """Users take turns by the tokens that they were served: the virtual token counter of Sheng et al. (2024), their algorithm 2.

    Args:
        input_weight, output_weight: what a token of a prompt and of an answer counts; 1 and 2 in the paper.

    Attributes:
        counters: service of each user so far, lifted when one comes back.
    """

    order_per_admission = True
    _who = attrgetter("user")

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0) -> None:
        self.input_weight, self.output_weight = input_weight, output_weight
        self.on_start()

    def on_start(self) -> None:
        self.counters: dict[str | None, float] = defaultdict(float)
        self._waiting: dict[str | None, set[str]] = {}  # users who wait, and their requests
        self._left_last: str | None = None

    def on_add(self, request: Any) -> None:
        user, counters = self._who(request), self.counters
        if user not in self._waiting:
            floor = min((counters[u] for u in self._waiting), default=counters.get(self._left_last, 0.0))
            counters[user] = max(counters.get(user, 0.0), floor)
        self._waiting.setdefault(user, set()).add(request.request_id)

    def on_preempt(self, request: Any) -> None:
        self._waiting.setdefault(self._who(request), set()).add(request.request_id)

    def on_admit(self, request: Any) -> None:
        self.on_finish(request)
        if not request.num_preemptions:
            self.counters[self._who(request)] += self.input_weight * request.num_prompt_tokens

    def on_tokens(self, request: Any, prompt: int, output: int) -> None:
        self.counters[self._who(request)] += self.output_weight * output

    def on_finish(self, request: Any) -> None:
        waiting = self._waiting.get(self._who(request), set())
        waiting.discard(request.request_id)
        if not waiting and self._waiting.pop(self._who(request), None) is not None:
            self._left_last = self._who(request)

    def order(self, waiting: Sequence[Any], view: SchedulerView) -> Sequence[Any]:
        return sorted(waiting, key=lambda r: self.counters[self._who(r)])


class AdapterFairShare(FairShare):
    """LoRA adapters take turns, and the base model with them. Adapters that are ahead wait for one that needs a slot.

    Args:
        input_weight, output_weight: see `FairShare`.
        lead: weighted tokens by which others may be ahead of an adapter that waits; more of them means fewer loads.
    """

    _who = attrgetter("lora_name")

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0, lead: float = 1000.0) -> None:
        super().__init__(input_weight, output_weight)
        self.lead = lead

    def chunk(self, request: Any, budget_left: int, view: SchedulerView) -> int:
        who = self._who(request)
        if request.request_id not in self._waiting.get(who, ()):
            return budget_left
        least = min(self.counters[other] for other in self._waiting)
        return 0 if self.counters[who] > least + self.lead else budget_left


class LRU(Policy):
    """Forget the block that has not been used for the longest time: vLLM's default."""


class LFU(Policy):
    """Forget the block that was hit least often; of equals, the one that has been free for the longest time."""

    @staticmethod
    def evict_key(block: Any) -> Any:
        return block.num_hits


class DeepestFirst(Policy):
    """Size-aware: forget the deepest block, so that long rare tails go before short beginnings."""

    @staticmethod
    def evict_key(block: Any) -> Any:
        return -block.depth


class Clairvoyant(Policy):
    """Belady's rule: forget the block whose next use lies furthest in the future. Needs the future, so it serves as a bound.

    Args:
        next_use: block hash -> moment of its next use (any sortable number), called at every eviction; infinity for never.
    """

    def __init__(self, next_use: Callable[[bytes], float]) -> None:
        self.next_use = next_use

    def evict(self, free_blocks: Iterator[Any], view: SchedulerView) -> Any:
        return max(free_blocks, key=lambda block: (self.next_use(block.block_hash), block.depth))


class Combined(Policy):
    """What `combine` makes. `parts`: the policy for each question. Each is told of the events."""

    def __init__(self, parts: dict[str, Policy]) -> None:
        self.parts = parts


def combine(
    order: Policy | None = None, chunk: Policy | None = None, victim: Policy | None = None, evict: Policy | None = None
) -> Policy:
    """One policy that asks a different one for each question; None means first come, first served."""
    parts = {"order": order, "chunk": chunk, "victim": victim, "evict": evict}
    combined = Combined({question: part for question, part in parts.items() if part is not None})
    for question, part in combined.parts.items():
        if overrides(part, question):
            setattr(combined, question, getattr(part, question))
    combined.track_blocks = any(part.track_blocks for part in combined.parts.values())
    if order is not None:
        combined.key, combined.order_per_admission = order.key, order.order_per_admission
    if evict is not None:
        combined.evict_key = evict.evict_key
    return combined


POLICIES: dict[str, Callable[..., Policy]] = {
    "fcfs": FCFS, "priority": Priority, "shortest_first": ShortestFirst, "fair_share": FairShare,
    "adapter_fair_share": AdapterFairShare, "longest_prefix_match": LongestPrefixMatch, "lru": LRU, "lfu": LFU,
    "deepest_first": DeepestFirst,
}  # fmt: skip
"""Classes or functions that make a policy, by the name that `scheduling_policy` uses."""
_SHIPPED = frozenset(POLICIES.values())


def register_policy(name: str, make: Callable[..., Policy]) -> None:
    """Let `scheduling_policy` name a policy. `make`: its class, or a function, called without arguments.

    Raises:
        ValueError: the name is taken.
        TypeError: `make` is neither.
    """
    register(POLICIES, "policy", name, make, Policy)


def ignores_priority(policy: Policy | str) -> bool:
    """Whether a policy, given as an object or by its name, is known to ignore the priority of requests."""
    kind = POLICIES[policy] if isinstance(policy, str) else type(policy)
    return kind in _SHIPPED and kind is not Priority


def arguments_of(policy: Policy) -> dict[str, Any]:
    """A policy's arguments, for the header of a trace: its public attributes with plain values, or the parts of a combined policy."""
    if isinstance(policy, Combined):
        return {
            question: {"name": part.name, "arguments": arguments_of(part)} for question, part in policy.parts.items()
        }
    return {name: value for name, value in vars(policy).items() if name[0] != "_" and type(value) in _PLAIN - {bytes}}


class PolicyError(RuntimeError):
    """A policy answered wrongly, raised, or did not answer. Names policy and method; the scheduler's state is intact."""


class _TimeOut(BaseException):
    pass


class Watchdog:
    """Interrupts Python code that runs for too long. One thread serves all watchdogs of a process, and sleeps while nothing is watched.

    Args:
        seconds: how long a watched block may take.
    """

    _changed = threading.Condition()
    _thread: ClassVar[threading.Thread | None] = None
    _deadlines: ClassVar[dict[int, float]] = {}  # by the thread that is watched
    _wakes = 0.0  # when the thread looks next, if nothing wakes it before

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raise inside the block if it takes too long. A nested block ends no later than the outer one."""
        me, due, deadlines = threading.get_ident(), time.monotonic() + self.seconds, Watchdog._deadlines
        with Watchdog._changed:
            if Watchdog._thread is None or not Watchdog._thread.is_alive():  # the first time, or after a fork
                Watchdog._thread = threading.Thread(target=self._run, daemon=True, name="minivllm-policy-watchdog")
                Watchdog._thread.start()
            outer = deadlines.get(me, math.inf)
            deadlines[me] = min(due, outer)
            if due < Watchdog._wakes:
                Watchdog._changed.notify()
        try:
            yield
        finally:
            with Watchdog._changed:
                deadlines[me] = outer
                if outer == math.inf:
                    del deadlines[me]

    @staticmethod
    def _run() -> None:
        with Watchdog._changed:
            while True:
                now, deadlines = time.monotonic(), Watchdog._deadlines
                for thread in [thread for thread, due in deadlines.items() if due <= now]:
                    deadlines[thread] = math.inf
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TimeOut))
                Watchdog._wakes = min(deadlines.values(), default=math.inf)
                Watchdog._changed.wait(None if Watchdog._wakes == math.inf else Watchdog._wakes - now)


_EVENTS = ("on_add", "on_admit", "on_preempt", "on_tokens", "on_hit", "on_free", "on_finish")


class Listener(EventReader):
    """Turns events of the trace into calls of a policy's `on_...` methods.

    Args:
        methods: the functions to call for each `on_...` name.
        requests: unfinished requests by id, as the scheduler has them. A policy that takes over in the middle of a run is told of each of
            them as if it came now.
        tree: kept up to date, if there is one.
    """

    def __init__(self, methods: dict[str, list[Callable[..., None]]], requests: Mapping[str, Request], pool: BlockPool,
                 tree: BlockTree | None) -> None:  # fmt: skip
        super().__init__()
        self._methods, self._requests, self._pool, self._tree = methods, requests, pool, tree
        self._known: dict[str, Request] = {}
        self._computed: dict[str, int] = {}
        self._prompt: dict[str, int] = {}
        self._events: deque[tuple[Any, ...]] = deque()
        self.method = ""
        if tree is not None:
            self._handlers |= {"evict": lambda block, name: tree.on_evict(block), "reset": tree.on_reset}
        for name, request in requests.items():
            self.note(("add", name))
            if request.status is RequestStatus.RUNNING:
                self.note(("admit", name, request.num_computed_tokens, request.num_cached_tokens))

    def __len__(self) -> int:
        return len(self._events)

    def note(self, event: tuple[Any, ...]) -> None:
        """Take an event. A request that arrives is looked up at once: it may have ended by the time the policy is told."""
        self._events.append(("add", self._requests[event[1]]) if event[0] == "add" else event)

    def tell(self) -> None:
        """Pass on what has been noted. An event whose handler fails is not passed on again."""
        while self._events:
            self.feed(self._events.popleft())

    def _call(self, method: str, request: str, *args: Any) -> None:
        self.method = method
        for function in self._methods[method]:
            function(View(self._known[request]), *args)

    def _blocks(self, blocks: Sequence[int]) -> tuple[BlockView, ...]:
        return tuple(BlockView(self._pool.blocks[i], self._tree) for i in blocks if i)

    def _on_add(self, request: Request) -> None:
        self._known[request.request_id] = request
        self._call("on_add", request.request_id)

    def _on_admit(self, request: str, computed: int, cached: int) -> None:
        self._computed[request] = computed
        self._call("on_admit", request)

    def _on_preempt(self, request: str, *rest: Any) -> None:
        self._call("on_preempt", request)

    def _on_schedule(self, counts: dict[str, int]) -> None:
        for request, n in counts.items():
            before, length = self._computed[request], self._known[request].num_prompt_tokens
            self._computed[request] = before + n
            if before < length:
                self._prompt[request] = self._prompt.get(request, 0) + min(before + n, length) - before

    def _on_update(self, time: float, gained: dict[str, tuple[int, ...]], *rest: Any) -> None:
        prompt, self._prompt = self._prompt, {}
        for request in {**prompt, **gained}:
            if request in self._known:
                self._call("on_tokens", request, prompt.get(request, 0), len(gained.get(request, ())))

    def _on_hit(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self._call("on_hit", request, self._blocks(blocks))

    def _on_free(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        if blocks:
            self._call("on_free", request, self._blocks(blocks))

    def _on_skip(self, request: str, group: int, start: int, end: int, blocks: tuple[int, ...]) -> None:
        self._on_free(request, group, blocks)

    def _on_cache(
        self, request: str, group: int, positions: tuple[int, ...], blocks: tuple[int, ...], *rest: Any
    ) -> None:
        if self._tree is not None:
            self._tree.on_cache(self._known[request], group, positions, blocks)

    def _on_finish(self, request: str, *rest: Any) -> None:
        if request in self._known:
            self._call("on_finish", request)
            for table in (self._known, self._computed, self._prompt):
                table.pop(request, None)


class PolicyGuard:
    """Asks a policy and checks what it answers.

    Args:
        policy: the policy.
        seconds: how long one answer may take; 0 for no limit (and no thread that watches).

    Attributes:
        listener: takes the events; None for a policy that does not listen.
    """

    def __init__(self, policy: Policy, seconds: float = 10.0) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"a policy must be an instance of minivllm.core.policy.Policy, got {policy!r}")
        if not seconds >= 0:
            raise ValueError(f"policy_timeout must be at least 0 seconds (0: no limit), got {seconds}")
        self.policy, self.seconds = policy, seconds
        self._watchdog = Watchdog(seconds) if seconds else None
        self.listener: Listener | None = None
        self._tree: BlockTree | None = None
        self._failed: PolicyError | None = None
        self.has_order, self.has_chunk, self.has_victim, self.has_evict = (
            overrides(policy, question) for question in ("order", "chunk", "victim", "evict")
        )
        self.has_key = policy.key is not None and not self.has_order

    def start(self, requests: Mapping[str, Request], pool: BlockPool, block_size: int) -> None:
        """Tell the policy that it begins, and make its listener if it listens."""
        parts = self.policy.parts.values() if isinstance(self.policy, Combined) else [self.policy]
        parts = list({id(part): part for part in parts}.values())
        for part in parts:
            self._ask("on_start", part.on_start)
        methods = {name: [getattr(part, name) for part in parts if overrides(part, name)] for name in _EVENTS}
        if self.policy.track_blocks:
            self._tree = BlockTree(pool, block_size)
        if self._tree or any(methods.values()):
            self.listener = Listener(methods, requests, pool, self._tree)

    def tell(self) -> None:
        """Tell a policy that listens what has happened. Raises PolicyError if it fails, or has failed in `tell_late`."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if listener := self.listener:
            self._watch(lambda: listener.method, listener.tell)

    def tell_late(self) -> None:
        """Like `tell`, but raises nothing: an error is kept for the next `tell`."""
        try:
            self.tell()
        except PolicyError as error:
            self._failed = error

    def _ask(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        self.tell()
        return self._watch(lambda: method, function, *args)

    def _watch(self, method: Callable[[], str], function: Callable[..., Any], *args: Any) -> Any:
        limit: AbstractContextManager[None] = nullcontext() if self._watchdog is None else self._watchdog.watch()
        try:
            with limit:
                return function(*args)
        except _TimeOut:
            self.fail(method(), f"did not answer within {self.seconds:g} s")
        except Exception as error:  # noqa: BLE001 - a policy may raise anything
            self.fail(method(), f"raised {type(error).__name__}: {error}", error)

    def fail(self, method: str, what: str, cause: Exception | None = None) -> NoReturn:
        """Raise PolicyError in the name of a method."""
        raise PolicyError(f"policy {self.policy.name}.{method} {what}") from cause

    def key(self, request: Request) -> Any:
        """What a waiting request is sorted by."""
        assert self.policy.key is not None
        return self._ask("key", self.policy.key, View(request))

    def order(self, waiting: list[Request], view: SchedulerView | None) -> list[Request]:
        """All waiting requests in the policy's order."""
        answer = self._ask("order", self.policy.order, tuple(map(View, waiting)), view)
        try:
            ordered = [target_of(v) for v in answer]
        except TypeError:
            ordered = [None]
        if None in ordered:
            self.fail("order", f"must return the views it was given, got {answer!r}")
        left = {id(request): request for request in waiting}
        for request in ordered:
            if left.pop(id(request), None) is None:
                again = any(request is known for known in waiting)
                what = (
                    f"request {request.request_id!r} twice" if again else f"a request that is not waiting: {request!r}"
                )
                self.fail("order", f"returned {what}")
        if left:
            lost = next(iter(left.values())).request_id
            self.fail("order", f"dropped {len(left)} of {len(waiting)} waiting requests, {lost!r} among them")
        return ordered

    def chunk(self, request: Request, budget: int, view: SchedulerView | None) -> int:
        """A cap on the request's tokens."""
        answer = self._ask("chunk", self.policy.chunk, View(request), budget, view)
        if isinstance(answer, bool) or not isinstance(answer, int) or answer < 0:
            self.fail(
                "chunk", f"must return a whole number of tokens, at least 0, for {request.request_id!r}; got {answer!r}"
            )
        return min(answer, budget)

    def victim(self, running: list[Request], view: SchedulerView | None) -> Request:
        """One of the running requests."""
        answer = self._ask("victim", self.policy.victim, tuple(map(View, running)), view)
        for request in running:
            if request is target_of(answer):
                return request
        self.fail("victim", f"must return one of the {len(running)} running requests it was given, got {answer!r}")

    def evict(self, blocks: Iterator[KVCacheBlock], view: SchedulerView | None) -> KVCacheBlock:
        """One of the cached free blocks."""
        answer = self._ask("evict", self.policy.evict, (BlockView(block, self._tree) for block in blocks), view)
        block = target_of(answer)
        if not isinstance(block, KVCacheBlock) or block.ref_cnt or block.block_hash is None:
            self.fail("evict", f"must return one of the cached free blocks it was given, got {answer!r}")
        return block

    def choose_victims(self, pool: BlockPool, view: Callable[[], SchedulerView]) -> None:
        """Let a block pool ask this policy which block to evict."""
        key, tree = self.policy.evict_key, self._tree
        pool.choose_victim = (lambda blocks: self.evict(blocks, view())) if self.has_evict else None
        pool.evict_by(
            (lambda block: key(BlockView(block, tree))) if key is not None and not self.has_evict else None,
            lambda rank: self._ask("evict_key", rank),
        )
