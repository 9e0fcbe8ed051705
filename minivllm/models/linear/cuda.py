"""Linear method of a GPU: our kernel for few rows, torch for more."""

# Generated from nbs/models/linear/cuda.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib.util
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.linear.base import LinearMethod
from minivllm.models.linear.grouped import (
    GroupedWeight,
    Matmul,
    QuantizedWeight,
    RepackedWeight,
    StoredLinear,
    pack_nibbles,
    unpack_nibbles,
)
from minivllm.models.linear.scaled import FP8, ScaledWeight, quantize_channels

MOST_ROWS = 256
"""Matmuls of up to this many rows use our kernel if `ops.takes_rows` says so; others use torch."""
QUANTIZED_ROWS = 64
"""The same for a quantized weight. It is read once per 16 rows, which up to here is faster than writing it out."""


def cuda_kernels() -> ModuleType:
    """The kernels behind torch calls. Raises ImportError if numba is not installed."""
    from minivllm_kernels.cuda import ops

    return ops


class FewRowsLinear(LinearMethod):
    """Our kernel for few rows, torch's matmul for more, and for a layer with a bias."""

    capturable = True

    def problem(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> str | None:
        try:
            ops = cuda_kernels()
        except ImportError as error:
            return f'{error}; install the kernels with pip install "minivllm[cuda]"'
        if (reason := ops.device_unsupported(device)) is not None:
            return reason
        if dtype not in ops.HALF:
            return f"the kernels are built for bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if outputs % 2 or inputs % 8:
            return f"the kernels take an even number of outputs and a multiple of 8 inputs, not {outputs} and {inputs}"
        return None

    def takes(self, x: Tensor, gated: bool = False) -> bool:
        """Whether the matmul with x [T, inputs], perhaps with `silu(gate) * up` at its end, is our kernel's."""
        few = 0 < x.shape[0] <= MOST_ROWS and "bias" not in self.weights
        return few and cuda_kernels().takes_rows(self.weights["weight"], x.shape[0], gated)

    def apply(self, x: Tensor) -> Tensor:
        if not self.takes(x):
            return F.linear(x, self.weights["weight"], self.weights.get("bias"))
        return cuda_kernels().gemv(x, self.weights["weight"])


TILE = 32
"""Outputs are padded to a multiple of this."""
NIBBLE_AT = {"bfloat16": 3, "float16": 2}
"""How many bits the words of a 4-bit weight are rotated to the left: four bits then lie where a 16-bit float has those after the leading 1
of 16 or 256."""
BASES = {"bfloat16": (16, 16), "float16": (256, 16)}
"""The offsets of 4-bit numbers in two outputs 8 apart: a zero point z is kept as -(offset + z)."""


def whole_zero_points(weight: GroupedWeight) -> Tensor | None:
    """int32 [outputs, groups]: the zero points that the lows of a weight are made of; None if they are no whole numbers to 31."""
    assert weight.low is not None
    scale, low = weight.scale.float(), weight.low.float()
    zero = (-low / scale.masked_fill(scale == 0, 1)).round()
    fits = torch.equal(zero * -scale, low) and bool((zero >= 0).all()) and bool((zero < 32).all())
    return zero.int() if fits else None


def short_scales(scale: Tensor) -> Tensor:
    """Scales with 16 bits, if that rounds none of them; else float32."""
    kinds = (scale.dtype,) if scale.itemsize == 2 else (torch.bfloat16, torch.float16)
    return next((s for s in map(scale.to, kinds) if torch.equal(s.float(), scale.float())), scale.float())


def cuda_format(weight: QuantizedWeight, dtype: torch.dtype) -> Any:
    """The `Format` that a GPU's kernels read a weight in. It decides which weights they multiply by.

    int4 with or without whole zero points, int8 without, and fp8, in groups of 32 or of a multiple of 64 (8 bits: 32), or with a scale for
    each output. Torch writes out all others: code books, other lows, groups of 16.

    Raises:
        ValueError: there is no kernel for it; says why.
    """
    from minivllm_kernels.cuda.quantized import MOST_BYTES, Format

    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"activations are {str(dtype).removeprefix('torch.')}, not bfloat16 or float16")
    if weight.shape[0] % 2:
        raise ValueError(f"an odd number of outputs, {weight.shape[0]}")
    if isinstance(weight, GroupedWeight | ScaledWeight):
        size = -(-weight.shape[0] // TILE) * TILE * weight.q.shape[1]
        if size > MOST_BYTES:
            raise ValueError(f"a weight of {size} bytes; the kernels take less than 8 GiB")
    name, zeros = str(dtype).removeprefix("torch."), False
    if isinstance(weight, ScaledWeight):
        if weight.q.dtype == FP8 and bool((weight.q.view(torch.uint8) & 127 == 127).any()):
            raise ValueError("it has numbers that are NaN")
        kind, columns, group = "fp8" if weight.q.dtype == FP8 else "int8", weight.shape[1], weight.block
        return Format(kind, name, columns, group, "float32")
    if not isinstance(weight, GroupedWeight) or weight.codes is not None:
        raise ValueError("its numbers are those of a code book")
    if weight.low is not None:
        if weight.bits == 8:
            raise ValueError("weights of 8 bits with zero points have no kernel")
        zeros = whole_zero_points(weight) is not None
        if not zeros:
            raise ValueError("what is added to a group is no whole number of its scale")
    scale = str(short_scales(weight.scale).dtype).removeprefix("torch.")
    return Format(f"int{weight.bits}", name, weight.columns, weight.group, scale, zeros)


def _by_tiles(x: Tensor) -> Tensor:
    """[outputs, n], padded, to [tiles, 2, 8, n]: outputs 8 apart are the two halves of a tile."""
    return F.pad(x, (0, 0, 0, -x.shape[0] % TILE)).view(-1, 2, 8, x.shape[1])


def _turned(words: Tensor, by: int) -> Tensor:
    """int32 words with the bits turned to the left."""
    return (words << by) | ((words >> (32 - by)) & ((1 << by) - 1))


def _interleaved(words: Tensor) -> Tensor:
    """Pairs of e4m3 in the halves of int32 words; four bits of each change places, so that the kernel needs fewer steps. Its own reverse."""
    return (words & -0x7F807F81) | (words & 0x78007800) >> 4 | (words & 0x07800780) << 4


def pack_tiles(q: Tensor, format: Any) -> Tensor:
    """Numbers uint8 [outputs, inputs] as int32 words, in the order in which `minivllm_kernels.cuda.quantized` reads them."""
    tiles = _by_tiles(q)  # inputs are steps, halves of 32, lanes, slices, pairs, numbers of a pair
    if format.kind == "int4":
        nibbles = tiles.unflatten(3, (-1, 2, 4, 2, 2, 2)).permute(0, 3, 2, 5, 4, 6, 8, 7, 1)
        return _turned(pack_nibbles(nibbles.reshape(-1, 8)).view(torch.int32).flatten(), NIBBLE_AT[format.dtype])
    words = (
        tiles.unflatten(3, (-1, 4, 2, 2, 2)).permute(0, 3, 2, 4, 5, 6, 7, 1).reshape(-1, 4).view(torch.int32).flatten()
    )
    if format.kind == "int8":
        return words
    return _interleaved(words)


def unpack_tiles(words: Tensor, format: Any) -> Tensor:
    """The reverse of `pack_tiles`; outputs are still padded."""
    if format.kind == "int4":
        numbers = _turned(words, 32 - NIBBLE_AT[format.dtype]).view(torch.uint8)
        tiles = unpack_nibbles(numbers).view(-1, format.steps, 8, 4, 2, 2, 2, 2, 2).permute(0, 8, 2, 1, 4, 3, 5, 7, 6)
        return tiles.reshape(-1, format.features)
    words = _interleaved(words) if format.kind == "fp8" else words
    tiles = words.view(torch.uint8).view(-1, format.steps, 8, 4, 2, 2, 2, 2).permute(0, 7, 2, 1, 3, 4, 5, 6)
    return tiles.reshape(-1, format.features)


class CUDAPackedWeight(RepackedWeight):
    """A weight in the order of the GPU's kernels. Activations stay as they are, also where a checkpoint would have them rounded.

    Args:
        format: `cuda_format` of the weight.
    """

    def __init__(self, weight: GroupedWeight | ScaledWeight, format: Any) -> None:
        self.format, self._shape = format, weight.shape
        self.order, self.inputs = (weight.order, weight.inputs) if isinstance(weight, GroupedWeight) else (None, None)
        self.bits = 4 if format.kind == "int4" else 8
        self.words = pack_tiles(unpack_nibbles(weight.q) if self.bits == 4 else weight.q.view(torch.uint8), format)
        scale = weight.scale.to(getattr(torch, format.scale))
        self.scales = _by_tiles(scale).permute(0, 3, 2, 1).contiguous().view(torch.int32)
        if format.zeros:
            assert isinstance(weight, GroupedWeight)
            whole = whole_zero_points(weight)
            assert whole is not None  # `cuda_format` has looked
            base = torch.tensor(BASES[format.dtype], device=whole.device)
            zero = (-base - _by_tiles(whole).permute(0, 3, 2, 1)).to(getattr(torch, format.dtype))
            self.scales = torch.cat((self.scales, zero.contiguous().view(torch.int32)), -1)

    def apply(self, x: Tensor, matmul: Matmul = F.linear) -> Tensor:
        """See `QuantizedWeight`. More than `QUANTIZED_ROWS` rows are multiplied by torch, with the weight written out in slices."""
        ops, outputs = cuda_kernels(), self._shape[0]
        if self.order is not None:
            x = (x if self.inputs is None else F.pad(x, (0, 1))).index_select(1, self.order)
        if 0 < x.shape[0] <= QUANTIZED_ROWS:
            return ops.quantized_gemv(x, self.format, self.words, self.scales, outputs)
        out, each = [], max(AT_ONCE // self.format.features // TILE, 1) * TILE
        for first in range(0, outputs, each):
            size = min(each, outputs - first)
            out.append(matmul(x, ops.dequantize(self.format, self.words, self.scales, first, size)))
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    def unpacked(self) -> GroupedWeight | ScaledWeight:
        """The weight as it came."""
        format, outputs, kind = self.format, self._shape[0], getattr(torch, self.format.scale)

        def outputs_of(pairs: Tensor) -> Tensor:
            """[tiles, groups, 8, 2], where the last are outputs 8 apart, to [outputs, groups]."""
            return pairs.permute(0, 3, 2, 1).reshape(-1, pairs.shape[1])[:outputs]

        q = unpack_tiles(self.words, format)[:outputs]
        scale, low = outputs_of(self.scales[..., : kind.itemsize // 2].contiguous().view(kind)), None
        if format.zeros:
            halves = self.scales[..., 1:].contiguous().view(getattr(torch, format.dtype)).float()
            low = outputs_of(halves + halves.new_tensor(BASES[format.dtype])) * scale.float()
        if format.kind == "fp8":
            return ScaledWeight(q.view(FP8), scale, format.group)
        q = pack_nibbles(q) if self.bits == 4 else q.view(torch.int8)
        return GroupedWeight(q, scale, low, order=self.order, inputs=self.inputs)


AT_ONCE = 1 << 27
"""Numbers of a weight that are written out at once, to be multiplied by torch."""


def packed(weight: Any, dtype: torch.dtype) -> Any:
    """A weight in the order of the kernels; as it is, if it is not quantized, or there is no kernel for it, or no GPU."""
    if not isinstance(weight, GroupedWeight | ScaledWeight):
        return weight
    if FewRowsLinear().problem(64, 64, dtype, weight.q.device):
        return weight
    try:
        format = cuda_format(weight, dtype)
    except ValueError:
        return weight
    return CUDAPackedWeight(weight, format)


class CUDAStoredLinear(StoredLinear):
    """`StoredLinear` with weights multiplied by the GPU's kernels if there are any for them; torch writes out the others."""

    capturable = True

    def process_weights_after_loading(self) -> None:
        if self.loaded:
            super().process_weights_after_loading()
            self.values = [packed(value, self.dtype) for value in self.values]


class FP8Linear(LinearMethod):
    """A weight that is rounded to fp8 when it is loaded. Where no kernel of a GPU takes it, activations are rounded, too, token by token."""

    capturable = True

    def problem(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> str | None:
        return None if dtype.is_floating_point else f"fp8 weights are made from floats, not from {dtype}"

    def process_weights_after_loading(self) -> None:
        if "weight" in self.weights:
            weight = self.weights.pop("weight")
            self.dtype = weight.dtype
            self.value, self._added = packed(quantize_channels(weight, FP8), self.dtype), self.bias
            if isinstance(self.value, ScaledWeight) and (ours := self._for_cpu(self.value)) is not None:
                self.value, self._added = ours, None  # its kernel adds the bias

    def _for_cpu(self, value: ScaledWeight) -> QuantizedWeight | None:
        here = value.q.device.type == "cpu" and self.dtype in (torch.float32, torch.bfloat16)
        if not here or importlib.util.find_spec("numba") is None:
            return None
        from minivllm.models.linear.quantized import CPUScaledWeight, as_scaled

        bias, scaled = self.bias, as_scaled(value)
        return scaled and CPUScaledWeight(scaled, self.dtype, None if bias is None else bias.float())

    def apply(self, x: Tensor) -> Tensor:
        out = self.value.apply(x)
        return out if self._added is None else out + self._added

    @property
    def weight(self) -> Tensor:
        return self.weights["weight"] if "weight" in self.weights else self.value.dequantize().to(self.dtype)

    @property
    def memory(self) -> Tensor | None:
        return None
