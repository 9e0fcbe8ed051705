"""Whose clock?

Why does the scheduler not simply ask what time it is?
"""

# Generated from nbs/core/clock.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=d814ff8e6102 module=b0dd42c71bea

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "VirtualClock", "WallClock"]


# %% nbs/core/clock.ipynb #Clock
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
        """Move forward. Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now += seconds

    def advance_to(self, moment: float) -> None:
        """Move to a moment, unless it has passed already."""
        self._now = max(self._now, moment)
