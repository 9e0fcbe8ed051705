"""Memory waste view: internal fragmentation with and without paging."""

# Generated from nbs/viz/waste.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minivllm.lab.metrics import OccupancyReader
from minivllm.viz.palette import LIGHT
from minivllm.viz.payload import Payload
from minivllm.viz.view import TraceSource, TraceView, counted, legend_above

__all__ = ["Waste"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMES = {
    "paged": "pages (this run)",
    "oracle": "one piece, length known",
    "power_of_two": "one piece, next power of two",
    "max_len": "one piece, max_model_len",
}


@dataclass(frozen=True, slots=True)
class WasteData:
    """Token slots per step, at its end: see `lab.metrics.Occupancy`.

    Attributes:
        stored: slots that the running requests would fill if they shared nothing. [num_steps]
        reserved: slots set aside by each of `SCHEMES`: those of the blocks in use, a shared one once; or of pieces, which share nothing.
            [4, num_steps]
        wasted: those of them that are empty. [4, num_steps]
        running: requests that run. [num_steps]
        empty: running requests by the number of empty slots in their last block. [num_steps, block_size]
        capacity: slots of the whole cache.
        longest: slots of one piece for the longest request allowed.
    """

    stored: npt.NDArray[np.int64]
    reserved: npt.NDArray[np.int64]
    wasted: npt.NDArray[np.int64]
    running: npt.NDArray[np.int64]
    empty: npt.NDArray[np.int64]
    capacity: int
    longest: int

    def share(self) -> npt.NDArray[np.float64]:
        """What part of the reserved slots is empty, per scheme and step; nan where nothing is reserved. [4, num_steps]"""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.wasted / self.reserved

    def mean_share(self) -> npt.NDArray[np.float64]:
        """The same over the steps with running requests; nan if there are none. [4]"""
        busy = self.running > 0
        return self.share()[:, busy].mean(axis=1) if busy.any() else np.full(len(SCHEMES), np.nan)


class WasteReader(OccupancyReader):
    """Notes occupancy, and the blocks that some request holds, after each step: `read(trace, reader)`, then `reader.data()`."""

    def begin(self) -> None:
        super().begin()
        self._used: list[int] = []

    def end_step(self) -> None:
        super().end_step()
        self._used.append(self.fold.num_used)

    def data(self) -> WasteData:
        """What was read."""
        n, size, groups = len(self._used), self.header.block_size, self.header.num_groups
        stored, running = np.zeros(n, np.int64), np.zeros(n, np.int64)
        reserved, empty = np.zeros((len(SCHEMES), n), np.int64), np.zeros((n, size), np.int64)
        wasted = np.zeros_like(reserved)
        for at in self.occupancies():
            stored[at.step], running[at.step] = at.stored, len(at.empty)
            reserved[:, at.step] = [at.reserved[name] for name in SCHEMES]
            wasted[:, at.step] = reserved[:, at.step] - at.stored
            empty[at.step] = np.bincount(np.clip(at.empty, 0, size - 1), minlength=size)
        reserved[0] = size * np.array(self._used, np.int64)
        capacity, longest = (self.header.num_blocks - 1) * size, groups * int(self.longest or 0)
        return WasteData(stored, reserved, wasted, running, empty, capacity, longest)


class Waste(TraceView):
    """Internal fragmentation at every step, and what reserving each request's memory in one piece would have lost.

    Args:
        trace: a trace, or the path of a saved one.
        max_model_len: the longest request for which one piece would have to be reserved; None for the recorded limit.
    """

    module = "waste"
    title = "Memory waste"
    figure_size = (8.0, 4.5)

    def __init__(self, trace: TraceSource, max_model_len: int | None = None) -> None:
        super().__init__(trace)
        if max_model_len is not None and max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, got {max_model_len}")
        self.max_model_len = max_model_len
        if self.problem is None and not (max_model_len or self.trace.header.settings.get("max_model_len")):
            self.problem = "The trace does not say how long a request may be: Waste(trace, max_model_len=...)."

    @cached_property
    def waste(self) -> WasteData:
        """What is drawn."""
        return self.reading.data()

    def make_reader(self) -> WasteReader:
        return WasteReader(self.max_model_len)

    def build(self) -> Payload:
        d, payload = self.waste, Payload({})
        mean = [None if np.isnan(share) else round(float(share), 6) for share in d.mean_share()]
        payload.header = self.header(
            schemes=list(SCHEMES.values()), capacity=d.capacity, longest=d.longest, blockSize=d.empty.shape[1], mean=mean,
            series=payload.add_numbers(np.diff(np.concatenate([d.stored[None], d.running[None], d.reserved, d.wasted]), axis=1, prepend=0)),
            empty=payload.add_numbers(np.diff(d.empty, axis=0, prepend=0)),
        )  # fmt: skip
        return payload

    def describe(self) -> str:
        d = self.waste
        if not d.running.any():
            return "No request was running at the end of any step, so no memory was held."
        paged, oracle, power, most = (f"{100 * share:.0f} %" for share in d.mean_share())
        text = f"Of the memory that pages set aside, {paged} was empty on average (at most one block per request is not full). "
        text += f"In one piece per request: {oracle} if its length were known, {power} with the next power of two, {most} with max_model_len. "
        fits = counted(d.capacity // d.longest, "request")
        return f"{text}Room for {fits} of max_model_len at a time; up to {d.running.max()} ran."

    def draw(self, axes: Axes) -> None:
        axes.set_axis_off()
        top, bottom = axes.inset_axes((0, 0.52, 1, 0.48)), axes.inset_axes((0, 0, 1, 0.44))
        draw_waste(top, bottom, self.waste)


_LINES = {
    "paged": ("prefill", "-", 2.0),
    "oracle": ("swapped", "--", 1.3),
    "power_of_two": ("preempted", "-.", 1.3),
    "max_len": ("ink", ":", 1.6),
}


def draw_waste(top: Axes, bottom: Axes, d: WasteData) -> None:
    """Above: slots, stored and empty, against the cache's size. Below: the empty share under each scheme."""
    x = np.arange(len(d.stored) + 1)
    full = d.reserved[0] - d.wasted[0]
    empty: dict[str, Any] = {"facecolor": "none", "edgecolor": LIGHT["preempted"], "hatch": "////", "linewidth": 0.4}
    top.stairs(full, x, fill=True, color=LIGHT["decode"], label="stored")
    top.stairs(d.reserved[0], x, baseline=full, fill=True, label="empty in pages", **empty)
    ceiling = max(d.capacity, min(int(d.reserved.max(initial=1)), int(2.5 * d.capacity)))
    for row, name in enumerate(SCHEMES):
        colour, style, width = _LINES[name]
        line: dict[str, Any] = {"baseline": None, "color": LIGHT[colour], "linestyle": style, "linewidth": width}
        if name != "paged":
            top.stairs(np.minimum(d.reserved[row], ceiling * 1.1), x, **line)
        bottom.stairs(100 * d.share()[row], x, label=SCHEMES[name], **line)
    if d.reserved.max(initial=0) > ceiling:
        words = f"off this scale: up to {d.reserved.max():,}"
        top.text(len(d.stored), ceiling, words, ha="right", va="top", fontsize=7.5, color=LIGHT["muted"])
    top.axhline(d.capacity, color=LIGHT["muted"], linewidth=0.8)
    top.text(0, d.capacity, " the whole cache", va="bottom", fontsize=7.5, color=LIGHT["muted"])
    top.set(ylabel="token slots", ylim=(0, ceiling * 1.04), xlim=(0, len(d.stored)))
    top.tick_params(labelbottom=False)
    bottom.set(ylabel="empty, %", ylim=(0, 100), xlim=(0, len(d.stored)), xlabel="step")
    for ax in (top, bottom):
        ax.spines[["top", "right"]].set_visible(False)
    handles = [*top.get_legend_handles_labels()[0], *bottom.get_legend_handles_labels()[0]]
    legend_above(top, 3, handles=handles)
