"""Plugins: functions of installed packages that register policies, models, parsers and so on."""

# Generated from nbs/core/plugins.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "minivllm.plugins"
"""The group of entry points. vLLM's is `vllm.general_plugins`."""

logger = logging.getLogger("minivllm.plugins")


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point that was found.

    Attributes:
        name: of the entry point.
        value: the object it names, as `module:function`.
        package, version: of the distribution that declares it.
        problem: why it is not in use; None if it was loaded.
    """

    name: str
    value: str
    package: str
    version: str
    problem: str | None = None


_lock = threading.RLock()
_plugins: list[Plugin] | None = None


def load_plugins() -> tuple[Plugin, ...]:
    """Find all plugins and call those that `MINIVLLM_PLUGINS` allows, once in a process. Never raises for what a plugin does.

    Returns:
        All that were found, in the order of their names, loaded or not.
    """
    global _plugins
    with _lock:
        if _plugins is None:
            from importlib.metadata import entry_points

            _plugins = []  # a plugin that makes an engine comes here again
            listed = os.environ.get("MINIVLLM_PLUGINS")
            allowed = None if listed is None else {name.strip() for name in listed.split(",")} - {""}
            found = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
            for name in sorted((allowed or set()) - {entry.name for entry in found}):
                logger.warning("MINIVLLM_PLUGINS names %r, but no installed package has such a plugin", name)
            _plugins.extend(_load(entry, allowed is None or entry.name in allowed) for entry in found)
        return tuple(_plugins)


def _load(entry: EntryPoint, allowed: bool) -> Plugin:
    problem = None if allowed else "not in MINIVLLM_PLUGINS"
    package, version = (entry.dist.name, entry.dist.version) if entry.dist is not None else ("?", "?")
    if allowed:
        try:
            entry.load()()
        except (Exception, SystemExit) as error:  # a plugin may raise anything, and must not stop the engine
            problem = f"{type(error).__name__}: {error}"
            logger.warning("plugin %r of %s %s is skipped: %s", entry.name, package, version, problem)
            logger.debug("where it failed", exc_info=True)
    return Plugin(entry.name, entry.value, package, version, problem)


def describe_plugins() -> str:
    """A line for each plugin: name, package and version, what it names, and whether it is loaded."""
    rows = [(p.name, f"{p.package} {p.version}", p.value, p.problem or "loaded") for p in load_plugins()]
    if not rows:
        return f"no plugins: no installed package has an entry point in the group {GROUP!r}"
    rows.insert(0, ("name", "package", "entry point", "state"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join("  ".join([*(f"{x:<{n}}" for x, n in zip(row, widths, strict=False)), row[3]]) for row in rows)


def check_class(what: str, cls: Any, base: type, also: str = "") -> None:
    """Raise TypeError unless `cls` is a class that inherits from `base`. `what`, `also`: for the error."""
    if not (isinstance(cls, type) and issubclass(cls, base)):
        kind = "a class" if base is object else f"a class that inherits from {base.__name__}"
        raise TypeError(f"{what}: expected {kind}{also}, got {cls!r}")


def check_maker(what: str, make: Any, base: type = object) -> None:
    """Raise TypeError unless `make` is a class that inherits from `base`, or a function."""
    if isinstance(make, type) or not callable(make):
        check_class(what, make, base, ", or a function that makes one")


def register(
    known: dict[str, Any], what: str, name: str, make: Any, base: type = object, *, by_name: bool = False
) -> None:
    """Enter the class or function that makes a `what`, such as a policy, into a registry under a name.

    Args:
        known: the registry.
        make: a class that inherits from `base`, or a function.
        by_name: it may also be `"module:name"`, to be imported when it is first wanted.

    Raises:
        ValueError: the name is taken.
        TypeError: the name is no text, or `make` is none of these.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a {what} must be text, got {name!r}")
    if name in known:
        raise ValueError(f"{what} {name!r} exists already")
    if not (by_name and isinstance(make, str) and ":" in make):
        check_maker(f"{what} {name!r}", make, base)
    known[name] = make


Class = TypeVar("Class", bound=type)


def registering(known: dict[str, Any], base: type, names: tuple[str, ...]) -> Callable[[Class], Class]:
    """A class decorator that enters a class under some names, replacing earlier entries.

    Raises:
        TypeError: no names, or one that is no text; later: what is decorated is no class that inherits from `base`.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"a {base.__name__} is registered under names in parentheses, got {names}")

    def register(cls: Class) -> Class:
        check_class(", ".join(names), cls, base)
        known.update(dict.fromkeys(names, cls))
        return cls

    return register
