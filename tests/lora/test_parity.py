"""Tokens and logits equal those of weights that PEFT merged, for many adapters in one batch."""

from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import GREEDY, NEW_TOKENS, SIZES, VARIANTS, greedy, peft_adapter, prompts_of
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm import LLM, SamplingParams
from minivllm.core.scheduler import Swap
from minivllm.lora.adapter import LoRARequest
from minivllm.lora.store import AdapterStore


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LoRARequest | None, Any]]:
    """By name: the request, and the merged model of transformers. `base` is the base model."""
    root = tmp_path_factory.mktemp("adapters")
    made: dict[str, tuple[LoRARequest | None, Any]] = {"base": (None, hf_model("llama"))}
    for i, (name, settings) in enumerate(VARIANTS.items()):
        merged = peft_adapter("llama", settings, root / name, seed=i)
        made[name] = LoRARequest(name, i + 1, str(root / name)), merged
    return made


@pytest.fixture(scope="module")
def expected(adapters: Any) -> list[tuple[LoRARequest | None, list[int], list[int]]]:
    """(adapter, prompt, tokens) of all, the adapters mixed."""
    table = [
        (request, prompt, greedy(model, prompt))
        for request, model in adapters.values()
        for prompt in prompts_of("base" if request is None else request.lora_name)
    ]
    return [table[i] for i in np.random.default_rng(0).permutation(len(table))]


def check(llm: LLM, expected: Any) -> None:
    requests, prompts, tokens = zip(*expected, strict=True)
    outputs = llm.generate(list(prompts), GREEDY, lora_request=list(requests), use_tqdm=False)
    for request, output, want in zip(requests, outputs, tokens, strict=True):
        assert output.error is None
        assert output.outputs[0].token_ids == want, request


def test_adapters_differ(expected):
    """Else the others would prove nothing."""
    first = [tokens for _, prompt, tokens in expected if prompt == prompts_of("base")[0]]
    assert len({tuple(tokens) for tokens in first}) > 6


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "numba_cpu_invariant"])
def test_all_in_one_batch(tiny_model_path, expected, backend):  # noqa: F811
    with LLM(
        tiny_model_path("llama"), enable_lora=True, max_loras=8, attention_backend=backend, enforce_eager=False, **SIZES
    ) as llm:
        check(llm, expected)
        check(llm, expected)  # now with prefix hits
        assert llm.get_metrics()["prefix_cache_hits"] > 0


def read_at_once(self: AdapterStore, *about: str) -> Future[None]:
    """`prefetch`, but the adapter is there when it returns: the order in which requests join does not depend on the machine."""
    future = PREFETCH(self, *about)
    wait([future])
    return future


PREFETCH = AdapterStore.prefetch


@pytest.mark.parametrize("preemption", [None, Swap(100)])
def test_few_slots_little_memory(tiny_model_path, expected, preemption, monkeypatch):  # noqa: F811
    """Adapters are evicted and loaded again, requests wait for slots and are preempted, prefixes are found."""
    monkeypatch.setattr(AdapterStore, "prefetch", read_at_once)
    few = {**SIZES, "num_gpu_blocks": 14, "block_size": 8, "max_model_len": 72, "max_num_batched_tokens": 40}
    with LLM(
        tiny_model_path("llama"), enable_lora=True, max_loras=2, max_cpu_loras=3, preemption=preemption, **few
    ) as llm:
        with llm.record() as trace:
            check(llm, expected)
        kinds = [event.kind for event in trace]
        assert kinds.count("lora_evict") >= 6 and kinds.count("preempt") > 3
        assert kinds.count("lora_load") > len(VARIANTS)  # some were loaded again
        assert llm.get_metrics()["prefix_cache_hits"] > 0
        assert any(event.kind == "wait" and event.reason == "max_loras" for event in trace)
        trace.check()
        assert trace.at(len(trace.to_pandas()["steps"]) - 1).loras.keys() == {0, 1}


def test_logits_and_prompt_logprobs(tiny_model_path, adapters):  # noqa: F811
    prompt = prompts_of("base")[0]
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=5, prompt_logprobs=0, ignore_eos=True)
    with LLM(tiny_model_path("llama"), enable_lora=True, max_loras=9, **SIZES) as llm:
        requests = [request for request, _ in adapters.values()]
        outputs = llm.generate([prompt] * len(requests), params, lora_request=requests, use_tqdm=False)
    for (_, model), output in zip(adapters.values(), outputs, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for i, token in enumerate(prompt[1:]):
            assert output.prompt_logprobs[i + 1][token].logprob == pytest.approx(want[i, token].item(), abs=1e-3)
        for token, found in output.outputs[0].logprobs[0].items():
            assert found.logprob == pytest.approx(want[-1, token].item(), abs=1e-3)


def test_long_prompts(tiny_model_path, adapters):  # noqa: F811
    """Runs of many rows beside single ones: two ways to multiply in one step."""
    prompts = [[(7 * i + j) % 250 for i in range(140)] for j in range(4)]
    names = ("ends", "base", "patterns", "all-linear")
    sizes = {**SIZES, "max_model_len": 200}
    with LLM(tiny_model_path("llama"), enable_lora=True, max_loras=4, **sizes) as llm:
        requests = [adapters[name][0] for name in names]
        mixed = [*prompts, [1, 2, 3]]
        outputs = llm.generate(mixed, GREEDY, lora_request=[*requests, adapters["rslora"][0]], use_tqdm=False)
    for name, prompt, output in zip((*names, "rslora"), mixed, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy(adapters[name][1], prompt), name


def test_captured_steps_are_used(tiny_model_path, adapters):  # noqa: F811
    """On a CPU small steps are one launch with adapters, too, and one capture serves every mix of them."""
    pytest.importorskip("numba")
    request, other = adapters["all-linear"][0], adapters["rslora"][0]
    with LLM(tiny_model_path("llama"), enable_lora=True, max_loras=2, **SIZES) as llm:
        captured = llm.llm_engine.core.executor.runner.model.captured
        for mix in ([request, None], [None, request], [request, other], [None, None]):
            llm.generate([[1, 2, 3], [4, 5, 6]], GREEDY, lora_request=mix, use_tqdm=False)
        assert captured.problem is None and not captured.refused
        assert {(2, True), (2, False)} <= captured._programs.keys()


QUERIES_AND_KEYS = {
    "deepseek-v2": ["q_proj", "kv_a_proj_with_mqa"],
    "deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    **{name: ["q_proj", "k_proj"] for name in ("glm", "glm4", "cohere", "cohere2")},
}
"""Families whose rows are reordered when they are loaded, and modules with such rows."""


@pytest.mark.parametrize(
    "family", ["llama-tied-biased", "mistral-window", "qwen2", "qwen3", "gemma3", *QUERIES_AND_KEYS]
)
def test_families(tiny_model_path, tmp_path: Path, family: str) -> None:  # noqa: F811
    settings = {"r": 4, "lora_alpha": 8, "target_modules": QUERIES_AND_KEYS.get(family, "all-linear")}
    merged = peft_adapter(family, settings, tmp_path / "a", seed=3)
    prompt = prompts_of("base")[0]
    with LLM(tiny_model_path(family), enable_lora=True, **SIZES) as llm:
        request = LoRARequest("a", 1, str(tmp_path / "a"))
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0)
        (output,) = llm.generate([prompt], params, lora_request=request, use_tqdm=False)
    assert output.outputs[0].token_ids == greedy(merged, prompt)
    with torch.inference_mode():
        want = merged(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for i, token in enumerate(prompt[1:]):
        assert output.prompt_logprobs[i + 1][token].logprob == pytest.approx(want[i, token].item(), abs=1e-3)
