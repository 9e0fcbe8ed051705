"""Python source as text: strings, indentation, statements with their comments, bound names."""

# Generated from nbs/literate/source.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast


def string_lines(source: str, docstrings: bool = True) -> set[int]:
    """Numbers (from 1) of the lines that begin inside a string; those of docstrings only if asked. None if it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return set()
    skipped = set() if docstrings else {id(node) for node in _docstring_nodes(tree)}
    inside: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr | ast.Constant) or id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes):
            inside.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    return inside


def _docstring_nodes(tree: ast.AST) -> Iterator[ast.Constant]:
    """The docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                yield cast(ast.Constant, first.value)


INDENT = "    "


def indent(text: str) -> str:
    """Indent code by one level; the lines of multi-line strings stay, those of docstrings move."""
    kept = string_lines(text, docstrings=False)
    lines = enumerate(text.split("\n"), 1)
    return "\n".join(line if not line.strip() or number in kept else INDENT + line for number, line in lines)


def dedent(text: str) -> str:
    """Undo `indent`."""
    kept = string_lines("if True:\n" + text, docstrings=False)
    lines = enumerate(text.split("\n"), 2)
    return "\n".join(line if number in kept else line.removeprefix(INDENT) for number, line in lines)


@dataclass(frozen=True)
class Piece:
    """Lines `first` to `last` (from 1): a statement and the comments above it, or comments alone (`node` None)."""

    first: int
    last: int
    node: ast.stmt | None = field(compare=False)


def split(lines: Sequence[str], body: Sequence[ast.stmt], first: int, last: int) -> list[Piece]:
    """Split the lines first..last into pieces, one for each statement of `body`, blank lines between them left out."""
    found: list[Piece] = []
    for index, node in enumerate(body):
        end = _end(lines, node, start(body[index + 1]) if index + 1 < len(body) else last + 1)
        found.append(Piece(_skip_blank(lines, first), end, node))
        first = end + 1
    first = _skip_blank(lines, first)
    return found + ([Piece(first, _skip_blank(lines, last, -1), None)] if first <= last else [])


def start(node: ast.stmt) -> int:
    """The first line of a statement, decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def _end(lines: Sequence[str], node: ast.stmt, limit: int) -> int:
    """The last line of a statement; comments that follow a block and are indented deeper belong to it."""
    end = node.end_lineno or node.lineno
    for number in range(end + 1, limit):
        line = lines[number - 1]
        if line.strip():
            if len(line) - len(line.lstrip()) <= node.col_offset:
                break
            end = number
    return end


def _skip_blank(lines: Sequence[str], number: int, step: int = 1) -> int:
    """The first line from `number` on, or with step -1 back from it, that is not blank."""
    while 0 < number <= len(lines) and not lines[number - 1].strip():
        number += step
    return number


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)


def bound_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements bind at module level, type variables left out; those of imports only if these stand in `body` itself."""
    for node in body:
        if isinstance(node, DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if getattr(getattr(node.value, "func", None), "id", "") not in {"TypeVar", "ParamSpec", "TypeVarTuple"}:
                yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse, *getattr(node, "finalbody", [])]
            inner += [child for handler in getattr(node, "handlers", []) for child in handler.body]
            yield from bound_names([child for child in inner if not isinstance(child, IMPORTS)])


def import_lines(body: Iterable[ast.stmt | None]) -> dict[str, None]:
    """The imports among statements, one name each, as source lines (an ordered set)."""
    found: dict[str, None] = {}
    for node in body:
        if isinstance(node, ast.Import):
            found.update((ast.unparse(ast.Import([alias])), None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update((ast.unparse(ast.ImportFrom(node.module, [alias], node.level)), None) for alias in node.names)
    return found


def normal(text: str) -> str:
    """Code without its layout: the syntax tree and the comments."""
    tree = ast.parse(text)
    for node in _docstring_nodes(tree):
        node.value = "\n".join(line.strip() for line in str(node.value).strip().split("\n"))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string.lstrip("#").strip() for token in tokens if token.type == tokenize.COMMENT]
    return f"{ast.dump(tree)} {comments}"
