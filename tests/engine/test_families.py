"""Every family through the whole engine: chunked prompts, decodes, prefix hits and preemption, against transformers."""

import pytest
import torch
import transformers
from PIL import Image
from tiny_models import (  # noqa: F401 - a fixture
    EOS_TOKEN_ID,
    POOLING_MODELS,
    STATES,
    TINY_MODELS,
    VOCAB_SIZE,
    class_name,
    hf_config,
    hf_model,
    logits_equal,
    next_logits,
    randomise,
    tiny_model_path,
    tiny_tokenizer,
)
from tiny_vlms import VLMS, vlm

from minivllm import LLM, SamplingParams
from minivllm.core.config import make_kv_cache_groups
from minivllm.models.families.registry import families, spec_from_config

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1, logprobs_mode="raw_logits")


def test_no_family_is_listed_without_a_model_here():
    """Those with states go the same way in tests/models/test_state.py, those that read pictures in tests/multimodal, and those
    that predict no tokens in test_encoders.py."""
    states = {class_name(name) for name in STATES}
    walked = {"text": {class_name(name) for name in TINY_MODELS} - states, "states": states}
    walked["text"].add(PUBLISHED)
    walked |= {"pictures": {type(vlm(name)).__name__ for name in VLMS}, "pooling": set(POOLING_MODELS)}
    listed: dict[str, set[str]] = {}
    for family in families():
        listed.setdefault(family.kind, set()).update(family.architectures)
    assert listed == walked


def prompts(name: str) -> list[list[int]]:
    """Ragged, and some begin alike; with dynamic NTK within its limit, beyond which transformers depends on the longest."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, EOS_TOKEN_ID - 1, (200,), generator=generator).tolist()
    if name == "llama-rope-dynamic":
        return [tokens[:44], tokens[:30] + tokens[100:115], tokens[:3], tokens[70:100], tokens[50:99]]
    return [tokens[:60], tokens[:40] + tokens[100:115], tokens[:3], tokens[70:100], tokens[:60] + tokens[150:161]]


PUBLISHED = "Llama4ForConditionalGeneration"
PLAIN = [(name, "reference" if name == "gemma2" else "sdpa") for name in TINY_MODELS if name not in STATES]
CHOSEN = [(name, "auto") for name in ("gpt2", "glm", "cohere2", "olmo2", "llama4")]
"""Learned positions; half a head rotated; parallel blocks, some without positions; norms after; experts and chunks."""


@pytest.mark.parametrize(("name", "backend"), PLAIN + CHOSEN)
def test_logits_and_greedy_tokens_under_preemption_and_prefix_hits(name, backend, tiny_model_path):  # noqa: F811
    walk(hf_model(name), tiny_model_path(name), prompts(name), backend, name == "llama4")


def test_the_text_model_of_a_published_llama_4(tmp_path):
    """Its folder holds an encoder, too. transformers' own forward fails without a picture, so the oracle is its text model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"image_size": 28, "patch_size": 14}
    sizes |= dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
    config = transformers.Llama4Config(text_config=hf_config("llama4").to_dict(), vision_config=sizes)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    walk(model.language_model, tmp_path, prompts("llama4"), "sdpa", True)
    with (
        LLM(str(tmp_path), max_model_len=90, dtype="float32", num_gpu_blocks=30) as llm,
        pytest.raises(ValueError, match="reads text alone"),
    ):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": Image.new("RGB", (8, 8))}})


def walk(model, folder, texts, backend, chunked):
    """Compare, while prompts are cut, preempted and found in the cache. chunked: chunks before the last are freed."""
    how = {"dtype": "float32", "attention_backend": backend, "block_size": 4, "max_num_batched_tokens": 24}
    specs = spec_from_config(model.config.to_dict()).kv_cache_specs(4)
    each = 16 if chunked else 27  # blocks for one request of the longest, and a bit
    blocks = each * len(make_kv_cache_groups(specs)) + 1
    with LLM(str(folder), max_model_len=90, **how, num_gpu_blocks=blocks, max_logprobs=-1) as llm:
        outputs = [out.outputs[0] for _ in range(2) for out in llm.generate(texts, PARAMS, use_tqdm=False)]
        metrics = llm.get_metrics()
    assert metrics["prefix_cache_hits"] > 0 and metrics["num_preemptions"] > 0
    wanted = next_logits(model, texts, [out.token_ids for out in outputs[: len(texts)]])
    for output, want in zip(outputs, 2 * wanted, strict=True):
        assert output.token_ids == want.argmax(-1).tolist()
        got = torch.tensor([[row[token].logprob for token in range(VOCAB_SIZE)] for row in output.logprobs])
        assert want.abs().max() > 3, "random, but not flat"
        assert logits_equal(got, want)
