"""The timeline: every cell is what the folded state and the decisions say, in Python and in the page."""

import json
import time

import numpy as np
import pytest
from remote_store import remote_trace
from viz_runs import Moody, busy_trace, kind_of, span, words_of

from minivllm.core.trace import Trace
from minivllm.lab import Constant, simulate
from minivllm.lab.workload import WorkloadRequest, poisson
from minivllm.viz.palette import DECODE_TINT, owner_colour, tint
from minivllm.viz.timeline import Timeline
from minivllm.viz.timeline_data import (
    DECODE,
    FINISHES,
    KINDS,
    PREEMPTED,
    PREFILL,
    REMOTE,
    STALLED,
    SWAPPED,
    WAITING,
)

RUNS = {
    "full": {},
    "swap": {"seed": 1, "swap": 12},
    "hybrid": {"seed": 2, "kind": "hybrid", "blocks": 40},
    "tight": {"seed": 5, "blocks": 17},
    "stalled": {"seed": 3, "policy": Moody()},
}
TOLD = {
    "WAITING": WAITING, "RUNNING": STALLED, "PREEMPTED": PREEMPTED, "SWAPPED": SWAPPED, "WAITING_FOR_REMOTE_KVS": REMOTE,
}  # fmt: skip


@pytest.fixture(scope="module")
def traces():
    return {name: busy_trace(**how) for name, how in RUNS.items()} | {"remote": remote_trace()[0]}


def reset_steps(trace):
    """Steps at whose end the prefix cache was reset: running requests are preempted after they were computed."""
    found, step = set(), -1
    for event in trace.events:
        step += event[0] == "step"
        if event[0] == "reset":
            found.add(step)
    return found


def test_every_cell_is_what_the_state_says(traces):
    seen = set()
    for trace in traces.values():
        data, frames = Timeline(trace).lanes, trace.to_pandas()
        first = int(frames["steps"].step[0])
        done = frames["decisions"].query("decision in ('prefill', 'decode')")
        scheduled = {(row.step - first, row.request_id): (row.decision, row.num_tokens) for row in done.itertuples()}
        number = {name: i for i, name in enumerate(data.request_ids)}
        for step, state in trace.states():
            for name, request in state.requests.items():
                kind = kind_of(data, number[name], step)
                seen.add(kind)
                by_reset = step in reset_steps(trace) and request.status == "PREEMPTED"  # when the step had computed it
                if (step, name) in scheduled and not by_reset:
                    decision, tokens = scheduled[step, name]
                    assert KINDS[kind] == decision
                    if kind == PREFILL:
                        assert data.tokens[span(data, number[name], step)] == tokens
                else:
                    assert kind == TOLD[request.status]
            for name in set(number) - set(state.requests):
                kind = kind_of(data, number[name], step)
                assert kind is None or data.finish[number[name]] == step  # ended within the step
    assert seen == {WAITING, PREEMPTED, SWAPPED, REMOTE, STALLED, PREFILL, DECODE}


def test_strips_are_the_table_of_steps(traces):
    for trace in traces.values():
        data, steps = Timeline(trace).lanes, trace.to_pandas()["steps"]
        for mine, theirs in (
            ("prefill_tokens", "num_prefill_tokens"),
            ("decode_tokens", "num_decodes"),
            ("running", "num_running"),
            ("waiting", "num_waiting"),
        ):
            np.testing.assert_array_equal(getattr(data, mine), steps[theirs])
        np.testing.assert_allclose(data.time[:-1], steps.start)
        assert data.budget == 14


def test_reasons_are_those_of_the_trace(traces):
    told = set()
    for name in ("full", "swap", "tight"):
        data = Timeline(traces[name]).lanes
        told |= {words_of(data, request, step) for request in range(25) for step in range(data.num_steps)}
    assert any(line.startswith("waiting: behind r") and "too few KV blocks" in line for line in told)
    assert "waiting: as many requests were running as max_num_seqs allows" in told
    assert any("that it wanted: the token budget of the step was used up" in line for line in told)
    assert any(line.startswith("preempted: ") for line in told)
    remote = Timeline(traces["remote"]).lanes
    on_their_way = {words_of(remote, r, s) for r in range(40) for s in range(remote.num_steps)}
    assert "blocks on their way: its KV blocks were being fetched from elsewhere" in on_their_way
    assert {"decode", "not there yet", "finished: length", "finished: abort"} <= told
    stalled = Timeline(traces["stalled"]).lanes
    assert "running, but got no tokens" in {
        words_of(stalled, r, s) for r in range(25) for s in range(stalled.num_steps)
    }


def test_an_unknown_reason_is_told_by_its_name(traces):
    trace = Trace(traces["full"].header, traces["full"].start)
    trace.events += [e if e[0] != "wait" else ("wait", e[1], "moon phase") for e in traces["full"].events]
    assert "moon phase" in Timeline(trace).lanes.reasons


@pytest.mark.parametrize("name", RUNS)
def test_the_page_tells_and_draws_the_same(traces, name, open_page, tmp_path):
    view = Timeline(traces[name])
    data = view.lanes
    page = open_page(view.save(tmp_path / "x.html"), width=1300)
    steps = list(range(0, data.num_steps, max(1, data.num_steps // 25)))
    told, computed = page.evaluate(
        """steps => { const { lanes } = document.querySelector('.mv-timeline').lanes;
        return [steps.map(s => lanes.ids.map((_, r) => lanes.describe(r, s))), steps.map(s => lanes.ids.map((_, r) => lanes.computed(r, s)))]; }""",
        steps,
    )
    for k, step in enumerate(steps):
        state = view.trace.at(step)
        for r, request in enumerate(data.request_ids):
            assert told[k][r] == words_of(data, r, step)
            known = computed[k][r]
            if known is not None and request in state.requests and step not in reset_steps(view.trace):
                assert known == state.requests[request].num_computed_tokens
    # Pixels in the middle of prefill and decode cells of a row, from the drawn canvas.
    page.evaluate("document.querySelector('.mv-timeline').lanes.axis.show(0, 40)")
    page.wait_for_timeout(100)
    hits = page.evaluate(
        """() => { const { lanes, chart, axis } = document.querySelector('.mv-timeline').lanes;
        const canvas = document.querySelector('.mv-lanes-canvas'), pen = canvas.getContext('2d'), ratio = devicePixelRatio, out = [];
        const height = chart.pane.firstChild.clientHeight / lanes.count;
        for (let r = 0; r < lanes.count; r++) for (let s = 1; s < 39; s++) {
          const x = chart.xOf(s + 0.5), y = (r + 0.5) * height - chart.pane.scrollTop;
          out.push([r, s, ...pen.getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data]); }
        return out; }"""
    )
    decodes: dict[int, set] = {}
    others: dict[int, set] = {}
    for r, step, *rgba in hits:
        kind, end = kind_of(data, r, step), data.finish[r]
        if abs(step - end) <= 2:  # the sign of the end may lie over it
            continue
        if kind == DECODE:
            assert rgba[3] == 255, (data.request_ids[r], step)
            decodes.setdefault(r, set()).add(tuple(rgba[:3]))
        elif kind is None:
            assert rgba[3] == 0, (data.request_ids[r], step)
        elif kind != PREFILL:  # a number may stand in the middle of a chunk
            others.setdefault(r, set()).add(tuple(rgba[:3]))
    assert len(decodes) > 5 and all(len(colours) == 1 for colours in decodes.values()), "a request has one colour"
    assert len(set.union(*decodes.values())) >= 5, "and neighbours have others"
    assert all(not colours & decodes[r] for r, colours in others.items() if r in decodes)


def test_keys_clicks_and_zoom(traces, open_page, tmp_path):
    view = Timeline(traces["full"])
    page = open_page(view.save(tmp_path / "x.html"), width=1000, dark=True)
    cursor = "[...globalThis.minivllmCursors.values()][0]"
    page.locator(".mv-lanes-pane").focus()
    for key in ("Home", "ArrowRight", "ArrowRight", "Shift+ArrowRight", "ArrowLeft", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate(f"[{cursor}.step, {cursor}.request]") == [11, "r1"]
    assert page.locator(".mv-lanes-detail").inner_text() == f"Step 11, request r1: {words_of(view.lanes, 1, 11)}."
    page.keyboard.press("+")
    size = page.evaluate("(({ axis }) => axis.to - axis.from)(document.querySelector('.mv-timeline').lanes)")
    assert size == pytest.approx(view.lanes.num_steps / 2)
    page.keyboard.press("0")
    box = page.locator(".mv-lanes-pane").bounding_box()
    x = page.evaluate("document.querySelector('.mv-timeline').lanes.chart.xOf(20.5)")
    page.mouse.click(box["x"] + x, box["y"] + 5)
    assert page.evaluate(f"[{cursor}.step, {cursor}.request]") == [20, "r0"]
    page.mouse.move(box["x"] + x, box["y"] + 5)
    assert words_of(view.lanes, 0, 20) in page.locator(".mv-tooltip:visible").inner_text()
    page.keyboard.press("Escape")
    page.select_option("select[aria-label='horizontal axis']", "time")
    assert page.evaluate(f"{cursor}.request") is None


def test_a_click_on_a_row_tells_its_story(traces, open_page, tmp_path):
    view = Timeline(traces["tight"])
    page = open_page(view.save(tmp_path / "x.html"), width=1000)
    assert page.locator(".mv-lanes-story").inner_text() == "Click a row for the story of its request."
    data = view.lanes
    row = int(data.preemptions[0, 1])
    page.evaluate(
        f"[...globalThis.minivllmCursors.values()][0].set({{ request: {json.dumps(data.request_ids[row])} }})"
    )
    lines = page.locator(".mv-lanes-story li").all_inner_texts()
    spans = np.flatnonzero(data.request == row)
    assert len(lines) == len(spans) + 1 and any("preempted" in line for line in lines)
    assert lines[-1] == f"step {data.finish[row]} finished: {FINISHES[data.finish_kind[row]]}"
    for line, i in zip(lines, spans, strict=False):
        first, last = data.start[i], data.end[i] - 1
        assert line.startswith(f"step {first} " if first == last else f"steps {first} to {last} "), line
    page.locator(".mv-lanes-story button").nth(1).click()
    assert page.evaluate("[...globalThis.minivllmCursors.values()][0].step") == data.start[spans[1]]
    assert page.locator(".mv-lanes-story li[data-now]").inner_text() == lines[1]


def test_no_row_of_a_tall_timeline_is_cut(open_page, tmp_path):
    workload = poisson(16, 70, (20, 40), (6, 90), seed=1)
    trace = simulate(workload, config={"num_gpu_blocks": 300, "max_num_seqs": 12}, cost_model=Constant(0.012)).trace
    page = open_page(Timeline(trace).save(tmp_path / "x.html"), width=1000)
    page.get_by_label("tall rows").click()
    page.wait_for_timeout(100)
    height, all_of_it, count = page.evaluate(
        "(() => { const pane = document.querySelector('.mv-lanes-pane'); return [pane.clientHeight, pane.scrollHeight, 70]; })()"
    )
    row = all_of_it / count
    assert row >= 16 and height < all_of_it and height % row == 0


PIXELS = """([start, end, y]) => {
  const { chart } = document.querySelector(".mv-timeline").lanes, pen = document.querySelector(".mv-lanes-canvas").getContext("2d");
  return [0.2, 0.35, 0.5, 0.65, 0.8].map((part) => {
    const x = Math.round(chart.xOf(start) + part * (chart.xOf(end) - chart.xOf(start)));
    return [...pen.getImageData(x, Math.round(y), 1, 1).data].slice(0, 3); });
}"""


def test_one_hue_a_request(traces, open_page, tmp_path):
    """Prefill in the colour that the request has in every view, decode in a tint of it."""
    view = Timeline(traces["full"])
    data = view.lanes
    page = open_page(view.save(tmp_path / "x.html"), width=1600)
    page.wait_for_timeout(100)
    height = page.evaluate("document.querySelector('.mv-lanes-pane').scrollHeight") / len(data.request_ids)
    checked = 0
    for i in np.flatnonzero(np.isin(data.kind, (PREFILL, DECODE))):
        row, prefill = data.request[i], data.kind[i] == PREFILL
        y = (row + 0.5 - (0.3 if prefill else 0)) * height  # above the number that stands in a prefill
        hue = owner_colour(row)
        wanted = hue if prefill else tint(hue, DECODE_TINT)
        drawn = page.evaluate(PIXELS, [int(data.start[i]), int(data.end[i]), float(y)])  # a number may lie over some
        colour = [int(wanted[k : k + 2], 16) for k in (1, 3, 5)]
        # A browser blends colours with 8 bits, and rounds otherwise than Python does.
        off = min(max(abs(a - b) for a, b in zip(pixel, colour)) for pixel in drawn)
        assert off <= 2, (row, data.start[i], drawn, wanted)
        checked += 1
    assert checked > 40


def test_pictures_and_words(traces):
    view = Timeline(traces["tight"])
    assert view.to_png().startswith(b"\x89PNG") and view.trace.plot_timeline() is not None
    data = view.lanes
    assert view.describe().startswith(f"25 requests in {data.num_steps} steps")
    assert (
        f"{len(data.preemptions)} preemption" in view.describe()
        and f"Most in the queue: {data.waiting.max()}" in view.describe()
    )


@pytest.mark.slow
def test_two_thousand_requests_in_ten_thousand_steps(open_page, tmp_path):
    workload = poisson(16, 2000, (20, 400), (60, 900), seed=1)
    config = {"num_gpu_blocks": 3000, "max_num_seqs": 128, "max_num_batched_tokens": 512}
    trace = simulate(workload, config=config, cost_model=Constant(0.012)).trace
    assert trace.num_steps > 8000
    began = time.perf_counter()
    view = Timeline(trace)
    path = view.save(tmp_path / "big.html")
    seconds = time.perf_counter() - began
    page = open_page(path, width=1500)
    paints = page.evaluate(
        """async () => { const { axis, chart } = document.querySelector('.mv-timeline').lanes, times = [];
        const frame = () => new Promise(requestAnimationFrame);
        for (const tall of [true, false]) { chart.setRows(tall); await frame(); await frame();
          for (let i = 0; i < 10; i++) { const t = performance.now(); axis.pan(0.001 * (i % 2 ? 1 : -1)); await frame(); times.push(performance.now() - t); } axis.zoom(8); }
        return times; }"""
    )
    print(
        f"\n{trace.num_steps} steps: read and packed in {seconds:.2f} s, {path.stat().st_size / 1e3:.0f} KB; frame {np.median(paints):.1f} ms, worst {max(paints):.1f} ms"
    )
    assert path.stat().st_size < 400_000 and np.median(paints) < 100


def test_the_adapters_in_the_slots(open_page, tmp_path):
    """Loads, evictions and what a request waits for, in Python and on the page, are what the folded state says."""
    requests = [
        WorkloadRequest(f"r{i}", i * 0.03, (range(5 + i % 7),), range(1, 9), lora_name=f"a{i * 5 % 4}@0123")
        for i in range(24)
    ]
    config = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "num_gpu_blocks": 64,
        "max_loras": 2,
    }
    trace = simulate(requests, config=config, cost_model=Constant(per_step=0.01)).trace
    view = Timeline(trace)
    data, states = view.lanes, dict(trace.states())
    told = []
    for step in range(data.num_steps):
        there = {int(r[0]): data.adapters[r[3]] for r in data.loras if r[1] <= step < r[2]}
        assert there == states[step].loras, step
        told.append(", ".join(f"{name.split('@')[0]} in slot {slot}" for slot, name in sorted(there.items())))
    kinds = [event.kind for event in trace]
    assert len(data.loras) == kinds.count("lora_load") > 6 and kinds.count("lora_evict") > 4
    assert f"{len(data.loras)} loads of 4 adapters into 2 slots" in view.describe()
    assert any("max_loras" in words_of(data, r, s) for r in range(24) for s in range(data.num_steps))
    page = open_page(view.save(tmp_path / "x.html"), width=1000)
    lanes = "document.querySelector('.mv-timeline').lanes.lanes"
    shown = page.evaluate(f"Array.from({{ length: {data.num_steps} }}, (_, s) => {lanes}.adaptersAt(s))")
    assert [sorted(text.split(", ")) for text in shown] == [sorted(text.split(", ")) for text in told]
