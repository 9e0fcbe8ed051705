"""Trace as pandas tables: steps, requests, blocks, tokens, decisions."""

# Generated from nbs/core/trace_tables.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm.core.trace import Added, EventReader, Fold, Trace

__all__ = ["tables"]


# %% nbs/core/trace_tables.ipynb #code-a65844
if TYPE_CHECKING:
    import pandas as pd


# %% nbs/core/trace_tables.ipynb #_Collector
_STEP = ["step", "start", "end", "num_tokens", "num_prefill_tokens", "num_decodes", "num_running", "num_waiting",
         "used_blocks", "cached_blocks", "free_blocks", "num_preempted", "num_finished"]  # fmt: skip
_REQUEST = ["request_id", "user", "priority", "arrival", "num_prompt_tokens", "max_tokens", "num_output_tokens", "num_cached_tokens",
            "scheduled", "first_token", "finished", "finish_reason", "num_preemptions"]  # fmt: skip
_BLOCK = ["step", "time", "event", "block_id", "request_id", "group", "position", "hash"]
_TOKEN = ["request_id", "position", "token_id", "step", "time"]
_DECISION = ["step", "request_id", "decision", "num_tokens", "wanted", "reason"]


class _Collector(EventReader):
    """Turns events into rows. One method per kind; kinds without rows are only folded."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.fold = Fold(trace.start)
        self.step, self.time = -1, 0.0
        self.steps: list[list[Any]] = []
        self.blocks: list[tuple[Any, ...]] = []
        self.tokens: list[tuple[Any, ...]] = []
        self.decisions: list[tuple[Any, ...]] = []
        self.requests: dict[str, dict[str, Any]] = {}
        for request_id, state in trace.start.requests.items():
            self._open(
                request_id,
                None,
                0,
                float("nan"),
                state.num_prompt_tokens,
                None,
                state.num_tokens - state.num_prompt_tokens,
            )

    def _open(
        self, request_id: str, user: Any, priority: int, arrival: float, prompt: int, most: Any, outputs: int
    ) -> None:
        values = (request_id, user, priority, arrival, prompt, most, outputs, 0, None, None, None, None, 0)
        self.requests[request_id] = dict(zip(_REQUEST, values, strict=True))

    def feed(self, event: tuple[Any, ...]) -> None:
        super().feed(event)
        self.fold.apply(event)

    def _on_step(self, step: int, time: float) -> None:
        self.close_step()
        self.step, self.time = step, time
        self.steps.append([step, time, None, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])

    def close_step(self) -> None:
        """Fill in what is known when a step has ended: the lengths of the queues and the use of the blocks."""
        if self.steps:
            state = self.fold.now
            free, cached = len(self.fold.free_blocks), self.fold.num_cached_free
            self.steps[-1][6:11] = [
                len(state.running),
                len(state.waiting),
                len(state.ref_cnt) - 1 - free,
                cached,
                free - cached,
            ]

    def _on_add(self, *fields: Any) -> None:
        new = Added(*fields)
        self._open(new.request, new.user, new.priority, new.arrival, new.num_prompt, new.max_tokens, len(new.output))

    def _on_admit(self, request: str, computed: int, cached: int) -> None:
        row = self.requests[request]
        row["num_cached_tokens"] = cached
        row["scheduled"] = self.time if row["scheduled"] is None else row["scheduled"]
        self.decisions.append((self.step, request, "admit", None, None, None))

    def _on_schedule(self, scheduled: dict[str, int]) -> None:
        row = self.steps[-1]
        for request, n in scheduled.items():
            state = self.fold.now.requests[request]
            decode = state.num_computed_tokens >= state.num_prompt_tokens and n == 1
            row[3] += n
            row[5 if decode else 4] += 1 if decode else n
            self.decisions.append((self.step, request, "decode" if decode else "prefill", n, None, None))

    def _on_chunk(self, request: str, n: int, wanted: int, reason: str) -> None:
        self.decisions.append((self.step, request, "cut", n, wanted, reason))

    def _on_policy_error(self, message: str) -> None:
        self.decisions.append((self.step, None, "policy error", None, None, message))

    def _on_wait(self, request: str, reason: str) -> None:
        self.decisions.append((self.step, request, "wait", None, None, reason))

    def _on_preempt(self, request: str, mode: str, needed_by: str, chosen_by: str) -> None:
        self.requests[request]["num_preemptions"] += 1
        self.steps[-1][11] += 1
        why = f"request {needed_by} needed blocks; chosen by {chosen_by}"
        self.decisions.append((self.step, request, f"preempt ({mode})", None, None, why))

    def _on_update(self, time: float, gained: dict[str, tuple[int, ...]], step: int | None = None) -> None:
        self.time, step = time, self.step if step is None else step
        if (late := self.step - step) < len(self.steps):
            self.steps[-1 - late][2] = time
        for request, new in gained.items():
            row = self.requests[request]
            row["first_token"] = time if row["first_token"] is None else row["first_token"]
            for token in new:
                self.tokens.append((request, row["num_prompt_tokens"] + row["num_output_tokens"], token, step, time))
                row["num_output_tokens"] += 1

    def _on_finish(self, request: str, reason: str, stop_reason: Any) -> None:
        row = self.requests[request]
        row["finished"], row["finish_reason"] = self.time, reason
        if self.steps:
            self.steps[-1][12] += 1

    def _block(
        self, event: str, block: int, request: str | None, group: int | None, position: int | None, name: bytes | None
    ) -> None:
        self.blocks.append((self.step, self.time, event, block, request, group, position, name.hex() if name else None))

    def _on_alloc(self, request: str, group: int, blocks: tuple[int, ...], event: str = "allocated") -> None:
        start = len(self.fold.now.requests[request].tables[group])
        for i, block in enumerate(blocks):
            if block:
                self._block(event, block, request, group, start + i, self.fold.now.hashes[block])

    def _on_hit(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self._on_alloc(request, group, blocks, "shared")

    def _on_cache(self, request: str, group: int, positions: Any, blocks: Any, names: Any) -> None:
        for position, block, name in zip(positions, blocks, names, strict=True):
            self._block("cached", block, request, group, position, name)

    def _on_free(self, request: str, group: int, blocks: tuple[int, ...], event: str = "freed") -> None:
        table = self.fold.now.requests[request].tables[group]
        where = {block: i for i, block in enumerate(table)}
        for block in blocks:
            self._block(event, block, request, group, where[block], self.fold.now.hashes[block])

    def _on_skip(self, request: str, group: int, start: int, end: int, blocks: tuple[int, ...]) -> None:
        self._on_free(request, group, blocks, "left by the window")

    def _on_evict(self, block: int, name: bytes) -> None:
        self._block("evicted", block, None, None, None, name)


# %% nbs/core/trace_tables.ipynb #tables
def tables(trace: Trace) -> dict[str, pd.DataFrame]:
    """All tables of a trace.

    Returns:
        `steps`: one row per step. `start`, `end` and `duration` in seconds; tokens scheduled, by kind; queue lengths and block counts
        at the end of the step. `used_blocks` are held by requests, `cached_blocks` are free but hold reusable content.
        `requests`: one row per request. `queue_time` from arrival to its first schedule, `ttft` to its first token, `tpot` the mean time
        between tokens, `e2e` to its end, all in seconds.
        `blocks`: one row per event of a block. Integers that a row lacks are `<NA>`, here and in `decisions`.
        `tokens`: one row per sampled token.
        `decisions`: one row per decision about a request in a step, with the reason where it got less than it wanted.
    """
    import pandas as pd

    collector = _Collector(trace)
    for event in trace.events:
        collector.feed(event)
    collector.close_step()
    steps = pd.DataFrame(collector.steps, columns=_STEP)
    steps["end"] = steps["end"].astype(float)
    steps.insert(3, "duration", steps["end"] - steps["start"])
    requests = pd.DataFrame(list(collector.requests.values()), columns=_REQUEST)
    for name in ("arrival", "scheduled", "first_token", "finished"):
        requests[name] = requests[name].astype(float)
    requests["queue_time"] = requests["scheduled"] - requests["arrival"]
    requests["ttft"] = requests["first_token"] - requests["arrival"]
    gaps = (requests["num_output_tokens"] - 1).where(requests["num_output_tokens"] > 1)
    requests["tpot"] = (requests["finished"] - requests["first_token"]) / gaps
    requests["e2e"] = requests["finished"] - requests["arrival"]
    blocks = pd.DataFrame(collector.blocks, columns=_BLOCK)
    decisions = pd.DataFrame(collector.decisions, columns=_DECISION)
    return {
        "steps": steps,
        "requests": requests,
        "blocks": blocks.astype({"group": "Int64", "position": "Int64"}),
        "tokens": pd.DataFrame(collector.tokens, columns=_TOKEN),
        "decisions": decisions.astype({"num_tokens": "Int64", "wanted": "Int64"}),
    }
