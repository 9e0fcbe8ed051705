"""EngineCore: the loop of schedule, execute, update over token ids."""

# Generated from nbs/engine/core.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from minivllm.core.config import EngineConfig
from minivllm.core.kv_connector import make_connector
from minivllm.core.kv_events import KVEventTap
from minivllm.core.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.core.policy import Policy
from minivllm.core.request import FinishReason, Request
from minivllm.core.scheduler import Clock, Preemption, Recompute, Scheduler, Swap, WallClock
from minivllm.core.trace import Trace
from minivllm.core.trace_files import TraceWriter
from minivllm.engine.kv_publisher import KVEventPublisher
from minivllm.sampling.grammar import GrammarCompiler, PendingGrammar
from minivllm.sampling.params import StructuredOutputsParams

if TYPE_CHECKING:  # so that the engine core can be used where there is no torch
    from minivllm.runtime.executor import Executor, PendingStep
    from minivllm.runtime.weights import Function, Weights


logger = logging.getLogger("minivllm.engine")
SEND_STEPS = 500  # how long `sleep`, `load_weights` and `reset_prefix_cache` wait for sends; an idle step takes 10 ms


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
        self.executor, self.grammar, self.clock = executor, grammar, clock or WallClock()
        self._remote = getattr(executor, "is_remote", False)
        self._in_step = getattr(executor, "in_step", False)
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            config.kv_cache,
            policy=policy,
            preemption=preemption,
            clock=self.clock,
            connector=make_connector(config),
        )
        self.scheduler.waits_for_tokens = config.args.pipeline_parallel_size > 1
        if config.speculative is not None:  # all counters are there from the start
            self.scheduler.spec_stats.num_accepted_tokens_per_pos = [0] * config.speculative.num_speculative_tokens
        self._compiling = GrammarQueue(grammar)
        self._adapters: dict[str, Future[Any]] = {}  # done when an adapter is in main memory
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep]] = deque()
        self._outputs: list[EngineCoreOutput] = []  # what the next step returns
        self._recording: TraceWriter | None = None
        self._publisher: KVEventPublisher | None = None
        if config.args.kv_events_endpoint is not None:
            self._tap = KVEventTap(self.scheduler)
            self._publisher = KVEventPublisher(
                config.args.kv_events_endpoint, config.args.kv_events_replay_endpoint, config.args.kv_events_topic
            )
        self._device_drafts = 0
        if config.speculative is not None and config.speculative.drafts_on_device:
            self._device_drafts = config.speculative.num_speculative_tokens
        if config.async_scheduling:
            ahead = self.step_async if config.speculative is None else self.step_drafting
            self.step = ahead  # type: ignore[method-assign]
        self._stages = config.args.pipeline_parallel_size
        if self._stages > 1:
            self.step = self.step_pipelined  # type: ignore[method-assign]
        self.weight_version, self.asleep, self._awake_step = 0, dict[str, str](), self.step
        self._torn = ""  # why some weights are new and some old, if they are

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ValueError if its id is in use or it can never run; nothing has changed then."""
        if request.request_id in self._compiling.waiting or request.request_id in self.scheduler.requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        if self._torn:
            self._fail([request.request_id])
            return
        if self._remote and getattr(request.sampling_params, "logits_processors", None):
            raise ValueError(
                "logits_processors are functions, which cannot be handed to worker processes;"
                " they need distributed_executor_backend='uni'"
            )
        adapter = None if request.lora_name is None else self._adapters[request.lora_name]
        if getattr(request.sampling_params, "structured_outputs", None) is None and (
            adapter is None or (_is_read(adapter) and not self._in_step)
        ):
            self.scheduler.add_request(request)
        else:
            self._compiling.add(request, adapter)

    def prefetch_lora(self, key: str, path: str, digest: str) -> None:
        """Begin to read an adapter into main memory. Requests with it may be added now; they join the scheduler when it is there."""
        self._adapters[key] = self.executor.collective_rpc("prefetch_lora", args=(key, path, digest), non_block=True)

    def is_lora_read(self, key: str) -> bool:
        """Whether an adapter that `prefetch_lora` was called for is in main memory. Raises AdapterError if it cannot be read."""
        adapter = self._adapters[key]
        return adapter.done() and adapter.result() is not None

    def pin_lora(self, key: str) -> None:
        """Keep an adapter in its slot once it has one. Raises ValueError if too few slots would be left."""
        self.scheduler.adapters.pin(key)

    def unpin_lora(self, key: str) -> None:
        """Let an adapter be evicted again."""
        self.scheduler.adapters.pinned.discard(key)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests in any state; unknown ids are passed over. Returns those that were ended."""
        ids = list(request_ids)
        return self._compiling.remove(ids) + self.scheduler.finish_requests(ids, FinishReason.ABORT)

    def has_requests(self) -> bool:
        """Whether `step` has anything to do, even if only rows to drop. While the engine sleeps, requests wait."""
        if self.asleep:
            return bool(self._outputs)
        return self.scheduler.has_requests() or any((self._compiling.waiting, self._in_flight, self._outputs))

    def compile_grammar(self, params: StructuredOutputsParams) -> PendingGrammar:
        """Begin to compile a grammar, for a caller that waits for it before `add_request`. Raises ValueError if it cannot be one."""
        return self._compiling.compile(params)

    def watch(self, callback: Callable[[], None]) -> None:
        """Set a function to be called, in some thread, if the executor fails while it is idle."""
        self.executor.register_failure_callback(callback)

    def check_health(self) -> None:
        """Raises the error that the executor failed with, if it has failed."""
        self.executor.check_health()

    def fileno(self) -> int | None:
        """The number of a file that becomes readable when outputs have come; None here, because `step` makes the outputs."""
        return None

    def step(self) -> list[EngineCoreOutput]:
        """Run one step; returns what requests gained. Does nothing when there is nothing to do.

        Raises:
            PolicyError: a hook of the policy failed; no request is lost.
            Exception: whatever the executor raises; the requests of the step have ended then (see `_give_up`).
        """
        if self._compiling.waiting:
            self._admit_compiled()
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            try:
                result = self.executor.execute_model(scheduled)
            except BaseException:
                self._give_up(scheduled)
                raise
            self._update(scheduled, result)
        outputs, self._outputs = self._outputs, []
        return outputs

    def step_async(self) -> list[EngineCoreOutput]:
        """Begin one step, and return what requests gained in the one before, which ran meanwhile. Raises as `step`."""
        if self._compiling.waiting:
            self._admit_compiled()
        more = self.scheduler.has_requests()
        if more:
            self._submit(self.scheduler.schedule())
        if len(self._in_flight) > more:
            self._update(*self._wait())
        outputs, self._outputs = self._outputs, []
        return outputs

    def step_drafting(self) -> list[EngineCoreOutput]:
        """Like `step_async`, with draft tokens. What a step verifies is known when the one before has ended, so that is waited for first,
        unless the device makes the drafts.

        The step runs while the caller handles what requests gained in the one before.
        """
        if self._compiling.waiting:
            self._admit_compiled()
        ahead = self._num_drafts_ahead()
        if self._in_flight and not (ahead and self._in_flight[-1][0].drafts_on_device):
            self._update(*self._wait())
            ahead = self._num_drafts_ahead()
        if more := self.scheduler.has_requests():
            self.scheduler.drafts_ahead = ahead
            self._submit(self.scheduler.schedule())
        if len(self._in_flight) > more:
            self._update(*self._wait())
        outputs, self._outputs = self._outputs, []
        return outputs

    def _num_drafts_ahead(self) -> int:
        """Draft tokens of each request that the device makes for the next step; 0 if the host has to."""
        if not (self._device_drafts and self.scheduler.can_draft_ahead()):
            return 0
        return self._device_drafts if self.executor.can_draft_ahead(self.scheduler.trace is not None) else 0

    def step_pipelined(self) -> list[EngineCoreOutput]:
        """Begin one step. If then every pipeline stage has a step, or nothing more can run, wait for the oldest one. Raises as `step`.

        A request is in one step at a time, since its next token is not known earlier; only chunks of a prompt can be in several. So the requests form
        as many batches as there are stages (vLLM's batch queue).
        """
        if self._compiling.waiting:
            self._admit_compiled()
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._submit(scheduled)
            if scheduled.total_num_scheduled_tokens and len(self._in_flight) < self._stages:
                outputs, self._outputs = self._outputs, []
                return outputs
        if self._in_flight:
            self._update(*self._wait())
        outputs, self._outputs = self._outputs, []
        return outputs

    def _submit(self, scheduled: SchedulerOutput) -> None:
        try:
            self._in_flight.append((scheduled, self.executor.submit(scheduled)))
        except BaseException:
            self._give_up(scheduled)
            raise

    def _wait(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The oldest step in flight, and its result."""
        scheduled, pending = self._in_flight[0]
        try:
            result = pending.result()
        except BaseException:
            self._give_up()
            raise
        self._in_flight.popleft()
        return scheduled, result

    def _update(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        outputs = self.scheduler.update_from_output(scheduled, result)
        if self.weight_version:
            for output in outputs:
                output.weight_version = self.weight_version
        self._outputs += outputs
        if self._recording is not None and not self._recording.push():
            self._end_recording()
        if self._publisher is not None:
            self._publisher.publish(self._tap.take())

    def drain(self) -> None:
        """Wait for the steps in flight. What requests gained comes with the next `step`."""
        while self._in_flight:
            self._update(*self._wait())

    def _admit_compiled(self) -> None:
        """Let requests whose grammar and adapter are ready join the scheduler; those whose grammar or adapter is wrong end."""
        idle = not (self.scheduler.has_requests() or self._in_flight)
        ready, failed = self._compiling.take_ready(len(self._compiling.waiting) if self._in_step else int(idle))
        for request in ready:
            try:
                self.scheduler.add_request(request)
            except ValueError as error:  # a prompt that the cache can never hold; the other requests go on
                failed.append(EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=str(error)))
        self._outputs += failed

    def _give_up(self, *scheduled: SchedulerOutput) -> None:
        """After a step that was scheduled and not executed: end its requests and those of steps in flight, forget the prefix cache."""
        self.scheduler.abandon([*(before for before, _ in self._in_flight), *scheduled])
        self._in_flight.clear()

    @contextmanager
    def record(self, samples: bool = False, ranks: bool = False) -> Iterator[Trace]:
        """Record everything that the scheduler does within the block.

        ``samples``: also keep the logits of every sampled token (a row of the vocabulary each), for `LLM.explain`.
        ``ranks``: also note what each rank did: see `Trace.ranks`.

        Raises:
            RuntimeError: a recording is under way. ValueError: ``ranks``, and there is one rank in this process.
        """
        if ranks and not (self._remote or self._in_step):
            raise ValueError(
                "record(ranks=True) needs ranks: distributed_executor_backend='mp', 'ray' or 'external_launcher'"
            )
        if self.scheduler.is_recording:
            raise RuntimeError("this engine is recording already; leave the other record() block first")
        self.drain()
        trace = self.scheduler.record()
        self._note_weights()
        if samples:
            self.executor.keep_samples(trace.samples)
        if ranks:
            self.executor.collective_rpc("record_spans", args=(True,))
        try:
            yield trace
        finally:
            try:
                self.drain()
                if ranks:
                    spans = self.executor.collective_rpc("record_spans", args=(False,))
                    trace.ranks = on_one_clock(spans, getattr(self.clock, "start", 0.0))
            finally:
                self.scheduler.stop_recording()
                if samples:
                    self.executor.keep_samples(None)

    def record_to(self, path: str) -> None:
        """Record from now on, into a file, until `shutdown`. A full disk ends the recording; the log says so.

        Raises:
            RuntimeError: a recording is under way. ValueError, OSError: see `TraceWriter`.
        """
        if self.scheduler.is_recording:
            raise RuntimeError("this engine is recording already")
        self.drain()
        trace = self.scheduler.record()
        self._note_weights()
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

    def engine_of(self, request_id: str) -> int:
        """The number of the engine that has a request: always 0, except in a data-parallel core."""
        return 0

    def engine_stats(self) -> list[dict[str, float]]:
        """`get_stats` of each engine: one entry, except in a data-parallel core."""
        return [self.get_stats()]

    def get_stats(self) -> dict[str, float]:
        """Gauges of this moment and counters since the start; the names are those of vLLM's metrics."""
        scheduler = self.scheduler
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting) + len(scheduler.remote) + len(self._compiling.waiting),
            "kv_cache_usage_perc": scheduler.kv_cache_manager.block_pool.usage,
            "prefix_cache_queries": scheduler.kv_cache_manager.stats.query_tokens,
            "prefix_cache_hits": scheduler.kv_cache_manager.stats.hit_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "num_steps": scheduler.step,
            "weight_version": self.weight_version,
            **({} if scheduler.connector is None else scheduler.connector.gauges()),
            **scheduler.spec_stats.gauges(),
        }

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes.

        Args:
            reset_running_requests: preempt the requests that hold blocks; they compute all their tokens again.

        Returns:
            False, and nothing has changed, if requests hold blocks and `reset_running_requests` is off.
        """
        self.drain()
        if not self.scheduler.requests:
            self._finish_sends()
        done = self.scheduler.reset_prefix_cache(reset_running_requests)
        if self._publisher is not None:
            self._publisher.publish(self._tap.take())
        return done

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every rank's model runner, between two steps. See `Executor.collective_rpc`.

        Raises:
            ValueError: there is no such method, or it is one that the engine itself must know of.
            Exception: what the method raises.
        """
        if method in _ENGINES:
            raise ValueError(
                f"collective_rpc({method!r}) would go past the engine, which has {_ENGINES[method]}() for it"
            )
        return self._call_ranks(method, *args, timeout=timeout, **(kwargs or {}))

    def _call_ranks(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        self.drain()
        found: list[Any] = self.executor.collective_rpc(method, timeout, args, kwargs)
        return found

    def apply_model(self, function: Function) -> list[Any]:
        """Call a function with the model (a `Decoder`, or a rank's part of it) on each rank; returns the results.
        After changing weights with it, call `reset_prefix_cache`.

        Raises:
            ValueError: the ranks are other processes, and the function has no name there. What the function raises.
        """
        if not self._remote:
            return self._call_ranks("apply_model", function)
        from minivllm.runtime.weights import pack_function

        return self._call_ranks("apply_model", pack_function(function))

    def _check_idle(self, mode: str) -> None:
        """Wait for the steps in flight. Raises what is wrong with the mode, or that a KV connector still reads blocks."""
        if mode not in ("abort", "keep"):
            raise ValueError(f"mode must be 'abort' or 'keep' (what becomes of unfinished requests), got {mode!r}")
        self.drain()
        self._finish_sends()
        if self.scheduler.is_sending:
            raise RuntimeError("blocks are still being copied to elsewhere; try again")

    def _stop_requests(self, mode: str) -> None:
        """ "abort" all requests, or "keep" them: they compute all their tokens again. Forget the prefix cache."""
        self.reset_prefix_cache(reset_running_requests=True)  # first: a connector would keep blocks of those that end
        if mode == "abort":
            ended = self.abort([*self._compiling.waiting, *self.scheduler.requests])
            self._outputs += [EngineCoreOutput(request_id, [], FinishReason.ABORT) for request_id in ended]

    def check_sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Raises what `sleep` would, before anything has changed."""
        if level not in (1, 2):
            raise ValueError(f"sleep: level must be 1 (weights are kept) or 2 (weights are dropped), got {level!r}")
        if self.asleep:
            raise RuntimeError("sleep: the engine sleeps already")
        self._check_idle(mode)
        if self.scheduler.is_receiving:
            raise RuntimeError("sleep: blocks are still being filled by a KV connector; try again")
        self._call_ranks("check_sleep", level)

    def _finish_sends(self) -> None:
        """Step until a KV connector has sent the blocks of requests that have ended, `SEND_STEPS` times at most."""
        for _ in range(SEND_STEPS):
            if not self.scheduler.is_sending:
                return
            self._outputs = self.step()
            self.drain()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`. Requests that come meanwhile wait; no step runs.

        What stays in memory: draft layers and their cache, adapters, norms, and captured steps (until `wake_up`). If a rank fails,
        the others wake again; requests have ended, or wait, by then.

        Args:
            level: 1: the KV cache is dropped, and the weights of a GPU go to the host's memory. 2: the weights are dropped too, and
                `load_weights` must bring others (or the same) before a step can run.
            mode: what becomes of unfinished requests: see `load_weights`.

        Raises:
            ValueError: another level or mode, or at level 2 a model that can take no other weights. RuntimeError: the engine sleeps
                already, or a KV connector is still copying blocks.
        """
        self.check_sleep(level, mode)
        self._stop_requests(mode)
        self._set_asleep({"kv_cache": "wake_up()", "weights": "wake_up()" if level == 1 else "load_weights()"})
        try:
            self._call_ranks("sleep", level)
        except BaseException:
            self.wake_up()
            if all(self._call_ranks("has_weights")):
                self._set_asleep({})
            raise

    def _set_asleep(self, asleep: dict[str, str]) -> None:
        """asleep: {what is missing: the call that brings it back}. Steps run only while it is empty."""
        self.asleep = asleep
        self.step = self._step_asleep if asleep else self._awake_step  # type: ignore[method-assign]

    def _step_asleep(self) -> list[EngineCoreOutput]:
        """Outputs from before the engine fell asleep. Raises RuntimeError if there are none."""
        if not self._outputs:
            raise no_step(self.asleep)
        outputs, self._outputs = self._outputs, []
        return outputs

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: of the "weights", of the "kv_cache", or of both (None). Dropped weights come back only with `load_weights`.

        Raises:
            ValueError: another tag. RuntimeError: `load_weights` has failed half-way, and must be called again.
        """
        if wrong := [tag for tag in tags or () if tag not in ("weights", "kv_cache")]:
            raise ValueError(f"wake_up: tags are 'weights' and 'kv_cache', got {wrong[0]!r}")
        chosen = [tag for tag in self.asleep if tags is None or tag in tags]
        if chosen:
            self._call_ranks("wake_up", chosen)
        self._set_asleep({tag: call for tag, call in self.asleep.items() if tag not in chosen or call != "wake_up()"})
        if self._torn:
            raise RuntimeError(self._torn)

    def is_sleeping(self) -> bool:
        """Whether memory is missing, so that no step can run."""
        return bool(self.asleep)

    def missing(self) -> dict[str, str]:
        """{what is missing while no step can run: the call that brings it back}."""
        return dict(self.asleep)

    def check_load_weights(self, weights: str | None = None, mode: str = "keep") -> None:
        """Raises what `load_weights` would, before anything has changed. weights: a model or a folder, or None, as there."""
        self._check_idle(mode)
        self._call_ranks("check_weights", weights)

    def load_weights(self, weights: Weights = None, version: int | None = None, mode: str = "keep") -> int:
        """Change all weights between two steps. Prefix cache, captured steps and what KV connectors keep are void then.

        Adapters stay, and so do the weights of a draft model and of MTP and EAGLE heads: they are not loaded anew, and go on drafting
        for the new weights.

        Args:
            weights: a model as `EngineArgs.model` names one, a folder of safetensors, a dict or pairs of a name in the checkpoint and a
                tensor, or None for the checkpoint that the engine was made of.
            version: a number for them, not below the last one; None for the last one + 1. `RequestOutput.weight_version`, the metrics
                and traces have it.
            mode: unfinished requests end ("abort"), or go on ("keep"): they keep their tokens, compute their keys and values anew, and
                choose the next tokens by the new weights.

        Returns:
            The version.

        Raises:
            ValueError: another model, a tensor that is missing, unknown, of a wrong shape or dtype, or not finite, or a model that cannot
                take others: all tensors are read once to be checked, before one is changed. RuntimeError: changing them has failed
                half-way. Unfinished requests and new ones then end with an error, until a call of this method succeeds.
        """
        version = next_version(version, self.weight_version)
        from minivllm.runtime.weights import as_path, check_pairs

        weights = check_pairs(weights)
        if self._remote:
            with as_path(weights) as path:
                self._load_weights(path, mode)
        else:
            self._load_weights(weights, mode)
        self._set_asleep({tag: call for tag, call in self.asleep.items() if tag != "weights"})
        self.weight_version, self._torn = version, ""
        self._note_weights()
        return self.weight_version

    def _load_weights(self, weights: Weights, mode: str) -> None:
        self._check_idle(mode)
        self._call_ranks("check_weights", weights)
        self._stop_requests(mode)
        try:
            self._call_ranks("load_weights", weights)
        except BaseException as error:
            if all(self._call_ranks("has_weights")):
                raise
            self._torn = f"load_weights has failed half-way, and no step can run until it succeeds: {error!r}"
            self._set_asleep(self.asleep | {"weights": "load_weights()"})
            self._fail(self.abort([*self._compiling.waiting, *self.scheduler.requests]))
            raise RuntimeError(self._torn) from error

    def _fail(self, request_ids: Iterable[str]) -> None:
        """End requests that no step can run for."""
        ended = [EngineCoreOutput(name, [], FinishReason.ERROR, error=self._torn) for name in request_ids]
        self._outputs += ended

    def _note_weights(self) -> None:
        if self.weight_version and self.scheduler.trace is not None:
            self.scheduler.trace(("note", "weight_version", self.weight_version, "load_weights"))

    def shutdown(self) -> None:
        """Give the executor's memory back, send the last KV events, write the trace that `record_to` began."""
        self.drain()
        self._end_recording()
        if self._publisher is not None:
            self._publisher.publish(self._tap.take())
            self._publisher.close()
            self._publisher = None
        if self.grammar is not None:
            self.grammar.shutdown()
        if self.scheduler.connector is not None:
            try:
                self._call_ranks("shutdown_connector", timeout=10.0)
            except Exception as error:  # noqa: BLE001 - a rank has failed or ended
                logger.warning("KV connectors may have left something behind: %r", error)
        self.executor.shutdown()
        if self.scheduler.connector is not None:
            self.scheduler.connector.shutdown()


_ENGINES = {
    "sleep": "sleep",
    "wake_up": "wake_up",
    "load_weights": "load_weights",
    "execute_model": "step",
    "launch": "step",
}


def next_version(version: int | None, latest: int) -> int:
    """The version of new weights. Raises ValueError if it is no number, or below the last one."""
    if version is not None and (type(version) is not int or version < latest):
        raise ValueError(
            f"load_weights: version must be a number from {latest} on, that of the weights now; got {version!r}"
        )
    return latest + 1 if version is None else version


def no_step(missing: Mapping[str, str]) -> RuntimeError:
    """The error of a step that cannot run. missing: see `EngineCore.missing`."""
    needs = " and ".join(f"{tag} by {call}" for tag, call in missing.items())
    return RuntimeError(f"the engine sleeps, and no step can run: it needs {needs}")


def on_one_clock(
    spans: list[list[tuple[str, float, float, int]]], start: float
) -> list[tuple[int, str, float, float, int]]:
    """Spans of all ranks (see `Spans`), in order of time, and the gaps between two steps of a rank as ``idle``.

    ``start``: start of the engine's clock. Processes of one machine read the same clock; those of several need not agree.
    """
    found = []
    for rank, mine in enumerate(spans):
        steps = sorted((at, seconds) for name, at, seconds, _ in mine if name == "step")
        gaps = [("idle", at + seconds, then - at - seconds, 0) for (at, seconds), (then, _) in pairwise(steps)]
        found += [(rank, name, at - start, seconds, size) for name, at, seconds, size in (*mine, *gaps)]
    return sorted(found, key=lambda span: (span[2], -span[3]))


def _is_read(adapter: Future[Any]) -> bool:
    return adapter.done() and adapter.exception() is None


class GrammarQueue:
    """Requests whose grammar is being compiled, or whose adapter is being read.

    Args:
        compiler: None if the engine has no tokenizer.

    Attributes:
        waiting: {request id: request, and what it waits for}, in the order of arrival.
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self.compiler = compiler
        self.waiting: dict[str, tuple[Request, list[PendingGrammar | Future[Any]]]] = {}

    def compile(self, params: StructuredOutputsParams) -> PendingGrammar:
        """Begin to compile. Raises ValueError without a compiler, GrammarError for a grammar that is too large."""
        if self.compiler is None:
            raise ValueError("structured_outputs need a tokenizer, and this engine has none")
        return self.compiler.submit(params)

    def add(self, request: Request, adapter: Future[Any] | None = None) -> None:
        """Begin to compile the grammar that the request's parameters ask for, if they do. ``adapter``: a load to wait for as well."""
        pending: list[PendingGrammar | Future[Any]] = [] if adapter is None else [adapter]
        if (structure := getattr(request.sampling_params, "structured_outputs", None)) is not None:
            pending.append(self.compile(structure))
        self.waiting[request.request_id] = request, pending

    def remove(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests; returns those that were here."""
        return [request_id for request_id in request_ids if self.waiting.pop(request_id, None) is not None]

    def take_ready(self, wait: int) -> tuple[list[Request], list[EngineCoreOutput]]:
        """Requests that have what they wait for, in the order of arrival, and the last outputs of those that cannot get it.

        The first ``wait`` of them are waited for: one when there is nothing else to do, all if other processes must decide the same.
        """
        ready: list[Request] = []
        failed: list[EngineCoreOutput] = []
        for request_id, (request, pending) in list(self.waiting.items()):
            if wait <= 0 and not all(each.done() for each in pending):
                continue
            wait -= 1
            del self.waiting[request_id]
            try:
                for each in pending:
                    each.result()
                ready.append(request)
            except ValueError as error:  # GrammarError, AdapterError
                failed.append(EngineCoreOutput(request_id, [], FinishReason.ERROR, error=str(error)))
        return ready, failed
