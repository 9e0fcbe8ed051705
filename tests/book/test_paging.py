"""The puzzles on blocks: every solution is right, every wrong answer is caught by name, and what is drawn is a trace."""

import re

import pytest
from puzzles import load_puzzles

from minivllm.book.paging import Puzzle
from minivllm.viz import BlockMap

PUZZLES = load_puzzles("paging")
WRONG = [(puzzle, function) for puzzle in PUZZLES for function in puzzle.wrong]


def test_there_are_twelve_at_least_and_each_has_its_wrong_answers():
    assert len({puzzle.name for puzzle in PUZZLES}) == len(PUZZLES) >= 12
    assert all(len(puzzle.wrong) >= 2 for puzzle in PUZZLES)


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)
def test_the_solution_is_right_and_its_story_a_trace(puzzle: Puzzle):
    replay = puzzle.check(puzzle.answer)
    assert replay and replay.text == "right"
    assert len(replay.captions) == replay.trace.num_steps >= 3
    replay.trace.check()
    assert "in use" in str(replay.block_map()) and isinstance(replay.block_map(), BlockMap)
    assert puzzle.solution.startswith("def _")


@pytest.mark.parametrize(("puzzle", "function"), WRONG, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_a_wrong_answer_is_caught_at_its_step(puzzle: Puzzle, function):
    verdict = puzzle.check(function)
    assert not verdict
    assert puzzle.wrong[function] in verdict.text
    step = re.match(r"step (\d+) \(", verdict.text)
    assert step and int(step[1]) == len(verdict.captions), "the picture ends at the step in question"
    assert verdict._repr_html_().startswith("<pre>step") and "<svg" in verdict._repr_html_()
    assert puzzle.show(function).captions[: len(verdict.captions)] == verdict.captions


def test_what_the_reader_s_code_does_is_the_verdict_on_it():
    slot = PUZZLES[0]

    def raises(table, position, size):
        return table[position] * size

    def dots(table, position, size): ...

    def other(table, place):
        return 0

    assert slot.check(raises).text == "step 4 (where is token 5 of a?): it raised IndexError: list index out of range"
    assert slot.check(dots).text.startswith("no answer yet")
    assert slot.check(other).text.startswith("the function of this puzzle takes (table, position, size): ")
    assert slot.check(lambda blocks, i, n: blocks[i // n] * n + i % n), "arguments may have other names"


def test_a_function_that_also_returns_what_it_changed_is_right():
    def returns_its_table(table, free, num_tokens, size):
        PUZZLES[1].answer(table, free, num_tokens, size)
        return table

    assert PUZZLES[1].check(returns_its_table)


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)
@pytest.mark.parametrize("value", [None, 7, [], {}, [("a", 1)]], ids=repr)
def test_an_answer_of_the_wrong_kind_is_a_verdict(puzzle: Puzzle, value):
    assert "step" in puzzle.check(lambda *given: value).text
    assert puzzle.show(lambda *given: value).captions


def test_a_block_that_somebody_holds_cannot_be_taken_twice():
    """The story goes on as far as it can, and says why not further."""
    allocate = PUZZLES[1]

    def twice(table, free, num_tokens, size):
        while len(table) * size < num_tokens:
            table.append(free[0])

    assert "the story cannot go on" in allocate.show(twice).text
    assert allocate.check(twice).text.startswith("step 1 (a has 10 tokens): table[1] should be 1, and is 3")


def test_the_style_of_a_picture_reaches_nothing_else_on_the_page():
    (style,) = re.findall(r"<style>(.*?)</style>", PUZZLES[0].show(PUZZLES[0].answer).svg())
    assert all(rule.startswith(".story ") for rule in style.split("}") if rule)
