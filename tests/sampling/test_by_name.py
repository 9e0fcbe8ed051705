"""Transforms by name, from Python and over HTTP, and those that get a row where others get the batch."""

import httpx
import pytest
import torch
from live_server import live_server
from sampling_batches import make_batch
from tiny_models import tiny_model_path  # noqa: F401

from minivllm import LLM, SamplingParams
from minivllm.core.config import EngineArgs
from minivllm.sampling.params import InvalidParameter
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.transforms import TRANSFORMS, each_row, register_transform, transforms_of
from minivllm.sampling.zoo import TypicalP

SMALL = {"dtype": "float32", "num_gpu_blocks": 64, "max_model_len": 64}


@pytest.fixture
def only():
    """A transform by name that allows one token."""

    def make(token, bias=1000.0):
        if token < 0:
            raise ValueError("a token is not negative")

        def press(logits, view):
            logits[token] += bias
            return logits

        return press

    register_transform("only", make)
    yield
    del TRANSFORMS["only"]


def test_a_name_is_the_same_as_the_function():
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    named = SamplingParams(seed=1, extra_args={"typical": 0.5})
    given = SamplingParams(seed=1, logits_processors=[TypicalP(0.5)])
    free = SamplingParams(seed=1)
    seen: list[torch.Tensor] = []
    Sampler()(logits.clone(), make_batch([named, given, free], 50), lambda stage, x: seen.append(x.clone()))
    assert torch.equal(seen[-1][0], TypicalP(0.5)(logits[0].clone(), None))
    assert seen[-1][2].isfinite().all() and not seen[-1][0].isfinite().all()
    rows = [Sampler()(logits[:1].clone(), make_batch([p], 50)).token_ids for p in (named, given)]
    assert rows[0] == rows[1]


def test_each_request_has_a_transform_of_its_own():
    """Mirostat remembers; two requests that name it must not share what it remembers."""
    batch = make_batch([SamplingParams(seed=i, extra_args={"mirostat": {"tau": 3.0}}) for i in range(2)], 50)
    Sampler()(torch.randn(2, 50), batch)
    (a,), (b,) = (view.transforms for view in batch.requests)
    assert a is not b and set(a._memory) == {"0"} and set(b._memory) == {"1"}
    Sampler()(torch.randn(2, 50), batch)
    assert batch.requests[0].transforms == [a]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"typicl": 0.9}, r"keys are transforms: typical, top_n_sigma, xtc, dry, mirostat; did you mean 'typical'\?"),
        ({"typical": 1.5}, r"extra_args\['typical'\] must be what the transform takes \(mass must be a finite number in \(0, 1\]"),
        ({"xtc": {"chance": 1}}, r"extra_args\['xtc'\] must be what the transform takes \(.*unexpected keyword argument 'chance'"),
    ],
)  # fmt: skip
def test_a_wrong_name_or_value_is_refused_before_it_runs(tiny_model_path, given, words):  # noqa: F811
    with LLM(str(tiny_model_path("llama")), **SMALL) as llm:
        with pytest.raises(InvalidParameter, match=words):
            llm.generate("ab", SamplingParams(extra_args=given), use_tqdm=False)
        reads = SamplingParams(max_tokens=2, extra_args={"mine": 3}, logits_processors=[lambda logits, view: logits])
        llm.generate("ab", reads, use_tqdm=False)


def test_over_http(tiny_model_path, only):  # noqa: F811
    args = EngineArgs(model=str(tiny_model_path("llama")), **SMALL)
    with live_server(args) as server:

        def post(path, **fields):
            body = {"model": server.model, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **fields}
            return httpx.post(f"{server.url}{path}", json=body, timeout=60)

        plain = post("/v1/completions", prompt="ab").json()["choices"][0]["token_ids"]
        forced = post("/v1/completions", prompt="ab", vllm_xargs={"only": 7})
        assert forced.json()["choices"][0]["token_ids"] == [7] * 4 != plain
        weak = post("/v1/completions", prompt="ab", vllm_xargs={"only": {"token": 7, "bias": 0.0}})
        assert weak.json()["choices"][0]["token_ids"] == plain
        chat = post("/v1/chat/completions", messages=[{"role": "user", "content": "ab"}], vllm_xargs={"only": 9})
        assert chat.json()["choices"][0]["token_ids"] == [9] * 4
        for wrong, words in (({"onyl": 7}, "did you mean 'only'"), ({"only": -1}, "a token is not negative")):
            refused = post("/v1/completions", prompt="ab", vllm_xargs=wrong)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]


def test_a_transform_of_a_row_is_none_of_the_engine(tiny_model_path):  # noqa: F811
    with pytest.raises(TypeError, match=r"TypicalP takes one request's row \[V\].*each_row\(TypicalP\)"):
        LLM(str(tiny_model_path("llama")), logits_processors=[TypicalP(0.9)], **SMALL)
    with pytest.raises(InvalidParameter, match="of one row"):
        transforms_of(SamplingParams(logits_processors=[lambda logits, batch: logits]))
    torch.manual_seed(0)
    logits, batch = torch.randn(4, 30), make_batch([SamplingParams(seed=i) for i in range(4)], 30)
    every = each_row(TypicalP(0.5))(logits.clone(), batch)
    assert torch.equal(every, torch.stack([TypicalP(0.5)(row.clone(), None) for row in logits]))
    wide = Sampler(transforms=[lambda logits, batch: logits[0]])
    with pytest.raises(ValueError, match=r"must return logits \[4, 30\], returned \[30\]"):
        wide(logits.clone(), batch)


def test_a_trace_with_logits_is_not_saved_without_a_word(tiny_model_path, tmp_path):  # noqa: F811
    with LLM(str(tiny_model_path("llama")), **SMALL) as llm:
        with llm.record(samples=True) as trace:
            llm.generate("ab", SamplingParams(max_tokens=3), use_tqdm=False)
        with pytest.raises(ValueError, match=r"the logits of 3 samples.*drop_samples=True"):
            trace.save(tmp_path / "run.jsonl")
        assert not list(tmp_path.iterdir())
        trace.save(tmp_path / "run.jsonl", drop_samples=True)
        assert type(trace).load(tmp_path / "run.jsonl").events == trace.events
