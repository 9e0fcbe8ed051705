"""Output dataclasses: RequestOutput, CompletionOutput, metrics, embeddings."""

# Generated from nbs/engine/outputs.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass
from typing import Any, Generic, TypeVar


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    index: its number among the ``n`` answers. text, token_ids: the answer, or with ``RequestOutputKind.DELTA`` what is new of it.
    cumulative_logprob: sum of the log-probabilities of the tokens, None unless ``logprobs`` was asked for.
    logprobs: for each token ``{token id: Logprob}``, or None. text_offsets: for each token of ``logprobs`` the place in the
    whole answer's text where its text begins (a piece of a character begins where the character does), or None.
    finish_reason: None while it runs, then "stop", "length", "abort" or "error".
    stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence token and other reasons.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, later: "CompletionOutput") -> None:
        """Take in what is new since this delta."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.cumulative_logprob = later.cumulative_logprob
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        if self.text_offsets is not None and later.text_offsets is not None:
            self.text_offsets += later.text_offsets
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request on the engine's clock, in seconds; None until they have come. Also how many
    draft tokens were verified, and how many of them accepted."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Counts of a request that has ended in any way: with an answer, aborted, or failed.

    Attributes:
        finish_reasons: one for each answer that was begun, or "stop" for a vector.
        num_generation_tokens: tokens of all answers.
        engine: the number of the replica, with data parallelism.
    """

    finish_reasons: list[str]
    num_prompt_tokens: int
    num_generation_tokens: int
    metrics: RequestMetrics
    engine: int = 0


@dataclass(slots=True)
class RequestOutput:
    """All that is known of a request at the end of a step.

    prompt: the text, None if token ids were given. prompt_logprobs: for each prompt token ``{token id: Logprob}`` (None for
    the first, which nothing predicts), or None. num_cached_tokens: prompt tokens found in the prefix cache.
    error: why the request failed, if the finish reason is "error". pooled: the vector or class scores of a request with PoolingParams, which has no
    ``outputs``. weight_version: version of the weights that chose its newest token, see `EngineCore.load_weights`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    pooled: list[Any] | None = None
    weight_version: int = 0

    def add(self, later: "RequestOutput") -> None:
        """Take in the next delta of the same request, so that one output says what two would have said."""
        known = {completion.index: completion for completion in self.outputs}
        for completion in later.outputs:
            if completion.index in known:
                known[completion.index].add(completion)
            else:
                self.outputs.append(completion)
        self.finished, self.error, self.metrics = later.finished, later.error, later.metrics
        self.prompt_logprobs, self.num_cached_tokens = later.prompt_logprobs, later.num_cached_tokens
        self.weight_version = later.weight_version


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector that stands for a prompt. ``embedding``: as many numbers as the model's hidden states have, or ``dimensions``."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """``probs``: one number for each class of the model."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together, as the model sees it."""

    score: float


@dataclass(slots=True)
class PoolingOutput:
    """The result of any pooling task. ``data``: a list of numbers, or for a token task one list per token."""

    data: list[Any]


Pooled = TypeVar("Pooled")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """What `LLM.encode`, `embed`, `classify` and `score` give for one prompt; vLLM's shape."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    weight_version: int = 0


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
