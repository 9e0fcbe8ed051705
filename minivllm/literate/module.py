"""Statements of a module, and the cells that they come from."""

# Generated from nbs/literate/module.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from minivllm.literate.fold import Item, fold, items_in
from minivllm.literate.notebook import LiterateError, Notebook
from minivllm.literate.render import GENERATED
from minivllm.literate.source import FUNCTIONS, IMPORTS, Piece, bound_names, dedent, import_lines, normal, split, start


@dataclass(frozen=True)
class Part:
    """A statement of a module with the comments above it, or comments alone (`node` None); `gap` counts the blank lines above.

    A class is several parts: its head, and each statement of its body (`cls`), at the left margin.
    """

    text: str
    first: int
    last: int
    gap: int
    node: ast.stmt | None
    cls: str | None = None

    @cached_property
    def normal(self) -> str:
        """The text without its layout."""
        return normal(self.text + "\n    ..." if self.is_head else self.text)

    @property
    def is_head(self) -> bool:
        return isinstance(self.node, ast.ClassDef) and self.last < start(self.node.body[0])

    @cached_property
    def name(self) -> tuple[str | None, str]:
        """What distinguishes a part from the others: its class, and the names that it binds or else all of its text."""
        return self.cls, ", ".join(bound_names([self.node] if self.node else [])) or self.normal


@dataclass(frozen=True)
class Module:
    """A module taken apart. `computed`: its docstring and `__all__`, where no cell says the latter."""

    lines: list[str]
    computed: tuple[str, str]
    imports: list[Part]
    parts: list[Part]

    @property
    def imported(self) -> dict[str, None]:
        """The imported names, each as a source line."""
        return import_lines(part.node for part in self.imports)

    def text(self, parts: Sequence[Part]) -> str:
        """The text of parts that follow each other, from the first to the last, at the left margin."""
        text = "\n".join(self.lines[parts[0].first - 1 : parts[-1].last])
        return dedent(text) if parts[0].cls else text


def read_module(text: str, notebook: Notebook) -> Module:
    """Take the module of a notebook apart. Raises LiterateError when it does not parse, or has code above a computed `__all__`."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise LiterateError(error.msg, notebook.target, line=error.lineno) from error
    lines = ["" if line.startswith(GENERATED) else line for line in text.split("\n")]
    documented = ast.get_docstring(tree) is not None
    begin = (tree.body[0].end_lineno or 1) + 1 if documented else 1
    pieces = split(lines, tree.body[documented:], begin, len(lines))
    imports: list[Part] = []
    parts: list[Part] = []
    names = ""
    computes = all("__all__" not in bound_names([item.node]) for item in items_in(notebook) if item.node)
    for part in _parts(lines, pieces, begin - 1):
        if isinstance(part.node, IMPORTS) and not part.cls:
            imports.append(part)
        elif computes and part.name == (None, "__all__"):
            names = ast.dump(part.node) if part.node else ""
            if parts:
                raise LiterateError("code stands above __all__", notebook.target, line=parts[0].first)
        else:
            parts.append(part)
    return Module(lines, (ast.get_docstring(tree) or "", names), imports, parts)


def _parts(lines: Sequence[str], pieces: Sequence[Piece], above: int, cls: str | None = None) -> Iterator[Part]:
    """Parts of pieces. `above`: the last line before them."""
    for piece in pieces:
        last, body = piece.last, piece.node.body if isinstance(piece.node, ast.ClassDef) and cls is None else []
        if body and lines[start(body[0]) - 1].startswith(" "):
            last = start(body[0]) - 1
            while not lines[last - 1].strip() or lines[last - 1].lstrip().startswith("#"):
                last -= 1
        text = "\n".join(lines[piece.first - 1 : last])
        gap = piece.first - above - 1
        yield Part(dedent(text) if cls else text, piece.first, last, gap, piece.node, cls)
        if last < piece.last and isinstance(piece.node, ast.ClassDef):
            yield from _parts(lines, split(lines, body, last + 1, piece.last), last, piece.node.name)
        above = piece.last


def origins(module: Module, notebook: Notebook) -> list[Item]:
    """The item of each part of a module that is the export of its notebook. What stands in the cell of a class has the item of the class."""
    top, methods = fold(items_in(notebook))
    own = iter([*(item for item in top if item.node), *[item for item in top if not item.node][-1:]])
    left = Counter(part.cls for part in module.parts)
    found: list[Item] = []
    for part in module.parts:
        left[part.cls] -= 1
        folded = methods.get(part.cls or "", [])
        if part.cls is None:
            owner = next(own)
        found.append(folded[-1 - left[part.cls]] if left[part.cls] < len(folded) else owner)
    return found


def matches(old: Sequence[Part], new: Sequence[Part]) -> list[int | None]:
    """For each part of `new` which one of `old` it is, by name, or else by place and kind; None for one that was added."""
    gone, added = (
        [part.name[1] for part in ours if part.is_head and part.name not in {other.name for other in theirs}]
        for ours, theirs in ((old, new), (new, old))
    )
    renamed = dict(zip(added, gone, strict=True)) if len(added) == len(gone) else {}
    before = [part.name for part in old]
    after = [
        (renamed.get(cls or "", cls), renamed.get(name, name) if part.is_head else name)
        for part in new
        for cls, name in [part.name]
    ]
    found: list[int | None] = [None] * len(new)
    for kind, a1, a2, b1, b2 in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            found[b1:b2] = range(a1, a2)
            continue
        for b in range(b1, b2):
            for a in range(a1, a2):
                alike = (before[a][0], _kind(old[a])) == (after[b][0], _kind(new[b]))
                if alike and before[a] not in after and after[b] not in before:
                    found[b], a1 = a, a + 1
                    break
    return found


def _kind(part: Part) -> type:
    return ast.FunctionDef if isinstance(part.node, FUNCTIONS) else type(part.node)


@dataclass(frozen=True)
class Placed:
    """A part of an edited module, the item that it belongs to, and the part of the export that it was (None: it is new)."""

    part: Part
    item: Item
    was: Part | None


def placed(base: Module, edited: Module, notebook: Notebook) -> list[Placed]:
    """Where each part of an edited module belongs. `base`: the export of the notebook."""
    items, found = origins(base, notebook), []
    code = items or items_in(notebook)[-1:]
    if edited.parts and not code:
        raise LiterateError("no exported cell can take code", notebook.name)
    top = above = code[0] if code else None
    for part, index in zip(edited.parts, matches(base.parts, edited.parts), strict=True):
        above = items[index] if index is not None else above if part.cls else top
        top = top if part.cls else above
        assert above is not None
        found.append(Placed(part, above, None if index is None else base.parts[index]))
    return found
