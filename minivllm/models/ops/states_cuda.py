"""Recurrences on states in the blocks of a cache on a GPU, each as one numba.cuda kernel."""

# Generated from nbs/models/ops/states_cuda.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import torch
from torch import Tensor

from minivllm.attention.state import Sequences, StateView
from minivllm.models.linear.cuda import cuda_kernels
from minivllm.models.ops.states import StateOps


def _cache(states: StateView, where: Sequences) -> tuple[tuple[int, int], tuple[Tensor, Tensor, Tensor]]:
    """Where states are, and whose."""
    assert states.place is not None
    return states.place, (where.read, where.write, where.begins)


class NumbaCudaStateOps(StateOps):
    """See `StateOps`. What surrounds a recurrence is torch's; so is one whose sizes no kernel takes, or whose states are in both halves
    of a cache's layout."""

    capturable = True

    def run_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, states: StateView, where: Sequences) -> Tensor:
        if states.place is None:
            return StateOps.run_conv(self, x, weight, bias, states, where)
        bias = torch.zeros(x.shape[1], device=x.device) if bias is None else bias
        return cuda_kernels().conv(x, weight, bias, *_cache(states, where))

    def run_ssd(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: StateView, where: Sequences
    ) -> Tensor:
        """See `StateOps`. A piece of a prompt is worked through in chunks."""
        if states.place is None or not cuda_kernels().takes_ssd(*states.shape[1:]):
            return StateOps.run_ssd(self, x, dt, A, B, C, D, states, where)
        return cuda_kernels().ssd(x, dt, A, B, C, D, *_cache(states, where), in_chunks=not where.single)

    def run_selective(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, states: StateView, where: Sequences
    ) -> Tensor:
        if states.place is None:
            return StateOps.run_selective(self, x, dt, A, B, C, D, states, where)
        return cuda_kernels().selective(x, dt, A, B, C, D, *_cache(states, where))

    def run_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: StateView, where: Sequences
    ) -> Tensor:
        if states.place is None or v.shape[2] > 1024:
            return StateOps.run_delta(self, q, k, v, decay, beta, states, where)
        return cuda_kernels().delta(q, k, v, decay, beta, *_cache(states, where))
