"""Every field of OpenAI's requests does something or is refused by name: walked in the types of the client itself."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from live_server import LiveServer, live_server
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from minivllm import serving
from minivllm.core.config import EngineArgs
from minivllm.sampling.params import SamplingParams
from minivllm.serving.app import ServerOptions
from minivllm.serving.embeddings import EmbeddingRequest
from minivllm.serving.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields, log_no_effect
from minivllm.serving.response_request import ResponsesRequest

SCHEMA = {"name": "x", "schema": {"enum": [1, 2]}}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}}}
TOOL = {"type": "function", "function": FUNCTION}
COMMON: dict[str, Any] = {
    "frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"64": 1}, "max_tokens": 3, "n": 2, "seed": 1, "stop": ["a"],
    "stream": True, "temperature": 0.5, "top_p": 0.5, "user": "ann", "model": "tiny",
}  # fmt: skip
HONOURED: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        **COMMON, "prompt": "abc", "best_of": 2, "echo": True, "logprobs": 1, "stream_options": {"include_usage": True},
    },
    "/v1/chat/completions": {
        **COMMON, "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 3,
        "parallel_tool_calls": False, "reasoning_effort": "low", "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "safety_identifier": "ann", "stream_options": {"include_usage": True}, "tools": [TOOL], "tool_choice": "required",
    },
    "/v1/responses": {
        "include": ["message.output_text.logprobs"], "input": "abc", "instructions": "b", "max_output_tokens": 3, "max_tool_calls": 3,
        "metadata": {"a": "b"}, "model": "tiny", "parallel_tool_calls": False, "previous_response_id": "resp_0",
        "reasoning": {"effort": "low"}, "safety_identifier": "ann", "store": False, "stream": True, "stream_options": {},
        "temperature": 0.5, "text": {"format": {"type": "json_schema", **SCHEMA}}, "tool_choice": "required",
        "tools": [{"type": "function", **FUNCTION}], "top_logprobs": 1, "top_p": 0.5, "user": "ann",
    },
    "/v1/embeddings": {"input": "abc", "model": "tiny", "dimensions": 3, "encoding_format": "base64", "user": "ann"},
}  # fmt: skip
HINTS: dict[str, Any] = {
    "prompt_cache_key": "x", "prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h", "service_tier": "flex",
}  # fmt: skip
NO_EFFECT: dict[str, dict[str, Any]] = {
    "/v1/completions": {},
    "/v1/chat/completions": {
        **HINTS, "metadata": {"a": "b"}, "prediction": {"type": "content", "content": "x"}, "store": True,
    },
    "/v1/responses": HINTS,
    "/v1/embeddings": {},
}  # fmt: skip
REFUSED_FIELDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"suffix": "x"},
    "/v1/chat/completions": {
        "audio": {"voice": "x", "format": "wav"}, "function_call": "auto", "functions": [FUNCTION], "modalities": ["audio"],
        "moderation": {"model": "x"}, "verbosity": "low", "web_search_options": {},
    },
    "/v1/responses": {
        "access_programs": {"cyber": "standard"}, "background": True, "background_options": {"x": 1},
        "context_management": [{"type": "compaction"}], "conversation": "conv_0", "image": {"x": 1}, "moderation": {"model": "x"},
        "prompt": {"id": "x"}, "truncation": "auto",
    },
    "/v1/embeddings": {},
}  # fmt: skip
TYPES = {
    "/v1/completions": (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    "/v1/chat/completions": (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
    "/v1/responses": (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
}
NEEDS = {
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}, "tool_choice": {"tools": True},
    "tools": {"tool_choice": True}, "parallel_tool_calls": {"tools": True, "tool_choice": True}, "n": {"temperature": True},
    "best_of": {"temperature": True},
}  # fmt: skip
MAY_BE_400 = {"reasoning_effort", "reasoning", "previous_response_id"}
"""Right in form, and refused by this template or this store: by name."""


@pytest.mark.parametrize("path", list(TYPES))
def test_every_field_of_the_client_is_known(path: str):
    """A new release of the client with a new field fails here, until it is decided."""
    given, ours = TYPES[path]
    fields = set(given.__annotations__) | ({"stream"} if path != "/v1/embeddings" else set())
    table = ours.field_table()
    assert set(HONOURED[path]) | set(NO_EFFECT[path]) | set(REFUSED_FIELDS[path]) == fields
    for expected, what in ((HONOURED, "used"), (NO_EFFECT, "no effect"), (REFUSED_FIELDS, "refused")):
        assert {name for name in fields if table[name].startswith(what)} == set(expected[path])


@pytest.fixture(scope="module")
def live(tiny_args: EngineArgs) -> Iterator[LiveServer]:
    overrides = {"max_position_embeddings": 2048}
    args = replace(tiny_args, hf_overrides=overrides, num_gpu_blocks=512, scheduling_policy="priority")
    options = ServerOptions(served_model_name=["tiny"], enable_prompt_tokens_details=True)
    with live_server(args, options) as server:
        yield server


def body_of(path: str, field: str) -> dict[str, Any]:
    """The smallest request with this field."""
    values = HONOURED[path]
    base = {name: values[name] for name in ("prompt", "messages", "input") if name in values}
    limit = (
        {"max_tokens": 3} if path.endswith("completions") else {"max_output_tokens": 3} if "responses" in path else {}
    )
    needed = {name: values[name] for name in NEEDS.get(field, {}) if name in values}
    others = NO_EFFECT[path] | REFUSED_FIELDS[path]
    return {**base, **limit, **needed, field: values.get(field, others.get(field))}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in TYPES for field in HONOURED[path]])
def test_what_is_honoured_is_taken(live: LiveServer, path: str, field: str):
    response = live.post(path, body_of(path, field))
    if field in MAY_BE_400:
        assert response.status_code == 400 and field.partition(".")[0] in response.text
    else:
        assert response.status_code == 200, response.text
        if response.headers["content-type"].startswith("application/json"):
            json.loads(response.text)


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in TYPES for field in NO_EFFECT[path]])
def test_what_has_no_effect_is_taken_and_said_once(
    live: LiveServer, path: str, field: str, caplog: pytest.LogCaptureFixture
):
    log_no_effect.cache_clear()
    for _ in range(2):
        assert live.post(path, body_of(path, field)).status_code == 200
    assert [field in record.message for record in caplog.records if "has no effect" in record.message] == [True]


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, (_, ours) in TYPES.items() for field in ours.field_table()]
)
def test_null_means_not_given(live: LiveServer, path: str, field: str):
    base = {name: HONOURED[path][name] for name in ("prompt", "messages", "input") if name in HONOURED[path]}
    limit = {"max_output_tokens": 1} if path == "/v1/responses" else {} if "embed" in path else {"max_tokens": 1}
    response = live.post(path, {**limit, **base, field: None})
    assert response.status_code == (400 if field in base else 200), response.text


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in TYPES for field in REFUSED_FIELDS[path]])
def test_what_is_refused_is_named(live: LiveServer, path: str, field: str):
    response = live.post(path, body_of(path, field))
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == field and field in error["message"]


def test_no_field_is_ignored():
    """Every field of a request is read somewhere in the server, and not only declared."""
    modules = (
        "protocol",
        "completions",
        "chat",
        "answers",
        "generation",
        "responses",
        "response_request",
        "embeddings",
        "pooling",
        "app",
    )
    text = "\n".join(inspect.getsource(__import__(f"{serving.__name__}.{name}", fromlist=["x"])) for name in modules)
    for _, ours in TYPES.values():
        passed_on = SamplingParams.__dataclass_fields__ if issubclass(ours, SamplingFields) else {}
        for name in ours.model_fields.keys() - passed_on.keys():  # what both have goes to SamplingParams by name
            read = rf"(body|self|request)\.{name}\b|^ *\"[^=\n]*\b{name}\b[^=\n]*\",?\)?( *#.*)?$|\"{name}\""
            assert re.search(read, text, re.MULTILINE), f"{ours.__name__}.{name} is never read"


CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": [{**USER, "colour": 1}]}, "messages[0].colour"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}]}, "content[0].cache"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "audio"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]}, "function_call"),
        (CHAT, {"messages": [USER], "tools": [{**TOOL, "x": 1}], "tool_choice": "none"}, "tools[0].x"),
        (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {**FUNCTION, "x": 1}}]}, "function.x"),
        (CHAT, {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "x": 1}}}, "json_schema.x"),
        (CHAT, {"messages": [USER], "stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
        ("/v1/responses", {"input": [{**USER, "colour": 1}]}, "input[0].colour"),
        ("/v1/responses", {"input": "a", "text": {"verbosity": "low"}}, "verbosity"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", **FUNCTION, "x": 1}]}, "tools[0].x"),
        ("/v1/responses", {"input": "a", "stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
    ],
)  # fmt: skip
def test_nested_fields_are_named_too(live: LiveServer, path: str, body: dict, field: str):
    response = live.post(path, body)
    assert response.status_code == 400 and field in response.json()["error"]["param"], response.text


# What a field does, where no other test shows it


def test_usage_with_every_piece(live: LiveServer):
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for path, more in (("/v1/completions", {"prompt": "abc"}), (CHAT, {"messages": [USER]})):
        lines = live.post(
            path,
            {**more, **options, "max_tokens": 5, "ignore_eos": True, "temperature": 0, "return_token_ids": True},
        ).text
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines.splitlines() if line.startswith("data: {")]
        told = 0
        for chunk in chunks[:-1]:
            told += len(chunk["choices"][0].get("token_ids") or ())
            assert (chunk["usage"] or {"completion_tokens": 0})["completion_tokens"] == told
        assert told == 5
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 5
        assert all(
            chunk["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]
            for chunk in chunks
            if chunk.get("usage")
        )


def test_priority_and_user_reach_the_scheduler(live: LiveServer):
    scheduler = live.llm.llm_engine.core.scheduler
    trace = scheduler.record()
    live.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "priority": 7, "user": "ann"})
    live.post(CHAT, {"messages": [USER], "max_tokens": 1, "priority": -2, "safety_identifier": "bob"})
    live.post("/v1/responses", {"input": "a", "max_output_tokens": 1, "priority": 3, "user": "eve"})
    live.post("/v1/embeddings", {"input": "a", "priority": 4, "user": "joe"})
    scheduler.stop_recording()
    added = [(event[5], event[6]) for event in trace.events if event[0] == "add"]
    assert added == [(7, "ann"), (-2, "bob"), (3, "eve"), (4, "joe")]


def test_a_salt_keeps_caches_apart(live: LiveServer):
    def cached(path: str, body: dict[str, Any]) -> int:
        usage = live.post(path, body).json()["usage"]
        return (usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"]

    text = "the same beginning of every prompt, long enough for a few blocks of the cache"
    forms = (
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        ("/v1/responses", {"input": [{"role": "user", "content": "for responses: " + text}], "max_output_tokens": 1}),
    )
    for path, body in forms:
        found = [cached(path, {**body, "cache_salt": salt}) for salt in ("ann", "bob", "ann")]
        assert found[:2] == [0, 0] and found[2] >= 64


def test_the_best_of_several(live: LiveServer):
    wish = {"prompt": "abc", "temperature": 1, "seed": 11, "max_tokens": 12, "logprobs": 0}
    four = live.post("/v1/completions", {**wish, "n": 4}).json()["choices"]
    best = live.post("/v1/completions", {**wish, "n": 2, "best_of": 4}).json()
    mean = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in four]
    expected = [four[i]["text"] for i in sorted(range(4), key=lambda i: (-mean[i], i))[:2]]
    assert expected != [choice["text"] for choice in four[:2]]
    assert [choice["text"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
