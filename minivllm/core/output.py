"""What scheduler, model runner and engine core exchange in a step."""

# Generated from nbs/core/output.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.encoder_cache import MultiModalFeatureSpec
from minivllm.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request that the runner does not hold yet, with all that it needs to make a row.

    Attributes:
        request_id: the row's name.
        prompt_token_ids: the prompt.
        output_token_ids: tokens sampled before a preemption; empty for a fresh request.
        sampling_params: as the caller gave them.
        block_ids: one block table per KV cache group.
        num_computed_tokens: tokens already in the cache: a prefix hit, or a swapped-in history.
        lora_name: adapter, or None.
        lora_slot: slot of the adapter; -1 for no adapter.
        mm_features: inputs besides the text (images, audio, embeddings), without their data.
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: Any
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    lora_name: str | None = None
    lora_slot: int = -1
    mm_features: tuple[MultiModalFeatureSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """What the worker side of a KV connector does in a step. A `place` is a tuple that only the connector
    reads; its last entry is `(KV cache group, content hash)`.

    Attributes:
        loads: `(place, block)` copies to make before the layers run, and after `swap_out`.
        saves: `(block, place)` copies to make after them.
        async_loads: by request, copies like `loads` that go on while steps run; `finished_recving` reports their end.
        failures: how many steps with failed loads the scheduler has heard of. A worker that knows of more saves nothing: what it has
            computed since may be wrong.
        sends: requests that have ended and whose blocks stay until `finished_sending` names them, each with the step from which workers
            know of it. Each step repeats all of them, so nothing is lost when a step fails.
    """

    loads: tuple[tuple[tuple[Any, ...], int], ...] = ()
    saves: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    failures: int = 0
    async_loads: dict[str, tuple[tuple[tuple[Any, ...], int], ...]] = field(default_factory=dict)
    sends: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What to run in one step.

    Attributes:
        step: counts from 0.
        num_scheduled_tokens: tokens to compute per request, in scheduling order.
        total_num_scheduled_tokens: the sum; at most the token budget. It can be 0, when there are only rows to drop.
        new_requests: rows to add.
        new_block_ids: blocks appended to rows that the runner already holds, one list per KV cache group.
        preempted: rows to drop; they come back as `new_requests`.
        finished: rows to drop for good, finished or aborted since the last step.
        swap_out: `(gpu block, cpu block)` copies to make before the step, and before `swap_in`.
        swap_in: `(cpu block, gpu block)` copies to make before the step.
        lora_loads: `(slot, adapter)` to load before the step, in this order.
        scheduled_spec_decode_tokens: draft tokens to verify, by request. They are the last of its scheduled tokens.
        drafts_on_device: the device knows these, and the newest token of each request; `NOT_DRAFTED` stands for such a draft token, and
            all are scheduled as if every draft token of the step before were accepted.
        free_encoder_mm_hashes: encoder outputs to drop before the step.
        scheduled_encoder_inputs: to encode before the step, after these were dropped. They carry their data.
        recorded: a trace is kept, so the runner counts what only a trace needs.
        kv_connector_metadata: blocks to fetch and to save; None for none.
    """

    step: int
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    new_requests: tuple[NewRequestData, ...] = ()
    new_block_ids: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    lora_loads: tuple[tuple[int, str], ...] = ()
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    drafts_on_device: bool = False
    free_encoder_mm_hashes: tuple[str, ...] = ()
    scheduled_encoder_inputs: tuple[MultiModalFeatureSpec, ...] = ()
    recorded: bool = False
    kv_connector_metadata: KVConnectorMetadata | None = None


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step of the model produced.

    Attributes:
        sampled_token_ids: new tokens of the requests that sampled: one, and one more for each draft token that was accepted.
        logprobs: per request, one entry per sampled token.
        prompt_logprobs: per request, entries for prompt positions that were computed in this step.
        errors: requests that failed alone, with the reason; they are finished with `FinishReason.ERROR`.
        failed_loras: adapters of `lora_loads` that could not be loaded, with the reason; what was computed with them is wrong.
        pooled: vectors or class scores of requests that wanted these and no tokens; these requests have ended.
        draft_token_ids: guesses at the tokens after the newest one, for the next step to verify.
        device_draft_token_ids: of a step with `drafts_on_device`, the draft tokens that were verified.
        num_accepted_tokens: how many of a request's sampled tokens are draft tokens; if not said, all but the last.
        proposer_error: why there are no more draft tokens.
        expert_loads: for a recorded step, `(layer, tokens per expert)` of each layer with experts.
        draft_odds: of requests with draft tokens, if they were asked for: see `Verified.odds`.
        invalid_block_ids: blocks that a KV connector could not fill. What was computed with them is wrong.
        finished_recving: requests whose `async_loads` have ended. Those of their blocks that could not be filled are among `invalid_block_ids`.
        finished_sending: requests whose blocks a KV connector had asked to keep, and has now copied.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    failed_loras: dict[str, str] = field(default_factory=dict)
    pooled: dict[str, list[Any]] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    device_draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    num_accepted_tokens: dict[str, int] = field(default_factory=dict)
    proposer_error: str | None = None
    expert_loads: tuple[tuple[int, tuple[int, ...]], ...] = ()
    draft_odds: dict[str, list[tuple[float, float, float | None]]] = field(default_factory=dict)
    invalid_block_ids: set[int] = field(default_factory=set)
    finished_recving: Collection[str] = frozenset()
    finished_sending: Collection[str] = frozenset()


@dataclass(slots=True)
class EngineCoreOutput:
    """What one request gained in one step, as the output processor receives it.

    Attributes:
        request_id: the request.
        new_token_ids: tokens sampled in this step.
        finish_reason: set in the request's last output.
        stop_reason: the stop token that ended it, if one did.
        logprobs: one entry per new token, or None.
        prompt_logprobs: entries for prompt positions, or None.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        error: why it failed, when `finish_reason` is `error`.
        pooled: the vector or class scores of a request that wanted them; for a token task, a list of them.
        num_draft_tokens, num_accepted_tokens: draft tokens that were verified in this step, and those that were accepted.
        weight_version: version of the weights that were used, see `EngineCore.load_weights`.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[Any] | None = None
    prompt_logprobs: list[Any] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    pooled: list[Any] | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    weight_version: int = 0
