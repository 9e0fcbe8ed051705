"""The documentation pages: every notebook is there, as readers should see it, and nothing is fetched from elsewhere."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm import literate

ROOT = Path(__file__).parents[2]
PAGES = runpy.run_path(str(ROOT / "site/pages.py"))


def notebook(*sources: str) -> literate.Notebook:
    cells = [
        {"id": f"c{i}", "cell_type": "code", "metadata": {}, "source": s, "outputs": []} for i, s in enumerate(sources)
    ]
    return literate.parse_notebook(
        json.dumps({"nbformat": 4, "nbformat_minor": 5, "cells": cells}), "nbs/x.ipynb", Path("x")
    )


def test_directives_and_hidden_cells_are_left_out():
    page = PAGES["page"](
        notebook("#| default_exp x", "#| export\nx = 1", "#| hide\ny = 2", "#| export\n#| hide\nz = 3", "w = 4")
    )
    assert [cell["source"] for cell in page["cells"]] == ["x = 1", "w = 4"]


def test_contents_follow_the_parts():
    names = ["nbs/index.ipynb", "nbs/1_core/02_b.ipynb", "nbs/8_new/a.ipynb", "nbs/literate.ipynb"]
    text = PAGES["contents"]([literate.Notebook(Path(name), name, "", {}, ()) for name in names])
    assert re.findall(r":caption: (.*)", text) == ["The core", "8_new", "The toolchain"]
    assert re.findall(r"^\w.*", text, re.MULTILINE) == ["1_core/02_b", "8_new/a", "literate"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pages, html = tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("html")
    PAGES["main"](pages)
    command = [
        "-m",
        "sphinx",
        "-b",
        "html",
        "-W",
        "--keep-going",
        "-q",
        "-c",
        str(ROOT / "site"),
        str(pages),
        str(html),
    ]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return html


@pytest.mark.slow
def test_every_notebook_has_a_page_in_the_menu(site):
    index = (site / "index.html").read_text()
    for path in literate.notebook_paths(ROOT):
        page = path.relative_to(ROOT / "nbs").with_suffix(".html").as_posix()
        assert (site / page).exists()
        assert page == "index.html" or f'href="{page}"' in index


@pytest.mark.slow
def test_pages_fetch_nothing_and_show_no_directives(site):
    for path in site.glob("**/*.html"):
        text = path.read_text()
        assert re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?:https?:)?//[^"]*"', text) == []
        assert "default_exp" not in text or path.name == "literate.html"


@pytest.mark.slow
def test_formulas_need_no_script(site):
    pages = [path.read_text() for path in site.glob("**/*.html")]
    assert any('<math xmlns="http://www.w3.org/1998/Math/MathML"' in page for page in pages)
    assert not any(re.search(r"<script[^>]*mathjax", page, re.IGNORECASE) for page in pages)
