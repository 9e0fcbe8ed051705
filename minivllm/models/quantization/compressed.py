"""Formats compressed-tensors and fp8: packed integers, int8, fp8 and 4-bit floats."""

# Generated from nbs/models/quantization/compressed.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.models.linear.grouped import GroupedWeight
from minivllm.models.linear.scaled import FP8, ScaledWeight
from minivllm.models.quantization.formats import (
    Format,
    Parts,
    Value,
    group_order,
    grouped,
    register_format,
    unpack_words,
)

_SCHEMES = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)


@register_format("compressed-tensors")
class CompressedTensors(Format):
    """compressed-tensors, as llm-compressor writes it."""

    kinds = (
        ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx",
        ".weight_global_scale", ".input_scale", ".input_zero_point", ".input_global_scale",
    )  # fmt: skip

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.setting("quantization_status", ("compressed", "frozen"), "compressed")
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            if config.get(name):
                raise ValueError(f"quantization_config: {name}={config[name]!r} is not implemented")
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ValueError("quantization_config: config_groups must name at least one group of modules")
        self.schemes = list(groups.values())
        for scheme in self.schemes:
            if (kind := scheme.get("format") or config.get("format")) not in _SCHEMES:
                raise ValueError(f"quantization_config: format={kind!r} is not implemented; implemented: {_SCHEMES}")

    def scheme(self, module: str) -> Mapping[str, Any]:
        """The group of `config_groups` that a module belongs to. Names of modules come before names of classes."""

        def named(target: str) -> bool:
            if target.startswith("re:"):
                return re.match(target.removeprefix("re:"), module) is not None
            return module == target or module.endswith(f".{target}")

        for match in (named, lambda target: target == "Linear"):
            for scheme in self.schemes:
                if any(match(target) for target in scheme["targets"]):
                    return scheme
        raise ValueError(f"quantization_config: no group of config_groups has {module!r}, which is quantized")

    def decode(self, parts: Parts) -> Mapping[str, Value]:
        scheme = self.scheme(parts.module)
        weights, activations = scheme["weights"], scheme.get("input_activations")
        kind = scheme.get("format") or self.config["format"]
        if kind in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "pack-quantized") and activations:
            raise ValueError(
                f"{parts.module}: format {kind} with activations of {activations['num_bits']} bits is not implemented"
            )
        if kind == "pack-quantized":
            return {".weight": _packed(parts, weights)}
        if kind in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            return {".weight": _float4(parts, kind.startswith("nv"))}
        dtype = FP8 if weights["type"] == "float" else torch.int8
        if weights["num_bits"] != 8 or not weights["symmetric"]:
            raise ValueError(f"{parts.module}: format {kind} is implemented for 8 bits and symmetric weights")
        if dtype == torch.int8 and not activations and weights["strategy"] == "group":
            q = parts.need(".weight", torch.int8)
            groups = parts.groups(".weight_scale", q.shape[1], weights["group_size"])
            return {".weight": GroupedWeight(q, parts.need(".weight_scale", shape=(q.shape[0], groups)).float())}
        block = weights.get("block_structure") if weights["strategy"] == "block" else None
        return {".weight": scaled(parts, dtype, ".weight_scale", block, _activations(parts, activations, dtype))}


def _packed(parts: Parts, weights: Mapping[str, Any]) -> GroupedWeight:
    if (bits := weights["num_bits"]) not in (4, 8) or weights["type"] != "int":
        raise ValueError(f"{parts.module}: packed weights are implemented for integers of 4 and 8 bits")
    words = parts.need(".weight_packed", torch.int32)
    outputs, inputs = parts.need(".weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    fields = 32 // bits
    parts.need(".weight_packed", torch.int32, (outputs, -(-inputs // fields)))
    size = weights["group_size"] if weights["strategy"] == "group" else -1
    groups = parts.groups(".weight_scale", inputs, size)
    q, scale = unpack_words(words, bits, 1)[:, :inputs], parts.need(".weight_scale", shape=(outputs, groups))
    zero = None
    if not weights["symmetric"]:
        zeros = parts.need(".weight_zero_point", torch.int32, (-(-outputs // fields), groups))
        zero = unpack_words(zeros, bits, 0)[:outputs].int()
    order = group_order(parts, ".weight_g_idx", inputs, groups)
    return grouped((q if order is None else q[:, order]).contiguous(), scale, zero, bits, order)


def scaled(parts: Parts, dtype: torch.dtype, kind: str, block: list[int] | None, activations: str) -> ScaledWeight:
    """A weight of a byte each.

    Args:
        kind: kind of the tensor with the scales.
        block: outputs and inputs that share a scale; None for one scale in all, or one for each output.
        activations: see `ScaledWeight`.
    """
    q = parts.need(".weight", dtype)
    (outputs, inputs), scale = q.shape, parts.tensors.get(kind)
    if block is not None:
        blocks = (-(-outputs // block[0]), -(-inputs // block[1]))
        scale = parts.need(kind, shape=blocks).float().repeat_interleave(block[0], 0)[:outputs]
    elif scale is not None and scale.numel() == 1:
        scale = parts.need(kind, shape=scale.shape).float().expand(outputs).reshape(-1, 1)
    else:
        shape = (outputs, 1) if scale is None or scale.dim() == 2 else (outputs,)
        scale = parts.need(kind, shape=shape).float().reshape(-1, 1)
    static = None
    if activations == "static":
        given = parts.tensors.get(".input_scale")
        static = parts.need(".input_scale", shape=(1,) if given is None or given.dim() else ()).float().reshape(1)
    return ScaledWeight(q, scale.contiguous(), inputs if block is None else block[1], activations, static)


def _activations(parts: Parts, given: Mapping[str, Any] | None, dtype: torch.dtype) -> str:
    if not given:
        return "none"
    kind, number = ("float", "fp8") if dtype == FP8 else ("int", "int8")
    if given["num_bits"] != 8 or given["type"] != kind or not given["symmetric"]:
        raise ValueError(
            f"{parts.module}: activations other than symmetric {number} are not implemented for {number} weights"
        )
    if given["dynamic"]:
        return "group" if given["strategy"] == "group" else "token"
    if given["strategy"] != "tensor":
        raise ValueError(f"{parts.module}: static activations are implemented per tensor, not per {given['strategy']}")
    return "static"


E2M1 = torch.tensor([sign * x for sign in (1.0, -1.0) for x in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
"""The sixteen 4-bit floats."""


def power_of_two(exponent: Tensor) -> Tensor:
    """float32 from the exponents of MXFP4, uint8 with 127 added."""
    return torch.ldexp(torch.ones(exponent.shape), exponent.int() - 127)


def _float4(parts: Parts, nv: bool) -> GroupedWeight:
    q = parts.need(".weight_packed", torch.uint8)
    shape, size = (q.shape[0], 2 * q.shape[1]), 16 if nv else 32
    groups = parts.groups(".weight_scale", shape[1], size)
    scale = parts.need(".weight_scale", FP8 if nv else torch.uint8, (shape[0], groups))
    if nv:
        scale = scale.float() / parts.need(".weight_global_scale", shape=(1,)).float()
    return GroupedWeight(q, scale if nv else power_of_two(scale), codes=E2M1)


@register_format("fp8")
class FP8Checkpoint(Format):
    """fp8 in blocks (DeepSeek-V3, Qwen3-FP8), or with one scale for each weight."""

    kinds = (".weight", ".weight_scale_inv", ".weight_scale", ".input_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.setting("fmt", ("e4m3",), "e4m3")
        self.static = self.setting("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
        self.block = config.get("weight_block_size")
        if self.block is not None and (len(self.block) != 2 or self.static):
            raise ValueError(
                f"quantization_config: weight_block_size={self.block!r} with these activations is not implemented"
            )

    def decode(self, parts: Parts) -> Mapping[str, Value]:
        how = "group" if self.block else "static" if self.static else "token"
        return {".weight": scaled(parts, FP8, ".weight_scale_inv" if self.block else ".weight_scale", self.block, how)}
