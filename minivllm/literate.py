"""How the book becomes the package.

The notebooks in `nbs/` are the source of every module, and this module exports them, checks them,
and carries an edited module back into its notebook.
"""

# Generated from nbs/literate.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=fe21eb5fc537 module=273b40a74737

import abc
import argparse
import ast
import builtins
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = [
    "BODY_ONLY",
    "DIRECTIVES",
    "FORMAT",
    "HEADER",
    "INDENT",
    "REFUSED",
    "Book",
    "Cell",
    "Item",
    "LiterateError",
    "Notebook",
    "Piece",
    "build",
    "cut",
    "digest",
    "docstring",
    "export",
    "find_root",
    "fold",
    "formatted",
    "header",
    "indent",
    "items_of",
    "joined",
    "lines_inside_strings",
    "main",
    "make_packages",
    "marker",
    "method",
    "method_class",
    "module_digest",
    "module_path",
    "notebook_from",
    "notebook_paths",
    "public_names",
    "read_book",
    "read_notebook",
    "render",
    "seal",
    "source_digest",
    "state",
    "write",
]


# %% nbs/literate.ipynb #LiterateError
class LiterateError(Exception):
    """A mistake in a notebook or a module. The message begins with its place: path, `#cell`, line within the cell."""

    def __init__(self, message: str, path: str, cell: str | None = None, line: int | None = None) -> None:
        place = path + (f" #{cell}" if cell else "") + (f" line {line}" if line else "")
        super().__init__(f"{place}: {message}")


# %% nbs/literate.ipynb #Cell
DIRECTIVES = {"default_exp": True, "export": False, "hide": False}
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
        self._refuse_late_directives(len(found))
        return found

    def _refuse_late_directives(self, seen: int) -> None:
        for number, line in enumerate(self.source.splitlines(), 1):
            if number > seen and line.startswith("#|") and number not in lines_inside_strings(self.source):
                raise self.error("directives belong in the first lines of a cell", number)

    @property
    def code(self) -> str:
        """The source with its directive lines blanked, so that line numbers still count from the cell's first line."""
        return "\n".join("" if line.startswith("#|") else line for line in self.source.split("\n"))

    @property
    def exported(self) -> bool:
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
    """A notebook of the book: `name` is its path from the repository root, `data` the JSON that was read."""

    path: Path
    name: str
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
            raise named[0].error(f"not a module name: {module!r}; write 'core.scheduler' or 'minivllm_kernels.decode'")
        return module

    @cached_property
    def exports(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.exported]

    @property
    def target(self) -> str:
        """The module's path from the repository root."""
        return module_path(self.module or "")


def module_path(module: str) -> str:
    """`core.request` -> `minivllm/core/request.py`; `minivllm_kernels.decode` -> `kernels/minivllm_kernels/decode.py`."""
    folder = "kernels" if module.split(".")[0] == "minivllm_kernels" else "minivllm"
    return f"{folder}/{module.replace('.', '/')}.py"


# %% nbs/literate.ipynb #read-notebook
def read_notebook(path: Path, root: Path) -> Notebook:
    """Read a notebook (format 4.5 or newer: cells need ids). Raises LiterateError when it is not one."""
    name = path.relative_to(root).as_posix()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise LiterateError(f"not a notebook: {error.msg}", name, line=error.lineno) from error
    return notebook_from(data, name, path)


def notebook_from(data: dict[str, Any], name: str, path: Path) -> Notebook:
    """A Notebook from its JSON form."""
    cells, seen = [], set()
    for index, raw in enumerate(data.get("cells", [])):
        if not raw.get("id"):
            raise LiterateError(f"cell {index} has no id: save the notebook in format 4.5 or newer", name)
        if raw["id"] in seen:
            raise LiterateError("two cells have this id", name, raw["id"])
        seen.add(raw["id"])
        cells.append(Cell(name, raw["id"], raw["cell_type"], joined(raw["source"])))
    return Notebook(path, name, data, tuple(cells))


def joined(text: str | list[str]) -> str:
    """Text of a notebook file, which may be stored as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


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
    """The last line of a statement; indented comments that follow a block belong to it."""
    end = node.end_lineno or node.lineno
    for number in range(end + 1, limit):
        if lines[number - 1].startswith((" ", "\t")) and lines[number - 1].strip():
            end = number
        elif lines[number - 1].strip():
            break
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
    """A piece of an exported cell, as text that can stand in a module. `cls`: the class whose method this is, if any."""

    cell: Cell
    piece: Piece
    text: str
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
    except SyntaxError as error:
        hint = " (magics cannot be exported)" if (error.text or "").lstrip().startswith(("%", "!")) else ""
        raise cell.error(f"{error.msg}{hint}", error.lineno) from error
    lines = cell.code.split("\n")
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if _start(after) <= (before.end_lineno or before.lineno):
            raise cell.error("two statements on one line cannot be exported: give each its own", after.lineno)
    return [_item(cell, lines, piece) for piece in cut(lines, tree.body, 1, len(lines))]


def _item(cell: Cell, lines: Sequence[str], piece: Piece) -> Item:
    cls = method_class(cell, piece.node)
    kept = list(lines[piece.first - 1 : piece.last])
    if cls is not None and isinstance(piece.node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorator = piece.node.decorator_list[0]
        del kept[decorator.lineno - piece.first : (decorator.end_lineno or decorator.lineno) - piece.first + 1]
        kept = [re.sub(rf"^@{cls}\.(\w+)\.(setter|getter|deleter)\b", r"@\1.\2", line) for line in kept]
    return Item(cell, piece, "\n".join(kept), cls)


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


# %% nbs/literate.ipynb #docstring
def docstring(notebook: Notebook) -> str:
    """Title and first sentence of the first markdown cell. Raises LiterateError when there is no `# Title`."""
    prose = next((cell for cell in notebook.cells if cell.kind == "markdown"), None)
    lines = prose.source.strip().splitlines() if prose else []
    if not lines or not lines[0].startswith("# "):
        raise LiterateError(
            "the first markdown cell must begin with '# Title': it becomes the docstring", notebook.name
        )
    title = _plain(lines[0][2:])
    rest = "\n".join(lines[1:]).strip()
    paragraph = " ".join(re.split(r"\n\s*\n", rest)[0].split()) if rest and not rest.startswith("#") else ""
    sentence = re.match(r".*?[.!?](?=\s+[^a-z\s]|\s*$)", paragraph)
    body = textwrap.fill(_plain(sentence[0] if sentence else paragraph), 100, break_long_words=False)
    return f"{title}{'' if title[-1:] in '.!?' else '.'}" + (f"\n\n{body}\n" if body else "")


def _plain(markdown: str) -> str:
    """Markdown as docstring text: links and emphasis gone, nothing that would end or escape the string."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    text = re.sub(r"(\*\*|__|\*)(?=\S)(.+?)(?<=\S)\1", r"\2", text)
    return text.replace("\\", "\\\\").replace('"""', "'''").strip()


# %% nbs/literate.ipynb #module-source
FORMAT = 1
"""Part of every digest: raise it when `render` changes what it writes, and every module counts as out of date."""
INDENT = "    "


def marker(cell: Cell) -> str:
    return f"# %% {cell.notebook} #{cell.id}"


def render(notebook: Notebook) -> str:
    """The module of a notebook, before formatting. Raises LiterateError at the cell that cannot be exported."""
    items = [item for cell in notebook.exports for item in items_of(cell)]
    top, methods = fold(items)
    head = [f'"""{docstring(notebook)}"""', "", header(notebook.name, source_digest(notebook), "0" * 12), ""]
    head += [item.text for item in items if item.is_import] + [""]
    names = public_names(top, items if notebook.target.endswith("__init__.py") else [])
    if "__all__" not in _bound([item.node for item in top if item.node]):
        head += [f"__all__ = {names!r}", ""]
    return "\n".join(head + list(_body(top, methods))) + "\n"


def _body(top: Sequence[Item], methods: dict[str, list[Item]]) -> Iterator[str]:
    current = None
    for item in top:
        if item.cell != current:
            yield "\n\n" + marker(item.cell)
            current = item.cell
        yield item.text
        for folded in methods.get(item.node.name, []) if isinstance(item.node, ast.ClassDef) else []:
            if folded.cell != current:
                yield f"\n{INDENT}{marker(folded.cell)}"
                current = folded.cell
            yield indent(folded.text)


def indent(text: str) -> str:
    """Indent code by one level; the lines of multi-line strings stay, those of docstrings move."""
    kept = lines_inside_strings(text, docstrings=False)
    return "\n".join(
        line if not line.strip() or number in kept else INDENT + line for number, line in enumerate(text.split("\n"), 1)
    )


# %% nbs/literate.ipynb #header
HEADER = re.compile(r"^# literate: notebook=([0-9a-f]{12}) module=([0-9a-f]{12})\n", re.MULTILINE)


def header(name: str, notebook_digest: str, module_digest: str) -> str:
    return (
        f"# Generated from {name} by `python -m minivllm.literate export`. Edit the notebook,\n"
        "# or edit this file and run `python -m minivllm.literate write-back`.\n"
        f"# literate: notebook={notebook_digest} module={module_digest}"
    )


def source_digest(notebook: Notebook) -> str:
    """Digest of everything that `render` reads: name, module, docstring, and the code of the exported cells."""
    cells = [[cell.id, cell.code.strip()] for cell in notebook.exports]
    return digest(json.dumps([FORMAT, notebook.name, notebook.module, docstring(notebook), cells]))


def module_digest(text: str) -> str:
    """Digest of a module without the line that holds the digests."""
    return digest(HEADER.sub("", text))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
                if item.node.name in classes:
                    first = classes[item.node.name].cell.id
                    raise item.cell.error(
                        f"class {item.node.name} is exported twice, first in #{first}", item.piece.first
                    )
                classes[item.node.name] = item
        elif item.cls not in classes:
            raise item.cell.error(
                f"@method({item.cls}): no earlier exported cell defines class {item.cls}", item.piece.first
            )
        else:
            methods[item.cls].append(item)
    _refuse_late_names(items, top, methods)
    return top, methods


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
            for name in _names_at_definition(item.node, annotations=not lazy) & later.keys():
                where = "itself not complete" if later[name] is owner else f"bound later, in #{later[name].cell.id}"
                raise item.cell.error(
                    f"this method moves up into class {item.cls}, where {name} is {where}: define it before the class,"
                    " or, if it is an annotation, use `from __future__ import annotations`",
                    item.piece.first,
                )


def _names_at_definition(node: ast.stmt | None, annotations: bool) -> set[str]:
    """Names that a function definition evaluates when it is executed: decorators, defaults and (if asked) annotations."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    arguments = node.args
    evaluated: list[ast.AST | None] = [*node.decorator_list[1:], *arguments.defaults, *arguments.kw_defaults]
    if annotations:
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        evaluated += [node.returns, *(argument.annotation for argument in named if argument)]
    return {n.id for part in evaluated if part for n in ast.walk(part) if isinstance(n, ast.Name)}


# %% nbs/literate.ipynb #names
def public_names(top: Sequence[Item], imports: Sequence[Item] = ()) -> list[str]:
    """Names for `__all__`, in order: what the items bind, without underscores and type variables, and what `imports` import."""
    bound = _bound([item.node for item in (*imports, *top) if item.node])
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
def formatted(modules: dict[str, str], root: Path) -> dict[str, str]:
    """Sort imports, drop unused ones, and format. `modules` maps a path from the root to its text, and so does the result.

    The settings are those of the root's `pyproject.toml`. Raises LiterateError when ruff is not installed or fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in modules.items():
            write(Path(folder, name), text)
        settings = ["--no-cache", "--quiet", "--config", str(root / "pyproject.toml"), "."]
        _ruff(["check", "--fix", "--exit-zero", "--select", "I,F401,RUF022", *settings], folder)
        _ruff(["format", *settings], folder)
        return {name: Path(folder, name).read_text(encoding="utf-8") for name in modules}


def _ruff(arguments: list[str], folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise LiterateError(
            f"ruff {arguments[0]} failed (is it installed? pip install ruff): {done.stderr.strip()}", "export"
        )


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


# %% nbs/literate.ipynb #format-demo
def build(notebooks: Sequence[Notebook], root: Path) -> dict[str, str]:
    """The finished text of each notebook's module, by path from the root, digests included."""
    texts = formatted({notebook.target: render(notebook) for notebook in notebooks}, root)
    return {name: seal(text) for name, text in texts.items()}


def seal(text: str) -> str:
    """Fill in the digest of the module's own text."""
    return HEADER.sub(lambda found: f"# literate: notebook={found[1]} module={module_digest(text)}\n", text, count=1)


# %% nbs/literate.ipynb #root
def find_root(start: Path) -> Path:
    """The nearest folder at or above `start` that holds `nbs/` and `pyproject.toml`."""
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / "nbs").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    raise LiterateError("no folder with nbs/ and pyproject.toml here or above", str(start))


def notebook_paths(root: Path) -> list[Path]:
    return [path for path in sorted(root.glob("nbs/**/*.ipynb")) if ".ipynb_checkpoints" not in path.parts]


# %% nbs/literate.ipynb #state
def state(notebook: Notebook, root: Path) -> str:
    """How notebook and module stand: same, missing, notebook (changed), module (changed), both, or foreign (no header)."""
    path = root / notebook.target
    if not path.exists():
        return "missing"
    text = path.read_text(encoding="utf-8")
    found = HEADER.search(text)
    if not found:
        return "missing" if not text.strip() else "foreign"
    notebook_same, module_same = found[1] == source_digest(notebook), found[2] == module_digest(text)
    if notebook_same:
        return "same" if module_same else "module"
    return "notebook" if module_same else "both"


# %% nbs/literate.ipynb #export
REFUSED = {
    "module": "was edited since the last export: run write-back to keep the edit, or export --force to lose it",
    "both": "and its notebook were both edited since the last export: export --force keeps the notebook's side, "
    "write-back --force the module's",
    "foreign": "exists but was not exported by this tool: move its code into the notebook, then export --force",
}


def export(notebooks: Sequence[Notebook], root: Path, force: bool = False) -> tuple[list[str], list[LiterateError]]:
    """Write the modules that are out of date. Returns the paths written and the errors; one bad notebook stops no other."""
    ready, errors = [], []
    for notebook in notebooks:
        try:
            found = state(notebook, root)
            if found in REFUSED and not force:
                raise LiterateError(f"{notebook.target} {REFUSED[found]}", notebook.name)
            if found != "same":
                render(notebook)
                ready.append(notebook)
        except LiterateError as error:
            errors.append(error)
    built = build(ready, root) if ready else {}
    for name, text in built.items():
        write(root / name, text)
    return list(built) + make_packages(root, list(built)), errors


def make_packages(root: Path, modules: Iterable[str]) -> list[str]:
    """Make the empty `__init__.py` of every package that holds one of the modules. `kernels/` is a folder, no package."""
    made = []
    for package in sorted({parent for module in modules for parent in Path(module).parents}):
        init = package / "__init__.py"
        if package.as_posix() not in {".", "kernels"} and not (root / init).exists():
            write(root / init, "")
            made.append(init.as_posix())
    return made


# %% nbs/literate.ipynb #book
@dataclass
class Book:
    """The notebooks that export a module, by path of the module, and the errors found on the way."""

    root: Path
    chapters: dict[str, Notebook] = field(default_factory=dict)
    plain: list[Notebook] = field(default_factory=list)
    errors: list[LiterateError] = field(default_factory=list)


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


# %% nbs/literate.ipynb #main
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minivllm.literate", description="Notebooks to modules, and back.")
    commands = parser.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("export")
    sub.add_argument("--force", action="store_true")
    sub.add_argument("paths", nargs="*")
    arguments = parser.parse_args(argv)
    root = find_root(Path.cwd())
    book = read_book(root)
    chosen = [
        n
        for n in book.chapters.values()
        if not arguments.paths or str(n.path) in {str(Path(p).resolve()) for p in arguments.paths}
    ]
    written, errors = export(chosen, root, arguments.force)
    for name in written:
        print("exported", name)
    for error in errors + ([] if arguments.paths else book.errors):
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__" and "get_ipython" not in globals():
    sys.exit(main())
