"""What all views share: forms, messages in place of a view, pages with one cursor, the command, the palette, the payload."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import tiny_tokenizer
from viz_traces import aborted, make_trace

from minivllm.cli import main
from minivllm.core.events import TraceHeader
from minivllm.core.trace import Trace
from minivllm.lab import Constant, simulate
from minivllm.lab.readers import read_azure
from minivllm.lab.workload import poisson, shared_prefix
from minivllm.viz import BlockMap, Page, PrefixTree
from minivllm.viz.assets import sources, version
from minivllm.viz.page import show
from minivllm.viz.palette import DARK, LIGHT, NUM_OWNER_COLOURS
from minivllm.viz.payload import Payload, varints
from minivllm.viz.timeline import _seconds
from minivllm.viz.view import most_eventful


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(num_blocks=97, steps=40)


# ---- messages


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Trace(TraceHeader()), "Nothing happened"),
        (lambda: aborted(0), "1 request was added and 1 ended again"),
        (lambda: Trace(TraceHeader(version=99)), "a trace of version 99"),
    ],
)
def test_a_message_stands_in_place_of_the_view(made, words, open_page, tmp_path):
    for view in (BlockMap(made()), show(made())):
        assert words in view.summary()
        page = open_page(view.save(tmp_path / "view.html"))
        assert words in page.locator(".mv-problem").inner_text()
        with pytest.raises(ValueError, match=words):
            view.to_png()


def test_broken_files(open_page, tmp_path):
    broken, other = tmp_path / "broken.jsonl", tmp_path / "other.jsonl"
    broken.write_text("not json\n")
    other.write_text('{"trace": {"version": 99}}\n')
    assert "broken.jsonl, line 1" in BlockMap(broken).summary()
    assert "version 99" in show(other).summary()
    page = open_page(BlockMap(broken).save(tmp_path / "view.html"))
    assert "broken.jsonl, line 1" in page.locator(".mv-problem").inner_text()
    with pytest.raises(FileNotFoundError):
        BlockMap(tmp_path / "none.jsonl")
    with pytest.raises(TypeError, match="got int"):
        BlockMap(3)


def test_short_lives(open_page, tmp_path):
    one = make_trace(num_blocks=97, steps=1, rate=3.0)
    page = open_page(BlockMap(one).save(tmp_path / "one.html"))
    assert "one step" in page.locator(".mv-note").inner_text()
    assert page.get_by_label("play", exact=True).is_disabled()
    page = open_page(BlockMap(aborted(2)).save(tmp_path / "aborted.html"))
    assert "1 aborted before their turn" in page.locator(".mv-note").inner_text()


# ---- forms


def test_the_notebook_gets_widget_page_and_words(trace):
    pytest.importorskip("anywidget")
    view = BlockMap(trace)
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain", "image/png"}
    assert bundle["text/plain"] == view.summary() == repr(view)
    assert "http" not in bundle["text/html"].replace("http://www.w3.org/2000/svg", "")
    state = view.widget.get_state()
    assert len(state["payload"]) == len(view.data().bytes()) < 20_000
    assert len(bundle["text/html"]) < 70_000


def test_a_renderer_without_scripts_has_a_picture(trace):
    for view in (BlockMap(trace), show(trace), PrefixTree(trace)):
        assert base64.b64decode(view._repr_mimebundle_()["image/png"]).startswith(b"\x89PNG"), view.title


def test_a_cell_that_runs_again_closes_what_it_showed(trace, monkeypatch):
    """Thirty times the same cell: one view is left; views of other cells, and of the same run of the cell, stay."""
    pytest.importorskip("anywidget")
    import IPython
    from ipywidgets.widgets.widget import _instances

    shell = SimpleNamespace(parent_header={})
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    before, shown = len(_instances), []

    def run(cell, number, count=1):
        shell.parent_header = {"header": {"msg_id": f"run {number}"}, "metadata": {"cellId": cell}}
        for _ in range(count):
            shown.append(BlockMap(trace))
            shown[-1]._repr_mimebundle_()

    run("other", 0)
    alone = len(_instances) - before
    for number in range(30):
        run("a", number)
    assert len(_instances) - before == 2 * alone
    assert sum("_payload" in view.__dict__ for view in shown) == 2
    run("a", 99, count=3)
    assert len(_instances) - before == 4 * alone
    assert shown[1]._repr_mimebundle_()["text/plain"], "a closed view can be shown again"
    for view in shown:
        view.close()


@pytest.mark.parametrize("seconds", [0, 3e-7, 0.0042, 0.25, 2.41, 75.3, 2410.0, 99999.0])
def test_both_languages_write_lengths_of_time_alike(seconds, browser):
    page = browser.new_page()
    page.add_script_tag(
        content=sources()["ui"].replace("export ", "") + "\nglobalThis.duration = duration;", type="module"
    )
    page.wait_for_function("globalThis.duration")  # modules run when the browser likes
    words = page.evaluate(f"duration({seconds})")
    page.close()
    assert words == _seconds(seconds) and "e" not in words and not words.startswith("0.00")


def test_controls_keep_their_keys_in_jupyterlab(trace, open_page, tmp_path):
    """JupyterLab takes arrow keys for itself, unless an element says that it needs them."""
    page = open_page(show(trace).save(tmp_path / "page.html"), views=4)
    assert page.locator("input, select").count() >= 5
    assert (
        page.locator("input:not([data-lm-suppress-shortcuts]), select:not([data-lm-suppress-shortcuts])").count() == 0
    )


def test_a_run_opens_where_most_happens(open_page, tmp_path):
    trace = make_trace(num_blocks=50, steps=100, rate=0.9)
    step = most_eventful(trace)
    happened = {row.decision.split()[0] for row in trace.to_pandas()["decisions"].itertuples() if row.step == step}
    assert "preempt" in happened and step > 0
    page = open_page(show(trace).save(tmp_path / "page.html"), views=4)
    assert page.locator(".mv-readout").inner_text() == f"step {step} of 99"


def test_what_does_not_fit_in_a_notebook_says_so(trace, monkeypatch):
    monkeypatch.setattr("minivllm.viz.view.HTML_LIMIT", 10_000)
    assert "Save it beside the notebook" in BlockMap(trace)._html_for_notebook()


def test_refresh_shows_what_has_come_since():
    trace = make_trace(num_blocks=97, steps=40)
    events, trace.events = trace.events, []
    view = BlockMap(trace)
    assert "Nothing happened" in view.summary()
    trace.events += events
    view.refresh()
    assert "in 40 steps" in view.summary() and view.data().header["trace"]["steps"] == 40


def test_saving_names_what_is_wrong(trace, tmp_path):
    with pytest.raises(ValueError, match=r"saved as \.html, got 'x\.png'"):
        BlockMap(trace).save(tmp_path / "x.png")
    with pytest.raises(ValueError, match="at least one view"):
        Page([])
    with pytest.raises(ValueError, match="no ES module nothing"):
        sources("nothing")


# ---- several views


def test_views_of_one_trace_share_a_cursor(trace, open_page, tmp_path):
    other = make_trace(num_blocks=97, steps=30, seed=5)
    body = "".join(view.to_html() for view in (BlockMap(trace), BlockMap(trace), BlockMap(other)))
    (tmp_path / "three.html").write_text(f"<!doctype html><link rel=icon href='data:,'><body>{body}")
    page = open_page(tmp_path / "three.html", views=3)
    page.get_by_label("step", exact=True).first.fill("7")
    assert [out.inner_text() for out in page.locator(".mv-readout").all()] == [
        "step 7 of 39",
        "step 7 of 39",
        f"step {most_eventful(other)} of 29",
    ]


def test_a_page_has_one_player(trace, open_page, tmp_path):
    view = Page([BlockMap(trace), BlockMap(trace)], "Two")
    page = open_page(view.save(tmp_path / "two.html"), views=2)
    assert page.locator(".mv-player").count() == 1
    page.get_by_label("last step").click()
    images = page.eval_on_selector_all("canvas[data-pool=gpu]", "all => all.map(c => c.toDataURL())")
    assert images[0] == images[1]
    page.get_by_label("first step").click()
    assert page.locator("canvas[data-pool=gpu]").first.evaluate("c => c.toDataURL()") != images[0]
    assert view.to_png().startswith(b"\x89PNG")


def test_playing_reaches_the_end(trace, open_page, tmp_path):
    page = open_page(BlockMap(trace).save(tmp_path / "view.html"))
    page.get_by_label("speed, in steps a second").select_option("100")
    page.get_by_label("play", exact=True).click()
    page.wait_for_function("document.querySelector('.mv-readout').textContent === 'step 39 of 39'")
    assert page.get_by_label("play", exact=True).is_visible()


def test_it_follows_the_page_into_the_dark(trace, open_page, tmp_path):
    page = open_page(BlockMap(trace).save(tmp_path / "view.html"))
    assert page.locator(".mv-card").get_attribute("data-theme") == "light"
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector(".mv-card[data-theme=dark]")
    background = page.locator(".mv-card").evaluate("e => getComputedStyle(e).backgroundColor")
    assert background == "rgb({}, {}, {})".format(*bytes.fromhex(DARK["panel"][1:]))


# ---- the command


def test_the_command_writes_a_page(trace, tmp_path, capsys, open_page, monkeypatch):
    trace.save(tmp_path / "run.jsonl")
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    assert main(["trace", "view", str(tmp_path / "run.jsonl"), "--output", str(tmp_path / "page.html")]) == 0
    assert opened == [(tmp_path / "page.html").as_uri()]
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert main(["trace", "view", str(tmp_path / "run.jsonl"), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "page.html"),
        "no browser could be started: open the file by hand",
    ]
    page = open_page(tmp_path / "page.html")
    assert page.title() == "run.jsonl" and page.locator("h1").inner_text() == "run.jsonl"


def test_the_command_shows_text_and_compares(trace, tmp_path, capsys, open_page):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    for name, seed in (("a", 0), ("b", 1)):
        make_trace(num_blocks=97, steps=9, vocabulary=200, seed=seed).save(tmp_path / f"{name}.jsonl")
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    tokens = next(event[7] for event in Trace.load(files[0]).events if event[0] == "add")
    output = ["--output", str(tmp_path / "page.html"), "--no-open"]
    assert main(["trace", "view", *files, "--tokenizer", str(tmp_path / "model"), *output]) == 0
    page = open_page(tmp_path / "page.html", views=5)
    assert page.locator("h1").inner_text() == "a.jsonl and b.jsonl" and page.locator(".mv-compare").count() == 1
    page.evaluate("() => [...globalThis.minivllmCursors.values()].forEach((cursor) => cursor.go(8))")
    page.get_by_label("block number to pin").fill("1")
    page.keyboard.press("Enter")
    page.wait_for_selector("aside dd")
    assert tokenizer.decode(tokens[1:3]) in page.locator("aside").inner_text()
    assert main(["trace", "view", files[0], str(tmp_path / "c.jsonl"), "--no-open"]) == 2
    assert main(["trace", "view", files[0], "--tokenizer", str(tmp_path / "none"), "--no-open"]) == 2
    error = capsys.readouterr().err
    assert "c.jsonl" in error and str(tmp_path / "none") in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("x", "run.jsonl, line 1"),
        ('{"trace": {"version": 99}}', "version 99"),
        ("", "is empty"),
    ],
)
def test_the_command_says_what_is_wrong(text, words, tmp_path, capsys):
    if text is not None:
        (tmp_path / "run.jsonl").write_text(text)
    assert main(["trace", "view", str(tmp_path / "run.jsonl"), "--no-open"]) == 2
    assert words in capsys.readouterr().err


# ---- what travels


def sixty_five_requests(folder: Path) -> Trace:
    """More requests than 64: their made-up token ids need more than 32 bits."""
    return simulate(poisson(20.0, 65, (16, 64), (4, 16)), cost_model=Constant(0.01)).trace


def a_shared_prefix(folder: Path) -> Trace:
    return simulate(shared_prefix(40.0, 200, 20, 64, (16, 64), (4, 16)), cost_model=Constant(0.01)).trace


def read_from_a_file(folder: Path) -> Trace:
    """The answers that the readers of workloads make up have ids of 60 bits."""
    path = folder / "azure.csv"
    rows = [f"2023-11-16 18:17:0{i}.9799600,{40 + i},{20 + i}" for i in range(9)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return simulate(read_azure(path), cost_model=Constant(0.01)).trace


@pytest.mark.parametrize("make", [sixty_five_requests, a_shared_prefix, read_from_a_file])
def test_runs_with_made_up_tokens_are_shown(make, open_page, tmp_path):
    trace = make(tmp_path)
    ids = [event.prompt for event in trace if event.kind == "add"]
    ids += [new for event in trace if event.kind == "update" for new in event.tokens.values()]
    assert max(max(tokens) for tokens in ids if len(tokens)) >= 2**31
    assert BlockMap(trace, tokens=True).data().header["tokens"] is not None
    trace.save(tmp_path / "run.jsonl")
    page = open_page(show(tmp_path / "run.jsonl").save(tmp_path / "run.html"), views=4)
    assert page.locator(".mv-card[data-ready]").count() == 4
    tree = PrefixTree(trace)
    node = next(i for i, tokens in enumerate(tree.tree.tokens) if tokens[0] >= 2**24 and tree.tree.depth[i] == 1)
    assert tree._text(node) == f"request {tree.tree.request_ids[tree.tree.owners[node]]}, tokens 16 to 31"


def unpacked(data: bytes) -> list[int]:
    numbers, value, shift = [], 0, 0
    for byte in data:
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            numbers.append((value >> 1) ^ -(value & 1))
            value = shift = 0
    return numbers


def test_varints_bring_every_number_back():
    draw = np.random.default_rng(0)
    numbers = np.concatenate(
        [
            [0, -1, 1, 63, 64, -64, -65, 2**31 - 1, -(2**31)],
            draw.integers(-(2**31), 2**31, 500),
            draw.integers(-99, 99, 500),
        ]
    )
    assert unpacked(varints(numbers)) == numbers.tolist()
    assert varints([0, -1, 1]) == bytes([0, 1, 2]) and varints([]) == b""
    with pytest.raises(ValueError, match="32 bits"):
        varints([2**31])


def test_the_page_reads_what_python_packs(browser):
    payload = Payload({})
    numbers = [0, -1, 2**31 - 1, -(2**31), 300, -300]
    payload.add_numbers(numbers)
    payload.add_json({"text": "é</script>"})
    page = browser.new_page()
    page.add_script_tag(
        content=sources()["data"].replace("export ", "") + "\nglobalThis.made = { Data, fromBase64 };", type="module"
    )
    seen = page.evaluate(
        """async ([header, bytes]) => {
          const data = new made.Data(header, Uint8Array.from(bytes));
          return [Array.from(await data.part(0)), await data.json(1)];
        }""",
        [payload.full_header(), list(payload.bytes())],
    )
    page.close()
    assert seen == [numbers, {"text": "é</script>"}]
    assert "</script>" not in Payload({"x": "</script><!--"}).json()


# ---- colours


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_told_apart_by_everybody(theme):
    measures: dict = {}  # those of the chapter on colours
    chapter = json.loads((Path(__file__).parents[2] / "nbs/viz/palette.ipynb").read_text())
    exec("".join(next(cell["source"] for cell in chapter["cells"] if cell["id"] == "contrast")), measures)
    contrast, least_difference = measures["contrast"], measures["least_difference"]
    assert least_difference([theme[f"owner-{i}"] for i in range(NUM_OWNER_COLOURS)]) > 0.12
    for name in ("ink", "muted", "accent", "warning"):
        assert min(contrast(theme[name], theme[paper]) for paper in ("panel", "raised", "page")) >= 4.5, name
    for name in (*(f"owner-{i}" for i in range(NUM_OWNER_COLOURS)), "free", "cached", "null"):
        assert contrast(theme[name], theme["panel"]) >= 3, name
    assert LIGHT.keys() == DARK.keys()


def test_both_languages_count_the_owners_alike():
    assert f"OWNER_COLOURS = {NUM_OWNER_COLOURS};" in sources()["schema"]
    assert len(version()) == 8


def test_views_load_light():
    """A view is made and saved without torch, and without the libraries of figures and widgets."""
    code = "import sys, minivllm.viz.page, minivllm.viz.block_map; print(*{'torch', 'pandas', 'matplotlib', 'anywidget', 'ipywidgets'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# ---- a real model


@pytest.mark.slow
def test_a_recorded_run_shows_its_text(llm, open_page, tmp_path):
    from minivllm import SamplingParams

    with llm.record() as trace:
        (output,) = llm.generate(
            ["The quick brown fox jumps over the lazy dog, and the next day it does so once more."],
            SamplingParams(temperature=0, max_tokens=8),
            use_tqdm=False,
        )
    page = open_page(trace.show().save(tmp_path / "run.html"), views=len(trace.show().views))
    block = next(event[3][0] for event in trace.events if event[0] == "alloc")
    page.get_by_label("block number to pin").fill(str(block))
    page.keyboard.press("Enter")
    page.wait_for_selector("aside dd")
    assert "The quick brown fox jumps over the lazy dog" in page.locator("aside").inner_text()
    assert output.outputs[0].text
