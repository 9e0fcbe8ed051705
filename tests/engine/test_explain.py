"""What was kept of a token explains that token: the same sampler on the same logits gives the same choice."""

import json
from typing import Any

import pytest
from tiny_models import tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.sampling.params import StructuredOutputsParams


@pytest.fixture(scope="module")
def tiny(tiny_model_path: Any) -> Any:  # noqa: F811
    with LLM(tiny_model_path("llama"), dtype="float32", num_gpu_blocks=60, max_model_len=128) as llm:
        yield llm


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=5),
    "sampled": SamplingParams(temperature=1.2, top_k=12, top_p=0.9, min_p=0.02, presence_penalty=0.5, max_tokens=5),
    "several": SamplingParams(temperature=1.0, n=2, seed=5, max_tokens=4),
    "json": SamplingParams(
        temperature=1.0,
        max_tokens=40,
        seed=1,
        structured_outputs=StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        ),
    ),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_every_recorded_token_is_explained(tiny: LLM, kind: str) -> None:
    with tiny.record(samples=True) as trace:
        (output,) = tiny.generate(["abc"], PARAMS[kind], use_tqdm=False)
    tokens = trace.to_pandas()["tokens"].groupby("request_id")["token_id"].apply(list)
    assert len(tokens) == PARAMS[kind].n
    assert sorted(map(tuple, tokens)) == sorted(tuple(c.token_ids) for c in output.outputs)
    for request_id, chosen in tokens.items():
        for step, token_id in enumerate(chosen):
            table = tiny.explain(trace, request_id, step)
            assert table["stage"].iloc[0] == "model"
            assert table["token_id"].iloc[-1] == token_id
            assert table["kept"].is_monotonic_decreasing
    if kind == "json":
        assert "a" in json.loads(output.outputs[0].text)


def test_what_was_not_kept_cannot_be_explained(tiny: LLM) -> None:
    with tiny.record() as trace:
        (output,) = tiny.generate(["abc"], PARAMS["greedy"], use_tqdm=False)
    with pytest.raises(KeyError, match="no samples; record with record"):
        tiny.explain(trace, output, 0)
    with tiny.record(samples=True) as trace:
        (output,) = tiny.generate(["abc"], PARAMS["greedy"], use_tqdm=False)
    with pytest.raises(KeyError, match="output token 5 of request"):
        tiny.explain(trace, output, 5)
    assert tiny.llm_engine.core.executor.runner.sample_log is None
