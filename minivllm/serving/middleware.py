"""Middleware: body limit, API keys, access log, request ids."""

# Generated from nbs/serving/middleware.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.serving.errors import ApiError

access = logging.getLogger("minivllm.access")


class BodyLimit:
    """Reads the body before the app does, and refuses one of more than ``max_bytes`` with 413. Does not trust Content-Length."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        too_large = length.isdigit() and int(length) > self.max_bytes
        body, more = bytearray(), not too_large
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            too_large = len(body) > self.max_bytes
            more = message.get("more_body", False) and not too_large
        if too_large:
            text = f"the body is larger than the limit of {self.max_bytes} bytes"
            error = ApiError(413, text, code="body_too_large", headers={"Connection": "close"})
            await error.response()(scope, receive, send)
            return
        await self.app(scope, _replay(bytes(body), receive), send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the whole body once, then pass on what comes next: that the client hangs up."""
    rest = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return rest.pop() if rest else await receive()

    return again


class JsonRoute(APIRoute):
    """A route that parses and checks a large JSON body in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler, field = super().get_route_handler(), self.body_field
        model = None if field is None else field.field_info.annotation

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive, model))

        return handle


class _JsonRequest(Request):
    """``model``: the pydantic class of the body."""

    LARGE = 1 << 16

    def __init__(self, scope: Scope, receive: Receive, model: Any) -> None:
        super().__init__(scope, receive)
        self.model = model

    async def json(self) -> Any:
        data = await self.body()
        if self.model is None or len(data) < self.LARGE:
            return json.loads(data)
        return await asyncio.to_thread(lambda: self.model.model_validate(json.loads(data)))


def http_protocol(max_head_bytes: int) -> Any:
    """What uvicorn parses HTTP with: its protocol in C, given a limit for the head of a request. Without httptools "h11", which has a limit."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class LimitedHead(HttpToolsProtocol):
        _head_bytes, _in_head = 0, True

        def data_received(self, data: bytes) -> None:
            counts = self._in_head
            super().data_received(data)
            if counts and self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > max_head_bytes and not self.transport.is_closing():
                    body = json.dumps(ApiError(431, f"the head is larger than {max_head_bytes} bytes").body).encode()
                    head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
                    self.transport.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                    self.transport.close()

        def on_message_begin(self) -> None:
            self._head_bytes, self._in_head = 0, True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

    return LimitedHead


class SiteCheck:
    """Refuses what a web page of another site sends. ``hosts``: names under which the server may be spoken to; empty for any."""

    def __init__(self, app: ASGIApp, origins: Collection[str] = (), hosts: Collection[str] = ()) -> None:
        self.app, self.origins = app, frozenset(origins)
        self.hosts = frozenset() if "*" in hosts else frozenset(host.strip("[]").lower() for host in hosts)

    def fault(self, method: str, headers: Headers) -> ApiError | None:
        """Why a request is refused, or None."""
        host, origin = headers.get("host", ""), headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname or ""
            sender = urlsplit(origin or "").netloc
        except ValueError:
            return ApiError(400, "the header Host or Origin is malformed")
        if self.hosts and name not in self.hosts:
            return ApiError(403, f"Host: {name!r} is not a name of this server (--allowed-hosts says which are)")
        known = origin is None or "*" in self.origins or origin in self.origins or sender == host
        if not known and method not in ("GET", "HEAD", "OPTIONS"):
            return ApiError(403, f"Origin: {origin!r} may not send requests here (--allowed-origins says which may)")
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.fault(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self.app if error is None else error.response())(scope, receive, send)


class ApiKey:
    """Lets in who sends one of the keys, as ``Authorization: Bearer KEY`` or as a password; and anybody to the paths in ``OPEN``."""

    OPEN = frozenset({"/health", "/ping", "/version"})

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app, self.hashes = app, [hashlib.sha256(key.encode()).digest() for key in keys]

    def knows(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        key = key.strip()
        if scheme.lower() == "basic":
            try:
                key = base64.b64decode(key, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        given = hashlib.sha256(key.encode()).digest()
        matches = [hmac.compare_digest(given, known) for known in self.hashes]
        return any(matches) and scheme.lower() in ("bearer", "basic")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in self.OPEN and scope["method"] != "OPTIONS"
        if guarded and not self.knows(Headers(scope=scope).get("authorization", "")):
            # A browser asks its user only where Basic stands alone.
            asks = 'Basic realm="minivllm"' if scope["method"] == "GET" else "Bearer"
            message = "the API key is missing or wrong"
            error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": asks})
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


class AccessLog:
    """One line a request in the logger ``minivllm.access``, plain or JSON, and the header X-Request-Id in the answer. None for the paths in
    ``QUIET``."""

    QUIET = frozenset({"/health", "/metrics", "/dashboard/samples"})

    def __init__(self, app: ASGIApp, as_json: bool = False) -> None:
        self.app, self.as_json = app, as_json

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        request_id = Headers(scope=scope).get("x-request-id") or uuid4().hex

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, named)
        finally:
            if scope["path"] not in self.QUIET:
                self._write(scope, status, time.perf_counter() - begun, request_id)

    def _write(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        values = {
            "client": (scope.get("client") or ("-",))[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "milliseconds": round(seconds * 1000, 1),
            "request_id": request_id,
        }
        if self.as_json:
            access.info(json.dumps(values))
        else:
            access.info("%s", " ".join(map(_word, values.values())))


def _word(value: Any) -> str:
    """A value of a log line; in quotes if it is more than one plain word."""
    return str(value) if re.fullmatch(r"[!#-~]+", str(value)) else json.dumps(value)
