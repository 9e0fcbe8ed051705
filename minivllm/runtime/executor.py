"""Executor: loads the model, sizes the KV cache, runs scheduler outputs."""

# Generated from nbs/runtime/executor.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from minivllm.attention.backend import FP8, AttentionBackend, AttentionSpec
from minivllm.attention.numba_cuda import NumbaCudaBackend, compile_attention, cuda_ops, start_compilers
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
from minivllm.models.fallback import TransformersDecoder, TransformersSpec
from minivllm.models.linear.choose import explain_linear_method
from minivllm.models.loading import LoadedModel, load_model
from minivllm.models.mixers.moe import MoESpec
from minivllm.models.parallel import Share, Stage, TensorGroup
from minivllm.models.pooling import pooling_facts
from minivllm.models.tokenizer import get_tokenizer
from minivllm.multimodal.encoder import TowerEncoder, load_encoder
from minivllm.runtime.machine import (
    choose_device,
    choose_sums,
    cpu_quota,
    has_native_bf16,
    keep_freed_memory,
    limit_threads,
    machine_facts,
    settle_vector_math,
    torch_device,
)
from minivllm.runtime.model_runner import GRAPH_BYTES, ModelRunner
from minivllm.runtime.peak_memory import peak_bytes, rehearse
from minivllm.runtime.sample_record import SampleLog, SampleRecord
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.transforms import Transform
from minivllm.spec_decode.draft_model import with_drafter

if TYPE_CHECKING:
    import pandas as pd


class PendingStep(Protocol):
    """A step that has begun."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises what it raised."""
        ...


class Executor(ABC):
    """Executes what the scheduler decides. A subclass says with `_call` how a method of its ranks is called.

    Attributes:
        config: the settings that it runs with.
        is_remote: requests must be able to cross to other processes.
        in_step: other processes must decide the same.
    """

    config: EngineConfig
    is_remote = in_step = False

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """The cache that it has allocated."""
        return self.config.kv_cache

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one step and return what was sampled. Called once for every decision, in order."""

    @abstractmethod
    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Begin one step; its result may be asked for after the next was submitted. Instead of `execute_model`."""

    @abstractmethod
    def keep_samples(self, log: SampleLog | None) -> None:
        """Put what the sampler sees into `log` from now on; None to stop."""

    @abstractmethod
    def explain(self, record: SampleRecord, tokenizer: Any = None, top: int = 5) -> "pd.DataFrame":
        """How a recorded token was chosen, stage by stage: see `Sampler.explain`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give memory and processes back; no call may follow."""

    @abstractmethod
    def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Future[list[Any]]":
        """The results of all ranks."""

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a method of every rank's model runner; the results, in the order of ranks. A method that returns a future is waited for.

        Args:
            timeout: seconds to wait; None for no limit.
            args, kwargs: the method's arguments.
            non_block: return a future of the results.

        Raises:
            TimeoutError, or what the method raises.
        """
        future = self._call(method, args, kwargs or {})
        return future if non_block else future.result(timeout)

    def check_health(self) -> None:
        """Raises what the executor has failed with, if it has. Here there is nothing that could fail by itself."""

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Have a function called, in some thread, should the executor fail by itself."""

    def can_draft_ahead(self, recorded: bool) -> bool:
        """Whether a device can make the next step's drafts before the host knows the last tokens. recorded: see `SchedulerOutput`."""
        return False


@dataclass(frozen=True)
class EnginePlan:
    """The checked decisions on what is going to be loaded. ``decoder``: the model, if it has been loaded already."""

    config: EngineConfig
    model: LoadedModel
    backend: AttentionBackend
    machine: MachineFacts
    decoder: Decoder | None = None


def _kv_dtype(args: EngineArgs) -> torch.dtype | None:
    return {"auto": None, "int8_per_token_head": torch.int8}.get(args.kv_cache_dtype, FP8)


def read_model(args: EngineArgs) -> LoadedModel:
    """Find the model, and read everything but its weights."""
    return load_model(
        args.model,
        load_format=args.load_format,
        download_dir=args.download_dir,
        revision=args.revision,
        hf_overrides=args.hf_overrides,
        seed=args.seed,
        model_impl=args.model_impl,
    )


def load_tokenizer(config: EngineConfig, eos_token_ids: Sequence[int]) -> tuple[Any, GrammarCompiler | None]:
    """The tokenizer and what compiles grammars with it; None for both with ``skip_tokenizer_init``.

    ``eos_token_ids``: the model's, besides the tokenizer's own. Raises ValueError if there is no tokenizer.
    """
    args = config.args
    if args.skip_tokenizer_init:
        return None, None
    tokenizer = get_tokenizer(args.tokenizer or config.model.path, args.download_dir)
    ends = dict.fromkeys([tokenizer.eos_token_id, *eos_token_ids])
    return tokenizer, GrammarCompiler(tokenizer, config.model.vocab_size, [i for i in ends if i is not None])


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
    if device == "cuda" and args.executor == "uni":
        start_compilers(args.attention_backend)
    limit_threads(cpu_quota())
    settle_vector_math()
    dtype = choose_dtype(args.dtype, loaded.checkpoint_dtype, device, has_native_bf16(device))
    share = None if args.tensor_parallel_size == 1 else Share(0, args.tensor_parallel_size, *args.expert_sharing)
    if args.world_size > 1 and (loaded.spec.whole_prompts or loaded.spec.pooler is not None):
        raise ValueError(
            f"{loaded.spec.family}: encoders and classifiers are implemented for one rank, not for {args.world_size}"
        )
    if args.enable_expert_parallel and not any(isinstance(layer.mlp, MoESpec) for layer in loaded.spec.layers):
        raise ValueError(f"enable_expert_parallel needs a mixture of experts, and {loaded.name!r} has none")
    if loaded.spec.whole_prompts and args.dtype == "auto" and loaded.checkpoint_dtype == "float32":
        dtype = Decision("dtype", "float32", "the checkpoint's own: vectors are compared with others'")
    facts = loaded.facts(
        args.block_size, dtype.value, args.linear_kernel, args.kv_cache_dtype, share, args.pipeline_parallel_size
    )
    facts = with_pooling(facts, loaded, args)
    block_size = unify_block_size(facts.kv_specs, args.block_size)
    specs = loaded.spec.attention_specs(block_size, getattr(torch, dtype.value), _kv_dtype(args), share)
    backend, why = select_backend(args.attention_backend, backend_needs(specs), torch.device(device))
    about = getattr(torch, dtype.value), torch.device(device), backend.batch_invariant
    linear = explain_linear_method(args.linear_kernel, backend.linear_method, *about, loaded.quantization)
    facts = with_drafter(facts, args, loaded, dtype.value)
    machine = machine_facts(device, (backend.name, why), linear, choose_sums(device, args))
    return EnginePlan(resolve(args, facts, machine, dtype), loaded, backend, machine)


def load_decoder(plan: EnginePlan, group: TensorGroup | None = None, stage: Stage | None = None) -> Decoder:
    """Build the model, or what one rank of a group or a pipeline stage holds of it, and read its weights."""
    dtype, device = getattr(torch, plan.config.dtype), torch_device(plan.config.device)
    method, kv_dtype = plan.machine.linear_kernel, _kv_dtype(plan.config.args)
    longest = plan.config.scheduler.max_model_len
    if isinstance(plan.model.spec, TransformersSpec):
        return _load_transformers(plan, plan.model.spec)
    alone = group is None and (stage is None or (stage.is_first and stage.is_last))
    compiles = alone and isinstance(plan.backend, NumbaCudaBackend)
    if compiles:  # attention first: nothing takes longer
        specs = plan.model.spec.attention_specs(plan.config.kv_cache.block_size, dtype, kv_dtype)
        compile_attention([spec for spec in specs if isinstance(spec, AttentionSpec)], device)
    decoder = Decoder(plan.model.spec, plan.backend, dtype, device, method, kv_dtype, longest, group, stage)
    # the kernels of a weight that is stored quantized depend on its numbers, which may differ from layer to layer
    stored = bool(plan.model.quantization)
    early = method == "gemv" and not stored
    kernels = rehearse(decoder, plan.config.kv_cache, plan.config.scheduler) if compiles and early else []
    decoder.load_weights(plan.model.weights(plan.config.dtype, device))
    if compiles and not early:
        kernels = rehearse(decoder, plan.config.kv_cache, plan.config.scheduler, every_layer=stored)
    if kernels:
        cuda_ops().load_rehearsed(kernels, device)
    if (args := plan.config.args).enable_lora:
        LoRAModel(decoder, args.max_loras, args.max_lora_rank, plan.config.scheduler.max_num_batched_tokens)
    return decoder


def _load_transformers(plan: EnginePlan, spec: TransformersSpec) -> Decoder:
    """A model that transformers computes. Raises ValueError for what changes linear layers, which are not ours there."""
    args = plan.config.args
    refused = ("quantization", args.quantization), ("enable_lora", args.enable_lora), (
        "tensor_parallel_size or pipeline_parallel_size", args.world_size > 1
    )  # fmt: skip
    if what := next((name for name, given in refused if given), None):
        raise ValueError(f"{what} is not implemented for {spec.family}, which runs through transformers")
    dtype, device = getattr(torch, plan.config.dtype), torch_device(plan.config.device)
    decoder = TransformersDecoder(spec, plan.backend, dtype, device, _kv_dtype(args))
    if plan.model.load_format == "dummy":
        decoder.load_weights(plan.model.weights(plan.config.dtype))
    else:
        decoder.load_folder(str(plan.model.path))
    return decoder


def make_encoder(plan: EnginePlan) -> TowerEncoder | None:
    """The encoder of the model, with its weights; None for a model of text alone."""
    if (media := plan.model.spec.media) is None:
        return None
    return load_encoder(plan.model, media, getattr(torch, plan.config.dtype), torch_device(plan.config.device))


def measure_memory(plan: EnginePlan, decoder: Decoder) -> tuple[int, int] | None:
    """Bytes of a GPU that a loaded model and its largest step leave for the KV cache, and bytes that this step takes.

    None if there is nothing to measure: on a CPU, or if the user says how large the cache is.
    """
    args, config = plan.config.args, plan.config
    if config.device == "cpu" or args.num_gpu_blocks is not None or args.kv_cache_memory_bytes is not None:
        return None
    peak = peak_bytes(decoder, config.kv_cache, config.scheduler, config.speculative)
    graphs = 0 if args.enforce_eager else GRAPH_BYTES
    free, _ = torch.cuda.mem_get_info()
    # `resolve` subtracts the weights, but they are loaded already
    return free - peak - graphs + config.model.weight_bytes, peak


def with_memory(plan: EnginePlan, measured: tuple[int, int] | None) -> EnginePlan:
    """The plan with a KV cache for what `measure_memory` found.

    Raises:
        ValueError: nothing is left; says what to change.
    """
    if measured is None:
        return plan
    config, (left, peak) = plan.config, measured
    graphs = 0 if config.args.enforce_eager else GRAPH_BYTES
    dtype = next(d for d in config.decisions if d.setting == "dtype")
    fitted = resolve(config.args, config.model, replace(plan.machine, free_memory_bytes=left), dtype)
    decision = Decision("peak_memory_bytes", peak, f"the largest step, measured; CUDA graphs may take {graphs:,} more")
    return replace(plan, config=replace(fitted, decisions=(*fitted.decisions, decision)))


def fit_memory(plan: EnginePlan) -> EnginePlan:
    """Load the model. On a GPU, also measure what its largest step takes, and give the KV cache what is left of
    `gpu_memory_utilization`, unless the user says how large the cache is.

    Raises:
        ValueError: nothing is left; says what to change.
    """
    decoder = load_decoder(plan)
    return replace(with_memory(plan, measure_memory(plan, decoder)), decoder=decoder)


class UniProcExecutor(Executor):
    """Runs the model in the engine's own process. Submitted steps run on a GPU by themselves, on a CPU in a thread."""

    def __init__(
        self, plan: EnginePlan, transforms: Sequence[Transform] = (), grammar: GrammarCompiler | None = None
    ) -> None:
        self.config = plan.config
        decoder = plan.decoder or load_decoder(plan)
        keep_freed_memory()  # not before the weights are loaded
        self._runner: ModelRunner | None = ModelRunner(
            decoder, plan.backend, plan.config, transforms, grammar, make_encoder(plan)
        )
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
        return runner.launch(output) if runner.buffer is not None else self._thread.submit(runner.execute_model, output)

    def keep_samples(self, log: SampleLog | None) -> None:
        if self._runner is not None:
            self._runner.sample_log = log

    def explain(self, record: SampleRecord, tokenizer: Any = None, top: int = 5) -> "pd.DataFrame":
        return record.explain(self.runner.sampler, self.runner.grammar, tokenizer, top)

    def _call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Future[list[Any]]":
        return one_rank(find_method(method, self.runner)(*args, **kwargs))

    def can_draft_ahead(self, recorded: bool) -> bool:
        return self.runner.can_draft_ahead(recorded)

    def shutdown(self) -> None:
        self._thread.shutdown()
        if self._runner is not None and self._runner.adapters is not None:
            self._runner.adapters.close()
        self._runner = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def find_method(name: str, *holders: Any) -> Callable[..., Any]:
    """The method of the first of `holders` that has it. Raises ValueError if none has."""
    for holder in holders:
        if hasattr(holder, name):
            found: Callable[..., Any] = getattr(holder, name)
            return found
    raise ValueError(f"collective_rpc({name!r}): {type(holders[-1]).__name__!r} object has no attribute {name!r}")


def one_rank(result: Any) -> "Future[list[Any]]":
    """What the only rank of a call has returned, or will return, as a list of one."""
    future: Future[list[Any]] = Future()
    if isinstance(result, Future):
        result.add_done_callback(functools.partial(_pass_on, future))
    else:
        future.set_result([result])
    return future


def _pass_on(future: "Future[list[Any]]", done: "Future[Any]") -> None:
    if (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result([done.result()])
