"""Diff: finds the first parting, and says why on both sides."""

import pytest

from minivllm.core.policy import FCFS, Policy, ShortestFirst
from minivllm.lab import diff, simulate
from minivllm.lab.comparison import decisions, first_difference, standing
from minivllm.lab.cost import Constant
from minivllm.lab.workload import WorkloadRequest, poisson, text

COST = Constant(0.01)


def asking(name, arrival, prompt, output):
    i = ord(name[0])
    return WorkloadRequest(name, arrival, (text(2 * i, prompt),), text(2 * i + 1, output))


QUEUE = [asking("a", 0.0, 40, 10), asking("b", 0.001, 60, 10), asking("c", 0.002, 10, 5)]
ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "num_gpu_blocks": 64}


def test_equal_runs_do_not_differ():
    a, b = (simulate(poisson(30, 40, (1, 60), (1, 20), seed=2), config=ONE, cost_model=COST) for _ in range(2))
    d = diff(a, b)
    assert d.first_difference is None and "all decisions are the same" in repr(d)
    assert (d.requests.filter(like="_delta").fillna(0) == 0).all().all() and len(d.requests) == 40


def test_the_parting_and_its_reasons():
    a, b = (simulate(QUEUE, config=ONE, policy=policy, cost_model=COST) for policy in (FCFS(), ShortestFirst()))
    d = diff(a, b)
    first = d.first_difference
    assert first.step == 10 and first.a.admitted == ("b",) and first.b.admitted == ("c",)
    assert set(first.reasons) == {"b", "c"}
    assert first.reasons["b"] == (
        "got 60 tokens",
        "waited: as many requests were running as max_num_seqs allows (since step 10)",
    )
    assert first.reasons["c"][1] == "got 10 tokens"
    assert first.reasons["c"][0] == "waited: as many requests were running as max_num_seqs allows (since step 10)"
    assert standing(a.trace, "c", 5) == "waited behind 'b' (as many requests were running as max_num_seqs allows)"
    frame = d.requests.set_index("request_id")
    assert frame.queue_time_delta["a"] == 0
    assert frame.ttft_delta["b"] == pytest.approx(0.05) and frame.ttft_delta["c"] == pytest.approx(-0.10)
    assert frame.tpot_delta.abs().max() < 1e-9 and frame.finished_delta["c"] == pytest.approx(-0.10)
    assert str(first) in repr(d) and "step 10 (at 0.100 s in a, 0.100 s in b)" in str(first)


def test_reasons_of_a_policy_that_orders():
    class Last(Policy):
        def order(self, waiting, view):
            return list(waiting)[::-1]

    a, b = (simulate(QUEUE, config=ONE, policy=policy, cost_model=COST) for policy in (None, Last()))
    reasons = diff(a, b).first_difference.reasons
    assert reasons["b"][1] == "waited: Last put 1 before it, first 'c'"


def test_cut_preempted_and_ended_are_told():
    many = [asking(name, 0.0, 30, 40) for name in "abcd"]
    run = simulate(
        many,
        config={"block_size": 4, "num_gpu_blocks": 50, "max_num_seqs": 4, "max_num_batched_tokens": 50},
        cost_model=COST,
    )
    assert (
        standing(run.trace, "b", 0)
        == "got 20 tokens of the 30 that it wanted: the token budget of the step was used up"
    )
    step = next(d.step for d in decisions(run.trace) if d.preempted)
    victim = next(d for d in decisions(run.trace) if d.preempted).preempted[0]
    assert f"was preempted in step {step} (recompute)" in standing(run.trace, victim, step)
    assert "needed blocks; chosen by FCFS" in standing(run.trace, victim, step)
    last = run.trace.num_steps - 1
    assert standing(run.trace, "a", last).startswith("had ended in step") and "(length)" in standing(
        run.trace, "a", last
    )
    assert standing(run.trace, "nobody", 0) == "had not arrived"


def test_one_run_is_longer():
    a, b = (simulate(QUEUE[:n], config=ONE, cost_model=COST) for n in (1, 2))
    d = diff(a, b)
    assert d.only_b == ("b",) and d.only_a == () and "0 only in a, 1 only in b" in repr(d)
    assert d.first_difference.step == 10 and d.first_difference.a is None
    assert d.first_difference.reasons["b"][0] == "had not arrived"


def test_requests_matched_by_order():
    renamed = [WorkloadRequest(f"z{r.request_id}", r.arrival_time, r.prompt, r.output) for r in QUEUE]
    a, b = simulate(QUEUE, config=ONE, cost_model=COST), simulate(renamed, config=ONE, cost_model=COST)
    with pytest.raises(ValueError, match='no request id in common.*match="order"'):
        diff(a, b)
    assert diff(a, b, match="order").first_difference is None
    c = simulate(renamed, config=ONE, policy=ShortestFirst(), cost_model=COST)
    assert (
        diff(a, c, match="order").first_difference.reasons
        == diff(a, simulate(QUEUE, config=ONE, policy=ShortestFirst(), cost_model=COST)).first_difference.reasons
    )
    with pytest.raises(ValueError, match="equally many requests, got 3 and 2"):
        diff(a, simulate(renamed[:2], config=ONE, cost_model=COST), match="order")
    with pytest.raises(ValueError, match='match must be "id" or "order", got "name"'.replace('"name"', "'name'")):
        diff(a, b, match="name")


def test_summary_counts():
    a, b = (simulate(QUEUE, config=ONE, policy=policy, cost_model=COST) for policy in (FCFS(), ShortestFirst()))
    row = diff(a, b).summary().set_index("measurement").loc["ttft"]
    assert (row.smaller, row.equal, row.larger) == (1, 1, 1)
    assert row.mean_a == pytest.approx(a.requests.ttft.mean()) and row.median_b == pytest.approx(
        b.requests.ttft.median()
    )


def test_runs_without_traces_compare_by_request_only():
    a = simulate(QUEUE, config=ONE, cost_model=COST)
    b = simulate(QUEUE, config=ONE, cost_model=COST, policy=ShortestFirst(), record=False)
    d = diff(a, b)
    assert d.first_difference is None and "steps not compared" in repr(d) and d.requests.ttft_delta.abs().max() > 0
    with pytest.raises(TypeError, match="a Run or a Trace was expected, got int"):
        diff(a, 3)


def test_only_the_order_differs():
    a = simulate([asking("a", 0.0, 10, 5), asking("b", 0.0, 9, 5)], config={**ONE, "max_num_seqs": 2}, cost_model=COST)
    b = simulate(
        [asking("a", 0.0, 10, 5), asking("b", 0.0, 9, 5)],
        config={**ONE, "max_num_seqs": 2},
        policy=ShortestFirst(),
        cost_model=COST,
    )
    first = first_difference(a.trace, b.trace)
    assert first.step == 0 and first.reasons == {} and "in another order" in str(first)
