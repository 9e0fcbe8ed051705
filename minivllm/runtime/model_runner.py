"""Model runner: scheduler output to forward pass and sampled tokens."""

# Generated from nbs/runtime/model_runner.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.backend import AttentionBackend, AttentionSpec, Plan
from minivllm.attention.state import LayerCacheSpec, MambaSpec, cache_layout
from minivllm.attention.step_buffer import BufferFull, StepBuffer
from minivllm.core.config import EngineConfig, KVCacheConfig
from minivllm.core.module import capture_problem, generation
from minivllm.core.output import KVConnectorMetadata, ModelRunnerOutput, NewRequestData, SchedulerOutput
from minivllm.core.speculative import NOT_DRAFTED, SpeculativeConfig
from minivllm.lora.adapter import AdapterError
from minivllm.lora.store import AdapterStore
from minivllm.models.decoder import Decoder, Media
from minivllm.models.linear.base import empty_weight
from minivllm.models.mixers.moe import ExpertLoads
from minivllm.multimodal.mrope import MRope
from minivllm.multimodal.outputs import EncoderOutputs, MediaEncoder
from minivllm.runtime.decode_graphs import DecodeGraphs, graph_ladder, rung
from minivllm.runtime.device_drafts import (
    DeviceDrafts,
    DeviceStep,
    SameStep,
    host_drafts_reason,
    planned_lengths,
)
from minivllm.runtime.input_batch import InputBatch, Int64, StepInputs
from minivllm.runtime.kv_connectors import ConnectorWorker, make_connector_worker
from minivllm.runtime.machine import torch_device
from minivllm.runtime.pooler import Pooler
from minivllm.runtime.sample_record import SampleLog, forget_samples, log_samples
from minivllm.runtime.weights import (
    Function,
    Parked,
    Weights,
    check_loadable,
    open_weights,
    unpack_function,
    weight_tensors,
)
from minivllm.sampling.grammar import GrammarCompiler
from minivllm.sampling.logprobs import Logprob, compute_logprobs
from minivllm.sampling.pooling import PoolingParams
from minivllm.sampling.sampler import PendingSample, Sampler, SamplerOutput
from minivllm.sampling.state import RequestView, SamplingBatch, SamplingState
from minivllm.sampling.transforms import Transform
from minivllm.spec_decode.draft_model import DraftHost, shared_group
from minivllm.spec_decode.drafter import Drafter, make_drafter
from minivllm.spec_decode.proposers import DraftRequest, HiddenStates
from minivllm.spec_decode.rejection import DeviceVerifier, Draft, RejectionSampler, Verified

logger = logging.getLogger("minivllm.runtime")


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU memory is only taken when a page is first touched, a huge page if the system has them.

    It begins with a page, so that no load of 64 bytes reads two cache lines.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return empty_weight(1, num_bytes, torch.uint8, device).view(dtype).view(shape)  # what the system gives is zeros


def new_kv_caches(
    backend: AttentionBackend, config: KVCacheConfig, specs: list[LayerCacheSpec], num_blocks: int, device: torch.device
) -> list[Tensor]:
    """Cache tensors of ``num_blocks`` blocks in the backend's layout, one for each place in a group. specs: the groups'."""
    shape, dtype = cache_layout(backend, specs, num_blocks)
    return [zeros_on_demand(shape, dtype, device) for _ in range(config.num_tensors)]


def new_swap_caches(
    backend: AttentionBackend, config: KVCacheConfig, specs: list[LayerCacheSpec], device: torch.device
) -> list[Tensor]:
    """Cache tensors in main memory, block 0 a null block there too. Pinned if the caches are on a GPU, which then copies by itself."""
    host, num_blocks = torch.device("cpu"), config.num_cpu_blocks + 1
    if not config.num_cpu_blocks:
        return []
    if device.type == "cpu":
        return new_kv_caches(backend, config, specs, num_blocks, host)
    shape, dtype = cache_layout(backend, specs, num_blocks)
    return [torch.zeros(shape, dtype=dtype, pin_memory=True) for _ in range(config.num_tensors)]


def step_bytes(config: EngineConfig) -> int:
    """Room for the arrays of a step (see `StepBuffer`), generously: ids, positions, slots and work lists, block tables.

    A draft token takes part in the attention as a separate request, and has its own row of the block table.
    """
    limits, groups = config.scheduler, len(config.kv_cache.groups)
    per_token, per_row = 16 + 8 + groups * (8 + 32), groups * 64 * 32 + 16  # the last for a `DeviceStep`
    table = groups * 4 * -(-limits.max_model_len // config.kv_cache.block_size)
    rows = limits.max_sampled_rows(config.speculative)
    return limits.max_num_batched_tokens * per_token + rows * (per_row + table) + (1 << 18)


def table_sizes(config: KVCacheConfig, max_model_len: int) -> tuple[int, list[int]]:
    """Tokens that block tables have room for, and tokens of a block of each KV cache group."""
    # a ring of states may be longer
    least = (g.spec.block_size * g.spec.rules.num_blocks(g.spec, 1) for g in config.groups)
    return max(max_model_len, *least), [g.spec.block_size for g in config.groups]


def group_attention_specs(config: KVCacheConfig, layer_specs: list[LayerCacheSpec]) -> list[LayerCacheSpec]:
    """The attention spec, or the state's, of each KV cache group.

    Raises:
        ValueError: layers of one group want different attention, so one plan cannot serve them.
    """
    specs = []
    for group in config.groups:
        distinct = {layer_specs[layer] for layer in group.layers} or {layer_specs[0]}  # none of them in this stage
        if len(distinct) > 1:
            raise ValueError(f"layers {group.layers} share a block table but differ in attention: {distinct}")
        spec = distinct.pop()
        specs.append(
            replace(spec, ring=dict(group.spec.options).get("ring", 1)) if isinstance(spec, MambaSpec) else spec
        )
    return specs


class FutureTokens:
    """The newest token of every row, kept where it was chosen.

    The host writes ~row, which is negative, where it does not know the newest token of a row. `tokens` has on the device what that stands for:
    int64 [vocab_size + num_rows + 1], where tokens[token] is the token, and tokens[~row] the newest one of the row. The row after the last is no request's.
    """

    def __init__(self, vocab_size: int, num_rows: int, device: torch.device) -> None:
        self.tokens = torch.arange(vocab_size + num_rows + 1, device=device)
        self.tokens[vocab_size:] = 0

    def put(self, rows: Tensor, token_ids: Tensor) -> None:
        """Keep what was chosen for these rows; -1, for a row that failed, as token 0: what comes of it is thrown away."""
        self.tokens[~rows] = token_ids.clamp(min=0)

    def resolve(self, token_ids: Tensor) -> Tensor:
        """The token ids with the newest tokens in the places of ~row."""
        return self.tokens[token_ids]  # one kernel, where to compare and choose would be five


def chooses_ahead(config: EngineConfig) -> bool:
    """Whether a step may begin before the host knows the tokens of the one before. A model that only pools chooses none."""
    return config.async_scheduling and config.speculative is None and config.model.pooling.generates


def _sampled_places(last: Int64, rows: Int64, drafts: Sequence[Draft]) -> tuple[Int64, Int64]:
    """The tokens after which something is sampled, and their rows: the last of each request, and as many before it as it has drafts."""
    counts = np.array([len(draft.token_ids) + 1 for draft in drafts])
    ends = np.cumsum(counts)
    return np.repeat(last - ends + 1, counts) + np.arange(ends[-1]), np.repeat(rows, counts)


GRAPH_BYTES = 1 << 30  # most memory that CUDA graphs may take
GREEDY_ROWS = 256  # most rows whose tokens a graph chooses: the logits of more take memory


class ModelRunner:
    """Executes scheduler outputs on one device.

    ``model``: loaded and not yet bound to a cache. ``backend``: the one that the model was built with.
    ``transforms``: applied to the logits of every request, besides each request's own. ``grammar``: compiles structured outputs; without
    it such requests fail. ``encoder``: of media; None for a model of text alone.
    """

    PROMPT_SLICE = 256  # prompt tokens whose logits are held at once

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        config: EngineConfig,
        transforms: Sequence[Transform] = (),
        grammar: GrammarCompiler | None = None,
        encoder: MediaEncoder | None = None,
    ) -> None:
        kv, limits = config.kv_cache, config.scheduler
        self.model, self.backend, self.config, self.grammar = model, backend, config, grammar
        self.device = torch_device(config.device)
        self.specs = group_attention_specs(kv, model.attention_specs(kv.block_size))
        self.kv_caches = new_kv_caches(backend, kv, self.specs, kv.num_blocks, self.device)
        self.swap_caches = new_swap_caches(backend, kv, self.specs, self.device)
        self.connector = make_connector_worker(config.args, backend, self.kv_caches, model.group)
        model.eager = config.args.enforce_eager
        model.bind(kv)
        self.batch = InputBatch(limits.max_num_seqs, *table_sizes(kv, limits.max_model_len))
        self.adapters = self._make_adapters() if config.args.enable_lora else None
        self.lora_slots, self._looks_back = np.full(limits.max_num_seqs, -1), bool(transforms)
        self.sampling = SamplingState(limits.max_num_seqs, model.spec.vocab_size, self.device)
        self.sampler = Sampler(None, transforms, config.args.logprobs_mode, model.ops.argmax)
        speculative = config.speculative
        self.drafter = self._make_drafter(speculative) if speculative and model.stage.is_last else None
        self._states: tuple[StepInputs, Tensor] | None = None  # hidden states of the last step, for a proposer
        self.pooler = Pooler(model.pooling_head, config.model.pooling.activation)
        self.media = EncoderOutputs(encoder, model.dtype, self.device)
        self.mrope = MRope() if any(rope and rope.sections for rope in model.spec.ropes) else None
        self.rejection = RejectionSampler(self.sampler, speculative.synthetic_acceptance_rate if speculative else None)
        self.expert_loads = ExpertLoads(model)
        self._latest: PendingStep | None = None
        self.future: FutureTokens | None = None
        self._prompt_done: dict[str, int] = {}
        self._parked, self._has_weights = dict[str, Parked](), True
        self.sample_log: SampleLog | None = None
        self.buffer: StepBuffer | None = None
        self.graphs: DecodeGraphs | None = None
        self._device_step, self._same = None, None  # type: DeviceStep | None, SameStep | None
        self.ladder = graph_ladder(limits.max_sampled_rows(speculative))
        self._generation = -1  # of the model that the graphs were captured of
        self._capture_problem: str | None = None
        if self.device.type != "cpu":
            self.buffer = StepBuffer(step_bytes(config), self.device)
            if chooses_ahead(config):
                self.future = FutureTokens(config.model.vocab_size, limits.max_num_seqs, self.device)
            self.graphs = self._make_graphs()
        self.device_drafts = self._make_device_drafts(encoder is not None or bool(transforms))
        self.planners = [spec.planner(backend, self.device, self.buffer) for spec in self.specs]

    def _make_drafter(self, speculative: SpeculativeConfig) -> Drafter:
        drafter = make_drafter(
            speculative, self.model.spec.vocab_size, DraftHost(self.model, self.backend, self.config)
        )
        self._draft_table = self.batch.block_tables[shared_group(self.config.kv_cache)] if drafter.uses_blocks else None
        return drafter

    def _make_graphs(self) -> DecodeGraphs | None:
        """None if steps are not to be recorded, or cannot be: states have no fixed plan, and a pipeline stage waits for the one before."""
        args, group = self.config.args, self.model.group
        alone = args.pipeline_parallel_size == 1 and not args.enforce_eager
        if not alone or not all(isinstance(spec, AttentionSpec) for spec in self.specs):
            return None
        return DecodeGraphs(self.device, GRAPH_BYTES, sys.stderr.isatty(), int if group is None else group.largest)

    def _make_device_drafts(self, more: bool) -> DeviceDrafts | None:
        """None if the host must make the drafts, if any. more: there are media or transforms, which only the host knows."""
        speculative = self.config.speculative
        if speculative is None or not speculative.drafts_on_device:
            return None
        reason = "there are media, or logits processors of all requests" if more else None
        if (reason := reason or host_drafts_reason(self.config, self.specs)) is None:
            return DeviceDrafts(self.config, self.model.spec.vocab_size, self.device)
        if speculative.method == "ngram_gpu":
            logger.warning("the host makes the drafts, and waits for the tokens of each step: %s", reason)
        return None

    def can_draft_ahead(self, recorded: bool) -> bool:
        """See `Executor.can_draft_ahead`: not while a choice depends on tokens, or is recorded, or no graph can be replayed."""
        seen = self.sample_log is not None or self.expert_loads.counts or self.expert_loads.on != recorded
        if self.device_drafts is None or self.graphs is None or seen:
            return False
        return self._may_replay(self.graphs) and not self.sampling.looks_back()

    def _make_adapters(self) -> AdapterStore:
        args, model = self.config.args, self.model
        keep = args.max_cpu_loras or args.max_loras
        return AdapterStore(model.lora, model.spec, args.max_lora_rank, model.dtype, keep)

    def prefetch_lora(self, key: str, path: str, digest: str) -> Future[None]:
        """Have an adapter read into main memory; see `AdapterStore`."""
        assert self.adapters is not None, "enable_lora is off"
        return self.adapters.prefetch(key, path, digest)

    def check_sleep(self, level: int) -> None:
        """Raises ValueError if the model, or the system, cannot do it."""
        if level == 2:
            check_loadable(self.model)
        self._parts()

    def _parts(self) -> dict[str, Parked]:
        caches = [*self.kv_caches, *self.swap_caches]
        return {"weights": Parked(weight_tensors(self.model)), "kv_cache": Parked(caches)}

    def sleep(self, level: int) -> int:
        """Give the memory of the KV cache back, and that of the weights: at level 1 a GPU's, which go to the host, at level 2 all,
        which are dropped. The memory of draft layers and their cache, of adapters, norms and captured steps is not given back.

        Returns:
            The bytes.

        Raises:
            ValueError: see `check_sleep`. OSError, RuntimeError: memory that was refused. All that was freed is taken again then, but
                `has_weights` tells whether weights were lost.
        """
        self.check_sleep(level)
        parked = self._parts()
        self._latest, self._has_weights = None, self._has_weights and level == 1
        try:
            freed = parked["weights"].free(keep=level == 1) + parked["kv_cache"].free()
        except BaseException:
            for each in parked.values():
                each.restore()
            self.model.bind(self.config.kv_cache)  # as in `wake_up`
            raise
        self._parked = parked
        return freed

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory again: that of `weights`, of `kv_cache`, or of both. If it is refused, a later call may try again."""
        for tag in tags:
            if tag in self._parked:
                self._parked[tag].restore()
                del self._parked[tag]
        # a GPU's memory has other addresses now: graphs captured with the old ones are thrown away
        self.model.bind(self.config.kv_cache)

    def check_weights(self, weights: Weights) -> None:
        """Raises what is wrong with them, before anything has changed; reads them all. See `open_weights`, `Decoder.check_weights`."""
        self.model.check_weights(open_weights(self.model, self.config.args, weights))

    def load_weights(self, weights: Weights) -> None:
        """Fill all weights anew; see `runtime.weights`. Adapters and draft layers (MTP and EAGLE heads, too) stay as they are."""
        tensors = open_weights(self.model, self.config.args, weights)
        self.wake_up(["weights"])
        self._has_weights = False
        self.model.renew()
        self.model.load_weights(tensors)
        self._has_weights = True

    def has_weights(self) -> bool:
        """Whether a step can run: they were not dropped, and no `load_weights` has failed half-way."""
        return self._has_weights

    def apply_model(self, function: Function | str) -> object:
        """Call a function with the model, and return its result. A str names the function, see `pack_function`."""
        return unpack_function(function)(self.model)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one step. A request that fails by itself is reported in ``errors``; the others go on."""
        return self.launch(output).result()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> "PendingStep":
        """Have the device execute one step, and do not wait. With `future` the next may be launched before the result is asked for."""
        clock = None if self.drafter is None or self.drafter.length is None else StepClock(self.device)
        pending, transfers = PendingStep(self, output, clock), output.kv_connector_metadata
        self._update_rows(output, pending.output)
        if output.swap_out or output.swap_in:
            self._swap_blocks(output)
        if self.connector is not None:
            self._load_blocks(self.connector, output, pending.output)
        if output.scheduled_encoder_inputs or output.free_encoder_mm_hashes:
            self.media.update(output)
        if not output.total_num_scheduled_tokens:
            return pending
        if output.recorded != self.expert_loads.on:
            self.expert_loads.switch(output.recorded)
        guesses = output.scheduled_spec_decode_tokens
        ahead = output.drafts_on_device
        if ahead and self._same is not None and self._relaunch(output, pending, self._same):
            return pending
        step = self.batch.prepare(output.num_scheduled_tokens, guesses, ahead)
        media = self.media.gather(step) if self.media.features else None
        chosen = np.flatnonzero(step.samples)
        drafts, last_and_rows = list[Draft](), (step.last_token[chosen], step.rows[chosen])
        if guesses or self.device_drafts is not None:
            drafts, last_and_rows = self._draft_inputs(step, chosen, output, last_and_rows)
        if self.adapters is not None:
            self.adapters.use(np.repeat(self.lora_slots[step.rows], step.counts))
        turned = step.positions if self.mrope is None or not self.mrope.ahead else self.mrope.positions(step)
        arrays, taken = (step.token_ids, turned, *last_and_rows), None
        if self.buffer is None:
            token_ids, positions, last, rows = map(torch.from_numpy, arrays)
            plans = [plan(batch) for plan, batch in zip(self.planners, step.attention, strict=True)]
            hidden = self.model.forward(token_ids, positions, self.kv_caches, plans, media)
        else:
            hidden, last, rows, taken = self._forward_buffered(step, arrays, self.buffer, media, ahead)
        if self.expert_loads.counts:
            pending.loads = self.expert_loads.take()
        if self.drafter is not None:
            hidden = self._keep_states(self.drafter, step, hidden)
        if not self.model.stage.is_last:
            return self._await_tokens(pending, output, step, chosen)
        if self._prompt_done:
            self._compute_prompt_logprobs(step, hidden, pending.output)
        if self.pooler.entries:
            self._pool(step, hidden, pending.output)
        self.batch.num_computed[step.rows] += step.counts
        sampled = hidden if len(last) == len(hidden) else hidden[last]
        if drafts:
            pending.verified = self._verify(step, chosen, sampled, drafts, self._device_step if ahead else None)
            pending.decision = None if ahead else output
        elif len(chosen):
            self._sample(step, chosen, sampled, rows, taken, pending)
        if transfers is not None or clock is not None:
            self._end_launch(pending, transfers)
        self._latest = pending
        return pending

    def _draft_inputs(
        self, step: StepInputs, chosen: Int64, output: SchedulerOutput, last_and_rows: tuple[Int64, Int64]
    ) -> tuple[list[Draft], tuple[Int64, Int64]]:
        """The draft that the step verifies for each request; the tokens after which something is sampled, and their rows (`last_and_rows` without drafts)."""
        guesses, ahead = output.scheduled_spec_decode_tokens, output.drafts_on_device
        names = [step.request_ids[i] for i in chosen]
        if self.drafter is None or self.device_drafts is not None:
            drafts = [Draft(guesses.get(name, ())) for name in names]
        else:
            drafts = [self.drafter.scheduled(name, guesses.get(name, ())) for name in names]
        if self.device_drafts is not None and ahead:
            self.device_drafts.refresh(self.batch, step, drafts, self.sampling.batch(step.request_ids))
            return drafts, (step.place, step.row_of_token)
        if self.device_drafts is not None:
            self.device_drafts.current[step.rows] = False
        return (drafts, _sampled_places(*last_and_rows, drafts)) if guesses else ([], last_and_rows)

    def _relaunch(self, output: SchedulerOutput, pending: "PendingStep", same: SameStep) -> bool:
        """Launch a step whose arrays the device has already; False if it has not."""
        if self.graphs is None or same.key not in self.graphs or not same.serves(output, self.batch):
            return False
        step = same.step
        hidden, same.device.chosen = self.graphs.replay(same.key)
        self.batch.num_computed[step.rows] += step.counts
        drafts = [Draft((NOT_DRAFTED,) * (count - 1)) for count in step.counts.tolist()]
        pending.verified = self._verify(step, np.arange(len(step.rows)), hidden, drafts, same.device)
        pending.decision, self._latest = None, pending
        return True

    def _await_tokens(
        self, pending: "PendingStep", output: SchedulerOutput, step: StepInputs, chosen: Int64
    ) -> "PendingStep":
        """End the launch of a pipeline stage that does not sample: see `learn`."""
        guesses = output.scheduled_spec_decode_tokens
        self.batch.num_computed[step.rows] += step.counts
        self.batch.awaited |= {(n := step.request_ids[i]): (output.step, len(guesses.get(n, ()))) for i in chosen}
        self._end_launch(pending, output.kv_connector_metadata)
        return pending

    def _end_launch(self, pending: "PendingStep", transfers: KVConnectorMetadata | None) -> None:
        """The layers have run, and the tokens are chosen."""
        if transfers is not None and self.connector is not None and not pending.output.failed_loras:
            self.connector.wait_for_save(transfers)
        if pending.clock is not None:
            pending.clock.stop()

    def _load_blocks(self, connector: ConnectorWorker, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if (transfers := output.kv_connector_metadata) is not None:
            result.invalid_block_ids = connector.start_load_kv(transfers)
        idle = not output.total_num_scheduled_tokens
        sends = {} if transfers is None else transfers.sends
        result.finished_sending, result.finished_recving = connector.end_transfers(sends, output.finished, idle)
        result.invalid_block_ids |= connector.get_block_ids_with_load_errors()

    def shutdown_connector(self) -> None:
        """See `ConnectorWorker.shutdown`."""
        if self.connector is not None:
            self.connector.shutdown()

    def learn(self, sampled: Sequence[tuple[int, Mapping[str, list[int]]]]) -> None:
        """Store what the last pipeline stage has sampled. For the stages before it.

        Args:
            sampled: (step, tokens by request). Those of a request that has lost its row since are passed over.
        """
        for step, tokens in sampled:
            for request_id, new in tokens.items():
                awaited, drafts = self.batch.awaited.get(request_id, (None, 0))
                if awaited == step:
                    del self.batch.awaited[request_id]
                    self.batch.accept(request_id, drafts, new)

    def _update_rows(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if self.drafter is not None:
            for request_id in output.preempted:
                self.drafter.preempt(request_id)
            for request_id in output.finished:
                view = self.sampling.requests.get(request_id)
                self.drafter.finish(request_id, [] if view is None else list(view.output_token_ids))
        for request_id in (*output.preempted, *output.finished):
            self.batch.drop(request_id)
            self.media.features.pop(request_id, None)
            if self.mrope is not None:
                self.mrope.drop(request_id)
            if request_id in self.sampling.requests:
                self.sampling.remove(request_id)
        for request_id in output.finished:
            self._prompt_done.pop(request_id, None)
            self.pooler.drop(request_id)
        for slot, key in output.lora_loads:
            assert self.adapters is not None, "enable_lora is off"
            try:
                self.adapters.load(slot, key)
            except AdapterError as error:
                result.failed_loras[key] = f"adapter {key!r} cannot be loaded: {error}"
        for new in output.new_requests:
            known = [*new.prompt_token_ids, *new.output_token_ids]
            row = self.batch.add(new.request_id, known, new.num_computed_tokens, new.block_ids)
            params, self.lora_slots[row] = new.sampling_params, new.lora_slot
            if new.mm_features:
                self.media.features[new.request_id] = new.mm_features
                if self.mrope is not None:
                    self.mrope.add(new.request_id, new.mm_features, len(new.prompt_token_ids))
            if isinstance(params, PoolingParams):
                self.pooler.add(new.request_id, params, len(known), new.num_computed_tokens)
                self.batch.draws[row] = False
                continue
            if params.prompt_logprobs is not None:
                self._prompt_done.setdefault(new.request_id, 0)
            try:
                self._add_sampling_row(new)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the other requests
                self.batch.draws[row] = False
                result.errors[new.request_id] = f"{type(error).__name__}: {error}"
        for request_id, block_ids in output.new_block_ids.items():
            self.batch.append_blocks(request_id, block_ids)

    def _add_sampling_row(self, new: NewRequestData) -> None:
        params, matcher = new.sampling_params, None
        if params.structured_outputs is not None and self.grammar is not None:
            matcher = self.grammar.matcher(params.structured_outputs)  # compiled before the request was scheduled
        self.sampling.add(new.request_id, params, new.prompt_token_ids, new.output_token_ids, params.seed, matcher)

    def _swap_blocks(self, output: SchedulerOutput) -> None:
        for device_cache, cpu_cache in zip(self.kv_caches, self.swap_caches, strict=True):
            self.backend.copy_blocks(device_cache, cpu_cache, output.swap_out)
            self.backend.copy_blocks(cpu_cache, device_cache, output.swap_in)

    def _forward_buffered(
        self,
        step: StepInputs,
        arrays: tuple[Int64, Int64, Int64, Int64],
        buffer: StepBuffer,
        media: Media | None,
        ahead: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Send all arrays of a step in one copy, and run the layers.

        Args:
            arrays: token ids [T] and positions, [T] or [3, T] (see `Rope`); of each request that samples, the last token's place among the T, and the row.
            ahead: only the device knows the tokens, so that a graph must place them.

        Returns:
            Hidden states after the last norm, [T, hidden_size]; the last two of the arrays, on the device; and the tokens that follow, int64
            [T], if a graph has chosen them.
        """
        self._same = None
        plain = media is None and len(arrays[3]) == len(step.token_ids) and arrays[1].ndim == 1
        if plain and (replayed := self._replay(step, arrays[1], buffer, ahead)) is not None:
            return replayed
        if ahead:
            raise RuntimeError(f"no CUDA graph for {len(step.token_ids)} tokens whose places only the device knows")
        buffer.begin()
        token_ids, positions, last, rows = map(buffer.put, arrays)
        plans = [plan(batch) for plan, batch in zip(self.planners, step.attention, strict=True)]
        buffer.send()
        return self._layers(token_ids, positions, plans, media), last, rows, None

    def _layers(self, token_ids: Tensor, positions: Tensor, plans: list[Plan], media: Media | None = None) -> Tensor:
        if self.future is not None:
            token_ids = self.future.resolve(token_ids)
        return self.model.forward(token_ids, positions, self.kv_caches, plans, media)

    def _replay(
        self, step: StepInputs, turned: Int64, buffer: StepBuffer, ahead: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
        """As `_forward_buffered`, by a CUDA graph, for a step in which each token is a query by itself; None if the backend knows no plan for one,
        or the buffer is too small. turned: positions of the rotation, [T]."""
        rows = len(step.token_ids)
        padded = rung(self.ladder, rows)
        if self.expert_loads.counts:
            return None  # a graph tells no one what its experts took
        adapted = self.adapters is not None and self.adapters.model.active
        if adapted and self.adapters is not None and not self.adapters.model.can_replay(padded or rows):
            return None
        one_each = len(step.attention[0].seq_lens) == rows
        if self.graphs is None or padded is None or not one_each or not self._may_replay(self.graphs):
            return None
        buffer.begin()
        try:
            (ids, token_ids), (at, positions), (of, rows_there) = (
                buffer.reserve((padded,), np.int64) for _ in range(3)
            )
            device = None if self.device_drafts is None else DeviceStep(self.device_drafts, rows_there, buffer)
            specs = [spec for spec in self.specs if isinstance(spec, AttentionSpec)]
            plans = [it for spec in specs if (it := self.backend.fixed_decode(padded, spec, buffer)) is not None]
            if len(plans) < len(self.specs):
                self.graphs = None
                return None
            greedy = self._takes_argmax(step, padded, ahead)
            shapes = (fixed.fill(batch) for fixed, batch in zip(plans, step.attention, strict=True))
            key = padded, adapted, greedy, *shapes
        except BufferFull:
            return None
        ids[:rows], ids[rows:], at[:rows], at[rows:] = step.token_ids, 0, turned, 0
        of[:rows], of[rows:] = step.row_of_token, len(self.batch.num_tokens)
        if device is not None and ahead:
            device.fill(step, self.batch)
        buffer.send()

        def run(made: list[Plan]) -> tuple[Tensor, ...]:
            if device is not None:
                device.place(plans, token_ids, positions)
            hidden = self._layers(token_ids, positions, made)
            return (hidden, self._choose(hidden, rows_there, device)) if greedy else (hidden,)

        def make() -> tuple[Callable[[], tuple[Tensor, ...]], object]:
            made = [fixed.plan() for fixed in plans]
            return lambda: run(made), (token_ids, positions, made, device)

        hidden, *chosen = self.graphs.run(key, make)
        self._device_step = device
        if device is not None and greedy:
            device.chosen = chosen.pop()
            self._same = SameStep(step, device, key, planned_lengths(self.batch, step))
        of_rows = rows_there[:rows]
        return hidden[:rows], of_rows, of_rows, chosen[0][:rows] if chosen else None

    def _takes_argmax(self, step: StepInputs, padded: int, ahead: bool) -> bool:
        """Whether a graph of `padded` tokens may choose the step's tokens as well: then the host has less to launch."""
        drafted = self.drafter is not None and not ahead
        if drafted or padded > GREEDY_ROWS or not step.samples.all():
            return False
        return self._wants_argmax(self.sampling.batch(step.request_ids))

    def _wants_argmax(self, batch: SamplingBatch) -> bool:
        """Whether the argmax of the logits is all that a batch needs of them."""
        if self.sample_log is not None or self.adapters is not None or self.model.group is not None:
            return False
        return self.sampler.takes_argmax(batch)

    def _choose(self, hidden: Tensor, rows: Tensor, device: DeviceStep | None) -> Tensor:
        """In a graph: the argmax token of each row, int64 [T]; of drafts of the device [2, T], see `DeviceStep.chosen`."""
        chosen = self.model.compute_argmax(hidden)
        if self.future is not None:
            self.future.put(rows, chosen)
        if device is None:
            return chosen
        both = torch.stack([chosen, chosen])
        device.compare(both[0], both[1])
        return both

    def _may_replay(self, graphs: DecodeGraphs) -> bool:
        """Whether a graph can stand for the model as it is now. Graphs of the model before a change are dropped."""
        if self._generation != generation():
            graphs.clear()
            self._generation, self._capture_problem = generation(), capture_problem(self.model)
        return self._capture_problem is None

    def get_sampler(self) -> Sampler:
        """The sampler, for code that shows how it chooses."""
        return self.sampler

    def _sample(
        self,
        step: StepInputs,
        chosen: Int64,
        hidden: Tensor,
        rows_there: Tensor,
        taken: Tensor | None,
        pending: "PendingStep",
    ) -> None:
        """Choose a token for each of the requests `chosen`; hidden: [len(chosen), hidden_size]; rows_there: their rows, on the device.
        taken: the tokens, if a graph has chosen them."""
        rows = step.rows[chosen]
        batch = self.sampling.batch([step.request_ids[i] for i in chosen])
        if self.adapters is not None:
            self.adapters.use(self.lora_slots[rows])
        if taken is not None:
            drawn = self.sampler.take(batch, taken)
        elif self.graphs is not None and self._may_replay(self.graphs) and self._wants_argmax(batch):
            drawn = self.sampler.take(batch, self.model.compute_argmax(hidden))
        else:
            logits = self.model.compute_logits(hidden)
            if self._latest is not None and (self._looks_back or self.sample_log is not None or batch.looks_back):
                self._latest.result()
            if self.sample_log is not None:
                log_samples(self.sample_log, batch.requests, logits)
            drawn = self.sampler.start(logits, batch)
        if taken is None and self.future is not None:
            self.future.put(rows_there, drawn.token_ids)
        places = self.batch.append_tokens(rows, ~rows)  # ~row stands for a token that the host does not know yet
        pending.drawn, pending.views, pending.rows, pending.places = drawn, batch.requests, rows, places
        self.sampling.columns["num_output_tokens"][batch.rows] += 1  # `SamplingState.arrive` will name it

    def _propose(self, drafter: Drafter, output: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> None:
        """Add draft tokens for the requests that will go on after this step. seconds: what it took,
        without what the caller did between its launch and its result."""
        sampled, scheduled = result.sampled_token_ids, output.scheduled_spec_decode_tokens
        drafts = {name: len(scheduled.get(name, ())) for name in sampled}
        only = output.total_num_scheduled_tokens == len(sampled) + sum(drafts.values())
        accepted = {name: result.num_accepted_tokens.get(name, 0) for name in drafts}
        drafter.observe(len(sampled), drafts, accepted, seconds if only else None)
        if self._states is not None:
            states, self._states = self._hidden_states(*self._states), None
            drafter.read(states)
        asked = (r for name, new in sampled.items() if (r := self._draft_request(name, new[-1])) is not None)
        result.draft_token_ids = drafter.propose(asked, len(sampled))
        if drafter.problem is not None:
            result.proposer_error = f"{type(drafter.problem).__name__}: {drafter.problem}"

    def _keep_states(self, drafter: Drafter, step: StepInputs, hidden: Tensor) -> Tensor:
        """Keep what a proposer reads until the step's tokens are known. Returns the hidden states alone, [T, hidden_size]."""
        if drafter.reads:
            self._states = step, hidden
        size = self.model.spec.hidden_size
        return hidden if hidden.shape[1] == size else hidden[:, :size].contiguous()

    def _hidden_states(self, step: StepInputs, hidden: Tensor) -> list[HiddenStates]:
        """The states that a proposer reads: for requests that go on, those of all places whose next token is certain."""
        states = []
        for i, name in enumerate(step.request_ids):
            row, start = step.rows[i], int(step.starts[i])
            first, end = int(step.positions[start]), int(self.batch.num_computed[row])
            if name in self.sampling.requests and first < end < self.batch.num_tokens[row]:
                states.append(HiddenStates(self._describe(name, 0), first, hidden[start : start + end - first]))
        return states

    def _draft_request(self, request_id: str, newest: int) -> DraftRequest | None:
        """A request as a proposer sees it; None if it ends, or may not have two more tokens."""
        view, row = self.sampling.requests[request_id], self.batch.row_of[request_id]
        known, longest = int(self.batch.num_tokens[row]), self.config.scheduler.max_model_len
        left = longest - known
        if view.params.max_tokens is not None:
            left = min(left, view.params.max_tokens - len(view.output_token_ids))
        if left <= 1 or view.params.ends_with(newest) or self.drafter is None:
            return None
        return self._describe(request_id, min(self.drafter.config.num_speculative_tokens, left - 1))

    def _describe(self, request_id: str, most: int) -> DraftRequest:
        view, row = self.sampling.requests[request_id], self.batch.row_of[request_id]
        known = int(self.batch.num_tokens[row])
        token_ids = self.batch.token_ids[row, :known]
        token_ids.flags.writeable = False
        request = DraftRequest(request_id, token_ids, len(view.prompt_token_ids), most, view.params, view.seed)
        return request if (table := self._draft_table) is None else replace(request, blocks=table.of(row))

    def _verify(
        self,
        step: StepInputs,
        chosen: Int64,
        hidden: Tensor,
        drafts: Sequence[Draft],
        verifier: DeviceVerifier | None,
    ) -> Callable[[ModelRunnerOutput], None]:
        """As `_sample`, in a step with draft tokens. hidden: [sum of (drafts + 1), hidden_size]. verifier: of drafts of the device.

        Returns what waits for the tokens, and puts those that are accepted into a result.
        """
        batch = self.sampling.batch([step.request_ids[i] for i in chosen])
        if self.adapters is not None:
            self.adapters.use(np.repeat(self.lora_slots[step.rows[chosen]], [len(d.token_ids) + 1 for d in drafts]))
        if verifier is not None:
            logits = self.model.compute_logits(hidden) if verifier.chosen is None else None
            finish = self.rejection.start_on_device(logits, batch, drafts, verifier)
            return lambda result: self._accept(batch.requests, drafts, finish(), result, on_device=True)
        logits = self.model.compute_logits(hidden)
        if self.sample_log is not None:
            log_samples(self.sample_log, batch.requests, logits, [draft.token_ids for draft in drafts])
        self.rejection.explains = self.sample_log is not None
        finish = self.rejection.start(logits, batch, drafts, self._looks_back)
        return lambda result: self._accept(batch.requests, drafts, finish(), result)

    def _accept(
        self,
        views: Sequence[RequestView],
        drafts: Sequence[Draft],
        verified: Sequence[Verified],
        result: ModelRunnerOutput,
        on_device: bool = False,
    ) -> None:
        """Keep what requests with drafts got."""
        for view, draft, got in zip(views, drafts, verified, strict=True):
            name = view.request_id
            if self.sample_log is not None:
                forget_samples(self.sample_log, view, len(draft.token_ids) + 1 - len(got.token_ids))
            if self.sampling.requests.get(name) is view:  # else it has lost its row while the step ran
                self.batch.accept(name, len(draft.token_ids), got.token_ids)
            if on_device:
                result.device_draft_token_ids[name] = got.device_drafts
            if got.token_ids:
                result.sampled_token_ids[name], result.num_accepted_tokens[name] = got.token_ids, got.num_accepted
            if got.odds:
                result.draft_odds[name] = got.odds
            if got.logprobs:
                result.logprobs[name] = got.logprobs
            if got.error is not None:
                result.errors[name] = got.error

    def _pool(self, step: StepInputs, hidden: Tensor, result: ModelRunnerOutput) -> None:
        """Hand the hidden states of requests that want a vector to the pooler."""
        starts = step.starts
        for i, request_id in enumerate(step.request_ids):
            if request_id in self.pooler:
                vector = self.pooler.take(request_id, hidden[int(starts[i]) : int(starts[i + 1])])
                if vector is not None:
                    result.pooled[request_id] = vector

    def _compute_prompt_logprobs(self, step: StepInputs, hidden: Tensor, result: ModelRunnerOutput) -> None:
        starts = step.starts
        for i, request_id in enumerate(step.request_ids):
            view = self.sampling.requests.get(request_id)
            if request_id not in self._prompt_done or view is None or view.params.prompt_logprobs is None:
                continue
            row, done, prompt = step.rows[i], self._prompt_done[request_id], view.prompt_token_ids
            count = view.params.prompt_logprobs
            computed = int(self.batch.num_computed[row])
            first, end = max(computed, done), min(computed + int(step.counts[i]), len(prompt) - 1)
            if first >= end:
                continue
            at = int(starts[i]) - computed
            result.prompt_logprobs[request_id] = self._logprobs_of(
                hidden[at + first : at + end], prompt[first + 1 : end + 1], count, self.lora_slots[row]
            )
            self._prompt_done[request_id] = end

    def _logprobs_of(
        self, hidden: Tensor, token_ids: Sequence[int], count: int, lora_slot: int
    ) -> list[dict[int, Logprob]]:
        """Reports on ``token_ids`` [R] after the hidden states [R, hidden_size], a slice at a time."""
        reports: list[dict[int, Logprob]] = []
        for start in range(0, len(hidden), self.PROMPT_SLICE):
            part = slice(start, start + self.PROMPT_SLICE)
            if self.adapters is not None:
                self.adapters.use(np.full(len(hidden[part]), lora_slot))
            reports += compute_logprobs(self.model.compute_logits(hidden[part]), token_ids[part], count)
        return reports


class StepClock:
    """Seconds from here to where a device has done what it was given before `stop`, whatever the host does meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._start = time.perf_counter()
        self._end: float | None = None
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        """The device was given all of its work. A CPU has done it."""
        self._end = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Waits for the device. 0.0 for a step with no layers, which has not called `stop`."""
        if self._end is None:
            return 0.0
        if not self._events:
            return self._end - self._start
        start, end = self._events
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


@dataclass(slots=True)
class PendingStep:
    """A step that the device has executed or will, and the tokens that the host does not know yet.

    Attributes:
        decision: what is executed; None when its drafts were asked for.
        clock: how long the device takes; None without a drafter.
        output: what is known of the result.
        drawn: the tokens, or None if there are none or they have been taken.
        verified: waits for the tokens of a step with drafts, and puts them into a result; None as `drawn`.
        views, rows, places: for the requests that get a token, their views, their rows in the `InputBatch` (which can differ from those
            in the `SamplingState`), and the place in the row where the token belongs.
        loads: the loads of a recorded step, see `ExpertLoads.take`.
    """

    runner: ModelRunner
    decision: SchedulerOutput | None
    clock: StepClock | None = None
    output: ModelRunnerOutput = field(default_factory=ModelRunnerOutput)
    drawn: PendingSample | None = None
    verified: Callable[[ModelRunnerOutput], None] | None = None
    views: Sequence[RequestView] = ()
    rows: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    places: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    loads: Sequence[tuple[int, Tensor]] = ()

    def result(self) -> ModelRunnerOutput:
        """Wait for the tokens, put them into their rows, and ask for the next drafts."""
        seconds = 0.0 if self.clock is None or self.decision is None else self.clock.seconds()
        start = time.perf_counter()
        if self.loads:
            self.output.expert_loads = tuple((layer, tuple(counts.tolist())) for layer, counts in self.loads)
            self.loads = ()
        if self.verified is not None:
            self.verified(self.output)
            self.verified = None
        if self.drawn is not None:
            drawn, self.drawn = self.drawn.finish(), None
            self._take(drawn)
        if (decision := self.decision) is not None and (drafter := self.runner.drafter) is not None:
            self.decision = None
            self.runner._propose(drafter, decision, self.output, seconds + time.perf_counter() - start)
        return self.output

    def _take(self, drawn: SamplerOutput) -> None:
        runner, output, token_ids = self.runner, self.output, drawn.token_ids.numpy()
        alive = [runner.sampling.requests.get(view.request_id) is view for view in self.views]  # else it lost its row
        keep = np.flatnonzero(alive)
        known = token_ids[keep].clip(min=0)  # -1 for one that failed, which may be in the next step already
        runner.batch.set_tokens(self.rows[keep], self.places[keep], known)
        for view, token_id, logprobs, lives in zip(self.views, token_ids.tolist(), drawn.logprobs, alive, strict=True):
            if view.request_id in drawn.errors:
                continue
            if lives:
                runner.sampling.arrive(view, token_id)
            output.sampled_token_ids[view.request_id] = [token_id]
            if logprobs is not None:
                output.logprobs[view.request_id] = [logprobs]
        output.errors.update(drawn.errors)
