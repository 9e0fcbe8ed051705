"""Adapters by name: checked when they are registered, read in a thread, kept in main memory."""

# Generated from nbs/lora/store.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from minivllm.lora.adapter import AdapterError, LoRARequest, check_adapter, load_adapter
from minivllm.lora.linear import LoRAModel, PreparedAdapter
from minivllm.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """An adapter that requests may ask for. key: the engine's name for it and its contents. digest: see `adapter_digest`."""

    request: LoRARequest
    key: str
    digest: str


class AdapterRegistry:
    """The adapters that an engine knows. Any thread may ask.

    Args:
        spec: the base model's.
        max_rank: largest rank.
    """

    def __init__(self, spec: DecoderSpec, max_rank: int) -> None:
        self._spec, self._max_rank, self._lock = spec, max_rank, threading.RLock()
        self._known: dict[str, RegisteredAdapter] = {}

    def add(self, request: LoRARequest) -> RegisteredAdapter:
        """Check an adapter, or find it, if it is known already.

        Raises:
            AdapterError: it cannot be used (see `check_adapter`), or its name or number belongs to another one.
        """
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, got {type(request).__name__}")
        if (known := self._find(request)) is not None:
            return known
        digest = check_adapter(request.lora_path, self._spec, self._max_rank).digest  # slow, so without the lock
        with self._lock:
            new = RegisteredAdapter(request, f"{request.lora_name}@{digest[:32]}", digest)
            return self._find(request) or self._known.setdefault(request.lora_name, new)

    def _find(self, request: LoRARequest) -> RegisteredAdapter | None:
        with self._lock:
            known = self._known.get(request.lora_name)
            if known is not None and known.request != request:
                raise AdapterError(f"{request} is not the adapter of this name that is loaded: {known.request}")
            if known is None and (other := self.by_id(request.lora_int_id)) is not None:
                raise AdapterError(f"lora_int_id {request.lora_int_id} belongs to adapter {other.request.lora_name!r}")
            return known

    def by_id(self, lora_int_id: int) -> RegisteredAdapter | None:
        """The adapter of this number."""
        with self._lock:
            return next((known for known in self._known.values() if known.request.lora_int_id == lora_int_id), None)

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; requests that have it go on. Returns whether it was known."""
        with self._lock:
            known = self.by_id(lora_int_id)
            return known is not None and self._known.pop(known.request.lora_name) is known

    def ids(self) -> set[int]:
        """The numbers of all known adapters."""
        with self._lock:
            return {known.request.lora_int_id for known in self._known.values()}


class AdapterStore:
    """Reads adapters, keeps them in main memory, and copies them into slots.

    Args:
        model: the slots.
        spec, max_rank: see `check_adapter`.
        dtype: the model's.
        max_cpu_loras: adapters kept in main memory; the least recently used one is evicted first.
    """

    def __init__(
        self, model: LoRAModel, spec: DecoderSpec, max_rank: int, dtype: torch.dtype, max_cpu_loras: int
    ) -> None:
        self.model, self._spec, self._max_rank, self._dtype = model, spec, max_rank, dtype
        self._max = max_cpu_loras
        self._files: dict[str, tuple[str, str]] = {}
        self._loaded: OrderedDict[str, PreparedAdapter] = OrderedDict()
        self._reading: dict[str, Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minivllm-lora")
        self._lock = threading.Lock()

    def prefetch(self, key: str, path: str, digest: str) -> Future[None]:
        """Read an adapter in a thread, unless it is here or being read. The future that is returned holds no weights."""
        with self._lock:
            self._files[key] = path, digest
            if key in self._loaded:
                self._loaded.move_to_end(key)
                done: Future[None] = Future()
                done.set_result(None)
                return done
            if key not in self._reading:
                self._reading[key] = self._thread.submit(self._read_ahead, key)
            return self._reading[key]

    def _read_ahead(self, key: str) -> None:
        try:
            self._read(key)
        finally:
            with self._lock:
                self._reading.pop(key, None)

    def _read(self, key: str) -> PreparedAdapter:
        path, digest = self._files[key]
        checked = check_adapter(path, self._spec, self._max_rank)
        if checked.digest != digest:
            raise AdapterError(f"adapter {key!r}: the files in {path} have changed since it was loaded")
        adapter = self.model.prepare(load_adapter(key, checked, self._dtype))
        with self._lock:
            self._loaded[key] = adapter
            while len(self._loaded) > self._max:
                self._loaded.popitem(last=False)
        return adapter

    def load(self, slot: int, key: str) -> None:
        """Copy an adapter into a slot; it is read now if memory did not keep it.

        Raises:
            AdapterError: it cannot be read; the slot holds what it held.
        """
        with self._lock:
            adapter = self._loaded.get(key)
            if adapter is not None:
                self._loaded.move_to_end(key)
        self.model.set_slot(slot, adapter or self._read(key))

    def use(self, slots: npt.NDArray[np.int64]) -> None:
        """Say which slot each row of the next step uses, -1 for none."""
        self.model.batch.set(slots)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
