"""A block's hash says what is in it: every token reads only keys and values that were truly computed for its own prefix."""

import random

import pytest
from block_memory import Memory
from random_workload import Workload, run_random

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import FCFS, PolicyError
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler


def run(seed: int) -> Workload:
    return run_random(Workload, seed)


def test_a_few_hundred_random_workloads():
    runs = [run(seed) for seed in range(300)]
    assert all(sum(getattr(w, what) for w in runs) > 100 for what in ("hits", "preemptions", "errors", "drafted"))
    accepted = sum(w.scheduler.spec_stats.num_accepted_tokens for w in runs)
    assert 100 < accepted < sum(w.drafted for w in runs) - 100


@pytest.mark.slow
def test_twenty_thousand_random_workloads():
    seed = random.SystemRandom().randrange(10**9)
    print(f"20,000 workloads from seed {seed}")
    for i in range(seed, seed + 20_000):
        run(i)


class Stages(Workload):
    """Some steps in flight, as by pipeline stages: a request is in one of them, drafts come with its result."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.scheduler.waits_for_tokens, self.depth = True, rng.choice([2, 3])
        kinds = (group.spec for group in self.scheduler.kv_cache_manager.groups)
        if not any(spec.rules.is_state and "ring" not in dict(spec.options) for spec in kinds):
            self.memory.guess = self.guess

    def run(self) -> None:
        trace = self.scheduler.record()
        super().run()
        trace.check()
        verified = [event for event in trace.events if event[0] == "verify"]
        self.late = sum(len(event) > 2 for event in verified)


def test_drafts_of_requests_in_several_steps_in_flight():
    runs = [run_random(Stages, seed) for seed in range(300)]
    assert all(sum(getattr(w, what) for w in runs) > 100 for what in ("hits", "preemptions", "drafted", "late"))


def step(scheduler, memory):
    output = scheduler.schedule()
    scheduler.update_from_output(output, memory.execute(output))
    return output


def test_a_victim_that_was_planned_in_the_same_step_resumes_on_what_was_computed():
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=9, max_model_len=64, policy="priority", long_prefill_token_threshold=5
    )
    scheduler = Scheduler(config, CacheConfig(block_size=3, num_gpu_blocks=9))
    memory = Memory(scheduler)
    scheduler.add_request(Request("other", [99], max_tokens=20))
    scheduler.add_request(Request("low", list(range(13)), max_tokens=1, priority=1))
    step(scheduler, memory)
    scheduler.add_request(Request("urgent", list(range(50, 57)), max_tokens=1))
    assert step(scheduler, memory).num_scheduled_tokens == {"other": 1, "low": 5, "urgent": 3}  # low has 10 of 13
    assert step(scheduler, memory).preempted == ("low",)  # after its last three had been planned
    [resumed] = step(scheduler, memory).new_requests
    assert (resumed.request_id, resumed.num_computed_tokens) == ("low", 9)


def test_a_policy_error_leaves_no_promise_behind():
    """A prompt is planned, and shared by another in the same step; then the policy fails, and the first goes away."""

    class Fails(FCFS):
        def chunk(self, request, budget_left, view):
            return budget_left if request.request_id != "c" else 1 // 0

    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=64)
    scheduler = Scheduler(config, CacheConfig(block_size=4, num_gpu_blocks=40), policy=Fails())
    memory = Memory(scheduler)
    for name in "abc":
        scheduler.add_request(Request(name, list(range(10)), max_tokens=2))
    with pytest.raises(PolicyError):
        scheduler.schedule()
    assert not any(block.block_hash for block in scheduler.kv_cache_manager.block_pool.blocks)
    scheduler.finish_requests(["a"])
    scheduler.set_policy(FCFS())
    output = step(scheduler, memory)
    assert [(new.request_id, new.num_computed_tokens) for new in output.new_requests] == [("b", 0), ("c", 8)]


def test_after_a_failed_step_requests_that_go_on_register_nothing_more():
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
    scheduler = Scheduler(config, CacheConfig(block_size=4, num_gpu_blocks=40), policy=OnlyB())
    memory = Memory(scheduler)
    for name in "ab":
        scheduler.add_request(Request(name, list(range(6)), max_tokens=9))
    scheduler.set_policy(FCFS())
    step(scheduler, memory)
    scheduler.set_policy(OnlyB())
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["b"]
    scheduler.abandon([output])
    assert list(scheduler.requests) == ["a"]
    scheduler.set_policy(FCFS())
    while scheduler.has_requests():
        step(scheduler, memory)
        assert not any(block.block_hash for block in scheduler.kv_cache_manager.block_pool.blocks)


class OnlyB(FCFS):
    def chunk(self, request, budget_left, view):
        return budget_left if request.request_id == "b" else 0


def test_a_prompt_is_shared_within_the_step_that_computes_it():
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=64)
    scheduler = Scheduler(config, CacheConfig(block_size=4, num_gpu_blocks=40))
    memory = Memory(scheduler)
    for i in range(3):
        scheduler.add_request(Request(str(i), list(range(10)), max_tokens=3))
    assert step(scheduler, memory).num_scheduled_tokens == {"0": 10, "1": 2, "2": 2}


def test_reset_refuses_while_requests_hold_blocks_and_can_be_told_to_reset_them():
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
    scheduler = Scheduler(config, CacheConfig(block_size=4, num_gpu_blocks=40))
    memory = Memory(scheduler)
    scheduler.add_request(Request("a", list(range(6)), max_tokens=9))
    step(scheduler, memory)
    assert scheduler.reset_prefix_cache() is False
    assert scheduler.kv_cache_manager.block_pool.num_free < 39
    assert scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert not any(block.block_hash for block in scheduler.kv_cache_manager.block_pool.blocks)
    output = step(scheduler, memory)
    assert (output.preempted, output.num_scheduled_tokens) == (("a",), {"a": 7})
