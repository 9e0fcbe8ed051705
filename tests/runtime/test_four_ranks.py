"""Four ranks, as four shares of each layer and as two stages of two, in processes and in Ray actors: the tokens of one rank.

One group of four serves all checks of a kind. Those with Ray need the extra `scale`, and start a cluster of this machine.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
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
    write_adapter,
)
from tiny_models import TINY_MODELS, tiny_model_path

from minivllm.core.ray_cluster import cluster_folder
from minivllm.engine.llm import LLM
from minivllm.lora.adapter import LoRARequest
from minivllm.runtime.executors.mp import start_workers
from minivllm.runtime.executors.ray_executor import RayWorkers
from minivllm.sampling.params import SamplingParams, StructuredOutputsParams

__all__ = ["tiny_model_path"]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sockets are inherited")
WAYS = {
    "four shares": {"tensor_parallel_size": 4},
    "two stages of two": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
HEADS = {"num_attention_heads": 8}
FAMILIES = {  # fewer KV heads than ranks where the family has them
    "llama-tied-biased": HEADS,
    "qwen3": HEADS,
    "gemma3": HEADS,
    "gpt-oss": HEADS,
    "deepseek-v3": {**HEADS, "num_key_value_heads": 8},
    "falcon": {"num_attention_heads": 4},
}
ray_or_skip = [pytest.mark.slow, pytest.mark.long]


def by_four(name: str) -> str:
    """The name of a model like another, whose heads four ranks can share."""
    kind, fields = TINY_MODELS[name]
    TINY_MODELS.setdefault(f"{name}-by-four", (kind, {**fields, **FAMILIES[name]}))
    return f"{name}-by-four"


def need_ray() -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install 'minivllm[scale]'")


@pytest.fixture(scope="module", params=["mp", pytest.param("ray", marks=ray_or_skip)])
def four(request):
    """Four ranks without a model."""
    if request.param == "ray":
        need_ray()
    workers = start_workers(4, "cpu") if request.param == "mp" else RayWorkers(4, "cpu")
    yield workers
    workers.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "falcon" else [pytest.mark.long]) for name in FAMILIES]
)
def test_the_tokens_of_one_rank(name, way, four, tiny_model_path):
    """With preemption and prefix hits; experts by rank where there are some."""
    blocks = 22 if name in ("gemma3", "gpt-oss") else 12
    changes = {"num_gpu_blocks": blocks, "max_model_len": 128 if blocks > 12 else 100}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    path = str(tiny_model_path(by_four(name)))
    llm = LLM(path, **{**SIZES, **changes})
    want = tokens(llm, params)
    llm.close()
    by_expert = name in ("gpt-oss", "deepseek-v3")
    llm = sharded(four, path, **changes, **WAYS[way], enable_expert_parallel=by_expert)
    assert tokens(llm, params) == want and tokens(llm, params) == want
    metrics = llm.llm_engine.get_metrics()
    assert metrics["num_preemptions"] > 0 and metrics["prefix_cache_hits"] > 0
    if way == "four shares":
        memory = llm.llm_engine.core.executor.collective_rpc("memory")
        check_bytes(path, memory, **changes, enable_expert_parallel=by_expert)
    llm.close()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_four_ranks_send_tokens_to_experts(name, four, tiny_model_path, tmp_path):
    """Two of the heads of six are padded."""
    check_all_to_all(four, tiny_model_path(name), tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_adapters_speculation_and_structure_on_four_ranks(way, four, tiny_model_path, tmp_path):
    name = by_four("llama-tied-biased")
    peft_adapter(name, VARIANTS["all-linear"], tmp_path / "one", 1)
    path, adapters = str(tiny_model_path(name)), [LoRARequest("one", 1, str(tmp_path / "one")), None] * 3
    choice = StructuredOutputsParams(choice=["yes, of course", "no, never"])
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=20, structured_outputs=choice), *[GREEDY] * 4]
    changes = {"enable_lora": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    found = []
    for make in (LLM, lambda path, **more: sharded(four, path, **more, **WAYS[way])):
        llm = make(path, **{**SIZES, **changes})
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapters)
        found.append(([list(o.outputs[0].token_ids) for o in outputs], outputs[1].outputs[0].text))
        llm.close()
    assert found[0] == found[1] and found[0][1] in ("yes, of course", "no, never")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", [*({"tensor_parallel_size": n} for n in (2, 3, 4)), {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_smollm2_on_several_ranks_gives_the_tokens_of_one(smollm2_path, backend, way):
    """SmolLM2 has 9 heads in 3 groups: two and four ranks pad them. With preemption and prefix hits; bytes as computed."""
    if backend == "ray":
        need_ray()
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    changes = {**SIZES, "num_gpu_blocks": 7, "max_model_len": 96}
    found = []
    for how in ({}, {**way, "distributed_executor_backend": backend}):
        llm = LLM(str(smollm2_path), **changes, **how)
        found += [tokens(llm, params), tokens(llm, params)]
        metrics = llm.llm_engine.get_metrics()
        assert metrics["num_preemptions"] > 0 and metrics["prefix_cache_hits"] > 0
        if "tensor_parallel_size" in how:
            memory = llm.llm_engine.core.executor.collective_rpc("memory")
            check_bytes(smollm2_path, memory, num_gpu_blocks=7, max_model_len=96)
            heads = {2: 2, 3: 1, 4: 1}[len(memory)]
            assert memory[0]["kv_cache"] == 7 * 16 * 30 * 2 * heads * 64 * 4
        llm.close()
    assert found[1:] == found[:-1]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_smollm2_with_padded_heads_takes_adapters_drafts_and_structure(smollm2_path, backend, size, tmp_path):
    """All at once, in a cache too small for all requests, twice for prefix hits."""
    if backend == "ray":
        need_ray()
    write_adapter(tmp_path / "one", smollm2_path, "_proj")
    adapters = [LoRARequest("one", 1, str(tmp_path / "one")), None] * 3
    choice = StructuredOutputsParams(choice=["yes, of course", "no, never"])
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 6
    params[1] = SamplingParams(temperature=0, max_tokens=20, structured_outputs=choice)
    changes = {**SIZES, "num_gpu_blocks": 7, "max_model_len": 80, "enable_lora": True}
    changes["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3, "dynamic_length": False}
    found, plain = [], None
    for how in ({}, {"tensor_parallel_size": size, "distributed_executor_backend": backend}):
        llm = LLM(str(smollm2_path), **changes, **how)
        plain = plain or tokens(llm, params)
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapters)
            found.append([list(o.outputs[0].token_ids) for o in outputs])
            assert outputs[1].outputs[0].text in choice.choice
        metrics = llm.llm_engine.get_metrics()
        assert min(metrics[name] for name in ("num_preemptions", "prefix_cache_hits")) > 0
        assert metrics["spec_decode_num_accepted_tokens"] > 0
        llm.close()
    assert found[1:] == found[:-1] and found[0] != plain


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_four_ranks_listen_on_loopback_alone(four):
    folder = cluster_folder() if isinstance(four, RayWorkers) else None
    pids = processes_in(folder) if folder else [process.pid for process in four.processes]
    assert len(pids) >= 4 and listening(pids) <= LOOPBACK


@pytest.mark.slow
def test_the_end_of_one_of_four_reaches_every_waiter(four, tiny_model_path):
    """Last of those that use the four: they are gone then."""
    ray = isinstance(four, RayWorkers)
    pids = four.pids if ray else [process.pid for process in four.processes]
    path = tiny_model_path("llama")
    changes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    how = rf"worker 1 of 4 \(process {pids[1]}\) " + ("has died; Ray says" if ray else "was killed by SIGKILL")
    check_that_a_death_reaches_every_waiter(four, path, lambda: os.kill(pids[1], signal.SIGKILL), how, **changes)
    wait_until(lambda: not any(map(alive, pids)))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def processes_in(folder: str) -> list[int]:
    """Processes that have a file in a folder open, but for this one."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(folder):
                found.add(int(link.parts[2]))
        except OSError:
            pass
    return sorted(found - {os.getpid()})


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


DRIVER = """
import sys
from minivllm.core.ray_cluster import cluster_folder
from minivllm.engine.llm import LLM
llm = LLM(sys.argv[1], distributed_executor_backend="ray", dtype="float32", device="cpu", num_gpu_blocks=9, max_model_len=64)
print(cluster_folder(), len(llm.generate("x", use_tqdm=False)[0].outputs[0].token_ids), flush=True)
if sys.argv[2] == "close":
    llm.close()
else:
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_cluster_of_our_own_leaves_nothing_behind(how, tiny_model_path):
    """kill -9 of the driver, which Ray's agents would outlive; and an engine that is closed."""
    need_ray()
    env = dict(os.environ, OMP_NUM_THREADS="1")
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", DRIVER, str(tiny_model_path("llama")), how]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    folder, count = driver.stdout.readline().split()
    assert int(count) > 0
    if how == "kill":
        assert len(processes_in(folder)) > 5
        driver.kill()
        wait_until(lambda: not Path(folder).exists())
    assert driver.wait() == (-signal.SIGKILL if how == "kill" else 0)
    assert not Path(folder).exists() and not processes_in(folder)


def test_a_missing_ray_is_said(monkeypatch, tiny_model_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"needs Ray, which is not installed: pip install 'minivllm\[scale\]'"):
        LLM(str(tiny_model_path("llama")), distributed_executor_backend="ray", **SIZES)
