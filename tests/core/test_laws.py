"""Whatever happens to it, the scheduler's events fold to its live state, no block leaks, and everyone finishes."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduling import GROUPS, Driver, LateDriver, fake_model, kv_config

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
    driver_class = Driver

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
        self.driver = self.driver_class(Scheduler(config, cache, kv, policy=self.policy(), preemption=preemption))
        self.count = 0
        self.truth = {}

    def add_request(self, request):
        self.driver.scheduler.add_request(request)
        tokens = list(request.all_token_ids)
        while len(tokens) < request.max_total_tokens:
            tokens.append(sum(tokens) % 3)
            if tokens[-1] in request.end_token_ids:
                break
        self.truth[request.request_id] = tokens[request.num_prompt_tokens :]

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
        self.add_request(
            Request(str(self.count), prompt, max_tokens=max_tokens, stop_token_ids=stop, priority=priority, cache_salt=salt, user=user, skip_reading_prefix_cache=skip)
        )  # fmt: skip

    @rule(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6), shared=st.integers(0, 6))
    def burst(self, lengths, shared):
        """Several at once, with a common beginning and long answers: this is what runs the pool dry."""
        for length in lengths:
            self.count += 1
            prompt = [2] * min(shared, length) + [(self.count + i) % 3 for i in range(length - min(shared, length))]
            self.add_request(Request(str(self.count), prompt, max_tokens=self.longest - length))

    @rule(data=st.data())
    def abort(self, data):
        ids = sorted(self.driver.scheduler.requests)
        if ids:
            name = data.draw(st.sampled_from(ids))
            self.driver.scheduler.finish_requests([name])
            self.truth[name] = self.truth[name][: len(self.driver.outputs.get(name, []))]

    @rule(n=st.integers(1, 9))
    def steps(self, n):
        for _ in range(n):
            self.driver.step()

    @rule(running=st.booleans())
    def reset(self, running):
        self.driver.scheduler.reset_prefix_cache(reset_running_requests=running)

    @rule(policy=st.sampled_from(POLICIES))
    def change_policy(self, policy):
        self.driver.scheduler.set_policy(policy())

    @rule()
    def abort_between_schedule_and_update(self):
        scheduler = self.driver.scheduler
        if scheduler.requests:
            output = scheduler.schedule()
            self.driver.runner.execute(output)
            for name in scheduler.finish_requests(sorted(scheduler.requests)[:1]):
                self.truth[name] = self.truth[name][: len(self.driver.outputs.get(name, []))]
            self.driver.take_in(output, fake_model(output, scheduler))

    @invariant()
    def folded_is_live(self):
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.drain()
            assert self.driver.outputs == {name: tokens for name, tokens in self.truth.items() if tokens}


class LateMachine(EngineMachine):
    """The same laws, and the same tokens, when every step is decided before the tokens of the one before are known."""

    driver_class = LateDriver

    @invariant()
    def folded_is_live(self):
        if hasattr(self, "driver"):
            self.driver.check(ahead=len(self.driver.flying) - 1 if self.driver.flying else 0)

    @rule()
    def abort_between_schedule_and_update(self):
        """And take the id for another request at once, while the step is under way."""
        scheduler = self.driver.scheduler
        for name in scheduler.finish_requests(sorted(scheduler.requests)[:1]):
            said = self.driver.outputs.pop(name, [])
            assert said == self.truth[name][: len(said)]
            self.add_request(Request(name, [2, 1, 2], max_tokens=5))

    @rule()
    def wait_for_the_step_under_way(self):
        if self.driver.flying:
            self.driver.land()


HEALTH = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
QUICK = settings(max_examples=60, stateful_step_count=12, deadline=None, suppress_health_check=HEALTH)
TestQuick, TestQuickLate = EngineMachine.TestCase, LateMachine.TestCase
TestQuick.settings = TestQuickLate.settings = QUICK


@pytest.mark.slow
@pytest.mark.long
class TestMany(EngineMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=12, deadline=None, suppress_health_check=HEALTH)


@pytest.mark.slow
@pytest.mark.long
class TestManyLate(LateMachine.TestCase):
    settings = TestMany.settings


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
