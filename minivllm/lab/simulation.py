"""Simulation: the real scheduler and KV cache manager on a virtual clock."""

# Generated from nbs/lab/simulation.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from minivllm.core.config import CacheConfig, EngineConfig, KVCacheConfig, KVCacheGroup, KVCacheSpec, SchedulerConfig
from minivllm.core.kv_connector import KVConnector
from minivllm.core.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.core.plugins import load_plugins
from minivllm.core.policy import POLICIES, Combined, Policy, combine
from minivllm.core.request import FinishReason
from minivllm.core.scheduler import Preemption, Recompute, Scheduler, Swap, VirtualClock
from minivllm.core.trace import Event, Trace
from minivllm.lab.cost import CostModel, Roofline, Speculative, known
from minivllm.lab.executor import DraftingExecutor, Executor, FakeExecutor
from minivllm.lab.meter import Meter
from minivllm.lab.workload import Workload, WorkloadRequest

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Settings:
    """What a scheduler is made with. `kv_cache` is None for one group of full attention."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    kv_cache: KVCacheConfig | None = None

    def __post_init__(self) -> None:
        for group in self.kv_cache.groups if self.kv_cache else ():
            if group.spec.block_size != self.cache.block_size:
                raise ValueError(
                    f"block_size={self.cache.block_size}, but a KV cache group has blocks of {group.spec.block_size} tokens"
                )


_SCHEDULER = {f.name for f in fields(SchedulerConfig)}
_CACHE = {f.name for f in fields(CacheConfig)}
_DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 131_072}


def make_settings(
    config: EngineConfig | Settings | dict[str, Any] | None,
    base: dict[str, Any] | None = None,
    cost_model: CostModel | None = None,
) -> Settings:
    """Settings from an engine's configuration, or from a dictionary over `base` (a trace's settings) over defaults.

    Raises:
        TypeError: a name that is unknown; says which is near.
    """
    if cost_model is not None and not callable(getattr(cost_model, "seconds", None)):
        raise TypeError(f"cost_model must be a CostModel, such as Constant(0.01), got {cost_model!r}")
    if isinstance(config, Settings):
        return config
    if isinstance(config, EngineConfig):
        return Settings(config.scheduler, config.cache, config.kv_cache)
    if config is not None and not isinstance(config, dict):
        raise TypeError(
            f"config must be an EngineConfig (llm.config) or a dict of settings, got {type(config).__name__}"
        )
    for name in config or {}:
        known(str(name), dict.fromkeys(sorted(_SCHEDULER | _CACHE)), "setting", TypeError)
    values = {**(_DEFAULTS if base is None else base), **(config or {})}
    cache = {name: value for name, value in values.items() if name in _CACHE}
    if "num_gpu_blocks" not in cache and cost_model is not None:
        room = cost_model.num_gpu_blocks(cache.get("block_size", CacheConfig().block_size))
        if room is not None:
            cache["num_gpu_blocks"] = room
    limits = {name: value for name, value in values.items() if name in _SCHEDULER}
    return Settings(SchedulerConfig(**limits), CacheConfig(**cache))


class Session:
    """The real scheduler on a virtual clock, with a model that says what it is told.

    Args:
        settings: limits and block counts.
        policy: None for the one that the settings name.
        cost_model: seconds per step; None to measure how long `executor` takes.
        executor: None for the fake one. Another one answers itself; the length of the answers is still the workload's.
        preemption, sampling_params, policy_timeout, connector: see `simulate`.

    Attributes:
        refused: ids of requests that the scheduler would not take, with its reason.
    """

    def __init__(
        self, settings: Settings, policy: Policy | None = None, cost_model: CostModel | None = None, *,
        executor: Executor | None = None, preemption: Preemption | None = None, sampling_params: Any = None,
        policy_timeout: float = 10.0, connector: KVConnector | None = None,
    ) -> None:  # fmt: skip
        if cost_model is None and executor is None:
            raise ValueError("a fake model takes no time: give a cost_model")
        self.settings, self.cost_model, self.clock = settings, cost_model, VirtualClock()
        self.scheduler = Scheduler(
            settings.scheduler, settings.cache, settings.kv_cache, policy=policy, preemption=preemption,
            clock=self.clock, policy_timeout=policy_timeout, connector=connector,
        )  # fmt: skip
        self._stages: int = getattr(cost_model, "stages", 1)
        self.scheduler.waits_for_tokens = self._stages > 1
        self._in_flight: deque[tuple[float, SchedulerOutput, ModelRunnerOutput, list[str]]] = deque()
        self._first_stage = self._last_stage = 0.0  # when they are free
        self.fake = executor if isinstance(executor, FakeExecutor) else FakeExecutor(settings.cache.block_size)
        self.executor = None if isinstance(executor, FakeExecutor) else executor
        self.refused: list[tuple[str, str]] = []
        self._sampling_params = sampling_params
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = count()
        self._follow_ups: dict[str, Callable[[float], WorkloadRequest | None]] = {}
        self._loading: dict[str, float] = {}  # requests whose blocks come beside the steps -> when they are there

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Do something at a moment, or as soon after it as a step has ended."""
        heapq.heappush(self._later, (moment, next(self._ticket), action))

    def add(self, request: WorkloadRequest) -> None:
        """Hand a request to the scheduler now. One that it refuses is noted in `refused`."""
        made = request.to_request()
        made.sampling_params = self._sampling_params
        try:
            self.scheduler.add_request(made)
        except ValueError as error:
            self.refused.append((request.request_id, str(error)))
            return
        self.fake.set_answer(request.request_id, request.output)
        if request.follow_up is not None:
            self._follow_ups[request.request_id] = request.follow_up

    def step(self) -> list[EngineCoreOutput]:
        """Schedule, execute, move the clock, update."""
        output = self.scheduler.schedule()
        result = self.fake.execute_model(output)
        if self.scheduler.connector is not None and self.executor is None:
            self._note_loads(output, result)
        started = time.perf_counter()
        if self.executor is not None:
            result = self.executor.execute_model(output)
        if self.cost_model is not None:
            seconds = self.cost_model.seconds(output, self.fake.work)
        else:
            seconds = time.perf_counter() - started
        if self._stages > 1:
            return self._pipelined(output, result, seconds)
        self.clock.advance(seconds)
        if not output.total_num_scheduled_tokens:  # nothing to do but to wait for something, if there is anything
            self.clock.advance_to(min(self._moments(), default=0.0))
        return self._update(output, result, self.fake.exhausted)

    def _update(
        self, output: SchedulerOutput, result: ModelRunnerOutput, exhausted: list[str]
    ) -> list[EngineCoreOutput]:
        outputs = self.scheduler.update_from_output(output, result)
        for name in exhausted:
            if name in self.scheduler.requests:  # its recorded answer was cut off here
                self.end(name)
        return outputs

    def _moments(self) -> list[float]:
        """When something may happen by itself."""
        return [*(moment for moment, *_ in self._later[:1]), *self._loading.values()]

    def _note_loads(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Blocks that come beside the steps take the time that the cost model says (see `lab.parallel.Transfers`), else none.
        Blocks that are sent take none."""
        now, meta = self.clock.now(), output.kv_connector_metadata
        result.finished_recving = {name for name, end in self._loading.items() if end <= now}
        self._loading = {name: end for name, end in self._loading.items() if end > now}
        seconds = getattr(self.cost_model, "transfer_seconds", lambda num_blocks: 0.0)
        if meta is None:
            return
        result.finished_sending = meta.sends.keys()
        for name, loads in meta.async_loads.items():
            self._loading[name] = max(now, *self._loading.values(), 0.0) + seconds(len(loads))  # one after the other

    def _pipelined(self, output: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> list[EngineCoreOutput]:
        """Begin a step that takes `seconds` for all its stages. If every stage has one then, or nothing more can run, the oldest ends."""
        part = seconds / self._stages if output.total_num_scheduled_tokens else 0.0
        begin = max(self.clock.now(), self._first_stage)
        self._first_stage = begin + part
        self._last_stage = max(begin + self._stages * part, self._last_stage + part)
        self._in_flight.append((self._last_stage, output, result, self.fake.exhausted))
        if part and len(self._in_flight) < self._stages:
            self.clock.advance_to(self._first_stage)
            return []
        end, scheduled, sampled, exhausted = self._in_flight.popleft()
        self.clock.advance_to(end)
        if not part and not self._in_flight:
            self.clock.advance_to(min(self._moments(), default=0.0))
        return self._update(scheduled, sampled, exhausted)

    def end(self, request_id: str) -> None:
        """Abort a request if it has not ended, and let its follow-up come."""
        self.scheduler.finish_requests([request_id], FinishReason.ABORT)
        self._follow(request_id)

    def _follow(self, request_id: str) -> None:
        follow_up = self._follow_ups.pop(request_id, None)
        after = follow_up and follow_up(self.clock.now())
        if after is not None:
            self.at(after.arrival_time, lambda: self.add(after))

    def expect(self, requests: Iterable[WorkloadRequest]) -> None:
        """Let requests arrive at their times. They are pulled one at a time, and must be in order of arrival."""
        stream, last = iter(requests), -1.0

        def arrive(request: WorkloadRequest | None) -> None:
            nonlocal last
            if (after := next(stream, None)) is not None:
                if after.arrival_time < last:
                    raise ValueError(
                        f"request {after.request_id!r} arrives at {after.arrival_time} s, before the one in front of it ({last} s);"
                        " sort them with Workload.of(...)"
                    )
                last = after.arrival_time
                self.at(last, lambda: arrive(after))
            if request is not None:
                self.add(request)

        arrive(None)

    def run(self) -> None:
        """Step until no request is left and none is expected."""
        later, clock, requests = self._later, self.clock, self.scheduler.requests
        while requests or later:
            if not requests:
                clock.advance_to(later[0][0])
            while later and later[0][0] <= clock.now():
                heapq.heappop(later)[2]()
            if requests:
                for out in self.step():
                    if out.finish_reason is not None and self._follow_ups:
                        self._follow(out.request_id)
        self.drain()

    def drain(self) -> None:
        """End the steps that are left in a pipeline, in which no request has a token any more."""
        while self._in_flight:
            self._update(*self._in_flight.popleft()[1:])


@dataclass(repr=False)
class Run:
    """What came of a simulation, a replay or a fork.

    Attributes:
        name: of the workload.
        policy: name of the policy.
        settings: what the scheduler was made with.
        cost_model: what a step cost; None if it was measured or recorded.
        trace: everything that happened, or None if it was not recorded.
        refused: ids of requests that the scheduler would not take, with its reason.
        skipped: what the workload left out, counted.
        wall_seconds: how long it took to compute.
    """

    name: str
    policy: str
    settings: Settings
    cost_model: CostModel | None
    trace: Trace | None
    refused: list[tuple[str, str]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    wall_seconds: float = 0.0
    _meter: Meter | None = None

    @property
    def meter(self) -> Meter:
        """Measurements, read off the trace if there is one."""
        if self._meter is None:
            assert self.trace is not None
            self._meter = Meter.of(self.trace)
        return self._meter

    @property
    def requests(self) -> pd.DataFrame:
        """One row per request: see `Meter.to_pandas`."""
        return self.meter.to_pandas()

    @property
    def seconds(self) -> float:
        """Virtual time from the first step to the end."""
        return self.meter.end - (self.meter.start or 0.0)

    def __repr__(self) -> str:
        m = self.meter
        text = f"Run({self.name!r}, {self.policy}: {len(m)} requests, {m.num_steps} steps, {m.num_tokens} tokens, {self.seconds:.1f} s"
        return text + (f", {len(self.refused)} refused)" if self.refused else ")")


def trace_of(x: Trace | Run) -> Trace:
    """The trace itself, or that of a run. Raises ValueError for a run that was not recorded."""
    trace = x.trace if isinstance(x, Run) else x
    if trace is None:
        raise ValueError(f"{x!r} was not recorded; simulate with record=True")
    return trace


def policy_of(trace: Trace) -> Policy:
    """The policy that a trace was recorded under, made with the same arguments.

    Raises:
        ValueError: it, or a part of it, neither ships with minivllm nor was registered.
    """
    return _make_policy(trace.header.policy, trace.header.policy_arguments)


def _make_policy(name: str, arguments: dict[str, Any]) -> Policy:
    if name == Combined.__name__:
        return combine(**{hook: _make_policy(part["name"], part["arguments"]) for hook, part in arguments.items()})
    load_plugins()
    known = {getattr(make, "__name__", ""): make for make in POLICIES.values()}
    if name not in known:
        raise ValueError(
            f"the trace was recorded under {name!r}, which does not ship with minivllm; give it as policy=..."
        )
    return known[name](**arguments)


def preemption_of(trace: Trace) -> Preemption:
    """How a trace's scheduler preempted."""
    return Swap(trace.header.num_cpu_blocks) if trace.header.preemption == "swap" else Recompute()


def kv_cache_of(trace: Trace, block_size: int | None = None) -> KVCacheConfig | None:
    """The KV cache groups that a trace was recorded with, or the same with blocks of another size; None if it was told of none."""
    head, size = trace.header, {} if block_size is None else {"block_size": block_size}
    if not head.groups:
        return None
    groups = tuple(KVCacheGroup(KVCacheSpec(**group["spec"] | size), tuple(group["layers"])) for group in head.groups)
    return KVCacheConfig(head.num_blocks, block_size or head.block_size, groups, head.num_cpu_blocks)


def simulate(
    source: Workload | Trace | Run | Iterable[WorkloadRequest], *,
    config: EngineConfig | Settings | dict[str, Any] | None = None, policy: Policy | None = None,
    cost_model: CostModel | None = None, executor: str | Executor = "fake", preemption: Preemption | None = None,
    kv_cache: KVCacheConfig | None = None, record: bool = True, sampling_params: Any = None,
    subscribers: Iterable[Callable[[Event], None]] = (), policy_timeout: float = 10.0,
    connector: KVConnector | None = None,
) -> Run:  # fmt: skip
    """What would have happened: the real scheduler and KV cache manager on these requests, on a virtual clock.

    Args:
        source: a workload, or a recorded trace or run, whose requests come again at the same moments with the same answers.
        config: `llm.config`, or a dict of the names in `SchedulerConfig` and `CacheConfig`. What it leaves open is taken from the trace; for
            a workload, from vLLM's defaults for GPUs, with as many KV blocks as the cost model's device has room for.
        policy: None for the trace's own; for a workload, first come, first served.
        cost_model: None for one that is fitted to the trace; for a workload, `Roofline("h100", "llama-3.1-8b")`. With a `Speculative` one the
            fake model drafts.
        executor: "fake", or an object with `execute_model(output)`. With another one and no cost model, its own time counts; one derived from
            `FakeExecutor` answers as that does, and may add draft tokens.
        preemption: `Recompute()` or `Swap(n)`; None for the trace's own, or as the CPU blocks in `config` say.
        kv_cache: KV cache groups, for models with windows; None for the trace's own, or those of `llm.config`.
        record: keep the whole trace. Without it, memory stays small: a row of numbers per request.
        sampling_params: given to every request, for an executor that reads them.
        subscribers: functions that take each event of the trace as it happens.
        policy_timeout: seconds that an answer of the policy may take; 0 for no limit, and no thread (Python in a browser has none).
        connector: the scheduler side of a KV connector, such as `OffloadingConnector`; `lab.parallel.Transfers` says what its copies cost.

    Raises:
        PolicyError: the policy failed. ValueError, TypeError: settings that make no sense, or requests out of order.
    """
    trace = trace_of(source) if isinstance(source, Run | Trace) else None
    if isinstance(executor, str) and executor != "fake":
        raise ValueError(f'executor must be "fake" or an object with execute_model(output), got {executor!r}')
    model = None if isinstance(executor, str) else executor
    if cost_model is None and (model is None or isinstance(model, FakeExecutor)):
        known = source.cost_model if isinstance(source, Run) else None
        cost_model = known or (CostModel.fit(trace) if trace is not None else Roofline())
    settings = make_settings(config, trace.header.settings if trace is not None else None, cost_model)
    if model is None and isinstance(cost_model, Speculative):
        model = DraftingExecutor(cost_model, settings.cache.block_size)
    if kv_cache is None and trace is not None and settings.kv_cache is None:
        kv_cache = kv_cache_of(trace, settings.cache.block_size)
    settings = replace(settings, kv_cache=kv_cache or settings.kv_cache)
    if trace is not None:
        policy, preemption = policy or policy_of(trace), preemption or preemption_of(trace)
        workload = Workload.from_trace(trace)
    else:
        workload = source if isinstance(source, Workload) else Workload.of(source)  # type: ignore[arg-type]
    session = Session(
        settings, policy, cost_model, executor=model, preemption=preemption, sampling_params=sampling_params,
        policy_timeout=policy_timeout, connector=connector,
    )  # fmt: skip
    return _measure(session, workload, record, subscribers)


def _measure(session: Session, workload: Workload, record: bool, subscribers: Iterable[Callable[[Event], None]]) -> Run:
    started, scheduler = time.perf_counter(), session.scheduler
    trace, meter = (scheduler.record(), None) if record else (None, Meter())
    if meter is not None:
        scheduler.subscribe(meter.feed, blocks=False)
    for sink in subscribers:
        scheduler.subscribe(sink)
    session.expect(workload)
    session.run()
    return Run(
        workload.name, scheduler.policy.name, session.settings, session.cost_model, trace, session.refused,
        dict(workload.skipped), time.perf_counter() - started, meter,
    )  # fmt: skip
