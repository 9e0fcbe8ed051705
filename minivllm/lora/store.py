"""Adapters by name, checked at the door, read in a thread, kept in main memory."""

# Generated from nbs/lora/store.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minivllm.lora.adapter import Adapter, AdapterError, LoRARequest, check_adapter, load_adapter
from minivllm.lora.linear import LoRAModel

__all__ = ["AdapterRegistry", "AdapterStore", "RegisteredAdapter"]


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """An adapter that requests may ask for. key: the engine's name for it. digest: see `adapter_digest`."""

    request: LoRARequest
    key: str
    digest: str


class AdapterRegistry:
    """The adapters that an engine knows. Any thread may ask.

    Args:
        targets: from `lora_targets`.
        max_rank: largest rank.
    """

    def __init__(self, targets: Mapping[str, tuple[int, int]], max_rank: int) -> None:
        self._targets, self._max_rank, self._lock = targets, max_rank, threading.Lock()
        self._known: dict[str, RegisteredAdapter] = {}
        self._digests: dict[str, list[str]] = {}

    def add(self, request: LoRARequest) -> RegisteredAdapter:
        """Check an adapter, or find it, if it is known already.

        Raises:
            AdapterError: it cannot be used (see `check_adapter`), or its name or number belongs to another one.
        """
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, got {type(request).__name__}")
        with self._lock:
            known = self._known.get(request.lora_name)
            if known is not None and known.request == request:
                return known
            if known is not None:
                raise AdapterError(f"{request} is not the adapter of this name that is loaded: {known.request}")
            if (other := self.by_id(request.lora_int_id)) is not None:
                raise AdapterError(f"lora_int_id {request.lora_int_id} belongs to adapter {other.request.lora_name!r}")
            digest = check_adapter(request.lora_path, self._targets, self._max_rank).digest
            earlier = self._digests.setdefault(request.lora_name, [])
            if digest not in earlier:
                earlier.append(digest)
            number = earlier.index(digest) + 1
            key = request.lora_name if number == 1 else f"{request.lora_name}@{number}"
            self._known[request.lora_name] = RegisteredAdapter(request, key, digest)
            return self._known[request.lora_name]

    def by_id(self, lora_int_id: int) -> RegisteredAdapter | None:
        """The adapter of this number."""
        return next((known for known in self._known.values() if known.request.lora_int_id == lora_int_id), None)

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; requests that have it go on. Returns whether it was known."""
        with self._lock:
            known = self.by_id(lora_int_id)
            return known is not None and self._known.pop(known.request.lora_name) is known

    def ids(self) -> set[int]:
        """The numbers of all known adapters."""
        return {known.request.lora_int_id for known in self._known.values()}


class AdapterStore:
    """Adapters in main memory, and those of them that lie in slots.

    Args:
        model: the slots.
        targets, max_rank: see `check_adapter`.
        dtype: of the model.
        max_cpu_loras: adapters kept in main memory; the least recently used one goes first.
    """

    def __init__(
        self,
        model: LoRAModel,
        targets: Mapping[str, tuple[int, int]],
        max_rank: int,
        dtype: torch.dtype,
        max_cpu_loras: int,
    ) -> None:
        self.model, self._targets, self._max_rank, self._dtype = model, targets, max_rank, dtype
        self._max = max_cpu_loras
        self._files: dict[str, tuple[str, str]] = {}
        self._loaded: OrderedDict[str, Future[Adapter]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minivllm-lora")
        self._lock = threading.Lock()
        self._failed: dict[int, str] = {}

    def prefetch(self, key: str, path: str, digest: str) -> Future[Adapter]:
        """Read an adapter in a thread, unless it is here or on its way."""
        with self._lock:
            self._files[key] = path, digest
            if key not in self._loaded:
                self._loaded[key] = self._thread.submit(self._read, key, path, digest)
            self._loaded.move_to_end(key)
            while len(self._loaded) > self._max:
                self._loaded.popitem(last=False)
            return self._loaded[key]

    def _read(self, key: str, path: str, digest: str) -> Adapter:
        try:
            checked = check_adapter(path, self._targets, self._max_rank)
            if checked.digest != digest:
                raise AdapterError(f"adapter {key!r}: the files in {path} have changed since it was loaded")
            return load_adapter(key, checked, self._dtype)
        except BaseException:
            with self._lock:  # the next request tries again
                self._loaded.pop(key, None)
            raise

    def load(self, slot: int, key: str) -> None:
        """Copy an adapter into a slot; it is read now if memory did not keep it. `error` tells of a failure."""
        try:
            self.model.set_slot(slot, self.prefetch(key, *self._files[key]).result())
            self._failed.pop(slot, None)
        except (AdapterError, OSError, KeyError) as error:
            self._failed[slot] = f"adapter {key!r} cannot be loaded: {error}"

    def use(self, slots: npt.NDArray[np.int64]) -> None:
        """Say which slot each row of what the model computes next has, -1 for none."""
        self.model.batch.set(slots)

    def error(self, slot: int) -> str | None:
        """Why the adapter of a slot is not there."""
        return self._failed.get(slot)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
