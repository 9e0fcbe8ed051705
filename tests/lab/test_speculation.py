"""Drafts in simulations: as often right as the cost model says, the same answers, and gains that closed forms give."""

import pytest

from minivllm.lab import Constant, Roofline, Workload, WorkloadRequest, simulate, speculation_pays
from minivllm.lab.cost import Speculative

K = 4


def load(count: int, answer: int = 300) -> Workload:
    return Workload.of([WorkloadRequest(str(i), 0.0, ([i] * 20,), [7] * answer) for i in range(count)])


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_steps_give_as_many_tokens_as_the_chance_says(acceptance):
    run = simulate(load(3), cost_model=Speculative(Constant(0.01), acceptance, K))
    run.trace.check()
    table = run.trace.to_pandas()["spec_decode"]
    drafts = table.groupby(["request_id", "step"]).outcome.apply(lambda o: (o == "accepted").sum())
    expected = sum(acceptance**i for i in range(1, K + 1))
    assert drafts.mean() == pytest.approx(expected, abs=0.25)
    tokens = run.trace.to_pandas()["tokens"]
    assert tokens.groupby("request_id").token_id.apply(list).tolist() == [[7] * 300] * 3


def test_a_constant_step_is_as_many_times_as_fast_as_tokens_come():
    table = speculation_pays(load(2), Constant(0.01), lengths=(2, K), acceptance=(0.5, 0.8))
    assert table.speedup[0] == 1 and len(table) == 5
    for row in table[1:].itertuples():
        expected = sum(row.acceptance**i for i in range(row.num_speculative_tokens + 1))
        assert row.speedup == pytest.approx(expected, rel=0.12)


def test_the_proposers_time_counts():
    slow = speculation_pays(load(1), Constant(0.01), lengths=(K,), acceptance=(0.0,), draft_seconds=0.01)
    assert slow.speedup[1] == pytest.approx(1 / (1 + K), rel=0.05)


def crossover(model, batches, **options):
    """Batches of requests that come at once: how many times as fast with drafts."""
    loads = {n: Workload.of([WorkloadRequest(str(i), 0.0, ([i] * 20,), [7] * 60) for i in range(n)]) for n in batches}
    return {n: speculation_pays(load, model, lengths=(K,), **options).speedup[1] for n, load in loads.items()}


@pytest.mark.parametrize("batch", [1, 128])
def test_with_dynamic_length_drafts_never_cost_much(batch):
    model = Roofline("h100", "smollm2")
    always = crossover(model, [batch], acceptance=(0.2,))[batch]
    dynamic = crossover(model, [batch], acceptance=(0.2,), dynamic_length=True)[batch]
    assert dynamic > 0.97 and dynamic > always - 0.02


def test_the_crossover_falls_with_the_batch():
    gains = crossover(Roofline("cpu-2-core", "smollm2"), [1, 8, 32])
    assert gains[1] > 1.5 > gains[32] and gains[1] > gains[8] > gains[32]


@pytest.mark.parametrize("wrong", [{"acceptance": 1.5}, {"acceptance": 0.5, "draft_seconds": -1.0}, {"acceptance": 0.5, "num_speculative_tokens": -1}])  # fmt: skip
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Speculative(Constant(0.01), **wrong)
