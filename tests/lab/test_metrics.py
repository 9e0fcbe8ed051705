"""Metrics against plain calculations."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scheduling import Driver, kv_config

from minivllm.core.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.trace import Trace
from minivllm.lab import simulate
from minivllm.lab.cost import Constant, Roofline
from minivllm.lab.metrics import compare, fragmentation, goodput, latency, occupancy, requests, summary, throughput
from minivllm.lab.workload import poisson, shared_prefix

SMALL = {"num_gpu_blocks": 40, "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def run():
    workload = shared_prefix(60, 80, 3, 24, (3, 60), (1, 40), seed=6).allowing(60)
    return simulate(workload, config=SMALL, cost_model=Roofline("h100", "smollm2"))


def test_latencies_are_plain_percentiles(run):
    table = latency(run, (0.5, 0.9)).set_index(["metric", "statistic"]).seconds
    frame = run.requests
    for metric in ("queue_time", "ttft", "tpot", "e2e"):
        values = frame[metric].dropna().to_numpy()
        assert table[metric, "mean"] == pytest.approx(values.mean())
        assert table[metric, "p90"] == pytest.approx(np.quantile(values, 0.9))
    gaps = run.trace.to_pandas()["tokens"].groupby("request_id").time.diff().dropna()
    assert table["itl", "p50"] == pytest.approx(gaps.quantile(0.5, interpolation="lower"), rel=0.011)
    with pytest.raises(ValueError, match="quantiles must be from 0 to 1, got 50"):
        latency(run, (50,))


def test_throughput_counts_what_was_done(run):
    table = throughput(run).set_index("metric").value
    frame = run.requests
    seconds = frame.finished.max() - frame.arrival.min()
    assert table["seconds"] == pytest.approx(seconds)
    assert table["requests_per_s"] == pytest.approx(80 / seconds)
    assert table["output_tokens_per_s"] == pytest.approx(frame.num_output_tokens.sum() / seconds)
    assert table["computed_tokens_per_s"] * seconds == pytest.approx(run.trace.to_pandas()["steps"].num_tokens.sum())
    assert (
        table["cached_share"] == pytest.approx(frame.num_cached_tokens.sum() / frame.num_prompt_tokens.sum())
        and table["cached_share"] > 0
    )
    assert table["preemptions"] == frame.num_preemptions.sum() > 0


def test_goodput_keeps_promises(run):
    frame = run.requests
    ttft, tpot, e2e = (frame[name].median() for name in ("ttft", "tpot", "e2e"))
    table = goodput(run, ttft=ttft, tpot=tpot, e2e=e2e).set_index("promise")
    kept = {
        f"ttft <= {ttft:g} s": [r.ttft <= ttft for r in frame.itertuples()],
        f"tpot <= {tpot:g} s": [math.isnan(r.tpot) or r.tpot <= tpot for r in frame.itertuples()],
        f"e2e <= {e2e:g} s": [r.e2e <= e2e for r in frame.itertuples()],
    }
    kept["all"] = [all(each) for each in zip(*kept.values(), strict=True)]
    seconds = frame.finished.max() - frame.arrival.min()
    assert set(table.index) == set(kept) and 0 < table.share["all"] < 1
    for name, each in kept.items():
        assert table.share[name] == pytest.approx(np.mean(each))
        assert table.requests_per_s[name] == pytest.approx(sum(each) / seconds)
    assert goodput(run, e2e=1e9).share.tolist() == [1.0]
    with pytest.raises(ValueError, match="at least one promise"):
        goodput(run)


def test_unfinished_requests_keep_no_promise(run):
    half = Trace(run.trace.header, run.trace.start)
    half.events.extend(run.trace.events[: len(run.trace.events) // 2])
    frame = requests(half)
    assert frame.finish_reason.isna().any()
    assert goodput(half, tpot=1e9).share[0] == pytest.approx(frame.finish_reason.notna().mean())


def test_fragmentation_is_what_the_states_say(run):
    table = fragmentation(run, max_model_len=128)
    final = {
        name: n + m
        for name, n, m in run.requests[["request_id", "num_prompt_tokens", "num_output_tokens"]].itertuples(index=False)
    }
    by_step = {step: rows.set_index("scheme") for step, rows in table.groupby("step")}
    checked = 0
    for step, state in run.trace.states():
        running = {name: state.requests[name] for name in state.running}
        if not running:
            assert step not in by_step
            continue
        rows = by_step[step]
        stored = sum(r.num_computed_tokens for r in running.values())
        reserved = {
            "paged": 8 * sum(len(r.tables[0]) for r in running.values()),
            "oracle": sum(final[name] for name in running),
            "power_of_two": sum(2 ** math.ceil(math.log2(r.num_computed_tokens)) for r in running.values()),
            "max_len": 128 * len(running),
        }
        assert rows.reserved_tokens.to_dict() == reserved and set(rows.stored_tokens) == {stored}
        assert rows.waste["paged"] == pytest.approx(1 - stored / reserved["paged"])
        assert reserved["paged"] - stored <= 8 * len(running)
        checked += 1
    assert checked > 100
    assert set(fragmentation(run.trace).query("scheme == 'max_len'").reserved_tokens % 131_072) == {0}


@pytest.mark.parametrize("kind", ["window", "hybrid", "all"])
def test_occupancy_counts_every_group_and_what_windows_have_left(kind):
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128)
    cache = CacheConfig(block_size=4, num_gpu_blocks=60, num_cpu_blocks=40)
    driver = Driver(Scheduler(config, cache, kv_config(kind, 4, 60)))
    for i in range(12):
        prompt = [j % 3 for j in range(5 + 3 * i)]
        driver.scheduler.add_request(Request(f"r{i}", prompt, max_tokens=30))
    driver.drain()
    assert {event[0] for event in driver.trace.events} >= {"skip", "hit"}
    states, groups, waste = dict(driver.trace.states()), driver.trace.header.num_groups, 0
    for at in occupancy(driver.trace):
        running = [r for r in states[at.step].requests.values() if r.status == "RUNNING"]
        held = sum(block > 0 for r in running for table in r.tables for block in table)
        unseen = sum(block == 0 for r in running for table in r.tables for block in table)
        assert at.reserved["paged"] == 4 * held
        assert at.stored == groups * sum(r.num_computed_tokens for r in running) - 4 * unseen
        assert sorted(at.empty) == sorted(-r.num_computed_tokens % 4 for r in running)
        assert at.reserved["paged"] - at.stored == groups * sum(at.empty)
        assert at.reserved["max_len"] == groups * 128 * len(running)
        waste += at.reserved["paged"] - at.stored
    assert waste > 0


def test_occupancy_needs_a_limit(run):
    bare = Trace(replace(run.trace.header, settings={}), run.trace.start)
    with pytest.raises(ValueError, match="how long a request may be; give max_model_len="):
        next(occupancy(bare))


def test_tables_are_tidy(run):
    whole = summary(run)
    assert (
        list(whole.columns) == ["metric", "statistic", "value"] and not whole.duplicated(["metric", "statistic"]).any()
    )
    other = simulate(poisson(9, 20, 20, 5), config=SMALL, cost_model=Constant(0.01), record=False)
    both = compare({"a": run, "b": other})
    assert list(both.columns) == ["run", "metric", "statistic", "value"] and len(both) == 2 * len(whole)
    assert requests(other).equals(other.requests)


def test_what_is_not_a_run_is_refused(run):
    with pytest.raises(TypeError, match="a Run, a Trace or a Meter was expected, got str"):
        latency("run")
    with pytest.raises(ValueError, match="compare needs at least one run"):
        compare({})
    other = simulate(poisson(9, 20, 20, 5), config=SMALL, cost_model=Constant(0.01), record=False)
    with pytest.raises(ValueError, match="was not recorded"):
        fragmentation(other)
