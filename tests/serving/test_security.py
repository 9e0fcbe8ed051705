"""What a stranger sends runs nothing and costs a bounded time."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server

import minivllm
from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def trusting(tiny_args: EngineArgs) -> Iterator[LiveServer]:
    args = replace(tiny_args, hf_overrides={"max_position_embeddings": 2048}, num_gpu_blocks=256)
    with live_server(args, ServerOptions(trust_request_chat_template=True)) as server:
        yield server


def test_no_template_from_a_request(tiny: LiveServer):
    for path, body in ((CHAT, {"messages": [USER]}), ("/tokenize", {"messages": [USER]})):
        error = tiny.post(path, {**body, "chat_template": TEMPLATE}).json()["error"]
        assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
        smuggled = tiny.post(path, {**body, "chat_template_kwargs": {"chat_template": TEMPLATE}})
        assert smuggled.status_code == 400 and "chat_template" in smuggled.json()["error"]["message"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set x = messages.append(1) %}",
        "{{ 1 // 0 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ messages[7].content.x.y }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
    ],
)
def test_a_trusted_template_runs_in_a_sandbox(trusting: LiveServer, template: str):
    response = trusting.post(CHAT, {"messages": [USER], "chat_template": template, "max_tokens": 1})
    assert response.status_code == 400, response.text
    fine = trusting.post(CHAT, {"messages": [USER], "chat_template": TEMPLATE, "max_tokens": 1})
    assert fine.status_code == 200


DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}


@pytest.mark.parametrize(
    "wish",
    [
        {"regex": "(((a{1,500}){1,500}){1,500}){1,500}"},
        {"regex": "(a|aa)*" * 50 + "b{50000}"},
        {"grammar": 'start: "' + "x" * (2 << 20) + '"'},
        {"choice": ["x" * 100] * 30_000},
        {"json": {"type": "array", "items": {"enum": list(range(300_000))}}},
        {"json": DEEP},
        {"json": {"$ref": "#"}},
    ],
)
def test_a_wish_that_is_too_much_costs_a_bounded_time(tiny: LiveServer, wish: dict[str, Any]):
    start = time.monotonic()
    response = tiny.post(CHAT, {"messages": [USER], "structured_outputs": wish, "max_tokens": 3})
    assert response.status_code in (200, 400), response.text
    assert time.monotonic() - start < 20
    assert tiny.post(CHAT, {"messages": [USER], "max_tokens": 1}).status_code == 200


def test_too_large_is_said(tiny: LiveServer):
    error = tiny.post(
        CHAT, {"messages": [USER], "structured_outputs": {"grammar": 'start: "' + "x" * (2 << 20) + '"'}}
    ).json()
    assert "bytes" in error["error"]["message"]


def test_no_pickle_anywhere():
    folder = Path(minivllm.__file__).parent
    for file in folder.rglob("*.py"):
        code = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
        assert not any("import pickle" in line or "from pickle" in line for line in code), file
