"""Workloads: reproducible, lazy, and of the promised statistics."""

import tracemalloc
from itertools import islice, pairwise

import numpy as np
import pytest

from minivllm.core.request import FinishReason
from minivllm.lab import simulate
from minivllm.lab.cost import Constant
from minivllm.lab.workload import (
    Workload,
    WorkloadRequest,
    bursts,
    chat,
    closed_loop,
    lognormal,
    poisson,
    shared_prefix,
    text,
)

SOME = {
    "poisson": lambda n=50, seed=1: poisson(3, n, (1, 90), (1, 30), num_users=3, seed=seed),
    "bursts": lambda n=50, seed=1: bursts(3, n, (1, 90), (1, 30), seed=seed),
    "shared": lambda n=50, seed=1: shared_prefix(3, n, 4, 64, (1, 90), (1, 30), seed=seed),
    "chat": lambda n=50, seed=1: chat(3, n, (1, 4), 2.0, 33, (1, 90), (1, 30), seed=seed),
    "closed": lambda n=50, seed=1: closed_loop(n, 3, 2.0, (1, 90), (1, 30), seed=seed),
}


def spelled(requests):
    return [(r.request_id, r.arrival_time, r.prompt_token_ids(), list(r.output), r.user, r.session) for r in requests]


@pytest.mark.parametrize("kind", SOME)
def test_same_seed_same_requests_another_seed_others(kind):
    workload = SOME[kind]()
    once = spelled(workload.unrolled())
    assert once == spelled(workload.unrolled()) == spelled(SOME[kind]().unrolled())
    assert once != spelled(SOME[kind](seed=2).unrolled())


@pytest.mark.parametrize("kind", SOME)
def test_beginning_does_not_depend_on_length(kind):
    assert spelled(SOME[kind](20)) == spelled(islice(SOME[kind](50), 20)) == spelled(SOME[kind](50).head(20))


@pytest.mark.parametrize("kind", SOME)
def test_ids_are_unique_and_arrivals_in_order(kind):
    requests = list(SOME[kind]().unrolled())
    assert len({r.request_id for r in requests}) == len(requests)
    assert all(a.arrival_time <= b.arrival_time for a, b in pairwise(requests))


def test_counts_and_lengths_may_be_numbers_of_numpy():
    made = [poisson(1, n(3), n(5), (n(1), n(4))) for n in (int, np.int64)]
    assert spelled(made[0]) == spelled(made[1])


def test_texts_of_different_requests_share_nothing():
    seen: set[int] = set()
    for request in SOME["poisson"]():
        ids = {*request.prompt_token_ids(), *request.output}
        assert not ids & seen
        seen |= ids


@pytest.mark.parametrize("burstiness", [1.0, 0.25, 4.0])
def test_gaps_have_the_promised_mean_and_spread(burstiness):
    gaps = np.diff([0.0, *(r.arrival_time for r in poisson(5, 20_000, 1, 1, burstiness=burstiness))])
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_lengths_keep_to_their_bounds():
    generator = np.random.default_rng(0)
    drawn = [lognormal(100, 1.5, 400)(generator) for _ in range(5000)]
    assert min(drawn) >= 1 and max(drawn) == 400
    assert np.median(drawn) == pytest.approx(100, rel=0.1)
    lengths = [r.num_prompt_tokens for r in poisson(1, 3000, (3, 6), 2)]
    assert set(lengths) == {3, 4, 5, 6}


def test_shared_prefixes_are_shared_exactly():
    requests = list(shared_prefix(1, 80, 3, 64, (1, 40), 1, skew=0, seed=4))
    assert {r.session for r in requests} == {"prefix-0", "prefix-1", "prefix-2"}
    for a in requests[:20]:
        for b in requests:
            if a is not b:
                common = sum(x == y for x, y in zip(a.block_names(16), b.block_names(16), strict=False))
                assert common == (4 if a.session == b.session else 0)


def test_zipf_demand_of_prefixes():
    sessions = [r.session for r in shared_prefix(1, 6000, 4, 16, 1, 1, skew=1.0)]
    weights = np.array([1, 1 / 2, 1 / 3, 1 / 4])
    for k, expected in enumerate(weights / weights.sum()):
        assert sessions.count(f"prefix-{k}") / 6000 == pytest.approx(expected, abs=0.02)


def test_each_turn_of_a_chat_begins_with_all_before():
    request = next(iter(chat(1, 1, 4, 2.0, 50, (5, 20), (5, 20), seed=9)))
    moment = 10.0
    for _ in range(3):
        after = request.follow_up(moment)
        before = request.prompt_token_ids() + list(request.output)
        assert after.prompt_token_ids()[: len(before)] == before
        assert after.num_prompt_tokens > len(before) and after.arrival_time > moment
        assert spelled([after]) == spelled([request.follow_up(moment)])  # may be asked for again
        request, moment = after, after.arrival_time + 1
    assert request.follow_up is None


def test_users_in_a_closed_loop_wait_for_their_answers():
    run = simulate(closed_loop(3, 20, 0.5, (5, 50), (1, 20)), cost_model=Constant(0.03))
    frame = run.requests.sort_values("arrival")
    assert len(frame) == 60
    for _, of_user in frame.groupby("user"):
        assert (of_user.arrival.iloc[1:].to_numpy() >= of_user.finished.iloc[:-1].to_numpy()).all()
    events = sorted([(t, 1) for t in frame.arrival] + [(t, -1) for t in frame.finished], key=lambda e: (e[0], e[1]))
    assert max(np.cumsum([delta for _, delta in events])) <= 3


def test_a_long_workload_is_never_in_memory():
    tracemalloc.start()
    count = sum(1 for _ in poisson(100, 20_000, (1, 4000), (1, 1000)).head(20_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000 and peak < 1_000_000


def finish_of(request: WorkloadRequest):
    """How a request ends when it says its answer."""
    made = request.to_request()
    for i, token in enumerate(request.output):
        if made.append_output_token(token):
            return i + 1, made.finish_reason, made.stop_reason
    return None


def test_answers_end_where_they_end():
    base = WorkloadRequest("a", 0.0, (text(1, 5),), [7, 8, 7])
    assert finish_of(base) == (3, FinishReason.LENGTH, None)
    assert finish_of(WorkloadRequest("a", 0.0, (text(1, 5),), [7, 8, 7], max_tokens=9)) == (3, FinishReason.STOP, None)
    own = WorkloadRequest("a", 0.0, (text(1, 5),), [7, 8, 7], max_tokens=9, stop_token_id=7)
    assert finish_of(own) == (3, FinishReason.STOP, 7)
    cut = WorkloadRequest("a", 0.0, (text(1, 5),), [7, 8, 7], max_tokens=9, ends_with_stop=False)
    assert finish_of(cut) is None


def test_changed_workloads():
    workload = SOME["chat"]()
    plain, fast = list(workload), list(workload.faster(2))
    assert [r.arrival_time / 2 for r in plain] == [r.arrival_time for r in fast]
    moved = list(workload.arriving(10, seed=3))
    assert [r.prompt for r in moved] == [r.prompt for r in plain] and moved[0].arrival_time != plain[0].arrival_time
    for request in workload.allowing(12).unrolled():
        assert request.max_tokens == 12 and request.num_output_tokens <= 12
    cut = [r for r in workload.allowing(12).unrolled() if r.num_output_tokens == 12]
    assert cut and finish_of(cut[0])[:2] == (12, FinishReason.LENGTH)


def test_in_vocabulary_keeps_what_is_shared():
    plain, spelled_out = SOME["chat"](), SOME["chat"]().in_vocabulary(17, 49152)
    for a, b in zip(plain.unrolled(), spelled_out.unrolled(), strict=True):
        ids = b.prompt_token_ids()
        assert 17 <= min(ids) and max(ids) < 49152 and len(ids) == a.num_prompt_tokens
    a = [name for r in plain.unrolled() for name in r.block_names(16)]
    b = [name for r in spelled_out.unrolled() for name in r.block_names(16)]
    assert len(set(a)) == len(set(b))


def test_salt_and_adapter_are_part_of_block_names():
    prompt, answer = (text(1, 40),), [1]
    names = {
        tuple(WorkloadRequest("a", 0.0, prompt, answer, **extra).block_names(16))
        for extra in ({}, {"cache_salt": "x"}, {"lora_name": "x"}, {"extra_keys": ("x",)})
    }
    assert len(names) == 4


def test_workload_of_sorts_and_tabulates():
    workload = Workload.of(WorkloadRequest(str(i), t, (text(i, 4),), [1]) for i, t in enumerate((3.0, 1.0, 2.0)))
    assert [r.request_id for r in workload] == ["1", "2", "0"]
    assert workload.to_pandas()["arrival"].tolist() == [1.0, 2.0, 3.0]


def test_from_trace_gives_the_same_requests_again():
    source = shared_prefix(20, 30, 2, 32, (4, 30), (2, 12), seed=5).allowing(20)
    run = simulate(source, config={"num_gpu_blocks": 200, "block_size": 4}, cost_model=Constant(0.01))
    again = Workload.from_trace(run.trace)
    first = next(iter(source)).arrival_time
    for a, b in zip(source, again, strict=True):
        assert (a.request_id, a.prompt_token_ids(), list(a.output), a.max_tokens) == (
            b.request_id, b.prompt_token_ids(), list(b.output), b.max_tokens,
        )  # fmt: skip
        assert b.arrival_time == pytest.approx(a.arrival_time - first)
        assert finish_of(a) == finish_of(b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WorkloadRequest("a", 0.0, (), [1]), "'a': the prompt is empty"),
        (lambda: WorkloadRequest("a", 0.0, (range(3),), []), "'a': the answer is empty"),
        (lambda: WorkloadRequest("a", 0.0, (range(3),), [1, 2], max_tokens=1), "more than max_tokens=1"),
        (lambda: poisson(0, 5), "rate must be above 0 requests per second, got 0"),
        (lambda: poisson(1, 5, burstiness=-1), "burstiness must be above 0"),
        (lambda: poisson(1, 5, prompt_tokens=(5, 2)), r"prompt_tokens must be at least 1, or a pair.*\(5, 2\)"),
        (lambda: poisson(1, -2), "num_requests must be a whole number, at least 0, got -2"),
        (lambda: poisson(1, 2.5), "num_requests must be a whole number, at least 0, got 2.5"),
        (lambda: poisson(1, 5, num_users=0), "num_users must be a whole number, at least 1, got 0"),
        (lambda: poisson(1, 5, 2.5), "prompt_tokens must be at least 1"),
        (lambda: poisson(1, 5, (1, 2, 3)), "prompt_tokens must be at least 1"),
        (lambda: bursts(1, -2), "num_requests must be a whole number, at least 0, got -2"),
        (lambda: shared_prefix(1, -2, 4), "num_requests must be a whole number, at least 0, got -2"),
        (lambda: shared_prefix(1, 5, 0), "num_prefixes must be a whole number, at least 1, got 0"),
        (lambda: shared_prefix(1, 5, 4, skew=float("nan")), "skew must be finite, got nan"),
        (lambda: chat(1, -2), "num_sessions must be a whole number, at least 0, got -2"),
        (lambda: chat(1, 5, system_tokens=-1), "system_tokens must be a whole number, at least 0, got -1"),
        (lambda: closed_loop(-2, 3), "num_users must be a whole number, at least 0, got -2"),
        (lambda: poisson(1, 5).head(-2), "head: num_requests must be a whole number, at least 0, got -2"),
        (lambda: lognormal(0, 1.0, 10), "lognormal needs median > 0"),
        (lambda: chat(1, 5, think_time=-1), "think_time must be finite, at least 0 seconds, got -1"),
        (lambda: poisson(1, 5).faster(0), "factor above 0, got 0"),
        (lambda: poisson(1, 5).allowing(0), "max_tokens must be at least 1, got 0"),
        (lambda: poisson(1, 5).in_vocabulary(5, 5), "0 <= low < high, got 5 and 5"),
        (lambda: text(0, 1 << 25), "at most 16777216 tokens"),
    ],
)
def test_bad_arguments_say_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()
