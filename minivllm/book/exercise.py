"""Checkers for the exercises of the book."""

# Generated from nbs/book/exercise.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

__all__ = ["Exercise", "is_blank"]


# %% nbs/book/exercise.ipynb #Verdict
@dataclass(frozen=True)
class Verdict:
    """What a checker says. True if it begins with "right"."""

    text: str

    def __bool__(self) -> bool:
        return self.text.startswith("right")

    def __repr__(self) -> str:
        return self.text


# %% nbs/book/exercise.ipynb #Exercise
@dataclass(frozen=True)
class Exercise:
    """A checker, made from a function of the answer: `@Exercise` above its `def`.

    Attributes:
        judge: gives a complaint about an answer; or None, or words that begin with "right", if there is none. May be
            an `async def`, for answers that are.
    """

    judge: Callable[..., str | None | Coroutine[Any, Any, str | None]]

    def __call__(self, *answer: Any) -> Verdict:
        """Judge an answer. What the answer's own code raises is a verdict too."""
        if any(map(is_blank, answer)):
            return Verdict("no answer yet: put yours in place of the dots")
        try:
            found = self.judge(*answer)
            return Verdict((_in_a_loop(found) if isinstance(found, Coroutine) else found) or "right")
        except Exception as error:  # noqa: BLE001 - whatever a reader's code may raise is the verdict on it
            return Verdict(f"it raised {type(error).__name__}: {error}{_place(error, answer) or _guess(error, answer)}")

    def accepts(self, *answer: Any) -> None:
        """For the folded solution: AssertionError unless the answer is found right."""
        verdict = self(*answer)
        if not verdict:
            raise AssertionError(f"a solution was refused: {verdict}")

    def rejects(self, *answer: Any, because: str) -> None:
        """For a wrong answer: AssertionError unless it is caught, in words that hold `because`."""
        verdict = self(*answer)
        if verdict or because not in verdict.text:
            raise AssertionError(f"a wrong answer should be refused with {because!r}, not: {verdict}")


# %% nbs/book/exercise.ipynb #is_blank
def _blank() -> None: ...


async def _blank_coroutine() -> None: ...


_BLANKS = {function.__code__.co_code for function in (_blank, _blank_coroutine)}


def is_blank(answer: Any) -> bool:
    """Whether an answer is dots, has dots in it, or is a function (or a class, or an object, with a method) whose body is dots."""
    if isinstance(answer, dict):
        return any(map(is_blank, answer.values()))
    if isinstance(answer, list | tuple | set):
        return any(map(is_blank, answer))
    kind = answer if isinstance(answer, type) else type(answer)
    if kind.__module__ == "__main__":  # the reader's own class, with methods still to write
        return any(is_blank(value) for value in vars(kind).values() if value is ... or hasattr(value, "__code__"))
    code = getattr(answer, "__code__", None)
    return answer is ... or (code is not None and code.co_code in _BLANKS and code.co_consts[0] is None)


def _in_a_loop(judging: Coroutine[Any, Any, str | None]) -> str | None:
    """What a coroutine returns, from a loop of its own: a notebook's is running already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, judging).result()


def _place(error: Exception, answer: tuple[Any, ...]) -> str:
    """The line of the reader's function that raised, if it is one and its source is known."""
    files = {part.__code__.co_filename for part in answer if hasattr(part, "__code__")}
    lines = [
        frame.line for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files and frame.line
    ]
    return f", at `{lines[-1]}`" if lines else ""


def _guess(error: Exception, answer: tuple[Any, ...]) -> str:
    """What an error in the checker itself says about the answer, in the two cases that happen to everybody."""
    if "positional argument" in str(error):
        return ": is the answer one thing, such as a list, where you gave several?"
    if "NoneType" in str(error) and any(map(callable, answer)):
        return ": a function without `return` gives None"
    return ""
