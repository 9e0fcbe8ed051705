"""The one form of all exercises."""

import asyncio

import pytest

from minivllm.book.exercise import Exercise, is_blank


@Exercise
def check_half(answer):
    for n in (0, 4, 10):
        if answer(n) != n // 2:
            return f"half of {n} is {n // 2}, not {answer(n)}"


@Exercise
def check_number(answer, other=2):
    return f"right: {answer}" if answer == other else f"not {answer}"


def test_a_verdict_is_true_if_it_is_right():
    assert check_half(lambda n: n // 2) and str(check_half(lambda n: n // 2)) == "right"
    assert not check_half(lambda n: n) and str(check_half(lambda n: n)) == "half of 4 is 2, not 4"
    assert check_number(2) and str(check_number(2)) == "right: 2"


def blank(n): ...


async def blank_coroutine(n): ...


class Unwritten:
    """A reader's own class, in a notebook."""

    __module__ = "__main__"

    def order(self, waiting): ...


@pytest.mark.parametrize(
    "answer", [..., [1, ...], {"a": ...}, (..., 2), blank, blank_coroutine, Unwritten, Unwritten()]
)
def test_dots_are_no_answer_yet(answer):
    assert str(check_number(answer)).startswith("no answer yet")


def test_a_function_that_returns_something_is_an_answer():
    async def waits(n):
        return 7

    assert not is_blank(lambda n: 7) and not is_blank(waits)


def test_answers_that_wait_are_judged_too():
    @Exercise
    async def check_double(answer):
        return None if await answer(3) == 6 else "twice 3 is 6"

    async def double(n):
        return 2 * n

    async def forgets(n): ...

    async def raises(n):
        raise KeyError("x")

    async def in_a_notebook():
        check_double.accepts(double)
        check_double.rejects(raises, because="""it raised KeyError: 'x', at `raise KeyError("x")`""")

    asyncio.run(in_a_notebook())
    check_double.accepts(double)
    check_double.rejects(forgets, because="no answer yet")


def test_an_error_of_the_reader_names_the_line():
    def divides(n):
        return n / 0

    assert str(check_half(divides)) == "it raised ZeroDivisionError: division by zero, at `return n / 0`"


def test_what_happens_to_everybody_is_explained():
    @Exercise
    def check_sum(answer):
        return f"{answer(2):,}"

    assert str(check_sum(print)).endswith(": a function without `return` gives None")
    assert str(check_half(1, 2)).endswith(": is the answer one thing, such as a list, where you gave several?")
    assert str(check_half(3)) == "it raised TypeError: 'int' object is not callable"


def test_a_checker_that_is_wrong_itself_is_noticed():
    check_number.accepts(2)
    check_number.rejects(3, because="not 3")
    with pytest.raises(AssertionError, match="a solution was refused: not 3"):
        check_number.accepts(3)
    with pytest.raises(AssertionError, match="should be refused with 'x', not: not 3"):
        check_number.rejects(3, because="x")
    with pytest.raises(AssertionError, match="should be refused"):
        check_number.rejects(2, because="right")
