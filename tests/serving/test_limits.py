"""One request costs the others little, whatever is in it: it is refused by its size, before work is done for it."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server

from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def server(tiny_args: EngineArgs) -> Iterator[LiveServer]:
    args = replace(tiny_args, hf_overrides={"max_position_embeddings": 2048}, num_gpu_blocks=512)
    with live_server(args, ServerOptions(served_model_name=["tiny"])) as live:
        live.post(COMPLETE, {"prompt": "a", "max_tokens": 1})
        yield live


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def references(count: int) -> dict[str, Any]:
    inner = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**inner, f"d{count}": {"type": "integer"}}}


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": properties(5000)}}
RULES = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(5000)) + '\nr5000: "c"'
HEAVY: dict[str, tuple[str, dict[str, Any]]] = {
    "bad words": (COMPLETE, {"prompt": "a", "bad_words": [f"w{i}" for i in range(300_000)]}),
    "long bad words": (COMPLETE, {"prompt": "a", "bad_words": ["w" * 5000] * 500}),
    "stop": (COMPLETE, {"prompt": "a", "stop": [f"w{i}" for i in range(300_000)]}),
    "messages": (CHAT, {"messages": [USER] * 300_000}),
    "tokenize messages": ("/tokenize", {"messages": [USER] * 300_000}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 300_000}]}),
    "messages that cannot fit": (CHAT, {"messages": [{"role": "user", "content": ""}] * 3000}),
    "calls": (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [{}] * 100_000}]}),
    "items": ("/v1/responses", {"input": [USER] * 200_000}),
    "prompt": (COMPLETE, {"prompt": "abc " * 3_500_000}),
    "prompt without special tokens": (COMPLETE, {"prompt": "abc " * 3_500_000, "add_special_tokens": False}),
    "message": (CHAT, {"messages": [{"role": "user", "content": "abc " * 3_500_000}]}),
    "tokenize": ("/tokenize", {"prompt": "abc " * 3_500_000}),
    "embed": ("/v1/embeddings", {"input": "abc " * 3_500_000}),
    "responses": ("/v1/responses", {"input": "abc " * 3_500_000}),
    "n": (COMPLETE, {"prompt": "a", "n": 16384, "temperature": 1}),
    "best_of": (COMPLETE, {"prompt": "a", "best_of": 16384, "temperature": 1}),
    "prompts": (COMPLETE, {"prompt": ["a"] * 20_000}),
    "prompts times n": (COMPLETE, {"prompt": ["a"] * 1000, "n": 100, "temperature": 1}),
    "inputs": ("/v1/embeddings", {"input": ["a"] * 20_000}),
    "schema": (COMPLETE, {"prompt": "a", "structured_outputs": {"json": properties(5000)}}),
    "schema for chat": (
        CHAT, {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": properties(5000)}}}
    ),
    "tool": (CHAT, {"messages": [USER], "tools": [FUNCTION], "tool_choice": "required"}),
    "references": (COMPLETE, {"prompt": "a", "structured_outputs": {"json": references(3000)}}),
    "rules": (COMPLETE, {"prompt": "a", "structured_outputs": {"grammar": RULES}}),
    "detokenize": ("/detokenize", {"tokens": [1] * 1_000_000}),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(HEAVY))
def test_a_heavy_request_is_refused_and_delays_no_other(server: LiveServer, kind: str):
    path, body = HEAVY[kind]
    content = httpx.Request("POST", "http://x", json=body).content
    found: list[httpx.Response] = []
    headers = {"Content-Type": "application/json"}
    heavy = threading.Thread(
        target=lambda: found.append(httpx.post(server.url + path, content=content, headers=headers, timeout=60))
    )
    heavy.start()
    longest = 0.0
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while heavy.is_alive():
            begin = time.monotonic()
            assert client.post(COMPLETE, json={"prompt": "a", "max_tokens": 1}).status_code == 200
            longest = max(longest, time.monotonic() - begin)
    assert found[0].status_code == 400, found[0].text[:300]
    assert len(found[0].text) < 1000 and longest < 10  # it was a minute and more


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "integer", "multipleOf": 999983, "minimum": -(10**15), "maximum": 10**15}},
        {"json": properties(900)},
        {"regex": "a{1000000}"},
        {"choice": ["x"] * 200_000},
        {"grammar": 'start: "' + "x" * 1_000_000 + '"'},
    ],
)
def test_a_grammar_that_is_too_much_is_the_clients_error(server: LiveServer, asked: dict[str, Any]):
    response = server.post(COMPLETE, {"prompt": "a", "max_tokens": 3, "structured_outputs": asked})
    assert response.status_code in (200, 400), response.text


def test_who_leaves_early_is_not_worked_for(server: LiveServer):
    """The prompts of a body are tokenized one after another, until its client has gone."""
    processor, seen = server.llm.llm_engine.input_processor, 0
    before = processor.check_characters

    def count(text: str) -> None:
        nonlocal seen
        seen += 1
        time.sleep(0.02)
        before(text)

    processor.check_characters = count
    try:
        with pytest.raises(httpx.ReadTimeout):
            body = {"prompt": ["abc"] * 500, "max_tokens": 1, "add_special_tokens": False}
            httpx.post(server.url + COMPLETE, json=body, timeout=0.3)
        time.sleep(0.3)
        stopped_at = seen
        time.sleep(0.3)
        assert 0 < seen == stopped_at < 500
    finally:
        processor.check_characters = before
    assert server.wait_at_rest()


def test_a_long_head_is_refused_while_it_comes(server: LiveServer):
    host, port = server.url.removeprefix("http://").split(":")
    import socket

    for line in (b"X-Long: ", b"Authorization: Bearer "):
        with socket.create_connection((host, int(port)), timeout=30) as sock:
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + line)
            sent = 0
            try:
                while sent < 40 << 20:
                    sock.sendall(b"x" * 65536)
                    sent += 65536
            except OSError:
                pass
            assert sent < 20 << 20
            try:
                assert b" 431 " in sock.recv(100)
            except ConnectionResetError:  # it did not even wait for us to listen
                pass
        assert httpx.get(server.url + "/health", timeout=5).status_code == 200
    assert httpx.get(server.url + "/health", headers={"X-Long": "x" * 30_000}, timeout=5).status_code == 200
