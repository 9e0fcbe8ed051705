"""LLMEngine: synchronous engine, one step at a time."""

# Generated from nbs/engine/llm_engine.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack

from minivllm.attention.select import make_backend
from minivllm.core.config import EngineArgs, EngineConfig
from minivllm.core.output import NewRequestData, SchedulerOutput
from minivllm.core.policy import Policy
from minivllm.core.scheduler import Clock, Preemption, Swap, WallClock
from minivllm.core.trace import Trace
from minivllm.engine.core import EngineCore
from minivllm.engine.input_processor import InputProcessor, ProcessedInput, PromptType, RequestOptions
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.outputs import RequestOutput
from minivllm.lora.adapter import AdapterError, LoRARequest
from minivllm.lora.store import AdapterRegistry, RegisteredAdapter
from minivllm.models.spec import DecoderSpec
from minivllm.models.tokenizer import find_tokenizer
from minivllm.multimodal.processor import MediaProcessor
from minivllm.runtime.executor import Executor, load_tokenizer, plan_engine
from minivllm.runtime.executors.select import load_first, make_executor
from minivllm.runtime.machine import freeze_gc_heap
from minivllm.runtime.weights import Function, Weights
from minivllm.sampling.params import InvalidParameter, SamplingParams
from minivllm.sampling.pooling import PoolingParams
from minivllm.sampling.transforms import Transform

__all__ = ["PROMPT", "STEPS", "EngineControls", "LLMEngine", "rehearsal", "warm_up"]

if TYPE_CHECKING:
    import pandas as pd


logger = logging.getLogger("minivllm.engine")
# Fields of a model's generation config, and the names that SamplingParams has for them.
FROM_GENERATION_CONFIG = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
FROM_GENERATION_CONFIG["max_new_tokens"] = "max_tokens"


class EngineControls:
    """Calls that `LLMEngine` and `LLM` pass on to the engine core, between two steps."""

    core: EngineCore

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `EngineCore.reset_prefix_cache`."""
        return self.core.reset_prefix_cache(reset_running_requests)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: see `EngineCore.sleep`. Requests that are added meanwhile wait.

        Args:
            level: 1 keeps the weights, 2 drops them: then `load_weights` must follow.
            mode: "abort" unfinished requests, or "keep" them.
        """
        self.core.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: see `EngineCore.wake_up`. tags: "weights", "kv_cache", or both; None for both."""
        self.core.wake_up([tags] if isinstance(tags, str) else tags)

    def is_sleeping(self) -> bool:
        """Whether memory is missing, so that no step can run."""
        return self.core.is_sleeping()

    def load_weights(self, weights: Weights = None, version: int | None = None, mode: str = "keep") -> int:
        """Change all weights: see `EngineCore.load_weights`. Returns the version, which outputs have as `weight_version`.

        Args:
            weights: a model by its name or folder, a folder of safetensors, pairs (name in the checkpoint, tensor), or None for
                the checkpoint that the engine was made of.
            version: None for the last one + 1.
            mode: "keep" unfinished requests, which compute all their tokens again, or "abort" them.
        """
        return self.core.load_weights(weights, version, mode)

    @property
    def weight_version(self) -> int:
        """0 for the checkpoint that the engine was made of; see `load_weights`."""
        return int(self.core.get_stats().get("weight_version", 0))

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every rank's model runner: see `Executor.collective_rpc`."""
        return self.core.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, function: Function) -> list[Any]:
        """Call a function with every rank's model (a `Decoder`); returns the results: see `EngineCore.apply_model`."""
        return self.core.apply_model(function)

    def set_policy(self, policy: Policy) -> None:
        """Use another scheduling policy from the next step on."""
        self.core.scheduler.set_policy(policy)


class LLMEngine(EngineControls):
    """Requests in, outputs out, one step at a time. Make one with `from_engine_args`.

    ``tokenizer`` may be None: then prompts are token ids and ``detokenize=False``.
    """

    def __init__(
        self, config: EngineConfig, core: EngineCore, tokenizer: Any, generation_config: dict[str, Any] | None = None
    ) -> None:
        self.config, self.core, self.tokenizer = config, core, tokenizer
        self.generation_config = generation_config or {}
        self.default_sampling_params = {} if config.args.generation_config == "vllm" else self._defaults()
        self.clock = core.clock
        self.input_processor = InputProcessor(config, tokenizer, self.generation_config)
        self.output_processor = OutputProcessor(tokenizer)
        self.num_generation_tokens = 0
        self._prompt_tokens = Counter[int]()  # by engine
        self._told_about_seeds = self._closed = False

    @classmethod
    def from_engine_args(
        cls,
        args: EngineArgs,
        *,
        policy: Policy | None = None,
        preemption: Preemption | None = None,
        logits_processors: Sequence[Transform] = (),
        clock: Clock | None = None,
    ) -> Self:
        """Find and load the model, and build everything around it.

        ``preemption``: `Recompute()` or `Swap(num_cpu_blocks)`; it overrides ``args.preemption_mode``.
        ``logits_processors``: transforms of the whole batch's logits, besides those of single requests.
        Raises ValueError for an unknown model or a setting out of range.
        """
        if args.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size={args.data_parallel_size}: one LLMEngine is one replica; minivllm serve, or"
                ' AsyncLLM.from_engine_args(args, engine_in="process"), has several'
            )
        if isinstance(preemption, Swap):
            args = replace(args, num_cpu_blocks=preemption.num_cpu_blocks, preemption_mode="swap")
        plan = plan_engine(args)
        if not args.skip_tokenizer_init:  # a missing tokenizer is reported before the weights are read
            find_tokenizer(args.tokenizer or plan.config.model.path, args.download_dir)
        with ThreadPoolExecutor(1, thread_name_prefix="minivllm-tokenizer") as reader:  # while the model loads
            reading = reader.submit(load_tokenizer, plan.config, plan.model.eos_token_ids)
            plan = load_first(plan)
            tokenizer, grammar = reading.result()
        freeze_gc_heap()
        executor = make_executor(plan, logits_processors, grammar)
        config = executor.config
        core = EngineCore(
            config, executor, policy=policy, preemption=preemption, clock=clock or WallClock(), grammar=grammar
        )
        engine = cls(config, core, tokenizer, plan.model.generation_config)
        engine.input_processor.transforms_read_extra_args = bool(logits_processors)
        engine.know_adapters(plan.model.spec)
        engine.know_media(plan.model.spec)
        return engine

    def know_adapters(self, spec: DecoderSpec) -> None:
        """Let requests bring adapters for the model that the spec describes, if ``enable_lora`` is on."""
        if self.config.args.enable_lora:
            self.input_processor.adapters = AdapterRegistry(spec, self.config.args.max_lora_rank)

    def know_media(self, spec: DecoderSpec) -> None:
        """Let requests bring pictures or clips, if the model that the spec describes reads them."""
        if spec.media is not None:
            args, model = self.config.args, self.config.model
            limits, size = args.limit_mm_per_prompt, int(args.mm_processor_cache_gb * (1 << 30))
            about = spec.media, self.tokenizer, model.hidden_size
            self.input_processor.media = MediaProcessor(model.path, *about, limits, size, args.enable_mm_embeds)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter and read it into main memory; True, as in vLLM. Raises ValueError if it cannot be used."""
        adapter = self.input_processor.register(lora_request)
        self.prefetch_lora(adapter)
        while not self.is_lora_read(adapter):
            time.sleep(0.002)
        return True

    def prefetch_lora(self, adapter: RegisteredAdapter) -> None:
        self.core.prefetch_lora(adapter.key, adapter.request.lora_path, adapter.digest)

    def is_lora_read(self, adapter: RegisteredAdapter) -> bool:
        """Whether an adapter is in main memory now. Forgets one that cannot be read, and raises AdapterError."""
        try:
            return self.core.is_lora_read(adapter.key)
        except AdapterError:
            self.remove_lora(adapter.request.lora_int_id)
            raise

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, by its `lora_int_id`. Requests that have it go on. Returns whether it was known."""
        adapters = self.input_processor.adapters
        known = None if adapters is None else adapters.by_id(lora_id)
        if adapters is None or known is None:
            return False
        self.core.unpin_lora(known.key)
        return adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The `lora_int_id` of each adapter that is known."""
        adapters = self.input_processor.adapters
        return set() if adapters is None else adapters.ids()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in its slot once it has one.

        Raises:
            ValueError: no such adapter, or no slot would be left for the others.
        """
        known = self.input_processor.adapters and self.input_processor.adapters.by_id(lora_id)
        if not known:
            raise ValueError(f"pin_lora: no adapter has lora_int_id {lora_id!r}; known: {sorted(self.list_loras())}")
        self.core.pin_lora(known.key)
        return True

    def _defaults(self) -> dict[str, Any]:
        """The fields of SamplingParams that the model's generation config sets. An error in it is the model's fault, not a request's."""
        fields: dict[str, Any] = {}
        for theirs, ours in FROM_GENERATION_CONFIG.items():
            value = self.generation_config.get(theirs)
            if value is None:
                continue
            try:
                SamplingParams(**{ours: value})
            except InvalidParameter as error:
                file = f"{self.config.model.path}/generation_config.json"
                raise ValueError(f"{file}: {theirs} must be {error.allowed}; it is {value!r}") from error
            fields[ours] = value
        return fields

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Queue a request; it arrives now unless the options say when.

        Raises:
            TypeError, ValueError: a bad prompt, parameter or id; says what is allowed. Other requests are not touched.
        """
        self.add_processed(request_id, self.process(request_id, prompt, params, **options))

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        completed: dict[int, SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> ProcessedInput:
        """Check and tokenise a request without queueing it; see `InputProcessor.process`."""
        if self._closed:
            raise RuntimeError("this engine was closed")
        if isinstance(params, SamplingParams) and params.seed is not None and not params.is_greedy:
            self._tell_about_seeds()
        if options.get("arrival_time") is None:
            options["arrival_time"] = self.clock.now()
        return self.input_processor.process(request_id, prompt, params, completed=completed, **options)

    def add_processed(self, request_id: str, given: ProcessedInput) -> None:
        """Queue what `process` has checked. Raises ValueError if the id is in use, TypeError if it cannot cross to the engine's process."""
        children = {child.request_id: child.sampling_params for child in given.children}
        arrival = given.children[0].arrival_time
        self.output_processor.add_request(
            request_id, given.prompt, given.prompt_token_ids, given.params, children, arrival
        )
        try:
            if given.adapter is not None:
                self.prefetch_lora(given.adapter)
            for child in given.children:
                self.core.add_request(child)
        except Exception:
            self.abort_request([request_id])
            raise
        engine = self.output_processor.requests[request_id].engine = self.core.engine_of(next(iter(children)))
        self._prompt_tokens[engine] += len(given.prompt_token_ids)

    def _tell_about_seeds(self) -> None:
        """Say once that a seed alone does not fix the tokens, if the logits depend on what else is in the batch."""
        name = self.config.attention_backend
        if not self._told_about_seeds and not make_backend(name).batch_invariant:
            invariant = "numba_cuda_invariant" if self.config.device == "cuda" else "numba_cpu_invariant"
            logger.info(
                "a seeded request gets the same random numbers in any batch, but with attention_backend=%r its logits are rounded"
                " by what else is in the batch, and close choices may differ; attention_backend=%r gives the same tokens",
                name,
                invariant,
            )
        self._told_about_seeds = True

    def step(self) -> list[RequestOutput]:
        """Run one step; returns an output for each request that has news (with FINAL_ONLY: that has ended)."""
        if self._closed:
            raise RuntimeError("this engine was closed")
        core_outputs = self.core.step()
        self.num_generation_tokens += sum(len(output.new_token_ids) for output in core_outputs)
        processed = self.output_processor.process_outputs(core_outputs, self.clock.now())
        if processed.reqs_to_abort:
            self.core.abort(processed.reqs_to_abort)
        return processed.request_outputs

    def abort_request(self, request_ids: Sequence[str] | str) -> list[RequestOutput]:
        """End requests in any state; returns what they had, with the finish reason "abort". Unknown ids are passed over."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        outputs, core_ids = self.output_processor.abort_requests(ids, self.clock.now())
        self.core.abort(core_ids)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self.output_processor.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor.requests)

    def get_metrics(self) -> dict[str, float]:
        """Counters since the start, and gauges of this moment; the names are those of vLLM's metrics."""
        tokens = {"prompt_tokens": self._prompt_tokens.total(), "generation_tokens": self.num_generation_tokens}
        return self.core.get_stats() | tokens

    def get_engine_metrics(self) -> list[dict[str, float]]:
        """As `get_metrics`, for each engine of a data-parallel core; for another core, a list of one."""
        all_tokens = {
            "generation_tokens": self.num_generation_tokens
        }  # a data-parallel core has counted its engines' own
        stats = enumerate(self.core.engine_stats())
        return [all_tokens | one | {"prompt_tokens": self._prompt_tokens[i]} for i, one in stats]

    @contextmanager
    def record(self, samples: bool = False, ranks: bool = False) -> Iterator[Trace]:
        """``with engine.record() as trace:`` records what the scheduler does in the block.

        ``samples``: also keep the logits of every sampled token (a row of the vocabulary each), for `explain`, and the pictures of prompts.
        ``ranks``: also note when each rank computed and waited: see `Trace.ranks`.
        """
        media = self.input_processor.media if samples else None
        with self.core.record(samples, ranks) as trace:
            trace.tokenizer = self.tokenizer
            if media is not None:
                media.pictures = trace.pictures
            try:
                yield trace
            finally:
                if media is not None:
                    media.pictures = None

    def explain(self, trace: Trace, request_id: str, step: int, top: int = 5) -> "pd.DataFrame":
        """How the ``step``-th output token of a request (counted from 0) was chosen, stage by stage.

        Needs a trace recorded with ``samples=True``. For the columns see `Sampler.explain`.

        Raises:
            KeyError: the trace has no record of this token.
        """
        if (record := trace.samples.get((request_id, step))) is None:
            kept = sorted({name for name, _ in trace.samples})
            known = f"samples of {', '.join(kept[:5])}" if kept else "no samples; record with record(samples=True)"
            raise KeyError(f"output token {step} of request {request_id!r} is not in this trace: it has {known}")
        return self.core.executor.explain(record, self.tokenizer, top)

    def close(self) -> None:
        """End all requests and give the model's memory back; no call may follow. Closing twice is no error."""
        if not self._closed:
            self.abort_request(list(self.output_processor.requests))
            self._closed = True
            self.core.shutdown()


PROMPT, STEPS = 32, 3
"""Prompt tokens of each request, and how many tokens follow, if there is room for them."""

_PARAMS = (
    SamplingParams(temperature=0, seed=0),
    SamplingParams(temperature=1, top_k=50, top_p=0.9, min_p=0.01, seed=0),
)


def rehearsal(config: EngineConfig) -> Iterator[SchedulerOutput]:
    """Decisions about two made-up requests, one greedy and one not; none if the cache has no room for a single token."""
    cache, limits = config.kv_cache, config.scheduler
    count = min(len(_PARAMS), limits.max_num_seqs, limits.max_num_batched_tokens)
    room = (cache.num_blocks - 1) // (count * len(cache.groups)) * cache.block_size
    if config.model.pooling.whole_prompts:
        room = limits.max_model_len
    length = min(PROMPT, limits.max_num_batched_tokens // count, min(limits.max_model_len, room) - STEPS)
    if length < 1:
        return
    need = -(-(length + STEPS) // cache.block_size)
    prompt = [token % config.model.vocab_size for token in range(length)]
    block, new = 1, []  # block 0 is no request's
    pooling, hidden_size = config.model.pooling, config.model.hidden_size
    rehearsed = _PARAMS if pooling.generates else (PoolingParams().resolved(pooling, hidden_size),) * 2
    for i, params in enumerate(rehearsed[:count]):
        tables = [list(range(block + g * need, block + (g + 1) * need)) for g in range(len(cache.groups))]
        block += need * len(cache.groups)
        new.append(NewRequestData(f"warm-up-{i}", prompt, [], params, tuple(tables), 0, None))
    names = tuple(request.request_id for request in new)
    yield SchedulerOutput(0, dict.fromkeys(names, length), length * count, tuple(new))
    for step in range(1, STEPS + 1 if pooling.generates else 1):
        yield SchedulerOutput(step, dict.fromkeys(names, 1), count)
    yield SchedulerOutput(STEPS + 1, {}, 0, finished=names)


def warm_up(executor: Executor, config: EngineConfig) -> None:
    """Execute the rehearsal, on an executor that has done nothing else yet. Raises what the executor raises, RuntimeError if a request fails."""
    for output in rehearsal(config):
        if errors := executor.execute_model(output).errors:
            raise RuntimeError(f"the model fails at its first step: {next(iter(errors.values()))}")
