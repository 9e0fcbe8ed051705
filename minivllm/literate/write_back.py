"""Edits of a module carried into the cells of its notebook."""

# Generated from nbs/literate/write_back.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ast
import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from minivllm.literate.clean import notebook_text
from minivllm.literate.fold import Item, items_of
from minivllm.literate.module import Module, Part, read_module
from minivllm.literate.notebook import Cell, LiterateError, Notebook, parse_notebook, write
from minivllm.literate.render import build, formatted
from minivllm.literate.source import DEFINITIONS, FUNCTIONS, IMPORTS, import_lines, normal
from minivllm.literate.sync import compare, edited_side, module_text, out_of_step, remember

__all__ = ["write_back"]


# %% nbs/literate/write_back.ipynb #write-back
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
    read_module(text, target)  # ruff's words for a module that does not parse are worse
    base = read_module(differing[target], target)
    edited = read_module(formatted({target: text}, root)[target], target)
    carried = carry(notebook, base, edited, root)
    built = build([carried], root)[target]
    verify(read_module(built, target), base, edited)
    write(notebook.path, carried.text)
    write(root / target, built)
    remember([carried], root)
    return True


# %% nbs/literate/write_back.ipynb #carry
def carry(notebook: Notebook, base: Module, edited: Module, root: Path) -> Notebook:
    """The notebook with the differences between two forms of its module carried into its cells."""
    texts = cell_texts(edited, root)
    items = {cell.id: items_of(cell) for cell in notebook.exports}
    blocks = {cell: [[_own_text(item)] for item in found] for cell, found in items.items()}
    for name, found in items.items():
        for cls in {part.cls: None for part in (*base.code, *edited.code) if part.cell == name}:
            mine = [index for index, item in enumerate(found) if item.cls == cls and not item.is_import]
            old = [part.text for part in base.code if (part.cell, part.cls) == (name, cls)]
            new = [(part.text, text) for part, text in texts if (part.cell, part.cls) == (name, cls)]
            carry_parts(blocks[name], mine, old, new)
    moved = carry_imports(blocks, items, base.imports, edited.imports)
    sources = {}
    for cell in notebook.exports:
        if blocks[cell.id] != [[_own_text(item)] for item in items[cell.id]]:
            sources[cell.id] = cell_source(cell, items[cell.id], blocks[cell.id])
    sources |= sorted_imports({name: source for name, source in sources.items() if name in moved}, root)
    return with_sources(notebook, sources, texts)


def _own_text(item: Item) -> str:
    """An item as it stands in its cell."""
    return "\n".join(item.cell.code.split("\n")[item.piece.first - 1 : item.piece.last])


# %% nbs/literate/write_back.ipynb #carry-parts
def carry_parts(
    blocks: list[list[str]], mine: Sequence[int], old: Sequence[str], new: Sequence[tuple[str, str]]
) -> None:
    """Turn the difference between `old` and `new` parts of one cell and class into other texts for the cell's items.

    Args:
        blocks: for each item of the cell the texts that take its place, changed here; one that is added joins the item above it.
        mine: which items belong to the parts of `old`, one each.
        old: the text of each part before the edit.
        new: the text of each part after it, in the module and for the cell.
    """
    matcher = difflib.SequenceMatcher(None, old, [text for text, _ in new], autojunk=False)
    for kind, a1, a2, b1, b2 in matcher.get_opcodes():
        if kind == "equal":
            continue
        texts = [text for _, text in new[b1:b2]]
        for index in mine[a1:a2]:
            blocks[index] = [texts.pop(0)] if texts else []
        if a2:
            blocks[mine[a2 - 1]] += texts
        elif mine:
            blocks[mine[0]] = texts + blocks[mine[0]]
        elif texts:
            blocks.append(texts)


def cell_source(cell: Cell, items: Sequence[Item], blocks: Sequence[Sequence[str]]) -> str:
    """The source of a cell, given the texts for each of its items. Neighbours that stay keep the blank lines between them."""
    lines = cell.source.split("\n")[: len(cell.directives)]
    above, kept_above = "", -2
    for index, texts in enumerate(blocks):
        item = items[index] if index < len(items) else None
        for text in texts:
            kept = index if item and _is_definition(text) == _is_definition(_own_text(item)) else -2
            gap = item.gap if item and text is texts[0] else 0
            if kept < 0 or kept_above != kept - 1:
                gap = max(gap, 2 if _is_definition(text) or _is_definition(above) else 0)
            lines += [""] * (gap if above else 0) + text.split("\n")
            above, kept_above = text, kept
    return "\n".join(lines)


def _is_definition(text: str) -> bool:
    return any(isinstance(node, DEFINITIONS) for node in ast.parse(text).body)


# %% nbs/literate/write_back.ipynb #carry-imports
def carry_imports(
    blocks: dict[str, list[list[str]]], items: dict[str, list[Item]], old: Iterable[str], new: Iterable[str]
) -> set[str]:
    """Carry added and removed imports (one name each, as source lines) into the cells; returns the cells that changed.

    A removed name goes from every exported cell; an added one joins the first imports, or the place of a removed one.
    """
    gone, added = set(old) - set(new), [line for line in new if line not in set(old)]
    imports = [(cell, index) for cell, found in items.items() for index, item in enumerate(found) if item.is_import]
    changed = []
    for cell, index in imports:
        names = import_lines([items[cell][index].node])
        if gone & names.keys():
            blocks[cell][index] = [name for name in names if name not in gone]
            changed.append((cell, index))
    if added:
        cell, index = [*changed, *imports, (next(iter(items)), 0)][0]
        here = blocks[cell][index]
        blocks[cell][index] = [*here, *added] if imports else [*added, *here]
        changed.append((cell, index))
    return {cell for cell, _ in changed}


def sorted_imports(sources: dict[str, str], root: Path) -> dict[str, str]:
    """Cells whose imports changed, with these sorted and nothing else touched."""
    done = formatted({f"{cell}.py": text + "\n" for cell, text in sources.items()}, root, fix="I", layout=False)
    return {name.removesuffix(".py"): text.strip("\n") for name, text in done.items()}


# %% nbs/literate/write_back.ipynb #cell-texts
def cell_texts(module: Module, root: Path) -> list[tuple[Part, str]]:
    """Each part with its text for the notebook, formatted for the left margin, where more fits on a line."""
    texts = {f"{number}.py": _with_method(part, module.path) + "\n" for number, part in enumerate(module.code)}
    done = formatted(texts, root, fix="")
    return [(part, text.strip("\n")) for part, text in zip(module.code, done.values(), strict=True)]


def _with_method(part: Part, path: str) -> str:
    """A part as it stands in a notebook: a folded method gets its `@method(Cls)` back. `path` is for errors."""
    if part.cls is None or part.node is None:
        return part.text
    if not isinstance(part.node, FUNCTIONS):
        raise LiterateError(f"only methods can stand below the marker of a method (#{part.cell})", path, line=part.line)
    lines = part.text.split("\n")
    top = next(number for number, line in enumerate(lines) if line.startswith(("@", "def ", "async ")))
    lines = [re.sub(r"^@(\w+)\.(setter|getter|deleter)\b", rf"@{part.cls}.\1.\2", line) for line in lines]
    return "\n".join([*lines[:top], f"@method({part.cls})", *lines[top:]])


# %% nbs/literate/write_back.ipynb #with-sources
def with_sources(notebook: Notebook, sources: dict[str, str], texts: Sequence[tuple[Part, str]]) -> Notebook:
    """A copy of a notebook: cells in `sources` changed (their outputs dropped), emptied cells gone, new cells of `texts` added."""
    place: dict[str, float] = {cell.id: number for number, cell in enumerate(notebook.cells)}
    fresh: dict[str, list[str]] = defaultdict(list)
    for index, (part, text) in enumerate(texts):
        if part.cell not in place:
            place[part.cell] = _place_for(index, [part for part, _ in texts], place)
            fresh[part.cell] = []
        if part.cell in fresh:
            fresh[part.cell].append(text)
    cells = []
    for raw in notebook.data["cells"]:
        source = sources.get(raw["id"])
        if source is None:
            cells.append(raw)
        elif Cell(notebook.name, raw["id"], "code", source).code.strip():
            cells.append({**raw, "source": source, "outputs": []})
    new: dict[str, Any] = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    cells += [{**new, "id": cell, "source": "#| export\n" + "\n\n\n".join(found)} for cell, found in fresh.items()]
    cells.sort(key=lambda raw: place[raw["id"]])
    return parse_notebook(notebook_text({**notebook.data, "cells": cells}), notebook.name, notebook.path)


def _place_for(index: int, parts: Sequence[Part], place: dict[str, float]) -> float:
    """A place between two cells for the new cell of `parts[index]`; `place` holds those of the known cells."""
    new = parts[index]
    above = [
        place[part.cell]
        for part in parts[:index]
        if new.cls in (None, part.cls) or (isinstance(part.node, ast.ClassDef) and part.node.name == new.cls)
    ]
    below = [place[part.cell] for part in parts[index + 1 :] if part.cls == new.cls and part.cell in place]
    return max([0.0, *(number for number in above if not below or number < below[0])]) + 0.001


# %% nbs/literate/write_back.ipynb #verify
def verify(built: Module, base: Module, edited: Module) -> None:
    """Raises LiterateError, naming the place, unless `built` says what `edited` says."""

    def fixed(module: Module) -> list[str]:
        return [ast.dump(node) for node in module.preamble if not isinstance(node, IMPORTS)]

    for ours, theirs in zip_longest(built.code, edited.code):
        sides = [(part.cell, part.cls, normal(part.text)) if part else None for part in (ours, theirs)]
        if sides[0] != sides[1]:
            part = theirs or ours
            what = f"this edit has no place in the notebook (near cell #{part.cell})"
            raise LiterateError(what, edited.path, line=theirs.line if theirs else None)
    if fixed(edited) not in (fixed(base), fixed(built)):
        raise LiterateError("the docstring (`#| doc`) and __all__ are computed: edit the notebook", edited.path, line=1)
    if built.imports != edited.imports or built.comments != edited.comments:
        raise LiterateError("imports or the comments above them have no place in the notebook", edited.path, line=1)
