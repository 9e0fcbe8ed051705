"""Online latency and queue measurements from trace events."""

# Generated from nbs/lab/meter.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
from typing import Any

from minivllm.core.trace_tables import RequestTable


class LogHistogram:
    """Counts of positive numbers in bins of one per cent; numbers below a nanosecond count as zero."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a number this many times."""
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


class Meter(RequestTable):
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

    def _on_step(self, step: int, time: float) -> None:
        super()._on_step(step, time)
        self.num_steps += 1

    def _on_preempt(self, name: str, *rest: Any) -> None:
        super()._on_preempt(name)
        self.num_preemptions += 1

    def _on_schedule(self, scheduled: dict[str, int]) -> None:
        self.num_tokens += sum(scheduled.values())

    def _on_update(self, time: float, gained: dict[str, tuple[int, ...]], step: int | None = None) -> None:
        alive, last = self._alive, self._times["last_token"]
        since: dict[float, int] = {}
        for name, tokens in gained.items():
            before = last[alive[name]]
            if before >= 0:  # nan is not
                since[before] = since.get(before, 0) + 1
            if len(tokens) > 1:
                since[time] = since.get(time, 0) + len(tokens) - 1
        for before, times in since.items():
            self.gaps.add(time - before, times)
        super()._on_update(time, gained, step)
