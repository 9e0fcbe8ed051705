"""Request state: token ids, status, progress counters, finish reason."""

# Generated from nbs/core/request.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Hashable, Sequence
from enum import Enum, IntEnum
from typing import Any

from minivllm.core.encoder_cache import MultiModalFeatureSpec


class FinishReason(str, Enum):
    """Why a request ended. The values are the strings that the OpenAI API uses; `error` is ours."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


class RequestStatus(IntEnum):
    """The state of a request. All but `RUNNING` and `FINISHED` are forms of waiting."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    SWAPPED = 3
    WAITING_FOR_REMOTE_KVS = 4
    FINISHED = 5


class Request:
    """One request as the scheduler sees it: token ids in, token ids out, and a progress counter.

    Args:
        request_id: unique while the request lives.
        prompt_token_ids: at least one token id.
        max_tokens: the most tokens to sample, at least 1.
        min_tokens: no end-of-sequence or stop token ends the request before this many sampled tokens.
        eos_token_id: the token that ends a text, or None.
        stop_token_ids: further tokens that end the request.
        ignore_eos: go on after `eos_token_id`.
        sampling_params: handed to the model runner unread.
        arrival_time: seconds on the engine's clock.
        priority: smaller is more urgent (vLLM's convention).
        user: owner of the request, for fair-share policies.
        cache_salt: requests share cached blocks only with requests of the same salt.
        lora_name: adapter name; blocks are shared only under the same adapter.
        extra_keys: further values; only requests with equal ones share blocks.
        mm_features: inputs besides the text (images, audio, embeddings), in the order of their ranges in the prompt.
        skip_reading_prefix_cache: compute every prompt token even if its block is cached (prompt log-probabilities need it).

    Raises:
        ValueError: for an empty prompt, `max_tokens` below 1 or `min_tokens` outside 0..max_tokens.
    """

    __slots__ = (
        "request_id", "all_token_ids", "num_prompt_tokens", "num_tokens", "num_computed_tokens", "num_cached_tokens",
        "max_tokens", "min_tokens", "eos_token_id", "stop_token_ids", "ignore_eos", "sampling_params", "arrival_time",
        "priority", "user", "cache_salt", "lora_name", "extra_keys", "skip_reading_prefix_cache", "status",
        "finish_reason", "stop_reason", "num_preemptions", "block_hashes", "capacity", "sequence_number", "max_total_tokens",
        "end_token_ids", "num_denied", "spec_token_ids", "mm_features", "route",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        eos_token_id: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        ignore_eos: bool = False,
        sampling_params: Any = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        extra_keys: tuple[Hashable, ...] = (),
        mm_features: tuple[MultiModalFeatureSpec, ...] = (),
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError(f"request {request_id!r}: the prompt is empty; at least one token id is needed")
        if max_tokens < 1:
            raise ValueError(f"request {request_id!r}: max_tokens must be at least 1, got {max_tokens}")
        if not 0 <= min_tokens <= max_tokens:
            raise ValueError(f"request {request_id!r}: min_tokens must be in 0..{max_tokens}, got {min_tokens}")
        self.request_id = request_id
        self.all_token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.eos_token_id = eos_token_id
        self.stop_token_ids = stop_token_ids
        self.ignore_eos = ignore_eos
        self.end_token_ids = stop_token_ids if ignore_eos or eos_token_id is None else stop_token_ids | {eos_token_id}
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.priority = priority
        self.user = user
        self.route: tuple[Any, ...] | None = None  # the event of a router, for the trace
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.extra_keys, self.mm_features = extra_keys, mm_features
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_preemptions = self.num_denied = 0
        self.spec_token_ids: list[int] = []  # drafts that the next step may verify
        self.block_hashes: list[bytes] = []
        self.capacity = 0
        self.sequence_number = 0

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens so far (a copy)."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens have been sampled."""
        return self.num_tokens - self.num_prompt_tokens

    def append_output_token(self, token_id: int) -> bool:
        """Append one sampled token; set `finish_reason` and `stop_reason` and return True if it ends the request."""
        self.all_token_ids.append(token_id)
        self.num_tokens += 1
        if token_id in self.end_token_ids and self.num_output_tokens >= self.min_tokens:
            self.finish_reason = FinishReason.STOP
            if self.ignore_eos or token_id != self.eos_token_id:
                self.stop_reason = token_id
            return True
        if self.num_tokens >= self.max_total_tokens:
            self.finish_reason = FinishReason.LENGTH
            return True
        return False

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens} of {self.num_tokens},"
            f" {self.num_output_tokens} of at most {self.max_tokens} sampled)"
        )
