"""LinearMethod, which says how a linear layer multiplies, and memory for weights."""

# Generated from nbs/models/linear/base.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import mmap
import os
import sys
import threading
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from minivllm.core.module import Module


class LinearMethod(Module):
    """How one linear layer multiplies, and what it keeps of its weight. Each layer has a method object to itself.

    The life of one: `create_weights`, then the checkpoint is copied into `weights`, then
    `process_weights_after_loading`, then `apply` in every step. The names are vLLM's.

    Attributes:
        dims: for each tensor of `weights`, the dimension along which outputs lie and the one along which inputs lie;
            None for a tensor that has no such dimension. Fused parts and shards are slices along them.
        weights: what a checkpoint holds of the layer, by suffix; empty once it was processed into something else.
        out_dtype: dtype of the results; None for that of the input.
    """

    dims: ClassVar[Mapping[str, tuple[int | None, int | None]]] = {"weight": (0, 1), "bias": (0, None)}

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.out_dtype: torch.dtype | None = None

    def problem(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why this method cannot multiply with a weight [outputs, inputs], or None."""
        return None

    def create_weights(
        self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make room in `weights` for what the checkpoint holds; here a whole weight, and a bias."""
        self.weights = {"weight": empty_weight(outputs, inputs, dtype, device)}
        if bias:
            self.weights["bias"] = torch.empty(outputs, dtype=dtype, device=device)

    def process_weights_after_loading(self) -> None:
        """Pack, quantize or check what was loaded; here nothing. May be called again after the same weights were loaded anew."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """x [T, inputs] to [T, outputs]."""

    def together(self, methods: "Sequence[LinearMethod]") -> "GroupedLinear | None":
        """A function that multiplies with the weights of all `methods` (of one shape) in one launch; None if there is no such kernel."""
        return None

    def replaced(self, method: "LinearMethod") -> "LinearMethod":
        """The layer's method after `method` has replaced this one: `method`, or a wrapper that now goes around it."""
        return method

    @property
    def innermost(self) -> "LinearMethod":
        """Itself, or what a wrapper goes around."""
        return self

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs] in the dtype of the model: what it multiplies with, a copy if it is kept in another form."""
        return self.weights["weight"]

    @property
    def bias(self) -> Tensor | None:
        """[outputs] or None."""
        return self.weights.get("bias")

    @property
    def memory(self) -> Tensor | None:
        """The weight as `apply` reads it, in whatever order; None if that is not one tensor."""
        return self.weights.get("weight")


class GroupedLinear(Protocol):
    """Multiplies with several weights at once: rows [T, inputs], sorted by weight, and the end of each weight's rows, int32 [weights], to [T, outputs]."""

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor: ...


def empty_weight(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns], not initialised.

    On a CPU straight from the system, which gets it back when the weight is packed and let go; `malloc` would keep it.
    """
    if device.type != "cpu":
        return torch.empty(rows, columns, dtype=dtype, device=device)
    private: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
    memory = mmap.mmap(-1, rows * columns * dtype.itemsize, **private)
    if len(memory) >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # filling it is a fault for each 2 MiB, not for each 4 KiB
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)


HUGE_PAGE = 1 << 21
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def use_huge_pages(memory: Tensor) -> None:
    """Have Linux move memory that is filled into pages of 2 MiB, so that fewer addresses must be translated to read it.

    Where the system has none to give, or no such call, nothing changes.
    """
    if not _gains_by_huge_pages(memory):
        return
    first = memory.data_ptr() // HUGE_PAGE * HUGE_PAGE
    size = -(-(memory.data_ptr() + memory.nbytes - first) // HUGE_PAGE) * HUGE_PAGE
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)


def _gains_by_huge_pages(memory: Tensor) -> bool:
    return memory.device.type == "cpu" and sys.platform.startswith("linux") and memory.nbytes >= HUGE_PAGE // 8


def move_to_huge_pages(memories: Iterable[Tensor]) -> threading.Thread | None:
    """`use_huge_pages` for each, in a background thread (returned), since the copy takes a while. None if there is nothing to move."""
    large = [memory for memory in memories if _gains_by_huge_pages(memory)]

    def move() -> None:
        for memory in large:
            use_huge_pages(memory)

    if not large:
        return None
    mover = threading.Thread(target=move, name="minivllm-huge-pages")
    mover.start()
    return mover
