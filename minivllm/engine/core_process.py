"""EngineCore in a separate process, and its client."""

# Generated from nbs/engine/core_process.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from minivllm.core.config import EngineArgs, EngineConfig
from minivllm.core.kv_connector import make_connector
from minivllm.core.output import EngineCoreOutput
from minivllm.core.plugins import load_plugins
from minivllm.core.request import FinishReason, Request
from minivllm.core.scheduler import WallClock
from minivllm.engine.core import EngineCore, no_step
from minivllm.engine.llm_engine import LLMEngine, warm_up
from minivllm.engine.wire import Channel, from_columns, in_columns
from minivllm.lora.adapter import AdapterError
from minivllm.runtime.executor import load_tokenizer, read_model
from minivllm.runtime.executors.mp import how_it_ended, start_module
from minivllm.runtime.weights import Function, Weights, as_path, pack_function
from minivllm.sampling.grammar import GrammarCompiler, PendingGrammar
from minivllm.sampling.params import StructuredOutputsParams

__all__ = [
    "CALLS", "EngineCoreClient", "EngineCoreProc", "EngineProcessError", "RemoteCore", "around",
    "connect_engine", "logger",
]  # fmt: skip

logger = logging.getLogger("minivllm.engine")
# Methods of EngineCore that the other side may call. Arguments and results must be able to cross (see `engine.wire`).
CALLS = (
    "reset_prefix_cache", "record_to", "is_lora_read", "pin_lora", "unpin_lora", "check_sleep", "sleep", "wake_up", "missing",
    "check_load_weights", "load_weights", "collective_rpc",
)  # fmt: skip


class EngineCoreProc:
    """An engine core at one end of a channel: messages in, outputs and statistics out."""

    GRACE = 5.0
    """Seconds that a step may still take when the server has gone."""

    def __init__(self, channel: Channel, core: EngineCore) -> None:
        self.channel, self.core = channel, core
        self._inbox: deque[list[Any]] = deque()
        self._news = threading.Condition()
        self._taken = 0
        core.watch(lambda: self._put(["check"]))
        threading.Thread(target=self._listen, name="minivllm-listen", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._put(self.channel.receive())
        except EOFError:
            self._put(["stop"])
            time.sleep(self.GRACE)
            os._exit(1)

    def _put(self, message: list[Any]) -> None:
        with self._news:
            self._inbox.append(message)
            self._news.notify()

    def serve(self) -> None:
        """Work until "stop" comes, or the other end of the channel closes. Raises what the core raises."""
        scheduler = self.core.scheduler
        while True:
            outputs: list[EngineCoreOutput] = []
            messages = self._take()
            for message in messages:
                if message[0] == "stop":
                    return
                outputs += self._handle(*message)
            if self.core.has_requests():
                outputs += self.core.step()
            if outputs or messages or scheduler.requests or not scheduler.is_sending:  # else no answer is due
                self._send("outputs", in_columns(outputs))

    def _take(self) -> list[list[Any]]:
        """All messages that have come; waits for one if the core has nothing to do."""
        with self._news:
            while not (self._inbox or self.core.has_requests()):
                self._news.wait()
            messages = list(self._inbox)
            self._inbox.clear()
        self._taken += len(messages)
        return messages

    def _handle(self, kind: str, *what: Any) -> list[EngineCoreOutput]:
        """Do what a message asks for. Returns the last output of a request that was refused."""
        if kind == "add":
            (request,) = what
            try:
                self.core.add_request(request)
            except ValueError as error:
                return [EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=str(error))]
        elif kind == "prefetch_lora":
            self.core.prefetch_lora(*what)
        elif kind == "abort":
            self.core.abort(what[0])
        elif kind == "check":
            self.core.check_health()
        elif kind == "call" and what[0] in CALLS:
            name, arguments = what
            try:
                self._send("result", getattr(self.core, name)(*arguments))
            except Exception as error:  # noqa: BLE001 - the caller's error, not the engine's
                self._send("refused", [_kind_of(error), str(error)])
        else:
            raise ValueError(f"a message asks for {kind!r} {what[:1]}, which an engine does not do")
        return []

    def _send(self, kind: str, value: Any) -> None:
        try:
            self.channel.send([kind, value, self.core.get_stats(), self._taken])
        except OSError:  # the other end is gone; the listener has seen it too
            self._put(["stop"])


def main(file_number: int) -> int:
    """What runs in the engine's process; returns its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=file_number))
    args, options, warm, clock_start, log_level = channel.receive()
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        load_plugins()
        engine = LLMEngine.from_engine_args(args, clock=WallClock(clock_start), **options)
        if warm:
            warm_up(engine.core.executor, engine.config)
    except Exception as error:  # noqa: BLE001 - said by the one that started us
        channel.send(["refused", [_kind_of(error), str(error)]])
        return 1
    core = engine.core
    limit = core.scheduler.max_model_len
    channel.send(["ready", [engine.config, engine.generation_config, limit], core.get_stats(), 0])
    status = 0
    try:
        EngineCoreProc(channel, core).serve()
    except BaseException as error:
        logger.critical("the engine has failed", exc_info=error)
        channel.send(["failed", [_kind_of(error), str(error)], {}, 0])
        status = 1
    core.shutdown()
    return status


class EngineProcessError(RuntimeError):
    """The engine's process has failed or was killed."""


_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (AdapterError, ValueError, TypeError, NotImplementedError, FileNotFoundError, PermissionError, OSError)
}


def _kind_of(error: BaseException) -> str:
    """The name of its class, or of a base that callers tell apart."""
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((name for name in names if name in _ERRORS), names[0])


def _as_error(kind: str, text: str) -> Exception:
    """An error of the other process as an exception, of the same class if callers tell that class apart."""
    known = _ERRORS.get(kind)
    return EngineProcessError(f"{kind}: {text}") if known is None else known(text)


class RemoteCore:
    """What the clients of engine cores in other processes have in common. ``grammar``: compiles grammars here, to check them."""

    grammar: GrammarCompiler | None = None
    asleep: Mapping[str, str] = MappingProxyType({})  # see `EngineCore.missing`; of one core
    collective_rpc: Callable[..., list[Any]]
    get_stats: Callable[[], dict[str, float]]

    @property
    def scheduler(self) -> Any:
        """There is none here. Raises EngineProcessError that says where it is."""
        raise EngineProcessError('the scheduler is in the engine\'s process; engine_in="thread" has it here')

    def record(self, samples: bool = False) -> Any:
        raise EngineProcessError(
            'an engine in another process records with record_to(path); record() needs engine_in="thread"'
        )

    def compile_grammar(self, params: StructuredOutputsParams) -> PendingGrammar:
        """See `EngineCore.compile_grammar`. Here it is compiled to be checked; the engine's process does it again."""
        assert self.grammar is not None
        return self.grammar.submit(params)

    def apply_model(self, function: Function) -> list[Any]:
        """See `EngineCore.apply_model`. What the function returns must be able to cross, see `engine.wire`."""
        return self.collective_rpc("apply_model", args=(pack_function(function),))

    def engine_of(self, request_id: str) -> int:
        """See `EngineCore.engine_of`."""
        return 0

    def engine_stats(self) -> list[dict[str, float]]:
        """See `EngineCore.engine_stats`."""
        return [self.get_stats()]

    def watch(self, callback: Callable[[], None]) -> None:
        """Does nothing: if a process fails, a file becomes readable, see `fileno`."""

    def check_health(self) -> None:
        """Does nothing: if a process has failed, the next step raises."""


class EngineCoreClient(RemoteCore):
    """An engine core in a separate process, with the methods of `EngineCore`. One thread uses it; `get_stats` is for all.

    ``options``: see `LLMEngine.from_engine_args`; objects that would have to cross (policies, transforms) cannot.
    ``warm``: whether to rehearse first, see `llm_engine.warm_up`. ``environment``: variables that the process has in addition to this one's.
    ``clock``: to share with other engines; None for a new one.

    Raises:
        ValueError, ...: what loading the model raises there. TypeError: an option that cannot cross. EngineProcessError.
    """

    def __init__(
        self, args: EngineArgs, *, warm: bool = False, environment: Mapping[str, str] | None = None,
        clock: WallClock | None = None, **options: Any,
    ) -> None:  # fmt: skip
        for name, value in options.items():
            if not (value is None or value == () or isinstance(value, str)):
                raise TypeError(
                    f"{name}: an object cannot be handed to an engine in another process, got {type(value).__name__};"
                    ' use engine_in="thread"'
                )
        self.clock = clock or WallClock()
        self._stats: dict[str, float] = {}
        self._sent = 0
        self._born: dict[str, int] = {}
        self._arrived: deque[list[Any]] = deque()
        self.process, ours = start_module("minivllm.engine.core_process", env=environment or {})
        self.channel = Channel(ours)
        try:
            given = {name: value for name, value in options.items() if value}
            level = logging.getLogger().getEffectiveLevel()
            self.channel.send([args, given, warm, self.clock.start, level])
            kind, value, *_ = self._receive()
            if kind == "refused":
                raise _as_error(*value)
            self.config: EngineConfig = value[0]
            self.generation_config: dict[str, Any] = value[1]
            self._max_model_len: int = value[2]
        except BaseException:
            self._end(0.0)
            raise

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never run, or if it brings functions."""
        if request.num_tokens >= self._max_model_len:
            raise ValueError(
                f"request {request.request_id!r}: a prompt of {request.num_tokens} tokens is too long; max_model_len, or what the"
                f" KV cache can hold, is {self._max_model_len} tokens and at least one must be left for the output"
            )
        if getattr(request.sampling_params, "logits_processors", None):
            raise ValueError(
                'logits_processors are functions, which cannot cross to the engine\'s process; use engine_in="thread"'
            )
        self._send("add", request)
        self._born[request.request_id] = self._sent

    def abort(self, request_ids: Any) -> list[str]:
        """End requests in any state; unknown ids are passed over. Returns those that had not ended."""
        alive = [name for name in request_ids if self._born.pop(name, None) is not None]
        if alive:
            self._send("abort", alive)
        return alive

    def fileno(self) -> int:
        """The channel: it becomes readable when a step's outputs have come."""
        return self.channel.fileno()

    def has_requests(self) -> bool:
        """Whether `step` has something to deliver (or the end of the process to report) without waiting."""
        return bool(self._arrived) or self.channel.ready()

    def step(self) -> list[EngineCoreOutput]:
        """The outputs of one step of the engine; waits for them.

        Raises:
            EngineProcessError: the process has ended. RuntimeError: the engine sleeps, and nothing will come.
        """
        if self.asleep and not self.has_requests():
            raise no_step(self.asleep)
        kind, value, _, taken = self._arrived.popleft() if self._arrived else self._receive()
        if kind == "failed":
            raise EngineProcessError(f"{value[0]}: {value[1]}")
        outputs = [output for output in from_columns(value) if self._born.get(output.request_id, taken + 1) <= taken]
        for output in outputs:
            if output.finish_reason is not None:
                del self._born[output.request_id]
        return outputs

    def _send(self, *message: Any) -> None:
        """Raises TypeError or ValueError for what cannot cross; the message does not count as sent then."""
        try:
            self.channel.send(list(message))
        except OSError:  # it has ended; the next step says so
            pass
        self._sent += 1

    def _receive(self) -> list[Any]:
        try:
            message: list[Any] = self.channel.receive()
        except EOFError:
            raise EngineProcessError(f"the engine's process {how_it_ended(self.process)}") from None
        if len(message) > 2 and message[2]:
            self._stats = message[2]
        return message

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the engine core. Raises what it raises, or EngineProcessError."""
        self._send("call", name, list(arguments))
        while True:
            message = self._receive()
            if message[0] == "result":
                return message[1]
            if message[0] == "refused":
                raise _as_error(*message[1])
            self._arrived.append(message)
            if message[0] == "failed":
                raise EngineProcessError(f"{message[1][0]}: {message[1][1]}")

    def _change(self, name: str, *arguments: Any) -> Any:
        """Like `_call`, for methods that may put the engine to sleep or wake it, even if they fail."""
        try:
            return self._call(name, *arguments)
        finally:  # what requests got before comes ahead of this answer
            self.asleep = self._call("missing")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `EngineCore.reset_prefix_cache`."""
        return bool(self._call("reset_prefix_cache", reset_running_requests))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See `EngineCore.sleep`."""
        self._change("sleep", level, mode)

    def check_sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See `EngineCore.check_sleep`."""
        self._call("check_sleep", level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `EngineCore.wake_up`."""
        self._change("wake_up", None if tags is None else list(tags))

    def is_sleeping(self) -> bool:
        """See `EngineCore.is_sleeping`."""
        return bool(self.asleep)

    def load_weights(self, weights: Weights = None, version: int | None = None, mode: str = "keep") -> int:
        """See `EngineCore.load_weights`. Tensors cross by a file."""
        with as_path(weights) as path:
            return int(self._change("load_weights", path, version, mode))

    def check_load_weights(self, weights: str | None = None, mode: str = "keep") -> None:
        """See `EngineCore.check_load_weights`."""
        self._call("check_load_weights", weights, mode)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See `EngineCore.collective_rpc`; plain values can cross, see `engine.wire`."""
        return list(self._call("collective_rpc", method, timeout, list(args), dict(kwargs or {})))

    def record_to(self, path: str) -> None:
        """Record from now on, into `PATH.part`; the shutdown makes it the file. Raises RuntimeError if a recording is under way."""
        self._call("record_to", os.path.abspath(path))

    def prefetch_lora(self, key: str, path: str, digest: str) -> None:
        """See `EngineCore.prefetch_lora`. If the adapter cannot be read, its requests fail."""
        self._send("prefetch_lora", key, os.path.abspath(path), digest)

    def is_lora_read(self, key: str) -> bool:
        """See `EngineCore.is_lora_read`."""
        return bool(self._call("is_lora_read", key))

    def pin_lora(self, key: str) -> None:
        """See `EngineCore.pin_lora`."""
        self._call("pin_lora", key)

    def unpin_lora(self, key: str) -> None:
        """See `EngineCore.unpin_lora`."""
        self._call("unpin_lora", key)

    def get_stats(self) -> dict[str, float]:
        """See `EngineCore.get_stats`; as of the last message."""
        return self._stats

    def shutdown(self) -> None:
        """End the process, and wait until it has ended. Twice is no error."""
        self._send("stop")
        self._end(30.0)
        if self.process.wait() < 0 and (connector := make_connector(self.config)) is not None:
            connector.shutdown()  # a process that was killed has not removed what its connector kept
        if self.grammar is not None:
            self.grammar.shutdown()

    def _end(self, seconds: float) -> None:
        """Wait `seconds` for the process to end, then kill it."""
        killer = threading.Timer(seconds, self.process.kill)
        killer.start()
        try:
            while True:
                self.channel.receive()
        except EOFError:
            pass
        self.process.wait()
        killer.cancel()
        self.channel.close()


def connect_engine(args: EngineArgs, *, warm: bool = False, **options: Any) -> LLMEngine:
    """An LLMEngine whose core runs in a separate process. Raises what `EngineCoreClient` raises."""
    return around(EngineCoreClient(args, warm=warm, **options), args)


def around(core: Any, args: EngineArgs) -> LLMEngine:
    """An LLMEngine over a core that is elsewhere (`EngineCoreClient` or the like); shut down if that fails."""
    try:
        config = core.config
        found = core.generation_config.get("eos_token_id")
        tokenizer, core.grammar = load_tokenizer(config, found if isinstance(found, list) else [found])
        engine = LLMEngine(config, cast(EngineCore, core), tokenizer, core.generation_config)
        if args.enable_lora:
            engine.know_adapters(read_model(args).spec)
        if config.model.reads_media:
            engine.know_media(read_model(args).spec)
        return engine
    except BaseException:
        core.shutdown()
        raise


if __name__ == "__main__" and "get_ipython" not in globals():
    sys.exit(main(int(sys.argv[1])))
