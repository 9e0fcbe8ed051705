"""CPU linear kernels: numba for few rows, torch or oneDNN for many."""

# Generated from nbs/models/cpu_linear.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import copy
import ctypes
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.linear import LinearKernel
from minivllm_kernels.cpu.matmul.layout import TILE, PackedProduct, host_tiles, packed_problem
from minivllm_kernels.cpu.matmul.plain import Product, product_problem
from minivllm_kernels.cpu.program import NOW, Launcher

__all__ = [
    "BITS", "FewRows", "HasProduct", "Packed", "by_tiles", "cpu_invariant_kernel", "cpu_kernel",
    "cpu_problem", "explain", "few_rows", "launch_product", "onednn_block", "onednn_packs", "pack_onednn",
    "unpack_onednn",
]  # fmt: skip

"""Linear kernels for the CPU: few rows by a numba kernel at the speed of memory, many by oneDNN, from one copy of the weight."""

BITS = {torch.float32: 32, torch.bfloat16: 16}


def cpu_problem(weight: Tensor) -> str | None:
    """Why these kernels cannot use this weight, or None."""
    if weight.device.type != "cpu":
        return f"the weight is on {weight.device}"
    if weight.dtype not in BITS:
        return f"the weight is {str(weight.dtype).removeprefix('torch.')}, not float32 or bfloat16"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return product_problem(weight.shape[1], weight.shape[0], BITS[weight.dtype])


class FewRows:
    """The numba product. Sums are float32 in one fixed order: a row's result is bit-identical in any batch.

    Args:
        weight: [out, in], float32 or bf16.
        few: more rows than these are multiplied by torch.

    Raises:
        ValueError: `cpu_problem`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, few: float = math.inf) -> None:
        if problem := cpu_problem(weight):
            raise ValueError(f"no CPU kernel for this weight: {problem}")
        (self.outputs, inputs), bits = weight.shape, 8 * weight.element_size()
        self.weight, self.bias, self.few = weight.contiguous(), bias, few
        self.wide_bias = None if bias is None else bias.float().contiguous()
        where = 0 if self.wide_bias is None else self.wide_bias.data_ptr()
        self.product = Product(self.weight.data_ptr(), self.outputs, inputs, bits, bits, where)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.few:
            return F.linear(x, self.weight, self.bias)
        return launch_product(self, x)


@runtime_checkable
class HasProduct(Protocol):
    """A linear kernel that has a numba product."""

    @property
    def outputs(self) -> int:
        """Columns of the result."""

    @property
    def few(self) -> float:
        """Rows for which the product is used, at most."""

    @property
    def product(self) -> Callable[[int, int, int, int, Launcher], None]:
        """Addresses of x and of the result, rows, threads, and where to launch."""


def launch_product(kernel: HasProduct, x: Tensor, out: Tensor | None = None, on: Launcher = NOW) -> Tensor:
    """x [T, in] times the weight, by the numba product, into `out` [T, outputs] if it is given; both contiguous then.

    Raises:
        ValueError: `out` has another dtype than the results.
    """
    x, dtype = x.contiguous(), getattr(kernel, "out_dtype", x.dtype)
    out = x.new_empty(x.shape[0], kernel.outputs, dtype=dtype) if out is None else out
    if out.dtype != dtype:
        raise ValueError(f"this product gives {dtype}, and its results were to be written to {out.dtype}")
    kernel.product(x.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads(), on)
    return out


def onednn_packs() -> bool:
    """Whether torch can hand oneDNN a packed bf16 weight here, and show it; it needs a CPU with bf16 arithmetic."""
    ops = torch.ops.mkldnn
    wanted = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported", "data_ptr", "_nbytes")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(ops, name) for name in wanted):
        return False
    return bool(ops._is_mkldnn_bf16_supported())


def pack_onednn(weight: Tensor) -> tuple[Tensor, Tensor]:
    """oneDNN's packed weight, and its memory as flat bf16."""
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, 64)
    memory = (ctypes.c_char * ops._nbytes(packed)).from_address(ops.data_ptr(packed))
    return packed, torch.frombuffer(memory, dtype=torch.bfloat16)


def unpack_onednn(memory: Tensor, outputs: int, inputs: int, block: int) -> Tensor:
    """[outputs, inputs] from [outputs / block][inputs / 2][block][2], both padded."""
    blocks = -(-outputs // block)
    pairs = memory.view(torch.int32).view(blocks, -1, block).transpose(1, 2).contiguous()
    return pairs.view(torch.bfloat16).view(blocks * block, -1)[:outputs, :inputs].contiguous()


@functools.cache
def onednn_block(outputs: int, inputs: int) -> int | None:
    """Outputs of a block in oneDNN's order of a bf16 weight of this shape; None if it is not an order that we know.

    oneDNN does not say: a weight whose elements are numbered is packed, and compared with what we would expect.
    """
    numbers = torch.arange(30011, dtype=torch.int16)  # a prime, below the bits of bf16's infinity
    numbered = numbers.repeat(outputs * inputs // len(numbers) + 1)[: outputs * inputs].view(outputs, inputs)
    _, memory = pack_onednn(numbered.view(torch.bfloat16))
    for block in (32, 64, 128):
        whole = -(-outputs // block) * block
        if memory.numel() % (2 * whole) or packed_problem(inputs, block):
            continue
        some = memory.numel() // whole * block  # one block tells a wrong order
        sizes = ((memory[:some], min(outputs, block)), (memory, outputs))
        if all(torch.equal(unpack_onednn(m, n, inputs, block).view(torch.int16), numbered[:n]) for m, n in sizes):
            return block
    return None


def by_tiles(inputs: int) -> bool:
    """Whether the numba product with a packed weight uses the tile unit."""
    return host_tiles() and inputs % (2 * TILE) == 0


class Packed:
    """A bf16 weight in oneDNN's order, for oneDNN and for a numba product that reads the same order.

    Args:
        weight: [out, in] of bf16; not needed any more afterwards.
        few: up to how many rows the numba product is used.

    Raises:
        ValueError: oneDNN's order is not known (`onednn_block`).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, few: int) -> None:
        self.outputs, self.inputs = weight.shape
        block = onednn_block(*weight.shape)
        if block is None:
            raise ValueError(f"oneDNN packs a weight of {tuple(weight.shape)} in an order that is not known")
        self.block, self.few, self.bias = block, few, bias
        self.packed, self.memory = pack_onednn(weight)
        self.wide_bias = None if bias is None else bias.float().contiguous()
        padded = self.memory.numel() // (-(-self.outputs // block) * block)
        where = 0 if self.wide_bias is None else self.wide_bias.data_ptr()
        sizes = (self.outputs, self.inputs, padded, block)
        self._described = (self.memory.data_ptr(), *sizes, where, by_tiles(self.inputs))
        self.product, self.out_dtype = PackedProduct(*self._described), torch.bfloat16
        self.multiply = torch.ops.mkldnn._linear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > self.few:
            return self.multiply(x, self.packed, self.bias, "none", [], "").to(self.out_dtype)
        return launch_product(self, x)

    def widened(self) -> "Packed":
        """A kernel of the same weight that gives results in float32, rounded as before."""
        wide = copy.copy(self)
        wide.product, wide.out_dtype = PackedProduct(*self._described, out_bits=32), torch.float32
        return wide

    def unpack(self) -> Tensor:
        """The weight in its ordinary order, a copy."""
        return unpack_onednn(self.memory, self.outputs, self.inputs, self.block)


def few_rows(dtype: torch.dtype, tiles: bool) -> float:
    """Up to how many rows the numba product is the faster one, by the tile unit or without."""
    if dtype == torch.bfloat16:
        return math.inf if not onednn_packs() else 64 if tiles else 4
    return 16


def explain(dtype: torch.dtype) -> str:
    """What `cpu` does with weights of a dtype, in words."""
    tiles = host_tiles() and dtype == torch.bfloat16
    limit = few_rows(dtype, tiles)
    if limit == math.inf:
        return "numba, each weight read once; this CPU has no bf16 arithmetic for torch to use"
    then = "oneDNN with weights packed once" if dtype == torch.bfloat16 else "torch"
    unit = " with the CPU's tile unit" if tiles else " at the speed of memory"
    return f"up to {limit} rows numba{unit}, more rows {then}"


def cpu_kernel(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """The faster product for each number of rows. A row's rounding depends on which one it was.

    Raises:
        ValueError: `cpu_problem`.
    """
    if problem := cpu_problem(weight):
        raise ValueError(f"no CPU kernel for this weight: {problem}")
    if weight.dtype == torch.bfloat16 and onednn_packs() and onednn_block(*weight.shape):
        return Packed(weight, bias, int(few_rows(weight.dtype, by_tiles(weight.shape[1]))))
    return FewRows(weight, bias, few_rows(weight.dtype, tiles=False))


def cpu_invariant_kernel(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """The numba product for any number of rows: bit-identical in any batch.

    Raises:
        ValueError: `cpu_problem`.
    """
    return FewRows(weight, bias)
