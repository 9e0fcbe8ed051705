"""Checks of the book: modules in step, outputs free of machine paths, short cells."""

# Generated from nbs/literate/check.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from minivllm.literate.clean import is_clean
from minivllm.literate.module import origins, placed, read_module
from minivllm.literate.notebook import Book, LiterateError, Notebook, joined
from minivllm.literate.sync import compare, edited_side, missing_packages, module_text, out_of_step

__all__ = ["LIMITS", "check", "length_errors"]


def check(book: Book, rebuild: bool = False) -> list[LiterateError]:
    """Everything that is out of step. `rebuild` exports again even what the record knows to agree."""
    chapters = list(book.chapters.values())
    differing, errors = compare(chapters, book.root, rebuild)
    errors = book.errors + errors
    for notebook in (*chapters, *book.plain):
        try:
            if notebook.module and notebook.target in differing:
                errors += step_errors(notebook, book.root, differing[notebook.target])
            errors += output_errors(notebook, book.root)
            if not is_clean(notebook):
                errors.append(LiterateError("holds metadata that changes from run to run: run clean", notebook.name))
        except LiterateError as error:
            errors.append(error)
    return errors + length_errors(book) + (orphans(book) if book.whole else [])


def differing_cells(notebook: Notebook, exported: str, text: str) -> list[str]:
    """Ids of the cells whose code is not the same in the export of the notebook and in the text of its module."""
    base, edited = (read_module(side, notebook) for side in (exported, text))
    places = placed(base, edited, notebook)
    same = {id(place.was) for place in places if place.was and place.was.normal == place.part.normal}
    differing = {place.item.cell for place in places if id(place.was) not in same}
    lost = zip(base.parts, origins(base, notebook), strict=True)
    differing |= {item.cell for part, item in lost if id(part) not in same}
    return [cell.id for cell in notebook.exports if cell in differing]


def step_errors(notebook: Notebook, root: Path, exported: str) -> list[LiterateError]:
    """How a notebook and a module that is not its export differ: one error for each cell."""
    side = edited_side(notebook, root)
    if side in {"missing", "conflict", "foreign"}:
        return [out_of_step(notebook, side)]
    cells = differing_cells(notebook, exported, module_text(notebook, root) or "")
    errors = [out_of_step(notebook, side, cell) for cell in cells]
    return errors or [out_of_step(notebook, side, what="imports, layout or docstring: ")]


def orphans(book: Book) -> list[LiterateError]:
    """Python files in the packages that no notebook exports. An empty `__init__.py` needs no notebook, but must be there."""
    errors = []
    for path in sorted(path for folder in ("minivllm", "kernels") for path in (book.root / folder).glob("**/*.py")):
        name = path.relative_to(book.root).as_posix()
        if name not in book.chapters and not (path.name == "__init__.py" and not path.read_text().strip()):
            errors.append(LiterateError("no notebook exports this file: write it as a notebook, or delete it", name))
    for init in missing_packages(book.root, book.chapters):
        errors.append(LiterateError("is missing, so its folder is no package: run export", init))
    return errors


LIMITS = {"kernels": 120}


def length_errors(book: Book) -> list[LiterateError]:
    """One error for each exported cell that is too long to read at a glance."""
    errors = []
    for notebook in book.chapters.values():
        limit = LIMITS.get(notebook.target.split("/")[0], 60)
        for cell in notebook.exports:
            if (count := len(cell.code.strip().splitlines())) > limit:
                errors.append(cell.error(f"an exported cell of {count} lines; {limit} are allowed: tell it in parts"))
    return errors


PERSONAL = r"(?:/home/|/Users/|/root/|/tmp/ipykernel_|[A-Z]:\\Users\\)\w+"
"""Paths of some user's machine."""


def output_errors(notebook: Notebook, root: Path) -> list[LiterateError]:
    """One error for each cell with a stored output that holds an absolute path of a machine, or a memory address."""
    here = [re.escape(str(folder)) + r"\b" for folder in (root.resolve(), Path.home()) if folder.parent != folder]
    personal = re.compile(rf"(?<![\w.+/=])(?:{'|'.join([PERSONAL, *here])})|(?<= at )0x[0-9a-f]{{6,}}")
    errors = []
    for raw in notebook.data["cells"]:
        if found := personal.search("\n".join(_output_texts(raw.get("outputs", [])))):
            what = f"a stored output holds {found[0]!r}, which belongs to one machine: change the cell and run it again"
            errors.append(LiterateError(what, notebook.name, raw["id"]))
    return errors


def _output_texts(outputs: Iterable[dict[str, Any]]) -> Iterator[str]:
    for output in outputs:
        yield joined(output.get("text", ""))
        yield from output.get("traceback", [])
        yield from (joined(value) for mime, value in output.get("data", {}).items() if mime.startswith("text/"))
