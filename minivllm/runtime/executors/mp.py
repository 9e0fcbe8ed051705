"""Executor with a process for each rank."""

# Generated from nbs/runtime/executors/mp.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import contextlib
import functools
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.runtime.executor import EnginePlan, Executor, PendingStep, with_memory
from minivllm.runtime.executors.broadcast import Broadcast, Frames, Ring, unnamed_file
from minivllm.runtime.executors.worker import Launch
from minivllm.runtime.machine import cpu_quota
from minivllm.runtime.sample_record import SampleLog, SampleRecord

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("minivllm.runtime")

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def share_of_cores(size: int) -> dict[str, str]:
    """Variables that give one of `size` processes its share of the cores, unless the user has said how many threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(cores, cpu_quota() or cores) // size)
    return {name: os.environ.get(name, str(threads)) for name in _THREADS}


def start_module(
    module: str, *args: int, files: Sequence[int] = (), env: Mapping[str, str]
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """A process that runs a module, and the socket to it. The module gets the number of its socket's file, and these numbers.

    files: others that stay open in it. env: variables that it has besides this process's.
    """
    ours, theirs = socket.socketpair()
    try:
        command = [sys.executable, "-P", "-m", module, *map(str, (theirs.fileno(), *args))]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno(), *files], stdin=subprocess.DEVNULL, env={**os.environ, **env}
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def how_it_ended(process: "subprocess.Popen[bytes]") -> str:
    """Why nothing more comes from a process, in words."""
    try:
        status = process.wait(5.0)
    except subprocess.TimeoutExpired:
        return "has closed its socket"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class WorkerError(RuntimeError):
    """A worker has failed or was killed; the engine cannot go on."""


@dataclass
class Call:
    """A call under way. ranks: that answer. fatal: an error of a worker is the end of them all."""

    ranks: Sequence[int]
    fatal: bool
    future: "Future[list[Any]]" = field(default_factory=Future)
    answers: dict[int, Any] = field(default_factory=dict)

    def answer(self, rank: int, failed: bool, value: Any) -> bool:
        """Take an answer; whether the call is done. One that is not fatal may fail on several ranks: all are waited for."""
        if rank in self.ranks:
            self.answers[rank] = value
        whole = len(self.answers) == len(self.ranks)
        if failed and not self.future.done():
            self.future.set_exception(value)
        elif whole and not self.future.done():
            self.future.set_result([self.answers[rank] for rank in self.ranks])
        return self.future.done() and (self.fatal or whole)


class StepResult:
    """A step under way: see `PendingStep`.

    Args:
        wait: gives the answer to the call.
        log: where samples go.
        sampled: gets the step's tokens.
    """

    def __init__(
        self, wait: Callable[[], list[Any]], log: SampleLog | None, sampled: Callable[[dict[str, list[int]]], None]
    ) -> None:
        self._wait, self._log, self._sampled = wait, log, sampled

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises WorkerError; if it takes longer than `step_timeout`, with the stacks of all workers, which are ended."""
        ((output, samples),) = self._wait()
        if self._log is not None:
            self._log |= samples
        self._sampled(output.sampled_token_ids)
        return output


def step_timeout() -> float:
    """Seconds that the engine waits for a step, by MINIVLLM_EXECUTE_MODEL_TIMEOUT_SECONDS. Raises ValueError."""
    name = "MINIVLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    given = os.environ.get(name, "300")
    try:
        if (seconds := float(given)) > 0:
            return seconds
    except ValueError:
        pass
    raise ValueError(f"{name} must be a number of seconds above 0, got {given!r}")


class Calls(ABC):
    """Calls to ranks that are under way. A subclass says how a message goes out (`_send`) and how ranks are ended (`_kill`, `close`).

    Args:
        size: number of ranks. All of them answer a first call, number 0, when they are ready.

    Attributes:
        failure: why the ranks have ended, if they ended by themselves.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._calls: dict[int, Call] = {0: Call(range(size), True)}
        self._number, self._lock, self._closing = 1, threading.Lock(), False

    @abstractmethod
    def _send(
        self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: tuple[int, ...]
    ) -> None:
        """Send a call to all ranks, in order. Raises OSError if one is gone, or what pickle raises (nothing is sent then)."""

    @abstractmethod
    def _kill(self) -> None:
        """End all ranks at once."""

    @abstractmethod
    def _has_lost_one(self) -> bool:
        """Whether a rank has ended, which may be why another one has failed; a moment is waited for that. All calls have failed then."""

    @abstractmethod
    def stacks(self, seconds: float = 2.0) -> str:
        """Where the threads of every rank are, as text. A rank that says nothing for so long is said to be stopped."""

    @abstractmethod
    def close(self, seconds: float = 10.0) -> None:
        """Let the ranks finish, for so long, then kill them. Twice is no error."""

    def call(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
        ranks: Sequence[int] | None = None, fatal: bool = False,
    ) -> "Future[list[Any]]":  # fmt: skip
        """Call a method of every worker.

        Args:
            ranks: those that answer; None for all.
            fatal: if one raises, the workers no longer agree, and are ended.

        Raises:
            WorkerError: they have ended. What pickle raises, for arguments that cannot cross.
        """
        call = Call(range(self.size) if ranks is None else ranks, fatal)
        with self._lock:  # messages go out in the order of their numbers
            self.check()
            self._calls[self._number] = call
            try:
                self._send(self._number, method, tuple(args), dict(kwargs or {}), tuple(call.ranks))
            except OSError:  # a worker has ended, which the listener will say, to this call too
                pass
            except BaseException:
                del self._calls[self._number]
                raise
            self._number += 1
        return call.future

    def check(self) -> None:
        """Raises WorkerError if a worker has ended, or they were closed."""
        if self.failure is not None:
            raise WorkerError(str(self.failure)) from self.failure
        if self._closing:
            raise RuntimeError("this engine was closed: its executor was shut down")

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Have a function called, in the thread that listens, if a worker ends by itself; at once if one has."""
        self._callbacks.append(callback)
        if self.failure is not None:
            callback()

    def _take(self, number: int, rank: int, failed: bool, value: Any) -> None:
        """Give an answer to the call that it belongs to."""
        call = self._calls.get(number)
        if failed and number and call is not None and call.fatal and self.size > 1 and self._has_lost_one():
            return
        if call is not None and call.answer(rank, failed, value):
            self._calls.pop(number, None)
        if failed and (call is None or call.fatal):  # of a call that is fatal, a second worker may say the same
            self._fail(
                value if number == 0 else WorkerError(f"worker {rank} has failed: {type(value).__name__}: {value}")
            )

    def _fail(self, error: BaseException) -> None:
        """Kill all workers, and give the error to every waiting call. Only the first error counts."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            calls, self._calls = self._calls, {}
        self._kill()
        if not self._closing:  # before anyone is told by a future, and closes what a callback needs
            for callback in self._callbacks:
                callback()
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(error)

    def wait(self, future: "Future[list[Any]]", what: str, seconds: float) -> list[Any]:
        """The answer to a call. Raises WorkerError if it does not come in time, with the stacks of all workers, which are ended."""
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():  # it is a worker's own
                raise
        self._fail(WorkerError(f"workers did not answer {what} within {seconds:g} s\n{self.stacks()}"))
        return future.result()


class Workers(Calls):
    """Processes that answer calls.

    Args:
        launches: what each is told first. Their folder is removed when all has ended.

    Raises:
        Exception: what a worker raises while it starts.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        super().__init__(len(launches))
        self._folder, self._stacks = launches[0].folder, unnamed_file(0)
        file = unnamed_file(Ring.size(self.size))
        module, env, files = "minivllm.runtime.executors.worker", share_of_cores(self.size), (file, self._stacks)
        started = [start_module(module, *files, rank, self.size, files=files, env=env) for rank in range(self.size)]
        self.processes = [process for process, _ in started]
        self._frames = [Frames(sock) for _, sock in started]
        self._broadcast = Broadcast(self._frames, file)
        os.close(file)
        self._thread = threading.Thread(target=self._listen, name="minivllm-workers", daemon=True)
        self._thread.start()
        try:
            ready = self._calls[0].future
            for frames, launch in zip(self._frames, launches, strict=True):
                with contextlib.suppress(OSError):  # it has ended, which the thread will say
                    frames.send(launch)
            ready.result()
        except BaseException:
            self.close(0.0)
            raise

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, frames in enumerate(self._frames):
                selector.register(frames.sock, selectors.EVENT_READ, rank)
            while self.failure is None:
                for key, _ in selector.select():
                    try:
                        number, rank, failed, value = self._frames[key.data].receive()
                    except EOFError:
                        self._fail(WorkerError(self._how_it_ended(key.data)))
                        return
                    self._take(number, rank, failed, value)

    def _how_it_ended(self, rank: int) -> str:
        process = self.processes[rank]
        return f"worker {rank} of {self.size} (process {process.pid}) {how_it_ended(process)}"

    def _send(
        self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: tuple[int, ...]
    ) -> None:
        self._broadcast.send((number, method, args, kwargs, ranks))

    def _fail(self, error: BaseException) -> None:
        self._broadcast.closed = True  # a call may be waiting for room in the ring, and has the lock
        Calls._fail(self, error)

    def _has_lost_one(self) -> bool:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            for rank, process in enumerate(self.processes):
                if process.poll() is not None:
                    self._fail(WorkerError(self._how_it_ended(rank)))
                    return True
            time.sleep(0.02)
        return False

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self, seconds: float = 10.0) -> None:
        if not self._closing and self.failure is None and seconds:
            with contextlib.suppress(WorkerError, OSError):
                self.call("stop", ranks=())
        self._closing = True
        for process in self.processes:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._thread.join()
        if self._stacks >= 0:
            os.close(self._stacks)
            self._stacks = -1
        shutil.rmtree(self._folder, ignore_errors=True)
        for frames in self._frames:
            frames.sock.close()

    def stacks(self, seconds: float = 2.0) -> str:
        parts = []
        for rank, process in enumerate(self.processes):
            start = end = os.fstat(self._stacks).st_size
            process.send_signal(signal.SIGUSR1)
            deadline, grown = time.monotonic() + seconds, False
            while time.monotonic() < deadline and not grown:
                time.sleep(0.05)
                size = os.fstat(self._stacks).st_size
                grown, end = size == end > start, size  # it has begun, and writes no more
            text = os.pread(self._stacks, end - start, start).decode(errors="replace")
            parts.append(f"worker {rank} of {self.size} (process {process.pid}):\n{text or 'does not react: stopped'}")
        return "\n".join(parts)


def start_workers(size: int, device: str) -> Workers:
    """New workers that have found each other, with no model yet. device: `cpu` or `cuda`."""
    folder, level = tempfile.mkdtemp(prefix="minivllm-"), logging.getLogger().getEffectiveLevel()
    workers = Workers([Launch(rank, size, device, folder, level) for rank in range(size)])
    logger.info("%d worker processes are ready", size)
    return workers


class MultiprocExecutor(Executor):
    """Runs the model in worker processes, one for each rank.

    Args:
        workers: processes that run no model now, to use instead of new ones; they stay when the executor is shut down.

    Raises:
        Exception: what loading the model raises, in whatever process.
    """

    is_remote = True

    def __init__(self, plan: EnginePlan, workers: Calls | None = None) -> None:
        self._step_timeout = step_timeout()
        self._log: SampleLog | None = None
        # by step, not yet told to the stages before the last
        self._sampled: list[tuple[int, dict[str, list[int]]]] = []
        args, self._own = plan.config.args, workers is None
        self.workers = workers or start_workers(args.world_size, plan.config.device)
        if self.workers.size != args.world_size:
            raise ValueError(f"{self.workers.size} workers cannot run a model on {args.world_size} ranks")
        try:
            measured = self.workers.call("load_model", [plan.config, plan.machine], fatal=True).result()
            smallest = None if None in measured else min(measured)
            self.config = with_memory(plan, smallest).config
            self.workers.call("initialize", [self.config], fatal=True).result()
        except BaseException:
            self.workers.close(0.0)
            raise

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return self.submit(output).result()

    def submit(self, output: SchedulerOutput) -> PendingStep:
        sampled, self._sampled = self._sampled, []
        future = self.workers.call("execute_model", [output, sampled], ranks=[self.output_rank], fatal=True)
        wait = functools.partial(self.workers.wait, future, "execute_model", self._step_timeout)
        return StepResult(wait, self._log, functools.partial(self._note_sampled, output.step))

    def _note_sampled(self, step: int, tokens: dict[str, list[int]]) -> None:
        if self.config.args.pipeline_parallel_size > 1:
            self._sampled.append((step, dict(tokens)))

    @property
    def output_rank(self) -> int:
        """The rank that sends the results of steps: the first one of the last stage (all ranks of that stage have them)."""
        args = self.config.args
        return args.world_size - args.tensor_parallel_size

    def keep_samples(self, log: SampleLog | None) -> None:
        self._log = log
        if self.workers.failure is None:
            self.workers.call("keep_samples", [log is not None]).result()

    def explain(self, record: SampleRecord, tokenizer: Any = None, top: int = 5) -> "pd.DataFrame":
        """See `Executor`. With any tokenizer, tokens are texts by the model's own."""
        arguments = [record, tokenizer is not None, top]
        return self.workers.call("explain", arguments, ranks=[self.output_rank]).result()[0]

    def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Future[list[Any]]":
        return self.workers.call(method, args, kwargs)

    def check_health(self) -> None:
        self.workers.check()

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        self.workers.on_failure(callback)

    def shutdown(self) -> None:
        if self._own or self.workers.failure is not None:
            self.workers.close()
        else:
            self.workers.call("unload", fatal=True).result()
