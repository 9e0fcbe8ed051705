"""Media in the scheduler: encoder outputs are there when they are needed, and blocks know which picture is in them."""

import random
from dataclasses import replace

import pytest
from scheduling import Driver, LateDriver

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.encoder_cache import MultiModalFeatureSpec, PlaceholderRange
from minivllm.core.events import Fold
from minivllm.core.request import Request
from minivllm.core.scheduler import Recompute, Scheduler, Swap, VirtualClock
from minivllm.core.trace import Trace
from minivllm.lab.workload import recorded_requests

PAD = 9


def picture(name, offset, length, whole=False, is_embed=None):
    return MultiModalFeatureSpec(name, "image", PlaceholderRange(offset, length, is_embed), whole=whole)


def make(budget=16, cache=12, step=12, blocks=40, index="hash", preemption=None, **config):
    limits = {"max_num_seqs": min(budget, 8), "max_num_batched_tokens": budget, "max_model_len": 64}
    return Scheduler(
        SchedulerConfig(**limits, encoder_cache_size=cache, max_num_encoder_input_tokens=step, **config),
        CacheConfig(4, blocks, prefix_cache_index=index),
        preemption=preemption or Recompute(),
        clock=VirtualClock(),
    )


def request(name, *parts, max_tokens=3, whole=False, **more):
    """parts: token ids, and (name of a picture, its tokens)."""
    tokens, features = [], []
    for part in parts:
        if isinstance(part, tuple):
            features.append(picture(part[0], len(tokens), part[1], whole))
            tokens += [PAD] * part[1]
        else:
            tokens.append(part)
    return Request(name, tokens, max_tokens=max_tokens, mm_features=tuple(features), **more)


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_hit_needs_the_same_picture(index):
    driver = Driver(make(index=index))
    cached = []
    for name, parts in enumerate([(("a", 10), 1, 2), (("a", 10), 3, 4), (("b", 10), 1, 2), (1, ("a", 10), 2)]):
        driver.scheduler.add_request(request(str(name), *parts))
        driver.step()
        cached.append(driver.scheduler.requests[str(name)].num_cached_tokens)
        driver.drain()
    assert cached == [0, 8, 0, 0]


def test_a_picture_that_begins_elsewhere_in_a_block_is_another_content():
    one, other = request("1", ("a", 3), ("b", 5), 1), request("2", ("a", 4), ("b", 4), 1)
    from minivllm.core.prefix import extend_block_hashes

    assert extend_block_hashes(one, 8) != extend_block_hashes(other, 8)


def test_a_chunk_stops_before_an_input_that_does_not_fit():
    driver = Driver(make(budget=32, cache=12, step=8))
    driver.scheduler.add_request(request("r", 1, 2, ("a", 6), 3, ("b", 6), 4))
    assert driver.step().num_scheduled_tokens == {"r": 9}
    assert ("chunk", "r", 9, 16, "encoder_budget") in driver.trace.events
    driver.drain()


def test_a_running_request_waits_for_room_and_says_so():
    driver = Driver(make(budget=16, cache=8, step=16))
    driver.scheduler.add_request(request("0", ("a", 8), *range(10)))
    driver.scheduler.add_request(request("1", 1, ("b", 8)))
    first = driver.step()
    assert first.num_scheduled_tokens == {"0": 16}
    second = driver.step()  # the first picture is behind: its output may go
    assert second.free_encoder_mm_hashes == ("a",) and [f.identifier for f in second.scheduled_encoder_inputs] == ["b"]
    driver.drain()


def test_requests_with_one_picture_share_its_output():
    driver = Driver(make(budget=16, cache=8, step=8))
    for name in "012":
        driver.scheduler.add_request(request(name, int(name), ("a", 4)))
    assert [f.identifier for f in driver.step().scheduled_encoder_inputs] == ["a"]
    driver.drain()
    assert sum(event[0] == "encode" for event in driver.trace.events) == 1


def test_a_whole_range_is_never_split_whatever_the_caps():
    driver = Driver(make(budget=16, cache=16, step=16, long_prefill_token_threshold=3))
    driver.scheduler.add_request(request("0", 1, 2, ("a", 8), 3, whole=True))
    driver.scheduler.add_request(request("1", 1, 2, ("b", 8), 3, whole=True))
    driver.drain()
    with pytest.raises(ValueError, match="20 tokens must be computed in one step, and max_num_batched_tokens=16"):
        make(cache=32, step=32).add_request(request("2", ("c", 20), whole=True))


def test_an_input_that_can_never_be_encoded_is_refused_and_nothing_changes():
    scheduler = make(cache=8, step=6)
    with pytest.raises(ValueError, match="input 0 .image. takes 9 embeddings; encoder_cache_size=8"):
        scheduler.add_request(request("r", ("a", 9)))
    with pytest.raises(ValueError, match="max_num_encoder_input_tokens=6"):
        scheduler.add_request(request("r", ("a", 7)))
    assert not scheduler.requests and not scheduler.encoder_cache.users
    mask = bytes([1, 0] * 6)
    scheduler.add_request(Request("r", [PAD] * 12, max_tokens=1, mm_features=(picture("a", 0, 12, is_embed=mask),)))


def test_a_failed_step_forgets_what_it_was_to_encode():
    driver = Driver(make())
    driver.scheduler.add_request(request("r", ("a", 6), 1))
    output = driver.scheduler.schedule()
    driver.scheduler.abandon([output])
    driver.check()
    assert not driver.scheduler.encoder_cache.sizes and not driver.scheduler.encoder_cache.users
    driver.runner.encoded.add("a")  # the runner may have got so far
    driver.scheduler.add_request(request("s", ("a", 6), 1))
    driver.drain()


def workload(scheduler, driver, rng, steps=60):
    """Requests with pictures of a small set, aborts now and then."""
    sizes = {name: rng.randint(1, 9) for name in "abcdef"}
    whole = rng.random() < 0.3
    for number in range(rng.randint(4, 14)):
        parts = []
        for _ in range(rng.randint(1, 4)):
            parts += [rng.randint(0, 1) for _ in range(rng.randint(0, 5))]
            if rng.random() < 0.7:
                name = rng.choice("abcdef")
                parts.append((name, sizes[name]))
        parts = parts or [1]
        salt = rng.choice([None, None, "s"])
        scheduler.add_request(request(str(number), *parts, max_tokens=rng.randint(1, 9), whole=whole, cache_salt=salt))
        for _ in range(rng.randint(0, 3)):
            if scheduler.has_requests():
                driver.step()
        if rng.random() < 0.15 and scheduler.requests:
            scheduler.finish_requests([rng.choice(list(scheduler.requests))])
    driver.drain()


@pytest.mark.parametrize("seed", range(30))
def test_random_workloads(seed):
    rng = random.Random(seed)
    preemption = Swap(rng.randint(2, 12)) if rng.random() < 0.3 else None
    scheduler = make(
        budget=rng.randint(9, 24),
        cache=rng.randint(9, 20),
        step=rng.randint(9, 20),
        blocks=rng.randint(17, 30),
        index=rng.choice(["hash", "radix"]),
        preemption=preemption,
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
    )
    driver = (LateDriver if rng.random() < 0.4 else Driver)(scheduler)
    workload(scheduler, driver, rng)
    assert not scheduler.encoder_cache.held and not scheduler.encoder_cache.users
    assert set(scheduler.encoder_cache.freeable) == set(scheduler.encoder_cache.sizes) == driver.runner.encoded


def test_a_trace_keeps_the_media(tmp_path):
    driver = Driver(make())
    sent = request("r", 1, ("a", 6), 2, ("b", 3))
    driver.scheduler.add_request(sent)
    driver.drain()
    driver.trace.save(tmp_path / "t.jsonl")
    loaded = Trace.load(tmp_path / "t.jsonl")
    (again,) = recorded_requests(loaded)
    assert again.request.mm_features == sent.mm_features
    fold = Fold(loaded.start)
    for event in loaded.events:
        fold.apply(event)
    assert fold.state().encoder_cache == {"a": 6, "b": 3}
    names = [replace(again.request, mm_features=f).block_names(4) for f in (sent.mm_features, sent.mm_features[:1])]
    assert [a == b for a, b in zip(*names, strict=True)] == [True, True, False]
