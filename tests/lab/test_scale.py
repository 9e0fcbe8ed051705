"""Ranks, replicas and sweeps in the lab: closed forms, and the same answers whichever way they are computed."""

import random

import pytest

from minivllm.core.config import KVTransferConfig
from minivllm.core.kv_connector import OffloadingConnector
from minivllm.core.policy import FCFS, ShortestFirst
from minivllm.core.routing import LeastLoaded, PrefixAware, RoundRobin
from minivllm.lab.cost import MODELS, Constant, CostModel, Device, ModelShape, Roofline, StepWork
from minivllm.lab.parallel import Link, Parallel, Transfers
from minivllm.lab.replicas import simulate_pd, simulate_replicas
from minivllm.lab.simulation import make_settings, simulate
from minivllm.lab.sweep import sweep
from minivllm.lab.workload import chat, poisson

TALK = chat(rate=4, num_sessions=20, turns=(2, 5), think_time=2.0, prompt_tokens=(60, 90), output_tokens=30, seed=1)
CONFIG = {"num_gpu_blocks": 4000}


def work(tokens: int, sampled: int = 1) -> StepWork:
    made = StepWork(num_sampled=sampled)
    made.add(100, tokens)
    return made


def test_collectives_are_so_many_messages():
    link = Link(100.0, 0.5)
    assert link.send(200) == 0.5 + 2
    assert link.all_gather(400, 4) == 3 * (0.5 + 1) and link.all_reduce(400, 4) == 6 * (0.5 + 1)
    assert link.all_to_all(400, 4) == link.all_gather(400, 4) and link.all_reduce(400, 1) == 0
    with pytest.raises(ValueError, match="needs bandwidth > 0"):
        Link(0, 1)


def test_one_rank_is_a_roofline():
    one, many = Parallel("h100", "llama-3.1-8b"), Roofline("h100", "llama-3.1-8b")
    for tokens in (1, 300):
        parts = one.parts(work(tokens))
        assert parts.pop("joins") == parts.pop("sends") == 0 and parts == many.parts(work(tokens))
    assert one.num_gpu_blocks(16) == many.num_gpu_blocks(16)


def test_joins_are_those_of_the_model():
    """2 L + 1 sums of hidden states and the logits of what is sampled: `models.parallel` counts the same."""
    m, wire = MODELS["smollm2"], Link(1.0, 0.0)
    wide = ModelShape("wide", m.num_layers, 576, 8, 4, 72, 1536, 49152)
    joins = Parallel("h100", wide, tensor=2, link=wire).parts(work(7, 3))["joins"]
    assert joins == pytest.approx((2 * 30 + 1) * 7 * 576 * 2 + 3 * 4 * 49152 / 2)
    sends = Parallel("h100", wide, pipeline=3, link=wire).parts(work(7))["sends"]
    assert sends == 2 * (2 * 7 * 576 * 2)
    assert Parallel("h100", wide, tensor=2).parts(StepWork())["joins"] == 0


def test_the_parts_of_ranks_add_up():
    base = Roofline("h100", "llama-3.1-8b")
    four = Parallel("h100", "llama-3.1-8b", tensor=4)
    assert four.parts(work(4000))["linear"] == pytest.approx(base.parts(work(4000))["linear"] / 4)
    staged = Parallel("h100", "llama-3.1-8b", pipeline=4)
    for name in ("linear", "attention", "logits"):
        assert staged.parts(work(50))[name] == pytest.approx(base.parts(work(50))[name])
    assert four.num_gpu_blocks(16) > 4 * base.num_gpu_blocks(16) and staged.num_gpu_blocks(
        16
    ) > 4 * base.num_gpu_blocks(16)
    card = Device("small", 1e14, 1e12, 10e9)
    with pytest.raises(ValueError, match="needs 15 GB for its weights"):
        Parallel(card)
    assert Parallel(card, tensor=4).num_gpu_blocks(16) > 0


def test_heads_that_do_not_divide_are_padded():
    smollm2 = ModelShape("smollm2", 30, 576, 9, 3, 64, 1536, 49152)
    for ranks, heads, kv_heads in ((2, 6, 2), (3, 3, 1), (4, 3, 1), (8, 2, 1)):
        mine = Parallel("h100", smollm2, tensor=ranks).rank.model
        assert (mine.num_heads, mine.num_kv_heads) == (heads, kv_heads)
        assert mine.kv_bytes_per_token == smollm2.kv_bytes_per_token * kv_heads / 3


def test_experts_that_are_read():
    m, rng = MODELS["mixtral-8x7b"], random.Random(0)
    mlp = 3 * m.hidden_size * m.intermediate_size
    for tokens in (1, 3, 10):
        seen = [len({e for _ in range(tokens) for e in rng.sample(range(8), 2)}) for _ in range(4000)]
        assert (m.weights_read(tokens) - (m.active_weights - 2 * mlp)) / mlp == pytest.approx(
            sum(seen) / 4000, rel=0.02
        )
    whole = Parallel("h100", m, tensor=4, by_expert=True)
    sliced = Parallel("h100", m, tensor=4)
    assert whole.rank.model.layer_weights == sliced.rank.model.layer_weights
    assert whole.parts(work(2000))["linear"] == pytest.approx(sliced.parts(work(2000))["linear"], rel=1e-6)
    # a token has k = 2 rows, which travel there and back from one rank, and all gather the sums: 2 k / ranks + 1 against 2
    for ranks in (2, 4, 8):
        ways = [
            Parallel("h100", m, tensor=ranks, by_expert=True, dispatch=dispatch, link=Link(1e9, 0)).parts(work(2000))
            for dispatch in ("all_to_all", "all_reduce")
        ]
        hidden, away = 2000 * m.hidden_size * m.dtype_bytes, (ranks - 1) / ranks
        saved = m.num_layers * away * hidden * (2 - (2 * 2 / ranks + 1)) / 1e9
        assert ways[1]["joins"] - ways[0]["joins"] == pytest.approx(saved, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor": 0}, "the layers of llama-3.1-8b cannot be split among 0 ranks equally"),
        (
            {"tensor": 3, "model": "mixtral-8x7b", "by_expert": True},
            "8 experts of mixtral-8x7b cannot be split among 3",
        ),
        ({"pipeline": 33}, "32 layers of llama-3.1-8b cannot be 33 stages"),
        ({"by_expert": True}, "by_expert needs experts"),
        ({"dispatch": "all_to_all"}, "dispatch='all_to_all' needs by_expert=True"),
        ({"link": "nvlnk"}, "unknown link 'nvlnk'; did you mean 'nvlink'"),
    ],
)
def test_what_cannot_be_split_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        Parallel(**{"device": "h100", "model": "llama-3.1-8b"} | options)


class Staged(CostModel):
    """Every step takes a second for both of its stages."""

    stages = 2

    def seconds(self, output, work):
        return 1.0


def test_a_pipeline_has_a_batch_in_every_stage():
    """Two requests of ten tokens, one in each stage: a token every half second. Alone, a request has its token after a second."""
    two = poisson(1e6, 2, 10, 10, seed=0)
    run = simulate(
        two, cost_model=Staged(), config={"num_gpu_blocks": 100, "max_num_batched_tokens": 10, "max_num_seqs": 2}
    )
    run.trace.check()
    assert run.requests.finished.max() == pytest.approx(10.5, abs=0.01)
    alone = simulate(poisson(1e6, 1, 10, 10, seed=0), cost_model=Staged(), config={"num_gpu_blocks": 100})
    assert alone.requests.finished.max() == pytest.approx(10.0, abs=0.01)
    assert sorted(run.requests.num_output_tokens) == [10, 10]


def test_loads_of_a_connector_take_their_time():
    """A cache of 12 blocks forgets what the tier in main memory still has: fewer tokens are computed, and the link is waited for."""
    extra = {"num_cpu_blocks": 500}
    wanted = KVTransferConfig(kv_connector="OffloadingConnector", kv_connector_extra_config=extra)
    small, base = {"num_gpu_blocks": 70, "max_model_len": 1000}, Constant(0.01, 1e-4)
    without = simulate(TALK, config=small, cost_model=base)
    runs = [
        simulate(
            TALK, config=small, cost_model=Transfers(base, Link(bandwidth, 0.0), 1000),
            connector=OffloadingConnector(wanted, 16, 1, ""),
        )
        for bandwidth in (1e12, 1e5)
    ]  # fmt: skip
    for run in runs:
        run.trace.check()
    fast, slow = runs
    assert fast.meter.num_tokens < without.meter.num_tokens and fast.requests.ttft.mean() < slow.requests.ttft.mean()
    loads = sum(len(event.blocks) for event in fast.trace if event.kind == "kv_load")
    assert loads > 0 and fast.requests.num_cached_tokens.sum() > without.requests.num_cached_tokens.sum()


def test_one_replica_is_a_simulation():
    for source in (TALK, poisson(5.0, 30, 200, 20, seed=2)):
        want = simulate(source, config=CONFIG, cost_model=Constant(0.01, 1e-5)).requests.set_index("request_id")
        got = simulate_replicas(source, num_replicas=1, config=CONFIG, cost_model=Constant(0.01, 1e-5)).requests
        got = got.set_index("request_id").loc[want.index]
        assert (got.num_output_tokens == want.num_output_tokens).all()
        assert got.ttft.mean() == pytest.approx(want.ttft.mean(), rel=0.05)
        assert got.num_cached_tokens.sum() == want.num_cached_tokens.sum()


def test_a_router_that_knows_prefixes_finds_them():
    fleets = {
        type(r): simulate_replicas(TALK, r, 3, config=CONFIG) for r in (RoundRobin(), LeastLoaded(), PrefixAware())
    }
    assert fleets[PrefixAware].hit_rate > 1.2 * fleets[RoundRobin].hit_rate
    alone = simulate_replicas(TALK, num_replicas=1, config=CONFIG)
    for fleet in fleets.values():
        assert len(fleet.requests) == len(alone.requests) == len(fleet.decisions)
        assert fleet.hit_rate <= alone.hit_rate
        by_name = dict(zip(fleet.requests.request_id, fleet.requests.replica, strict=True))
        assert {event.request: event.replica for event in fleet.decisions} == by_name
    reasons = [event.reason for event in fleets[PrefixAware].decisions]
    assert any(reason.startswith("0 of ") for reason in reasons) and any(
        "blocks were sent there" in r for r in reasons[-9:]
    )


def test_prompts_on_one_engine_and_answers_on_another():
    """Every full block of a prompt but the last token's is found there; no request decodes beside a prompt."""
    source = poisson(3.0, 30, 1000, 50, seed=0)
    both = simulate_pd(source, config=CONFIG)
    alone = simulate_replicas(source, num_replicas=1, config=CONFIG)
    assert len(both.requests) == 30 and (both.requests.num_cached_tokens == 999 // 16 * 16).all()
    assert (both.requests.num_output_tokens == 50).all() and both.requests.tpot.max() < alone.requests.tpot.max()
    assert (both.requests.ttft > 0).all() and both.requests.arrival.tolist() == pytest.approx(
        alone.requests.arrival.tolist(), abs=0.5
    )
    slow = simulate_pd(source, link=Link(2e8, 0.0), config=CONFIG)
    assert slow.requests.ttft.median() > both.requests.ttft.median() + 62 * 16 * 131072 / 2e8 * 0.5
    beside = simulate_pd(source, link=Link(2e8, 0.0), config=CONFIG, load_async=True)
    assert (beside.requests.num_cached_tokens == 999 // 16 * 16).all() and (
        beside.requests.num_output_tokens == 50
    ).all()
    assert beside.requests.tpot.max() < 0.5 * slow.requests.tpot.max() and beside.requests.ttft.median() > 0.6
    assert len(simulate_pd(TALK, config=CONFIG, load_async=True).requests) == len(
        simulate_replicas(TALK, config=CONFIG).requests
    )
    assert len(simulate_pd(TALK, config=CONFIG).requests) == len(simulate_replicas(TALK, config=CONFIG).requests)
    with pytest.raises(ValueError, match="block_bytes is not known"):
        simulate_pd(source, decode=Constant(0.01), config=CONFIG)


def test_requests_that_no_engine_takes_are_told():
    fits, long = chat(rate=4, num_sessions=5, seed=1), poisson(5.0, 4, 3000, 20, seed=2)
    tight = {"num_gpu_blocks": 100, "max_model_len": 1000}
    for simulated in (simulate_replicas, simulate_pd):
        none = simulated(long, config=tight)
        assert len(none.requests) == 0 and len(none.refused) == 4 and repr(none).endswith(" s, 4 refused)")
        assert simulated(fits, config=CONFIG).refused == []
    with pytest.raises(ValueError, match="num_replicas must be at least 1, got 0"):
        simulate_replicas(long, num_replicas=0)


GRID = {"policy": [FCFS(), ShortestFirst()], "num_gpu_blocks": [120, 4000]}


def test_a_sweep_is_its_simulations():
    table = sweep(GRID, TALK, on="here", cost_model=Constant(0.01, 1e-5))
    assert table.policy.tolist() == ["FCFS", "FCFS", "ShortestFirst", "ShortestFirst"]
    assert table.num_gpu_blocks.tolist() == [120, 4000] * 2
    run = simulate(TALK, policy=ShortestFirst(), config={"num_gpu_blocks": 120}, cost_model=Constant(0.01, 1e-5))
    assert table.ttft_median[2] == run.requests.ttft.median() and table.num_preemptions[2] == run.meter.num_preemptions
    assert sweep(GRID, TALK, workers=2, cost_model=Constant(0.01, 1e-5)).equals(table)
    loads = sweep(
        {"workload": [TALK, TALK.faster(4)]}, on="here", config=CONFIG, keep=lambda run: {"n": len(run.requests)}
    )
    assert loads.n.tolist() == [len(run.requests)] * 2
    with pytest.raises(ValueError, match="on must be one of here, processes, ray; got 'threads'"):
        sweep(GRID, TALK, on="threads")
    with pytest.raises(ValueError, match="needs a source"):
        sweep(GRID)
    for on in ("here", "ray"):
        with pytest.raises(ValueError, match=f"workers goes with on=\"processes\", not with on='{on}'"):
            sweep(GRID, TALK, on=on, workers=2)


def test_a_sweep_takes_settings_as_a_simulation_does():
    source, cost = poisson(5.0, 5, 50, 5, seed=0), Constant(0.01)
    settings, few = make_settings(CONFIG, None, cost), {"policy": [FCFS()]}
    want = sweep(few, source, on="here", config=CONFIG, cost_model=cost)
    assert sweep(few, source, on="here", config=settings, cost_model=cost).equals(want)
    bare = sweep({"num_gpu_blocks": [4000]}, source, on="here", config=None, cost_model=cost)
    assert bare.ttft_median.tolist() == want.ttft_median.tolist()
    with pytest.raises(TypeError, match="a grid of settings needs config as a dict, got Settings"):
        sweep({"num_gpu_blocks": [4000]}, source, on="here", config=settings, cost_model=cost)


@pytest.mark.slow
@pytest.mark.long
def test_a_sweep_on_ray_is_the_same():
    pytest.importorskip("ray", reason="needs Ray: pip install 'minivllm[scale]'")
    here = sweep(GRID, TALK, on="here", cost_model=Constant(0.01, 1e-5))
    assert sweep(GRID, TALK, on="ray", cost_model=Constant(0.01, 1e-5)).equals(here)
