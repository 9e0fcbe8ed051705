"""What a chapter defines and its module does not have: cells of a notebook, executed together with those of the module."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def chapter_cells(notebook: str, *ids: str) -> SimpleNamespace:
    """The names that the exported cells of a notebook, such as "numba_kernels/cuda/decode", and its cells `ids` define.

    numba's simulator lends `cuda` to one namespace at a time, so a kernel and its device functions must share one.
    """
    path = Path(__file__).parents[1] / "nbs" / f"{notebook}.ipynb"
    names: dict[str, Any] = {"__name__": f"chapter {notebook}"}
    missing = set(ids)
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["id"] in missing or re.match(r"#\| exporti?\n", source):
            missing.discard(cell["id"])
            exec(compile(source, f"<{notebook} #{cell['id']}>", "exec"), names)
    assert not missing, f"{path} has no cells {missing}"
    return SimpleNamespace(**names)
