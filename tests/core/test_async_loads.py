"""Blocks that a connector fills beside the steps, in any order, with failures: every token reads what was computed for its own prefix."""

import random

import pytest
from random_workload import Workload, run_random
from remote_store import RemoteMemory, Store

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.events import Fold
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.trace import Trace, TraceError, find_fault


class RemoteWorkload(Workload):
    """The random engine with such a connector; the fold of its events is compared with the live state after each step."""

    KINDS = ("full",)

    def make_connector(self, block_size):
        share = self.rng.choice([0.0, 0.0, 0.3])
        return Store(block_size, lambda request: self.rng.random() < share)

    def make_memory(self):
        quick, bad, rng = self.rng.choice([0.1, 0.4, 1.0]), self.rng.choice([0.0, 0.1, 0.5]), self.rng
        self.trace = self.scheduler.record()
        self.fold, self.done = Fold(self.trace.start), 0
        return RemoteMemory(self.scheduler, lambda name: rng.random() < quick, lambda: rng.random() < bad)

    def step(self):
        super().step()
        self.compare()

    def act(self):
        super().act()
        self.compare()

    def compare(self):
        for event in self.trace.events[self.done :]:
            self.fold.apply(event)
        self.done = len(self.trace.events)
        live = self.scheduler.state()
        assert self.fold.state() == live
        fault = find_fault(live, ahead=self.depth)
        assert fault is None, fault

    def run(self):
        super().run()
        scheduler = self.scheduler
        assert not any((scheduler.remote, scheduler._receiving, scheduler._kept, scheduler.connector._loading))
        self.trace.check()


def run(seed: int) -> RemoteWorkload:
    return run_random(RemoteWorkload, seed)


def test_many_random_workloads():
    runs = [run(seed) for seed in range(150)]
    kinds = [event[0] for w in runs for event in w.trace.events]
    assert all(kinds.count(kind) > 20 for kind in ("kv_wait", "kv_arrive", "kv_keep", "kv_release", "preempt"))
    why = {event[4] for w in runs for event in w.trace.events if event[0] == "preempt"}
    assert {"kv_load_failure", "policy_error", "step_failed", "reset_prefix_cache"} <= why
    assert sum(w.memory.loaded for w in runs) > 2 * sum(w.memory.spoilt for w in runs) > 40


@pytest.mark.slow
def test_a_thousand_random_workloads():
    seed = random.SystemRandom().randrange(10**9)
    print(f"1,000 workloads from seed {seed}")
    for i in range(seed, seed + 1000):
        run(i)


def engine(requests: int = 1, **settings) -> tuple[Scheduler, RemoteMemory, set[str]]:
    """An engine whose store holds the first two blocks of a prompt of 10 tokens, requests for it, and which of them have their blocks."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 40, **settings}
    blocks = limits.pop("num_gpu_blocks", 30)
    scheduler = Scheduler(
        SchedulerConfig(**limits), CacheConfig(block_size=4, num_gpu_blocks=blocks), connector=Store()
    )
    arrived: set[str] = set()
    memory = RemoteMemory(scheduler, arrived.__contains__)
    scheduler.add_request(Request("first", list(range(10)), max_tokens=1))
    step(scheduler, memory)
    assert scheduler.reset_prefix_cache() and not scheduler.connector.held
    scheduler.connector.held |= set(memory.store)
    for i in range(requests):
        scheduler.add_request(Request(str(i), list(range(10)), max_tokens=3))
    return scheduler, memory, arrived


def step(scheduler, memory):
    output = scheduler.schedule()
    scheduler.update_from_output(output, memory.execute(output))
    return output


def test_a_request_waits_for_its_blocks_while_others_run():
    scheduler, memory, arrived = engine()
    scheduler.add_request(Request("other", [7] * 5, max_tokens=9))
    trace = scheduler.record()
    assert list(step(scheduler, memory).num_scheduled_tokens) == ["other"]
    assert scheduler.requests["0"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert [len(table) for table in scheduler.kv_cache_manager.get_block_ids("0")] == [3]
    assert list(step(scheduler, memory).num_scheduled_tokens) == ["other"]
    arrived.add("0")
    step(scheduler, memory)
    output = step(scheduler, memory)
    assert output.num_scheduled_tokens == {"other": 1, "0": 2} and output.new_requests[0].num_computed_tokens == 8
    while scheduler.has_requests():
        step(scheduler, memory)
    trace.check()
    told = trace.why("0")
    assert any("fetched from elsewhere (8 tokens)" in line for line in told)
    assert any("has its fetched blocks, 8 tokens computed" in line for line in told)
    decisions = trace.to_pandas()["decisions"]
    assert list(decisions[decisions.reason == "remote_kv"].request_id) == ["0"]
    early = Trace(trace.header, trace.start, [event for event in trace.events if event[0] != "kv_arrive"])
    with pytest.raises(TraceError, match="admitted with 8 tokens computed, and 0 have arrived"):
        early.check()


def test_what_arrives_after_a_change_of_weights_is_not_used():
    scheduler, memory, arrived = engine()
    step(scheduler, memory)
    assert scheduler.reset_prefix_cache() is False  # a request holds blocks
    assert scheduler.reset_prefix_cache(reset_running_requests=True) is True
    arrived.add("0")
    step(scheduler, memory)
    assert step(scheduler, memory).new_requests[0].num_computed_tokens == 0


def test_blocks_of_an_aborted_request_stay_until_the_transfer_has_ended():
    scheduler, memory, arrived = engine()
    step(scheduler, memory)
    scheduler.finish_requests(["0"])
    again = Request("0", [5] * 9, max_tokens=2)
    scheduler.add_request(again)
    pool = scheduler.kv_cache_manager.block_pool
    for _ in range(3):
        assert not step(scheduler, memory).num_scheduled_tokens and pool.num_free == pool.num_blocks - 3
    arrived.add("0")
    memory.spoils = lambda: True  # no request loses anything by it
    trace = scheduler.record()
    step(scheduler, memory)
    assert not any(event.kind == "reset" for event in trace)
    assert pool.num_free == pool.num_blocks and step(scheduler, memory).num_scheduled_tokens == {"0": 9}
    while scheduler.has_requests():
        step(scheduler, memory)
    assert pool.num_free == pool.num_blocks


def test_a_store_that_never_brings_what_it_says_it_has_stops_no_request():
    scheduler, memory, arrived = engine(requests=2)
    scheduler.connector.stubborn, memory.spoils = True, lambda: True
    arrived |= {"0", "1"}
    trace = scheduler.record()
    for _ in range(20):
        step(scheduler, memory)
    assert not scheduler.requests and memory.spoilt == 4 == scheduler.connector.num_async_failures * 2
    trace.check()
    assert any("could not be" in line for line in trace.why("0"))


def test_one_that_has_not_started_loses_its_blocks_before_one_that_runs():
    scheduler, memory, arrived = engine(max_num_seqs=1, num_gpu_blocks=7)
    step(scheduler, memory)
    arrived.add("0")
    scheduler.add_request(Request("long", [7] * 9, max_tokens=12))
    trace = scheduler.record()
    step(scheduler, memory)  # "long" starts, and then the blocks of "0" come
    while scheduler.has_requests():
        step(scheduler, memory)
    trace.check()
    lost = [event for event in trace if event.kind == "preempt"]
    assert [(event.request, event.needed_by) for event in lost] == [("0", "long")]


def sender() -> tuple[Scheduler, RemoteMemory, set[str]]:
    """An engine that keeps the blocks of each request that ends until it is in the set, and one that has just ended."""
    arrived: set[str] = set()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=40, max_model_len=40),
        CacheConfig(block_size=4, num_gpu_blocks=30),
        connector=Store(keeps=lambda request: True),
    )
    memory = RemoteMemory(scheduler, arrived.__contains__)
    scheduler.add_request(Request("0", list(range(10)), max_tokens=1))
    step(scheduler, memory)
    assert not scheduler.requests
    return scheduler, memory, arrived


def test_an_engine_whose_blocks_are_being_sent_has_something_to_do():
    scheduler, memory, arrived = sender()
    pool = scheduler.kv_cache_manager.block_pool
    for _ in range(3):
        assert scheduler.has_requests() and scheduler.is_sending and pool.num_free < pool.num_blocks
        step(scheduler, memory)
    arrived.add("0")
    step(scheduler, memory)
    assert pool.num_free == pool.num_blocks and scheduler.reset_prefix_cache()
    assert not scheduler.has_requests() and not scheduler.is_sending


@pytest.mark.parametrize("lost", ["the end of the request", "that it was sent"])
def test_a_step_that_fails_loses_no_send(lost):
    scheduler, memory, arrived = sender()
    memory.spoils = lambda: lost == "the end of the request"
    arrived.add("0")
    output = scheduler.schedule()
    assert output.finished == ("0",)
    memory.execute(output, fails=True)
    scheduler.abandon([output])
    assert scheduler.is_sending
    step(scheduler, memory)
    assert not scheduler.has_requests()


def test_what_is_told_of_an_earlier_request_does_not_release_its_namesake():
    scheduler, *_ = sender()
    early = scheduler.schedule()
    late = scheduler.schedule()
    scheduler.update_from_output(early, ModelRunnerOutput({}, finished_sending={"0"}))
    assert not scheduler.is_sending
    scheduler.add_request(Request("0", [5] * 9, max_tokens=9))
    scheduler.schedule()
    scheduler.finish_requests(["0"])
    scheduler.update_from_output(late, ModelRunnerOutput({}, finished_sending={"0"}))  # said again: it has not heard
    assert scheduler.is_sending
