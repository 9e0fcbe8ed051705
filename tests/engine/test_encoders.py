"""Encoders, and heads on causal models, through the whole engine and against transformers."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    POOLING_MODELS,
    hf_pooling_model,
    pair_tokenizer,
    save_pooling_model,
    save_tiny_model,
    tiny_model_path,
)

from minivllm import LLM, SamplingParams
from minivllm.models.families.registry import architectures
from minivllm.models.pooling import read_sentence_transformers
from minivllm.sampling.params import InvalidParameter
from minivllm.sampling.pooling import PoolingParams, cosine

__all__ = ["tiny_model_path"]
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(2, 250) for _ in range(n)] for n in (1, 2, 15, 16, 17, 40, 60, 40)]
CLASSIFIERS = [name for name in POOLING_MODELS if "Classification" in name]
EMBEDDERS = [name for name in POOLING_MODELS if name not in CLASSIFIERS]


def test_no_pooling_architecture_is_listed_without_a_model_here():
    assert set(POOLING_MODELS) == set(architectures(pooling=True))


@torch.inference_mode()
def transformers_gives(name: str, prompt: list[int], **changes: Any) -> torch.Tensor:
    """Hidden states [n, H], or logits [labels] or [n, labels]."""
    model, ids = hf_pooling_model(name, **changes), torch.tensor([prompt])
    found = (model if name in CLASSIFIERS else model.base_model)(ids, attention_mask=torch.ones_like(ids))
    return (found.logits if name in CLASSIFIERS else found.last_hidden_state)[0].double()


def engine(name: str, folder: Path, **options: Any) -> LLM:
    how = {"dtype": "float32", "max_num_batched_tokens": 128, "max_num_seqs": 8}
    if not name.startswith(("Bert", "Roberta", "XLM", "Modern")):  # chunks, and blocks for a few requests only
        how |= {"max_num_batched_tokens": 24, "num_gpu_blocks": 80, "block_size": 4, "max_model_len": 90}
        how |= {"attention_backend": "reference" if "Gemma2" in name else "sdpa"}
    return LLM(str(folder), **{**how, **options})


@pytest.mark.parametrize("name", EMBEDDERS)
def test_vectors(name: str, tmp_path: Path):
    states = [transformers_gives(name, prompt) for prompt in PROMPTS]
    poolings = {"cls": lambda h: h[0], "mean": lambda h: h.mean(0), "last": lambda h: h[-1]}
    with engine(name, save_pooling_model(name, tmp_path)) as llm:
        params = [PoolingParams(pooling_type=kind, normalize=False) for kind in poolings for _ in PROMPTS]
        outputs = llm.embed(PROMPTS * 3, pooling_params=params, use_tqdm=False)
        tokens = llm.encode(PROMPTS[2], PoolingParams(normalize=False), pooling_task="token_embed", use_tqdm=False)
    expected = [pool(hidden) for pool in poolings.values() for hidden in states]
    np.testing.assert_allclose([o.outputs.embedding for o in outputs], torch.stack(expected), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(tokens[0].outputs.data, states[2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes(name: str, tmp_path: Path):
    task = "token_classify" if "Token" in name else "classify"
    with engine(name, save_pooling_model(name, tmp_path)) as llm:
        logits = llm.encode(PROMPTS, PoolingParams(use_activation=False), pooling_task=task, use_tqdm=False)
        probs = llm.encode(PROMPTS, use_tqdm=False)
        assert llm.config.model.pooling.tasks[0] == task and len(llm.config.model.pooling.labels) == 3
        if task == "classify":
            assert [o.outputs.probs for o in llm.classify(PROMPTS, use_tqdm=False)] == [o.outputs.data for o in probs]
    for prompt, raw, soft in zip(PROMPTS, logits, probs, strict=True):
        expected = transformers_gives(name, prompt)
        np.testing.assert_allclose(raw.outputs.data, expected, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(soft.outputs.data, expected.softmax(-1), atol=1e-5, rtol=1e-5)


def test_modernbert_classifies_a_mean_too(tmp_path: Path):
    name, how = "ModernBertForSequenceClassification", {"classifier_pooling": "mean", "norm_bias": True}
    with engine(name, save_pooling_model(name, tmp_path, **how)) as llm:
        (found,) = llm.encode(PROMPTS[5], PoolingParams(use_activation=False), use_tqdm=False)
    np.testing.assert_allclose(found.outputs.data, transformers_gives(name, PROMPTS[5], **how), atol=1e-5, rtol=1e-5)


PAIRS = [("what is a cat?", "an animal"), ("what is a cat?", "a car that is yellow"), ("x", "y")]


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_a_cross_encoder_scores_pairs(name: str, tmp_path: Path):
    kind = f"{name}ForSequenceClassification"
    tokenizer, model = pair_tokenizer(), hf_pooling_model(kind, num_labels=1)
    with engine(kind, save_pooling_model(kind, tmp_path, num_labels=1)) as llm:
        outputs = llm.score([a for a, _ in PAIRS], [b for _, b in PAIRS], use_tqdm=False)
        short = llm.score("cat", "dog" * 9, pooling_params=PoolingParams(truncate_prompt_tokens=12), use_tqdm=False)
        one = llm.score(PAIRS[0][0], [PAIRS[0][1], PAIRS[1][1]], use_tqdm=False)
    types = {"return_token_type_ids": name == "Bert"}
    for (a, b), output in zip(PAIRS, outputs, strict=True):
        with torch.inference_mode():
            logit = model(**tokenizer(a, text_pair=b, return_tensors="pt", **types)).logits[0, 0]
        assert output.outputs.score == pytest.approx(float(torch.sigmoid(logit)), abs=1e-5)
    assert len(short[0].prompt_token_ids) == 12
    assert [o.outputs.score for o in one] == pytest.approx([o.outputs.score for o in outputs[:2]], abs=1e-6)
    if name == "Bert":  # the second text's type counts
        ids = tokenizer(*PAIRS[0], return_token_type_ids=False, return_tensors="pt")
        with torch.inference_mode():
            blind = float(torch.sigmoid(model(**ids).logits[0, 0]))
        assert abs(outputs[0].outputs.score - blind) > 1e-4


def test_an_embedder_scores_by_the_cosine_and_rewards_are_for_each_token(tmp_path: Path):
    with engine("BertModel", save_pooling_model("BertModel", tmp_path / "a")) as llm:
        a, b = (o.outputs.embedding for o in llm.embed(["cat", "dog"], use_tqdm=False))
        assert llm.score("cat", "dog", use_tqdm=False)[0].outputs.score == pytest.approx(cosine(a, b), abs=1e-6)
        with pytest.raises(ValueError, match="make no pairs"):
            llm.score(["a", "b"], ["c", "d", "e"])
        with pytest.raises(InvalidParameter, match=r"task.*embed, token_embed, score"):
            llm.classify("a")
    name = "LlamaForSequenceClassification"
    with engine(name, save_pooling_model(name, tmp_path / "b", num_labels=1)) as llm:
        (rewards,) = llm.reward([PROMPTS[4]], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        with pytest.raises(ValueError, match="predicts no tokens"):
            llm.generate([PROMPTS[1]])
    ends = [float(transformers_gives(name, PROMPTS[4][: i + 1], num_labels=1)[0]) for i in range(17)]
    np.testing.assert_allclose(np.ravel(rewards.outputs.data), ends, atol=1e-5, rtol=1e-5)


def test_prefix_hits_of_a_classifier(tmp_path: Path):
    name = "Qwen2ForSequenceClassification"
    prompts = [PROMPTS[6], PROMPTS[5], PROMPTS[6][:33] + PROMPTS[4], PROMPTS[5][:8]]
    with engine(name, save_pooling_model(name, tmp_path), attention_backend="auto") as llm:
        for _ in range(2):
            outputs = llm.encode(prompts, PoolingParams(use_activation=False), use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                np.testing.assert_allclose(output.outputs.data, transformers_gives(name, prompt), atol=1e-5, rtol=1e-5)
        assert llm.get_metrics()["prefix_cache_hits"] > 0


def test_an_encoder_in_the_engine(tmp_path: Path):
    """Prompts as a whole, no block, a sound trace, and the length to the last token."""
    with engine("RobertaModel", save_pooling_model("RobertaModel", tmp_path), max_num_batched_tokens=64) as llm:
        assert llm.config.scheduler.max_model_len == 64  # 66 positions, of which the first two are for padding
        with llm.record() as trace:
            llm.embed([[5] * 64, [6] * 40, [7] * 24], use_tqdm=False)
        trace.check()
        assert trace.num_steps == 2 and not any(event[0] == "alloc" for event in trace.events)
        with pytest.raises(ValueError, match=r"65 tokens, but at most 64 .*truncate"):
            llm.embed([[5] * 65])
        cut = llm.embed([list(range(2, 102))], pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
        assert cut[0].prompt_token_ids == list(range(2, 66)), "the beginning is kept"
        text = llm.embed("abcdefgh", pooling_params=PoolingParams(truncate_prompt_tokens=5), use_tqdm=False)[0]
        assert text.prompt_token_ids == [256, *pair_tokenizer()("abc")["input_ids"][1:-1], 257]
        with pytest.raises(ValueError, match="1 token types"):
            llm.embed({"prompt_token_ids": [5, 6], "token_type_ids": [0, 1]})


def test_which_runner(tmp_path: Path):
    folder = save_tiny_model("qwen2", tmp_path)
    options = {"dtype": "float32", "num_gpu_blocks": 32}
    with LLM(str(folder), **options) as llm:
        assert llm.config.model.pooling.generates and llm.config.model.pooling.pooling_type == "mean"
    with LLM(str(folder), runner="pooling", **options) as llm:
        (last,) = llm.embed([PROMPTS[3]], use_tqdm=False)
        (same,) = llm.embed([PROMPTS[3]], pooling_params=PoolingParams(pooling_type="last"), use_tqdm=False)
        assert last.outputs.embedding == same.outputs.embedding
        with pytest.raises(ValueError, match="predicts no tokens"):
            llm.generate([PROMPTS[1]], SamplingParams(max_tokens=1))
    write_modules(folder, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "Normalize")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    with LLM(str(folder), pooler_config={"normalize": False}, **options) as llm:
        facts = llm.config.model.pooling
        assert (facts.pooling_type, facts.normalize, facts.generates) == ("last", False, False)
        assert llm.config.scheduler.max_model_len == 32
    with LLM(str(folder), runner="generate", **options) as llm:
        assert llm.config.model.pooling.generates
    with pytest.raises(ValueError, match="pooler_config: pooling_type is one of"):
        LLM(str(folder), pooler_config={"pooling_type": "max"}, **options)
    with pytest.raises(ValueError, match=r"pooler_config must be a dict"):
        LLM(str(folder), pooler_config={"pooling": "cls"}, **options)


def write_modules(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    kinds = ["Transformer", "Pooling", *more]
    modules = [{"type": f"sentence_transformers.models.{k}", "path": f"{i}_{k}"} for i, k in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_what_sentence_transformers_writes(tmp_path: Path):
    assert read_sentence_transformers(tmp_path) is None
    write_modules(tmp_path, {"pooling_mode": "cls"})
    assert read_sentence_transformers(tmp_path) == {"pooling_type": "cls", "normalize": False, "max_seq_length": None}
    for pooling in ({"pooling_mode": "max"}, {"pooling_mode_max_tokens": True}, {"pooling_mode_mean_tokens": False}):
        write_modules(tmp_path, pooling)
        with pytest.raises(ValueError, match="this pooling is not implemented"):
            read_sentence_transformers(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "cls"}, "Dense")
    with pytest.raises(ValueError, match="type 'Dense' is not implemented"):
        read_sentence_transformers(tmp_path)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({}, "softmax"),
        ({"num_labels": 1}, "sigmoid"),
        ({"problem_type": "regression"}, "identity"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
    ],
)
def test_activations(fields: dict[str, Any], activation: str, tmp_path: Path):
    name = "BertForSequenceClassification"
    folder = save_pooling_model(name, tmp_path, num_labels=fields.pop("num_labels", 3))
    with engine(name, folder, hf_overrides=fields) as llm:
        assert llm.config.model.pooling.activation == activation


def test_what_an_encoder_refuses(tmp_path: Path):
    folder = str(save_pooling_model("BertModel", tmp_path))
    with pytest.raises(ValueError, match="runner='generate': BertModel predicts no tokens"):
        LLM(folder, runner="generate")
    with pytest.raises(ValueError, match="enable_lora is not implemented"):
        LLM(folder, enable_lora=True)
    with pytest.raises(ValueError, match=r"backend 'sdpa' cannot run this model.*causal"):
        LLM(folder, attention_backend="sdpa")
    with pytest.raises(ValueError, match=r"position_embedding_type='relative_key'"):
        LLM(folder, hf_overrides={"position_embedding_type": "relative_key"})
    with pytest.raises(ValueError, match="activation of the scores is 'x.Mish'"):
        about = {"architectures": ["BertForSequenceClassification"], "sbert_ce_default_activation_function": "x.Mish"}
        LLM(folder, hf_overrides=about)
    with LLM(folder, hf_overrides={"matryoshka_dimensions": [8, 16]}) as llm:
        (vector,) = llm.embed("cat", pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
        assert len(vector.outputs.embedding) == 8
        with pytest.raises(InvalidParameter, match="dimensions must be one of those .*8, 16"):
            llm.embed("cat", pooling_params=PoolingParams(dimensions=12))


@pytest.mark.slow
def test_minilm_is_what_sentence_transformers_computes():
    """Mean over the attention mask of transformers' hidden states, scaled to length 1: what its `encode` does."""
    from transformers import AutoModel, AutoTokenizer

    texts = ["The cat sleeps on the warm sofa.", "A kitten dozes.", "Shares fell. " * 30, "x"]
    with LLM("minilm") as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        model, tokenizer = (kind.from_pretrained(llm.model_path) for kind in (AutoModel, AutoTokenizer))
    given = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    np.testing.assert_allclose([o.outputs.embedding for o in outputs], expected, atol=1e-5)


@pytest.mark.slow
def test_minilm_is_what_the_package_itself_computes():
    package = pytest.importorskip("sentence_transformers")
    texts = ["The cat sleeps on the warm sofa.", "A kitten dozes.", "Shares fell. " * 30, "x"]
    with LLM("minilm") as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        expected = package.SentenceTransformer(str(llm.model_path), device="cpu").encode(texts)
    np.testing.assert_allclose([o.outputs.embedding for o in outputs], expected, atol=1e-5)
