"""Notebook files: cells, directives, the module that each exports, the whole book."""

# Generated from nbs/literate/notebook.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from minivllm.literate.source import string_lines


class LiterateError(Exception):
    """A mistake in a notebook or a module. The message begins with its place: `path`, `#cell`, line within the cell."""

    def __init__(self, message: str, path: str, cell: str | None = None, line: int | None = None) -> None:
        place = path + (f" #{cell}" if cell else "") + (f" line {line}" if line else "")
        super().__init__(f"{place}: {message}")
        self.path = path


DIRECTIVES = {"default_exp": True, "doc": True, "export": False, "exporti": False, "hide": False}
"""Name of a directive -> whether it takes an argument."""


@dataclass(frozen=True)
class Cell:
    """One cell of a notebook. `kind` is code, markdown or raw; `notebook` is the path shown in errors."""

    notebook: str
    id: str
    kind: str
    source: str

    def error(self, message: str, line: int | None = None) -> LiterateError:
        return LiterateError(message, self.notebook, self.id, line)

    @cached_property
    def directives(self) -> dict[str, str]:
        """The directives in the first lines, name -> argument. Raises LiterateError for one that is not known."""
        lines = self.source.splitlines() if self.kind == "code" else []
        found: dict[str, str] = {}
        for number, line in enumerate(takewhile(lambda line: line.startswith("#|"), lines), 1):
            name, _, argument = line[2:].strip().partition(" ")
            if name not in DIRECTIVES:
                raise self.error(f"unknown directive {name!r}; known are {', '.join(DIRECTIVES)}", number)
            if name in found:
                raise self.error(f"directive {name!r} stands here twice", number)
            if bool(argument.strip()) != DIRECTIVES[name]:
                raise self.error(f"{name} takes {'one' if DIRECTIVES[name] else 'no'} argument, got {line!r}", number)
            found[name] = argument.strip()
        if {"export", "exporti"} <= found.keys():
            raise self.error("export puts names into __all__ and exporti does not: keep one of them")
        for number, line in enumerate(lines[len(found) :], len(found) + 1):
            if line.startswith("#|") and number not in string_lines(self.source):
                raise self.error("directives belong in the first lines of a cell", number)
        return found

    @property
    def code(self) -> str:
        """The source with its directive lines blanked, so that line numbers still count from the cell's first line."""
        seen = len(self.directives)
        return "\n" * seen + "\n".join(self.source.split("\n")[seen:])

    @property
    def exported(self) -> bool:
        return "export" in self.directives or "exporti" in self.directives

    @property
    def public(self) -> bool:
        """Whether the names that the cell binds belong to `__all__`."""
        return "export" in self.directives


@dataclass(frozen=True)
class Notebook:
    """A notebook of the book: `name` is its path from the repository root, `text` the file, `data` the JSON in it."""

    path: Path
    name: str
    text: str
    data: dict[str, Any]
    cells: tuple[Cell, ...]

    def _directive(self, name: str) -> tuple[Cell, str] | None:
        """The one cell with this directive, and its argument."""
        cells = [cell for cell in self.cells if name in cell.directives]
        if len(cells) > 1:
            raise cells[1].error(f"{name} stands twice, first in #{cells[0].id}")
        return (cells[0], cells[0].directives[name]) if cells else None

    @cached_property
    def module(self) -> str | None:
        """What `#| default_exp` says, such as `core.block_pool`; None for a chapter that exports nothing."""
        found = self._directive("default_exp")
        if found is None:
            if self.exports:
                raise self.exports[0].error("this cell is exported, but no cell says '#| default_exp module.name'")
            return None
        cell, module = found
        if not re.fullmatch(r"[a-z_]\w*(\.[a-z_]\w*)*", module) or module.split(".")[0] == "minivllm":
            raise cell.error(f"not a module name: {module!r}; write 'core.scheduler' or 'minivllm_kernels.cuda.decode'")
        return module

    @cached_property
    def docstring(self) -> str:
        """The docstring of the module: the one line that `#| doc` gives. Raises LiterateError when there is none."""
        found = self._directive("doc")
        if found is None:
            raise LiterateError("no cell says what the module is, as '#| doc One technical line'", self.name)
        cell, line = found
        if len(line) > 100 or '"' in line or "\\" in line:
            raise cell.error(f"doc is one line of at most 100 characters, without quotes and backslashes: {line!r}")
        return line if line[-1] in ".!?" else line + "."

    @cached_property
    def exports(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.exported]

    @property
    def target(self) -> str:
        """The module's path from the repository root: `kernels/minivllm_kernels/cuda/decode.py`, `minivllm/core/request.py`."""
        module = self.module or ""
        folder = "kernels" if module.split(".")[0] == "minivllm_kernels" else "minivllm"
        return f"{folder}/{module.replace('.', '/')}.py"


def read_notebook(path: Path, root: Path) -> Notebook:
    """Read a notebook (format 4.5 or newer: cells need ids). Raises LiterateError when it is not one."""
    return parse_notebook(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix(), path)


def parse_notebook(text: str, name: str, path: Path) -> Notebook:
    """A Notebook from the text of its file."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if conflict := CONFLICT.search(text):
            raise _conflict_error(text[: conflict.start()], name) from error
        raise LiterateError(f"not a notebook: {error.msg}", name, line=error.lineno) from error
    if not isinstance(data, dict) or data.get("nbformat") != 4:
        raise LiterateError("not a notebook of format 4", name)
    cells: dict[str, Cell] = {}
    for index, raw in enumerate(data.get("cells", [])):
        if not raw.get("id"):
            raise LiterateError(f"cell {index} has no id: save the notebook in format 4.5 or newer", name)
        if raw["id"] in cells:
            raise LiterateError("two cells have this id", name, raw["id"])
        cells[raw["id"]] = Cell(name, raw["id"], raw["cell_type"], joined(raw["source"]))
    return Notebook(path, name, text, data, tuple(cells.values()))


def joined(text: str | list[str]) -> str:
    """Text of a notebook file, which may be stored as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


CONFLICT = re.compile(r"^<{7} .*\n(?:.*\n)*?={7}\n(?:.*\n)*?>{7} ", re.MULTILINE)
"""What git leaves where both sides of a merge changed the same lines."""


def _conflict_error(above: str, name: str) -> LiterateError:
    """The error of a notebook that git could not merge, given its text above the first conflict."""
    ids = re.findall(r'^ *"id": "([^"]+)"', above, re.MULTILINE)
    message = "this cell was edited on both sides of a merge: choose a side, or join them, in the notebook's file"
    return LiterateError(message, name, ids[-1] if ids else None)


def find_root(begin: Path) -> Path:
    """The nearest folder at or above `begin` that holds `nbs/` and `pyproject.toml`."""
    for folder in (begin.resolve(), *begin.resolve().parents):
        if (folder / "nbs").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    raise LiterateError("no folder with nbs/ and pyproject.toml here or above", str(begin))


def notebook_paths(root: Path) -> list[Path]:
    return [path for path in sorted(root.glob("nbs/**/*.ipynb")) if ".ipynb_checkpoints" not in path.parts]


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@dataclass
class Book:
    """The notebooks that export a module, by path of the module, the plain ones, and the errors found on the way."""

    root: Path
    chapters: dict[str, Notebook] = field(default_factory=dict)
    plain: list[Notebook] = field(default_factory=list)
    errors: list[LiterateError] = field(default_factory=list)
    whole: bool = True


def read_book(root: Path, paths: Sequence[str] = ()) -> Book:
    """Read the notebooks under `nbs/`; with `paths` only what these name: notebooks, modules or folders of either.

    Two notebooks that export the same module are an error that names both.
    """
    book = Book(root, whole=not paths)
    unused = {Path(given).resolve(): given for given in paths}
    folders = list(unused)
    names: dict[str, str] = {}

    def chosen(*files: Path) -> bool:
        found = [folder for folder in folders for file in files if folder in (file.resolve(), *file.resolve().parents)]
        for folder in found:
            unused.pop(folder, None)
        return book.whole or bool(found)

    for path in notebook_paths(root):
        try:
            notebook = read_notebook(path, root)
            other = names.setdefault(notebook.target, notebook.name) if notebook.module else notebook.name
            if other != notebook.name:
                raise LiterateError(f"default_exp {notebook.module}: {other} exports the same module", notebook.name)
            if notebook.module and chosen(path, root / notebook.target):
                book.chapters[notebook.target] = notebook
            elif not notebook.module and chosen(path):
                book.plain.append(notebook)
        except LiterateError as error:
            if chosen(path):
                book.errors.append(error)
    for given in unused.values():
        raise LiterateError("neither a notebook of this book nor a module or folder of one", given)
    return book
