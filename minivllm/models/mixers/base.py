"""Blocks of a layer as values, and the registry that makes modules of them."""

# Generated from nbs/models/mixers/base.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from minivllm.attention.backend import AttentionBackend
from minivllm.attention.state import LayerCacheSpec
from minivllm.core.config import KVCacheSpec
from minivllm.core.module import Module
from minivllm.core.plugins import check_class
from minivllm.models.layers import LayerNorm, RMSNorm
from minivllm.models.linear.layer import Linear, RowParallelLinear, Shard, method_or_torch
from minivllm.models.ops.base import LayerOps
from minivllm.models.parallel import Share, Split, SplitBlock, TensorGroup
from minivllm.models.rope import RopeSpec


class LinearSpec(NamedTuple):
    """A linear layer: numbers in, outputs of each part by its name in a checkpoint, and whether there is a bias."""

    inputs: int
    parts: Mapping[str, int]
    bias: bool = False


class MixerSpec(ABC):
    """Parameters of a block, as a value: a frozen dataclass that says which weights the block has, and builds nothing."""

    def check_counts(self, *names: str) -> None:
        """Raise ValueError for a field that is no whole number of at least 1."""
        for name in names:
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")

    @abstractmethod
    def linears(self, hidden_size: int) -> dict[str, LinearSpec]:
        """The linear layers, by the name of the attribute that will hold each."""

    def split(self, share: Share) -> SplitBlock:
        """The part of the block that a rank computes.

        Raises:
            ValueError: it cannot be split, or not among this many ranks; says why.
        """
        raise ValueError(f"{type(self).__name__.removesuffix('Spec')} cannot be split among ranks (tensor parallelism)")

    def vectors(self) -> dict[str, int]:
        """Other weights of a checkpoint, one-dimensional: {name: size}."""
        return {}

    def weight_shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name, without the layer's prefix, and shape of every tensor that a checkpoint holds of the block."""
        shapes: dict[str, tuple[int, ...]] = {}
        for linear in self.linears(hidden_size).values():
            for name, outputs in linear.parts.items():
                shapes[f"{name}.weight"] = (outputs, linear.inputs)
                if linear.bias:
                    shapes[f"{name}.bias"] = (outputs,)
        return shapes | {f"{name}.weight": (size,) for name, size in self.vectors().items()}


class TokenMixerSpec(MixerSpec):
    """Parameters of a block in which tokens see each other. What they see of the past lies in a cache.

    Attributes:
        rope: the rotation of positions, or None.
    """

    rope: RopeSpec | None

    @abstractmethod
    def attention_spec(self, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> LayerCacheSpec:
        """What the block asks of the attention backend."""

    @abstractmethod
    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        """What it asks of the KV cache manager. dtype_bytes: of one stored number."""


@dataclass(frozen=True, kw_only=True)
class Builder:
    """What modules are built with: the sizes and implementations that all layers of a model share.

    Attributes:
        linear_method: name of the `LinearMethod` of every linear layer that it can be used for; the rest get torch's.
        kv_dtype: the cache's, see `AttentionSpec`.
        norm_offset: see `RMSNorm`.
        layer_norm, norm_bias: norms are layer norms, with a bias or without.
        group: the ranks that hold the layers together; None for one rank.
        splits: how the linear layers of the block that is built are cut, by attribute.
        reduces: whether a layer that is cut by inputs adds up the ranks' results; else the block does.
    """

    hidden_size: int
    norm_eps: float
    norm_offset: bool
    ops: LayerOps
    backend: AttentionBackend
    linear_method: str
    dtype: torch.dtype
    device: torch.device
    kv_dtype: torch.dtype | None = None
    layer_norm: bool = False
    norm_bias: bool = False
    group: TensorGroup | None = None
    splits: Mapping[str, Any] = field(default_factory=dict)
    reduces: bool = True

    @property
    def share(self) -> Share:
        """Which part of every layer is built."""
        return Share() if self.group is None else self.group.share

    def block(self, spec: MixerSpec) -> "Mixer":
        """The module of a spec, or what this rank computes of it. Raises as `build_mixer` and `MixerSpec.split`."""
        if self.group is None:
            return build_mixer(spec, self)
        part = spec.split(self.share)
        return build_mixer(part.spec, replace(self, splits=part.splits))

    def inner(self, name: str) -> "Builder":
        """For a block within the block that is built, whose results that block adds up."""
        return self if self.group is None else replace(self, splits=self.splits[name].splits, reduces=False)

    def norm(self, size: int | None = None) -> RMSNorm | LayerNorm:
        """A norm of the model's kind, of hidden states if no size is given."""
        size = size or self.hidden_size
        if self.layer_norm:
            return LayerNorm(size, self.norm_eps, dtype=self.dtype, device=self.device, bias=self.norm_bias)
        how = {"dtype": self.dtype, "device": self.device, "offset": self.norm_offset}
        return RMSNorm(size, self.norm_eps, self.ops, **how)  # type: ignore[arg-type]

    def linear(self, spec: LinearSpec, name: str = "", cls: Callable[..., Linear] = Linear, **kwargs: Any) -> Linear:
        """A linear layer, its weights still to be loaded. name: of its attribute. cls: what to make if it is not cut."""
        sizes = (spec.inputs, sum(spec.parts.values()))
        method = method_or_torch(kwargs.pop("method", self.linear_method), *sizes, self.dtype, self.device)
        how: dict[str, Any] = {
            "bias": spec.bias,
            "dtype": self.dtype,
            "device": self.device,
            "method": method,
            **kwargs,
        }
        split: Split | None = self.splits.get(name)
        if split is None or self.group is None:
            return cls(spec.inputs, spec.parts, **how)
        shard = Shard(*self.share[:2], *split)
        if split.by == "inputs" and self.reduces:
            return RowParallelLinear(spec.inputs, spec.parts, shard=shard, group=self.group, **how)
        return Linear(spec.inputs, spec.parts, shard=shard, **how)


class Mixer(Module):
    """A block: made from its spec, with a `Linear` for each that the spec names.

    Attributes:
        spec: its parameters.
        cache, group, rotation: which of the step's cache tensors, plans and rotations are its own; set by `Decoder.bind`.
    """

    def __init__(self, spec: MixerSpec, builder: Builder) -> None:
        self.spec, self.ops = spec, builder.ops
        self.cache = self.group = self.rotation = 0
        for name, linear in spec.linears(builder.hidden_size).items():
            setattr(self, name, builder.linear(linear, name))

    def linears(self) -> list[Linear]:
        """Its linear layers, in the order of a step."""
        return [part for part in vars(self).values() if isinstance(part, Linear)]

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """(name without the layer's prefix, function that loads the tensor) for all that a checkpoint must hold of it."""
        for linear in self.linears():
            yield from linear.targets()

    def optional_targets(self) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """The same for what it may hold."""
        yield from ()

    def process_weights_after_loading(self) -> None:
        """Called once everything is loaded, and linear layers have their final form."""

    def renew(self) -> None:
        """Forget what `optional_targets` has loaded. Called before weights are loaded anew."""


MIXERS: dict[type[MixerSpec], type[Mixer]] = {}
"""From the type of a spec to the module that it becomes."""

MixerType = TypeVar("MixerType", bound=type[Mixer])


def register_mixer(spec: type[MixerSpec]) -> Callable[[MixerType], MixerType]:
    """Register the module that specs of a type become. A decorator; a new kind of block is one file that uses it.

    Raises:
        TypeError: `spec` does not inherit from `MixerSpec`, or what is decorated not from `Mixer`.
    """
    check_class("a spec", spec, MixerSpec)

    def register(cls: MixerType) -> MixerType:
        check_class(spec.__name__, cls, Mixer)
        MIXERS[spec] = cls
        return cls

    return register


def build_mixer(spec: MixerSpec, builder: Builder) -> Mixer:
    """The module of a spec.

    Raises:
        ValueError: no module is registered for specs of this type.
    """
    if type(spec) not in MIXERS:
        known = ", ".join(cls.__name__ for cls in MIXERS)
        raise ValueError(f"no block is registered for {type(spec).__name__}; registered: {known}")
    return MIXERS[type(spec)](spec, builder)
