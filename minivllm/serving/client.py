"""Small HTTP client for OpenAI-compatible servers, with server-sent events."""

# Generated from nbs/serving/client.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any

import httpx


class ServerError(RuntimeError):
    """The server has answered with an error. ``status``: of HTTP; 200 if it came in a stream."""

    def __init__(self, status: int, message: str) -> None:
        did = f"answered {status}" if status != 200 else "broke off"
        super().__init__(f"the server {did}: {message}")
        self.status, self.message = status, message


def _error_text(body: bytes) -> str:
    """The message of an error body, whatever its shape."""
    try:
        found = json.loads(body)
        found = found.get("error", found)
        return str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        return body.decode("utf-8", "replace")[:200]


async def read_events(lines: AsyncIterator[str]) -> AsyncIterator[Any]:
    """The events in the lines of a streamed answer, parsed, up to [DONE].

    Raises:
        ServerError: an event is an error. ConnectionError: the lines end without [DONE].
    """
    async for line in lines:
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            return
        if data:
            event = json.loads(data)
            if event.get("error"):
                raise ServerError(200, _error_text(data.encode()))
            yield event
    raise ConnectionError("the stream has ended without [DONE]")


@cache
def tls_context(insecure: bool) -> ssl.SSLContext:
    """Certificates are checked, unless ``insecure``. Made once: reading the system's certificates takes longer than a request."""
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def check_address(url: str) -> None:
    """Raise ValueError for a text that cannot be the address of a server."""
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        found = httpx.URL()
    if found.scheme not in ("http", "https") or not found.host or (found.port or 0) > 65535:
        raise ValueError(
            f"an address begins with http:// or https:// and names a host, with a port up to 65535; got {url!r}"
        )


@contextmanager
def _in_words(url: str) -> Iterator[None]:
    """Errors of httpx as errors of the system, and a bad address as ValueError."""
    check_address(url)
    try:
        yield
    except httpx.ConnectError as error:
        place = httpx.URL(url)
        port = place.port or (443 if place.scheme == "https" else 80)
        raise ConnectionError(f"cannot connect to {place.host}:{port}: {error}") from error
    except httpx.HTTPError as error:
        raise ConnectionError(f"the server has closed the connection: {error}") from error


@asynccontextmanager
async def request(
    method: str, url: str, body: Any = None, headers: dict[str, str] | None = None, insecure: bool = False
) -> AsyncIterator[httpx.Response]:
    """Send a request with a JSON body and wait for status and headers of the answer. ``insecure``: see `tls_context`.

    Raises:
        ServerError: a status of 400 or more. OSError: no connection. ValueError: a bad address.
    """
    verify = tls_context(insecure) if url.startswith("https") else False
    with _in_words(url):
        async with (
            httpx.AsyncClient(verify=verify, trust_env=False, timeout=None) as client,
            client.stream(method, url, json=body, headers=headers) as response,
        ):
            if response.status_code >= 400:
                raise ServerError(response.status_code, _error_text(await response.aread()))
            yield response


async def get_json(url: str, headers: dict[str, str] | None = None, insecure: bool = False) -> Any:
    """What a GET gives, parsed."""
    async with request("GET", url, headers=headers, insecure=insecure) as response:
        return json.loads(await response.aread())


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that shows a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _post_events(url: str, body: dict[str, Any], api_key: str | None = None, insecure: bool = False) -> Iterator[Any]:
    """The events of a streamed answer. Leaving the loop closes the connection, which aborts the request.

    Raises:
        ServerError: the server refuses, or breaks off. OSError: no connection. ValueError: a bad address.
    """

    async def stream() -> AsyncIterator[Any]:
        async with request("POST", url, body | {"stream": True}, bearer(api_key), insecure) as response:
            async for event in read_events(response.aiter_lines()):
                yield event

    events = stream()

    async def next_event() -> Any:
        return await anext(events, None)

    with asyncio.Runner() as runner:
        try:
            while (event := runner.run(next_event())) is not None:
                yield event
        finally:
            runner.run(events.aclose())  # type: ignore[attr-defined]


class Remote:
    """A server, as the commands `complete` and `chat` use it. ``url``: with or without /v1. ``model``: None for the server's first."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None, insecure: bool = False) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self.base, self.api_key, self.insecure = base + "/v1", api_key, insecure
        cards = asyncio.run(get_json(self.base + "/models", bearer(api_key), insecure))["data"]
        names = [card["id"] for card in cards]
        if model is not None and model not in names:
            raise ValueError(f"{self.base} does not serve {model!r}; it serves {', '.join(names)}")
        self.model = model or names[0]

    def complete(self, prompt: str, **fields: Any) -> Iterator[tuple[int, str]]:
        """Pieces of completions, each with the number of its completion. ``fields``: of the request."""
        for event in _post_events(
            self.base + "/completions", {"model": self.model, "prompt": prompt} | fields, self.api_key, self.insecure
        ):
            for choice in event["choices"]:
                yield choice["index"], choice["text"]

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> Iterator[str]:
        """Pieces of the answer to a conversation."""
        body = {"model": self.model, "messages": messages} | fields
        for event in _post_events(self.base + "/chat/completions", body, self.api_key, self.insecure):
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
