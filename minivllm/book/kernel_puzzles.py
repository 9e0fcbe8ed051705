"""Kernel puzzles: from a guarded copy to paged attention, checked in numba's CUDA simulator."""

# Generated from nbs/book/kernel_puzzles.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from minivllm.book.exercise import Verdict
from minivllm.book.lens import Lens

__all__ = ["Puzzle"]


@dataclass(frozen=True, repr=False)
class KernelVerdict(Verdict):
    """What `Puzzle.check` found; true if the kernel is right and fast. ``lens``: what the kernel did."""

    lens: Lens | None = None

    def __bool__(self) -> bool:
        return self.text == "right"

    def _repr_html_(self) -> str:
        picture = "" if self or self.lens is None else self.lens.svg()
        return f"<pre>{escape(self.text)}</pre>{picture}"


@dataclass(frozen=True, repr=False)
class Puzzle:
    """A kernel to write.

    Attributes:
        name: of the puzzle; task: what the kernel should do.
        case: from a random generator to the arguments by name; `out` arrays come filled with NaN or -1.
        expected: from the arguments to the right outputs by name, in plain NumPy.
        grid, threads: of the launch.
        answer: a right kernel.
        wrong: mistakes to test the puzzle with: (text of the answer, its replacement, words of the verdict).
        demand: what else the lens must find: gives a complaint, or None.
    """

    name: str
    task: str
    case: Callable[[np.random.Generator], dict[str, Any]]
    expected: Callable[..., dict[str, np.ndarray]]
    grid: int
    threads: int
    answer: Callable
    wrong: tuple[tuple[str, str, str], ...]
    demand: Callable[[Lens], str | None] | None = None

    def deal(self, seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(arguments by name, right outputs) of one case."""
        arguments = self.case(np.random.default_rng(seed))
        copies = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        return arguments, self.expected(**copies)

    def show(self, kernel: Callable) -> Lens:
        """What the kernel did on the first case: a picture in a notebook, and in words."""
        return Lens().run(kernel, self.grid, self.threads, **self.deal(0)[0])

    @property
    def solution(self) -> str:
        """The source of a right kernel."""
        return textwrap.dedent(inspect.getsource(self.answer))

    def _repr_html_(self) -> str:
        lens = self.show(self.answer)
        launch = f"{self.grid} block{'s' * (self.grid > 1)} of {self.threads} thread{'s' * (self.threads > 1)}"
        return f"<b>{escape(self.name)}</b> ({launch}): {escape(self.task)}{lens.svg()}"

    def __repr__(self) -> str:
        return f"{self.name}: {self.task}"

    def check(self, kernel: Callable) -> KernelVerdict:
        """Try the kernel on three cases. TypeError if its arguments have other names than the puzzle's."""
        for seed in range(3):
            (arguments, right), lens = self.deal(seed), Lens()
            try:
                lens.run(kernel, self.grid, self.threads, **arguments)
            except TypeError as error:
                if not lens.accesses and kernel.__name__ in str(error):
                    raise
                return KernelVerdict(f"it raised: {error}", lens)
            except Exception as error:  # noqa: BLE001 - whatever a reader's code may raise is the verdict on it
                return KernelVerdict(f"it raised {type(error).__name__}: {error}", lens)
            complaint = next(lens.faults(), None) or _first_wrong(lens, arguments, right)
            if not complaint and self.grid * self.threads > 1 and len({a.who for a in lens.accesses}) == 1:
                threads = self.grid * self.threads
                complaint = f"right, and slow: one thread does all the work, and {threads} are there"
            complaint = complaint or (self.demand and self.demand(lens))
            if complaint:
                return KernelVerdict(complaint, lens)
        return KernelVerdict("right")


def _first_wrong(lens: Lens, arguments: dict[str, Any], right: dict[str, np.ndarray]) -> str | None:
    for name, expected in right.items():
        wrong = np.flatnonzero(~np.isclose(arguments[name], expected, rtol=1e-4, atol=1e-5, equal_nan=True))
        if len(wrong):
            return _wrong_element(lens, name, int(wrong[0]), arguments[name].flat[wrong[0]], expected.flat[wrong[0]])
    return None


def _wrong_element(lens: Lens, name: str, index: int, found: float, expected: float) -> str:
    writes = [a for a in lens.accesses if (a.array, a.index, a.write) == (name, index, True)]
    who = "no thread wrote it"
    if writes:
        who = f"{writes[-1].who} wrote it: {lens.source(writes[-1].line)}"
    expectation = "should be left alone, and is" if np.isnan(expected) else f"should be {expected:.6g}, and is"
    return f"{lens.element(name, index)} {expectation} {found:.6g}; {who}"
