"""Continuous batching scheduler: token budget, chunked prefill, admission, preemption."""

# Generated from nbs/core/scheduler.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from minivllm.core.adapter_slots import AdapterSlots
from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.config import CacheConfig, KVCacheConfig, SchedulerConfig, tokens_held
from minivllm.core.encoder_cache import EncoderCacheManager, MultiModalFeatureSpec
from minivllm.core.kv_cache import CacheHit, KVCacheManager
from minivllm.core.kv_connector import KVConnector
from minivllm.core.output import (
    EngineCoreOutput,
    KVConnectorMetadata,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from minivllm.core.policy import POLICIES, Listener, Policy, PolicyError, PolicyGuard, SchedulerView, Served
from minivllm.core.recorder import Recorder
from minivllm.core.request import FinishReason, Request, RequestStatus
from minivllm.core.request_queue import WaitingQueue
from minivllm.core.speculative import NOT_DRAFTED, SpecDecodingStats


@dataclass(frozen=True, slots=True)
class Recompute:
    """A preempted request loses its blocks and computes them again (less what the prefix cache still holds)."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A preempted request's blocks are copied to `num_cpu_blocks` blocks of CPU memory; if those are full, it recomputes."""

    num_cpu_blocks: int

    def __post_init__(self) -> None:
        if self.num_cpu_blocks < 1:
            raise ValueError(f"Swap needs at least 1 CPU block, got {self.num_cpu_blocks}")


Preemption = Recompute | Swap


class Clock(Protocol):
    """Gives the time in seconds."""

    def now(self) -> float: ...


class WallClock:
    """Seconds since ``start`` on the machine's monotonic clock, which all its processes share; None: since the clock was made."""

    def __init__(self, start: float | None = None) -> None:
        self.start = time.perf_counter() if start is None else start

    def now(self) -> float:
        return time.perf_counter() - self.start


class VirtualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward. Raises ValueError for a step that is negative or not finite."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a clock can only go forward, by a finite time: advance({seconds})")
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Move to a moment, unless it has passed already."""
        self._now = max(self._now, moment)


@dataclass(slots=True)
class _Decision:
    """The decision about a step, while it is being made."""

    scheduled: dict[str, int] = field(default_factory=dict)
    new_requests: dict[str, NewRequestData] = field(default_factory=dict)
    new_block_ids: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    swap_out: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    swap_in: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    spec: dict[str, list[int]] = field(default_factory=dict)
    lora_loads: list[tuple[int, str]] = field(default_factory=list)
    loras_in_use: set[str] = field(default_factory=set)
    encoder_inputs: dict[str, MultiModalFeatureSpec] = field(default_factory=dict)
    encoder_frees: list[str] = field(default_factory=list)
    remote: list[str] = field(default_factory=list)  # requests that are to wait for their blocks
    encoded: int = 0  # embeddings that are encoded in this step
    budget: int = 0
    threshold: int = 0
    closed: bool = False  # a running request lost its blocks: no request is admitted


class Scheduler(Recorder):
    """Decides, step by step, which tokens are computed. Owns the requests and, through the KV cache manager, all blocks.

    Args:
        config: limits.
        cache: block size and counts.
        kv_cache: KV cache groups; None for one group of full attention.
        policy: decides the order, the chunks, the victims and what is evicted; None for the one that `config.policy` names.
        preemption: `Recompute()` or `Swap(n)`; None takes `Swap` if `cache.num_cpu_blocks` is given.
        clock: where the time comes from.
        connector: fetches blocks from an external store, and saves blocks there; None for none.
        policy_timeout: seconds that a policy's answer may take; 0 for no limit (and no watchdog).

    Attributes:
        requests: unfinished requests by id.
        waiting, running: the queues.
        remote: requests in `WAITING_FOR_REMOTE_KVS`. A connector is filling their blocks while steps run, or has filled them.
        kv_cache_manager: the KV cache manager.
        spec_stats: counters of draft tokens.
        adapters: which LoRA adapter is in which slot.
        encoder_cache: which encoder outputs are kept.
        trace: None, or a function that takes an event (see `record` and `subscribe`).
        waits_for_tokens: a request whose newest token is in flight is not scheduled until that token has arrived, and one that was preempted meanwhile
            is not admitted. Pipeline stages need this: the first stage does not sample, so it must be given that token before the next step begins.
        drafts_ahead: how many draft tokens per request the device makes for the next step. That step may then be decided before the tokens
            of the last one are known; see `can_draft_ahead`. 0 if the host makes the drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv_cache: KVCacheConfig | None = None,
        *,
        policy: Policy | None = None,
        preemption: Preemption | None = None,
        clock: Clock | None = None,
        policy_timeout: float = 10.0,
        connector: KVConnector | None = None,
    ) -> None:
        Recorder.__init__(self)
        if not isinstance(preemption, Recompute | Swap | None):
            raise TypeError(f"preemption must be Recompute() or Swap(num_cpu_blocks), got {preemption!r}")
        if isinstance(preemption, Swap):
            cache = CacheConfig(**{**asdict(cache), "num_cpu_blocks": preemption.num_cpu_blocks})
        self.config, self.cache, self.kv_cache = config, cache, kv_cache
        self.preemption = preemption or (Swap(cache.num_cpu_blocks) if cache.num_cpu_blocks else Recompute())
        self.clock = clock or WallClock()
        self.kv_cache_manager = KVCacheManager(cache, kv_cache, config.max_num_batched_tokens)
        self.connector = connector
        if connector is not None:
            self._of_blocks.append(connector.note)
            self._connect()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.remote: dict[str, Request] = {}
        # transfers in progress: how many tokens are computed when they end, or why their blocks are useless
        self._receiving: dict[str, int | str] = {}
        self._unfetchable: set[str] = set()  # requests for which no block could be fetched
        self._kept: dict[str, list[KVCacheBlock]] = {}  # blocks of ended requests that a connector still copies
        # requests in `_kept` whose blocks are being sent; value: the first step in which workers know of it
        self._sends: dict[str, int] = {}
        self.adapters = AdapterSlots(config.max_loras)
        self.encoder_cache = EncoderCacheManager(*config.encoder_limits)
        self.step = self.num_preemptions = 0
        self.waits_for_tokens, self.drafts_ahead = False, 0
        # with `waits_for_tokens`, the step in which a request was last scheduled
        self._scheduled_in: dict[str, int] = {}
        self.spec_stats = SpecDecodingStats()
        self._arrivals = self._overtaken = self._idle_steps = 0
        self._served: dict[str | None, Served] = {}
        self._listener: Listener | None = None
        self._needed_by: Request | None = None
        self._finished: list[str] = []
        self._newest_result = -1
        self._ended_in_flight: dict[str, int] = {}
        self._decision = _Decision()
        self._policy_timeout = policy_timeout
        self.waiting = WaitingQueue()
        self.set_policy(policy or POLICIES[config.policy]())
        specs, pool = [group.spec for group in self.kv_cache_manager.groups], self.kv_cache_manager.block_pool
        self.max_model_len = tokens_held(specs, pool.num_blocks, config.max_model_len, config.max_num_batched_tokens)

    def set_policy(self, policy: Policy) -> None:
        """Use another policy from the next step on."""
        guard = PolicyGuard(policy, self._policy_timeout)
        guard.start(self.requests, self.kv_cache_manager.block_pool, self.cache.block_size)
        if self._listener is not None:
            self.unsubscribe(self._listener.note)
        self._guard, self._listener = guard, guard.listener
        if self._listener is not None:
            self.subscribe(self._listener.note)
        queue = WaitingQueue(guard if guard.has_key else None)
        for request in self.waiting:
            queue.add(request)
        self.waiting = queue
        guard.choose_victims(self.kv_cache_manager.block_pool, lambda: self._view(self._decision.budget))

    def _served_tokens(self) -> dict[str | None, Served]:
        """Tokens served per user so far. Counted when a policy asks, so that a step need not count."""
        before = dict(self._served)
        for request in self.running:
            self._keep_account(request, 1)
        served, self._served = self._served, before
        return served

    def _keep_account(self, request: Request, sign: int) -> None:
        """Note what a request had when it started to run (sign -1), or has when it stops (1)."""
        prompt, output = self._served.get(request.user, Served())
        computed = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._served[request.user] = Served(prompt + sign * computed, output + sign * request.num_output_tokens)

    def _view(self, budget: int) -> SchedulerView:
        return SchedulerView(
            self.kv_cache_manager,
            step=self.step,
            now=self.clock.now(),
            budget=budget,
            num_waiting=len(self.waiting),
            running=self.running,
            needed_by=self._needed_by,
            served=self._served_tokens,
            note=self._note,
        )

    def _note(self, label: str, value: Any) -> None:
        if self.trace is not None:
            self.trace(("note", label, value, self.policy.name))

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, or its prompt can never fit; nothing has changed then.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        if request.status is not RequestStatus.WAITING:
            raise ValueError(f"{request!r} has been run before; make a new Request")
        if request.num_tokens + self.config.generates > self.max_model_len:
            limit = "max_model_len" if self.max_model_len == self.config.max_model_len else "what the KV cache can hold"
            raise ValueError(
                f"request {request.request_id!r}: a prompt of {request.num_tokens} tokens is too long; {limit} is"
                f" {self.max_model_len} tokens and at least one must be left for the output"
            )
        if request.mm_features:
            self._check_media(request)
        request.max_total_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        request.sequence_number = self._arrivals
        self._arrivals += 1
        self.requests[request.request_id] = request
        if self.trace is not None:
            if request.route is not None:
                self.trace(request.route)
            self.trace(_add_event(request))
            if attributes := _attributes(request):
                self.trace(("attributes", request.request_id, attributes))
        self.waiting.add(request)

    def _check_media(self, request: Request) -> None:
        """Count a request with media. Raises ValueError if one of its inputs can never be encoded, or never be computed in one step."""
        self.encoder_cache.check(request)
        most = self.config.max_num_batched_tokens
        for feature in request.mm_features:
            if feature.whole and feature.mm_position.length > most:
                raise ValueError(
                    f"request {request.request_id!r}: a {feature.modality} of {feature.mm_position.length} tokens must be computed"
                    f" in one step, and max_num_batched_tokens={most}"
                )
        self.encoder_cache.users += 1

    def schedule(self) -> SchedulerOutput:
        """Decide what the next step computes.

        Raises:
            PolicyError: a policy's hook failed. No block is lost; call again after `set_policy`.
        """
        trace, decision = self.trace, self._decision
        if trace is not None:
            trace(("step", self.step, self.clock.now()))
        self.kv_cache_manager.block_pool.step = self.step
        decision.budget = self.config.max_num_batched_tokens
        decision.threshold = self.config.long_prefill_token_threshold if len(self.requests) > 1 else 0
        if self.encoder_cache.held:
            self._release_encoded()
        try:
            self._fill(decision)
        except BaseException as error:
            self._take_back(decision)
            if trace is not None and isinstance(error, PolicyError):
                trace(("policy_error", str(error)))
            raise
        self._decision = _Decision()
        for request_id in decision.swap_in:
            self.kv_cache_manager.free_cpu(request_id)
        if trace is not None and decision.scheduled:
            if self.drafts_ahead and decision.spec:
                trace(("draft", {name: tuple(tokens) for name, tokens in decision.spec.items()}))
            trace(("schedule", decision.scheduled))
        output = SchedulerOutput(
            step=self.step,
            num_scheduled_tokens=decision.scheduled,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - decision.budget,
            new_requests=tuple(decision.new_requests.values()),
            new_block_ids=decision.new_block_ids,
            preempted=tuple(decision.preempted),
            finished=tuple(self._finished),
            swap_out=tuple(pair for pairs in decision.swap_out.values() for pair in pairs),
            swap_in=tuple(pair for pairs in decision.swap_in.values() for pair in pairs),
            lora_loads=tuple(decision.lora_loads),
            scheduled_spec_decode_tokens=decision.spec,
            drafts_on_device=self.drafts_ahead > 0,
            free_encoder_mm_hashes=tuple(decision.encoder_frees),
            scheduled_encoder_inputs=tuple(decision.encoder_inputs.values()),
            recorded=self.trace is not None,
            kv_connector_metadata=None if self.connector is None else self._transfers(self.connector, decision),
        )
        self._finished = []
        if self.waits_for_tokens:
            self._scheduled_in |= dict.fromkeys(decision.scheduled, self.step)
        self.step += 1
        return output

    def _fill(self, decision: _Decision) -> None:
        if self._listener is not None:
            self._guard.tell()
        self._schedule_running(decision)
        if self.remote and decision.budget:
            self._schedule_arrived(decision)
        if self.waiting.requests:
            if not decision.budget:
                self._wait(self.waiting.first(), "budget")
            elif decision.closed:
                self._wait(self.waiting.first(), "after_preemption")
            else:
                self._schedule_waiting(decision)
        idle = self.requests and not (decision.scheduled or self._receiving or self._kept)
        self._idle_steps = self._idle_steps + 1 if idle else 0
        if self._idle_steps > self.config.starvation_limit:
            raise PolicyError(f"policy {self.policy.name} has given no tokens to anyone for {self._idle_steps} steps")

    def _take_back(self, decision: _Decision) -> None:
        """Undo a decision that failed half-way: its admissions, its token counts, the blocks it registered.

        Preemptions and new blocks of running requests stay, and go out with the next decision.
        """
        for request_id in reversed(decision.remote):  # they may share blocks that this decision was to fill
            del self._receiving[request_id]
            self._end_load(request_id, set())
            self._lose(self.remote[request_id], "policy_error")
        decision.remote.clear()
        for request_id in reversed(decision.new_requests.copy()):
            if self.connector is not None:  # what was to be fetched is registered already
                self.kv_cache_manager.uncache_blocks(self.requests[request_id], 0)
            self._preempt(self.requests[request_id], decision, request_id, "policy_error")
        for request_id, n in tuple(decision.scheduled.items()):
            request = self.requests[request_id]
            if self.kv_cache_manager.has_gap(request, request.num_computed_tokens - n):
                self._preempt(request, decision, request_id, "policy_error")
                continue
            request.num_computed_tokens -= n
            self.kv_cache_manager.uncache_blocks(request, request.num_computed_tokens)
        decision.scheduled.clear()
        decision.spec.clear()
        self.step += 1

    def _schedule_running(self, decision: _Decision) -> None:
        scheduled, budget, ahead = decision.scheduled, decision.budget, self.drafts_ahead
        unknown = [NOT_DRAFTED] * ahead
        threshold, ask, runs = decision.threshold, self._guard.has_chunk, RequestStatus.RUNNING
        caching, media = self.kv_cache_manager.caching_groups, self.encoder_cache.users > 0
        for request in tuple(self.running):
            if budget <= 0:
                break
            if request.status is not runs:  # preempted for one before it
                continue
            computed, known = request.num_computed_tokens, request.num_tokens
            spec = request.spec_token_ids
            if ahead and not spec:
                known, spec = max(known, computed + 1), unknown
            n = known - computed
            if spec:  # at least one token is left for after the drafts
                n += min(len(spec), request.max_total_tokens - known - 1)
            if n <= 0:  # its newest token is in flight: this step goes on from it, unless the request ends with it
                if computed + 1 >= request.max_total_tokens or self.waits_for_tokens:
                    continue
                n = 1
            if n > 1 or ask or media:
                n = self._cap(request, n, budget, threshold, ask)
                if media:
                    n, _ = self._fit_media(request, computed, n, budget, decision)
                if n == 0:
                    continue
            if computed + n >= request.capacity:
                if computed + n == request.capacity:
                    for group in caching:
                        group.cache_full_blocks(request, computed + n)
                else:
                    decision.budget = budget
                    fits = self._make_room(request, n, decision)
                    budget = decision.budget
                    if not fits:
                        continue
            scheduled[request.request_id] = n
            request.num_computed_tokens = computed + n
            budget -= n
            if media:
                self._encode(request, computed, n, decision)
            if spec:
                if (verified := computed + n - known) > 0:
                    decision.spec[request.request_id] = spec[:verified]
                request.spec_token_ids = []
        decision.budget = budget

    def can_draft_ahead(self) -> bool:
        """Whether every request in the next step has computed its prompt, so that the device can know its newest token and its drafts."""
        arriving = self.waiting.requests and len(self.running) < self.config.max_num_seqs
        if arriving or self.remote:
            return False
        return all(request.num_computed_tokens >= request.num_tokens - 1 for request in self.running)

    def _cap(self, request: Request, n: int, budget: int, threshold: int, ask: bool) -> int:
        """How many tokens a request gets of the `n` that it wants."""
        wanted, why = n, ""
        if 0 < threshold < n:
            n, why = threshold, "long_prefill_token_threshold"
        if ask and (cap := self._ask_chunk(request, budget)) < n:
            n, why = cap, "policy"
        if budget < n:
            n, why = budget, "budget"
        if n < wanted and self.trace is not None:
            self.trace(("chunk", request.request_id, n, wanted, why))
        return n

    def _fit_media(self, request: Request, start: int, n: int, budget: int, decision: _Decision) -> tuple[int, str]:
        """How many of `n` tokens from `start` on can be computed with the encoder outputs that exist or fit; if none, the reason."""
        if not request.mm_features or start >= request.num_prompt_tokens:
            return n, ""
        whole = self.encoder_cache.keep_whole(request, start, n, budget)
        fits, reason = self.encoder_cache.fit(request, start, whole, decision.encoded)
        reason = reason or "budget"
        if fits < n and self.trace is not None:
            self.trace(("chunk", request.request_id, fits, n, reason))
        return fits, reason

    def _encode(self, request: Request, start: int, n: int, decision: _Decision) -> None:
        """Schedule the encoder inputs that these tokens need, and note which cached outputs are dropped to make room."""
        if not request.mm_features or start >= request.num_prompt_tokens:
            return
        new, evicted = self.encoder_cache.take(request, start, n)
        self._drop_encoded(evicted, decision)
        for feature in new:
            decision.encoder_inputs[feature.identifier] = feature
            decision.encoded += feature.mm_position.num_embeds
            if self.trace is not None:
                size = feature.mm_position.num_embeds
                self.trace(("encode", request.request_id, feature.modality, feature.identifier, size))

    def _release_encoded(self) -> None:
        """Release encoder outputs whose ranges are computed. Steps run in order, so an output has been used before it is dropped."""
        for request_id in list(self.encoder_cache.held):
            request = self.requests[request_id]
            self.encoder_cache.release(request, request.num_computed_tokens)

    def _drop_encoded(self, evicted: Iterable[str], decision: _Decision) -> None:
        for name in evicted:
            if decision.encoder_inputs.pop(name, None) is None:  # else planned for a request that was preempted since
                decision.encoder_frees.append(name)
            if self.trace is not None:
                self.trace(("encoder_evict", name))

    def _ask_chunk(self, request: Request, budget: int) -> int:
        """The policy's cap. It is ignored once the policy has given this request nothing, and others something, for too many steps in a row."""
        cap = self._guard.chunk(request, budget, self._view(budget))
        request.num_denied = 0 if cap else request.num_denied + 1
        if request.num_denied <= self.config.starvation_limit or self._idle_steps:
            return cap
        request.num_denied = 0
        return budget

    def _make_room(self, request: Request, n: int, decision: _Decision) -> bool:
        """Allocate for `n` more tokens; False if the request had to be preempted itself."""
        self._needed_by = request
        while True:
            new = self.kv_cache_manager.allocate_slots(request, n)
            if new is not None:
                if any(new):
                    self._note_blocks(request.request_id, new, decision)
                return True
            if idle := next((r for name, r in reversed(self.remote.items()) if name not in self._receiving), None):
                self._lose(idle, self.policy.name, request.request_id)  # before one that has started
                decision.closed = True
                continue
            victim = self._choose_victim(decision)
            self._preempt(
                victim, decision, request.request_id, self.policy.name, swap=isinstance(self.preemption, Swap)
            )
            decision.closed = True
            if victim is request:
                return False

    def _note_blocks(self, request_id: str, new: tuple[list[int], ...], decision: _Decision) -> None:
        """Append to the blocks that the runner is told of. After a decision was taken back, there may be some of this request already."""
        held = decision.new_block_ids.setdefault(request_id, new)
        if held is not new:
            for ids, more in zip(held, new, strict=True):
                ids.extend(more)

    def _choose_victim(self, decision: _Decision) -> Request:
        if not self._guard.has_victim:
            return self.running[-1]
        limit = self.config.starvation_limit
        candidates = [r for r in self.running if r.num_preemptions < limit] or self.running[-1:]
        return self._guard.victim(candidates, self._view(decision.budget))

    def _preempt(
        self, victim: Request, decision: _Decision, needed_by: str, chosen_by: str, swap: bool = False
    ) -> None:
        """Take a running request's blocks away and put it in front of the waiting ones.

        What this decision planned for it is undone. If the decision admitted it, it waits again as before.
        """
        request_id, kv = victim.request_id, self.kv_cache_manager
        n = decision.scheduled.pop(request_id, 0)
        decision.budget += n
        victim.num_computed_tokens -= n
        self._keep_account(victim, 1)
        self.running.remove(victim)
        swapped_in = decision.swap_in.pop(request_id, None)
        if n:
            kv.uncache_blocks(victim, 0 if swapped_in else victim.num_computed_tokens)
        if victim.lora_name in self.adapters.loading and request_id not in decision.new_requests:
            kv.uncache_blocks(victim, 0)  # the load may fail, and then its blocks are wrong
            swap = False
        if swapped_in:
            kv.free(victim, keep_cpu_blocks=True)
        elif swap and victim.num_computed_tokens and (pairs := kv.swap_out(victim)):
            decision.swap_out[request_id] = pairs
        else:
            kv.free(victim)
            victim.num_computed_tokens = 0
        victim.status = RequestStatus.SWAPPED if victim.num_computed_tokens else RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self.num_preemptions += 1
        if decision.new_requests.pop(request_id, None) is None:
            decision.preempted.append(request_id)
        decision.new_block_ids.pop(request_id, None)
        decision.spec.pop(request_id, None)
        victim.spec_token_ids = []
        if victim.mm_features:
            self.encoder_cache.free(victim)
        self.waiting.add(victim, front=True)
        if self.trace is not None:
            mode = "swap" if victim.num_computed_tokens else "recompute"
            self.trace(("preempt", request_id, mode, needed_by, chosen_by))

    def _schedule_waiting(self, decision: _Decision) -> None:
        self._note_loras(decision)
        refused = set[str | None]()  # while requests are admitted, no slot becomes free
        try:
            for request in self._candidates(decision):
                reason = "max_loras" if request.lora_name in refused else self._admit(request, decision)
                if reason is not None and (reason != "max_loras" or self.waiting.open == len(self.waiting)):
                    self._wait(request, reason)
                if reason == "max_loras" and self._overtaken < self.config.starvation_limit:
                    self.waiting.hold(request)  # others need no slot, or have theirs
                    refused.add(request.lora_name)
                elif reason is not None:
                    break
        finally:
            self.waiting.release()

    def _note_loras(self, decision: _Decision) -> None:
        decision.loras_in_use = {request.lora_name for request in self.running if request.lora_name is not None}

    def _schedule_arrived(self, decision: _Decision) -> None:
        """Admit requests whose blocks have been filled, before all others and whatever the policy: others may wait for the blocks that they hold."""
        self._note_loras(decision)
        for request in tuple(self.remote.values()):
            if request.request_id not in self._receiving and decision.budget:
                reason = self._admit(request, decision)
                if reason is not None:
                    self._wait(request, reason)

    def _candidates(self, decision: _Decision) -> Iterator[Request]:
        """Waiting requests in the order of admission; each must be admitted, or held, before the next is taken."""
        if len(self.running) >= self.config.max_num_seqs:
            yield self.waiting.first()
            return
        if not self._guard.has_order:
            while self.waiting.open and decision.budget:
                yield self._next_in_line(self.waiting.first())
            return
        while self.policy.order_per_admission and self.waiting.open and decision.budget:
            for request in filter(self.waiting.is_open, self._ordered(decision)):
                yield self._next_in_line(request)
                if request not in self.waiting or self.waiting.is_open(request):
                    break  # one was admitted: ask for the order again
        if self.policy.order_per_admission:
            return
        for request in self._ordered(decision):
            if not decision.budget:
                return
            while self.waiting.is_open(request):
                yield self._next_in_line(request)

    def _ordered(self, decision: _Decision) -> list[Request]:
        """The waiting requests in the policy's order."""
        self._needed_by = None
        ordered = self._guard.order(list(self.waiting), self._view(decision.budget))
        if self.trace is not None:
            self.trace(("order", tuple(request.request_id for request in ordered), self.policy.name))
        return ordered

    def _next_in_line(self, preferred: Request) -> Request:
        """The preferred request, unless the oldest has been overtaken too often."""
        oldest = next(iter(self.waiting))
        if preferred is not oldest and self._overtaken >= self.config.starvation_limit:
            return oldest
        return preferred

    def _wait(self, request: Request, reason: str) -> None:
        """Record why the first in line is not admitted, unless the last `wait` event said the same."""
        if self.trace is not None and self._last_wait != (request.request_id, reason):
            self._last_wait = (request.request_id, reason)
            self.trace(("wait", request.request_id, reason))

    def _admit(self, request: Request, decision: _Decision) -> str | None:
        """Start one waiting request, or the transfer of its blocks. Returns None, or the reason if neither can start now."""
        config, self._needed_by = self.config, request
        if len(self.running) >= config.max_num_seqs:
            return "max_num_seqs"
        if config.max_num_partial_prefills is not None:
            partial = sum(r.num_computed_tokens < r.num_prompt_tokens for r in self.running)
            if partial >= config.max_num_partial_prefills:
                return "max_num_partial_prefills"
        if self._scheduled_in.get(request.request_id, -1) > self._newest_result:
            return "in_flight"
        if request.request_id in self._kept:
            return "blocks_in_use"
        name, adapters = request.lora_name, self.adapters
        if name is not None and adapters.count and not adapters.can_take(name, decision.loras_in_use):
            return "max_loras"
        if request.status is RequestStatus.SWAPPED:
            return self._admit_swapped(request, decision)
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return self._admit_arrived(request, decision)
        hit, more = self.kv_cache_manager.get_computed_blocks(request), 0
        if self.connector is not None and request.request_id not in self._unfetchable:
            more, load_async = self.connector.get_num_new_matched_tokens(request, hit.num_tokens)
            if load_async and more:
                return self._receive(self.connector, request, hit, more, decision)
        computed = hit.num_tokens + more
        n, reason = self._first_chunk(request, computed, decision)
        if n == 0:
            return reason
        reserve = request.num_tokens if config.scheduler_reserve_full_isl else 0
        blocks = self.kv_cache_manager.allocate_slots(request, more + n, hit, self._keep_free(), reserve)
        if blocks is None:
            return "no_blocks"
        self.kv_cache_manager.count_lookup(request, hit)
        request.num_computed_tokens = computed
        if request.num_preemptions == 0:
            request.num_cached_tokens = computed
        if self.connector is not None:
            self.connector.update_state_after_alloc(request, blocks, hit.num_tokens, more)
        self._start(request, n, blocks, decision)
        return None

    def _first_chunk(self, request: Request, computed: int, decision: _Decision) -> tuple[int, str]:
        """How many tokens a starting request gets after its `computed` ones; if none, the reason."""
        wanted = request.num_tokens - computed
        if not self.config.enable_chunked_prefill and min(wanted, decision.threshold or wanted) > decision.budget:
            return 0, "no_chunked_prefill"
        n = self._cap(request, wanted, decision.budget, decision.threshold, self._guard.has_chunk)
        if n and request.mm_features:
            return self._fit_media(request, computed, n, decision.budget, decision)
        return n, "policy"

    def _take_slot(self, request: Request, decision: _Decision) -> int:
        """The slot of the request's adapter; -1 if it has none. If the adapter must be loaded, the decision says so."""
        name, adapters = request.lora_name, self.adapters
        if name is None or not adapters.count:
            return -1
        is_new = name not in adapters.slot_of
        slot, evicted = adapters.take(name, decision.loras_in_use)
        decision.loras_in_use.add(name)
        if is_new:
            decision.lora_loads.append((slot, name))
            if self.trace is not None:
                if evicted is not None:
                    self.trace(("lora_evict", evicted, slot))
                self.trace(("lora_load", name, slot))
        return slot

    def _keep_free(self) -> int:
        """Blocks that an admission must leave free, so that running requests can grow; 0 if there are none."""
        return int(self.cache.watermark * self.kv_cache_manager.block_pool.num_blocks) if self.running else 0

    def _admit_swapped(self, request: Request, decision: _Decision) -> str | None:
        kv = self.kv_cache_manager
        n, reason = self._first_chunk(request, request.num_computed_tokens, decision)
        if n == 0:
            return reason
        taken = kv.swap_in(request, n, self._keep_free())
        if taken is None:
            return "no_blocks"
        pairs, blocks = taken
        try:
            more = kv.allocate_slots(request, n)
        except BaseException:  # an eviction policy may raise anything
            kv.free(request, keep_cpu_blocks=True)
            raise
        assert more is not None, "swap_in left room for these blocks"
        decision.swap_in[request.request_id] = pairs
        self._start(request, n, tuple(old + new for old, new in zip(blocks, more, strict=True)), decision)
        return None

    def _start(self, request: Request, n: int, blocks: tuple[list[int], ...], decision: _Decision) -> None:
        """Move a waiting request to the running ones, and add what the runner needs of it to the decision."""
        if self.remote.pop(request.request_id, None) is None:
            overtakes = request is not next(iter(self.waiting))
            self._overtaken = self._overtaken + 1 if overtakes else 0
            self.waiting.remove(request)
        slot = self._take_slot(request, decision)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if self.trace is not None:
            self.trace(("admit", request.request_id, request.num_computed_tokens, request.num_cached_tokens))
        decision.new_requests[request.request_id] = NewRequestData(
            request_id=request.request_id,
            prompt_token_ids=request.all_token_ids[: request.num_prompt_tokens],
            output_token_ids=request.output_token_ids,
            sampling_params=request.sampling_params,
            block_ids=blocks,
            num_computed_tokens=request.num_computed_tokens,
            lora_name=request.lora_name,
            lora_slot=slot,
            mm_features=tuple(feature.bare for feature in request.mm_features),
        )
        if request.mm_features:
            self._encode(request, request.num_computed_tokens, n, decision)
        self._keep_account(request, -1)
        decision.scheduled[request.request_id] = n
        request.num_computed_tokens += n
        decision.budget -= n

    def _receive(
        self, connector: KVConnector, request: Request, hit: CacheHit, more: int, decision: _Decision
    ) -> str | None:
        """Begin to fill a request's blocks while steps run. It takes blocks for all of its tokens, so that it can start as soon as they are filled."""
        request_id, kv = request.request_id, self.kv_cache_manager
        wanted = request.num_tokens - hit.num_tokens
        blocks = kv.allocate_slots(request, wanted, hit, self._keep_free(), delay_cache_blocks=True)
        if blocks is None:
            return "no_blocks"
        kv.count_lookup(request, hit)
        connector.update_state_after_alloc(request, blocks, hit.num_tokens, more, load_async=True)
        self.waiting.remove(request)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self.remote[request_id], self._receiving[request_id] = request, hit.num_tokens + more
        decision.remote.append(request_id)
        if self.trace is not None:
            self.trace(("kv_wait", request_id, more))
        return None

    def _admit_arrived(self, request: Request, decision: _Decision) -> str | None:
        computed = request.num_computed_tokens
        n, reason = self._first_chunk(request, computed, decision)
        if n == 0:
            return reason
        if self.kv_cache_manager.allocate_slots(request, n) is None:
            return "no_blocks"
        if request.num_preemptions == 0:
            request.num_cached_tokens = computed
        self._start(request, n, self.kv_cache_manager.get_block_ids(request.request_id), decision)
        return None

    def _end_transfers(self, step: int, result: ModelRunnerOutput) -> None:
        """Note which transfers of a connector have ended. Blocks that could not be filled are computed: nothing was computed from them yet."""
        for request_id in result.finished_sending:  # workers repeat an id until they hear that it arrived
            if self._sends.get(request_id, step + 1) <= step:
                del self._sends[request_id]
                self._release(request_id)
        for request_id in result.finished_recving:
            tokens = self._receiving.pop(request_id)
            if request_id in self._kept:  # it was aborted meanwhile
                result.invalid_block_ids -= {block.block_id for block in self._kept[request_id]}
                self._end_load(request_id, set())
                self._release(request_id)
                continue
            request, kv = self.remote[request_id], self.kv_cache_manager
            tables = kv.get_block_ids(request_id)
            bad = {block for table in tables for block in table} & result.invalid_block_ids
            if bad:
                first = min(i for table in tables for i, block in enumerate(table) if block in bad)
                tokens = min(tokens, first * self.cache.block_size) if isinstance(tokens, int) else tokens
                result.invalid_block_ids -= bad
            self._end_load(request_id, bad)
            if not tokens:  # asking again might never end
                self._unfetchable.add(request_id)
            if not tokens or isinstance(tokens, str):
                self._lose(request, tokens or "kv_load_failure")
                continue
            request.num_computed_tokens = tokens
            kv.cache_blocks(request, tokens)
            if self.trace is not None:
                self.trace(("kv_arrive", request_id, tokens))

    def _end_load(self, request_id: str, bad: set[int]) -> None:
        assert self.connector is not None
        self.connector.end_async_load(request_id, bad)

    def _disown(self, why: str, lora_names: Container[str | None] | None = None) -> None:
        """Restart requests in `remote`, because their blocks may be wrong; those whose blocks are still being filled, when that has ended.

        lora_names: restart only requests with one of these adapters; None for all.
        """
        for request_id, request in reversed(list(self.remote.items())):
            if lora_names is not None and request.lora_name not in lora_names:
                continue
            if request_id in self._receiving:
                self._receiving[request_id] = why
            else:
                self._lose(request, why)

    def _lose(self, request: Request, why: str, needed_by: str | None = None) -> None:
        """Free the blocks of a request in `remote`, and let it wait as before. No transfer may be filling them."""
        request_id = request.request_id
        self.kv_cache_manager.free(request)
        del self.remote[request_id]
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self.waiting.add(request, front=True)
        if self.trace is not None:
            self.trace(("preempt", request_id, "recompute", needed_by or request_id, why))

    def _keep(self, request: Request) -> None:
        """Keep the blocks of a request that ends until a connector has copied them."""
        request_id = request.request_id
        self._kept[request_id] = self.kv_cache_manager.detach(request)
        if self.trace is not None:
            ids = tuple(block.block_id for block in self._kept[request_id])
            self.trace(("kv_keep", request_id, ids))

    def _release(self, request_id: str) -> None:
        blocks = self._kept.pop(request_id)
        if self.trace is not None:
            self.trace(("kv_release", request_id, tuple(block.block_id for block in blocks)))
        self.kv_cache_manager.block_pool.free(blocks)

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Update the requests with what a step produced.

        With async scheduling the next step has been decided already: its result for a request that ends here is discarded.

        Args:
            output: the decision that was run, the oldest one without a result so far.
            result: its result. Requests that ended meanwhile are passed over.

        Returns:
            One entry per request that gained a token or its vector, failed, or has prompt log-probabilities to report.
        """
        outputs, ended = list[EngineCoreOutput](), list[Request]()
        self._newest_result = output.step
        if self._ended_in_flight:
            self._drop_late(output, result)
        if output.lora_loads or result.invalid_block_ids or result.finished_recving or result.finished_sending:
            self._confirm_loads(output, result)
        tokens_of, requests, drafts = result.sampled_token_ids, self.requests, output.scheduled_spec_decode_tokens
        all_sampled = len(tokens_of) == len(output.num_scheduled_tokens)
        if drafts or not all_sampled or max(map(len, tokens_of.values()), default=1) != 1:
            self._check_counts(output, result)
        for request_id in output.num_scheduled_tokens:
            request, new = requests.get(request_id), tokens_of.get(request_id)
            if request is None or not new:
                continue
            before = request.num_tokens
            for token in new:
                if request.append_output_token(token):
                    new = new[: request.num_tokens - before]
                    ended.append(request)
                    break
            outputs.append(
                EngineCoreOutput(  # by position: keywords would cost a tenth of a step
                    request_id, new, request.finish_reason, request.stop_reason, None, None, request.num_cached_tokens
                )
            )
        if drafts:
            self._roll_back(output, result, outputs)
        gained = {out.request_id: tuple(out.new_token_ids) for out in outputs} if self.trace is not None else None
        if result.logprobs or result.prompt_logprobs or result.errors or result.pooled:
            self._attach(result, outputs, ended)
        if gained is not None:
            self._trace_result(output, result, gained)
        for request in ended:
            if request.status is not RequestStatus.RUNNING:  # preempted while its last token was computed
                self.waiting.remove(request)
            self._finish(request)
        if ended:
            gone = {id(request) for request in ended}
            self.running = [request for request in self.running if id(request) not in gone]
        if result.draft_token_ids:
            self._propose(result.draft_token_ids)
        if result.proposer_error is not None:
            self.spec_stats.error = result.proposer_error
        if self._listener is not None:
            self._guard.tell_late()
        return outputs

    def _check_counts(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Raise ValueError for an executor that returned too many tokens for a request, or none where one was due; nothing has changed then."""
        tokens_of, drafts = result.sampled_token_ids, output.scheduled_spec_decode_tokens
        alone = output.step == self.step - 1
        for request_id in output.num_scheduled_tokens:
            new = tokens_of.get(request_id, ())
            if len(new) == 1 or (request := self.requests.get(request_id)) is None:
                continue
            most = len(drafts.get(request_id, ())) + 1
            if len(new) > most:
                raise ValueError(
                    f"the executor returned {len(new)} tokens for request {request_id!r} in step {output.step}, which carried"
                    f" {most - 1} draft tokens of it: at most {most} can come back"
                )
            ended = request_id in result.errors or request_id in result.pooled
            if alone and not new and not ended and request.num_computed_tokens >= request.num_tokens:
                raise ValueError(
                    f"the executor returned no token for request {request_id!r} in step {output.step}, after which all its tokens are computed"
                )

    def _roll_back(self, output: SchedulerOutput, result: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        """Count the draft tokens, and take back what was computed for those that were not accepted."""
        rejected, verified, drafts = {}, {}, output.scheduled_spec_decode_tokens
        for out in outputs:
            if scheduled := drafts.get(out.request_id):
                draft = result.device_draft_token_ids.get(out.request_id, scheduled)
                new, most = out.new_token_ids, len(result.sampled_token_ids[out.request_id]) - 1
                accepted = min(result.num_accepted_tokens.get(out.request_id, most), len(new))
                out.num_draft_tokens, out.num_accepted_tokens = len(draft), accepted
                if draft:
                    self.spec_stats.observe_draft(len(draft), accepted)
                if draft and self.trace is not None:
                    after = new[accepted] if accepted < len(new) else None
                    odds = tuple(result.draft_odds.get(out.request_id, ()))
                    verified[out.request_id] = (tuple(draft), accepted, after, odds)
                n, request = len(scheduled) + 1 - len(new), self.requests[out.request_id]
                if n and request.num_computed_tokens:  # else it was preempted while the step ran
                    rejected[out.request_id] = n
                    request.num_computed_tokens -= n
        if verified and self.trace is not None:
            self.trace(("verify", verified, *self._late(output)))
        if rejected and self.trace is not None:
            self.trace(("rollback", rejected))

    def _propose(self, drafts: dict[str, list[int]]) -> None:
        """Keep draft tokens for a request's next step. Raises ValueError if that has been decided already."""
        if self._newest_result < self.step - 1 and not self.waits_for_tokens:
            raise ValueError("draft tokens came too late: the step that could verify them has been decided already")
        kept = {}
        for request_id, tokens in drafts.items():
            request = self.requests.get(request_id)
            if tokens and request and request.status is RequestStatus.RUNNING:  # it may have been preempted since
                request.spec_token_ids, kept[request_id] = list(tokens), tuple(tokens)
        if kept and self.trace is not None:
            self.trace(("draft", kept))

    def _late(self, output: SchedulerOutput) -> tuple[int, ...]:
        """The step of a decision as a tuple, for the trace; empty if no later step has been decided."""
        return () if output.step == self.step - 1 else (output.step,)

    def _trace_result(
        self, output: SchedulerOutput, result: ModelRunnerOutput, gained: dict[str, tuple[int, ...]]
    ) -> None:
        """Record the result of a step."""
        if self.trace is not None:
            self.trace(("update", self.clock.now(), gained, *self._late(output)))
            if result.expert_loads:
                self.trace(("experts", output.step, result.expert_loads))

    def _drop_late(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Forget what a step brings to requests that ended while it ran: their ids may be in use again."""
        for request_id, last in list(self._ended_in_flight.items()):
            if output.step <= last:
                for table in (result.sampled_token_ids, result.prompt_logprobs, result.errors, result.pooled):
                    table.pop(request_id, None)
                result.draft_token_ids.pop(request_id, None)
            if output.step >= last:
                del self._ended_in_flight[request_id]

    def _attach(self, result: ModelRunnerOutput, outputs: list[EngineCoreOutput], ended: list[Request]) -> None:
        """Add log-probabilities, vectors and errors to the outputs."""
        by_id = {out.request_id: out for out in outputs}
        for request_id in (*result.prompt_logprobs, *result.errors, *result.pooled):
            if request_id in self.requests and request_id not in by_id:
                request = self.requests[request_id]
                by_id[request_id] = EngineCoreOutput(request_id, [], num_cached_tokens=request.num_cached_tokens)
                outputs.append(by_id[request_id])
        for request_id, out in by_id.items():
            if request_id in result.logprobs:
                out.logprobs = result.logprobs[request_id][: len(out.new_token_ids)]
            out.prompt_logprobs = result.prompt_logprobs.get(request_id)
            out.pooled = result.pooled.get(request_id)
            if request_id in result.errors or out.pooled is not None:
                request = self.requests[request_id]
                out.error = result.errors.get(request_id)
                reason = FinishReason.STOP if out.error is None else FinishReason.ERROR
                request.finish_reason = out.finish_reason = reason
                if request not in ended:
                    ended.append(request)

    def _confirm_loads(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Note which adapters, and which blocks, are loaded. An adapter that could not be loaded loses its slot, and its requests
        fail: what they computed is wrong. For blocks see `_end_transfers` and `_recompute`."""
        self._end_transfers(output.step, result)
        if result.invalid_block_ids:
            self._recompute(output, result)
        failed = result.failed_loras
        self._release_slots((slot, name) for slot, name in output.lora_loads if name in failed)
        self.adapters.loading -= {n for slot, n in output.lora_loads if self.adapters.slot_of.get(n) == slot}
        if failed:
            self._disown("step_failed", failed)
        for request in self.running if failed else ():
            if request.lora_name in failed:
                self.kv_cache_manager.uncache_blocks(request, 0)
                for table in (result.sampled_token_ids, result.logprobs, result.prompt_logprobs, result.pooled):
                    table.pop(request.request_id, None)
                result.errors[request.request_id] = failed[request.lora_name]

    def _release_slots(self, loads: Iterable[tuple[int, str]]) -> None:
        """Take back loads that did not happen."""
        for slot, name in loads:
            if self.adapters.slot_of.get(name) == slot:
                self.adapters.release(name)
                if self.trace is not None:
                    self.trace(("lora_evict", name, slot))

    def _transfers(self, connector: KVConnector, decision: _Decision) -> KVConnectorMetadata | None:
        """What the workers fetch and save in this step. Blocks of an adapter that may fail to load are not saved."""
        kv, loading = self.kv_cache_manager, self.adapters.loading
        names = [r.request_id for r in self.running if r.lora_name in loading] if loading else []
        unsure = {block for name in names for table in kv.get_block_ids(name) for block in table}
        meta = connector.build_connector_meta(decision.new_requests, unsure, self._sends)
        if meta is not None and self.trace is not None:
            owner = {
                block: name for name, new in decision.new_requests.items() for table in new.block_ids for block in table
            }
            for (*_, (group, content)), block in meta.loads:
                self.trace(("kv_load", owner[block], group, (block,), (content,)))
            for name in decision.remote:
                for (*_, (group, content)), block in meta.async_loads[name]:
                    self.trace(("kv_load", name, group, (block,), (content,)))
            for block, (*_, (group, content)) in meta.saves:
                self.trace(("kv_save", group, (block,), (content,)))
        return meta

    def _recompute(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Preempt the requests that hold a block which could not be fetched, and forget all cached content."""
        kv, bad = self.kv_cache_manager, result.invalid_block_ids
        if self.connector is not None and output.kv_connector_metadata is not None:
            self.connector.update_connector_output(output.kv_connector_metadata, bad)
        kv.reset_prefix_cache()
        self._disown("kv_load_failure")
        for request in reversed(self.running.copy()):
            name = request.request_id
            if bad.isdisjoint(block for blocks in kv.get_block_ids(name) for block in blocks):
                continue
            tables: tuple[dict[str, Any], ...] = result.sampled_token_ids, result.logprobs, result.prompt_logprobs
            for table in (*tables, result.pooled, result.errors, result.draft_token_ids):
                table.pop(name, None)
            self._preempt(request, self._decision, name, "kv_load_failure")
            if self._newest_result < self.step - 1:
                self._ended_in_flight[name] = self.step - 1

    def _finish(self, request: Request) -> None:
        """Give everything back. The caller takes the request out of its queue."""
        if request.status is RequestStatus.RUNNING:
            self._keep_account(request, 1)
            if request.lora_name in self.adapters.loading:  # aborted before it is known whether its blocks are right
                self.kv_cache_manager.uncache_blocks(request, 0)
            if self.connector is not None and request.finish_reason is not FinishReason.ERROR:
                blocks = self.kv_cache_manager.get_block_ids(request.request_id)
                if self.connector.request_finished(request, blocks):
                    self._keep(request)
                    self._sends[request.request_id] = self.step
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and request.request_id in self._receiving:
            self._receiving[request.request_id] = "abort"
            self._keep(request)  # the connector goes on filling its blocks
        request.status = RequestStatus.FINISHED
        if request.lora_name is not None:
            self.adapters.touch(request.lora_name)
        self.kv_cache_manager.free(request)
        if request.mm_features:
            self.encoder_cache.free(request)
            self.encoder_cache.users -= 1
        del self.requests[request.request_id]
        self._finished.append(request.request_id)
        self._scheduled_in.pop(request.request_id, None)
        self._unfetchable.discard(request.request_id)
        self._decision.new_block_ids.pop(request.request_id, None)
        self._decision.swap_out.pop(request.request_id, None)
        if self._newest_result < self.step - 1:
            self._ended_in_flight[request.request_id] = self.step - 1
        if not self.requests:
            self._served.clear()
        if self.trace is not None:
            self.trace(("finish", request.request_id, str(request.finish_reason), request.stop_reason))

    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[str]:
        """End requests from outside, in whatever state they are. Unknown ids are passed over.

        Returns:
            The ids that were ended.
        """
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            elif self.remote.pop(request_id, None) is None:
                self.waiting.remove(request)
            request.finish_reason = reason
            self._finish(request)
            ended.append(request_id)
        return ended

    @property
    def is_sending(self) -> bool:
        """Whether a connector is sending blocks of requests that have ended."""
        return bool(self._sends)

    @property
    def is_receiving(self) -> bool:
        """Whether a connector is filling blocks, including those of requests that have ended."""
        return bool(self._receiving)

    def has_requests(self) -> bool:
        """Whether there is anything left to do: unfinished requests, rows that the runner must still drop, blocks that a connector still fills or sends."""
        return bool(self.requests or self._finished or self._receiving or self._kept)

    def abandon(self, outputs: Iterable[SchedulerOutput]) -> None:
        """End the requests of steps that were decided but failed, and forget all cached content.

        Args:
            outputs: all decisions without a result, including those that were never executed.
        """
        for output in outputs:
            self.finish_requests([*output.num_scheduled_tokens, *output.preempted], FinishReason.ERROR)
            self._release_slots(output.lora_loads)
        if self._receiving and self.connector is not None:
            self.connector.resend()
        self._disown("step_failed")
        self._drop_encoded(self.encoder_cache.reset(), self._decision)
        self.kv_cache_manager.reset_prefix_cache()
        self._newest_result = self.step - 1
        self._ended_in_flight.clear()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached content, as is needed after a change of weights.

        Args:
            reset_running_requests: preempt every request that holds blocks; it computes all its tokens again. What steps in
                flight bring for them is discarded.

        Returns:
            False, and nothing has changed, if requests hold blocks and `reset_running_requests` is off.
        """
        kv, pool = self.kv_cache_manager, self.kv_cache_manager.block_pool
        if reset_running_requests:
            for request in reversed(self.running.copy()):
                self._preempt(request, self._decision, request.request_id, "reset_prefix_cache")
                if self._newest_result < self.step - 1:
                    self._ended_in_flight[request.request_id] = self.step - 1
            self._disown("reset_prefix_cache")
            for request in self.waiting:
                if request.status is RequestStatus.SWAPPED:
                    kv.free_cpu(request.request_id)
                    self._decision.swap_out.pop(request.request_id, None)
                    request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
                    if self.trace is not None:
                        name = request.request_id
                        self.trace(("preempt", name, "recompute", name, "reset_prefix_cache"))
        elif pool.num_free < pool.num_blocks or kv.swapped:
            return False
        kv.reset_prefix_cache()
        if self.connector is not None:
            self.connector.clear()
        return True


def _add_event(r: Request) -> tuple[Any, ...]:
    return (
        "add", r.request_id, r.num_prompt_tokens, r.max_tokens, r.arrival_time, r.priority, r.user,
        tuple(r.all_token_ids[: r.num_prompt_tokens]), tuple(r.output_token_ids), r.sequence_number,
    )  # fmt: skip


def _attributes(r: Request) -> dict[str, Any]:
    """Attributes that few requests have and that decisions depend on."""
    rare = {
        "cache_salt": r.cache_salt,
        "lora_name": r.lora_name,
        "extra_keys": r.extra_keys,
        "mm_features": tuple(feature.to_tuple() for feature in r.mm_features),
        "skip_reading_prefix_cache": r.skip_reading_prefix_cache,
    }
    return {name: value for name, value in rare.items() if value not in (None, (), False)}
