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
    for number in range(part.line - 1, end):
        if "return " in lines[number]:
            lines[number] = re.sub(r"return ", "return 2, ", lines[number])
            lines.insert(number, re.sub(r"return.*", "# changed", lines[number]))
            return
    lines[part.line - 1] = lines[part.line - 1].replace(" = ", " = 2, ", 1)


def add(lines: list[str], part: module.Part, end: int) -> None:
    """A function, or a method, below a statement."""
    indent, argument = ("    ", "self") if part.cls else ("", "")
    lines[end:end] = ["", f"{indent}def new_{end}({argument}):", f"{indent}    return {end}", ""]


def add_cell(lines: list[str], part: module.Part, end: int) -> None:
    add(lines, part, end)
    lines.insert(end + 1, f"{'    ' if part.cls else ''}# %% nbs/demo.ipynb #new-{end}")


def delete(lines: list[str], part: module.Part, end: int) -> None:
    if not isinstance(part.node, ast.ClassDef):
        del lines[part.line - 1 : end]


def annotate(lines: list[str], part: module.Part, end: int) -> None:
    lines.insert(part.line - 1, f"{'    ' if part.cls else ''}# noted {end}")


EDITS: list[Callable[[list[str], module.Part, int], None]] = [change, add, add_cell, delete, annotate]


def edited(text: str, draw: Callable) -> tuple[str, bool]:
    """Some statements of a module changed, from the bottom up so that line numbers stay true; and is there a new cell?"""
    lines = text.split("\n")
    new_cell = False
    for part in sorted(module.read_module(text, MODULE).parts, key=lambda part: -part.line):
        own_class_goes_on = isinstance(part.node, ast.ClassDef)
        edit = draw(st.sampled_from([None, None, *EDITS]))
        if edit and not (own_class_goes_on and edit in {add, add_cell}):
            edit(lines, part, part.line + part.text.count("\n"))
            new_cell |= edit is add_cell
    return "\n".join(lines), new_cell


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
        path = start.root / MODULE
        text, new_cell = edited(path.read_text(), data.draw)
        path.write_text(text)
        before = (start.root / "nbs/demo.ipynb").read_text()
        wanted = module.read_module(next(iter(render.formatted({MODULE: text}, start.root).values())), MODULE)
        try:
            write_back.write_back(start.chapters[MODULE], start.root)
        except notebook.LiterateError:
            # A marker in the middle of a cell can move a class below its methods. Only that may be refused, and then whole.
            assert new_cell
            assert (path.read_text(), (start.root / "nbs/demo.ipynb").read_text()) == (text, before)
            return

        after = notebook.read_book(start.root)
        assert check.check(after, rebuild=True) == []
        assert sync.export(list(after.chapters.values()), start.root) == ([], [])
        found = module.read_module(path.read_text(), MODULE)
        assert {k: v for k, v in module.by_cell(found).items() if v} == {
            k: v for k, v in module.by_cell(wanted).items() if v
        }
        assert found.imports.keys() == wanted.imports.keys()
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
        parts = module.read_module(render.build([notebook], Path(folder))[MODULE], MODULE).parts
        expected = [
            (item.cell.id, item.cls, source.normal(item.text))
            for cell in notebook.exports
            for item in fold.items_of(cell)
            if not item.is_import
        ]
        assert sorted(expected, key=repr) == sorted(((p.cell, p.cls, source.normal(p.text)) for p in parts), key=repr)
