"""Two ranks give the tokens of one: tensor, expert and pipeline parallelism by worker processes and by Ray actors."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from adapters import VARIANTS, peft_adapter
from ranks import (
    GREEDY,
    LOOPBACK,
    PROMPTS,
    SIZES,
    check_all_to_all,
    check_bytes,
    check_that_a_death_reaches_every_waiter,
    listening,
    sharded,
    tokens,
)
from safetensors.torch import load_file, save_file
from tiny_models import hf_config, hf_model, tiny_model_path

from minivllm.core.config import EngineArgs
from minivllm.core.module import capture_problem
from minivllm.core.trace import Trace
from minivllm.core.trace_files import perfetto_events
from minivllm.engine.llm import LLM
from minivllm.lora.adapter import LoRARequest
from minivllm.models.loading import SINGLE
from minivllm.runtime.executor import plan_engine
from minivllm.runtime.executors.mp import WorkerError, start_workers, step_timeout
from minivllm.runtime.executors.ray_executor import RayWorkers
from minivllm.sampling.params import SamplingParams, StructuredOutputsParams
from minivllm.spec_decode.proposers import NgramProposer

__all__ = ["tiny_model_path"]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sockets are inherited")


@pytest.fixture(scope="module", params=["mp", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.long])])
def pair(request):
    """Two ranks without a model, for all tests."""
    if request.param == "ray":
        pytest.importorskip("ray", reason="needs Ray: pip install 'minivllm[scale]'")
    workers = start_workers(2, "cpu") if request.param == "mp" else RayWorkers(2, "cpu")
    yield workers
    workers.close()


WAYS = {
    "two shares": {"tensor_parallel_size": 2},
    "two stages": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
}
FAMILIES = ("llama-tied-biased", "qwen3", "gemma3", "gpt-oss", "deepseek-v3", "falcon")
TARGETS = {  # what an adapter may change where it cannot change all
    "gpt-oss": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek-v3": ["q_a_proj", "q_b_proj", "o_proj"],
    "falcon": ["dense", "dense_h_to_4h", "dense_4h_to_h"],
}
CHOICE = StructuredOutputsParams(choice=["yes, of course", "no, never"])
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0, max_tokens=20, structured_outputs=CHOICE),
    GREEDY,
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=5, max_tokens=25, ignore_eos=True, presence_penalty=0.5),
    GREEDY,
]


@pytest.fixture(scope="module")
def family(tiny_model_path, tmp_path_factory):
    """A function: a model of this name, settings that make requests wait for blocks, an adapter, and what one rank says."""

    @cache
    def made(name):
        path, folder = str(tiny_model_path(name)), tmp_path_factory.mktemp("adapter")
        peft_adapter(name, {**VARIANTS["all-linear"], "target_modules": TARGETS.get(name, "all-linear")}, folder, 1)
        changes = {"num_gpu_blocks": 22 if name in ("gemma3", "gpt-oss") else 12, "enable_lora": True}
        changes |= {"max_model_len": 128 if changes["num_gpu_blocks"] > 12 else 100, "max_num_batched_tokens": 48}
        changes |= {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "dynamic_length": False}}
        changes |= {"max_num_seqs": 8}
        adapters = [LoRARequest("one", 1, str(folder)), None] * 3
        with LLM(path, **{**SIZES, **changes}) as llm:
            return path, changes, adapters, all_said(llm, adapters)

    return made


def all_said(llm, adapters):
    """Token ids of two runs, the second one with the prefixes of the first, and log-probabilities of a prompt."""
    runs = [llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=adapters) for _ in range(2)]
    assert all(run[1].outputs[0].text in ("yes, of course", "no, never") for run in runs)
    ids = [[list(output.outputs[0].token_ids) for output in run] for run in runs]
    return ids, [sorted(place) for place in runs[0][3].prompt_logprobs[1:]]


def stage_bytes(name, blocks):
    """Bytes of the matrices and of the cache of each of two stages, from what transformers has."""
    config, found = hf_config(name), []
    tensors = {n: t for n, t in hf_model(name).state_dict().items() if t.dim() > 1 and "_bias" not in n}
    latent = getattr(config, "kv_lora_rank", None)
    width = config.hidden_size // config.num_attention_heads  # of a head, in the family that does not say
    heads = 1 if name == "falcon" else config.num_key_value_heads
    numbers = latent + config.qk_rope_head_dim if latent else 2 * heads * getattr(config, "head_dim", width)
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    for stage in range(2):
        layers, weights = range(2 * stage, 2 * stage + 2), 0
        for full, tensor in tensors.items():
            layer = re.search(r"\.(\d+)\.", full)
            ends = "lm_head" if stage and not config.tie_word_embeddings else "embed"
            mine = int(layer[1]) in layers if layer else ends in full
            weights += tensor.nbytes * (mine and "kv_b_proj" not in full)
        tensors_of_cache = max(Counter(kinds[layer] for layer in layers).values())  # kinds share blocks
        found.append((weights, tensors_of_cache * blocks * 16 * numbers * 4))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_give_the_tokens_of_one(name, way, pair, family):
    """With preemption, prefix hits, chunks of prompts, an adapter, drafts, a structure, log-probabilities and seeds; stages with two batches
    in flight. All families: `tests/models/test_shards.py`."""
    path, changes, adapters, (want, logprobs) = family(name)
    by_expert = name == "deepseek-v3" and way == "two shares"
    llm = sharded(pair, path, **changes, **WAYS[way], enable_expert_parallel=by_expert)
    core, most, submit = llm.llm_engine.core, 0, llm.llm_engine.core._submit

    def counted(scheduled):
        nonlocal most
        submit(scheduled)
        most = max(most, sum(s.total_num_scheduled_tokens > 0 for s, _ in core._in_flight))

    core._submit = counted
    with llm.record() as trace:
        got, logprobs_there = all_said(llm, adapters)
    assert got == want and logprobs_there == logprobs
    metrics = llm.llm_engine.get_metrics()
    for what in ("num_preemptions", "prefix_cache_hits", "spec_decode_num_draft_tokens"):
        assert metrics[what] > 0, what
    memory = core.executor.collective_rpc("memory")
    if way == "two shares":
        check_bytes(path, memory, **changes, enable_expert_parallel=by_expert)
    else:
        assert most == 2
        blocks = changes["num_gpu_blocks"]
        assert [(rank["matrices"], rank["kv_cache"]) for rank in memory] == stage_bytes(name, blocks)
    trace.check()
    counts, step = {}, -1
    for event in trace:
        step = event.step if event.kind == "step" else step
        counts |= {step: event.num_scheduled} if event.kind == "schedule" else {}
    verified = trace.to_pandas()["spec_decode"].groupby(["step", "request_id"]).size()
    assert len(verified) and all(counts[step][request] == n + 1 for (step, request), n in verified.items())
    llm.llm_engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_with_an_int8_cache_give_the_tokens_of_one(way, pair, tiny_model_path):
    path, changes = tiny_model_path("gemma3"), {"num_gpu_blocks": 22, "kv_cache_dtype": "int8_per_token_head"}
    with LLM(str(path), **{**SIZES, **changes}) as llm:
        want = tokens(llm)
    llm = sharded(pair, path, **changes, **WAYS[way])
    assert tokens(llm) == want and tokens(llm) == want
    metrics, memory = llm.llm_engine.get_metrics(), llm.llm_engine.core.executor.collective_rpc("memory")
    assert metrics["num_preemptions"] > 0 and metrics["prefix_cache_hits"] > 0
    if way == "two shares":
        check_bytes(path, memory, **changes)
    llm.llm_engine.close()


def test_settings(monkeypatch):
    assert EngineArgs(tensor_parallel_size=2, pipeline_parallel_size=3).world_size == 6
    assert EngineArgs(pipeline_parallel_size=2).executor == "mp" and EngineArgs().executor == "uni"
    with pytest.raises(ValueError, match="need distributed_executor_backend='mp'"):
        EngineArgs(pipeline_parallel_size=2, distributed_executor_backend="uni")
    monkeypatch.setenv("MINIVLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="must be a number of seconds above 0, got 'soon'"):
        step_timeout()


def test_what_is_padded_is_said(tiny_model_path):
    args = EngineArgs(model=str(tiny_model_path("llama")), **SIZES, tensor_parallel_size=4)
    plan = plan_engine(args)
    (said,) = [d for d in plan.config.decisions if d.setting == "tensor_parallel_size"]
    assert said.value == 4 and said.why.endswith("have zeros: 6 query heads padded to 8 (+33%)")
    plan = plan_engine(replace(args, tensor_parallel_size=2))
    assert [d.why for d in plan.config.decisions if d.setting == "tensor_parallel_size"] == ["asked for"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3"])
def test_two_ranks_send_tokens_to_experts(name, pair, tiny_model_path, tmp_path):
    check_all_to_all(pair, tiny_model_path(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_other_weights_and_sleep_on_two_ranks(way, pair, tiny_model_path, tmp_path):
    """Each rank reads its share of what comes by a folder, and of tensors, which cross by one."""
    path = tiny_model_path("llama-tied-biased")
    state = {name: 0.5 * torch.roll(tensor, 1, 0) for name, tensor in load_file(path / SINGLE).items()}
    (tmp_path / "new").mkdir()
    save_file(state, tmp_path / "new" / SINGLE)
    llm = LLM(str(path), **SIZES)
    old = tokens(llm)
    llm.load_weights(state.items())
    new = tokens(llm)
    llm.close()
    llm = sharded(pair, path, **WAYS[way])
    assert old != new and tokens(llm) == old
    assert llm.load_weights(tmp_path / "new") == 1 and tokens(llm) == new
    llm.sleep(level=2)
    llm.load_weights(state.items())
    llm.wake_up()
    assert tokens(llm) == new
    llm.sleep()
    llm.wake_up()
    assert llm.load_weights() == 3 and tokens(llm) == old
    assert llm.apply_model(capture_problem) == ["SDPABackend is not declared capturable"] * 2
    for function in (lambda model: 1, test_settings):
        with pytest.raises(ValueError, match="crosses to worker processes by its module and name"):
            llm.apply_model(function)
    with pytest.raises(ValueError, match="unknown model"):
        llm.load_weights(tmp_path / "nothing")
    assert tokens(llm) == old
    llm.close()


@pytest.mark.slow
def test_adapters_speculation_structure_and_samples_on_two_ranks(pair, tiny_model_path, tmp_path):
    peft_adapter("llama", VARIANTS["all-linear"], tmp_path / "one", 1)
    peft_adapter("llama", VARIANTS["ends"], tmp_path / "two", 2)
    adapters = [LoRARequest("one", 1, str(tmp_path / "one")), LoRARequest("two", 2, str(tmp_path / "two")), None] * 2
    choice = StructuredOutputsParams(choice=["yes, of course", "no, never"])
    params = [
        GREEDY,
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=choice),
        SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(temperature=1, seed=3, max_tokens=8),
        GREEDY,
    ]

    def run(llm: LLM):
        with llm.llm_engine.record(samples=True) as trace:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapters)
        name = outputs[0].request_id
        frame = llm.llm_engine.explain(trace, name, 1)
        stats = llm.llm_engine.get_metrics()["spec_decode_num_accepted_tokens"]
        return [list(o.outputs[0].token_ids) for o in outputs], outputs[1].outputs[0].text, frame, stats

    changes = {
        "enable_lora": True,
        "max_loras": 2,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "dynamic_length": False},
    }
    results = []
    for make in (LLM, lambda path, **more: sharded(pair, path, **more)):
        llm = make(str(tiny_model_path("llama")), **{**SIZES, **changes})
        results.append(run(llm))
        llm.llm_engine.close()
    (want, _, frame, accepted), (got, text, frame_there, accepted_there) = results
    assert got == want and text in ("yes, of course", "no, never") and accepted_there == accepted > 0
    assert list(frame_there.columns) == list(frame.columns) and len(frame_there) == len(frame)


@pytest.mark.slow
def test_a_recording_tells_what_each_rank_did(pair, tiny_model_path, tmp_path):
    """Joins lie within steps, stages wait for each other, all on the engine's clock; files and Perfetto have it."""
    path = tiny_model_path("llama")
    for stages in (1, 2):
        llm = sharded(pair, path, tensor_parallel_size=2 // stages, pipeline_parallel_size=stages)
        before = llm.llm_engine.core.executor.collective_rpc("memory")
        with llm.record(ranks=True) as trace:
            tokens(llm)
        after = llm.llm_engine.core.executor.collective_rpc("memory")
        tokens(llm)
        started = {event.step: event.time for event in trace if event.kind == "step"}
        assert {rank for rank, *_ in trace.ranks} == {0, 1}
        for rank in (0, 1):
            mine = [span[1:] for span in trace.ranks if span[0] == rank]
            steps = [(at, at + seconds) for name, at, seconds, _ in mine if name == "step"]
            assert len(steps) >= sum(event.kind == "schedule" and bool(event.num_scheduled) for event in trace)
            assert min(started.values()) < steps[0][0] and steps[0][1] < llm.llm_engine.clock.now()
            names = {name for name, *_ in mine} - {"step", "idle"}
            assert names == ({"all_reduce", "all_gather"} if stages == 1 else {"receive"} if rank else {"send"})
            for name, at, seconds, size in mine:
                assert name in ("step", "idle") or any(a <= at and at + seconds <= b for a, b in steps)
            joined = [size for name, _, _, size in mine if name in ("all_reduce", "all_gather")]
            assert len(joined) == after[rank]["calls"] - before[rank]["calls"]
            assert sum(joined) == after[rank]["bytes"] - before[rank]["bytes"]
        llm.close()
    trace.save(tmp_path / "run.jsonl")
    again = Trace.load(tmp_path / "run.jsonl")
    assert again.ranks == trace.ranks
    names = {e["args"]["name"] for e in perfetto_events(again) if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"engine", "requests", "rank 0", "rank 1"}
    waits = [e for e in perfetto_events(again) if e["name"] == "receive"]
    assert waits and all(e["pid"] == 11 for e in waits)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_fetch_blocks_and_agree_on_what_cannot_be(pair, tiny_model_path, tmp_path, way):
    """One rank's half of a block is damaged: neither uses it."""
    path, extra = tiny_model_path("llama-tied-biased"), {"shared_storage_path": str(tmp_path)}
    config = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}
    llm = sharded(pair, path, **WAYS[way], kv_transfer_config=config)
    want = tokens(llm)
    llm.llm_engine.close()
    halves = sorted(tmp_path.glob("*/*.1"))
    assert len(halves) == len(list(tmp_path.glob("*/*.0"))) > 0
    for failures, load_async in ((0, False), (1, False), (1, True)):
        config["kv_connector_extra_config"] = {**extra, "load_async": load_async}
        llm = sharded(pair, path, **WAYS[way], kv_transfer_config=config)
        assert tokens(llm) == want
        metrics = llm.llm_engine.get_metrics()
        assert (metrics["num_kv_load_failures"] > 0) == bool(failures) and metrics["external_prefix_cache_hits"] > 0
        llm.llm_engine.close()
        for half in halves:
            half.write_bytes(b"x")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("pair", ["mp"], indirect=True)  # Ray's: `test_four_ranks`
def test_workers_listen_on_loopback_alone(pair):
    assert listening([process.pid for process in pair.processes]) <= LOOPBACK


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["mp"], indirect=True)
def test_the_end_of_a_worker_reaches_every_waiter(pair, tiny_model_path):
    """Last of those that use the pair: it is gone then."""
    how = r"worker 1 of 2 \(process \d+\) was killed by SIGKILL"
    check_that_a_death_reaches_every_waiter(pair, tiny_model_path("llama"), pair.processes[1].kill, how)
    assert all(process.wait(10) != 0 for process in pair.processes)


SERVE = """
import sys
from minivllm.core.config import EngineArgs
from minivllm.engine.llm import LLM
llm = LLM(sys.argv[1], distributed_executor_backend="mp", dtype="float32", device="cpu", num_gpu_blocks=9, max_model_len=64)
print(*[process.pid for process in llm.llm_engine.core.executor.workers.processes], flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_one_worker_leaves_nothing_behind(tiny_model_path, tmp_path):
    """One rank in a process: the same tokens, no socket; kill -9 of the engine ends the worker too."""
    env = dict(os.environ, OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1", TMPDIR=str(tmp_path))
    command = [sys.executable, "-c", SERVE, str(tiny_model_path("llama"))]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    (worker,) = map(int, engine.stdout.readline().split())
    if sys.platform == "linux":
        assert listening([worker, engine.pid]) == set()
    engine.kill()
    engine.wait()
    deadline = time.monotonic() + 20
    while alive(worker):
        assert time.monotonic() < deadline, "the worker outlives the engine"
        time.sleep(0.02)
    assert not list(tmp_path.glob("minivllm-*"))


@pytest.mark.slow
def test_a_step_that_never_ends_is_an_error_with_the_stacks_of_all_ranks(tiny_model_path, monkeypatch):
    """One rank is stopped: the other stands in a collective."""
    monkeypatch.setenv("MINIVLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    llm = LLM(str(tiny_model_path("llama")), **SIZES, tensor_parallel_size=2)
    workers = llm.llm_engine.core.executor.workers
    workers.processes[1].send_signal(signal.SIGSTOP)
    with pytest.raises(WorkerError, match="did not answer execute_model within 2 s") as caught:
        llm.generate("x", GREEDY, use_tqdm=False)
    first, second = re.split(r"worker 1 of 2 \(process \d+\):", str(caught.value))
    assert "all_reduce" in first and "in execute_model" in first and second.strip() == "does not react: stopped"
    assert all(process.wait(10) == -signal.SIGKILL for process in workers.processes)
    llm.llm_engine.close()
    assert not Path(workers._folder).exists()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_cannot_cross_is_refused_by_name(tiny_model_path):
    path = str(tiny_model_path("llama"))
    with (
        LLM(path, **SIZES) as llm,
        pytest.raises(ValueError, match=r"record\(ranks=True\) needs ranks"),
        llm.record(ranks=True),
    ):
        pass
    with pytest.raises(ValueError, match="logits_processors are objects"):
        LLM(path, distributed_executor_backend="mp", logits_processors=[lambda logits, batch: logits], **SIZES)
    speculation = {"method": NgramProposer(1, 2), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="a proposer that is an object"):
        EngineArgs(model=path, distributed_executor_backend="mp", speculative_config=speculation)
