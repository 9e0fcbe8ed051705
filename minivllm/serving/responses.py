"""`/v1/responses`: stored responses, items, stream events."""

# Generated from nbs/serving/responses.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from minivllm.engine.outputs import CompletionOutput, RequestOutput
from minivllm.serving.chat import ChatPlan, chat_logprobs, plan_chat, token_bytes
from minivllm.serving.errors import ApiError, as_api_error
from minivllm.serving.generation import (
    Job,
    ServerState,
    SSEResponse,
    Writer,
    answer,
    check_output,
    merge,
    plan_fields,
    renamed,
    to_json,
)
from minivllm.serving.middleware import JsonRoute
from minivllm.serving.response_request import ResponsesRequest, as_chat

__all__ = ["ResponseStore", "Stored", "responses_router"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, the input items of its request, and the whole conversation up to its last output."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    conversation: list[dict[str, Any]]


class ResponseStore:
    """Responses by id, in memory: the oldest go when there are too many, or too many bytes of them."""

    def __init__(self, max_count: int = 1000, max_bytes: int = 64 << 20) -> None:
        self.max_count, self.max_bytes = max_count, max_bytes
        self._entries: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, stored: Stored) -> None:
        size = len(json.dumps([stored.response, stored.conversation]))
        self._entries[stored.response["id"]] = (stored, size)
        self._bytes += size
        while len(self._entries) > self.max_count or self._bytes > self.max_bytes:
            self._bytes -= self._entries.popitem(last=False)[1][1]

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """A stored response. Raises ApiError 404 if there is none, or 400 if ``param``, a field of a request, names it."""
        if response_id not in self._entries:
            message = f"there is no response {response_id!r} here: it was not stored, was deleted, or had to make room"
            code = "previous_response_not_found" if param else "not_found"
            raise ApiError(400 if param else 404, message, param=param, code=code)
        return self._entries[response_id][0]

    def delete(self, response_id: str) -> None:
        """Forget a response. Raises ApiError 404 if there is none."""
        self.get(response_id)
        self._bytes -= self._entries.pop(response_id)[1]


@dataclass(frozen=True, kw_only=True)
class ResponsePlan(ChatPlan):
    """A response, planned as a chat. ``request``: what was asked. ``conversation``: its items, and all that came before."""

    request: ResponsesRequest
    conversation: Sequence[dict[str, Any]]


_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Names in a response of fields that a chat calls otherwise."""


def _repeated(body: ResponsesRequest) -> dict[str, Any]:
    """The fields of a request that are in its response."""
    given = body.model_dump(mode="json", include={"text", "tools", "tool_choice"}, by_alias=True, exclude_unset=True)
    same = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "safety_identifier", "user")
    return {
        **{name: getattr(body, name) for name in same},
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": body.store is not False,
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | (given.get("text") or {}),
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in given.get("tools") or ()],
        "top_logprobs": body.top_logprobs or 0,
    }


def plan_response(
    body: ResponsesRequest, request: Request, state: ServerState, before: Sequence[dict[str, Any]]
) -> ResponsePlan:
    """Check a body and make its prompt. ``before``: the conversation that it goes on with. Raises ApiError."""
    items, parser = [*before, *body.items()], state.parsers.tool_parser
    chat = as_chat(
        body,
        items,
        keep_thoughts="reasoning_content" in str(state.llm.get_tokenizer().chat_template),
        strict=parser is not None and parser.form is not None,
    )
    fields = plan_fields(chat, state, request, "resp") | {"id": f"resp_{uuid4().hex}"}
    try:
        plan = plan_chat(chat, state, fields)
    except Exception as error:
        raise renamed(as_api_error(error), _NAMES) from error
    return ResponsePlan(**(vars(plan) | {"names": _NAMES}), request=body, conversation=items)


class ItemWriter:
    """Makes the items of one response, and the events that report them."""

    def __init__(self, plan: ResponsePlan, to_bytes: Any) -> None:
        self.plan, self.to_bytes = plan, to_bytes
        self.reader = plan.reader()
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item under way, the last of output
        self._logprobs: list[dict[str, Any]] = []
        self._sequence = 0

    def event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": f"response.{kind}", "sequence_number": self._sequence - 1, **more}

    def take(self, completion: CompletionOutput) -> Iterator[dict[str, Any]]:
        """The events of a piece of the answer."""
        if self.to_bytes is not None and completion.logprobs is not None:
            found = chat_logprobs(completion, self.plan.body.num_logprobs or 0, self.to_bytes)["content"]
            if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
                found.pop()  # the token that ended the answer has no text, whatever output it came with
            self._logprobs += [entry | {"bytes": entry["bytes"] or []} for entry in found]
        part = self.reader.push(completion)
        if part.thought:
            yield from self._say("reasoning", part.thought)
        if part.content:
            yield from self._say("message", part.content)
        for delta in part.calls:
            if delta.name is not None:
                yield from self._begin("function_call", name=delta.name)
            if delta.arguments:
                yield from self._argue(delta.arguments)

    def end(self, status: str) -> Iterator[dict[str, Any]]:
        """The events after the last piece."""
        if not self.output and self.plan.use is None:
            yield from self._begin("message")  # an empty answer is an answer
        yield from self._close(status)

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output) - 1}

    def _say(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        fresh, self._logprobs = self._logprobs, []
        where = {**self._where(), "content_index": 0}
        if kind == "reasoning":
            yield self.event("reasoning_text.delta", **where, delta=text)
            return
        part["logprobs"] += fresh
        yield self.event("output_text.delta", **where, delta=text, logprobs=fresh)

    def _argue(self, text: str) -> Iterator[dict[str, Any]]:
        assert self._open is not None
        self._open["arguments"] += text
        self._logprobs = []
        yield self.event("function_call_arguments.delta", **self._where(), delta=text)

    def _begin(self, kind: str, **more: Any) -> Iterator[dict[str, Any]]:
        yield from self._close("completed")
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"id": f"msg_{uuid4().hex}", "role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"id": f"rs_{uuid4().hex}", "summary": [], "content": []}
        else:
            assert self.plan.use is not None
            item |= {"id": f"fc_{uuid4().hex}", "call_id": self.plan.use.parser.new_id(), "arguments": "", **more}
        self.output.append(item)
        self._open = item
        yield self.event("output_item.added", output_index=len(self.output) - 1, item=deepcopy(item))
        if kind != "function_call":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self.event("content_part.added", **self._where(), content_index=0, part=deepcopy(part))
            item["content"].append(part)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the item under way."""
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self.event("function_call_arguments.done", **self._where(), **done)
        else:
            part, where = item["content"][0], {**self._where(), "content_index": 0}
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            more = {} if kind == "reasoning_text" else {"logprobs": part["logprobs"]}
            yield self.event(f"{kind}.done", **where, text=part["text"], **more)
            yield self.event("content_part.done", **where, part=deepcopy(part))
        yield self.event("output_item.done", output_index=len(self.output) - 1, item=deepcopy(item))
        self._open = None


class ResponseWriter(Writer):
    """Makes one response, whole or as events."""

    def __init__(self, job: Job, store: ResponseStore) -> None:
        super().__init__(job)
        plan, self.store = self.plan, store
        self.items = ItemWriter(plan, token_bytes(self.tokenizer) if plan.body.logprobs else None)
        self.response_object: dict[str, Any] = {
            "id": plan.id,
            "object": "response",
            "created_at": job.created,
            "status": "in_progress",
            "background": False,
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
            "model": plan.model,
            "output": [],
            **_repeated(plan.request),
            "service_tier": "default",
            "temperature": plan.params.temperature,
            "top_p": plan.params.top_p,
            "truncation": "disabled",
        }

    def _snapshot(self, kind: str) -> dict[str, Any]:
        return self.items.event(kind, response=dict(self.response_object))

    def usage(self) -> dict[str, Any]:
        usage = self.counter.usage()
        thought = self.items.reader.count_thought_tokens(self.tokenizer.decode)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self.counter.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage["total_tokens"],
        }

    def finish(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The last events. The response is stored before the very last, so that a client can go on with it."""
        cut = output.outputs[0].finish_reason == "length"
        status = "incomplete" if cut else "completed"
        yield from self.items.end(status)
        self.response_object |= {
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.items.output,
            "usage": self.usage(),
        }
        if self.plan.request.store is not False:
            items = [{"id": f"msg_{uuid4().hex}", **item} for item in self.plan.request.items()]
            conversation = [*self.plan.conversation, *self.items.output]
            self.store.put(Stored(self.response_object, items, conversation))
        yield self._snapshot(status)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event of a response that will not come."""
        fault = {"code": "server_error", "message": error.message}
        self.response_object |= {"status": "failed", "error": fault, "output": self.items.output}
        return self._snapshot("failed")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """All events, in order."""
        yield self._snapshot("created")
        yield self._snapshot("in_progress")
        async for i, output in merge(self.job.streams):
            check_output(output)
            self.counter.add(i, output)
            for completion in output.outputs:
                for event in self.items.take(completion):
                    yield event
            if output.finished:
                for event in self.finish(output):
                    yield event

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response at once."""
        self.counter.add(0, outputs[0])
        for _ in (*self.items.take(outputs[0].outputs[0]), *self.finish(outputs[0])):
            pass
        return self.response_object

    def response(self) -> Response:
        return EventResponse(self.job, self)


class EventResponse(SSEResponse):
    """Streams the events of a writer under their names. A failure is the last event."""

    def __init__(self, job: Job, writer: ResponseWriter) -> None:
        self.writer = writer
        super().__init__(job, writer.events())

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for event in self.chunks:
                yield _named(event)
        except Exception as error:  # noqa: BLE001 - the status is out, so it goes into the stream
            yield _named(self.writer.failed(as_api_error(error)))


def _named(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: {to_json(event)}\n\n".encode("utf-8", "replace")


def _page(items: list[dict[str, Any]], order: str, limit: int, after: str | None) -> dict[str, Any]:
    """A page of a list. Raises ApiError."""
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be 'asc' or 'desc', got {order!r}", param="order")
    if not 1 <= limit <= 100:
        raise ApiError(400, f"limit must be in 1..100, got {limit}", param="limit")
    items = items[:: 1 if order == "asc" else -1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, f"after: there is no item {after!r}", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": start + limit < len(items)}


def responses_router(state: ServerState) -> APIRouter:
    """``/v1/responses``, with a separate store."""
    router, store = APIRouter(route_class=JsonRoute), ResponseStore()

    @router.post("/v1/responses", response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> dict[str, Any] | Response:
        """Answer items with items."""
        before: Sequence[dict[str, Any]] = ()
        if body.previous_response_id is not None:
            before = store.get(body.previous_response_id, "previous_response_id").conversation
        plan = state.llm.run_input(lambda: plan_response(body, request, state, before))
        return await answer(request, state, body.model, plan, partial(ResponseWriter, store=store))

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(response_id: str, stream: bool = False) -> dict[str, Any]:
        """A response that was stored."""
        if stream:
            raise ApiError(400, "stream: a stored response is given whole", param="stream")
        return store.get(response_id).response

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> dict[str, Any]:
        """Forget a response."""
        store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str, order: str = "desc", limit: int = 20, after: str | None = None
    ) -> dict[str, Any]:
        """The input items of a response that was stored."""
        return _page(store.get(response_id).input_items, order, limit, after)

    return router
