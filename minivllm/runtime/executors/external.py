"""Executor with one rank in this process, among processes that run the same program."""

# Generated from nbs/runtime/executors/external.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from minivllm.core.config import EngineConfig
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.runtime.executor import EnginePlan, Executor, PendingStep, one_rank, with_memory
from minivllm.runtime.executors.worker import Launch, Worker, use_loopback
from minivllm.runtime.sample_record import SampleLog, SampleRecord
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.transforms import Transform

if TYPE_CHECKING:
    import pandas as pd


def launch_from_environment(size: int, device: str) -> Launch:
    """What torchrun, or another launcher, tells this process by its environment.

    Args:
        size: ranks that the engine's settings ask for.
        device: `cpu` or `cuda`.

    Raises:
        ValueError: a variable is missing, or there are more or fewer processes than ranks.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"distributed_executor_backend='external_launcher' needs {missing[0]} in the environment: start the program with torchrun"
        )
    rank, world, local = (int(os.environ[name]) for name in names[:3])
    if world != size:
        raise ValueError(
            f"{world} processes were launched, but tensor_parallel_size x pipeline_parallel_size is {size}"
        )
    if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
        use_loopback()
    return Launch(rank, size, device, "", gpu=local, address="env://")


def same_everywhere(what: str, value: Any) -> None:
    """Raises ValueError on every rank if a value differs between them."""
    digest = sha256(repr(value).encode()).hexdigest()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest)
    if len(set(found)) > 1:
        raise ValueError(
            f"{what} must be the same in all processes; ranks that agree: {[found.index(d) for d in found]}"
        )


class ExternalExecutor(Executor):
    """Runs one rank of a model in this process. A process group that the program has made is used, and left.

    Args:
        transforms, grammar: see `make_executor`.

    Raises:
        ValueError: see `launch_from_environment`; or the processes were given different settings.
    """

    in_step = True

    def __init__(
        self, plan: EnginePlan, transforms: Sequence[Transform] = (), grammar: GrammarCompiler | None = None
    ) -> None:
        size = plan.config.args.world_size
        self._own = not dist.is_initialized() and size > 1
        self.worker = Worker(launch_from_environment(size, plan.config.device))
        self._log: SampleLog | None = None
        self._sampled: list[tuple[int, dict[str, list[int]]]] = []
        try:
            self.config = self._load(plan, size)
            self.worker.initialize(self.config, transforms, grammar)
        except BaseException:
            self.shutdown()
            raise

    def _load(self, plan: EnginePlan, size: int) -> EngineConfig:
        """Read the weights. Returns settings that suit the memory of all ranks."""
        if size > 1:
            same_everywhere("engine arguments", plan.config.args)
        measured = self.worker.load_model(plan.config, plan.machine)
        if size > 1:
            found: list[Any] = [None] * size
            dist.all_gather_object(found, measured)
            measured = None if None in found else min(found)
        return with_memory(plan, measured).config

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        args = self.config.args
        result, samples = self.worker.execute_model(output, self._sampled)
        # each rank measures for itself how many drafts pay: one decides for all
        if args.pipeline_parallel_size > 1 or args.speculative is not None:
            box = [(result, samples)]
            dist.broadcast_object_list(box, src=args.world_size - args.tensor_parallel_size)
            result, samples = box[0]
            self._sampled = [(output.step, dict(result.sampled_token_ids))]
        if self._log is not None:
            self._log |= samples
        return result

    def submit(self, output: SchedulerOutput) -> PendingStep:
        done: Future[ModelRunnerOutput] = Future()
        done.set_result(self.execute_model(output))
        return done

    def keep_samples(self, log: SampleLog | None) -> None:
        self._log = log
        self.worker.keep_samples(log is not None)

    def explain(self, record: SampleRecord, tokenizer: Any = None, top: int = 5) -> "pd.DataFrame":
        return self.worker.explain(record, tokenizer is not None, top)

    def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Future[list[Any]]":
        """On this process's rank alone."""
        return one_rank(self.worker.call(method, args, kwargs))

    def shutdown(self) -> None:
        if self.worker.runner is not None:
            self.worker.unload()
        if self._own and dist.is_initialized():
            dist.destroy_process_group()
        self._own = False
