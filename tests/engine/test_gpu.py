"""The whole engine on a GPU. Skipped, with the reason, where there is none."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
import torch
import torch.distributed as dist
from adapters import VARIANTS, peft_adapter
from adapters import greedy as merged_tokens
from async_workload import summary, workload
from safetensors.torch import load_file
from varied_prompts import varied_prompts

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.attention.select import make_backend
from minivllm.core.config import EngineArgs
from minivllm.core.module import Module, ModuleList
from minivllm.engine.core_process import connect_engine
from minivllm.models.decoder import Decoder
from minivllm.models.families.registry import spec_from_config
from minivllm.models.loading import SINGLE, load_model
from minivllm.models.mixers.moe import MoE
from minivllm.models.ops.select import make_layer_ops
from minivllm.models.parallel import Share, TensorGroup
from minivllm.models.quantization.writers import write_compressed
from minivllm.runtime import executor
from minivllm.runtime.kv_connectors import PeerMemoryWorker
from minivllm_kernels.cuda import ops

REASON = ops.device_unsupported(torch.device("cuda", 0))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=f"no GPU to run on: {REASON}")]

PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (5, 40, 17, 120, 64, 3, 33, 90, 7, 8, 9)]
SWAPPING = {"num_gpu_blocks": 40, "num_cpu_blocks": 100, "preemption_mode": "swap", "max_num_batched_tokens": 48, "max_num_seqs": 8}  # fmt: skip
KERNEL_HEADS = {"head_dim": 64, "num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, patch = tmp_path_factory.mktemp("gpu_models"), pytest.MonkeyPatch()
    for name in ("llama", "qwen3", "gemma3"):  # with heads that the kernels are built for
        family, changes = tiny_models.TINY_MODELS[name]
        patch.setitem(tiny_models.TINY_MODELS, f"{name}-64", (family, {**changes, **KERNEL_HEADS}))

    def path(name):
        return root / name if (root / name).exists() else tiny_models.save_tiny_model(name, root / name)

    yield path
    patch.undo()


def greedy(n):
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


def tokens(llm, params, prompts=PROMPTS):
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def load(path, **kwargs):
    return LLM(str(path), device="cuda", **{"num_gpu_blocks": 300, **kwargs})


def transformers_tokens(path, prompts, n):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()
    answers = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(n):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids]).cuda(), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_float32_tokens_are_those_of_transformers(folder, name):
    want = transformers_tokens(folder(name), PROMPTS, 16)
    for kwargs in ({"attention_backend": "reference"}, {"attention_backend": "auto"}, SWAPPING):
        assert tokens(load(folder(name), dtype="float32", **kwargs), greedy(16)) == want, kwargs


@torch.inference_mode()
def test_bfloat16_tokens_of_smollm2_agree_with_transformers_up_to_near_ties(smollm2_path):
    """Both round to 8 bits at different places: at the first other token, transformers' two candidates must be nearly equal."""
    from transformers import AutoModelForCausalLM

    llm = load(smollm2_path, dtype="bfloat16", num_gpu_blocks=2000, max_model_len=1024)
    prompts = varied_prompts(llm.get_tokenizer())
    ours = tokens(llm, greedy(64), prompts)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16).cuda().eval()
    equal = 0
    for at, (prompt, answer) in enumerate(zip(prompts, ours)):
        ids = torch.tensor([prompt + answer]).cuda()
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        best = logits.argmax(-1).tolist()
        place = next((i for i, token in enumerate(answer) if token != best[i]), None)
        equal += place is None
        if place is not None:
            gap = float(logits[place].max() - logits[place, answer[place]])
            print(f"prompt {at}: the first {place} tokens are equal, then the logits lie {gap:.3f} apart")
            assert gap <= 0.25, (at, place, gap)  # logits of about 20 are multiples of 1/8
    print(f"{equal} of {len(prompts)} answers equal throughout")
    assert equal >= 8


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("llama-64", "auto"),
        ("qwen3-64", "auto"),
        ("gemma3-64", "auto"),
        ("qwen3-64", "fp8"),
        ("gemma3-64", "int8_per_token_head"),
    ],
)
def test_graphs_and_swapping_change_no_token(folder, name, kv):
    how = {"dtype": "bfloat16", "attention_backend": "numba_cuda", "kv_cache_dtype": kv}
    eager = load(folder(name), **how, enforce_eager=True)
    runner = eager.llm_engine.core.executor.runner
    assert runner.graphs is None
    want = tokens(eager, greedy(24))
    for kwargs in ({}, SWAPPING):
        llm = load(folder(name), **how, **kwargs)
        for _ in range(2):  # the second time every step is replayed
            got = tokens(llm, greedy(24))
        same = sum(a == b for a, b in zip(got, want))
        assert same >= len(want) - 2, (same, kwargs)  # products of padded rows may round otherwise: a near tie may fall
        assert len(llm.llm_engine.core.executor.runner.graphs) > 0


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_joins_of_one_rank_by_nccl(folder, tmp_path, monkeypatch, enforce_eager):
    """World size 1: every sum and gathering goes through NCCL, launched or in a CUDA graph, and changes no token."""
    want = tokens(load(folder("qwen3-64"), dtype="float32", enforce_eager=enforce_eager), greedy(16))
    alone = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", **alone, device_id=torch.device("cuda", 0))
    try:
        group = TensorGroup(Share(0, 1), dist.group.WORLD)
        whole = executor.load_decoder
        monkeypatch.setattr(executor, "load_decoder", lambda plan: whole(plan, group))
        llm = load(folder("qwen3-64"), dtype="float32", enforce_eager=enforce_eager)
        for _ in range(2):
            assert tokens(llm, greedy(16)) == want
        layers = llm.config.model.num_layers
        assert group.calls >= 2 * layers + 2
        llm.close()
    finally:
        dist.destroy_process_group()


def test_an_engine_reads_blocks_that_it_keeps_in_other_memory(folder, tmp_path):
    """CUDA opens no memory in the process that has it, so an engine's store is read in another way than a peer's."""
    extra = {"shared_storage_path": str(tmp_path), "num_blocks": 60}
    transfer = {"kv_connector": "PeerMemoryConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    small = {
        "dtype": "bfloat16",
        "attention_backend": "numba_cuda",
        "num_gpu_blocks": 16,
        "max_model_len": 200,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 3,
    }
    want = tokens(load(folder("llama-64"), **small), greedy(8))
    llm = load(folder("llama-64"), **small, kv_transfer_config=transfer)
    with llm.llm_engine.record() as trace:
        assert [tokens(llm, greedy(8)) for _ in range(2)] == [want, want]
    assert {"kv_load", "kv_save", "evict"} <= {event.kind for event in trace}
    assert llm.llm_engine.get_metrics()["num_kv_load_failures"] == 0


def test_memory_of_an_engine_that_is_killed_while_it_is_read_is_given_back(folder, tmp_path, monkeypatch):
    extra = {"shared_storage_path": str(tmp_path), "num_blocks": 20_000}
    transfer = {"kv_connector": "PeerMemoryConnector", "kv_connector_extra_config": extra}
    small = {"dtype": "bfloat16", "attention_backend": "numba_cuda", "num_gpu_blocks": 300, "max_model_len": 200}
    path = str(folder("llama-64"))
    want, copy, free = tokens(load(path, **small), greedy(8)), PeerMemoryWorker._copy_there, []
    config = {**transfer, "kv_role": "kv_producer"}
    first = connect_engine(EngineArgs(model=path, device="cuda", **small, kv_transfer_config=config))
    for i, prompt in enumerate(PROMPTS):
        first.add_request(str(i), {"prompt_token_ids": prompt}, greedy(8))
    while first.has_unfinished_requests():
        first.step()

    def killed(self, address, count, pairs):
        first.core.process.kill()
        first.core.process.wait()
        free.append((torch.cuda.mem_get_info()[0], count * sum(cache[:, 0].nbytes for cache in self.kv_caches)))
        copy(self, address, count, pairs)

    monkeypatch.setattr(PeerMemoryWorker, "_copy_there", killed)
    second = load(path, **small, kv_transfer_config={**transfer, "kv_role": "kv_consumer"})
    assert tokens(second, greedy(8)) == want
    assert second.llm_engine.get_metrics()["num_kv_load_failures"] == len(free) == 1 and not list(tmp_path.iterdir())
    (before, size), after = free[0], torch.cuda.mem_get_info()[0]
    assert after - before > 0.9 * size > 1e8
    first.close()


@pytest.mark.parametrize("first", [0, 4])
def test_experts_that_a_rank_holds_are_their_part_of_the_sum_in_a_graph(first):
    """Against float64, one expert after the other; rows of experts that are elsewhere add nothing."""
    model, device = tiny_models.hf_model("qwen3-moe"), torch.device("cuda")
    decoder = Decoder(spec_from_config(model.config.to_dict()), make_backend("sdpa"), torch.bfloat16, device)
    decoder.load_weights(tiny_models.checkpoint(model).items())
    moe = next(layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoE))
    moe.spec, moe.experts = replace(moe.spec, held=(first, 4)), ModuleList(list(moe.experts)[first : first + 4])
    moe.process_weights_after_loading()
    assert len(moe.stacked[0]) == 4 and moe.capturable
    x = torch.randn(37, 72, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    weights, ids = moe.route(x)
    want = torch.zeros(37, 72, dtype=torch.float64, device=device)
    for number, (gate_up, down) in enumerate(zip(*(each.double() for each in moe.stacked), strict=True), first):
        gate, up = (x.double() @ gate_up.T).chunk(2, -1)
        share = (weights.double() * (ids == number)).sum(-1, keepdim=True)
        want += share * (torch.nn.functional.silu(gate) * up @ down.T)
    got = moe(x)
    torch.testing.assert_close(got.double(), want, atol=0.01 * want.abs().max().item(), rtol=0.02)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = moe(x)
    graph.replay()
    assert torch.equal(again, got)


def test_a_replayed_step_equals_the_same_launches(folder):
    """Bit for bit: 3 requests are padded to 4 rows, and the limit of memory makes the second runner launch them one by one."""
    made = []
    for limit in (1 << 30, -1):
        llm = load(folder("qwen3-64"), dtype="bfloat16", attention_backend="numba_cuda")
        runner = llm.llm_engine.core.executor.runner
        runner.graphs.memory_limit = limit
        tokens(llm, greedy(2), PROMPTS[:1])  # takes the one graph that the limit allows
        made.append(tokens(llm, greedy(24), PROMPTS[:3]))
        made.append(tokens(llm, greedy(24), PROMPTS[:3]))
        assert (len(runner.graphs) == 1) == (limit < 0)
    assert made[0] == made[1] == made[2] == made[3]


@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_a_quantized_checkpoint_replays_graphs_and_changes_no_token(folder, tmp_path, form):
    """Numbers of requests for which a graph needs no padding; 24 rows are more than the kernel takes."""
    (tmp_path / form).mkdir()
    write_compressed(load_model(folder("llama-64")), tmp_path / form, form)
    made = []
    for eager in (True, False):
        llm = load(
            tmp_path / form, dtype="bfloat16", attention_backend="numba_cuda", enforce_eager=eager, max_num_seqs=32
        )
        made.append([tokens(llm, greedy(8), (PROMPTS * 3)[:n]) for n in (1, 8, 24)])
    assert made[0] == made[1]
    assert len(llm.llm_engine.core.executor.runner.graphs) >= 3


def test_a_part_replaced_after_graphs_were_captured_runs(folder):
    """Its own code also runs in every step; and when it is gone, steps are captured again."""
    how = {"dtype": "bfloat16", "attention_backend": "numba_cuda"}
    llm = load(folder("qwen3-64"), **how)
    want = tokens(llm, greedy(12), PROMPTS[:3])
    runner = llm.llm_engine.core.executor.runner
    mlp, calls = runner.model.layers[0].mlp, []
    remove = mlp.register_forward_hook(lambda module, args, output: calls.append(1) or torch.zeros_like(output))
    changed = tokens(llm, greedy(12), PROMPTS[:3])
    assert changed != want and len(calls) >= 12
    remove()
    assert tokens(llm, greedy(12), PROMPTS[:3]) == want and len(runner.graphs) > 0


def test_async_scheduling_changes_no_token(folder):
    """Requests of all kinds: stop tokens and strings, penalties, grammars, own transforms, log-probabilities."""
    for kwargs in ({"attention_backend": "reference"}, SWAPPING):
        for seed in range(2):
            prompts, params = workload(seed)
            said = []
            for overlap in (False, True):
                llm = load(folder("llama"), dtype="float32", async_scheduling=overlap, **kwargs)
                assert (llm.llm_engine.core.executor.runner.future is not None) == overlap
                outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
                said.append([[answer[:4] for answer in answers[:-1]] for answers in summary(outputs)])
            assert said[0] == said[1], kwargs


@pytest.mark.parametrize("name", ["llama-64", "qwen3-64", "gemma3-64"])
def test_async_scheduling_replays_graphs(folder, name):
    waiting = load(folder(name), dtype="bfloat16", attention_backend="numba_cuda", async_scheduling=False)
    llm = load(folder(name), dtype="bfloat16", attention_backend="numba_cuda", async_scheduling=True)
    for params in (greedy(24), SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)):
        for _ in range(
            2
        ):  # the second time every step is replayed, and prefixes are cached: other kernels, other rounding
            assert tokens(llm, params) == tokens(waiting, params)
    assert len(llm.llm_engine.core.executor.runner.graphs) > 0


def distance(truth, prompts, completions, loras=(None,)):
    """How much likelier the likeliest token is than the one chosen, by a model in float32: the mean of all places."""
    gaps = []
    for i, (prompt, one) in enumerate(zip(prompts, completions, strict=True)):
        request = {"prompt_token_ids": prompt + list(one.token_ids)}
        params, lora = SamplingParams(max_tokens=1, prompt_logprobs=1), loras[i % len(loras)]
        [out] = truth.generate(request, params, lora_request=lora, use_tqdm=False)
        for token, entry in zip(one.token_ids, out.prompt_logprobs[len(prompt) :], strict=True):
            gaps.append(max(report.logprob for report in entry.values()) - entry[token].logprob)
    return float(np.mean(gaps))


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_with_drafts_replay_graphs_and_are_as_near_to_float32(folder, overlap):
    """Drafts are accepted and rejected: the answers to come, with mistakes."""

    class Guesses:
        def propose(self, requests, view):
            drafts = []
            for request in requests:
                known, start = request.token_ids.tolist(), request.num_prompt_tokens
                truth = answers[tuple(known[:start])][len(known) - start :][: request.most]
                drafts.append([t if (len(known) + i) % 3 else 0 for i, t in enumerate(truth)])
            return drafts

    def answered(llm):
        requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [out.outputs[0] for out in llm.generate(requests, greedy(24), use_tqdm=False)]

    how = {"dtype": "bfloat16", "attention_backend": "numba_cuda"}
    truth = load(folder("llama-64"), dtype="float32", enable_prefix_caching=False)
    plain = answered(load(folder("llama-64"), **how, async_scheduling=False))
    answers = {tuple(prompt): one.token_ids for prompt, one in zip(PROMPTS, plain, strict=True)}
    config = {"method": Guesses(), "num_speculative_tokens": 4, "dynamic_length": False}
    llm = load(folder("llama-64"), **how, async_scheduling=overlap, speculative_config=config)
    limit = 1.5 * distance(truth, PROMPTS, plain) + 0.01
    for _ in range(2):  # the second time prefixes are cached; rows round otherwise when others are beside them
        assert distance(truth, PROMPTS, answered(llm)) < limit
    core = llm.llm_engine.core
    stats = core.scheduler.spec_stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens and stats.error is None
    assert len(core.executor.runner.graphs) > 0


def ahead_of(trace):
    """Steps that were decided before the tokens of the one before were known."""
    return sum(event[0] == "update" and len(event) == 4 for event in trace.events)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_of_the_device_are_verified_ahead_of_the_host(folder, temperature):
    """Texts repeat, so that n-grams are found; the answers are as near to float32 as those of an engine that waits, or the same draws."""
    prompts = [(prompt[:30] * 3)[: 10 + 7 * i] for i, prompt in enumerate(PROMPTS)]
    params = SamplingParams(temperature=temperature, top_k=2, seed=5, max_tokens=60, ignore_eos=True)
    config = {"method": "ngram_gpu", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    how = {"dtype": "bfloat16", "attention_backend": "numba_cuda", "speculative_config": config}

    def answered(llm):
        return [
            out.outputs[0] for out in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        ]

    waiting, llm = (load(folder("llama-64"), **how, async_scheduling=ahead) for ahead in (False, True))
    plain = answered(waiting)
    with llm.record() as trace:
        answers = answered(llm)
    trace.check()
    core = llm.llm_engine.core
    stats = core.scheduler.spec_stats
    assert ahead_of(trace) > 10 and core.executor.runner.device_drafts.current.any()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens and stats.error is None
    if temperature:  # what is drawn depends on rounding now and then: most answers begin alike
        alike = [a.token_ids[:8] == b.token_ids[:8] for a, b in zip(answers, plain, strict=True)]
        assert sum(alike) >= len(alike) - 2
        return
    truth = load(folder("llama-64"), dtype="float32", enable_prefix_caching=False)
    assert distance(truth, prompts, answers) < 1.5 * distance(truth, prompts, plain) + 0.01


def test_with_async_scheduling_the_host_waits_for_nothing_but_tokens(folder):
    llm = load(folder("qwen3-64"), dtype="bfloat16", attention_backend="numba_cuda", async_scheduling=True)
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, logprobs=2)
    for sampling in (greedy(40), params):
        tokens(llm, sampling, PROMPTS[:3])
        for i, prompt in enumerate(PROMPTS[:3]):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        for _ in range(5):
            llm.llm_engine.step()
        torch.cuda.set_sync_debug_mode("error")  # whatever makes the host wait for the whole stream raises
        try:
            for _ in range(20):
                llm.llm_engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()


def torch_ops(decoder):
    ops = make_layer_ops("torch")
    for part in decoder.all_parts():
        if isinstance(part, Module) and "ops" in vars(part):
            part.ops = ops


def prompt_logprobs(llm):
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    answers = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    reports = [entry for answer in answers for entry in answer.prompt_logprobs if entry]
    return np.array([next(iter(entry.values())).logprob for entry in reports])


@pytest.mark.parametrize("name", ["llama-64", "qwen3-64"])
def test_the_ops_of_numba_are_as_near_to_the_truth_as_torchs(folder, name):
    truth, errors = prompt_logprobs(load(folder(name), dtype="float32", attention_backend="sdpa")), []
    for change in (torch_ops, lambda decoder: None):
        llm = load(folder(name), dtype="bfloat16", attention_backend="numba_cuda")
        change(llm.llm_engine.core.executor.runner.model)
        errors.append(np.abs(prompt_logprobs(llm) - truth).mean())
    plain, fused = errors
    assert plain != fused and fused < 1.1 * plain, errors


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(folder):
    llm = load(folder("llama"), dtype="float32", attention_backend="reference")
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=7, max_tokens=12, ignore_eos=True)
    assert [tokens(llm, params, [p])[0] for p in PROMPTS[:4]] == tokens(llm, params, PROMPTS[:4])


def test_the_cache_gets_what_the_largest_step_leaves(folder):
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 1.6e9) / total
    wanted = {"num_gpu_blocks": None, "gpu_memory_utilization": share, "max_num_seqs": 1000}
    llm = load(folder("qwen3-64"), dtype="bfloat16", attention_backend="numba_cuda", **wanted)
    why = {d.setting: d for d in llm.config.decisions}
    assert why["num_gpu_blocks"].why.startswith("gpu_memory_utilization") and why["peak_memory_bytes"].value > 1e6
    tokens(llm, greedy(4), PROMPTS * 20)
    free, total = torch.cuda.mem_get_info()
    assert total - free <= share * total


def test_too_little_memory_says_what_to_do(folder):
    with pytest.raises(
        ValueError, match=r"no room for the KV cache: .*gpu_memory_utilization=0.001.*kv_cache_memory_bytes"
    ):
        load(folder("qwen3-64"), num_gpu_blocks=None, gpu_memory_utilization=0.001)


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Requests of three adapters for the tiny Llama with the kernels' heads, and their merged models."""
    folder("llama-64")
    root, made = tmp_path_factory.mktemp("gpu_adapters"), []
    for i, name in enumerate(("all-linear", "rslora", "patterns")):
        merged = peft_adapter("llama-64", VARIANTS[name], root / name, seed=i)
        made.append((LoRARequest(name, i + 1, str(root / name)), merged))
    return made


def adapted(llm, loras, n):
    """Completions of all prompts twice, by the base and the adapters in turn."""
    prompts, mix = PROMPTS * 2, [None, *loras]
    requests = [mix[i % len(mix)] for i in range(len(prompts))]
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy(n), lora_request=requests, use_tqdm=False)
    return [answer.outputs[0] for answer in answers]


def test_float32_tokens_with_adapters_are_those_of_merged_weights(folder, adapters):
    llm = load(folder("llama-64"), dtype="float32", enable_lora=True, max_loras=2)
    got = adapted(llm, [lora for lora, _ in adapters], 12)
    models = [tiny_models.hf_model("llama-64"), *(merged for _, merged in adapters)]
    prompts = PROMPTS * 2
    assert [one.token_ids for one in got] == [merged_tokens(models[i % 4], p) for i, p in enumerate(prompts)]


@pytest.mark.parametrize("is_async", [False, True])
def test_graphs_with_adapters_are_as_near_to_float32_as_without(folder, adapters, is_async):
    """Adapters come and go in two slots; one graph for each number of rows serves every mix of them."""
    how = {"dtype": "bfloat16", "attention_backend": "numba_cuda", "enable_lora": True, "max_loras": 2}
    loras = [lora for lora, _ in adapters]
    truth = load(folder("llama-64"), dtype="float32", enable_lora=True, max_loras=2, enable_prefix_caching=False)
    prompts, mix = PROMPTS * 2, [None, *loras]
    eager = distance(truth, prompts, adapted(load(folder("llama-64"), **how, enforce_eager=True), loras, 24), mix)
    llm = load(folder("llama-64"), **how, async_scheduling=is_async)
    runner = llm.llm_engine.core.executor.runner
    for _ in range(2):  # the second time prefixes are cached: other rows side by side, other rounding
        got = adapted(llm, loras, 24)
        replayed = distance(truth, prompts, got, mix)
        assert replayed < 1.5 * eager + 0.01
    assert any(key[1] for key in runner.graphs._graphs), "no step with adapters was replayed"
    plain, alone = (
        adapted(llm, [], 24),
        adapted(load(folder("llama-64"), **how | {"enable_lora": False, "max_loras": 1}), [], 24),
    )
    assert distance(truth, prompts, plain) < 1.5 * distance(truth, prompts, alone) + 0.01
    assert distance(truth, prompts, plain, mix) > 10 * replayed + 0.1  # the adapters do change what is likely
    assert sum(a.token_ids != b.token_ids for a, b in zip(plain, got)) > 8


@pytest.mark.parametrize("changes", [{}, {"quantization": "fp8"}], ids=["bf16", "fp8"])
def test_sleep_gives_memory_back_and_weights_come_again(folder, changes):
    """Weights of level 1 come back from the host, and graphs are captured anew: memory lies elsewhere then."""
    path, params = folder("llama-64"), greedy(8)
    llm = load(path, dtype="bfloat16", num_gpu_blocks=20_000, **changes)
    want = tokens(llm, params)
    cache = sum(c.nbytes for c in llm.llm_engine.core.executor.runner.kv_caches)
    state = {name: tensor.roll(1, 0) for name, tensor in load_file(path / SINGLE).items()}
    for level in (1, 2):
        before = torch.cuda.memory_allocated()
        llm.sleep(level)
        assert before - torch.cuda.memory_allocated() >= 0.99 * cache > 50e6
        llm.wake_up(["weights"])
        if level == 2:
            llm.load_weights()
        llm.wake_up()
        assert tokens(llm, params) == want
    llm.load_weights(state.items())
    new = tokens(llm, params)
    llm.load_weights()
    assert new != want and tokens(llm, params) == want
    llm.close()


def test_dummy_weights_are_drawn_where_the_model_is(folder):
    """A seed gives the same weights in every engine on a GPU, and again after a sleep that frees them."""
    path, params = folder("llama-64"), greedy(8)
    answers = []
    for seed in (0, 0, 1):
        with load(path, dtype="bfloat16", load_format="dummy", seed=seed) as llm:
            model, name = load_model(path, load_format="dummy", seed=seed), "model.embed_tokens.weight"
            drawn = dict(model.weights("bfloat16", "cuda"))
            decoder = llm.llm_engine.core.executor.runner.model
            assert drawn[name].is_cuda and torch.equal(
                decoder.embedding[: len(drawn[name])], drawn[name].to(torch.bfloat16)
            )
            assert drawn[name].std().item() == pytest.approx(0.02, rel=0.05)
            answers.append(tokens(llm, params))
            llm.sleep(2)
            llm.wake_up(["weights"])
            llm.load_weights()
            llm.wake_up()
            assert tokens(llm, params) == answers[-1]
    assert answers[0] == answers[1] != answers[2]


COLD = """
import sys
from minivllm import LLM, SamplingParams
from minivllm_kernels.cuda.simt import CudaKernel

def ptx(self, cc):
    raise RuntimeError(f"the engine's process compiles {self.name}")

CudaKernel.ptx = ptx
with LLM(sys.argv[1], device="cuda", dtype="bfloat16", num_gpu_blocks=300, quantization=sys.argv[2] or None) as llm:
    for count, tokens in ((1, 5), (1, 200), (14, 3), (40, 2)):
        prompts = [{"prompt_token_ids": [1] * tokens}] * count
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
print("done")
"""


@pytest.mark.parametrize(("name", "quantization"), [("llama-64", ""), ("qwen3-64", ""), ("llama-64", "fp8")])
def test_other_processes_compile_what_a_new_engine_launches(folder, tmp_path, name, quantization):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core compiles nothing ahead")
    environment = os.environ | {"MINIVLLM_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", COLD, str(folder(name)), quantization]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr[-2000:]
    assert "compiling kernels ahead failed" not in done.stderr
