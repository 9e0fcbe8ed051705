"""Middleware: body limit, API keys, access log, request ids."""

# Generated from nbs/serving/middleware.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Sequence
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.serving.errors import ApiError

__all__ = ["AccessLog", "ApiKey", "BodyLimit", "access"]


# %% nbs/serving/middleware.ipynb #BodyLimit
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
    """Give the whole body once, then whatever comes: the client hanging up."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


# %% nbs/serving/middleware.ipynb #ApiKey
class ApiKey:
    """Lets in who sends ``Authorization: Bearer KEY`` with one of the keys, and anybody to the paths in ``OPEN``."""

    OPEN = frozenset(
        {"/health", "/ping", "/version", "/metrics", "/load", "/docs", "/redoc", "/openapi.json"}
        | {"/dashboard", "/dashboard/samples"}  # a browser's first request has no key; no more is told than by /metrics
    )

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app, self.hashes = app, [hashlib.sha256(key.encode()).digest() for key in keys]

    def knows(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(given, known) for known in self.hashes]
        return any(matches) and scheme.lower() == "bearer"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in self.OPEN and scope["method"] != "OPTIONS"
        if guarded and not self.knows(Headers(scope=scope).get("authorization", "")):
            error = ApiError(
                401, "the API key is missing or wrong", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


# %% nbs/serving/middleware.ipynb #AccessLog
class AccessLog:
    """One line a request in the logger ``minivllm.access``, plain or JSON, and the header X-Request-Id in the answer."""

    def __init__(
        self,
        app: ASGIApp,
        as_json: bool = False,
        quiet_paths: Sequence[str] = ("/health", "/metrics", "/dashboard/samples"),
    ) -> None:
        self.app, self.as_json, self.quiet_paths = app, as_json, frozenset(quiet_paths)

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
            if scope["path"] not in self.quiet_paths:
                self._write(scope, status, time.perf_counter() - begun, request_id)

    def _write(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        client = (scope.get("client") or ("-",))[0]
        values = {
            "client": client,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "milliseconds": round(seconds * 1000, 1),
            "request_id": request_id,
        }
        if self.as_json:
            access.info(json.dumps(values))
        else:
            access.info(
                "%s",
                " ".join(
                    json.dumps(v) if isinstance(v, str) and not v.isprintable() else str(v) for v in values.values()
                ),
            )
