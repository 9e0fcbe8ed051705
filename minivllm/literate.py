"""Literate notebooks to Python modules and back: export, check, write-back, clean."""

# Generated from nbs/literate.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import abc
import argparse
import ast
import builtins
import difflib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

__all__ = [
    "BODY_ONLY", "CONFLICT", "GENERATED", "INDENT", "LIMITS", "LONG", "MARKER", "METADATA", "OUT_OF_STEP",
    "RECORD", "SAFE_TO_EXPORT", "VOLATILE_CELL", "WIDGET_VIEW", "WIDTH", "Book", "Item", "LiterateError",
    "Module", "Notebook", "Part", "Watcher", "build", "by_cell", "check", "clean", "committed", "compact",
    "compare", "dedent", "digest", "edited_side", "entry", "export", "export_saved", "exporter_digest",
    "find_root", "finished", "formatted", "header", "imports_of", "indent", "is_clean", "items_of", "joined",
    "long_cells", "main", "make_packages", "marker", "method", "missing_packages", "module_imports",
    "module_path", "normal", "notebook_paths", "orphans", "parse_notebook", "post_save_hook", "pre_save_hook",
    "read_book", "read_module", "read_notebook", "read_record", "remember", "render", "source_digest",
    "spell", "strip", "take_apart", "write", "write_back",
]  # fmt: skip


# %% nbs/literate.ipynb #LiterateError
class LiterateError(Exception):
    """A mistake in a notebook or a module. The message begins with its place: `path`, `#cell`, line within the cell."""

    def __init__(self, message: str, path: str, cell: str | None = None, line: int | None = None) -> None:
        place = path + (f" #{cell}" if cell else "") + (f" line {line}" if line else "")
        super().__init__(f"{place}: {message}")
        self.path = path


# %% nbs/literate.ipynb #Cell
DIRECTIVES = {"default_exp": True, "doc": True, "export": False, "exporti": False, "hide": False}
"""Name of a directive -> whether it takes an argument."""


@dataclass(frozen=True)
class Cell:
    """One cell of a notebook. `kind` is code, markdown or raw; `notebook` is the path shown in errors and markers."""

    notebook: str
    id: str
    kind: str
    source: str

    def error(self, message: str, line: int | None = None) -> LiterateError:
        return LiterateError(message, self.notebook, self.id, line)

    @cached_property
    def directives(self) -> dict[str, str]:
        """The directives in the first lines, name -> argument. Raises LiterateError for one that is not known."""
        found: dict[str, str] = {}
        if self.kind != "code":
            return found
        for number, line in enumerate(self.source.splitlines(), 1):
            if not line.startswith("#|"):
                break
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
        self._refuse_late_directives(len(found))
        return found

    def _refuse_late_directives(self, seen: int) -> None:
        for number, line in enumerate(self.source.splitlines(), 1):
            if number > seen and line.startswith("#|") and number not in lines_inside_strings(self.source):
                raise self.error("directives belong in the first lines of a cell", number)

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


# %% nbs/literate.ipynb #strings
def lines_inside_strings(source: str, docstrings: bool = True) -> set[int]:
    """Numbers (from 1) of the lines that begin inside a string. Without `docstrings`, those of docstrings are left out.

    A source that does not parse has none.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    skipped = set() if docstrings else {id(node) for node in _docstrings(tree)}
    inside: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr | ast.Constant) or id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes):
            inside.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    return inside


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.value


# %% nbs/literate.ipynb #Notebook
@dataclass(frozen=True)
class Notebook:
    """A notebook of the book: `name` is its path from the repository root, `text` the file, `data` the JSON in it."""

    path: Path
    name: str
    text: str
    data: dict[str, Any]
    cells: tuple[Cell, ...]

    @cached_property
    def module(self) -> str | None:
        """What `#| default_exp` says, such as `core.block_pool`; None for a chapter that exports nothing."""
        named = [cell for cell in self.cells if "default_exp" in cell.directives]
        if len(named) > 1:
            raise named[1].error(f"default_exp stands twice, first in #{named[0].id}")
        exports = self.exports
        if not named:
            if exports:
                raise exports[0].error("this cell is exported, but no cell says '#| default_exp module.name'")
            return None
        module = named[0].directives["default_exp"]
        if not re.fullmatch(r"[a-z_]\w*(\.[a-z_]\w*)*", module) or module.split(".")[0] == "minivllm":
            raise named[0].error(
                f"not a module name: {module!r}; write 'core.scheduler' or 'minivllm_kernels.cuda.decode'"
            )
        return module

    @cached_property
    def docstring(self) -> str:
        """The docstring of the module: the one line that `#| doc` gives. Raises LiterateError when there is none."""
        named = [cell for cell in self.cells if "doc" in cell.directives]
        if len(named) != 1:
            again = f", not {len(named)}" if named else ""
            message = f"one cell says what the module is, as '#| doc One technical line'{again}"
            raise LiterateError(message, self.name)
        line = named[0].directives["doc"]
        if len(line) > 100 or '"' in line or "\\" in line:
            raise named[0].error(f"doc is one line of at most 100 characters, without quotes and backslashes: {line!r}")
        return line if line[-1] in ".!?" else line + "."

    @cached_property
    def exports(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.exported]

    @property
    def target(self) -> str:
        """The module's path from the repository root."""
        return module_path(self.module or "")


def module_path(module: str) -> str:
    """`core.request` -> `minivllm/core/request.py`; `minivllm_kernels.cuda.decode` -> `kernels/minivllm_kernels/cuda/decode.py`."""
    folder = "kernels" if module.split(".")[0] == "minivllm_kernels" else "minivllm"
    return f"{folder}/{module.replace('.', '/')}.py"


# %% nbs/literate.ipynb #read-notebook
def read_notebook(path: Path, root: Path) -> Notebook:
    """Read a notebook (format 4.5 or newer: cells need ids). Raises LiterateError when it is not one."""
    return parse_notebook(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix(), path)


def parse_notebook(text: str, name: str, path: Path) -> Notebook:
    """A Notebook from the text of its file."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if found := CONFLICT.search(text):
            raise _conflict(text[: found.start()], name) from error
        raise LiterateError(f"not a notebook: {error.msg}", name, line=error.lineno) from error
    if not isinstance(data, dict) or data.get("nbformat") != 4:
        raise LiterateError("not a notebook of format 4", name)
    cells, seen = [], set()
    for index, raw in enumerate(data.get("cells", [])):
        if not raw.get("id"):
            raise LiterateError(f"cell {index} has no id: save the notebook in format 4.5 or newer", name)
        if raw["id"] in seen:
            raise LiterateError("two cells have this id", name, raw["id"])
        seen.add(raw["id"])
        cells.append(Cell(name, raw["id"], raw["cell_type"], joined(raw["source"])))
    return Notebook(path, name, text, data, tuple(cells))


CONFLICT = re.compile(r"^<{7} .*\n(?:.*\n)*?={7}\n(?:.*\n)*?>{7} ", re.MULTILINE)


"""What git leaves where both sides of a merge changed the same lines."""


def _conflict(above: str, name: str) -> LiterateError:
    """The error of a notebook that git could not merge, given its text above the first conflict."""
    ids = re.findall(r'^ *"id": "([^"]+)"', above, re.MULTILINE)
    message = "this cell was edited on both sides of a merge: choose a side, or join them, in the notebook's file"
    return LiterateError(message, name, ids[-1] if ids else None)


def joined(text: str | list[str]) -> str:
    """Text of a notebook file, which may be stored as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


# %% nbs/literate.ipynb #root
def find_root(start: Path) -> Path:
    """The nearest folder at or above `start` that holds `nbs/` and `pyproject.toml`."""
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "nbs").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    raise LiterateError("no folder with nbs/ and pyproject.toml here or above", str(start))


def notebook_paths(root: Path) -> list[Path]:
    return [path for path in sorted(root.glob("nbs/**/*.ipynb")) if ".ipynb_checkpoints" not in path.parts]


# %% nbs/literate.ipynb #Piece
@dataclass(frozen=True)
class Piece:
    """Lines `first` to `last` (from 1): a statement and the comments above it, or comments alone (`node` None)."""

    first: int
    last: int
    node: ast.stmt | None


def cut(lines: Sequence[str], body: Sequence[ast.stmt], first: int, last: int) -> list[Piece]:
    """Cut the lines first..last into pieces, one for each statement of `body`, blank lines between them left out."""
    found: list[Piece] = []
    for index, node in enumerate(body):
        end = _end_with_comments(lines, node, _start(body[index + 1]) if index + 1 < len(body) else last + 1)
        found.append(Piece(_skip_blank(lines, first), end, node))
        first = end + 1
    first = _skip_blank(lines, first)
    return found + ([Piece(first, _strip_blank(lines, last), None)] if first <= last else [])


def _start(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def _end_with_comments(lines: Sequence[str], node: ast.stmt, limit: int) -> int:
    """The last line of a statement; comments that follow a block and are indented deeper belong to it."""
    end = node.end_lineno or node.lineno
    for number in range(end + 1, limit):
        line = lines[number - 1]
        if line.strip():
            if len(line) - len(line.lstrip()) <= node.col_offset:
                break
            end = number
    return end


def _skip_blank(lines: Sequence[str], number: int) -> int:
    while number <= len(lines) and not lines[number - 1].strip():
        number += 1
    return number


def _strip_blank(lines: Sequence[str], number: int) -> int:
    while number > 0 and not lines[number - 1].strip():
        number -= 1
    return number


# %% nbs/literate.ipynb #Item
@dataclass(frozen=True)
class Item:
    """A piece of an exported cell, as text that can stand in a module. `cls`: the class whose method this is, if any.

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
        return isinstance(self.node, ast.Import | ast.ImportFrom)


def items_of(cell: Cell) -> list[Item]:
    """The items of an exported cell. Raises LiterateError for code that does not parse, at its line."""
    try:
        tree = ast.parse(cell.code)
        compile(tree, cell.notebook, "exec", dont_inherit=True)
    except SyntaxError as error:
        hint = " (magics cannot be exported)" if (error.text or "").lstrip().startswith(("%", "!")) else ""
        raise cell.error(f"{error.msg}{hint}", error.lineno) from error
    lines = cell.code.split("\n")
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if _start(after) <= (before.end_lineno or before.lineno):
            raise cell.error("two statements on one line cannot be exported: give each its own", after.lineno)
    found = cut(lines, tree.body, 1, len(lines))
    ends = [0, *(piece.last for piece in found)]
    return [_item(cell, lines, piece, piece.first - end - 1) for piece, end in zip(found, ends, strict=False)]


def _item(cell: Cell, lines: Sequence[str], piece: Piece, gap: int) -> Item:
    cls = method_class(cell, piece.node)
    kept = list(lines[piece.first - 1 : piece.last])
    if cls is not None and isinstance(piece.node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorator = piece.node.decorator_list[0]
        del kept[decorator.lineno - piece.first : (decorator.end_lineno or decorator.lineno) - piece.first + 1]
        kept = [re.sub(rf"^@{cls}\.(\w+)\.(setter|getter|deleter)\b", r"@\1.\2", line) for line in kept]
    return Item(cell, piece, "\n".join(kept), gap, cls)


# %% nbs/literate.ipynb #method-class
def method_class(cell: Cell, node: ast.stmt | None) -> str | None:
    """The class named by a leading `@method(Cls)`, or None. Raises LiterateError when `method` is used in another way."""
    calls = [
        (position, decorator)
        for position, decorator in enumerate(getattr(node, "decorator_list", []))
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "method"
    ]
    if not calls:
        return None
    position, call = calls[0]
    if position or len(calls) > 1 or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise cell.error("@method(Cls) must be the first decorator of a function", call.lineno)
    if len(call.args) != 1 or call.keywords or not isinstance(call.args[0], ast.Name):
        raise cell.error("@method takes one argument, the name of a class", call.lineno)
    for inner in ast.walk(node):
        if not isinstance(inner, ast.Attribute | ast.Name):
            continue
        private = inner.attr if isinstance(inner, ast.Attribute) else inner.id
        if private.startswith("__") and not private.endswith("__"):
            raise cell.error(f"{private} is renamed inside a class but not here: use one underscore", inner.lineno)
    return call.args[0].id


# %% nbs/literate.ipynb #method
BODY_ONLY = frozenset(
    {"__post_init__", "__eq__", "__init_subclass__", "__class_getitem__", "__set_name__", "__slots__"}
)
"""Names that Python looks at while it creates a class, so that adding them later means something else."""


def method(cls: type) -> Callable[[Any], Any]:
    """Decorator: put the function, property, classmethod or staticmethod below it on `cls`.

    In an exported cell the definition is folded into the class body. Decorators between `@method(cls)` and `def` are kept.
    To extend a property write `@Cls.name.setter`. Raises TypeError for names and forms that only work inside a class body.
    """

    def put(member: Any) -> Any:
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        name = function.__name__
        if name in BODY_ONLY:
            raise TypeError(f"{name} only works inside the class body: define it in the cell of {cls.__name__}")
        if "super" in getattr(getattr(function, "__code__", None), "co_names", ()):
            raise TypeError(f"super() needs the class body: in {name} call the method of the base class by name")
        if isinstance(member, property):
            for accessor in (member.fget, member.fset, member.fdel):
                if accessor is not None:
                    accessor.__qualname__ = f"{cls.__qualname__}.{name}"
        elif hasattr(function, "__qualname__"):
            function.__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, member)
        abc.update_abstractmethods(cls)
        return _meaning_before(name)

    return put


def _meaning_before(name: str) -> Any:
    """What a name meant where `@method` stands, before the definition below it: a global, a built-in, or None."""
    caller = sys._getframe(2).f_globals
    return caller.get(name, getattr(builtins, name, None))


# %% nbs/literate.ipynb #module-source
INDENT = "    "


GENERATED = "# Generated from nbs/"


def marker(cell: Cell) -> str:
    return f"# %% {cell.notebook} #{cell.id}"


def render(notebook: Notebook) -> str:
    """The module of a notebook, before formatting. Raises LiterateError at the cell that cannot be exported."""
    items = [item for cell in notebook.exports for item in items_of(cell)]
    top, methods = fold(items)
    head = [f'"""{notebook.docstring}"""', "", header(notebook.name), ""]
    head += [item.text for item in items if item.is_import] + [""]
    if "__all__" not in _bound([item.node for item in top if item.node]):
        names = public_names(top, items if notebook.target.endswith("__init__.py") else [])
        head += [f"__all__ = {json.dumps(names)}  # fmt: skip" if names else "__all__: list[str] = []", ""]
    return "\n".join(head + list(_body(top, methods))) + "\n"


def _body(top: Sequence[Item], methods: dict[str, list[Item]]) -> Iterator[str]:
    current = None
    for item in top:
        if item.cell != current:
            yield "\n\n" + marker(item.cell)
            current = item.cell
            yield item.text
        else:
            yield "\n" * item.gap + item.text
        if isinstance(item.node, ast.ClassDef) and item.node.name in methods:
            current = None
            yield from _folded(methods[item.node.name])


def _folded(methods: Sequence[Item]) -> Iterator[str]:
    current = None
    for item in methods:
        if item.cell != current:
            yield f"\n{INDENT}{marker(item.cell)}"
            current = item.cell
        yield indent(item.text)


def indent(text: str) -> str:
    """Indent code by one level; the lines of multi-line strings stay, those of docstrings move."""
    kept = lines_inside_strings(text, docstrings=False)
    return "\n".join(
        line if not line.strip() or number in kept else INDENT + line for number, line in enumerate(text.split("\n"), 1)
    )


# %% nbs/literate.ipynb #header
def header(name: str) -> str:
    return f"{GENERATED}{name.removeprefix('nbs/')}; after an edit here run `python -m minivllm.literate write-back`."


def source_digest(notebook: Notebook) -> str:
    """Digest of everything that `render` reads: name, module, docstring, and the code of the exported cells."""
    cells = [[cell.id, cell.public, cell.code.strip()] for cell in notebook.exports]
    return digest(json.dumps([notebook.name, notebook.module, notebook.docstring, cells]))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# %% nbs/literate.ipynb #fold
def fold(items: Sequence[Item]) -> tuple[list[Item], dict[str, list[Item]]]:
    """Split items (imports left out) into those of the top level and the methods of each class.

    Raises LiterateError when a class is not defined in an earlier exported cell, is defined twice, or when a method needs,
    at the moment of its definition, a name that the module only binds after the class.
    """
    top: list[Item] = []
    methods: dict[str, list[Item]] = defaultdict(list)
    classes: dict[str, Item] = {}
    for item in items:
        if item.is_import:
            continue
        if item.cls is None:
            top.append(item)
            if isinstance(item.node, ast.ClassDef):
                classes[item.node.name] = item
        elif item.cls not in classes:
            raise item.cell.error(
                f"@method({item.cls}): no earlier exported cell defines class {item.cls}", item.piece.first
            )
        else:
            methods[item.cls].append(item)
    for scope in (top, *methods.values()):
        _refuse_second_definitions(scope)
    _refuse_late_names(items, top, methods)
    return top, methods


def _refuse_second_definitions(scope: Sequence[Item]) -> None:
    """Raises LiterateError where a function or class and another statement bind one name: the later would win, unnoticed."""
    first: dict[str, Item] = {}
    for item in scope:
        whole = isinstance(item.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if not whole and not isinstance(item.node, ast.Assign | ast.AnnAssign) or _continues(item.node):
            continue
        for name in _bound([item.node] if item.node else []):
            if name in first and (whole or isinstance(first[name].node, _DEFINITIONS)):
                raise item.cell.error(f"{name} is exported twice, first in #{first[name].cell.id}", item.piece.first)
            first[name] = item


_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _continues(node: ast.stmt | None) -> bool:
    """Whether a definition is meant to share its name: an overload, a property's setter, a registered variant."""
    names = {
        getattr(decorator, "attr", getattr(decorator, "id", "")) for decorator in getattr(node, "decorator_list", [])
    }
    called = [decorator.func for decorator in getattr(node, "decorator_list", []) if isinstance(decorator, ast.Call)]
    names |= {getattr(function, "attr", "") for function in called}
    return bool(names & {"overload", "setter", "getter", "deleter", "register"})


def _refuse_late_names(items: Sequence[Item], top: Sequence[Item], methods: dict[str, list[Item]]) -> None:
    lazy = any(isinstance(item.node, ast.ImportFrom) and item.node.module == "__future__" for item in items)
    for position, owner in enumerate(top):
        if not isinstance(owner.node, ast.ClassDef) or owner.node.name not in methods:
            continue
        later = {name: item for item in top[position:] if item.node for name in _bound([item.node])}
        later.pop(owner.node.name, None)
        if lazy is False:
            later[owner.node.name] = owner
        for item in methods[owner.node.name]:
            for name in _names_at_definition(item.text, annotations=not lazy) & later.keys():
                where = "itself not complete" if later[name] is owner else f"bound later, in #{later[name].cell.id}"
                raise item.cell.error(
                    f"this method moves up into class {item.cls}, where {name} is {where}: define it before the class,"
                    " or, if it is an annotation, use `from __future__ import annotations`",
                    item.piece.first,
                )


def _names_at_definition(method: str, annotations: bool) -> set[str]:
    """Names that the definition of a method evaluates when it is executed: decorators, defaults, annotations if asked."""
    node = ast.parse(method).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = node.args
    evaluated: list[ast.AST | None] = [*node.decorator_list, *arguments.defaults, *arguments.kw_defaults]
    if annotations:
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        evaluated += [node.returns, *(argument.annotation for argument in named if argument)]
    return {n.id for part in evaluated if part for n in ast.walk(part) if isinstance(n, ast.Name)}


# %% nbs/literate.ipynb #names
def public_names(top: Sequence[Item], imports: Sequence[Item] = ()) -> list[str]:
    """Names for `__all__`: what public cells bind, without underscores and type variables, and what `imports` import."""
    bound = _bound([item.node for item in (*imports, *top) if item.node and item.cell.public])
    return list(dict.fromkeys(name for name in bound if not name.startswith("_")))


def _bound(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements bind at module level; those of imports only when an import stands in `body` itself."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not _is_type_variable(node.value):
                yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse, *getattr(node, "finalbody", [])]
            inner += [child for handler in getattr(node, "handlers", []) for child in handler.body]
            yield from _bound([child for child in inner if not isinstance(child, ast.Import | ast.ImportFrom)])


def _is_type_variable(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and getattr(value.func, "id", "") in {"TypeVar", "ParamSpec", "TypeVarTuple"}


# %% nbs/literate.ipynb #format
def formatted(modules: dict[str, str], root: Path, fix: str = "I,F401,RUF022", layout: bool = True) -> dict[str, str]:
    """Let ruff fix its rules `fix` (sort imports, drop unused ones, sort `__all__`) and, if `layout`, format the code.

    Maps paths to texts, as `modules` does.

    The settings are those of the root's `pyproject.toml`. Raises LiterateError when ruff is not installed or fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in modules.items():
            write(Path(folder, name), text)
        settings = ["--no-cache", "--quiet", "--config", str(root / "pyproject.toml"), "."]
        if fix:
            _ruff(["check", "--fix", "--exit-zero", "--select", fix, *settings], folder)
        if layout:
            _ruff(["format", *settings], folder)
        return {name: Path(folder, name).read_text(encoding="utf-8") for name in modules}


def _ruff(arguments: list[str], folder: str) -> None:
    beside = Path(sysconfig.get_path("scripts"), "ruff")
    program = str(beside) if beside.exists() else shutil.which("ruff")
    if program is None:
        raise LiterateError("ruff is not installed: pip install ruff", "export")
    done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LiterateError(f"ruff {arguments[0]} failed: {done.stderr.strip()}", "export")


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# %% nbs/literate.ipynb #format-demo
def build(notebooks: Sequence[Notebook], root: Path) -> dict[str, str]:
    """The finished text of each notebook's module, by path from the root."""
    return finished({notebook.target: render(notebook) for notebook in notebooks}, root)


def finished(rendered: dict[str, str], root: Path) -> dict[str, str]:
    """Rendered modules, by path, as they are written."""
    return {name: compact(text) for name, text in (formatted(rendered, root) if rendered else {}).items()}


def compact(text: str) -> str:
    """Break the one line of `__all__` where it is too long: ruff alone would give each name a line."""

    def fill(found: re.Match[str]) -> str:
        if len(found[0]) - len(found[2]) <= WIDTH:
            return found[0].removesuffix(found[2])
        return f"__all__ = [\n{textwrap.fill(found[1] + ',', WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)}\n]{found[2]}"

    return re.sub(r"^__all__ = \[(.*)\](  # fmt: skip)$", fill, text, count=1, flags=re.MULTILINE)


WIDTH = 110


# %% nbs/literate.ipynb #state
RECORD = ".literate.json"


"""A file that git ignores: for each module, digests of notebook and module when they were last seen to agree."""


def read_record(root: Path) -> dict[str, list[str]]:
    """Path of a module -> digests of the exporter, the notebook and the module at their last agreement here."""
    try:
        record = json.loads((root / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def entry(notebook: Notebook, root: Path) -> list[str]:
    """What the record says of a module when it agrees with its notebook as both are now."""
    return [exporter_digest(root), source_digest(notebook), digest(read_module(notebook, root) or "")]


def exporter_digest(root: Path) -> str:
    """Digest of what decides how a notebook is exported: this program, and ruff's settings."""
    return digest("".join(path.read_text(encoding="utf-8") for path in (Path(__file__), root / "pyproject.toml")))


def read_module(notebook: Notebook, root: Path) -> str | None:
    path = root / notebook.target
    return path.read_text(encoding="utf-8") if path.exists() else None


def remember(notebooks: Sequence[Notebook], root: Path) -> None:
    """Record that these notebooks and their modules agree."""
    record = read_record(root)
    now = record | {notebook.target: entry(notebook, root) for notebook in notebooks}
    if now != record:
        write(root / RECORD, json.dumps(now, indent=0, sort_keys=True))


def compare(
    notebooks: Sequence[Notebook], root: Path, rebuild: bool = False
) -> tuple[dict[str, str], list[LiterateError]]:
    """The modules that differ from what their notebooks export: path -> the export; and the errors of those that have none.

    What the record knows to agree is not exported again, unless `rebuild`.
    """
    record = {} if rebuild else read_record(root)
    rendered, errors = {}, []
    for notebook in notebooks:
        try:
            if record.get(notebook.target) != entry(notebook, root):
                rendered[notebook.target] = render(notebook)
        except LiterateError as error:
            errors.append(error)
    chapters = {notebook.target: notebook for notebook in notebooks}
    built = finished(rendered, root)
    differing = {name: text for name, text in built.items() if text != read_module(chapters[name], root)}
    remember([chapters[name] for name in built.keys() - differing.keys()], root)
    return differing, errors


# %% nbs/literate.ipynb #edited-side
def committed(name: str, root: Path) -> str | None:
    """The text of a file in git's HEAD; None without git, or when it is not there."""
    try:
        done = subprocess.run(["git", "show", f"HEAD:./{name}"], cwd=root, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.decode()


def _committed_digest(notebook: Notebook, root: Path) -> str | None:
    """The digest of a notebook in git's HEAD; None where it is not there, or cannot be exported by the rules of today."""
    text = committed(notebook.name, root)
    try:
        return None if text is None else source_digest(parse_notebook(text, notebook.name, notebook.path))
    except LiterateError:
        return None


def edited_side(notebook: Notebook, root: Path) -> str:
    """What became of a module that is not its notebook's export: a key of `OUT_OF_STEP`.

    A side was edited when it is neither as in git's HEAD nor as in the record.
    """
    module = read_module(notebook, root)
    if module is None or not module.strip():
        return "missing"
    if CONFLICT.search(module):
        return "conflict"
    if f"\n{GENERATED}" not in module:
        return "foreign"
    _, recorded, exported = read_record(root).get(notebook.target, ["", "", ""])
    if digest(module) == exported:
        return "notebook"
    now = source_digest(notebook)
    as_committed = now == _committed_digest(notebook, root)
    if module != committed(notebook.target, root):
        return "module" if as_committed or now == recorded else "both"
    return "neither" if as_committed else "notebook"


# %% nbs/literate.ipynb #export
OUT_OF_STEP = {
    "missing": "not exported yet: run export",
    "conflict": "git left a conflict in the module: run export",
    "notebook": "the notebook changed since the last export: run export",
    "module": "the module was edited since the last export: run write-back to keep the edit, or export --force to lose it",
    "both": "notebook and module both changed since the last export: "
    "export --force keeps the notebook's side, write-back --force the module's",
    "neither": "both are as in git's HEAD, where they differ, or the exporter changed: "
    "export --force keeps the notebook's side, write-back --force the module's",
    "foreign": "the module was not exported by this tool: move its code into the notebook, then export --force",
}


SAFE_TO_EXPORT = {"missing", "conflict", "notebook"}


def export(notebooks: Sequence[Notebook], root: Path, force: bool = False) -> tuple[list[str], list[LiterateError]]:
    """Write the modules that are out of date. Returns the paths written and the errors; one bad notebook stops no other."""
    differing, errors = compare(notebooks, root)
    written = []
    for notebook in notebooks:
        if notebook.target not in differing:
            continue
        found = edited_side(notebook, root)
        if force or found in SAFE_TO_EXPORT:
            write(root / notebook.target, differing[notebook.target])
            written.append(notebook)
        else:
            errors.append(LiterateError(f"differs from {notebook.target} ({OUT_OF_STEP[found]})", notebook.name))
    remember(written, root)
    names = [notebook.target for notebook in written]
    return names + make_packages(root, names), errors


def make_packages(root: Path, modules: Iterable[str]) -> list[str]:
    """Make the empty `__init__.py` of every package that holds one of the modules, where there is none."""
    missing = missing_packages(root, modules)
    for init in missing:
        write(root / init, "")
    return missing


def missing_packages(root: Path, modules: Iterable[str]) -> list[str]:
    """The `__init__.py` files that the packages of these modules lack. `kernels/` is a folder, not a package."""
    packages = sorted({parent for module in modules for parent in Path(module).parents} - {Path("."), Path("kernels")})
    return [
        (package / "__init__.py").as_posix() for package in packages if not (root / package / "__init__.py").exists()
    ]


# %% nbs/literate.ipynb #book
@dataclass
class Book:
    """The notebooks that export a module, by path of the module, the plain ones, and the errors found on the way."""

    root: Path
    chapters: dict[str, Notebook] = field(default_factory=dict)
    plain: list[Notebook] = field(default_factory=list)
    errors: list[LiterateError] = field(default_factory=list)
    whole: bool = True


def read_book(root: Path) -> Book:
    """Read every notebook under `nbs/`. Two that export the same module are an error that names both."""
    book = Book(root)
    for path in notebook_paths(root):
        try:
            notebook = read_notebook(path, root)
            if notebook.module is None:
                book.plain.append(notebook)
            elif notebook.target in book.chapters:
                other = book.chapters[notebook.target].name
                raise LiterateError(f"default_exp {notebook.module}: {other} exports the same module", notebook.name)
            else:
                book.chapters[notebook.target] = notebook
        except LiterateError as error:
            book.errors.append(error)
    return book


# %% nbs/literate.ipynb #Part
MARKER = re.compile(r"\s*# %% (\S.*\.ipynb) #([A-Za-z0-9_-]{1,64})\s*")


@dataclass(frozen=True)
class Part:
    """A statement of a module (or comments alone: `node` None), the cell it belongs to, and the class it was folded into."""

    cell: str
    text: str
    line: int
    node: ast.stmt | None
    cls: str | None = None


@dataclass
class Module:
    """A module taken apart: what stands above the first marker, and the parts below it."""

    path: str
    preamble: list[ast.stmt]
    comments: list[str]
    parts: list[Part]


def take_apart(text: str, path: str) -> Module:
    """Read a module along its markers. Raises LiterateError when it does not parse or has code that belongs to no cell."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise LiterateError(error.msg, path, line=error.lineno) from error
    lines = text.split("\n")
    begin = next((number for number, line in enumerate(lines, 1) if MARKER.fullmatch(line)), len(lines) + 1)
    preamble = [node for node in tree.body if node.lineno < begin]
    for node in preamble[1 if ast.get_docstring(tree) is not None else 0 :]:
        if not isinstance(node, ast.Import | ast.ImportFrom) and list(_bound([node])) != ["__all__"]:
            raise LiterateError("this stands above the first marker, so it belongs to no cell", path, line=node.lineno)
    head = [line.lstrip("# ") for line in lines[: begin - 1] if line.startswith("#") and "literate" not in line]
    parts = list(_parts(lines, cut(lines, tree.body[len(preamble) :], begin, len(lines)), "", None))
    return Module(path, preamble, head, parts)


def _parts(lines: Sequence[str], pieces: Sequence[Piece], cell: str, cls: str | None) -> Iterator[Part]:
    for piece in pieces:
        first = piece.first
        for number in range(first, (_start(piece.node) if piece.node else piece.last + 1)):
            if found := MARKER.fullmatch(lines[number - 1]):
                if any(line.strip() for line in lines[first - 1 : number - 1]):
                    yield _part(lines, Piece(first, number - 1, None), cell, cls)
                cell, first = found[2], number + 1
        first = _skip_blank(lines, first)
        if first > piece.last:
            continue
        inner = _inner_marker(lines, piece) if cls is None else None
        if inner is None or not isinstance(piece.node, ast.ClassDef):
            yield _part(lines, Piece(first, piece.last, piece.node), cell, cls)
            continue
        yield _part(lines, Piece(first, inner - 1, piece.node), cell, cls)
        body = [node for node in piece.node.body if _start(node) > inner]
        yield from _parts(lines, cut(lines, body, inner, piece.last), cell, piece.node.name)


def _inner_marker(lines: Sequence[str], piece: Piece) -> int | None:
    """The line of the first marker inside a class."""
    if not isinstance(piece.node, ast.ClassDef):
        return None
    inside = range(_start(piece.node), piece.last + 1)
    return next((number for number in inside if MARKER.fullmatch(lines[number - 1])), None)


def _part(lines: Sequence[str], piece: Piece, cell: str, cls: str | None) -> Part:
    text = "\n".join(lines[piece.first - 1 : _strip_blank(lines, piece.last)])
    return Part(cell, dedent(text) if cls else text, piece.first, piece.node, cls)


def dedent(text: str) -> str:
    """Undo `indent`."""
    kept = lines_inside_strings("if True:\n" + text, docstrings=False)
    return "\n".join(
        line if number in kept else line.removeprefix(INDENT) for number, line in enumerate(text.split("\n"), 2)
    )


# %% nbs/literate.ipynb #normal
def normal(text: str) -> str:
    """Code without its layout: the syntax tree and the comments."""
    tree = ast.parse(text)
    for node in _docstrings(tree):
        node.value = "\n".join(line.strip() for line in str(node.value).strip().split("\n"))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string.lstrip("#").strip() for token in tokens if token.type == tokenize.COMMENT]
    return f"{ast.dump(tree)} {comments}"


def imports_of(body: Iterable[ast.stmt]) -> dict[str, None]:
    """The imports among statements, one name each, as source lines (an ordered set)."""
    found: dict[str, None] = {}
    for node in body:
        if isinstance(node, ast.Import):
            found.update((ast.unparse(ast.Import([alias])), None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update((ast.unparse(ast.ImportFrom(node.module, [alias], node.level)), None) for alias in node.names)
    return found


def module_imports(module: Module) -> dict[str, None]:
    return imports_of([*module.preamble, *(part.node for part in module.parts if part.node and not part.cls)])


def by_cell(module: Module) -> dict[str, list[tuple[str | None, str]]]:
    """Cell id -> its parts in order, each as class and normal form. Imports are left out: they move."""
    found: dict[str, list[tuple[str | None, str]]] = defaultdict(list)
    for part in module.parts:
        if not isinstance(part.node, ast.Import | ast.ImportFrom):
            found[part.cell].append((part.cls, normal(part.text)))
    return found


# %% nbs/literate.ipynb #differences
def differing_cells(notebook: Notebook, text: str) -> list[str]:
    """Ids of the cells whose code is not the same in the notebook and in the text of its module."""
    ours, theirs = (by_cell(take_apart(side, notebook.target)) for side in (render(notebook), text))
    return [cell for cell in {**ours, **theirs} if ours.get(cell) != theirs.get(cell)]


def step_errors(notebook: Notebook, root: Path) -> list[LiterateError]:
    """How a notebook and a module that is not its export differ: one error for each cell."""
    found = edited_side(notebook, root)
    what = f"differs from {notebook.target} ({OUT_OF_STEP[found]})"
    if found in {"missing", "conflict", "foreign"}:
        return [LiterateError(what, notebook.name)]
    cells = differing_cells(notebook, read_module(notebook, root) or "")
    if not cells:
        return [LiterateError(f"imports, layout or docstring: {what}", notebook.name)]
    return [LiterateError(what, notebook.name, cell) for cell in cells]


# %% nbs/literate.ipynb #machine-traces
PERSONAL = re.compile(
    r"(?<![\w.+/=])(?:/home/|/Users/|/root/|/tmp/ipykernel_|[A-Z]:\\Users\\)\w+|(?<= at )0x[0-9a-f]{6,}"
)
"""Paths of some user's machine, and memory addresses."""


def output_errors(notebook: Notebook, root: Path) -> list[LiterateError]:
    """One error for each cell with a stored output that holds an absolute path of a machine, or a memory address."""
    here = [re.escape(str(folder)) for folder in (root.resolve(), Path.home()) if folder.parent != folder]
    local = re.compile(r"(?<![\w.+/=])(?:" + "|".join(here) + r")\b")
    errors = []
    for raw in notebook.data["cells"]:
        text = "\n".join(_output_texts(raw.get("outputs", [])))
        found = PERSONAL.search(text) or local.search(text)
        if found:
            message = (
                f"a stored output holds {found[0]!r}, which belongs to one machine: change the cell and run it again"
            )
            errors.append(LiterateError(message, notebook.name, raw["id"]))
    return errors


def _output_texts(outputs: Iterable[dict[str, Any]]) -> Iterator[str]:
    for output in outputs:
        yield joined(output.get("text", ""))
        yield "\n".join(output.get("traceback", []))
        for mime, value in output.get("data", {}).items():
            if mime.startswith("text/"):
                yield joined(value)


# %% nbs/literate.ipynb #strip
VOLATILE_CELL = frozenset(
    {"execution", "ExecuteTime", "executionInfo", "collapsed", "scrolled", "trusted", "vscode", "outputId", "colab"}
)
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def strip(data: dict[str, Any]) -> dict[str, Any]:
    """A notebook's JSON without execution counts, timestamps, versions and widget state. Outputs stay; `data` is not changed."""
    cells = []
    for raw in data["cells"]:
        cell = {**raw, "metadata": {k: v for k, v in raw["metadata"].items() if k not in VOLATILE_CELL}}
        if raw["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": _merge_streams(map(_strip_output, raw.get("outputs", [])))}
        cells.append(cell)
    metadata = {
        k: v for k, v in data.get("metadata", {}).items() if k not in {"widgets", "signature", "vscode", "colab"}
    }
    return {
        "cells": cells,
        "metadata": metadata | METADATA,
        "nbformat": 4,
        "nbformat_minor": max(5, data.get("nbformat_minor", 5)),
    }


def _merge_streams(outputs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbouring pieces of one stream: into how many pieces a kernel sends its text is chance."""
    merged: list[dict[str, Any]] = []
    for output in outputs:
        last = merged[-1] if merged else {}
        if output["output_type"] == last.get("output_type") == "stream" and output["name"] == last["name"]:
            merged[-1] = {**last, "text": joined(last["text"]) + joined(output["text"])}
        else:
            merged.append(output)
    return merged


def _strip_output(output: dict[str, Any]) -> dict[str, Any]:
    output = dict(output)
    if "execution_count" in output:
        output["execution_count"] = None
    if "data" in output:
        output["data"] = {mime: value for mime, value in output["data"].items() if mime != WIDGET_VIEW}
    return output


# %% nbs/literate.ipynb #spell
def spell(data: dict[str, Any]) -> str:
    """The file text of a notebook: sorted keys, one blank of indentation, multi-line text as lists of lines."""
    return json.dumps(_in_lines(data), ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def is_clean(notebook: Notebook) -> bool:
    """Whether `clean` has nothing to do. Compared without indentation: Python writes that twenty times as fast."""
    layout = notebook.text.startswith('{\n "cells": [') and notebook.text.endswith("\n}\n")
    return layout and json.dumps(notebook.data) == json.dumps(_in_lines(strip(notebook.data)), sort_keys=True)


def _in_lines(data: dict[str, Any]) -> dict[str, Any]:
    cells = []
    for raw in data["cells"]:
        cell = {**raw, "source": joined(raw["source"]).splitlines(keepends=True)}
        if "outputs" in cell:
            cell["outputs"] = [_spell_output(output) for output in cell["outputs"]]
        cells.append(cell)
    return {**data, "cells": cells}


def _spell_output(output: dict[str, Any]) -> dict[str, Any]:
    output = dict(output)
    if isinstance(output.get("text"), str):
        output["text"] = output["text"].splitlines(keepends=True)
    if "data" in output:
        output["data"] = {mime: _spell_value(mime, value) for mime, value in output["data"].items()}
    return output


def _spell_value(mime: str, value: Any) -> Any:
    lines = mime.startswith("text/") or mime in {"application/javascript", "image/svg+xml"}
    return value.splitlines(keepends=True) if lines and isinstance(value, str) else value


def clean(notebooks: Iterable[Notebook]) -> list[str]:
    """Clean notebook files in place. Returns the names of those that changed."""
    changed = []
    for notebook in notebooks:
        text = spell(strip(notebook.data))
        if text != notebook.text:
            write(notebook.path, text)
            changed.append(notebook.name)
    return changed


# %% nbs/literate.ipynb #check
def check(book: Book, rebuild: bool = False) -> list[LiterateError]:
    """Everything that is out of step. `rebuild` exports again even what the record knows to agree."""
    chapters = list(book.chapters.values())
    differing, errors = compare(chapters, book.root, rebuild)
    errors = book.errors + errors
    for notebook in (*chapters, *book.plain):
        try:
            if notebook.module and notebook.target in differing:
                errors += step_errors(notebook, book.root)
            errors += output_errors(notebook, book.root)
            if not is_clean(notebook):
                errors.append(LiterateError("holds metadata that changes from run to run: run clean", notebook.name))
        except LiterateError as error:
            errors.append(error)
    return errors + long_cells(book) + (orphans(book) if book.whole else [])


def long_cells(book: Book) -> list[LiterateError]:
    """Exported cells with more lines than a reader can take in, but for those that `LONG` still allows that many."""
    path = book.root / LONG
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    allowed = {place: int(count) for place, _, count in (line.rpartition(" ") for line in lines if line[:1] != "#")}
    errors = []
    for notebook in book.chapters.values():
        limit = LIMITS.get(notebook.target.split("/")[0], 60)
        for cell in notebook.exports:
            count = len(cell.code.strip().splitlines())
            if count > max(limit, allowed.get(f"{cell.notebook} #{cell.id}", 0)):
                errors.append(cell.error(f"an exported cell of {count} lines; {limit} are allowed: tell it in parts"))
    return errors


LIMITS = {"kernels": 120}


LONG = "nbs/long_cells.txt"


"""Lines such as `nbs/core/trace.ipynb #Fold 84`. Cells leave this list; none may join it."""


def orphans(book: Book) -> list[LiterateError]:
    """Python files in the packages that no notebook exports. An empty `__init__.py` needs no notebook, but must be there."""
    errors = []
    for folder in ("minivllm", "kernels"):
        for path in sorted((book.root / folder).glob("**/*.py")):
            name = path.relative_to(book.root).as_posix()
            if name not in book.chapters and not (path.name == "__init__.py" and not path.read_text().strip()):
                errors.append(
                    LiterateError("no notebook exports this file: write it as a notebook, or delete it", name)
                )
    for init in missing_packages(book.root, book.chapters):
        errors.append(LiterateError("is missing, so its folder is no package: run export", init))
    return errors


# %% nbs/literate.ipynb #Edit
@dataclass
class Edit:
    """Changes to the lines of one cell, collected first and applied from the bottom up. `imports`: some are imports."""

    lines: list[str]
    changes: list[tuple[int, int, list[str]]] = field(default_factory=list)
    imports: bool = False

    def replace(self, piece: Piece, text: str) -> None:
        self.changes.append((piece.first, piece.last, text.split("\n")))

    def delete(self, piece: Piece) -> None:
        self.changes.append((piece.first, _skip_blank(self.lines, piece.last + 1) - 1, []))

    def insert(self, after: int, text: str, gap: int) -> None:
        """Insert text below line `after` (0: at the top), `gap` blank lines away from it."""
        before = [""] * gap if after and not self.lines[after - 1].startswith("#|") else []
        self.changes.append((after + 1, after, before + text.split("\n")))

    def result(self) -> str:
        lines = list(self.lines)
        for first, last, new in sorted(self.changes, key=lambda change: change[:2], reverse=True):
            lines[first - 1 : last] = new
        return "\n".join(lines).strip("\n")


# %% nbs/literate.ipynb #edit-cell
def edit_parts(edit: Edit, items: Sequence[Item], old: Sequence[Part], new: Sequence[tuple[Part, str]]) -> None:
    """Turn the difference between `old` and `new` parts of one cell and class into changes of the cell's lines.

    `items` are the cell's own statements, one for each part of `old`. Each part of `new` comes with the text for the notebook.
    """
    matcher = difflib.SequenceMatcher(None, [p.text for p in old], [p.text for p, _ in new], autojunk=False)
    for kind, a1, a2, b1, b2 in matcher.get_opcodes():
        if kind == "equal":
            continue
        for item, (_, text) in zip(items[a1:a2], new[b1:b2], strict=False):
            edit.replace(item.piece, text)
        for item in items[a1 + (b2 - b1) : a2]:
            edit.delete(item.piece)
        extra = new[b1 + (a2 - a1) : b2]
        if extra:
            after = items[a2 - 1].piece.last if a2 else items[0].piece.first - 1 if items else len(edit.lines)
            nodes = [part.node for part, _ in extra] + [item.node for item in items[max(a2 - 1, 0) : a2 + 1]]
            wide = any(isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
            gap = 2 if wide else 0
            text = ("\n" * (gap + 1)).join(text for _, text in extra)
            edit.insert(after, text + ("\n" * gap if items and not a2 else ""), gap)


def as_cell_text(part: Part, path: str) -> str:
    """A part as it stands in a notebook: a folded method gets its `@method(Cls)` back. `path` is for errors."""
    if part.cls is None or part.node is None:
        return part.text
    if not isinstance(part.node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise LiterateError(f"only methods can stand below the marker of a method (#{part.cell})", path, line=part.line)
    lines = part.text.split("\n")
    top = next(number for number, line in enumerate(lines) if line.startswith(("@", "def ", "async ")))
    lines = [re.sub(r"^@(\w+)\.(setter|getter|deleter)\b", rf"@{part.cls}.\1.\2", line) for line in lines]
    return "\n".join([*lines[:top], f"@method({part.cls})", *lines[top:]])


# %% nbs/literate.ipynb #edit-imports
def edit_imports(edits: dict[str, Edit], items: Sequence[Item], old: Iterable[str], new: Iterable[str]) -> None:
    """Carry added and removed imports (one name each, as source lines) into the cells.

    A removed name goes from every exported cell; an added one joins the first imports, or the place of a removed one.
    """
    gone, added = set(old) - set(new), [line for line in new if line not in set(old)]
    place: Item | None = None
    imports = [item for item in items if item.is_import]
    for item in imports:
        names = imports_of([item.node] if item.node else [])
        if gone & names.keys():
            place = place or item
            left = "\n".join(name for name in names if name not in gone)
            edit = edits[item.cell.id]
            edit.imports = True
            edit.replace(item.piece, left) if left else edit.delete(item.piece)
    if added:
        place = place or (imports[0] if imports else None)
        cell = place.cell if place else items[0].cell
        edits[cell.id].imports = True
        edits[cell.id].insert(place.piece.last if place else len(cell.directives), "\n".join(added), gap=0)


# %% nbs/literate.ipynb #write-back
def write_back(notebook: Notebook, root: Path, force: bool = False) -> bool:
    """Carry the edits of a module into its notebook, then export it. Returns False when the module was not edited.

    `force` carries the module's side over even when the notebook was edited too. Raises LiterateError, and writes nothing, when
    both sides changed or when the edit has no place in the notebook.
    """
    differing, errors = compare([notebook], root)
    if errors:
        raise errors[0]
    found = edited_side(notebook, root) if differing else ""
    if found in {"both", "neither"} and not force or found in {"foreign", "conflict"}:
        raise LiterateError(f"differs from {notebook.target} ({OUT_OF_STEP[found]})", notebook.name)
    if found not in {"module", "both", "neither"}:
        return False
    target, text = notebook.target, read_module(notebook, root) or ""
    take_apart(text, target)
    base, edited = (take_apart(side, target) for side in (differing[target], *formatted({target: text}, root).values()))
    carried = apply_edit(notebook, base, edited, root)
    built = build([carried], root)[target]
    verify(take_apart(built, target), base, edited)
    write(notebook.path, carried.text)
    write(root / target, built)
    remember([carried], root)
    return True


# %% nbs/literate.ipynb #apply-edit
def apply_edit(notebook: Notebook, base: Module, edited: Module, root: Path) -> Notebook:
    """The notebook with the differences between two forms of its module carried into its cells."""
    items = {cell.id: items_of(cell) for cell in notebook.exports}
    edits = {cell.id: Edit(cell.source.split("\n")) for cell in notebook.exports}
    texts = cell_texts(edited, root)
    for cell in notebook.exports:
        for cls in {part.cls: None for part in (*base.parts, *edited.parts) if part.cell == cell.id}:
            mine = [item for item in items[cell.id] if item.cls == cls and not item.is_import]
            old = [part for part in base.parts if (part.cell, part.cls) == (cell.id, cls)]
            new = [(part, text) for part, text in texts if (part.cell, part.cls) == (cell.id, cls)]
            edit_parts(edits[cell.id], mine, old, new)
    edit_imports(
        edits,
        [item for cell in notebook.exports for item in items[cell.id]],
        module_imports(base),
        module_imports(edited),
    )
    sources = {cell: edit.result() for cell, edit in edits.items() if edit.changes}
    sources |= sorted_imports({cell: text for cell, text in sources.items() if edits[cell].imports}, root)
    return with_sources(notebook, sources, texts)


def sorted_imports(sources: dict[str, str], root: Path) -> dict[str, str]:
    """Cells whose imports changed, with these sorted and nothing else touched."""
    texts = {f"{cell}.py": text + "\n" for cell, text in sources.items()}
    done = formatted(texts, root, fix="I", layout=False) if texts else {}
    return {name.removesuffix(".py"): text.strip("\n") for name, text in done.items()}


def cell_texts(module: Module, root: Path) -> list[tuple[Part, str]]:
    """Each part with its text for the notebook, formatted for the left margin, where more fits on a line."""
    parts = [part for part in module.parts if not _is_import(part)]
    texts = {f"{number}.py": as_cell_text(part, module.path) + "\n" for number, part in enumerate(parts)}
    done = formatted(texts, root, fix="")
    return [(part, text.strip("\n")) for part, text in zip(parts, done.values(), strict=True)]


def _is_import(part: Part) -> bool:
    return isinstance(part.node, ast.Import | ast.ImportFrom)


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
    for cell, pieces in fresh.items():
        new: dict[str, Any] = {"cell_type": "code", "id": cell, "metadata": {}, "execution_count": None, "outputs": []}
        cells.append({**new, "source": "#| export\n" + "\n\n\n".join(pieces)})
    cells.sort(key=lambda raw: place[raw["id"]])
    return parse_notebook(spell({**notebook.data, "cells": cells}), notebook.name, notebook.path)


# %% nbs/literate.ipynb #place
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


# %% nbs/literate.ipynb #verify
def verify(built: Module, base: Module, edited: Module) -> None:
    """Raises LiterateError, naming the place, unless `built` says what `edited` says."""

    def sides(module: Module) -> list[tuple[str, str | None, str]]:
        return [(part.cell, part.cls, normal(part.text)) for part in module.parts if not _is_import(part)]

    def doc_and_all(module: Module) -> list[str]:
        return [ast.dump(node) for node in module.preamble if not isinstance(node, ast.Import | ast.ImportFrom)]

    lines = [part.line for part in edited.parts if not _is_import(part)]
    for ours, theirs, line in zip_longest(sides(built), sides(edited), lines):
        if ours != theirs:
            cell = (theirs or ours)[0]
            raise LiterateError(f"this edit has no place in the notebook (near cell #{cell})", edited.path, line=line)
    if doc_and_all(edited) not in (doc_and_all(base), doc_and_all(built)):
        raise LiterateError("the docstring (`#| doc`) and __all__ are computed: edit the notebook", edited.path, line=1)
    if module_imports(built) != module_imports(edited) or built.comments != edited.comments:
        raise LiterateError("imports or the comments above them have no place in the notebook", edited.path, line=1)


# %% nbs/literate.ipynb #hooks
def pre_save_hook(model: dict[str, Any], **_: Any) -> None:
    """Jupyter server hook: clean the notebook that is about to be written."""
    if model.get("type") == "notebook" and model.get("content"):
        model["content"] = strip(model["content"])


def post_save_hook(os_path: str, model: dict[str, Any], **_: Any) -> None:
    """Jupyter server hook: export the notebook that was written. Raises LiterateError, which JupyterLab shows."""
    if model.get("type") == "notebook":
        export_saved(Path(os_path))


def export_saved(path: Path) -> list[str]:
    """Export one notebook of the book, if it exports anything. Returns the paths written; raises the first error."""
    root = find_root(path.parent)
    if (root / "nbs") not in path.resolve().parents:
        return []
    notebook = read_notebook(path.resolve(), root)
    written, errors = export([notebook] if notebook.module else [], root)
    if errors:
        raise errors[0]
    return written


# %% nbs/literate.ipynb #Watcher
class Watcher:
    """Exports the notebooks under `nbs/` that change on disk: a thread that looks at their times twice a second."""

    def __init__(self, root: Path, say: Callable[[str], None] = print) -> None:
        self.root = root
        self.say = say
        self.seen = self._times()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _times(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in notebook_paths(self.root)}

    def look(self) -> None:
        """Export what changed since the last look; say what was written or what is wrong."""
        now = self._times()
        changed = [path for path in now if now[path] != self.seen.get(path)]
        self.seen = now
        for path in changed:
            try:
                for name in export_saved(path):
                    self.say(f"exported {name}")
            except (LiterateError, OSError) as error:
                self.say(str(error))

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            self.look()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


# %% nbs/literate.ipynb #extension
_watching: list[Watcher] = []


def autoexport(line: str = "") -> None:
    """The magic `%autoexport`: export notebooks as they are saved; `%autoexport off` ends it."""
    if line.strip() not in {"", "on", "off"}:
        raise ValueError(f"%autoexport takes nothing, 'on' or 'off', not {line.strip()!r}")
    while _watching:
        _watching.pop().stop()
    if line.strip() != "off":
        _watching.append(Watcher(find_root(Path.cwd())))
        _watching[0].start()


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext minivllm.literate` defines the magic `%autoexport`."""
    ipython.register_magic_function(autoexport, "line", "autoexport")


def unload_ipython_extension(ipython: Any) -> None:
    autoexport("off")


# %% nbs/literate.ipynb #select
def select(book: Book, paths: Sequence[str]) -> Book:
    """The part of the book that the paths name: notebooks, modules or folders of either. No path: all of it."""
    if not paths:
        return book
    chosen = Book(book.root, whole=False)
    for given in paths:
        path = Path(given).resolve()
        chapters = {
            name: n for name, n in book.chapters.items() if _within(n.path, path) or _within(book.root / name, path)
        }
        plain = [notebook for notebook in book.plain if _within(notebook.path, path)]
        errors = [error for error in book.errors if _within(book.root / error.path, path)]
        if not (chapters or plain or errors):
            raise LiterateError("neither a notebook of this book nor a module or folder of one", given)
        chosen.chapters.update(chapters)
        chosen.plain += plain
        chosen.errors += errors
    return chosen


def _within(path: Path, folder: Path) -> bool:
    return folder == path.resolve() or folder in path.resolve().parents


# %% nbs/literate.ipynb #main
def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns 0, or 1 after printing what is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        book = select(read_book(find_root(Path.cwd())), arguments.paths)
        done, errors = _COMMANDS[arguments.command](book, arguments)
    except LiterateError as refused:
        done, errors = [], [refused]
    for line in done:
        print(line)
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


def _export(book: Book, arguments: argparse.Namespace) -> tuple[list[str], list[LiterateError]]:
    written, errors = export(list(book.chapters.values()), book.root, arguments.force)
    return [f"exported {name}" for name in written], book.errors + errors


def _check(book: Book, arguments: argparse.Namespace) -> tuple[list[str], list[LiterateError]]:
    errors = check(book, arguments.rebuild)
    return [] if errors else [f"{len(book.chapters)} notebooks and their modules agree"], errors


def _write_back(book: Book, arguments: argparse.Namespace) -> tuple[list[str], list[LiterateError]]:
    differing, errors = compare(list(book.chapters.values()), book.root)
    done, errors = [], book.errors + errors
    for notebook in map(book.chapters.__getitem__, differing):
        try:
            if write_back(notebook, book.root, arguments.force):
                done.append(f"wrote {notebook.target} back into {notebook.name}")
        except LiterateError as refused:
            errors.append(refused)
    return done, errors


def _clean(book: Book, arguments: argparse.Namespace) -> tuple[list[str], list[LiterateError]]:
    return [f"cleaned {name}" for name in clean([*book.chapters.values(), *book.plain])], book.errors


_COMMANDS = {"export": _export, "check": _check, "write-back": _write_back, "clean": _clean}


# %% nbs/literate.ipynb #parser
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minivllm.literate", description="Notebooks to modules, and back.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="export | check | write-back | clean")
    helps = {
        "export": "write the modules of notebooks that changed",
        "check": "say which notebook and which cell differ from the module; exit code 1 if any does",
        "write-back": "carry edits of modules into the cells that they belong to",
        "clean": "drop execution counts, timestamps, versions and widget state from notebooks; keep outputs",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("paths", nargs="*", help="notebooks, modules or folders; default: the whole book")
        if name == "export":
            command.add_argument("--force", action="store_true", help="overwrite modules that were edited")
        if name == "write-back":
            command.add_argument("--force", action="store_true", help="overwrite notebooks that were edited too")
        if name == "check":
            command.add_argument(
                "--rebuild", action="store_true", help="also export again in memory and compare the text"
            )
    return parser


if __name__ == "__main__" and "get_ipython" not in globals():
    sys.exit(main())
