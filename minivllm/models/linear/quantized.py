"""Linear methods with weights of 8 or 4 bits: quantize at load, pack, multiply."""

# Generated from nbs/models/linear/quantized.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
import math
import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.linear.cpu import CPULinear, few_rows_matmul, onednn_block, onednn_packs, pack_onednn
from minivllm_kernels.cpu.matmul.layout import ITEM, UNIT, QuantizedMatmul, padded

__all__ = [
    "AT_ONCE", "FEW", "QuantizedLinear", "TorchQuantizedLinear", "cut", "explain", "few_rows", "pack_scales",
    "pack_words", "quantize", "quantized_linear", "restore",
]  # fmt: skip


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """8 bits, one step a row, symmetric around zero.

    Args:
        weight: float32 [outputs, inputs].

    Returns:
        `u`, uint8 [outputs, inputs], and float32 [outputs, 1, 2], a step and a low: `weight` is `u * step + low`, to half a step.
    """
    step = (weight.abs().amax(1, keepdim=True) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    u = weight.div(step).round_().add_(128).to(torch.uint8)
    return u, torch.stack((step, -128 * step), -1)


def quantize_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """4 bits, from the least to the largest of every `group` inputs of a row. Step and low are rounded to bf16 first.

    Args:
        weight: float32 [outputs, inputs]. The last group may be shorter.

    Returns:
        `u`, uint8 [outputs, inputs], and bf16 [outputs, groups, 2], a step and a low: `weight` is `u * step + low`.
    """
    outputs, inputs = weight.shape
    whole = F.pad(weight[None], (0, -inputs % group), mode="replicate").view(outputs, -1, group)
    low, high = whole.aminmax(dim=-1, keepdim=True)
    scales = torch.cat(((high - low) / 15, low), -1).to(torch.bfloat16)
    step, low = scales.float().split(1, -1)
    u = whole.sub(low).div_(step.masked_fill(step == 0, 1)).round_().clamp_(0, 15)
    return u.to(torch.uint8).view(outputs, -1)[:, :inputs], scales


def pack_words(u: Tensor, bits: int) -> Tensor:
    """Whole numbers [outputs, inputs] as int32 words, in the order of `QuantizedMatmul`; outputs a multiple of `ITEM`."""
    u = F.pad(u, (0, padded(u.shape[1]) - u.shape[1]))
    if bits == 4:
        u = u[:, ::2] | u[:, 1::2] << 4
    return u.view(-1, ITEM, u.shape[1] // 4, 4).transpose(1, 2).contiguous().view(torch.int32).squeeze(-1)


def pack_scales(scales: Tensor) -> Tensor:
    """[outputs, groups, 2] in the order of `QuantizedMatmul`."""
    return scales.view(-1, ITEM, *scales.shape[1:]).permute(0, 2, 3, 1).contiguous()


def quantize(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Words and scales of a weight [outputs, inputs] in the order of `QuantizedMatmul`, made some rows at a time."""
    outputs, inputs = weight.shape
    blocks, groups = -(-outputs // ITEM), -(-padded(inputs) // group)
    words = torch.empty(blocks, padded(inputs) * bits // 32, ITEM, dtype=torch.int32)
    scales = torch.empty(blocks, groups, 2, ITEM, dtype=torch.float32 if bits == 8 else torch.bfloat16)
    some = max(AT_ONCE // inputs // ITEM, 1)
    for first, rows in zip(range(0, blocks, some), weight.split(some * ITEM), strict=True):
        rows = F.pad(rows.float(), (0, 0, 0, -rows.shape[0] % ITEM))
        u, parts = quantize_rows(rows) if bits == 8 else quantize_groups(rows, group)
        words[first : first + some], scales[first : first + some] = pack_words(u, bits), pack_scales(parts)
    return words, scales


AT_ONCE = 1 << 21
"""Numbers of a weight that are quantized, or written out again, at once: what a cache holds."""


def restore(words: Tensor, scales: Tensor, outputs: int, inputs: int, group: int) -> Tensor:
    """float32 [outputs, inputs]: what the words and scales of `quantize` stand for."""
    u = words.unsqueeze(-1).view(torch.uint8)  # [blocks, words, ITEM, 4]
    if scales.dtype == torch.bfloat16:
        u = torch.stack((u & 15, u >> 4), -1).flatten(-2)
    u = u.transpose(1, 2).reshape(words.shape[0] * ITEM, -1)[:outputs, :inputs]
    step, low = scales.float().permute(2, 0, 3, 1).flatten(1, 2).repeat_interleave(group, 2)[:, :outputs, :inputs]
    return u * step + low


class _Piece:
    """Memory for some outputs of a weight, written out for torch to multiply with, over and over.

    float32 lies [inputs, outputs]; bf16 in oneDNN's order, so that oneDNN need not bring it into order each time.
    """

    def __init__(self, dtype: torch.dtype, outputs: int, inputs: int) -> None:
        self.whole = -(-outputs // ITEM) * ITEM
        if dtype == torch.float32:
            memory = torch.empty(padded(inputs), self.whole)
            self.weight, self.stride, self.block = memory[:inputs, :outputs], self.whole, 0
        else:
            self.block = onednn_block(outputs, inputs) or 0
            self.weight, memory = pack_onednn(torch.zeros(outputs, inputs, dtype=dtype))
            self.stride = memory.numel() // (-(-outputs // self.block) * self.block)
        self.where = memory.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs] to [rows, outputs]."""
        if self.block:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return torch.mm(x, self.weight)


class _Pieces(threading.local):
    """The pieces of this Python thread; all layers of a shape share one."""

    def __init__(self) -> None:
        self.of = functools.cache(_Piece)


_pieces = _Pieces()


def cut(outputs: int, inputs: int) -> list[tuple[int, int]]:
    """(first output, outputs) of the pieces that a weight is written out in."""
    count = -(-outputs * inputs // AT_ONCE)
    size = -(-outputs // (64 * count)) * 64
    return [(first, min(size, outputs - first)) for first in range(0, outputs, size)]


FEW = 8
"""Up to this many rows the numba kernel is the faster one."""


def few_rows(dtype: torch.dtype, outputs: int, inputs: int) -> float:
    """Up to how many rows the numba kernel is the faster one, or the only one."""
    if dtype == torch.float32:
        return FEW
    if not onednn_packs() or inputs % UNIT or not all(onednn_block(n, inputs) for _, n in cut(outputs, inputs)):
        return math.inf
    return FEW


class QuantizedLinear(CPULinear):
    """A weight of 8 or 4 bits, rounded when it is loaded; activations stay what they are.

    Few rows by a numba kernel, more by torch, with the weight written out piece by piece in the dtype that it came in.

    Args:
        bits: 8 (a step for each output) or 4.
        group: inputs with a step and a low of their own, for 4 bits.
    """

    capturable = True

    def __init__(self, bits: int, group: int | None = None) -> None:
        super().__init__()
        self.bits, self.group = bits, group

    def problem(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `LinearMethod`."""
        if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
            return f"quantized weights are made from float32 or bfloat16 on the CPU, not from {dtype} on {device}"
        return None

    def process_weights_after_loading(self) -> None:
        """See `LinearMethod`."""
        if "weight" not in self.weights:
            return  # nothing was loaded anew
        weight, bias = self.weights.pop("weight"), self.weights.get("bias")
        (self.outputs, self.inputs), self.dtype = weight.shape, weight.dtype
        self.out_dtype, self.max_rows = None, few_rows(weight.dtype, *weight.shape)
        self._float_bias = None if bias is None else bias.float().contiguous()
        self._group = padded(self.inputs) if self.group is None else self.group
        self.words, self.scales = quantize(weight, self.bits, self._group)
        sizes = (self.bits, self._group, self.outputs, self.inputs, 8 * weight.element_size())
        self._kernel: QuantizedMatmul = QuantizedMatmul(
            self.words.data_ptr(), self.scales.data_ptr(), *sizes, self._bias_address()
        )

    def apply(self, x: Tensor) -> Tensor:
        """See `LinearMethod`."""
        if x.shape[0] <= self.max_rows:
            return few_rows_matmul(self._kernel, x, self.outputs)
        parts, x = [], x.contiguous()
        for first, outputs in cut(self.outputs, self.inputs):
            piece = _pieces.of(self.dtype, outputs, self.inputs)
            threads = torch.get_num_threads()
            self._kernel.dequantize(piece.where, first, piece.whole, piece.stride, piece.block, threads)
            parts.append(piece(x))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out if self._float_bias is None else out.add_(self._float_bias)

    @property
    def weight(self) -> Tensor:
        if "weight" in self.weights:
            return self.weights["weight"]
        return restore(self.words, self.scales, self.outputs, self.inputs, self._group).to(self.dtype)

    @property
    def memory(self) -> Tensor | None:
        return self.weights.get("weight", getattr(self, "words", None))


class TorchQuantizedLinear(QuantizedLinear):
    """The same numbers, with the whole weight written out by torch in every step: slow, and easy to read."""

    capturable = True

    def apply(self, x: Tensor) -> Tensor:
        """See `LinearMethod`."""
        return F.linear(x, self.weight, self.bias)


def quantized_linear(name: str) -> QuantizedLinear:
    """The method `int8`, or `int4_` and the inputs of a group; by torch alone with `torch_` before it."""
    kind = name.removeprefix("torch_")
    cls = QuantizedLinear if kind == name else TorchQuantizedLinear
    return cls(8) if kind == "int8" else cls(4, int(kind.removeprefix("int4_")))


def explain(dtype: torch.dtype, name: str) -> str:
    """What the weights of a method are, and how they are multiplied, in words."""
    what, kind = "8 bits, a step for each output", name.removeprefix("torch_")
    if kind != "int8":
        what = f"4 bits, a step and a low for {kind.removeprefix('int4_')} inputs, output layer 8 bits"
    if kind != name:
        return f"weights of {what}; torch writes them out in every step"
    limit = few_rows(dtype, 64, 64)
    many = "" if limit == math.inf else f", beyond {limit} rows torch multiplies with pieces written out"
    return f"weights of {what}; numba reads each once{many}"
