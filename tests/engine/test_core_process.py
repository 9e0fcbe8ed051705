"""An engine in a separate process: what crosses, and what happens when one side ends."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from tiny_models import tiny_model_path

from minivllm import AsyncLLM, EngineArgs, SamplingParams
from minivllm.core.output import EngineCoreOutput
from minivllm.core.policy import FCFS
from minivllm.core.request import FinishReason, Request
from minivllm.core.trace import Trace
from minivllm.engine.async_llm import EngineDeadError
from minivllm.engine.core_process import EngineCoreClient, EngineCoreProc
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.wire import Channel, from_columns, in_columns, pack, unpack
from minivllm.sampling.logprobs import Logprob
from minivllm.sampling.params import RequestOutputKind

__all__ = ["tiny_model_path"]

LONG = SamplingParams(max_tokens=250, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def args(tiny_model_path: Any) -> EngineArgs:
    return EngineArgs(model=str(tiny_model_path("llama")), dtype="float32", num_gpu_blocks=64, max_num_seqs=8)


@pytest.fixture
def start(args: EngineArgs) -> Iterator[Callable[[], AsyncLLM]]:
    started: list[AsyncLLM] = []

    def one() -> AsyncLLM:
        started.append(AsyncLLM.from_engine_args(args, engine_in="process"))
        return started[-1]

    yield one
    for llm in started:
        llm.shutdown()


@pytest.mark.parametrize(
    "value",
    [
        EngineCoreOutput("a", [1, 2], FinishReason.STOP, 2, [{1: Logprob(-0.5, 1, "x"), 7: Logprob(-1.0, 2)}, {2: Logprob(0.0)}]),
        EngineArgs(max_model_len=64, hf_overrides={"a": {"b": [1, None]}}),
        SamplingParams(
            seed=2**64 - 1, stop=["x"], logit_bias={3: 1.5}, structured_outputs={"json": {"type": "object"}},  # type: ignore[arg-type]
            repetition_detection={"max_pattern_size": 2, "min_count": 2},  # type: ignore[arg-type]
        ),
        ((1, (2, 3)), frozenset({"a"}), {"k": b"bytes", 5: None}, 1.5, True, "\ud83d\ude00"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_crosses_comes_out_equal(value: Any):
    back = unpack(pack(value))
    assert back == value and type(back) is type(value)


def test_requests_cross_with_every_field():
    request = Request(
        "a", [1, 2], max_tokens=3, stop_token_ids=frozenset({9}), extra_keys=("k", 1), sampling_params=SamplingParams()
    )
    back = unpack(pack(request))
    assert {name: getattr(back, name) for name in Request.__slots__} == {
        n: getattr(request, n) for n in Request.__slots__
    }


def test_outputs_cross_in_columns():
    outputs = [
        EngineCoreOutput("whole", [5], FinishReason.STOP, 5),
        EngineCoreOutput("named", [6], logprobs=[{6: Logprob(-0.5, 1)}]),
        EngineCoreOutput("failed", [], error="no"),
        EngineCoreOutput("plain", [1]),
        EngineCoreOutput("cached", [2, 3], num_cached_tokens=4),
    ]
    assert from_columns(unpack(pack(in_columns(outputs)))) == outputs
    assert from_columns(unpack(pack(in_columns([])))) == []


@pytest.mark.parametrize("value", [lambda: 0, Path("x"), object(), {"a": {1, 2}}])
def test_what_is_not_in_the_table_is_refused_by_name(value: Any):
    with pytest.raises(TypeError, match="cannot cross between processes"):
        pack(["message", value])


def test_no_pickle_is_read_or_written():
    for module in ("wire", "core_process", "async_llm"):
        source = (Path(__file__).parents[2] / f"minivllm/engine/{module}.py").read_text()
        assert "pickle" not in source and "multiprocessing" not in source


def test_statistics_settings_and_errors_are_those_of_an_engine_here(start: Callable[[], AsyncLLM], args: EngineArgs):
    far, near = start(), AsyncLLM.from_engine_args(args)
    assert far.config == near.config
    assert far.get_default_sampling_params() == near.get_default_sampling_params()
    wrong = [
        ("x" * 5000, SamplingParams()),
        ("a", SamplingParams(structured_outputs={"regex": "(["})),  # type: ignore[arg-type]
    ]

    async def run(llm: AsyncLLM) -> list[Any]:
        told = []
        for prompt, params in wrong:
            with pytest.raises(ValueError) as caught:
                await llm.submit(prompt, params)
            told.append((type(caught.value), str(caught.value)))
        texts = [o.outputs[0].text async for o in llm.generate("x" * 40, SamplingParams(temperature=0, max_tokens=9))]
        chosen = SamplingParams(structured_outputs={"choice": ["yes"]}, logprobs=2)  # type: ignore[arg-type]
        choice = [o async for o in llm.generate("a", chosen)][-1].outputs[0]
        metrics = llm.get_metrics()
        del metrics["num_steps"]  # how many pass while a grammar is compiled is a matter of time
        return [told, texts[-1], choice, metrics, await llm.reset_prefix_cache(), await llm.reset_prefix_cache()]

    expected, got = asyncio.run(run(near)), asyncio.run(run(far))
    near.shutdown()
    assert got == expected
    with (
        pytest.raises(EngineDeadError, match=None) if far.errored else pytest.raises(ValueError, match="use engine_in")
    ):
        asyncio.run(far.submit("a", SamplingParams(logits_processors=[lambda logits, view: logits])))


@pytest.mark.parametrize("moment", ["in the middle of an answer", pytest.param("at rest", marks=pytest.mark.slow)])
def test_death_of_the_process_is_seen_by_all(start: Callable[[], AsyncLLM], moment: str):
    llm = start()
    told: list[BaseException] = []
    llm.on_death = told.append
    core: Any = llm.llm_engine.core

    async def run() -> None:
        streams = []
        if moment == "in the middle of an answer":
            streams = [await llm.submit("abc", LONG) for _ in range(12)]  # more than can run at once
            await anext(streams[0])
        core.process.kill()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                async for _ in stream:
                    pass
        end = time.monotonic() + 10
        while not told and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for late in (llm.submit("abc", LONG), llm.reset_prefix_cache()):
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                await late

    asyncio.run(run())
    assert len(told) == 1 and llm.errored
    with pytest.raises(EngineDeadError):
        llm.check_health()


def test_trace_and_clean_end(start: Callable[[], AsyncLLM], tmp_path: Path):
    llm = start()

    async def run() -> None:
        await llm.record_to(str(tmp_path / "run.jsonl"))
        with pytest.raises(Exception, match="recording already"):
            await llm.record_to(str(tmp_path / "again.jsonl"))
        async for _ in llm.generate("abc", replace(LONG, max_tokens=5)):
            pass

    asyncio.run(run())
    llm.shutdown()
    assert llm.llm_engine.core.process.returncode == 0  # type: ignore[attr-defined]
    trace = Trace.load(tmp_path / "run.jsonl")
    trace.check()
    assert len(trace.to_pandas()["requests"]) == 1


@pytest.mark.slow
def test_a_wrong_model_is_the_same_error_as_here(args: EngineArgs):
    wrong = replace(args, model="no/such/model.gguf")
    said = []
    for place in ("thread", "process"):
        with pytest.raises(Exception) as caught:
            AsyncLLM.from_engine_args(wrong, engine_in=place)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


def test_objects_stay_here(args: EngineArgs):
    with pytest.raises(TypeError, match='policy: an object cannot.*engine_in="thread"'):
        AsyncLLM.from_engine_args(args, engine_in="process", policy=FCFS())


ORPHAN = """
import os, sys
from minivllm import EngineArgs
from minivllm.engine.core_process import EngineCoreClient
from minivllm.core.request import Request
from minivllm.sampling.params import SamplingParams
core = EngineCoreClient(EngineArgs(model=sys.argv[1], dtype="float32", num_gpu_blocks=64))
core.add_request(Request("a", [5, 6], max_tokens=200, sampling_params=SamplingParams(seed=1)))
print(core.process.pid, flush=True)
sys.stdin.read()
"""


def test_no_orphan_when_the_parent_is_killed(args: EngineArgs):
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", ORPHAN, args.model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    child.send_signal(signal.SIGINT)  # as from a terminal: the engine's end is its server's decision
    child.send_signal(signal.SIGTERM)
    assert child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    parent.kill()
    parent.wait()
    child.wait(10)


class Core:
    """A core that answers when it is told to."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.outputs: list[EngineCoreOutput] = []

    def add_request(self, request: Request) -> None:
        self.requests.append(request)

    def abort(self, ids: list[str]) -> None:
        self.requests = [r for r in self.requests if r.request_id not in ids]

    def has_requests(self) -> bool:
        return bool(self.outputs)

    def step(self) -> list[EngineCoreOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def get_stats(self) -> dict[str, float]:
        return {"num_requests_running": len(self.requests)}


def client_of(channel: Channel) -> EngineCoreClient:
    """A client without a process."""
    client = object.__new__(EngineCoreClient)
    client.channel, client._sent, client._born, client._stats, client._max_model_len = channel, 0, {}, {}, 100
    client._arrived = deque()
    return client


def test_a_client_of_an_engine_that_sleeps_does_not_wait_for_a_step(args: EngineArgs, monkeypatch: Any):
    """It raises as an engine here does, after the outputs of requests that have ended."""

    def listen(proc: EngineCoreProc) -> None:  # the real one ends its process
        with contextlib.suppress(EOFError, OSError):
            while True:
                proc._put(proc.channel.receive())

    monkeypatch.setattr(EngineCoreProc, "_listen", listen)
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    client, engine = client_of(Channel(ours)), LLMEngine.from_engine_args(args)
    thread = threading.Thread(target=EngineCoreProc(Channel(theirs), engine.core).serve)
    thread.start()
    params = SamplingParams(temperature=0, seed=1)
    try:
        client.add_request(Request("a", [5, 6], max_tokens=60, sampling_params=params))
        client.sleep()
        with pytest.raises(RuntimeError, match="sleeps already"):
            client.sleep()
        outputs: list[EngineCoreOutput] = []
        with pytest.raises(RuntimeError, match=r"it needs kv_cache by wake_up\(\) and weights by wake_up\(\)"):
            while True:
                outputs += client.step()
        assert outputs[-1].finish_reason is FinishReason.ABORT and client.is_sleeping()
        client.add_request(Request("b", [5, 6], max_tokens=2, sampling_params=params))
        client.wake_up()
        while not (outputs and outputs[-1].request_id == "b" and outputs[-1].finish_reason):
            outputs += client.step()
        with pytest.raises(ValueError, match="version must be"):
            client.load_weights(version=-1)
        assert client.load_weights() == 1 and not client.is_sleeping()
    finally:
        client._send("stop")
        thread.join(10)
        engine.close()


def test_an_output_of_an_aborted_request_does_not_reach_its_namesake():
    ours, theirs = (Channel(end) for end in socket.socketpair())
    client = client_of(ours)
    core: Any = Core()
    proc = object.__new__(EngineCoreProc)
    proc.channel, proc.core, proc._taken = theirs, core, 0

    with pytest.raises(TypeError, match="cannot cross"):  # and it does not count as a message
        client.add_request(Request("huge", [1], max_tokens=5, priority=2**70))
    client.add_request(Request("a", [1], max_tokens=5))
    proc._taken += 1
    proc._handle(*theirs.receive())
    client.abort(["a"])
    client.add_request(Request("a", [2], max_tokens=5))
    # of the first "a": the engine has not read the abort yet
    proc._send("outputs", in_columns([EngineCoreOutput("a", [11])]))
    assert client.step() == []
    for _ in range(2):
        proc._taken += 1
        proc._handle(*theirs.receive())
    proc._send("outputs", in_columns([EngineCoreOutput("a", [22], FinishReason.LENGTH)]))
    assert [output.new_token_ids for output in client.step()] == [[22]]
    assert client.get_stats() == {"num_requests_running": 1}


def test_an_engine_that_only_sends_blocks_fills_no_channel():
    """It steps until they are sent; the outputs of these steps would not be read."""
    ours, theirs = (Channel(end) for end in socket.socketpair())

    class Sending(Core):
        scheduler = SimpleNamespace(requests={}, is_sending=True)
        left = 50

        def has_requests(self) -> bool:
            return bool(self.left)

        def step(self) -> list[EngineCoreOutput]:
            self.left -= 1
            self.scheduler.is_sending = self.left > 0
            return []

    proc = object.__new__(EngineCoreProc)
    proc.channel, proc.core, proc._taken = theirs, cast(Any, Sending()), 0
    proc._inbox, proc._news = deque(), threading.Condition()
    served = threading.Thread(target=proc.serve)
    served.start()
    assert ours.receive()[:2] == ["outputs", in_columns([])]  # the last, which says that it is at rest
    proc._put(["stop"])
    served.join(10)
    assert not served.is_alive() and not ours.ready()
