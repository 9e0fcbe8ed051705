"""Dashboard view of a running engine."""

# Generated from nbs/viz/dashboard.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from minivllm.viz.monitor import EngineMonitor, Sample
from minivllm.viz.palette import LIGHT
from minivllm.viz.payload import Payload
from minivllm.viz.view import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Dashboard(View):
    """An engine, live: requests running and waiting, tokens a second, step time, KV blocks in use, prefix cache hits.

    ``engine``: an `LLM`, `LLMEngine` or `AsyncLLM`, stepped in any thread. It is looked at from a separate thread, never inside a
    step, from the first display (or `start`, or `with`) until `stop` or until the engine is closed. ``rate``: looks a second. ``keep``:
    samples that are remembered. ``source``: for a page that a server shows, the path where it asks for `new_samples`.

    Attributes:
        monitor: the samples; ``monitor.to_pandas()`` gives them as a table.

    Raises:
        TypeError: not an engine. ValueError: a rate or a length out of range.
    """

    module: ClassVar[str] = "dashboard"
    title = "Engine"
    wide = True
    figure_size = (7.0, 3.0)

    def __init__(self, engine: Any, rate: float = 20.0, keep: int = 1200, source: str | None = None) -> None:
        self.source = source
        self.monitor = EngineMonitor(
            engine, rate, keep, lambda sample: self._send(samples=[_row(sample)]), lambda why: self._send(ended=why)
        )

    def start(self) -> Self:
        """Begin to look. Twice is no error."""
        self.monitor.start()
        return self

    def stop(self) -> None:
        """Look no more. Twice is no error; what was seen stays."""
        self.monitor.stop()

    @cached_property
    def widget(self) -> Any:
        """The live widget (anywidget). Raises ImportError if anywidget is not installed."""
        made = View.widget.func(self)  # type: ignore[attr-defined]
        made.on_msg(self._answer)
        return made

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def build(self) -> Payload:
        payload = Payload({"fields": list(Sample._fields), "source": self.source})
        payload.header["samples"] = payload.add_json([_row(sample) for sample in self.monitor.samples.copy()])
        return payload

    def data(self) -> Payload:
        """Header and data as of now: unlike other views, this one changes."""
        self.__dict__.pop("_payload", None)
        return self._payload

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if not self.monitor.ended:
            self.start()
        return View._repr_mimebundle_(self, include, exclude)

    def _send(self, **message: Any) -> None:
        if (widget := self.__dict__.get("widget")) is not None:
            widget.send(message)

    def _answer(self, widget: Any, content: dict[str, Any], buffers: Any) -> None:
        widget.send(self.new_samples(int(content.get("more", -1))))

    def describe(self) -> str:
        if not self.monitor.samples:
            return "Nothing was seen yet."
        now = self.monitor.samples[-1]
        lines = [
            f"after {now.time:.1f} s: {now.running} running, {now.waiting} waiting, {now.tokens_per_second:.0f} tokens/s",
            f"KV blocks in use: {now.kv_usage:.1%}, steps: {now.steps}, preemptions: {now.preemptions}",
        ]
        if now.step_seconds is not None:
            lines.append(f"time from step to step: {now.step_seconds * 1000:.1f} ms")
        if now.hit_rate is not None:
            lines.append(f"prompt tokens found in the prefix cache: {now.hit_rate:.1%}")
        return "\n".join(lines)

    def draw(self, axes: Axes) -> None:
        """Requests running and waiting, and the share of KV blocks in use, over time."""
        table = self.monitor.to_pandas()
        axes.plot(table.time, table.running, color=LIGHT["owner-0"], label="running")
        axes.plot(table.time, table.waiting, color=LIGHT["owner-1"], label="waiting", linestyle="--")
        axes.set(xlabel="seconds", ylabel="requests", ylim=(0, None))
        share = axes.twinx()
        share.plot(table.time, 100 * table.kv_usage, color=LIGHT["owner-4"], label="KV blocks in use", linestyle=":")
        share.set(ylabel="% of KV blocks", ylim=(0, 100))
        lines = [*axes.get_lines(), *share.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="upper left", fontsize="small")
        for one in (axes, share):
            one.spines["top"].set_visible(False)

    def new_samples(self, after: int) -> dict[str, Any]:
        """What a page asks a server for with `?after=NUMBER`: the samples after that one, and why no more will come, or None."""
        return {"samples": [_row(sample) for sample in self.monitor.since(after)], "ended": self.monitor.ended}


def _row(sample: Sample) -> list[float | None]:
    return [value if value is None else round(value, 6) for value in sample]
