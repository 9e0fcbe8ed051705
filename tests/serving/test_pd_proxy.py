"""The proxy of disaggregated prefill: what each server is asked, and that the prefill server may be dead."""

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from live_server import live_server

from minivllm.serving.app import ServerOptions
from minivllm.serving.pd_proxy import main, make_proxy, prefill_body

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def stub(asked: list, status: int = 200) -> httpx.AsyncClient:
    """A server that notes what it is asked, and streams its own name."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request):
        body = await request.json()
        asked.append((body, request.headers.get("authorization")))
        if status != 200:
            return JSONResponse({"error": {"message": "no"}}, status)
        return StreamingResponse(iter([b"data: a\n\n", b"data: [DONE]\n\n"]), media_type="text/event-stream")

    @app.get("/v1/models")
    async def models():
        return {"data": []}

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


def ask(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy")


async def test_a_prompt_goes_to_both_servers():
    first, second = [], []
    body = {"model": "m", "prompt": "x", "max_tokens": 9, "stream": True, "stream_options": {}, "n": 2, "min_tokens": 3}
    async with ask(make_proxy(stub(first), stub(second))) as client:
        answer = await client.post("/v1/completions", json=body, headers={"Authorization": "Bearer k"})
        assert answer.text == "data: a\n\ndata: [DONE]\n\n" and answer.headers["content-type"].startswith(
            "text/event-stream"
        )
        assert (await client.get("/v1/models")).json() == {"data": []}
    assert first == [({"model": "m", "prompt": "x", "max_tokens": 1, "stream": False}, "Bearer k")]
    assert second == [(body, "Bearer k")] and prefill_body(body)["max_tokens"] == 1


@pytest.mark.parametrize("dead", [False, True])
async def test_a_prefill_server_that_fails_costs_no_request(dead):
    gone = httpx.AsyncClient(base_url="http://127.0.0.1:9")
    asked = []
    async with ask(make_proxy(gone if dead else stub([], 500), stub(asked))) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200 and len(asked) == 1
    async with ask(make_proxy(stub([]), gone)) as client:
        answer = await client.post("/v1/completions", content=json.dumps({"prompt": "x"}))
        assert answer.status_code == 502 and "decode server cannot be reached" in answer.json()["error"]["message"]


async def test_a_prefill_server_that_does_not_answer_costs_its_timeout():
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    hung = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=0.2)
    asked = []
    async with ask(make_proxy(hung, stub(asked))) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200 and len(asked) == 1
    server.close()


async def test_a_prefill_server_that_is_killed_before_it_answers_costs_no_request():
    async def die(reader, writer):
        await reader.readuntil(b"max_tokens")
        writer.transport.abort()

    server = await asyncio.start_server(die, "127.0.0.1", 0)
    killed = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    asked = []
    async with ask(make_proxy(killed, stub(asked))) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200 and len(asked) == 1
    server.close()


@pytest.mark.slow
async def test_two_servers_answer_as_one(tiny_args, tmp_path):
    """Real engines: the same text as the decode server gives alone, and the prompt's blocks come from the other one."""
    from dataclasses import replace

    def args(role: str):
        extra = {"shared_storage_path": str(tmp_path), "load_async": role == "kv_consumer"}
        config = {"kv_connector": "SharedStorageConnector", "kv_role": role, "kv_connector_extra_config": extra}
        return replace(tiny_args, kv_transfer_config=config)

    body = {"model": "tiny", "prompt": "A prompt that is long enough for some blocks of tokens.", "max_tokens": 12}
    body |= {"temperature": 0, "ignore_eos": True}
    options = ServerOptions(served_model_name=["tiny"])
    with live_server(args("kv_producer"), options) as one, live_server(args("kv_consumer"), options) as two:
        clients = [
            httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {server.key}"})
            for server in (one, two)
        ]
        async with ask(make_proxy(*clients)) as client:
            answer = (await client.post("/v1/completions", json=body)).json()
            streamed = (await client.post("/v1/completions", json=body | {"stream": True})).text
        hits = two.llm.llm_engine.get_metrics()["external_prefix_cache_hits"]
        assert hits == (answer["usage"]["prompt_tokens"] - 1) // 16 * 16 > 0
        assert (
            f'vllm:external_prefix_cache_hits_total{{engine="0",model_name="tiny"}} {hits:.1f}'
            in two.get("/metrics").text
        )
        assert two.llm.llm_engine.reset_prefix_cache()
        assert two.post("/v1/completions", body).json()["choices"][0]["text"] == answer["choices"][0]["text"]
        assert "[DONE]" in streamed and one.wait_at_rest() and two.wait_at_rest()


def test_what_is_no_address_is_refused(capsys):
    for wrong in ("localhost:8001", "http://", "http://a:99999"):
        with pytest.raises(SystemExit):
            main(["--prefill", "http://127.0.0.1:8001", "--decode", wrong])
        assert f"names a host, with a port up to 65535; got {wrong!r}" in capsys.readouterr().err
