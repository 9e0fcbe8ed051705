"""Proxy for disaggregated prefill: one server reads the prompt, another writes the answer."""

# Generated from nbs/serving/pd_proxy.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import argparse
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from minivllm.serving.client import check_address

logger = logging.getLogger("minivllm.serving")

_NOT_FOR_PREFILL = (
    "stream_options",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "min_tokens",
    "max_completion_tokens",
)
_HOP = {"host", "content-length", "connection", "transfer-encoding", "keep-alive", "accept-encoding"}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The request that computes a prompt and one token. Only its KV blocks are kept."""
    kept = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    return kept | {"max_tokens": 1, "stream": False}


def make_proxy(prefill: httpx.AsyncClient, decode: httpx.AsyncClient) -> FastAPI:
    """An app that hands prompts to one server and answers from another. Both clients have a server's URL as their base, and are closed with the app."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with prefill, decode:
            yield

    app = FastAPI(title="minivllm prefill and decode", lifespan=lifespan)

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(request: Request) -> Response:
        content, headers, path = await request.body(), _passed_on(request), request.url.path
        try:
            body = await request.json()
        except ValueError:
            body = None
        if isinstance(body, dict):
            await _prefill(prefill, path, prefill_body(body), headers)
        return await _relay(decode, request.method, path, content, headers)

    @app.get("/{path:path}")
    async def look(request: Request) -> Response:
        return await _relay(decode, "GET", request.url.path, b"", _passed_on(request))

    return app


def _passed_on(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name not in _HOP}


async def _prefill(client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    """Have the prompt computed. Errors are only logged: if the request itself is wrong, the decode server will say so."""
    headers = {name: value for name, value in headers.items() if name != "content-type"}
    try:
        answer = await client.post(path, json=body, headers=headers)
        if answer.is_error:
            logger.warning("the prefill server answered %d: the decode server computes the prompt", answer.status_code)
    except httpx.HTTPError as error:
        logger.warning("the prefill server cannot be reached (%r): the decode server computes the prompt", error)


async def _relay(
    client: httpx.AsyncClient, method: str, path: str, content: bytes, headers: dict[str, str]
) -> Response:
    """The answer of a server, as it arrives."""
    try:
        answer = await client.send(client.build_request(method, path, content=content, headers=headers), stream=True)
    except httpx.HTTPError as error:
        message = f"the decode server cannot be reached: {error!r}"
        return JSONResponse({"error": {"message": message, "type": "server_error", "param": None, "code": 502}}, 502)

    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:  # also if the client has gone: then the server hears of it
            await answer.aclose()

    kept = {name: value for name, value in answer.headers.items() if name not in _HOP}
    return StreamingResponse(pieces(), answer.status_code, kept)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proxy."""
    parser = argparse.ArgumentParser(prog="python -m minivllm.serving.pd_proxy", description=__doc__)
    parser.add_argument("--prefill", required=True, help="URL of the server that computes prompts")
    parser.add_argument("--decode", required=True, help="URL of the server that answers")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-timeout", type=float, default=300.0, help="seconds to wait for a prompt's blocks")
    args = parser.parse_args(argv)
    for url in (args.prefill, args.decode):
        try:
            check_address(url)
        except ValueError as error:
            parser.error(str(error))
    prefill = httpx.AsyncClient(base_url=args.prefill, timeout=httpx.Timeout(args.prefill_timeout, connect=10.0))
    decode = httpx.AsyncClient(base_url=args.decode, timeout=httpx.Timeout(None, connect=10.0))
    uvicorn.run(make_proxy(prefill, decode), host=args.host, port=args.port)
    return 0


if __name__ == "__main__" and "get_ipython" not in globals():
    raise SystemExit(main())
