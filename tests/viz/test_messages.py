"""Every view of a trace, where there is little or nothing to show: a clear message, in the words and on the page."""

import re

import matplotlib.pyplot as plt
import pytest
from viz_traces import aborted, make_trace, named

from minivllm.core.events import TraceHeader
from minivllm.core.trace import Trace
from minivllm.viz import BlockMap, Compare, Page, PrefixTree, Timeline, Waste

VIEWS = {
    "BlockMap": BlockMap,
    "Timeline": Timeline,
    "PrefixTree": PrefixTree,
    "Waste": Waste,
    "Compare": lambda trace: Compare(trace, trace),
}


def broken(folder):
    (folder / "broken.jsonl").write_text("not json\n")
    return folder / "broken.jsonl"


def contradictory(folder):
    trace = make_trace(num_blocks=97, steps=3)
    trace.events.insert(5, ("alloc", "nobody", 0, (1,)))
    trace.save(folder / "odd.jsonl")
    return folder / "odd.jsonl"


SITUATIONS = {
    "empty": (lambda folder: Trace(TraceHeader()), "Nothing happened"),
    "another version": (lambda folder: Trace(TraceHeader(version=99)), "of version 99"),
    "broken file": (broken, "broken.jsonl, line 1"),
    "contradiction": (contradictory, "odd.jsonl: event 5, ('alloc', 'nobody', 0, (1,)), contradicts"),
    "no step": (lambda folder: aborted(0), "1 request was added"),
    "one step": (lambda folder: make_trace(num_blocks=97, steps=1, rate=3.0), None),
    "aborted only": (lambda folder: aborted(2), None),
}


NAMES = ['"quoted" and \'single\'', "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--", "é😀", "x" * 300,
         " ", "two\nlines", "$\\frac{$_x^", "__proto__", "null"]  # fmt: skip


def test_requests_of_any_name(open_page, tmp_path):
    trace = named(NAMES)
    views = [build(trace) for build in VIEWS.values()]
    page = open_page(Page(views).save(tmp_path / "page.html"), width=900, views=len(views))
    page.on("dialog", lambda dialog: pytest.fail("a name was run as a program"))
    shown = page.get_by_label("request whose block table is shown")
    for step, name in enumerate(NAMES):
        page.evaluate(
            "([step, request]) => globalThis.minivllmCursors.forEach((c) => { c.go(5 * step); c.set({ request }); })",
            [step, name],
        )
        assert shown.input_value() == name
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, name[:20]
        assert (
            page.locator(".mv-timeline .mv-lanes-detail").text_content().startswith(f"Step {5 * step}, request {name}:")
        )
    assert Page(views).to_png()[:4] == b"\x89PNG"


def test_files_have_fitting_names(tmp_path):
    view = BlockMap(named(["a"], steps=2))
    for write, name in ((view.save, "view"), (view.save, "view.png"), (view.to_png, "view.jpg"), (view.to_png, "")):
        with pytest.raises(ValueError, match=r"\.png|\.html"):
            write(tmp_path / name if name else "")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        view.save(tmp_path / "nowhere" / "view.html")
    assert view.to_png(tmp_path / "view.PNG") == (tmp_path / "view.PNG").read_bytes()
    assert view.save(tmp_path / "é #%?.HTM").exists()


def test_figures_show_themselves_in_a_notebook():
    view = BlockMap(named(["a"], steps=2))
    for one in (view, Page([view])):
        assert one.figure()._repr_png_().startswith(b"\x89PNG")
    figure = view.plot().figure
    assert plt.figure(figure.number) is figure, "pyplot shows it when the cell ends"
    plt.close(figure)


def test_what_is_no_view_and_no_tokenizer_is_refused():
    trace = named(["a"], steps=2)
    with pytest.raises(TypeError, match="a page shows views, got Trace"):
        Page([BlockMap(trace), trace])
    with pytest.raises(TypeError, match=r"a tokenizer has decode\(token_ids\); got Trace"):
        trace.show(trace)
    inner = BlockMap(trace)
    assert Page([Page(inner), Timeline(trace)]).views[0] is inner


@pytest.mark.parametrize("name", SITUATIONS)
def test_little_or_nothing_to_show(name, open_page, tmp_path):
    make, words = SITUATIONS[name]
    views = {kind: build(make(tmp_path)) for kind, build in VIEWS.items()}
    for kind, view in views.items():
        assert view.summary().strip(), kind
        if words is not None:
            assert words in view.summary(), kind
            with pytest.raises(ValueError, match=re.escape(words)):
                view.to_png()
        else:
            assert view.to_png()[:4] == b"\x89PNG", kind
    page = open_page(Page(list(views.values())).save(tmp_path / "page.html"), views=len(views))
    assert page.locator(".mv-problem, .mv-card[data-ready]").count() == len(views)
    problems = page.locator(".mv-problem").all_inner_texts()
    if words is None:
        assert problems == []
    else:
        assert len(problems) == len(views) and all(words in text for text in problems)
