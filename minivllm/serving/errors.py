"""Errors in OpenAI's shape and the handlers that send them."""

# Generated from nbs/serving/errors.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from minivllm.engine.async_llm import EngineDeadError
from minivllm.sampling.grammar import GrammarError
from minivllm.sampling.params import InvalidParameter

logger = logging.getLogger("minivllm.serving")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error. ``param``: the field at fault. ``code``: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """All ASCII: the message may quote what is no valid text."""
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


def _place(where: Sequence[Any]) -> str:
    """`("body", "messages", 0, "role")` -> `messages[0].role`. Names of union members are not fields, and are left out."""
    text = ""
    for part in where[1:] if where and where[0] in ("body", "query", "path") else where:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "list", "dict"):
            text += f".{part}" if text else part
    return text


def from_validation(errors: Sequence[Any]) -> ApiError:
    """The first fault that pydantic found, as a 400 that names the field. Where a value may have several forms, the form that came closest."""
    first = max(
        (error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]), key=lambda error: len(error["loc"])
    )
    place = first.get("ctx", {}).get("field") or _place(first["loc"])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {place!r}", param=place, code="unknown_field")
    given = first.get("input")
    shown = f", got {repr(given)[:80]}" if isinstance(given, (str, int, float, bool, type(None))) else ""
    fault = first["msg"].removeprefix("Value error, ")
    if not (place and fault.startswith(place)):
        fault = f"{place or 'the request'}: {fault}"
    return ApiError(400, fault + shown, param=place or None, code="invalid_value")


_hidden: dict[str, str] = {}


def hide_paths(names: dict[str, str]) -> None:
    """From now on, write names in place of folders (and what is in them) in messages. ``names``: {folder: name}."""
    _hidden.update({folder: name for folder, name in names.items() if len(folder) > 1})


def _without_paths(text: str) -> str:
    for folder in sorted(_hidden, key=len, reverse=True):
        if folder in text:
            text = re.sub(re.escape(folder) + r"(/[^\s:'\",)]*)?", _hidden[folder].replace("\\", r"\\"), text)
    return text


def _code(text: str) -> str:
    too_long = any(words in text for words in ("max_model_len=", "is too long"))
    return "context_length_exceeded" if too_long else "invalid_value"


def as_api_error(error: Exception) -> ApiError:
    """The answer for an error that a client's request caused."""
    if isinstance(error, ApiError):
        return error
    text = _without_paths(str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(503, text, code="engine_dead")
    if isinstance(error, InvalidParameter):
        name = error.parameter.replace("extra_args", "vllm_xargs")  # what requests call it
        return ApiError(400, text.replace(error.parameter, name, 1), param=name, code=_code(text))
    if isinstance(error, GrammarError):
        return ApiError(400, f"what the answer must look like: {text}", code="invalid_grammar")
    if isinstance(error, ValidationError):
        return from_validation(error.errors())
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply", code="invalid_value")
    if isinstance(error, UnicodeDecodeError):
        return ApiError(400, "the body is not valid JSON: it is not UTF-8", code="invalid_json")
    if isinstance(error, (ValueError, TypeError)):
        return ApiError(400, text, code=_code(text))
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}; the server's log has the details")


_NO_JSON = "There was an error parsing the body"
"""FastAPI's message for any error while a body is read; the error itself is its cause."""


def install_error_handlers(app: FastAPI) -> None:
    """Every error of ``app`` leaves in OpenAI's shape."""

    async def ours(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def schema(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        if isinstance(error.body, bytes):  # not parsed, for it does not claim to be JSON
            given = request.headers.get("content-type", "")
            message = f"the body must be JSON with the header 'Content-Type: application/json', got {given!r}"
            return ApiError(415, message, code="unsupported_media_type").response()
        return from_validation(error.errors()).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = error.detail
        if message == _NO_JSON and isinstance(error.__cause__, Exception):
            return as_api_error(error.__cause__).response()
        if error.status_code in (404, 405):
            message = f"there is no {request.method} {request.url.path} here; /docs lists what there is"
        return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()

    for kind in (ApiError, EngineDeadError, RecursionError, Exception):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, schema)
    app.add_exception_handler(HTTPException, http)
