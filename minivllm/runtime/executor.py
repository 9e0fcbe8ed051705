"""Executor: loads the model, sizes the KV cache, runs scheduler outputs."""

# Generated from nbs/runtime/executor.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import gc
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from minivllm.attention.backend import FP8, AttentionBackend
from minivllm.attention.select import select_backend
from minivllm.attention.state import backend_needs
from minivllm.core.config import (
    Decision,
    EngineArgs,
    EngineConfig,
    KVCacheConfig,
    MachineFacts,
    ModelFacts,
    choose_dtype,
    resolve,
    unify_block_size,
)
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.lora.linear import LoRAModel
from minivllm.models.decoder import Decoder
from minivllm.models.linear.choose import explain_linear_method
from minivllm.models.loading import LoadedModel, load_model
from minivllm.models.pooling import pooling_facts
from minivllm.runtime.machine import (
    choose_device,
    cpu_quota,
    has_native_bf16,
    limit_threads,
    machine_facts,
    settle_vector_math,
)
from minivllm.runtime.model_runner import GRAPH_BYTES, ModelRunner
from minivllm.runtime.peak_memory import peak_bytes
from minivllm.runtime.sample_record import SampleLog, SampleRecord
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.transforms import Transform
from minivllm.spec_decode.draft_model import with_drafter

__all__ = [
    "EnginePlan", "Executor", "ExecutorMaker", "PendingStep", "UniProcExecutor", "fit_memory", "load_decoder",
    "make_executor", "plan_engine", "read_model", "register_executor", "with_pooling",
]  # fmt: skip

if TYPE_CHECKING:
    import pandas as pd


class PendingStep(Protocol):
    """A step that has begun."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises what it raised."""
        ...


class Executor(Protocol):
    """Executes what the scheduler decides."""

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The cache that it has allocated."""
        ...

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one step and return what was sampled. Called once for every decision, in order."""
        ...

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Begin one step; its result may be asked for after the next was submitted. Instead of `execute_model`."""
        ...

    def keep_samples(self, log: SampleLog | None) -> None:
        """Put what the sampler sees into `log` from now on; None to stop."""
        ...

    def explain(self, record: SampleRecord, tokenizer: Any = None, top: int = 5) -> "pd.DataFrame":
        """How a recorded token was chosen, stage by stage: see `Sampler.explain`."""
        ...

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the model runner of every worker, and return their results."""
        ...

    def shutdown(self) -> None:
        """Give memory and processes back; no call may follow."""
        ...


@dataclass(frozen=True)
class EnginePlan:
    """What is going to be loaded, decided and checked. ``decoder``: the model, if it has been loaded already."""

    config: EngineConfig
    model: LoadedModel
    backend: AttentionBackend
    machine: MachineFacts
    decoder: Decoder | None = None


def _kv_dtype(args: EngineArgs) -> torch.dtype | None:
    return FP8 if args.fp8_kv_cache else None


def read_model(args: EngineArgs) -> LoadedModel:
    """Find the model, and read everything but its weights."""
    return load_model(
        args.model,
        load_format=args.load_format,
        download_dir=args.download_dir,
        revision=args.revision,
        hf_overrides=args.hf_overrides,
        seed=args.seed,
    )


def with_pooling(facts: ModelFacts, loaded: LoadedModel, args: EngineArgs) -> ModelFacts:
    """The facts with what the model makes of a whole prompt, and the longest that it was trained for."""
    spec, longest = loaded.spec, facts.max_position_embeddings
    pooling, limit = pooling_facts(spec.pooler, loaded.hf_config, loaded.path, args.runner, args.pooler_config)
    pooling = replace(pooling, token_types=spec.token_types, whole_prompts=spec.whole_prompts)
    return replace(facts, pooling=pooling, max_position_embeddings=min(longest, limit or longest))


def plan_engine(args: EngineArgs) -> EnginePlan:
    """Find the model, look at the machine, and decide.

    Raises:
        ValueError: an unknown model, an architecture that is not implemented, or a setting out of range; names it.
    """
    loaded = read_model(args)
    device = choose_device(args.device)
    limit_threads(cpu_quota())
    settle_vector_math()
    dtype = choose_dtype(args.dtype, loaded.checkpoint_dtype, device, has_native_bf16(device))
    if loaded.spec.whole_prompts and args.dtype == "auto" and loaded.checkpoint_dtype == "float32":
        dtype = Decision("dtype", "float32", "the checkpoint's own: vectors are compared with others'")
    facts = loaded.facts(args.block_size, dtype.value, args.linear_kernel, args.fp8_kv_cache)
    facts = with_pooling(facts, loaded, args)
    block_size = unify_block_size(facts.kv_specs, args.block_size)
    specs = loaded.spec.attention_specs(block_size, getattr(torch, dtype.value), _kv_dtype(args))
    backend, why = select_backend(args.attention_backend, backend_needs(specs), torch.device(device))
    about = getattr(torch, dtype.value), torch.device(device), backend.batch_invariant
    linear = explain_linear_method(args.linear_kernel, backend.linear_method, *about, loaded.quantization)
    facts = with_drafter(facts, args, loaded, dtype.value)
    machine = machine_facts(device, (backend.name, why), linear)
    return EnginePlan(resolve(args, facts, machine, dtype), loaded, backend, machine)


def load_decoder(plan: EnginePlan) -> Decoder:
    """Build the model and read its weights."""
    dtype, device = getattr(torch, plan.config.dtype), torch.device(plan.config.device)
    method, kv_dtype = plan.machine.linear_kernel, _kv_dtype(plan.config.args)
    longest = plan.config.scheduler.max_model_len
    decoder = Decoder(plan.model.spec, plan.backend, dtype, device, method, kv_dtype, longest)
    decoder.load_weights(plan.model.weights(plan.config.dtype))
    if (args := plan.config.args).enable_lora:
        LoRAModel(decoder, args.max_loras, args.max_lora_rank, plan.config.scheduler.max_num_batched_tokens)
    return decoder


def fit_memory(plan: EnginePlan) -> EnginePlan:
    """On a GPU, load the model, measure what its largest step takes, and give the KV cache what is left of
    `gpu_memory_utilization`. Elsewhere, or if the user says how large the cache is, the plan as it came.

    Raises:
        ValueError: nothing is left; says what to change.
    """
    args, config = plan.config.args, plan.config
    if config.device == "cpu" or args.num_gpu_blocks is not None or args.kv_cache_memory_bytes is not None:
        return plan
    decoder = load_decoder(plan)
    peak = peak_bytes(decoder, config.kv_cache, config.scheduler, config.speculative)
    graphs = 0 if args.enforce_eager else GRAPH_BYTES
    free, _ = torch.cuda.mem_get_info()
    left = free - peak - graphs + config.model.weight_bytes  # which `resolve` takes off, but they are loaded already
    dtype = next(d for d in config.decisions if d.setting == "dtype")
    measured = resolve(args, config.model, replace(plan.machine, free_memory_bytes=left), dtype)
    decision = Decision("peak_memory_bytes", peak, f"the largest step, measured; CUDA graphs may take {graphs:,} more")
    return replace(plan, config=replace(measured, decisions=(*measured.decisions, decision)), decoder=decoder)


class UniProcExecutor:
    """Runs the model in the engine's own process. Submitted steps run on a GPU by themselves, on a CPU in a thread."""

    def __init__(
        self, plan: EnginePlan, transforms: Sequence[Transform] = (), grammar: GrammarCompiler | None = None
    ) -> None:
        self.kv_cache_config = plan.config.kv_cache
        decoder = plan.decoder or load_decoder(plan)
        self._runner: ModelRunner | None = ModelRunner(decoder, plan.backend, plan.config, transforms, grammar)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minivllm-runner")  # starts with the first submission
        self._process = os.getpid()

    @property
    def runner(self) -> ModelRunner:
        """Raises RuntimeError after `shutdown`, and in a forked child, where torch's threads do not exist and a step would wait for ever."""
        if self._runner is None:
            raise RuntimeError("this engine was closed: its executor was shut down")
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine was made in process {self._process}, and a forked child cannot run it (torch's threads are not"
                " copied): make the engine in the child, or start the child with multiprocessing's 'spawn'"
            )
        return self._runner

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute_model(output)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        runner = self.runner
        return runner.launch(output) if runner.future is not None else self._thread.submit(runner.execute_model, output)

    def keep_samples(self, log: SampleLog | None) -> None:
        if self._runner is not None:
            self._runner.sample_log = log

    def explain(self, record: SampleRecord, tokenizer: Any = None, top: int = 5) -> "pd.DataFrame":
        return record.explain(self.runner.sampler, self.runner.grammar, tokenizer, top)

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.runner, method)(*args)]

    def shutdown(self) -> None:
        self._thread.shutdown()
        if self._runner is not None and self._runner.adapters is not None:
            self._runner.adapters.close()
        self._runner = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


ExecutorMaker = Callable[[EnginePlan, Sequence[Transform], GrammarCompiler | None], Executor]
_EXECUTORS: dict[str, ExecutorMaker] = {"uniproc": UniProcExecutor}


def register_executor(name: str, make: ExecutorMaker) -> None:
    """Let `distributed_executor_backend` name an executor. `make`: its class, or a function of a plan, transforms and a grammar.

    Raises:
        ValueError: the name is taken.
    """
    if name in _EXECUTORS or name in _LATER:
        raise ValueError(f"executor {name!r} exists already")
    _EXECUTORS[name] = make


_LATER = ("mp", "ray", "external_launcher")


def make_executor(
    kind: str, plan: EnginePlan, transforms: Sequence[Transform] = (), grammar: GrammarCompiler | None = None
) -> Executor:
    """The executor of this name, with the model loaded.

    ``transforms``: of the logits of every request. ``grammar``: for structured outputs.

    Raises:
        NotImplementedError: a name that vLLM knows and this package does not (yet). ValueError: any other name.
    """
    if kind in _LATER:
        raise NotImplementedError(f"distributed_executor_backend={kind!r} is not implemented; 'uniproc' is")
    if kind not in _EXECUTORS:
        raise ValueError(f"distributed_executor_backend must be one of {', '.join(_EXECUTORS)}; got {kind!r}")
    return _EXECUTORS[kind](plan, transforms, grammar)
