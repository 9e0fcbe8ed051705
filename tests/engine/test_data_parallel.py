"""Several engines behind a front that looks like one. The replicas here are small things in this process; one slow test has real ones."""

import asyncio
import os
import socket
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from adapters import VARIANTS, peft_adapter
from ranks import GREEDY, PROMPTS, SIZES
from safetensors.torch import load_file
from tiny_models import tiny_model_path

from minivllm.core.config import CacheConfig, EngineArgs, SchedulerConfig
from minivllm.core.module import capture_problem
from minivllm.core.output import EngineCoreOutput
from minivllm.core.ray_cluster import cluster_folder
from minivllm.core.request import FinishReason, Request
from minivllm.core.routing import LeastLoaded, RoundRobin
from minivllm.core.scheduler import Scheduler, WallClock
from minivllm.core.trace import Trace
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.core import next_version
from minivllm.engine.core_process import EngineProcessError
from minivllm.engine.data_parallel import DataParallelCore, replica_args, replica_environment
from minivllm.engine.llm import LLM
from minivllm.lora.adapter import LoRARequest
from minivllm.models.loading import SINGLE
from minivllm.sampling.params import SamplingParams, StructuredOutputsParams

__all__ = ["tiny_model_path"]


class FakeCore:
    """A replica whose steps the test makes. What it is asked is in `asked`."""

    config, generation_config, asleep = None, {}, {}

    def __init__(self, number: int) -> None:
        self.number, self.clock, self.asked, self.ready = number, WallClock(), [], []
        self.ours, self.theirs = socket.socketpair()

    def fileno(self) -> int:
        return self.ours.fileno()

    def produce(self, *outputs: EngineCoreOutput) -> None:
        self.ready.append(list(outputs))
        self.theirs.send(b"!")

    def add_request(self, request: Request) -> None:
        if request.num_prompt_tokens > 50:
            raise ValueError("too long")
        self.asked.append(("add", request.request_id))

    def abort(self, ids: list[str]) -> list[str]:
        self.asked.append(("abort", *ids))
        return ids

    def has_requests(self) -> bool:
        return bool(self.ready)

    def step(self) -> list[EngineCoreOutput]:
        self.ours.recv(1)
        return self.ready.pop(0)

    def get_stats(self) -> dict[str, float]:
        return {"num_requests_running": self.number + 1, "kv_cache_usage_perc": 0.2 * self.number}

    def __getattr__(self, name: str):
        return lambda *args: self.asked.append((name, *args)) or self.number == 0


def request(name: str, length: int = 3) -> Request:
    return Request(name, [1] * length, max_tokens=4)


def token(name: str, last: bool = False) -> EngineCoreOutput:
    return EngineCoreOutput(name, [7], FinishReason.LENGTH if last else None)


@pytest.fixture
def front():
    front = DataParallelCore([FakeCore(0), FakeCore(1)], LeastLoaded())
    yield front
    front.shutdown()


def test_requests_go_where_the_router_says_and_their_ends_are_counted(front):
    a, b = front.cores
    for name in "wxyz":
        front.add_request(request(name))
    assert a.asked == [("add", "w"), ("add", "y")] and b.asked == [("add", "x"), ("add", "z")]
    assert [(r.num_requests, r.num_tokens) for r in front.replicas] == [(2, 6), (2, 6)]
    assert not front.has_requests() and [event.replica for event in front.decisions] == [0, 1, 0, 1]
    b.produce(token("x"), token("z", last=True))
    a.produce(token("w", last=True))
    assert front.has_requests() and {o.request_id for o in front.step()} == {"w", "x", "z"}
    assert [r.num_requests for r in front.replicas] == [1, 1]
    assert [front.engine_of(name) for name in "xyz"] == [1, 0, 0]  # z has ended
    assert [stats["generation_tokens"] for stats in front.engine_stats()] == [1, 2]
    assert front.abort(["x", "unknown", "w"]) == ["x"]
    assert [r.num_requests for r in front.replicas] == [1, 0] and b.asked[-1] == ("abort", "x")
    with pytest.raises(ValueError, match="too long"):
        front.add_request(request("long", 60))
    assert [r.num_requests for r in front.replicas] == [1, 0]


def test_a_refused_request_leaves_no_route(front):
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=16)
    schedulers = [Scheduler(limits, CacheConfig(block_size=4, num_gpu_blocks=20)) for _ in front.cores]
    for core, scheduler in zip(front.cores, schedulers, strict=True):
        core.add_request = scheduler.add_request
    front.add_request(request("before"))
    front.record_to("run.jsonl")
    traces = [scheduler.record() for scheduler in schedulers]
    for name, length in (("a", 3), ("long", 40), ("before", 3), ("b", 3)):
        with pytest.raises(ValueError) if name in ("long", "before") else nullcontext():
            front.add_request(request(name, length))
    events = [[(event.kind, event.request) for event in trace] for trace in traces]
    assert events == [[("route", "b"), ("add", "b")], [("route", "a"), ("add", "a")]]
    assert len(front.decisions) == 3


def test_step_waits_for_whichever_replica_comes_first(front):
    import threading

    front.add_request(request("a"))
    threading.Timer(0.05, lambda: front.cores[1].produce(token("a"))).start()
    assert [o.request_id for o in front.step()] == ["a"]


def test_what_concerns_all_reaches_all(front):
    front.prefetch_lora("k", "p", "d")
    front.record_to("folder/x.jsonl")
    assert front.reset_prefix_cache() is False and front.is_lora_read("k") is False
    for i, core in enumerate(front.cores):
        assert ("prefetch_lora", "k", "p", "d") in core.asked and ("reset_prefix_cache", False) in core.asked
        assert ("record_to", f"folder/x-{i}.jsonl") in core.asked
    assert front.get_stats() == {"num_requests_running": 3, "kv_cache_usage_perc": 0.1}


class Sleeper(FakeCore):
    """One that refuses what is in `refused`."""

    refused, version = "", 0

    def get_stats(self) -> dict[str, float]:
        return {"weight_version": self.version}

    def check_sleep(self, level: int, mode: str) -> None:
        if self.asleep:
            raise RuntimeError("sleeps already")
        if self.refused == "check":
            raise RuntimeError("still being filled")

    def sleep(self, level: int, mode: str) -> None:
        self.asked.append("sleep")
        if self.refused == "sleep":
            raise OSError("no memory")
        self.asleep = {"kv_cache": "wake_up()"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.asleep = {}

    def check_load_weights(self, weights: str, mode: str) -> None:
        if self.refused == "check":
            raise ValueError("another model")

    def load_weights(self, weights: str, version: int | None, mode: str) -> int:
        if self.refused == "load":
            raise ValueError("lacks a tensor")
        self.version = next_version(version, self.version)
        return self.version


def test_all_replicas_sleep_or_none_and_all_have_one_version():
    front = DataParallelCore([Sleeper(0), Sleeper(1)], LeastLoaded())
    a, b = front.cores
    for refused in ("check", "sleep"):
        b.refused = refused
        with pytest.raises((RuntimeError, OSError)):
            front.sleep()
        assert not front.is_sleeping() and bool(a.asked) == (refused == "sleep")
    b.refused = "check"
    with pytest.raises(ValueError, match="another model"):
        front.load_weights("x")
    assert (a.version, b.version) == (0, 0)
    b.refused = "load"
    with pytest.raises(ValueError, match="lacks a tensor"):
        front.load_weights("x")
    assert (a.version, b.version) == (1, 0) and front.get_stats()["weight_version"] == 0
    b.refused = ""
    with pytest.raises(ValueError, match="from 1 on"):
        front.load_weights("x", version=0)
    assert (a.version, b.version) == (1, 0)
    assert front.load_weights("x") == 2 == a.version == b.version == front.get_stats()["weight_version"]
    front.sleep()
    with pytest.raises(RuntimeError, match=r"it needs kv_cache by wake_up\(\)"):
        front.step()
    with pytest.raises(RuntimeError, match="sleeps already"):
        front.sleep()
    front.wake_up()
    b.sleep(1, "abort")
    front.add_request(request("a"))
    a.produce(token("a"))
    assert [output.request_id for output in front.step()] == ["a"]
    front.shutdown()


def test_a_router_that_names_no_replica_is_told_so(front):
    class Wrong:
        def choose(self, request, replicas):
            return 2

    front.router = Wrong()
    with pytest.raises(ValueError, match="router Wrong chose replica 2; there are 0 to 1"):
        front.add_request(request("a"))


def test_settings_of_a_replica(monkeypatch):
    args = EngineArgs(data_parallel_size=2, kv_events_endpoint="tcp://*:5557", device="cpu")
    assert replica_args(args, 1).kv_events_endpoint == "tcp://*:5558" and replica_args(args, 1).data_parallel_size == 1
    with pytest.raises(ValueError, match="it must be tcp://HOST:PORT"):
        replica_args(replace(args, kv_events_endpoint="ipc://x"), 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    both = replace(args, tensor_parallel_size=2, device="auto")
    assert [replica_environment(both, r)["CUDA_VISIBLE_DEVICES"] for r in (0, 1)] == ["4,5", "6,7"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    for quota, threads in ((None, "4"), (4, "2"), (1, "1")):  # of a container
        monkeypatch.setattr("minivllm.runtime.executors.mp.cpu_quota", lambda quota=quota: quota)
        assert replica_environment(args, 0)["OMP_NUM_THREADS"] == threads


def test_one_engine_refuses_to_be_several():
    with pytest.raises(ValueError, match="one LLMEngine is one replica"):
        LLM(data_parallel_size=2)
    with pytest.raises(ValueError, match='needs engine_in="process"'):
        AsyncLLM.from_engine_args(EngineArgs(data_parallel_size=2))
    with pytest.raises(ValueError, match="must be one of 'prefix_aware'"):
        EngineArgs(data_parallel_router="random")


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, pytest.param("ray", marks=pytest.mark.long)])
def test_two_real_replicas_give_the_tokens_of_one(backend, tiny_model_path, tmp_path):
    """By Ray, each has two ranks, and one cluster serves both. The traces of the replicas tell of the router, on one clock."""
    if backend == "ray":
        pytest.importorskip("ray", reason="needs Ray: pip install 'minivllm[scale]'")
    path = str(tiny_model_path("llama"))
    sizes = {"dtype": "float32", "device": "cpu", "num_gpu_blocks": 40, "max_model_len": 128}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [f"A beginning that is long enough for some blocks, {i}" for i in range(6)]
    llm = LLM(path, **sizes)
    want = [o.outputs[0].text for o in llm.generate(prompts, greedy, use_tqdm=False)]
    llm.llm_engine.close()

    async def main() -> None:
        ranks = {"distributed_executor_backend": backend, "tensor_parallel_size": 2 if backend else 1}
        args = EngineArgs(model=path, data_parallel_size=2, **ranks, **sizes)
        engine = AsyncLLM.from_engine_args(args, engine_in="process", router=RoundRobin())
        await engine.record_to(str(tmp_path / "run.jsonl"))

        async def one(prompt: str) -> str:
            async for output in engine.generate(prompt, greedy):
                last = output
            return last.outputs[0].text

        assert await asyncio.gather(*map(one, prompts)) == want
        front = engine.llm_engine.core
        assert all(core.get_stats()["num_steps"] > 0 for core in front.cores)
        assert [(event.replica, event.reason) for event in front.decisions] == [(i % 2, "its turn") for i in range(6)]
        front.cores[1].process.kill()
        with pytest.raises(Exception, match="was killed by SIGKILL"):
            for prompt in prompts:
                await one(prompt)
        engine.shutdown()
        assert all(core.process.poll() is not None for core in front.cores)
        assert cluster_folder() is None

    asyncio.run(main())
    trace = Trace.load(tmp_path / "run-0.jsonl")
    trace.check()
    sent = [event for event in trace if event.kind == "route"]
    added = {event.request: event.arrival for event in trace if event.kind == "add"}
    assert [(event.replica, event.reason) for event in sent[:3]] == [(0, "its turn")] * 3
    assert all(0 <= event.time - added[event.request] < 5 for event in sent)
    assert len(trace.to_pandas()["routes"]) == 2 * len(sent)
    assert issubclass(EngineProcessError, RuntimeError)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-tied-biased", "gemma3"])
@pytest.mark.parametrize("backend", ["mp", "ray"])
def test_two_replicas_of_two_families(name, backend, tiny_model_path, tmp_path):
    """With preemption, prefix hits, an adapter, drafts and a structure; then other weights, sleep, and a function of the models."""
    if backend == "ray":
        pytest.importorskip("ray", reason="needs Ray: pip install 'minivllm[scale]'")
    path, blocks = str(tiny_model_path(name)), 17 if name == "gemma3" else 9
    peft_adapter(name, VARIANTS["all-linear"], tmp_path / "one", 1)
    state = {key: 0.5 * torch.roll(tensor, 1, 0) for key, tensor in load_file(f"{path}/{SINGLE}").items()}
    sizes = {**SIZES, "num_gpu_blocks": blocks, "max_model_len": 128, "enable_lora": True}
    sizes |= {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "dynamic_length": False}}
    choice = StructuredOutputsParams(choice=["yes, of course", "no, never"])
    params = [SamplingParams(temperature=0, max_tokens=20, structured_outputs=choice), *[GREEDY] * 7]
    prompts = ["Is it so?", *PROMPTS[:3], *PROMPTS[:4]]
    adapters = [None, None, *[LoRARequest("one", 1, str(tmp_path / "one"))] * 3, None, None, None]
    with LLM(path, **sizes | {"num_gpu_blocks": 100}) as llm:
        ask = {"use_tqdm": False, "lora_request": adapters}
        old = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, **ask)]
        llm.load_weights(state.items())
        new = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, **ask)]
    assert old != new

    async def main(engine: AsyncLLM) -> None:
        async def one(i: int) -> list[int]:
            async for output in engine.generate(prompts[i], params[i], lora_request=adapters[i]):
                last = output
            return list(last.outputs[0].token_ids)

        async def all_tokens() -> list[list[int]]:
            return await asyncio.gather(*map(one, range(len(prompts))))

        assert await all_tokens() == old and await all_tokens() == old
        stats = [core.get_stats() for core in engine.llm_engine.core.cores]
        for what in ("num_preemptions", "prefix_cache_hits", "spec_decode_num_draft_tokens"):
            assert all(one[what] > 0 for one in stats), (what, [one[what] for one in stats])
        assert await engine.load_weights(state.items()) == 1 and await all_tokens() == new
        await engine.sleep(level=2)
        assert await engine.is_sleeping()
        assert await engine.load_weights() == 2
        await engine.wake_up()
        assert await all_tokens() == old
        await engine.sleep()
        await engine.wake_up()
        assert await all_tokens() == old
        assert await engine.apply_model(capture_problem) == ["SDPABackend is not declared capturable"] * 2

    args = EngineArgs(model=path, data_parallel_size=2, distributed_executor_backend=backend, **sizes)
    engine = AsyncLLM.from_engine_args(args, engine_in="process", router=RoundRobin())
    try:
        asyncio.run(main(engine))
    finally:
        engine.shutdown()
    assert cluster_folder() is None
