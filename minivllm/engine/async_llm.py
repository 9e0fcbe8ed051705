"""AsyncLLM: one engine in a background thread for many asyncio callers."""

# Generated from nbs/engine/async_llm.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import asyncio
import itertools
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar, Unpack

from minivllm.core.config import EngineArgs, EngineConfig
from minivllm.core.policy import FCFS, PolicyError, Priority
from minivllm.engine.detokenizer import DetokenizerFactory
from minivllm.engine.input_processor import ProcessedInput, PromptType, RequestOptions
from minivllm.engine.llm_engine import LLMEngine, warm_up
from minivllm.engine.outputs import FinishedRequest, RequestOutput
from minivllm.lora.adapter import LoRARequest
from minivllm.runtime.weights import Function, Weights
from minivllm.sampling.params import RequestOutputKind, SamplingParams
from minivllm.sampling.pooling import PoolingParams

T = TypeVar("T")


logger = logging.getLogger("minivllm.engine")


class Wakeup:
    """Wakes the one thread that waits for it. ``fileno``: a file that wakes it too when it becomes readable."""

    def __init__(self, fileno: int | None = None) -> None:
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._receiver, select.POLLIN)
        if fileno is not None:
            self._poll.register(fileno, select.POLLIN)

    def set(self) -> None:
        """From any thread; again changes nothing."""
        try:
            self._sender.send(b"!")
        except BlockingIOError:
            pass

    def wait(self) -> None:
        """Until `set` is called (or was since the last time), or the file becomes readable."""
        if any(number == self._receiver.fileno() for number, _ in self._poll.poll()):
            self._receiver.recv(4096)

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


class EngineDeadError(RuntimeError):
    """The engine has failed or was shut down; nothing more comes from it. ``__cause__`` is the error that ended it."""


class RequestStream:
    """The outputs of one request, in the loop that asked for it: ``async for output in stream``.

    A reader that stops before the end calls `aclose`, which aborts the request. One output waits at most: of a reader that is slow, deltas are
    joined, and of cumulative outputs the newest is kept.
    """

    def __init__(self, request_id: str, deltas: bool, on_close: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.finished = False
        self._deltas, self._on_close = deltas, on_close
        self._ready: RequestOutput | None = None
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Called in ``loop``."""
        if self._ready is not None and self._deltas:
            self._ready.add(output)
        else:
            self._ready = output
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Called in ``loop``. What came before is still delivered."""
        self._error = error
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. Raises StopAsyncIteration after the last, EngineDeadError if the engine is gone."""
        if self.finished:
            raise StopAsyncIteration
        while self._ready is None:
            if self._error is not None:
                self.finished = True
                raise self._error
            self._news.clear()
            await self._news.wait()
        output, self._ready = self._ready, None
        self.finished = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request if it has not ended."""
        if not self.finished:
            self.finished = True
            self._on_close(self.request_id)


class AsyncLLM:
    """One engine for many callers in asyncio. Make one with `from_engine_args`.

    A thread drives the engine; the engine's core runs in that thread, or in a separate process. If it raises or the process ends, it is
    dead: every stream and every later call raises EngineDeadError. ``on_death``: called once, in the thread, when that happens.
    A policy that raises costs no request: the standard one takes its place, and ``policy_error`` is what it raised.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self.on_death: Callable[[BaseException], None] = lambda error: None
        self.dead_error: BaseException | None = None
        self.policy_error: PolicyError | None = None
        self._streams: dict[str, RequestStream] = {}
        self._inbox: deque[tuple[Callable[[LLMEngine], Any], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._wakeup = Wakeup(engine.core.fileno())
        self._closing = False
        self._ids = itertools.count()
        engine.core.watch(self._wakeup.set)
        self._inputs = ThreadPoolExecutor(4, thread_name_prefix="minivllm-inputs")
        self._thread = threading.Thread(target=self._run, name="minivllm-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(
        cls, args: EngineArgs, *, engine_in: str = "thread", warm: bool = False, **options: Any
    ) -> Self:
        """Load the model and start. ``options``: see `LLMEngine.from_engine_args`.

        ``engine_in``: "thread", or "process" for an engine core in a separate process (see `engine.core_process`); with
        ``args.data_parallel_size`` several of them, and the option ``router`` chooses among them (see `core.routing`).
        ``warm``: rehearse first, so that the first request does not pay for it (see `llm_engine.warm_up`).

        Raises:
            ValueError: an unknown model or setting. TypeError: an option that cannot cross to the process.
        """
        if args.executor == "external_launcher":
            raise ValueError(
                "distributed_executor_backend='external_launcher' is for LLM.generate in a program under torchrun: requests"
                " of a server reach its processes at different moments"
            )
        if args.data_parallel_size > 1:
            from minivllm.engine.core_process import around
            from minivllm.engine.data_parallel import DataParallelCore

            if engine_in != "process":
                raise ValueError('data_parallel_size needs engine_in="process": each replica is a process')
            return cls(around(DataParallelCore.start(args, warm=warm, **options), args))
        if engine_in == "process":
            from minivllm.engine.core_process import connect_engine  # it needs msgpack

            return cls(connect_engine(args, warm=warm, **options))
        if engine_in != "thread":
            raise ValueError(f"engine_in must be 'thread' or 'process', got {engine_in!r}")
        engine = LLMEngine.from_engine_args(args, **options)
        if warm:
            warm_up(engine.core.executor, engine.config)
        return cls(engine)

    @property
    def config(self) -> EngineConfig:
        return self.llm_engine.config

    @property
    def errored(self) -> bool:
        """Whether the engine failed."""
        return self.dead_error is not None

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._streams)

    def get_tokenizer(self) -> Any:
        return self.llm_engine.tokenizer

    def get_detokenizers(self) -> DetokenizerFactory:
        """The factory of detokenizers, which turn tokens into text. The engine must have a tokenizer."""
        factory = self.llm_engine.output_processor.detokenizers
        assert factory is not None
        return factory

    def get_default_sampling_params(self) -> dict[str, Any]:
        """See `LLMEngine.default_sampling_params`."""
        return self.llm_engine.default_sampling_params

    def _post(self, job: Callable[[LLMEngine], T]) -> "Future[T]":
        """Have ``job`` done between two steps. The future raises EngineDeadError if that can no longer happen."""
        future: Future[T] = Future()
        with self._lock:
            if self._closing or self.errored:
                future.set_exception(self._death())
            else:
                self._inbox.append((job, future))
                self._wakeup.set()
        return future

    def _death(self) -> EngineDeadError:
        if self.dead_error is None:
            return EngineDeadError("the engine was shut down")
        error = EngineDeadError(f"the engine has failed: {type(self.dead_error).__name__}: {self.dead_error}")
        error.__cause__ = self.dead_error
        return error

    def _run(self) -> None:
        engine = self.llm_engine
        try:
            while not self._closing:
                self._do_jobs()
                if engine.core.has_requests():
                    self._deliver(self._step())
                elif not self._inbox:
                    self._wakeup.wait()
                    engine.core.check_health()
        except BaseException as error:  # noqa: BLE001 - every waiting caller must hear of it, whatever it is
            self.dead_error = error
        self._end()

    def _step(self) -> list[RequestOutput]:
        try:
            return self.llm_engine.step()
        except PolicyError as error:
            if self.policy_error is not None:
                raise
            self.policy_error = error
            logger.error("the policy has failed; the engine goes on with the standard one", exc_info=error)
            self.llm_engine.set_policy(Priority() if self.config.scheduler.policy == "priority" else FCFS())
            return []

    def _do_jobs(self) -> None:
        while self._inbox:
            job, future = self._inbox.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job(self.llm_engine))
                except Exception as error:  # noqa: BLE001 - the caller's error, not the engine's
                    future.set_exception(error)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # closed
                self.llm_engine.abort_request([stream.request_id for stream, _ in pairs])
                for stream, _ in pairs:
                    self._streams.pop(stream.request_id, None)

    def _end(self) -> None:
        """The thread's last act: no caller may be left waiting."""
        with self._lock:
            self._closing = True
            jobs, self._inbox = self._inbox, deque()
            self._wakeup.close()
        for _, future in jobs:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._death())
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            try:
                stream.loop.call_soon_threadsafe(stream.fail, self._death())
            except RuntimeError:  # its loop was closed
                pass
        self._inputs.shutdown(wait=False, cancel_futures=True)
        try:
            self.llm_engine.close()
        finally:
            if self.dead_error is not None:
                self.on_death(self.dead_error)

    async def submit(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | PoolingParams,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Queue a request and return its stream; when this returns, the engine has accepted it.

        With PoolingParams the stream has one output, whose ``pooled`` is the vector.

        Raises:
            TypeError, ValueError: a bad prompt, parameter or id. EngineDeadError.
        """
        name = f"async-{next(self._ids)}" if request_id is None else request_id
        if options.get("arrival_time") is None:  # now, not when a thread comes to it
            options["arrival_time"] = self.llm_engine.clock.now()
        given = await self.run_input(lambda: self.llm_engine.process(name, prompt, sampling_params, **options))
        await self._compile_grammar(given.params)
        stream = RequestStream(name, given.params.output_kind is RequestOutputKind.DELTA, self._forget)
        try:
            await asyncio.wrap_future(self._post(lambda engine: self._add(engine, stream, given)))
        except asyncio.CancelledError:
            self._forget(name)
            raise
        return stream

    async def _compile_grammar(self, params: SamplingParams | PoolingParams) -> None:
        """Wait until the grammar is compiled, so that a wrong one is the caller's error and the engine never waits for one."""
        if params.structured_outputs is None:
            return
        pending = self.llm_engine.core.compile_grammar(params.structured_outputs)
        while not pending.done():
            await asyncio.sleep(0.005)
        pending.result()

    def _add(self, engine: LLMEngine, stream: RequestStream, given: ProcessedInput) -> None:
        engine.add_processed(stream.request_id, given)
        self._streams[stream.request_id] = stream

    async def run_input(self, work: Callable[[], T]) -> T:
        """Call ``work``, which checks or tokenises input, in a thread of a pool. Raises EngineDeadError, or what ``work`` raises."""
        if self._closing or self.errored:
            raise self._death()
        return await asyncio.get_running_loop().run_in_executor(self._inputs, work)

    def _forget(self, request_id: str) -> None:
        """Abort a request that is no longer read."""

        def job(engine: LLMEngine) -> None:
            if self._streams.pop(request_id, None) is not None:
                engine.abort_request(request_id)

        self._post(job)  # a dead engine has forgotten it already

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of one request as they come. Leaving the loop early aborts the request.

        Raises:
            TypeError, ValueError: a bad prompt, parameter or id. EngineDeadError: the engine failed.
        """
        stream = await self.submit(prompt, sampling_params, request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request: its stream gets a last output with the finish reason "abort". Unknown ids are passed over."""
        await self.call(lambda engine: self._deliver(engine.abort_request(request_id)))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLMEngine.add_lora`. The file is checked and read in threads, so that no step waits for it."""
        adapter = await self.run_input(lambda: self.llm_engine.input_processor.register(lora_request))
        await self.call(lambda engine: engine.prefetch_lora(adapter))
        while not await self.call(lambda engine: engine.is_lora_read(adapter)):
            await asyncio.sleep(0.005)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """See `LLMEngine.remove_lora`."""
        return await self.call(lambda engine: engine.remove_lora(lora_id))

    async def list_loras(self) -> set[int]:
        """See `LLMEngine.list_loras`."""
        return self.llm_engine.list_loras()

    async def pin_lora(self, lora_id: int) -> bool:
        """See `LLMEngine.pin_lora`."""
        return await self.call(lambda engine: engine.pin_lora(lora_id))

    async def call(self, job: Callable[[LLMEngine], T]) -> T:
        """Call ``job`` with the engine between two steps. Raises what ``job`` raises, or EngineDeadError."""
        return await asyncio.wrap_future(self._post(job))

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine has failed or was shut down."""
        if self.errored or self._closing:
            raise self._death()

    def observe(self, on_finished: Callable[[FinishedRequest], None]) -> None:
        """Call ``on_finished`` for every request that ends from now on, in the engine's thread."""
        self.llm_engine.output_processor.on_finished = on_finished

    def get_metrics(self) -> dict[str, float]:
        """See `LLMEngine.get_metrics`. Reads counters without waiting for the step under way."""
        return self.llm_engine.get_metrics()

    def get_engine_metrics(self) -> list[dict[str, float]]:
        """See `LLMEngine.get_engine_metrics`."""
        return self.llm_engine.get_engine_metrics()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `EngineCore.reset_prefix_cache`."""
        return await self.call(lambda engine: engine.reset_prefix_cache(reset_running_requests))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See `EngineCore.sleep`. Requests that come meanwhile wait."""
        await self.call(lambda engine: engine.sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `EngineCore.wake_up`."""
        await self.call(lambda engine: engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Whether no step can run."""
        return await self.call(lambda engine: engine.is_sleeping())

    async def load_weights(self, weights: Weights = None, version: int | None = None, mode: str = "keep") -> int:
        """See `EngineCore.load_weights`."""
        return await self.call(lambda engine: engine.load_weights(weights, version, mode))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See `Executor.collective_rpc`. With an engine in another process, only plain values can cross."""
        return await self.call(lambda engine: engine.collective_rpc(method, timeout, args, kwargs))

    async def apply_model(self, function: Function) -> list[Any]:
        """See `EngineCore.apply_model`."""
        return await self.call(lambda engine: engine.apply_model(function))

    async def record_to(self, path: str) -> None:
        """Record what the scheduler does, from now on, into `PATH.part`; the shutdown makes it the file (.jsonl or .parquet)."""
        await self.call(lambda engine: engine.core.record_to(path))

    def shutdown(self) -> None:
        """Stop after the step under way; streams that have not ended raise EngineDeadError. Twice is no error."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wakeup.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _put_all(pairs: list[tuple[RequestStream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream.put(output)
