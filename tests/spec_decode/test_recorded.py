"""What a trace says about drafts: outcomes, probabilities, the token that came instead; and what views and usage make of it."""

import numpy as np
import pytest
import torch
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture
from viz_runs import kind_of, words_of

from minivllm import LLM, SamplingParams
from minivllm.core.trace import Trace
from minivllm.spec_decode.rejection import Draft
from minivllm.viz.timeline import Timeline
from minivllm.viz.timeline_data import DECODE

V = 264


class Made:
    """Drafts of three tokens; every second with a distribution that they were drawn from."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def propose(self, requests, view):
        drafts = []
        for i, _ in enumerate(requests):
            q = torch.softmax(torch.from_numpy(self.rng.normal(size=(3, V))).float() * 2, -1)
            ids = [
                int(self.rng.choice(V, p=(row / row.sum()).double().numpy() / (row / row.sum()).double().sum().item()))
                for row in q
            ]
            drafts.append(
                Draft(ids, q) if (view.step + i) % 2 else Draft([int(i) for i in self.rng.integers(0, 30, 3)])
            )
        return drafts


@pytest.fixture(scope="module")
def recorded(tiny_model_path, tmp_path_factory):  # noqa: F811
    config = {"method": Made(), "num_speculative_tokens": 3, "dynamic_length": False}
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=60, ignore_eos=True, allowed_token_ids=[*range(30)])
        for t in (0, 1.0, 1.0)
    ]
    with LLM(tiny_model_path("llama"), dtype="float32", num_gpu_blocks=60, speculative_config=config) as llm:
        with llm.record(samples=True) as trace:
            outs = llm.generate([{"prompt_token_ids": [1, 2, 3 + i]} for i in range(3)], params, use_tqdm=False)
        stats = llm.llm_engine.core.scheduler.spec_stats
    trace.check()
    return trace, outs, stats


def target(tokens: list[int]) -> np.ndarray:
    """At a temperature of 1, only the allowed tokens."""
    with torch.no_grad():
        logits = hf_model("llama")(torch.tensor([tokens])).logits[0, -1]
    logits[30:] = -torch.inf
    return torch.softmax(logits.double(), -1).numpy()


def test_the_table_agrees_with_the_counters_and_with_transformers(recorded):
    trace, outs, stats = recorded
    table = trace.to_pandas()["spec_decode"]
    assert len(table) == stats.num_draft_tokens and (table.outcome == "accepted").sum() == stats.num_accepted_tokens
    assert set(table.outcome) == {"accepted", "rejected", "not reached"}
    for out in outs:
        mine, said = table[table.request_id == out.request_id], [*out.prompt_token_ids, *out.outputs[0].token_ids]
        assert out.metrics.num_draft_tokens == len(mine)
        assert out.metrics.num_accepted_tokens == (mine.outcome == "accepted").sum()
        for row in mine[mine.outcome != "not reached"].iloc[::5].itertuples():
            p = target(said[: row.position])
            assert row.target_prob == pytest.approx(p[row.token_id], abs=1e-4)
            assert (said[row.position] == row.token_id) == (row.outcome == "accepted")
            if row.outcome == "accepted":
                assert np.isnan(row.residual_prob)
                continue
            assert row.sampled_instead == said[row.position]
            if out is outs[0]:
                assert row.residual_prob == 1 and row.sampled_instead == p.argmax()
            elif row.draft_prob == 1:
                p[row.token_id] = 0
                assert row.residual_prob == pytest.approx(p[row.sampled_instead] / p.sum(), abs=1e-4)
            else:
                assert 0 < row.residual_prob <= 1 and row.draft_prob < 1
    assert table.target_prob[table.outcome == "not reached"].isna().all()


def test_decodes_with_drafts_are_decodes_in_tables_and_timeline(recorded):
    trace, outs, stats = recorded
    tables = trace.to_pandas()
    assert tables["steps"].num_prefill_tokens.sum() == sum(len(out.prompt_token_ids) for out in outs)
    data = Timeline(trace).lanes
    assert data.drafts[:, 2].sum() == stats.num_draft_tokens and data.drafts[:, 3].sum() == stats.num_accepted_tokens
    step, request, verified, accepted = data.drafts[5].tolist()
    assert kind_of(data, request, step) == DECODE
    assert words_of(data, request, step) == f"decode, {accepted} of {verified} draft tokens accepted"
    assert trace.plot_timeline() is not None


def test_files_keep_drafts(recorded, tmp_path):
    trace, *_ = recorded
    for name in ("t.jsonl", "t.parquet"):
        trace.save(tmp_path / name, drop_samples=True)
        assert [e for e in Trace.load(tmp_path / name).events if e[0] == "verify"] == [
            e for e in trace.events if e[0] == "verify"
        ]


def test_pictures_of_drafts(recorded):
    trace, *_ = recorded
    table = trace.to_pandas()["spec_decode"]
    ax = trace.plot_drafts()
    bars = {c.get_label(): [p.get_height() for p in c.patches] for c in ax.containers}
    for outcome, heights in bars.items():
        assert heights == [((table.place == i) & (table.outcome == outcome)).sum() for i in range(3)]
    row = table[table.outcome == "rejected"].iloc[0]
    one = trace.plot_drafts(row.request_id, int(row.step))
    assert one.containers[0].patches[row.place].get_height() == pytest.approx(row.target_prob)
    with pytest.raises(ValueError, match="needs a request_id"):
        trace.plot_drafts(step=3)
    with pytest.raises(ValueError, match="no draft of 'nobody'"):
        trace.plot_drafts("nobody")


def test_without_samples_there_are_outcomes_and_no_probabilities(tiny_model_path):  # noqa: F811
    config = {"method": Made(), "num_speculative_tokens": 3, "dynamic_length": False}
    with (
        LLM(tiny_model_path("llama"), dtype="float32", num_gpu_blocks=60, speculative_config=config) as llm,
        llm.record() as trace,
    ):
        llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
    table = trace.to_pandas()["spec_decode"]
    assert len(table) and table.target_prob.isna().all() and table.sampled_instead.notna().any()
