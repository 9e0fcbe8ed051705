"""What clients really send: their own answers come back as history, and templates differ in what they know."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server, scripted_model

from minivllm.core.config import EngineArgs
from minivllm.models.tokenizer import get_tokenizer
from minivllm.serving import chat as chat_module
from minivllm.serving.app import ServerOptions
from minivllm.serving.chat import render_chat
from minivllm.serving.protocol import ChatMessage, log_no_effect

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
R1 = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}<assistant><think>"
NAMES = "{% for m in messages %}<{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>{{ m.content }}{% endfor %}"
TOOL_NAMES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
)
JOINS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{% endfor %}"
)
CALLED = [
    {**USER},
    {"role": "assistant", "content": None,
     "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "b"},
]  # fmt: skip


@pytest.fixture(scope="module")
def thinker(tiny_args: EngineArgs) -> Iterator[LiveServer]:
    args = replace(tiny_args, hf_overrides={"max_position_embeddings": 2048}, num_gpu_blocks=512)
    options = ServerOptions(served_model_name=["tiny"], reasoning_parser="deepseek_r1")
    with live_server(args, options) as server:
        server.llm.get_tokenizer().chat_template = R1
        yield server


def test_an_answer_comes_back_as_history(thinker: LiveServer):
    with scripted_model(thinker) as say, thinker.client() as client:
        say("a thought</think>an answer")
        for _ in range(2):
            answer = client.chat.completions.create(model="tiny", messages=[USER], max_tokens=60).choices[0].message
            assert answer.content == "an answer" and answer.model_extra["reasoning_content"].endswith("thought")
        messages = [USER, answer.model_dump(), USER]
        assert messages[1]["annotations"] is None and messages[1]["reasoning_content"]
        second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=60)
    assert second.choices[0].message.content == "an answer"


def test_all_that_providers_add_to_an_answer_comes_back(thinker: LiveServer):
    added = {
        "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": [], "parsed": None,
        "reasoning_content": "r", "provider_specific_fields": {"x": 1}, "reasoning_details": [], "thinking_blocks": [],
    }  # fmt: skip
    messages = [USER, {"role": "assistant", "content": "b", **added}, USER]
    assert thinker.post(CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    assert thinker.post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).status_code == 200


def test_what_clients_send_to_responses(thinker: LiveServer):
    """The fields of coding agents: hints, a hosted tool, items with nulls."""
    body = {
        "input": [{"role": "user", "content": "a", "id": None, "type": None}], "max_output_tokens": 1, "store": False,
        "prompt_cache_key": "k", "include": ["reasoning.encrypted_content"], "client_metadata": {"a": "b"},
        "reasoning": {"effort": None, "summary": "auto"}, "tools": [{"type": "web_search"}], "tool_choice": "auto",
        "parallel_tool_calls": False,
    }  # fmt: skip
    response = thinker.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    assert response.json()["tools"] == []  # those that the model was told of
    named = {"input": "a", "tools": [{"type": "web_search"}], "tool_choice": "required"}
    assert thinker.post("/v1/responses", named).status_code == 400


@pytest.mark.parametrize(
    ("template", "kept"), [(PLAIN, False), (TOOL_NAMES, False), (NAMES, True)], ids=["plain", "other name", "names"]
)
def test_a_name_is_used_or_said_to_be_left_out(
    tiny_model_path: Any, template: str, kept: bool, caplog: pytest.LogCaptureFixture
):
    log_no_effect.cache_clear()
    chat_module._left_out.clear()
    tokenizer = get_tokenizer(Path(tiny_model_path("llama")))
    messages = [ChatMessage(role="user", content="a", name="Ann")]
    texts = [render_chat(tokenizer, messages, chat_template=template) for _ in range(2)]
    assert ("Ann" in texts[0]) == kept
    assert len([r for r in caplog.records if "name has no effect" in r.message]) == (0 if kept else 1)


def test_arguments_of_calls_for_templates_that_join_strings(tiny_model_path: Any):
    tokenizer = get_tokenizer(Path(tiny_model_path("llama")))
    messages = [ChatMessage.model_validate(message) for message in CALLED]
    assert 'f {"a": 1}' in render_chat(tokenizer, messages, chat_template=JOINS)
    with pytest.raises(ValueError, match="undefined"):
        render_chat(tokenizer, messages, chat_template="{{ no.such.thing }}" + JOINS)


def test_an_unused_variable_of_a_template_is_named(tiny_model_path: Any):
    """``message`` occurs in many templates, as the name of their own loop variable."""
    tokenizer = get_tokenizer(Path(tiny_model_path("llama")))
    loop = "{% for message in messages %}{{ message.content }}{% endfor %}{{ style }}"
    messages = [ChatMessage(role="user", content="a")]
    assert render_chat(tokenizer, messages, chat_template=loop, template_kwargs={"style": "b"}) == "ab"
    with pytest.raises(ValueError, match="'message'"):
        render_chat(tokenizer, messages, chat_template=loop, template_kwargs={"message": "b"})


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_the_shape_of_answers_is_vllms(tiny: LiveServer):
    base = {"max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
    for path, body in (("/v1/completions", {"prompt": "abc"}), (CHAT, {"messages": [USER]})):
        whole = tiny.post(path, {**base, **body}).json()
        assert whole["system_fingerprint"] is None and whole["service_tier"] is None
        holder = whole if path == CHAT else whole["choices"][0]
        assert holder["prompt_logprobs"] is None and holder["prompt_token_ids"]
        usage = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        chunks = chunks_of(tiny.post(path, {**base, **body, **usage}).text)
        first = chunks[0] if path == CHAT else chunks[0]["choices"][0]
        assert first["prompt_token_ids"] == holder["prompt_token_ids"]
        assert chunks[0]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert sum("prompt_token_ids" in json.dumps(chunk) and "[" in json.dumps(chunk).split("prompt_token_ids")[1][:4]
                   for chunk in chunks) == 1  # fmt: skip
        last = chunks[-2]["choices"][0]
        assert last["finish_reason"] == "length" and (path != CHAT or "content" in last["delta"])
        unasked = {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}}
        assert all("usage" not in chunk for chunk in chunks_of(tiny.post(path, {**base, **body, **unasked}).text))
    assert tiny.post("/tokenize", {"prompt": "a"}).json()["token_strs"] is None
    (card, *_) = tiny.get("/v1/models").json()["data"]
    assert card["permission"][0]["object"] == "model_permission"
    assert tiny.post("/v1/completions", {"prompt": "a", "seed": 2**63}).status_code == 400
