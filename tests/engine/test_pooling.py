"""Vectors are the hidden states of transformers, whatever the engine does with the prompt on the way."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import hf_model, tiny_model_path

from minivllm import LLM, SamplingParams
from minivllm.core.request import FinishReason
from minivllm.core.scheduler import Swap
from minivllm.runtime.pooler import Pooler
from minivllm.sampling.params import InvalidParameter
from minivllm.sampling.pooling import PoolingParams, cosine

__all__ = ["tiny_model_path"]
SIZE = 72
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(33, 120) for _ in range(n)] for n in (1, 2, 15, 16, 17, 40, 90, 200)]


def states(prompt: list[int]) -> torch.Tensor:
    """[n, H] after the last norm, of transformers."""
    with torch.inference_mode():
        return hf_model("llama").model(torch.tensor([prompt])).last_hidden_state[0].double()


@pytest.fixture(scope="module")
def llm(tiny_model_path: Any) -> Iterator[LLM]:
    with LLM(
        str(tiny_model_path("llama")), dtype="float32", num_gpu_blocks=64, max_num_batched_tokens=64, max_num_seqs=8
    ) as shared:
        yield shared


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_vectors_are_those_of_transformers(llm: LLM, kind: str):
    params = PoolingParams(pooling_type=kind, normalize=False)
    outputs = llm.embed(PROMPTS, pooling_params=params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        hidden = states(prompt)
        expected = hidden.mean(0) if kind == "mean" else hidden[-1]
        assert output.outputs.hidden_size == SIZE and output.prompt_token_ids == prompt
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=2e-4, rtol=2e-4)


def test_length_one_and_fewer_dimensions(llm: LLM):
    (plain,) = llm.embed(PROMPTS[4], pooling_params=PoolingParams(normalize=False), use_tqdm=False)
    (unit,) = llm.embed(PROMPTS[4], use_tqdm=False)
    (short,) = llm.embed(PROMPTS[4], pooling_params=PoolingParams(dimensions=10), use_tqdm=False)
    raw = np.array(plain.outputs.embedding)
    assert np.linalg.norm(unit.outputs.embedding) == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(unit.outputs.embedding, raw / np.linalg.norm(raw), atol=1e-6)
    np.testing.assert_allclose(short.outputs.embedding, raw[:10] / np.linalg.norm(raw[:10]), atol=1e-6)
    assert cosine([1, 0], [0, 2]) == 0 and cosine([1, 1], [2, 2]) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["mean", "last"])
@pytest.mark.parametrize("backend", ["reference"])
def test_alone_and_in_company_the_same_bits(tiny_model_path: Any, kind: str, backend: str):
    params = PoolingParams(pooling_type=kind)
    options = {"dtype": "float32", "attention_backend": backend, "num_gpu_blocks": 128}
    with LLM(str(tiny_model_path("llama")), **options) as whole:
        together = [o.outputs.embedding for o in whole.embed(PROMPTS, pooling_params=params, use_tqdm=False)]
        whole.reset_prefix_cache()
        alone = [whole.embed(p, pooling_params=params, use_tqdm=False)[0].outputs.embedding for p in PROMPTS]
        again = [whole.embed(p, pooling_params=params, use_tqdm=False)[0] for p in PROMPTS]
    assert together == alone == [o.outputs.embedding for o in again]
    cached = [o.num_cached_tokens for o in again]
    assert cached == [0] * len(PROMPTS) if kind == "mean" else max(cached) > 100, (
        "the last token needs no other's state"
    )


def test_among_requests_that_generate(llm: LLM):
    engine = llm.llm_engine
    alone = llm.generate([PROMPTS[3]], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].outputs[0]
    vector = llm.embed(PROMPTS[6], use_tqdm=False)[0].outputs.embedding
    engine.add_request("words", PROMPTS[3], SamplingParams(temperature=0, max_tokens=20))
    engine.add_request("vector", PROMPTS[6], PoolingParams())
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    assert last["words"].outputs[0].token_ids == alone.token_ids
    assert last["vector"].outputs == [] and last["vector"].finished
    np.testing.assert_allclose(last["vector"].pooled, vector, atol=1e-5)


@pytest.mark.parametrize("preemption", [None, Swap(64)])
def test_preemption_changes_nothing(tiny_model_path: Any, preemption: Any):
    """A pool that is too small: long generations push vectors out in the middle of their prompts."""
    options = {"dtype": "float32", "num_gpu_blocks": 24, "max_num_batched_tokens": 32, "enable_prefix_caching": False}
    with LLM(
        str(tiny_model_path("llama")), preemption=preemption, scheduler_reserve_full_isl=False, **options
    ) as small:
        engine = small.llm_engine
        for i in range(3):
            engine.add_request(f"words{i}", PROMPTS[5], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"v{i}", prompt, PoolingParams(normalize=False))
        trace = engine.core.scheduler.record()
        last = {}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
    trace.check()
    preempted = {event[1] for event in trace.events if event[0] == "preempt"}
    assert any(name.startswith("v") for name in preempted), preempted
    for i, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(last[f"v{i}"].pooled, states(prompt).mean(0), atol=2e-4, rtol=2e-4)


def test_the_trace_and_the_pool_are_whole_afterwards(llm: LLM):
    with llm.record() as trace:
        llm.embed(PROMPTS, use_tqdm=False)
    trace.check()
    ends = [event for event in trace.events if event[0] == "finish"]
    assert len(ends) == len(PROMPTS) and {event[2] for event in ends} == {str(FinishReason.STOP)}
    assert (
        trace.at(trace.num_steps - 1) is not None
        and llm.llm_engine.core.scheduler.kv_cache_manager.block_pool.usage == 0
    )
    runner = llm.llm_engine.core.executor.runner
    llm.generate([[64]], SamplingParams(max_tokens=1), use_tqdm=False)  # the next step drops what has ended
    assert not runner.pooler.entries and len(runner.batch) <= 1


def test_an_abort(llm: LLM):
    engine = llm.llm_engine
    engine.add_request("v", PROMPTS[7], PoolingParams())
    engine.step()
    (output,) = engine.abort_request("v")
    assert output.finished and output.pooled is None
    while engine.core.has_requests():
        engine.step()
    assert engine.core.scheduler.kv_cache_manager.block_pool.usage == 0


def test_what_is_wrong_is_said(llm: LLM):
    for wrong in ({"pooling_type": "max"}, {"dimensions": 0}, {"normalize": 1}):
        with pytest.raises(InvalidParameter, match=next(iter(wrong))):
            PoolingParams(**wrong)
    with pytest.raises(TypeError, match="normalize"):
        PoolingParams(normalise=True)
    with pytest.raises(InvalidParameter, match="at most the 72"):
        llm.embed("a", pooling_params=PoolingParams(dimensions=73))
    with pytest.raises(TypeError, match="PoolingParams"):
        llm.embed("a", pooling_params=SamplingParams())
    with pytest.raises(ValueError, match="empty"):
        llm.embed([[64], []])
    assert not llm.llm_engine.has_unfinished_requests()


def test_the_pooler_starts_again_or_goes_on():
    params, ones = PoolingParams(pooling_type="mean", normalize=False), torch.ones(2, 3)
    pooler = Pooler()
    pooler.add("a", params, 4, 0)
    assert pooler.take("a", ones) is None
    pooler.add("a", params, 4, 2)  # swapped in
    assert pooler.take("a", 3 * ones) == [2, 2, 2]
    pooler.add("a", params, 2, 0)  # computed again
    assert pooler.take("a", 5 * ones) == [5, 5, 5]
    pooler.drop("a")
    pooler.drop("a")
    assert not pooler.entries
