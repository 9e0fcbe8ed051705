"""Thoughts are told apart from the answer, and an answer in a form may be thought about first."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from live_server import LiveServer, live_server, scripted_model

from minivllm.core.config import EngineArgs
from minivllm.serving import reasoning
from minivllm.serving.app import ServerOptions
from minivllm.serving.reasoning import REASONING_PARSERS, ReasoningParser, register_reasoning_parser, tokens_up_to

ASK = [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("name", "prompt", "text", "thought", "content"),
    [
        ("qwen3", "", "<think>\nhm\n</think>\n\nYes.", "\nhm\n", "\n\nYes."),
        ("qwen3", "", " <think>hm</think>Yes.", "hm", "Yes."),
        ("qwen3", "", "Yes.", "", "Yes."),
        ("qwen3", "", "<thin", "", "<thin"),
        ("qwen3", "", "Yes. <think>x</think>", "", "Yes. <think>x</think>"),
        ("qwen3", "", "<think>hm", "hm", ""),
        ("qwen3", "", "<think>hm</thi", "hm</thi", ""),
        ("qwen3", "assistant\n<think>\n", "hm</think>Yes.", "hm", "Yes."),
        ("qwen3", "<think>\n\n</think>\n\n", "Yes. <think>x</think>", "", "Yes. <think>x</think>"),
        ("qwen3", "user: what is <think>?\nassistant:", "Yes.", "", "Yes."),
        ("deepseek_r1", "", "hm</think>Yes.", "hm", "Yes."),
        ("deepseek_r1", "", "<think>hm</think>Yes.", "hm", "Yes."),
        ("deepseek_r1", "", "hm", "hm", ""),
        ("deepseek_r1", "", "</think>Yes.", "", "Yes."),
        ("mistral", "", "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    ],
)
def test_however_the_text_is_cut(name: str, prompt: str, text: str, thought: str, content: str):
    rng = random.Random(text)
    cuts = [[text], list(text)]
    for _ in range(10):
        at = sorted(rng.choices(range(len(text) + 1), k=3))
        cuts.append([text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)])
    for pieces in cuts:
        parser = REASONING_PARSERS[name](prompt)
        told = [*map(parser.push, pieces), parser.end()]
        assert ("".join(t for t, _ in told), "".join(c for _, c in told)) == (thought, content), pieces


def test_tokens_up_to_a_mark():
    text = list(map(ord, "hm</think>Yes"))
    assert tokens_up_to("</think>", text, lambda ids: "".join(map(chr, ids))) == 10


def test_a_family_of_ones_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reasoning, "REASONING_PARSERS", {})

    @register_reasoning_parser("mine")
    class Mine(ReasoningParser):
        start, end_mark = "(", ")"

    assert reasoning.REASONING_PARSERS["mine"]("").push("(a)b") == ("a", "b")


@pytest.fixture(scope="module")
def thinker(tiny_args: EngineArgs) -> Iterator[LiveServer]:
    args = replace(tiny_args, hf_overrides={"max_position_embeddings": 2048}, num_gpu_blocks=512)
    options = ServerOptions(
        served_model_name=["tiny"], reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True
    )
    with live_server(args, options) as server:
        yield server


@pytest.fixture
def scripted(thinker: LiveServer) -> Iterator[Any]:
    with scripted_model(thinker) as say:
        yield say


def test_chat_tells_thoughts_apart(scripted: Any):
    wishes = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 100}
    with scripted("<think>hm</think>Yes.").client() as client:
        whole = client.chat.completions.create(**wishes)
        chunks = list(client.chat.completions.create(**wishes, stream=True, stream_options={"include_usage": True}))
        silent = client.chat.completions.create(**wishes, extra_body={"include_reasoning": False}).choices[0].message
    message = whole.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("Yes.", "hm", "hm")
    assert whole.usage.completion_tokens_details.reasoning_tokens == len("<think>hm</think>")
    deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks if chunk.choices]
    assert "".join(d.get("reasoning", "") for d in deltas) == "hm"
    assert "".join(d.get("content") or "" for d in deltas) == "Yes."
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len("<think>hm</think>")
    assert silent.content == "Yes." and silent.reasoning is None


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}


@pytest.mark.parametrize(
    ("wish", "answer"),
    [
        ({"response_format": FORM}, '"a"'),
        ({"extra_body": {"structured_outputs": {"choice": ["one", "two"]}}}, "one"),
        ({"extra_body": {"structured_outputs": {"regex": "[0-9]{3}/x"}}}, "123/x"),
    ],
)
def test_a_form_holds_behind_the_thoughts(scripted: Any, wish: dict, answer: str):
    with scripted("<think>{x hm</think>" + answer).client() as client:
        message = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=100, **wish).choices[0].message
        assert (message.reasoning, message.content) == ("{x hm", answer)
    with scripted(answer).client() as client:
        message = client.chat.completions.create(model="tiny", messages=ASK, max_tokens=100, **wish).choices[0].message
        assert (message.reasoning, message.content) == (None, answer)


def test_a_forced_call_may_be_thought_about(scripted: Any):
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
    }
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
    for choice in ("required", "auto"):
        with scripted(f"<think>two</think>\n{call}").client() as client:
            message = client.chat.completions.create(
                model="tiny", messages=ASK, tools=[tool], tool_choice=choice, max_tokens=150
            ).choices[0].message  # fmt: skip
        assert message.reasoning == "two" and json.loads(message.tool_calls[0].function.arguments) == {"a": 2}


def test_what_cannot_be_thought_about_is_named(thinker: LiveServer):
    body = {"messages": ASK, "structured_outputs": {"grammar": 'start: "a"'}}
    error = thinker.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "structured_outputs.grammar"


def test_effort_goes_to_a_template_that_knows_it(thinker: LiveServer):
    error = thinker.post("/v1/chat/completions", {"messages": ASK, "reasoning_effort": "low"}).json()["error"]
    assert "reasoning_effort" in error["message"]
