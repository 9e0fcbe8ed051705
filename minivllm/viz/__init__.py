"""Pictures.

The views of this part, each in a chapter of its own: what one asks for by name.
"""

# Generated from nbs/8_viz/00_viz.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=64d649b03d5a module=ff0248862535

import importlib
from typing import Any

# %% nbs/8_viz/00_viz.ipynb #lazy
_HOMES = {
    "BlockMap": "minivllm.viz.block_map",
    "Dashboard": "minivllm.viz.dashboard",
    "EngineMonitor": "minivllm.viz.monitor",
    "Page": "minivllm.viz.page",
    "Predict": "minivllm.viz.predict",
    "SamplerExplorer": "minivllm.viz.sampler_explorer",
    "View": "minivllm.viz.view",
}

__all__ = ["BlockMap", "Dashboard", "EngineMonitor", "Page", "Predict", "SamplerExplorer", "View"]


def __getattr__(name: str) -> Any:
    """Import a view from its module when it is first used, and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm.viz' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
