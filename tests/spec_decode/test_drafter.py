"""How many draft tokens a step carries: chances, measured costs, and the choice, with invented step times."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from minivllm.core.speculative import SpeculativeConfig
from minivllm.spec_decode.drafter import Acceptance, DraftLength, StepCost, make_drafter
from minivllm.spec_decode.proposers import DraftRequest

# ---- Acceptance


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_the_chance_of_a_draft_token_is_learned_from_what_was_accepted(chance):
    acceptance, rng = Acceptance(), np.random.default_rng(0)
    learned = []
    for step in range(2000):
        right = rng.random(4) < chance
        acceptance.observe("a", 4, int(right.cumprod().sum()))
        learned.append(acceptance["a"] if step > 50 else chance)
    assert abs(np.mean(learned) - chance) < 0.05 and 0 <= min(learned) <= max(learned) <= 1


def test_requests_have_chances_of_their_own_and_a_new_one_has_the_average():
    acceptance = Acceptance()
    assert acceptance["new"] == pytest.approx(0.6)
    for _ in range(200):
        acceptance.observe("good", 4, 4)
        acceptance.observe("bad", 4, 0)
    assert acceptance["good"] > 0.95 and acceptance["bad"] < 0.2
    assert acceptance["bad"] < acceptance["new"] < acceptance["good"]
    before = acceptance["bad"]
    for _ in range(100):
        acceptance.observe("bad", 0, 0)
    assert acceptance["bad"] > 1.5 * before
    acceptance.forget("bad")
    assert acceptance["bad"] == acceptance["new"]


# ---- StepCost


def test_sizes_are_exact_up_to_eight_and_then_within_an_eighth():
    for tokens in range(1, 3000):
        size = StepCost.size(tokens)
        assert size >= tokens and (size == tokens if tokens <= 8 else size < tokens * 1.25)


def test_the_first_step_of_a_number_of_tokens_does_not_count():
    """It compiles, and may take seconds."""
    cost = StepCost()
    cost.observe(3, 9.0)
    assert not cost.knows(3)
    cost.observe(3, 0.5)
    assert cost.knows(3) and cost.seconds(np.array([3])) == [0.5]


def test_the_median_of_the_last_times_counts_and_old_ones_are_forgotten():
    cost = StepCost()
    for seconds in (0.0, 1.0, 1.0, 1.0, 99.0, 1.2):
        cost.observe(2, seconds)
    assert cost.seconds(np.array([2])) == [1.0]
    for _ in range(StepCost.STALE + 2):
        cost.observe(5, 2.0)
    assert not cost.knows(2) and cost.knows(5)


def test_more_tokens_never_cost_less_and_what_is_between_is_interpolated():
    cost = StepCost()
    for tokens, seconds in [(1, 1.0), (2, 3.0), (4, 2.0), (8, 8.0)] * 2:
        cost.observe(tokens, seconds)
    assert cost.seconds(np.array([1, 2, 3, 4, 6, 8])).tolist() == [1.0, 3.0, 3.0, 3.0, 5.5, 8.0]


def test_many_more_tokens_than_were_tried_are_taken_for_a_little_dearer():
    cost = StepCost()
    for tokens in (4, 8, 4, 8):
        cost.observe(tokens, float(tokens))
    assert cost.seconds(np.array([8, 16, 40])).tolist() == pytest.approx([8.0, 8.0 * 1.3, 8.0 * 2.2])


def test_the_first_step_of_each_size_beyond_128_does_not_count():
    cost = StepCost()
    for tokens in (140, 141, 142, 128, 127):
        cost.observe(tokens, 9.0)
    assert cost.knows(140) and not cost.knows(128)


def test_a_batch_carries_whole_sizes_of_tokens_or_all_drafts():
    length = timed(lambda tokens: 100.0 + tokens)
    for count in range(1, 12):
        kept = length.choose([0.9] * count, [4] * count, 20)
        assert sum(kept) == 4 * count or StepCost.size(20 + sum(kept)) == 20 + sum(kept)
    assert 0 < sum(length.choose([0.5] * 9, [4] * 9, 20)) < 36


# ---- DraftLength


def timed(seconds, most=64):
    length = DraftLength()
    for tokens in [*range(1, most + 1)] * 2:
        length.cost.observe(tokens, seconds(StepCost.size(tokens)))
    return length


def best_by_brute_force(chances, lengths, batch, seconds, overhead):
    """Tokens a second of every choice."""
    rates = {}
    for kept in itertools.product(*(range(n + 1) for n in lengths)):
        gained = batch + sum(sum(c**i for i in range(1, n + 1)) for c, n in zip(chances, kept, strict=True))
        rates[kept] = gained / (seconds(StepCost.size(batch + sum(kept))) + overhead)
    return rates


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_gives_more_tokens_a_second(seed):
    rng = np.random.default_rng(seed)
    count, extra = int(rng.integers(1, 4)), int(rng.integers(0, 3))
    chances, lengths = rng.uniform(0.05, 0.95, count).tolist(), rng.integers(0, 4, count).tolist()
    flat, overhead = int(rng.integers(1, 9)), float(rng.choice([0.0, 2.0]))

    def seconds(tokens):
        return float(max(flat, tokens))

    kept = timed(seconds).choose(chances, lengths, count + extra, overhead)
    rates = best_by_brute_force(chances, lengths, count + extra, seconds, overhead)
    best, none = max(rates.values()), rates[(0,) * count]
    if best < DraftLength.MARGIN * none:
        assert sum(kept) == 0
    else:
        assert rates[tuple(kept)] == pytest.approx(best)


def test_nothing_is_drafted_before_a_step_without_drafts_was_timed():
    length = DraftLength()
    assert not length.asks(2) and length.choose([0.9, 0.9], [4, 4], 2) == [0, 0]
    length.cost.observe(2, 1.0)
    length.cost.observe(2, 1.0)
    assert length.asks(2) and not length.asks(3)
    assert length.choose([0.9, 0.9], [4, 4], 2) == [4, 4]  # what was not tried is taken for cheap, and found out


def pauses(length, steps, overhead, chance, drafted=4):
    """In which steps of one request the proposer is asked."""
    asked = []
    for step in range(steps):
        if length.asks(1):
            asked.append(step)
            length.choose([chance], [drafted], 1, overhead)
    return asked


def test_a_proposer_that_costs_more_than_it_saves_is_asked_less_and_less():
    asked = pauses(timed(lambda tokens: 1.0), 1000, 8.0, 0.3)
    assert np.diff(asked).tolist()[:7] == [2, 4, 8, 16, 32, 64, 65] and len(asked) < 25


@pytest.mark.parametrize(("overhead", "chance", "drafted"), [(0.01, 0.0, 0), (2.0, 0.95, 4), (0.0, 0.1, 4)])
def test_a_proposer_that_pays_or_costs_nothing_is_always_asked(overhead, chance, drafted):
    """The first has no guess and needs a hundredth of a step for that; the second takes two steps, and gains more than three."""
    assert pauses(timed(lambda tokens: 1.0), 200, overhead, chance, drafted) == [*range(200)]


def test_a_proposer_that_costs_little_is_asked_so_often_that_it_takes_a_hundredth_of_the_time():
    asked = pauses(timed(lambda tokens: 1.0), 400, 0.05, 0.0)
    assert np.diff(asked).max() == 6 and 0.05 * len(asked) < 0.015 * 400


def test_a_text_that_turns_predictable_is_drafted_again():
    length = timed(lambda tokens: 1.0)
    pauses(length, 300, 2.0, 0.1)
    assert len(pauses(length, 200, 2.0, 0.95)) > 130


BUSY = [1, 5, 16, 32, 48, 64, 65, 80, 128, 320], [26.6, 29, 40.6, 47, 55.5, 67, 125, 146, 230, 560]
"""Milliseconds of a step by its tokens: SmolLM2 on one core, where 64 requests leave nothing idle."""


def speed(length, acceptance, batch, share, chance, rng, steps=96):
    """How many times as fast as without drafts. share: of requests that have a draft of 4; chance: that a token of it is right."""
    drafts, spent, tokens = [0] * batch, 0.0, 0
    for _ in range(steps):
        took = float(np.interp(batch + sum(drafts), *BUSY))
        right = [int((rng.random(n) < chance).cumprod().sum()) for n in drafts]
        for i, (n, accepted) in enumerate(zip(drafts, right, strict=True)):
            acceptance.observe(str(i), n, accepted)
        length.cost.observe(batch + sum(drafts), took)
        spent, tokens, drafts = spent + took, tokens + batch + sum(right), [0] * batch
        if length.asks(batch):
            spent, lengths = spent + 0.01 * batch, [4 * (rng.random() < share) for _ in range(batch)]
            drafts = length.choose([acceptance[str(i)] for i in range(batch)], lengths, batch, 0.01 * batch)
    return tokens / spent / (batch / float(np.interp(batch, *BUSY)))


@pytest.mark.parametrize(
    ("batch", "share", "chance", "first", "later"),
    [(1, 0.8, 0.7, 1.6, 1.8), (16, 0.8, 0.7, 1.25, 1.35), (16, 0.25, 0.43, 0.97, 1.0), (16, 0.5, 0.15, 0.95, 0.97), (64, 0.8, 0.7, 0.9, 0.97), (64, 0.25, 0.43, 0.93, 0.97), (64, 0.5, 0.15, 0.93, 0.97)],
)  # fmt: skip
def test_a_batch_is_hardly_slower_with_drafts_and_faster_where_they_pay(batch, share, chance, first, later):
    length, acceptance, rng = DraftLength(), Acceptance(), np.random.default_rng(0)
    assert speed(length, acceptance, batch, share, chance, rng) > first  # while it finds out what steps cost
    assert min(speed(length, acceptance, batch, share, chance, rng, 200) for _ in range(6)) > later


# ---- the drafter


def test_a_drafter_counts_the_time_of_its_proposer(monkeypatch):
    """A clock that a proposer turns: 50 ms a call, with steps of 10 ms."""
    now = 0.0

    class Slow:
        calls = 0

        def propose(self, requests, view):
            nonlocal now
            now, self.calls = now + 0.05, self.calls + 1
            return [[1, 2] for _ in requests]

    monkeypatch.setattr("minivllm.spec_decode.drafter.time", SimpleNamespace(perf_counter=lambda: now))
    slow = Slow()
    drafter = make_drafter(SpeculativeConfig.from_dict({"method": slow, "num_speculative_tokens": 4}), 10)
    request = DraftRequest("a", np.array([1, 2], np.int32), 1, 4, None)
    for _ in range(100):
        drafter.observe(1, {"a": 0}, {"a": 0}, 0.01)
        drafter.propose([request], 1)
    assert 1 < slow.calls < 10
