"""Recurrences on states in the blocks of a cache on a CPU, each as one numba kernel."""

# Generated from nbs/models/ops/states_cpu.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import math

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.state import Sequences, StateView
from minivllm.models.ops.states import Fixed, StateOps
from minivllm_kernels.cpu.compile import Kernel, host_lanes, kernel, pack
from minivllm_kernels.cpu.program import LAUNCHER

BITS = {torch.float32: 32, torch.bfloat16: 16}
STRIP = 256
"""Channels of a work item, about."""


@functools.cache
def _kernel(name: str, *params: int) -> Kernel:
    return kernel(f"minivllm_kernels.cpu.scan:{name}", *params)


def _lanes(size: int) -> int:
    return math.gcd(host_lanes(), size)


@functools.cache
def as_int(eps: float) -> int:
    """The bits of a float32, with which a kernel is compiled."""
    return int(np.float32(eps).view(np.int32))


def _place(states: StateView, x: Tensor) -> tuple[int, int] | None:
    """Where the states are, if there are kernels for them and for the dtype of x."""
    return states.place if x.dtype in BITS else None


def _address(x: Tensor) -> int:
    assert x.is_contiguous(), "a kernel reads it as one run of memory"
    return x.data_ptr()


def _rows(x: Tensor) -> tuple[int, int]:
    """Address of a tensor [T, n], and numbers from one row to the next."""
    assert x.stride(1) == 1 or x.shape[1] == 1, "a kernel reads rows as they lie"
    return x.data_ptr(), x.stride(0)


def _launch(which: Kernel, place: tuple[int, int], where: Sequences, parts: int, *own: int) -> None:
    """Launch a recurrence on all parts of all sequences. place: that of the states; own: arguments of this kernel."""
    sequences, threads = [x.data_ptr() for x in (where.read, where.write, where.begins)], torch.get_num_threads()
    items = len(where.read) * parts
    # Neighbouring parts go to one thread: what it prefetches past the end of a part is its own next part. A thread claims eight times,
    # and four parts at least if there are enough.
    at_once = max(items // (8 * threads), min(items // threads, 4), 1)
    LAUNCHER.run(which, pack(items, *place, *sequences, parts, at_once, *own), threads)


class NumbaCPUStateOps(StateOps):
    """See `StateOps`. torch does what has no kernel: other dtypes, and states that lie in both halves of a cache's layout."""

    capturable = True

    def conv(
        self,
        u: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: StateView,
        where: Sequences,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        place, (before, channels) = _place(states, u), states.shape
        if place is None:
            return StateOps.conv(self, u, weight, bias, states, where, gates)
        out = torch.empty((len(u), channels), dtype=u.dtype)
        which = _kernel("conv", before + 1, BITS[u.dtype], _lanes(channels), int(gates is not None))
        around = [0, 0] if gates is None else [gate.data_ptr() for gate in gates]
        own = [*_rows(u), _address(weight), 0 if bias is None else _address(bias), _address(out), channels, *around]
        _launch(which, place, where, -(-channels // STRIP), *own)
        return out

    def ssd(self, xBC: Tensor, dt: Tensor, fixed: Fixed, groups: int, states: StateView, where: Sequences) -> Tensor:
        place, (heads, P, N) = _place(states, xBC), states.shape
        if place is None:
            return StateOps.ssd(self, xBC, dt, fixed, groups, states, where)
        out = torch.empty(len(xBC), heads, P)
        which = _kernel("ssd", P, N, BITS[xBC.dtype], _lanes(N))
        small = (fixed.bias, fixed.limits, fixed.A, fixed.D)
        own = [_address(xBC), *_rows(dt), *(_address(x) for x in (*small, out)), groups]
        _launch(which, place, where, heads, *own)
        return out

    def selective(
        self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor, fixed: Fixed, states: StateView, where: Sequences
    ) -> Tensor:
        place, (N, channels) = _place(states, x), states.shape
        if place is None:
            return StateOps.selective(self, x, dt, B, C, z, fixed, states, where)
        out, which = torch.empty(x.shape, dtype=x.dtype), _kernel("selective", N, BITS[x.dtype], _lanes(channels))
        own = [*(_address(v) for v in (x, dt, fixed.bias, fixed.A)), *_rows(B), *_rows(C)]
        own += [_address(fixed.D), *_rows(z), _address(out)]
        _launch(which, place, where, -(-channels // STRIP), *own, channels)
        return out

    def delta(
        self, qkv: Tensor, b: Tensor, a: Tensor, fixed: Fixed, k_heads: int, states: StateView, where: Sequences
    ) -> Tensor:
        place, (heads, K, V) = _place(states, qkv), states.shape
        if place is None:
            return StateOps.delta(self, qkv, b, a, fixed, k_heads, states, where)
        out, which = torch.empty(len(qkv), heads, V), _kernel("delta", K, V, BITS[qkv.dtype], _lanes(V), _lanes(K))
        own = [_address(qkv), b.data_ptr(), *_rows(a), *(_address(x) for x in (fixed.bias, fixed.A, out)), k_heads]
        _launch(which, place, where, heads, *own)
        return out

    def contiguous(self, x: Tensor) -> Tensor:
        if x.dtype not in BITS or x.is_contiguous():
            return x.contiguous()
        out, size = torch.empty(x.shape, dtype=x.dtype), x.shape[1]
        args = pack(len(x), *_rows(x), out.data_ptr(), size)
        LAUNCHER.run(_kernel("copy_rows", BITS[x.dtype], _lanes(size)), args, 1)
        return out

    def gated_norm(self, y: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
        if z.dtype not in BITS:
            return StateOps.gated_norm(self, y, z, weight, eps, gate_first)
        tokens, groups, size = y.shape
        out, shared = torch.empty((tokens, groups * size), dtype=z.dtype), len(weight) == 1
        which = _kernel("gated_norm", size, BITS[z.dtype], _lanes(size), int(gate_first), as_int(eps))
        threads, items = torch.get_num_threads(), tokens * groups
        own = [_address(y), *_rows(z), _address(weight), 0 if shared else size, _address(out), groups]
        LAUNCHER.run(which, pack(items, max(items // (4 * threads), 1), *own), threads)
        return out
