"""Linear methods of a CPU: numba for few rows, oneDNN or torch for many, from one copy of the weight."""

# Generated from nbs/models/linear/cpu.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import functools
import importlib.util
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.linear.base import GroupedLinear, LinearMethod
from minivllm_kernels.cpu.matmul.layout import (
    TILE,
    GroupedMatmul,
    Matmul,
    PackedMatmul,
    RowMajorMatmul,
    host_dots,
    host_tiles,
    packed_problem,
    row_major_problem,
)

BITS = {torch.float32: 32, torch.bfloat16: 16}

FewRowsKernel = Callable[[int, int, int, int], None]
"""Addresses of contiguous x and out, rows, threads."""


def few_rows_matmul(kernel: FewRowsKernel, x: Tensor, outputs: int, dtype: torch.dtype | None = None) -> Tensor:
    """x [T, inputs] times the weight of a kernel, [T, outputs]. dtype: that of the results, if it is not x's."""
    x = x.contiguous()
    out = x.new_empty(x.shape[0], outputs, dtype=dtype or x.dtype)
    kernel(x.data_ptr(), out.data_ptr(), x.shape[0], torch.get_num_threads())
    return out


@functools.cache
def onednn_packs() -> bool:
    """Whether torch can hand oneDNN a packed bf16 weight here, and show it; it needs a CPU with bf16 arithmetic.

    Without bf16 arithmetic oneDNN only transposes the weight, and multiplies slower than the numba kernel.
    """
    ops = torch.ops.mkldnn
    wanted = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported", "data_ptr", "_nbytes")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(ops, name) for name in wanted):
        return False
    if not ops._is_mkldnn_bf16_supported():
        return False
    weight = torch.arange(64.0 * 64).view(64, 64).bfloat16()
    _, memory = pack_onednn(weight)  # the tensor that has a name here owns the memory
    return not torch.equal(memory, weight.T.flatten())


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
    """Whether the kernel for a packed weight uses the CPU's tile unit."""
    return host_tiles() and inputs % (2 * TILE) == 0


WIDENED = 2  # rows up to which the kernel that widens a bf16 weight is at least as fast: reading is its limit
SMALL = 1 << 22  # numbers of a weight that a core's cache keeps while a step of many rows goes through it


def few_rows(dtype: torch.dtype, tiles: bool, numbers: int = 0) -> float:
    """Up to how many rows the numba kernel is faster than torch. tiles: it uses AMX. numbers: inputs times outputs of the weight."""
    if dtype != torch.bfloat16:
        return 16
    if not onednn_packs():
        return math.inf
    if tiles:
        return 128 if numbers <= SMALL else 64
    return 128 if host_dots() else 4


def explain(dtype: torch.dtype) -> str:
    """What `cpu` does with weights of a dtype, in words."""
    tiles = host_tiles() and dtype == torch.bfloat16
    limit = few_rows(dtype, tiles)
    if limit == math.inf:
        return "numba, each weight read once; this CPU has no bf16 arithmetic for torch to use"
    then = "oneDNN with weights packed once" if dtype == torch.bfloat16 else "torch"
    how = " by dot products of pairs" if limit > 4 else " at the speed of memory"
    unit = " with the CPU's tile unit" if tiles else how
    large = f" ({few_rows(dtype, tiles, SMALL + 1)} by a large weight)" if tiles else ""
    return f"up to {limit} rows numba{unit}{large}, more rows {then}"


class CPULinear(LinearMethod):
    """The faster matmul for each number of rows. A row's rounding depends on which one it was.

    A bf16 weight is packed in oneDNN's order, which the numba kernel reads too, and is kept only so.

    Attributes:
        max_rows: more rows than these are multiplied by oneDNN or torch.
    """

    capturable = True

    def problem(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"the weight is on {device}"
        if dtype not in BITS:
            return f"the weight is {str(dtype).removeprefix('torch.')}, not float32 or bfloat16"
        if importlib.util.find_spec("numba") is None:
            return "numba is not installed (pip install 'minivllm[kernels]')"
        return row_major_problem(inputs, outputs, BITS[dtype])

    def process_weights_after_loading(self) -> None:
        if "weight" not in self.weights:
            return  # nothing was loaded anew
        weight, bias = self.weights["weight"].contiguous(), self.weights.get("bias")
        self.outputs, self.inputs = weight.shape
        self._float_bias = None if bias is None else bias.float().contiguous()
        packs = weight.dtype == torch.bfloat16 and onednn_packs()
        self._block = self._pack_block() if packs else None
        if self._block:
            self._pack(self.weights.pop("weight"))
        else:
            self.weights["weight"], bits = weight, BITS[weight.dtype]
            self.out_dtype, self.max_rows = None, self._max_rows(weight.dtype, tiles=False)
            sizes = (self.outputs, self.inputs, bits, self._bias_address())
            self._kernel: Matmul = RowMajorMatmul(weight.data_ptr(), *sizes)
            self._few: Matmul = self._kernel

    def _pack_block(self) -> int | None:
        return onednn_block(self.outputs, self.inputs)

    def _max_rows(self, dtype: torch.dtype, tiles: bool) -> float:
        return few_rows(dtype, tiles, self.outputs * self.inputs)

    def _bias_address(self) -> int:
        return 0 if self._float_bias is None else self._float_bias.data_ptr()

    def _pack(self, weight: Tensor) -> None:
        self._packed, self._memory = pack_onednn(weight)
        block = self._block or 0
        padded, tiles = self._memory.numel() // (-(-self.outputs // block) * block), by_tiles(self.inputs)
        self.out_dtype, self.max_rows = self.out_dtype or weight.dtype, self._max_rows(weight.dtype, tiles)
        sizes = (self.outputs, self.inputs, padded, block)
        out_bits = 8 * self.out_dtype.itemsize
        make = functools.partial(PackedMatmul, self._memory.data_ptr(), *sizes, self._bias_address(), tiles, out_bits)
        self._kernel = make(dots=host_dots())
        self._few = make() if host_dots() and not tiles else self._kernel

    def apply(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.max_rows:
            kernel = self._few if x.shape[0] <= WIDENED else self._kernel
            return few_rows_matmul(kernel, x, self.outputs, self.out_dtype)
        if self._block:
            out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.weights.get("bias"), "none", [], "")
            return out.to(self.out_dtype)
        return F.linear(x, self.weights["weight"], self.weights.get("bias"))

    def together(self, methods: Sequence[LinearMethod]) -> GroupedLinear | None:
        same = [method for method in methods if type(method) is type(self)]
        if len(same) < len(methods):
            return None
        many, few = (GroupedMatmul(kernels) for kernels in ([m._kernel for m in same], [m._few for m in same]))
        max_rows = self.max_rows

        def multiply(rows: Tensor, ends: Tensor) -> Tensor:
            counts = np.diff(ends.numpy(), prepend=0).astype(np.int64)
            if counts.max() > max_rows:
                parts = zip(methods, rows.split(counts.tolist()), strict=True)
                return torch.cat([method.apply(x) for method, x in parts])
            rows = rows.contiguous()
            out = rows.new_empty(len(rows), self.outputs, dtype=self.out_dtype or rows.dtype)
            grouped = few if counts.max() <= WIDENED else many
            grouped(rows.data_ptr(), out.data_ptr(), counts, torch.get_num_threads())
            return out

        return multiply

    @property
    def weight(self) -> Tensor:
        if "weight" in self.weights:
            return self.weights["weight"]
        return unpack_onednn(self._memory, self.outputs, self.inputs, self._block or 0)

    @property
    def memory(self) -> Tensor | None:
        return self.weights.get("weight", getattr(self, "_memory", None))


class CPUInvariantLinear(CPULinear):
    """The numba kernel for any number of rows, from the weight as it was loaded: bit-identical in any batch.

    Sums are float32 in one fixed order.
    """

    capturable = True

    def _pack_block(self) -> int | None:
        return None

    def _max_rows(self, dtype: torch.dtype, tiles: bool) -> float:
        return math.inf
