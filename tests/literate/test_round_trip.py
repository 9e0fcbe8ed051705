"""Random notebooks, random edits of their modules: whatever is written back comes out again."""

import ast
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.literate import check, clean, fold, module, notebook, render, source, sync, write_back

MODULE = "minivllm/pool.py"
NOTE = st.sampled_from(["", "# a note\n", "# two\n# lines\n"])
VALUE = st.sampled_from(["1", "math.pi", "os.sep", '"""\ntext\n"""', "[\n        1,\n    ]"])


@st.composite
def cells(draw) -> dict[str, str]:
    """Exported cells of constants, functions, classes and methods of these classes, and cells that are not exported."""
    classes: list[str] = []
    found = {"head": "#| default_exp pool\n#| doc A demo", "imports": "#| export\nimport math\nimport os"}
    for number in range(draw(st.integers(1, 6))):
        items = []
        for extra in range(draw(st.integers(1, 3))):
            name, value, note = f"x{number}_{extra}", draw(VALUE), draw(NOTE)
            kind = draw(st.sampled_from(["constant", "function", "class", "method", "property"]))
            if kind in {"method", "property"} and classes:
                decorator = "@property\n" if kind == "property" else ""
                cls = draw(st.sampled_from(classes))
                items.append(
                    f'{note}@method({cls})\n{decorator}def {name}(self):\n    """Doc.\n\n    More."""\n    return {value}'
                )
            elif kind == "class":
                classes.append(name.upper())
                items.append(
                    f'{note}class {name.upper()}:\n    """Doc."""\n\n    size = 1\n\n    def own(self):\n        return {value}'
                )
            elif kind == "function":
                items.append(f"{note}def {name}():\n    return {value}")
            else:
                items.append(f"{note}{name} = {value}")
        found[f"cell{number}"] = "#| export\n" + "\n\n\n".join(items)
        if draw(st.booleans()):
            found[f"try{number}"] = "print(1)"
    return found


def change(lines: list[str], part: module.Part, end: int) -> None:
    """Another value in one statement, and a comment in it."""
    for number in range(part.first - 1, end):
        if "return " in lines[number]:
            lines[number] = re.sub(r"return ", "return 2, ", lines[number])
            lines.insert(number, re.sub(r"return.*", "# changed", lines[number]))
            return
    lines[part.first - 1] = lines[part.first - 1].replace(" = ", " = 2, ", 1)


def add(lines: list[str], part: module.Part, end: int) -> None:
    """A function, or a method, below a statement."""
    indent, argument = ("    ", "self") if part.cls else ("", "")
    lines[end:end] = ["", f"{indent}def new_{end}({argument}):", f"{indent}    return {end}", ""]


def delete(lines: list[str], part: module.Part, end: int) -> None:
    if isinstance(part.node, ast.FunctionDef) or not part.cls:
        del lines[part.first - 1 : end]


def annotate(lines: list[str], part: module.Part, end: int) -> None:
    lines.insert(part.first - 1, f"{'    ' if part.cls else ''}# noted {end}")


EDITS: list[Callable[[list[str], module.Part, int], None]] = [change, add, delete, annotate]


def edited(module: module.Module, draw: Callable) -> str:
    """Some statements of a module changed, from the bottom up so that line numbers stay true."""
    lines = list(module.lines)
    for part in reversed(module.parts):
        edit = draw(st.sampled_from([None, None, *EDITS]))
        if edit and not (part.is_head and edit in {add, delete}):
            edit(lines, part, part.last)
    return "\n".join(lines)


def book(folder: str, sources: dict[str, str]) -> notebook.Book:
    root = Path(folder)
    raw = [{"id": "title", "cell_type": "markdown", "metadata": {}, "source": "# Demo"}]
    raw += [
        {"id": cell, "cell_type": "code", "metadata": {}, "source": source, "outputs": []}
        for cell, source in sources.items()
    ]
    data = clean.cleaned({"cells": raw, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    notebook.write(root / "nbs/demo.ipynb", clean.notebook_text(data))
    notebook.write(root / "pyproject.toml", "[tool.ruff]\nline-length = 120\n")
    return notebook.read_book(root)


@pytest.mark.slow
@settings(max_examples=40)
@given(sources=cells(), data=st.data())
def test_an_edited_module_survives_write_back_and_export(sources, data):
    with tempfile.TemporaryDirectory() as folder:
        start = book(folder, sources)
        assert sync.export(list(start.chapters.values()), start.root)[1] == []
        path, chapter = start.root / MODULE, start.chapters[MODULE]
        text = path.read_text()
        header = next(line for line in text.split("\n") if line.startswith(render.GENERATED))
        path.write_text(edited(module.read_module(text, chapter), data.draw).replace("\n\n\n", f"\n\n{header}\n", 1))
        wanted = module.read_module(render.formatted({MODULE: path.read_text()}, start.root)[MODULE], chapter)
        assert write_back.write_back(chapter, start.root) == (path.read_text() != text)

        after = notebook.read_book(start.root)
        assert check.check(after, rebuild=True) == []
        assert sync.export(list(after.chapters.values()), start.root) == ([], [])
        found = module.read_module(path.read_text(), after.chapters[MODULE])
        assert [(part.cls, part.text) for part in found.parts] == [(part.cls, part.text) for part in wanted.parts]
        assert [part.text for part in found.imports] == [part.text for part in wanted.imports]
        now = {
            raw["id"]: "".join(raw["source"])
            for raw in json.loads((start.root / "nbs/demo.ipynb").read_text())["cells"]
        }
        assert {
            cell: source for cell, source in sources.items() if not source.startswith("#| export")
        }.items() <= now.items()


@pytest.mark.slow
@settings(max_examples=15)
@given(sources=cells())
def test_the_module_has_every_statement_of_the_notebook_once(sources):
    with tempfile.TemporaryDirectory() as folder:
        notebook = book(folder, sources).chapters[MODULE]
        parts = module.read_module(render.build([notebook], Path(folder))[MODULE], notebook)
        found = [
            (item, source.normal(parts.text([part])))
            for part, item in zip(parts.parts, module.origins(parts, notebook), strict=True)
            if not (part.cls and item.cls is None) and not part.is_head
        ]
        expected = [
            (item, source.normal(item.text))
            for item in fold.items_in(notebook)
            if not item.is_import and not isinstance(item.node, ast.ClassDef)
        ]
        assert sorted(expected, key=repr) == sorted(found, key=repr)
