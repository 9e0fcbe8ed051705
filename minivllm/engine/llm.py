"""LLM: offline inference for lists of prompts."""

# Generated from nbs/engine/llm.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import itertools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tqdm.auto import tqdm

from minivllm.core.config import EngineArgs, EngineConfig
from minivllm.core.policy import Policy
from minivllm.core.scheduler import Preemption
from minivllm.core.trace import Trace
from minivllm.engine.beam_search import Beams, BeamSearchOutput, beam_search_output, num_candidates, search_beams
from minivllm.engine.input_processor import ProcessedInput, PromptType, parse_prompt
from minivllm.engine.llm_engine import EngineControls, LLMEngine
from minivllm.engine.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from minivllm.engine.pairs import make_pairs
from minivllm.lora.adapter import LoRARequest
from minivllm.models.tokenizer import apply_chat_template
from minivllm.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from minivllm.sampling.pooling import PoolingParams
from minivllm.sampling.transforms import Transform

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger("minivllm.engine")

T = TypeVar("T")
Message = dict[str, Any]
Prompts = PromptType | Sequence[PromptType]
Sampling = SamplingParams | Sequence[SamplingParams] | None
Pooling = PoolingParams | Sequence[PoolingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(EngineControls):
    """A language model that answers lists of prompts.

    ``model``: an alias such as "smollm2", a folder, a ``.gguf`` file or a hub id. ``policy``: a scheduling policy object.
    ``preemption``: `Recompute()` or `Swap(num_cpu_blocks)`. ``logits_processors``: transforms of the whole batch's logits,
    `transform(logits [rows, vocabulary], batch) -> logits`. All other keywords are the fields of `EngineArgs`, under vLLM's names.

    Raises:
        TypeError: an unknown keyword; names the nearest known one. ValueError: an unknown model, a value out of range.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        policy: Policy | None = None,
        preemption: Preemption | None = None,
        logits_processors: Sequence[Transform] = (),
        **engine_args: Any,
    ) -> None:
        options: dict[str, Any] = {"policy": policy, "preemption": preemption, "logits_processors": logits_processors}
        self._start(EngineArgs.from_kwargs(model=str(model), **engine_args), **options)

    def _start(self, args: EngineArgs, **options: Any) -> None:
        self._start_with(LLMEngine.from_engine_args(args, **options))

    def _start_with(self, engine: LLMEngine) -> None:
        self.llm_engine, self.core = engine, engine.core
        self._ids = itertools.count()

    @classmethod
    def from_engine_args(cls, args: EngineArgs, **options: Any) -> Self:
        """Like the constructor, from EngineArgs. ``options``: see `LLMEngine.from_engine_args`."""
        llm = cls.__new__(cls)
        llm._start(args, **options)
        return llm

    @property
    def config(self) -> EngineConfig:
        """Every setting; ``print(llm.config.explain())`` says where each came from."""
        return self.llm_engine.config

    @property
    def model_path(self) -> str:
        """The folder that the weights came from, in Hugging Face layout."""
        return self.config.model.path

    def get_tokenizer(self) -> Any:
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that are used if none are given: the model's generation config, or neutral with ``generation_config="vllm"``."""
        return SamplingParams(**self.llm_engine.default_sampling_params)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        user: Sequence[str | None] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the answers come in their order.

        ``prompts``: a text, a list of token ids, a dict (`{"prompt": ...}` or `{"prompt_token_ids": ...}`), or a list of these.
        ``sampling_params``: one for all, or one for each. ``priority``, ``user``: one for each prompt, for policies that ask.
        ``lora_request``: an adapter for all, or one for each (None: the base model); needs ``enable_lora=True``.
        A request that fails while it runs, such as one with a JSON schema that cannot be compiled, does not stop the others: a
        warning says so, its ``finish_reason`` is "error", and its ``error`` the reason.

        Raises:
            TypeError, ValueError: a bad prompt or parameter, found before anything runs.
            KeyboardInterrupt: the rest is aborted; the engine stays usable.
        """
        listed = _as_prompt_list(prompts)
        return self._run(self._process_all(listed, sampling_params, priority, user, lora_request), use_tqdm)

    def _process_all(
        self,
        prompts: Sequence[PromptType],
        sampling_params: Sampling | Pooling,
        priority: Sequence[int] | None = None,
        user: Sequence[str | None] | None = None,
        lora_request: Adapters = None,
    ) -> list[tuple[str, ProcessedInput]]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each("sampling_params", sampling_params, len(prompts), (SamplingParams, PoolingParams))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts), int)
        users = _one_each("user", user, len(prompts), (str, type(None)))
        loras = _one_each("lora_request", lora_request, len(prompts), LoRARequest)
        if self.llm_engine.is_sleeping():
            raise RuntimeError("this engine sleeps: call wake_up(), after sleep(level=2) load_weights() too")
        if self.llm_engine.has_unfinished_requests():
            raise RuntimeError(
                f"{self.llm_engine.get_num_unfinished_requests()} requests that were added to llm.llm_engine are unfinished:"
                " step them to their end or abort them first"
            )
        distinct = {id(given): given for given in params}  # usually one object for all prompts
        final = {key: it if isinstance(it, PoolingParams) else _final_only(it) for key, it in distinct.items()}
        checked, completed = [], dict[int, SamplingParams]()
        moment = self.llm_engine.clock.now()
        for i, prompt in enumerate(prompts):
            request_id = str(next(self._ids))
            try:
                about = {"priority": priorities[i], "user": users[i], "lora_request": loras[i], "arrival_time": moment}
                given = self.llm_engine.process(request_id, prompt, final[id(params[i])], completed, **about)
            except (TypeError, ValueError) as error:
                if len(prompts) == 1:
                    raise
                raise (TypeError if isinstance(error, TypeError) else ValueError)(f"prompts[{i}]: {error}") from error
            checked.append((request_id, given))
        return checked

    def _run(self, requests: Sequence[tuple[str, ProcessedInput]], use_tqdm: bool) -> list[RequestOutput]:
        """Queue requests and step until they have ended. Whatever goes wrong, none of them is left in the engine."""
        engine, done = self.llm_engine, {}
        try:
            with deferred_interrupts() as check_interrupt, _Progress(len(requests), use_tqdm) as progress:
                for request_id, given in requests:
                    engine.add_processed(request_id, given)
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        done[output.request_id] = output
                        progress.finished(output)
                    check_interrupt()
        except BaseException:
            engine.abort_request([request_id for request_id, _ in requests])
            raise
        if failed := [output.error for output in done.values() if output.error is not None]:
            logger.warning("%d of %d requests ended with an error, one of them: %s", len(failed), len(done), failed[0])
        return [done[request_id] for request_id, _ in requests]

    def embed(
        self, prompts: Prompts, *, pooling_params: Pooling = None, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, from the hidden states after the model's last norm; see `PoolingParams`.

        A model that predicts tokens was not trained to make vectors: texts about the same thing come out nearer to each other than
        others, but a model that was trained for it (`LLM("minilm")`) tells them apart far better.

        Raises:
            TypeError, ValueError: a bad prompt or parameter, or a model that gives none; found before anything runs.
        """
        outputs = self._pool(_as_prompt_list(prompts), pooling_params, "embed", use_tqdm)
        return [_pooled(output, EmbeddingOutput) for output in outputs]

    def _pool(
        self, prompts: Sequence[PromptType], pooling_params: Pooling, task: str | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        params = PoolingParams() if pooling_params is None else pooling_params
        for given in params if isinstance(params, (list, tuple)) else [params]:
            if not isinstance(given, PoolingParams):
                raise TypeError(f"pooling_params must be PoolingParams, got {type(given).__name__}")
            if task is not None and given.task not in (None, task):
                raise ValueError(f"pooling_params has task={given.task!r}, and this method is for {task!r}")
        each = _one_each("pooling_params", params, len(prompts), PoolingParams)
        each = [replace(given, task=task or given.task) for given in each]
        return self._run(self._process_all(prompts, each), use_tqdm)

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Pooling = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Whatever the model makes of a prompt. pooling_task: a name in `sampling.pooling.TASKS`; None for its usual one.

        Raises:
            TypeError, ValueError: a bad prompt or parameter, or a task that is not the model's; found before anything runs.
        """
        outputs = self._pool(_as_prompt_list(prompts), pooling_params, pooling_task, use_tqdm)
        return [_pooled(output, PoolingOutput) for output in outputs]

    def classify(
        self, prompts: Prompts, *, pooling_params: Pooling = None, use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """A number for each class of a classifier, for each prompt. Raises as `encode`."""
        outputs = self._pool(_as_prompt_list(prompts), pooling_params, "classify", use_tqdm)
        return [_pooled(output, ClassificationOutput) for output in outputs]

    def reward(
        self, prompts: Prompts, *, pooling_params: Pooling = None, use_tqdm: bool = True
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The rewards of each token of a prompt, from a reward model; one that rates the whole text does so at the last token. Raises as `encode`."""
        return self.encode(prompts, pooling_params, pooling_task="token_classify", use_tqdm=use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well pairs of texts go together: by a cross-encoder, or by the cosine of two vectors; see `engine.pairs`.

        Args:
            data_1: one text for all of `data_2`, or as many.

        Raises:
            ValueError: as `encode`, and if the texts make no pairs.
        """
        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        params = pooling_params or PoolingParams()
        processor, keep = self.llm_engine.input_processor, params.truncate_prompt_tokens
        keep = None if keep is None else processor.num_kept(keep)
        pairs = make_pairs(self.get_tokenizer(), self.config.model.pooling, first, second, keep)
        outputs = [_pooled(output, PoolingOutput) for output in self._pool(pairs.prompts, params, "score", use_tqdm)]
        ends = [i if pairs.places is None else pairs.places[i][1] for i in range(len(second))]
        scores = pairs.scores([output.outputs.data for output in outputs])
        about = [outputs[end] for end in ends]
        return [
            PoolingRequestOutput(output.request_id, ScoringOutput(score), output.prompt_token_ids)
            for output, score in zip(about, scores, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of `{"role": ..., "content": ...}`), or each of a list of conversations.

        ``chat_template``: Jinja text in place of the model's own. ``continue_final_message``: go on with the last message instead of answering it
        (then set ``add_generation_prompt=False``). ``chat_template_kwargs``: further variables of the template.
        ``lora_request``: see `generate`.

        Raises:
            ValueError: the model has no template, or it refuses the messages.
        """
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts: list[PromptType] = []
        for conversation in conversations:
            text, token_ids = apply_chat_template(
                self.get_tokenizer(), conversation, chat_template=chat_template, tools=tools,
                add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )  # fmt: skip
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The ``params.beam_width`` likeliest continuations of each prompt, best first; `engine.beam_search` has the rules.

        Raises:
            TypeError, ValueError: a bad prompt, or a beam width that needs more than ``max_logprobs`` log-probabilities.
        """
        processor, limit = self.llm_engine.input_processor, self.config.args.max_logprobs
        plain = SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        plain.update_from_generation_config(self.llm_engine.generation_config, processor.eos_token_id)
        ends = frozenset() if params.ignore_eos else plain.all_stop_token_ids
        needed = num_candidates(params.beam_width, ends)
        if limit != -1 and needed > limit:
            raise ValueError(
                f"beam_width={params.beam_width} needs {needed} log-probabilities a token; max_logprobs is {limit}"
            )
        searches = []
        for prompt in _as_prompt_list(prompts):
            token_ids = processor.tokenize(parse_prompt(prompt), plain)
            searches.append(Beams(token_ids, params, processor.max_tokens(len(token_ids), plain), ends))
        with tqdm(total=params.max_tokens, desc="Beam search", unit="token", disable=not use_tqdm) as bar:
            search_beams(searches, lambda p, sampling: self.generate(p, sampling, use_tqdm=False), bar.update)
        return [beam_search_output(search, self.get_tokenizer()) for search in searches]

    def record(self, samples: bool = False, ranks: bool = False) -> AbstractContextManager[Trace]:
        """``with llm.record() as trace:`` records all that the scheduler does in the block.

        ``samples``: also keep the logits of every sampled token (a row of the vocabulary each), for `explain`.
        ``ranks``: also note when each rank computed, joined others and waited: see `Trace.ranks`.
        """
        return self.llm_engine.record(samples, ranks)

    def explain(self, trace: Trace, request: RequestOutput | str, step: int, top: int = 5) -> "pd.DataFrame":
        """How the ``step``-th output token of a request (counted from 0) was chosen: see `LLMEngine.explain`.

        ``request``: an output, or an id as in the trace (with ``n > 1`` each completion has its own).
        """
        return self.llm_engine.explain(trace, request if isinstance(request, str) else request.request_id, step, top)

    def get_metrics(self) -> dict[str, float]:
        """Counters since the start, and gauges of this moment; see `LLMEngine.get_metrics`."""
        return self.llm_engine.get_metrics()

    def close(self) -> None:
        """Give the model's memory back. Also done by ``with LLM(...) as llm:``."""
        self.llm_engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Progress:
    """A tqdm bar that counts finished prompts and shows tokens per second."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, desc="Processed prompts", disable=not shown, dynamic_ncols=True)
        self._tokens_in = self._tokens_out = 0

    def finished(self, output: RequestOutput) -> None:
        self._tokens_in += len(output.prompt_token_ids)
        self._tokens_out += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = self._bar.format_dict["elapsed"]
        if seconds and not self._bar.disable:
            rates = f"input: {self._tokens_in / seconds:.1f} tok/s, output: {self._tokens_out / seconds:.1f} tok/s"
            self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def _as_prompt_list(prompts: Any) -> list[Any]:
    """One prompt becomes a list of one. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    # going over a table gives the names of its columns
    tabular = isinstance(prompts, Mapping) or hasattr(prompts, "columns")
    if tabular or isinstance(prompts, (bytes, bytearray)) or not hasattr(prompts, "__iter__"):
        raise TypeError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    listed = list(prompts)
    if not listed:
        return []
    return listed if isinstance(listed[0], (str, dict)) or hasattr(listed[0], "__len__") else [listed]


def _pooled(output: RequestOutput, make: Callable[[list[Any]], T]) -> PoolingRequestOutput[T]:
    if output.pooled is None:
        raise RuntimeError(f"request {output.request_id!r} got no vector: {output.error or 'it was aborted'}")
    about = output.prompt_token_ids, output.finished, output.num_cached_tokens, output.metrics, output.weight_version
    return PoolingRequestOutput(output.request_id, make(output.pooled), *about)


def _final_only(params: SamplingParams) -> SamplingParams:
    """A copy whose output is put together only at the end."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    copy = params.clone()
    copy.output_kind = RequestOutputKind.FINAL_ONLY
    return copy


def _one_each(name: str, given: Any, count: int, kind: type | tuple[type, ...]) -> list[Any]:
    """One value for each of ``count`` prompts. Raises ValueError for a list of another length, TypeError for another type."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if given is None or isinstance(given, kinds):
        return [given] * count
    if isinstance(given, (str, Mapping)) or not hasattr(given, "__iter__"):
        raise TypeError(f"{name} must be {kinds[0].__name__}, or a list with one for each prompt; got {given!r}")
    values = list(given)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one for all, or one for each")
    return values


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C waits for a call of the yielded function, which then raises KeyboardInterrupt.

    A second press does not wait, for the program may hang. Nothing changes outside of the main thread (Python
    delivers signals there only) or where another program part handles the signal.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
