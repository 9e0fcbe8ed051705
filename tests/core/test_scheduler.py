"""The scheduler's rules, one by one, and what it does with broken policies."""

import random

import pytest
from scheduling import Driver, fake_model

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.policy import (
    FCFS,
    LFU,
    FairShare,
    LongestPrefixMatch,
    Policy,
    PolicyError,
    Priority,
    ShortestFirst,
    View,
)
from minivllm.core.request import FinishReason, Request
from minivllm.core.scheduler import Recompute, Scheduler, Swap, VirtualClock


def make(
    policy=None,
    preemption=None,
    seqs=8,
    budget=32,
    length=64,
    blocks=33,
    block_size=4,
    caching=True,
    timeout=10.0,
    **config,
):
    return Scheduler(
        SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=length, **config),
        CacheConfig(block_size, blocks, enable_prefix_caching=caching),
        policy=policy,
        preemption=preemption,
        clock=VirtualClock(),
        policy_timeout=timeout,
    )  # fmt: skip


def add(scheduler, *lengths, max_tokens=4, **kwargs):
    start = len(scheduler.requests)
    for i, length in enumerate(lengths):
        scheduler.add_request(Request(str(start + i), [10 * i + start] * length, max_tokens=max_tokens, **kwargs))


def step(scheduler):
    output = scheduler.schedule()
    scheduler.update_from_output(output, fake_model(output, scheduler))
    return output


def test_one_budget_for_prefill_and_decode():
    s = make()
    add(s, 3)
    step(s)
    add(s, 40, 5)
    assert step(s).num_scheduled_tokens == {"0": 1, "1": 31}
    assert step(s).num_scheduled_tokens == {"0": 1, "1": 9, "2": 5}


def test_long_prefill_threshold_caps_each_request_but_a_lone_one():
    s = make(long_prefill_token_threshold=6)
    add(s, 20, 20, 3)
    assert step(s).num_scheduled_tokens == {"0": 6, "1": 6, "2": 3}
    lone = make(long_prefill_token_threshold=6)
    add(lone, 40)
    assert step(lone).num_scheduled_tokens == {"0": 32}
    add(lone, 3)
    assert step(lone).num_scheduled_tokens == {"0": 6, "1": 3}


def test_the_threshold_cuts_prompts_also_without_chunked_prefill():
    """As in vLLM: what is compared with the budget is what the threshold leaves of a prompt."""
    s = make(budget=64, enable_chunked_prefill=False, long_prefill_token_threshold=4)
    add(s, 10, 3)
    assert step(s).num_scheduled_tokens == {"0": 4, "1": 3}
    while s.has_requests():
        step(s)


def test_max_num_partial_prefills():
    s = make(long_prefill_token_threshold=6, max_num_partial_prefills=1)
    add(s, 20, 20)
    assert step(s).num_scheduled_tokens == {"0": 6}


def test_without_chunked_prefill_a_prompt_is_never_cut():
    s = make(budget=64, enable_chunked_prefill=False)
    add(s, 40, 30, 5)
    assert step(s).num_scheduled_tokens == {"0": 40}
    assert step(s).num_scheduled_tokens == {"0": 1, "1": 30, "2": 5}


def test_full_prompt_is_reserved_at_admission():
    reserving, eager = make(blocks=11, length=40), make(blocks=11, length=40, scheduler_reserve_full_isl=False)
    for s in (reserving, eager):
        add(s, 24, 24, max_tokens=1)
    assert list(step(reserving).num_scheduled_tokens) == ["0"]
    assert list(step(eager).num_scheduled_tokens) == ["0", "1"]


def test_watermark_leaves_room():
    s = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64), CacheConfig(4, 21, watermark=0.5)
    )
    add(s, 24, 24)
    assert list(step(s).num_scheduled_tokens) == ["0"]


def test_youngest_gives_way_and_returns_first():
    s = make(seqs=3, blocks=10, length=36, caching=False)
    add(s, 10, 10, 10, max_tokens=20)
    step(s)
    assert [r.request_id for r in s.running] == ["0", "1", "2"]
    while not s.num_preemptions:
        output = step(s)
    assert output.preempted == ("2",)
    assert [r.request_id for r in s.waiting] == ["2"]
    add(s, 2)
    assert next(iter(s.waiting)).request_id == "2"


def test_nobody_is_admitted_in_a_step_with_a_preemption():
    s = make(seqs=4, blocks=8, length=28, caching=False)
    add(s, 10, 10, max_tokens=18)
    trace = s.record()
    step(s)
    add(s, 1)
    while s.has_requests():
        output = step(s)
        assert not (output.preempted and output.new_requests)
    assert any(e[0] == "wait" and e[2] == "after_preemption" for e in trace.events)


@pytest.mark.parametrize("preemption", [Recompute(), Swap(4), Swap(100)])
def test_preempted_requests_lose_nothing(preemption):
    def tokens(blocks):
        driver = Driver(make(preemption=preemption, blocks=blocks, length=32))
        add(driver.scheduler, 9, 8, 7, 6, 5, max_tokens=20)
        driver.drain()
        return driver.outputs, driver.scheduler.num_preemptions

    (roomy, none), (tight, some) = tokens(100), tokens(10)
    assert none == 0
    assert some > 0
    assert roomy == tight


def test_swap_copies_out_and_in_again():
    s = make(preemption=Swap(50), blocks=9, length=32, caching=False)
    add(s, 9, 8, 7, max_tokens=20)
    out, back = [], []
    while s.has_requests():
        output = step(s)
        out += [cpu for _, cpu in output.swap_out]
        back += [cpu for cpu, _ in output.swap_in]
    assert out
    assert sorted(out) == sorted(back)


def test_a_request_that_can_never_run_is_refused_and_nothing_else_changes():
    s = make(blocks=9, length=64)
    add(s, 5)
    before = s.state()
    with pytest.raises(ValueError, match="'x'.*32 tokens is too long; what the KV cache can hold is 32 tokens"):
        s.add_request(Request("x", [1] * 32, max_tokens=1))
    with pytest.raises(ValueError, match="'0' is already in use"):
        s.add_request(Request("0", [1], max_tokens=1))
    with pytest.raises(ValueError, match="max_model_len is 64 tokens"):
        make(blocks=99).add_request(Request("x", [1] * 64, max_tokens=1))
    assert s.state() == before


def test_a_request_ends_at_the_longest_length_that_fits():
    driver = Driver(make(blocks=5, length=64))
    add(driver.scheduler, 10, max_tokens=50)
    driver.drain()
    assert len(driver.outputs["0"]) == 16 - 10


def test_finish_reasons():
    s = make()
    s.add_request(Request("eos", [1, 1], max_tokens=5, eos_token_id=2))
    s.add_request(Request("ignored", [1, 1], max_tokens=1, eos_token_id=2, ignore_eos=True))
    s.add_request(Request("stop", [1, 1], max_tokens=5, stop_token_ids=frozenset({2})))
    s.add_request(Request("late", [1, 1], max_tokens=5, eos_token_id=2, min_tokens=2))
    output = s.schedule()
    reasons = {
        o.request_id: (o.finish_reason, o.stop_reason) for o in s.update_from_output(output, fake_model(output, s))
    }
    assert reasons == {
        "eos": (FinishReason.STOP, None),
        "ignored": (FinishReason.LENGTH, None),
        "stop": (FinishReason.STOP, 2),
        "late": (None, None),
    }


@pytest.mark.parametrize("state", ["waiting", "running", "preempted", "swapped"])
def test_abort_in_any_state(state):
    s = make(
        preemption=Swap(50) if state == "swapped" else None,
        blocks=9,
        length=32,
        caching=False,
        seqs=2 if state == "waiting" else 3,
    )
    driver = Driver(s)
    add(s, 9, 8, 7, max_tokens=20)
    driver.step()
    while state in ("preempted", "swapped") and not s.num_preemptions:
        driver.step()
    victim = next(r for r in s.requests.values() if r.status.name.lower() == state)
    assert s.finish_requests([victim.request_id, "unknown"]) == [victim.request_id]
    assert victim.finish_reason is FinishReason.ABORT
    driver.check()
    output = driver.step()
    assert victim.request_id in output.finished
    driver.drain()


def test_an_error_of_one_request_ends_that_one():
    driver = Driver(make())
    add(driver.scheduler, 3, 3)
    output = driver.decide()
    result = ModelRunnerOutput({"0": [5]}, errors={"1": "its transform raised"})
    outs = {o.request_id: o for o in driver.scheduler.update_from_output(output, result)}
    assert outs["1"].finish_reason is FinishReason.ERROR
    assert outs["1"].error == "its transform raised"
    assert outs["0"].finish_reason is None
    driver.runner.rows["0"].tokens[-1] = 5
    driver.check()
    driver.drain()


def test_shared_prompts_share_blocks():
    s = make()
    for i in range(3):
        s.add_request(Request(str(i), list(range(10)), max_tokens=3))
    step(s)
    tables = [s.kv_cache_manager.get_block_ids(str(i))[0] for i in range(3)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert s.kv_cache_manager.block_pool.blocks[tables[0][0]].ref_cnt == 3


def test_hit_statistics_tell_no_lookup_from_no_hit():
    off, miss = make(caching=False), make()
    for s in (off, miss):
        add(s, 8)
        step(s)
    assert off.kv_cache_manager.stats.hit_rate is None
    assert off.kv_cache_manager.stats.skipped == 1
    assert miss.kv_cache_manager.stats.hit_rate == 0.0
    miss.add_request(Request("no", [0] * 8, max_tokens=1, skip_reading_prefix_cache=True))
    step(miss)
    assert miss.kv_cache_manager.stats.skipped == 1


def test_reset_prefix_cache_forgets():
    s = make()
    add(s, 8, max_tokens=1)
    step(s)
    assert s.reset_prefix_cache() is True
    s.add_request(Request("again", [0] * 8, max_tokens=1))
    assert step(s).num_scheduled_tokens == {"again": 8}


# --- policies -------------------------------------------------------------------------------------------------------


def admitted(policy, requests, **kwargs):
    s = make(policy=policy, seqs=1, **kwargs)
    for request in requests:
        s.add_request(request)
    order = []
    while s.has_requests():
        order += [r.request_id for r in step(s).new_requests]
    return order


def test_orders():
    def some():
        return [
            Request("long", [1] * 9, max_tokens=9, priority=1, user="ann"),
            Request("short", [2] * 2, max_tokens=2, priority=2, user="ann"),
            Request("urgent", [3] * 5, max_tokens=5, priority=0, user="bob"),
        ]

    assert admitted(FCFS(), some()) == ["long", "short", "urgent"]
    assert admitted(Priority(), some()) == ["urgent", "long", "short"]
    assert admitted(ShortestFirst(), some()) == ["short", "urgent", "long"]
    assert admitted(FairShare(), some()) == ["long", "urgent", "short"]


def test_longest_prefix_match_goes_where_the_cache_is():
    requests = [
        Request("a", [1] * 9, max_tokens=1),
        Request("b", [2] * 9, max_tokens=1),
        Request("a2", [1] * 9, max_tokens=1),
    ]
    assert admitted(LongestPrefixMatch(), requests) == ["a", "a2", "b"]


def test_priority_preempts_the_least_urgent():
    s = make(policy=Priority(), seqs=3, blocks=10, length=36, caching=False)
    for name, priority in (("b", 5), ("c", 1), ("a", 3)):
        s.add_request(Request(name, [1] * 9, max_tokens=20, priority=priority))
    preempted = []
    while not preempted:
        preempted += step(s).preempted
    assert preempted == ["b"]


def test_of_equals_the_youngest_is_preempted():
    running = [Request(name, [1], max_tokens=1, priority=1, arrival_time=2.0) for name in ("first", "second")]
    for number, request in enumerate(running):
        request.sequence_number = number
    assert Priority().victim(running, None).request_id == "second"
    later = Request("later", [1], max_tokens=1, priority=1, arrival_time=3.0)
    assert Priority().victim([*running, later], None).request_id == "later"


def test_two_equals_do_not_preempt_each_other_for_ever():
    """Each grows chunk by chunk, and the pool holds only one of them: the older must get through."""
    limits = {"long_prefill_token_threshold": 3, "scheduler_reserve_full_isl": False}
    s = make(policy=Priority(), seqs=2, blocks=5, length=16, caching=False, **limits)
    for name in "ab":
        s.add_request(Request(name, [1] * 13, max_tokens=1))
    for _ in range(20):
        step(s)
    assert not s.requests


def test_lfu_keeps_what_is_hit_often():
    def survivors(policy):
        s = make(policy=policy, blocks=7, length=24)
        for name, token in (("hot", 1), ("hot2", 1), ("cold", 2), ("new", 3)):
            s.add_request(Request(name, [token] * 9, max_tokens=1))
            while s.has_requests():
                step(s)
        return {t: s.kv_cache_manager.cached_tokens(Request("?", [t] * 9, max_tokens=1)) for t in (1, 2)}

    assert survivors(FCFS())[1] < survivors(LFU())[1]


def test_the_oldest_is_overtaken_at_most_so_often():
    limit = 5
    s = make(policy=ShortestFirst(), seqs=1, starvation_limit=limit)
    s.add_request(Request("long", [1] * 30, max_tokens=2))
    before = 0
    for i in range(100):
        s.add_request(Request(f"s{i}", [2], max_tokens=1))
        new = [r.request_id for r in step(s).new_requests]
        if "long" in new:
            break
        before += len(new)
    assert before == limit


def test_served_tokens_are_those_that_were_computed_and_sampled():
    """Also under preemption, prefix hits and swapping, and for every view: counted here one by one."""

    class Looks(FCFS):
        def order(self, waiting, view):
            seen.append(view.served)
            return waiting

    for preemption in (Recompute(), Swap(20)):
        seen, prompts, computed = [], {"ann": 0, "bob": 0}, {}
        s = make(policy=Looks(), blocks=12, length=40, budget=12, preemption=preemption)
        for i in range(8):
            s.add_request(Request(str(i), [i % 3] * (5 + 2 * i), max_tokens=15, user="ann" if i % 3 else "bob"))
        every = dict(s.requests)

        def given(user):
            return prompts[user], sum(r.num_output_tokens for r in every.values() if r.user == user)  # noqa: B023

        while len(s.requests) > 1:
            looks = len(seen)
            assert {u: tuple(n) for u, n in s._served_tokens().items() if any(n)} == {
                u: given(u) for u in prompts if any(given(u))
            }
            output = step(s)
            computed |= {new.request_id: new.num_computed_tokens for new in output.new_requests}
            for request_id, n in output.num_scheduled_tokens.items():
                before, length = computed[request_id], every[request_id].num_prompt_tokens
                computed[request_id] = before + n
                prompts[every[request_id].user] += min(before + n, length) - min(before, length)
            assert len(seen) == looks or all(seen[-1].get(u, (0, 0))[0] <= n for u, n in prompts.items())
        assert s.num_preemptions > 2 and len(seen) > 2


def test_a_request_is_chosen_as_victim_at_most_so_often():
    """A policy that always picks the same one: its limit reached, others give way, and it ends."""

    class PicksOnA(FCFS):
        def victim(self, running, view):
            return next((r for r in running if r.request_id == "a"), running[-1])

    limit = 2
    s = make(policy=PicksOnA(), blocks=9, length=28, caching=False, starvation_limit=limit)
    for name in "abcdef":
        s.add_request(Request(name, [1] * 6, max_tokens=20))
    chosen = []
    while s.has_requests():
        chosen += step(s).preempted
    assert chosen.count("a") == limit and len(chosen) > limit


def test_a_request_is_denied_tokens_at_most_so_often():
    """Also a running one: a policy that gives nothing to it must give way in the end."""

    class Ignores(FCFS):
        def chunk(self, request, budget_left, view):
            return 0 if request.request_id == "a" and request.num_computed_tokens else budget_left

    limit = 5
    s = make(policy=Ignores(), starvation_limit=limit, budget=8, length=64)
    s.add_request(Request("a", [1] * 12, max_tokens=2))
    s.add_request(Request("b", [2], max_tokens=40))
    steps = [step(s).num_scheduled_tokens for _ in range(1 + 2 * (limit + 1))]
    given = [i for i, scheduled in enumerate(steps) if "a" in scheduled]
    assert given == [0, limit + 1, 2 * (limit + 1)] and all("b" in scheduled for scheduled in steps[1:])


def test_the_whole_prompt_in_the_cache_leaves_one_block_to_compute():
    """A step must produce the logits of the last token, so its block is computed again."""
    s = make()
    s.add_request(Request("first", list(range(8)), max_tokens=1))
    step(s)
    s.add_request(Request("again", list(range(8)), max_tokens=1))
    assert step(s).num_scheduled_tokens == {"again": 4} and s.kv_cache_manager.stats.hit_tokens == 4


class Broken(Policy):
    def __init__(self, hook, answer):
        setattr(self, hook, answer)


def endless(*args):
    while True:
        pass


def boom(*args):
    raise KeyError("boom")


BROKEN = [
    ("order", lambda waiting, view: waiting[1:], "dropped 1 of 3"),
    ("order", lambda waiting, view: [*waiting, waiting[0]], "twice"),
    ("order", lambda waiting, view: [View(Request("ghost", [1], max_tokens=1)), *waiting], "not waiting.*ghost"),
    ("order", lambda waiting, view: None, "must return the views"),
    ("order", boom, "raised KeyError: 'boom'"),
    ("order", lambda waiting, view: waiting[0].length, "Request has no 'length'; it has .*num_prompt_tokens"),
    ("order", endless, "did not answer within 0.2 s"),
    ("key", boom, "raised KeyError: 'boom'"),
    ("key", endless, "did not answer within 0.2 s"),
    ("key", lambda request: request.request_id if request.num_prompt_tokens > 7 else 7, "cannot be compared"),
    ("key", lambda request: setattr(request, "priority", 0), "read-only"),
    ("chunk", lambda request, budget, view: -1, "at least 0.*got -1"),
    ("chunk", lambda request, budget, view: 1.5, "got 1.5"),
    ("chunk", boom, "raised KeyError"),
    ("victim", lambda running, view: "me", "must return one of the"),
    ("victim", boom, "raised KeyError"),
    ("victim", lambda running, view: setattr(running[0], "num_tokens", 1), "read-only"),
    ("evict", lambda free, view: None, "must return one of the cached free blocks"),
    ("evict", boom, "raised KeyError"),
    ("evict", endless, "did not answer"),
    ("evict", lambda free, view: setattr(next(free).next, "ref_cnt", 7), "read-only: cannot set 'ref_cnt'"),
    ("evict_key", boom, "raised KeyError"),
    ("evict_key", lambda block: block.depth if block.block_id > 3 else "x", "raised TypeError: '<' not supported"),
    ("evict_key", lambda block: setattr(block, "num_hits", 7), "read-only"),
    ("evict_key", endless, "did not answer"),
    ("evict_key", lambda block: block.parent, "known to policies with `track_blocks = True` only"),
    ("on_add", boom, "raised KeyError"),
    ("on_admit", lambda request: setattr(request, "priority", 3), "read-only"),
    ("on_tokens", boom, "raised KeyError"),
    ("on_tokens", endless, "did not answer"),
    ("on_hit", lambda request, blocks: setattr(blocks[0], "ref_cnt", 7), "read-only"),
    ("on_free", boom, "raised KeyError"),
    ("on_preempt", boom, "raised KeyError"),
    ("on_finish", boom, "raised KeyError"),
]


@pytest.mark.parametrize("hook, answer, words", BROKEN)
def test_a_broken_policy_is_named_and_leaks_nothing(hook, answer, words):
    caching = hook in ("evict", "evict_key", "on_hit")
    driver = Driver(make(policy=Broken(hook, answer), blocks=9, length=32, timeout=0.2, caching=caching))
    s = driver.scheduler
    add(s, 9, 8, 7, max_tokens=20)
    with pytest.raises(PolicyError, match=f"Broken.{hook} .*{words}") as caught:
        for i in range(40):
            driver.step()
            if caching and not s.requests:
                s.add_request(Request(f"more{i}", [i // 2] * 30, max_tokens=1))
    driver.check()
    assert driver.trace.events[-1] == ("policy_error", str(caught.value))
    s.set_policy(FCFS())
    driver.drain()
    assert {str(i) for i in range(3)} <= set(driver.outputs)


def test_after_a_broken_policy_all_can_be_aborted():
    driver = Driver(make(policy=Broken("order", boom)))
    add(driver.scheduler, 9, 8)
    with pytest.raises(PolicyError):
        driver.step()
    driver.scheduler.finish_requests(list(driver.scheduler.requests))
    driver.scheduler.set_policy(FCFS())
    driver.drain()


def test_a_policy_that_gives_nobody_anything_is_reported():
    s = make(policy=Broken("chunk", lambda request, budget, view: 0), starvation_limit=20)
    add(s, 4)
    with pytest.raises(PolicyError, match="no tokens to anyone for 21 steps"):
        for _ in range(30):
            step(s)


def test_a_policy_that_fails_at_its_start_is_not_taken():
    s = make()
    with pytest.raises(PolicyError, match=r"Broken.on_start raised KeyError"):
        s.set_policy(Broken("on_start", boom))
    assert s.policy.name == "FCFS"


def test_without_a_limit_no_thread_is_started(monkeypatch):
    """As where Python cannot start threads: in a browser."""

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", no_thread)
    s = make(policy=LongestPrefixMatch(), timeout=0)
    add(s, 4, 5)
    assert list(step(s).num_scheduled_tokens) == ["0", "1"]
    with pytest.raises(ValueError, match="policy_timeout must be at least 0 seconds"):
        make(timeout=-1)


def test_a_policy_class_instead_of_an_instance():
    with pytest.raises(TypeError, match="must be an instance"):
        make(policy=FCFS)


def test_tokens_are_the_same_under_every_policy():
    """The fake model's token depends on the request's tokens alone, so this holds if no request's tokens are mixed up."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(1, 20))] for _ in range(20)]
    results = []
    for policy in (FCFS(), Priority(), ShortestFirst(), FairShare(), LongestPrefixMatch(), LFU()):
        for budget in (8, 32):
            driver = Driver(make(policy=policy, budget=budget, blocks=12, length=40))
            for i, prompt in enumerate(prompts):
                driver.scheduler.add_request(Request(str(i), prompt, max_tokens=12, priority=i % 3, user=str(i % 2)))
            driver.drain()
            results.append(driver.outputs)
    assert all(result == results[0] for result in results)
