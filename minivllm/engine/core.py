"""EngineCore: the loop of schedule, execute, update over token ids."""

# Generated from nbs/engine/core.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from minivllm.core.clock import Clock, WallClock
from minivllm.core.config import EngineConfig
from minivllm.core.kv_events import KVEventTap
from minivllm.core.output import EngineCoreOutput, SchedulerOutput
from minivllm.core.policy import Policy
from minivllm.core.request import FinishReason, Request
from minivllm.core.scheduler import Preemption, Recompute, Scheduler, Swap
from minivllm.core.trace import Trace
from minivllm.core.trace_files import TraceWriter
from minivllm.engine.batch_queue import BatchQueue
from minivllm.engine.grammar_queue import GrammarQueue, wants_grammar
from minivllm.engine.kv_publisher import KVEventPublisher
from minivllm.sampling.grammar import GrammarCompiler

__all__ = ["EngineCore", "logger"]


# %% nbs/engine/core.ipynb #EngineCore
if TYPE_CHECKING:  # so that the engine core can be used where there is no torch
    from minivllm.runtime.executor import Executor


logger = logging.getLogger("minivllm.engine")


class EngineCore:
    """Scheduler and executor, a step at a time. Knows token ids only.

    ``policy``, ``preemption``: None for the ones that ``config`` names. ``clock``: the time that the scheduler sees.
    ``grammar``: compiles structured outputs; None if there can be none.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        policy: Policy | None = None,
        preemption: Preemption | None = None,
        clock: Clock | None = None,
        grammar: GrammarCompiler | None = None,
    ) -> None:
        if preemption is None:
            swaps = config.args.preemption_mode == "swap"
            preemption = Swap(config.cache.num_cpu_blocks) if swaps else Recompute()
        self.executor = executor
        self.queue = BatchQueue(executor, 2 if config.async_scheduling else 1)
        self._kept: list[EngineCoreOutput] = []
        self.grammars = None if grammar is None else GrammarQueue(grammar)
        self._publisher: KVEventPublisher | None = None
        self._recording: TraceWriter | None = None
        self.clock = clock or WallClock()
        self.scheduler = Scheduler(
            config.scheduler, config.cache, config.kv_cache, policy=policy, preemption=preemption, clock=self.clock
        )
        if config.args.kv_events_endpoint is not None:
            self._tap = KVEventTap(self.scheduler)
            self._publisher = KVEventPublisher(
                config.args.kv_events_endpoint, config.args.kv_events_replay_endpoint, config.args.kv_events_topic
            )

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError if its id is in use or it can never run; nothing has changed then."""
        if self.grammars is not None and request.request_id in self.grammars:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        if not wants_grammar(request.sampling_params):
            self.scheduler.add_request(request)
        elif self.grammars is None:
            raise ValueError("structured_outputs need a tokenizer, and this engine has none")
        elif request.request_id in self.scheduler.requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        else:
            self.grammars.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests in any state; unknown ids are passed over. Returns those that were ended."""
        ids = list(request_ids)
        waiting = [] if self.grammars is None else self.grammars.remove(ids)
        return waiting + self.scheduler.finish_requests(ids, FinishReason.ABORT)

    def has_requests(self) -> bool:
        """Whether `step` has anything to do, be it only rows to drop."""
        return self.scheduler.has_requests() or any((self.grammars, self.queue, self._kept))

    # %% nbs/engine/core.ipynb #EngineCore-step
    def step(self) -> list[EngineCoreOutput]:
        """Run one step; returns what requests gained. Does nothing when there is nothing to do.

        With async scheduling: begin one step, and return what requests gained in the one before.

        Raises:
            PolicyError: a hook of the policy failed; no request is lost.
            Exception: whatever the executor raises; the requests of the steps under way have ended then (see `_give_up`).
        """
        if self.grammars:
            self._kept += self._admit_compiled()
        if self.scheduler.has_requests():
            self._begin(self.scheduler.schedule())
            if len(self.queue) == self.queue.size:
                self._take_in()
        else:
            self.drain()
        outputs, self._kept = self._kept, []
        return outputs

    def _begin(self, output: SchedulerOutput) -> None:
        try:
            self.queue.put(output)
        except BaseException:
            self._give_up()
            raise

    def _take_in(self) -> None:
        """Wait for the oldest step under way, and note what came of it."""
        try:
            output, result = self.queue.take()
        except BaseException:
            self._give_up()
            raise
        self._kept += self.scheduler.update_from_output(output, result)
        if self._recording is not None and not self._recording.push():
            self._end_recording()
        if self._publisher is not None:
            self._publisher.publish(self._tap.take())

    # %% nbs/engine/core.ipynb #EngineCore-drain
    def drain(self) -> None:
        """Wait for all steps under way. What requests gained comes with the next `step`."""
        while self.queue:
            self._take_in()

    def _admit_compiled(self) -> list[EngineCoreOutput]:
        """Let requests whose grammar is compiled join the scheduler; returns the ends of those whose grammar is wrong."""
        assert self.grammars is not None
        ready, failed = self.grammars.take_ready(wait=not (self.scheduler.has_requests() or self.queue))
        for request in ready:
            try:
                self.scheduler.add_request(request)
            except ValueError as error:  # a prompt that the cache can never hold; the other requests go on
                failed.append(EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=str(error)))
        return failed

    # %% nbs/engine/core.ipynb #EngineCore-_give_up
    def _give_up(self) -> None:
        """After a step that was decided but not carried out: end its requests and those of the next, forget the prefix cache."""
        for output in self.queue.clear():
            self.scheduler.finish_requests([*output.num_scheduled_tokens, *output.preempted], FinishReason.ERROR)
        self.scheduler.reset_prefix_cache()

    # %% nbs/engine/core.ipynb #EngineCore-record
    @contextmanager
    def record(self, samples: bool = False) -> Iterator[Trace]:
        """Record everything that the scheduler does within the block.

        ``samples``: also keep the logits of every sampled token (a row of the vocabulary each), for `LLM.explain`.

        Raises:
            RuntimeError: a recording is under way.
        """
        if self.scheduler.is_recording:
            raise RuntimeError("this engine is recording already; leave the other record() block first")
        self.drain()
        trace = self.scheduler.record()
        if samples:
            self.executor.keep_samples(trace.samples)
        try:
            yield trace
        finally:
            try:
                self.drain()
            finally:
                self.scheduler.stop_recording()
                if samples:
                    self.executor.keep_samples(None)

    # %% nbs/engine/core.ipynb #EngineCore-record_to
    def record_to(self, path: str) -> None:
        """Record from now on, into a file, until `shutdown`. A disk that is full ends it, and is said in the log.

        Raises:
            RuntimeError: a recording is under way. ValueError, OSError: see `TraceWriter`.
        """
        if self.scheduler.is_recording:
            raise RuntimeError("this engine is recording already")
        self.drain()
        trace = self.scheduler.record()
        try:
            self._recording = TraceWriter(trace, path)
        except BaseException:
            self.scheduler.stop_recording()
            raise

    def _end_recording(self) -> None:
        if self._recording is not None:
            writer, self._recording = self._recording, None
            self.scheduler.stop_recording()
            place = writer.close()
            if writer.error is not None:
                logger.error("the recording has ended early: %s; what was written is in %s", writer.error, place)
            else:
                logger.info("the trace of %d steps is in %s", writer.num_steps, place)

    # %% nbs/engine/core.ipynb #EngineCore-stats
    def get_stats(self) -> dict[str, float]:
        """Gauges of this moment and counters since the start; the names are those of vLLM's metrics."""
        scheduler = self.scheduler
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting) + (len(self.grammars) if self.grammars else 0),
            "kv_cache_usage_perc": scheduler.kv_cache_manager.block_pool.usage,
            "prefix_cache_queries": scheduler.kv_cache_manager.stats.query_tokens,
            "prefix_cache_hits": scheduler.kv_cache_manager.stats.hit_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "num_steps": scheduler.step,
        }

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks held one."""
        return self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Give the executor's memory back, send the last KV events, write the trace that `record_to` began."""
        self.drain()
        self._end_recording()
        if self._publisher is not None:
            self._publisher.publish(self._tap.take())
            self._publisher.close()
            self._publisher = None
        if self.grammars is not None:
            self.grammars.compiler.shutdown()
        self.executor.shutdown()
