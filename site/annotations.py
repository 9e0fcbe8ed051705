"""What Sphinx would read wrongly in docstrings and annotations: names that stand together, and names of other modules."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

FIELD = re.compile(r"^(:(?:param|ivar) )([\w\\*]+(?:, [\w\\*]+)+)(?=:)")


@cache
def imported(module: str) -> dict[str, str]:
    """The names that a module imports from this project's modules, with their full names."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return {}
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("minivllm")
        for alias in node.names
    }


def resolve(_: Sphinx, doctree: nodes.document) -> None:
    """Write full names in place of bare ones. Left to itself Sphinx takes any object whose name ends like that, of any module."""
    for node in doctree.findall(pending_xref):
        if node.get("refdomain") == "py" and node.get("py:module"):
            node["reftarget"] = imported(node["py:module"]).get(node["reftarget"], node["reftarget"])
            node["refspecific"] = False


def join_names(_app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Keep the names of a line such as `low, high: the bounds` together. Sphinx would take the first for the second's type."""
    lines[:] = [FIELD.sub(lambda found: found[1] + found[2].replace(", ", ","), line) for line in lines]
