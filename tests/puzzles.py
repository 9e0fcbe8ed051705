"""The puzzles of a chapter, with their answers and their wrong answers: the folded cells of its notebook, executed."""

import json
import linecache
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from minivllm.book.kernel_puzzles import Puzzle as KernelPuzzle


def execute(source: str, filename: str, names: dict[str, Any]) -> None:
    """Execute code so that `inspect.getsource` finds it."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), names)


def load_puzzles(chapter: str) -> tuple[Any, ...]:
    """`PUZZLES` of a chapter of the book, such as "paging"; the names of the chapter's module are those of the package."""
    names = dict(vars(import_module(f"minivllm.book.{chapter}")))
    path = Path(__file__).parents[1] / "nbs" / "book" / f"{chapter}.ipynb"
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            execute("".join(cell["source"]), f"<{chapter} #{cell['id']}>", names)
    return names["PUZZLES"]


def wrong_kernels(puzzle: KernelPuzzle) -> Iterator[tuple[Any, str]]:
    """The wrong kernels of a puzzle, each with words that the verdict on it must hold."""
    for number, (right, wrong, words) in enumerate(puzzle.wrong):
        assert right in puzzle.solution, f"{puzzle.name}, mistake {number}: not a part of the answer"
        names = dict(puzzle.answer.__globals__)
        execute(puzzle.solution.replace(right, wrong), f"<{puzzle.name}, mistake {number}>", names)
        yield names[puzzle.answer.__name__], words
