"""A rank of an engine in a separate process."""

# Generated from nbs/runtime/executors/worker.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import faulthandler
import functools
import logging
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minivllm.attention.numba_cuda import cuda_ops
from minivllm.attention.select import make_backend
from minivllm.core.config import EngineArgs, EngineConfig, MachineFacts, stage_groups, stage_layers
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.core.plugins import load_plugins
from minivllm.models.parallel import Adder, Share, Spans, Stage, TensorGroup
from minivllm.runtime.executor import EnginePlan, find_method, load_decoder, load_tokenizer, measure_memory, read_model
from minivllm.runtime.executors.broadcast import Frames, Ring
from minivllm.runtime.machine import keep_freed_memory, settle_vector_math
from minivllm.runtime.model_runner import ModelRunner
from minivllm.runtime.sample_record import SampleLog, SampleRecord
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.transforms import Transform

logger = logging.getLogger("minivllm.runtime")


@dataclass(frozen=True)
class Launch:
    """What a worker is told first.

    Attributes:
        rank, size: its number, and the number of workers.
        device: `cpu` or `cuda`.
        folder: the same for all ranks, empty; what is in it belongs to torch. It must stay as long as the workers run: NCCL connects two ranks
            when they first have something to tell each other, and does so through a file there.
        log_level: level of the root logger.
        gpu: which of the GPUs that it sees the rank takes; None for the one with the rank's number.
        address: where ranks of several machines meet, as torch.distributed reads it; None for a file in `folder`.
    """

    rank: int
    size: int
    device: str
    folder: str
    log_level: int = logging.WARNING
    gpu: int | None = None
    address: str | None = None


def use_loopback() -> None:
    """Have ranks of one machine find each other on its loopback interface, unless the user has named another."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo0" if sys.platform == "darwin" else "lo")


def connect(launch: Launch) -> None:
    """Join the other ranks, if there are any.

    Raises:
        ValueError: there is no GPU of this rank's number.
    """
    on_gpu = launch.device == "cuda"
    if on_gpu:
        gpu, most = (launch.rank, launch.size) if launch.gpu is None else (launch.gpu, launch.gpu + 1)
        if (count := torch.cuda.device_count()) < most:
            raise ValueError(f"{launch.size} ranks need a GPU each, and torch.cuda.device_count() is {count}")
        torch.cuda.set_device(gpu)
    if launch.size == 1 or dist.is_initialized():
        return
    if launch.address is None:
        use_loopback()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=launch.address or f"file://{launch.folder}/store",
        rank=launch.rank,
        world_size=launch.size,
        timeout=timedelta(minutes=10),
        device_id=torch.device("cuda", gpu) if on_gpu else None,  # NCCL connects, or fails, here and not in a step
    )


class LateGrammar:
    """Makes the grammar compiler when it is first needed. See `GrammarCompiler.matcher`."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan

    @functools.cached_property
    def _made(self) -> tuple[Any, GrammarCompiler | None]:
        return load_tokenizer(self._plan.config, self._plan.model.eos_token_ids)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._made[0]

    def matcher(self, params: Any) -> Any:
        """A fresh matcher at the start of the text."""
        compiler = self._made[1]
        assert compiler is not None, "without a tokenizer no request has a grammar"
        return compiler.matcher(params)


class Worker:
    """One rank of an engine.

    Attributes:
        rank: its number.
        plan: what it runs; from `load_model` on.
        group: the ranks that hold the layers together, or None.
        runner: from `initialize` on.
    """

    def __init__(self, launch: Launch) -> None:
        self.rank, self.size = launch.rank, launch.size
        connect(launch)
        self.group: TensorGroup | None = None
        self.runner: ModelRunner | None = None
        self._samples: SampleLog = {}
        self.spans = Spans()
        self._adders: dict[int, Adder] = {}  # by ranks in a group; their memory stays until the process ends

    def load_model(self, config: EngineConfig, machine: MachineFacts) -> tuple[int, int] | None:
        """Read the weights. Returns what `measure_memory` finds."""
        settle_vector_math()
        args = config.args
        self.group = self._join(args, machine) if args.tensor_parallel_size > 1 else None
        plan = EnginePlan(config, read_model(args), make_backend(config.attention_backend), machine)
        self.stage = self._find_stage(plan)
        self.plan = replace(plan, decoder=(decoder := load_decoder(plan, self.group, self.stage)))
        self.grammar = LateGrammar(self.plan)
        return measure_memory(self.plan, decoder)

    def _find_stage(self, plan: EnginePlan) -> Stage:
        """Which layers this rank has."""
        args, width = plan.config.args, plan.config.args.tensor_parallel_size
        count, index = args.pipeline_parallel_size, self.rank // width
        layers = stage_layers(plan.config.model.num_layers, count)[index]
        return Stage(layers, index == 0, index == count - 1, self.rank - width, self.rank + width)

    def unload(self) -> None:
        """Give the memory of the model back; another may be loaded."""
        if self.runner is not None and self.runner.adapters is not None:
            self.runner.adapters.close()
        self.runner = None
        del self.plan, self.grammar

    def initialize(
        self, config: EngineConfig, transforms: Sequence[Transform] = (), grammar: GrammarCompiler | None = None
    ) -> None:
        """Make the KV cache, and everything else that a step needs. transforms, grammar: see `ModelRunner`; here only if they need not cross."""
        local = replace(config.kv_cache, groups=stage_groups(config.kv_cache.groups, self.stage.layers))
        config = replace(config, kv_cache=local)
        self.plan = replace(self.plan, config=config)
        assert self.plan.decoder is not None, "load_model comes first"
        keep_freed_memory()  # not before the weights are loaded
        self.runner = ModelRunner(self.plan.decoder, self.plan.backend, config, transforms, grammar or self.grammar)  # type: ignore[arg-type]

    def _join(self, args: EngineArgs, machine: MachineFacts) -> TensorGroup:
        """The ranks of this one's stage. All ranks make all groups, as torch wants it."""
        size = args.tensor_parallel_size
        groups = [dist.new_group(list(range(at, at + size))) for at in range(0, self.size, size)]
        share, group = Share(self.rank % size, size, *args.expert_sharing), groups[self.rank // size]

        def exchange(handle: bytes) -> list[bytes]:
            handles: list[Any] = [None] * size
            dist.all_gather_object(handles, handle, group)
            return handles

        if machine.sums_by_peers and size not in self._adders:
            self._adders[size] = cuda_ops().PeerAllReduce(share.rank, size, exchange)
        return TensorGroup(share, group, self._adders[size] if machine.sums_by_peers else None)

    def keep_samples(self, on: bool) -> None:
        """Send what the sampler sees along with the results from now on, or stop."""
        assert self.runner is not None
        self.runner.sample_log = self._samples if on else None

    def execute_model(
        self, output: SchedulerOutput, sampled: Sequence[tuple[int, Mapping[str, list[int]]]]
    ) -> tuple[ModelRunnerOutput, SampleLog]:
        """Execute a step. Returns its samples too, if `keep_samples` asked for them. sampled: since the last call, see `ModelRunner.learn`."""
        assert self.runner is not None
        if not self.stage.is_last:
            self.runner.learn(sampled)
        result = self.runner.execute_model(output)
        samples = dict(self._samples)
        self._samples.clear()
        return result, samples

    def explain(self, record: SampleRecord, texts: bool, top: int) -> Any:
        """See `SampleRecord.explain`. texts: show tokens as texts."""
        assert self.runner is not None
        tokenizer = self.grammar.tokenizer if texts else None
        return record.explain(self.runner.sampler, self.grammar, tokenizer, top)  # type: ignore[arg-type]

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's weights and KV cache, and what its joins with other ranks came to: calls, and bytes put in."""
        assert self.runner is not None
        decoder = self.runner.model
        tensors = [decoder.embedding, *(linear.weight for linear in (*decoder.linears(), decoder.head) if linear)]
        distinct = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
        joins = (0, 0) if self.group is None else (self.group.calls, self.group.bytes)
        cache = sum(cache.nbytes for cache in self.runner.kv_caches)
        return {"matrices": sum(distinct.values()), "kv_cache": cache, "calls": joins[0], "bytes": joins[1]}

    def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Execute a call from the engine, and return its result."""
        return find_method(method, self, self.runner)(*args, **kwargs)

    def close(self) -> None:
        """Leave the other ranks."""
        if self.runner is not None:
            self.unload()
        if self.size > 1:
            dist.destroy_process_group()

    def record_spans(self, on: bool) -> list[tuple[str, float, float, int]]:
        """Note from now on when this rank runs a step, joins others and waits for another stage; or stop, and return it: see `Spans`."""
        found = self.spans.stop()
        self.spans = Spans()
        if on:
            assert self.runner is not None
            self.spans.watch(self.runner, "execute_model", "step")
            if self.group is not None:
                for join in ("all_reduce", "all_gather", "all_to_all"):
                    self.spans.watch(self.group, join, join)
            if self.stage.before >= 0:
                self.spans.watch(self.stage, "receive", "receive")
            if not self.stage.is_last:
                self.spans.watch(self.stage, "send", "send")
        return found


def die_with(sock: socket.socket, folder: str, workers: Sequence[Worker]) -> None:
    """End this process as soon as the other end of a socket has closed. Before that, shut down the connectors of workers and remove a folder."""
    poll = select.poll()
    poll.register(sock, getattr(select, "POLLRDHUP", 0))  # and a hang-up, which is always reported

    def watch() -> None:
        poll.poll()
        try:
            for runner in [worker.runner for worker in workers if worker.runner is not None]:
                runner.shutdown_connector()
            end = time.monotonic() + 5
            while os.path.exists(folder) and time.monotonic() < end:  # another rank may have put a file there meanwhile
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="minivllm-watch", daemon=True).start()


def await_end() -> None:
    """Wait, for ever, for the thread of `die_with`, which removes the folder and ends this process."""
    threading.Event().wait()


def pack_answer(number: int, rank: int, value: Any, failed: bool = False) -> bytes:
    """An answer to a call; one that cannot cross becomes an error that says so."""
    try:
        return pickle.dumps((number, rank, failed, value), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - pickle raises what it likes
        what = f"what a worker would answer cannot cross between processes: {type(value).__name__}: {error}"
        return pickle.dumps((number, rank, True, TypeError(what)))


def send_answer(frames: Frames, number: int, rank: int, value: Any, failed: bool = False) -> None:
    """Answer a message."""
    try:
        frames.send_bytes(-1, pack_answer(number, rank, value, failed))
    except OSError:  # the engine is gone
        await_end()


def serve(worker: Worker, frames: Frames, ring: Ring) -> None:
    """Do what the engine says until it says stop, or its end of the socket closes."""
    while True:
        number, method, args, kwargs, ranks = frames.receive(ring, worker.rank)
        if method == "stop":
            return
        answers = worker.rank in ranks
        try:
            result = worker.call(method, args, kwargs)
        except Exception as error:  # noqa: BLE001 - the engine decides what follows from it
            send_answer(frames, number, worker.rank, error, failed=True)
            continue
        if isinstance(result, Future):
            result.add_done_callback(functools.partial(_send_result, frames, number, worker.rank))
        elif answers:
            send_answer(frames, number, worker.rank, result)


def _send_result(frames: Frames, number: int, rank: int, done: "Future[Any]") -> None:
    error = done.exception()
    send_answer(frames, number, rank, done.result() if error is None else error, failed=error is not None)


def main(control: int, file: int, stacks: int, rank: int, size: int) -> int:
    """What runs in a worker's process; returns its exit status. SIGUSR1 has the stacks of all threads written to the file `stacks`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, stacks)
    sock = socket.socket(fileno=control)
    frames, ring = Frames(sock), Ring(file, size)
    try:
        launch: Launch = frames.receive()
    except EOFError:  # the engine has ended
        return 1
    workers = list[Worker]()
    die_with(sock, launch.folder, workers)
    logging.basicConfig(level=launch.log_level, format=f"%(asctime)s %(levelname)s %(name)s rank {rank}: %(message)s")
    try:
        load_plugins()
        workers.append(worker := Worker(launch))
    except Exception as error:  # noqa: BLE001 - said by the engine
        send_answer(frames, 0, rank, error, failed=True)
        return 1
    send_answer(frames, 0, rank, None)
    try:
        serve(worker, frames, ring)
    except EOFError:  # the engine has ended
        await_end()
    worker.close()
    return 0


if __name__ == "__main__" and "get_ipython" not in globals():
    status = main(*map(int, sys.argv[1:]))
    logging.shutdown()
    os._exit(status)  # there is nothing to take down: the system does it faster
