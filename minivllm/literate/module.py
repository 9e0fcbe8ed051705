"""Exported modules read back along their cell markers."""

# Generated from nbs/literate/module.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minivllm.literate.notebook import LiterateError
from minivllm.literate.source import IMPORTS, Piece, bound_names, dedent, import_lines, normal, skip_blank, split, start

__all__ = ["MARKER", "Module", "Part", "by_cell", "read_module"]


# %% nbs/literate/module.ipynb #Part
MARKER = re.compile(r"\s*# %% (\S.*\.ipynb) #([A-Za-z0-9_-]{1,64})\s*")


@dataclass(frozen=True)
class Part:
    """A statement of a module (or comments alone: `node` None), the cell it belongs to, and the class it was folded into."""

    cell: str
    text: str
    line: int
    node: ast.stmt | None
    cls: str | None = None

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, IMPORTS)


@dataclass
class Module:
    """A module taken apart: what stands above the first marker, and the parts below it."""

    path: str
    preamble: list[ast.stmt]
    comments: list[str]
    parts: list[Part]

    @property
    def imports(self) -> dict[str, None]:
        """The imported names, each as a source line."""
        return import_lines([*self.preamble, *(part.node for part in self.parts if not part.cls)])

    @property
    def code(self) -> list[Part]:
        """The parts that are no imports: those move."""
        return [part for part in self.parts if not part.is_import]


# %% nbs/literate/module.ipynb #read-module
def read_module(text: str, path: str) -> Module:
    """Read a module along its markers. Raises LiterateError when it does not parse or has code that belongs to no cell."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise LiterateError(error.msg, path, line=error.lineno) from error
    lines = text.split("\n")
    begin = next((number for number, line in enumerate(lines, 1) if MARKER.fullmatch(line)), len(lines) + 1)
    preamble = [node for node in tree.body if node.lineno < begin]
    for node in preamble[1 if ast.get_docstring(tree) is not None else 0 :]:
        if not isinstance(node, IMPORTS) and list(bound_names([node])) != ["__all__"]:
            raise LiterateError("this stands above the first marker, so it belongs to no cell", path, line=node.lineno)
    comments = [line.lstrip("# ") for line in lines[: begin - 1] if line.startswith("#") and "literate" not in line]
    pieces = split(lines, tree.body[len(preamble) :], begin, len(lines))
    return Module(path, preamble, comments, list(_parts(lines, pieces, "", None)))


def _parts(lines: Sequence[str], pieces: Sequence[Piece], cell: str, cls: str | None) -> Iterator[Part]:
    for piece in pieces:
        first = piece.first
        for number in range(first, start(piece.node) if piece.node else piece.last + 1):
            if found := MARKER.fullmatch(lines[number - 1]):
                if any(line.strip() for line in lines[first - 1 : number - 1]):
                    yield _part(lines, Piece(first, number - 1, None), cell, cls)
                cell, first = found[2], number + 1
        first = skip_blank(lines, first)
        if first > piece.last:
            continue
        inner = _inner_marker(lines, piece) if cls is None else None
        yield _part(lines, Piece(first, inner - 1 if inner else piece.last, piece.node), cell, cls)
        if inner and isinstance(piece.node, ast.ClassDef):
            body = [node for node in piece.node.body if start(node) > inner]
            yield from _parts(lines, split(lines, body, inner, piece.last), cell, piece.node.name)


def _inner_marker(lines: Sequence[str], piece: Piece) -> int | None:
    """The line of the first marker inside a class."""
    inside = range(start(piece.node), piece.last + 1) if isinstance(piece.node, ast.ClassDef) else ()
    return next((number for number in inside if MARKER.fullmatch(lines[number - 1])), None)


def _part(lines: Sequence[str], piece: Piece, cell: str, cls: str | None) -> Part:
    text = "\n".join(lines[piece.first - 1 : skip_blank(lines, piece.last, -1)])
    return Part(cell, dedent(text) if cls else text, piece.first, piece.node, cls)


# %% nbs/literate/module.ipynb #by-cell
def by_cell(module: Module) -> dict[str, list[tuple[str | None, str]]]:
    """Cell id -> its parts in order, each as class and normal form. Imports are left out: they move."""
    found: dict[str, list[tuple[str | None, str]]] = defaultdict(list)
    for part in module.code:
        found[part.cell].append((part.cls, normal(part.text)))
    return found
