"""Text of a module: docstring, imports, `__all__`, code, formatted by ruff."""

# Generated from nbs/literate/render.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ast
import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from minivllm.literate.fold import Item, fold, items_in
from minivllm.literate.notebook import LiterateError, Notebook, write
from minivllm.literate.source import INDENT, bound_names, indent

GENERATED = "# Generated from nbs/"


def render(notebook: Notebook) -> str:
    """The module of a notebook, before formatting. Raises LiterateError at the cell that cannot be exported."""
    items = items_in(notebook)
    top, methods = fold(items)
    head = [f'"""{notebook.docstring}"""', "", header(notebook.name), ""]
    head += [item.text for item in items if item.is_import] + [""]
    package = notebook.target.endswith("__init__.py")
    internal = _names(item for item in top if not item.cell.public)
    if "__all__" not in bound_names([item.node for item in top if item.node]) and (package or internal):
        names = _names(item for item in (*(i for i in items if package and i.is_import), *top) if item.cell.public)
        head += [f"__all__ = {json.dumps(names)}  # fmt: skip" if names else "__all__: list[str] = []"]
    return "\n".join([*head, *_body(top, methods)]) + "\n"


def header(name: str) -> str:
    return f"{GENERATED}{name.removeprefix('nbs/')}; after an edit here run `python -m minivllm.literate write-back`."


def _names(items: Iterable[Item]) -> list[str]:
    """What items bind, without underscores and type variables."""
    names = bound_names([item.node for item in items if item.node])
    return list(dict.fromkeys(name for name in names if not name.startswith("_")))


def _body(top: Sequence[Item], methods: dict[str, list[Item]]) -> Iterator[str]:
    cell = None
    for item in top:
        yield "\n" * (item.gap if item.cell == cell else 1) + item.text
        cell = item.cell
        if isinstance(item.node, ast.ClassDef) and item.node.name in methods:
            yield from ("\n" + indent(method.text) for method in methods[item.node.name])
            cell = None


def formatted(modules: dict[str, str], root: Path, fix: str = "I,F401,RUF022", layout: bool = True) -> dict[str, str]:
    """Let ruff fix its rules `fix` (sort imports, drop unused ones, sort `__all__`) and, if `layout`, format the code.

    Args:
        modules: path -> text.
        root: the folder whose `pyproject.toml` has the settings.

    Raises:
        LiterateError: ruff is not installed, or fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, text in modules.items():
            write(Path(folder, name), text)
        settings = ["--no-cache", "--quiet", "--config", str(root / "pyproject.toml"), "."]
        if fix and modules:
            _ruff(["check", "--fix", "--exit-zero", "--select", fix, *settings], folder)
        if layout and modules:
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


WIDTH = 110


def build(notebooks: Sequence[Notebook], root: Path) -> dict[str, str]:
    """The finished text of each notebook's module, by path from the root."""
    return finished({notebook.target: render(notebook) for notebook in notebooks}, root)


def finished(rendered: dict[str, str], root: Path) -> dict[str, str]:
    """Rendered modules, by path, as they are written."""
    return {name: _wrap_all(text) for name, text in formatted(rendered, root).items()}


def _wrap_all(text: str) -> str:
    """Break the one line of `__all__` where it is too long: ruff alone would give each name a line."""

    def wrapped(found: re.Match[str]) -> str:
        if len(found[1]) <= WIDTH:
            return found[1]
        names = textwrap.fill(found[2] + ",", WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
        return f"__all__ = [\n{names}\n]{found[3]}"

    return re.sub(r"^(__all__ = \[(.*)\])(  # fmt: skip)$", wrapped, text, count=1, flags=re.MULTILINE)
