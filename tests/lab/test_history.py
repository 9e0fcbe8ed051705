"""Replay and fork: a history runs again to the last event, on whatever it was recorded."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import fake_model, kv_config

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.policy import (
    FCFS,
    LFU,
    DeepestFirst,
    FairShare,
    LongestPrefixMatch,
    Policy,
    PolicyError,
    Priority,
    ShortestFirst,
    combine,
)
from minivllm.core.request import FinishReason, Request
from minivllm.core.scheduler import Recompute, Scheduler, Swap, VirtualClock
from minivllm.core.trace import Trace
from minivllm.lab import CostModel, ReplayDivergence, diff, fork, replay, simulate
from minivllm.lab.cost import Constant, Roofline
from minivllm.lab.history import recorded_steps
from minivllm.lab.workload import Workload, chat, poisson, shared_prefix

SMALL = {"num_gpu_blocks": 26, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 32}
POLICIES = {p.__name__: p for p in (FCFS, Priority, ShortestFirst, FairShare, LongestPrefixMatch, LFU)}


class Life:
    """An engine that lives as real ones do: an unsteady clock, arrivals, aborts, resets and failures at any moment."""

    def __init__(self, seed, policy, preemption, kind, warm):
        self.random = random.Random(seed)
        self.clock = VirtualClock(self.random.random())
        config = SchedulerConfig(
            max_num_seqs=5,
            max_num_batched_tokens=24,
            max_model_len=80,
            long_prefill_token_threshold=self.random.choice([0, 7]),
        )
        cache = CacheConfig(block_size=4, num_gpu_blocks=48, watermark=self.random.choice([0.0, 0.1]))
        self.kv_cache = kv_config(kind, 4, 48)
        self.scheduler = Scheduler(config, cache, self.kv_cache, policy=policy, preemption=preemption, clock=self.clock)
        self.born = 0
        if warm:
            self.live(12)
            self.drain()
        self.trace = self.scheduler.record()

    def ask(self):
        r = self.random
        prompt = [r.randrange(2) for _ in range(r.randint(1, 30))]
        made = Request(
            f"r{self.born}", prompt, max_tokens=r.randint(1, 25), eos_token_id=r.choice([None, 1]), min_tokens=r.randint(0, 1),
            stop_token_ids=frozenset([2]) if r.random() < 0.3 else frozenset(), arrival_time=self.clock.now(), priority=r.randint(0, 2),
            user=r.choice([None, "ann", "bob"]), cache_salt=r.choice([None, None, "salt"]), lora_name=r.choice([None, None, "adapter"]),
            extra_keys=r.choice([(), (), (b"image", 7)]), skip_reading_prefix_cache=r.random() < 0.1,
        )  # fmt: skip
        self.born += 1
        self.scheduler.add_request(made)

    def something_happens(self):
        r = self.random
        if r.random() < 0.5:
            self.ask()
        if r.random() < 0.08 and self.scheduler.requests:
            self.scheduler.finish_requests([r.choice(list(self.scheduler.requests))], FinishReason.ABORT)
        if r.random() < 0.03:
            self.scheduler.reset_prefix_cache(reset_running_requests=r.random() < 0.7)

    def step(self):
        r = self.random
        self.clock.advance(r.random() * 0.01)
        output = self.scheduler.schedule()
        if r.random() < 0.2:
            self.something_happens()
        if r.random() < 0.02:  # the model dies: its requests end, the engine lives on
            self.scheduler.abandon([output])
            return
        result = fake_model(output, self.scheduler)
        if result.sampled_token_ids and r.random() < 0.04:
            name = r.choice(list(result.sampled_token_ids))
            del result.sampled_token_ids[name]
            result = ModelRunnerOutput(result.sampled_token_ids, errors={name: "its own fault"})
        self.clock.advance(r.random() * 0.02)
        self.scheduler.update_from_output(output, result)

    def live(self, steps):
        for _ in range(steps):
            self.something_happens()
            if self.scheduler.has_requests():
                self.step()

    def drain(self):
        while self.scheduler.has_requests():
            self.step()


@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(sorted(POLICIES)),
    swap=st.booleans(),
    kind=st.sampled_from(["full", "window", "hybrid", "all"]),
    warm=st.booleans(),
    ends=st.booleans(),
)
@settings(max_examples=60)
def test_whatever_lived_can_be_lived_again(seed, policy, swap, kind, warm, ends):
    if kind != "full" or policy == "LFU":
        warm = False  # what such a cache held before cannot be put back; see below
    life = Life(seed, POLICIES[policy](), Swap(20) if swap else Recompute(), kind, warm)
    life.live(40)
    if ends:
        life.drain()
    again = replay(life.trace)  # policy, preemption and KV cache groups are told by the trace
    first = (
        next((e[1] for e in life.trace.events if e[0] == "step"), 0),
        next((e[9] for e in life.trace.events if e[0] == "add"), 0),
    )
    shifted = [
        ("step", e[1] + first[0], e[2]) if e[0] == "step" else (*e[:9], e[9] + first[1]) if e[0] == "add" else e
        for e in again.trace.events
    ]
    assert shifted == life.trace.events
    assert all(a == b for (_, a), (_, b) in zip(life.trace.states(), again.trace.states(), strict=True))


@pytest.mark.parametrize(
    "policy",
    [
        FairShare(1.0, 3.0),
        combine(order=FairShare(), evict=DeepestFirst()),
        combine(order=ShortestFirst(), victim=Priority()),
    ],
)
def test_arguments_of_policies_are_recorded(policy, tmp_path):
    """A replay whose policy has other arguments parts from the recording; with the recorded ones, also from a file, it does not."""
    run = recorded(policy)
    assert run.meter.num_preemptions and any(event[0] == "evict" for event in run.trace.events)
    run.trace.save(tmp_path / "run.jsonl")
    replay(Trace.load(tmp_path / "run.jsonl"))
    if run.policy == "FairShare":
        with pytest.raises(ReplayDivergence):
            replay(run, policy=FairShare(9.0, 1.0))


def recorded(policy=None, cost=None, **config):
    workload = shared_prefix(60, 50, 3, 16, (3, 40), (2, 30), seed=6).allowing(30)
    workload = workload.map(lambda r: replace(r, user=f"user-{int(r.request_id) % 3}"))
    return simulate(workload, config={**SMALL, **config}, policy=policy, cost_model=cost or Roofline("h100", "smollm2"))


@pytest.mark.parametrize("policy", [FCFS, Priority, ShortestFirst, FairShare, LongestPrefixMatch, LFU])
@pytest.mark.parametrize("cpu_blocks", [0, 25])
def test_simulated_runs_replay(policy, cpu_blocks):
    run = recorded(policy(), num_cpu_blocks=cpu_blocks)
    assert run.meter.num_preemptions
    again = replay(run)
    assert again.trace == run.trace and again.policy == policy.__name__
    assert again.requests.equals(run.requests)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_replay_from_a_file(tmp_path, ending):
    run = recorded()
    run.trace.save(tmp_path / f"run.{ending}")
    assert replay(Trace.load(tmp_path / f"run.{ending}")).trace.events == run.trace.events


def test_another_policy_parts_from_the_recording():
    run = recorded()
    with pytest.raises(ReplayDivergence, match=r"step \d+: the recording has .*, the replay ") as caught:
        replay(run, policy=ShortestFirst())
    # it compares more than decisions
    assert caught.value.step <= diff(run, recorded(ShortestFirst())).first_difference.step
    assert caught.value.recorded != caught.value.replayed


@pytest.mark.parametrize("kind", ["schedule", "admit", "alloc", "evict", "finish", "update"])
def test_a_changed_recording_is_found_out(kind):
    run = recorded()
    where = [i for i, event in enumerate(run.trace.events) if event[0] == kind][-3]
    event = run.trace.events[where]
    if kind == "update":
        changed = ("update", event[1], {"nobody": [1]})
    elif kind == "schedule":
        changed = ("schedule", {**event[1], "nobody": 1})
    else:
        changed = (kind, "nobody", *event[2:]) if kind != "evict" else ("evict", event[1] + 1, event[2])
    run.trace.events[where] = changed
    with pytest.raises(ReplayDivergence):
        replay(run.trace)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_recording_without_its_end_replays_as_far_as_it_goes(cut):
    run = recorded()
    starts = [i for i, event in enumerate(run.trace.events) if event[0] == "step"]
    part = Trace(run.trace.header, run.trace.start)
    part.events.extend(run.trace.events[: starts[-cut]])
    assert replay(part).trace.events == part.events


def test_a_missing_event_is_found_out():
    run = simulate(poisson(60, 10, (3, 40), (2, 30), seed=6), config=SMALL, cost_model=Constant(0.01))
    del run.trace.events[-2:]  # the last request frees its blocks and ends
    with pytest.raises(ReplayDivergence, match="the recording has nothing more, the replay"):
        replay(run.trace)


def test_a_recording_that_began_in_the_middle_is_refused():
    life = Life(1, FCFS(), Recompute(), "full", warm=False)
    life.live(10)
    assert life.scheduler.requests
    trace = life.scheduler.record()
    life.live(5)
    with pytest.raises(ValueError, match=r"began while \d+ requests were under way"):
        replay(trace, kv_cache=life.kv_cache)


def test_a_warm_cache_of_several_groups_is_refused_with_a_way_out():
    life = Life(2, FCFS(), Recompute(), "hybrid", warm=True)
    life.live(10)
    with pytest.raises(ValueError, match=r"Call reset_prefix_cache\(\) before recording"):
        replay(life.trace, kv_cache=life.kv_cache)


def test_steps_at_which_a_policy_failed_are_repeated():
    class Moody(Policy):
        def chunk(self, request, budget_left, view):
            if view.step == 3:
                raise RuntimeError("not today")
            return budget_left

    clock = VirtualClock()
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(), policy=Moody(), clock=clock)
    trace = scheduler.record()
    scheduler.add_request(Request("a", [1] * 20, max_tokens=8, ignore_eos=True))
    while scheduler.requests:
        try:
            output = scheduler.schedule()
        except PolicyError:
            continue
        clock.advance(0.01)
        scheduler.update_from_output(output, fake_model(output, scheduler))
    assert replay(trace, policy=Moody()).trace.events == trace.events


@pytest.mark.parametrize("policy", [FCFS, ShortestFirst, LongestPrefixMatch])
def test_fork_without_a_change_is_the_same_to_the_last_event(policy):
    run = recorded(policy(), num_cpu_blocks=10)
    for step in (0, 1, run.trace.num_steps // 2, run.trace.num_steps - 1, run.trace.num_steps):
        assert fork(run, step).trace.events == run.trace.events, step


def test_fork_of_conversations_and_of_loaded_traces():
    run = simulate(chat(20, 12, 3, 0.1, 8, (3, 20), (2, 20), seed=4), config=SMALL, cost_model=Constant(0.01))
    assert fork(run, 20).trace.events == run.trace.events
    assert fork(run.trace, 20, cost_model=Constant(0.01)).trace.events == run.trace.events


def test_fork_has_the_same_history_and_another_future():
    run, step = recorded(), 60
    other = fork(run, step, policy=ShortestFirst())
    start = [i for i, event in enumerate(run.trace.events) if event[0] == "step"][step]
    before = next(i for i in range(start, 0, -1) if run.trace.events[i - 1][0] in ("update", "finish"))
    assert other.trace.events[:before] == run.trace.events[:before]
    assert other.trace.events != run.trace.events
    other.trace.check()
    a, b = (r.requests.set_index("request_id") for r in (run, other))
    assert b.num_output_tokens.to_dict() == a.num_output_tokens.to_dict()
    assert b.finish_reason.to_dict() == a.finish_reason.to_dict()
    assert diff(run, other).first_difference.step >= step


def test_fork_at_the_beginning_is_a_simulation():
    run = recorded()
    anew = simulate(run.trace, policy=ShortestFirst(), cost_model=Roofline("h100", "smollm2"))
    forked = fork(run, 0, policy=ShortestFirst())
    a, b = anew.requests, forked.requests
    assert a.request_id.tolist() == b.request_id.tolist() and a.num_preemptions.tolist() == b.num_preemptions.tolist()
    assert (a.ttft - b.ttft).abs().max() < 1e-9


def test_fork_ends_what_was_cut_off_where_it_was_cut():
    life = Life(5, FCFS(), Recompute(), "full", warm=True)
    life.live(60)
    life.drain()
    reasons = {e[2] for e in life.trace.events if e[0] == "finish"}
    assert reasons >= {"stop", "length", "abort"}
    said = {}
    for event in life.trace.events:
        if event[0] == "update":
            for name, tokens in event[2].items():
                said.setdefault(name, []).extend(tokens)
    other = fork(life.trace, 20, policy=ShortestFirst(), cost_model=Constant(0.013), kv_cache=life.kv_cache)
    other.trace.check()
    assert other.requests.finish_reason.notna().all()
    for event in other.trace.events:
        if event[0] == "update":
            for name, tokens in event[2].items():
                if name in said:
                    assert tokens == (said[name].pop(0),)


def test_fork_says_what_is_wrong():
    run = recorded()
    with pytest.raises(IndexError, match=f"step 100000 of a recording with {run.trace.num_steps} steps"):
        fork(run, 100_000)
    with pytest.raises(IndexError, match="step -1 of"):
        fork(run, -1)
    unrecorded = simulate(poisson(1, 3, 5, 3), cost_model=Constant(0.01), record=False)
    with pytest.raises(ValueError, match="was not recorded; simulate with record=True"):
        replay(unrecorded)


def test_recorded_steps_hold_all_causes():
    life = Life(11, FCFS(), Recompute(), "full", warm=False)
    life.live(80)
    steps, after = recorded_steps(life.trace)
    causes = [what for step in steps for what in (*step.before, *step.during)] + after
    kinds = [what[0] for what in causes]
    events = [event[0] for event in life.trace.events]
    assert (
        len(steps) == events.count("step")
        and kinds.count("add") == events.count("add")
        and kinds.count("reset") == events.count("reset")
    )
    assert sum(step.end is not None for step in steps) == events.count("update")
    assert sum(what[0] == "finish" and what[2] == "abort" for what in causes) == sum(
        e[0] == "finish" and e[2] == "abort" for e in life.trace.events
    )


@pytest.mark.slow
def test_a_run_of_the_real_model_replays_and_forks(llm):
    from minivllm import SamplingParams

    llm.llm_engine.reset_prefix_cache()
    prompts = [f"Question {i}: what is {i} plus {i}?" for i in range(12)]
    llm.generate(prompts[:3], SamplingParams(max_tokens=8), use_tqdm=False)  # the recording begins with a warm cache
    with llm.record() as trace:
        params = [SamplingParams(max_tokens=8 + i, stop="." if i % 3 == 0 else None, seed=i) for i in range(12)]
        llm.generate(prompts, params, use_tqdm=False)
        llm.generate(prompts[:4], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
    again = replay(trace, kv_cache=llm.config.kv_cache)
    assert len(again.trace.events) == len(trace.events)
    other = fork(trace, 5, policy=ShortestFirst(), cost_model=CostModel.fit(trace), kv_cache=llm.config.kv_cache)
    assert len(other.requests) == 16 and other.requests.finish_reason.notna().all()
    assert len(list(Workload.from_trace(trace))) == 16
