"""Small HTTP client for OpenAI-compatible servers, with server-sent events."""

# Generated from nbs/serving/client.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import asyncio
import http.client
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

__all__ = [
    "EventSplitter", "Remote", "Response", "ServerError", "StreamReader", "error_text", "get_json", "request",
    "tls_context",
]  # fmt: skip


class ServerError(RuntimeError):
    """The server has answered with an error. ``status``: of HTTP; 200 if it came in a stream."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(
            f"the server answered {status}: {message}" if status != 200 else f"the server broke off: {message}"
        )
        self.status, self.message = status, message


class EventSplitter:
    """Cuts a stream of bytes into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return [event[5:].strip() for event in whole if event.startswith(b"data:")]


class StreamReader:
    """The events of a streamed answer, parsed, from its bytes. ``done``: [DONE] has come, and nothing after it counts."""

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self.done = False

    def feed(self, data: bytes) -> Iterator[Any]:
        """The events that are complete now. Raises ServerError for one that is an error."""
        for part in self._splitter.feed(data):
            if part == b"[DONE]":
                self.done = True
                return
            event = json.loads(part)
            if event.get("error"):
                raise ServerError(200, error_text(part))
            yield event


def error_text(body: bytes) -> str:
    """The message of an error body, whatever its shape."""
    try:
        found = json.loads(body)
        found = found.get("error", found)
        return str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        return body.decode("utf-8", "replace")[:200]


def _place(url: str) -> tuple[SplitResult, int, str]:
    """Parts of an address, its port, and the path with its query. Raises ValueError that names the address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"an address begins with http:// or https:// and names a host, got {url!r}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts, parts.port or (443 if parts.scheme == "https" else 80), path


def tls_context(insecure: bool = False) -> ssl.SSLContext:
    """Certificates are checked, unless ``insecure``."""
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@dataclass
class Response:
    """An answer whose status and headers have come. ``headers``: names in lower case."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ConnectionError if it ends before its end."""
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            length = self.headers.get("content-length")
            yield await (self.reader.read() if length is None else self.reader.readexactly(int(length)))
            return
        try:
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
        except asyncio.IncompleteReadError:
            raise ConnectionError("the server has closed the connection in the middle of its answer") from None

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[Any]:
        """The events of a stream, parsed, up to [DONE]. Raises ServerError for an event that is an error, ConnectionError."""
        stream = StreamReader()
        async for piece in self.pieces():
            for event in stream.feed(piece):
                yield event
            if stream.done:
                return
        raise ConnectionError("the stream has ended without [DONE]")


@asynccontextmanager
async def request(
    method: str, url: str, body: Any = None, headers: dict[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Response]:
    """Send a request with a JSON body and wait for the head of the answer. ``tls``: for https, default: `tls_context()`.

    Raises:
        ServerError: a status of 400 or more. OSError: no connection.
    """
    parts, port, path = _place(url)
    secure = (tls or tls_context()) if parts.scheme == "https" else None
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close", f"Content-Length: {len(data)}"]
    lines += ["Content-Type: application/json"] * bool(data) + [
        f"{name}: {value}" for name, value in (headers or {}).items()
    ]
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
    except OSError as error:
        raise ConnectionError(f"cannot connect to {parts.hostname}:{port}: {error.strerror or error}") from error
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await writer.drain()
        try:
            first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        except asyncio.IncompleteReadError:
            raise ConnectionError("the server has closed the connection before it answered") from None
        found = dict(line.split(":", 1) for line in rest if line)
        response = Response(int(first.split()[1]), {k.lower(): v.strip() for k, v in found.items()}, reader)
        if response.status >= 400:
            raise ServerError(response.status, error_text(await response.read()))
        yield response
    finally:
        writer.close()


async def get_json(url: str, headers: dict[str, str] | None = None, tls: ssl.SSLContext | None = None) -> Any:
    """What a GET gives, parsed."""
    async with request("GET", url, headers=headers, tls=tls) as response:
        return json.loads(await response.read())


def post_events(url: str, body: dict[str, Any], api_key: str | None = None, insecure: bool = False) -> Iterator[Any]:
    """The events of a streamed answer. Leaving the loop closes the connection, which aborts the request.

    Raises:
        ServerError: the server refuses, or breaks off. OSError: no connection. ValueError: a bad address.
    """
    parts, port, path = _place(url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        line: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, port, context=tls_context(insecure)
        )
    else:
        line = http.client.HTTPConnection(parts.hostname, port)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        line.request("POST", path, json.dumps(body | {"stream": True}), headers)
        response = line.getresponse()
        if response.status >= 400:
            raise ServerError(response.status, error_text(response.read()))
        stream = StreamReader()
        while piece := response.read1(65536):
            yield from stream.feed(piece)
            if stream.done:
                return
        raise ServerError(200, "the stream has ended without [DONE]")
    finally:
        line.close()


class Remote:
    """A server, as the commands `complete` and `chat` use it. ``url``: with or without /v1. ``model``: None for the server's first."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None, insecure: bool = False) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self.base, self.api_key, self.insecure = base + "/v1", api_key, insecure
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        tls = tls_context(insecure) if base.startswith("https") else None
        names = [card["id"] for card in asyncio.run(get_json(self.base + "/models", headers, tls))["data"]]
        if model is not None and model not in names:
            raise ValueError(f"{self.base} does not serve {model!r}; it serves {', '.join(names)}")
        self.model = model or names[0]

    def complete(self, prompt: str, **fields: Any) -> Iterator[tuple[int, str]]:
        """Pieces of completions, each with the number of its completion. ``fields``: of the request."""
        for event in post_events(
            self.base + "/completions", {"model": self.model, "prompt": prompt} | fields, self.api_key, self.insecure
        ):
            for choice in event["choices"]:
                yield choice["index"], choice["text"]

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> Iterator[str]:
        """Pieces of the answer to a conversation."""
        body = {"model": self.model, "messages": messages} | fields
        for event in post_events(self.base + "/chat/completions", body, self.api_key, self.insecure):
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
