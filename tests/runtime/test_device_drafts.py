"""Drafts of the device: steps that are launched before the host knows the tokens give those of an engine that waits."""

import logging
import random

import pytest
from async_workload import summary, workload
from device_drafts import go_ahead
from tiny_models import tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.sampling.params import RequestOutputKind

SIZES = {
    "dtype": "float32", "attention_backend": "numba_cpu_invariant", "block_size": 4, "max_num_seqs": 5, "max_model_len": 96,
    "max_num_batched_tokens": 40,
}  # fmt: skip
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SYNTHETIC = {"method": "synthetic", "num_speculative_tokens": 3, "synthetic_acceptance_rate": 0.6}
POOLS = {"roomy": {"num_gpu_blocks": 200}, "recompute": {"num_gpu_blocks": 30},
         "swap": {"num_gpu_blocks": 30, "num_cpu_blocks": 60, "preemption_mode": "swap"}}  # fmt: skip


@pytest.fixture(scope="module")
def path(tiny_model_path):  # noqa: F811
    return str(tiny_model_path("llama"))


def load(path, drafts, waits=False, **more):
    return LLM(path, speculative_config=drafts, async_scheduling=not waits, **SIZES, **more)


def answers(llm, seed, keep=lambda params: True):
    prompts, params = workload(seed)
    asked = [({"prompt_token_ids": p}, each) for p, each in zip(prompts, params, strict=True) if keep(each)]
    return summary(llm.generate([prompt for prompt, _ in asked], [each for _, each in asked], use_tqdm=False))


def plain(params):
    """Whether no choice of the request looks back."""
    return not (params.structured_outputs or params.logits_processors or params.bad_words or params.min_tokens) and (
        params.repetition_penalty == 1
    )


def ahead_of(trace):
    """Steps that were decided before the tokens of the one before were known."""
    return sum(event[0] == "update" and len(event) == 4 for event in trace.events)


@pytest.mark.parametrize("pool", POOLS)
def test_the_tokens_are_those_of_an_engine_that_waits(path, pool, monkeypatch):
    with load(path, NGRAM, waits=True, **POOLS[pool]) as waiting:
        want = answers(waiting, 1, plain)
    with go_ahead(load(path, NGRAM, **POOLS[pool]), monkeypatch) as llm:
        core = llm.llm_engine.core
        with llm.record() as trace:
            assert answers(llm, 1, plain) == want
        assert ahead_of(trace) > 10 and core.executor.runner.graphs.replayed
        trace.check()
        assert trace.at(-1) == core.scheduler.state()
        while core.has_requests():
            llm.llm_engine.step()
        assert not core.scheduler.requests and not core._in_flight and not len(core.executor.runner.batch)
        stats = core.scheduler.spec_stats
        assert stats.num_accepted_tokens > 0 and stats.num_draft_tokens > stats.num_accepted_tokens


def test_synthetic_acceptance_draws_what_the_host_draws(path, monkeypatch):
    """Of one stream, every draft is accepted, or not, as in an engine that waits."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, seed=3)
    seen = []
    for waits in (True, False):
        with load(path, SYNTHETIC, waits, num_gpu_blocks=200) as llm:
            if not waits:
                go_ahead(llm, monkeypatch)
            with llm.record() as trace:
                [out] = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, params, use_tqdm=False)
            stats = llm.llm_engine.core.scheduler.spec_stats
            seen.append((out.outputs[0].token_ids, stats.num_accepted_tokens_per_pos, stats.num_drafts))
            assert (ahead_of(trace) > 10) != waits
    assert seen[0] == seen[1]


def test_requests_that_look_back_make_the_host_wait(path, monkeypatch):
    """In one engine with requests that do not: every answer is right, and steps go ahead again when those have ended."""
    with load(path, NGRAM, waits=True, num_gpu_blocks=200) as waiting:
        want = answers(waiting, 2)
    with go_ahead(load(path, NGRAM, num_gpu_blocks=200), monkeypatch) as llm, llm.record() as trace:
        assert answers(llm, 2) == want
        assert ahead_of(trace)


def test_aborted_at_any_moment(path, monkeypatch):
    prompts, params = workload(5)
    params = [p.clone(n=1, stop=None, output_kind=RequestOutputKind.CUMULATIVE) for p in params if plain(p)]
    with load(path, NGRAM, waits=True, num_gpu_blocks=40) as waiting:
        want = [
            list(waiting.generate({"prompt_token_ids": p}, each, use_tqdm=False)[0].outputs[0].token_ids)
            for p, each in zip(prompts, params, strict=False)
        ]
    with go_ahead(load(path, NGRAM, num_gpu_blocks=40), monkeypatch) as llm:
        engine = llm.llm_engine
        for seed in range(4):
            rng, got, gone = random.Random(seed), {}, set()
            for i, (prompt, each) in enumerate(zip(prompts, params, strict=False)):
                engine.add_request(f"{i}", {"prompt_token_ids": prompt}, each)
            while engine.has_unfinished_requests():
                if rng.random() < 0.2 and (name := f"{rng.randrange(len(want))}") not in gone:
                    engine.abort_request([name])
                    gone.add(name)
                got |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step()}
            for i, tokens in enumerate(want):
                said = got.get(f"{i}", [])
                assert said == tokens[: len(said)]
                assert said == tokens or f"{i}" in gone
        assert engine.core.scheduler.kv_cache_manager.block_pool.usage == 0.0


def test_why_the_host_makes_the_drafts(path, caplog):
    with caplog.at_level(logging.WARNING, "minivllm.runtime"), load(path, NGRAM, num_gpu_blocks=200) as llm:
        assert "the host makes the drafts, and waits for the tokens of each step: the device is a CPU" in caplog.text
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        [out] = llm.generate({"prompt_token_ids": [5, 6, 7] * 4}, params, use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 8
