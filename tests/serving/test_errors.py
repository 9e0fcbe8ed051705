"""Bad input is a clear and bounded answer in OpenAI's shape, and costs no other request anything."""

import json

import httpx
import openai
import pytest
from live_server import LiveServer, live_server

from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
PROMPT = {"prompt": "abc", "max_tokens": 2}


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETE, {**PROMPT, "temprature": 1}, "temprature", "unknown field"),
        (COMPLETE, {"max_tokens": 2}, "prompt", "required"),
        (COMPLETE, {**PROMPT, "max_tokens": "2"}, "max_tokens", "integer"),
        (COMPLETE, {**PROMPT, "n": 0}, "n", "n must be"),
        (COMPLETE, {**PROMPT, "temperature": 9}, "temperature", "[0, 2]"),
        (COMPLETE, {**PROMPT, "logit_bias": {"x": 1}}, "logit_bias", "token"),
        (COMPLETE, {**PROMPT, "logit_bias": {"9999": 1}}, "logit_bias", "vocabulary"),
        (COMPLETE, {**PROMPT, "suffix": "end"}, "suffix", "not supported"),
        (COMPLETE, {**PROMPT, "max_tokens": 0}, "max_tokens", "echo"),
        (COMPLETE, {**PROMPT, "logprobs": 500}, "logprobs", "max_logprobs"),
        (COMPLETE, {**PROMPT, "prompt": []}, "prompt", "at least one"),
        (COMPLETE, {**PROMPT, "prompt": ""}, None, "empty"),
        (COMPLETE, {**PROMPT, "prompt": [1, 99999]}, None, "token ids"),
        (COMPLETE, {**PROMPT, "prompt": ["a", 3]}, "prompt[1]", "string"),
        (COMPLETE, {**PROMPT, "stream_options": {"include_usage": True}}, None, "stream"),
        (COMPLETE, {**PROMPT, "best_of": 3, "n": 2, "stream": True, "temperature": 1}, "best_of", "DELTA"),
        (COMPLETE, {**PROMPT, "structured_outputs": {"choice": []}}, "structured_outputs.choice", "non-empty"),
        (COMPLETE, {**PROMPT, "structured_outputs": {"jsn": {}}}, None, "jsn"),
        (COMPLETE, {**PROMPT, "structured_outputs": {"regex": "(["}}, None, "must look like"),
        (CHAT, {**HELLO, "response_format": BAD_SCHEMA, "stream": True}, None, "must look like"),
        (COMPLETE, {**PROMPT, "vllm_xargs": {"nope": 1}}, "vllm_xargs", "vllm_xargs must be a dict whose keys are"),
        (CHAT, {**HELLO, "vllm_xargs": {"typical": 5}}, "vllm_xargs['typical']", "vllm_xargs['typical'] must be"),
        (COMPLETE, {**PROMPT, "request_id": "a b"}, "request_id", "pattern"),
        (CHAT, {**HELLO, "tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHAT, {**HELLO, "verbosity": "low"}, "verbosity", "not supported"),
        (CHAT, {**HELLO, "top_logprobs": 2}, None, "logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages", "reads text alone"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": "Hello"}, "messages", "list"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "developer"),
        (CHAT, {**HELLO, "response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (CHAT, {**HELLO, "chat_template": "{{ messages }}"}, "chat_template", "trust-request-chat-template"),
        (CHAT, {**HELLO, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "must not set"),
        (CHAT, {**HELLO, "chat_template_kwargs": {"thinking": True}}, None, "thinking"),
        (CHAT, {**HELLO, "max_tokens": 1, "max_completion_tokens": 2}, None, "differ"),
    ],
)
def test_what_is_wrong_is_named(tiny: LiveServer, path: str, body: dict, param: str | None, words: str):
    error = error_of(tiny.post(path, body), 400)
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert (error["param"] or "").startswith(param or "")
    assert bool(error["param"]) == bool(param) or param is None


HALF = "a\ud83d"
TOOLS = [{"type": "function", "function": {"name": "f", "description": HALF, "parameters": {}}}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETE, {**PROMPT, "prompt": HALF}, "prompt"),
        (COMPLETE, {**PROMPT, "prompt": ["ok", HALF]}, "prompt"),
        (COMPLETE, {**PROMPT, "stop": [HALF]}, "stop"),
        (COMPLETE, {**PROMPT, "bad_words": [HALF]}, "bad_words"),
        (COMPLETE, {**PROMPT, "structured_outputs": {"regex": HALF}}, "structured_outputs.regex"),
        (COMPLETE, {**PROMPT, "structured_outputs": {"choice": [HALF]}}, "structured_outputs.choice"),
        (COMPLETE, {**PROMPT, "structured_outputs": {"grammar": HALF}}, "structured_outputs.grammar"),
        (COMPLETE, {**PROMPT, "structured_outputs": {"json": {"enum": [HALF]}}}, "structured_outputs.json"),
        (COMPLETE, {**PROMPT, HALF: 1}, None),
        (CHAT, {"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]}, "messages[0].content"),
        (CHAT, {**HELLO, "tools": TOOLS, "tool_choice": "required"}, "tools[0].function.description"),
        ("/v1/responses", {"input": HALF}, "messages[0].content"),
        ("/v1/embeddings", {"input": HALF}, "prompt"),
        ("/tokenize", {"prompt": HALF}, "prompt"),
    ],
)
def test_half_a_character_is_named(tiny: LiveServer, path: str, body: dict, param: str):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {tiny.key}"}
    response = httpx.post(tiny.url + path, content=json.dumps(body).encode(), headers=headers, timeout=60)
    error = error_of(response, 400)
    assert (error["param"] or "").removesuffix("[0]") == (param or "").removesuffix("[0]") and (
        "surrogate" in error["message"] or "unicode" in error["message"]
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_fit_are_refused_with_the_three_numbers(tiny: LiveServer, name: str):
    limit = tiny.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {**HELLO, name: limit} if name != "max_tokens" else {**PROMPT, "max_tokens": limit - 2}
    body.pop("max_tokens" if name != "max_tokens" else "", None)
    path = COMPLETE if name == "max_tokens" else CHAT
    error = error_of(tiny.post(path, body), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert str(limit) in error["message"] and str(body[name]) in error["message"]
    if name == "max_tokens":
        assert "prompt takes 3" in error["message"]
        assert tiny.post(path, {**body, "max_tokens": limit - 3, "stop": ["e"]}).status_code == 200
    error = error_of(tiny.post("/v1/responses", {"input": "abc", "max_output_tokens": limit}), 400)
    assert error["param"] == "max_output_tokens" and error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2", b"\xff\xfe", b"null", b"[]", b'"x"', b"[" * 100_000])
def test_malformed_bodies(tiny: LiveServer, body: bytes):
    response = httpx.post(tiny.url + COMPLETE, content=body, headers={"Content-Type": "application/json"})
    error_of(response, 400)


def test_a_schema_of_four_hundred_levels_is_the_clients_error(tiny: LiveServer):
    schema = '{"properties": {"a": ' * 400 + "{}" + "}}" * 400
    body = '{"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": ' + schema + "}}"
    response = httpx.post(tiny.url + COMPLETE, content=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert "nested too deeply" in error_of(response, 400)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_does_not_claim_to_be_json(tiny: LiveServer, kind: str):
    response = httpx.post(tiny.url + COMPLETE, content=json.dumps(PROMPT), headers={"Content-Type": kind}, timeout=60)
    assert "Content-Type: application/json" in error_of(response, 415)["message"]


def test_a_long_value_is_shown_in_part(tiny: LiveServer):
    body = {**PROMPT, "logit_bias": {str(token): 1 for token in range(300, 9000)}}
    assert len(error_of(tiny.post(COMPLETE, body), 400)["message"]) < 400


def test_odd_text(tiny: LiveServer):
    for text in ("\\ud800", "\\u0000", "a" * 3000):
        response = httpx.post(
            tiny.url + COMPLETE,
            content=f'{{"prompt": "{text}", "max_tokens": 1}}',
            headers={"Content-Type": "application/json"},
            timeout=30,
        )
        assert response.status_code in (200, 400), (text[:10], response.text)


def test_a_prompt_that_is_too_long(tiny: LiveServer):
    with tiny.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a" * 256)
    assert caught.value.code == "context_length_exceeded" and "255" in str(caught.value)


def test_one_bad_prompt_of_three_leaves_nothing_behind(tiny: LiveServer):
    error_of(tiny.post(COMPLETE, {**PROMPT, "prompt": ["abc", "def", ""], "max_tokens": 200}), 400)
    assert tiny.wait_at_rest()


def test_unknown_model_path_and_method(tiny: LiveServer):
    assert error_of(tiny.post(COMPLETE, {**PROMPT, "model": "gpt-7"}), 404)["param"] == "model"
    assert "/v1/audio" in error_of(tiny.post("/v1/audio", {}), 404)["message"]
    error_of(tiny.get(COMPLETE), 405)


def test_huge_bodies_are_refused(tiny_args: EngineArgs):
    with live_server(tiny_args, ServerOptions(max_body_bytes=1000)) as server:
        assert error_of(server.post(COMPLETE, {"prompt": "a" * 2000}), 413)["code"] == "body_too_large"
        pieces = (b" " * 100 for _ in range(50))  # no Content-Length
        response = httpx.post(server.url + COMPLETE, content=pieces, headers={"Content-Type": "application/json"})
        error_of(response, 413)
        assert server.post(COMPLETE, PROMPT).status_code == 200


def test_keys(tiny_args: EngineArgs):
    options = ServerOptions(api_key=["tiger", "lion"], allowed_origins=["https://app.example"])
    with live_server(tiny_args, options) as server:
        assert server.post(COMPLETE, PROMPT).status_code == 200
        for header in ("Bearer cat", "Bearer", "tiger", "Basic tiger"):
            assert (
                error_of(server.post(COMPLETE, PROMPT, headers={"Authorization": header}), 401)["code"]
                == "invalid_api_key"
            )
        error_of(httpx.get(server.url + "/v1/models"), 401)
        assert httpx.get(server.url + "/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="cat", max_retries=0).models.list()
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        assert (
            httpx.options(server.url + COMPLETE, headers=asked).headers["access-control-allow-origin"]
            == asked["Origin"]
        )
        stranger = httpx.options(server.url + COMPLETE, headers=asked | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers


def test_death_of_the_engine(tiny_args: EngineArgs):
    with live_server(tiny_args) as server:
        body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + COMPLETE, json=body, timeout=30) as response:
            assert response.status_code == 200
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            next(lines)

            def cut(output):
                raise OSError("the wire was cut")

            server.llm.llm_engine.core.executor.execute_model = cut
            rest = list(lines)
        assert rest[-1] == "[DONE]"
        assert "the wire was cut" in json.loads(rest[-2])["error"]["message"]
        for response in (server.post(COMPLETE, PROMPT), server.get("/health"), server.post(CHAT, HELLO)):
            assert error_of(response, 503)["code"] == "engine_dead"
