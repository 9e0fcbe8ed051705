"""The pages of the book: the notebooks as readers should see them, and a page for each part."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import contents

from minivllm.literate import Notebook, joined, read_notebook, write


@dataclass(frozen=True)
class Chapter:
    """A line of `book.toml`: the notebook's path under `nbs/` without `.ipynb`; `fast` for the two-hour path."""

    path: str
    question: str
    fast: bool = False


@dataclass(frozen=True)
class Part:
    """A part of the book. `number` counts from 1."""

    number: int
    title: str
    question: str
    chapters: tuple[Chapter, ...]

    @property
    def page(self) -> str:
        """The name of its page."""
        return f"part_{self.number:02}"


def read_parts() -> list[Part]:
    """The parts of the book, in reading order, as `book.toml` says."""
    return [
        Part(number, part["title"], part["question"], tuple(Chapter(**chapter) for chapter in part["chapters"]))
        for number, part in enumerate(contents.parts(), 1)
    ]


def tagged(metadata: dict, exported: bool) -> dict:
    """What JupyterLab folds away, such as solutions, is folded on the page too; cells of the module are marked."""
    tags = [*metadata.get("tags", [])]
    if metadata.get("jupyter", {}).get("source_hidden"):
        tags.append("hide-input")
    if exported:
        tags.append("exported")
    return {**metadata, "tags": tags} if tags else metadata


def page(notebook: Notebook) -> dict:
    """The notebook's JSON as readers should see it. Cells that only hold directives, or are hidden, are left out."""
    shown = []
    for cell, raw in zip(notebook.cells, notebook.data["cells"], strict=True):
        source = re.sub(r"^# NBVAL_\w+\n", "", cell.code.strip("\n"), flags=re.MULTILINE)  # marks for the tests
        if "hide" not in cell.directives and source.strip():
            shown.append({**raw, "source": source, "metadata": tagged(raw["metadata"], cell.exported)})
    return {**notebook.data, "cells": shown}


def module_name(notebook: Notebook) -> str | None:
    """The module that a chapter exports, as one imports it."""
    module = notebook.module
    if module is None:
        return None
    full = module if module.startswith("minivllm_kernels") else f"minivllm.{module}"
    return full.removesuffix(".__init__")


def facts(notebook: Notebook, part: Part, chapter: Chapter) -> str:
    """The line under a chapter's title: where it stands in the book, and what it exports."""
    parts = [f"[Part {part.number}: {part.title}](/book/{part.page}.md)"]
    if chapter.fast:
        parts.append("[on the two-hour path](/book/index.ipynb#the-two-hour-path)")
    if module := module_name(notebook):
        parts.append(f"[`{module}`](/api/{module}.rst)")
    return ":::{container} chapter-facts\n" + " · ".join(parts) + "\n:::"


def after(parts: Iterable[Part]) -> dict[str, Chapter]:
    """For each chapter of the two-hour path but the last: the one after it, which may stand in another part."""
    fast = [chapter for part in parts for chapter in part.chapters if chapter.fast]
    return {chapter.path: then for chapter, then in pairwise(fast)}


def chapter_page(notebook: Notebook, part: Part, chapter: Chapter, then: Chapter | None = None) -> dict:
    """A chapter's page: the notebook, with the line of facts under its title, and at its end the way `then` on the path."""
    data = page(notebook)
    first = next((cell for cell in data["cells"] if cell["cell_type"] == "markdown"), None)
    title = re.match(r"# .*", first["source"]) if first else None
    if first is None or title is None:
        raise ValueError(f"{notebook.name}: the first cell of a chapter begins with its title, '# ...'")
    first["source"] = f"{title[0]}\n\n{facts(notebook, part, chapter)}\n{first['source'][title.end() :]}"
    if then is not None:
        way = f"*Next on the two-hour path:* [{then.question}](/book/{then.path}.ipynb)"
        data["cells"].append({"id": "then", "cell_type": "markdown", "metadata": {}, "source": way})
    return data


def part_page(part: Part, titles: dict[str, str]) -> str:
    """The page of a part: its question, and its chapters with theirs, where the title does not ask it already."""
    rows = []
    for c in part.chapters:
        question = "" if c.question == re.sub("[`*]", "", titles[c.path]) else c.question
        rows.append(f"| [{titles[c.path]}](/book/{c.path}.ipynb) | {question} | {'●' if c.fast else ''} |")
    return "\n".join(
        [
            f"# {part.number}. {part.title}",
            "",
            f"*{part.question}*",
            "",
            "| chapter | its question | two-hour path |",
            "|---|---|---|",
            *rows,
            "",
            toctree(chapter.path for chapter in part.chapters),
        ]
    )


def toctree(entries: Iterable[str]) -> str:
    """A table of contents for the menu alone."""
    return "\n".join(["```{toctree}", ":hidden:", "", *entries, "```", ""])


def title_of(notebook: Notebook) -> str:
    """The first heading of a notebook."""
    for cell in notebook.cells:
        if cell.kind == "markdown" and (found := re.match(r"# (.*)", cell.source)):
            return found[1].strip()
    raise ValueError(f"{notebook.name} has no title")


def save(data: dict, path: Path) -> None:
    for raw in data["cells"]:
        raw["source"] = joined(raw["source"])
    write(path, json.dumps(data))


def first_page(notebook: Notebook, parts: list[Part]) -> dict:
    """The book's first page, with the parts in the menu."""
    data = page(notebook)
    data["cells"][0]["source"] = re.sub(r"^# .*", "# The book", data["cells"][0]["source"])
    menu = {"id": "menu", "cell_type": "markdown", "metadata": {}, "source": toctree(part.page for part in parts)}
    return {**data, "cells": [*data["cells"], menu]}


def make_book(root: Path, target: Path) -> dict[str, str]:
    """Write all pages of the book into `target`; returns the path of the chapter that exports each module."""
    parts, chapters = read_parts(), {}
    path = after(parts)
    notebooks = {c.path: read_notebook(root / f"nbs/{c.path}.ipynb", root) for part in parts for c in part.chapters}
    titles = {path: title_of(notebook) for path, notebook in notebooks.items()}
    index = read_notebook(root / "nbs/index.ipynb", root)
    save(first_page(index, parts), target / "index.ipynb")
    for part in parts:
        write(target / f"{part.page}.md", part_page(part, titles))
        for chapter in part.chapters:
            data = chapter_page(notebooks[chapter.path], part, chapter, path.get(chapter.path))
            save(data, target / f"{chapter.path}.ipynb")
    for name, notebook in {"index": index, **notebooks}.items():
        if module := module_name(notebook):
            chapters[module] = f"/book/{name}.ipynb"
    return chapters
