"""Attention backend protocol: layer spec, step batch, paged KV cache, plan and attend."""

# Generated from nbs/attention/backend.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.step_buffer import StepBuffer
from minivllm.core.module import Module

FP8 = torch.float8_e4m3fn
"""A sign, 4 bits of exponent, 3 of mantissa: a byte for numbers up to 448."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What one attention layer computes, and how its cache is divided into blocks.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key-value heads; each serves `num_heads // num_kv_heads` consecutive query heads (GQA).
        head_dim: size of one head.
        scale: factor on the scores before the softmax, usually `head_dim ** -0.5`.
        block_size: tokens per KV block.
        dtype: that of queries, keys, values and the result.
        sliding_window: a query sees itself and the `sliding_window - 1` tokens before it; None for all of them.
        chunk: a query sees the tokens of its own chunk of `chunk` positions only (chunked local attention).
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` before the softmax (Gemma 2).
        kv_dtype: that of keys and values in the cache: `FP8`, `torch.int8` (with scales, see `int8_parts`), or None for `dtype`.
        sinks: each head has one more score in its softmax, which belongs to no token (see `AttentionBackend.sinks`).
        value_dim: values are the first `value_dim` numbers of the keys, and the cache holds keys only (latent attention);
            None for separate values.
        sees_ahead: some queries see beyond themselves, see `AttentionBatch.last_key`.
        causal: a token sees no later one. If not, it sees the whole prompt, and there is no cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    dtype: torch.dtype
    sliding_window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    kv_dtype: torch.dtype | None = None
    sinks: bool = False
    value_dim: int | None = None
    sees_ahead: bool = False
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "sliding_window", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"AttentionSpec.{name} must be at least 1, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"AttentionSpec: num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.sliding_window is not None and self.chunk is not None:
            raise ValueError(
                f"AttentionSpec: sliding_window ({self.sliding_window}) and chunk ({self.chunk}) exclude each other"
            )
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"AttentionSpec.soft_cap must be above 0, got {self.soft_cap}")
        if self.kv_dtype not in (None, FP8, torch.int8):
            raise ValueError(f"AttentionSpec.kv_dtype must be {FP8}, torch.int8 or None, got {self.kv_dtype}")
        if self.value_dim is not None and not 1 <= self.value_dim <= self.head_dim:
            raise ValueError(f"AttentionSpec.value_dim must be in 1..{self.head_dim}, got {self.value_dim}")
        if self.value_dim is not None and self.kv_dtype is not None:
            raise ValueError(f"{self.kv_dtype} is not implemented for latent attention; use kv_cache_dtype='auto'")

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    def planner(
        self, backend: "AttentionBackend", device: torch.device, buffer: StepBuffer | None = None
    ) -> "Callable[[AttentionBatch], Plan]":
        """The function that plans the steps of a group of such layers; with a `buffer`, its arrays go there."""
        if buffer is None:
            return partial(backend.plan, spec=self, device=device)
        return partial(backend.plan_into, spec=self, buffer=buffer)

    @property
    def out_dim(self) -> int:
        """Numbers of a head in the result."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def beyond_kernels(self) -> str | None:
        """Why a backend that is causal and knows only keys, values and a softmax over them cannot do this; None if it can."""
        if self.sees_ahead:
            return "its kernels are causal, and pictures of this model see ahead; 'sdpa' and 'reference' can do that"
        if not self.causal:
            return "its attention is causal; attention_backend='encoder' looks both ways"
        if self.sinks:
            return "its kernels have no attention sinks; attention_backend='sdpa' and 'reference' do"
        return None if self.value_dim is None else "its kernels read no latent cache; 'sdpa' and 'reference' do"

    def first_key(self, positions: np.ndarray) -> np.ndarray:
        """The first position that a query at each of `positions` sees. It sees everything from there to itself.

        Full, sliding-window and chunked attention differ in nothing but this number.
        """
        if self.sliding_window is not None:
            return np.maximum(positions - (self.sliding_window - 1), 0)
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return np.zeros_like(positions)


@dataclass
class AttentionBatch:
    """One step of one KV cache group, on the host. Requests are laid end to end along the token axis.

    Attributes:
        query_start_loc: int32 [B + 1]; request `r` owns the tokens `query_start_loc[r] : query_start_loc[r + 1]`.
        seq_lens: int32 [B]; tokens of each request after this step. Its queries are the last ones of them.
        block_table: int32 [B, max_blocks]; block `j` of a row holds the positions from `j * block_size` on.
        slot_mapping: int64 [T]; where the key and value of each token go: `block * block_size + offset`.
        last_key: int64 [T], the last position that each query sees; None if it is its own.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray
    slot_mapping: np.ndarray
    last_key: np.ndarray | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)

    @property
    def query_lens(self) -> np.ndarray:
        return np.diff(self.query_start_loc)

    def check(self, block_size: int) -> None:
        """Refuse an inconsistent batch.

        Raises:
            ValueError: the arrays contradict each other; names the first thing that is wrong.
        """
        b, t, lens = len(self.seq_lens), len(self.slot_mapping), np.diff(self.query_start_loc)
        if self.query_start_loc.shape != (b + 1,) or self.query_start_loc[0] != 0 or self.query_start_loc[-1] != t:
            raise ValueError(
                f"AttentionBatch.query_start_loc must be {b + 1} offsets from 0 to {t}, got {self.query_start_loc}"
            )
        if b and lens.min() < 1:
            raise ValueError(f"AttentionBatch: every request needs at least one query, got query lengths {lens}")
        if (self.seq_lens < lens).any():
            raise ValueError(f"AttentionBatch: seq_lens {self.seq_lens} are shorter than the query lengths {lens}")
        if self.block_table.ndim != 2 or len(self.block_table) != b:
            raise ValueError(
                f"AttentionBatch.block_table must be [{b}, max_blocks], got shape {self.block_table.shape}"
            )
        longest = self.seq_lens.max(initial=0)
        if longest > self.block_table.shape[1] * block_size:
            raise ValueError(
                f"AttentionBatch.block_table has {self.block_table.shape[1]} blocks of {block_size} tokens a request,"
                f" too few for a sequence of {longest}"
            )


class KVScales(NamedTuple):
    """The factors that turn the numbers of one layer's fp8 cache into keys and values."""

    k: float = 1.0
    v: float = 1.0


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """`x / scale` rounded to fp8; what is beyond +-448 becomes +-448, NaN stays NaN."""
    most = torch.finfo(FP8).max
    return (x.float() * (1 / scale)).clamp(-most, most).to(FP8)


INT8_SCALE_BYTES = 4
LEAST_PEAK = 1e-30


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each vector `x[..., D]` rounded to whole numbers up to 127, int8, and what they are multiplied by, float32 [...].

    vLLM's `int8_per_token_head`: nothing has to be calibrated, since every head of every token has its own scale. A vector with a
    NaN gets NaN as its scale.
    """
    peak = x.float().abs().amax(-1).clamp_min(LEAST_PEAK)
    return (x.float() * (127 / peak)[..., None]).round().to(torch.int8), peak / 127


def int8_parts(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an int8 cache `[2, num_blocks, block_size, num_kv_heads, head_dim + 4]`: whole numbers
    [2, num_blocks, block_size, num_kv_heads, head_dim], and their scales, float32 [2, num_blocks, num_kv_heads, block_size].

    In the memory of a block the scales lie after all numbers, so a copy of the block includes them.
    """
    size, heads, wide = kv_cache.shape[2:]
    memory, numbers = kv_cache.flatten(2), size * heads * (wide - INT8_SCALE_BYTES)
    scales = memory[..., numbers:].view(torch.float32).unflatten(-1, (heads, size))
    return memory[..., :numbers].unflatten(-1, (size, heads, -1)), scales


def as_bytes(x: Tensor) -> Tensor:
    """A view of an fp8 tensor as bytes, which torch can move on every device; any other tensor as it is."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


@dataclass
class Plan:
    """What a backend works out once per step and group, and uses in every layer of the group.

    Attributes:
        spec: that of the group's layers.
        slot_mapping: int64 [T] on the device of the cache.
    """

    spec: AttentionSpec
    slot_mapping: Tensor


class KnownTokens(NamedTuple):
    """Tokens of requests by row, on a device that knows them before the host does.

    Attributes:
        ids: int32 [rows, longest]. counts: int64 [rows], how many there are.
        guesses: int32 [rows, k], draft tokens that follow them; `NOT_DRAFTED` for none.
    """

    ids: Tensor
    counts: Tensor
    guesses: Tensor


class FixedDecode(Protocol):
    """A step of up to N requests with one token each, for a CUDA graph: sizes and addresses are fixed, contents are not.

    Made once per step, at the same place in the step's buffer, so that its arrays have the addresses that they had when the graph
    was captured.
    """

    def fill(self, batch: AttentionBatch) -> Hashable:
        """Write this step's arrays. Gives what the launches depend on: a graph is good for one such value."""
        ...

    def place(self, token_ids: Tensor, positions: Tensor, places: Tensor, rows: Tensor, tokens: KnownTokens) -> None:
        """Correct the step on the device, for tokens that the host planned as if all draft tokens of the step before were accepted.

        Args:
            token_ids, positions: int64 [N], overwritten like the slots and lengths of the plan.
            places: int32 [N]: how far a token stands after the newest of its row; below 0 for one that is planned right.
            rows: int64 [N], the tokens' rows in `tokens`.
        """
        ...

    def plan(self) -> Plan:
        """The plan of N rows; those past the end of the batch have no work, and write to slot 0, in the null block."""
        ...


class AttentionBackend(Module):
    """Attention over a paged KV cache. A backend keeps no state between calls.

    Attributes:
        name: what users call it.
        batch_invariant: the result for a token is bit-identical whatever else is in the batch.
        layer_ops, linear_method: names of the `LayerOps` and the `LinearMethod` that go with it.
        scales: those of an fp8 cache.
        sinks: [num_heads], one more score of each head's softmax, which takes weight and gives nothing (Xiao et al., 2023).
    """

    name: ClassVar[str]
    batch_invariant: ClassVar[bool] = False
    layer_ops: ClassVar[str] = "torch"
    linear_method: ClassVar[str] = "torch"
    scales: KVScales = KVScales()
    sinks: Tensor | None = None

    @abstractmethod
    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """Why this backend cannot do `spec` on `device`, or None if it can."""

    @abstractmethod
    def plan(self, batch: AttentionBatch, spec: AttentionSpec, device: torch.device) -> Plan:
        """Prepare a step of one group of layers.

        Raises:
            ValueError: the batch is inconsistent, see `AttentionBatch.check`.
        """

    def plan_into(self, batch: AttentionBatch, spec: AttentionSpec, buffer: StepBuffer) -> Plan:
        """As `plan`, with host arrays put into `buffer`, which is sent before the plan is used. Here: they go by themselves."""
        return self.plan(batch, spec, buffer.device)

    def fixed_decode(self, num_rows: int, spec: AttentionSpec, buffer: StepBuffer) -> FixedDecode | None:
        """A plan for up to `num_rows` single tokens whose launches never change. Here None: this backend has no such plans."""
        return None

    @abstractmethod
    def attend(self, q: Tensor, kv_cache: Tensor, plan: Plan) -> Tensor:
        """Attention of every token to its own request's cache, as the plan's `AttentionSpec` says.

        Args:
            q: [T, num_heads, head_dim]; prefill chunks and single decode tokens alike.
            kv_cache: the layer's cache; the step's own keys and values have been written.
            plan: this step's, from this backend.

        Returns:
            [T, num_heads, head_dim] in the dtype of `q`. Slots past the end of a request are never read into it.
        """

    def kv_cache_shape(self, num_blocks: int, spec: AttentionSpec) -> tuple[int, ...]:
        """Shape of one layer's cache. Dimension 1 is the block in every layout; inside a block a backend may differ."""
        parts = 2 if spec.value_dim is None else 1
        scale = INT8_SCALE_BYTES if spec.kv_dtype == torch.int8 else 0
        if scale and spec.head_dim * spec.block_size % 4:
            raise ValueError(
                f"an int8 cache needs block_size x head_dim in whole float32, and {spec.block_size} x {spec.head_dim} is not"
            )
        return (parts, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim + scale)

    def kv_cache_dtype(self, spec: AttentionSpec) -> torch.dtype:
        """Dtype of the cache."""
        return spec.kv_dtype or spec.dtype

    def scaled(self, scales: KVScales) -> "AttentionBackend":
        """This backend, for a layer whose fp8 cache has these scales."""
        backend = copy.copy(self)
        backend.scales = scales
        return backend

    def with_sinks(self, sinks: Tensor) -> "AttentionBackend":
        """This backend, for a layer that has these sinks, [num_heads]."""
        backend = copy.copy(self)
        backend.sinks = sinks
        return backend

    def new_kv_cache(self, num_blocks: int, spec: AttentionSpec, device: torch.device) -> Tensor:
        """An empty cache of one layer."""
        return torch.zeros(self.kv_cache_shape(num_blocks, spec), dtype=self.kv_cache_dtype(spec), device=device)

    def write(self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store the step's keys and values; in an fp8 cache divided by their scales, at most +-448; in an int8 cache see `to_int8`.

        Args:
            k, v: [T, num_kv_heads, head_dim]; a latent cache has no place for v, which is left out.
            kv_cache: the layer's cache, changed in place.
            slot_mapping: int64 [T], one slot per token.
        """
        if kv_cache.dtype == torch.int8:
            numbers, scales = int8_parts(kv_cache)
            block, offset = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
            for half, x in enumerate((k, v)):
                numbers[half, block, offset], scales[half, block, :, offset] = to_int8(x)
            return
        if kv_cache.dtype == FP8:
            k, v = (as_bytes(to_fp8(x, scale)) for x, scale in zip((k, v), self.scales, strict=True))
            kv_cache = as_bytes(kv_cache)
        for half, x in zip(kv_cache, (k, v), strict=False):
            half.flatten(0, 1).index_copy_(0, slot_mapping, x)

    def copy_blocks(self, src_cache: Tensor, dst_cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, between two caches (swapping) or within one. All are read before any is written.

        Args:
            src_cache, dst_cache: caches of one layer in this backend's layout; may be the same tensor, or on two devices.
            pairs: (block in `src_cache`, block in `dst_cache`).

        Raises:
            ValueError: two pairs write the same block.
        """
        if not pairs:
            return
        src, dst = zip(*pairs, strict=True)
        if len(set(dst)) != len(dst):
            raise ValueError(f"copy_blocks: a block is written twice: {list(pairs)}")
        blocks = as_bytes(src_cache).index_select(1, torch.tensor(src, device=src_cache.device)).to(dst_cache.device)
        as_bytes(dst_cache).index_copy_(1, torch.tensor(dst, device=dst_cache.device), blocks)
