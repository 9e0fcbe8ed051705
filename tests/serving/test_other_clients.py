"""Clients that are not OpenAI's Python package: Pydantic AI, and OpenAI's package for JavaScript."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server, scripted_model
from pydantic import BaseModel, Field

from minivllm.core.config import EngineArgs
from minivllm.serving.app import ServerOptions


@pytest.fixture(scope="module")
def server(tiny_args: EngineArgs) -> Iterator[LiveServer]:
    args = replace(tiny_args, hf_overrides={"max_position_embeddings": 4096}, num_gpu_blocks=512)
    options = ServerOptions(served_model_name=["tiny"], tool_call_parser="hermes", enable_auto_tool_choice=True)
    with live_server(args, options) as live:
        yield live


@pytest.fixture
def scripted(server: LiveServer) -> Iterator[Any]:
    with scripted_model(server) as say:
        yield say


class City(BaseModel):
    name: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=999)


def agent(live: LiveServer, **options: Any) -> Any:
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{live.url}/v1", api_key="none"))
    return ai.Agent(model, **options)


def test_an_agent_calls_a_function_and_goes_on(scripted: Any):
    call = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
    live = scripted(call, "It is 42.")
    helper, seen = agent(live, instructions="Be brief."), []

    @helper.tool_plain
    def double(number: int) -> int:
        """Double a number."""
        seen.append(number)
        return 2 * number

    result = helper.run_sync("What is twice 21?")
    assert result.output == "It is 42." and seen == [21] and result.usage.requests == 2


def test_an_agent_answers_with_an_object(scripted: Any):
    """Pydantic AI asks for objects by a function that must be called."""
    live = scripted(
        '<tool_call>\n{"name": "final_result", "arguments": {"name": "Rom", "inhabitants": 3}}\n</tool_call>'
    )
    assert agent(live, output_type=City).run_sync("A city?").output == City(name="Rom", inhabitants=3)


def test_an_agent_streams(scripted: Any):
    live = scripted("Hello there.")

    async def main() -> list[str]:
        async with agent(live).run_stream("Hi") as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    import asyncio

    pieces = asyncio.run(main())
    assert "".join(pieces) == "Hello there." and len(pieces) > 3


SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const out = {};
out.models = (await client.models.list()).data.map((m) => m.id);
out.whole = (await client.chat.completions.create({ model: "tiny", messages })).choices[0].message.content;
out.streamed = "";
for await (const chunk of await client.chat.completions.create({ model: "tiny", messages, stream: true }))
  out.streamed += chunk.choices[0]?.delta?.content ?? "";
const runner = client.chat.completions.stream({ model: "tiny", messages });
out.helper = await runner.finalContent();
const tools = [{ type: "function", function: { name: "f", parameters: { type: "object", properties: { a: { enum: [1, 2] } }, required: ["a"] } } }];
const forced = await client.chat.completions.create({ model: "tiny", messages, tools, tool_choice: "required", parallel_tool_calls: false });
out.call = forced.choices[0].message.tool_calls[0].function;
out.reason = forced.choices[0].finish_reason;
const response = await client.responses.create({ model: "tiny", input: "Hi" });
out.response = response.output_text;
out.events = [];
for await (const event of await client.responses.create({ model: "tiny", input: "Hi", stream: true })) out.events.push(event.type);
const vector = await client.embeddings.create({ model: "tiny", input: "abc" });
out.length = Math.hypot(...vector.data[0].embedding);
out.size = vector.data[0].embedding.length;
try { await client.chat.completions.create({ model: "none", messages }); } catch (error) { out.error = [error.status, error.code]; }
console.log(JSON.stringify(out));
"""


@pytest.mark.slow
def test_javascript(scripted: Any, tmp_path: Path):
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm and node are not here")
    installed = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "openai@7.59.0"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    if installed.returncode:
        pytest.skip(f"npm cannot install openai: {installed.stderr[-200:]}")
    (tmp_path / "drive.mjs").write_text(SCRIPT)
    live = scripted("Hello.")
    done = subprocess.run(
        [node, "drive.mjs", live.url], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["models"] == ["tiny"] and out["error"] == [404, "model_not_found"]
    assert out["whole"] == out["streamed"] == out["helper"] == out["response"] == "Hello."
    assert json.loads(out["call"]["arguments"])["a"] in (1, 2) and out["reason"] == "tool_calls"
    assert out["events"][0] == "response.created" and out["events"][-1] == "response.completed"
    assert out["size"] == 72 and abs(out["length"] - 1) < 1e-5
