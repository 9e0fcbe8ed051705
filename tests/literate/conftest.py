"""A small repository in a temporary folder, with notebooks made from keyword arguments: cell id = source."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from minivllm.literate import __main__ as cli
from minivllm.literate import clean, notebook

ROOT = Path(__file__).parents[2]


class Repo:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "nbs").mkdir()
        shutil.copy(ROOT / "pyproject.toml", root)

    def notebook(
        self, name: str = "nbs/demo.ipynb", title: str = "# Demo\n\nA chapter. It is short.", **sources: str
    ) -> Path:
        """Write a notebook. A module without `#| doc` gets one. Cells get one output each, to see that outputs stay."""
        cells: list[dict[str, Any]] = [{"id": "title", "cell_type": "markdown", "metadata": {}, "source": title}]
        for cell, source in sources.items():
            output = {"name": "stdout", "output_type": "stream", "text": f"output of {cell}"}
            cells.append(
                {"id": cell, "cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [output]}
            )
            source = dedent(source).strip("\n")
            documented = source if "#| doc" in source else re.sub(r"(#\| default_exp .+)", "\\1\n#| doc A demo", source)
            cells[-1]["source"] = documented
        path = self.root / name
        data = {"cells": cells, "metadata": clean.METADATA, "nbformat": 4, "nbformat_minor": 5}
        notebook.write(path, clean.notebook_text(data))
        return path

    def read(self, name: str) -> str:
        return (self.root / name).read_text()

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace a text that stands exactly once in a file."""
        text = self.read(name)
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in\n{text}"
        (self.root / name).write_text(text.replace(old, new))

    def cell(self, cell: str, name: str = "nbs/demo.ipynb") -> dict[str, Any] | None:
        """A cell, its source joined; None when there is no such cell."""
        found = [raw for raw in json.loads(self.read(name))["cells"] if raw["id"] == cell]
        return {**found[0], "source": "".join(found[0]["source"])} if found else None

    def source(self, cell: str, name: str = "nbs/demo.ipynb") -> str:
        found = self.cell(cell, name)
        assert found is not None
        return found["source"]


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    monkeypatch.chdir(tmp_path)
    return Repo(tmp_path)


@pytest.fixture
def run(repo: Repo, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command of `python -m minivllm.literate` that must succeed; returns what it printed."""

    def command(*arguments: str) -> str:
        code = cli.main(list(arguments))
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, ""), printed.err
        return printed.out

    return command


@pytest.fixture
def fails(repo: Repo, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must fail with exit code 1; returns the errors that it printed."""

    def command(*arguments: str) -> str:
        assert cli.main(list(arguments)) == 1
        return capsys.readouterr().err

    return command
