"""Online latency and queue measurements from trace events."""

# Generated from nbs/lab/meter.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.events import EventReader
from minivllm.core.trace import Trace

__all__ = ["LogHistogram", "Meter"]

if TYPE_CHECKING:
    import pandas as pd


class LogHistogram:
    """Counts of positive numbers in bins of one per cent; numbers below a nanosecond count as zero."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a number so many times."""
        i = round(math.log(value) * 100) if value > 1e-9 else -(1 << 30)
        self.counts[i] = self.counts.get(i, 0) + times
        self.total += times
        self.sum += value * times

    @property
    def mean(self) -> float:
        """Exact mean; nan if nothing was counted."""
        return self.sum / self.total if self.total else math.nan

    def quantile(self, q: float) -> float:
        """The value below which a share `q` of the numbers lies, to within one per cent; nan if nothing was counted."""
        wanted, seen = q * self.total, 0
        for i in sorted(self.counts):
            seen += self.counts[i]
            if seen >= wanted:
                return math.exp(i / 100) if i > -(1 << 30) else 0.0
        return math.nan


_FLOATS = ("arrival", "scheduled", "first_token", "last_token", "finished")
_WHOLES = ("priority", "num_prompt_tokens", "max_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions")
_REASONS = ("", "stop", "length", "abort", "error")


class Meter(EventReader):
    """Takes events, keeps measurements: `scheduler.subscribe(meter.feed)`, or `Meter.of(trace)`.

    Attributes:
        gaps: the distribution of inter-token latencies.
        num_steps: steps begun.
        num_tokens: tokens computed.
        num_preemptions: how often a request lost its blocks.
        start, end: first and last moment seen, in seconds on the engine's clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gaps = LogHistogram()
        self.num_steps = self.num_tokens = self.num_preemptions = 0
        self.start: float | None = None
        self.end = 0.0
        self._ids: list[str] = []
        self._users: list[str | None] = []
        self._reasons = array("b")
        self._floats = {name: array("d") for name in _FLOATS}
        self._wholes = {name: array("q") for name in _WHOLES}
        self._alive: dict[str, int] = {}

    @classmethod
    def of(cls, trace: Trace) -> Meter:
        """What a recorded trace says. Requests that were under way when it began have no arrival and no queue time."""
        meter = cls()
        for request_id, state in trace.start.requests.items():
            meter._open(
                request_id, math.nan, 0, state.num_prompt_tokens, -1, None, state.num_tokens - state.num_prompt_tokens
            )
        meter.feed_all(trace.events)
        return meter

    def __len__(self) -> int:
        """Requests seen."""
        return len(self._ids)

    def _open(
        self, name: str, arrival: float, priority: int, prompt: int, most: int, user: str | None, outputs: int
    ) -> None:
        self._alive[name] = len(self._ids)
        self._ids.append(name)
        self._users.append(user)
        self._reasons.append(0)
        for column, value in zip(self._floats.values(), (arrival, math.nan, math.nan, math.nan, math.nan), strict=True):
            column.append(value)
        for numbers, number in zip(self._wholes.values(), (priority, prompt, most, outputs, 0, 0), strict=True):
            numbers.append(number)

    def _on_add(
        self, request: str, num_prompt: int, max_tokens: int, arrival: float, priority: int, user: Any,
        prompt: Any, output: Any, number: int,
    ) -> None:  # fmt: skip
        self._open(request, arrival, priority, num_prompt, max_tokens, user, len(output))

    def _on_step(self, step: int, time: float) -> None:
        self.num_steps += 1
        self.end = time
        if self.start is None:
            self.start = time

    def _on_admit(self, name: str, computed: int, cached: int) -> None:
        i = self._alive[name]
        self._wholes["num_cached_tokens"][i] = cached
        if math.isnan(self._floats["scheduled"][i]):
            self._floats["scheduled"][i] = self.end

    def _on_preempt(self, name: str, *rest: Any) -> None:
        self.num_preemptions += 1
        self._wholes["num_preemptions"][self._alive[name]] += 1

    def _on_schedule(self, scheduled: dict[str, int]) -> None:
        self.num_tokens += sum(scheduled.values())

    def _on_update(self, time: float, gained: dict[str, tuple[int, ...]], step: int | None = None) -> None:
        self.end = time
        alive, last, first, outputs = (
            self._alive,
            self._floats["last_token"],
            self._floats["first_token"],
            self._wholes["num_output_tokens"],
        )
        since: dict[float, int] = {}
        for name, tokens in gained.items():
            i = alive[name]
            before = last[i]
            if before >= 0:  # nan is not
                since[before] = since.get(before, 0) + 1
            else:
                first[i] = time
            last[i] = time
            outputs[i] += len(tokens)
            if len(tokens) > 1:
                since[time] = since.get(time, 0) + len(tokens) - 1
        for before, times in since.items():
            self.gaps.add(time - before, times)

    def _on_finish(self, name: str, reason: str, stop_reason: Any) -> None:
        i = self._alive.pop(name)
        self._floats["finished"][i] = self.end
        self._reasons[i] = _REASONS.index(reason)

    def to_pandas(self) -> pd.DataFrame:
        """One row per request, in order of arrival; times in seconds, nan where something has not happened (yet)."""
        import pandas as pd

        f = {name: np.array(column) for name, column in self._floats.items()}
        w = {name: np.array(column) for name, column in self._wholes.items()}
        most: Any = w["max_tokens"]
        if (most < 0).any():
            most = np.where(most < 0, np.nan, most)
        reasons = np.array([None, *_REASONS[1:]], dtype=object)[np.array(self._reasons)]
        gaps = np.where(w["num_output_tokens"] > 1, w["num_output_tokens"] - 1, np.nan)
        return pd.DataFrame(
            {
                "request_id": self._ids,
                "user": self._users,
                "priority": w["priority"],
                "arrival": f["arrival"],
                "num_prompt_tokens": w["num_prompt_tokens"],
                "max_tokens": most,
                "num_output_tokens": w["num_output_tokens"],
                "num_cached_tokens": w["num_cached_tokens"],
                "scheduled": f["scheduled"],
                "first_token": f["first_token"],
                "finished": f["finished"],
                "finish_reason": reasons,
                "num_preemptions": w["num_preemptions"],
                "queue_time": f["scheduled"] - f["arrival"],
                "ttft": f["first_token"] - f["arrival"],
                "tpot": (f["finished"] - f["first_token"]) / gaps,
                "e2e": f["finished"] - f["arrival"],
            }
        )
