"""Compare view: two runs side by side with their first difference."""

# Generated from nbs/viz/compare.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.lab.comparison import Difference, first_difference, names_in_a
from minivllm.lab.simulation import Run, trace_of
from minivllm.viz.palette import LIGHT
from minivllm.viz.payload import Payload
from minivllm.viz.timeline import Timeline, describe_lanes, draw_lanes, pack_lanes
from minivllm.viz.timeline_data import TimelineData
from minivllm.viz.view import TraceSource, View, most_eventful, open_trace, trace_key

__all__ = ["Compare"]

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _numbered(ids: list[str]) -> list[tuple[str, int]]:
    """Ids with how often they came before: an id may be used again after its request has ended."""
    seen: Counter[str] = Counter()
    keys = []
    for name in ids:
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys


def aligned(a: TimelineData, b: TimelineData, names: dict[str, str] | None = None) -> tuple[TimelineData, TimelineData]:
    """Two runs with the same request in the same row: those of a in a's order, then those that only b has.

    Args:
        names: what the requests of b are called in a, where that differs.
    """
    mine, theirs = _numbered(a.request_ids), _numbered([(names or {}).get(name, name) for name in b.request_ids])
    rows = {key: row for row, key in enumerate(dict.fromkeys([*mine, *theirs]))}
    ids = [name for name, _ in rows]
    return _on_rows(a, ids, [rows[key] for key in mine]), _on_rows(b, ids, [rows[key] for key in theirs])


def _on_rows(d: TimelineData, ids: list[str], row_of: list[int]) -> TimelineData:
    rows, n = np.array(row_of, np.int32), len(ids)

    def spread(values: np.ndarray, fill: int) -> Any:
        out = np.full(n, fill, values.dtype)
        out[rows] = values
        return out

    def renamed(table: np.ndarray, *columns: int) -> Any:
        table = table.copy()
        for column in columns:
            table[:, column] = rows[table[:, column]] if len(table) else 0
        return table

    request = rows[d.request] if len(rows) else d.request
    order = np.lexsort((d.start, request))
    spans = {name: getattr(d, name)[order] for name in ("start", "end", "kind", "tokens", "wanted", "reason")}
    return replace(
        d, request_ids=ids, prompt=spread(d.prompt, 0), output=spread(d.output, 0), finish=spread(d.finish, d.num_steps),
        finish_kind=spread(d.finish_kind, 0), request=request[order], preemptions=renamed(d.preemptions, 1, 2),
        admissions=renamed(d.admissions, 1), waits=renamed(d.waits, 1), **spans,
    )  # fmt: skip


class Compare(View):
    """Two runs of the same requests side by side on one cursor, with the first step in which they decided differently, and both reasons.

    Args:
        trace_a, trace_b: traces, paths of saved ones, or recorded runs of `lab.simulate`.
        names: what to call the two.
        match: "id" for equal request ids, "order" for the order in which they were added.

    Raises:
        ValueError: no such way to match, a run that was not recorded, or different numbers of requests under match="order".
    """

    module = "compare"
    title = "Two runs"
    wide = True
    figure_size = (9.0, 6.0)

    def __init__(
        self, trace_a: TraceSource | Run, trace_b: TraceSource | Run, *,
        names: tuple[str, str] | None = None, match: str = "id",
    ) -> None:  # fmt: skip
        names_in_a((), (), match)  # refuses another word now, not when it is drawn
        self.sources, self.match = tuple(trace_of(x) if isinstance(x, Run) else x for x in (trace_a, trace_b)), match
        (self.a, problem_a), (self.b, problem_b) = (open_trace(source) for source in self.sources)
        different = self.a.header.policy != self.b.header.policy
        policies = (f"a: {self.a.header.policy}", f"b: {self.b.header.policy}") if different else ("a", "b")
        self.names = tuple(names) if names else policies
        if len(self.names) != 2:
            raise ValueError(f"names must be two, got {len(self.names)}")
        problems = zip(self.names, (problem_a, problem_b), strict=True)
        self.problem = " ".join(f"{name}: {problem}" for name, problem in problems if problem) or None

    @cached_property
    def runs(self) -> tuple[TimelineData, TimelineData]:
        """Both runs, each request in the same row."""
        return aligned(Timeline(self.a).lanes, Timeline(self.b).lanes, self._renamed)

    @cached_property
    def _renamed(self) -> dict[str, str]:
        return names_in_a(self.a.names(), self.b.names(), self.match)

    @cached_property
    def difference(self) -> Difference | None:
        """The first step in which the runs decided differently; None if they never did."""
        return first_difference(self.a, self.b, self._renamed)

    def refresh(self) -> None:
        (self.a, _), (self.b, _) = (open_trace(source) for source in self.sources)
        View.refresh(self)

    def build(self) -> Payload:
        payload, (a, b), first = Payload({}), self.runs, self.difference
        key = hashlib.sha256(f"{trace_key(self.a)} {trace_key(self.b)}".encode()).hexdigest()[:16]
        payload.header = {
            "trace": {"key": key, "steps": max(a.num_steps, b.num_steps), "open": first.step if first else most_eventful(self.a), "of": [{"key": trace_key(t), "steps": t.num_steps} for t in (self.a, self.b)]},
            "names": list(self.names),
            "lanes": [pack_lanes(payload, a), pack_lanes(payload, b)],
            "difference": first and {
                "step": first.step, "over": [first.a is None, first.b is None], "reasons": [[name, *both] for name, both in first.reasons.items()],
                "orders": [list(d.scheduled) if d else [] for d in (first.a, first.b)] if not first.reasons else None,
            },
        }  # fmt: skip
        return payload

    def describe(self) -> str:
        told = [f"{name}. {describe_lanes(run)}" for name, run in zip(self.names, self.runs, strict=True)]
        return "\n".join([*told, str(self.difference or "All decisions are the same.")])

    def draw(self, axes: Axes) -> None:
        axes.set_axis_off()
        steps = max(run.num_steps for run in self.runs)
        for run, name, bottom in zip(self.runs, self.names, (0.56, 0.0), strict=True):
            ax = axes.inset_axes((0, bottom, 1, 0.42))
            draw_lanes(ax, run)
            ax.set_xlim(0, steps)
            ax.spines[["top", "right"]].set_visible(False)
            ax.text(1.0, 1.02, name, transform=ax.transAxes, ha="right", va="bottom", weight="bold", parse_math=False)
            if self.difference is not None:
                ax.axvline(self.difference.step, color=LIGHT["warning"], linewidth=1.2)
                if bottom:
                    ax.annotate(f"first difference: step {self.difference.step}", (self.difference.step, 0), xytext=(4, -2), textcoords="offset points", va="top", fontsize="small", color=LIGHT["warning"],
                                xycoords=("data", "data"))  # fmt: skip
        ax.set_xlabel("step")
