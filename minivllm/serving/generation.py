"""Shared by the generating endpoints: submit, collect, stream, cancel on disconnect."""

# Generated from nbs/serving/generation.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.core.plugins import load_plugins
from minivllm.core.policy import ignores_priority
from minivllm.engine.async_llm import AsyncLLM, RequestStream
from minivllm.engine.outputs import FinishedRequest, RequestOutput
from minivllm.lora.adapter import LoRARequest
from minivllm.lora.resolver import make_resolvers
from minivllm.multimodal.fetch import MediaConnector
from minivllm.multimodal.images import MAX_PIXELS
from minivllm.sampling.params import SamplingParams, check_text
from minivllm.sampling.pooling import PoolingParams
from minivllm.serving.answers import ParserOptions
from minivllm.serving.errors import ApiError, as_api_error, logger
from minivllm.serving.protocol import MAX_ANSWERS
from minivllm.serving.tools import load_plugin

T = TypeVar("T")


def _option(default: Any, text: str) -> Any:
    made: dict[str, Any] = {"default_factory": list} if isinstance(default, list) else {"default": default}
    return field(**made, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What an operator may say of a server, besides the engine's arguments. Names are vLLM's where it has one."""

    served_model_name: list[str] = _option([], "names that clients may use; default: the model as given")  # noqa: RUF009
    api_key: list[str] = _option([], "keys that clients must show one of; default: VLLM_API_KEY or MINIVLLM_API_KEY")  # noqa: RUF009
    allowed_origins: list[str] = _option([], "origins that browsers may call from, * for all; words or a JSON list")  # noqa: RUF009
    allowed_hosts: list[str] = _option(  # noqa: RUF009
        [], "names of this server; default: those of this machine if it listens there without a key, else any (*)"
    )
    max_queue: int | None = _option(None, "requests that may wait beyond those that run; more get 429")
    max_body_bytes: int = _option(16 << 20, "largest body of a request")
    request_timeout: float | None = _option(None, "seconds that one answer may take")
    stall_timeout: float | None = _option(
        60.0, "seconds that the client of a stream may take nothing, before its request is ended"
    )
    enable_prompt_tokens_details: bool = _option(False, "tell in the usage how many prompt tokens were cached")
    trust_request_chat_template: bool = _option(False, "run chat templates that come with requests")
    enable_auto_tool_choice: bool = _option(
        False, "let the model decide by itself to call functions; needs --tool-call-parser"
    )
    tool_call_parser: str | None = _option(
        None, "how this model writes calls: hermes, llama3_json, mistral, pythonic, or a plugin's"
    )
    tool_parser_plugin: str | None = _option(None, "Python file that registers a tool parser")
    reasoning_parser: str | None = _option(
        None, "how this model marks its thoughts: qwen3, deepseek_r1, mistral, or a plugin's"
    )
    reasoning_parser_plugin: str | None = _option(None, "Python file that registers a reasoning parser")
    lora_modules: list[str] = _option([], "adapters to serve as models of their own: name=path")  # noqa: RUF009
    lora_resolvers: list[str] = _option([], "where to look for an unknown model name: folder=PATH, hub=OWNER/NAME")  # noqa: RUF009
    enable_runtime_lora: bool = _option(False, "let clients load and unload adapters")
    allowed_media_domains: list[str] = _option([], "hosts that pictures may be fetched from")  # noqa: RUF009
    allowed_local_media_path: str | None = _option(None, "folder that pictures may be read from by file: URLs")
    max_image_pixels: int = _option(MAX_PIXELS, "most pixels of the pictures of one request, together")
    dashboard: bool = _option(False, "show the engine live at /dashboard")
    log_json: bool = _option(False, "write the access log as JSON")
    trace: str | None = _option(None, "record the scheduler in this file (.jsonl or .parquet)")

    def __post_init__(self) -> None:
        """Options are checked before a model is loaded."""
        if self.max_queue is not None and self.max_queue < 0:
            raise ValueError(f"max_queue must be at least 0, got {self.max_queue}")
        for name in ("max_body_bytes", "max_image_pixels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.allowed_local_media_path is not None and not Path(self.allowed_local_media_path).is_dir():
            raise ValueError(f"allowed_local_media_path: there is no folder {self.allowed_local_media_path}")
        for name in ("request_timeout", "stall_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and seconds <= 0:
                raise ValueError(f"{name} must be above 0, got {seconds}")
        if self.trace is not None and not Path(self.trace).absolute().parent.is_dir():
            raise ValueError(f"trace: there is no folder {Path(self.trace).absolute().parent}")
        if self.trace is not None and Path(self.trace).suffix not in (".jsonl", ".parquet"):
            raise ValueError(f"trace: a trace is saved as .jsonl or .parquet, got {self.trace!r}")
        self.parsers()
        self.adapters()
        make_resolvers(self.lora_resolvers)

    def adapters(self) -> dict[str, str]:
        """Folder of each adapter by its name. Raises ValueError for an entry that is not `name=path`, and for a name given twice."""
        found: dict[str, str] = {}
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if not name or not path or name in found:
                raise ValueError(f"lora_modules: each must be name=path with a distinct name, got {module!r}")
            found[name] = path
        return found

    def parsers(self) -> ParserOptions:
        """How answers are read; runs the plugins. Raises ValueError for an unknown name."""
        load_plugins()
        for plugin in (self.tool_parser_plugin, self.reasoning_parser_plugin):
            if plugin is not None:
                load_plugin(plugin)
        return ParserOptions.from_names(self.tool_call_parser, self.enable_auto_tool_choice, self.reasoning_parser)


@dataclass
class ServerState:
    """What the endpoints of one app share.

    Attributes:
        observe: Counts requests that end, for the metrics.
        in_flight: Engine requests of open HTTP requests.
        adapters: LoRA adapters by the names that clients use.
        lora_ids: Gives each adapter a number that no other has.
    """

    llm: AsyncLLM
    options: ServerOptions = field(default_factory=ServerOptions)
    observe: Callable[[FinishedRequest], None] = lambda finished: None
    in_flight: int = 0
    adapters: dict[str, LoRARequest] = field(default_factory=dict)
    lora_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.parsers, given = self.options.parsers(), self.options
        self.connector = MediaConnector(
            given.allowed_media_domains, given.allowed_local_media_path, given.max_body_bytes
        )
        self.resolvers = make_resolvers(self.options.lora_resolvers)
        self._resolving: dict[str, asyncio.Future[None]] = {}
        self.started = int(time.time())

    @property
    def model_names(self) -> Sequence[str]:
        """Names that clients may use; the first is the one in answers."""
        return [*(self.options.served_model_name or [self.llm.config.model.name]), *self.adapters]

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not served."""
        if name is not None and name not in self.model_names:
            served = ", ".join(map(repr, self.model_names))
            message = f"the model {name!r} is not served here; {served} is"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.model_names[0]

    async def add_adapter(self, adapter: LoRARequest) -> None:
        """Check and read an adapter, and serve it under its name from now on. Raises ApiError."""
        try:
            await self.llm.add_lora(replace(adapter, lora_int_id=(number := next(self.lora_ids))))
        except ValueError as error:
            raise as_api_error(error) from error
        self.adapters[adapter.lora_name] = replace(adapter, lora_int_id=number)

    async def find_model(self, name: str | None) -> None:
        """Ask the resolvers for a model that is not served. Raises ApiError if the adapter that one finds cannot be used."""
        if not self.resolvers or name is None or name in self.model_names:
            return
        if (work := self._resolving.get(name)) is None:
            work = self._resolving[name] = asyncio.ensure_future(self._resolve(name))
            work.add_done_callback(lambda work: self._resolving.pop(name) and (work.cancelled() or work.exception()))
        await asyncio.shield(work)  # another request may wait for it, too

    async def _resolve(self, name: str) -> None:
        for resolver in self.resolvers:
            found = await resolver.resolve_lora(self.llm.config.args.model, name)
            if found is not None:
                await self.add_adapter(replace(found, lora_name=name))
                logger.info("found adapter %r in %s", name, found.lora_path)
                return

    def check_room(self, count: int) -> None:
        """Raises ApiError 400 or 429: too many answers at once, or the queue would be too long."""
        if count > MAX_ANSWERS:
            raise ApiError(400, f"{count} answers in one request (prompts times n); at most {MAX_ANSWERS} are allowed")
        if self.options.max_queue is None:
            return
        limit = self.llm.config.scheduler.max_num_seqs + self.options.max_queue
        if self.in_flight + count > limit:
            message = f"{self.in_flight} requests are running or waiting, at most {limit} may; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})

    def check_priority(self, priority: int) -> None:
        """Raises ApiError 400 for a priority where requests run first come, first served."""
        core: Any = self.llm.llm_engine.core
        try:
            ignored = ignores_priority(core.scheduler.policy)
        except RuntimeError:  # the scheduler is in the engine's process
            ignored = ignores_priority(self.llm.config.scheduler.policy)
        if priority != 0 and ignored:
            message = f"priority: this server's scheduling policy does not read it (--scheduling-policy priority does), got {priority}"
            raise ApiError(400, message, param="priority")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One HTTP request, checked and rendered.

    Attributes:
        id: The answer's id; the engine's requests are named after it.
        model: The name to answer with.
        body: The request.
        prompts: The prompts, as the engine takes them.
        cut_max_tokens: Whether ``max_tokens`` may be lowered to what fits; False if the client asked for a number, which must then fit.
        names: The client's names of fields that an error of the engine may name.
    """

    id: str
    model: str
    body: Any
    prompts: Sequence[Mapping[str, Any]]
    params: SamplingParams | PoolingParams
    cut_max_tokens: bool = True
    names: Mapping[str, str] = field(default_factory=dict)


def plan_fields(body: Any, state: ServerState, request: Request, prefix: str) -> dict[str, Any]:
    """The fields of a Plan that every endpoint fills in the same way. Raises ApiError.

    The id is ``prefix`` and what the client gave in the body or in X-Request-Id, if it is a plain word; else a new one.
    """
    state.check_priority(body.priority)
    header = request.headers.get("x-request-id", "")
    name = body.request_id or (header if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", header) else uuid4().hex)
    return {"id": f"{prefix}-{name}", "model": state.check_model(body.model), "body": body}


async def encode(state: ServerState, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, made in a thread. Raises ValueError if the text is too long to be looked at."""
    engine = state.llm.llm_engine

    def work() -> list[int]:
        check_text(text, "prompt")
        engine.input_processor.check_characters(text)
        return list(engine.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    return await state.llm.run_input(work)


async def engine_prompts(body: Any, prompts: Sequence[Any], state: ServerState) -> list[dict[str, Any]]:
    """Texts and token ids as the engine takes them. Raises ApiError."""
    state.check_room(len(prompts) * getattr(body, "n", 1))
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
    made: list[dict[str, Any]] = []
    for prompt in prompts:
        form: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if isinstance(prompt, str) and not body.add_special_tokens:
            form["prompt_token_ids"] = await encode(state, prompt, False)
        made.append(form | salt)
    return made


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error, with the client's name of the field."""
    error.param = names.get(error.param or "", error.param)
    return error


class Job:
    """A plan that runs. ``streams``: one for each prompt."""

    def __init__(self, state: ServerState, plan: Plan) -> None:
        self.state, self.plan = state, plan
        self.created = int(time.time())
        self.streams: list[RequestStream] = []
        self._count = 0

    async def submit(self) -> None:
        """Queue one request for each prompt. Raises ApiError, and then nothing is queued."""
        plan, state = self.plan, self.state
        count = len(plan.prompts) * plan.params.num_children
        state.check_room(count)
        self._count = count
        state.in_flight += count
        try:
            for i, prompt in enumerate(plan.prompts):
                name = f"{plan.id}-{i}-{uuid4().hex[:8]}"
                stream = await state.llm.submit(
                    dict(prompt), plan.params, name,
                    priority=plan.body.priority, user=plan.body.end_user, cut_max_tokens=plan.cut_max_tokens,
                    lora_request=state.adapters.get(plan.model),
                )  # fmt: skip
                self.streams.append(stream)
        except BaseException as error:
            await self.close()
            if isinstance(error, Exception):
                raise renamed(as_api_error(error), plan.names) from error
            raise

    async def close(self) -> None:
        """Abort what has not ended. Twice is no error."""
        self.state.in_flight -= self._count
        self._count = 0
        for stream in self.streams:
            await stream.aclose()


def check_output(output: RequestOutput) -> None:
    """Raise for a request that failed inside the engine: ApiError 400 if its own grammar went beyond the limits, else 500."""
    if output.error is None:
        return
    text = as_api_error(ValueError(output.error)).message
    if text.startswith("grammar:"):
        raise ApiError(400, text, code="invalid_grammar")
    raise ApiError(500, text, code="generation_failed")


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


async def _unless_disconnected(request: Request, work: Awaitable[T], timeout: float | None) -> T:
    """The result of ``work``, which is cancelled when the client hangs up or the time is over.

    Raises:
        ApiError: 408 after ``timeout`` seconds, 499 when the client has gone (it is not sent then).
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


to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""One encoder for all events: `json.dumps` with these options would make one for each."""


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(body).encode("utf-8", "replace") + b"\n\n"


async def _in_time(chunks: AsyncIterator[T], seconds: float) -> AsyncIterator[T]:
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

    A client that takes nothing for ``stall_timeout`` seconds is treated as one that has hung up: until then, what it has not taken waits
    in its request's stream, as one output. The job is closed here and not in the generator, which is never entered if the client hangs up
    before the first byte.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, chunks: AsyncIterator[dict[str, Any]]) -> None:
        self.job, limit = job, job.state.options.request_timeout
        self.chunks = chunks if limit is None else _in_time(chunks, limit)
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
        """Returns when the client has taken nothing for ``limit`` seconds. It looks now and then: a timer for each piece would cost more."""
        if limit is None:
            await asyncio.Event().wait()
            return
        now = asyncio.get_running_loop().time
        while (left := limit - (0 if self._since is None else now() - self._since)) > 0:
            await asyncio.sleep(left)
        logger.warning("%s: the client has taken nothing for too long; its request is ended", self.job.plan.id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = asyncio.ensure_future(self._stream(send))
        stalled = asyncio.ensure_future(self._stalled(self.job.state.options.stall_timeout))
        tasks = [stream, asyncio.ensure_future(_hung_up(receive)), stalled]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                stream.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.job.close()


class Counter:
    """Adds up the usage of all prompts while pieces go out. ``details``: also tell cached tokens."""

    def __init__(self, details: bool = False) -> None:
        self.details = details
        self._prompts: set[int] = set()
        self._drafts: dict[int, tuple[int, int]] = {}  # accepted and rejected draft tokens of each prompt's answers
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0

    def begin(self, i: int, output: RequestOutput) -> bool:
        """Count the prompt number ``i``. Returns False if it was counted before."""
        if i in self._prompts:
            return False
        self._prompts.add(i)
        self._prompt_tokens += len(output.prompt_token_ids)
        self._cached_tokens += output.num_cached_tokens
        return True

    def add(self, i: int, output: RequestOutput) -> None:
        """Count the new tokens of prompt ``i``'s answers."""
        self.begin(i, output)
        self._generated_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if (metrics := output.metrics) is not None and metrics.num_draft_tokens:
            accepted = metrics.num_accepted_tokens
            self._drafts[i] = accepted, metrics.num_draft_tokens - accepted

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache; 0 if the operator does not let clients know."""
        return self._cached_tokens if self.details else 0

    def usage(self, generates: bool = True) -> dict[str, Any]:
        """OpenAI's usage object. ``generates``: False if generated tokens are not part of the answer."""
        generated = self._generated_tokens if generates else 0
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self._prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens} if self.details else None,
        }
        if self._drafts:  # speculation drafted for these prompts
            names = "accepted_prediction_tokens", "rejected_prediction_tokens"
            counts = map(sum, zip(*self._drafts.values(), strict=True))
            usage["completion_tokens_details"] = dict(zip(names, counts, strict=True))
        return usage


class Writer:
    """Writes the answer of one job, whole or in chunks. An endpoint's own writer says what a choice is."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, job: Job) -> None:
        self.job = job
        self.plan: Any = job.plan  # of the endpoint's own kind
        self.body = job.plan.body
        self.tokenizer = job.state.llm.get_tokenizer()
        self.counter = Counter(job.state.options.enable_prompt_tokens_details)

    def choices(self, i: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """All choices of prompt ``i``, whole."""
        raise NotImplementedError

    def opening(self, output: RequestOutput) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Choices of chunks that come before any piece."""
        yield from ()

    def pieces(self, i: int, output: RequestOutput) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The choices of the chunks for a new output of prompt ``i``, each with further fields of its chunk."""
        raise NotImplementedError

    def usage(self) -> dict[str, Any]:
        return self.counter.usage()

    def further(self, output: RequestOutput) -> dict[str, Any]:
        """Further fields of a whole answer."""
        return {}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.plan.id, "object": kind, "created": self.job.created, "model": self.plan.model}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer at once."""
        choices = []
        for i, output in enumerate(outputs):
            self.counter.add(i, output)
            choices += list(self.choices(i, output))
        head = {**self._head(self.kind), "choices": choices, "usage": self.usage()}
        nothing = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
        return head | nothing | self.further(outputs[0])

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in pieces."""
        body, head = self.body, self._head(self.chunk_kind)
        async for i, output in merge(self.job.streams):
            check_output(output)
            for choice, more in self._all_pieces(i, output):
                chunk = {**head, "choices": [choice], **more}
                if body.include_usage:
                    chunk["usage"] = self.usage() if body.continuous_usage else None
                yield chunk
        if body.include_usage:
            yield {**head, "choices": [], "usage": self.usage()}

    def _all_pieces(self, i: int, output: RequestOutput) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        if self.counter.begin(i, output):
            yield from self.opening(output)
        self.counter.add(i, output)
        yield from self.pieces(i, output)

    def response(self) -> Response:
        return SSEResponse(self.job, self.chunks())


async def answer(
    request: Request,
    state: ServerState,
    model: str | None,
    plan: Coroutine[Any, Any, Plan],
    make_writer: Callable[[Job], Any],
) -> dict[str, Any] | Response:
    """Plan, generate, answer. All of it ends when the client hangs up.

    Args:
        model: The name that the client gave.
        plan: Makes the request's Plan.
        make_writer: Makes the Writer of a job.

    Raises:
        ApiError: the request is at fault, takes too long, or its client has gone.
    """

    async def work() -> dict[str, Any] | Response:
        try:
            await state.find_model(model)
            job = Job(state, await plan)
            writer = make_writer(job)
        except Exception as error:
            plan.close()
            raise as_api_error(error) from error
        await job.submit()
        if job.plan.body.stream:
            return writer.response()
        try:
            return writer.whole(await collect(job))
        finally:
            await job.close()

    return await _unless_disconnected(request, work(), state.options.request_timeout)
