"""Memory waste against the states; two runs side by side against `lab.diff`; what is shown where there is nothing to show."""

from dataclasses import replace

import numpy as np
import pytest
from viz_runs import busy_trace, kind_of, words_of
from viz_traces import make_trace

from minivllm.core.events import TraceHeader
from minivllm.core.policy import ShortestFirst
from minivllm.core.trace import Trace
from minivllm.lab import Constant, diff, simulate
from minivllm.lab.workload import shared_prefix
from minivllm.viz.compare import Compare
from minivllm.viz.page import Page, show
from minivllm.viz.prefix_tree import PrefixTree
from minivllm.viz.timeline import Timeline
from minivllm.viz.waste import Waste

SMALL = {"num_gpu_blocks": 40, "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 128}


@pytest.fixture(scope="module")
def runs():
    workload = shared_prefix(60, 30, 3, 24, (3, 60), (1, 40), seed=6)
    return [simulate(workload, config=SMALL, cost_model=Constant(0.01), policy=p) for p in (None, ShortestFirst())]


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_waste_is_what_the_states_say(kind, open_page, tmp_path):
    view = Waste(busy_trace(2, kind, blocks=40))
    d, groups = view.waste, view.trace.header.num_groups
    for step, state in view.trace.states():
        running = [r for r in state.requests.values() if r.status == "RUNNING"]
        assert d.running[step] == len(running)
        assert d.reserved[0, step] == 4 * sum(count > 0 for count in state.ref_cnt)
        empty = [-r.num_computed_tokens % 4 for r in running]
        assert d.wasted[0, step] == groups * sum(empty)
        assert d.empty[step].tolist() == np.bincount(empty, minlength=4).tolist()
        assert d.reserved[3, step] == groups * 64 * len(running)
    page = open_page(view.save(tmp_path / "x.html"), width=1300)
    step = int(np.argmax(d.running))
    page.evaluate("step => [...globalThis.minivllmCursors.values()][0].go(step)", step)
    reserved, wasted = page.evaluate(
        "(({ reserved, wasted }) => [reserved.map(r => [...r]), wasted.map(r => [...r])])(document.querySelector('.mv-waste').waste)"
    )
    assert reserved == d.reserved.tolist() and wasted == d.wasted.tolist()
    cells = page.locator(".mv-waste-table tbody tr").first.locator("td").all_inner_texts()
    assert cells[:2] == [str(d.reserved[0, step]), str(d.wasted[0, step])]
    assert view.to_png().startswith(b"\x89PNG") and "in one piece" in view.describe().lower()


def test_the_table_of_a_large_cache_stays_clear_of_the_histogram(open_page, tmp_path):
    trace = make_trace(
        num_blocks=65536, steps=12, block_size=16, seqs=512, rate=30, prompt=900, output=60, budget=16384
    )
    page = open_page(trace.show().save(tmp_path / "x.html"), width=1440, views=4)
    table, bars = (page.locator(f".mv-waste-{name}").bounding_box() for name in ("table", "bars"))
    apart = bars["x"] >= table["x"] + table["width"] or bars["y"] >= table["y"] + table["height"]
    assert apart, (table, bars)


def test_waste_needs_to_know_the_longest_request(runs):
    trace = runs[0].trace
    bare = Trace(replace(trace.header, settings={}), trace.start)
    bare.events += trace.events
    assert "max_model_len=" in (Waste(bare).problem or "")
    assert Waste(bare, 128).waste.reserved.tolist() == Waste(trace).waste.reserved.tolist()


def test_compare_marks_what_diff_finds(runs, open_page, tmp_path):
    view, expected = Compare(*runs), diff(*runs).first_difference
    assert view.difference == expected is not None
    page = open_page(view.save(tmp_path / "x.html"), width=1500)
    words = page.locator(".mv-compare-words").inner_text()
    for name, (mine, theirs) in expected.reasons.items():
        assert name in words and mine in words and theirs in words
    page.get_by_role("button", name="go there").click()
    cursor = page.evaluate("(({ step, request }) => [step, request])([...globalThis.minivllmCursors.values()][0])")
    assert cursor == [expected.step, next(iter(expected.reasons))]
    row = view.runs[0].request_ids.index(cursor[1])
    told = page.locator(".mv-compare-run .mv-lanes-detail").all_inner_texts()
    assert told == [f"Step {cursor[0]}, request {cursor[1]}: {words_of(run, row, cursor[0])}." for run in view.runs]
    assert page.evaluate("step => document.querySelector('.mv-compare').compare.differ(step)", expected.step - 1) == []
    assert set(expected.reasons) <= set(
        page.evaluate("step => document.querySelector('.mv-compare').compare.differ(step)", expected.step)
    )
    assert page.locator(".mv-compare-mark:visible").count() == 2
    assert view.to_png().startswith(b"\x89PNG") and str(expected) in view.describe()


def test_a_comparison_and_the_views_of_its_runs_share_one_cursor(runs, open_page, tmp_path):
    a, b = (run.trace for run in runs)
    page = open_page(Page([Timeline(a), Compare(a, b), Waste(b)]).save(tmp_path / "x.html"), width=1500, views=3)
    assert page.get_by_label("step", exact=True).count() == 1, "one player for all"
    page.get_by_label("step", exact=True).fill("21")
    where = "() => [...globalThis.minivllmCursors.values()].map(({ step }) => step)"
    assert page.evaluate(where) == [21] * 3
    page.locator(".mv-timeline [tabindex='0']").first.focus()
    page.keyboard.press(".")
    assert page.evaluate(where) == [22] * 3
    page.evaluate("() => [...globalThis.minivllmCursors.values()].forEach((cursor) => cursor.go(9999))")
    assert sorted(page.evaluate(where)) == sorted([a.num_steps - 1, b.num_steps - 1, max(a.num_steps, b.num_steps) - 1])
    views = show(a, other=b).views
    assert isinstance(views[0], Compare) and len(views) == 5


def test_compare_puts_the_same_request_into_the_same_row(runs):
    short = simulate(shared_prefix(60, 12, 3, 24, (3, 60), (1, 40), seed=6), config=SMALL, cost_model=Constant(0.01))
    a, b = Compare(short, runs[0]).runs
    assert a.request_ids == b.request_ids and len(a.request_ids) == 30
    whole = Timeline(runs[0].trace).lanes
    for row, name in enumerate(b.request_ids):
        other = whole.request_ids.index(name)
        assert [words_of(b, row, s) for s in range(0, b.num_steps, 9)] == [
            words_of(whole, other, s) for s in range(0, b.num_steps, 9)
        ]
    assert kind_of(a, 29, 0) is None
    same = Compare(runs[0], runs[0].trace)
    assert same.difference is None and "All decisions are the same" in same.describe()
    with pytest.raises(ValueError, match="equally many requests, got 12 and 30"):
        Compare(short, runs[0], match="order").describe()
    with pytest.raises(ValueError, match='match must be "id" or "order"'):
        Compare(short, short, match="name")


def test_a_message_where_there_is_nothing_to_show(tmp_path, open_page):
    header = TraceHeader(num_blocks=10, settings={"max_model_len": 64})
    (tmp_path / "broken.jsonl").write_text("not a trace\n")
    aborted = Trace(header)
    aborted.events += [("add", "r0", 3, 5, 0.0, 0, None, (1, 2, 3), (), 0), ("finish", "r0", "abort", None)]
    cases = {
        "Nothing happened": Trace(header),
        "1 request was added and 1 ended again": aborted,
        "version 99": Trace(replace(header, version=99)),
        "broken.jsonl": tmp_path / "broken.jsonl",
    }
    for message, source in cases.items():
        for kind in (Timeline, PrefixTree, Waste, lambda t: Compare(t, t)):
            view = kind(source)
            assert message in view.summary()
            with pytest.raises(ValueError, match=r"."):
                view.to_png()
    page = open_page(Compare(aborted, aborted).save(tmp_path / "x.html"))
    assert "ended again" in page.locator(".mv-problem").inner_text()


def test_one_step_and_only_aborted_requests(tmp_path, open_page):
    trace = Trace(TraceHeader(num_blocks=10, settings={"max_model_len": 64, "max_num_batched_tokens": 8}))
    trace.events += [
        ("add", "r0", 3, 5, 0.0, 0, None, (1, 2, 3), (), 0),
        ("step", 0, 0.0),
        ("finish", "r0", "abort", None),
    ]
    for kind in (Timeline, PrefixTree, Waste, lambda t: Compare(t, t)):
        view = kind(trace)
        page = open_page(view.save(tmp_path / "x.html"))
        assert page.locator("[data-ready]").count() == 1 and view.to_png()
