"""Trace as pandas tables: steps, requests, blocks, tokens, decisions."""

# Generated from nbs/core/trace_tables.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import math
from array import array
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from minivllm.core.events import EventReader, FoldReader, Recording, read

if TYPE_CHECKING:
    import pandas as pd

_TIMES = ("arrival", "scheduled", "first_token", "last_token", "finished")
_COUNTS = ("priority", "num_prompt_tokens", "max_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions")
_REQUEST = ["request_id", "user", "priority", "arrival", "num_prompt_tokens", "max_tokens", "num_output_tokens",
            "num_cached_tokens", "scheduled", "first_token", "finished", "finish_reason", "num_preemptions",
            "queue_time", "ttft", "tpot", "e2e"]  # fmt: skip


class RequestTable(EventReader):
    """Takes events, keeps one row of numbers per request.

    Attributes:
        start, end: first and last moment seen, in seconds on the engine's clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start: float | None = None
        self.end = 0.0
        self._texts: dict[str, list[str | None]] = {"request_id": [], "user": [], "finish_reason": []}
        self._times = {name: array("d") for name in _TIMES}
        self._counts = {name: array("q") for name in _COUNTS}
        self._alive: dict[str, int] = {}

    @classmethod
    def of(cls, trace: Recording) -> Self:
        """The table of a recording. Requests that were under way when it began have no arrival and no queue time."""
        table = cls()
        for name, state in trace.start.requests.items():
            prompt = state.num_prompt_tokens
            table._open(name, None, math.nan, 0, prompt, -1, state.num_tokens - prompt)
        for event in trace.events:
            table.feed(event)
        return table

    def __len__(self) -> int:
        """Requests seen."""
        return len(self._times["arrival"])

    def _open(self, name: str, user: str | None, arrival: float, *counts: int) -> None:
        """A new row. `counts`: priority, tokens of the prompt, most and present tokens of the answer."""
        self._alive[name] = len(self)
        for texts, text in zip(self._texts.values(), (name, user, None), strict=True):
            texts.append(text)
        for times, time in zip(self._times.values(), (arrival, *[math.nan] * 4), strict=True):
            times.append(time)
        for numbers, number in zip(self._counts.values(), (*counts, 0, 0), strict=True):
            numbers.append(number)

    def _on_add(
        self, request: str, num_prompt: int, max_tokens: int, arrival: float, priority: int, user: Any, *rest: Any
    ) -> None:
        self._open(request, user, arrival, priority, num_prompt, max_tokens, len(rest[1]))

    def _on_step(self, step: int, time: float) -> None:
        self.end = time
        self.start = time if self.start is None else self.start

    def _on_admit(self, name: str, computed: int, cached: int) -> None:
        i = self._alive[name]
        self._counts["num_cached_tokens"][i] = cached
        if math.isnan(self._times["scheduled"][i]):
            self._times["scheduled"][i] = self.end

    def _on_preempt(self, name: str, *rest: Any) -> None:
        self._counts["num_preemptions"][self._alive[name]] += 1

    def _on_update(self, time: float, gained: dict[str, tuple[int, ...]], step: int | None = None) -> None:
        self.end, alive, outputs = time, self._alive, self._counts["num_output_tokens"]
        last, first = self._times["last_token"], self._times["first_token"]
        for name, tokens in gained.items():
            i = alive[name]
            if not last[i] >= 0:  # nan is not
                first[i] = time
            last[i] = time
            outputs[i] += len(tokens)

    def _on_finish(self, name: str, reason: str, stop_reason: Any) -> None:
        i = self._alive.pop(name)
        self._times["finished"][i], self._texts["finish_reason"][i] = self.end, reason

    def to_pandas(self) -> pd.DataFrame:
        """One row per request, in order of arrival; times in seconds, nan where something has not happened (yet)."""
        import pandas as pd

        numbers = {name: np.array(column) for name, column in (self._times | self._counts).items()}
        table = pd.DataFrame({name: pd.Series(texts, dtype=object) for name, texts in self._texts.items()} | numbers)
        table["max_tokens"] = table["max_tokens"].where(table["max_tokens"] >= 0)  # -1: not known
        outputs = table["num_output_tokens"]
        table["queue_time"] = table["scheduled"] - table["arrival"]
        table["ttft"] = table["first_token"] - table["arrival"]
        table["tpot"] = (table["finished"] - table["first_token"]) / (outputs - 1).where(outputs > 1)
        table["e2e"] = table["finished"] - table["arrival"]
        return table[_REQUEST]


_STEP = ["step", "start", "end", "num_tokens", "num_prefill_tokens", "num_decodes", "num_running", "num_waiting",
         "used_blocks", "cached_blocks", "free_blocks", "num_preempted", "num_finished"]  # fmt: skip
_TABLES: dict[str, tuple[str, dict[str, Any]]] = {  # columns, and dtypes where a column may lack values
    "blocks": ("step time event block_id request_id group position hash", {"group": "Int64", "position": "Int64"}),
    "tokens": ("request_id position token_id step time", {}),
    "decisions": ("step request_id decision num_tokens wanted reason", {"num_tokens": "Int64", "wanted": "Int64"}),
    "routes": ("time request_id replica chosen num_requests num_tokens score reason", {"score": float}),
    "media": ("request_id modality first end num_embeds identifier encoded", {"encoded": "Int64"}),
    "experts": ("step layer expert num_tokens", {}),
    "spec_decode": (
        "request_id step position place token_id outcome target_prob draft_prob sampled_instead residual_prob",
        {"sampled_instead": "Int64", "target_prob": float, "draft_prob": float, "residual_prob": float},
    ),
}


class _Collector(FoldReader):
    """Turns events into rows."""

    def begin(self) -> None:
        self.number, self.time = -1, 0.0
        self.steps: list[dict[str, Any]] = []
        self.rows: dict[str, list[Any]] = {name: [] for name in _TABLES}
        self.blocks, self.tokens, self.decisions, self.routes, self.media, self.experts, self.drafts = (
            self.rows.values()
        )

    def end_step(self) -> None:
        state, free, cached = self.fold.now, len(self.fold.free_blocks), self.fold.num_cached_free
        self.steps[-1].update(
            num_running=len(state.running), num_waiting=len(state.waiting) + len(state.remote), used_blocks=self.fold.num_used,
            cached_blocks=cached, free_blocks=free - cached,
        )  # fmt: skip

    def _on_step(self, step: int, time: float) -> None:
        self.number, self.time = step, time
        self.steps.append(dict.fromkeys(_STEP, 0) | {"step": step, "start": time, "end": None})

    def _decide(self, request: str | None, decision: str, n: Any = None, wanted: Any = None, why: Any = None) -> None:
        self.decisions.append((self.number, request, decision, n, wanted, why))

    def _on_route(self, request: str, time: float, replica: int, candidates: Any, reason: str) -> None:
        for i, about in enumerate(candidates):
            self.routes.append((time, request, i, i == replica, *about, reason if i == replica else None))

    def _on_admit(self, request: str, num_computed: int, num_cached: int) -> None:
        self._decide(request, "admit")

    def _on_schedule(self, num_scheduled: dict[str, int]) -> None:
        row = self.steps[-1]
        for request, n in num_scheduled.items():
            state = self.fold.now.requests[request]
            behind = state.num_tokens - state.num_computed_tokens  # with draft tokens a decode has more than one token
            decode = state.num_computed_tokens >= state.num_prompt_tokens and (n == 1 or behind == 1)
            row["num_tokens"] += n
            row["num_decodes" if decode else "num_prefill_tokens"] += n
            self._decide(request, "decode" if decode else "prefill", n)

    def _on_chunk(self, request: str, num_tokens: int, wanted: int, reason: str) -> None:
        self._decide(request, "cut", num_tokens, wanted, reason)

    def _on_policy_error(self, message: str) -> None:
        self._decide(None, "policy error", why=message)

    def _on_wait(self, request: str, reason: str) -> None:
        self._decide(request, "wait", why=reason)

    def _on_kv_wait(self, request: str, num_external: int) -> None:
        self._decide(request, "wait", num_external, why="remote_kv")

    def _on_preempt(self, request: str, mode: str, needed_by: str, chosen_by: str) -> None:
        self.steps[-1]["num_preempted"] += 1
        self._decide(request, f"preempt ({mode})", why=f"request {needed_by} needed blocks; chosen by {chosen_by}")

    def _on_update(self, time: float, tokens: dict[str, tuple[int, ...]], step: int | None = None) -> None:
        self.time, step = time, self.number if step is None else step
        if (late := self.number - step) < len(self.steps):
            self.steps[-1 - late]["end"] = time
        for request, new in tokens.items():
            first = self.fold.now.requests[request].num_tokens
            self.tokens += [(request, position, token, step, time) for position, token in enumerate(new, first)]

    def _on_verify(self, drafts: dict[str, Any], step: int | None = None) -> None:
        step = self.number if step is None else step
        for request, (tokens, accepted, after, odds) in drafts.items():
            first = self.fold.now.requests[request].num_tokens
            for place, token in enumerate(tokens):
                reached = "rejected" if place == accepted and after is not None else "not reached"
                outcome = "accepted" if place < accepted else reached
                p, q, rest = odds[place] if place < len(odds) else (None, None, None)
                instead = after if outcome == "rejected" else None
                self.drafts.append((request, step, first + place, place, token, outcome, p, q, instead, rest))

    def _on_attributes(self, request: str, values: dict[str, Any]) -> None:
        for name, modality, _, first, length, mask, *_ in values.get("mm_features", ()):
            self.media.append([request, modality, first, first + length, sum(mask) if mask else length, name, None])

    def _on_encode(self, request: str, modality: str, identifier: str, num_embeds: int) -> None:
        for row in self.media:
            if row[0] == request and row[5] == identifier and row[6] is None:
                row[6] = self.number

    def _on_experts(self, step: int, loads: Any) -> None:
        for layer, counts in loads:
            self.experts += [(step, layer, expert, n) for expert, n in enumerate(counts)]

    def _on_finish(self, request: str, reason: str, stop_reason: Any) -> None:
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
        `steps`: one row per step. `start`, `end` and `duration` in seconds; tokens scheduled, by kind; queue lengths and
        block counts at the end of the step. `used_blocks` are held by requests, `cached_blocks` are free but hold
        reusable content.
        `requests`: one row per request. `queue_time` from arrival to its first schedule, `ttft` to its first token, `tpot`
        the mean time between tokens, `e2e` to its end, all in seconds.
        `blocks`: one row per event of a block. Integers that a row lacks are `<NA>`, here and in `decisions`.
        `tokens`: one row per sampled token.
        `decisions`: one row per decision about a request in a step, with the reason if it got less than it wanted.
        `routes`: for each request that a router sent here, one row per replica that it could have gone to: requests and prompt tokens there, the
        router's own `score` of it, and the reason in the row of the one that was `chosen`.
        `spec_decode`: one row per draft token that was verified: its `place` in the draft, and the `outcome`: `accepted`, `rejected`, or `not
        reached` after a rejected one. With samples in the trace also its probability for the target and for the proposer (1 if it gave
        none), and, where it was rejected, the probability of the token sampled instead in what the target had left.
        `media`: one row per picture, clip or run of embeddings of a request: its tokens `first` to `end` - 1 of the prompt, the embeddings
        among them, and the step in which they were `encoded` for it, `<NA>` if the encoder cache or the prefix cache had them.
        `experts`: one row per step, layer with experts, and expert: `num_tokens`, how many of the step's tokens went to it.
    """
    import pandas as pd

    collector = _Collector()
    read(trace, collector)
    steps = pd.DataFrame(collector.steps, columns=_STEP)
    steps["end"] = steps["end"].astype(float)
    steps.insert(3, "duration", steps["end"] - steps["start"])
    found = {"steps": steps, "requests": RequestTable.of(trace).to_pandas()}
    for name, (columns, dtypes) in _TABLES.items():
        found[name] = pd.DataFrame(collector.rows[name], columns=columns.split()).astype(dtypes)
    return found
