"""What a stranger sends runs nothing and costs a bounded time."""

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, live_server

import minivllm
from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions, make_parser, options_from

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def trusting(tiny_args: EngineArgs) -> Iterator[LiveServer]:
    args = replace(tiny_args, hf_overrides={"max_position_embeddings": 2048}, num_gpu_blocks=256)
    with live_server(args, ServerOptions(served_model_name=["tiny"], trust_request_chat_template=True)) as server:
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
    assert "more than 262144 characters" in error["error"]["message"]


def test_no_pickle_but_between_the_ranks_of_one_engine():
    folder = Path(minivllm.__file__).parent
    # what a rank and its own parent tell each other: through memory and sockets without a name, or by calls of Ray's actors
    ranks = {folder / f"runtime/executors/{name}.py" for name in ("broadcast", "worker", "ray_executor")}
    for file in sorted({*folder.rglob("*.py")} - ranks):
        code = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
        # pickletools lists what a pickle would do, and does nothing
        assert not any(re.search(r"\b(import|from) (c?pickle|dill|cloudpickle)\b", line) for line in code), file


KEYED = ("/metrics", "/load", "/docs", "/openapi.json", "/dashboard", "/dashboard/samples", "/v1/models")


def test_with_a_key_only_health_and_version_are_open(tiny_args: EngineArgs):
    """A browser is asked for the key by HTTP's Basic, where the key is the password."""
    with live_server(tiny_args, ServerOptions(api_key=["tiger"], dashboard=True)) as server:
        for path in KEYED:
            refused = httpx.get(server.url + path)
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == 'Basic realm="minivllm"', path
            assert httpx.get(server.url + path, auth=("anybody", "tiger")).status_code == 200, path
            assert httpx.get(server.url + path, auth=("tiger", "lion")).status_code == 401, path
            assert server.get(path).status_code == 200, path
        assert httpx.post(server.url + "/reset_prefix_cache").status_code == 401
        for path in ("/health", "/ping", "/version"):
            assert httpx.get(server.url + path).status_code == 200, path


def test_no_web_page_of_another_site_gets_in(tiny_args: EngineArgs):
    options = ServerOptions(allowed_origins=["http://good.example"], allowed_hosts=["127.0.0.1", "localhost"])
    with live_server(tiny_args, options) as server:
        reset, port = server.url + "/reset_prefix_cache", server.url.rpartition(":")[2]
        foreign = httpx.post(reset, headers={"Origin": "http://evil.example", "Content-Type": "text/plain"})
        assert foreign.status_code == 403 and "--allowed-origins" in foreign.json()["error"]["message"]
        assert httpx.post(reset, headers={"Origin": "null"}).status_code == 403
        for origin in ("http://good.example", server.url, None):
            assert httpx.post(reset, headers={"Origin": origin} if origin else {}).status_code == 200
        for name, status in (
            ("evil.example", 403),
            ("127.0.0.1.evil.example", 403),
            ("localhost", 200),
            ("LOCALHOST", 200),
        ):
            answer = httpx.get(server.url + "/metrics", headers={"Host": f"{name}:{port}"})
            assert answer.status_code == status, name


def test_a_server_of_this_machine_answers_to_its_names_alone(monkeypatch: pytest.MonkeyPatch):
    for name in ("MINIVLLM_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def hosts(*flags: str) -> list[str]:
        return options_from(make_parser().parse_args(list(flags))).allowed_hosts

    assert hosts() == ["127.0.0.1", "::1", "localhost"]
    assert hosts("--host", "0.0.0.0") == hosts("--api-key", "a") == []
    assert hosts("--allowed-hosts", "a.example") == ["a.example"]


def test_what_users_of_vllm_are_used_to(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for name in ("MINIVLLM_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def options(*flags: str) -> ServerOptions:
        return options_from(make_parser().parse_args(list(flags)))

    assert options("--allowed-origins", '["*", "http://a"]').allowed_origins == ["*", "http://a"]
    with pytest.raises(ValueError, match="JSON list"):
        options("--allowed-origins", "[*]")
    assert options("--host", "0.0.0.0").api_key == [] and "no --api-key" in caplog.text
    monkeypatch.setenv("VLLM_API_KEY", "tiger")
    assert options().api_key == ["tiger"] and options("--api-key", "lion").api_key == ["lion"]
    assert make_parser().parse_args(["--num-gpu-blocks-override", "7"]).num_gpu_blocks == 7


def test_cached_tokens_are_a_secret_unless_allowed(tiny_args: EngineArgs):
    """Who can see them can find out what others have asked, without measuring any time."""
    with live_server(tiny_args, ServerOptions()) as server:
        for _ in range(2):
            usage = server.post("/v1/completions", {"prompt": "a" * 64, "max_tokens": 1}).json()["usage"]
            assert usage["prompt_tokens_details"] is None
            usage = server.post("/v1/responses", {"input": "a" * 64, "max_output_tokens": 1}).json()["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] == 0


def test_a_priority_needs_a_scheduler_that_knows_it(tiny: LiveServer):
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        (CHAT, {"messages": [USER]}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        error = tiny.post(path, {**body, "priority": 1})
        assert error.status_code == 400 and error.json()["error"]["param"] == "priority"


ODD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"x": 1}}),
    (CHAT, {"messages": [USER], "chat_template": "{{ 1 // 0 }}"}),
    (CHAT, {"messages": [USER], "chat_template": "{% if %}"}),
    (CHAT, {"messages": [USER], "structured_outputs": {"grammar": "start: nothing"}}),
    (CHAT, {"messages": [USER], "structured_outputs": {"json": {"type": "x"}}}),
    ("/v1/completions", {"prompt": [10**9]}),
    ("/v1/completions", {"prompt": "a" * 10_000}),
    ("/v1/completions", {"prompt": "a", "repetition_detection": {"x": 1}}),
    ("/v1/completions", {"prompt": "a", "repetition_penalty": 1e-300}),
    ("/v1/embeddings", {"input": "a", "dimensions": 10**9}),
    ("/tokenize", {"prompt": "a", "model": "other"}),
]


@pytest.mark.parametrize(("path", "body"), ODD)
def test_no_error_tells_where_the_server_keeps_its_files(trusting: LiveServer, path: str, body: dict[str, Any]):
    text = trusting.post(path, {**body, **({"max_tokens": 1} if "completions" in path else {})}).text
    assert '"error"' in text
    places = (
        trusting.llm.config.model.path,
        trusting.llm.get_tokenizer().name_or_path,
        Path.home(),
        sys.prefix,
        "site-packages",
    )
    assert not any(str(place) in text for place in places), text


def test_an_error_of_the_engine_names_no_file(tiny_args: EngineArgs):
    with live_server(tiny_args) as server:

        def fail(output: Any) -> None:
            raise OSError(2, "no such file", f"{minivllm.__file__} and {server.llm.config.model.path}/x.safetensors")

        server.llm.llm_engine.core.executor.execute_model = fail
        text = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).text
        assert "no such file" in text
        assert str(Path(minivllm.__file__).parent) not in text and str(server.llm.config.model.path) not in text


def test_a_log_line_cannot_be_forged(tiny: LiveServer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="minivllm.access"):
        tiny.get("/nothing%20200%200.1%20mine")
        deadline = time.monotonic() + 10
        while "nothing" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert '"/nothing 200 0.1 mine" 404' in caplog.text


def test_what_is_wrong_with_a_body_is_said_rightly(tiny: LiveServer):
    headers = {"Content-Type": "application/json"}
    for content, words in ((b"[" * 100_000, "nested too deeply"), (b'{"prompt": "\xff"}', "UTF-8")):
        answer = httpx.post(tiny.url + "/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
