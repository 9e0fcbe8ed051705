"""CUDA attention backend on numba kernels, with fixed-shape decode for CUDA graphs."""

# Generated from nbs/attention/numba_cuda.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import bisect
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.backend import FP8, AttentionBackend, AttentionBatch, AttentionSpec, KnownTokens, Plan
from minivllm.attention.step_buffer import StepBuffer

if TYPE_CHECKING:
    from minivllm_kernels.cuda.ops import AttentionPlan
    from minivllm_kernels.cuda.planning import AttentionShape


@dataclass
class NumbaCudaPlan(Plan):
    """A step's plan on the device."""

    device_plan: "AttentionPlan"


def cuda_ops() -> ModuleType:
    """The kernels behind torch calls, `minivllm_kernels.cuda.ops`. Raises ImportError if numba is not installed."""
    from minivllm_kernels.cuda import ops

    return ops


def start_compilers(attention_backend: str) -> None:
    """If this backend may be chosen and none of its kernels is cached, start the process that compiles them, before this one imports numba."""
    if attention_backend in ("auto", NumbaCudaBackend.name) and importlib.util.find_spec("minivllm_kernels"):
        from minivllm_kernels.cuda import launch

        launch.start_compilers()


def compile_attention(specs: Sequence[AttentionSpec], device: torch.device) -> None:
    """Let other processes compile this backend's kernels for layers with these specs, if they are not cached."""
    cuda_ops().compile_attention(dict.fromkeys(map(_shape, specs)), device)


def _dtype(spec: AttentionSpec) -> str:
    return str(spec.dtype).removeprefix("torch.")


@functools.cache
def _shape(spec: AttentionSpec) -> "AttentionShape":
    from minivllm_kernels.cuda.planning import AttentionShape

    kinds = spec.soft_cap is not None, spec.kv_dtype == FP8, spec.kv_dtype == torch.int8
    return AttentionShape(_dtype(spec), spec.head_dim, spec.group_size, spec.block_size, *kinds)


class NumbaCudaBackend(AttentionBackend):
    """Paged attention by numba.cuda kernels on an NVIDIA GPU of compute capability 8.0 or later.

    Single-token rows are read by a split-KV kernel, longer ones by a tiled prefill kernel. Sliding windows, chunked
    local attention and soft caps; bfloat16 and float16; an int8 cache; an fp8 cache from compute capability 8.9 on.
    """

    name: ClassVar[str] = "numba_cuda"
    layer_ops: ClassVar[str] = "numba_cuda"
    linear_method: ClassVar[str] = "gemv"
    capturable = True

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        if (beyond := spec.beyond_kernels) is not None:
            return beyond
        if device.type != "cuda":
            return f"it needs an NVIDIA GPU, and the device is {device}"
        try:
            from minivllm_kernels.cuda.planning import shape_unsupported

            reason = cuda_ops().device_unsupported(device)
        except ImportError as error:
            return f'{error}; install the kernels with pip install "minivllm[cuda]"'
        reason = reason or shape_unsupported(_dtype(spec), spec.head_dim, spec.group_size, spec.block_size)
        return reason or (cuda_ops().fp8_unsupported(device) if spec.kv_dtype == FP8 else None)

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, device: torch.device) -> NumbaCudaPlan:
        return self._plan(batch, spec, device, None)

    def plan_into(self, batch: AttentionBatch, spec: AttentionSpec, buffer: StepBuffer) -> NumbaCudaPlan:
        return self._plan(batch, spec, buffer.device, buffer.put)

    def fixed_decode(self, num_rows: int, spec: AttentionSpec, buffer: StepBuffer) -> "NumbaCudaFixedDecode | None":
        return None if self.batch_invariant else NumbaCudaFixedDecode(num_rows, spec, buffer)

    def _plan(
        self,
        batch: AttentionBatch,
        spec: AttentionSpec,
        device: torch.device,
        put: Callable[[np.ndarray], Tensor] | None,
    ) -> NumbaCudaPlan:
        batch.check(spec.block_size)
        device_plan = cuda_ops().plan_attention(
            _shape(spec),
            kv_heads=spec.num_kv_heads,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
            scale=spec.scale,
            device=device,
            window=spec.sliding_window,
            chunk=spec.chunk,
            soft_cap=spec.soft_cap,
            batch_invariant=self.batch_invariant,
            put=put,
        )
        return NumbaCudaPlan(spec, device_plan.slot_mapping, device_plan)

    def write(self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        cuda_ops().reshape_and_cache(k, v, kv_cache, slot_mapping, *self.scales)

    def attend(self, q: Tensor, kv_cache: Tensor, plan: Plan) -> Tensor:
        if not isinstance(plan, NumbaCudaPlan):
            raise TypeError(f"attend needs a plan made by this backend, not {type(plan).__name__}")
        return cuda_ops().paged_attention(q, kv_cache, plan.device_plan, None, *self.scales)

    def copy_blocks(self, src_cache: Tensor, dst_cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        targets = {b for _, b in pairs}
        if len(targets) != len(pairs):
            raise ValueError(f"copy_blocks: a block is written twice: {list(pairs)}")
        reachable = all(x.is_cuda or x.is_pinned() for x in (src_cache, dst_cache))
        overlap = src_cache.data_ptr() == dst_cache.data_ptr() and any(a in targets for a, _ in pairs)
        if not pairs:
            return
        if overlap or not reachable:  # the generic way reads everything before it writes
            AttentionBackend.copy_blocks(self, src_cache, dst_cache, pairs)
            return
        device = src_cache.device if src_cache.is_cuda else dst_cache.device
        cuda_ops().copy_blocks(src_cache, dst_cache, torch.tensor(pairs, dtype=torch.int64).to(device))


class NumbaCudaFixedDecode:
    """See `FixedDecode`. The block table is the only array whose size changes from step to step: it comes last in the buffer,
    and the work items say where in the buffer each row of it begins."""

    def __init__(self, num_rows: int, spec: AttentionSpec, buffer: StepBuffer) -> None:
        self.spec, self.buffer, self.shape, self.warps = spec, buffer, _shape(spec), 0
        self._rungs = cuda_ops().decode_rungs(self.shape, spec.num_kv_heads, num_rows, buffer.device)
        self._slots, self.slot_mapping = buffer.reserve((num_rows,), np.int64)
        self._items, self.items = buffer.reserve((self._rungs[-1], 8), np.int32)

    def fill(self, batch: AttentionBatch) -> tuple[int, int]:
        spec, count = self.spec, batch.num_reqs
        sequences = self.shape, spec.num_kv_heads, batch.seq_lens, None, None
        work = cuda_ops().decode_work(*sequences, self.buffer.device, spec.sliding_window, spec.chunk)
        self._slots[:count], self._slots[count:] = batch.slot_mapping, 0
        start = self.buffer.used // np.dtype(np.int32).itemsize
        table, _ = self.buffer.reserve(batch.block_table.shape, np.int32)
        table[...] = batch.block_table
        items, used = self._items, len(work.items)
        items[:used], items[used:] = work.items, -1
        items[:used, 0] = start + work.items[:, 0] * table.shape[1]
        launched = self._rungs[bisect.bisect_left(self._rungs, used)]
        self.warps, self.items = work.warps, self.items[:launched]
        return work.warps, launched

    def place(self, token_ids: Tensor, positions: Tensor, places: Tensor, rows: Tensor, tokens: KnownTokens) -> None:
        slots, block_size = self.slot_mapping, self.spec.block_size
        cuda_ops().place_tokens(
            token_ids, positions, slots, places, rows, self.items, self.buffer.words, *tokens, block_size
        )

    def plan(self) -> NumbaCudaPlan:
        spec = self.spec
        device_plan = cuda_ops().fixed_decode_plan(
            self.shape,
            kv_heads=spec.num_kv_heads,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
            slot_mapping=self.slot_mapping,
            items=self.items,
            warps=self.warps,
            words=self.buffer.words,
        )
        return NumbaCudaPlan(spec, self.slot_mapping, device_plan)


class NumbaCudaInvariantBackend(NumbaCudaBackend):
    """The same in batch-invariant mode: a token's result is bit-identical whatever else is in the batch, and however its
    prompt was cut. Every row goes through the prefill kernel, so decoding few long sequences is slower."""

    name: ClassVar[str] = "numba_cuda_invariant"
    capturable = True
    batch_invariant: ClassVar[bool] = True
