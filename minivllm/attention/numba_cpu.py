"""CPU attention backend on numba kernels that read the paged KV cache in place."""

# Generated from nbs/attention/numba_cpu.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.backend import (
    FP8,
    INT8_SCALE_BYTES,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVScales,
    Plan,
)
from minivllm_kernels.cpu.compile import Kernel, host_is_x86, host_lanes, host_registers, kernel, pack, run
from minivllm_kernels.cpu.matmul.layout import host_tiles
from minivllm_kernels.cpu.planning import INT8, AttentionStep, CPUAttentionShape
from minivllm_kernels.cpu.program import LAUNCHER

"""Paged attention by numba kernels on the CPU: no gather, decode and prefill alike, any mix of lengths.

A row's result does not depend on what else is in the batch, on how a prompt is cut into chunks, on the number of
threads, or on where blocks lie: every sum has one order. One thing is left out: a CPU's tile unit, where there is one, multiplies bf16 for
several tokens of a request at once, and rounds otherwise than the vectors do for a token that comes alone. `numba_cpu_invariant`
leaves the unit out.
"""

BITS = {torch.float32: 32, torch.bfloat16: 16, FP8: 8, torch.int8: INT8}


@functools.cache
def _kv_factors(scales: KVScales) -> np.ndarray:
    """float32 [2, 2]: what keys and values read from an fp8 cache are multiplied by, and what is written to it. Kernels read fp8
    divided by 256."""
    return np.array([[256 * x for x in scales], [1 / x for x in scales]], np.float32)


@dataclass
class NumbaCPUPlan(Plan):
    """A step's work list, with the kernel that it is for."""

    step: AttentionStep


class NumbaCPUBackend(AttentionBackend):
    """Attention by numba kernels that read the pages where they lie.

    Args:
        kv_dtype: the cache's, if the model asks for none: torch.float32 or torch.bfloat16; None for the model's own.
    """

    name: ClassVar[str] = "numba_cpu"
    layer_ops: ClassVar[str] = "numba_cpu"
    linear_method: ClassVar[str] = "cpu"
    capturable = True
    by_tiles: ClassVar[bool] = True

    def __init__(self, kv_dtype: torch.dtype | None = None) -> None:
        if kv_dtype not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"kv_dtype must be torch.float32 or torch.bfloat16, got {kv_dtype}")
        self.kv_dtype = kv_dtype

    def unsupported(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """See `AttentionBackend.unsupported`. The kernels need numba, a CPU, float32 or bf16, and a head and block size that they are built for."""
        if (beyond := spec.beyond_kernels) is not None:
            return beyond
        if device.type != "cpu":
            return f"its kernels run on the CPU, and the device is {device}"
        if importlib.util.find_spec("numba") is None:
            return "numba is not installed (pip install 'minivllm[kernels]')"
        if spec.dtype not in (torch.float32, torch.bfloat16):
            return f"it computes from float32 or bfloat16, and the model is {str(spec.dtype).removeprefix('torch.')}"
        if spec.kv_dtype == FP8 and host_is_x86() and host_lanes() == 4:
            return "its kernels read an fp8 cache by F16C, which this CPU lacks; attention_backend='sdpa' and 'reference' need none"
        return CPUAttentionShape.problem(spec.head_dim, spec.block_size)

    def kv_cache_shape(self, num_blocks: int, spec: AttentionSpec) -> tuple[int, ...]:
        """Keys and values of a head lie together in a block, keys transposed; see `minivllm_kernels.cpu.cache`."""
        scale = INT8_SCALE_BYTES if spec.kv_dtype == torch.int8 else 0
        return (1, num_blocks, spec.num_kv_heads, 2, (spec.head_dim + scale) * spec.block_size)

    def kv_cache_dtype(self, spec: AttentionSpec) -> torch.dtype:
        """Dtype of the cache."""
        return spec.kv_dtype or self.kv_dtype or spec.dtype

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, device: torch.device) -> NumbaCPUPlan:
        batch.check(spec.block_size)
        step = AttentionStep(
            _shape(spec, self.kv_cache_dtype(spec), self.by_tiles and host_tiles()),
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            num_kv_heads=spec.num_kv_heads,
            scale=spec.scale,
            window=spec.sliding_window or 0,
            chunk=spec.chunk or 0,
            soft_cap=spec.soft_cap or 0.0,
            threads=torch.get_num_threads(),
        )
        return NumbaCPUPlan(spec=spec, slot_mapping=torch.as_tensor(batch.slot_mapping), step=step)

    def attend(self, q: Tensor, kv_cache: Tensor, plan: Plan) -> Tensor:
        assert isinstance(plan, NumbaCPUPlan)
        q = q if (q.stride(1), q.stride(2)) == (q.shape[2], 1) else q.contiguous()
        out = q.new_empty(q.shape)
        factors = _kv_factors(self.scales).ctypes.data
        plan.step.run(q.data_ptr(), out.data_ptr(), kv_cache.data_ptr(), q.stride(0), factors)
        return out

    def write(self, k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `AttentionBackend.write`. Tokens with a negative slot are not stored."""
        tokens, heads, head_dim = k.shape
        k, v = (x if x.stride(1) == head_dim and x.stride(2) == 1 else x.contiguous() for x in (k, v))
        each = head_dim + (INT8_SCALE_BYTES if kv_cache.dtype == torch.int8 else 0)
        writer = _writer(head_dim, kv_cache.shape[-1] // each, BITS[k.dtype], BITS[kv_cache.dtype])
        where = (k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), slot_mapping.data_ptr(), kv_cache.data_ptr())
        factors = _kv_factors(self.scales)[1].ctypes.data
        LAUNCHER.run(writer, pack(tokens, *where, heads, factors), torch.get_num_threads() if tokens > 8 else 1)

    def copy_blocks(self, src_cache: Tensor, dst_cache: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        src, dst = {a for a, _ in pairs}, {b for _, b in pairs}
        overlap = src_cache.data_ptr() == dst_cache.data_ptr() and src & dst
        if overlap or len(dst) < len(pairs) or not pairs:
            return AttentionBackend.copy_blocks(self, src_cache, dst_cache, pairs)
        where = np.array(pairs, np.int64)
        words = src_cache[0, 0].nbytes // 8
        args = pack(len(pairs), src_cache.data_ptr(), dst_cache.data_ptr(), words, where.ctypes.data)
        run(kernel("minivllm_kernels.cpu.cache:copy"), args, torch.get_num_threads())


@functools.cache
def _shape(spec: AttentionSpec, kv_dtype: torch.dtype, tiles: bool) -> CPUAttentionShape:
    sizes = (spec.head_dim, spec.group_size, spec.block_size)
    shape = CPUAttentionShape(*sizes, BITS[spec.dtype], BITS[kv_dtype], host_lanes(), host_registers())
    return replace(shape, tiles=tiles and shape.tiles_problem is None)


@functools.cache
def _writer(head_dim: int, block_size: int, bits: int, kv_bits: int) -> Kernel:
    shape = CPUAttentionShape(head_dim, 1, block_size, bits, kv_bits, host_lanes())
    return kernel("minivllm_kernels.cpu.cache:write", head_dim, block_size, bits, kv_bits, shape.lanes)


class NumbaCPUInvariantBackend(NumbaCPUBackend):
    """The same without the tile unit. It asks the model for matmuls whose rows do not depend on the batch either."""

    name: ClassVar[str] = "numba_cpu_invariant"
    layer_ops: ClassVar[str] = "torch"
    by_tiles: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = True
