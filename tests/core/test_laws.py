"""Whatever happens to it, the scheduler's events fold to its live state, no block leaks, and everyone finishes."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduling import GROUPS, Driver, fake_model, kv_config

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import (
    FCFS,
    LFU,
    DeepestFirst,
    FairShare,
    LongestPrefixMatch,
    Policy,
    Priority,
    ShortestFirst,
    combine,
)
from minivllm.core.request import Request
from minivllm.core.scheduler import Recompute, Scheduler, Swap


class Nibble(FCFS):
    """Never more than three tokens of one request."""

    def chunk(self, request, budget_left, view):
        return min(3, budget_left)


class OldestGivesWay(FCFS):
    def victim(self, running, view):
        return running[0]


POLICIES: list[type[Policy]] = [
    FCFS,
    Priority,
    ShortestFirst,
    FairShare,
    LongestPrefixMatch,
    Nibble,
    OldestGivesWay,
    LFU,
    DeepestFirst,
]


class EngineMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        block_size = draw(st.sampled_from([1, 2, 4]))
        kind = draw(st.sampled_from(sorted(GROUPS)))
        kv = kv_config(kind, block_size, 2, window=draw(st.sampled_from([2, 4, 7])))
        self.longest = 24
        least = len(kv.groups) * (self.longest // block_size) + 1
        num_blocks = draw(st.integers(least, least + least // 2))
        seqs = draw(st.integers(1, 6))
        config = SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=draw(st.integers(seqs, 40)),
            max_model_len=self.longest,
            long_prefill_token_threshold=draw(st.sampled_from([0, 0, 5])),
            max_num_partial_prefills=draw(st.sampled_from([None, 1, 2])),
            scheduler_reserve_full_isl=draw(st.booleans()),
            starvation_limit=draw(st.sampled_from([2, 1000])),
        )
        cache = CacheConfig(
            block_size=block_size,
            num_gpu_blocks=num_blocks,
            enable_prefix_caching=draw(st.booleans()),
            prefix_cache_index=draw(st.sampled_from(["hash", "radix"])),
            watermark=draw(st.sampled_from([0.0, 0.2])),
        )
        self.policy = draw(st.sampled_from(POLICIES))
        preemption = draw(st.sampled_from([Recompute(), Swap(3), Swap(100)]))
        self.driver = Driver(Scheduler(config, cache, kv, policy=self.policy(), preemption=preemption))
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 8),
        stop=st.sampled_from([frozenset(), frozenset({1})]),
        priority=st.integers(0, 3),
        salt=st.sampled_from([None, None, "s"]),
        user=st.sampled_from([None, "ann", "bob"]),
        skip=st.sampled_from([False, False, True]),
    )
    def add(self, prompt, max_tokens, stop, priority, salt, user, skip):
        self.count += 1
        self.driver.scheduler.add_request(
            Request(str(self.count), prompt, max_tokens=max_tokens, stop_token_ids=stop, priority=priority, cache_salt=salt, user=user, skip_reading_prefix_cache=skip)
        )  # fmt: skip

    @rule(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6), shared=st.integers(0, 6))
    def burst(self, lengths, shared):
        """Several at once, with a common beginning and long answers: this is what runs the pool dry."""
        for length in lengths:
            self.count += 1
            prompt = [2] * min(shared, length) + [(self.count + i) % 3 for i in range(length - min(shared, length))]
            self.driver.scheduler.add_request(Request(str(self.count), prompt, max_tokens=self.longest - length))

    @rule(data=st.data())
    def abort(self, data):
        ids = sorted(self.driver.scheduler.requests)
        if ids:
            self.driver.scheduler.finish_requests([data.draw(st.sampled_from(ids))])

    @rule(n=st.integers(1, 9))
    def steps(self, n):
        for _ in range(n):
            self.driver.step()

    @rule()
    def reset(self):
        self.driver.scheduler.reset_prefix_cache()

    @rule(policy=st.sampled_from(POLICIES))
    def change_policy(self, policy):
        self.driver.scheduler.set_policy(policy())

    @rule()
    def abort_between_schedule_and_update(self):
        scheduler = self.driver.scheduler
        if scheduler.requests:
            output = scheduler.schedule()
            self.driver.runner.apply(output)
            scheduler.finish_requests(sorted(scheduler.requests)[:1])
            scheduler.update(output, fake_model(output, scheduler))

    @invariant()
    def folded_is_live(self):
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()


HEALTH = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
TestQuick = EngineMachine.TestCase
TestQuick.settings = settings(max_examples=100, stateful_step_count=12, deadline=None, suppress_health_check=HEALTH)


@pytest.mark.slow
@pytest.mark.long
class TestMany(EngineMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=12, deadline=None, suppress_health_check=HEALTH)


def test_combined_policies_run():
    policy = combine(order=ShortestFirst(), evict=LFU(), chunk=Nibble())
    driver = Driver(
        Scheduler(
            SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8, max_model_len=32),
            CacheConfig(4, 12),
            policy=policy,
        )
    )
    for i in range(12):
        driver.scheduler.add_request(Request(str(i), [i % 3] * (1 + i), max_tokens=6))
    driver.drain()
    assert len(driver.outputs) == 12
