"""Records a scheduler: live state, event subscribers, traces."""

# Generated from nbs/core/recorder.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from minivllm.core.adapter_slots import AdapterSlots
from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.config import CacheConfig, KVCacheConfig, SchedulerConfig
from minivllm.core.encoder_cache import EncoderCacheManager
from minivllm.core.events import Event, RequestSnapshot, State, TraceHeader
from minivllm.core.kv_cache import KVCacheManager
from minivllm.core.policy import Policy, PolicyGuard, arguments_of
from minivllm.core.request import Request
from minivllm.core.request_queue import WaitingQueue
from minivllm.core.trace import Trace

Sink = Callable[[Event], None]


class Recorder:
    """The part of a scheduler that tells what happens: its state as plain data, its events, and traces of them.

    Attributes:
        trace: None, or a function that takes an event.
    """

    config: SchedulerConfig
    cache: CacheConfig
    kv_cache: KVCacheConfig | None
    kv_cache_manager: KVCacheManager
    preemption: Any
    requests: dict[str, Request]
    adapters: AdapterSlots
    encoder_cache: EncoderCacheManager
    waiting: WaitingQueue
    running: list[Request]
    remote: dict[str, Request]
    _kept: dict[str, list[KVCacheBlock]]
    _guard: PolicyGuard

    def __init__(self) -> None:
        self.trace: Sink | None = None
        self._sinks: dict[Sink, bool] = {}
        self._of_blocks: list[Sink] = []  # get block events only (a KV connector): no other events are built for them
        self._recorder: Sink | None = None
        self._last_wait: tuple[Any, ...] | None = None

    @property
    def policy(self) -> Policy:
        """The policy in use. Set another at any time between two steps with `Scheduler.set_policy`."""
        return self._guard.policy

    def state(self) -> State:
        """The live state as plain data."""
        kv = self.kv_cache_manager
        pool, cpu = kv.block_pool, kv.cpu_pool
        state = State(
            num_groups=len(kv.groups),
            requests={},
            waiting=[request.request_id for request in self.waiting],
            running=[request.request_id for request in self.running],
            remote=list(self.remote),
            kept={request_id: [block.block_id for block in blocks] for request_id, blocks in self._kept.items()},
            ref_cnt=[block.ref_cnt for block in pool.blocks],
            hashes=[block.block_hash for block in pool.blocks],
            free=[block.block_id for block in pool.free_queue],
            cpu_free=[block.block_id for block in cpu.free_queue] if cpu else [],
            loras={slot: name for name, slot in self.adapters.slot_of.items()},
            encoder_cache=dict(self.encoder_cache.sizes),
        )
        for request_id, r in self.requests.items():
            held = request_id in kv.groups[0].tables
            tables = [list(ids) for ids in kv.get_block_ids(request_id)] if held else [[] for _ in kv.groups]
            copies = [block.block_id for table in kv.swapped.get(request_id, ()) for block in table if block.block_id]
            counts = r.num_prompt_tokens, r.num_tokens, r.num_computed_tokens, r.num_cached_tokens
            state.requests[request_id] = RequestSnapshot(r.status.name, *counts, tables, copies)
        return state

    def record(self) -> Trace:
        """Start a new trace from the present state. Ends with `stop_recording`, or with the next `record`."""
        self.stop_recording()
        groups = self.kv_cache.groups if self.kv_cache else ()
        header = TraceHeader(
            block_size=self.cache.block_size,
            num_blocks=self.cache.num_gpu_blocks,
            num_groups=len(self.kv_cache_manager.groups),
            num_cpu_blocks=self.cache.num_cpu_blocks,
            policy=self.policy.name,
            settings=asdict(self.config) | asdict(self.cache),
            policy_arguments=arguments_of(self.policy),
            preemption=type(self.preemption).__name__.lower(),
            groups=[{"spec": asdict(group.spec), "layers": list(group.layers)} for group in groups],
        )
        trace = Trace(header, self.state())
        self._recorder = trace.events.append
        self.subscribe(self._recorder)
        self._last_wait = None
        return trace

    @property
    def is_recording(self) -> bool:
        """Whether a trace is being recorded."""
        return self._recorder is not None

    def stop_recording(self) -> None:
        """End the recording that `record` began."""
        if self._recorder is not None:
            self.unsubscribe(self._recorder)
            self._recorder = None

    def subscribe(self, sink: Sink, blocks: bool = True) -> None:
        """Send every event to `sink` from now on; with `blocks` also those of blocks. It must be quick and must not raise."""
        self._sinks[sink] = blocks
        self._connect()

    def unsubscribe(self, sink: Sink) -> None:
        """Stop sending events to `sink`. Raises KeyError if it was not subscribed."""
        del self._sinks[sink]
        self._connect()

    def _connect(self) -> None:
        self.trace = _to_all(self._sinks)
        sinks = [*(sink for sink, blocks in self._sinks.items() if blocks), *self._of_blocks]
        self.kv_cache_manager.block_pool.trace = _to_all(sinks)


def _to_all(sinks: Iterable[Sink]) -> Sink | None:
    """No sink: None, which costs least. One: itself. More: a function that calls them all."""
    sinks = tuple(sinks)

    def tell_all(event: tuple[Any, ...]) -> None:
        for sink in sinks:
            sink(event)

    return None if not sinks else sinks[0] if len(sinks) == 1 else tell_all
