"""The schema of events and other tables, written for the pages' programs."""

# Generated from nbs/viz/tables.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from minivllm.core.events import SCHEMA
from minivllm.viz import palette, prefix_data, timeline_data
from minivllm.viz.block_map import MODES, STATUSES, WIRE
from minivllm.viz.view import MADE_UP

_NUMBERS = {
    "timeline_data": ("WAITING", "PREEMPTED", "SWAPPED", "REMOTE", "STALLED", "PREFILL", "DECODE"),
    "prefix_data": ("CACHED", "HIT", "EVICTED", "FORGOTTEN"),
}


def javascript() -> str:
    """The text of `schema.js`."""
    tables: dict[str, tuple[str, Any]] = {
        "KINDS": ("kinds of events; a number in the stream is an index here", list(SCHEMA)),
        "WIRE": ("the events that travel, and their fields", WIRE),
        "STATUSES": ("of a request", STATUSES),
        "MODES": ("of a preemption", MODES),
        "FINISHES": ("ends of a request", timeline_data.FINISHES),
        "TREE_KINDS": ("how a cached block stands", prefix_data.KINDS),
        "OWNER_COLOURS": ("colours of requests, given again and again", palette.NUM_OWNER_COLOURS),
        "DECODE_TINT": ("how much of a request's colour is left where it decodes", palette.DECODE_TINT),
        "MADE_UP": ("token ids from here on are made up by the lab", MADE_UP),
    }
    lines = ["// Written by `minivllm.viz.tables.write()` from the Python side: do not edit."]
    for module, names in _NUMBERS.items():
        values = {name: getattr(globals()[module], name) for name in names}
        lines.append(f"export const {', '.join(f'{name} = {value}' for name, value in values.items())}; // {module}.py")
    lines += [f"export const {name} = {json.dumps(value)}; // {what}" for name, (what, value) in tables.items()]
    return "\n".join(lines) + "\n"


def write() -> Path:
    """Write `schema.js` where the pages' programs lie; returns its path."""
    path = Path(str(files("minivllm.viz"))) / "static/schema.js"
    path.write_text(javascript(), encoding="utf-8")
    return path
