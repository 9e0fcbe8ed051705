"""Views of traces and of running engines: the package's public names."""

# Generated from nbs/viz/index.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import importlib
from typing import TYPE_CHECKING, Any

# %% nbs/viz/index.ipynb #lazy
if TYPE_CHECKING:
    from minivllm.viz.block_map import BlockMap
    from minivllm.viz.compare import Compare
    from minivllm.viz.dashboard import Dashboard
    from minivllm.viz.monitor import EngineMonitor
    from minivllm.viz.page import Page
    from minivllm.viz.predict import Predict
    from minivllm.viz.prefix_tree import PrefixTree
    from minivllm.viz.sampler_explorer import SamplerExplorer
    from minivllm.viz.timeline import Timeline
    from minivllm.viz.view import View
    from minivllm.viz.waste import Waste

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
}

__all__ = [
    "BlockMap",
    "Compare",
    "Dashboard",
    "EngineMonitor",
    "Page",
    "Predict",
    "PrefixTree",
    "SamplerExplorer",
    "Timeline",
    "View",
    "Waste",
]


def __getattr__(name: str) -> Any:
    """Import a view from its module when it is first used, and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm.viz' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
