"""Views of traces and of running engines: the package's public names."""

# Generated from nbs/viz/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib
from typing import Any

from minivllm.core.plugins import load_plugins

_HOMES = {
    "BlockMap": "minivllm.viz.block_map",
    "Compare": "minivllm.viz.compare",
    "Dashboard": "minivllm.viz.dashboard",
    "EngineMonitor": "minivllm.viz.monitor",
    "Page": "minivllm.viz.page",
    "Predict": "minivllm.viz.predict",
    "PrefixTree": "minivllm.viz.prefix_tree",
    "SamplerExplorer": "minivllm.viz.sampler_explorer",
    "Timeline": "minivllm.viz.timeline",
    "View": "minivllm.viz.view",
    "Waste": "minivllm.viz.waste",
    "plot_drafts": "minivllm.viz.drafts",
    "plot_experts": "minivllm.viz.experts",
    "show": "minivllm.viz.page",
}

__all__ = [name for name in ("register_view", *_HOMES) if name not in ("plot_drafts", "plot_experts", "show")]


def register_view(name: str, home: str) -> None:
    """Make a view known as `minivllm.viz.NAME`. `home`: the module that has it under this name, imported when it is first wanted.

    Raises:
        ValueError: the name is taken.
    """
    if name in _HOMES or name in globals():
        raise ValueError(f"view {name!r} exists already")
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
