"""Edits of a module carried into the cells of its notebook."""

# Generated from nbs/literate/write_back.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from minivllm.literate.clean import notebook_text
from minivllm.literate.fold import Item, items_in, items_of
from minivllm.literate.module import Module, Placed, origins, placed, read_module
from minivllm.literate.notebook import Cell, LiterateError, Notebook, parse_notebook, write
from minivllm.literate.render import build, formatted
from minivllm.literate.source import DEFINITIONS, FUNCTIONS, import_lines
from minivllm.literate.sync import compare, edited_side, module_text, out_of_step, remember

__all__ = ["write_back"]


def write_back(notebook: Notebook, root: Path, force: bool = False) -> bool:
    """Carry the edits of a module into its notebook, then export it. Returns False when the module was not edited.

    `force` carries the module's side over even when the notebook was edited too.

    Raises:
        LiterateError: both sides changed, or the edit has no place in the notebook. Nothing was written.
    """
    differing, errors = compare([notebook], root)
    if errors:
        raise errors[0]
    side = edited_side(notebook, root) if differing else ""
    if side in {"both", "neither"} and not force or side in {"foreign", "conflict"}:
        raise out_of_step(notebook, side)
    if side not in {"module", "both", "neither"}:
        return False
    target, text = notebook.target, module_text(notebook, root) or ""
    read_module(text, notebook)  # ruff's words for a module that does not parse are worse
    base = read_module(differing[target], notebook)
    edited = read_module(formatted({target: text}, root)[target], notebook)
    carried = carry(notebook, base, edited, root)
    built = build([carried], root)[target]
    verify(built, carried, base, edited)
    write(notebook.path, carried.text)
    write(root / target, built)
    remember([carried], root)
    return True


@dataclass
class Entry:
    """A text of a cell, and the blank lines above it; `stays`: it has the place, and the blank lines, of the item that it was."""

    text: str
    gap: int = 0
    stays: bool = True
    definition: bool = False


def own_text(item: Item) -> str:
    """An item as it stands in its cell."""
    return "\n".join(item.cell.code.split("\n")[item.piece.first - 1 : item.piece.last])


def carry(notebook: Notebook, base: Module, edited: Module, root: Path) -> Notebook:
    """The notebook with the differences between two forms of its module carried into its cells."""
    items, home = items_in(notebook), origins(base, notebook)
    entries: dict[Item, list[Entry]] = {item: [] if item in home else [Entry(own_text(item))] for item in items}
    groups: list[list[Placed]] = []  # one for each entry: what stands in the cell of a class is one with it
    for place in placed(base, edited, notebook):
        if place.part.cls and place.item.cls is None:
            groups[-1].append(place)
        else:
            groups.append([place])
    texts = {}
    for number, (first, *more) in enumerate(groups):
        parts = [place.part for place in (first, *more)]
        was = [part for part, item in zip(base.parts, home, strict=True) if first.was and item == first.item]
        if not was or (was[0].cls, base.text(was)) != (parts[0].cls, edited.text(parts)):
            texts[f"{number}.py"] = _in_cell(first, edited.text(parts), items, notebook.target) + "\n"
    texts = formatted(texts, root, fix="")
    for number, (first, *_) in enumerate(groups):
        stays = first.was is not None and first.was.gap == first.part.gap
        text = texts.get(f"{number}.py", own_text(first.item)).strip("\n")
        entries[first.item].append(Entry(text, first.part.gap, stays, isinstance(first.part.node, DEFINITIONS)))
    changed = carry_imports(entries, base.imported, edited.imported)
    return with_sources(notebook, entries, changed, root)


def carry_imports(entries: dict[Item, list[Entry]], old: Iterable[str], new: Iterable[str]) -> set[Cell]:
    """Carry added and removed imports (one name each, as source lines) into the cells; returns the cells that changed.

    A removed name goes from every exported cell; an added one joins the first imports, or the place of a removed one.
    """
    gone, added = set(old) - set(new), [Entry(line) for line in new if line not in set(old)]
    imports = [item for item in entries if item.is_import]
    changed = []
    for item in imports:
        names = import_lines([item.node])
        if gone & names.keys():
            entries[item] = [Entry(name) for name in names if name not in gone]
            changed.append(item)
    if added:
        item = next(iter([*changed, *imports, *entries]))
        entries[item] = [*entries[item], *added] if imports else [*added, *entries[item]]
        changed.append(item)
    return {item.cell for item in changed}


def _in_cell(place: Placed, text: str, items: Iterable[Item], path: str) -> str:
    """The text of a part as it stands in a notebook: a folded method gets its `@method(Cls)` back. `path` is for errors.

    Raises LiterateError for what cannot stand in the cell.
    """
    part, cls, cell = place.part, place.part.cls, place.item.cell
    if part.is_head and place.was is None and any(item.cls == part.name[1] for item in items):
        what = f"class {part.name[1]} has methods in cells of their own: move its cell in the notebook"
        raise LiterateError(what, path, line=part.first)
    if cls is None:
        return text
    if not isinstance(part.node, FUNCTIONS):
        what = f"only methods can stand below a method that has its own cell (#{cell.id})"
        raise LiterateError(what, path, line=part.first)
    lines = text.split("\n")
    top = next(number for number, line in enumerate(lines) if line.startswith(("@", "def ", "async ")))
    lines = [re.sub(r"^@(\w+)\.(setter|getter|deleter)\b", rf"@{cls}.\1.\2", line) for line in lines]
    return "\n".join([*lines[:top], f"@method({cls})", *lines[top:]])


def cell_source(cell: Cell, entries: dict[Item, list[Entry]]) -> str:
    """The source of a cell, given the entries of its items. Neighbours that stay keep the blank lines between them."""
    lines = cell.source.split("\n")[: len(cell.directives)]
    above: tuple[int, Entry] | None = None
    for index, item in enumerate(items_of(cell)):
        for entry in entries[item]:
            if above and above[0] == index - 1 and above[1].stays and entry.stays:
                gap = item.gap
            else:
                gap = max(entry.gap, 2 if entry.definition or (above and above[1].definition) else 0)
            lines += [""] * (gap if above else 0) + entry.text.split("\n")
            above = index, entry
    return "\n".join(lines)


def with_sources(notebook: Notebook, entries: dict[Item, list[Entry]], imports: set[Cell], root: Path) -> Notebook:
    """A copy of a notebook, the sources of its cells made from entries; cells that change lose their outputs, emptied ones go.

    `imports`: the cells whose imports are to be sorted.
    """
    as_before = {item: [Entry(own_text(item))] for item in entries}
    sources = {cell: cell_source(cell, entries) for cell in notebook.exports}
    sources = {cell: text for cell, text in sources.items() if text != cell_source(cell, as_before)}
    unsorted = {f"{cell.id}.py": text + "\n" for cell, text in sources.items() if cell in imports}
    done = formatted(unsorted, root, fix="I", layout=False)
    cells = []
    for raw, cell in zip(notebook.data["cells"], notebook.cells, strict=True):
        if cell not in sources:
            cells.append(raw)
        elif any(entries[item] for item in items_of(cell)):
            source = done.get(f"{cell.id}.py", sources[cell]).strip("\n")
            cells.append({**raw, "source": source, "outputs": []})
    return parse_notebook(notebook_text({**notebook.data, "cells": cells}), notebook.name, notebook.path)


def verify(text: str, carried: Notebook, base: Module, edited: Module) -> None:
    """Raises LiterateError, naming the place, unless `text`, the export of the changed notebook, says what `edited` says."""
    built, path = read_module(text, carried), carried.target
    cells = [item.cell.id for item in origins(built, carried)]
    for ours, theirs, cell in zip_longest(built.parts, edited.parts, cells):
        if not (ours and theirs and (ours.cls, ours.text) == (theirs.cls, theirs.text)):
            what = f"this edit has no place in the notebook (near cell #{cell or cells[-1]})"
            raise LiterateError(what, path, line=theirs.first if theirs else None)
    doc, names = edited.computed
    if doc != built.computed[0] or names not in (base.computed[1], built.computed[1]):
        raise LiterateError("the docstring (`#| doc`) and __all__ are computed: edit the notebook", path, line=1)
    if sorted(part.text for part in built.imports) != sorted(part.text for part in edited.imports):
        raise LiterateError("imports or the comments above them have no place in the notebook", path, line=1)
