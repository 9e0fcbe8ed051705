"""A real JupyterLab in a real browser: views appear, move together, tell what the trace tells, and leave no state behind."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from viz_traces import make_trace

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-this-test"
CELLS = [
    """
import threading, time
from types import SimpleNamespace
import numpy as np
from minivllm.core.trace import Trace
from minivllm.viz import BlockMap, Compare, Dashboard, PrefixTree, SamplerExplorer, Timeline, Waste
trace = Trace.load("run.jsonl")
""",
    "blocks = BlockMap(trace)\nblocks",
    "timeline = Timeline(trace)\ntimeline",
    "trace.show()",
    """
class Engine:
    def __init__(self):
        self.steps = 0
    def get_metrics(self):
        self.steps += 1
        names = ("kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
        return dict.fromkeys(names, 0) | {
            "num_requests_running": self.steps % 7, "num_requests_waiting": 1, "num_steps": self.steps, "generation_tokens": 5 * self.steps}

dashboard = Dashboard(Engine())
dashboard
""",
    """
from minivllm.runtime.sample_record import SampleRecord
from minivllm.sampling.params import SamplingParams
logits = np.random.default_rng(0).normal(0, 2, 49152).astype(np.float32)
SamplerExplorer(SampleRecord(logits, SamplingParams(temperature=0.8, top_k=40, seed=1), (1, 2), (), 1))
""",
    "PrefixTree(trace)",
    "Waste(trace)",
    'Compare(trace, "other.jsonl")',
]
OF_THE_TRACE = (1, 2, 3, 6, 7, 8)  # cells whose views follow its cursor  # fmt: skip
READ = """
from ipywidgets.widgets.widget import _instances
print("the kernel sees", blocks.widget.step, blocks.widget.block, repr(blocks.widget.request), len(_instances), "widgets")
"""


def notebook(cells: list[str]) -> dict[str, Any]:
    made = [
        {
            "cell_type": "code",
            "id": f"c{i}",
            "metadata": {},
            "source": c.strip(),
            "outputs": [],
            "execution_count": None,
        }
        for i, c in enumerate(cells)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved trace and a notebook that shows it."""
    path = tmp_path_factory.mktemp("lab")
    make_trace(num_blocks=96, steps=80).save(path / "run.jsonl")
    make_trace(num_blocks=96, steps=80, budget=32).save(path / "other.jsonl")
    (path / "views.ipynb").write_text(json.dumps(notebook([*CELLS, READ])))
    return path


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab on that folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.log"
    options = ["--no-browser", "--allow-root", f"--port={port}", "--port-retries=0", f"--IdentityProvider.token={TOKEN}",
               "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]  # fmt: skip
    with log.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", *options], cwd=folder, stdout=written, stderr=subprocess.STDOUT
        )
    try:
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={TOKEN}", timeout=5).read()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, "the server did not start"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


OPEN = """async (name) => {
  const app = window.jupyterapp;
  await app.restored;
  const panel = await app.commands.execute('docmanager:open', {path: name, factory: 'Notebook', kernel: {name: 'python3'}});
  await panel.context.ready;
  await panel.sessionContext.ready;
  for (let i = 0; i < 600 && panel.sessionContext.session?.kernel?.connectionStatus !== 'connected'; i++) await new Promise((r) => setTimeout(r, 50));
  app.shell.activateById(panel.id);
  await app.commands.execute('notebook:run-all-cells');
  // JupyterLab draws only the cells in sight until one scrolls to them: show all
  panel.content.notebookConfig = {...panel.content.notebookConfig, windowingMode: 'none'};
}"""


READY = "[1, 2, 3, 4, 5, 6, 7, 8].every((i) => document.querySelectorAll('.jp-Notebook .jp-Cell')[i]?.querySelector('.mv-card[data-ready]'))"


def unanswered(message: Any) -> bool:
    """Whether JupyterLab asked its own server for something that is not there (a workspace, a session that has gone): views load nothing by address."""
    return message.text.startswith("Failed to load resource") and message.location["url"].startswith("http://127.0.0.1")


@pytest.fixture(scope="module")
def lab(server: str, browser: Any) -> Iterator[Any]:
    """A browser page with the notebook open and run. `lab.problems`: errors on the console, requests to elsewhere."""
    page = browser.new_page(viewport={"width": 1500, "height": 1200})
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" and not unanswered(m) else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    inside = (server, server.replace("http", "ws"), "blob:", "data:")
    page.on("request", lambda r: None if r.url.startswith(inside) else problems.append(f"request to {r.url}"))
    page.problems = problems
    page.goto(f"{server}/lab?token={TOKEN}")
    page.wait_for_function("window.jupyterapp !== undefined", timeout=90_000)
    page.evaluate(OPEN, "views.ipynb")
    page.wait_for_function(READY, timeout=60_000)
    yield page
    page.close()


def output(page: Any, cell: int) -> Any:
    return page.locator(".jp-Notebook .jp-Cell").nth(cell)


def step_shown(where: Any) -> str:
    return where.locator(".mv-readout").first.inner_text()


def kernel_sees(page: Any) -> str:
    page.evaluate("""async () => {
      const notebook = window.jupyterapp.shell.currentWidget.content;
      notebook.deselectAll();
      notebook.activeCellIndex = notebook.widgets.length - 1;
      await window.jupyterapp.commands.execute('notebook:run-cell');
    }""")
    return page.locator(".jp-Notebook .jp-Cell").last.locator(".jp-OutputArea-output").inner_text().strip()


def kernel_counts(page: Any) -> str:
    """The live widgets in the kernel."""
    found = re.search(r"(\d+) widgets", kernel_sees(page))
    assert found
    return found.group(1)


def test_scrubbing_one_view_moves_all_of_them_and_the_kernel_hears_of_it(lab):
    slider = output(lab, 1).locator(".mv-player input[type=range]")
    slider.fill("37")
    for cell in OF_THE_TRACE:
        assert step_shown(output(lab, cell)) == "step 37 of 79"
    lab.wait_for_timeout(400)
    assert "the kernel sees 37" in kernel_sees(lab)
    output(lab, 2).get_by_role("button", name="step forward").click()
    for cell in OF_THE_TRACE:
        assert step_shown(output(lab, cell)) == "step 38 of 79"
    assert output(lab, 6).locator(".mv-subtitle").inner_text().endswith("after step 38")
    assert output(lab, 7).locator("caption").inner_text().startswith("Step 38:")
    for told in output(lab, 8).locator(".mv-compare-run .mv-lanes-detail").all_inner_texts():
        assert told.startswith("Step 38")


def test_the_sliders_keys_are_its_own(lab):
    """JupyterLab has shortcuts on arrow, page and home keys."""
    slider = output(lab, 1).locator(".mv-player input[type=range]")
    slider.fill("20")
    slider.focus()
    for key, step in (("ArrowRight", 21), ("ArrowLeft", 20), ("ArrowDown", 19), ("Home", 0), ("End", 79)):
        lab.keyboard.press(key)
        assert step_shown(output(lab, 1)) == f"step {step} of 79", key
    lab.keyboard.press("PageDown")
    assert step_shown(output(lab, 1)) != "step 79 of 79"


def test_a_cell_that_runs_again_leaves_one_widget(lab):
    before = kernel_counts(lab)
    for _ in range(5):
        lab.evaluate("""async () => {
          const notebook = window.jupyterapp.shell.currentWidget.content;
          notebook.deselectAll();
          notebook.activeCellIndex = 7;
          await window.jupyterapp.commands.execute('notebook:run-cell');
        }""")
    assert kernel_counts(lab) == before
    output(lab, 7).locator(".mv-card[data-ready]").wait_for()


def test_a_view_made_later_is_where_the_others_are(lab):
    lab.evaluate("""() => {
      const [[, cursor], ...others] = globalThis.minivllmCursors;
      cursor.go(12);
      for (const [key] of others) globalThis.minivllmCursors.delete(key);
    }""")
    lab.evaluate("""async () => {
      const notebook = window.jupyterapp.shell.currentWidget.content;
      notebook.deselectAll();
      notebook.activeCellIndex = 8;
      await window.jupyterapp.commands.execute('notebook:run-cell');
    }""")
    output(lab, 8).locator(".mv-card[data-ready]").wait_for()
    assert step_shown(output(lab, 8)) == "step 12 of 79"
    output(lab, 8).get_by_role("button", name="go there").click()
    assert step_shown(output(lab, 1)) == step_shown(output(lab, 8)) != "step 12 of 79"


def test_a_click_on_a_block_lists_the_history_that_the_tables_have(lab, folder):
    from minivllm.core.trace import Trace

    table = Trace.load(folder / "run.jsonl").to_pandas()["blocks"]
    canvas = output(lab, 1).locator("canvas[data-pool=gpu]").first
    for block in (5, 40):
        columns, pitch = (float(canvas.get_attribute(f"data-{name}")) for name in ("columns", "pitch"))
        cell = pitch / lab.evaluate("devicePixelRatio")
        canvas.click(position={"x": (block % columns + 0.5) * cell, "y": (block // columns + 0.5) * cell})
        rows = output(lab, 1).locator(".mv-bm-details tbody tr")
        rows.first.wait_for()
        assert f"Block {block}" in output(lab, 1).locator(".mv-bm-details").inner_text()
        shown = rows.evaluate_all("all => all.map(({dataset: d}) => [+d.step, d.event, d.request, d.hash])")
        of_block = table[table.block_id == block]
        expected = [
            [r.step, r.event, r.request_id or "", r.hash[:6] if r.event == "cached" else ""]
            for r in of_block.itertuples()
        ]
        assert len(expected) > 2
        assert [row[:3] for row in shown] == [row[:3] for row in expected]
        assert [row[3] for row in shown if row[1] == "cached"] == [row[3] for row in expected if row[1] == "cached"]
    lab.wait_for_timeout(400)
    assert "40" in kernel_sees(lab)


def test_the_dashboard_lives(lab):
    card = output(lab, 4).locator(".mv-card")
    assert card.locator(".mv-status").inner_text() == "live"
    before, start = int(card.get_attribute("data-samples")), time.monotonic()
    lab.wait_for_timeout(2000)
    rate = (int(card.get_attribute("data-samples")) - before) / (time.monotonic() - start)
    assert 15 < rate < 25, f"{rate} samples a second"


def test_sliders_of_the_explorer_work(lab):
    card = output(lab, 5).locator(".mv-card")
    card.get_by_label("top_k", exact=True).fill("3")
    lab.wait_for_function("document.querySelector('.mv-odds thead').innerText.includes('3 tokens')")


def test_the_saved_notebook_is_small_and_holds_no_state(lab, folder):
    lab.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    lab.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")
    saved = (folder / "views.ipynb").read_text()
    made = json.loads(saved)
    assert made["cells"][1]["outputs"], "nothing was saved"
    assert len(saved.encode()) < 1_000_000
    assert "widgets" not in made["metadata"]
    assert "application/vnd.jupyter.widget-state+json" not in saved


def test_nothing_went_wrong_and_nothing_left_the_machine(lab):
    assert lab.problems == []


def test_nbconvert_makes_a_page_that_works_without_a_kernel(lab, folder, browser):
    convert = [sys.executable, "-m", "nbconvert", "--to", "html", "views.ipynb"]
    subprocess.run(convert, cwd=folder, check=True, capture_output=True)
    page, outside, errors = browser.new_page(), [], []
    page.route(re.compile("^https?://"), lambda route: (outside.append(route.request.url), route.fulfill(body="")))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((folder / "views.html").as_uri())
    page.wait_for_function("document.querySelectorAll('.mv-card[data-ready]').length >= 11")
    page.locator(".mv-card input[type=range][aria-label=step]").first.fill("21")
    shown = page.locator(".mv-readout").all_inner_texts()
    assert len(shown) == len(OF_THE_TRACE) and set(shown) == {"step 21 of 79"}
    assert len(page.query_selector_all(".mv-dashboard, .mv-sampler-explorer")) == 2
    # nbconvert's own template asks for these
    assert all("/require.js/" in url or "/mathjax/" in url for url in outside)
    assert errors == []
    page.close()
