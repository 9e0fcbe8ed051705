"""Timeline view: requests by steps, with prefill, decode, waiting and preemption."""

# Generated from nbs/viz/timeline.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.viz.palette import LIGHT
from minivllm.viz.payload import Payload
from minivllm.viz.timeline_data import (
    DECODE,
    FINISHES,
    PREEMPTED,
    PREFILL,
    STALLED,
    SWAPPED,
    WAITING,
    TimelineData,
    timeline_data,
)
from minivllm.viz.view import TraceSource, TraceView

__all__ = ["Timeline", "describe_lanes", "draw_lanes", "pack_lanes", "plot_timeline"]


# %% nbs/viz/timeline.ipynb #code-d50b26
if TYPE_CHECKING:
    from matplotlib.axes import Axes


# %% nbs/viz/timeline.ipynb #pack_lanes
def pack_lanes(payload: Payload, data: TimelineData) -> dict[str, Any]:
    """Add the parts that the page's `readLanes` reads; returns their description for the header."""
    before = np.where(np.diff(data.request, prepend=-1) == 0, np.concatenate([[0], data.end[:-1]]), 0)
    prefill = data.kind == PREFILL
    time, unit = np.concatenate([np.diff(data.time), data.step_end - data.time[:-1]]), 1e-6
    while len(time) and time.max() > unit * 2e9:
        unit *= 10
    strips = np.stack([data.prefill_tokens, data.decode_tokens, data.running, data.waiting])
    parts: dict[str, np.ndarray] = {
        "spans": np.concatenate([np.bincount(data.request, minlength=len(data.request_ids)), data.start - before,
                                 data.end - data.start, data.kind + 8 * data.reason.astype(np.int32)]),
        "chunks": np.concatenate([data.tokens[prefill], data.wanted[prefill] - data.tokens[prefill]]),
        "requests": np.concatenate([data.prompt, data.output, data.finish, data.finish_kind]),
        "preemptions": _columns(data.preemptions),
        "admissions": _columns(data.admissions),
        "waits": _columns(data.waits),
        "time": np.rint(time / unit),
        "strips": np.diff(strips, prepend=0, axis=1),
    }  # fmt: skip
    return {
        "steps": data.num_steps, "requests": len(data.request_ids), "start": float(data.time[0]), "unit": unit, "budget": data.budget,
        "policy": data.policy, "reasons": data.reasons, "ids": payload.add_json(data.request_ids),
        "parts": {name: payload.add_numbers(numbers) for name, numbers in parts.items()},
    }  # fmt: skip


def _columns(rows: np.ndarray) -> np.ndarray:
    """Rows of events one column after the other, the first (the step) as differences."""
    columns = rows.T.copy()
    columns[0] = np.diff(columns[0], prepend=0)
    return columns


# %% nbs/viz/timeline.ipynb #Timeline
class Timeline(TraceView):
    """Requests by steps (or by seconds): prefill chunks, decodes, waiting and why, preemptions, ends; tokens and queues beneath.

    Args:
        trace: a trace, or the path of a saved one.
    """

    module = "timeline"
    title = "Timeline"
    wide = True
    figure_size = (9.0, 5.0)

    def __init__(self, trace: TraceSource) -> None:
        super().__init__(trace)

    @cached_property
    def lanes(self) -> TimelineData:
        """What is drawn: every request's spans."""
        return timeline_data(self.trace)

    def refresh(self) -> None:
        self.__dict__.pop("lanes", None)
        super().refresh()

    def build(self) -> Payload:
        payload = Payload({})
        payload.header = self.header(lanes=pack_lanes(payload, self.lanes))
        return payload

    def describe(self) -> str:
        return describe_lanes(self.lanes)

    def draw(self, axes: Axes) -> None:
        d = self.lanes
        axes.set_axis_off()
        main, tokens, queue = (axes.inset_axes((0, y, 1, h)) for y, h in ((0.42, 0.58), (0.21, 0.17), (0, 0.17)))
        draw_lanes(main, d)
        _draw_tokens(tokens, d)
        _draw_queue(queue, d)
        for ax in (main, tokens):
            ax.tick_params(labelbottom=False)
        for ax in (main, tokens, queue):
            ax.set_xlim(0, d.num_steps)
            ax.spines[["top", "right"]].set_visible(False)
        queue.set_xlabel("step")


# %% nbs/viz/timeline.ipynb #describe_lanes
def describe_lanes(d: TimelineData) -> str:
    """A run in a few sentences."""
    n = len(d.request_ids)
    ends = [
        f"{count} {name}"
        for name, count in zip(FINISHES, np.bincount(d.finish_kind, minlength=len(FINISHES)), strict=True)
        if count and name != "unfinished"
    ]
    unfinished = int(np.sum(d.finish_kind == 0))
    text = (
        f"{_count(n, 'request')} in {_count(d.num_steps, 'step')}, {d.time[-1] - d.time[0]:.3g} s, under {d.policy}. "
    )
    text += f"Ended: {', '.join(ends) or 'none'}{f'; {unfinished} still under way' if unfinished else ''}. "
    if len(d.preemptions):
        text += (
            f"{_count(len(d.preemptions), 'preemption')} of {_count(len(np.unique(d.preemptions[:, 1])), 'request')}. "
        )
    waited = np.bincount(d.request, weights=np.where(d.kind <= SWAPPED, d.end - d.start, 0), minlength=n)
    if n and waited.max() > 0:
        longest = int(np.argmax(waited))
        text += f"{d.request_ids[longest]} waited longest, {_count(int(waited[longest]), 'step')}. "
    total = d.prefill_tokens + d.decode_tokens
    busiest = int(np.argmax(total))
    limit = f" of {d.budget}" if d.budget else ""
    return text + f"Fullest step: {busiest}, with {total[busiest]}{limit} tokens. Most in the queue: {d.waiting.max()}."


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' * (n != 1)}"


# %% nbs/viz/timeline.ipynb #draw_lanes
# Height of a bar and hatching: kinds are told apart without colour too.
_STYLE: dict[int, tuple[str, float, dict[str, Any]]] = {
    WAITING: ("waiting", 0.12, {}),
    PREEMPTED: ("preempted", 0.7, {"hatch": "/////", "fill": False}),
    SWAPPED: ("swapped", 0.7, {"hatch": "----", "fill": False}),
    STALLED: ("decode", 0.42, {"fill": False}),
    PREFILL: ("prefill", 0.86, {}),
    DECODE: ("decode", 0.42, {}),
}
_NAMES = {
    WAITING: "waiting",
    PREEMPTED: "preempted",
    SWAPPED: "swapped out",
    STALLED: "running, no tokens",
    PREFILL: "prefill chunk",
    DECODE: "decode",
}
_MARKS = {"stop": "o", "length": "s", "abort": "x", "error": "^"}


def draw_lanes(ax: Axes, d: TimelineData) -> None:
    """One row per request, first come on top."""
    from matplotlib.collections import PolyCollection

    rows = max(1, len(d.request_ids))
    crowded = rows > 150
    for kind, (colour, height, style) in _STYLE.items():
        mine = d.kind == kind
        if not mine.any():
            continue
        tall = 1.0 if crowded else height
        x0, x1, y = d.start[mine], d.end[mine], d.request[mine] + 0.5
        corners = np.stack(
            [np.stack([x0, x1, x1, x0], 1), np.stack([y - tall / 2, y - tall / 2, y + tall / 2, y + tall / 2], 1)], 2
        )
        plain = {} if crowded else style
        face = "none" if plain.get("fill") is False else LIGHT[colour]
        edge = LIGHT["panel"] if kind == PREFILL and not crowded else LIGHT[colour] if face == "none" else "none"
        ax.add_collection(
            PolyCollection(
                list(corners),
                facecolors=face,
                edgecolors=edge,
                linewidths=0.6,
                hatch=plain.get("hatch"),
                label=_NAMES[kind],
            )
        )
    if not crowded:
        for name, mark in _MARKS.items():
            mine = d.finish_kind == FINISHES.index(name)
            if mine.any():
                ax.scatter(
                    d.finish[mine] + 1,
                    np.flatnonzero(mine) + 0.5,
                    s=14,
                    marker=mark,
                    color=LIGHT["finished"],
                    label=name,
                    zorder=3,
                    linewidths=1,
                )
    ax.set_ylim(rows, 0)
    ax.set_xlim(0, d.num_steps)
    if rows <= 30:
        names = [f"{name[:23]}…" if len(name) > 24 else name for name in d.request_ids]
        fits = min(8.3, 150 / rows)  # points, in the height of the view's own figure
        ax.set_yticks(np.arange(rows) + 0.5, names, fontsize=fits, parse_math=False)
        ax.tick_params(axis="y", length=0)
    else:
        ax.set_ylabel("request")
    if not ax.get_legend_handles_labels()[0]:
        return
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=5,
        fontsize="small",
        frameon=False,
        handlelength=1.6,
        columnspacing=1.4,
        borderaxespad=0.2,
    )


def _draw_tokens(ax: Axes, d: TimelineData) -> None:
    x = np.arange(d.num_steps + 1)
    total = d.prefill_tokens + d.decode_tokens
    ax.stairs(total, x, fill=True, color=LIGHT["decode"])
    ax.stairs(d.prefill_tokens, x, fill=True, color=LIGHT["prefill"])
    if d.budget and d.budget <= 4 * total.max():
        ax.axhline(d.budget, color=LIGHT["muted"], linewidth=0.8, linestyle="--")
    ax.set_ylabel("tokens", fontsize="small")
    ax.set_ylim(bottom=0)


def _draw_queue(ax: Axes, d: TimelineData) -> None:
    x = np.arange(d.num_steps + 1)
    ax.stairs(d.running, x, color=LIGHT["decode"], linewidth=1.4, label="running", baseline=None)
    ax.stairs(d.waiting, x, color=LIGHT["muted"], linewidth=1.4, linestyle=":", label="waiting", baseline=None)
    ax.set_ylabel("requests", fontsize="small")
    ax.set_ylim(bottom=0)
    ax.legend(loc="upper right", fontsize="x-small", frameon=False, ncols=2)


def plot_timeline(trace: TraceSource, ax: Axes | None = None) -> Axes:
    """Draw the timeline of a trace with matplotlib; returns the axes."""
    return Timeline(trace).plot(ax)
