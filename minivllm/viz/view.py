"""Base classes of views: notebook widget, HTML page, figure, text summary."""

# Generated from nbs/viz/view.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import base64
import hashlib
import io
import sys
import weakref
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from minivllm.core.events import TRACE_VERSION, Event, Fold, FoldReader, TraceHeader, read
from minivllm.core.trace import Trace
from minivllm.core.trace_files import TraceFileError
from minivllm.viz.assets import document, fragment, widget_module
from minivllm.viz.payload import Payload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TraceSource = Trace | str | Path
HTML_LIMIT = 2_000_000
MADE_UP = 1 << 24  # token ids from here on are made up by the lab: no vocabulary is that large


def open_trace(source: TraceSource) -> tuple[Trace, str | None]:
    """A trace, and a message if it cannot be shown: its file is broken or contradicts itself, it is of another version, nothing happened in it.

    Raises:
        FileNotFoundError: no such file.
        TypeError: neither a trace nor a path.
    """
    if isinstance(source, str | Path):
        try:
            name, source = Path(source).name, Trace.load(source)
        except TraceFileError as error:
            return Trace(TraceHeader()), str(error)
        if (fault := _contradiction(source)) is not None:
            return Trace(TraceHeader()), f"{name}: {fault}"
    if not isinstance(source, Trace):
        raise TypeError(f"a view shows a Trace or the path of a saved one, got {type(source).__name__}")
    if source.header.version != TRACE_VERSION:
        version = source.header.version
        return source, f"This is a trace of version {version}; this program shows version {TRACE_VERSION}."
    return source, None if source.num_steps else _why_empty(source)


def _contradiction(trace: Trace) -> str | None:
    """The first event that cannot follow from those before it."""
    if len(trace.start.ref_cnt) != trace.header.num_blocks:
        return f"the header tells of {trace.header.num_blocks} blocks, the state at the start of {len(trace.start.ref_cnt)}"
    fold = Fold(trace.start)
    for i, event in enumerate(trace.events):
        try:
            fold.apply(event)
        except (ValueError, LookupError, TypeError) as error:
            return f"event {i}, {str(event)[:100]}, contradicts those before it ({type(error).__name__}: {error})"
    return None


def _why_empty(trace: Trace) -> str:
    added = sum(event[0] == "add" for event in trace.events)
    ended = sum(event[0] == "finish" for event in trace.events)
    text = "Nothing happened while this trace was recorded"
    if added:
        what = f"{counted(added, 'request')} {'was' if added == 1 else 'were'} added"
        text = f"No step was run while this trace was recorded: {what}{f' and {ended} ended again' if ended else ''}"
    return f"{text}. Run the engine inside `with llm.record() as trace:`."


def trace_note(trace: Trace) -> str | None:
    """A remark for above a view: there is nothing to scrub, or no request ever ran."""
    notes = ["This trace has one step, so there is nothing to play."] if trace.num_steps == 1 else []
    if not any(event[0] == "schedule" for event in trace.events):
        aborted = sum(event[0] == "finish" and event[2] == "abort" for event in trace.events)
        notes.append(f"No request was given a token{f': {aborted} aborted before their turn' if aborted else ''}.")
    return " ".join(notes) or None


def trace_key(trace: Trace) -> str:
    """A name for a trace, the same for every view of it: made of its header, its length, and its first and last events."""
    ends = (trace.events[:50], trace.events[-50:]) if len(trace) > 100 else trace.events
    return hashlib.sha256(repr((trace.header, len(trace), ends)).encode()).hexdigest()[:16]


_EVENTFUL = {"preempt": 8, "evict": 4, "hit": 4, "admit": 2, "finish": 2, "chunk": 1, "alloc": 1}
_FULL = 6  # what a full pool weighs, in the same measure


class _EventfulSteps(FoldReader):
    """For each step the weight of the kinds of its events, and the blocks in use at its end."""

    def begin(self) -> None:
        self.kinds: list[int] = []
        self.used: list[int] = []
        self._seen: set[str] = set()

    def feed(self, event: Event) -> None:
        if event[0] == "step":  # what comes before the first step does not count
            self._seen.clear()
        self._seen.add(event[0])

    def end_step(self) -> None:
        self.kinds.append(sum(_EVENTFUL.get(kind, 0) for kind in self._seen))
        self.used.append(self.fold.num_used)
        self._seen.clear()


def most_eventful(trace: Trace) -> int:
    """The step to open a run at: the first one in which most kinds of things happen while much of the memory is in use."""
    known = trace.__dict__.get("_eventful")
    if known is None or known[0] != len(trace):
        reader = _EventfulSteps()
        read(trace, reader)
        most = max(reader.used, default=0) or 1
        scores = [kinds + _FULL * used / most for kinds, used in zip(reader.kinds, reader.used, strict=True)] or [0.0]
        known = trace.__dict__["_eventful"] = len(trace), scores.index(max(scores))
    return int(known[1])


class View:
    """One picture, in four forms: live in a notebook, a page without a kernel, a matplotlib figure, and words.

    A subclass names its ES module, and gives `build`, `describe` and `draw`. In a notebook a view shows itself.

    Attributes:
        module: name of the ES module in `static/` that draws it; its `render(card, data, context)` is called.
        title: heading.
        wide: takes the whole width of a page with several views.
        problem: a message that is shown in place of the view, or None.
    """

    module: ClassVar[str]
    title: str = ""
    wide: bool = False
    page_heading: ClassVar[bool] = False  # a saved page has a heading besides the view's own
    problem: str | None = None

    def build(self) -> Payload:
        """What travels to the page. The base class adds `module`, `title`, `wide` and `summary` to the header."""
        raise NotImplementedError(f"{type(self).__name__}.build")

    def describe(self) -> str:
        """What the picture shows, in words."""
        raise NotImplementedError(f"{type(self).__name__}.describe")

    def draw(self, axes: Axes) -> None:
        """Draw with matplotlib."""
        raise NotImplementedError(f"{type(self).__name__}.draw")

    figure_size: tuple[float, float] = (7.0, 3.5)  # inches

    @cached_property
    def _payload(self) -> Payload:
        payload = Payload({"problem": self.problem}) if self.problem else self.build()
        payload.header = {
            "module": self.module, "title": self.title, "wide": self.wide, **payload.header, "summary": self.summary(),
        }  # fmt: skip
        return payload

    @cached_property
    def _summary(self) -> str:
        return f"{self.title}\n{self.problem or self.describe()}"

    @cached_property
    def widget(self) -> Any:
        """The live widget (anywidget). Its traits `step`, `request` and `block` follow what the reader does, and can be set.

        Raises:
            ImportError: anywidget is not installed.
        """
        payload = self.data()
        step = (payload.header.get("trace") or {}).get("open", 0)
        return _widget_class(self.modules())(header=payload.json(), payload=payload.bytes(), step=step)

    def data(self) -> Payload:
        """Header and deflated parts, made once."""
        return self._payload

    def summary(self) -> str:
        """Plain text: the title, and what the picture shows or why there is none."""
        return self._summary

    def __repr__(self) -> str:
        return self.summary()

    def modules(self) -> tuple[str, ...]:
        """The ES modules that the page needs."""
        return (self.module,)

    def to_html(self, program: bool = True) -> str:
        """A self-contained piece of HTML. `program=False` leaves the modules out, for a page that has them from another piece further down."""
        return fragment(self.data(), self.modules(), self.summary(), program)

    def save(self, path: str | Path) -> Path:
        """Write one HTML file that needs neither a kernel nor a network; returns its path.

        Raises:
            ValueError: the name does not end in .html or .htm.
        """
        path = Path(path)
        if path.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"a view is saved as .html, got {path.name!r}; to_png() makes an image")
        path.write_text(document(self.title, self.to_html(), self.page_heading), encoding="utf-8")
        return path

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw with matplotlib, into `ax` or into a new figure of pyplot's; returns the axes.

        Raises:
            ValueError: there is nothing to draw.
        """
        if self.problem:
            raise ValueError(self.problem)
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.figure(figsize=self.figure_size, layout="constrained").add_subplot()
        self.draw(ax)
        return ax

    def figure(self) -> Figure:
        """The matplotlib figure of the view."""
        figure = new_figure(self.figure_size)
        self.plot(figure.add_subplot())
        return figure

    def to_png(self, path: str | Path | None = None, dpi: int = 150) -> bytes:
        """The figure as PNG; written to `path` too, if given.

        Raises:
            ValueError: the name does not end in .png, or there is nothing to draw.
        """
        if path is not None and Path(path).suffix.lower() != ".png":
            what = f"to_png writes a .png, got {Path(path).name!r}"
            raise ValueError(f"{what}; figure().savefig(...) writes other formats")
        image = as_png(self.figure(), dpi)
        if path is not None:
            Path(path).write_bytes(image)
        return image

    def refresh(self) -> None:
        """Build the data again, from what the trace holds now, and show it in the live widget."""
        for cls in type(self).__mro__:
            for name, value in vars(cls).items():
                if isinstance(value, cached_property) and name != "widget":
                    self.__dict__.pop(name, None)
        if "widget" in self.__dict__:
            payload = self.data()
            with self.widget.hold_sync():
                self.widget.payload = payload.bytes()
                self.widget.header = payload.json()

    def close(self) -> None:
        """Close the live widget and let go of the data. Shown again, the view makes both anew."""
        widget = self.__dict__.pop("widget", None)
        if widget is not None:
            widget.layout.close()
            widget.close()
        self.__dict__.pop("_payload", None)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        _close_last_run(self)
        bundle = {"text/plain": self.summary(), "text/html": self._html_for_notebook()}
        if self.problem is None:
            bundle["image/png"] = base64.b64encode(self.to_png(dpi=60)).decode()
        try:
            live = self.widget._repr_mimebundle_()
        except ImportError:  # a notebook without anywidget shows the page
            return bundle
        live = live[0] if isinstance(live, tuple) else live
        return {**(live or {}), **bundle}

    def _html_for_notebook(self) -> str:
        page = self.to_html()
        if len(page) <= HTML_LIMIT:
            return page
        small = Payload({"module": self.module, "title": self.title, "problem": (
            f"The view without a kernel takes {len(page) / 1e6:.1f} MB, too much for a notebook's output."
        ' Save it beside the notebook: view.save("view.html").')})  # fmt: skip
        return fragment(small, (), self.summary())


# By cell: the run of the cell that showed them, and the views.
_SHOWN: dict[str, tuple[str, list[weakref.ref[View]]]] = {}


def _close_last_run(view: View) -> None:
    """Close what the last run of this notebook cell showed. Front ends that do not name their cells keep all."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    request = getattr(shell, "parent_header", None) or {}
    cell, run = request.get("metadata", {}).get("cellId"), request.get("header", {}).get("msg_id", "")
    if cell is None:
        return
    if _SHOWN.get(cell, ("", []))[0] != run:
        for old in _SHOWN.pop(cell, ("", []))[1]:
            if (other := old()) is not None and other is not view:
                other.close()
        _SHOWN[cell] = (run, [])
    _SHOWN[cell][1].append(weakref.ref(view))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 block", "2,000 blocks"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure, its size in inches. In a notebook it shows itself; matplotlib's own do that only once pyplot is imported."""
    from matplotlib.figure import Figure as Plain

    class Figure(Plain):
        def _repr_png_(self) -> bytes:
            return as_png(self, self.dpi)

    return Figure(figsize=size, layout="constrained")


def legend_above(axes: Axes, columns: int, **more: Any) -> None:
    """A small legend above the axes, at their left."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize="small", frameon=False, borderaxespad=0.2, **more,
    )  # fmt: skip


def as_png(figure: Figure, dpi: float) -> bytes:
    """A matplotlib figure as the bytes of a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


@cache
def _widget_class(modules: tuple[str, ...]) -> Any:
    import anywidget
    import traitlets

    class ViewWidget(anywidget.AnyWidget):
        """A view on the page, and where its reader looks."""

        _esm = widget_module(*modules)
        header = traitlets.Unicode().tag(sync=True)
        payload = traitlets.Bytes().tag(sync=True)
        step = traitlets.Int(0).tag(sync=True)
        request = traitlets.Unicode("").tag(sync=True)
        block = traitlets.Int(-1).tag(sync=True)

    return ViewWidget


class TraceView(View):
    """A view of a trace, given as such or as the path of a saved one. All views of one trace on a page share the step, the request and the block.

    Args:
        trace: a trace, or the path of a saved one.
        tokenizer: anything with `decode(token_ids)`, to show tokens and the names of requests as text; None takes `trace.tokenizer`,
            and without that token ids and request ids are shown.

    Raises:
        FileNotFoundError: no such file. TypeError: neither trace nor path, or a tokenizer that cannot decode.
    """

    def __init__(self, trace: TraceSource, tokenizer: Any = None) -> None:
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise TypeError(f"a tokenizer has decode(token_ids); got {type(tokenizer).__name__}")
        self.source = trace
        self.trace, self.problem = open_trace(trace)
        self.tokenizer = tokenizer if tokenizer is not None else self.trace.tokenizer

    reader: ClassVar[Any] = None  # the class of its `FoldReader`

    def make_reader(self) -> Any:
        """A new `FoldReader` that reads for this view what `reading` then holds; None if it needs none."""
        return self.reader and self.reader()

    @cached_property
    def reading(self) -> Any:
        """The reader of this view, after it has read the trace."""
        reader = self.make_reader()
        read(self.trace, reader)
        return reader

    @cached_property
    def names(self) -> dict[str, str]:
        """What the requests are called: see `Trace.names`."""
        return self.trace.names(self.tokenizer)

    def refresh(self) -> None:
        self.trace, self.problem = open_trace(self.source)
        super().refresh()

    def header(self, **more: Any) -> dict[str, Any]:
        """The header that every view of a trace starts from: the shared cursor's name, length and first step, and remarks."""
        trace = self.trace
        cursor = {"key": trace_key(trace), "steps": trace.num_steps, "open": most_eventful(trace)}
        return {"trace": cursor, "note": trace_note(trace), **more}


def read_together(views: Sequence[View]) -> None:
    """Fold each trace once for all views of it that have not read it yet."""
    waiting: dict[int, list[TraceView]] = {}
    for view in views:
        if isinstance(view, TraceView) and view.problem is None and "reading" not in view.__dict__:
            waiting.setdefault(id(view.trace), []).append(view)
    for same in waiting.values():
        readers = [(view, reader) for view in same if (reader := view.make_reader()) is not None]
        if readers:
            read(same[0].trace, *(reader for _, reader in readers))
        for view, reader in readers:
            view.__dict__["reading"] = reader
