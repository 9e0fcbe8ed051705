"""Keys and values of a byte each, e4m3 or int8 with scales, through the whole engine."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from async_workload import workload
from paged import PagedDecoder, make_decoder
from safetensors.torch import load_file, save_file
from tiny_models import hf_model, save_tiny_model, tiny_model_path  # noqa: F401

from minivllm import LLM, SamplingParams
from minivllm.attention.backend import FP8
from minivllm.core.config import Decision, EngineArgs, KVCacheSpec, MachineFacts, ModelFacts, resolve
from minivllm.models.loading import load_model
from minivllm.models.spec import DecoderSpec
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


BYTES = ["fp8", "int8_per_token_head"]
HALVES = "+f16c" in host_machine()[2].split(",")
FP8_BY_NUMBA = pytest.param(
    "numba_cpu", "fp8", marks=pytest.mark.skipif(not HALVES, reason="its kernels read an fp8 cache by F16C")
)


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


def test_scales_count_and_lie_in_the_blocks(path):
    with load(
        path, kv_cache_dtype="int8_per_token_head", num_gpu_blocks=None, max_num_seqs=20, kv_cache_memory_bytes=1 << 18
    ) as llm:
        spec, caches = llm.config.kv_cache.groups[0].spec, llm.llm_engine.core.executor.runner.kv_caches
        block = 2 * spec.block_size * spec.num_kv_heads * (spec.head_dim + 4)
        assert spec.bytes_per_block == block == caches[0][:, 0].nbytes and {x.dtype for x in caches} == {torch.int8}
        assert llm.config.cache.num_gpu_blocks == (1 << 18) // (block * len(caches))


def test_scales_come_beside_other_options_of_a_cache(path, monkeypatch):
    loaded, asked = load_model(path), DecoderSpec.kv_cache_specs
    more = (("ring", 7),)
    monkeypatch.setattr(DecoderSpec, "kv_cache_specs", lambda *a: [replace(s, options=more) for s in asked(*a)])
    facts = loaded.facts(16, "float32", kv_cache_dtype="int8_per_token_head")
    assert {spec.options for spec in facts.kv_specs} == {(*more, ("scale_bytes", 4))}


@pytest.mark.parametrize(
    ("backend", "kv"),
    [*(("reference", kv) for kv in BYTES), *(("sdpa", kv) for kv in BYTES), ("numba_cpu", BYTES[1]), FP8_BY_NUMBA],
)
def test_crowded_swapped_and_from_the_prefix_cache_the_tokens_are_those_of_each_alone(path, backend, kv):
    prompts, how = workload(1)[0][:6], {"attention_backend": backend, "kv_cache_dtype": kv}
    with load(path, **how, enable_prefix_caching=False) as llm:
        alone = [greedy_tokens(llm, [p])[0] for p in prompts]
    for pool in ({}, SWAPPING):
        with load(path, **how, **pool) as llm:
            assert greedy_tokens(llm, prompts) == alone
            assert greedy_tokens(llm, prompts) == alone
            metrics = llm.get_metrics()
            assert metrics["prefix_cache_hits"] > 0 and (metrics["num_preemptions"] > 0) == bool(pool)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama"])
def test_windows_drafts_and_blocks_of_other_engines_change_no_token_of_int8(tiny_model_path, tmp_path, name):  # noqa: F811
    path, prompts = str(tiny_model_path(name)), [[(k * k + 7 * k * i) % 251 for k in range(60 - i)] for i in range(4)]
    how = {
        "kv_cache_dtype": "int8_per_token_head",
        "enable_prefix_caching": True,
        "block_size": 8,
        "num_gpu_blocks": 300,
    }
    with load(path, **how) as llm:
        want = greedy_tokens(llm, prompts)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    with load(path, **how, speculative_config=drafts) as llm:
        assert greedy_tokens(llm, prompts) == want
        assert llm.get_metrics()["spec_decode_num_draft_tokens"] > 0
    disk = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    for loaded in (False, True) if name == "llama" else ():  # connectors take no windows
        with load(path, **how, kv_transfer_config=disk) as llm:
            assert greedy_tokens(llm, prompts) == want
            assert (llm.get_metrics()["external_prefix_cache_hits"] > 0) == loaded


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
    exact, *others = (make_decoder(hf_model("llama"), kv_dtype=dtype) for dtype in (None, FP8, torch.int8))
    fp8, int8 = (mean_kl(exact, other, tokens) for other in others)
    print(f"KL of an fp8 cache, random weights: {fp8:.4f} nats a token; of int8: {int8:.4f}")
    assert 1e-4 < fp8 < 0.3 and 1e-6 < int8 < fp8 / 3


@pytest.mark.slow
def test_how_far_the_logits_of_a_trained_model_move():
    args = {"model": "smollm2", "dtype": "float32"}
    plans = [plan_engine(EngineArgs(**args, kv_cache_dtype=dtype)) for dtype in ("auto", *BYTES)]
    text = (Path(__file__).parents[2] / "benchmarks" / "alice.txt").read_text()[:1200]
    tokens = get_tokenizer(plans[0].model.path).encode(text)
    exact, *others = map(load_decoder, plans)
    fp8, int8 = (mean_kl(exact, other, tokens) for other in others)
    print(f"KL of an fp8 cache, SmolLM2: {fp8:.5f} nats a token; of int8: {int8:.5f}")
    assert 1e-5 < fp8 < 0.02 and 1e-6 < int8 < fp8 / 3


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
    with pytest.raises(ValueError, match="must be one of 'auto', 'fp8', 'fp8_e4m3', 'int8_per_token_head'; got 'int8'"):
        EngineArgs(model=path, kv_cache_dtype="int8")


@pytest.mark.parametrize("kv", BYTES)
def test_what_has_no_such_cache_says_so(tiny_model_path, kv):  # noqa: F811
    with pytest.raises(ValueError, match="is not implemented for latent attention; use kv_cache_dtype='auto'"):
        load(str(tiny_model_path("deepseek-v3")), kv_cache_dtype=kv)


def test_explain_says_which_kernel_computes_prompts():
    facts = ModelFacts(
        "m", "m", 100, 1, 64, (KVCacheSpec("full", 16, 2, 64, None, 1, (("scale_bytes", 4),)),), 10**6, "bfloat16"
    )
    machine = MachineFacts("cuda", 10**10, 10**10, True, "numba_cuda", "why")
    args = EngineArgs(model="m", kv_cache_dtype="int8_per_token_head", num_gpu_blocks=40)
    chosen = {
        d.setting: (d.value, d.why) for d in resolve(args, facts, machine, Decision("dtype", "bfloat16", "")).decisions
    }
    assert chosen["kv_cache_dtype"][0] == "int8_per_token_head" and "by mma.sync" in chosen["kv_cache_dtype"][1]
