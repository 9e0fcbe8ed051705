"""Packs the small arrays of a step into one pinned buffer and one host-to-device copy."""

# Generated from nbs/attention/step_buffer.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: the widest load of the kernels
MAX_VIEWS = 1024  # that a buffer remembers
_TORCH = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """As `torch.cuda.current_stream`, which makes an object at each call."""
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(device)
    return _streams[key]


class BufferFull(ValueError):
    """The arrays of a step do not fit into its `StepBuffer`."""


class StepBuffer:
    """Host arrays of a step, sent to a device in one copy.

    In a step: `begin`, any number of `reserve` and `put`, `send`. Arrays of equal sizes in equal order lie at equal
    addresses in every step. What `put` returns is valid on the device's current stream after `send`.

    Args:
        num_bytes: room for a step. An array that no longer fits travels by itself.
        device: where to.

    Attributes:
        words: int32 view of the whole buffer on the device.
        used: bytes that are taken; the next array begins there.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.device, self.used = device, 0
        self._there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.words = self._there.view(torch.int32)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._fetched: list[torch.cuda.Event | None] = [None, None]
        # most steps reserve what the last did
        self._views: list[dict[object, tuple[np.ndarray, Tensor, int]]] = [{}, {}]
        self._sent: list[dict[int, tuple[Tensor, Tensor]]] = [{}, {}]

    def begin(self) -> None:
        """Start a step. Waits, if need be, until the arrays of the last step but one were fetched."""
        for pair in (self._hosts, self._fetched, self._views, self._sent):
            pair.reverse()
        self.used = 0
        if (event := self._fetched[0]) is not None:
            event.synchronize()

    def reserve(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> tuple[np.ndarray, Tensor]:
        """Room for an int32 or int64 array: the host array, to be written before `send`, and the tensor on the device.

        Raises:
            BufferFull: it does not fit.
        """
        key, views = (self.used, shape, dtype), self._views[0]
        if key not in views:
            if len(views) == MAX_VIEWS:
                views.clear()
            views[key] = self._view(shape, np.dtype(dtype))
        host, there, self.used = views[key]
        return host, there

    def _view(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> tuple[np.ndarray, Tensor, int]:
        size, at = math.prod(shape) * kind.itemsize, self.used
        if at + size > len(self._there):
            raise BufferFull(f"a step's arrays take more than the {len(self._there):,} bytes of the buffer")
        host = self._hosts[0][at : at + size].numpy().view(kind).reshape(shape)
        there = self._there[at : at + size].view(_TORCH[kind]).view(shape)
        return host, there, at + -(-size // ALIGNMENT) * ALIGNMENT

    def put(self, array: np.ndarray) -> Tensor:
        """The tensor that will hold a copy of `array`, int32 or int64, after `send`."""
        if self.used + array.nbytes > len(self._there):
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        host, there = self.reserve(array.shape, array.dtype)
        host[...] = array
        return there

    def send(self) -> None:
        """Copy what was put and reserved since `begin`. The host does not wait."""
        sent = self._sent[0]
        if self.used not in sent:
            if len(sent) == MAX_VIEWS:
                sent.clear()
            sent[self.used] = self._there[: self.used], self._hosts[0][: self.used]
        there, here = sent[self.used]
        there.copy_(here, non_blocking=True)
        if self.device.type == "cuda":
            event = self._fetched[0] = self._fetched[0] or torch.cuda.Event()
            event.record(current_stream(self.device))
