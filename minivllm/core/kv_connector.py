"""KV connectors, scheduler side: which blocks are fetched from, and saved to, an external store."""

# Generated from nbs/core/kv_connector.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import contextlib
import json
import os
import re
import secrets
import shutil
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from minivllm.core.config import EngineConfig, KVTransferConfig
from minivllm.core.output import KVConnectorMetadata, NewRequestData
from minivllm.core.prefix import extend_block_hashes
from minivllm.core.request import Request

Key = tuple[int, bytes]  # identifies a block: its KV cache group and its hash
Loads = tuple[tuple[tuple[Any, ...], int], ...]  # (place, block) each


class KVConnector(ABC):
    """The scheduler side of a connector. A subclass says where blocks are: `holds`, `place_to_load`, `place_to_save`, `forget`, `clear`.

    Args:
        config: what the user asked for.
        block_size: tokens per block.
        num_groups: number of KV cache groups; only groups of full attention or of latent vectors are supported.
        namespace: text that stands for the model and the layout of its blocks; engines share blocks only if it is equal (see `namespace_of`).

    Attributes:
        num_queries, num_hits: tokens that were looked up here, after the prefix cache, and those that were fetched.
        num_failures: steps in which a load failed.
        num_async_failures: requests with a failed asynchronous load.
        load_async: whether blocks are fetched while the request waits and steps run; `load_async` of the extra configuration.
    """

    def __init__(self, config: KVTransferConfig, block_size: int, num_groups: int, namespace: str) -> None:
        self.config, self.block_size, self.num_groups, self.namespace = config, block_size, num_groups, namespace
        self.num_queries = self.num_hits = self.num_failures = self.num_async_failures = 0
        self.load_async = config.kv_connector_extra_config.get("load_async", False)
        if type(self.load_async) is not bool:
            raise ValueError(f"kv_connector_extra_config: load_async must be true or false, got {self.load_async!r}")
        self._new: dict[Key, int] = {}  # blocks that this step fills
        self._admitted: dict[str, tuple[int, list[tuple[Key, int]]]] = {}
        self._starting: set[str] = set()  # of those, the ones that are fetched while steps run
        self._loading: dict[str, Loads] = {}
        self._resent: dict[str, Loads] = {}

    @abstractmethod
    def holds(self, key: Key) -> bool:
        """Whether a block can be fetched. No side effects."""

    @abstractmethod
    def place_to_load(self, key: Key) -> tuple[Any, ...]:
        """Where a held block lies, for the worker side. Counts as a use, for the order of eviction."""

    @abstractmethod
    def place_to_save(self, key: Key) -> tuple[Any, ...] | None:
        """Where to put a block; None if it is stored already or is not to be stored. The first element differs for each place."""

    @abstractmethod
    def forget(self, key: Key) -> None:
        """A block could not be loaded."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all: the weights have changed."""

    def note(self, event: tuple[Any, ...]) -> None:
        """Follow which blocks are filled, by an event of the cache (see `core.events`)."""
        kind = event[0]
        if kind == "cache" and self.config.is_producer:
            self._new |= {(event[2], name): block for block, name in zip(event[4], event[5], strict=True)}
        elif self._new and kind in ("uncache", "evict"):
            gone = {event[1]} if kind == "evict" else set(event[3])
            self._new = {key: block for key, block in self._new.items() if block not in gone}
        elif kind == "reset":
            self._new.clear()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens beyond the computed prefix can be fetched, a whole number of blocks, and whether while steps run. No side effects."""
        if not self.config.is_consumer or request.skip_reading_prefix_cache:
            return 0, False
        names, first = extend_block_hashes(request, self.block_size), num_computed_tokens // self.block_size
        end, most = first, (request.num_tokens - 1) // self.block_size
        while end < most and all(self.holds((group, names[end])) for group in range(self.num_groups)):
            end += 1
        return (end - first) * self.block_size, self.load_async

    def update_state_after_alloc(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        num_computed_tokens: int,
        num_external_tokens: int,
        load_async: bool = False,
    ) -> None:
        """A request is admitted, or will wait for its blocks (`load_async`). In its tables, the blocks to fill come after those of the prefix hit."""
        first = num_computed_tokens // self.block_size
        span = range(first, first + num_external_tokens // self.block_size)
        names = request.block_hashes
        loads = [((group, names[i]), table[i]) for group, table in enumerate(block_ids) for i in span]
        self._admitted[request.request_id] = request.num_tokens - num_computed_tokens, loads
        if load_async:
            self._starting.add(request.request_id)

    def build_connector_meta(
        self, new_requests: Mapping[str, NewRequestData], unsure: Container[int] = (), sends: Mapping[str, int] = {}
    ) -> KVConnectorMetadata | None:
        """What the workers do in this step; None if it is nothing.

        Args:
            new_requests: requests admitted in this step. Loads that were planned for others are dropped.
            unsure: blocks that may turn out to be wrong, which are not saved.
            sends: see `KVConnectorMetadata`.
        """
        loads, saves, async_loads = list[tuple[tuple[Any, ...], int]](), {}, self._resent
        for request_id, (queried, wanted) in self._admitted.items():
            if request_id in new_requests or request_id in self._starting:
                places = [(self.place_to_load(key), block) for key, block in wanted]
                self.num_queries += queried
                self.num_hits += len(wanted) // self.num_groups * self.block_size
                if request_id in self._starting:
                    async_loads[request_id] = self._loading[request_id] = tuple(places)
                else:
                    loads += places
        for key, block in self._new.items():
            if block not in unsure and (place := self.place_to_save(key)) is not None:
                saves[place[0]] = block, place
        self._new, self._admitted, self._starting, self._resent = {}, {}, set(), {}
        if not (loads or saves or async_loads or sends):
            return None
        return KVConnectorMetadata(tuple(loads), tuple(saves.values()), self.num_failures, async_loads, dict(sends))

    def update_connector_output(self, meta: KVConnectorMetadata, invalid_block_ids: set[int]) -> None:
        """Loads of a step have failed."""
        self.num_failures += 1
        for place, block in meta.loads:
            if block in invalid_block_ids:
                self.forget(place[-1])

    def end_async_load(self, request_id: str, invalid_block_ids: set[int]) -> None:
        """The blocks of a request have been filled, except these; or the step that was to begin the load was taken back."""
        self._starting.discard(request_id)
        self._admitted.pop(request_id, None)
        self.num_async_failures += bool(invalid_block_ids)
        for place, block in self._loading.pop(request_id, ()):
            if block in invalid_block_ids:
                self.forget(place[-1])

    def resend(self) -> None:
        """A step has failed, and messages to or from workers may be lost. The next step asks again for all blocks that are being fetched."""
        self._resent = dict(self._loading)

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> bool:
        """A running request ends. Returns whether its blocks must be kept, for workers to copy, until `finished_sending` names it."""
        return False

    def shutdown(self) -> None:
        """Remove what would be left behind, such as files. The workers have ended, or are shut down."""

    def gauges(self) -> dict[str, float]:
        """Tokens by the names of vLLM's metrics, and how often loads failed: steps, plus requests with asynchronous loads."""
        return {
            "external_prefix_cache_queries": self.num_queries,
            "external_prefix_cache_hits": self.num_hits,
            "num_kv_load_failures": self.num_failures + self.num_async_failures,
        }


class LRU:
    """An order of eviction: the least recently used block first. `OFFLOAD_POLICIES` has the others; each is made with the number of slots."""

    def __init__(self, capacity: int) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key) -> None:
        """A block was added."""
        self._keys[key] = None

    def touch(self, key: Key) -> None:
        """A block is used, or was computed again."""
        self._keys.move_to_end(key)

    def evict(self) -> Key:
        """Choose a block, and forget it."""
        return self._keys.popitem(last=False)[0]

    def remove(self, key: Key) -> None:
        """A block is gone."""
        self._keys.pop(key, None)


class ARC:
    """Adaptive replacement (Megiddo and Modha, FAST 2003): `once` and `again`, and ghosts, keys of what was evicted from each. Methods as those of `LRU`."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.target = capacity, 0.0
        self._once, self._again, self._once_ghosts, self._again_ghosts = (OrderedDict[Key, None]() for _ in range(4))

    def add(self, key: Key) -> None:
        once, again = self._once_ghosts, self._again_ghosts
        if key in once:  # `once` was too short
            self.target = min(self.capacity, self.target + max(1.0, len(again) / len(once)))
            del once[key]
            self._again[key] = None
        elif key in again:
            self.target = max(0.0, self.target - max(1.0, len(once) / len(again)))
            del again[key]
            self._again[key] = None
        else:
            self._once[key] = None

    def touch(self, key: Key) -> None:
        if self._once.pop(key, 0) is None:
            self._again[key] = None
        else:
            self._again.move_to_end(key)

    def evict(self) -> Key:
        first = self._once and (len(self._once) > self.target or not self._again)
        source, ghosts = (self._once, self._once_ghosts) if first else (self._again, self._again_ghosts)
        key = source.popitem(last=False)[0]
        ghosts[key] = None
        while len(ghosts) > self.capacity:
            ghosts.popitem(last=False)
        return key

    def remove(self, key: Key) -> None:
        for table in (self._once, self._again):
            table.pop(key, None)


OFFLOAD_POLICIES: dict[str, type[Any]] = {"lru": LRU, "arc": ARC}


def take_extra(config: KVTransferConfig, **defaults: Any) -> dict[str, Any]:
    """`kv_connector_extra_config` with defaults; a default of `...` marks a required field. Raises ValueError for missing and unknown fields."""
    given, defaults = config.kv_connector_extra_config, {**defaults, "load_async": False}  # which all have
    if unknown := sorted(set(given) - set(defaults)):
        raise ValueError(
            f"kv_connector_extra_config of {config.kv_connector}: {unknown[0]!r} is unknown; known: {', '.join(defaults)}"
        )
    found = defaults | given
    if missing := next((name for name, value in found.items() if value is ...), None):
        raise ValueError(f"kv_connector_extra_config of {config.kv_connector} must have {missing!r}")
    return found


class OffloadingConnector(KVConnector):
    """Blocks in main memory. Extra configuration: `num_cpu_blocks`, `eviction_policy` (a name of `OFFLOAD_POLICIES`)."""

    def __init__(self, config: KVTransferConfig, block_size: int, num_groups: int, namespace: str) -> None:
        super().__init__(config, block_size, num_groups, namespace)
        extra = take_extra(config, num_cpu_blocks=..., eviction_policy="lru")
        count, policy = extra["num_cpu_blocks"], extra["eviction_policy"]
        if type(count) is not int or count < 1:
            raise ValueError(f"kv_connector_extra_config: num_cpu_blocks must be at least 1, got {count!r}")
        if policy not in OFFLOAD_POLICIES:
            names = ", ".join(OFFLOAD_POLICIES)
            raise ValueError(f"kv_connector_extra_config: eviction_policy must be one of {names}; got {policy!r}")
        self._count, self._make = count, OFFLOAD_POLICIES[policy]
        self.clear()

    def clear(self) -> None:
        self._generation = secrets.token_hex(8)  # of the blocks from now on: slots still hold older ones
        self.policy = self._make(self._count)
        self.slots: dict[Key, int] = {}
        self._free = list(range(self._count, 0, -1))  # slot 0 is a null block, as in the cache

    def holds(self, key: Key) -> bool:
        return key in self.slots

    def place_to_load(self, key: Key) -> tuple[Any, ...]:
        self.policy.touch(key)
        return self.slots[key], self._generation, key

    def place_to_save(self, key: Key) -> tuple[Any, ...] | None:
        if key in self.slots:
            self.policy.touch(key)
            return None
        slot = self._free.pop() if self._free else self.slots.pop(self.policy.evict())
        self.slots[key] = slot
        self.policy.add(key)
        return slot, self._generation, key

    def forget(self, key: Key) -> None:
        if (slot := self.slots.pop(key, None)) is not None:
            self.policy.remove(key)
            self._free.append(slot)


class SharedStorageConnector(KVConnector):
    """Blocks in files. Extra configuration: `shared_storage_path`, a folder; `max_bytes`, its largest size, or null for no limit.

    Each rank has its own file for a block, `PATH.RANK`.
    """

    extra: ClassVar[dict[str, Any]] = {"shared_storage_path": ..., "max_bytes": None}

    def __init__(self, config: KVTransferConfig, block_size: int, num_groups: int, namespace: str) -> None:
        super().__init__(config, block_size, num_groups, namespace)
        extra = take_extra(config, **self.extra)
        for name in self.extra.keys() - {"shared_storage_path"}:
            if (most := extra[name]) is not None and (type(most) is not int or most < 1):
                raise ValueError(f"kv_connector_extra_config: {name} must be at least 1, got {most!r}")
        self._root, self._bad = str(extra["shared_storage_path"]), dict[Key, tuple[int, int]]()
        self.folder = os.path.join(self._root, namespace)
        self._remove: Callable[[], Any] = lambda: None

    def clear(self) -> None:
        """Go on in a new folder that no other engine reads. It is removed with this object, by the next call, or, after a kill, by the next engine.

        Blocks of the first weights stay for other engines.
        """
        self._remove()
        self.folder = os.path.join(self._root, f"{self.namespace}-{secrets.token_hex(8)}-{os.getpid()}")
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def _path(self, key: Key) -> str:
        return os.path.join(self.folder, f"{key[1].hex()}-{key[0]}")

    def _file(self, key: Key) -> tuple[int, int] | None:
        """Inode and modification time (ns) of rank 0's file of a block; None if there is none."""
        try:
            status = os.stat(self._path(key) + ".0")
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def holds(self, key: Key) -> bool:
        return (file := self._file(key)) is not None and file != self._bad.get(key)

    def place_to_load(self, key: Key) -> tuple[Any, ...]:
        return self._path(key), key

    def place_to_save(self, key: Key) -> tuple[Any, ...] | None:
        if self.holds(key):
            return None
        self._bad.pop(key, None)
        return self._path(key), key

    def forget(self, key: Key) -> None:
        if (file := self._file(key)) is not None:  # a later file of this name may be good
            self._bad[key] = file

    def shutdown(self) -> None:
        self._remove()


def remove_left(root: Path, *patterns: str) -> None:
    """Remove the files and folders of processes that have ended. patterns: globs of names in `root` that end in `-` and a process id."""
    for path in (path for pattern in patterns for path in root.glob(pattern)):
        with contextlib.suppress(OSError, ValueError):
            if not runs(int(path.name.rpartition("-")[2])):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def runs(pid: int) -> bool:
    """Whether a process runs. One that has ended and that its parent has not waited for (a zombie) does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's, or there is no /proc
        return True


def look_up_block(path: str) -> tuple[str, int, tuple[int, int]] | None:
    """(name of the store, slot, (inode, modification time in ns)) from the file of a block; None if it is gone or names no slot."""
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            found = re.fullmatch(r"(store-\w+-(\d+)-\d+) (\d+)", file.read())
    except OSError:
        return None
    if found is None or not int(found[3]) < int(found[2]):
        return None
    return found[1], int(found[3]), (status.st_ino, status.st_mtime_ns)


def remove_gone(root: Path, *stores: Path) -> None:
    """Remove these stores and those of processes that have ended, the files of blocks in them, and the folders that this leaves empty."""
    files = list(root.glob("*/*-*.*"))
    for store in stores:
        with contextlib.suppress(OSError):
            store.unlink()
    remove_left(root, "store-*", "*/*.tmp-*")
    for file in files:
        with contextlib.suppress(OSError):
            if (place := look_up_block(str(file))) is not None and not (root / place[0]).exists():
                file.unlink()
    for folder in {file.parent for file in files}:
        with contextlib.suppress(OSError):
            folder.rmdir()


class PeerMemoryConnector(SharedStorageConnector):
    """Blocks in the memory of the rank that computed them, where others read them. Files say which block lies where.

    Extra configuration: `shared_storage_path`, a folder for those files; `num_blocks`, how many a rank keeps.
    """

    extra: ClassVar[dict[str, Any]] = {"shared_storage_path": ..., "num_blocks": ...}

    def shutdown(self) -> None:
        super().shutdown()
        remove_gone(Path(self._root))  # a rank that was killed has left them


CONNECTORS: dict[str, type[KVConnector]] = {
    "OffloadingConnector": OffloadingConnector,
    "PeerMemoryConnector": PeerMemoryConnector,
    "SharedStorageConnector": SharedStorageConnector,
}


def namespace_of(config: EngineConfig) -> str:
    """A name that is equal for engines whose blocks hold the same bytes: a hash of the model's files and of all that the layout depends on."""
    args, path = config.args, Path(config.model.path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    seed = (args.seed, config.device) if args.load_format == "dummy" else 0  # a GPU draws other weights than a CPU
    how = (args.load_format, seed, args.quantization, args.quantization_config, args.hf_overrides)
    ranks = (args.tensor_parallel_size, args.pipeline_parallel_size, args.enable_expert_parallel)
    layout = (config.dtype, args.kv_cache_dtype, config.attention_backend, *ranks)
    groups = [(repr(group.spec), group.layers) for group in config.kv_cache.groups]
    return sha256(json.dumps([found, how, layout, groups], default=repr).encode()).hexdigest()[:24]


def make_connector(config: EngineConfig) -> KVConnector | None:
    """The scheduler side of the connector in `kv_transfer_config`; None if there is none.

    Raises:
        ValueError: no such connector, a wrong extra configuration, or a model whose blocks it cannot fetch.
    """
    if (wanted := config.args.kv_transfer) is None:
        return None
    if wanted.kv_connector not in CONNECTORS:
        raise ValueError(f"kv_connector must be one of {', '.join(CONNECTORS)}; got {wanted.kv_connector!r}")
    groups = config.kv_cache.groups
    if other := [group.spec.kind for group in groups if group.spec.kind not in ("full", "latent")]:
        raise ValueError(
            f"kv_transfer_config is implemented for full attention; {config.model.name!r} has layers of {other[0]!r}"
        )
    return CONNECTORS[wanted.kv_connector](wanted, config.cache.block_size, len(groups), namespace_of(config))
