"""Shared by the generating endpoints: submit, collect, stream, cancel on disconnect."""

# Generated from nbs/serving/generation.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.engine.async_llm import AsyncLLM, RequestStream
from minivllm.engine.outputs import FinishedRequest, RequestOutput
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.pooling import PoolingParams
from minivllm.serving.answers import ParserOptions
from minivllm.serving.errors import ApiError, as_api_error, logger

__all__ = [
    "Counter", "Job", "SSEResponse", "ServerState", "check_output", "collect", "event", "in_time", "merge",
    "request_name", "to_json", "unless_disconnected", "usage",
]  # fmt: skip


# %% nbs/serving/generation.ipynb #ServerState
T = TypeVar("T")


@dataclass
class ServerState:
    """What the endpoints of one app share.

    model_names: names that clients may use, the first is the one in answers. max_queue: requests that may wait beyond those
    that run (``max_num_seqs``), None for no limit. request_timeout: seconds for one answer, None for no limit. stall_timeout: seconds
    that a client of a stream may take nothing.
    parsers: how tool calls and thoughts are read.
    observe: counts requests that end, for the metrics. in_flight: engine requests of open HTTP requests.
    """

    llm: AsyncLLM
    model_names: Sequence[str]
    max_queue: int | None = None
    request_timeout: float | None = None
    stall_timeout: float | None = 60.0
    trust_request_chat_template: bool = False
    parsers: ParserOptions = field(default_factory=ParserOptions)
    observe: Callable[[FinishedRequest], None] = lambda finished: None
    started: int = field(default_factory=lambda: int(time.time()))
    in_flight: int = 0
    open_requests: int = 0

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not served."""
        if name is not None and name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            raise ApiError(
                404, f"the model {name!r} is not served here; {served} is", param="model", code="model_not_found"
            )
        return name or self.model_names[0]

    def check_room(self, count: int) -> None:
        """Raises ApiError 429 if ``count`` more requests would make the queue too long."""
        if self.max_queue is None:
            return
        limit = self.llm.config.scheduler.max_num_seqs + self.max_queue
        if self.in_flight + count > limit:
            message = f"{self.in_flight} requests are running or waiting, at most {limit} may; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})


# %% nbs/serving/generation.ipynb #Job
@dataclass
class Job:
    """One HTTP request that generates. ``streams``: one for each prompt."""

    state: ServerState
    id: str
    model: str
    streams: list[RequestStream] = field(default_factory=list)
    count: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    async def submit(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | PoolingParams,
        priority: int,
        user: str | None,
        cut_max_tokens: bool = True,
    ) -> None:
        """Queue one request for each prompt. Raises ApiError, and then nothing is queued.

        ``cut_max_tokens``: False if the client asked for so many tokens; then more than fit is an error.
        """
        count = len(prompts) * params.num_children
        self.state.check_room(count)
        self.count = count
        self.state.in_flight += count
        try:
            for i, prompt in enumerate(prompts):
                name = f"{self.id}-{i}-{uuid4().hex[:8]}"
                stream = await self.state.llm.submit(
                    prompt, params, name, priority=priority, user=user, cut_max_tokens=cut_max_tokens
                )
                self.streams.append(stream)
        except BaseException as error:
            await self.close()
            if isinstance(error, Exception):
                raise as_api_error(error) from error
            raise

    async def close(self) -> None:
        """Abort what has not ended. Twice is no error."""
        self.state.in_flight -= self.count
        self.count = 0
        for stream in self.streams:
            await stream.aclose()


def request_name(prefix: str, given: str | None, header: str | None) -> str:
    """``prefix`` and the id that the client gave in the body or in X-Request-Id, if it is a plain word; else a new one."""
    chosen = given or (header if header and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", header) else None)
    return f"{prefix}-{chosen or uuid4().hex}"


# %% nbs/serving/generation.ipynb #collect
def check_output(output: RequestOutput) -> None:
    """Raises ApiError 500 if the request failed inside the engine. (What is wrong with its wishes was found when it was submitted.)"""
    if output.error is not None:
        raise ApiError(500, output.error, code="generation_failed")


async def collect(job: Job) -> list[RequestOutput]:
    """The last output of every stream."""
    finals = []
    for stream in job.streams:
        async for output in stream:
            final = output
        check_output(final)
        finals.append(final)
    return finals


async def _hung_up(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Awaitable[T], timeout: float | None) -> T:
    """The result of ``work``, which is cancelled when the client hangs up or the time is over.

    Raises:
        ApiError: 408 after ``timeout`` seconds, 499 when the client has gone (nobody reads it then).
    """

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(request.receive))
    try:
        await asyncio.wait({task, watch}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watch.done():
            raise ApiError(499, "the client has closed the connection")
        raise ApiError(408, f"no answer within {timeout:g} seconds", code="timeout")
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


# %% nbs/serving/generation.ipynb #merge
async def merge(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of all streams as they come, each with the number of its stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                i = waiting.pop(task)
                output = task.result()
                yield i, output
                if not output.finished:
                    waiting[asyncio.ensure_future(anext(streams[i]))] = i
    finally:
        for task in waiting:
            task.cancel()


# %% nbs/serving/generation.ipynb #sse
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""One encoder for all events: `json.dumps` with these options would make one for each."""


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(body).encode("utf-8", "replace") + b"\n\n"


async def in_time(chunks: AsyncIterator[T], seconds: float) -> AsyncIterator[T]:
    """Pass on what comes; ApiError 408 if the last has not come after ``seconds``."""
    end = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(end):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise ApiError(408, f"no end within {seconds:g} seconds", code="timeout") from None
        yield chunk


class SSEResponse(Response):
    """Streams ``chunks``, then [DONE]; an error on the way is an event. When the client hangs up, the job is aborted.

    A client that takes nothing for ``state.stall_timeout`` seconds is treated as one that has hung up: until then, what it has not taken waits
    in its request's stream, as one output. The job is closed here and not in the generator, which is never entered if the client hangs up
    before the first byte.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, chunks: AsyncIterator[dict[str, Any]]) -> None:
        self.job, limit = job, job.state.request_timeout
        self.chunks = chunks if limit is None else in_time(chunks, limit)
        self._since: float | None = None  # the moment from which on a client has not taken a piece
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self.chunks:
                yield event(chunk)
        except Exception as error:  # noqa: BLE001 - the status is out, so it goes into the stream
            yield event(as_api_error(error).body)
        yield b"data: [DONE]\n\n"

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        now = asyncio.get_running_loop().time
        async for data in self._events():
            self._since = now()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stalled(self, limit: float | None) -> None:
        """Returns when the client has taken nothing for so many seconds. It looks now and then: a timer for each piece would cost more."""
        if limit is None:
            await asyncio.Event().wait()
            return
        now = asyncio.get_running_loop().time
        while (left := limit - (0 if self._since is None else now() - self._since)) > 0:
            await asyncio.sleep(left)
        logger.warning("%s: the client has taken nothing for too long; its request is ended", self.job.id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = asyncio.ensure_future(self._stream(send))
        tasks = [
            stream,
            asyncio.ensure_future(_hung_up(receive)),
            asyncio.ensure_future(self._stalled(self.job.state.stall_timeout)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                stream.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.job.close()


# %% nbs/serving/generation.ipynb #usage
def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Counter:
    """Adds up usage while pieces go out. With several prompts, all of them."""

    def __init__(self) -> None:
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self.generated: dict[int, int] = {}

    def add(self, i: int, output: RequestOutput) -> None:
        self._prompt[i] = len(output.prompt_token_ids)
        self._cached[i] = output.num_cached_tokens
        new = sum(len(completion.token_ids) for completion in output.outputs)
        self.generated[i] = self.generated.get(i, 0) + new

    def usage(self) -> dict[str, Any]:
        return usage(*(sum(counts.values()) for counts in (self._prompt, self.generated, self._cached)))
