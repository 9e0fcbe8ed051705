"""A store beside the cache whose blocks come beside the steps, when a test says so, and a runner that knows what is in them."""

import random
from types import SimpleNamespace

from block_memory import GARBAGE, Memory

from minivllm.core.config import CacheConfig, KVTransferConfig, SchedulerConfig
from minivllm.core.kv_connector import KVConnector
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.trace import Trace
from minivllm.runtime.kv_connectors import ConnectorWorker


class Store(KVConnector):
    """Says that it holds what it was to save, and what it was told (`held`). `keeps(request)`: whether it sends the blocks of one that ends."""

    def __init__(self, block_size: int = 4, keeps=lambda request: False) -> None:
        super().__init__(
            KVTransferConfig(kv_connector="Store", kv_connector_extra_config={"load_async": True}), block_size, 1, ""
        )
        self.held, self.keeps, self.stubborn = set(), keeps, False

    def holds(self, key):
        return key in self.held

    def place_to_load(self, key):
        return (key,)

    def place_to_save(self, key):
        return None if key in self.held else self.held.add(key) or (key,)

    def forget(self, key):
        if not self.stubborn:
            self.held.discard(key)

    def clear(self):
        self.held.clear()

    def request_finished(self, request, block_ids):
        return self.keeps(request)


class Sender(ConnectorWorker):
    """Has sent the blocks of a request when `arrives(request id)` says so. `content(request id)`: what is in them."""

    load = save = None  # which no test calls

    def __init__(self, arrives, content):
        super().__init__(SimpleNamespace(), None, (), None)
        self.arrives, self.content, self.sending = arrives, content, {}

    def get_finished(self, finished_req_ids, idle=False):
        for name in self.sends.keys() & set(finished_req_ids):
            assert name not in self.sending
            self.sending[name] = self.content(name)
        done = {name for name in self.sending if self.arrives(name)}
        for name in done:  # they hold what they held before
            assert self.content(name) == self.sending.pop(name)
        return done, set()


class RemoteMemory(Memory):
    """Also keeps what is saved, and fills blocks when `arrives(request id)` says so; of those, `spoils()` says which cannot be."""

    def __init__(self, scheduler, arrives, spoils=lambda: False) -> None:
        super().__init__(scheduler)
        self.arrives, self.spoils = arrives, spoils
        self.store, self.pending = {}, {}
        self.sender = Sender(arrives, lambda name: [self.content(b.block_id) for b in scheduler._kept[name]])
        self.loaded = self.spoilt = 0
        self.brought: set[int] = set()  # blocks that the store has filled, and no step has written since

    def execute(self, output, fails=False):
        meta, sent = output.kv_connector_metadata, set()
        heard = not (fails and self.spoils())
        if heard:
            sent, _ = self.sender.end_transfers({} if meta is None else meta.sends, output.finished)
        if meta is not None and heard:
            assert not meta.loads and not meta.failures
            for name, loads in meta.async_loads.items():
                self.pending.setdefault(name, loads)
        arrived = [name for name in self.pending if self.arrives(name)]
        invalid = {block for name in arrived for block in self.fill(self.pending.pop(name))}
        for name, n in output.num_scheduled_tokens.items():
            computed = self.scheduler.requests[name].num_computed_tokens - n
            [table] = self.scheduler.kv_cache_manager.get_block_ids(name)
            self.brought -= {*table[computed // self.size : -(-(computed + n) // self.size)]}
        result = super().execute(output, fails)
        for block, place in () if meta is None or fails else meta.saves:
            self.store[place[-1]] = self.content(block)
        if fails:  # what was told is lost
            return result
        result.finished_recving, result.finished_sending, result.invalid_block_ids = set(arrived), sent, invalid
        return result

    def content(self, block):
        return [self.device.get((block, i), GARBAGE) for i in range(self.size)]

    def fill(self, loads):
        for (key,), block in loads:
            bad = key not in self.store or self.spoils()
            self.loaded += 1
            self.spoilt += bad
            self.brought = self.brought - {block} if bad else self.brought | {block}
            for i, value in enumerate([GARBAGE] * self.size if bad else self.store[key]):
                self.device[block, i] = value
            if bad:
                yield block


def remote_trace(seed: int = 0, blocks: int = 30) -> tuple[Trace, list[set[int]]]:
    """Forty requests with common beginnings and a store of all blocks; a tenth of the loads fail, two requests are aborted.

    Returns:
        The trace, and after each step the blocks with a hash whose content was last written by the store.
    """
    rng = random.Random(seed)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=14, max_model_len=64)
    keeps = {"r3", "r4", "r9", "r20"}
    store = Store(4, lambda request: request.request_id in keeps)
    scheduler = Scheduler(config, CacheConfig(block_size=4, num_gpu_blocks=blocks), connector=store)
    memory = RemoteMemory(scheduler, lambda name: rng.random() < 0.3, lambda: rng.random() < 0.1)
    heads = [[rng.randrange(3) for _ in range(12)] for _ in range(4)]
    trace, brought = scheduler.record(), list[set[int]]()
    for i in range(40):
        tail = [rng.randrange(3) for _ in range(rng.randrange(1, 14))]
        scheduler.add_request(Request(f"r{i}", rng.choice(heads) + tail, max_tokens=rng.randrange(1, 20)))
    while scheduler.has_requests():
        if scheduler.step in (30, 70):
            scheduler.finish_requests(list(scheduler.remote)[:1])
        output = scheduler.schedule()
        scheduler.update_from_output(output, memory.execute(output))
        pool = scheduler.kv_cache_manager.block_pool
        brought.append(
            {block.block_id for block in pool.blocks if block.block_hash and block.block_id in memory.brought}
        )
    scheduler.stop_recording()
    return trace, brought
