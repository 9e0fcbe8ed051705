"""Which of notebook and module was edited, and the export of what is out of date."""

# Generated from nbs/literate/sync.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import hashlib
import inspect
import json
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from minivllm.literate.notebook import CONFLICT, LiterateError, Notebook, parse_notebook, write
from minivllm.literate.render import GENERATED, finished, render

RECORD = ".literate.json"
"""A file that git ignores: for each module, digests of notebook and module when they were last seen to agree."""


def _read_record(root: Path) -> dict[str, list[str]]:
    """Path of a module -> digests of the exporter, the notebook and the module at their last agreement here."""
    try:
        record = json.loads((root / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def remember(notebooks: Sequence[Notebook], root: Path) -> None:
    """Record that these notebooks and their modules agree."""
    record = _read_record(root)
    now = record | {notebook.target: entry(notebook, root) for notebook in notebooks}
    if now != record:
        with suppress(OSError):  # where nothing can be written the check still works, each time from scratch
            write(root / RECORD, json.dumps(now, indent=0, sort_keys=True))


def entry(notebook: Notebook, root: Path) -> list[str]:
    """What the record says of a module when it agrees with its notebook as both are now."""
    return [exporter_digest(root), _notebook_digest(notebook), digest(module_text(notebook, root) or "")]


@cache
def exporter_digest(root: Path) -> str:
    """Digest of what decides how a notebook is exported: this program, and ruff's settings."""
    paths = [*sorted(Path(inspect.getfile(render)).parent.glob("*.py")), root / "pyproject.toml"]
    return digest("".join(path.read_text(encoding="utf-8") for path in paths))


def _notebook_digest(notebook: Notebook) -> str:
    """Digest of everything that `render` reads: name, module, docstring, and the code of the exported cells."""
    cells = [[cell.id, cell.public, cell.code.strip()] for cell in notebook.exports]
    return digest(json.dumps([notebook.name, notebook.module, notebook.docstring, cells]))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def module_text(notebook: Notebook, root: Path) -> str | None:
    path = root / notebook.target
    return path.read_text(encoding="utf-8") if path.exists() else None


def compare(
    notebooks: Sequence[Notebook], root: Path, rebuild: bool = False
) -> tuple[dict[str, str], list[LiterateError]]:
    """The modules that differ from what their notebooks export: path -> the export; and the errors of notebooks without one.

    What the record knows to agree is not exported again, unless `rebuild`.
    """
    record = {} if rebuild else _read_record(root)
    rendered, errors = {}, []
    for notebook in notebooks:
        try:
            if record.get(notebook.target) != entry(notebook, root):
                rendered[notebook.target] = render(notebook)
        except LiterateError as error:
            errors.append(error)
    chapters = {notebook.target: notebook for notebook in notebooks}
    built = finished(rendered, root)
    differing = {name: text for name, text in built.items() if text != module_text(chapters[name], root)}
    remember([chapters[name] for name in built.keys() - differing.keys()], root)
    return differing, errors


def edited_side(notebook: Notebook, root: Path) -> str:
    """What became of a module that is not its notebook's export: a key of `_OUT_OF_STEP`.

    A side was edited when it is neither as in git's HEAD nor as in the record.
    """
    module = module_text(notebook, root)
    if module is None or not module.strip():
        return "missing"
    if CONFLICT.search(module):
        return "conflict"
    if f"\n{GENERATED}" not in module:
        return "foreign"
    recorded = [*_read_record(root).get(notebook.target, []), "", "", ""]
    if digest(module) == recorded[2]:
        return "notebook"
    now = _notebook_digest(notebook)
    as_committed = now == _committed_digest(notebook, root)
    if module != committed(notebook.target, root):
        return "module" if as_committed or now == recorded[1] else "both"
    return "neither" if as_committed else "notebook"


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
        return None if text is None else _notebook_digest(parse_notebook(text, notebook.name, notebook.path))
    except LiterateError:
        return None


_KEEP_ONE = "export --force keeps the notebook's side, write-back --force the module's"
_OUT_OF_STEP = {
    "missing": "not exported yet: run export",
    "conflict": "git left a conflict in the module: run export",
    "notebook": "the notebook changed since the last export: run export",
    "module": "the module was edited since the last export: run write-back to keep the edit, or export --force to lose it",
    "both": f"notebook and module both changed since the last export: {_KEEP_ONE}",
    "neither": f"both are as in git's HEAD, where they differ, or the exporter changed: {_KEEP_ONE}",
    "foreign": "the module was not exported by this tool: move its code into the notebook, then export --force",
}


def out_of_step(notebook: Notebook, side: str, cell: str | None = None, what: str = "") -> LiterateError:
    """The error of a notebook, or of one of its cells, that differs from the module. `what`: what else differs."""
    return LiterateError(f"{what}differs from {notebook.target} ({_OUT_OF_STEP[side]})", notebook.name, cell)


def export(notebooks: Sequence[Notebook], root: Path, force: bool = False) -> tuple[list[str], list[LiterateError]]:
    """Write the modules that are out of date. Returns the paths written and the errors; one bad notebook stops no other."""
    differing, errors = compare(notebooks, root)
    written = []
    for notebook in notebooks:
        if notebook.target in differing:
            side = edited_side(notebook, root)
            if force or side in {"missing", "conflict", "notebook"}:
                write(root / notebook.target, differing[notebook.target])
                written.append(notebook)
            else:
                errors.append(out_of_step(notebook, side))
    remember(written, root)
    names = [notebook.target for notebook in written]
    packages = missing_packages(root, names)
    for package in packages:
        write(root / package, "")
    return names + packages, errors


def missing_packages(root: Path, modules: Iterable[str]) -> list[str]:
    """The `__init__.py` files that the packages of these modules lack. `kernels/` is a folder, not a package."""
    packages = sorted({parent for module in modules for parent in Path(module).parents} - {Path("."), Path("kernels")})
    files = [(package / "__init__.py").as_posix() for package in packages]
    return [name for name in files if not (root / name).exists()]
