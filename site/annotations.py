"""What Sphinx would read wrongly in docstrings and annotations: names that stand together, and names of other modules."""

import ast
import importlib.util
import inspect
import re
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from docutils import nodes
from sphinx.addnodes import desc_annotation, pending_xref
from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

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


def hide_raw_values(_: Sphinx, doctree: nodes.document) -> None:
    """Leave out the value of a constant that Python can only show as `<...>`: functions, classes."""
    for node in list(doctree.findall(desc_annotation)):
        if re.match(r"\s*=.*<\w", node.astext()):
            node.parent.remove(node)


def join_names(_app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Keep the names of a line such as `low, high: the bounds` together. Sphinx would take the first for the second's type."""
    lines[:] = [FIELD.sub(lambda found: found[1] + found[2].replace(", ", ","), line) for line in lines]


def join_first_line(_app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Undo what napoleon does to `What it is: and more` of a property or a constant, whose first words it takes for a type."""
    if what in ("property", "attribute", "data") and lines and (kind := re.match(":type: (.*)", lines[-1])):
        lines[:] = [f"{kind[1]}: {lines[0]}", *lines[1:-1]]


def readable_signature(
    _app: Sphinx, _what: str, _name: str, what: object, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """No signature for a protocol, which is not called; fields of a pydantic model by their types alone; `...` for a default of a
    dataclass that is a function or made by one, since Sphinx, which cannot parse `<factory>`, would set it all as raw text."""
    if getattr(what, "_is_protocol", False) and isinstance(what, type):
        return "", returns
    if isinstance(what, type) and hasattr(what, "model_fields"):
        fields = inspect.signature(what).parameters.values()
        plain = inspect.Signature([field.replace(annotation=bare(field.annotation)) for field in fields])
        signature = stringify_signature(plain, unqualified_typehints=True)
    return signature and re.sub(r"<(factory|function [\w.<>]+)>", "...", signature), returns


def bare(kind: Any) -> Any:
    """An annotation without what `Annotated` adds to it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return bare(arguments[0])
    if origin in (Union, UnionType):
        return reduce(or_, map(bare, arguments))
    return kind if origin in (None, Literal, Callable) else origin[tuple(map(bare, arguments))]


def skip_member(_app: Sphinx, _what: str, name: str, member: object, _skip: bool, _options: object) -> bool | None:
    """Leave out the fields of a named tuple, of which Python says no more than their number, and what pydantic says of itself."""
    return True if name == "model_config" or str(member.__doc__).startswith("Alias for field number") else None
