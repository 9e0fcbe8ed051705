"""Linear methods with weights of 8 or 4 bits: quantize at load, pack, multiply."""

# Generated from nbs/models/linear/quantized.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.linear.base import LinearMethod
from minivllm.models.linear.batch_invariant import matmul_by_tiles
from minivllm.models.linear.cpu import few_rows_matmul
from minivllm.models.linear.grouped import (
    GroupedWeight,
    QuantizedWeight,
    RepackedWeight,
    StoredLinear,
    pack_nibbles,
    unpack_nibbles,
)
from minivllm.models.linear.scaled import FP8, ScaledWeight
from minivllm_kernels.cpu.compile import host_lanes, kernel, pack
from minivllm_kernels.cpu.matmul.layout import (
    FEW,
    ITEM,
    SPAN,
    QuantizedMatmul,
    ScaledMatmul,
    group_problem,
    scaled_problem,
)
from minivllm_kernels.cpu.program import LAUNCHER

__all__ = [
    "AT_ONCE", "CPUScaledWeight", "CPUStoredLinear", "PackedWeight", "QuantizedLinear",
    "TorchQuantizedLinear", "as_scaled", "explain", "pack_problem", "pack_scales", "pack_words", "quantize",
    "quantize_groups", "quantize_rows", "quantized_linear", "rounded_together", "shortened", "whole_codes",
]  # fmt: skip


def quantize_rows(weight: Tensor) -> GroupedWeight:
    """8 bits, one scale per row, symmetric around zero; weight: float32 [outputs, inputs]."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return GroupedWeight(weight.div(scale).round_().to(torch.int8), scale)


def shortened(x: Tensor) -> Tensor:
    """float32 as float16, or as it is if that would round a number by more than one part in 2048."""
    half = x.half()
    return half if ((half.float() - x).abs() <= x.abs() / 2048).all() else x


def quantize_groups(weight: Tensor, group: int) -> GroupedWeight:
    """4 bits, from the least to the largest of every `group` inputs of a row. Scale and low are `shortened` first.

    Args:
        weight: float32 [outputs, inputs]. The last group may be shorter.
    """
    outputs, inputs = weight.shape
    whole = F.pad(weight[None], (0, -inputs % group), mode="replicate").view(outputs, -1, group)
    low, high = whole.aminmax(dim=-1)
    low, scale = shortened(low), shortened((high - low) / 15)
    exact = scale.float().unsqueeze(-1)
    q = whole.sub(low.float().unsqueeze(-1)).div_(exact.masked_fill(exact == 0, 1)).round_().clamp_(0, 15)
    stored = pack_nibbles(q.to(torch.uint8).view(outputs, -1))
    if inputs % group == 0:
        return GroupedWeight(stored, scale, low)
    order = torch.arange(2 * stored.shape[1]).clamp_(max=inputs)  # columns after the last input belong to none
    return GroupedWeight(stored, scale, low, order=order, inputs=inputs)


AT_ONCE = 1 << 21
"""Numbers of a weight that are quantized at once: what a cache holds."""


def quantize(weight: Tensor, bits: int, group: int | None) -> GroupedWeight:
    """A weight [outputs, inputs] in 8 bits, or in 4 with a scale and a low for every `group` inputs."""
    pieces = [
        quantize_rows(rows.float()) if bits == 8 else quantize_groups(rows.float(), group or weight.shape[1])
        for rows in weight.split(max(AT_ONCE // weight.shape[1], 1))
    ]
    whole = pieces[0]
    if len(pieces) == 1:
        return whole
    both = {name: torch.cat([piece.tensors()[name] for piece in pieces]) for name in ("q", "scale")}
    low = None if whole.low is None else torch.cat([piece.tensors()["low"] for piece in pieces])
    return GroupedWeight(both["q"], both["scale"], low, order=whole.order, inputs=whole.inputs)


def pack_problem(weight: GroupedWeight) -> str | None:
    """Why no kernel multiplies by this weight, or None."""
    return None if weight.scale.shape[1] == 1 else group_problem(weight.group, weight.bits)


def rounded_together(weight: GroupedWeight) -> tuple[int, int]:
    """(inputs of a row that are rounded together, how often that doubles to the inputs that share a scale of the weight)."""
    if weight.scale.shape[1] == 1:
        return SPAN if 0 < weight.columns % (2 * SPAN) <= SPAN else 2 * SPAN, 31
    if weight.group % (2 * SPAN):
        return weight.group, 0
    times = weight.group // (2 * SPAN)
    return (2 * SPAN, times.bit_length() - 1) if times & (times - 1) == 0 else (weight.group, 0)


def pack_words(u: Tensor, bits: int, columns: int) -> Tensor:
    """Numbers [outputs, inputs], padded to `columns`, as int32 words in the order of `QuantizedMatmul`."""
    u = F.pad(u, (0, columns - u.shape[1], 0, -u.shape[0] % ITEM))
    if bits == 4:
        fours = u.view(len(u), -1, 2, 4)
        u = (fours[:, :, 0] | fours[:, :, 1] << 4).view(len(u), -1)
    return u.view(-1, ITEM, u.shape[1] // 4, 4).transpose(1, 2).contiguous().view(torch.int32).squeeze(-1)


def pack_scales(weight: GroupedWeight, factor: float) -> Tensor:
    """[outputs / ITEM, scale groups, parts, ITEM]: in float16, unless that rounds by more than one part in 2048, or the scales are
    one for each output, or 8 bits have a low."""
    parts = [weight.scale.float() / factor] + ([] if weight.low is None else [weight.low.float()])
    whole = F.pad(torch.stack(parts, -1), (0, 0, 0, 0, 0, -weight.scale.shape[0] % ITEM))
    packed = whole.view(-1, ITEM, *whole.shape[1:]).permute(0, 2, 3, 1).contiguous()
    if weight.scale.shape[1] == 1 or (weight.bits == 8 and weight.low is not None):
        return packed
    return shortened(packed)


def whole_codes(codes: Tensor) -> tuple[Tensor, float]:
    """A code book as numbers from -127 to 127, and the factor between: exact if the codes are whole numbers or halves."""
    largest = codes.abs().max().item()
    for factor in (1.0, 2.0):
        if largest * factor <= 127 and bool((codes * factor == (codes * factor).round()).all()):
            return (codes * factor).to(torch.int8), factor
    return (codes * (127 / largest)).round().to(torch.int8), 127 / largest


class PackedWeight(RepackedWeight):
    """A `GroupedWeight` in the order of the CPU's kernel, which rounds activations to 8 bits, 16 or more of a row together, except for
    many rows of bf16 where there is a tile unit.

    A code book that is not made of halves is rounded to parts of 127 of its largest entry.

    Args:
        dtype: of the activations, float32 or bfloat16.
        bias: float32 [outputs], added to the results.
        out_dtype: of the results, if it is another one.
        tiles: see `QuantizedMatmul`.

    Raises:
        ValueError: `pack_problem`.
    """

    def __init__(
        self,
        weight: GroupedWeight,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        tiles: bool = True,
    ) -> None:
        if problem := pack_problem(weight):
            raise ValueError(f"no kernel for this weight: {problem}")
        self._shape, self.columns, self.bits, self.out_dtype = weight.shape, weight.columns, weight.bits, out_dtype
        self.order, self.inputs, self.bias = weight.order, weight.inputs, bias
        self.codes: Tensor | None
        self.codes, factor = (None, 1.0) if weight.codes is None else whole_codes(weight.codes)
        self.table = None if self.codes is None else self.codes.view(torch.uint8) ^ 128
        group, shift = rounded_together(weight)
        straight = torch.arange(self.columns).clamp_(max=self._shape[1])
        behind = self.columns - self._shape[1]
        self.straight = self.order is None or (behind < weight.group and torch.equal(self.order, straight))
        inputs = self._shape[1] if self.straight else self.columns
        u = unpack_nibbles(weight.q) if self.bits == 4 else weight.q.view(torch.uint8) ^ 128
        wide = -(-inputs // group) * group
        self.words = pack_words(u[:, :wide], self.bits, wide)
        self.scales = pack_scales(weight, factor)
        self.kernel = QuantizedMatmul(
            self.words.data_ptr(),
            self.scales.data_ptr(),
            self._shape[0],
            inputs,
            bits=self.bits,
            group=group,
            shift=shift,
            parts=self.scales.shape[2],
            scale_bits=8 * self.scales.itemsize,
            x_bits=8 * dtype.itemsize,
            out_bits=8 * (out_dtype or dtype).itemsize,
            bias=0 if bias is None else bias.data_ptr(),
            codes=0 if self.table is None else self.table.data_ptr(),
            tiles=tiles,
        )

    def apply(self, x: Tensor, matmul: Any = None) -> Tensor:
        """x [T, inputs] to [T, outputs], with the bias. `matmul` is not needed."""
        if not self.straight:
            assert self.order is not None
            x = take_columns(x, self.order)
        return few_rows_matmul(self.kernel, x, self._shape[0], self.out_dtype)

    def unpacked(self) -> GroupedWeight:
        """The weight as it came; a code book as the kernel has it."""
        u = self.words.unsqueeze(-1).view(torch.uint8)  # [blocks, words, ITEM, 4]
        if self.bits == 4:
            u = torch.stack((u & 15, u >> 4), 2).flatten(1, 2)  # the low halves are four inputs, the high ones the next
        u = u.transpose(1, 2).reshape(len(self.words) * ITEM, -1)[: self._shape[0], : self.columns]
        u = F.pad(u, (0, self.columns - u.shape[1]))  # columns after the last input, which are not kept
        q = pack_nibbles(u) if self.bits == 4 else (u ^ 128).view(torch.int8)
        scale, *low = self.scales.permute(2, 0, 3, 1).flatten(1, 2)[:, : self._shape[0]].unbind()
        codes = None if self.codes is None else self.codes.float()
        return GroupedWeight(q, scale, low[0] if low else None, codes, self.order, self.inputs)


class CPUScaledWeight(RepackedWeight):
    """A `ScaledWeight` in the order of the CPU's kernel, or a `GroupedWeight` of 8 bits whose groups are too small for its own.

    Args:
        dtype: of the activations, float32 or bfloat16.
        bias: float32 [outputs], added to the results.

    Raises:
        ValueError: `layout.scaled_problem`.
    """

    def __init__(self, weight: ScaledWeight, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        self._shape, self._like, self.bias = weight.shape, replace(weight, q=weight.q[:0], scale=weight.scale[:0]), bias
        pad = -weight.shape[0] % ITEM
        q = F.pad(weight.q.view(torch.uint8), (0, 0, 0, pad))
        self.words = q.view(-1, ITEM, q.shape[1]).transpose(1, 2).contiguous()
        scale = weight.scale.float() * (256 if weight.q.dtype == FP8 else 1)
        scale = F.pad(scale, (0, 0, 0, pad))
        self.scales = scale.view(-1, ITEM, scale.shape[1]).transpose(1, 2).contiguous()
        step = weight.input_scale
        self.kernel = ScaledMatmul(
            self.words.data_ptr(),
            self.scales.data_ptr(),
            0 if step is None else step.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            outputs=weight.shape[0],
            inputs=weight.shape[1],
            block=weight.block,
            whole=weight.q.dtype == torch.int8,
            together={"none": 0, "group": weight.block}.get(weight.activations, weight.shape[1]),
            bits=8 * dtype.itemsize,
        )

    def apply(self, x: Tensor, matmul: Any = None) -> Tensor:
        """x [T, inputs] to [T, outputs], with the bias. `matmul` is not needed."""
        return few_rows_matmul(self.kernel, x, self._shape[0])

    def unpacked(self) -> ScaledWeight:
        """The weight as it came."""
        outputs = self._shape[0]
        q, scale = (t.transpose(1, 2).flatten(0, 1)[:outputs] for t in (self.words, self.scales))
        fp8 = self._like.q.dtype == FP8
        return replace(self._like, q=q.view(self._like.q.dtype), scale=scale / 256 if fp8 else scale)


def as_scaled(value: QuantizedWeight | Tensor) -> ScaledWeight | None:
    """The weight as one that `CPUScaledWeight` takes, or None."""
    if isinstance(value, GroupedWeight) and value.bits == 8 and value.low is None and value.order is None:
        value = ScaledWeight(value.q, value.scale.float(), value.group)
    if not isinstance(value, ScaledWeight):
        return None
    together = value.block if value.activations == "group" else value.shape[1]
    whole = value.q.dtype == torch.int8
    return None if scaled_problem(value.shape[1], value.block, together, whole) else value


def take_columns(x: Tensor, order: Tensor) -> Tensor:
    """x [T, inputs] in an order of columns, int64 [columns]: [T, columns]; a column of no input (`inputs`) is zero."""
    x, (rows, inputs), columns = x.contiguous(), x.shape, len(order)
    out = x.new_empty(rows, columns)
    args = pack(rows, x.data_ptr(), order.data_ptr(), out.data_ptr(), inputs, columns)
    which = kernel("minivllm_kernels.cpu.matmul.quantized:take_columns", 8 * x.itemsize)
    LAUNCHER.run(which, args, min(rows, torch.get_num_threads()))
    return out


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Results [T, n] of several weights as one [T, outputs]."""
    rows, first = len(parts[0]), 0
    out = parts[0].new_empty(rows, sum(part.shape[1] for part in parts))
    for part in parts:
        size, to = part.shape[1], out.data_ptr() + first * out.itemsize
        which = "minivllm_kernels.cpu.pointwise:add_apart", 8 * out.itemsize, math.gcd(host_lanes(), size)
        args = pack(rows, 1, part.data_ptr(), 0, to, size, out.shape[1])
        LAUNCHER.run(kernel(*which), args, min(rows, torch.get_num_threads()))
        first += size
    return out


class CPUStoredLinear(StoredLinear):
    """`StoredLinear` with grouped weights multiplied by the CPU's kernel; weights of other kinds are written out by torch.

    Args:
        parts, dtype: see `StoredLinear`.
        tiles: see `QuantizedMatmul`. Without them a row's result is the same to the bit in any batch, also by what torch writes out.
    """

    capturable = True

    def __init__(self, parts: Mapping[str, int], dtype: torch.dtype, tiles: bool = True) -> None:
        super().__init__(parts, dtype, F.linear if tiles else matmul_by_tiles)
        self.tiles = tiles

    def process_weights_after_loading(self) -> None:
        """See `LinearMethod`."""
        if not self.loaded:
            return  # nothing was loaded anew
        super().process_weights_after_loading()
        self.biases: list[Tensor] | list[None] = [None] * len(self.values)
        if self.bias is not None:
            self.biases = [part.float() for part in self.bias.split([value.shape[0] for value in self.values])]
        self.values = [self._pack(*both) for both in zip(self.values, self.biases, strict=True)]

    def _pack(self, value: QuantizedWeight | Tensor, bias: Tensor | None) -> QuantizedWeight | Tensor:
        if isinstance(value, GroupedWeight) and not pack_problem(value):
            return PackedWeight(value, self.dtype, bias, tiles=self.tiles)
        scaled = as_scaled(value)
        return value if scaled is None else CPUScaledWeight(scaled, self.dtype, bias)

    def apply(self, x: Tensor) -> Tensor:
        """See `LinearMethod`."""
        out = [self.multiply(x, i) for i in range(len(self.values))]
        return out[0] if len(out) == 1 else side_by_side(out)

    def multiply(self, x: Tensor, index: int) -> Tensor:
        """x [T, inputs] by `values[index]`, with its bias."""
        out, bias = super().multiply(x, index), self.biases[index]
        return out if bias is None or isinstance(self.values[index], RepackedWeight) else out + bias.to(out.dtype)


class QuantizedLinear(LinearMethod):
    """A weight of 8 or 4 bits, rounded when it is loaded, and multiplied by the CPU's kernel: see `PackedWeight`.

    Args:
        bits: 8 (a scale for each output) or 4.
        group: inputs that share a scale and a low, for 4 bits.
        tiles: see `QuantizedMatmul`.

    Attributes:
        value: the weight; None until it was loaded.
    """

    capturable = True

    def __init__(self, bits: int, group: int | None = None, tiles: bool = True) -> None:
        super().__init__()
        self.bits, self.group, self.tiles = bits, group, tiles
        self.value: QuantizedWeight | None = None

    def problem(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
            return f"quantized weights are made from float32 or bfloat16 on the CPU, not from {dtype} on {device}"
        return None

    def process_weights_after_loading(self) -> None:
        if "weight" not in self.weights:
            return  # nothing was loaded anew
        weight, bias = self.weights.pop("weight"), self.weights.get("bias")
        self.dtype = weight.dtype
        own = None if bias is None else bias.float().contiguous()
        self.value = self._pack(quantize(weight, self.bits, self.group), own)

    def _pack(self, value: GroupedWeight, bias: Tensor | None) -> QuantizedWeight:
        return PackedWeight(value, self.dtype, bias, self.out_dtype, self.tiles)

    def apply(self, x: Tensor) -> Tensor:
        assert self.value is not None
        return self.value.apply(x)

    @property
    def weight(self) -> Tensor:
        if "weight" in self.weights or self.value is None:
            return self.weights["weight"]
        return self.value.dequantize().to(self.dtype)

    @property
    def memory(self) -> Tensor | None:
        return self.value.words if isinstance(self.value, PackedWeight) else self.weights.get("weight")


class TorchQuantizedLinear(QuantizedLinear):
    """The same numbers, with the whole weight written out by torch in every step, and activations as they are: slow, easy to read."""

    capturable = True

    def _pack(self, value: GroupedWeight, bias: Tensor | None) -> QuantizedWeight:
        self.out_dtype = None
        return value

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def quantized_linear(name: str) -> QuantizedLinear:
    """The method `int8`, or `int4_` and the inputs of a group; by torch alone with `torch_` before it, with the same bits in any batch
    with `invariant_`."""
    kind = name.removeprefix("torch_").removeprefix("invariant_")
    cls = TorchQuantizedLinear if name.startswith("torch_") else QuantizedLinear
    bits, group = (8, None) if kind == "int8" else (4, int(kind.removeprefix("int4_")))
    return cls(bits, group, not name.startswith("invariant_"))


def explain(name: str) -> str:
    """What the weights of a method are, and how they are multiplied, in words."""
    what, kind = "8 bits, a scale for each output", name.removeprefix("torch_").removeprefix("invariant_")
    if kind != "int8":
        what = f"4 bits, a scale and a low for {kind.removeprefix('int4_')} inputs, output layer 8 bits"
    if name.startswith("torch_"):
        return f"weights of {what}; torch writes them out in every step"
    many = f"; where there is AMX, more than {FEW} rows of bf16 are not rounded" if kind == name else ""
    return f"weights of {what}; numba multiplies whole numbers, with activations rounded to 8 bits{many}"
