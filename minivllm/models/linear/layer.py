"""Linear layers fused at load, their shards, torch's matmul, and the registry of linear methods."""

# Generated from nbs/models/linear/layer.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.config import INTEGER_BITS, QUANTIZATIONS, WEIGHT_BITS
from minivllm.core.module import Module
from minivllm.core.plugins import register
from minivllm.models.linear.base import LinearMethod
from minivllm.models.linear.batch_invariant import BatchInvariantLinear, matmul_by_tiles
from minivllm.models.linear.grouped import QuantizedWeight, StoredLinear
from minivllm.models.parallel import Piece, Share, TensorGroup

QUANTIZED = tuple(f"{how}{name}" for how in ("", "torch_", "invariant_") for name in INTEGER_BITS)
"""Methods that round a weight to 8 bits, or to 4 with a scale for every group of inputs, when it is loaded."""


class TorchLinear(LinearMethod):
    """torch's own matmul, for any weight on any device. Its rounding may depend on the number of rows."""

    capturable = True

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights["weight"], self.weights.get("bias"))


_METHODS: dict[str, str | Callable[[], LinearMethod]] = {
    "torch": TorchLinear,
    "batch_invariant": BatchInvariantLinear,
    "cpu": "minivllm.models.linear.cpu:CPULinear",
    "cpu_invariant": "minivllm.models.linear.cpu:CPUInvariantLinear",
    "gemv": "minivllm.models.linear.cuda:FewRowsLinear",
    "fp8": "minivllm.models.linear.cuda:FP8Linear",
    **dict.fromkeys(QUANTIZED, "minivllm.models.linear.quantized:quantized_linear"),
}


def linear_method_names() -> tuple[str, ...]:
    """Names that `make_linear_method` knows."""
    return tuple(_METHODS)


def register_linear_method(name: str, make: str | Callable[[], LinearMethod]) -> None:
    """Make a method known. `make` may be `"module:name"`, imported when it is first wanted.

    Raises:
        ValueError: the name is taken.
        TypeError: `make` is neither that, nor a `LinearMethod`, nor a function that makes one.
    """
    register(_METHODS, "linear method", name, make, LinearMethod, by_name=True)


def register_quantization(name: str, make: str | Callable[[], LinearMethod], bits: float) -> None:
    """Let `quantization` name a linear method that rounds the weights of a checkpoint when they are loaded.

    All linear layers get it but the output layer. A cell may call this for an engine of the same process; the engine
    process of a server and the workers of several ranks know what a plugin registers.

    Args:
        make: the `LinearMethod`, see `register_linear_method`. What it takes from `weights` in
            `process_weights_after_loading` is let go, layer by layer. Its `problem` says what it cannot do.
        bits: what a weight takes, its share of the scales included; the rest of the memory is for the KV cache.

    Raises:
        ValueError: the name is taken, or `bits` is not above 0.
        TypeError: see `register_linear_method`.
    """
    if not bits > 0:
        raise ValueError(f"quantization {name!r}: bits must be above 0, got {bits}")
    register_linear_method(name, make)
    WEIGHT_BITS[name], QUANTIZATIONS[name] = bits, name


def make_linear_method(name: str) -> LinearMethod:
    """A new method object of this name.

    Raises:
        ValueError: no such name.
        ImportError: a library that it needs is not installed.
    """
    if name not in _METHODS:
        raise ValueError(
            f"no linear method {name!r}; known in this process: {', '.join(_METHODS)};"
            " a plugin makes one known in all, a cell only in its own"
        )
    make = _METHODS[name]
    if isinstance(make, str):
        make = resolve_name(make)
    return make(name) if name in QUANTIZED else make()  # type: ignore[call-arg]


def stored_linear(name: str, parts: Mapping[str, int], dtype: torch.dtype) -> StoredLinear:
    """The method for a weight that comes quantized, in the place of the one of this name."""
    if name in ("batch_invariant", "cpu_invariant"):
        return StoredLinear(parts, dtype, matmul_by_tiles)
    kind = name.removeprefix("invariant_")
    if kind in ("cpu", *INTEGER_BITS) and dtype in (torch.float32, torch.bfloat16):
        from minivllm.models.linear.quantized import CPUStoredLinear

        return CPUStoredLinear(parts, dtype, tiles=kind == name)
    if name == "gemv":
        from minivllm.models.linear.cuda import CUDAStoredLinear

        return CUDAStoredLinear(parts, dtype)
    return StoredLinear(parts, dtype)


def method_or_torch(name: str, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> str:
    """`name` if that method can multiply with such a weight, else `torch`, which always can."""
    return "torch" if make_linear_method(name).problem(inputs, outputs, dtype, device) else name


class Shard(NamedTuple):
    """Which part of a layer a rank computes: of the outputs, or a partial sum over part of the inputs.

    Attributes:
        pieces: see `Split`.
    """

    rank: int
    size: int
    by: str
    pieces: Mapping[str, tuple[Piece, ...]] = {}

    def of(self, part: str, length: int) -> list[tuple[int, int, int]]:
        """(start, length, room) of what this rank has of each piece of a part, along a dimension of this length."""
        pieces = self.pieces.get(part) or (Share(self.rank, self.size).piece(length),)
        every, before, found = sum(piece.total for piece in pieces), 0, []
        for total, start, n, room in pieces:  # packed: several outputs in a number
            found.append(((before + start) * length // every, n * length // every, room * length // every))
            before += total
        return found

    def cut(self, part: str, tensor: Tensor, dim: int) -> Tensor:
        """This rank's share of a part's tensor, cut along dimension `dim`; zeros where it lacks some."""
        found = []
        for start, length, room in self.of(part, tensor.shape[dim]):
            found.append(tensor.narrow(dim, start, length))
            if length < room:
                found.append(tensor.new_zeros(*tensor.shape[:dim], room - length, *tensor.shape[dim + 1 :]))
        return found[0] if len(found) == 1 else torch.cat(found, dim)


class Linear(Module):
    """`x @ weight.T + bias`, for one or several output parts that share their input.

    Parts lie below each other in one weight, so that one matmul computes them all (QKV, gate and up).

    Args:
        in_features: columns of the weight.
        parts: outputs of each part, by its name in a checkpoint, in order.
        bias: whether there is one.
        dtype, device: those of the weight.
        method: a name that `make_linear_method` knows.
        out_dtype: dtype of the results; a method that cannot write it gives the dtype of the input.
        shard: the part of the layer that this object holds.
        weight: memory to share with another owner (tied embeddings), instead of new memory.

    Raises:
        ValueError: the method cannot multiply with such a weight; says why.

    Attributes:
        method: its `LinearMethod`; exchange it by `use`.
        parts: as given; of a shard, this rank's outputs.
    """

    capturable = True

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        method: str = "torch",
        out_dtype: torch.dtype | None = None,
        shard: Shard | None = None,
        weight: Tensor | None = None,
    ) -> None:
        self.in_features, self.parts, self.has_bias, self.dtype = in_features, dict(parts), bias, dtype
        self.device, self.out_dtype, self.share = device, out_dtype, shard
        self.method_name, self._shared = method, weight
        self.method = self._make(method)
        self._make_room(self.method)
        self._kinds = tuple(self.method.weights)

    def _make_room(self, method: LinearMethod) -> None:
        if self._shared is not None:
            method.weights = {"weight": self._shared}
            return
        bias, dtype, device = self.has_bias, self.dtype, self.device
        method.create_weights(self.in_features, self.out_features, bias=bias, dtype=dtype, device=device)

    def renew(self) -> None:
        """Make room for a weight that is loaded anew: what was packed or came quantized is let go, what lies as a checkpoint
        has it is written over in its place."""
        if all(kind in self.method.weights for kind in self._kinds):
            return
        method = self._make(self.method_name)
        self._make_room(method)
        self.method = self.method.replaced(method)

    def _make(self, name: str) -> LinearMethod:
        method = make_linear_method(name)
        if problem := method.problem(self.in_features, self.out_features, self.dtype, self.device):
            raise ValueError(f"linear method {name!r} cannot be used: {problem}")
        method.out_dtype = self.out_dtype
        return method

    @property
    def out_features(self) -> int:
        return sum(self.parts.values())

    @property
    def weight(self) -> Tensor:
        return self.method.weight

    @property
    def bias(self) -> Tensor | None:
        return self.method.bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, out_features]; parts side by side."""
        return self.method.apply(x)

    def use(self, name: str, weight: Tensor | None = None) -> None:
        """Exchange the method, and keep the weight, or take another one of the same shape and dtype.

        Raises:
            ValueError: as for a new layer.
        """
        weight, bias = self.weight if weight is None else weight, self.bias
        method = self._make(name)
        method.weights = {"weight": weight} | ({} if bias is None else {"bias": bias})
        method.process_weights_after_loading()
        self.method, self.method_name = self.method.replaced(method), name

    def part(self, name: str, kind: str = "weight") -> Tensor:
        """The slice of one part, as a view to load into. `kind`: a name in the method's `weights`.

        A weight that was packed is unpacked first. Call `method.process_weights_after_loading` afterwards.
        """
        if kind not in self.method.weights and kind == "weight":
            self.use("torch")
        if kind not in self.method.weights:
            raise ValueError(f"Linear part {name!r} has no {kind}")
        tensor, dim = self.method.weights[kind], self.method.dims[kind][0]
        if dim is None:
            return tensor
        start = sum(rows for before, rows in list(self.parts.items())[: list(self.parts).index(name)])
        scale = tensor.shape[dim] / self.out_features  # packed tensors have several outputs in a number
        return tensor.narrow(dim, round(start * scale), round(self.parts[name] * scale))

    def load(self, name: str, kind: str, tensor: Tensor | QuantizedWeight) -> None:
        """Copy one tensor of a checkpoint, whole as it is there, into this layer or shard.

        A weight that comes quantized stays so: `StoredLinear` becomes the method of the layer.
        """
        quantized = isinstance(tensor, QuantizedWeight)
        if quantized or (kind == "weight" and isinstance(self.method.innermost, StoredLinear)):
            self._load_stored(name, tensor)
            return
        assert isinstance(tensor, Tensor)
        target = self.part(name, kind)
        if self.share is not None:
            dim = self.method.dims[kind][0 if self.share.by == "outputs" else 1]
            if dim is not None:
                tensor = self.share.cut(name, tensor, dim)
            elif kind == "bias" and self.share.rank > 0:  # partial sums are added up: one rank brings the bias
                tensor = torch.zeros_like(tensor)
        target.copy_(tensor)

    def _load_stored(self, name: str, weight: Tensor | QuantizedWeight) -> None:
        stored = self.method.innermost
        if not isinstance(stored, StoredLinear):
            before = stored.weights
            stored = stored_linear(self.method_name, self.parts, self.dtype)
            stored.loaded |= {part: self.part(part) for part in self.parts}  # some may stay tensors
            stored.weights = {"bias": before["bias"]} if "bias" in before else {}
            self.method = self.method.replaced(stored)
        if self.share is not None:
            weight = self._cut_stored(name, weight, self.share)
        if isinstance(weight, Tensor):
            weight = weight.to(self.dtype, copy=True)
        stored.loaded[name] = weight.to(self.device)

    def _cut_stored(self, name: str, weight: Tensor | QuantizedWeight, share: Shard) -> Tensor | QuantizedWeight:
        dim = int(share.by == "inputs")
        if not isinstance(weight, QuantizedWeight):
            return share.cut(name, weight, dim)
        (start, length, room), *others = share.of(name, weight.shape[dim])
        if others:
            raise ValueError(f"a quantized {name} holds {1 + len(others)} matrices, and cannot be split among ranks")
        if length < room:
            raise ValueError(
                f"{weight.shape[dim]} {share.by} of a quantized {name} cannot be split among {share.size} ranks equally,"
                " and a quantized weight cannot be padded"
            )
        return weight.narrow(dim, start, length)

    def targets(self) -> Iterator[tuple[str, Callable[[Tensor | QuantizedWeight], None]]]:
        """(name in a checkpoint, function that loads the tensor of that name) for all that this layer needs."""
        for name in self.parts:
            for kind in self._kinds:
                yield f"{name}.{kind}", partial(self.load, name, kind)


class RowParallelLinear(Linear):
    """A shard by inputs, whose ranks add up their results. group: the ranks."""

    capturable = True

    def __init__(self, *args: Any, group: TensorGroup, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] of this rank to the sum, [T, out_features]."""
        return self.group.all_reduce(self.method.apply(x))


class GatheredLinear(Linear):
    """A shard by outputs, whose ranks lay their results side by side. group: the ranks. outputs: those of the whole layer."""

    capturable = True

    def __init__(self, *args: Any, group: TensorGroup, outputs: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group, self.outputs = group, outputs

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] to [T, outputs]."""
        return self.group.all_gather(self.method.apply(x))[:, : self.outputs]
