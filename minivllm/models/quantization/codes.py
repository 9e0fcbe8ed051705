"""Formats bitsandbytes (NF4, FP4, int8) and mxfp4 (the experts of GPT-OSS)."""

# Generated from nbs/models/quantization/codes.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.models.linear.grouped import GroupedWeight
from minivllm.models.quantization.compressed import E2M1, power_of_two
from minivllm.models.quantization.formats import FLOATS, Format, Parts, Value, register_format


@register_format("bitsandbytes")
class BitsAndBytes(Format):
    """bitsandbytes, as transformers saves it: NF4 and FP4, with scales that are quantized or not, and int8."""

    kinds = (
        ".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map",
        ".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4", ".SCB", ".weight_format",
    )  # fmt: skip

    def decode(self, parts: Parts) -> Mapping[str, Value]:
        states = [kind for kind in parts.tensors if kind.startswith(".weight.quant_state")]
        if ".SCB" in parts.tensors or not states and parts.tensors.keys() <= {".weight", ".weight_format"}:
            return {".weight": _eight(parts)}
        return {".weight": _four(parts, states[0] if states else ".weight.quant_state.bitsandbytes__nf4")}


def _eight(parts: Parts) -> GroupedWeight:
    q = parts.need(".weight", torch.int8)
    if ".weight_format" in parts.tensors and int(parts.flat(".weight_format", torch.uint8, 1)):
        raise parts.error(".weight_format", "must be 0, rows one after the other: other orders are not implemented")
    return GroupedWeight(q, parts.flat(".SCB", FLOATS, q.shape[0]).float().div(127)[:, None])


def _four(parts: Parts, state_kind: str) -> GroupedWeight:
    try:
        state = json.loads(bytes(parts.flat(state_kind, torch.uint8).tolist()))
        (outputs, inputs), block = state["shape"], state["blocksize"]
    except (ValueError, KeyError, TypeError) as error:
        if state_kind not in parts.tensors:
            raise
        raise parts.error(state_kind, f"is not the description of a weight: {error}") from error
    group = math.gcd(block, inputs)
    if group % 2:
        raise parts.error(".weight", f"of {inputs} inputs has blocks of {block} that cut a byte in two")
    q = parts.flat(".weight", torch.uint8, outputs * inputs // 2).view(outputs, -1)
    absmax = _absmax(parts, state, -(-outputs * inputs // block))
    at = torch.arange(outputs * inputs // group) * group // block
    codes = parts.flat(".weight.quant_map", FLOATS, 16).float()
    return GroupedWeight(q >> 4 | q << 4, absmax[at].view(outputs, -1), codes=codes)


def _absmax(parts: Parts, state: Mapping[str, Any], count: int) -> Tensor:
    """float32 [count]. Scales that are quantized are computed in the dtype that they were made in, as bitsandbytes does."""
    if ".weight.nested_absmax" not in parts.tensors and "nested_blocksize" not in state:
        return parts.flat(".weight.absmax", FLOATS, count).float()
    places, block = parts.flat(".weight.absmax", torch.uint8, count), state["nested_blocksize"]
    outer = parts.flat(".weight.nested_absmax", FLOATS, -(-count // block)).float()
    codes = parts.flat(".weight.nested_quant_map", FLOATS, 256).float()
    dtype = getattr(torch, state["nested_dtype"])
    product = codes[places.int()] * outer.repeat_interleave(block)[:count]
    return (product.to(dtype) + torch.tensor(state["nested_offset"], dtype=dtype)).float()


@register_format("mxfp4")
class MXFP4(Format):
    """MXFP4 experts, as GPT-OSS has them."""

    kinds = ("_blocks", "_scales")

    def decode(self, parts: Parts) -> Mapping[str, Value]:
        """See `Format`. `_blocks` becomes a list with a weight for each expert."""
        blocks = parts.tensors.get("_blocks")
        if blocks is None or blocks.dim() != 4 or blocks.shape[-1] != 16:
            shape = "missing" if blocks is None else f"{tuple(blocks.shape)}"
            raise parts.error("_blocks", f"must have shape (experts, outputs, inputs / 32, 16), it is {shape}")
        parts.need("_blocks", torch.uint8, blocks.shape)
        scale = power_of_two(parts.need("_scales", torch.uint8, blocks.shape[:3]))
        return {"_blocks": [GroupedWeight(q.flatten(1), s, codes=E2M1) for q, s in zip(blocks, scale, strict=True)]}
