"""What goes wrong is clear and bounded: a program of its own, with its engine in a separate process."""

import asyncio
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trustme
from live_server import live_server
from prometheus_client.parser import text_string_to_metric_families

from minivllm.cli import main
from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions
from minivllm.serving.client import ServerError, request

COMPLETE = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@dataclass
class Program:
    """`minivllm serve` as a user starts it. ``lines``: what it has written to stderr."""

    process: "subprocess.Popen[str]"
    url: str
    lines: list[str]

    @property
    def engine(self) -> psutil.Process:
        return next(p for p in psutil.Process(self.process.pid).children() if "core_process" in " ".join(p.cmdline()))

    def wait_for(self, text: str, seconds: float = 30) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in self.lines:
                if text in line:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"{text!r} was not said:\n" + "".join(self.lines))


@contextmanager
def program(args: EngineArgs, *flags: str) -> Iterator[Program]:
    command = [sys.executable, "-P", "-m", "minivllm.cli", "serve", args.model, "--port", "0", "--dtype", "float32"]
    command += ["--num-gpu-blocks", str(args.num_gpu_blocks), "--max-num-seqs", "8", *flags]
    if args.hf_overrides is not None:
        command += ["--hf-overrides", json.dumps(args.hf_overrides)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stderr is not None
    started = Program(process, "", [])
    threading.Thread(target=lambda: started.lines.extend(iter(process.stderr.readline, "")), daemon=True).start()
    try:
        started.url = started.wait_for(" on http", 120).strip().rpartition(" on ")[2]
        until(lambda: can_connect(started.url))
        yield started
    finally:
        process.kill()
        process.wait()


def can_connect(url: str) -> bool:
    host, port = url.rpartition("//")[2].split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
        return True
    except OSError:
        return False


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def open_stream(url: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer is not read yet."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, int(port)))
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.slow
def test_an_engine_killed_in_the_middle(long_args: EngineArgs):
    with program(long_args) as server:
        with httpx.stream(
            "POST", server.url + COMPLETE, json={**LONG, "n": 8, "temperature": 1}, timeout=30
        ) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            server.engine.kill()
            rest = list(lines)
        said = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert said["code"] == "engine_dead" and "killed by SIGKILL" in said["message"] and rest[-1] == "data: [DONE]"
        assert server.process.wait(20) == 1
        assert "the engine has failed" in server.wait_for("the engine has failed")


@pytest.mark.slow
def test_a_stopped_engine_is_not_healthy(tiny_args: EngineArgs):
    with program(tiny_args) as server:
        engine = server.engine
        assert httpx.get(server.url + "/health").status_code == 200
        engine.suspend()
        until(lambda: httpx.get(server.url + "/health").status_code == 503)
        engine.resume()
        until(lambda: httpx.get(server.url + "/health").status_code == 200)
        assert httpx.post(server.url + COMPLETE, json={"prompt": "a", "max_tokens": 1}, timeout=60).status_code == 200


@pytest.mark.slow
def test_another_engine_when_asked_for(tiny_args: EngineArgs):
    with program(tiny_args, "--max-engine-restarts", "1") as server:
        first = server.engine
        first.kill()
        until(lambda: httpx.get(server.url + "/health").status_code == 503)
        refused = httpx.post(server.url + COMPLETE, json={"prompt": "a", "max_tokens": 1}, timeout=60)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
        until(lambda: httpx.get(server.url + "/health").status_code == 200, 40)
        assert httpx.post(server.url + COMPLETE, json={"prompt": "a", "max_tokens": 1}, timeout=60).status_code == 200
        assert server.engine.pid != first.pid and "running" in httpx.get(server.url + "/metrics").text
        server.engine.kill()
        assert server.process.wait(20) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_no_engine_is_left_behind(long_args: EngineArgs, how: str, tmp_path: Path):
    trace = tmp_path / "run.jsonl"
    with program(long_args, "--trace", str(trace), "--shutdown-timeout", "2") as server:
        engine = server.engine
        sock = open_stream(server.url, {**LONG, "n": 8, "temperature": 1})
        sock.recv(10)
        getattr(server.process, how)()
        status = server.process.wait(20)
        engine.wait(10)
        sock.close()
    if how == "terminate":
        assert status == 0
        from minivllm.core.trace import Trace

        Trace.load(trace).check()


@pytest.mark.slow
def test_tls_json_logs_and_two_servers_on_one_port(tiny_args: EngineArgs, tmp_path: Path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    certificate.private_key_pem.write_to_path(str(key))
    chain.write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
    with program(tiny_args, "--ssl-keyfile", str(key), "--ssl-certfile", str(chain), "--log-json") as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context()
        authority.configure_trust(context)
        with httpx.Client(verify=context, base_url=server.url, timeout=60) as client:
            answer = client.post(COMPLETE, json={"prompt": "secret", "max_tokens": 2}, headers={"X-Request-Id": "mine"})
        assert answer.status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(server.url + "/health")
        line = server.wait_for('"path": "/v1/completions"')
        found = json.loads(re.sub(r"^[^{]*", "", line))
        assert (found["status"], found["request_id"], found["method"]) == (200, "mine", "POST") and "secret" not in line
        second = [
            sys.executable,
            "-P",
            "-m",
            "minivllm.cli",
            "serve",
            tiny_args.model,
            "--port",
            server.url.split(":")[-1],
        ]
        done = subprocess.run(second, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "cannot listen on 127.0.0.1" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run(
        [*second, "--ssl-certfile", str(tmp_path / "none.pem"), "--port", "0"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "none.pem" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"), (b"", "required"), (b"[1]", ""), (b'"x"', ""), (b"\xff\xfe", ""), (b'{"prompt": "\xff"}', "UTF-8"), (b'{"prompt": NaN}', ""),
        (b'{"prompt": "a", "max_tokens": "many"}', "max_tokens"), (b'{"prompt": {"a": 1}}', "prompt"), (b'{"prompt": null}', "prompt"),
        (b'{"prompt": [[]]}', ""), (b'{"prompt": [1e30]}', "prompt"), (b'{"prompt": "a", "logit_bias": [1]}', "logit_bias"),
        (b'{"prompt": "a", "priority": 36893488147419103232}', "priority"), (b'{"prompt": "a", "top_k": 9223372036854775808}', "top_k"),
        (b'{"prompt": "a", "stop": 5}', "stop"), (b'{"prompt": "a", "n": true}', "n"), (b'{"prompt": "a", "seed": 1e400}', "seed"),
        (b'{"prompt": "\\ud800", "max_tokens": 1}', ""), (b"[" * 100_000, ""), (b'{"prompt": "a", "stream_options": 3}', "stream_options"),
    ],
)  # fmt: skip
def test_malformed_bodies_are_the_clients_error(tiny: Any, body: bytes, says: str):
    for path in (COMPLETE, "/v1/chat/completions", "/tokenize"):
        answer = httpx.post(tiny.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=30)
        lone = b"ud800" in body and path != "/v1/chat/completions"
        assert answer.status_code in ((200, 400) if lone else (400,)), (path, answer.text[:200])
        if path == COMPLETE and answer.status_code == 400:
            assert says in answer.json()["error"]["message"]
    assert tiny.wait_at_rest()


def test_a_huge_body_is_not_taken_in(tiny_args: EngineArgs):
    with live_server(tiny_args, ServerOptions(max_body_bytes=1000)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        before = psutil.Process().memory_info().rss
        for head in ("Content-Length: 4000000000", "Transfer-Encoding: chunked"):
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
                chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
                try:
                    for _ in range(200):
                        sock.sendall(chunk)
                except OSError:
                    pass
                try:
                    assert b"413" in sock.recv(100)
                except ConnectionResetError:  # it did not even wait for us to listen
                    pass
        assert psutil.Process().memory_info().rss - before < 50 << 20
        assert server.post(COMPLETE, {"prompt": "a" * 2000, "max_tokens": 1}).status_code == 413
        assert server.post(COMPLETE, {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_who_does_not_read_stalls_nobody(tiny_args: EngineArgs):
    """Forty streams that are not read; the others are as quick as ever, and after the time limit all is free."""
    with live_server(tiny_args, ServerOptions(stall_timeout=1.0)) as server:
        body = {**LONG, "n": 4, "temperature": 1, "logprobs": 5, "max_tokens": 200}
        silent = [open_stream(server.url, body) for _ in range(40)]
        for _ in range(5):
            answer = server.post(COMPLETE, {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == 3
        assert server.wait_at_rest(60)
        assert server.get("/load").json() == {"server_load": 0}
        for sock in silent:
            sock.close()


@pytest.mark.load
def test_ten_thousand_requests(tiny_args: EngineArgs):
    """Sixteen run, a hundred wait, the rest is told to come back; memory stays where it was."""

    async def flood(url: str, count: int) -> Counter[int]:
        """Statuses of this many requests, four hundred at a time."""
        statuses: Counter[int] = Counter()
        numbers = iter(range(count))

        async def client() -> None:
            for i in numbers:
                body = {"prompt": f"abc{i}", "max_tokens": 20, "ignore_eos": True}
                try:
                    async with request("POST", url + COMPLETE, body) as response:
                        assert json.loads(await response.aread())["usage"]["completion_tokens"] == 20
                    statuses[200] += 1
                except ServerError as error:
                    assert error.status == 429 and "at most 108 may; try again later" in error.message
                    statuses[429] += 1

        await asyncio.gather(*(client() for _ in range(400)))
        return statuses

    with program(tiny_args, "--max-queue", "100") as server:
        asyncio.run(flood(server.url, 1000))  # buffers and caches find their size
        processes = [psutil.Process(server.process.pid), server.engine]
        before = [p.memory_info().rss for p in processes]
        found = asyncio.run(flood(server.url, 10_000))
        assert found.keys() == {200, 429} and found[200] >= 108 and found.total() == 10_000
        grown = [p.memory_info().rss - b for p, b in zip(processes, before, strict=True)]
        assert max(grown) < 30 << 20, grown
        assert httpx.get(server.url + "/load").json() == {"server_load": 0}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


@pytest.mark.slow
def test_two_replicas_answer_as_one(tiny_args: EngineArgs):
    """By the program itself: the answers of one engine, metrics by engine, a stopped one is noticed, and Ctrl-C ends them all."""
    bodies = [{"prompt": f"{i} bottles", "max_tokens": 9 + i, "temperature": 0, "ignore_eos": True} for i in range(4)]
    chats = [{"messages": [{"role": "user", "content": body["prompt"]}], "max_tokens": 5} for body in bodies[:2]]
    asked = [(COMPLETE, body) for body in bodies] + [("/v1/chat/completions", {"temperature": 0, **c}) for c in chats]

    def answers(url: str) -> list[Any]:
        with ThreadPoolExecutor(len(asked)) as pool:
            replies = list(pool.map(lambda ask: httpx.post(url + ask[0], json=ask[1], timeout=60).json(), asked))
        return [(reply["choices"], reply["usage"]) for reply in replies]

    with live_server(tiny_args, ServerOptions()) as one:
        want = answers(one.url)
    with program(tiny_args, "--data-parallel-size", "2", "--data-parallel-router", "round_robin") as server:
        engines = [p for p in psutil.Process(server.process.pid).children() if "core_process" in " ".join(p.cmdline())]
        assert len(engines) == 2 and answers(server.url) == want
        found: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(httpx.get(server.url + "/metrics").text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    found.setdefault(sample.name, [0.0, 0.0])[int(sample.labels["engine"])] += sample.value
        assert found["vllm:request_success_total"] == found["vllm:e2e_request_latency_seconds_count"] == [3, 3]
        usage = [usage for _, usage in want]
        for name, field in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
            both, sums = found[f"vllm:{name}_tokens_total"], found[f"vllm:request_{name}_tokens_sum"]
            assert both == sums and min(both) > 0 and sum(both) == sum(one[field] for one in usage)
        assert found["vllm:num_requests_running"] == [0, 0]
        engines[1].suspend()
        until(lambda: httpx.get(server.url + "/health").status_code == 503)
        engines[1].resume()
        until(lambda: httpx.get(server.url + "/health").status_code == 200)
        children = psutil.Process(server.process.pid).children(recursive=True)
        for process in (*engines, server.process):  # as from a terminal
            process.send_signal(signal.SIGINT)
        assert server.process.wait(30) in (0, -signal.SIGINT, 130)
        _, alive = psutil.wait_procs(children, 10)
        assert not alive


@pytest.mark.parametrize("size", ["0", "-1", "x"])
def test_a_wrong_number_of_replicas_is_refused(size: str, tiny_args: EngineArgs, capsys):
    try:
        status = main(["serve", tiny_args.model, "--port", "0", "--data-parallel-size", size])
    except SystemExit as error:
        status = error.code
    said = capsys.readouterr().err
    assert status == 2 and "Traceback" not in said
    assert ("invalid int value: 'x'" if size == "x" else f"data_parallel_size must be at least 1, got {size}") in said
