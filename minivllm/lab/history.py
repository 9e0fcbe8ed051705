"""Replay of a recorded run, and forks with another policy."""

# Generated from nbs/lab/history.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from minivllm.core.config import KVCacheConfig
from minivllm.core.events import Event, State
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.policy import Policy, PolicyError
from minivllm.core.prefix import HashIndex
from minivllm.core.request import FinishReason, Request
from minivllm.core.scheduler import Preemption, Scheduler
from minivllm.core.trace import Trace
from minivllm.lab.cost import CostModel
from minivllm.lab.executor import FakeExecutor
from minivllm.lab.simulation import Run, Session, kv_cache_of, make_settings, policy_of, preemption_of, trace_of
from minivllm.lab.workload import recorded_requests

__all__ = ["RecordedStep", "ReplayDivergence", "fork", "recorded_steps", "replay"]


@dataclass(slots=True)
class RecordedStep:
    """One step of a recording, and what came from outside.

    Attributes:
        before: causes between the last step and this one: `("add",)`, `("finish", request, reason, at its last token)` or
            `("reset", whether it preempted requests)`.
        start: moment of the decision.
        during: causes between the decision and its result.
        end: moment of the result; None if there was none (the policy or the model failed).
        errors: requests that failed in the model.
        drafts: draft tokens that came with the result.
    """

    before: list[tuple[Any, ...]]
    start: float = 0.0
    during: list[tuple[Any, ...]] = field(default_factory=list)
    end: float | None = None
    errors: dict[str, str] = field(default_factory=dict)
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)


def recorded_steps(trace: Trace) -> tuple[list[RecordedStep], list[tuple[Any, ...]]]:
    """The steps of a trace, and the causes that came after the last one. Raises ValueError if steps overlapped."""
    steps: list[RecordedStep] = []
    waiting: list[tuple[Any, ...]] = []
    step: RecordedStep | None = None
    gained: dict[str, tuple[int, ...]] = {}
    preempted = False
    for event in trace.events:
        kind = event[0]
        if kind == "step":
            step, gained = RecordedStep(waiting, event[2]), {}
            waiting = []
            steps.append(step)
        running = step is not None and step.end is None
        if kind == "update":
            if len(event) > 3:
                raise ValueError(
                    "this was recorded with async_scheduling, where a step is decided before the tokens of the one before are known;"
                    " the lab decides one step after the other. Record with async_scheduling=False"
                )
            assert step is not None
            step.end, gained = event[1], event[2]
        elif kind == "preempt" and event[4] == "reset_prefix_cache":
            preempted = True
        elif kind == "draft" and step is not None:
            step.drafts = event[1]
        elif kind in ("add", "reset"):
            cause = (kind,) if kind == "add" else (kind, preempted)
            (step.during if step is not None and running else waiting).append(cause)
            preempted = False
        elif kind == "finish":
            _, name, reason, _ = event
            if step is None or running or waiting or reason == "abort":
                (step.during if step is not None and running else waiting).append((kind, name, reason, name in gained))
            elif reason == "error":
                step.errors[name] = "failed in the recording"
    return steps, waiting


def restore(scheduler: Scheduler, start: State) -> None:
    """Bring a new scheduler into the state in which a recording began.

    Raises:
        ValueError: requests were under way, or the cached blocks cannot be told apart (several KV cache groups, or a radix index).
    """
    if start.requests:
        raise ValueError(
            f"the recording began while {len(start.requests)} requests were under way ({', '.join(list(start.requests)[:3])}, ...); their tokens"
            " are not in it, so it cannot be run again. Begin to record before the first request"
        )
    pool, groups = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager.groups
    named = [block for block in pool.blocks if start.hashes[block.block_id] is not None]
    index = groups[0].index
    if named and (len(groups) > 1 or not isinstance(index, HashIndex)):
        raise ValueError(
            f"the recording began with {len(named)} cached blocks, which cannot be put back with several KV cache groups or a radix index."
            " Call reset_prefix_cache() before recording"
        )
    for block in named:
        block.block_hash = start.hashes[block.block_id]
        stand_in = Request("", [0], max_tokens=1)
        stand_in.block_hashes = [block.block_hash or b""]
        index.insert(stand_in, 0, block)
    pool.num_cached_free = len(named)
    pools = [(pool, start.free)]
    if scheduler.kv_cache_manager.cpu_pool is not None:
        pools.append((scheduler.kv_cache_manager.cpu_pool, start.cpu_free))
    for each, order in pools:
        for i in order:
            each.free_queue.remove(each.blocks[i])
            each.free_queue.append(each.blocks[i])
    scheduler.set_policy(scheduler.policy)  # which blocks can be evicted has changed


class ReplayDivergence(ValueError):
    """A replay decided otherwise than the recording.

    Attributes:
        step: number of the step, counted from the beginning of the recording.
        recorded, replayed: the first events that differ; None where there was none.
    """

    def __init__(self, step: int, recorded: Event | None, replayed: Event | None) -> None:
        self.step, self.recorded, self.replayed = step, recorded, replayed
        super().__init__(
            f"step {step}: the recording has {_short(recorded)}, the replay {_short(replayed)}."
            " Is the policy the recorded one, with the same arguments?"
        )


def _short(event: Event | None) -> str:
    text = "nothing more" if event is None else repr(event)
    return text if len(text) <= 160 else text[:157] + "..."


class _Comparison:
    """Compares two growing lists of events, from where it stopped last."""

    def __init__(self, recorded: list[Event], replayed: list[Event]) -> None:
        self._recorded, self._replayed, self._done = recorded, replayed, 0
        self._first: dict[str, tuple[int, int]] = {}

    def go_on(self, step: int) -> None:
        """Compare what has come since the last call. Raises ReplayDivergence."""
        end = min(len(self._recorded), len(self._replayed))
        for i in range(self._done, end):
            if not self._same(self._recorded[i], self._replayed[i]):
                raise ReplayDivergence(step, self._recorded[i], self._replayed[i])
        self._done = end

    def finish(self, step: int) -> None:
        """Compare the rest; nothing may be left over."""
        self.go_on(step)
        if len(self._recorded) != len(self._replayed):
            rest = (next(iter(events[self._done :]), None) for events in (self._recorded, self._replayed))
            raise ReplayDivergence(step, *rest)

    def _same(self, old: Event, new: Event) -> bool:
        if old[0] != new[0] or old[0] not in ("step", "add"):
            return old == new
        where = 1 if old[0] == "step" else 9
        a, b = self._first.setdefault(old[0], (old[where], new[where]))
        return old[where] - a == new[where] - b and old[:where] + old[where + 1 :] == new[:where] + new[where + 1 :]


class History:
    """A recorded run, ready to be run again.

    Args:
        source: the trace, or a run that has one.
        policy, preemption, kv_cache: None for what the trace tells.

    Raises:
        ValueError: the trace does not tell enough; says what is missing.
    """

    def __init__(
        self, source: Trace | Run, policy: Policy | None = None, preemption: Preemption | None = None,
        kv_cache: KVCacheConfig | None = None, cost_model: CostModel | None = None,
    ) -> None:  # fmt: skip
        trace = self.trace = trace_of(source)
        made = make_settings(None, trace.header.settings)
        self.settings = replace(made, kv_cache=kv_cache or kv_cache_of(trace))
        policy, preemption = policy or policy_of(trace), preemption or preemption_of(trace)
        fake = FakeExecutor(self.settings.cache.block_size)
        self.session = Session(self.settings, policy, cost_model, executor=fake, preemption=preemption)
        restore(self.session.scheduler, trace.start)
        self.steps, self.after = recorded_steps(trace)
        self.requests = (recorded.request for recorded in recorded_requests(trace))
        self.position = 0

    def cause(self, what: tuple[Any, ...]) -> None:
        """Let a recorded cause happen now."""
        session = self.session
        if what[0] == "add":
            session.add(next(self.requests))
        elif what[0] == "finish":
            session.scheduler.finish_requests([what[1]], FinishReason(what[2]))
        elif what[1]:
            session.scheduler.reset_prefix_cache(reset_running_requests=True)
        else:  # after a failed step requests may have gone on, with their blocks
            session.scheduler.kv_cache_manager.reset_prefix_cache()

    def play(self) -> None:
        """Run the next recorded step again."""
        step, session = self.steps[self.position], self.session
        scheduler, fake = session.scheduler, session.fake
        self.position += 1
        for what in step.before:
            self.cause(what)
        session.clock.advance_to(step.start)
        try:
            output = scheduler.schedule()
        except PolicyError:
            if step.end is not None:
                raise
            return
        for what in step.during:
            self.cause(what)
        if step.end is None:
            return
        result = fake.execute_model(output)
        if step.errors:
            sampled = {name: tokens for name, tokens in result.sampled_token_ids.items() if name not in step.errors}
            result = ModelRunnerOutput(sampled, errors=step.errors)
        result.draft_token_ids = {name: list(tokens) for name, tokens in step.drafts.items()}
        session.clock.advance_to(step.end)
        scheduler.update_from_output(output, result)


def replay(
    source: Trace | Run, *, policy: Policy | None = None, preemption: Preemption | None = None,
    kv_cache: KVCacheConfig | None = None,
) -> Run:  # fmt: skip
    """Run a recording again with its own times and tokens, and compare every event.

    Args:
        source: a trace of a live engine, of a simulation, or from a file.
        policy, preemption, kv_cache: None for those of the recording. A policy that does not ship with minivllm must be given.

    Returns:
        The run; its trace equals the recorded one.

    Raises:
        ReplayDivergence: the first event that differs. ValueError: the trace does not tell enough to be run again.
    """
    started = time.perf_counter()
    history = History(source, policy, preemption, kv_cache)
    scheduler = history.session.scheduler
    trace = scheduler.record()
    comparison = _Comparison(history.trace.events, trace.events)
    for i in range(len(history.steps)):
        history.play()
        comparison.go_on(i)
    for what in history.after:
        history.cause(what)
    comparison.finish(len(history.steps))
    return _as_run(history, trace, "replay", None, started)


def _as_run(history: History, trace: Trace, name: str, cost_model: CostModel | None, started: float) -> Run:
    session = history.session
    return Run(
        name, session.scheduler.policy.name, history.settings, cost_model, trace, session.refused,
        wall_seconds=time.perf_counter() - started,
    )  # fmt: skip


def fork(
    source: Trace | Run, step: int, *, policy: Policy | None = None, cost_model: CostModel | None = None,
    recorded_policy: Policy | None = None, preemption: Preemption | None = None, kv_cache: KVCacheConfig | None = None,
) -> Run:  # fmt: skip
    """The same history, a new future.

    Args:
        source: a trace or a run.
        step: the first recorded step that is decided anew, counted from 0; from 0 to the number of steps.
        policy: from that step on; None for the recorded one.
        cost_model: seconds per step from there on; None for that of a simulated run, or one that is fitted to the trace.
        recorded_policy, preemption, kv_cache: as in `replay`.

    Returns:
        A run whose trace begins as the recorded one. Requests that were cut off in the recording end where they were cut, aborts by the
        user come at their recorded moments, and all requests arrive when they did (also those that had waited for an answer).

    Raises:
        IndexError: there is no such step. ReplayDivergence: the history could not be repeated.
    """
    started = time.perf_counter()
    known = source.cost_model if isinstance(source, Run) else None
    cost_model = cost_model or known or CostModel.fit(trace_of(source))
    history = History(source, recorded_policy, preemption, kv_cache, cost_model)
    if not 0 <= step <= len(history.steps):
        raise IndexError(f"step {step} of a recording with {len(history.steps)} steps")
    session = history.session
    trace = session.scheduler.record()
    comparison = _Comparison(history.trace.events, trace.events)
    for i in range(step):
        history.play()
        comparison.go_on(i)
    if policy is not None:
        session.scheduler.set_policy(policy)
    _expect_the_rest(history, step)
    session.run()
    return _as_run(history, trace, f"fork at step {step}", cost_model, started)


def _expect_the_rest(history: History, step: int) -> None:
    """Put the causes that are still to come onto the session's clock."""
    session, now = history.session, history.session.clock.now()
    for recorded in (*history.steps[step:], RecordedStep(history.after)):
        for causes, then in ((recorded.before, recorded.start), (recorded.during, recorded.end or now)):
            for what in causes:
                if what[0] == "add":
                    request = next(history.requests)
                    session.at(request.arrival_time, partial(session.add, request))
                elif what[0] == "reset":
                    session.at(now, partial(history.cause, what))
                elif not what[3]:  # not cut off by what it said, but by a user
                    session.at(now, partial(session.end, what[1]))
            now = max(now, then)
