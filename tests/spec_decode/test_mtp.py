"""The layer that a checkpoint brings to draft with: its guesses are those of a plain torch model with transformers' own layer."""

import random

import pytest
import torch
from draft_heads import LAST, NAMES, mtp_tensors, with_layer  # noqa: F401 - a fixture
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture
from torch.nn import functional

from minivllm import LLM, SamplingParams

MOST = 3
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = {"dtype": "float32", "attention_backend": "sdpa", "max_model_len": 128, "num_gpu_blocks": 60}


def rms(x: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (weight + offset)


@torch.no_grad()
def guesses(name: str, tokens: list[int], count: int) -> list[int]:
    """Over the whole text again for every guess."""
    target, tensors, said = hf_model(name), mtp_tensors(name), []
    _, embedding_norm, hidden_norm, fuse, final_norm = (tensors.get(f"{n}.weight") for n in NAMES[name])
    offset = 1.0 if name.startswith("qwen3-next") else 0.0
    states, layer = target.model(torch.tensor([tokens])).last_hidden_state[0, :-1], target.model.layers[LAST]
    for _ in range(count):
        x = target.model.embed_tokens(torch.tensor([*tokens[1:], *said]))
        if name == "deepseek-v3":
            x[0] = 0
        both = torch.cat([rms(x, embedding_norm, offset), rms(states, hidden_norm, offset)], 1)
        x = functional.linear(both, fuse)[None]
        n = x.shape[1]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        rotation = target.model.rotary_emb(x, torch.arange(n)[None])
        out = layer(x, attention_mask=mask, position_embeddings=rotation)
        out = (out if isinstance(out, torch.Tensor) else out[0])[0, -1]
        normed = rms(out, final_norm, offset)
        said.append(int(target.lm_head(normed).argmax()))
        states = torch.cat([states, (normed if name.startswith("qwen3-next") else out)[None]])
    return said


@pytest.mark.parametrize("name", NAMES)
def test_guesses_are_the_layers_own_and_no_answer_changes(with_layer, name):  # noqa: F811
    path, rng = with_layer(name), random.Random(1)
    shared = [rng.randrange(250) for _ in range(30)]
    prompts = [shared[: 7 * i] + [rng.randrange(250) for _ in range(rng.randrange(1, 20))] for i in range(3)]
    asked = [{"prompt_token_ids": p} for p in prompts]
    with LLM(path, **SIZES) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)]
    config = {"method": "mtp", "num_speculative_tokens": MOST, "dynamic_length": False}
    with LLM(path, speculative_config=config, max_num_batched_tokens=24, max_num_seqs=8, **SIZES) as llm:
        drafter, told = llm.llm_engine.core.executor.runner.drafter, []
        propose = drafter.proposer.propose

        def listen(requests, view):
            drafts = propose(requests, view)
            told.extend((r.token_ids.tolist(), list(d.token_ids)) for r, d in zip(requests, drafts, strict=True))
            return drafts

        drafter.proposer.propose = listen
        for _ in range(2):  # the second finds prefixes in the cache
            assert [o.outputs[0].token_ids for o in llm.generate(asked, GREEDY, use_tqdm=False)] == plain
        assert drafter.problem is None
    drafted = [(tokens, ids) for tokens, ids in told if ids]
    assert len(drafted) > 20
    for tokens, ids in drafted[:: len(drafted) // 5]:
        assert ids == guesses(name, tokens, len(ids))


def test_a_checkpoint_or_a_family_without_the_layer_is_refused(tiny_model_path):  # noqa: F811
    config = {"method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(ValueError, match=r"has no tensor model.layers.4\.\*: its layer to draft with was left out"):
        LLM(tiny_model_path("deepseek-v3"), speculative_config=config, **SIZES)
    with pytest.raises(ValueError, match="a checkpoint of this model has no layer to draft with"):
        LLM(tiny_model_path("llama"), speculative_config=config, **SIZES)
    with pytest.raises(ValueError, match="2 layers to draft with"):
        LLM(
            tiny_model_path("deepseek-v3"),
            speculative_config=config,
            hf_overrides={"num_nextn_predict_layers": 2},
            **SIZES,
        )


def test_the_layers_memory_is_counted(tiny_model_path):  # noqa: F811
    size = {"load_format": "dummy", **SIZES, "num_gpu_blocks": None, "kv_cache_memory_bytes": 1 << 20}
    with LLM(tiny_model_path("deepseek-v3"), **size) as alone:
        count = alone.llm_engine.config.cache.num_gpu_blocks
    config = {"method": "mtp", "num_speculative_tokens": 1}
    with LLM(tiny_model_path("deepseek-v3"), speculative_config=config, **size) as both:
        assert both.llm_engine.config.cache.num_gpu_blocks == count * 4 // 5  # one layer more than four
        both.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY, use_tqdm=False)
        assert both.llm_engine.core.scheduler.spec_stats.num_draft_tokens > 0
