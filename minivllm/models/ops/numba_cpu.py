"""LayerOps on a CPU, each as one numba kernel."""

# Generated from nbs/models/ops/numba_cpu.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from minivllm.core.module import Module
from minivllm.models.layers import QKNorm
from minivllm.models.ops.base import AttentionHeads, CapturedSteps, ForwardContext
from minivllm.models.ops.captured import CapturedCPUSteps
from minivllm.models.ops.states_cpu import BITS, NumbaCPUStateOps, as_int
from minivllm.models.ops.torch import TorchOps
from minivllm.models.rope import Rotation
from minivllm_kernels.cpu.compile import host_lanes, kernel, pack
from minivllm_kernels.cpu.program import LAUNCHER

ALONE = 200_000
"""Up to this many numbers one thread is not slower than several that have to meet."""


@functools.cache
def _launcher(name: str, size: int, *params: int) -> Callable[..., None]:
    """A function that launches a kernel: how many numbers there are to work on, rows, the kernel's own arguments."""
    head = (size,) if name == "rotate" else ()
    lanes = math.gcd(host_lanes(), size // 2 if name == "rotate" else size)
    which = kernel(f"minivllm_kernels.cpu.pointwise:{name}", *head, params[0], lanes, *params[1:])

    def launch(numbers: int, rows: int, *own: int) -> None:
        threads = torch.get_num_threads()
        args = pack(rows, max(rows // (4 * threads), 1), *own)
        LAUNCHER.run(which, args, threads if numbers > ALONE else 1)

    return launch


@functools.cache
def _argmax_launcher(size: int) -> Callable[[int, int, int], None]:
    lanes = host_lanes()
    which = kernel("minivllm_kernels.cpu.pointwise:first_largest", lanes if size >= lanes else 1)
    return lambda x, out, rows: LAUNCHER.run(which, pack(rows, x, out, size), torch.get_num_threads())


class NumbaCPUOps(TorchOps):
    """See `LayerOps`. What has no kernel is torch's: a norm whose weight is wider than x, another gate than SiLU's.

    bf16 results may differ from torch's in the last bit: torch rounds between the steps of a chain, a kernel at its end.
    """

    name: ClassVar[str] = "numba_cpu"
    state_ops = NumbaCPUStateOps
    capturable = True

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype != weight.dtype or x.dtype not in BITS:
            return super().add_rms_norm(x, residual, weight, eps)
        x = x.contiguous()
        stream, out, (rows, size) = x if residual is None else residual, torch.empty_like(x), x.shape
        where = (x.data_ptr(), stream.data_ptr(), weight.data_ptr(), out.data_ptr())
        launch = _launcher("add_norm", size, BITS[x.dtype], as_int(eps))
        launch(rows * size, rows, *where, size, int(residual is not None))
        return out, stream

    def add_into(self, x: Tensor, residual: Tensor | None, out: Tensor) -> None:
        if x.dtype not in BITS:
            return TorchOps.add_into(self, x, residual, out)
        x, (rows, size) = x.contiguous(), x.shape
        where = (x.data_ptr(), 0 if residual is None else residual.data_ptr(), out.data_ptr())
        _launcher("add_apart", size, BITS[x.dtype])(rows * size, rows, *where, size, out.stride(0))

    def rope_and_cache(
        self, layer: AttentionHeads, qkv: Tensor, kv_cache: Tensor, slot_mapping: Tensor, rotation: Rotation | None
    ) -> Tensor:
        norm, num_heads, head_dim = layer.qk_norm, layer.num_heads, layer.head_dim
        known = norm is None or (type(norm) is QKNorm and norm.weight.dtype == qkv.dtype)
        if not known or rotation is None or rotation.rope.spec.dim != head_dim or qkv.dtype not in BITS:
            return TorchOps.rope_and_cache(self, layer, qkv, kv_cache, slot_mapping, rotation)
        heads = qkv.contiguous().view(qkv.shape[0], -1, head_dim)
        rows, num_kv_heads = len(heads), (heads.shape[1] - num_heads) // 2
        q, k = heads.new_empty(rows, num_heads, head_dim), heads.new_empty(rows, num_kv_heads, head_dim)
        cos, sin = (table.contiguous() for table in rotation.cos_sin)
        where = (heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), q.data_ptr(), k.data_ptr())
        weight, eps = (0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        launch = _launcher("rotate", head_dim, BITS[qkv.dtype], as_int(eps))
        launch(heads.numel(), rows, *where, heads.stride(0), num_heads, num_kv_heads, weight)
        layer.backend.write(k, heads[:, num_heads + num_kv_heads :], kv_cache, slot_mapping)
        return q

    def gated_linear(self, x: Tensor, gate_up: Callable[[Tensor], Tensor], activation: str) -> Tensor:
        if activation not in ("silu", "swish") or x.dtype not in BITS:
            return TorchOps.gated_linear(self, x, gate_up, activation)
        both = gate_up(x).contiguous()
        rows, size = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, size)
        # an exponential and a division take as long as ten numbers of other kernels
        _launcher("gated_silu", size, BITS[x.dtype])(10 * rows * size, rows, both.data_ptr(), out.data_ptr(), size)
        return out

    def moe_permute(self, x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        if x.dtype not in BITS:
            return TorchOps.moe_permute(self, x, ids, num_experts)
        (tokens, top_k), size, x, ids = ids.shape, x.shape[1], x.contiguous(), ids.contiguous()
        counts, places, out = ids.new_empty(2, num_experts), torch.empty_like(ids), x.new_empty(ids.numel(), size)
        sizes = (ids.numel(), counts.data_ptr(), num_experts, counts[1].data_ptr())
        sort = kernel("minivllm_kernels.cpu.pointwise:sort_choices")
        LAUNCHER.run(sort, pack(1, ids.data_ptr(), places.data_ptr(), *sizes), 1)
        where = (x.data_ptr(), places.data_ptr(), out.data_ptr())
        _launcher("copy_rows", size, BITS[x.dtype])(out.numel(), tokens, *where, size, top_k)
        return out, places, counts[0]

    def moe_unpermute(self, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        if rows.dtype not in BITS:
            return TorchOps.moe_unpermute(self, rows, places, weights)
        (tokens, top_k), size = weights.shape, rows.shape[1]
        rows, places, weights = rows.contiguous(), places.contiguous(), weights.contiguous()
        out = rows.new_empty(tokens, size)
        where = (rows.data_ptr(), places.data_ptr(), out.data_ptr())
        _launcher("add_rows", size, BITS[rows.dtype])(rows.numel(), tokens, *where, size, top_k, weights.data_ptr())
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        """See `LayerOps`. torch's takes several times as long on a CPU, and numpy's uses one core."""
        if logits.dtype != torch.float32:
            return TorchOps.argmax(self, logits)
        logits, ids = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64)
        _argmax_launcher(logits.shape[1])(logits.data_ptr(), ids.data_ptr(), len(logits))
        return ids

    def capture(self, model: Module, run: Callable[[Tensor, ForwardContext], Tensor]) -> CapturedSteps | None:
        return CapturedCPUSteps(model, run)
