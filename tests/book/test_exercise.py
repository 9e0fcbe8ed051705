"""The one form of all exercises."""

import asyncio

import numpy as np
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
    assert str(check_half(1, 2)) == "give one answer: put several values into a list"
    assert str(check_half()) == "give an answer"
    assert str(check_half(lambda: 1)) == "your function takes 0 arguments, and it is called with 1"
    assert str(check_half(lambda a, b: 1)) == "your function takes 2 arguments, and it is called with 1"


def test_a_class_where_an_object_is_wanted_is_explained():
    class Policy:
        def order(self, waiting):
            return sorted(waiting)

    @Exercise
    def check_policy(answer):
        return None if answer.order([2, 1]) == [1, 2] else "not sorted"

    assert check_policy(Policy())
    assert "this is a class, and an object of it is wanted: put () behind its name" in str(check_policy(Policy))


def test_pass_is_an_answer_and_dots_are_none():
    class Counts:
        __module__ = "__main__"

        def __init__(self):
            pass

        def order(self, waiting):
            return sorted(waiting)

    assert not is_blank(Counts) and not is_blank(Counts())
    assert is_blank(Unwritten)


@pytest.mark.parametrize("answer", [[3, 5], (3, 5), np.array([3, 5]), [np.int64(3), 5.0], range(3, 6, 2)])
def test_every_form_of_a_sequence_is_the_same_answer(answer):
    @Exercise
    def check_pair(answer):
        return None if answer == [3, 5] and answer != (3, 4) and answer[:1] == (3,) else f"not {answer}"

    @Exercise
    def check_returned(answer):
        return None if answer() == (3, 5) and answer() in [[3, 5]] else f"not {answer()}"

    assert check_pair(answer)
    assert check_returned(lambda: answer)
    assert str(check_pair(list(answer)[:1])) == f"not {list(answer)[:1]}"


def test_arguments_may_have_other_names_where_they_are_called_by_name():
    @Exercise
    def check_area(answer):
        sizes = [(2, 3), (4, 5)]
        return None if [answer(width=w, height=h) for w, h in sizes] == [w * h for w, h in sizes] else "not the area"

    assert check_area(lambda width, height: width * height) and check_area(lambda a, b: a * b)


def test_accepts_finds_a_checker_that_is_too_strict_or_too_lax():
    @Exercise
    def wants_a_list(answer):
        return None if isinstance(answer, list | tuple) and type(answer[0]) is int and "x" not in repr(answer) else "no"

    @Exercise
    def looks_once(answer):
        return None if answer(2) == 4 else "twice 2 is 4"

    @Exercise
    def takes_nothing(answer):
        return next((f"not {item}" for item in answer if item > 2), None)

    wants_a_list.accepts([1, 2])
    with pytest.raises(AssertionError, match="a function that always returns 4 was accepted"):
        looks_once.accepts(lambda n: 2 * n)
    with pytest.raises(AssertionError, match="an empty list was accepted"):
        takes_nothing.accepts([1, 2])
    strict = Exercise(lambda answer: None if repr(answer) == "[1, 2]" else f"not {answer}")
    with pytest.raises(AssertionError, match="the solution as a tuple was refused"):
        strict.accepts([1, 2])


def test_other_guesses():
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
