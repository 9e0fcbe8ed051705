"""Quantized checkpoints: the tensors of each module are collected, checked and decoded."""

# Generated from nbs/models/quantization/formats.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.core.plugins import registering
from minivllm.models.linear.grouped import GroupedWeight, QuantizedWeight, pack_nibbles

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Parts:
    """The tensors of one quantized module.

    Args:
        module: its name.
        tensors: by the end of their names, such as `.qweight`.
    """

    def __init__(self, module: str, tensors: Mapping[str, Tensor]) -> None:
        self.module, self.tensors = module, tensors

    def error(self, kind: str, what: str) -> ValueError:
        """An error that names a tensor."""
        return ValueError(f"tensor {self.module + kind!r} {what}")

    def need(
        self, kind: str, dtypes: torch.dtype | Sequence[torch.dtype] = FLOATS, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor that must be there, in one of these dtypes, and of this shape if one is given."""
        tensor, allowed = self.tensors.get(kind), (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
        if tensor is None:
            raise self.error(kind, f"is missing: {self.module} has {', '.join(sorted(self.tensors))}")
        if tensor.dtype not in allowed:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise self.error(kind, f"must be {known}, it is {str(tensor.dtype).removeprefix('torch.')}")
        if shape is None and tensor.dim() != 2:
            raise self.error(kind, f"must have 2 dimensions, its shape is {tuple(tensor.shape)}")
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise self.error(kind, f"must have shape {tuple(shape)}, it has {tuple(tensor.shape)}")
        return tensor

    def flat(self, kind: str, dtypes: torch.dtype | Sequence[torch.dtype], count: int | None = None) -> Tensor:
        """A tensor laid flat, whatever its shape. count: the numbers that it must have."""
        given = self.tensors.get(kind)
        tensor = self.need(kind, dtypes, None if given is None else given.shape).flatten()
        if count is not None and len(tensor) != count:
            raise self.error(kind, f"must have {count} numbers, it has {len(tensor)}")
        return tensor

    def groups(self, kind: str, inputs: int, size: int) -> int:
        """How many groups of `size` inputs there are; -1 for one group.

        Raises:
            ValueError: names a tensor of this kind.
        """
        size = inputs if size == -1 else size
        if inputs % size:
            raise self.error(kind, f"cannot be read: a group size of {size} does not divide {inputs} inputs")
        return inputs // size


Value = QuantizedWeight | Tensor | list[Any]


class Format(ABC):
    """How the checkpoints of one `quant_method` store weights.

    Args:
        config: the `quantization_config`.

    Raises:
        ValueError: a setting that is not implemented; names it and what is.

    Attributes:
        kinds: ends of the names of tensors that may belong to a quantized module.
    """

    kinds: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @abstractmethod
    def decode(self, parts: Parts) -> Mapping[str, Value]:
        """A module's weights, by what follows its name in a plain checkpoint: `.weight` for a linear layer.

        Raises:
            ValueError: names the tensor that is wrong.
        """

    def setting(self, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """A field of the configuration; ValueError unless it is one of these."""
        value = self.config.get(name, default)
        if value not in allowed:
            shown = ", ".join(map(repr, allowed))
            raise ValueError(f"quantization_config: {name}={value!r} is not implemented; implemented: {shown}")
        return value

    def split(self, name: str) -> tuple[str, str] | None:
        """A tensor's name as module and kind, or None if it can be no part of a quantized module."""
        kind = max((kind for kind in self.kinds if name.endswith(kind)), key=len, default=None)
        return None if kind is None else (name.removesuffix(kind), kind)


FORMATS: dict[str, type[Format]] = {}
"""By `quant_method`."""


def register_format(*names: str) -> Callable[[type[Format]], type[Format]]:
    """Register a format under its `quant_method`. A decorator, also for plugins. Raises TypeError for what is no `Format`."""
    return registering(FORMATS, Format, names)


PLAIN = ("F64", "F32", "F16", "BF16")


def quantized_modules(format: Format, names: Iterable[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """The tensors of each quantized module.

    Args:
        names: name and safetensors dtype of every tensor in the checkpoint.

    Returns:
        For each module the kinds of its tensors and their names.
    """
    modules: dict[str, dict[str, str]] = {}
    quantized = set()
    for name, dtype in names:
        if (found := format.split(name)) is not None:
            module, kind = found
            modules.setdefault(module, {})[kind] = name
            if kind != ".weight" or dtype not in PLAIN:
                quantized.add(module)
    return {module: kinds for module, kinds in modules.items() if module in quantized}


def decoded(
    format: Format, modules: Mapping[str, Mapping[str, str]], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Any]]:
    """A checkpoint's tensors, with one weight in the place of each quantized module's.

    Raises:
        ValueError: a tensor is missing or wrong; names it.
    """
    at = {name: (module, kind) for module, kinds in modules.items() for kind, name in kinds.items()}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        if name not in at:
            yield name, tensor
            continue
        module, kind = at[name]
        found = waiting.setdefault(module, {})
        found[kind] = tensor.clone()
        if len(found) == len(modules[module]):
            for end, value in format.decode(Parts(module, waiting.pop(module))).items():
                yield module + end, value


def unpack_words(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 to uint8, with 32 / bits numbers along a dimension where there was one.

    order: in which field of its word each number lies; the lowest bits are field 0.
    """
    fields = range(32 // bits) if order is None else order
    each = [(words >> bits * field & (1 << bits) - 1).to(torch.uint8) for field in fields]
    return torch.stack(each, dim + 1).flatten(dim, dim + 1)


def grouped(q: Tensor, scale: Tensor, zero: Tensor | None, bits: int, order: Tensor | None = None) -> GroupedWeight:
    """Numbers without a sign and zero points as a `GroupedWeight`.

    Args:
        q: uint8 [outputs, columns].
        scale: [outputs, groups].
        zero: integers [outputs, groups]; None if all are the middle, 8 or 128.
        order: see `GroupedWeight`.
    """
    middle = 1 << bits - 1
    if zero is not None and bool((zero == middle).all()):
        zero = None
    if bits == 4:
        low = None if zero is None else zero * -scale.float()
        return GroupedWeight(pack_nibbles(q), scale.contiguous(), low, order=order)
    low = None if zero is None else (middle - zero) * scale.float()
    return GroupedWeight((q ^ middle).view(torch.int8), scale.contiguous(), low, order=order)


@register_format("gptq")
class GPTQ(Format):
    """GPTQ (Frantar et al., 2022), as AutoGPTQ and GPTQModel write it, with 4 or 8 bits."""

    kinds = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.bits = self.setting("bits", (4, 8))
        self.version = self.setting("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        self.setting("pack_dtype", ("int32",), "int32")
        self.setting("dynamic", (None, {}))
        self.group = config.get("group_size", -1)

    def decode(self, parts: Parts) -> Mapping[str, Value]:
        words = parts.need(".qweight", torch.int32)
        q = unpack_words(words, self.bits, 0).T.contiguous()
        outputs, inputs = q.shape
        groups = parts.groups(".scales", inputs, self.group)
        scale = parts.need(".scales", shape=(groups, outputs)).T
        zeros = parts.need(".qzeros", torch.int32, (groups, outputs * self.bits // 32))
        zero = unpack_words(zeros, self.bits, 1).T.int() + (self.version == "gptq")
        order = group_order(parts, ".g_idx", inputs, groups)
        return {".weight": grouped(q if order is None else q[:, order], scale, zero, self.bits, order)}


def group_order(parts: Parts, kind: str, inputs: int, groups: int) -> Tensor | None:
    """The inputs sorted by group, int64 [inputs], from the group of each; None if they are sorted."""
    if kind not in parts.tensors:
        return None
    group, each = parts.need(kind, (torch.int32, torch.int64), (inputs,)).long(), inputs // groups
    if not bool(((group >= 0) & (group < groups)).all()) or not bool((group.bincount(minlength=groups) == each).all()):
        raise parts.error(kind, f"must name each of {groups} groups {each} times")
    order = group.argsort(stable=True)
    return None if bool((order.diff() > 0).all()) else order


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@register_format("awq")
class AWQ(Format):
    """AWQ (Lin et al., 2023) in its `gemm` layout."""

    kinds = (".qweight", ".qzeros", ".scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.setting("bits", (4,))
        self.setting("version", ("gemm", "GEMM"), "gemm")
        self.setting("zero_point", (True,), True)
        self.group = config.get("group_size", -1)

    def decode(self, parts: Parts) -> Mapping[str, Value]:
        q = unpack_words(parts.need(".qweight", torch.int32), 4, 1, AWQ_ORDER).T.contiguous()
        outputs, inputs = q.shape
        groups = parts.groups(".scales", inputs, self.group)
        scale = parts.need(".scales", shape=(groups, outputs)).T
        zeros = parts.need(".qzeros", torch.int32, (groups, outputs // 8))
        return {".weight": grouped(q, scale, unpack_words(zeros, 4, 1, AWQ_ORDER).T.int(), 4)}
