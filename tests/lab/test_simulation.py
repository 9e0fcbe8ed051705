"""Simulation: closed forms, queueing theory, and the same classes as the live engine."""

import numpy as np
import pytest

from minivllm.core.config import EngineArgs, KVCacheConfig, KVCacheSpec, make_kv_cache_groups
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.policy import FCFS, Policy, PolicyError, Priority, ShortestFirst
from minivllm.core.scheduler import Recompute, Scheduler, Swap
from minivllm.lab import simulate
from minivllm.lab.cost import Constant, CostModel, Roofline
from minivllm.lab.executor import FakeExecutor
from minivllm.lab.meter import LogHistogram, Meter
from minivllm.lab.simulation import Session, make_settings
from minivllm.lab.workload import Workload, WorkloadRequest, chat, closed_loop, poisson, shared_prefix, text

SMALL = {"num_gpu_blocks": 32, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def asking(i, arrival=0.0, prompt=10, output=4, **fields):
    return WorkloadRequest(str(i), arrival, (text(2 * i, prompt),), text(2 * i + 1, output), **fields)


def test_one_request_in_closed_form():
    run = simulate(
        [asking(0, 5.0, 100, 7)], config={"max_num_seqs": 4, "max_num_batched_tokens": 30}, cost_model=Constant(0.02)
    )
    row = run.requests.iloc[0]
    assert row.queue_time == 0.0 and row.arrival == 5.0
    assert row.ttft == pytest.approx(4 * 0.02)  # 30 + 30 + 30 + 10 tokens
    assert row.tpot == pytest.approx(0.02) and row.e2e == pytest.approx(10 * 0.02)
    assert row.finish_reason == "length" and row.num_output_tokens == 7
    assert run.meter.num_steps == 10 and run.meter.num_tokens == 106


def test_a_queue_with_one_server_waits_as_queueing_theory_says():
    """One request at a time, each takes one step: an M/D/1 queue, with a mean wait of rho * s / (2 (1 - rho))."""
    seconds, rho = 0.1, 0.7
    run = simulate(
        poisson(rho / seconds, 12_000, 8, 1, seed=1),
        config={"max_num_seqs": 1, "max_num_batched_tokens": 64, "num_gpu_blocks": 16},
        cost_model=Constant(seconds),
        record=False,
    )
    assert run.requests.queue_time.mean() == pytest.approx(rho * seconds / (2 * (1 - rho)), rel=0.05)


def test_littles_law():
    run = simulate(poisson(20, 600, (5, 60), (2, 40), seed=2), config=SMALL, cost_model=Constant(0.01))
    frame = run.requests
    moments = np.linspace(frame.arrival.min(), frame.finished.max(), 20_001)
    present = np.mean(
        (frame.arrival.to_numpy()[None] <= moments[:, None]) & (frame.finished.to_numpy()[None] > moments[:, None]),
        axis=0,
    ).sum()
    span = frame.finished.max() - frame.arrival.min()
    assert present == pytest.approx(len(frame) / span * frame.e2e.mean(), rel=0.01)


@pytest.mark.parametrize("preemption", [Recompute(), Swap(30)])
@pytest.mark.parametrize("policy", [FCFS, ShortestFirst, Priority])
def test_traces_are_sound_and_the_same_each_time(policy, preemption):
    workload = shared_prefix(60, 80, 3, 40, (4, 80), (2, 60), seed=3)
    a, b = (
        simulate(workload, config=SMALL, policy=policy(), preemption=preemption, cost_model=Roofline("h100", "smollm2"))
        for _ in range(2)
    )
    assert a.trace == b.trace
    assert a.meter.num_preemptions > 0
    a.trace.check()
    assert set(a.requests.finish_reason) == {"length"}
    assert a.requests.num_output_tokens.tolist() == [r.num_output_tokens for r in workload]


def test_unrecorded_run_measures_the_same():
    workload = chat(5, 30, 3, 0.5, 20, (4, 40), (2, 30), seed=2)
    a = simulate(workload, config=SMALL, cost_model=Constant(0.01))
    b = simulate(workload, config=SMALL, cost_model=Constant(0.01), record=False)
    assert b.trace is None and a.requests.equals(b.requests)
    assert (a.meter.gaps.counts, a.meter.num_steps, a.seconds) == (b.meter.gaps.counts, b.meter.num_steps, b.seconds)
    assert repr(a) == repr(b)


def test_meter_agrees_with_the_traces_own_table():
    run = simulate(poisson(40, 60, (4, 120), (1, 60), num_users=3, seed=5), config=SMALL, cost_model=Constant(0.01))
    mine, theirs = run.requests, run.trace.to_pandas()["requests"]
    assert run.meter.num_preemptions and list(mine.columns) == list(theirs.columns)
    for column in mine.columns:
        a, b = mine[column], theirs[column]
        assert np.allclose(a, b, equal_nan=True) if a.dtype.kind == "f" else a.tolist() == b.tolist(), column


def test_gaps_between_tokens_are_those_of_the_trace():
    run = simulate(poisson(40, 60, (4, 120), (1, 60), seed=5), config=SMALL, cost_model=Roofline("h100", "smollm2"))
    tokens = run.trace.to_pandas()["tokens"]
    gaps = tokens.groupby("request_id").time.diff().dropna()
    assert run.meter.gaps.total == len(gaps) and run.meter.gaps.mean == pytest.approx(gaps.mean())
    for q in (0.1, 0.5, 0.9, 0.99):
        assert run.meter.gaps.quantile(q) == pytest.approx(gaps.quantile(q, interpolation="lower"), rel=0.011)


def test_histogram_of_nothing_and_of_zeros():
    histogram = LogHistogram()
    assert np.isnan(histogram.mean) and np.isnan(histogram.quantile(0.5))
    histogram.add(0.0, 3)
    assert histogram.quantile(0.5) == 0.0


def test_meter_of_a_recording_that_began_in_the_middle():
    made, fake = make_settings(SMALL), FakeExecutor()
    scheduler = Scheduler(made.scheduler, made.cache)
    scheduler.add_request(asking(0, output=5).to_request())
    scheduler.update_from_output(output := scheduler.schedule(), fake.execute_model(output))
    trace = scheduler.record()
    while scheduler.requests:
        scheduler.update_from_output(output := scheduler.schedule(), fake.execute_model(output))
    row = Meter.of(trace).to_pandas().iloc[0]
    assert np.isnan(row.arrival) and np.isnan(row.queue_time) and np.isnan(row.max_tokens)
    assert row.num_output_tokens == 5 and row.finish_reason == "length"


def test_time_jumps_over_pauses():
    run = simulate([asking(0, 0.0), asking(1, 1e6)], config=SMALL, cost_model=Constant(0.01))
    assert run.meter.num_steps == 8 and run.requests.queue_time.tolist() == [0.0, 0.0]


def test_arrivals_are_seen_between_steps():
    run = simulate([asking(0, 0.0), asking(1, 0.015)], config=SMALL, cost_model=Constant(0.01))
    assert run.requests.scheduled[1] == pytest.approx(0.02)


def test_requests_that_never_fit_are_noted_and_their_follow_ups_do_not_come():
    big = asking(1, 0.5, prompt=5000, follow_up=lambda t: asking(2, t))
    run = simulate([asking(0), big, asking(3, 1.0)], config=SMALL, cost_model=Constant(0.01))
    assert [name for name, _ in run.refused] == ["1"] and "too long" in run.refused[0][1]
    assert run.requests.request_id.tolist() == ["0", "3"] and "1 refused" in repr(run)


def test_policies_that_look_at_the_clock_are_waited_for():
    class Later(Policy):
        def chunk(self, request, budget_left, view):
            return budget_left if view.now >= 1.0 else 0

    run = simulate([asking(0, 0.0), asking(1, 2.0)], config=SMALL, policy=Later(), cost_model=Constant(0.01))
    assert run.requests.finish_reason.tolist() == ["length"] * 2 and run.requests.scheduled[0] >= 1.0


def test_a_policy_that_starves_everybody_is_reported():
    class Nobody(Policy):
        def chunk(self, request, budget_left, view):
            return 0

    with pytest.raises(PolicyError, match="Nobody has given no tokens to anyone"):
        simulate([asking(0)], config={**SMALL, "starvation_limit": 20}, policy=Nobody(), cost_model=Constant(0.01))


def test_a_failing_policy_is_named_and_loses_nothing():
    class Forgets(Policy):
        def order(self, waiting, view):
            return waiting[1:]

    session = Session(make_settings(SMALL), Forgets(), Constant(0.01))
    session.expect([asking(i) for i in range(3)])
    with pytest.raises(PolicyError, match=r"Forgets\.order dropped 1 of 3"):
        session.run()
    session.scheduler.set_policy(FCFS())
    session.run()
    assert (
        session.scheduler.kv_cache_manager.block_pool.num_free
        == session.scheduler.kv_cache_manager.block_pool.num_blocks
        and not session.scheduler.requests
    )


def test_an_executor_of_ones_own_answers_and_is_timed():
    class Echo:
        def __init__(self):
            self.fake, self.params = FakeExecutor(), set()

        def execute_model(self, output):
            self.params.update(new.sampling_params for new in output.new_requests)
            return ModelRunnerOutput({name: [42] for name in self.fake.execute_model(output).sampled_token_ids})

    echo = Echo()
    run = simulate([asking(0), asking(1)], config=SMALL, executor=echo, sampling_params="greedy")
    said = [t for event in run.trace.events if event[0] == "update" for t in event[2].values()]
    assert said == [(42,)] * 8 and echo.params == {"greedy"} and 0 < run.seconds < 5 and run.cost_model is None
    timed = simulate([asking(0)], config=SMALL, executor=Echo(), cost_model=Constant(0.5))
    assert timed.seconds == pytest.approx(2.0)


def test_windows_and_groups():
    specs = [KVCacheSpec("full", 16, 1, 8), *(KVCacheSpec("sliding_window", 16, 1, 8, window=32) for _ in range(3))]
    groups = KVCacheConfig(64, 16, make_kv_cache_groups(specs))
    run = simulate(poisson(40, 40, (4, 120), (1, 60), seed=5), config=SMALL, kv_cache=groups, cost_model=Constant(0.01))
    run.trace.check()
    assert run.trace.header.num_groups == 4 and any(event[0] == "skip" for event in run.trace.events)
    again = simulate(run)
    assert again.requests.num_output_tokens.tolist() == run.requests.num_output_tokens.tolist()
    assert simulate(run.trace, cost_model=Constant(0.01)).trace.header == run.trace.header
    other = simulate(run, config={"block_size": 8})
    assert other.settings.kv_cache.groups[1].spec == KVCacheSpec("sliding_window", 8, 1, 8, window=32)
    with pytest.raises(ValueError, match="block_size=8, but a KV cache group has blocks of 16"):
        simulate(poisson(1, 1), config={"block_size": 8}, kv_cache=groups)


def test_a_trace_simulated_under_its_own_conditions_is_itself():
    source = poisson(40, 50, (4, 120), (1, 40), seed=7).allowing(40)
    first = next(iter(source)).arrival_time
    workload = Workload.of([r for r in source.map(lambda r: r)], "shifted")
    run = simulate(workload.faster(1), config=SMALL, policy=ShortestFirst(), cost_model=Constant(0.0625))
    again = simulate(run.trace, cost_model=Constant(0.0625))
    assert again.policy == "ShortestFirst" and first > 0
    a, b = run.requests, again.requests
    for column in ("num_cached_tokens", "num_preemptions", "num_output_tokens", "finish_reason"):
        assert a[column].tolist() == b[column].tolist()
    assert np.allclose(a.ttft, b.ttft) and np.allclose(a.e2e, b.e2e)


def test_costs_default_to_a_fit_for_traces():
    run = simulate(poisson(40, 50, (4, 120), (1, 40), seed=7), config=SMALL, cost_model=Constant(0.01))
    assert "FittedCost" in repr(simulate(run.trace).cost_model)
    assert simulate(run).cost_model is run.cost_model
    assert isinstance(simulate([asking(0)]).cost_model, Roofline)


def test_settings_come_from_everywhere():
    assert make_settings(None).scheduler.max_num_seqs == 256
    assert make_settings({"block_size": 8}, cost_model=Roofline()).cache.num_gpu_blocks == Roofline().num_gpu_blocks(8)
    assert (
        make_settings(
            {"max_num_seqs": 4}, {"max_num_seqs": 9, "max_num_batched_tokens": 77}
        ).scheduler.max_num_batched_tokens
        == 77
    )
    with pytest.raises(TypeError, match="unknown setting 'blocksize'; did you mean 'block_size'"):
        make_settings({"blocksize": 8})
    with pytest.raises(TypeError, match=r"EngineConfig .* or a dict of settings, got EngineArgs"):
        make_settings(EngineArgs())
    with pytest.raises(TypeError, match=r"cost_model must be a CostModel, such as Constant\(0.01\), got 0.01"):
        make_settings(None, cost_model=0.01)


def test_bad_arguments():
    with pytest.raises(ValueError, match='executor must be "fake" or an object'):
        simulate([asking(0)], executor="real")
    with pytest.raises(ValueError, match=r"'1' arrives at 0\.0 s, before the one in front of it \(1\.0 s\)"):
        simulate(Workload("bad", lambda _: [asking(0, 1.0), asking(1, 0.0)]), cost_model=Constant(0.01))
    unrecorded = simulate([asking(0)], cost_model=Constant(0.01), record=False)
    with pytest.raises(ValueError, match="was not recorded"):
        simulate(unrecorded)

    class Mine(FCFS):
        pass

    run = simulate([asking(0)], cost_model=Constant(0.01), policy=Mine())
    with pytest.raises(ValueError, match="recorded under 'Mine', which does not ship"):
        simulate(run)


def test_negative_costs_are_refused():
    class Backwards(CostModel):
        def seconds(self, output, work):
            return -1.0

    with pytest.raises(ValueError, match="can only go forward"):
        simulate([asking(0)], cost_model=Backwards())


def test_an_engine_config_is_taken_as_it_is():
    from minivllm.core.config import Decision, MachineFacts, ModelFacts, resolve

    specs = tuple(KVCacheSpec("full", 16, 1, 8) for _ in range(2))
    facts = ModelFacts("toy", "/toy", 100, 2, 512, specs, 1000)
    machine = MachineFacts("cpu", 10**9, 10**9, False, "reference", "asked for")
    config = resolve(
        EngineArgs(num_gpu_blocks=40, max_num_seqs=3), facts, machine, Decision("dtype", "float32", "asked for")
    )
    run = simulate([asking(i) for i in range(9)], config=config, cost_model=Constant(0.01))
    assert run.settings.kv_cache == config.kv_cache and run.trace.header.num_blocks == 40
    assert max(sum(e[0] == "schedule" and len(e[1]) for e in [event]) for event in run.trace.events) == 3


def test_closed_loop_load_grows_with_users_and_stays_bounded():
    seconds = [
        simulate(closed_loop(n, 10, 0.0, 16, 8), config=SMALL, cost_model=Constant(0.01)).seconds for n in (1, 8, 16)
    ]
    assert seconds[0] == pytest.approx(10 * 8 * 0.01)
    assert seconds[1] == pytest.approx(seconds[0], rel=0.15) and seconds[2] > 1.8 * seconds[1]
