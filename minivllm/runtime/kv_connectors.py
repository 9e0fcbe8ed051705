"""KV connectors, worker side: blocks to and from main memory, files and the memory of other ranks."""

# Generated from nbs/runtime/kv_connectors.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import contextlib
import functools
import logging
import os
import secrets
import struct
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm.attention.backend import AttentionBackend, as_bytes
from minivllm.attention.numba_cuda import cuda_ops
from minivllm.core.config import EngineArgs, KVTransferConfig
from minivllm.core.kv_connector import (
    CONNECTORS,
    KVConnector,
    Loads,
    PeerMemoryConnector,
    look_up_block,
    remove_gone,
    remove_left,
    runs,
    take_extra,
)
from minivllm.core.output import KVConnectorMetadata
from minivllm.core.plugins import check_maker, register
from minivllm.models.parallel import Share, TensorGroup

logger = logging.getLogger("minivllm.runtime")


class ConnectorWorker(ABC):
    """The worker side of a connector. A subclass has `load` and `save`.

    Args:
        config: what the user asked for.
        backend: the one that the caches were made with.
        kv_caches: this rank's, one for each place in a group.
        group: all ranks, those of other pipeline stages included; None for one.

    Attributes:
        sends: requests that have ended and whose blocks stay until `get_finished` tells that they are copied (see
            `KVConnectorMetadata.sends`).
    """

    def __init__(
        self,
        config: KVTransferConfig,
        backend: AttentionBackend,
        kv_caches: Sequence[Tensor],
        group: TensorGroup | None,
    ) -> None:
        self.sends: dict[str, int] = {}
        self._sent: set[str] = set()
        self.config, self.backend, self.kv_caches, self.group = config, backend, kv_caches, group
        self.rank = 0 if group is None else group.share.rank
        self.failures = 0
        self._pending: dict[str, tuple[Loads, Future[Any]]] = {}
        self._invalid: set[int] = set()
        self._threads = functools.cache(lambda: ThreadPoolExecutor(2, "kv-load"))  # made when one is needed

    def fetch(self, loads: Loads) -> Any:
        """Get what is slow to reach, for `load`. Runs in a thread while steps run, and must leave the caches alone."""
        return None

    @abstractmethod
    def load(self, loads: Loads, fetched: Any = None) -> set[int]:
        """Fill blocks, with what `fetch` has got for them, if it was called. Returns those that could not be filled."""

    @abstractmethod
    def save(self, saves: Sequence[tuple[int, tuple[Any, ...]]]) -> None:
        """Keep blocks. One that cannot be kept is no error: it will be computed again."""

    def shutdown(self) -> None:
        """Remove what would be left behind, such as files and sockets. No step follows. Twice is no error."""

    def start_load_kv(self, meta: KVConnectorMetadata) -> set[int]:
        """Called before the layers run. Returns the blocks that any rank could not fill. Starts the fetches that go on while steps run."""
        for request_id, loads in meta.async_loads.items():
            if request_id not in self._pending:  # else it was said twice, since a step had failed
                self._pending[request_id] = loads, self._threads().submit(self.fetch, loads)
        if not meta.loads:
            return set()
        failed = self._agree(meta.loads, self.load(meta.loads))
        self.failures += bool(failed)
        return failed

    def wait_for_save(self, meta: KVConnectorMetadata) -> None:
        """Called after the layers have run. Saves nothing until the scheduler has heard of every failure."""
        if meta.saves and self.failures == meta.failures:
            self.save(meta.saves)

    def _agree(self, loads: Loads, failed: set[int]) -> set[int]:
        """The blocks that any rank could not fill."""
        if self.group is None:
            return failed
        bad = self.group.any_of([block in failed for _, block in loads])
        return {block for (_, block), is_bad in zip(loads, bad, strict=True) if is_bad}

    def get_finished(self, finished_req_ids: Collection[str], idle: bool = False) -> tuple[set[str], set[str]]:
        """Fill the blocks that have been fetched meanwhile.

        Args:
            finished_req_ids: requests that have ended, for a subclass that copies their blocks (see `KVConnector.request_finished`).
            idle: there is nothing else to do, so wait for one, for a hundredth of a second. A subclass that sends blocks calls this
                method, too, which then waits as long for its sends.

        Returns:
            Requests whose blocks have been copied to elsewhere, and those whose blocks are filled; see `get_block_ids_with_load_errors`.
        """
        if not self._pending:
            if idle and self.sends.keys() - self._sent:
                time.sleep(0.01)
            return set(), set()
        if idle:
            wait([future for _, future in self._pending.values()], 0.01, FIRST_COMPLETED)
        open_ = [not future.done() for _, future in self._pending.values()]
        if self.group is not None:
            open_ = self.group.any_of(open_)
        ended = {name for name, is_open in zip(self._pending, open_, strict=True) if not is_open}
        for loads, future in [self._pending.pop(name) for name in sorted(ended)]:
            self._invalid |= self._agree(loads, self._load_fetched(loads, future))
        return set(), ended

    def _load_fetched(self, loads: Loads, future: "Future[Any]") -> set[int]:
        if (error := future.exception()) is not None:
            logger.warning("KV blocks cannot be fetched and will be computed: %r", error)
            return {block for _, block in loads}
        return self.load(loads, future.result())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of the requests that `get_finished` told of and that could not be filled."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def end_transfers(
        self, sends: Mapping[str, int], finished_req_ids: Collection[str], idle: bool = False
    ) -> tuple[set[str], set[str]]:
        """As `get_finished`, but tells of a send in each step until `sends` no longer has it: the result of a step can be lost.

        A request that `sends` has and whose end was told in a step that failed counts as ended now.
        """
        if not (sends or self.sends):
            return self.get_finished(finished_req_ids, idle)
        known = {name for name, step in sends.items() if self.sends.get(name) == step}
        self.sends, self._sent = dict(sends), self._sent & known
        sent, received = self.get_finished({*finished_req_ids, *(sends.keys() - known)}, idle)
        self._sent |= sent
        return self._sent & sends.keys(), received


class OffloadingWorker(ConnectorWorker):
    """Blocks in main memory, pinned if the caches are on a GPU; see `OffloadingConnector`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        count = take_extra(self.config, num_cpu_blocks=..., eviction_policy="lru")["num_cpu_blocks"] + 1
        self.held: dict[int, list[Any]] = {}
        self.slots = [self._new_slots(cache, count) for cache in self.kv_caches]

    def _new_slots(self, cache: Tensor, count: int) -> Tensor:
        shape = (cache.shape[0], count, *cache.shape[2:])
        return torch.zeros(shape, dtype=cache.dtype, pin_memory=cache.is_cuda)

    def load(self, loads: Loads, fetched: Any = None) -> set[int]:
        pairs = [(slot, block) for (slot, *name), block in loads if self.held.get(slot) == name]
        for cache, slots in zip(self.kv_caches, self.slots, strict=True):
            self.backend.copy_blocks(slots, cache, pairs)
        return {block for _, block in loads} - {block for _, block in pairs}

    def save(self, saves: Sequence[tuple[int, tuple[Any, ...]]]) -> None:
        pairs = [(block, place[0]) for block, place in saves]
        for cache, slots in zip(self.kv_caches, self.slots, strict=True):
            self.backend.copy_blocks(cache, slots, pairs)
        self.held |= {slot: name for _, (slot, *name) in saves}


_HEAD = struct.Struct("<8sQI")
_MAGIC = b"minikv1\0"


class SharedStorageWorker(ConnectorWorker):
    """Blocks in files; see `SharedStorageConnector`. With `max_bytes`, the files that were used longest ago are removed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        extra = take_extra(self.config, shared_storage_path=..., max_bytes=None)
        self.root, self.max_bytes = Path(extra["shared_storage_path"]), extra["max_bytes"]
        self.root.mkdir(parents=True, exist_ok=True)
        remove_left(self.root, "*/*.tmp-*", f"{'?' * 24}-{'?' * 16}-*")  # and blocks of changed weights
        self._bytes = [cache[:, 0].nbytes for cache in self.kv_caches]

    def fetch(self, loads: Loads) -> dict[int, Tensor]:
        return {block: data for (path, _), block in loads if (data := self._read(f"{path}.{self.rank}")) is not None}

    def load(self, loads: Loads, fetched: dict[int, Tensor] | None = None) -> set[int]:
        found = self.fetch(loads) if fetched is None else fetched
        if found:
            where, start = torch.tensor(list(found)), 0
            data = torch.stack(list(found.values()))
            for cache, size in zip(self.kv_caches, self._bytes, strict=True):
                there = as_bytes(cache)
                rows = data[:, start : start + size].contiguous().view(there.dtype)
                part = rows.view(len(found), there.shape[0], *there.shape[2:]).transpose(0, 1)
                there.index_copy_(1, where.to(cache.device), part.to(cache.device))
                start += size
        return {block for _, block in loads} - found.keys()

    def _read(self, path: str) -> Tensor | None:
        try:
            data = Path(path).read_bytes()
            os.utime(path)
        except OSError as error:
            logger.warning("a KV block cannot be read: %s", error)
            return None
        magic, size, checksum = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (b"", 0, 0)
        if (
            magic != _MAGIC
            or not size == sum(self._bytes) == len(data) - _HEAD.size
            or zlib.crc32(memoryview(data)[_HEAD.size :]) != checksum
        ):
            logger.warning("a KV block is damaged and will be computed: %s", path)
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        return torch.frombuffer(bytearray(memoryview(data)[_HEAD.size :]), dtype=torch.uint8)

    def save(self, saves: Sequence[tuple[int, tuple[Any, ...]]]) -> None:
        where = [block for block, _ in saves]
        parts = [
            as_bytes(cache)
            .index_select(1, torch.tensor(where, device=cache.device))
            .transpose(0, 1)
            .reshape(len(where), -1)
            .cpu()
            for cache in self.kv_caches
        ]
        for row, (_, (path, _)) in zip(torch.cat(parts, 1).view(torch.uint8), saves, strict=True):
            try:
                self._write(f"{path}.{self.rank}", row.numpy().tobytes())
            except OSError as error:
                logger.warning("KV blocks are not kept: %s", error)
                return
        if self.max_bytes is not None:
            self._shrink(self.max_bytes)

    def _write(self, path: str, data: bytes) -> None:
        write_whole(path, _HEAD.pack(_MAGIC, len(data), zlib.crc32(data)) + data)

    def _shrink(self, most: int) -> None:
        """Remove the files that were used longest ago. Another engine may do so at the same time."""
        found = []
        for path in self.root.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= most:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size


def write_whole(path: str, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    torn = f"{path}.tmp-{os.getpid()}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(torn, "wb") as file:
        file.write(data)
    os.replace(torn, path)


class PeerMemoryWorker(ConnectorWorker):
    """Blocks in the memory of the rank that computed them; see `PeerMemoryConnector`.

    The file of a block names a store, which is memory of some rank, and a slot of it. A rank removes the file before it fills the slot
    anew, and the store's file before it gives the memory back; it writes the file of a new block when that is whole. So a reader that
    finds both files before and after copying has copied a whole block. A store of a process that has ended counts as gone.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        extra = take_extra(self.config, **PeerMemoryConnector.extra)
        if self.kv_caches[0].is_cuda and not self.backend.name.startswith("numba_cuda"):
            raise ValueError(
                f"{self.config.kv_connector} needs attention_backend='numba_cuda' on a GPU, not {self.backend.name!r}"
            )
        self.root, self.count = Path(extra["shared_storage_path"]), extra["num_blocks"]
        self.root.mkdir(parents=True, exist_ok=True)
        remove_gone(self.root)
        self._name = f"store-{secrets.token_hex(4)}-{self.count}-{os.getpid()}"
        self._end = weakref.finalize(self, remove_gone, self.root, self.root / self._name)
        self._held: dict[int, str] = {}
        self._num_saved = 0
        self._copiers: dict[str, Callable[..., None] | None] = {}
        self._own = self._make_store() if self.config.is_producer else []

    def shutdown(self) -> None:
        self._end()

    def _wait(self) -> None:
        if self.kv_caches[0].is_cuda:
            torch.cuda.current_stream().synchronize()

    def _views(self, data: Tensor, count: int) -> list[Tensor]:
        """The slots of each cache, in memory of one store."""
        views, start = [], 0
        for cache in self.kv_caches:
            size = count * cache[:, 0].nbytes
            views.append(data[start : start + size].view(cache.dtype).view(cache.shape[0], count, *cache.shape[2:]))
            start += size
        return views

    def save(self, saves: Sequence[tuple[int, tuple[Any, ...]]]) -> None:
        for start in range(0, len(saves), self.count):
            try:
                self._fill(saves[start : start + self.count])
            except OSError as error:
                logger.warning("KV blocks are not kept: %s", error)
                return

    def _fill(self, saves: Sequence[tuple[int, tuple[Any, ...]]]) -> None:
        """Fill the next slots. Raises OSError, and fills none, if the file of what a slot held cannot be removed."""
        pairs = []
        for block, (path, _) in saves:
            slot = self._num_saved % self.count
            if (old := self._held.get(slot)) is not None:
                Path(old).unlink(missing_ok=True)
            self._held[slot] = f"{path}.{self.rank}"
            self._num_saved += 1
            pairs.append((block, slot))
        for cache, there in zip(self.kv_caches, self._own, strict=True):
            self.backend.copy_blocks(cache, there, pairs)
        self._wait()
        for _, slot in pairs:
            write_whole(self._held[slot], f"{self._name} {slot}".encode())

    def load(self, loads: Loads, fetched: Any = None) -> set[int]:
        names = {block: f"{path}.{self.rank}" for (path, _), block in loads}
        found = {block: place for block, name in names.items() if (place := look_up_block(name)) is not None}
        stores, copied = {store for store, _, _ in found.values()}, dict[int, Any]()
        for store in filter(self._is_there, stores):
            copy = (
                self._copiers[store] if store in self._copiers else self._copiers.setdefault(store, self._open(store))
            )
            places = {block: place for block, place in found.items() if place[0] == store}
            if copy is None:  # it cannot be opened: the files of its blocks are of no use
                for block in places:
                    with contextlib.suppress(OSError):
                        os.unlink(names[block])
            else:
                copy(self, pairs=[(slot, block) for block, (_, slot, _) in places.items()])
                copied |= places
        self._wait()
        gone = {store for store in stores | self._copiers.keys() if not self._is_there(store)}
        whole = {b for b, place in copied.items() if place[0] not in gone and look_up_block(names[b]) == place}
        if gone:
            self._copiers = {store: copy for store, copy in self._copiers.items() if store not in gone}
            remove_gone(self.root)
        return set(names) - whole

    def _is_there(self, store: str) -> bool:
        """Whether a store's file is there, and the process whose memory it is."""
        return (self.root / store).exists() and runs(int(store.rpartition("-")[2]))

    def _make_store(self) -> list[Tensor]:
        size, path = self.count * sum(cache[:, 0].nbytes for cache in self.kv_caches), self.root / self._name
        if self.kv_caches[0].is_cuda:
            from minivllm_kernels.cuda.all_reduce import share_memory  # numba may not be installed

            data = torch.empty(size, dtype=torch.uint8, device=self.kv_caches[0].device)
            write_whole(str(path), share_memory(data.data_ptr()))
        else:
            data = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        slots = self._views(data, self.count)
        # CUDA opens no handle where it was made
        self._copiers[self._name] = functools.partial(PeerMemoryWorker._copy_here, slots=slots)
        return slots

    def _open(self, store: str) -> Callable[..., None] | None:
        """A function that copies blocks out of another rank's store; None if the store is gone. It does not hold this object."""
        path, count, size = self.root / store, int(store.split("-")[2]), sum(c[:, 0].nbytes for c in self.kv_caches)
        try:
            if not self.kv_caches[0].is_cuda:
                if path.stat().st_size != count * size:
                    raise OSError(f"{store} has {path.stat().st_size} bytes, not {count * size}")
                data = torch.from_file(str(path), shared=True, size=count * size, dtype=torch.uint8)
                return functools.partial(PeerMemoryWorker._copy_here, slots=self._views(data, count))
            from minivllm_kernels.cuda.all_reduce import close_memory, open_memory

            address = open_memory(shared := path.read_bytes())
            copy = functools.partial(PeerMemoryWorker._copy_there, address=address, count=count)
            weakref.finalize(copy, close_memory, address, shared).atexit = False
            return copy
        except (OSError, RuntimeError) as error:
            logger.warning("KV blocks of another engine cannot be read: %s", error)
            return None

    def _copy_here(self, slots: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        for cache, there in zip(self.kv_caches, slots, strict=True):
            self.backend.copy_blocks(there, cache, pairs)

    def _copy_there(self, address: int, count: int, pairs: Sequence[tuple[int, int]]) -> None:
        there = torch.tensor(pairs, dtype=torch.int64).to(self.kv_caches[0].device)
        for cache in self.kv_caches:
            cuda_ops().copy_peer_blocks(address, count, cache, there)
            address += count * cache[:, 0].nbytes


ConnectorMaker = Callable[[KVTransferConfig, AttentionBackend, Sequence[Tensor], TensorGroup | None], ConnectorWorker]
_WORKERS: dict[str, ConnectorMaker] = {
    "OffloadingConnector": OffloadingWorker,
    "PeerMemoryConnector": PeerMemoryWorker,
    "SharedStorageConnector": SharedStorageWorker,
}


def register_kv_connector(name: str, scheduler_side: type[KVConnector], worker_side: ConnectorMaker) -> None:
    """Let `kv_transfer_config` name a connector. Worker processes know it if a plugin registers it.

    Raises:
        ValueError: the name is taken.
        TypeError: `scheduler_side` does not inherit from `KVConnector`, or `worker_side` is neither a class nor a function.
    """
    if name not in CONNECTORS:
        check_maker(f"worker side of KV connector {name!r}", worker_side)
    register(CONNECTORS, "KV connector", name, scheduler_side, KVConnector)
    _WORKERS[name] = worker_side


def make_connector_worker(
    args: EngineArgs, backend: AttentionBackend, kv_caches: Sequence[Tensor], group: TensorGroup | None
) -> ConnectorWorker | None:
    """The worker side of what `kv_transfer_config` asks for; None without.

    Args:
        args: with `kv_transfer` and the numbers of ranks.
        group: the ranks of this one's pipeline stage; None for one rank.

    Raises:
        ValueError: there is no such connector, or its extra configuration is wrong.
    """
    if (config := args.kv_transfer) is None:
        return None
    if args.pipeline_parallel_size > 1:
        group = TensorGroup(Share(dist.get_rank(), args.world_size))
    if config.kv_connector not in _WORKERS:
        raise ValueError(f"kv_connector must be one of {', '.join(_WORKERS)}; got {config.kv_connector!r}")
    return _WORKERS[config.kv_connector](config, backend, kv_caches, group)
