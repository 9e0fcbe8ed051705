"""Greedy tokens, in float32, equal those of transformers' `generate`, however the requests are batched or preempted."""

from typing import Any

import pytest
import torch
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture
from varied_prompts import varied_prompts

from minivllm import LLM, SamplingParams
from minivllm.core.scheduler import Swap

NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


@pytest.fixture(scope="session")
def prompts(llm: LLM) -> list[list[int]]:
    return varied_prompts(llm.get_tokenizer())


@pytest.fixture(scope="session")
def expected(hf_smollm2: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, one prompt at a time."""
    return [hf_generate(hf_smollm2, prompt, NEW_TOKENS) for prompt in prompts]


@torch.inference_mode()
def hf_generate(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.slow
def test_all_together(llm, prompts, expected):
    llm.reset_prefix_cache()
    assert tokens_of(llm, prompts) == expected


@pytest.mark.slow
def test_all_together_again_with_prefix_hits(llm, prompts, expected):
    llm.reset_prefix_cache()
    tokens_of(llm, prompts[-8:])
    before = llm.get_metrics()["prefix_cache_hits"]
    assert tokens_of(llm, prompts) == expected
    assert llm.get_metrics()["prefix_cache_hits"] > before + 1000


@pytest.mark.slow
def test_one_by_one(llm, prompts, expected):
    llm.reset_prefix_cache()
    for i in range(0, 32, 4):
        assert tokens_of(llm, [prompts[i]]) == [expected[i]], f"prompt {i}"


@pytest.mark.slow
@pytest.mark.parametrize("preemption", [None, Swap(60)], ids=["recompute", "swap"])
def test_pool_so_small_that_requests_are_preempted(preemption, prompts, expected):
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) <= 128]
    with LLM("smollm2", dtype="float32", num_gpu_blocks=28, max_num_batched_tokens=96, preemption=preemption) as small:
        got = tokens_of(small, [prompts[i] for i in chosen])
        assert small.get_metrics()["num_preemptions"] > 0
    assert got == [expected[i] for i in chosen]


@pytest.mark.slow
def test_long_prompts_in_small_chunks_of_odd_size(prompts, expected):
    with LLM(
        "smollm2", dtype="float32", max_model_len=700, num_gpu_blocks=400, max_num_batched_tokens=77, block_size=7
    ) as odd:
        assert tokens_of(odd, prompts[-4:] + prompts[:4]) == expected[-4:] + expected[:4]


@pytest.mark.slow
def test_the_reference_backend(prompts, expected):
    with LLM("smollm2", dtype="float32", max_model_len=256, num_gpu_blocks=200, attention_backend="reference") as slow:
        assert tokens_of(slow, prompts[:8]) == expected[:8]


@pytest.mark.slow
def test_logits_differ_by_less_than_a_thousandth(llm, hf_smollm2, prompts):
    vocab = llm.config.model.vocab_size
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, logprobs_mode="raw_logits", detokenize=False)
    chosen = [prompts[i] for i in (0, 2, 10, 16, 21, 26, 31)]
    for prompt, out in zip(chosen, llm.generate(chosen, params, use_tqdm=False), strict=True):
        completion = out.outputs[0]
        with torch.inference_mode():
            want = hf_smollm2(torch.tensor([prompt + completion.token_ids])).logits[0]
        for step, entry in enumerate(completion.logprobs):
            got = torch.tensor([entry[token].logprob for token in range(vocab)])
            assert (got - want[len(prompt) - 1 + step]).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["llama", "mistral", "mistral-window", "qwen2", "qwen2-window", "qwen3"])
def test_tiny_random_models(name, tiny_model_path):  # noqa: F811
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 250, (n,), generator=generator).tolist() for n in (1, 2, 7, 16, 33, 60, 90)]
    model = hf_model(name)
    want = [hf_generate(model, prompt, 24) for prompt in prompts]
    assert len({tuple(tokens) for tokens in want}) == len(want)
    settings = {"dtype": "float32", "block_size": 4}
    with LLM(str(tiny_model_path(name)), max_num_batched_tokens=48, num_gpu_blocks=128, **settings) as roomy:
        assert tokens_of(roomy, prompts, GREEDY.clone(max_tokens=24)) == want
    blocks = 62 if name == "qwen2-window" else 31  # there, windows and full attention are two groups in one pool
    with LLM(str(tiny_model_path(name)), max_num_batched_tokens=20, num_gpu_blocks=blocks, **settings) as tight:
        assert tokens_of(tight, prompts, GREEDY.clone(max_tokens=24)) == want
        assert tight.get_metrics()["num_preemptions"] > 0
