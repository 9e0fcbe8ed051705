"""The page folds what the trace folds: pixels, histories and words of a real browser against Python."""

import numpy as np
import pytest
from remote_store import remote_trace
from viz_traces import make_trace

from minivllm.core.events import State
from minivllm.core.trace import Trace
from minivllm.viz.block_map import BlockMap, block_states, fetched_blocks, request_numbers, state_groups
from minivllm.viz.palette import DARK, LIGHT, owner_colour

# Five points of every cell: the corner, a quarter in, the middle, the middle of the right edge, and the gap behind it.
READ = """(canvas) => {
  const { columns, pitch, inner } = Object.fromEntries(Object.entries(canvas.dataset).map(([k, v]) => [k, Number(v)]));
  const image = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const half = Math.floor(inner / 2), quarter = Math.floor(inner / 4);
  const points = [[0, 0], [quarter, quarter], [half, half], [inner - 1, half], [pitch - 1, half]];
  const rows = canvas.height / pitch, seen = [];
  for (let i = 0; i < rows * columns; i++) {
    seen.push(points.map(([dx, dy]) => {
      const at = 4 * ((Math.floor(i / columns) * pitch + dy) * canvas.width + (i % columns) * pitch + dx);
      return "#" + [0, 1, 2].map((k) => image[at + k].toString(16).padStart(2, "0")).join("");
    }));
  }
  return seen.map((row) => row.join(" ")).join(",");
}"""
SHAPES = {"used": "11110", "shared": "11010", "cached": "10010", "free": "00100", "null": "11100", "elsewhere": "10000"}
SHAPES["state"] = "01110"
GO = "(step) => { const cursor = [...globalThis.minivllmCursors.values()][0]; cursor.go(step); }"


def read(canvas) -> list[list[str]]:
    return [cell.split(" ") for cell in canvas.evaluate(READ).split(",")]


def kinds_in_group(trace: Trace, step: int, group: int) -> list[tuple[str, int | None]]:
    """What the pane of a group must show: from the state, and from which group cached a free block's content."""
    state, numbers = trace.at(step), request_numbers(trace)
    kinds = block_states(state, numbers, state_groups(trace))
    if trace.header.num_groups == 1:
        return kinds
    of = cached_groups(trace, step)
    for request in state.requests.values():
        for g, table in enumerate(request.tables):
            of.update(dict.fromkeys(table, g))
    return [
        ("elsewhere", None) if kind in ("used", "state", "shared", "cached") and of[block] != group else (kind, owner)
        for block, (kind, owner) in enumerate(kinds)
    ]


def cached_groups(trace: Trace, step: int) -> dict[int, int]:
    found, now = {}, -1
    for event in trace.events:
        now += event[0] == "step"
        if now > step:
            break
        if event[0] == "cache":
            found.update(dict.fromkeys(event[4], event[2]))
    return found


def colours(kind: str, owner: int | None, dark: bool) -> list[str]:
    theme = DARK if dark else LIGHT
    ink = theme["free" if kind == "elsewhere" else kind] if owner is None else owner_colour(owner, dark)
    return [ink if bit == "1" else theme["panel"] for bit in SHAPES[kind]]


def expected_cpu(state: State, trace: Trace, dark: bool) -> list[list[str]]:
    owner = {
        block: n
        for r, n in request_numbers(trace).items()
        if r in state.requests
        for block in state.requests[r].cpu_blocks
    }
    kinds = [("null", None)] + [
        ("used", owner[b]) if b in owner else ("free", None) for b in range(1, trace.header.num_cpu_blocks + 1)
    ]
    return [colours(kind, n, dark) for kind, n in kinds]


TRACES = {
    "shared prefixes": {"num_blocks": 97, "steps": 120, "rate": 0.8},
    "many chunks": {"num_blocks": 300, "steps": 400, "rate": 1.0, "seqs": 24},
    "swap": {"num_blocks": 70, "swap": 60, "steps": 100, "rate": 0.9},
    "groups": {"num_blocks": 150, "kind": "hybrid", "steps": 80, "rate": 0.8},
}


@pytest.fixture(scope="module", params=TRACES)
def trace(request) -> Trace:
    return make_trace(**TRACES[request.param])


@pytest.fixture(scope="module")
def saved(trace, tmp_path_factory):
    return BlockMap(trace).save(tmp_path_factory.mktemp("page") / "blocks.html")


def test_pixels_are_the_folded_state(trace, saved, open_page):
    dark = trace.header.num_cpu_blocks > 0  # one of them will do
    page = open_page(saved, dark=dark)
    count = trace.num_steps
    for step in [0, count - 1, count // 2, count // 2 + 1, count // 2 - 1, count // 4]:
        page.evaluate(GO, step)
        page.wait_for_function(f"document.querySelector('.mv-readout').textContent === 'step {step} of {count - 1}'")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        for group in range(trace.header.num_groups):
            seen = read(page.locator(f"canvas[data-pool=gpu][data-group='{group}']"))
            wanted = [colours(kind, owner, dark) for kind, owner in kinds_in_group(trace, step, group)]
            assert seen[: len(wanted)] == wanted, f"step {step}, group {group}"
        if trace.header.num_cpu_blocks:
            wanted = expected_cpu(trace.at(step), trace, dark)
            assert read(page.locator("canvas[data-pool=cpu]"))[: len(wanted)] == wanted


def test_a_state_is_a_disc_and_its_words_say_what_it_is_made_of(open_page, tmp_path):
    trace = make_trace(num_blocks=97, kind="aligned hybrid", steps=40, rate=0.8)
    [group] = state_groups(trace)
    page = open_page(BlockMap(trace).save(tmp_path / "blocks.html"))
    page.evaluate(GO, 30)
    page.wait_for_function("document.querySelector('.mv-readout').textContent.startsWith('step 30 ')")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    wanted = [colours(*kind, False) for kind in kinds_in_group(trace, 30, group)]
    assert read(page.locator(f"canvas[data-pool=gpu][data-group='{group}']"))[: len(wanted)] == wanted
    state = trace.at(30)
    its = next(r for r in state.requests.values() if r.tables[group] and state.ref_cnt[r.tables[group][-1]] == 1)
    checkpoint = next(  # of what the block holds now, not of what it held before
        event
        for event in trace.events
        if event[0] == "cache" and event[2] == group and state.hashes[event[4][-1]] == event[5][-1]
    )
    for block, tokens in (
        (its.tables[group][-1], its.num_computed_tokens),
        (checkpoint[4][-1], (checkpoint[3][-1] + 1) * trace.header.block_size),
    ):
        page.get_by_label("block number to pin").fill(str(block))
        page.keyboard.press("Enter")
        assert f"the state after {tokens} token" in page.locator("aside").inner_text()


@pytest.mark.slow
def test_blocks_from_elsewhere_lack_a_corner_and_are_told(open_page, tmp_path):
    trace, _ = remote_trace()
    view, count, seen_kinds = BlockMap(trace), trace.num_steps, set()
    page = open_page(view.save(tmp_path / "blocks.html"))
    for step in range(5, count, count // 7):
        page.evaluate(GO, step)
        page.wait_for_function(f"document.querySelector('.mv-readout').textContent === 'step {step} of {count - 1}'")
        page.evaluate("() => new Promise(requestAnimationFrame)")
        kinds, marked = kinds_in_group(trace, step, 0), fetched_blocks(trace, step)
        wanted = [colours(*kind, False) for kind in kinds]
        there = [block for block, (kind, _) in enumerate(kinds) if block in marked and kind != "free"]
        for block in there:
            wanted[block][0] = LIGHT["panel"]
            seen_kinds.add(kinds[block][0])
        assert read(page.locator("canvas[data-pool=gpu]"))[: len(wanted)] == wanted, step
        legend = page.locator(".mv-legend li", has_text="came from elsewhere").inner_text()
        assert legend.split() == ["came", "from", "elsewhere", str(len(there))]
    assert seen_kinds == {"used", "shared", "cached"}
    step, name, block = next(
        (step, name, its.tables[0][-1])
        for step, state in trace.states()
        for name, its in state.requests.items()
        if its.status == "WAITING_FOR_REMOTE_KVS" and not its.num_computed_tokens
    )
    loaded = next(e.blocks[0] for e in trace if e.kind == "kv_load" and e.request == name)
    page.evaluate(GO, step)
    page.get_by_label("block number to pin").fill(str(loaded))
    page.keyboard.press("Enter")
    page.locator(".mv-table tr[data-event=fetched]").first.wait_for()
    told = page.locator("aside").inner_text()
    assert "being fetched from elsewhere" in told and "nothing is computed" in told
    assert f"request {name} waits until it is filled from elsewhere" in told
    step, kept = next((step, state.kept) for step, state in trace.states() if state.kept)
    page.evaluate(GO, step)
    page.get_by_label("block number to pin").fill(str(next(iter(kept.values()))[0]))
    page.keyboard.press("Enter")
    page.wait_for_function(
        "document.querySelector('aside').innerText.includes('kept for a copy, after the end of request')"
    )
    loads = sum(len(event.blocks) for event in trace if event.kind == "kv_load")
    assert f"{loads} blocks came from elsewhere" in view.describe()
    labels = [text.get_text() for text in view.plot(step=30).get_legend().get_texts()]
    assert labels.count("came from elsewhere") == 1


@pytest.mark.slow
def test_histories_are_the_table_of_blocks(trace, saved, open_page):
    page, table = open_page(saved), trace.to_pandas()["blocks"]
    assert len(set(table["step"])) > 20
    for block in (1, 7, trace.header.num_blocks // 2, trace.header.num_blocks - 1):
        page.get_by_label("block number to pin").fill(str(block))
        page.keyboard.press("Enter")
        rows = table[table["block_id"] == block]
        page.wait_for_function(f"document.querySelectorAll('tbody tr[data-step]').length === {len(rows)}")
        seen = page.eval_on_selector_all("tbody tr[data-step]", "rows => rows.map(r => ({ ...r.dataset }))")
        assert [(int(r["step"]), r["event"]) for r in seen] == list(zip(rows["step"], rows["event"], strict=True))
        assert [r["hash"] for r in seen] == [name[:6] if isinstance(name, str) else "" for name in rows["hash"]]
        assert [r["request"] for r in seen] == [r if isinstance(r, str) else "" for r in rows["request_id"]]
        for column in ("group", "position"):
            assert [int(r[column]) for r in seen] == [int(x) for x in rows[column].astype(float).fillna(-1)]


@pytest.mark.slow
def test_the_decision_behind_an_event_is_told(open_page, tmp_path):
    trace = make_trace(num_blocks=50, steps=100, rate=0.9)
    table = trace.to_pandas()["blocks"]
    page = open_page(BlockMap(trace).save(tmp_path / "blocks.html"))
    decisions = trace.to_pandas()["decisions"]
    preempted = {
        (row.step, row.request_id): row.reason for row in decisions.itertuples() if row.decision.startswith("preempt")
    }
    freed = [row for row in table.itertuples() if row.event == "freed" and (row.step, row.request_id) in preempted]
    told = {}
    for block in (freed[0].block_id, freed[-1].block_id):
        page.get_by_label("block number to pin").fill(str(block))
        page.keyboard.press("Enter")
        page.wait_for_function(
            f"document.querySelectorAll('tbody tr[data-step]').length === {(table['block_id'] == block).sum()}"
        )
        for row in page.query_selector_all("tbody tr[data-step]"):
            told[
                int(row.get_attribute("data-step")), row.get_attribute("data-request"), row.get_attribute("data-event")
            ] = row.inner_text()
    checked = 0
    for (step, request, event), text in told.items():
        if event == "freed" and (step, request) in preempted:
            by = preempted[step, request].removeprefix("request ").split(" needed")[0]
            assert f"{request} was preempted (recompute, chosen by FCFS)" in text
            assert (f"{by} needed blocks" if by != request else "it needed blocks itself") in text
            checked += 1
        elif event == "freed":
            assert f"{request} ended (" in text
    assert checked


def test_pointer_and_keyboard(open_page, tmp_path):
    trace = make_trace(num_blocks=97, steps=60, rate=0.8)
    step = max(range(60), key=lambda i: sum(n > 1 for n in trace.at(i).ref_cnt))
    state = trace.at(step)
    shared = next(b for b, n in enumerate(state.ref_cnt) if n > 1)
    page = open_page(BlockMap(trace).save(tmp_path / "blocks.html"))
    page.evaluate(GO, step)
    canvas = page.locator("canvas[data-pool=gpu]")
    columns = int(canvas.get_attribute("data-columns"))
    cell = canvas.bounding_box()["width"] / columns
    spot = {"x": (shared % columns + 0.4) * cell, "y": (shared // columns + 0.4) * cell}
    canvas.hover(position=spot)
    words = page.locator(".mv-tooltip").inner_text()
    owners = state.owners(shared)
    assert f"Block {shared}" in words and f"shared by {len(owners)} requests" in words
    assert all(owner in words for owner in owners[:4]) and state.hashes[shared].hex()[:6] in words
    tokens = next(e for e in trace.events if e[0] == "add" and e[1] == owners[0])[7]
    place = state.requests[owners[0]].tables[0].index(shared)
    assert " ".join(map(str, tokens[4 * place : 4 * place + 4])) in words
    canvas.click(position=spot)
    assert page.locator(".mv-bm[data-pinned]").count() == 1
    assert page.get_by_label("request whose block table is shown").input_value() == owners[0]
    assert f"in {len(state.requests[owners[0]].tables[0])} block" in page.locator(".mv-bm-request").inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".mv-bm[data-pinned]").count() == 0 and page.locator(".mv-bm-strip canvas").count() == 0
    assert "Click a block" in page.locator("aside").inner_text()
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert f"Block {shared + 1 + columns}" in page.locator("aside").inner_text()
    page.keyboard.press(".")
    assert page.locator(".mv-readout").inner_text() == f"step {min(step + 1, 59)} of 59"
    page.wait_for_function("document.querySelector('.mv-live').textContent.length > 10")


BOXES = "() => [...document.querySelectorAll('.mv-bm canvas[data-pool], .mv-card')].map((e) => JSON.stringify(e.getBoundingClientRect()))"


@pytest.mark.parametrize("width", [1440, 700])
def test_a_click_moves_nothing(width, open_page, tmp_path):
    trace = make_trace(num_blocks=400, steps=60, rate=0.8)
    page = open_page(trace.show().save(tmp_path / "page.html"), width=width, views=4)
    state = trace.at(int(page.locator(".mv-readout").inner_text().split()[1]))
    block = next(b for b, n in enumerate(state.ref_cnt) if n)
    canvas = page.locator("canvas[data-pool=gpu]")
    columns, cell = int(canvas.get_attribute("data-columns")), None
    cell = canvas.bounding_box()["width"] / columns
    place = BlockMap(trace).shown.index(block)
    before = page.evaluate(BOXES)
    canvas.click(position={"x": (place % columns + 0.4) * cell, "y": (place // columns + 0.4) * cell})
    page.wait_for_selector("aside tr[data-step]")
    assert page.locator(".mv-bm[data-pinned]").count() == 1 and page.locator(".mv-bm-strip canvas").count() == 1
    assert page.evaluate(BOXES) == before


def test_blocks_that_were_never_touched_are_one_line(open_page, tmp_path):
    trace = make_trace(num_blocks=4096, steps=30, rate=0.8)
    touched = {0} | {b for e in trace if e.kind == "alloc" for b in e.blocks}
    view = BlockMap(trace)
    assert view.shown == sorted(touched) and len(touched) < 400
    page = open_page(view.save(tmp_path / "blocks.html"))
    assert (
        page.locator(".mv-bm-rest").inner_text()
        == f"and {4096 - len(touched):,} blocks that this run never touched: free"
    )
    step = int(page.locator(".mv-readout").inner_text().split()[1])
    kinds = block_states(trace.at(step), request_numbers(trace))
    wanted = [colours(*kinds[block], False) for block in sorted(touched)]
    assert read(page.locator("canvas[data-pool=gpu]"))[: len(wanted)] == wanted
    small = make_trace(num_blocks=64, steps=3, rate=0.8)
    assert BlockMap(small).shown == list(range(64)), "a small pool is shown whole"


INK = "() => { const c = document.querySelector('.mv-bm-over'); const d = c.width ? c.getContext('2d').getImageData(0, 0, c.width, c.height).data : []; let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; }"


def test_a_long_table_shows_one_arrow_at_a_time(open_page, tmp_path):
    trace = make_trace(num_blocks=700, steps=8, rate=3.0, prompt=600, budget=1200)
    page = open_page(BlockMap(trace).save(tmp_path / "blocks.html"))
    state = trace.at(int(page.locator(".mv-readout").inner_text().split()[1]))
    name = max(state.requests, key=lambda r: len(state.requests[r].tables[0]))
    assert len(state.requests[name].tables[0]) > 48
    page.get_by_label("request whose block table is shown").focus()
    page.get_by_label("request whose block table is shown").select_option(name)
    assert page.evaluate(INK) == 0
    page.locator(".mv-bm-strip canvas").hover(position={"x": 4, "y": 4})
    assert 0 < page.evaluate(INK) < 6000


def test_tokens_are_text_when_a_tokenizer_is_known(open_page, tmp_path):
    class Words:
        def decode(self, ids):
            return "".join(f" w{i}" if n else f"w{i}" for n, i in enumerate(ids))

    trace = make_trace(num_blocks=97, steps=20)
    page = open_page(BlockMap(trace, tokenizer=Words()).save(tmp_path / "blocks.html"))
    page.evaluate(GO, 19)
    page.wait_for_timeout(100)
    owner, its = next((r, its) for r, its in trace.at(19).requests.items() if its.tables[0])
    tokens = next(e for e in trace.events if e[0] == "add" and e[1] == owner)[7]
    page.get_by_label("block number to pin").fill(str(its.tables[0][0]))
    page.keyboard.press("Enter")
    assert "".join(f" w{t}" for t in tokens[:4]).strip() in page.locator("aside").inner_text()
    trace.tokenizer = Words()
    assert BlockMap(trace).tokenizer is trace.tokenizer


@pytest.mark.slow
def test_a_large_page_is_small(tmp_path):
    trace = make_trace(
        num_blocks=4096, steps=500, rate=1.2, block_size=16, seqs=256, prompt=400, output=160, budget=2048
    )
    view = BlockMap(trace)
    payload = view.data()
    assert len(payload.bytes()) * 4 / 3 + len(payload.json()) < 150_000
    assert payload.header["tokens"] is None, "tokens would not fit, and were not asked for"
    assert BlockMap(trace, tokens=True).data().header["tokens"] is not None
    assert view.save(tmp_path / "blocks.html").stat().st_size < 150_000 + 40_000


def test_a_figure_shows_any_step(trace):
    axes = trace.plot_blocks(step=5)
    kinds = [kind for kind, _ in block_states(trace.at(5), request_numbers(trace))]
    drawn = {c.get_offsets().shape[0] for c in axes.collections}
    assert {kinds.count("used"), kinds.count("free"), 1} <= drawn | {0}
    assert BlockMap(trace).to_png().startswith(b"\x89PNG")
    with pytest.raises(IndexError):
        trace.plot_blocks(step=trace.num_steps)


def test_a_trace_that_begins_in_the_middle(open_page, tmp_path):
    """The first keyframe is then not empty."""
    whole = make_trace(num_blocks=97, steps=60, rate=0.8)
    cut = next(i for i, e in enumerate(whole.events) if e[0] == "step" and e[1] == 30)
    rest = Trace(whole.header, whole.at(29))
    rest.events = whole.events[cut:]
    page = open_page(BlockMap(rest).save(tmp_path / "blocks.html"))
    for step in (0, 29):
        page.evaluate(GO, step)
        wanted = [
            colours(kind, owner, False) for kind, owner in block_states(whole.at(30 + step), request_numbers(rest))
        ]
        assert read(page.locator("canvas[data-pool=gpu]"))[:97] == wanted


def test_the_summary_counts():
    trace = make_trace(num_blocks=97, steps=60, rate=0.8)
    steps = trace.to_pandas()["steps"]
    words = BlockMap(trace).summary()
    assert (
        f"Most in use: {steps['used_blocks'].max()} of 96 blocks, at step {int(np.argmax(steps['used_blocks']))}."
        in words
    )
    assert f"{steps['cached_blocks'].iloc[-1]} free ones hold cached tokens" in words
