"""Checkers for the exercises of the book."""

# Generated from nbs/book/exercise.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ast
import asyncio
import copy
import functools
import inspect
import textwrap
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Self

__all__ = ["Exercise", "is_blank"]


@dataclass(frozen=True)
class Verdict:
    """What a checker says. True if it begins with "right"."""

    text: str

    def __bool__(self) -> bool:
        return self.text.startswith("right")

    def __repr__(self) -> str:
        return self.text


class WrongCall(Exception):
    """The reader's function takes other arguments than it is called with."""


class Items(tuple):
    """What a list or tuple held: equal to a list and to a tuple of the same, and shown as it was given."""

    given: Any

    def __new__(cls, given: Any, arrays: list[Any] | None = None) -> Self:
        made = super().__new__(cls, (in_one_form(item, arrays) for item in given))
        made.given = given
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | tuple) and tuple.__eq__(self, tuple(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __add__(self, other: Any) -> Any:
        return Items([*self, *other])

    def __radd__(self, other: Any) -> Any:
        return Items([*other, *self])

    def __getitem__(self, index: Any) -> Any:
        found = tuple.__getitem__(self, index)
        return Items(list(found)) if isinstance(index, slice) else found

    def __repr__(self) -> str:
        return repr(self.given)


def in_one_form(answer: Any, arrays: list[Any] | None = None) -> Any:
    """An answer as checkers want to see it: sequences as `Items`, numpy's numbers as Python's, functions that return these.

    Args:
        arrays: where given, numpy arrays stay as they are and are appended to it; otherwise they become Items too.
    """
    if type(answer) in (list, tuple, range, type({}.keys()), type({}.values())):
        return Items(answer, arrays)
    if type(answer) is dict:
        return {key: in_one_form(value, arrays) for key, value in answer.items()}
    if type(answer).__module__ == "numpy" and hasattr(answer, "tolist"):
        if answer.shape == ():
            return answer.tolist()
        if arrays is None:
            return Items(answer.tolist())
        arrays.append(answer)
        return answer
    plain = isinstance(answer, FunctionType) and not inspect.iscoroutinefunction(answer)
    if not plain or inspect.isgeneratorfunction(answer) or inspect.isasyncgenfunction(answer):
        return answer
    return _returning_one_form(answer, arrays)


def _returning_one_form(function: FunctionType, arrays: list[Any] | None) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for given, named in ((args, kwargs), ((*args, *kwargs.values()), {})):  # its arguments may have other names
            try:
                signature.bind(*given, **named)
            except TypeError:
                continue
            return in_one_form(function(*given, **named), arrays)
        wants = f"{len(signature.parameters)} argument{'s' * (len(signature.parameters) != 1)}"
        raise WrongCall(f"your function takes {wants}, and it is called with {len(args) + len(kwargs)}")

    return call


@dataclass(frozen=True)
class Exercise:
    """A checker, made from a function of the answer: `@Exercise` above its `def`.

    Attributes:
        judge: gives a complaint about an answer; or None, or words that begin with "right", if there is none. May be
            an `async def`, for answers that are. A function that is the answer comes wrapped: what compiles or reads
            it takes `inspect.unwrap(answer)`.
    """

    judge: Callable[..., str | None | Coroutine[Any, Any, str | None]]

    def __call__(self, *answer: Any) -> Verdict:
        """Judge an answer. What the answer's own code raises is a verdict too."""
        if any(map(is_blank, answer)):
            return Verdict("no answer yet: put yours in place of the dots")
        try:
            inspect.signature(self.judge).bind(*answer)
        except TypeError:
            return Verdict("give one answer: put several values into a list" if len(answer) > 1 else "give an answer")
        arrays: list[Any] = []
        verdict = self._judge(answer, arrays)
        if not verdict and arrays:  # perhaps the checker compares lists
            as_lists = self._judge(answer, None)
            verdict = as_lists if as_lists or verdict.text.startswith("it raised") else verdict
        return verdict

    def _judge(self, answer: tuple[Any, ...], arrays: list[Any] | None) -> Verdict:
        try:
            found = self.judge(*(in_one_form(part, arrays) for part in answer))
            if isinstance(found, Coroutine):  # in a separate loop: a notebook's is running already
                with ThreadPoolExecutor(1) as thread:
                    found = thread.submit(asyncio.run, found).result()
            return Verdict(found or "right")
        except WrongCall as error:
            return Verdict(str(error))
        except Exception as error:  # noqa: BLE001 - whatever a reader's code may raise is the verdict on it
            return Verdict(f"it raised {type(error).__name__}: {error}{_place(error, answer) or _guess(error, answer)}")

    def accepts(self, *answer: Any) -> None:
        """For the folded solution: AssertionError unless it is found right, in every form, and made-up answers are not."""
        verdict = self(*answer)
        if not verdict:
            raise AssertionError(f"a solution was refused: {verdict}")
        start = time.monotonic()
        for what, variant, right in _variants(self, answer):
            if time.monotonic() - start > PATIENCE:
                break
            verdict = self(*variant)
            if bool(verdict) != right:
                found = f"was refused: {verdict}" if right else "was accepted"
                raise AssertionError(f"{what} {found}")

    def rejects(self, *answer: Any, because: str) -> None:
        """For a wrong answer: AssertionError unless it is caught, in words that hold `because`."""
        verdict = self(*answer)
        if verdict or because not in verdict.text:
            raise AssertionError(f"a wrong answer should be refused with {because!r}, not: {verdict}")


def is_blank(answer: Any) -> bool:
    """Whether an answer is dots, has dots in it, or is a function (or a class, or an object, with a method) whose body is dots."""
    if isinstance(answer, dict):
        return any(map(is_blank, answer.values()))
    if isinstance(answer, list | tuple | set):
        return any(map(is_blank, answer))
    kind = answer if isinstance(answer, type) else type(answer)
    if kind.__module__ == "__main__":  # the reader's own class, with methods still to write
        return any(value is ... or _is_dots(value) for value in vars(kind).values())
    return answer is ... or _is_dots(answer)


def _is_dots(function: Any) -> bool:
    """Whether a function's body is dots alone, below a docstring perhaps. `pass` compiles to the same: its source tells."""
    function = getattr(function, "py_func", function)  # what numba compiled
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        return False
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0].body  # type: ignore[attr-defined]
    except (OSError, SyntaxError, TypeError, AttributeError):  # typed at a prompt: no source is kept
        return False
    body = body[1:] if ast.get_docstring(ast.Module(body, [])) is not None else body
    return len(body) == 1 and isinstance(body[0], ast.Expr) and getattr(body[0].value, "value", None) is ...


def _place(error: Exception, answer: tuple[Any, ...]) -> str:
    """The line of the reader's function that raised, if it is one and its source is known."""
    files = {part.__code__.co_filename for part in answer if hasattr(part, "__code__")}
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.line for frame in frames if frame.filename in files and frame.line]
    return f", at `{lines[-1]}`" if lines else ""


def _guess(error: Exception, answer: tuple[Any, ...]) -> str:
    """What an error in the checker itself says about the answer, in the most common cases."""
    if isinstance(error, TypeError) and "missing" in str(error) and any(isinstance(part, type) for part in answer):
        return ": this is a class, and an object of it is wanted: put () behind its name"
    if "NoneType" in str(error) and any(map(callable, answer)):
        return ": a function without `return` gives None"
    return ""


PATIENCE = 0.5  # seconds for the variants of one solution: a checker that runs an engine takes longer for each


def _variants(exercise: Exercise, answer: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...], bool]]:
    """(what it is, the answer, whether it is right): other forms of a solution, and answers that cannot be right."""
    if len(answer) != 1:
        return
    solution = answer[0]
    if not isinstance(solution, FunctionType):
        for what, other in _other_forms(solution):
            yield f"the solution as {what}", (other,), True
        for kind in (list, dict):
            if type(solution) in (list, tuple, dict) and len(solution):
                yield f"an empty {kind.__name__}", (kind(),), False
        return
    compiled = "unwrap" in exercise.judge.__code__.co_names  # its code counts, and a wrapper has other code
    if compiled or inspect.iscoroutinefunction(solution) or inspect.isgeneratorfunction(solution):
        return
    results: list[Any] = []
    exercise(lambda *args: (results.append(copy.copy(solution(*args))), results[-1])[1])  # type: ignore[func-returns-value]
    yield "the solution with other names for its arguments", (lambda *args: solution(*args),), True
    if not results or results[0] is None:
        return
    for index, (what, _) in enumerate(_other_forms(results[0])):
        yield (f"the solution that returns {what}", (lambda *args, i=index: _other(solution(*args), i),), True)
    for constant in ([], {}, *results[:1]):
        if not callable(constant):
            yield f"a function that always returns {constant!r}", (lambda *args, c=constant: copy.copy(c),), False


def _other(result: Any, index: int) -> Any:
    forms = list(_other_forms(result))
    return forms[index][1] if index < len(forms) else result


def _other_forms(value: Any) -> Iterator[tuple[str, Any]]:
    """(what it is, the same value in another form), as a reader may write it."""
    import numpy as np

    if type(value) in (int, float):
        yield "a number of numpy", np.asarray(value)[()]
    if type(value) in (list, tuple):
        yield ("a tuple", tuple(value)) if isinstance(value, list) else ("a list", list(value))
        if value and all(type(item) in (int, float) for item in value):
            yield "a numpy array", np.array(value)
