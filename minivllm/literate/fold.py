"""`@method` in a notebook, and exported cells folded into class bodies."""

# Generated from nbs/literate/fold.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import abc
import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from minivllm.literate.notebook import Cell, LiterateError, Notebook
from minivllm.literate.source import DEFINITIONS, FUNCTIONS, IMPORTS, Piece, bound_names, split, start

__all__ = ["Item", "fold", "items_in", "items_of", "method"]

_BODY_ONLY = frozenset(
    {"__post_init__", "__eq__", "__init_subclass__", "__class_getitem__", "__set_name__", "__slots__"}
)
"""Names that Python looks at while it creates a class, so that adding them later means something else."""


def method(cls: type) -> Callable[[Any], Any]:
    """Decorator: put the function, property, classmethod or staticmethod below it on `cls`.

    In an exported cell the definition is folded into the class body. Decorators between `@method(cls)` and `def` are kept.
    To extend a property write `@Cls.name.setter`.

    Raises:
        TypeError: for names and forms that only work inside a class body.
    """

    def put(member: Any) -> Any:
        cached = member.func if isinstance(member, cached_property) else None
        function = cached or getattr(member, "fget", None) or getattr(member, "__func__", member)
        name = function.__name__
        if name in _BODY_ONLY:
            raise TypeError(f"{name} only works inside the class body: define it in the cell of {cls.__name__}")
        if "super" in getattr(getattr(function, "__code__", None), "co_names", ()):
            raise TypeError(f"super() needs the class body: in {name} call the method of the base class by name")
        accessors = (member.fget, member.fset, member.fdel) if isinstance(member, property) else (function,)
        for accessor in filter(None, accessors):
            accessor.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, member)
        if cached:
            member.__set_name__(cls, name)
        abc.update_abstractmethods(cls)
        # What the name meant before the definition, so that a method `sum` does not hide the function in the notebook.
        return sys._getframe(1).f_globals.get(name, getattr(builtins, name, None))

    return put


@dataclass(frozen=True)
class Item:
    """A statement of an exported cell, as text that can stand in a module. `cls`: the class whose method this is, if any.

    `gap` is the number of blank lines above it.
    """

    cell: Cell
    piece: Piece
    text: str
    gap: int = 0
    cls: str | None = None

    @property
    def node(self) -> ast.stmt | None:
        return self.piece.node

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, IMPORTS)

    def error(self, message: str) -> LiterateError:
        return self.cell.error(message, self.piece.first)


def items_in(notebook: Notebook) -> list[Item]:
    """The items of all exported cells, in order."""
    return [item for cell in notebook.exports for item in items_of(cell)]


def items_of(cell: Cell) -> list[Item]:
    """The items of an exported cell. Raises LiterateError for code that a module cannot hold, at its line."""
    try:
        tree = ast.parse(cell.code)
        compile(tree, cell.notebook, "exec", dont_inherit=True)
    except SyntaxError as error:
        hint = " (magics cannot be exported)" if (error.text or "").lstrip().startswith(("%", "!")) else ""
        raise cell.error(f"{error.msg}{hint}", error.lineno) from error
    lines = cell.code.split("\n")
    for before, after in pairwise(tree.body):
        if start(after) <= (before.end_lineno or before.lineno):
            raise cell.error("two statements on one line cannot be exported: give each its own", after.lineno)
    items, end = [], 0
    for piece in split(lines, tree.body, 1, len(lines)):
        cls = method_class(cell, piece.node)
        kept = lines[piece.first - 1 : piece.last]
        if cls is not None and isinstance(piece.node, FUNCTIONS):
            decorator = piece.node.decorator_list[0]
            del kept[decorator.lineno - piece.first : (decorator.end_lineno or decorator.lineno) - piece.first + 1]
            kept = [re.sub(rf"^@{cls}\.(\w+)\.(setter|getter|deleter)\b", r"@\1.\2", line) for line in kept]
        items.append(Item(cell, piece, "\n".join(kept), piece.first - end - 1, cls))
        end = piece.last
    return items


def method_class(cell: Cell, node: ast.stmt | None) -> str | None:
    """The class named by a leading `@method(Cls)`, or None. Raises LiterateError when `method` is used in another way."""
    decorators = getattr(node, "decorator_list", [])
    calls = [call for call in decorators if getattr(getattr(call, "func", None), "id", "") == "method"]
    if not calls:
        return None
    call = calls[0]
    if call is not decorators[0] or len(calls) > 1 or not isinstance(node, FUNCTIONS):
        raise cell.error("@method(Cls) must be the first decorator of a function", call.lineno)
    if len(call.args) != 1 or call.keywords or not isinstance(call.args[0], ast.Name):
        raise cell.error("@method takes one argument, the name of a class", call.lineno)
    for inner in ast.walk(node):
        private = getattr(inner, "attr", getattr(inner, "id", ""))
        line = getattr(inner, "lineno", call.lineno)
        if private.startswith("__") and not private.endswith("__"):
            raise cell.error(f"{private} is renamed inside a class but not here: use one underscore", line)
        if private == "super":
            raise cell.error("super() needs the class body: call the method of the base class by name", line)
    return call.args[0].id


def fold(items: Sequence[Item]) -> tuple[list[Item], dict[str, list[Item]]]:
    """Split items (imports left out) into those of the top level and the methods of each class.

    Raises LiterateError when a class is not defined in an earlier exported cell, when two definitions share a name, or when
    a method needs, at the moment of its definition, a name that the module only binds after the class.
    """
    top: list[Item] = []
    methods: dict[str, list[Item]] = defaultdict(list)
    classes: set[str] = set()
    for item in items:
        if item.is_import:
            continue
        if item.cls is None:
            top.append(item)
            if isinstance(item.node, ast.ClassDef):
                classes.add(item.node.name)
        elif item.cls in classes:
            methods[item.cls].append(item)
        else:
            raise item.error(f"@method({item.cls}): no earlier exported cell defines class {item.cls}")
    for scope in (top, *methods.values()):
        _refuse_second_definitions(scope)
    _refuse_late_names(items, top, methods)
    return top, methods


def _refuse_second_definitions(scope: Sequence[Item]) -> None:
    """Raises LiterateError where a function or class shares its name with another statement: the later would win, unnoticed."""
    first: dict[str, Item] = {}
    for item in scope:
        definition = isinstance(item.node, DEFINITIONS)
        if not (definition or isinstance(item.node, ast.Assign | ast.AnnAssign)) or _may_share(item.node):
            continue
        for name in bound_names([item.node] if item.node else []):
            if name in first and (definition or isinstance(first[name].node, DEFINITIONS)):
                raise item.error(f"{name} is exported twice, first in #{first[name].cell.id}")
            first[name] = item


def _may_share(node: ast.stmt | None) -> bool:
    """Whether a definition is meant to share its name: an overload, a property's setter, a registered variant."""
    decorators = [getattr(decorator, "func", decorator) for decorator in getattr(node, "decorator_list", [])]
    names = {getattr(decorator, "attr", getattr(decorator, "id", "")) for decorator in decorators}
    return bool(names & {"overload", "setter", "getter", "deleter", "register"})


def _refuse_late_names(items: Sequence[Item], top: Sequence[Item], methods: dict[str, list[Item]]) -> None:
    lazy = any(isinstance(item.node, ast.ImportFrom) and item.node.module == "__future__" for item in items)
    for position, owner in enumerate(top):
        if not isinstance(owner.node, ast.ClassDef) or owner.node.name not in methods:
            continue
        later = {name: item for item in top[position + 1 :] if item.node for name in bound_names([item.node])}
        if not lazy:
            later[owner.node.name] = owner
        for item in methods[owner.node.name]:
            for name in _names_at_definition(item.text, annotations=not lazy) & later.keys():
                where = "itself not complete" if later[name] is owner else f"bound later, in #{later[name].cell.id}"
                raise item.error(
                    f"this method moves up into class {item.cls}, where {name} is {where}: define it before the class,"
                    " or, if it is an annotation, use `from __future__ import annotations`"
                )


def _names_at_definition(method: str, annotations: bool) -> set[str]:
    """Names that the definition of a method evaluates when it is executed: decorators, defaults, annotations if asked."""
    node = ast.parse(method).body[0]
    assert isinstance(node, FUNCTIONS)
    evaluated: list[ast.AST | None] = [*node.decorator_list, *node.args.defaults, *node.args.kw_defaults]
    if annotations:
        evaluated += [node.returns, *(part.annotation for part in ast.walk(node.args) if isinstance(part, ast.arg))]
    return {n.id for part in evaluated if part for n in ast.walk(part) if isinstance(n, ast.Name)}
