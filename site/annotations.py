"""Links of type annotations: a bare name means what the module imports under it, also where it imports only for type checkers."""

import ast
import importlib.util
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx


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
