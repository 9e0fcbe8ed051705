"""Clock protocol with a wall clock and a virtual clock."""

# Generated from nbs/core/clock.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math
import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells the time in seconds."""

    def now(self) -> float: ...


class WallClock:
    """Seconds since ``start`` on the machine's monotonic clock, which all its processes share; None: since the clock was made."""

    def __init__(self, start: float | None = None) -> None:
        self.start = time.perf_counter() if start is None else start

    def now(self) -> float:
        return time.perf_counter() - self.start


class VirtualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward. Raises ValueError for a step that is negative or not finite."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a clock can only go forward, by a finite time: advance({seconds})")
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Move to a moment, unless it has passed already."""
        self._now = max(self._now, moment)
