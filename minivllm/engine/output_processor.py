"""From engine core outputs to request outputs: detokenization, stop strings, logprobs."""

# Generated from nbs/engine/output_processor.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minivllm.core.output import EngineCoreOutput
from minivllm.core.request import FinishReason
from minivllm.engine.detokenizer import Detokenizer, DetokenizerFactory
from minivllm.engine.outputs import CompletionOutput, FinishedRequest, RequestMetrics, RequestOutput
from minivllm.engine.stop_strings import REPETITION_STOP_REASON, StopStrings, repeated_pattern_size
from minivllm.sampling.params import RepetitionDetectionParams, RequestOutputKind, SamplingParams, best_indices
from minivllm.sampling.pooling import PoolingParams

__all__ = ["OutputProcessor", "ProcessedOutputs"]


class CompletionState:
    """One answer while it is generated: one request of the engine core.

    ``detokenizer`` is None when the caller wants no text; then ``text`` stays empty.
    """

    def __init__(self, index: int, params: SamplingParams, detokenizer: Detokenizer | None) -> None:
        self.index = index
        self.params = params
        self.detokenizer = detokenizer
        self.stops = StopStrings(params.stop) if params.stop else None
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Any]] | None = None if params.logprobs is None else []
        self.text_offsets: list[int] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._sent_text = 0
        self._sent_tokens = 0

    def update(self, output: EngineCoreOutput) -> bool:
        """Take one step's tokens. Returns whether the engine core must be told that this request has ended."""
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        before, loop, ended_here = len(self.token_ids), self.params.repetition_detection, False
        num_visible = len(output.new_token_ids)
        if output.finish_reason is FinishReason.STOP and not self.params.include_stop_str_in_output:
            num_visible -= 1  # the end-of-sequence or stop token
        for i, token_id in enumerate(output.new_token_ids):
            self.token_ids.append(token_id)
            if self.text_offsets is not None:
                self.text_offsets.append(len(self.text))
            if i < num_visible and self.detokenizer is not None:
                start = len(self.text)
                self.text += self.detokenizer.push(token_id)
                ended_here = self.stops is not None and self._cut_at_stop(start)
            goes_on = output.finish_reason is None or i + 1 < len(output.new_token_ids)
            if loop is not None and not ended_here and goes_on:
                ended_here = self._ends_in(loop)
            if ended_here:  # further tokens are dropped
                break
        if self.finish_reason is not None and not ended_here:
            ended_here = self._flush()
        if output.logprobs:
            self._take_logprobs(output, len(self.token_ids) - before)
        return ended_here and output.finish_reason is None

    def _cut_at_stop(self, start: int) -> bool:
        """Whether the text from ``start`` on completes a stop string; then the text is cut and the reason set."""
        if self.stops is None or start == len(self.text) or len(self.token_ids) <= self.params.min_tokens:
            return False
        match = self.stops.find(self.text, start)
        if match is None:
            return False
        self.text = self.text[: match.end if self.params.include_stop_str_in_output else match.start]
        self.finish_reason, self.stop_reason = FinishReason.STOP, match.stop
        return True

    def _ends_in(self, loop: RepetitionDetectionParams) -> bool:
        """Whether the answer ends in a repeated pattern; then the reason is set."""
        if len(self.token_ids) < self.params.min_tokens or not repeated_pattern_size(self.token_ids, loop):
            return False
        self.finish_reason, self.stop_reason = FinishReason.STOP, REPETITION_STOP_REASON
        self._flush()
        return True

    def _flush(self) -> bool:
        if self.detokenizer is None:
            return False
        start = len(self.text)
        self.text += self.detokenizer.flush()
        return self._cut_at_stop(start)

    def _take_logprobs(self, output: EngineCoreOutput, count: int) -> None:
        if self.logprobs is None:
            return
        for token_id, entry in zip(output.new_token_ids[:count], output.logprobs or (), strict=False):
            self.logprobs.append(entry)
            self.cumulative_logprob += entry[token_id].logprob

    def completion(self, delta: bool) -> CompletionOutput:
        """The answer so far, or with ``delta`` what was not sent before."""
        end = len(self.text)
        if self.stops is not None and self.finish_reason is None and not self.params.include_stop_str_in_output:
            end -= self.stops.held_back(self.text)
        from_text, from_token = (self._sent_text, self._sent_tokens) if delta else (0, 0)
        self._sent_text, self._sent_tokens = end, len(self.token_ids)
        return CompletionOutput(
            index=self.index,
            text=self.text[from_text:end],
            token_ids=self.token_ids[from_token:],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[from_token:],
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            text_offsets=None if self.text_offsets is None else self.text_offsets[from_token:],
        )


@dataclass(slots=True)
class RequestState:
    """One request as the caller sees it, with its children: {id in the engine core: the child's state}."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: dict[str, CompletionState]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    changed: set[int] = field(default_factory=set)
    wants_vector: bool = False
    pooled: list[Any] | None = None
    finished: bool = False
    weight_version: int = 0
    engine: int = 0
    ranks_children: bool = field(init=False)

    def __post_init__(self) -> None:
        self.ranks_children = self.params.ranks_children

    def counts(self) -> FinishedRequest:
        """For the metrics, when it has ended."""
        reasons = [child.finish_reason.value for child in self.children.values() if child.finish_reason is not None]
        if self.pooled is not None:
            reasons = [FinishReason.STOP.value]
        generated = sum(len(child.token_ids) for child in self.children.values())
        return FinishedRequest(reasons, len(self.prompt_token_ids), generated, self.metrics, self.engine)

    def output(self) -> RequestOutput | None:
        """What the caller gets now, or None if it waits for the end."""
        kind, finished = self.params.output_kind, self.finished
        if not finished and (kind is RequestOutputKind.FINAL_ONLY or self.ranks_children):
            return None
        delta = kind is RequestOutputKind.DELTA
        children = [c for c in self.children.values() if not delta or c.index in self.changed]
        self.changed.clear()
        outputs = [] if self.wants_vector else [child.completion(delta) for child in children]
        if self.ranks_children:
            outputs = self._best(outputs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=replace(self.metrics),
            error=self.error,
            pooled=self.pooled,
            weight_version=self.weight_version,
        )

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """The ``n`` best of ``best_of``, renumbered; children that failed come last."""
        sound = [o for o in outputs if o.finish_reason != FinishReason.ERROR.value]
        totals = [o.cumulative_logprob or 0.0 for o in sound]
        order = [sound[i] for i in best_indices(totals, [len(o.token_ids) for o in sound], len(sound))]
        order += [o for o in outputs if o.finish_reason == FinishReason.ERROR.value]
        best = [replace(o, index=i) for i, o in enumerate(order[: self.params.n])]
        if self.params.logprobs is None:  # they were only wanted for the ranking
            best = [replace(o, logprobs=None, cumulative_logprob=None, text_offsets=None) for o in best]
        return best


@dataclass(slots=True)
class ProcessedOutputs:
    """``request_outputs`` for callers, and ``reqs_to_abort``: ids in the engine core that a stop string or a repetition ended."""

    request_outputs: list[RequestOutput]
    reqs_to_abort: list[str]


class OutputProcessor:
    """Turns the outputs of the engine core into outputs for callers.

    ``tokenizer`` may be None: then only requests with ``detokenize=False`` are possible. ``on_finished`` is called with every
    request that ends.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self.requests: dict[str, RequestState] = {}
        self.parent_of: dict[str, RequestState] = {}
        self.detokenizers = None if tokenizer is None else DetokenizerFactory(tokenizer)
        self.on_finished: Callable[[FinishedRequest], None] = lambda finished: None

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams | PoolingParams,
        children: dict[str, Any],
        arrival_time: float,
    ) -> None:
        """Expect outputs for a request. ``children``: {id in the engine core: its parameters}, at least one.

        A request for a vector is followed like one whose answer has no text.

        Raises:
            ValueError: an id is in use, or text is wanted and there is no tokenizer.
        """
        for name in (request_id, *children):
            if name in self.requests or name in self.parent_of:
                raise ValueError(f"request id {name!r} is in use by an unfinished request")
        wants_vector = isinstance(params, PoolingParams)
        if isinstance(params, PoolingParams):
            params = SamplingParams(output_kind=params.output_kind, detokenize=False)
            children = dict.fromkeys(children, params)
        states = {
            child_id: CompletionState(index, child, self._detokenizer(prompt_token_ids, child))
            for index, (child_id, child) in enumerate(children.items())
        }
        metrics = RequestMetrics(arrival_time)
        # nothing predicts the first token
        prompt_logprobs: list[dict[int, Any] | None] | None = None if params.prompt_logprobs is None else [None]
        state = RequestState(request_id, prompt, prompt_token_ids, params, states, metrics, prompt_logprobs)
        state.wants_vector = wants_vector
        self.requests[request_id] = state
        self.parent_of.update(dict.fromkeys(children, state))

    def _detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if not params.detokenize:
            return None
        if self.detokenizers is None:
            raise ValueError("detokenize=True needs a tokenizer, and the engine has none")
        return self.detokenizers(
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    def process_outputs(self, core_outputs: Sequence[EngineCoreOutput], now: float) -> ProcessedOutputs:
        """Take the outputs of one step. ``now``: the engine's clock. Outputs of requests that are no longer known are dropped."""
        touched: dict[str, RequestState] = {}
        to_abort: list[str] = []
        for output in core_outputs:
            state = self.parent_of.get(output.request_id)
            if state is None:
                continue
            touched[state.request_id] = state
            child = state.children[output.request_id]
            if output.new_token_ids:
                state.metrics.first_token_time = state.metrics.first_token_time or now
                state.metrics.last_token_time = now
                state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
                state.weight_version = output.weight_version
            if output.num_draft_tokens:
                state.metrics.num_draft_tokens += output.num_draft_tokens
                state.metrics.num_accepted_tokens += output.num_accepted_tokens
            if output.error is not None:
                state.error = output.error
            if output.pooled is not None:
                state.pooled, state.num_cached_tokens = output.pooled, output.num_cached_tokens
                state.weight_version = output.weight_version
            if output.logprobs or output.prompt_logprobs:
                self._name_tokens(output)
            if output.prompt_logprobs:
                state.prompt_logprobs = [*(state.prompt_logprobs or ()), *output.prompt_logprobs]
            if child.update(output):
                to_abort.append(output.request_id)
            state.changed.add(child.index)
            if child.finish_reason is not None:
                del self.parent_of[output.request_id]
                state.finished = all(other.finish_reason is not None for other in state.children.values())
        results = []
        for state in touched.values():
            if state.finished:
                self._finish(state, now)
            if (result := state.output()) is not None:
                results.append(result)
        return ProcessedOutputs(results, to_abort)

    def _finish(self, state: RequestState, now: float) -> None:
        state.metrics.finished_time = now
        del self.requests[state.request_id]
        self.on_finished(state.counts())

    def _name_tokens(self, output: EngineCoreOutput) -> None:
        """Write the text of each token into the log-probabilities."""
        if self.detokenizers is None:
            return
        for entry in [*(output.logprobs or ()), *(output.prompt_logprobs or ())]:
            for token_id, logprob in (entry or {}).items():
                logprob.decoded_token = self.detokenizers.token_text(token_id)

    def abort_requests(self, request_ids: Sequence[str], now: float) -> tuple[list[RequestOutput], list[str]]:
        """Forget requests. Returns their last outputs and the ids to abort in the engine core; unknown ids are passed over."""
        states = [self.requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self.requests]
        running = ((name, child) for state in states for name, child in state.children.items())
        core_ids = [name for name, child in running if child.finish_reason is None]
        aborted = [EngineCoreOutput(name, [], FinishReason.ABORT) for name in core_ids]
        return self.process_outputs(aborted, now).request_outputs, core_ids
