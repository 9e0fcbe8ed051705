"""Timeline view: requests by steps, with prefill, decode, waiting and preemption."""

# Generated from nbs/viz/timeline.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.viz.palette import DECODE_TINT, LIGHT, NUM_OWNER_COLOURS, owner_colour, tint
from minivllm.viz.payload import Payload
from minivllm.viz.timeline_data import FINISHES, PREFILL, REMOTE, TimelineData, TimelineReader
from minivllm.viz.view import TraceView, counted, legend_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        "drafts": _columns(data.drafts),
        "media": _columns(data.media),
        "loras": data.loras.T,
        "time": np.rint(time / unit),
        "strips": np.diff(strips, prepend=0, axis=1),
    }  # fmt: skip
    return {
        "steps": data.num_steps, "requests": len(data.request_ids), "start": float(data.time[0]), "unit": unit, "budget": data.budget,
        "policy": data.policy, "reasons": data.reasons, "adapters": [name.split("@")[0] for name in data.adapters], "ids": payload.add_json(data.request_ids),
        "names": payload.add_json([data.names.get(id, id) for id in data.request_ids]),
        "parts": {name: payload.add_numbers(numbers) for name, numbers in parts.items()},
        **({"routes": payload.add_json(data.routes)} if data.routes else {}),
    }  # fmt: skip


def _columns(rows: np.ndarray) -> np.ndarray:
    """Rows of events one column after the other, the first (the step) as differences."""
    columns = rows.T.copy()
    columns[0] = np.diff(columns[0], prepend=0)
    return columns


class Timeline(TraceView):
    """Requests by steps (or by seconds): prefill chunks, decodes, waiting and why, preemptions, ends; tokens and queues beneath."""

    module = "timeline"
    title = "Timeline"
    wide = True
    figure_size = (9.0, 5.0)
    reader = TimelineReader

    @cached_property
    def lanes(self) -> TimelineData:
        """What is drawn: every request's spans."""
        return self.reading.data(self.names)

    def build(self) -> Payload:
        payload = Payload({})
        payload.header = self.header(lanes=pack_lanes(payload, self.lanes))
        return payload

    def describe(self) -> str:
        return describe_lanes(self.lanes)

    def draw(self, axes: Axes) -> None:
        d = self.lanes
        axes.set_axis_off()
        strips = [_draw_tokens, _draw_queue, *([_draw_adapters] if len(d.loras) else [])]
        foot = 0.21 * len(strips)
        drawn = [axes.inset_axes((0, foot, 1, 1 - foot))]
        draw_lanes(drawn[0], d)
        for i, draw in enumerate(strips, 1):
            drawn.append(axes.inset_axes((0, foot - 0.21 * i, 1, 0.17)))
            draw(drawn[-1], d)
        for ax in drawn:
            ax.tick_params(labelbottom=ax is drawn[-1])
            ax.set_xlim(0, d.num_steps)
            ax.spines[["top", "right"]].set_visible(False)
        drawn[-1].set_xlabel("step")


def describe_lanes(d: TimelineData) -> str:
    """A run in a few sentences."""
    n, counts = len(d.request_ids), np.bincount(d.finish_kind, minlength=len(FINISHES))
    ends = ", ".join(f"{count} {name}" for name, count in zip(FINISHES[1:], counts[1:], strict=True) if count)
    open_ = f"; {counts[0]} still under way" if counts[0] else ""
    text = f"{counted(n, 'request')} in {counted(d.num_steps, 'step')}, {_seconds(d.time[-1] - d.time[0])}, under {d.policy}. "
    text += f"Ended: {ends or 'none'}{open_}. "
    if len(d.preemptions):
        text += f"{counted(len(d.preemptions), 'preemption')} of {counted(len(np.unique(d.preemptions[:, 1])), 'request')}. "
    if len(d.media):
        text += f"{counted(int(d.media[:, 2].sum()), 'token')} of media, {counted(int(d.media[:, 3].sum()), 'embedding')} encoded. "
    if len(d.loras):
        slots = counted(len(np.unique(d.loras[:, 0])), "slot")
        text += f"{counted(len(d.loras), 'load')} of {counted(len(d.adapters), 'adapter')} into {slots}. "
    waited = np.bincount(d.request, weights=np.where(d.kind <= REMOTE, d.end - d.start, 0), minlength=n)
    if n and waited.max() > 0:
        longest = d.request_ids[int(np.argmax(waited))]
        text += f"{d.names.get(longest, longest)} waited longest, {counted(int(waited.max()), 'step')}. "
    total = d.prefill_tokens + d.decode_tokens
    busiest = int(np.argmax(total))
    limit = f" of {d.budget}" if d.budget else ""
    return text + f"Fullest step: {busiest}, with {total[busiest]}{limit} tokens. Most in the queue: {d.waiting.max()}."


def _seconds(seconds: float) -> str:
    """A length of time as people write it: three digits, from microseconds to hours."""
    for least, name, size in ((3600, "h", 3600.0), (60, "min", 60.0), (1, "s", 1.0), (1e-3, "ms", 1e-3)):
        if seconds >= least:
            value = seconds / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"
    return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"


# For each of KINDS: height of a bar, how much is left of the request's colour, and the hatching of an empty bar: kinds
# are told apart without hue too.
_STYLE: tuple[tuple[str, float, float, str | None], ...] = (
    ("waiting", 0.12, 0.0, None), ("preempted", 0.7, 1.0, "/////"), ("swapped out", 0.7, 1.0, "----"),
    ("blocks on their way", 0.7, 1.0, "..."), ("running, no tokens", 0.42, 1.0, ""), ("prefill chunk", 0.86, 1.0, None), ("decode", 0.42, DECODE_TINT, None),
)  # fmt: skip
_MARKS = {"stop": "o", "length": "s", "abort": "x", "error": "^"}


def _draw_kind(ax: Axes, d: TimelineData, kind: int, crowded: bool) -> None:
    """The spans of one kind, each in its request's colour."""
    from matplotlib.collections import PolyCollection

    mine = d.kind == kind
    label, height, share, hatch = _STYLE[kind]
    tall, hatch = (1.0, None) if crowded else (height, hatch)
    x0, x1, y = d.start[mine], d.end[mine], d.request[mine] + 0.5
    low, high = y - tall / 2, y + tall / 2
    corners = np.stack([np.stack([x0, x1, x1, x0], 1), np.stack([low, low, high, high], 1)], 2)
    tints = [tint(owner_colour(n), share) if share else LIGHT["waiting"] for n in range(NUM_OWNER_COLOURS)]
    colours = [tints[n % NUM_OWNER_COLOURS] for n in d.request[mine]]
    colouring: dict[str, Any] = {"facecolors": colours, "edgecolors": "none"}
    if hatch is not None:
        colouring = {"facecolors": "none", "edgecolors": colours, "hatch": hatch or None}
    elif kind == PREFILL and not crowded:
        colouring["edgecolors"] = LIGHT["panel"]
    ax.add_collection(PolyCollection(list(corners), linewidths=0.6, label=label, **colouring))


def draw_lanes(ax: Axes, d: TimelineData) -> None:
    """One row per request in its own colour, first come on top."""
    rows = max(1, len(d.request_ids))
    crowded = rows > 150
    for kind in range(len(_STYLE)):
        if (d.kind == kind).any():
            _draw_kind(ax, d, kind, crowded)
    if len(d.drafts) and not crowded:
        step, request, verified, accepted = d.drafts.T
        at = {"y": request + 0.85, "height": 0.16, "left": step}
        ax.barh(width=0.9, color="none", edgecolor=LIGHT["muted"], linewidth=0.5, **at)
        ax.barh(width=0.9 * accepted / verified, color=LIGHT["decode"], label="drafts accepted", **at)
    if len(d.media) and not crowded:
        step, request, seen, encoded = d.media.T
        for some, face in ((seen > 0, LIGHT["panel"]), (encoded > 0, LIGHT["accent"])):
            label = "media tokens" if face == LIGHT["panel"] else "encoder runs"
            x, y = step[some] + 0.5, request[some] + (0.3 if face == LIGHT["panel"] else 0.7)
            ax.scatter(x, y, s=9, marker="D", c=face, edgecolors=LIGHT["ink"], linewidths=0.5, label=label, zorder=3)
    for name, mark in _MARKS.items():
        mine = d.finish_kind == FINISHES.index(name)
        if mine.any() and not crowded:
            x, y = d.finish[mine] + 1, np.flatnonzero(mine) + 0.5
            ax.scatter(x, y, s=14, marker=mark, color=LIGHT["finished"], label=name, zorder=3, linewidths=1)
    ax.set_ylim(rows, 0)
    ax.set_xlim(0, d.num_steps)
    if rows <= 30:
        called = [d.names.get(id, id) for id in d.request_ids]
        names = [f"{name[:23]}…" if len(name) > 24 else name for name in called]
        fits = min(8.3, 150 / rows)  # points, in the height of the view's own figure
        ax.set_yticks(np.arange(rows) + 0.5, names, fontsize=fits, parse_math=False)
        ax.tick_params(axis="y", length=0)
    else:
        ax.set_ylabel("request")
    if ax.get_legend_handles_labels()[0]:
        legend_above(ax, 5, handlelength=1.6, columnspacing=1.4)


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


def _draw_adapters(ax: Axes, d: TimelineData) -> None:
    """Which adapter lay in each slot."""
    slot, start, end, adapter = d.loras.T
    colours = [owner_colour(i) for i in adapter]
    ax.barh(slot, end - start, left=start, height=0.8, color=colours, edgecolor=LIGHT["panel"], linewidth=0.6)
    for x, y, wide, i in zip(start, slot, end - start, adapter, strict=True):
        if wide * 60 > d.num_steps * len(name := d.adapters[i].split("@")[0]):
            ax.text(x + wide / 2, y, name, ha="center", va="center", fontsize="x-small", parse_math=False)
    ax.set_ylim(slot.max() + 0.6, -0.6)
    ax.set_yticks([])
    ax.set_ylabel("adapters", fontsize="small")
