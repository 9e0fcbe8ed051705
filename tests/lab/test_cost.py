"""Cost models: the work of a step counted by hand, fits that find the truth, rooflines that agree with profiles."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from minivllm.lab import CostModel, simulate
from minivllm.lab.cost import (
    DEVICES,
    MODELS,
    Constant,
    Device,
    ModelShape,
    Roofline,
    StepWork,
    _nonnegative_least_squares,
    features,
    timed_steps,
)
from minivllm.lab.simulation import Session, make_settings
from minivllm.lab.workload import WorkloadRequest, lognormal, poisson


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=8))
def test_work_counts_query_key_pairs(rows):
    work = StepWork()
    for computed, n in rows:
        work.add(computed, n)
    pairs = sum(q + 1 for computed, n in rows for q in range(computed, computed + n))
    assert work.decode_context + work.prefill_pairs == pairs
    assert work.num_tokens == sum(n for _, n in rows) and work.num_requests == len(rows)
    assert work.decode_context + work.prefill_context == sum(computed + n for computed, n in rows)


class Noted(Constant):
    """Writes down the work that it is asked about."""

    def seconds(self, output, work):
        vars(self).setdefault("works", []).append(work)
        return super().seconds(output, work)


def test_work_read_off_a_trace_is_the_work_that_was_done():
    cost = Noted(0.01)
    workload = poisson(40, 60, (1, 200), (1, 30), seed=3)
    config = {"num_gpu_blocks": 40, "num_cpu_blocks": 30, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    run = simulate(workload, config=config, cost_model=cost)
    assert run.meter.num_preemptions
    timed = list(timed_steps(run.trace))
    works = vars(cost)["works"]
    assert len(timed) == len(works) > 100
    for (read, _, _), done in zip(timed, works, strict=True):
        assert (read.num_tokens, read.num_requests, read.num_sampled) == (
            done.num_tokens,
            done.num_requests,
            done.num_sampled,
        )
        assert (read.decode_context, read.prefill_context, read.prefill_pairs) == (
            done.decode_context, done.prefill_context, done.prefill_pairs,
        )  # fmt: skip
    assert sum(read.swapped_tokens for read, _, _ in timed) == sum(done.swapped_tokens for done in works) > 0


def test_idle_time_is_not_the_models():
    run = simulate(poisson(2, 30, 20, 3, seed=1), cost_model=Constant(0.01))
    timed = list(timed_steps(run.trace))
    assert {round(own, 9) for _, own, _ in timed} == {0.01}
    assert {round(total, 9) for _, _, total in timed if total is not None} == {0.01}
    assert sum(total is None for _, _, total in timed) > 20


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_equals_scipy(seed):
    generator = np.random.default_rng(seed)
    a, b = generator.random((60, 8)) * 10.0 ** generator.integers(-6, 6, 8), generator.normal(size=60)
    mine, (theirs, _) = _nonnegative_least_squares(a, b), nnls(a, b)
    assert (mine >= 0).all()
    assert np.linalg.norm(a @ mine - b) == pytest.approx(np.linalg.norm(a @ theirs - b), rel=1e-6)


class Known(CostModel):
    """A machine whose times are exactly of the fitted kind."""

    WEIGHTS = (4e-3, 1e-3, 5e-3, 2e-2, 3e-2, 0.0, 0.0, 1e-4, 2e-7, 1e-8, 0.0)
    KNOTS = (1, 8, 32, 128, 512, 2048)

    def seconds(self, output, work):
        return sum(w * f for w, f in zip(self.WEIGHTS, features(work, self.KNOTS), strict=True))


def some_run(cost, seed=0, **config):
    workload = poisson(30, 150, lognormal(150, 1.2, 1500), (1, 80), seed=seed)
    return simulate(
        workload,
        config={"num_gpu_blocks": 4000, "max_num_batched_tokens": 512, "max_num_seqs": 64, **config},
        cost_model=cost,
    )


def test_fit_finds_the_machine_and_predicts_other_runs():
    fitted = CostModel.fit(some_run(Known()).trace)
    assert fitted.error["median"] < 0.01 and abs(fitted.error["total"]) < 0.01
    other = some_run(Known(), seed=1, max_num_batched_tokens=256)
    guess = some_run(fitted, seed=1, max_num_batched_tokens=256)
    assert guess.seconds == pytest.approx(other.seconds, rel=0.02)
    assert guess.requests.ttft.median() == pytest.approx(other.requests.ttft.median(), rel=0.05)
    assert guess.requests.tpot.median() == pytest.approx(other.requests.tpot.median(), rel=0.02)


def test_fit_reports_its_error_honestly():
    generator = np.random.default_rng(0)

    class Unsteady(Known):
        def seconds(self, output, work):
            return super().seconds(output, work) * float(generator.lognormal(0, 0.3))

    fitted = CostModel.fit(some_run(Unsteady()).trace)
    assert 0.1 < fitted.error["median"] < 0.4 < fitted.error["p90"]
    assert "steps; error on unseen steps: median" in repr(fitted)


def test_a_machine_that_is_sometimes_slow_is_so_in_sum():
    """Others take a third of the time here and there, and once two seconds: the first is the machine's, the second is not."""
    generator = np.random.default_rng(0)

    class Shared(Known):
        steps = slowed = 0

        def seconds(self, output, work):
            self.steps += 1
            time = super().seconds(output, work) * (1 + float(generator.exponential(0.5)))
            self.slowed += time
            return time + 2.0 * (self.steps == 50)

    machine = Shared()
    fitted = CostModel.fit(some_run(machine).trace)
    predicted = sum(fitted.seconds(None, work) for work, *_ in timed_steps(some_run(machine, seed=0).trace))
    assert predicted == pytest.approx(machine.slowed / 2, rel=0.06)


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 200), st.integers(0, 10**6))
def test_more_work_never_costs_less(tokens, more, sampled, context):
    small, large = StepWork(tokens, 1, sampled, context), StepWork(tokens + more, 1, sampled + 1, context + more)
    for model in (Known(), Roofline("h100", "smollm2"), Constant(0.0, 1e-4)):
        assert model.seconds(None, small) <= model.seconds(None, large) + 1e-15


def test_fit_needs_steps_that_took_time():
    short = simulate(poisson(10, 2, 5, 3), cost_model=Constant(0.01))
    with pytest.raises(ValueError, match="steps were timed.* at least 20"):
        CostModel.fit(short.trace)
    with pytest.raises(ValueError, match=r"knots must be growing numbers of tokens, at least 1, got \[5, 2\]"):
        CostModel.fit(some_run(Known()).trace, knots=(5, 2))


def test_roofline_against_a_calculation_by_hand():
    device = Device("toy", 1e12, 1e11, 1e10, 1.0, 1.0, 0.0, 0.0)
    model = ModelShape("toy", 2, 64, 4, 2, 16, 128, 1000)
    weights = 64 * 4 * 16 + 2 * 64 * 2 * 16 + 4 * 16 * 64 + 3 * 64 * 128
    assert model.layer_weights == weights and model.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    parts = Roofline(device, model).parts(StepWork(1, 1, 1, 500))
    assert parts["linear"] == pytest.approx(2 * weights * 2 / 1e11)  # one token: reading the weights
    assert parts["attention"] == pytest.approx(2 * 2 * 500 * 2 * 16 * 2 / 1e11)
    assert parts["logits"] == pytest.approx(64 * 1000 * 2 / 1e11)
    parts = Roofline(device, model).parts(StepWork(4000, 1, 1, 0, 4000, 4000 * 4001 // 2))
    assert parts["linear"] == pytest.approx(2 * 2 * 4000 * weights / 1e12)  # many: calculating
    assert parts["attention"] == pytest.approx(2 * 4 * (4000 * 4001 // 2) * 4 * 16 / 1e12)


def test_roofline_knows_its_limits():
    model = Roofline("h100", "llama-3.1-8b")
    assert model.model.weight_bytes == pytest.approx(15.0e9, rel=0.02)
    assert model.num_gpu_blocks(16) == pytest.approx((72e9 - model.model.weight_bytes) / (16 * 131072), abs=1)
    with pytest.raises(ValueError, match="unknown device 'h10'; did you mean 'h100'"):
        Roofline("h10")
    with pytest.raises(ValueError, match="unknown model 'gpt'; known: llama-3.1-8b"):
        Roofline("h100", "gpt")
    with pytest.raises(ValueError, match="needs 15 GB for its weights; tiny has 1 GB"):
        Roofline(Device("tiny", 1e12, 1e11, 1e9), "llama-3.1-8b")
    with pytest.raises(ValueError, match="a step must take time"):
        Constant(0.0, 0.0)


def test_shape_from_a_hugging_face_config():
    config = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}  # fmt: skip
    assert ModelShape.from_config(config, "smollm2") == Roofline("cpu-2-core", "smollm2").model
    with pytest.raises(KeyError, match="hidden_size"):
        ModelShape.from_config({"num_attention_heads": 4})


@pytest.mark.parametrize("device", ["h100", "a100"])
def test_linear_layers_agree_with_published_profiles(trace_files, device):
    path = trace_files.parent / "profiles" / f"{device}_Llama-2-7b-hf_mlp.csv"
    if not path.exists():
        pytest.skip(f"no {path}")
    parts = [
        f"time_stats.{part}.median" for part in ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    ]
    model, ratios = Roofline(device, "llama-2-7b"), []
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["num_tensor_parallel_workers"] == "1":
                n = int(row["num_tokens"])
                real = sum(float(row[part]) for part in parts) / 1000 * model.model.num_layers
                ratios.append(model.parts(StepWork(n, n, n))["linear"] / real)
    assert np.median(ratios) == pytest.approx(1.0, abs=0.1)
    # a bound: worst where arithmetic, not reading, becomes the limit, and hardly ever above the measurement
    assert 0.45 < min(ratios) and max(ratios) < 1.1


def test_session_without_any_time_is_refused():
    with pytest.raises(ValueError, match="a fake model takes no time: give a cost_model"):
        Session(make_settings(None))


def test_a_hybrid_has_room_for_states_and_pays_for_them_once_a_step():
    """Numbers by hand: 2 state layers of 4,096 bytes, 1 attention layer of 2 * 2 * 16 * 2 = 128 bytes a token."""
    hybrid = ModelShape("toy", 3, 64, 4, 2, 16, 128, 1000, state_layers=2, state_bytes=4096, state_weights=20_000)
    assert hybrid.kv_bytes_per_token == 128
    mixers = 2 * 20_000 + 64 * 16 * 2 * (4 + 2)
    assert hybrid.layer_weights == mixers // 3 + 3 * 64 * 128
    roofline = Roofline(replace(DEVICES["h100"], memory_bytes=10_000_000), hybrid)
    kv = roofline.kv_cache(16)
    assert kv.block_size == 32 and [len(group.layers) for group in kv.groups] == [1, 1, 1]  # a state is 32 tokens
    assert kv.num_blocks == int((9_000_000 - hybrid.weight_bytes) / 4096)
    short, long = StepWork(), StepWork()
    short.add(10, 1), long.add(100_000, 1)
    moved = 2 * 2 * 4096 / (roofline.device.bandwidth * roofline.device.memory_efficiency)
    assert roofline.parts(short)["states"] == roofline.parts(long)["states"] == pytest.approx(moved)
    assert roofline.parts(long)["attention"] > roofline.parts(short)["attention"]


def test_a_hybrid_is_simulated_with_the_blocks_of_its_groups():
    roofline = Roofline("h100", replace(MODELS["mamba2-130m"], name="two states"))
    kv = replace(roofline.kv_cache(16), num_blocks=3)
    requests = [WorkloadRequest(f"r{i}", 0.0, (range(100),), range(50)) for i in range(4)]
    settings = {"block_size": kv.block_size, "num_gpu_blocks": 3, "enable_prefix_caching": False}
    run = simulate(requests, cost_model=roofline, kv_cache=kv, config=settings)
    running = [len(state.running) for _, state in run.trace.states()]
    assert max(running) == 2  # blocks, not tokens, are the limit
