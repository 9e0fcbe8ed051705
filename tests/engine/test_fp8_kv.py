"""Keys and values of a byte each, through the whole engine."""

from pathlib import Path

import pytest
import torch
from async_workload import workload
from paged import PagedDecoder, make_decoder
from safetensors.torch import load_file, save_file
from tiny_models import hf_model, save_tiny_model, tiny_model_path  # noqa: F401

from minivllm import LLM, SamplingParams
from minivllm.attention.backend import FP8
from minivllm.core.config import EngineArgs
from minivllm.models.tokenizer import get_tokenizer
from minivllm.runtime.executor import load_decoder, plan_engine
from minivllm_kernels.cpu.compile import host_machine

SMALL = {"dtype": "float32", "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 24, "max_model_len": 96}
SWAPPING = {"num_gpu_blocks": 30, "num_cpu_blocks": 60, "preemption_mode": "swap"}


@pytest.fixture(scope="module")
def path(tiny_model_path):  # noqa: F811
    return str(tiny_model_path("llama"))


def load(path, **kwargs):
    return LLM(path, **{"num_gpu_blocks": 200, "kv_cache_dtype": "fp8", **SMALL, **kwargs})


HALVES = "+f16c" in host_machine()[2].split(",")
NUMBA = pytest.param("numba_cpu", marks=pytest.mark.skipif(not HALVES, reason="its kernels read an fp8 cache by F16C"))


def greedy_tokens(llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def test_a_quarter_of_the_bytes_of_float32(path):
    limits = {"num_gpu_blocks": None, "kv_cache_memory_bytes": 1 << 18, "max_num_seqs": 20}
    wide = load(path, kv_cache_dtype="auto", **limits)
    with wide, load(path, **limits) as narrow:
        assert narrow.config.cache.num_gpu_blocks == 4 * wide.config.cache.num_gpu_blocks
        caches = narrow.llm_engine.core.executor.runner.kv_caches
        assert sum(x.nbytes for x in caches) <= 1 << 18 and {x.dtype for x in caches} == {FP8}
        chosen = {d.setting: (d.value, d.why) for llm in (wide, narrow) for d in llm.config.decisions}
        assert chosen["kv_cache_dtype"] == ("fp8", "asked for")
        assert chosen["attention_backend"][0] == ("numba_cpu" if HALVES else "sdpa")


@pytest.mark.parametrize("backend", ["reference", "sdpa", NUMBA])
def test_crowded_swapped_and_from_the_prefix_cache_the_tokens_are_those_of_each_alone(path, backend):
    prompts = workload(1)[0][:6]
    with load(path, attention_backend=backend, enable_prefix_caching=False) as llm:
        alone = [greedy_tokens(llm, [p])[0] for p in prompts]
    for pool in ({}, SWAPPING):
        with load(path, attention_backend=backend, **pool) as llm:
            assert greedy_tokens(llm, prompts) == alone
            assert greedy_tokens(llm, prompts) == alone
            metrics = llm.get_metrics()
            assert metrics["prefix_cache_hits"] > 0 and (metrics["num_preemptions"] > 0) == bool(pool)


def mean_kl(exact, other, tokens) -> float:
    """KL divergence of `other` from `exact`, two decoders: nats a token."""
    found = []
    for decoder in (exact, other):
        paged = PagedDecoder(decoder)
        paged.add("a", tokens)
        found.append(torch.cat([paged.step({"a": n})["a"] for n in (40, 1, 1, len(tokens) - 42)]).log_softmax(-1))
    return (found[0].exp() * (found[0] - found[1])).sum(-1).mean().item()


def test_how_far_the_logits_move():
    """Random weights, whose logits are far apart, make more of an error than a trained model does: see below."""
    tokens = torch.randint(0, 256, (72,), generator=torch.Generator().manual_seed(0)).tolist()
    exact, fp8 = make_decoder(hf_model("llama")), make_decoder(hf_model("llama"), kv_dtype=FP8)
    kl = mean_kl(exact, fp8, tokens)
    print(f"KL of an fp8 cache, random weights: {kl:.4f} nats a token")
    assert 1e-4 < kl < 0.3


@pytest.mark.slow
def test_how_far_the_logits_of_a_trained_model_move():
    args = {"model": "smollm2", "dtype": "float32"}
    plans = [plan_engine(EngineArgs(**args, kv_cache_dtype=dtype)) for dtype in ("auto", "fp8")]
    text = (Path(__file__).parents[2] / "benchmarks" / "alice.txt").read_text()[:1200]
    tokens = get_tokenizer(plans[0].model.path).encode(text)
    kl = mean_kl(*map(load_decoder, plans), tokens)
    print(f"KL of an fp8 cache, SmolLM2: {kl:.5f} nats a token")
    assert 1e-5 < kl < 0.02


@pytest.fixture
def scaled(tmp_path):
    """A checkpoint that brings scales; changes are tensors to add, or to leave out if None."""

    def make(**changes):
        file = save_tiny_model("llama", tmp_path) / "model.safetensors"
        tensors = load_file(file)
        names = {"k0": "model.layers.0.self_attn.k_scale", "v0": "model.layers.0.self_attn.v_scale"}
        names |= {"k1": "model.layers.1.self_attn.k_proj.k_scale", "v1": "model.layers.1.self_attn.v_proj.v_scale"}
        tensors |= {names[short]: tensor for short, tensor in changes.items()}
        save_file(tensors, file, {"format": "pt"})
        return str(tmp_path)

    return make


def test_scales_of_the_checkpoint(scaled):
    path = scaled(k0=torch.tensor(0.5), v0=torch.tensor([0.25]), v1=torch.tensor(3.0))
    plan = plan_engine(EngineArgs(model=path, kv_cache_dtype="fp8_e4m3", **SMALL))
    scales = [layer.mixer.backend.scales for layer in load_decoder(plan).layers]
    assert scales == [(0.5, 0.25), (3.0, 3.0), (1.0, 1.0), (1.0, 1.0)]
    plain = load_decoder(plan_engine(EngineArgs(model=path, **SMALL)))
    assert {layer.mixer.backend.scales for layer in plain.layers} == {(1.0, 1.0)}
    for wrong in (torch.tensor(0.0), torch.tensor([1.0, 2.0]), torch.tensor(torch.nan)):
        broken = scaled(k0=wrong)
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_scale' must be one number above 0, got"):
            load_decoder(plan_engine(EngineArgs(model=broken, kv_cache_dtype="fp8", **SMALL)))


def test_other_names_are_refused(path):
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of 'auto', 'fp8', 'fp8_e4m3'; got 'fp8_e5m2'"):
        EngineArgs(model=path, kv_cache_dtype="fp8_e5m2")
