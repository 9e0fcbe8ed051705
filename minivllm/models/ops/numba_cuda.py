"""LayerOps on an NVIDIA GPU, each as one numba.cuda kernel."""

# Generated from nbs/models/ops/numba_cuda.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from minivllm.attention.numba_cuda import NumbaCudaBackend
from minivllm.models.layers import QKNorm
from minivllm.models.linear.cuda import FewRowsLinear, cuda_kernels
from minivllm.models.linear.layer import Linear
from minivllm.models.ops.base import AttentionHeads
from minivllm.models.ops.states_cuda import NumbaCudaStateOps
from minivllm.models.ops.torch import TorchOps
from minivllm.models.rope import Rotation


class NumbaCudaOps(TorchOps):
    """See `LayerOps`. What has no kernel is torch's: a norm whose weight is wider than x, another gate than SiLU's."""

    name: ClassVar[str] = "numba_cuda"
    state_ops = NumbaCudaStateOps
    capturable = True

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        size = x.shape[-1]
        if weight.dtype != x.dtype or size % 8 or size > 16384:
            return super().add_rms_norm(x, residual, weight, eps)
        return cuda_kernels().rms_norm(x, weight, eps, residual), x if residual is None else residual

    def rope_and_cache(
        self, layer: AttentionHeads, qkv: Tensor, kv_cache: Tensor, slot_mapping: Tensor, rotation: Rotation | None
    ) -> Tensor:
        """See `LayerOps`. Cosines and sines are read from a table of all positions."""
        norm, backend = layer.qk_norm, layer.backend
        known = norm is None or (type(norm) is QKNorm and norm.weight.dtype == qkv.dtype)
        known = known and type(backend).write is NumbaCudaBackend.write  # the kernel writes to the cache in its place
        if not known or rotation is None or rotation.rope.spec.dim != layer.head_dim or rotation.positions.dim() > 1:
            return TorchOps.rope_and_cache(self, layer, qkv, kv_cache, slot_mapping, rotation)
        return cuda_kernels().rope_and_cache(
            qkv,
            kv_cache,
            rotation.rope.table,
            rotation.positions,
            slot_mapping,
            num_heads=layer.num_heads,
            q_weight=None if norm is None else norm.q_weight[0],
            k_weight=None if norm is None else norm.k_weight[0],
            eps=0.0 if norm is None else norm.eps,
            k_scale=backend.scales.k,
            v_scale=backend.scales.v,
        )

    def gated_linear(self, x: Tensor, gate_up: Callable[[Tensor], Tensor], activation: str) -> Tensor:
        """See `LayerOps`. For few rows the kernel of the matmul ends in `silu(gate) * up` itself."""
        if activation not in ("silu", "swish"):
            return TorchOps.gated_linear(self, x, gate_up, activation)
        method = gate_up.method if type(gate_up) is Linear else None
        if type(method) is FewRowsLinear and method.takes(x, gated=True) and method.weight.shape[0] % 16 == 0:
            return cuda_kernels().gemv(x, method.weight, gated=True)
        both = gate_up(x)
        if both.shape[1] % 16:
            return TorchOps.gated_linear(self, both, lambda both: both, activation)
        return cuda_kernels().silu_mul(both)

    def argmax(self, logits: Tensor) -> Tensor:
        if logits.stride(-1) != 1 or not cuda_kernels().takes_largest(logits):
            return TorchOps.argmax(self, logits)
        return cuda_kernels().first_largest(logits)
