"""`/v1/responses` by the official client: items, events, tools, memory."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from live_server import LiveServer, live_server, scripted_model
from openai.types import responses as types
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions
from minivllm.serving.errors import ApiError
from minivllm.serving.response_request import messages_of
from minivllm.serving.responses import ResponseStore, Stored

RESPONSES = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": True}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tiny_args: EngineArgs) -> Iterator[LiveServer]:
    args = replace(tiny_args, hf_overrides={"max_position_embeddings": 2048}, num_gpu_blocks=512)
    options = ServerOptions(
        served_model_name=["tiny"], reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True
    )
    with live_server(args, options) as live:
        yield live


@pytest.fixture
def scripted(server: LiveServer) -> Iterator[Any]:
    with scripted_model(server) as say:
        yield say


def raw_events(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """The events as they come, each of which OpenAI's own type must accept."""
    lines = server.post(RESPONSES, {"stream": True, **body}).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Names of events, deltas in a row as one."""
    short = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(short) if i == 0 or not (name.endswith("delta") and short[i - 1] == name)]


def test_text(scripted: Any):
    live = scripted("Hello.")
    with live.client() as client:
        answer = client.responses.create(
            model="tiny", input="Hi", instructions="Be brief.", temperature=0, metadata={"a": "b"}
        )
        stream = client.responses.create(model="tiny", input="Hi", temperature=0, stream=True)
        final = [event for event in stream][-1].response
    types.Response.model_validate(answer.to_dict(), strict=False)
    assert answer.output_text == final.output_text == "Hello." and answer.status == final.status == "completed"
    assert answer.id.startswith("resp_") and answer.metadata == {"a": "b"} and answer.instructions == "Be brief."
    assert answer.usage.output_tokens == len("Hello.") + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.output[0].role == "assistant" and answer.output[0].status == "completed"
    assert kinds(raw_events(live, input="Hi", temperature=0)) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip


def test_thoughts_and_calls_are_items(scripted: Any):
    live = scripted(f"<think>two</think>\nI ask.\n{CALL}\n{CALL}")
    events = raw_events(live, input="Hi", tools=[TOOL], max_output_tokens=300)
    item = ["output_item.added", "content_part.added"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(events) == [
        "created", "in_progress",
        *item, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        *item, "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        *call, *call, "completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    assert [o["type"] for o in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"][0]["text"] == "two" and output[1]["content"][0]["text"] == "\nI ask."
    assert all(o["arguments"] == '{"a": 2}' and o["name"] == "f" for o in output[2:])
    assert len({o["call_id"] for o in output[2:]}) == 2
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == output
    with live.client() as client:
        whole = client.responses.create(model="tiny", input="Hi", tools=[TOOL], max_output_tokens=300)
    assert [o.type for o in whole.output] == [o["type"] for o in output] and whole.output_text == "\nI ask."
    assert whole.usage.output_tokens_details.reasoning_tokens == len("<think>two</think>")


class Args(BaseModel):
    a: int = Field(ge=1, le=2)


def test_parse_and_the_stream_helper(scripted: Any):
    live = scripted('{"a": 2}')
    with live.client() as client:
        parsed = client.responses.parse(model="tiny", input="Hi", text_format=Args)
        with client.responses.stream(model="tiny", input="Hi", text_format=Args) as stream:
            deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
    assert parsed.output_parsed == final.output_parsed == Args(a=2) and deltas == '{"a": 2}'
    live = scripted(CALL.replace('"f"', '"Args"'))
    with live.client() as client:
        parsed = client.responses.parse(
            model="tiny", input="Hi", tools=[openai.pydantic_function_tool(Args)],
            tool_choice={"type": "function", "name": "Args"},
        )  # fmt: skip
    assert parsed.output[0].type == "function_call" and parsed.output[0].parsed_arguments == Args(a=2)


def test_the_async_client(scripted: Any):
    async def ask(live: LiveServer) -> tuple[str, str]:
        async with live.async_client() as client:
            whole = await client.responses.create(model="tiny", input="Hi")
            text = ""
            async for event in await client.responses.create(model="tiny", input="Hi", stream=True):
                text += event.delta if event.type == "response.output_text.delta" else ""
            return whole.output_text, text

    assert asyncio.run(ask(scripted("Hello."))) == ("Hello.", "Hello.")


def test_what_is_cut_off_is_incomplete(scripted: Any):
    live = scripted("Hello. " * 30)
    events = raw_events(live, input="Hi", max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"} and response["completed_at"] is None
    assert response["output"][0]["status"] == "incomplete" and response["usage"]["output_tokens"] == 5
    with live.client() as client:
        assert client.responses.create(model="tiny", input="Hi", max_output_tokens=5).status == "incomplete"


def test_logprobs(scripted: Any):
    live = scripted("Hello.")
    with live.client() as client:
        answer = client.responses.create(
            model="tiny", input="Hi", top_logprobs=2, include=["message.output_text.logprobs"]
        )
    entries = answer.output[0].content[0].logprobs
    assert [entry.token for entry in entries] == list("Hello.") and len(entries[0].top_logprobs) == 2
    streamed = [
        entry
        for event in raw_events(live, input="Hi", top_logprobs=2)
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert [entry["token"] for entry in streamed] == list("Hello.")


def prompt_tokens(live: LiveServer, messages: list[dict[str, Any]]) -> int:
    return live.post("/tokenize", {"messages": messages}).json()["count"]


def test_the_conversation_goes_on(scripted: Any):
    live = scripted("Hello.")
    with live.client() as client:
        first = client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
        second = client.responses.create(model="tiny", input="More", previous_response_id=first.id)
        third = client.responses.create(model="tiny", input="Even", previous_response_id=second.id, store=False)
        by_hand = client.responses.create(
            model="tiny", input=[{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "More"}]
        )
        assert client.responses.retrieve(second.id).output_text == "Hello."
        items = client.responses.input_items.list(second.id).data
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(third.id)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"
    assert [item.content[0].text for item in items] == ["More"]
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "More"},
    ]
    assert second.usage.input_tokens == by_hand.usage.input_tokens == prompt_tokens(live, talk)
    assert first.usage.input_tokens == prompt_tokens(live, [{"role": "system", "content": "Be brief."}, talk[0]])
    assert third.usage.input_tokens > second.usage.input_tokens


def test_a_call_and_its_result_go_back(scripted: Any):
    live = scripted(f"<think>hm</think>{CALL}")
    with live.client() as client:
        first = client.responses.create(model="tiny", input="Hi", tools=[TOOL])
        call = next(item for item in first.output if item.type == "function_call")
        live = scripted("Two.")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        second = client.responses.create(model="tiny", input=[result], previous_response_id=first.id)
        assert second.output_text == "Two."
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="tiny", input=[result])


def test_items_become_messages():
    items = [
        {"type": "message", "role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
        {"type": "message", "role": "assistant", "content": "b"},
    ]
    calls = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": "{}"}} for i, n in (("1", "f"), ("2", "g"))
    ]
    said = {"role": "assistant", "content": "a", "tool_calls": calls}
    rest = [{"role": "tool", "tool_call_id": "1", "content": "r"}, {"role": "assistant", "content": "b"}]
    assert messages_of(items, True) == [{"role": "user", "content": "q"}, said | {"reasoning_content": "t"}, *rest]
    assert messages_of(items, False)[1] == said


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "at least one"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]", "input_text"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "'user'"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]}, "encrypted_content", "not supported"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input", "tool call"),
        ({"input": "x", "background": True}, "background", "not supported"),
        ({"input": "x", "truncation": "auto"}, "truncation", "not supported"),
        ({"input": "x", "include": [1]}, "include[0]", "string"),
        ({"input": "x", "reasoning": {"mode": "pro"}}, "mode", "not supported"),
        ({"input": "x", "tools": [{"type": "file_search"}]}, "tools[0]", "must be 'function' (or 'web_search', which is left out), got 'file_search'"),
        ({"input": "x", "tools": [{"type": "web_search"}, {"type": "mcp"}]}, "tools[1]", "got 'mcp'"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"input": "x", "temperature": 9}, "temperature", "[0, 2]"),
        ({"input": "x", "n": 2}, "n", "unknown field"),
        ({"input": "x", "metadata": {"a": "b" * 600}}, "metadata", "512"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format", "schema"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "bad"}}}}, None, "look like"),
        ({"input": "x", "model": "gpt-9"}, "model", "not served"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server: LiveServer, body: dict, param: str | None, words: str):
    response = server.post(RESPONSES, body)
    error = response.json()["error"]
    assert response.status_code in (400, 404) and words in error["message"], error
    assert param is None or (error["param"] or "").startswith(param), error


def test_a_response_that_fails_says_so(tiny_args: EngineArgs):
    with live_server(tiny_args) as live:

        def cut(output: Any) -> None:
            raise OSError("the wire was cut")

        live.llm.llm_engine.core.executor.execute_model = cut
        last = raw_events(live, input="Hi")[-1]
    assert last["type"] == "response.failed" and "the wire was cut" in last["response"]["error"]["message"]
    assert last["response"]["status"] == "failed"


def test_hanging_up_frees_the_blocks(scripted: Any):
    live = scripted("Hello. " * 200)
    with live.client() as client:
        stream = client.responses.create(model="tiny", input="Hi", stream=True, max_output_tokens=1000)
        for _, event in zip(range(10), stream, strict=False):
            assert event.type
        stream.close()
    assert live.wait_at_rest()


def test_the_store_is_bounded():
    def stored(i: int, size: int) -> Stored:
        return Stored({"id": f"resp_{i}"}, [], [{"text": "x" * size}])

    store = ResponseStore(max_count=3, max_bytes=1000)
    for i in range(5):
        store.put(stored(i, 10))
    assert len(store) == 3 and store.get("resp_4").response["id"] == "resp_4"
    store.put(stored(5, 940))
    assert len(store) == 1
    store.put(stored(6, 2000))
    assert len(store) == 0
    with pytest.raises(ApiError, match="resp_6"):
        store.get("resp_6")
    for i in range(200):
        store.put(stored(i, 10))
        store.delete(f"resp_{i}")
    assert len(store) == 0 and store._bytes == 0
