"""Views of traces and of running engines: the package's public names."""

# Generated from nbs/viz/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib
from typing import Any

_HOMES = {
    "BlockMap": "block_map",
    "Compare": "compare",
    "Dashboard": "dashboard",
    "EngineMonitor": "monitor",
    "Page": "page",
    "Predict": "predict",
    "PrefixTree": "prefix_tree",
    "SamplerExplorer": "sampler_explorer",
    "Timeline": "timeline",
    "View": "view",
    "Waste": "waste",
    "show": "page",
}

__all__ = [name for name in _HOMES if name != "show"]


def __getattr__(name: str) -> Any:
    """Import a view from its module when it is first used, and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm.viz' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    value = getattr(importlib.import_module(f"minivllm.viz.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
