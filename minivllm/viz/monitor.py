"""Samples a running engine from a thread: rates, queue lengths, KV usage."""

# Generated from nbs/viz/monitor.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import threading
import time
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple, Self


class Sample(NamedTuple):
    """One look at an engine. Rates are over the last second.

    Attributes:
        number: counted from 0.
        time: seconds since the monitor started.
        running, waiting: requests.
        kv_usage: share of the KV blocks in use, 0 to 1.
        hit_rate: share of the prompt tokens that were found in the prefix cache, since the monitor started; None before any.
        tokens_per_second: generated tokens.
        step_seconds: from one step to the next, mean; None while no step ends.
        steps, preemptions: since the monitor started.
    """

    number: int
    time: float
    running: int
    waiting: int
    kv_usage: float
    hit_rate: float | None
    tokens_per_second: float
    step_seconds: float | None
    steps: int
    preemptions: int


# the engine's counters at one moment
_Counters = namedtuple("_Counters", "time busy steps tokens queries hits preemptions")


class _Window:
    """What changed within the last `seconds`, from counters that are added one look at a time. While an engine is busy, the window reaches back to
    the end of a step: a step that lasts longer than a second has a rate too.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self._looks: deque[tuple[_Counters, float]] = deque()  # with the busy seconds up to there

    def add(self, now: _Counters) -> None:
        last, busy = self._looks[-1] if self._looks else (now, 0.0)
        both = now.busy and last.busy
        self._looks.append((now, busy + (now.time - last.time if both else 0.0)))
        while len(self._looks) > 2 and self._looks[1][0].time <= now.time - self.seconds:
            if now.busy and self._looks[1][0].steps == now.steps > self._looks[0][0].steps:
                break
            self._looks.popleft()

    @property
    def tokens_per_second(self) -> float:
        (first, _), (last, _) = self._looks[0], self._looks[-1]
        return (last.tokens - first.tokens) / (last.time - first.time) if last.time > first.time else 0.0

    @property
    def step_seconds(self) -> float | None:
        (first, busy_before), (last, busy) = self._looks[0], self._looks[-1]
        steps = last.steps - first.steps
        return (busy - busy_before) / steps if steps > 0 and busy > busy_before else None


class EngineMonitor:
    """Looks at an engine many times a second, in a separate thread and never inside a step.

    ``engine``: an `LLM`, `LLMEngine` or `AsyncLLM`; it may be stepped in any thread. ``rate``: looks a second.
    ``keep``: how many samples are remembered. ``on_sample``: called in the monitor's thread with each new sample,
    ``on_end`` with the reason when it looks no more.

    Attributes:
        samples: the last ones, oldest first.
        ended: why it looks no more: "stopped", "the engine was closed" or an error; None while it looks, or before.

    Raises:
        TypeError: not an engine. ValueError: a rate or a length out of range.
    """

    def __init__(
        self, engine: Any, rate: float = 20.0, keep: int = 1200,
        on_sample: Callable[[Sample], None] = lambda sample: None, on_end: Callable[[str], None] = lambda why: None,
    ) -> None:  # fmt: skip
        if not 0 < rate <= 100:
            raise ValueError(f"rate must be in (0, 100] looks a second, got {rate}")
        if keep < 2:
            raise ValueError(f"keep must be at least 2 samples, got {keep}")
        self._engine = getattr(engine, "llm_engine", engine)
        if not hasattr(self._engine, "get_metrics"):
            raise TypeError(f"a monitor needs an LLM, LLMEngine or AsyncLLM, got {type(engine).__name__}")
        self.rate, self.on_sample, self.on_end = rate, on_sample, on_end
        self.samples: deque[Sample] = deque(maxlen=keep)
        self.ended: str | None = None
        self._window = _Window()
        self._first: _Counters | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether it looks."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Self:
        """Begin to look. Twice is no error; after `stop` it goes on."""
        if not self.running:
            self._stop.clear()
            self.ended = None
            self._thread = threading.Thread(target=self._run, name="minivllm-monitor", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Look no more; when this returns, no sample comes. Twice is no error."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not (self._stop.is_set() or getattr(self._engine, "_closed", False)):
                self.on_sample(self.look())
                due = max(due + 1 / self.rate, time.monotonic())
                if self._stop.wait(due - time.monotonic()):
                    self.on_sample(self.look())  # how it was at the end
            self.ended = "stopped" if self._stop.is_set() else "the engine was closed"
        except Exception as error:  # noqa: BLE001 - whatever it is: a monitor must not take the engine with it
            self.ended = f"{type(error).__name__}: {error}"
        self.on_end(self.ended)

    def look(self) -> Sample:
        """Look once, now, and remember the sample."""
        metrics = self._engine.get_metrics()
        running, waiting = int(metrics["num_requests_running"]), int(metrics["num_requests_waiting"])
        names = ("num_steps", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
        counts = [int(metrics[name]) for name in names]
        now = _Counters(time.monotonic(), running + waiting > 0, *counts)
        first = self._first = self._first or now
        self._window.add(now)
        queries = now.queries - first.queries
        hit_rate = (now.hits - first.hits) / queries if queries else None
        number = self.samples[-1].number + 1 if self.samples else 0
        sample = Sample(
            number, now.time - first.time, running, waiting, metrics["kv_cache_usage_perc"], hit_rate,
            self._window.tokens_per_second, self._window.step_seconds, now.steps - first.steps,
            now.preemptions - first.preemptions,
        )  # fmt: skip
        self.samples.append(sample)
        return sample

    def since(self, number: int) -> list[Sample]:
        """The remembered samples after the one with this number, oldest first."""
        return [sample for sample in self.samples.copy() if sample.number > number]

    def to_pandas(self) -> Any:
        """The remembered samples as a DataFrame, a row each."""
        import pandas as pd

        return pd.DataFrame(self.samples.copy(), columns=Sample._fields).set_index("number")
