"""Blocks of GGUF files as grouped weights: Q8_0 and other types."""

# Generated from nbs/models/quantization/blocks.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from minivllm.models.linear.grouped import GroupedWeight, pack_nibbles
from minivllm.models.quantization.compressed import E2M1, power_of_two
from minivllm.models.quantization.formats import Format, Parts, Value, register_format


def _half(blocks: Tensor, at: int) -> Tensor:
    """float16 [outputs, blocks], from two bytes of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _halves(pairs: Tensor) -> Tensor:
    """Pairs whose low bits are the first half of the numbers: uint8 [..., n] to [..., 2 n]."""
    return torch.cat((pairs & 15, pairs >> 4), -1)


def _bits(bytes: Tensor) -> Tensor:
    """uint8 [..., n] to uint8 [..., 8 n], 0 or 1, the lowest bit of each byte first."""
    return (bytes[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _four(at: int, low: int | None = None, codes: Tensor | None = None) -> Callable[[Tensor], GroupedWeight]:
    """Blocks of 4-bit numbers. at: where they begin; low: where the low is."""

    def decode(blocks: Tensor) -> GroupedWeight:
        q = pack_nibbles(_halves(blocks[..., at:]))
        return GroupedWeight(q.flatten(1), _half(blocks, 0), None if low is None else _half(blocks, low), codes)

    return decode


def _five(at: int, low: int | None = None) -> Callable[[Tensor], GroupedWeight]:
    """Blocks of 5-bit numbers: the fifth bits, then the rest."""

    def decode(blocks: Tensor) -> GroupedWeight:
        q = (_halves(blocks[..., at + 4 :]) | _bits(blocks[..., at : at + 4]) << 4).view(torch.int8)
        q = q if low is not None else q - 16
        return GroupedWeight(q.flatten(1), _half(blocks, 0), None if low is None else _half(blocks, low))

    return decode


def _q8_0(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0))


def _mxfp4(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(pack_nibbles(_halves(blocks[..., 1:])).flatten(1), power_of_two(blocks[..., 0]), codes=E2M1)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and low of each group of Q4_K and Q5_K, float32 [outputs, groups]."""
    a, b, c = blocks[..., 4:16].split(4, -1)
    scale = torch.cat((a & 63, c & 15 | a >> 6 << 4), -1)
    low = torch.cat((b & 63, c >> 4 | b >> 6 << 4), -1)
    factor, low_factor = (_half(blocks, at).float().unsqueeze(-1) for at in (0, 2))
    return (factor * scale).flatten(1), -(low_factor * low).flatten(1)


def _by_groups(pairs: Tensor) -> Tensor:
    """128 bytes to eight groups of 32: the low bits of 32 bytes are one group, their high bits the next one."""
    return _halves(pairs.unflatten(-1, (4, 32))).flatten(-2)


def _q4_k(blocks: Tensor) -> GroupedWeight:
    return GroupedWeight(pack_nibbles(_by_groups(blocks[..., 16:])).flatten(1), *_k_scales(blocks))


def _q5_k(blocks: Tensor) -> GroupedWeight:
    fifth = _bits(blocks[..., 16:48]).unflatten(-1, (32, 8)).transpose(-1, -2).flatten(-2)  # bit i is of group i
    q = (_by_groups(blocks[..., 48:]) | fifth << 4).view(torch.int8)
    return GroupedWeight(q.flatten(1), *_k_scales(blocks))


def _q6_k(blocks: Tensor) -> GroupedWeight:
    low = _halves(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    q = (low | high << 4).view(torch.int8) - 32
    scale = _half(blocks, 208).float().unsqueeze(-1) * blocks[..., 192:208].contiguous().view(torch.int8)
    return GroupedWeight(q.flatten(1), scale.flatten(1))


NL_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that 4 bits of IQ4_NL stand for: more of them near zero than far from it."""

BLOCKS: dict[str, tuple[int, Callable[[Tensor], GroupedWeight]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _four(2)),
    "Q4_1": (20, _four(4, 2)),
    "Q5_0": (22, _five(2)),
    "Q5_1": (24, _five(4, 2)),
    "IQ4_NL": (18, _four(2, codes=torch.tensor(NL_CODES, dtype=torch.float32))),
    "MXFP4": (17, _mxfp4),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and what decodes uint8 [outputs, blocks, bytes]."""


@register_format("gguf")
class GGUFBlocks(Format):
    """Blocks of a GGUF file, in a folder that `convert_gguf` wrote."""

    kinds = tuple(f".weight.{name}" for name in BLOCKS)

    def decode(self, parts: Parts) -> Mapping[str, Value]:
        ((kind, _),) = parts.tensors.items()
        size, decode = BLOCKS[kind.rpartition(".")[2]]
        rows = parts.need(kind, torch.uint8)
        if rows.shape[1] % size:
            raise parts.error(kind, f"has rows of {rows.shape[1]} bytes, which are no whole blocks of {size}")
        return {".weight": decode(rows.unflatten(1, (-1, size)))}
