"""Trace as pandas tables: steps, requests, blocks, tokens, decisions."""

# Generated from nbs/core/trace_tables.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from minivllm.core.events import FoldReader, Recording, read

__all__ = ["tables"]

if TYPE_CHECKING:
    import pandas as pd

_STEP = ["step", "start", "end", "num_tokens", "num_prefill_tokens", "num_decodes", "num_running", "num_waiting",
         "used_blocks", "cached_blocks", "free_blocks", "num_preempted", "num_finished"]  # fmt: skip
_REQUEST = ["request_id", "user", "priority", "arrival", "num_prompt_tokens", "max_tokens", "num_output_tokens", "num_cached_tokens",
            "scheduled", "first_token", "finished", "finish_reason", "num_preemptions"]  # fmt: skip
_BLOCK = ["step", "time", "event", "block_id", "request_id", "group", "position", "hash"]
_TOKEN = ["request_id", "position", "token_id", "step", "time"]
_DECISION = ["step", "request_id", "decision", "num_tokens", "wanted", "reason"]


class _Collector(FoldReader):
    """Turns events into rows."""

    def begin(self) -> None:
        self.number, self.time = -1, 0.0
        self.steps: list[dict[str, Any]] = []
        self.blocks: list[tuple[Any, ...]] = []
        self.tokens: list[tuple[Any, ...]] = []
        self.decisions: list[tuple[Any, ...]] = []
        self.requests: dict[str, dict[str, Any]] = {}
        for request_id, state in self.fold.now.requests.items():
            output = state.num_tokens - state.num_prompt_tokens
            self._open(request_id, None, 0, float("nan"), state.num_prompt_tokens, None, output)

    def _open(self, *values: Any) -> None:
        self.requests[values[0]] = dict(zip(_REQUEST, (*values, 0, None, None, None, None, 0), strict=True))

    def end_step(self) -> None:
        state, free, cached = self.fold.now, len(self.fold.free_blocks), self.fold.num_cached_free
        self.steps[-1].update(
            num_running=len(state.running), num_waiting=len(state.waiting), used_blocks=self.fold.num_used,
            cached_blocks=cached, free_blocks=free - cached,
        )  # fmt: skip

    def _on_step(self, step: int, time: float) -> None:
        self.number, self.time = step, time
        self.steps.append(dict.fromkeys(_STEP, 0) | {"step": step, "start": time, "end": None})

    def _on_add(
        self, request: str, num_prompt: int, max_tokens: int, arrival: float, priority: int, user: Any,
        prompt: Any, output: Any, number: int,
    ) -> None:  # fmt: skip
        self._open(request, user, priority, arrival, num_prompt, max_tokens, len(output))

    def _decide(self, request: str | None, decision: str, n: Any = None, wanted: Any = None, why: Any = None) -> None:
        self.decisions.append((self.number, request, decision, n, wanted, why))

    def _on_admit(self, request: str, num_computed: int, num_cached: int) -> None:
        row = self.requests[request]
        row["num_cached_tokens"] = num_cached
        row["scheduled"] = self.time if row["scheduled"] is None else row["scheduled"]
        self._decide(request, "admit")

    def _on_schedule(self, num_scheduled: dict[str, int]) -> None:
        row = self.steps[-1]
        for request, n in num_scheduled.items():
            state = self.fold.now.requests[request]
            decode = state.num_computed_tokens >= state.num_prompt_tokens and n == 1
            row["num_tokens"] += n
            row["num_decodes" if decode else "num_prefill_tokens"] += n
            self._decide(request, "decode" if decode else "prefill", n)

    def _on_chunk(self, request: str, num_tokens: int, wanted: int, reason: str) -> None:
        self._decide(request, "cut", num_tokens, wanted, reason)

    def _on_policy_error(self, message: str) -> None:
        self._decide(None, "policy error", why=message)

    def _on_wait(self, request: str, reason: str) -> None:
        self._decide(request, "wait", why=reason)

    def _on_preempt(self, request: str, mode: str, needed_by: str, chosen_by: str) -> None:
        self.requests[request]["num_preemptions"] += 1
        self.steps[-1]["num_preempted"] += 1
        self._decide(request, f"preempt ({mode})", why=f"request {needed_by} needed blocks; chosen by {chosen_by}")

    def _on_update(self, time: float, tokens: dict[str, tuple[int, ...]], step: int | None = None) -> None:
        self.time, step = time, self.number if step is None else step
        if (late := self.number - step) < len(self.steps):
            self.steps[-1 - late]["end"] = time
        for request, new in tokens.items():
            row = self.requests[request]
            row["first_token"] = time if row["first_token"] is None else row["first_token"]
            for token in new:
                self.tokens.append((request, row["num_prompt_tokens"] + row["num_output_tokens"], token, step, time))
                row["num_output_tokens"] += 1

    def _on_finish(self, request: str, reason: str, stop_reason: Any) -> None:
        self.requests[request].update(finished=self.time, finish_reason=reason)
        if self.steps:
            self.steps[-1]["num_finished"] += 1

    def _rows(self, event: str, blocks: Any, request: str, group: int, positions: Any) -> None:
        for position, block in zip(positions, blocks, strict=False):
            if block:
                name = self.fold.now.hashes[block]
                shown = name.hex() if name else None
                self.blocks.append((self.number, self.time, event, block, request, group, position, shown))

    def _on_alloc(self, request: str, group: int, blocks: tuple[int, ...], event: str = "allocated") -> None:
        self._rows(event, blocks, request, group, count(len(self.fold.now.requests[request].tables[group])))

    def _on_hit(self, request: str, group: int, blocks: tuple[int, ...]) -> None:
        self._on_alloc(request, group, blocks, "shared")

    def _on_cache(self, request: str, group: int, positions: Any, blocks: Any, hashes: Any) -> None:
        for position, block, name in zip(positions, blocks, hashes, strict=True):
            self.blocks.append((self.number, self.time, "cached", block, request, group, position, name.hex()))

    def _on_free(self, request: str, group: int, blocks: tuple[int, ...], event: str = "freed") -> None:
        where = {block: i for i, block in enumerate(self.fold.now.requests[request].tables[group])}
        self._rows(event, blocks, request, group, [where[block] for block in blocks])

    def _on_skip(self, request: str, group: int, start: int, end: int, blocks: tuple[int, ...]) -> None:
        self._on_free(request, group, blocks, "left by the window")

    def _on_evict(self, block: int, hash: bytes) -> None:
        self.blocks.append((self.number, self.time, "evicted", block, None, None, None, hash.hex()))


def tables(trace: Recording) -> dict[str, pd.DataFrame]:
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

    collector = _Collector()
    read(trace, collector)
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
