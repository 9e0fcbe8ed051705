"""Views of traces and of running engines: the package's public names."""

# Generated from nbs/viz/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib
from typing import Any

from minivllm.core.plugins import load_plugins

_VIEWS = {
    "BlockMap": "block_map", "Compare": "compare", "Dashboard": "dashboard", "EngineMonitor": "monitor",
    "Page": "page", "Predict": "predict", "PrefixTree": "prefix_tree", "SamplerExplorer": "sampler_explorer",
    "Timeline": "timeline", "View": "view", "Waste": "waste",
}  # fmt: skip
_FUNCTIONS = {"plot_drafts": "drafts", "plot_experts": "experts", "show": "page"}
_HOMES = {name: f"minivllm.viz.{module}" for name, module in {**_VIEWS, **_FUNCTIONS}.items()}

__all__ = [name for name in ("register_view", *_VIEWS)]


def register_view(name: str, home: str) -> None:
    """Make a view known as `minivllm.viz.NAME`. `home`: the module that has it under this name, imported when it is first wanted.

    Raises:
        ValueError: the name is taken.
        TypeError: `home` is no text.
    """
    if name in _HOMES or name in globals():
        raise ValueError(f"view {name!r} exists already")
    if not isinstance(home, str):
        raise TypeError(f"view {name!r}: expected the name of its module, got {home!r}")
    _HOMES[name] = home


def __getattr__(name: str) -> Any:
    """Import a view from its module when it is first used, and keep it."""
    if name not in _HOMES and name[0] != "_":
        load_plugins()
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm.viz' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
