"""Adapter slots by themselves, and what the scheduler does with requests for more adapters than there are slots."""

import random
import sys

import pytest
from scheduling import Driver, LateDriver, fake_model

from minivllm.core.adapter_slots import AdapterSlots
from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.policy import FCFS, AdapterFairShare, FairShare, LongestPrefixMatch, Priority, ShortestFirst
from minivllm.core.request import FinishReason, Request
from minivllm.core.scheduler import Recompute, Scheduler, Swap, VirtualClock


def make(loras=2, policy=None, preemption=None, blocks=60, seqs=8, budget=32, **config):
    limits = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=64, max_loras=loras, **config
    )
    return Scheduler(limits, CacheConfig(4, blocks), policy=policy, preemption=preemption, clock=VirtualClock())


def add(scheduler, *names, length=5, max_tokens=3, start=None):
    start = len(scheduler.requests) if start is None else start
    for i, name in enumerate(names):
        scheduler.add_request(Request(str(start + i), [i % 3] * length, max_tokens=max_tokens, lora_name=name))


def test_the_least_recently_used_is_evicted():
    slots = AdapterSlots(2)
    assert slots.take("a", ()) == (0, None) and slots.take("b", ()) == (1, None)
    slots.touch("a")
    slots.touch("unknown")
    assert slots.take("c", ()) == (1, "b")
    assert slots.in_slots == ["a", "c"] and list(slots.slot_of) == ["a", "c"]
    assert slots.take("a", ("a", "c")) == (0, None)  # it has a slot


def test_what_is_in_use_or_pinned_stays():
    slots = AdapterSlots(3)
    for name in "abc":
        slots.take(name, ())
    slots.pin("a")
    assert slots.can_take("a", "abc") and not slots.can_take("d", {"b", "c"})
    assert slots.can_take("d", {"b"}) and slots.take("d", {"b"}) == (2, "c")
    slots.pin("b")
    with pytest.raises(ValueError, match="2 of max_loras=3 are pinned"):
        slots.pin("d")
    slots.pin("a")  # again


def test_a_released_slot_is_free_and_the_lowest_is_taken_first():
    slots = AdapterSlots(3)
    for name in "abc":
        slots.take(name, ())
    assert slots.loading == set("abc")
    assert slots.release("b") == 1 and slots.release("a") == 0
    assert slots.loading == {"c"} and slots.in_slots == [None, None, "c"]
    assert slots.can_take("d", {"c"}) and slots.take("d", {"c"}) == (0, None)


@pytest.mark.parametrize("seed", range(20))
def test_slots_against_a_model(seed):
    """By a list in the order of use."""
    rng, slots, used, where = random.Random(seed), AdapterSlots(4), [], {}
    slots.pin("p")
    for _ in range(200):
        name, in_use = rng.choice("abcdefp"), set(rng.sample("abcdefp", rng.randrange(4)))
        victims = [n for n in used if n not in in_use and n != "p"]
        can = name in used or len(used) < 4 or bool(victims)
        assert slots.can_take(name, in_use) == can
        if not can:
            continue
        evicted = None
        if name not in used:
            if len(used) == 4:
                evicted = victims[0]
                used.remove(evicted)
                where[name] = where.pop(evicted)
            else:
                where[name] = min(set(range(4)) - set(where.values()))
        used = [n for n in used if n != name] + [name]
        assert slots.take(name, in_use) == (where[name], evicted)
        assert dict(slots.slot_of) == where and list(slots.slot_of) == used


def test_requests_without_a_slot_are_passed_and_keep_their_place():
    scheduler = make(loras=2)
    driver = Driver(scheduler)
    add(scheduler, "a", "b", "c", None, "a", "c", "b")
    output = driver.step()
    assert list(output.num_scheduled_tokens) == ["0", "1", "3", "4", "6"]
    assert output.lora_loads == ((0, "a"), (1, "b"))
    assert [request.request_id for request in scheduler.waiting] == ["2", "5"]
    waits = [event for event in driver.trace.events if event[0] == "wait"]
    assert waits == [("wait", "2", "max_loras")]  # of the first that is held, not of those behind it
    while "2" not in (output := driver.step()).num_scheduled_tokens:
        assert not output.lora_loads
    assert output.lora_loads == ((0, "c"),) and "5" in output.num_scheduled_tokens
    driver.drain()
    assert driver.trace.at(-1).loras == {0: "c", 1: "b"}
    assert [event for event in driver.trace.events if event[0] == "wait"] == waits


def test_a_request_that_is_passed_too_often_is_waited_for():
    scheduler = make(loras=1, seqs=3, starvation_limit=5)
    driver = Driver(scheduler)
    add(scheduler, "a", "b", max_tokens=8)
    passed = 0
    for number in range(2, 30):
        add(scheduler, "a", start=number, max_tokens=8)
        driver.step()
        passed = len({*driver.outputs} - {"0"})
        if "1" in driver.outputs:
            break
    assert "1" in driver.outputs and passed <= 8
    driver.drain()


def waits_of_the_quiet_one(policy, loras):
    """Steps until each of three requests of adapter `b` has its first token, while `a` keeps the engine full."""
    scheduler = make(loras=loras, seqs=4, policy=policy)
    driver = Driver(scheduler)
    number, came, waits = 0, {}, []
    for step in range(120):
        while len(scheduler.waiting) < 8:
            add(scheduler, "a", start=number, max_tokens=5 + number % 7)  # they do not end together
            number += 1
        if step % 40 == 10:
            add(scheduler, "b", start=1000 + step, max_tokens=9)
            came[str(1000 + step)] = step
        driver.step()
        waits += [step - came.pop(name) for name in list(came) if driver.outputs.get(name)]
    return waits + [120 - step for step in came.values()]


@pytest.mark.parametrize("loras", [1, 2])
def test_a_busy_adapter_does_not_starve_a_quiet_one(loras):
    """With a slot for both, turns by tokens are enough; with one slot the busy one must also be held back."""
    first_come = waits_of_the_quiet_one(FCFS(), loras)
    by_user = waits_of_the_quiet_one(FairShare(), loras)
    fair = waits_of_the_quiet_one(AdapterFairShare(lead=20), loras)
    patient = waits_of_the_quiet_one(AdapterFairShare(lead=200), loras)
    never = [110, 70, 30]  # to the end of the run
    assert loras == 2 or first_come == by_user == never
    assert max(fair) <= 8 and min(*first_come, *by_user) >= 17
    assert loras == 2 or max(fair) < max(patient) < 30


POLICIES = {
    "fcfs": FCFS, "shortest": ShortestFirst, "prefix": LongestPrefixMatch, "priority": Priority
}  # fmt: skip


@pytest.mark.parametrize("kind", [Driver, LateDriver])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("preemption", [Recompute(), Swap(40)], ids=["recompute", "swap"])
def test_many_adapters_few_slots(kind, policy, preemption):
    """The laws hold after every step, and running requests' adapters are in slots."""
    for seed in range(6):
        rng = random.Random(seed)
        scheduler = make(rng.randint(1, 3), POLICIES[policy](), preemption, blocks=24, seqs=rng.randint(2, 8))
        driver = kind(scheduler)
        for number in range(40):
            name = rng.choice([None, *"abcde"])
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            about = {"max_tokens": rng.randint(1, 9), "priority": rng.randrange(3), "lora_name": name}
            scheduler.add_request(Request(str(number), prompt, **about))
            if rng.random() < 0.7:
                driver.step()
                in_use = {r.lora_name for r in scheduler.running} - {None}
                assert in_use <= scheduler.adapters.slot_of.keys()
        driver.drain()
        assert scheduler.adapters.loading == set()


def failing(output, scheduler, *names):
    result = fake_model(output, scheduler)
    result.failed_loras = {name: f"no {name}" for _, name in output.lora_loads if name in names}
    return result


def test_a_load_that_fails_ends_its_requests_and_frees_slot_and_blocks():
    scheduler = make(loras=2, budget=64)
    driver = Driver(scheduler)
    add(scheduler, "a", "b", "a", None, length=9)
    output = driver.decide()
    outputs = scheduler.update_from_output(output, failing(output, scheduler, "a"))
    driver.check()
    errors = {out.request_id: (out.error, out.finish_reason, out.new_token_ids) for out in outputs}
    assert errors["0"] == errors["2"] == ("no a", FinishReason.ERROR, [])
    assert errors["1"][0] is None
    assert scheduler.adapters.in_slots == [None, "b"] and not scheduler.adapters.loading
    add(scheduler, "a", length=9, start=10)
    output = driver.step()
    assert output.lora_loads == ((0, "a"),)  # it is tried again
    assert output.new_requests[0].num_computed_tokens == 0  # and nothing of the first two is found
    driver.drain()


def test_a_request_joins_or_is_aborted_before_it_is_known_that_the_load_failed():
    """With async scheduling."""
    scheduler = make(loras=2)
    trace = scheduler.record()
    add(scheduler, "a", "a", length=9)
    first = scheduler.schedule()
    scheduler.finish_requests(["0"])
    add(scheduler, "a", "a", length=9, start=5)
    second = scheduler.schedule()
    aborted, shared = second.new_requests
    assert aborted.num_computed_tokens == 0  # the blocks of request 0 may be wrong, and are not found
    assert shared.num_computed_tokens == 8  # those of request 1 are shared, for better or worse
    outputs = scheduler.update_from_output(first, ModelRunnerOutput({"1": [1]}, failed_loras={"a": "no a"}))
    assert {out.request_id: out.error for out in outputs} == dict.fromkeys(("1", "5", "6"), "no a")
    assert not scheduler.update_from_output(second, ModelRunnerOutput({"5": [1], "6": [1]}))
    add(scheduler, "a", "a", length=9, start=8)
    output = scheduler.schedule()
    assert output.lora_loads and [new.num_computed_tokens for new in output.new_requests] == [0, 0]
    scheduler.update_from_output(output, fake_model(output, scheduler))
    trace.check()


@pytest.mark.parametrize("preemption", [Recompute(), Swap(20)], ids=["recompute", "swap"])
def test_a_preemption_before_it_is_known_that_the_load_failed(preemption):
    scheduler = make(loras=2, preemption=preemption, blocks=6)
    trace = scheduler.record()
    add(scheduler, None, "a", length=8, max_tokens=20)
    first = scheduler.schedule()
    outputs = [first]
    while not outputs[-1].preempted:  # the base model's request needs the blocks
        outputs.append(scheduler.schedule())
    result = ModelRunnerOutput({"0": [1], "1": [1]}, failed_loras={"a": "no a"})
    scheduler.update_from_output(first, result)
    assert not scheduler.kv_cache_manager.swapped
    scheduler.finish_requests(["0"])
    for output in outputs[1:]:
        scheduler.update_from_output(output, ModelRunnerOutput({}))
    output = scheduler.schedule()
    assert output.lora_loads and output.new_requests[0].num_computed_tokens == 0
    scheduler.update_from_output(output, fake_model(output, scheduler))
    trace.check()


def test_abandoned_steps_take_their_loads_back():
    scheduler = make(loras=2)
    driver = Driver(scheduler)
    add(scheduler, "a")
    driver.step()
    add(scheduler, "b", "c", start=3)
    lost = driver.decide()
    assert lost.lora_loads == ((1, "b"),)
    scheduler.abandon([lost])
    driver.check()
    assert scheduler.adapters.in_slots == ["a", None] and not scheduler.adapters.loading
    add(scheduler, "b", start=7)
    output = scheduler.schedule()
    assert (1, "b") in output.lora_loads or (0, "b") in output.lora_loads


def lines_of_a_step(waiting):
    """Lines of Python that a step executes in which one request runs and `waiting` others are held."""
    scheduler = make(loras=1, blocks=200, seqs=64, budget=256)
    add(scheduler, "a", max_tokens=40)
    scheduler.update_from_output(output := scheduler.schedule(), fake_model(output, scheduler))
    add(scheduler, *(f"x{i}" for i in range(waiting)), start=1)
    count = 0

    def trace(frame, event, about):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        output = scheduler.schedule()
    finally:
        sys.settrace(before)
    assert list(output.num_scheduled_tokens) == ["0"]
    return count


def test_held_requests_cost_one_pass():
    """Four times as many held requests cost four times as much, not sixteen times."""
    assert lines_of_a_step(800) < 5 * lines_of_a_step(200)
