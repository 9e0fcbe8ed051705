"""Cost models of a step: constant, roofline, fitted to a recorded trace."""

# Generated from nbs/lab/cost.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import numpy as np

from minivllm.core.config import STATE_KINDS, KVCacheConfig, KVCacheSpec, make_kv_cache_groups, unify_block_size
from minivllm.core.events import FoldReader, read
from minivllm.core.output import SchedulerOutput
from minivllm.core.trace import Trace


@dataclass(slots=True)
class StepWork:
    """The amount of work in one step.

    Attributes:
        num_tokens: tokens computed.
        num_requests: rows of the batch.
        num_sampled: rows that get a token: one row of logits each.
        decode_context: tokens whose keys and values are read by rows of a single token.
        prefill_context: the same for rows of several tokens.
        prefill_pairs: (query, key) pairs of rows of several tokens.
        swapped_tokens: tokens whose KV blocks are copied to or from the CPU.
    """

    num_tokens: int = 0
    num_requests: int = 0
    num_sampled: int = 0
    decode_context: int = 0
    prefill_context: int = 0
    prefill_pairs: int = 0
    swapped_tokens: int = 0

    def add(self, computed: int, n: int) -> None:
        """Count a row that computes `n` tokens after `computed` earlier ones."""
        self.num_tokens += n
        self.num_requests += 1
        if n == 1:
            self.decode_context += computed + 1
        else:
            self.prefill_context += computed + n
            self.prefill_pairs += n * computed + n * (n + 1) // 2


class CostModel(ABC):
    """How long steps take. Derive from it, or use `Constant`, `Roofline` or `CostModel.fit(trace)`."""

    @abstractmethod
    def seconds(self, output: SchedulerOutput, work: StepWork) -> float:
        """Seconds from this decision to the next one, if there is no wait for new requests."""

    def num_gpu_blocks(self, block_size: int) -> int | None:
        """KV blocks that the device has room for, or None if the model of cost does not know."""
        return None

    @staticmethod
    def fit(trace: Trace, knots: Sequence[int] = (1, 8, 32, 128, 512, 2048)) -> FittedCost:
        """A cost model from the step times of a recorded run: see `FittedCost`.

        Raises:
            ValueError: the trace has too few steps that were timed, or no time passed in them.
        """
        if sorted(set(knots)) != list(knots) or not knots or knots[0] < 1:
            raise ValueError(f"knots must be growing numbers of tokens, at least 1, got {list(knots)}")
        timed = [(work, total) for work, _, total in timed_steps(trace) if total is not None and work.num_tokens]
        times = np.array([total for _, total in timed])
        if len(timed) < 20 or not times.sum() > 0:
            raise ValueError(
                f"cannot fit a cost model: {len(timed)} steps were timed, {times.sum():.3g} s in all; at least 20 that took time are needed"
            )
        largest = max(work.num_tokens for work, _ in timed)
        used = [k for k in knots if k < largest] or [knots[0]]
        rows = np.array([features(work, used) for work, _ in timed])
        even = np.arange(len(rows)) % 2 == 0
        guess = np.where(even, rows @ _solve(rows[~even], times[~even]), rows @ _solve(rows[even], times[even]))
        off = np.abs(guess / np.maximum(times, 1e-12) - 1)
        error = {"median": np.median(off), "p90": np.quantile(off, 0.9), "total": guess.sum() / times.sum() - 1}
        error = {name: float(value) for name, value in error.items()}
        return FittedCost(used, _solve(rows, times).tolist(), len(rows), error)


@dataclass(frozen=True)
class Constant(CostModel):
    """Every step takes `per_step` seconds and `per_token` seconds for each of its tokens."""

    per_step: float = 0.01
    per_token: float = 0.0

    def __post_init__(self) -> None:
        if self.per_step < 0 or self.per_token < 0 or self.per_step + self.per_token == 0:
            raise ValueError(f"a step must take time: got per_step={self.per_step}, per_token={self.per_token}")

    def seconds(self, output: SchedulerOutput, work: StepWork) -> float:
        return self.per_step + self.per_token * work.num_tokens


@dataclass(frozen=True)
class Device:
    """What a roofline needs to know of a device.

    Attributes:
        flops: multiply-adds count as two, per second, dense, in the dtype of the model; data sheet.
        bandwidth: bytes per second of its memory; data sheet (for the CPU: measured).
        memory_bytes: memory for weights and KV cache.
        compute_efficiency, memory_efficiency: the share of those that kernels reach.
        step_overhead: seconds per step that hide behind nothing.
        layer_overhead: seconds per layer that hide behind nothing (launches, small kernels).
        swap_bandwidth: bytes per second between its memory and the CPU's.
    """

    name: str
    flops: float
    bandwidth: float
    memory_bytes: float
    compute_efficiency: float = 0.75
    memory_efficiency: float = 0.77
    step_overhead: float = 3e-4
    layer_overhead: float = 2e-5
    swap_bandwidth: float = 25e9


# data sheets of the 80 GB SXM cards, dense bfloat16; measurements of two cores of an AMD EPYC with AVX-512 bfloat16
DEVICES = {
    "h100": Device("h100", 989e12, 3.35e12, 80e9),
    "a100": Device("a100", 312e12, 2.04e12, 80e9),
    "cpu-2-core": Device("cpu-2-core", 830e9, 62e9, 16e9, 0.8, 0.4, 1e-3, 3e-5, 10e9),
}


@dataclass(frozen=True)
class ModelShape:
    """What a roofline needs to know of a decoder with gated MLPs.

    Attributes:
        state_layers: of the layers, those with a state in the place of attention.
        state_bytes: of one request's state in one of them.
        state_weights: of the linear layers of one of them, without its MLP.
        num_experts, experts_per_token: of a mixture; each expert is an MLP of `intermediate_size`. 0 and 1 for one MLP.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    dtype_bytes: int = 2
    state_layers: int = 0
    state_bytes: int = 0
    state_weights: int = 0
    num_experts: int = 0
    experts_per_token: float = 1

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - self.state_layers

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of one layer; the mean, if there are two kinds."""
        return int(self._weights(max(1, self.num_experts)))

    @property
    def active_weights(self) -> float:
        """Those that one token is multiplied with."""
        return self._weights(self.experts_per_token)

    def weights_read(self, tokens: int) -> float:
        """Those that some of this many tokens are multiplied with, if all experts are equally likely."""
        experts = max(1, self.num_experts)
        return self._weights(experts * (1 - (1 - self.experts_per_token / experts) ** tokens))

    def _weights(self, experts: float) -> float:
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mixers = self.attention_layers * attention + self.state_layers * self.state_weights
        return mixers // self.num_layers + experts * 3 * self.hidden_size * self.intermediate_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all linear layers and one embedding table."""
        return self.dtype_bytes * (self.num_layers * self.layer_weights + self.hidden_size * self.vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over all layers."""
        return 2 * self.attention_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @classmethod
    def from_config(cls, config: dict[str, Any], name: str = "model", dtype_bytes: int = 2) -> ModelShape:
        """From a Hugging Face configuration of a dense decoder. Raises KeyError naming what is missing."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
        sizes = (config["num_hidden_layers"], hidden, heads, kv_heads, head_dim)
        return cls(name, *sizes, config["intermediate_size"], config["vocab_size"], dtype_bytes)


MODELS = {
    "llama-3.1-8b": ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
    "llama-2-7b": ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
    "qwen3-0.6b": ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936),
    "mixtral-8x7b": ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, num_experts=8, experts_per_token=2),
    "smollm2": ModelShape("smollm2", 30, 576, 9, 3, 64, 1536, 49152),
    "mamba2-130m": ModelShape(
        "mamba2-130m", 24, 768, 1, 1, 64, 0, 50288, state_layers=24, state_bytes=807_936, state_weights=3_753_984
    ),
}


class Roofline(CostModel):
    """Step times from what a device can do and what a model needs.

    Args:
        device: a name in `DEVICES`, or a `Device`.
        model: a name in `MODELS`, or a `ModelShape` (see `ModelShape.from_config`).

    Raises:
        ValueError: an unknown name, or a model that does not fit into the device's memory.
    """

    def __init__(self, device: str | Device = "h100", model: str | ModelShape = "llama-3.1-8b") -> None:
        self.device: Device = known(device, DEVICES, "device")
        self.model: ModelShape = known(model, MODELS, "model")
        if self.model.weight_bytes >= self.device.memory_bytes:
            raise ValueError(
                f"{self.model.name} needs {self.model.weight_bytes / 1e9:.0f} GB for its weights; {self.device.name} has {self.device.memory_bytes / 1e9:.0f} GB"
            )

    def __repr__(self) -> str:
        return f"Roofline({self.device.name!r}, {self.model.name!r})"

    def parts(self, work: StepWork) -> dict[str, float]:
        """Seconds of a step by part: `linear`, `attention`, `states`, `elementwise`, `logits`, `swap` (of keys and values), `overhead`."""
        m, d = self.model, self.device
        flops, bandwidth = d.flops * d.compute_efficiency, d.bandwidth * d.memory_efficiency
        size, tokens, context = m.dtype_bytes, work.num_tokens, work.decode_context + work.prefill_context
        computing = bool(tokens)
        pairs = work.decode_context + work.prefill_pairs
        activations = tokens * size * (16 * m.hidden_size + 3 * m.experts_per_token * m.intermediate_size)
        head, kv_bytes = m.hidden_size * m.vocab_size, 2 * m.num_kv_heads * m.head_dim * size

        def roof(operations: float, num_bytes: float) -> float:
            return max(operations / flops, num_bytes / bandwidth)

        return {
            "linear": m.num_layers * roof(2 * tokens * m.active_weights, computing * size * m.weights_read(tokens)),
            "attention": m.attention_layers * roof(pairs * 4 * m.num_heads * m.head_dim, context * kv_bytes),
            # each number decays, is added to and read for each token; a state is read and written once a step
            "states": m.state_layers * roof(5 * tokens * (m.state_bytes // 4), 2 * work.num_requests * m.state_bytes),
            "elementwise": m.num_layers * roof(0, activations),
            "logits": roof(2 * work.num_sampled * head, bool(work.num_sampled) * size * head),
            "swap": work.swapped_tokens * m.kv_bytes_per_token / d.swap_bandwidth,
            "overhead": d.step_overhead + computing * m.num_layers * d.layer_overhead,
        }

    def seconds(self, output: SchedulerOutput, work: StepWork) -> float:
        return sum(self.parts(work).values())

    def num_gpu_blocks(self, block_size: int, utilization: float = 0.9) -> int:
        """KV blocks that fit beside the weights into `utilization` of the memory."""
        return self.kv_cache(block_size, utilization).num_blocks

    def kv_cache(self, block_size: int = 16, utilization: float = 0.9, mamba_cache_mode: str = "none") -> KVCacheConfig:
        """The pool and the groups of the model, with as many blocks as fit.

        Args:
            block_size: tokens; a hybrid gets a multiple, see `unify_block_size`.
            utilization: share of the memory that weights and blocks may take.
            mamba_cache_mode: see `EngineArgs`.
        """
        m = self.model
        attention = KVCacheSpec("full", block_size, m.num_kv_heads, m.head_dim, None, m.dtype_bytes)
        state = KVCacheSpec(STATE_KINDS[mamba_cache_mode], block_size, 1, max(1, m.state_bytes), None, 1)
        specs = [state] * m.state_layers + [attention] * m.attention_layers
        size = unify_block_size(specs, block_size)
        groups = make_kv_cache_groups([replace(spec, block_size=size) for spec in specs])
        room = self.device.memory_bytes * utilization - m.weight_bytes
        block = len(groups[0].layers) * groups[0].spec.bytes_per_block
        return KVCacheConfig(max(2, int(room / block)), size, groups)


def known(value: Any, table: dict[str, Any], what: str, error: type[Exception] = ValueError) -> Any:
    """A value, or what a table has under its name. Raises `error` for a name that is not there; says which is near."""
    if not isinstance(value, str):
        return value
    if value not in table:
        near = get_close_matches(value, table, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(table)}"
        raise error(f"unknown {what} {value!r}; {hint}")
    return table[value]


class _StepTimes(FoldReader):
    """Work and times of the recorded steps that came to their end."""

    def begin(self) -> None:
        self.found: list[tuple[StepWork, float, float | None]] = []
        self._end: float | None = None
        self._on_step(-1, 0.0)

    def close(self, next_start: float | None) -> None:
        """The next step begins, or None does."""
        if self._end is not None:
            total = None if self._idle or next_start is None else next_start - self._start
            self.found.append((self._work, self._end - self._start, total))

    def _on_step(self, step: int, time: float) -> None:
        self.close(time)
        self._work, self._start, self._end, self._idle = StepWork(), time, None, False

    def _on_schedule(self, num_scheduled: dict[str, int]) -> None:
        for name, n in num_scheduled.items():
            self._work.add(self.fold.now.requests[name].num_computed_tokens, n)

    def _on_swap_out(self, request: str, blocks: Sequence[Any]) -> None:
        self._work.swapped_tokens += len(blocks) * self.header.block_size

    _on_free_cpu = _on_swap_out

    def _on_rollback(self, num_rejected: dict[str, int]) -> None:
        self._work.num_sampled += sum(num_rejected.values())

    def _on_update(self, time: float, tokens: dict[str, tuple[int, ...]], step: int | None = None) -> None:
        if step is not None:
            raise ValueError("steps of a recording with async_scheduling overlap; record with async_scheduling=False")
        self._end = time
        self._work.num_sampled += sum(map(len, tokens.values()))

    def _on_finish(self, request: str, reason: str, stop_reason: Any) -> None:
        self._idle = self._idle or len(self.fold.now.requests) == 1


def timed_steps(trace: Trace) -> Iterator[tuple[StepWork, float, float | None]]:
    """Work, seconds until the model had answered, and seconds until the next decision, for each recorded step that came to its end.

    The last is None where the engine had nothing left to do in between, or the recording ended.

    Raises:
        ValueError: steps overlapped (async scheduling), so that none has its own time.
    """
    reader = _StepTimes()
    read(trace, reader)
    reader.close(None)
    return iter(reader.found)


def _nonnegative_least_squares(
    a: np.ndarray, b: np.ndarray, rounds: int = 3000, start: np.ndarray | None = None
) -> np.ndarray:
    """The x >= 0 that minimises |a x - b|, by coordinate descent from `start`. a: [rows, columns] float64."""
    scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    gram, target = (a / scale).T @ (a / scale), (a / scale).T @ b
    x = np.zeros(a.shape[1]) if start is None else start * scale
    for _ in range(rounds):
        before = x.copy()
        for i in range(len(x)):
            if gram[i, i] > 0:
                x[i] = max(0.0, x[i] + (target[i] - gram[i] @ x) / gram[i, i])
        if np.abs(x - before).max() <= 1e-10 * max(1e-300, x.max()):
            break
    return x / scale


class FittedCost(CostModel):
    """Step times learned from a recorded run. Made by `CostModel.fit(trace)`.

    The time grows with the number of tokens along a line that bends at `knots`, and straight with logits rows, context, pairs and swaps.

    Attributes:
        knots: numbers of tokens at which the line bends.
        weights: seconds per feature, in the order of `features`.
        num_steps: steps that it was fitted to.
        error: relative errors on steps that a fit to the other half of the steps has not seen: `median` and `p90` of single steps, and
            `total` of the sum (positive: predicted too much).
    """

    def __init__(self, knots: Sequence[int], weights: Sequence[float], num_steps: int, error: dict[str, float]) -> None:
        self.knots, self.weights, self.num_steps, self.error = tuple(knots), tuple(weights), num_steps, error

    def __repr__(self) -> str:
        signs = {"total": "+"}
        errors = ", ".join(f"{name} {value:{signs.get(name, '')}.1%}" for name, value in self.error.items())
        return f"FittedCost({self.num_steps} steps; error on unseen steps: {errors})"

    def seconds(self, output: SchedulerOutput, work: StepWork) -> float:
        return sum(w * f for w, f in zip(self.weights, features(work, self.knots), strict=True))


def features(work: StepWork, knots: Sequence[int]) -> list[float]:
    """What a fitted cost is linear in: 1, a ramp between each two knots and one behind the last, logits rows, context, pairs, swaps."""
    tokens = work.num_tokens
    ramps = [min(1.0, max(0.0, (tokens - low) / (high - low))) for low, high in pairwise(knots)]
    beyond = max(0.0, tokens / knots[-1] - 1.0)
    return [1.0, *ramps, beyond, work.num_sampled, work.decode_context, work.prefill_pairs, work.swapped_tokens]


def _solve(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Weights with small relative errors. Steps far off the others (other programs had the machine) count less: Huber's rule, reweighted.

    That is the time of a usual step. Steps are slowed more often than sped up, so in the end all weights are raised until the sum is right,
    with no step counted as more than three times the usual.
    """
    share = 1 / np.maximum(times, 1e-9)
    relative, target = rows * share[:, None], times * share
    weights = _nonnegative_least_squares(relative, target)
    for _ in range(6):
        off = np.abs(relative @ weights - target)
        trust = np.sqrt(np.minimum(1.0, max(float(np.median(off)), 1e-3) / np.maximum(off, 1e-9)))
        weights = _nonnegative_least_squares(relative * trust[:, None], target * trust, start=weights)
    usual = rows @ weights
    return weights * (np.minimum(times, 3 * usual).sum() / usual.sum())


@dataclass(frozen=True)
class Speculative(CostModel):
    """A cost model with draft tokens.

    Attributes:
        base: seconds of a step by its work.
        acceptance: the chance that a draft token is right, if all before it were.
        num_speculative_tokens: most draft tokens of a request in a step.
        draft_seconds: the proposer's time for each token of a draft, for all requests at once; 0 for one that only looks back.
        dynamic_length: draft only as many tokens as pay by `base`.
        seed: of what is accepted.

    Raises:
        ValueError: a number out of range.
    """

    base: CostModel
    acceptance: float
    num_speculative_tokens: int = 4
    draft_seconds: float = 0.0
    dynamic_length: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise ValueError(f"acceptance must be in [0, 1], got {self.acceptance}")
        if min(given := (self.num_speculative_tokens, self.draft_seconds)) < 0:
            raise ValueError(f"num_speculative_tokens and draft_seconds must be at least 0, got {given}")

    def seconds(self, output: SchedulerOutput, work: StepWork) -> float:
        longest = max(map(len, output.scheduled_spec_decode_tokens.values()), default=0)
        return self.base.seconds(output, work) + longest * self.draft_seconds

    def num_gpu_blocks(self, block_size: int) -> int | None:
        return self.base.num_gpu_blocks(block_size)

    def length(self, batch_size: int, context: int) -> int:
        """How many draft tokens each request of a batch gets. context: tokens that all of them attend to, together."""
        if not self.dynamic_length:
            return self.num_speculative_tokens
        rates = []
        for n in range(self.num_speculative_tokens + 1):
            rows = batch_size * (1 + n)
            work = StepWork(rows, batch_size, rows, prefill_context=context, prefill_pairs=context * (1 + n))
            gained = sum(self.acceptance**i for i in range(n + 1))
            rates.append(gained / (self.base.seconds(SchedulerOutput(0, {}, rows), work) + n * self.draft_seconds))
        return int(np.argmax(rates))
