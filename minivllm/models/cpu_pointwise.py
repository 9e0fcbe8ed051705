"""Fused CPU kernels for norm, SiLU gate and rotary embedding on torch tensors."""

# Generated from nbs/models/cpu_pointwise.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import importlib.util
import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

__all__ = ["ALONE", "BITS", "add_norm", "can_fuse", "gated_silu", "rotate"]

"""Norms, rotations and activations of a decoder on a CPU, each as one numba kernel."""

if TYPE_CHECKING:
    from minivllm.models.layers import QKNorm
    from minivllm_kernels.cpu.program import Launcher

BITS = {torch.float32: 32, torch.bfloat16: 16}
ALONE = 200_000
"""Up to so many numbers one thread is not slower than several that have to meet."""


def can_fuse(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels of this module can be used for activations like these."""
    return device.type == "cpu" and dtype in BITS and importlib.util.find_spec("numba") is not None


@functools.cache
def _kernel(name: str, size: int, *params: int) -> Callable[..., None]:
    """A function that launches a kernel: where, how many numbers there are to work on, rows, the kernel's own arguments."""
    from minivllm_kernels.cpu.compile import host_lanes, kernel, pack  # numba and llvmlite are optional
    from minivllm_kernels.cpu.program import NOW

    head = (size,) if name == "rotate" else ()
    lanes = math.gcd(host_lanes(), size // 2 if name == "rotate" else size)
    which = kernel(f"minivllm_kernels.cpu.pointwise:{name}", *head, params[0], lanes, *params[1:])

    def launch(on: "Launcher | None", numbers: int, rows: int, *own: int) -> None:
        threads = torch.get_num_threads()
        args = pack(rows, max(rows // (4 * threads), 1), *own)
        (NOW if on is None else on).run(which, args, threads if numbers > ALONE else 1)

    return launch


@functools.cache
def _as_int(eps: float) -> int:
    return struct.unpack("i", struct.pack("f", eps))[0]


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    on: "Launcher | None" = None,
) -> tuple[Tensor, Tensor]:
    """`RMSNorm.add` in one pass: x [T, size] joins the residual stream in place; (the normed stream, the stream).

    Like the others here it makes its result, or fills `out` if that is given; and launches at once, or on a program.
    """
    x = x.contiguous()
    stream = x if residual is None else residual
    out = torch.empty_like(x) if out is None else out
    rows, size = x.shape
    launch = _kernel("add_norm", size, BITS[x.dtype], _as_int(eps))
    where = (x.data_ptr(), stream.data_ptr(), weight.data_ptr(), out.data_ptr())
    launch(on, rows * size, rows, *where, size, int(residual is not None))
    return out, stream


def gated_silu(gate_up: Tensor, out: Tensor | None = None, on: "Launcher | None" = None) -> Tensor:
    """[T, 2 * inner], gate and up side by side, to `silu(gate) * up` [T, inner]."""
    gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size) if out is None else out
    launch = _kernel("gated_silu", size, BITS[gate_up.dtype])
    # an exponential and a division take as long as ten numbers of other kernels
    launch(on, 10 * rows * size, rows, gate_up.data_ptr(), out.data_ptr(), size)
    return out


def rotate(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    norm: "QKNorm | None" = None,
    out: tuple[Tensor, Tensor] | None = None,
    on: "Launcher | None" = None,
) -> tuple[Tensor, Tensor]:
    """Rotated queries [T, num_heads, dim] and keys [T, num_kv_heads, dim], of heads [T, any, dim] that begin with them.

    cos, sin: from `Rope`. norm: of each head, before it is rotated.
    """
    heads = heads.contiguous()
    rows, _, dim = heads.shape
    q, k = out or (heads.new_empty(rows, num_heads, dim), heads.new_empty(rows, num_kv_heads, dim))
    cos, sin = cos.contiguous(), sin.contiguous()
    where = (heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), q.data_ptr(), k.data_ptr())
    weight, eps = (0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
    launch = _kernel("rotate", dim, BITS[heads.dtype], _as_int(eps))
    launch(on, heads.numel(), rows, *where, heads.stride(0), num_heads, num_kv_heads, weight)
    return q, k
