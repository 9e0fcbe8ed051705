"""Watching, limiting and stopping the server."""

import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn
from live_server import LiveServer, live_server

from minivllm.core.config import EngineArgs
from minivllm.core.scheduler import Scheduler
from minivllm.core.trace import Trace
from minivllm.core.trace_files import TraceWriter
from minivllm.engine.async_llm import AsyncLLM
from minivllm.models.decoder import Decoder
from minivllm.serving.app import ServerOptions, create_app, listen, make_parser, options_from, run_server

COMPLETE = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True}


def metric(server: LiveServer, name: str) -> float:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.split()[-1]) for line in lines)


def test_metrics_count(tiny: LiveServer):
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
    timed = "vllm:time_to_first_token_seconds_count"
    before = [metric(tiny, name) for name in (*names, timed)]
    for stream in (False, True):
        assert (
            tiny.post(COMPLETE, {"prompt": "abcd", "max_tokens": 7, "ignore_eos": True, "stream": stream}).status_code
            == 200
        )
    after = [metric(tiny, name) for name in (*names, timed)]
    assert [a - b for a, b in zip(after, before, strict=True)] == [8, 14, 2, 2]
    text = tiny.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text
    for name in ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total"):
        assert name in text


def test_the_metrics_of_speculation(tiny: LiveServer, tiny_args: EngineArgs):
    """From the start, under vLLM's names."""
    names = (
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )
    place = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="%d"}'
    assert "spec_decode" not in tiny.get("/metrics").text
    config = {"method": "synthetic", "num_speculative_tokens": 2, "synthetic_acceptance_rate": 1.0}
    with live_server(
        replace(tiny_args, speculative_config=config), ServerOptions(served_model_name=["tiny"])
    ) as server:
        assert [metric(server, name) for name in names] == [0, 0, 0]
        assert place % 1 + " 0.0" in server.get("/metrics").text.splitlines()
        server.post(COMPLETE, {"prompt": "abcd", "max_tokens": 7, "ignore_eos": True})
        lines = server.get("/metrics").text.splitlines()
        assert [metric(server, name) for name in names] == [2, 4, 4]
    assert (
        place % 0 + " 2.0" in lines
        and place % 1 + " 2.0" in lines
        and not any('position="2"' in line for line in lines)
    )
    assert 'minivllm:spec_decode_proposer_failed{engine="0",model_name="tiny"} 0.0' in lines


@pytest.mark.parametrize("how", ["a stream is dropped", "a client hangs up", "the time is over"])
def test_requests_without_an_answer_are_counted(long_args: EngineArgs, how: str):
    names = ('vllm:request_success_total{engine="0",finished_reason="abort"', "vllm:e2e_request_latency_seconds_count")
    with live_server(long_args, ServerOptions(request_timeout=0.3 if how == "the time is over" else None)) as server:
        headers = {"Authorization": f"Bearer {server.key}"}
        if how == "a stream is dropped":
            body = {**LONG, "stream": True}
            with httpx.stream("POST", server.url + COMPLETE, json=body, headers=headers, timeout=60) as response:
                next(response.iter_lines())
        elif how == "a client hangs up":
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + COMPLETE, json=LONG, headers=headers, timeout=0.3)
        else:
            assert server.post(COMPLETE, LONG).status_code == 408
        assert server.wait_at_rest()
        lines = server.get("/metrics").text.splitlines()
    assert [sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names] == [1, 1]


def test_small_endpoints(tiny: LiveServer):
    from minivllm import __version__

    assert tiny.get("/health").status_code == tiny.get("/ping").status_code == 200
    assert tiny.get("/version").json() == {"version": __version__}
    assert tiny.get("/load").json() == {"server_load": 0}
    assert tiny.get("/docs").status_code == 200
    assert {COMPLETE, "/tokenize"} <= set(tiny.get("/openapi.json").json()["paths"])
    tokens = tiny.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert tokens["tokens"] == [64, 65] and tokens["count"] == 2 and tokens["token_strs"] == ["a", "b"]
    assert tiny.post("/detokenize", {"tokens": [64, 65]}).json() == {"prompt": "ab"}
    assert tiny.post("/detokenize", {"tokens": [99999]}).status_code == 400
    tiny.post(COMPLETE, {"prompt": "x" * 40, "max_tokens": 1})
    usage = "prompt_tokens_details"
    assert tiny.post(COMPLETE, {"prompt": "x" * 40, "max_tokens": 1}).json()["usage"][usage]["cached_tokens"] > 0
    assert tiny.post("/reset_prefix_cache").json() == {"success": True}
    assert tiny.post(COMPLETE, {"prompt": "x" * 40, "max_tokens": 1}).json()["usage"][usage]["cached_tokens"] == 0
    assert tiny.post("/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}


def test_request_ids(tiny: LiveServer):
    response = tiny.post(COMPLETE, {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1" and response.json()["id"] == "cmpl-mine-1"
    assert tiny.post(COMPLETE, {"prompt": "a", "max_tokens": 1}).headers["x-request-id"]


def test_the_log_holds_no_prompt(tiny: LiveServer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="minivllm"):
        tiny.post(COMPLETE, {"prompt": "secretword", "max_tokens": 1})
        tiny.post(COMPLETE, {"prompt": "secretword", "max_tokens": 0})
        deadline = time.monotonic() + 10  # a line is written after its answer was sent
        while "/v1/completions 400" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    text = caplog.text
    assert "/v1/completions 200" in text and "/v1/completions 400" in text and "secretword" not in text


@pytest.fixture(scope="module")
def patient(long_args: EngineArgs) -> Iterator[LiveServer]:
    with live_server(long_args, ServerOptions()) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_the_blocks(patient: LiveServer, stream: bool):
    body = json.dumps({**LONG, "n": 4, "temperature": 1, "stream": stream}).encode()
    host, port = patient.url.removeprefix("http://").split(":")
    before = metric(patient, "vllm:generation_tokens_total")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        sock.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while metric(patient, "vllm:generation_tokens_total") == before:
            time.sleep(0.01)
    assert patient.wait_at_rest()
    assert metric(patient, "vllm:generation_tokens_total") - before < 4 * LONG["max_tokens"]


def test_a_full_queue_says_when_to_come_back(long_args: EngineArgs):
    with live_server(long_args, ServerOptions(max_queue=0)) as server:
        body = {**LONG, "n": 16, "temperature": 1, "stream": True}
        with httpx.stream("POST", server.url + COMPLETE, json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            refused = server.post(COMPLETE, {"prompt": "a", "max_tokens": 1})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
        assert server.wait_at_rest()
        assert server.post(COMPLETE, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_time_limit(long_args: EngineArgs):
    with live_server(long_args, ServerOptions(request_timeout=0.5)) as server:  # time for a first token, not for 4,000
        body = {**LONG, "n": 8, "temperature": 1}
        assert server.post(COMPLETE, body).status_code == 408
        lines = [line for line in server.post(COMPLETE, {**body, "stream": True}).text.splitlines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        assert server.wait_at_rest()


def test_the_trace_of_a_run(tiny_args: EngineArgs, tmp_path):
    path = tmp_path / "run.jsonl"
    with live_server(tiny_args, ServerOptions(trace=str(path))) as server:
        server.post(COMPLETE, {"prompt": ["ab", "cd"], "max_tokens": 5})
    trace = Trace.load(path)
    trace.check()
    assert len(trace.to_pandas()["requests"]) == 2


def test_flags():
    args = make_parser().parse_args(
        ["smollm2", "--api-key", "a", "b", "--max-queue", "4", "--max-model-len", "512", "--log-json"]
    )
    options = options_from(args)
    assert (options.api_key, options.max_queue, options.log_json, args.max_model_len) == (["a", "b"], 4, True, 512)
    assert args.host == "127.0.0.1"
    with pytest.raises(ValueError, match="max_queue"):
        options_from(make_parser().parse_args(["--max-queue", "-1"]))


def test_port_in_use():
    with listen("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)


@pytest.mark.slow
def test_the_program_drains_at_sigterm(tiny_args: EngineArgs):
    command = [sys.executable, "-m", "minivllm.cli", "serve", tiny_args.model, "--port", "0", "--dtype", "float32"]
    program = subprocess.Popen([*command, "--num-gpu-blocks", "64"], stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        line = next(line for line in program.stderr if "serving" in line)
        url = "http://127.0.0.1:" + line.strip().rpartition(":")[2]
        body = {**LONG, "max_tokens": 250, "stream": True}
        for _ in range(200):
            try:
                httpx.get(url + "/health")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        with httpx.stream("POST", url + COMPLETE, json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            program.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]" and "error" not in rest[-2] and '"length"' in rest[-2]
        assert program.wait(30) in (0, -signal.SIGTERM)
    finally:
        program.kill()


def test_a_missing_model_is_said_in_one_line():
    command = [sys.executable, "-m", "minivllm.serving.app", "no/such/model.gguf", "--port", "0"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no/such/model.gguf" in done.stderr and "Traceback" not in done.stderr


def test_a_dead_engine_ends_the_program_with_status_one(tiny_args: EngineArgs):
    llm = AsyncLLM.from_engine_args(tiny_args)
    sock, status = listen("127.0.0.1", 0), []
    sock.listen()  # so that the client waits for the server instead of being refused
    thread = threading.Thread(target=lambda: status.append(run_server(create_app(llm), sock)), daemon=True)
    thread.start()

    def cut(output):
        raise OSError("the wire was cut")

    llm.llm_engine.core.executor.execute_model = cut
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    assert httpx.post(url + COMPLETE, json={"prompt": "a", "max_tokens": 1}, timeout=30).status_code == 503
    thread.join(20)
    assert status == [1]


def traced_run(args: EngineArgs, path: Path, during: Callable[[], None] = lambda: None) -> Path:
    """A recording of a few hundred steps; the events that are in memory at the end."""
    with live_server(args, ServerOptions(trace=str(path))) as server:
        for _ in range(4):
            server.post(COMPLETE, {"prompt": ["ab", "cd"], "max_tokens": 200, "ignore_eos": True})
            during()
        assert len(server.llm.llm_engine.core._recording.trace.events) < 2 * TraceWriter.BATCH
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_recording_is_written_as_it_goes(tiny_args: EngineArgs, tmp_path: Path, suffix: str, monkeypatch):
    monkeypatch.setattr(TraceWriter, "BATCH", 100)
    path, sizes = tmp_path / f"run{suffix}", []
    traced_run(tiny_args, path, lambda: sizes.append(path.with_name(path.name + ".part").stat().st_size))
    assert sizes[0] < sizes[-1] and list(tmp_path.iterdir()) == [path]
    trace = Trace.load(path)
    trace.check()
    assert len(trace.to_pandas()["requests"]) == 8


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_full_disk_ends_the_recording_and_keeps_what_is_written(
    tiny_args: EngineArgs, tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
):
    """A limit on the size of files stands in for the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))

    try:
        traced_run(tiny_args, tmp_path / f"run{suffix}", fill)
    except AttributeError:  # there is no recording any more, as it should be
        pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the recording has ended early" in caplog.text
    (kept,) = [path for path in tmp_path.iterdir()]
    trace = Trace.load(kept)
    trace.check()
    assert trace.num_steps > 10


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_waits_for_no_request(second: signal.Signals):
    from minivllm.serving.app import _Server

    server = _Server(uvicorn.Config(lambda: None))
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and not server.force_exit
    server.handle_exit(second, None)
    assert server.force_exit


def test_sleep_and_other_weights_in_development_mode(tiny: LiveServer, tiny_args: EngineArgs, monkeypatch):
    """vLLM's routes, and SGLang's for weights. Requests wait while the engine sleeps."""
    assert tiny.post("/collective_rpc", {"method": "has_weights"}).status_code == 404
    assert tiny.post("/sleep").status_code == 404 and tiny.get("/is_sleeping").status_code == 404
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with live_server(tiny_args, ServerOptions(served_model_name=["tiny"])) as server:
        ask = {"prompt": "abcd", "max_tokens": 7, "ignore_eos": True, "temperature": 0}
        want = server.post(COMPLETE, ask).json()["choices"][0]["text"]
        for wrong in ("/sleep?level=3", "/sleep?lvl=2", "/wake_up?tag=weights"):
            assert server.post(wrong).status_code == 400
        assert server.post("/sleep", {"level": 2}).status_code == 400
        assert server.post("/sleep?level=2").status_code == 200
        assert server.post("/sleep").status_code == 409 and server.get("/is_sleeping").json() == {"is_sleeping": True}
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(server.post(COMPLETE, ask).json()["choices"][0]["text"]))
        thread.start()
        assert server.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200 and not found
        body = {"model_path": tiny_args.model, "weight_version": 5, "abort_all_requests": False}
        assert server.post("/update_weights_from_disk", body).json()["weight_version"] == 5
        thread.join(20)
        assert found == [want] and server.get("/is_sleeping").json() == {"is_sleeping": False}
        assert metric(server, "minivllm:weight_version") == 5
        wrong = server.post("/update_weights_from_disk", {"model_path": "/nowhere"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "model_path"
        wrong = server.post("/update_weights_from_disk", body | {"weight_version": -1})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "weight_version"
        wrong = server.post("/update_weights_from_disk", body | {"weight_version": 4})
        assert wrong.status_code == 400 and "from 5 on" in wrong.text
        assert server.post("/collective_rpc", {"method": "has_weights"}).json() == {"results": ["True"]}
        for bad in (
            {},
            {"method": "_parts"},
            {"method": "sleep", "args": ["1"]},
            {"method": "fly"},
            {"method": "sleep", "x": 1},
        ):
            assert server.post("/collective_rpc", bad).status_code == 400
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "load_weights", lambda model, weights: model._fill({}))
            torn = server.post("/update_weights_from_disk", body)
        assert torn.status_code == 409 and "failed half-way" in torn.text
        for path, given in ((COMPLETE, ask), ("/wake_up", None)):  # neither waits, nor says that all is well
            answer = server.post(path, given)
            assert answer.status_code >= 400 and "failed half-way" in answer.text
        assert server.post("/update_weights_from_disk", body).status_code == 200
        assert server.post(COMPLETE, ask).json()["choices"][0]["text"] == want
        monkeypatch.setattr(Scheduler, "is_sending", True)
        assert server.post("/update_weights_from_disk", body).status_code == 409
