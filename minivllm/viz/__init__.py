"""Pictures.

The views of this part, each in a chapter of its own: what one asks for by name.
"""

# Generated from nbs/8_viz/00_viz.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=98e4a47ab0cd module=743169f1811c

import importlib
from typing import Any

# %% nbs/8_viz/00_viz.ipynb #lazy
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
