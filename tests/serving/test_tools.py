"""Functions are called over a real socket, forced by a grammar or read from what a scripted model writes."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from live_server import LiveServer, live_server, scripted_model
from pydantic import BaseModel, Field

from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions, make_parser, options_from
from minivllm.serving.protocol import FunctionDefinition
from minivllm.serving.tools import Call, CallFormat, call_rules, literal, quoted

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rom", "Bonn"]},
        "days": {"$ref": "#/$defs/few"},
    },
    "required": ["city", "days"],
    "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 9}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "a ::= b", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]


@pytest.fixture(scope="module")
def wide_args(tiny_args: EngineArgs) -> EngineArgs:
    """The tiny model with room for descriptions of functions."""
    return replace(tiny_args, hf_overrides={"max_position_embeddings": 2048}, num_gpu_blocks=512)


@pytest.fixture(scope="module")
def auto(wide_args: EngineArgs) -> Iterator[LiveServer]:
    options = ServerOptions(served_model_name=["tiny"], enable_auto_tool_choice=True, tool_call_parser="hermes")
    with live_server(wide_args, options) as server:
        yield server


@pytest.fixture(scope="module")
def tiny(wide_args: EngineArgs) -> Iterator[LiveServer]:
    """Without a parser: calls can be forced only."""
    with live_server(wide_args, ServerOptions(served_model_name=["tiny"])) as server:
        yield server


def script(text: str, **more: Any) -> dict[str, Any]:
    """Wishes that make the tiny model, one token a byte, write this text and end."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}, **more}


def collect(chunks: Any) -> tuple[str, list[dict[str, Any]], str | None]:
    """Content, calls and finish reason of a stream, put together as OpenAI's guide does."""
    content, calls, reason = "", {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for piece in choice.delta.tool_calls or ():
                if piece.index not in calls:
                    assert piece.id and piece.type == "function" and piece.function.name
                    calls[piece.index] = {"id": piece.id, "name": piece.function.name, "arguments": ""}
                else:
                    assert piece.id is None and piece.type is None and piece.function.name is None
                calls[piece.index]["arguments"] += piece.function.arguments
    return content, list(calls.values()), reason


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_fit_their_schema(tiny: LiveServer, choice: Any, seed: int):
    wishes = {"model": "tiny", "messages": ASK, "tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": seed,
              "parallel_tool_calls": False, "max_tokens": 200}  # fmt: skip
    with tiny.client() as client:
        answer = client.chat.completions.create(**wishes).choices[0]
        content, calls, reason = collect(client.chat.completions.create(**wishes, stream=True))
    named = choice != "required"
    (call,) = answer.message.tool_calls
    assert answer.message.content is None and call.type == "function" and call.id.startswith("call_")
    assert answer.finish_reason == reason == ("stop" if named else "tool_calls")
    if call.function.name == "weather":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    else:
        assert not named and (call.function.name, call.function.arguments) == ("time", "{}")
    assert content == "" and len(calls) == 1 and calls[0]["id"] != call.id
    assert (calls[0]["name"], calls[0]["arguments"]) == (call.function.name, call.function.arguments)


def test_several_calls(tiny: LiveServer):
    counts = set()
    with tiny.client() as client:
        for seed in range(3):
            wishes = {"model": "tiny", "messages": ASK, "tools": [TIME], "tool_choice": "required", "seed": seed,
                      "temperature": 1}  # fmt: skip
            calls = client.chat.completions.create(**wishes).choices[0].message.tool_calls
            counts.add(len(calls))
            assert len({call.id for call in calls}) == len(calls)
    assert max(counts) > 1


def test_a_call_that_is_cut_off_says_so(tiny: LiveServer):
    named = {"type": "function", "function": {"name": "weather"}}
    with tiny.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, tool_choice=named, max_tokens=60
        ).choices[0]
    assert answer.finish_reason == "length" and answer.message.tool_calls[0].function.arguments.startswith('{"city"')


def test_allowed_tools(tiny: LiveServer):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    with tiny.client() as client:
        for seed in range(3):
            wishes = {"model": "tiny", "messages": ASK, "tools": TOOLS, "tool_choice": choice, "seed": seed}
            answer = client.chat.completions.create(**wishes, temperature=1, max_tokens=250).choices[0]
            assert {call.function.name for call in answer.message.tool_calls} == {"time"}


def test_none_means_no_call(auto: LiveServer):
    with auto.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, tool_choice="none", **script("<tool_call>x</tool_call>")
        ).choices[0]
    assert answer.message.content == "<tool_call>x</tool_call>" and answer.message.tool_calls is None


class Weather(BaseModel):
    """Tells the weather."""

    city: str = Field(max_length=3)
    days: int = Field(ge=1, le=9)


def test_parse_gives_arguments_as_an_object(tiny: LiveServer):
    tool = openai.pydantic_function_tool(Weather)
    assert tool["function"]["strict"] is True
    with tiny.client() as client:
        answer = client.chat.completions.parse(
            model="tiny", messages=ASK, tools=[tool], tool_choice="required", temperature=1, seed=3,
            parallel_tool_calls=False, max_tokens=200,
        )  # fmt: skip
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


# What a model writes by itself. The tiny model cannot, so tokens are forced by a logits processor.


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 2}}\n</tool_call>'


@pytest.fixture
def scripted(auto: LiveServer) -> Iterator[Any]:
    with scripted_model(auto, against_grammar=True) as say:
        yield say


def test_the_model_decides(scripted: Any):
    wishes = {"model": "tiny", "messages": ASK, "tools": TOOLS}
    two = f"I ask.\n{HERMES}\n" + HERMES.replace("weather", "time")
    server = scripted(two)
    with server.client() as client:
        answer = client.chat.completions.create(**wishes).choices[0]
        streamed = collect(client.chat.completions.create(**wishes, stream=True))
        alone = client.chat.completions.create(**wishes, parallel_tool_calls=False).choices[0]
    names = [call.function.name for call in answer.message.tool_calls]
    assert (answer.message.content, names, answer.finish_reason) == ("I ask.", ["weather", "time"], "tool_calls")
    assert streamed[0] == "I ask." and streamed[2] == "tool_calls"
    assert [(c["name"], c["arguments"]) for c in streamed[1]] == [
        (call.function.name, call.function.arguments) for call in answer.message.tool_calls
    ]
    assert [call.function.name for call in alone.message.tool_calls] == ["weather"]
    with scripted("No need.").client() as client:
        answer = client.chat.completions.create(**wishes).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("No need.", None, "stop")


def test_arguments_stream_while_they_are_written(scripted: Any):
    with scripted(HERMES, pace=0.01).client() as client:
        chunks = list(
            client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, max_tokens=250, stream=True)
        )
    pieces = [c.choices[0].delta.tool_calls[0].function.arguments for c in chunks if c.choices[0].delta.tool_calls]
    assert "".join(pieces) == '{"city": "Rom", "days": 2}' and len(pieces) > 20
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        chunks[-1].choices[0].delta.to_dict() in ({}, {"content": ""})
        and chunks[-1].choices[0].finish_reason == "tool_calls"
    )


def test_logprobs_of_calls_are_all_sent(scripted: Any):
    wishes = {"model": "tiny", "messages": ASK, "tools": TOOLS, "logprobs": True}
    with scripted("Oh. " + HERMES).client() as client:
        whole = client.chat.completions.create(**wishes).choices[0].logprobs.content
        chunks = client.chat.completions.create(**wishes, stream=True)
        streamed = [token for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in whole]


def test_the_async_client_and_the_stream_helper(scripted: Any):
    async def ask(server: LiveServer) -> Any:
        async with server.async_client() as client:
            wishes = {
                "model": "tiny",
                "messages": ASK,
                "tools": [openai.pydantic_function_tool(Weather, name="weather")],
            }
            async with client.chat.completions.stream(**wishes, tool_choice="required", max_tokens=250) as stream:
                kinds = [event.type async for event in stream]
                return kinds, await stream.get_final_completion()

    kinds, final = asyncio.run(ask(scripted(HERMES)))
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Rom", days=2)


def test_strict_holds_a_free_answer_to_the_schema(auto: LiveServer):
    """The random model would rather write anything else: it is pushed into a call, and then must go through with it."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    calls, free = [], []
    with auto.client() as client:
        for seed in range(3):
            answer = client.chat.completions.create(
                model="tiny", messages=ASK, tools=[strict, TIME], seed=seed, temperature=1.5, max_tokens=250,
                logit_bias={str(t): 8 for t in auto.llm.get_tokenizer().encode("<tool_call>")}, stop=["qq"],
            ).choices[0]  # fmt: skip
            calls += answer.message.tool_calls or []
            free.append(answer.message.content)
    assert any(free)
    for call in calls:
        if call.function.name == "weather" and call.function.arguments.endswith("}"):
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_an_answer_in_json_or_a_call(auto: LiveServer):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    mark = str(auto.llm.get_tokenizer().encode("<")[0])
    with auto.client() as client:

        def ask(**more: Any) -> Any:
            return client.chat.completions.create(
                model="tiny", messages=ASK, tools=[TIME], response_format=form, max_tokens=250, parallel_tool_calls=False,
                **more,
            ).choices[0].message  # fmt: skip

        assert json.loads(ask(logit_bias={mark: -100}).content) in (1, 2)
        assert [call.function.name for call in ask(logit_bias={mark: 100}).tool_calls] == ["time"]


# What goes back to the model


HISTORY = [
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom", "days": 2}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def prompt_of(server: LiveServer, **body: Any) -> str:
    tokens = server.post("/tokenize", body).json()["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_functions_are_shown_to_a_model_whose_template_cannot(auto: LiveServer):
    prompt = prompt_of(auto, messages=HISTORY, tools=TOOLS)
    assert '"name": "weather"' in prompt and "<tool_call>" in prompt
    assert f"<|im_start|>assistant\n{HERMES}<|im_end|>" in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt
    with_system = prompt_of(auto, messages=[{"role": "system", "content": "Be brief."}, *ASK], tools=TOOLS)
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n")


def test_a_template_that_knows_calls_gets_them(wide_args: EngineArgs):
    template = (
        "{% for t in tools or [] %}T:{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %};{% endfor %}"
    )
    with live_server(wide_args, ServerOptions(trust_request_chat_template=True)) as server:
        prompt = prompt_of(server, messages=HISTORY, tools=TOOLS, tool_choice="required", chat_template=template)
    assert prompt == "T:weather;T:time;user:Weather?;assistant:weather(Rom);tool:sunny;"


F = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [F]}, "tool_choice", "--enable-auto-tool-choice"),
        ({"tools": [F], "tool_choice": "maybe"}, "tool_choice", "'required'"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0]", "'object'"),
        ({"tools": [F, F]}, "tools[1]", "two tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}],
          "tool_choice": "required"}, None, "must look like"),
        ({"tools": [F], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs", "json"),
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages[1]", "tool_call_id"),
        ({"messages": [*ASK, {"role": "tool", "content": "x", "tool_call_id": "c9"}]}, "messages[1].tool_call_id", "'c9'"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0]", "assistant"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]}]},
         "messages[1].tool_calls[0].function", "JSON object"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tiny: LiveServer, more: dict, param: str | None, words: str):
    response = tiny.post(CHAT, {"messages": ASK, "max_tokens": 2, **more})
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"], error
    assert param is None or (error["param"] or "").startswith(param), error


def test_flags():
    options = options_from(make_parser().parse_args(["--enable-auto-tool-choice", "--tool-call-parser", "mistral"]))
    assert options.parsers().auto and options.parsers().tool_parser.__name__ == "MistralToolParser"
    with pytest.raises(ValueError, match="hermes"):
        ServerOptions(tool_call_parser="hermez")
    with pytest.raises(ValueError, match="--tool-call-parser"):
        ServerOptions(enable_auto_tool_choice=True)
    with pytest.raises(ValueError, match="qwen3"):
        ServerOptions(reasoning_parser="x")


def test_rules_hide_the_mark_of_the_other_dialect(tiny: LiveServer):
    tokenizer = tiny.llm.get_tokenizer()
    assert "::=" not in quoted({"a": "x ::= y"}) and json.loads(quoted("::=")) == "::="
    assert literal("a<|im_start|>b", tokenizer) == f'"a" <[{tokenizer.convert_tokens_to_ids("<|im_start|>")}]> "b"'
    rules = call_rules(CallFormat(), [FunctionDefinition(name="f")], False, tokenizer)
    assert (
        rules[0].split() == ["calls:", "call"]
        and CallFormat().write([Call("f", "{}")]) == '{"name": "f", "arguments": {}}'
    )


def test_no_request_is_left(tiny: LiveServer, auto: LiveServer):
    assert tiny.wait_at_rest() and auto.wait_at_rest()
    assert httpx.get(auto.url + "/health").status_code == 200


@pytest.mark.slow
def test_smollm2_calls_what_it_must(smol: LiveServer):
    cities = {**SCHEMA, "properties": {**SCHEMA["properties"], "city": {"type": "string", "maxLength": 20}}}
    tool = {
        "type": "function",
        "function": {"name": "weather", "description": "Weather of a city", "parameters": cities},
    }
    with smol.client() as client:
        answer = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}],
            tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=80,
        ).choices[0]  # fmt: skip
    assert "Paris" in json.loads(answer.message.tool_calls[0].function.arguments)["city"]
