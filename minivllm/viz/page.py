"""Page of several views of a trace that share one cursor."""

# Generated from nbs/viz/page.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.viz.block_map import BlockMap
from minivllm.viz.compare import Compare
from minivllm.viz.payload import Payload
from minivllm.viz.prefix_tree import PrefixTree
from minivllm.viz.timeline import Timeline
from minivllm.viz.view import TraceSource, View, new_figure, open_trace, read_together
from minivllm.viz.waste import Waste

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Page(View):
    """Several views, one player. Views of the same trace move together.

    Args:
        views: in the order in which they stand on the page; a page among them stands for its views.
        title: heading of the page, and of the file that `save` writes.

    Raises:
        ValueError: no view was given. TypeError: something that is not a view.
    """

    module = "mount"
    page_heading = True

    def __init__(self, views: View | Sequence[View], title: str = "minivllm") -> None:
        given = [views] if isinstance(views, View) else list(views)
        if not given:
            raise ValueError("a page needs at least one view")
        for view in given:
            if not isinstance(view, View):
                raise TypeError(f"a page shows views, got {type(view).__name__}")
        self.views: list[View] = [one for view in given for one in (view.views if isinstance(view, Page) else [view])]
        self.title = title

    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(["mount", *(name for view in self.views for name in view.modules())]))

    def build(self) -> Payload:
        read_together(self.views)
        whole, headers, offset = Payload({}), [], 0
        for view in self.views:
            part = view.data()
            headers.append(part.full_header(offset))
            offset += len(part.bytes())
            whole.extend(part)
        traces = [header["trace"] for header in headers if header.get("trace")]
        # The one whose cursor moves all the others: the only trace, or a comparison of all that are shown.
        keys = {trace["key"] for trace in traces}
        leading = (t for t in traces if keys <= {t["key"], *(other["key"] for other in t.get("of", ()))})
        whole.header = {"views": headers, "trace": next(leading, None)}
        return whole

    def describe(self) -> str:
        return "\n\n".join(view.summary() for view in self.views)

    def refresh(self) -> None:
        for view in self.views:
            view.refresh()
        View.refresh(self)

    def plot(self, ax: Axes | None = None) -> Axes:
        raise TypeError("a page has several axes: figure() and to_png() draw it, and each view has its own plot()")

    def figure(self) -> Figure:
        """The views that can be drawn, one below the other."""
        shown = [view for view in self.views if view.problem is None]
        if not shown:
            raise ValueError("; ".join(str(view.problem) for view in self.views))
        heights = [view.figure_size[1] for view in shown]
        figure = new_figure((max(view.figure_size[0] for view in shown), sum(heights)))
        rows = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False)
        for axes, view in zip(rows[:, 0], shown, strict=True):
            view.plot(axes)
        return figure


def show(trace: TraceSource, tokenizer: Any = None, title: str | None = None, other: TraceSource | None = None) -> View:
    """The standard page of a trace, or of a saved one: every view of this package that shows a single trace.

    Args:
        other: another run of the same requests: it is compared with this one at the top of the page, on the same cursor.
        tokenizer: anything with `decode(token_ids)`; with one, blocks show their tokens as text. None takes the one that the trace was
            recorded with, if it is still here.
        title: heading; None names the file, or the policy.
    """
    opened, problem = open_trace(trace)
    if title is None:
        run = f"A run of {opened.num_steps} steps, policy {opened.header.policy}"
        title = Path(trace).name if isinstance(trace, str | Path) else run
        if other is not None:
            title += f" and {Path(other).name if isinstance(other, str | Path) else 'another run'}"
    if problem:
        return Message(title, problem)
    views: list[View] = [kind(opened, tokenizer) for kind in (BlockMap, Timeline, PrefixTree)]
    views.append(Waste(opened))
    if other is not None:
        named = isinstance(trace, str | Path) and isinstance(other, str | Path)
        views.insert(0, Compare(opened, other, names=(str(trace), str(other)) if named else None))
    return Page(views, title)


class Message(View):
    """Words in place of views that cannot be shown."""

    module = "mount"

    def __init__(self, title: str, problem: str) -> None:
        self.title, self.problem = title, problem
