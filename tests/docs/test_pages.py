"""The scripts that gather the pages of the site, piece by piece."""

import io
import json
import re
from pathlib import Path
from typing import Annotated, Protocol

import annotations
import api
import book
import links
import picture
import pydantic
import pytest
import replays
import results
import runs
from PIL import Image

import minivllm
from minivllm import literate
from minivllm.lab import replay

ROOT = Path(__file__).parents[2]


def notebook(*sources: str, name: str = "nbs/x.ipynb", kind: str = "code") -> literate.Notebook:
    cells = [
        {"id": f"c{i}", "cell_type": kind, "metadata": {}, "source": s, "outputs": []} for i, s in enumerate(sources)
    ]
    return literate.parse_notebook(json.dumps({"nbformat": 4, "nbformat_minor": 5, "cells": cells}), name, Path(name))


# ---- the book


def test_directives_and_hidden_cells_are_left_out():
    page = book.page(
        notebook("#| default_exp x", "#| export\nx = 1", "#| hide\ny = 2", "#| export\n#| hide\nz = 3", "w = 4")
    )
    assert [cell["source"] for cell in page["cells"]] == ["x = 1", "w = 4"]


def test_marks_for_the_tests_are_left_out():
    assert book.page(notebook("# NBVAL_IGNORE_OUTPUT\nx = 1  # NBVAL_ is a prefix"))["cells"][0]["source"] == (
        "x = 1  # NBVAL_ is a prefix"
    )


def test_what_jupyterlab_folds_is_folded():
    hidden = notebook("solution = 1")
    hidden.data["cells"][0]["metadata"] = {"jupyter": {"source_hidden": True}}
    assert book.page(hidden)["cells"][0]["metadata"]["tags"] == ["hide-input"]


def test_cells_of_the_module_are_marked():
    assert book.page(notebook("#| export\nx = 1"))["cells"][0]["metadata"]["tags"] == ["exported"]
    assert "tags" not in book.page(notebook("x = 1"))["cells"][0]["metadata"]


PART = book.Part(2, "Blocks", "Where?", (book.Chapter("a/one", "Who?", fast=True), book.Chapter("a/two", "What?")))


def test_a_question_that_is_the_title_is_asked_once():
    assert "| [*What*?](/book/a/two.ipynb) |  |" in book.part_page(PART, {"a/one": "One", "a/two": "*What*?"})


def test_a_chapter_says_where_it_stands():
    data = book.chapter_page(notebook("# Title\n\nText", kind="markdown"), PART, PART.chapters[0])
    first = data["cells"][0]["source"]
    assert first.startswith("# Title\n") and first.endswith("\n\nText")
    assert "[Part 2: Blocks](/book/part_02.md)" in first and "two-hour path" in first


def test_a_chapter_of_the_path_ends_with_the_way_to_the_next():
    other = book.Part(3, "Scheduler", "When?", (book.Chapter("b/one", "How?", fast=True),))
    path = book.after([PART, other])
    assert path == {"a/one": other.chapters[0]}
    pages = [
        book.chapter_page(notebook("# Title", kind="markdown"), part, c, path.get(c.path))["cells"]
        for part, c in ((PART, PART.chapters[0]), (PART, PART.chapters[1]), (other, other.chapters[0]))
    ]
    assert [len(cells) for cells in pages] == [2, 1, 1]
    assert pages[0][-1]["source"].endswith("[How?](/book/b/one.ipynb)")


def test_a_chapter_without_a_title_is_an_error():
    with pytest.raises(ValueError, match=r"nbs/x.ipynb: .* begins with its title"):
        book.chapter_page(notebook("Text", kind="markdown"), PART, PART.chapters[0])


def test_a_part_lists_its_chapters_in_order():
    text = book.part_page(PART, {"a/one": "One", "a/two": "Two"})
    assert re.findall(r"\| \[(\w+)\]\(/book/(a/\w+)\.ipynb\) \| \w+\? \| (●?)", text) == [
        ("One", "a/one", "●"),
        ("Two", "a/two", ""),
    ]
    assert text.index("a/one\na/two") > text.index("{toctree}")


# ---- the reference


def test_every_module_has_a_page_and_every_package_a_line():
    found = api.modules(ROOT)
    assert {"minivllm.core.scheduler", "minivllm.cli", "minivllm_kernels.cuda.decode"} <= found.keys()
    packages = {path.parent.name for path in (ROOT / "minivllm").glob("*/__init__.py")}
    assert packages <= api.PACKAGES.keys(), "a package without a line in PACKAGES"


def test_a_package_that_hands_names_on_lists_them():
    text = api.module_page("minivllm.lab", ROOT / "minivllm/lab/__init__.py", None)
    assert ":py:obj:`~minivllm.lab.simulation.simulate`" in text and "automodule" not in text


def test_what_a_package_imports_for_itself_is_not_handed_on():
    names = [name for name, _ in api.handed_on("minivllm", ROOT / "minivllm/__init__.py")]
    assert sorted([*names, "__version__"]) == sorted(minivllm.__all__)


def test_names_that_stand_together_stay_together():
    lines = [":param low, high: the bounds", ":param kind: one, two: three", ":ivar a, b, c: counts", "a, b: text"]
    annotations.join_names(None, "", "", None, None, lines)
    assert lines == [":param low,high: the bounds", ":param kind: one, two: three", ":ivar a,b,c: counts", "a, b: text"]


def test_a_signature_is_readable():
    def read(what, text="(a=<factory>, b=<function A.<lambda>>)"):
        return annotations.readable_signature(None, "class", "", what, None, text, None)[0]

    class Body(pydantic.BaseModel):
        count: Annotated[int, pydantic.Field(ge=0)] | None = None
        names: list[Annotated[str, pydantic.Field(max_length=3)]]

    assert read(Body) == "(*, count: int | None = None, names: list[str])"
    assert (read(int), read(Protocol)) == ("(a=..., b=...)", "")


def test_the_words_before_a_colon_are_no_type():
    lines = ["the null block is not counted.", "", ":type: All blocks"]
    annotations.join_first_line(None, "property", "", None, None, lines)
    assert lines == ["All blocks: the null block is not counted.", ""]


def test_a_bare_name_means_what_its_module_imports():
    assert annotations.imported("minivllm.engine.core")["Executor"] == "minivllm.runtime.executor.Executor"


# ---- links of the pages written by hand


@pytest.mark.parametrize(
    "link, page",
    [
        ("../../../nbs/core/prefix.ipynb", "/book/core/prefix.ipynb"),
        ("../../../nbs/index.ipynb#the-two-hour-path", "/book/index.ipynb#the-two-hour-path"),
        ("../../../nbs/index.ipynb#3-the-scheduler", "/book/part_03.md"),
        ("../../../nbs/index.ipynb#10-observing", "/book/part_10.md"),
        ("../../replays.py#swap", "/gallery/swap.md"),
        ("../../../minivllm/core/policy.py", "/api/minivllm.core.policy.rst"),
        ("../../../minivllm/lab/__init__.py", "/api/minivllm.lab.rst"),
        ("../../../kernels/minivllm_kernels/cuda/decode.py", "/api/minivllm_kernels.cuda.decode.rst"),
        ("../features.md", "/features.md"),
        ("../../../tests/core/test_scheduler.py", "/tests/core/test_scheduler.md"),
    ],
)
def test_a_link_to_a_source_leads_to_its_page(link, page):
    assert links.on_site(f"[x]({link}), [y](serve.md)", Path("site/docs/guides")) == f"[x]({page}), [y](serve.md)"


def test_a_link_to_what_has_no_page_is_an_error():
    with pytest.raises(ValueError, match="a link to Makefile"):
        links.on_site("[x](../../../Makefile)", Path("site/docs/guides"))


def test_links_work_in_the_repository_too():
    for page in (ROOT / "site/docs").rglob("*.md"):
        text = page.read_text()
        assert page.name == "index.md" or "](/" not in text, page
        for link in links.sources(text):
            assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"


# ---- benchmark results


def test_any_result_becomes_tables(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    rows = [{"batch": 1, "ms": 1.23456, "peer": {"ms": 2}}, {"batch": 16, "ms": 1234.5, "more": True}]
    runs = [{"ours": {"a": [1.5, 2.5], "b": 3}, "theirs": {"a": 2}}, {"ours": {"c": 4}}]
    found = {
        "card": "Card X",
        "copy": 3020.25,
        "decode": rows,
        "host": {"steps": {"a": 0.5}},
        "none": None,
        "runs": runs,
    }
    (folder / "thing-card-x.json").write_text(json.dumps(found))
    (folder / "other-some-machine.json").write_text(json.dumps(rows))
    text = results.benchmark_page(folder, tmp_path)
    assert "## thing" in text and "### thing: Card X" in text and "### other: some machine" in text
    assert "| batch | ms | peer.ms | more |" in text and "| 16 | 1,234 | – | yes |" in text
    assert "**host: steps**" in text and "| a | 0.5 |" in text
    assert "**runs 1**" in text and "| field | ours | theirs |" in text and "| a | 1.5, 2.5 | 2 |" in text, (
        "side by side"
    )
    assert "| b | 3 | – |" in text and "**runs 2: ours**" in text


def test_a_result_without_a_machine_is_an_error(tmp_path):
    (tmp_path / "thing.json").write_text("{}")
    with pytest.raises(ValueError, match="thing.json: neither"):
        results.benchmark_page(tmp_path, tmp_path)


def test_stored_results_name_their_machines():
    text = results.benchmark_page(ROOT / "benchmarks/results", ROOT / "benchmarks")
    assert text.count("\n### ") == len(list((ROOT / "benchmarks/results").glob("*.json"))) > 0


# ---- the stored run, and what is written by hand


def test_the_stored_run_is_what_the_scheduler_does():
    trace = runs.load()
    trace.check()
    replay(trace)
    times = {event[2] for event in trace.events if event[0] == "step"}
    assert times == {0.0}, "a stored run holds no measurement"


def test_stored_files_are_small():
    assert sum(path.stat().st_size for path in runs.RUNS.iterdir()) < 100_000
    assert (ROOT / "site/static/run.gif").stat().st_size < 500_000


def test_what_works_points_to_a_test_or_a_page():
    rows = [line for line in (ROOT / "site/docs/features.md").read_text().splitlines() if line.startswith("| ")]
    claims = [row for row in rows if "●" in row or "◐" in row]
    assert len(claims) > 25
    for row in claims:
        assert re.search(r"\]\(|`tests/", row), f"nothing shows it: {row}"
        for path in re.findall(r"`(tests/[\w/]+\.py)`", row):
            assert (ROOT / path).is_file() and f"](../../{path})" in row, f"no link to {path}"


def test_the_words_below_the_picture_are_true_of_the_stored_run():
    trace = runs.load()
    names = picture.called(trace)
    assert len(set(names.values())) == len(runs.PROMPTS) == 8
    assert sum(prompt.startswith(runs.SYSTEM) for _, prompt in runs.PROMPTS) == 5
    told = picture.told(trace, names)
    preempted = [step for step, words in told.items() if "preempted" in words]
    back = [step for step, words in told.items() if "continues" in words]
    for page in ("README.md", "site/docs/index.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert re.findall(r"At step (\d+) no block is free", text) == [str(step) for step in preempted], page
        assert re.findall(r"continues at step (\d+)", text) == [str(step) for step in back], page
    film = picture.Film(trace)
    assert len(film.states) == trace.num_steps and film.frame(preempted[0]).size == (840, 560)


def test_a_replay_stands_in_the_gallery_with_a_picture():
    replay = replays.Replay("sharing", "Prefix sharing", "Look.", replays.sharing, picture=1)
    assert "[![Picture of the run: Prefix sharing](sharing.png)](/gallery/sharing.md)" in replays.card(replay)
    small = [Image.open(io.BytesIO(replays.thumbnail(replay.make(), number))) for number in (0, 1)]
    assert all(image.format == "PNG" and len(image.convert("L").getcolors()) > 20 for image in small)
    assert small[0].size != small[1].size, "each view its own picture"
