"""Families that this package has not, through transformers' code and our cache; and folders without a tokenizer."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, next_logits, randomise, save_tiny_model, tiny_tokenizer

from minivllm import LLM, SamplingParams
from minivllm.models.fallback import transformers_spec
from minivllm.models.families.registry import is_known

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN_ID,
}
MODELS: dict[str, dict[str, Any]] = {
    "phi": {"partial_rotary_factor": 0.5},
    "seed_oss": {"head_dim": 16},
    "arcee": {},
    "exaone4": {"sliding_window": 24, "sliding_window_pattern": 2},
    "gpt_bigcode": {"n_embd": 72, "n_layer": 2, "n_head": 6, "n_positions": 256},
    "glm4_moe": {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}
"""One KV head; a window; experts; biases; learned positions."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@cache
def hf(model_type: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SIZES, **MODELS[model_type]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    return model


def save(model_type: str, folder: Path) -> str:
    hf(model_type).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


TOKENS = torch.randint(0, EOS_TOKEN_ID - 1, (200,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = [TOKENS[:60], TOKENS[:40] + TOKENS[100:115], TOKENS[:3], TOKENS[70:100], TOKENS[:60] + TOKENS[150:161]]


@pytest.mark.parametrize("model_type", MODELS)
def test_chunks_preemption_and_prefix_hits(model_type: str, tmp_path: Path):
    assert not is_known(hf(model_type).config.to_dict()), "this package has it by now: take another family"
    how = {"dtype": "float32", "attention_backend": "sdpa", "block_size": 4, "max_num_batched_tokens": 24}
    groups = 2 if model_type == "exaone4" else 1
    with LLM(save(model_type, tmp_path), max_model_len=90, **how, num_gpu_blocks=27 * groups + 1) as llm:
        with llm.record() as trace:
            first, again = (
                [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] for _ in "ab"
            )
        trace.check()
        metrics = llm.get_metrics()
    assert first == again == [logits.argmax(-1).tolist() for logits in next_logits(hf(model_type), PROMPTS, first)]
    assert metrics["prefix_cache_hits"] > 0 and metrics["num_preemptions"] > 0


def test_logits_and_vectors_on_the_kernels(tmp_path: Path):
    """The logits' own scaling and caps are the model's; a family that is here too can be had both ways."""
    folder = str(save_tiny_model("gemma3", tmp_path))
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3, logprobs=3)
    found = []
    for impl in ("minivllm", "transformers"):
        with LLM(folder, model_impl=impl, dtype="float32", num_gpu_blocks=64) as llm:
            (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
            (vector,) = llm.embed([PROMPTS[1]], use_tqdm=False)
        entries = [next(iter(entry.items())) for entry in output.prompt_logprobs[1:]]
        found.append(
            ([logprob.logprob for _, logprob in entries], output.outputs[0].token_ids, vector.outputs.embedding)
        )
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-4)
    np.testing.assert_allclose(found[1][2], found[0][2], atol=1e-4)
    assert found[1][1] == found[0][1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bloom"}, "BloomForCausalLM .*AttentionInterface"),
        ({"model_type": "mamba"}, "MambaForCausalLM .*AttentionInterface"),
        ({"model_type": "llama4_text", **SIZES}, "Llama4ForCausalLM .*chunked_attention"),
        ({"architectures": ["FrogForCausalLM"], "model_type": "frog"}, "FrogForCausalLM .*no such language model"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "BertModel .*no such language model"),
    ],
)
def test_what_cannot_run_is_refused_by_name(config: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        transformers_spec(config)


def test_options_and_broken_checkpoints(tmp_path: Path):
    folder = save("arcee", tmp_path)
    with pytest.raises(ValueError, match="ArceeForCausalLM"):
        LLM(folder, model_impl="minivllm")
    with pytest.raises(ValueError, match="enable_lora is not implemented for ArceeForCausalLM"):
        LLM(folder, enable_lora=True, num_gpu_blocks=32)
    from safetensors.torch import load_file, save_file

    tensors = load_file(f"{folder}/model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"ArceeForCausalLM: the checkpoint lacks model\.norm\.weight"):
        LLM(folder, num_gpu_blocks=32)
    with LLM(folder, load_format="dummy", num_gpu_blocks=32) as llm:
        assert len(llm.generate([PROMPTS[2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_a_folder_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = save_tiny_model("llama", tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="holds no tokenizer"):
        patch.setattr("minivllm.runtime.executor.load_decoder", lambda plan: pytest.fail("the weights were read first"))
        LLM(str(folder), num_gpu_blocks=32)
    with LLM(str(folder), skip_tokenizer_init=True, num_gpu_blocks=32) as llm:
        plain = SamplingParams(temperature=0, max_tokens=3, detokenize=False)
        assert len(llm.generate([PROMPTS[2]], plain, use_tqdm=False)[0].outputs[0].token_ids) == 3
        assert len(llm.embed([PROMPTS[2]], use_tqdm=False)[0].outputs.embedding) == 72
        for prompt, params, words in (("a", plain, "no tokenizer"), ([5], SamplingParams(), "needs a tokenizer")):
            with pytest.raises(ValueError, match=words):
                llm.generate([prompt], params)
