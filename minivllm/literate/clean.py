"""Notebook files without volatile metadata, in one canonical layout."""

# Generated from nbs/literate/clean.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
from collections.abc import Iterable
from typing import Any

from minivllm.literate.notebook import Notebook, joined, write

_VOLATILE_CELL = frozenset(
    {"execution", "ExecuteTime", "executionInfo", "collapsed", "scrolled", "trusted", "vscode", "outputId", "colab"}
)
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def cleaned(data: dict[str, Any]) -> dict[str, Any]:
    """A notebook's JSON without execution counts, timestamps, versions and widget state. Outputs stay; `data` is not changed."""
    cells = []
    for raw in data["cells"]:
        cell = {**raw, "metadata": {k: v for k, v in raw["metadata"].items() if k not in _VOLATILE_CELL}}
        if raw["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": _cleaned_outputs(raw.get("outputs", []))}
        cells.append(cell)
    dropped = {"widgets", "signature", "vscode", "colab"}
    metadata = {k: v for k, v in data.get("metadata", {}).items() if k not in dropped}
    minor = max(5, data.get("nbformat_minor", 5))
    return {"cells": cells, "metadata": metadata | METADATA, "nbformat": 4, "nbformat_minor": minor}


def _cleaned_outputs(outputs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs without counts and widgets, neighbouring pieces of a stream joined: into how many a kernel cuts its text is chance."""
    merged: list[dict[str, Any]] = []
    for output in outputs:
        last = merged[-1] if merged else {}
        if output["output_type"] == last.get("output_type") == "stream" and output["name"] == last["name"]:
            merged[-1] = {**last, "text": joined(last["text"]) + joined(output["text"])}
            continue
        merged.append({**output, **({"execution_count": None} if "execution_count" in output else {})})
        if "data" in output:
            merged[-1]["data"] = {mime: value for mime, value in output["data"].items() if mime != _WIDGET_VIEW}
    return merged


def notebook_text(data: dict[str, Any]) -> str:
    """The file text of a notebook, as Jupyter writes it: sorted keys, one blank of indentation, text as lists of lines."""
    return json.dumps(_in_lines(data), ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def is_clean(notebook: Notebook) -> bool:
    """Whether `clean` has nothing to do. Compared without indentation: Python writes that twenty times as fast."""
    layout = notebook.text.startswith('{\n "cells": [') and notebook.text.endswith("\n}\n")
    return layout and json.dumps(notebook.data) == json.dumps(_in_lines(cleaned(notebook.data)), sort_keys=True)


def _in_lines(data: dict[str, Any]) -> dict[str, Any]:
    cells = []
    for raw in data["cells"]:
        cell = {**raw, "source": joined(raw["source"]).splitlines(keepends=True)}
        if "outputs" in cell:
            cell["outputs"] = [_output_in_lines(output) for output in cell["outputs"]]
        cells.append(cell)
    return {**data, "cells": cells}


def _output_in_lines(output: dict[str, Any]) -> dict[str, Any]:
    def lines(value: Any) -> Any:
        return value.splitlines(keepends=True) if isinstance(value, str) else value

    def is_text(mime: str) -> bool:
        return mime.startswith("text/") or mime in {"application/javascript", "image/svg+xml"}

    data = {mime: lines(value) if is_text(mime) else value for mime, value in output.get("data", {}).items()}
    changed = {"text": lines(output.get("text")), "data": data}
    return {key: changed.get(key, value) for key, value in output.items()}


def clean(notebooks: Iterable[Notebook]) -> list[str]:
    """Clean notebook files in place. Returns the names of those that changed."""
    changed = []
    for notebook in notebooks:
        text = notebook_text(cleaned(notebook.data))
        if text != notebook.text:
            write(notebook.path, text)
            changed.append(notebook.name)
    return changed
