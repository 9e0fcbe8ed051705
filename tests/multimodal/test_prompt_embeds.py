"""Prompts of embeddings: the same tokens as the ids whose embeddings they are, whatever the scheduler does."""

import pytest
import torch
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.core.scheduler import Swap
from minivllm.sampling.params import BeamSearchParams

IDS = [[(7 * i * i + 3 * k) % 250 for i in range(length)] for k, length in enumerate((37, 5, 64, 1))]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def embeds(ids):
    return hf_model("llama").get_input_embeddings()(torch.tensor(ids)).detach()


def answers(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def path(tiny_model_path):  # noqa: F811
    return str(tiny_model_path("llama"))


@pytest.fixture(scope="module")
def llm(path):
    return LLM(path, dtype="float32", max_model_len=128, num_gpu_blocks=60, enable_prompt_embeds=True)


@pytest.fixture(scope="module")
def expected(llm):
    return answers(llm.generate([{"prompt_token_ids": ids} for ids in IDS], PARAMS))


def test_embeddings_and_their_ids_give_the_same(llm, expected):
    prompts = [form for ids in IDS for form in ({"prompt_embeds": embeds(ids)}, {"prompt_token_ids": ids})]
    assert answers(llm.generate(prompts, PARAMS)) == [tokens for tokens in expected for _ in "ab"]


def test_equal_rows_are_a_prefix_hit_and_other_rows_are_not(llm, expected):
    rows = embeds(IDS[2])
    other = rows.clone()
    other[20] += 1
    llm.generate([{"prompt_embeds": rows}], PARAMS)
    again, changed = llm.generate([{"prompt_embeds": rows}, {"prompt_embeds": other}], PARAMS)
    assert answers([again]) == expected[2:3] and again.num_cached_tokens == 48
    assert changed.num_cached_tokens == 0


@pytest.mark.parametrize(
    "settings, preemption",
    [
        ({"max_num_batched_tokens": 16, "encoder_cache_size": 10}, None),
        ({"max_num_batched_tokens": 32, "num_gpu_blocks": 9, "max_model_len": 80}, None),
        ({"max_num_batched_tokens": 32, "num_gpu_blocks": 9, "max_model_len": 80}, Swap(8)),
        ({"async_scheduling": True, "prefix_cache_index": "radix"}, None),
    ],
)
def test_however_it_is_cut(path, expected, settings, preemption):
    fixed = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks": 60, "max_num_seqs": 4}
    llm = LLM(path, **fixed | settings, preemption=preemption, enable_prompt_embeds=True)
    with llm.llm_engine.record() as trace:
        assert answers(llm.generate([{"prompt_embeds": embeds(ids)} for ids in IDS], PARAMS)) == expected
    trace.check()


def test_a_speculating_engine_too(path, expected):
    llm = LLM(path, dtype="float32", max_model_len=128, num_gpu_blocks=60, enable_prompt_embeds=True,
              speculative_config={"method": "ngram", "num_speculative_tokens": 3})  # fmt: skip
    assert answers(llm.generate([{"prompt_embeds": embeds(ids)} for ids in IDS], PARAMS)) == expected


def test_learned_positions_are_added(tiny_model_path):  # noqa: F811
    llm = LLM(
        str(tiny_model_path("gpt2")), dtype="float32", max_model_len=64, num_gpu_blocks=20, enable_prompt_embeds=True
    )
    rows = hf_model("gpt2").get_input_embeddings()(torch.tensor(IDS[0])).detach()
    one, other = llm.generate([{"prompt_embeds": rows}, {"prompt_token_ids": IDS[0]}], PARAMS)
    assert answers([one]) == answers([other])


@pytest.mark.parametrize(
    "value, error",
    [
        (torch.zeros(3, 5), r"shape \[at least 1, 72\], got \[3, 5\]"),
        (torch.zeros(0, 72), "at least 1"),
        (torch.zeros(3, 72, dtype=torch.int64), "array of int64"),
        ("text", "got str"),
        (torch.full((3, 72), torch.nan), "not finite"),
        (torch.zeros(200, 72), "max_model_len=128"),
    ],
)
def test_what_is_no_prompt_is_refused(llm, value, error):
    with pytest.raises((TypeError, ValueError), match=error):
        llm.generate({"prompt_embeds": value}, PARAMS)


def test_what_needs_token_ids_is_refused(llm):
    prompt = {"prompt_embeds": torch.zeros(3, 72)}
    for params, word in (
        (SamplingParams(prompt_logprobs=1), "prompt_logprobs=1"),
        (SamplingParams(repetition_penalty=1.2), "repetition_penalty=1.2"),
        (SamplingParams(truncate_prompt_tokens=2), "truncate_prompt_tokens=2"),
    ):
        with pytest.raises(ValueError, match=word):
            llm.generate(prompt, params)
    with pytest.raises(ValueError, match="neither 'prompt' nor"):
        llm.generate(prompt | {"prompt": "a"}, PARAMS)
    with pytest.raises(ValueError, match="token ids are needed"):
        llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
