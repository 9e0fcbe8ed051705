"""Every family through the whole engine: chunked prompts, decodes, prefix hits and preemption, against transformers."""

import pytest
import torch
from tiny_models import EOS_TOKEN_ID, TINY_MODELS, hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.core.config import make_kv_cache_groups
from minivllm.models.families.registry import architectures, spec_from_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def test_no_family_is_listed_without_a_model_here():
    assert {type(hf_model(name)).__name__ for name in TINY_MODELS} == set(architectures(pooling=False))


def prompts(name: str) -> list[list[int]]:
    """Ragged, and some begin alike; with dynamic NTK within its limit, beyond which transformers depends on the longest."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, EOS_TOKEN_ID - 1, (200,), generator=generator).tolist()
    if name == "llama-rope-dynamic":
        return [tokens[:44], tokens[:30] + tokens[100:115], tokens[:3], tokens[70:100], tokens[50:99]]
    return [tokens[:60], tokens[:40] + tokens[100:115], tokens[:3], tokens[70:100], tokens[:60] + tokens[150:161]]


@torch.inference_mode()
def generated(name: str, tokens: list[int]) -> list[int]:
    model = hf_model(name)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([tokens])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[
        0, len(tokens) :
    ].tolist()


PLAIN = [(name, "reference" if name == "gemma2" else "sdpa") for name in TINY_MODELS]
CHOSEN = [(name, "auto") for name in ("gpt2", "glm", "cohere2", "olmo2", "mixtral")]
"""Learned positions; half a head rotated; parallel blocks, some without positions; norms after; experts."""


@pytest.mark.parametrize(("name", "backend"), PLAIN + CHOSEN)
def test_greedy_tokens_under_preemption_and_prefix_hits(name, backend, tiny_model_path):  # noqa: F811
    want = [generated(name, tokens) for tokens in prompts(name)]
    how = {"dtype": "float32", "attention_backend": backend, "block_size": 4, "max_num_batched_tokens": 24}
    specs = spec_from_config(hf_model(name).config.to_dict()).kv_cache_specs(4)
    blocks = 27 * len(make_kv_cache_groups(specs)) + 1  # for one request of the longest, and a bit
    with LLM(str(tiny_model_path(name)), max_model_len=90, **how, num_gpu_blocks=blocks) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts(name), GREEDY, use_tqdm=False)
            assert [out.outputs[0].token_ids for out in outputs] == want
        metrics = llm.get_metrics()
    assert metrics["prefix_cache_hits"] > 0 and metrics["num_preemptions"] > 0
