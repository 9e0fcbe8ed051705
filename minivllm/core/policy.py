"""Policies: four questions of taste.

Who goes first, how much does each get, who gives up memory, and which cached block is forgotten?
"""

# Generated from nbs/core/policy.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=86a29bf215b8 module=031206fb32f0

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NoReturn

from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.request import Request

__all__ = [
    "FCFS",
    "LFU",
    "LRU",
    "Clairvoyant",
    "Combined",
    "DeepestFirst",
    "FairShare",
    "LongestPrefixMatch",
    "Policy",
    "PolicyError",
    "PolicyGuard",
    "Priority",
    "SchedulerView",
    "ShortestFirst",
    "View",
    "Watchdog",
    "arguments_of",
    "combine",
    "overrides",
]


# %% nbs/core/policy.ipynb #View
class View:
    """Reads through to an object; refuses every write."""

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
        if callable(value):
            raise AttributeError(f"{name!r} cannot be called through a read-only view")  # noqa: TRY004 - what a missing attribute raises
        return tuple(value) if isinstance(value, list) else value

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a policy's view is read-only: cannot set {name!r}")

    def __repr__(self) -> str:
        return f"View({object.__getattribute__(self, '_target')!r})"


# %% nbs/core/policy.ipynb #SchedulerView
class SchedulerView:
    """What a policy may know of the scheduler. Read-only.

    Attributes:
        step: number of the step being scheduled.
        now: seconds on the engine's clock.
        num_running, num_waiting: lengths of the queues.
        num_free_blocks, num_blocks: KV blocks that can be handed out, and all of them.
        block_size: tokens per block.
        budget: tokens left in this step.
    """

    __slots__ = ("step", "now", "num_running", "num_waiting", "num_free_blocks", "num_blocks", "block_size", "budget", "_cached", "_served")  # fmt: skip

    def __init__(
        self, cached_tokens: Callable[[Request], int], served: Callable[[], dict[str | None, int]], **values: Any
    ) -> None:
        self._cached, self._served = cached_tokens, served
        for name, value in values.items():
            setattr(self, name, value)

    @property
    def served(self) -> dict[str | None, int]:
        """Tokens scheduled for each user since the engine was last idle, counted anew at each look: prompts, outputs, recomputed ones."""
        return self._served()

    def cached_tokens(self, request: Any) -> int:
        """How many tokens at the start of a waiting request are in the prefix cache now."""
        return self._cached(object.__getattribute__(request, "_target"))


# %% nbs/core/policy.ipynb #Policy
class Policy:
    """First come, first served. Override any of the hooks.

    All requests are handed over as read-only views, running ones in the order in which they were admitted. The scheduler
    keeps its own promises (budget, reference counts, no starvation) whatever a hook answers, and reports a hook that raises,
    or answers with something it was not given, as `PolicyError`.
    """

    key: Callable[[Any], Any] | None = None
    """Optional: a fixed sort key of a request, smallest first. Takes the place of `order`."""

    @property
    def name(self) -> str:
        """The class name; it stands in traces and error messages."""
        return type(self).__name__

    def order(self, waiting: Sequence[Any], view: SchedulerView) -> Sequence[Any]:
        """The waiting requests in the order in which they should be admitted: each of them, once."""
        return waiting

    def chunk(self, request: Any, budget_left: int, view: SchedulerView) -> int:
        """The most tokens this request may get in this step, at least 0. The scheduler never gives more than it needs."""
        return budget_left

    def victim(self, running: Sequence[Any], view: SchedulerView) -> Any:
        """The running request that gives up its blocks when there are none left."""
        return running[-1]

    def evict(self, free_blocks: Iterator[Any], view: SchedulerView) -> Any:
        """The cached free block to forget, out of an iterator that runs from the least recently used on."""
        return next(free_blocks)


def overrides(policy: Policy, hook: str) -> bool:
    """Whether a policy has an answer of its own; if not, the scheduler need not ask."""
    return getattr(type(policy), hook) is not getattr(Policy, hook) or hook in vars(policy)


# %% nbs/core/policy.ipynb #FCFS
class FCFS(Policy):
    """First come, first served: vLLM's default."""


class Priority(Policy):
    """Smallest `priority` first, ties by arrival; the least urgent and youngest running request gives way (vLLM's rule)."""

    @staticmethod
    def key(request: Any) -> Any:
        return (request.priority, request.arrival_time, request.sequence_number)

    def victim(self, running: Sequence[Any], view: SchedulerView) -> Any:
        return max(running, key=lambda r: (r.priority, r.arrival_time, r.sequence_number))


class ShortestFirst(Policy):
    """Fewest tokens first, prompt and allowed output together. Short answers do not wait behind long ones."""

    @staticmethod
    def key(request: Any) -> Any:
        return (request.num_prompt_tokens + request.max_tokens, request.sequence_number)


class FairShare(Policy):
    """The user who has been served the fewest tokens goes first (virtual token counter, Sheng et al. 2024)."""

    def order(self, waiting: Sequence[Any], view: SchedulerView) -> Sequence[Any]:
        served = view.served
        return sorted(waiting, key=lambda r: served.get(r.user, 0))


class LongestPrefixMatch(Policy):
    """Most cached tokens first, so that a prefix is used while it is there (SGLang's default)."""

    def order(self, waiting: Sequence[Any], view: SchedulerView) -> Sequence[Any]:
        return sorted(waiting, key=view.cached_tokens, reverse=True)


# %% nbs/core/policy.ipynb #LRU
class LRU(Policy):
    """Forget the block that has not been used for the longest time: vLLM's default."""


class LFU(Policy):
    """Of the `sample` oldest cached blocks, forget the one that was hit least often."""

    def __init__(self, sample: int = 64) -> None:
        self.sample = sample

    def evict(self, free_blocks: Iterator[Any], view: SchedulerView) -> Any:
        return min(islice(free_blocks, self.sample), key=lambda block: block.num_hits)


class DeepestFirst(Policy):
    """Size-aware: of the `sample` oldest cached blocks, forget the deepest, so that long rare tails go before short beginnings."""

    def __init__(self, sample: int = 64) -> None:
        self.sample = sample

    def evict(self, free_blocks: Iterator[Any], view: SchedulerView) -> Any:
        return max(islice(free_blocks, self.sample), key=lambda block: block.depth)


class Clairvoyant(Policy):
    """Belady's rule: forget the block whose next use lies furthest in the future. Needs the future, so it serves as a bound.

    Args:
        next_use: block hash -> moment of its next use (any sortable number), called at every eviction; infinity for never.
    """

    def __init__(self, next_use: Callable[[bytes], float]) -> None:
        self.next_use = next_use

    def evict(self, free_blocks: Iterator[Any], view: SchedulerView) -> Any:
        return max(free_blocks, key=lambda block: (self.next_use(block.block_hash), block.depth))


# %% nbs/core/policy.ipynb #combine
class Combined(Policy):
    """What `combine` makes. `parts`: the policy behind each hook."""

    def __init__(self, parts: dict[str, Policy]) -> None:
        self.parts = parts


def combine(
    order: Policy | None = None, chunk: Policy | None = None, victim: Policy | None = None, evict: Policy | None = None
) -> Policy:
    """One policy that asks a different one for each question; None means first come, first served."""
    parts = {"order": order, "chunk": chunk, "victim": victim, "evict": evict}
    combined = Combined({hook: part for hook, part in parts.items() if part is not None})
    for hook, part in parts.items():
        if part is not None and overrides(part, hook):
            setattr(combined, hook, getattr(part, hook))
    if order is not None and order.key is not None:
        combined.key = order.key
    return combined


def arguments_of(policy: Policy) -> dict[str, Any]:
    """What a policy was made with, for the header of a trace: those of its attributes that are plain values; of a combined one, its parts."""
    if isinstance(policy, Combined):
        return {hook: {"name": part.name, "arguments": arguments_of(part)} for hook, part in policy.parts.items()}
    return {
        name: value for name, value in vars(policy).items() if value is None or isinstance(value, str | int | float)
    }


# %% nbs/core/policy.ipynb #PolicyError
class PolicyError(RuntimeError):
    """A policy answered wrongly, raised, or did not answer. Names policy and hook; the scheduler's state is intact."""


class _TimeOut(BaseException):
    pass


class Watchdog:
    """Interrupts Python code that runs for too long. One thread serves all calls; it sleeps while nothing is watched.

    Args:
        seconds: how long a watched block may take.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Condition()
        self._deadline: float | None = None
        self._target = 0
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raise inside the block if it takes too long."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="minivllm-policy-watchdog")
                self._thread.start()
            self._target, self._deadline = threading.get_ident(), time.monotonic() + self.seconds
            self._lock.notify()
        try:
            yield
        finally:
            with self._lock:
                self._deadline = None

    def _run(self) -> None:
        with self._lock:
            while True:
                if self._deadline is None:
                    self._lock.wait()
                elif (left := self._deadline - time.monotonic()) > 0:
                    self._lock.wait(left)
                else:
                    self._deadline = None
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._target), ctypes.py_object(_TimeOut))


# %% nbs/core/policy.ipynb #PolicyGuard
class PolicyGuard:
    """Asks a policy and checks what it answers.

    Args:
        policy: the policy.
        seconds: how long one answer may take.
    """

    def __init__(self, policy: Policy, seconds: float = 10.0) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"a policy must be an instance of minivllm.core.policy.Policy, got {policy!r}")
        self.policy = policy
        self._watchdog = Watchdog(seconds)
        self.has_order, self.has_chunk, self.has_victim, self.has_evict = (
            overrides(policy, hook) for hook in ("order", "chunk", "victim", "evict")
        )
        self.has_key = policy.key is not None

    def _ask(self, hook: str, *args: Any) -> Any:
        try:
            with self._watchdog.watch():
                return getattr(self.policy, hook)(*args)
        except _TimeOut:
            self.fail(hook, f"did not answer within {self._watchdog.seconds:g} s")
        except Exception as error:  # noqa: BLE001 - a policy may raise anything
            self.fail(hook, f"raised {type(error).__name__}: {error}", error)

    def fail(self, hook: str, what: str, cause: Exception | None = None) -> NoReturn:
        """Raise PolicyError in the name of a hook."""
        raise PolicyError(f"policy {self.policy.name}.{hook} {what}") from cause

    def key(self, request: Request) -> Any:
        """What a waiting request is sorted by."""
        return self._ask("key", View(request))

    def order(self, waiting: list[Request], view: SchedulerView) -> list[Request]:
        """All waiting requests in the policy's order."""
        views = [View(request) for request in waiting]
        answer = self._ask("order", tuple(views), view)
        try:
            ordered = [object.__getattribute__(v, "_target") for v in answer]
        except (TypeError, AttributeError):
            self.fail("order", f"must return the views it was given, got {answer!r}")
        known = {id(request) for request in waiting}
        seen: set[int] = set()
        for request in ordered:
            if id(request) not in known:
                self.fail("order", f"returned a request that is not waiting: {request!r}")
            if id(request) in seen:
                self.fail("order", f"returned request {request.request_id!r} twice")
            seen.add(id(request))
        if len(seen) < len(known):
            lost = next(request.request_id for request in waiting if id(request) not in seen)
            self.fail(
                "order", f"dropped {len(known) - len(seen)} of {len(known)} waiting requests, {lost!r} among them"
            )
        return ordered

    def chunk(self, request: Request, budget: int, view: SchedulerView) -> int:
        """A cap on the request's tokens."""
        answer = self._ask("chunk", View(request), budget, view)
        if isinstance(answer, bool) or not isinstance(answer, int) or answer < 0:
            self.fail(
                "chunk", f"must return a whole number of tokens, at least 0, for {request.request_id!r}; got {answer!r}"
            )
        return min(answer, budget)

    def victim(self, running: list[Request], view: SchedulerView) -> Request:
        """One of the running requests."""
        views = [View(request) for request in running]
        answer = self._ask("victim", tuple(views), view)
        for v, request in zip(views, running, strict=True):
            if v is answer:
                return request
        self.fail("victim", f"must return one of the {len(running)} running requests it was given, got {answer!r}")

    def evict(self, blocks: Iterator[KVCacheBlock], view: SchedulerView) -> KVCacheBlock:
        """One of the cached free blocks."""
        answer = self._ask("evict", (View(block) for block in blocks), view)
        block = object.__getattribute__(answer, "_target") if isinstance(answer, View) else None
        if not isinstance(block, KVCacheBlock) or block.ref_cnt or block.block_hash is None:
            self.fail("evict", f"must return one of the cached free blocks it was given, got {answer!r}")
        return block
