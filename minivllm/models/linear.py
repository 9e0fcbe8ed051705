"""Linear layers with fused weights and a registry of matmul kernels."""

# Generated from nbs/models/linear.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import importlib
import importlib.util
import mmap
import os
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.config import WEIGHT_BITS

__all__ = [
    "HUGE_PAGE", "MADV_COLLAPSE", "MADV_HUGEPAGE", "QUANTIZED", "KernelMaker", "Linear", "LinearKernel",
    "choose_kernel", "empty_weight", "explain_choice", "explain_quantized", "kernel_names", "make_kernel",
    "register_kernel", "torch_kernel", "use_huge_pages",
]  # fmt: skip

LinearKernel = Callable[[Tensor], Tensor]
"""From [T, in_features] to [T, out_features]."""

KernelMaker = Callable[[Tensor, Tensor | None], LinearKernel]
"""From weight [out_features, in_features] and bias [out_features] (or None) to a kernel.

A kernel that keeps the weight in an order of its own has a method `unpack()` that gives it back, and the layer lets the
ordinary one go. One that can give float32 for another dtype has a method `widened()`, which gives
another kernel that does.
"""


def torch_kernel(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """torch's own product. Its rounding may depend on the number of rows."""
    transposed = weight.t()
    if bias is None:
        return partial(torch.mm, mat2=transposed)
    return lambda x: torch.addmm(bias, x, transposed)


_TILE = 16


def batch_invariant_kernel(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """The product in tiles of 16 rows, the last one padded: each row's result is the same in any batch.

    A BLAS picks its loops by the shape of the whole product, so a row can round differently alone and in company.
    Here every product has one shape. The price is up to 16 times the arithmetic for one row.
    """

    def kernel(x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = x.new_empty(rows, weight.shape[0])
        for start in range(0, rows, _TILE):
            tile = x[start : start + _TILE]
            n = tile.shape[0]
            padded = F.pad(tile, (0, 0, 0, _TILE - n)) if n < _TILE else tile.contiguous()
            out[start : start + n] = F.linear(padded, weight, bias)[:n]
        return out

    return kernel


_KERNELS: dict[str, str | KernelMaker] = {
    "torch": torch_kernel,
    "batch_invariant": batch_invariant_kernel,
    "cpu": "minivllm.models.cpu_linear:cpu_kernel",
    "gemv": "minivllm.models.gpu_linear:gemv_kernel",
    "cpu_invariant": "minivllm.models.cpu_linear:cpu_invariant_kernel",
    "int8": "minivllm.models.cpu_quantized:int8_kernel",
    "int4_32": "minivllm.models.cpu_quantized:int4_32_kernel",
    "int4_64": "minivllm.models.cpu_quantized:int4_64_kernel",
    "int4_128": "minivllm.models.cpu_quantized:int4_128_kernel",
}


# kernels that keep the weight as numbers of 8 bits, or of 4 in groups of so many inputs
QUANTIZED = tuple(WEIGHT_BITS)


def kernel_names() -> tuple[str, ...]:
    """Names that `Linear.prepare` knows, besides `auto`."""
    return tuple(_KERNELS)


def register_kernel(name: str, make: str | KernelMaker) -> None:
    """Make a kernel known under a new name. `make` may be `"module:function"`, imported when it is first wanted.

    Raises:
        ValueError: the name is taken.
    """
    if name in _KERNELS or name == "auto":
        raise ValueError(f"linear kernel {name!r} exists already")
    _KERNELS[name] = make


def choose_kernel(weight: Tensor) -> str:
    """The kernel that `auto` stands for, by the weight's shape, dtype and device."""
    if weight.device.type == "cuda":
        from minivllm.models.gpu_linear import gpu_problem

        return "torch" if gpu_problem(weight.dtype, weight.device, *weight.shape) else "gemv"
    if weight.device.type != "cpu":
        return "torch"
    try:
        from minivllm.models.cpu_linear import cpu_problem
    except ImportError:  # numba and llvmlite are optional
        return "torch"
    return "torch" if cpu_problem(weight) else "cpu"


def explain_choice(dtype: torch.dtype, device: torch.device, batch_invariant: bool) -> tuple[str, str]:
    """(kernel that a model of this dtype gets if none is named, and why). Single weights of odd sizes may get `torch`."""
    if batch_invariant:
        return "batch_invariant", "the attention backend asks for rows that do not depend on the batch"
    if device.type == "cuda":
        from minivllm.models.gpu_linear import MOST_ROWS, gpu_problem

        own = f"kernels of our own for up to {MOST_ROWS} rows, torch's product for more"
        return ("torch", problem) if (problem := gpu_problem(dtype, device)) else ("gemv", own)
    if device.type != "cpu":
        return "torch", f"the one for {device.type}"
    try:
        from minivllm.models.cpu_linear import cpu_problem, explain
    except ImportError:
        return "torch", "numba is not installed (pip install 'minivllm[kernels]')"
    typical = torch.empty(64, 64, dtype=dtype)
    return ("torch", problem) if (problem := cpu_problem(typical)) else ("cpu", explain(dtype))


def explain_quantized(kernel: str, dtype: torch.dtype, device: torch.device, batch_invariant: bool) -> tuple[str, str]:
    """(kernel, what it does) for one of `QUANTIZED`.

    Raises:
        ValueError: it cannot be had on this device, in this dtype, or with this attention backend.
        ImportError: numba is not installed.
    """
    if device.type != "cpu":
        raise ValueError(
            f"quantization is implemented on the CPU, not on {device.type}; use device='cpu', or no quantization"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"quantization is implemented for dtype float32 and bfloat16, not {name}")
    if batch_invariant:
        raise ValueError(
            "quantization does not go with an attention backend that asks for rows that do not depend on the batch"
            " (reference, numba_cpu_invariant): how quantized weights are multiplied depends on the number of rows"
        )
    if importlib.util.find_spec("numba") is None:
        raise ImportError(
            "quantized weights are multiplied by numba, which is not installed: pip install 'minivllm[kernels]'"
        )
    from minivllm.models.cpu_quantized import explain

    return kernel, explain(dtype, kernel)


HUGE_PAGE = 1 << 21


MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25


def use_huge_pages(memory: Tensor) -> None:
    """Have Linux move memory that is filled into pages of 2 MiB, so that far fewer addresses must be translated while it is read.

    Where the system has none to give, or no such call, nothing changes.
    """
    if memory.device.type != "cpu" or not sys.platform.startswith("linux") or memory.nbytes < HUGE_PAGE // 8:
        return
    first = memory.data_ptr() // HUGE_PAGE * HUGE_PAGE
    size = memory.data_ptr() + memory.nbytes - first
    for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(-(-size // HUGE_PAGE) * HUGE_PAGE), advice)


def make_kernel(name: str, weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """The kernel of this name for a weight.

    Raises:
        ValueError: no such name, or it cannot use this weight. ImportError: what it stands on is not installed.
    """
    if name not in _KERNELS:
        raise ValueError(f"no linear kernel {name!r}; known: auto, {', '.join(_KERNELS)}")
    make = _KERNELS[name]
    if isinstance(make, str):
        module, _, function = make.partition(":")
        make = getattr(importlib.import_module(module), function)
    return make(weight, bias)


def empty_weight(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns], not initialised.

    On a CPU straight from the system, which gets it back when the weight is packed and let go; `malloc` would keep it.
    """
    if device.type != "cpu":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    return torch.frombuffer(mmap.mmap(-1, rows * columns * dtype.itemsize, **private), dtype=dtype).view(rows, columns)


class Linear:
    """`x @ weight.T + bias`, for one or several output parts that share their input.

    Parts lie below each other in one weight, so that one product computes them all (QKV, gate and up).

    Args:
        in_features: columns of the weight.
        parts: rows of each part, by name, in order.
        bias: whether there is one.
        dtype, device: of the weight.

    Attributes:
        weight: [sum of rows, in_features], not initialised. Once a kernel has packed it, a copy made on demand.
        bias: [sum of rows] or None.
        kernel: name of the kernel in use.
    """

    __slots__ = ("_rows", "_run", "_weight", "bias", "kernel")

    def __init__(
        self, in_features: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._rows: dict[str, slice] = {}
        end = 0
        for name, rows in parts.items():
            self._rows[name] = slice(end, end + rows)
            end += rows
        self._weight: Tensor | None = empty_weight(end, in_features, dtype, device)
        self.bias = torch.empty(end, dtype=dtype, device=device) if bias else None
        self.prepare("torch")

    @classmethod
    def sharing(cls, weight: Tensor) -> "Linear":
        """A layer without bias over a weight that somebody else owns (tied embeddings)."""
        layer = cls.__new__(cls)
        layer._rows, layer._weight, layer.bias = {}, weight, None
        layer.prepare("torch")
        return layer

    @property
    def weight(self) -> Tensor:
        return self._run.unpack() if self._weight is None else self._weight  # type: ignore[attr-defined]

    @property
    def memory(self) -> Tensor | None:
        """What the kernel reads of the weight, in whatever order, if it says so."""
        return getattr(self._run, "memory", self._weight)

    def part(self, name: str, kind: str = "weight") -> Tensor:
        """The rows of one part, as a view to load into. `kind` is `weight` or `bias`. Call `prepare` afterwards."""
        if kind == "weight" and self._weight is None:
            self.prepare("torch")
        tensor = self._weight if kind == "weight" else self.bias
        if tensor is None:
            raise ValueError(f"Linear part {name!r} has no {kind}")
        return tensor[self._rows[name]]

    def prepare(self, kernel: str = "auto", wide: bool = False) -> None:
        """Choose the matrix product, once the weight is loaded.

        Args:
            kernel: a name from `kernel_names()`, or `auto`.
            wide: results are wanted in float32. A kernel that can write them so at once (it has a method `widened()`) will.

        Raises:
            ValueError: unknown name, or a kernel that cannot use this weight.
        """
        weight = self.weight
        name = choose_kernel(weight) if kernel == "auto" else kernel
        self._run, self.kernel = make_kernel(name, weight, self.bias), name
        self._weight = None if hasattr(self._run, "unpack") else weight
        if wide and hasattr(self._run, "widened"):
            self._run = self._run.widened()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, out_features]; parts side by side."""
        return self._run(x)
