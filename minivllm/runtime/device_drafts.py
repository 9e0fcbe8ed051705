"""Device drafts: the GPU verifies drafts and makes the next before the host knows the tokens."""

# Generated from nbs/runtime/device_drafts.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.backend import AttentionSpec, FixedDecode, KnownTokens
from minivllm.attention.numba_cuda import cuda_ops
from minivllm.attention.state import LayerCacheSpec
from minivllm.attention.step_buffer import StepBuffer
from minivllm.core.config import EngineConfig
from minivllm.core.output import SchedulerOutput
from minivllm.core.speculative import NOT_DRAFTED
from minivllm.runtime.input_batch import InputBatch, Int64, StepInputs, round_lengths
from minivllm.sampling.logprobs import HostCopy
from minivllm.sampling.random import uniforms
from minivllm.sampling.state import Array, SamplingBatch
from minivllm.spec_decode.rejection import Draft, RejectionSampler


def host_drafts_reason(config: EngineConfig, specs: Sequence[LayerCacheSpec]) -> str | None:
    """Why the host must make the drafts of an engine, or None if the device can. specs: those of the KV cache groups."""
    args = config.args
    full = (isinstance(spec, AttentionSpec) and spec.sliding_window is None and spec.chunk is None for spec in specs)
    reasons = {
        "the device is a CPU": config.device == "cpu",
        "async_scheduling is off": not config.async_scheduling,
        "enforce_eager is on, and CUDA graphs place drafts": args.enforce_eager,
        "the attention backend is batch-invariant": config.attention_backend.endswith("_invariant"),
        "there are several ranks": args.world_size > 1,
        "not all layers have full attention": not all(full),
        "enable_lora is on": args.enable_lora,
        "there is a KV connector": args.kv_transfer is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class DeviceDrafts:
    """The tokens of all rows of an `InputBatch` on the device, which appends what it accepts and guesses what comes next.

    Attributes:
        tokens: all tokens of each row that the device knows, and its guesses at what follows.
        luck: int32 [rows, longest], for synthetic acceptance: 1 at n if a guess after n tokens is accepted; None for the exact rule.
        current: bool [rows]: whether they are the newest; not so for a row whose last step verified drafts of the host.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, device: torch.device) -> None:
        rows, speculative = config.scheduler.max_num_seqs, config.speculative
        assert speculative is not None
        self.k, self.vocab_size = speculative.num_speculative_tokens, vocab_size
        self.rate = speculative.synthetic_acceptance_rate
        self.lookup = None if speculative.method == "synthetic" else speculative.lookup
        self.current = np.zeros(rows, np.bool_)
        ids = torch.zeros((rows, config.scheduler.max_model_len + self.k + 1), dtype=torch.int32, device=device)
        guesses = torch.full((rows, self.k), NOT_DRAFTED, dtype=torch.int32, device=device)
        self.tokens = KnownTokens(ids, torch.zeros(rows, dtype=torch.int64, device=device), guesses)
        self.luck = None if self.rate is None else torch.zeros_like(ids)

    def refresh(self, batch: InputBatch, step: StepInputs, drafts: Sequence[Draft], requests: SamplingBatch) -> None:
        """Tell the device of the step's rows that are not current: their tokens, and drafts that the host has made."""
        for i in np.flatnonzero(~self.current[step.rows]).tolist():
            row, count = step.rows[i], int(batch.num_tokens[step.rows[i]])
            guesses = [*drafts[i].token_ids, *[NOT_DRAFTED] * self.k][: self.k]
            self.tokens.ids[row, :count] = torch.from_numpy(batch.token_ids[row, :count])
            self.tokens.counts[row] = count
            self.tokens.guesses[row] = torch.tensor(guesses, dtype=torch.int32)
            if self.luck is not None and self.rate is not None:
                outputs = requests.column("num_output_tokens")[i]
                before = np.arange(self.luck.shape[1]) - count + outputs
                seed = np.broadcast_to(requests.column("seed")[i] ^ np.uint64(RejectionSampler.SYNTHETIC), before.shape)
                self.luck[row] = torch.from_numpy((uniforms(seed, before) < self.rate).astype(np.int32))
        self.current[step.rows] = True


class DeviceStep:
    """Arrays of one step, in a `StepBuffer`: room for `padded` tokens, and as many requests.

    Attributes:
        rows: int64 [T], the row of each token.
        places: int32 [T], how far a token stands after the newest of its request; `NOT_DRAFTED` if the host knows the tokens.
        requests: int32 [B, 3]: the row, the first of the T tokens, how many drafts follow it; -1 for no request.
        chosen: int64 [2, T], if a graph has verified already: the tokens, and the drafts that they were compared with.
    """

    def __init__(self, of: DeviceDrafts, rows: Tensor, buffer: StepBuffer) -> None:
        self.of, self.rows = of, rows
        self._places, self.places = buffer.reserve((len(rows),), np.int32)
        self._requests, self.requests = buffer.reserve((len(rows), 3), np.int32)
        self._places[:] = NOT_DRAFTED
        self._told = np.zeros(0, np.int64)
        self.chosen: Tensor | None = None

    def fill(self, step: StepInputs, batch: InputBatch) -> None:
        """Write the arrays of a step whose tokens the device knows."""
        count, requests = len(step.rows), self._requests
        self._places[: len(step.place)], self._told = step.place, batch.num_tokens[step.row_of_token]
        requests[:count, 0], requests[:count, 1], requests[:count, 2] = step.rows, step.starts[:-1], step.counts - 1
        requests[count:] = -1

    def place(self, plans: Sequence[FixedDecode], token_ids: Tensor, positions: Tensor) -> None:
        """Correct what the host planned: see `FixedDecode.place`."""
        for plan in plans:
            plan.place(token_ids, positions, self.places, self.rows, self.of.tokens)

    def uniforms(self, seeds: Array, counts: Array) -> Tensor:
        """See `DeviceVerifier.uniforms`."""
        later = counts[:, None] + np.arange(self.of.k + 2)
        table = uniforms(np.broadcast_to(seeds[:, None], later.shape), later)
        numbers, told = (torch.from_numpy(x).to(self.rows.device, non_blocking=True) for x in (table, self._told))
        ahead = self.of.tokens.counts[self.rows[: len(told)]] - told
        return numbers.gather(1, ahead[:, None])[:, 0]

    def verify(self, token_ids: Tensor) -> HostCopy:
        """See `DeviceVerifier.verify`. Makes the drafts of the next step, too; with synthetic acceptance the tokens change."""
        drafts = torch.empty_like(token_ids)
        self.compare(token_ids, drafts)
        return HostCopy(drafts)

    def compare(self, token_ids: Tensor, drafts: Tensor) -> None:
        """As `verify`, which puts the drafts into a tensor, int64 [T]."""
        of, ways = self.of, {"vocab_size": self.of.vocab_size, "lookup": self.of.lookup}
        cuda_ops().verify_drafts(token_ids, drafts, self.requests, *of.tokens, of.luck, **ways)


@dataclass(frozen=True, slots=True)
class SameStep:
    """A step whose graph has chosen the tokens. It can be replayed as it is, since the device moves the tokens by itself.

    key: names the graph. planned: int64 [B], see `planned_lengths`.
    """

    step: StepInputs
    device: DeviceStep
    key: Hashable
    planned: Int64

    def serves(self, output: SchedulerOutput, batch: InputBatch) -> bool:
        """Whether a decision wants the same of the same requests in the same blocks, with lengths that were planned for."""
        scheduled, step = output.num_scheduled_tokens, self.step
        if output.new_block_ids or output.new_requests or output.preempted or output.finished:
            return False
        if list(scheduled) != step.request_ids or list(scheduled.values()) != step.counts.tolist():
            return False
        return bool((planned_lengths(batch, step) == self.planned).all())


def planned_lengths(batch: InputBatch, step: StepInputs) -> Int64:
    """The lengths that are planned for a step's requests, int64 [B]."""
    return round_lengths(batch.num_computed[step.rows] + step.counts)
