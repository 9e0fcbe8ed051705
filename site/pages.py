"""Turn the book into pages for Sphinx: the same notebooks, without directives and hidden cells, and a table of contents.

python site/pages.py site/_pages && sphinx-build -c site site/_pages site/_build/html
"""

import json
import shutil
import sys
from pathlib import Path

from minivllm.literate import Notebook, joined, notebook_paths, read_notebook, write

ROOT = Path(__file__).parents[1]
PARTS = {
    "1_core": "The core",
    "2_lab": "The lab",
    "3_model": "The model",
    "4_kernels": "Kernels",
    "5_engine": "The engine",
    "6_serving": "Serving",
    "7_scale": "Scale",
    "8_viz": "Pictures",
}


def page(notebook: Notebook) -> dict:
    """The notebook's JSON as readers should see it. Cells that only hold directives, or are hidden, are left out."""
    shown = []
    for cell, raw in zip(notebook.cells, notebook.data["cells"], strict=True):
        source = cell.code.strip("\n")
        if "hide" not in cell.directives and source.strip():
            shown.append({**raw, "source": source})
    return {**notebook.data, "cells": shown}


def contents(notebooks: list[Notebook]) -> str:
    """The tables of contents of the start page, one for each part, in the order of the file names."""
    parts: dict[str, list[str]] = {}
    for notebook in notebooks:
        folder, _, page = notebook.name.removeprefix("nbs/").removesuffix(".ipynb").rpartition("/")
        if page != "index":
            parts.setdefault(folder, []).append(f"{folder}/{page}".lstrip("/"))
    order = [*PARTS, *sorted(parts.keys() - PARTS.keys() - {""}), ""]
    return "\n\n".join(
        "\n".join(
            [
                "```{toctree}",
                f":caption: {PARTS.get(part, part) or 'The toolchain'}",
                ":hidden:",
                "",
                *parts[part],
                "```",
            ]
        )
        for part in order
        if part in parts
    )


def main(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    notebooks = [read_notebook(path, ROOT) for path in notebook_paths(ROOT)]
    for notebook in notebooks:
        data = page(notebook)
        if notebook.name == "nbs/index.ipynb":
            data["cells"].append(
                {"id": "contents", "cell_type": "markdown", "metadata": {}, "source": contents(notebooks)}
            )
        for raw in data["cells"]:
            raw["source"] = joined(raw["source"])
        write(target / notebook.name.removeprefix("nbs/"), json.dumps(data))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
