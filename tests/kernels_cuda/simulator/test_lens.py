"""The lens counts what can be counted by hand; every puzzle takes its answer and tells its wrong kernels what is wrong."""

import re

import numpy as np
import pytest
from numba import cuda
from puzzles import load_puzzles, wrong_kernels

from minivllm.book.kernel_puzzles import Puzzle
from minivllm.book.lens import Lens

PUZZLES = load_puzzles("kernel_puzzles")


def strided(out, x, step):
    i = cuda.threadIdx.x
    out[i] = x[i * step]


@pytest.mark.parametrize(
    ("dtype", "step", "pieces"), [("f4", 1, 4), ("f4", 2, 8), ("f4", 8, 32), ("f8", 1, 8), ("f2", 1, 2)]
)
def test_pieces_of_32_bytes(dtype, step, pieces):
    lens = Lens().run(strided, 1, 32, out=np.zeros(32, dtype), x=np.arange(256).astype(dtype), step=step)
    (row,) = [row for row in lens.table() if row["array"] == "x"]
    assert (row["pieces"], row["instructions"]) == (pieces, 1)
    assert row["needed"] == np.dtype(dtype).itemsize
    assert row["source"] == "out[i] = x[i * step]"


def banked(out, step):
    i = cuda.threadIdx.x
    cells = cuda.shared.array(1024, np.float32)
    out[i] = cells[i * step]


@pytest.mark.parametrize(("step", "ways"), [(0, 1), (1, 1), (2, 2), (3, 1), (8, 8), (31, 1), (32, 32)])
def test_bank_conflicts(step, ways):
    lens = Lens().run(banked, 1, 32, out=np.zeros(32, np.float32), step=step)
    assert [row["ways"] for row in lens.table() if row["space"] == "shared"] == [ways]


def shift(out, x, barrier):
    i = cuda.threadIdx.x
    row = cuda.shared.array(8, np.float32)
    row[i] = x[i]
    if barrier:
        cuda.syncthreads()
    out[i] = row[(i + 1) % 8]


def test_a_barrier_ends_a_race():
    arguments = {"out": np.zeros(8, np.float32), "x": np.arange(8, dtype=np.float32)}
    assert len(Lens().run(shift, 1, 8, **arguments, barrier=False).races()) == 8
    lens = Lens().run(shift, 1, 8, **arguments, barrier=True)
    assert lens.races() == [] and list(arguments["out"]) == [1, 2, 3, 4, 5, 6, 7, 0]
    assert set(lens.arrays) == {"out", "x", "row"}


def test_blocks_have_shared_memory_of_their_own_and_race_in_global_memory():
    arguments = {"out": np.zeros(8, np.float32), "x": np.arange(8, dtype=np.float32)}
    races = Lens().run(shift, 2, 8, **arguments, barrier=True).races()
    assert {w.array for w, _ in races} == {"out"} and {w.block != o.block for w, o in races} == {True}


def astray(out, x):
    i = cuda.threadIdx.x
    out[i, 0] = x[i - 1]


def test_what_is_outside_is_noted_and_harmless():
    x, out = np.arange(3, dtype=np.float32), np.zeros((2, 1), np.float32)
    lens = Lens().run(astray, 1, 3, out=out, x=x)
    assert [(a.array, a.thread, a.index, a.write) for a in lens.outside()] == [("x", 0, -1, False), ("out", 2, 2, True)]
    assert np.isnan(out[0, 0]) and out[1, 0] == 0
    assert (
        'class="o"' in lens.svg()
        and "thread 2 of block 0 writes outside out, at out[2] of shape (2, 1): " in lens.report()
    )


def test_the_style_of_a_picture_reaches_nothing_else_on_the_page():
    (style,) = re.findall(
        r"<style>(.*?)</style>", Lens().run(strided, 1, 1, out=np.zeros(1), x=np.zeros(1), step=1).svg()
    )
    assert all(rule.startswith(".lens ") for rule in style.split("}") if rule)


def test_what_a_lens_cannot_read_is_said():
    with pytest.raises(TypeError, match="takes out, x, step; given: out"):
        Lens().run(strided, 1, 1, out=np.zeros(1))
    with pytest.raises(TypeError, match="1 integers are needed"):
        Lens().run(strided, 1, 1, out=np.zeros(1), x=np.zeros(1), step=0.5)


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)
def test_a_puzzle_takes_its_answer_and_names_each_mistake(puzzle: Puzzle):
    assert puzzle.check(puzzle.answer), puzzle.check(puzzle.answer)
    assert "svg" in puzzle._repr_html_() and puzzle.solution.startswith("def ")
    for kernel, words in wrong_kernels(puzzle):
        verdict = puzzle.check(kernel)
        assert not verdict and words in verdict.text, (kernel.__code__.co_filename, verdict)


def test_there_are_at_least_twelve_puzzles():
    assert len(PUZZLES) >= 12 and len({puzzle.name for puzzle in PUZZLES}) == len(PUZZLES)
    assert all(puzzle.wrong for puzzle in PUZZLES)


def test_an_atomic_addition_is_no_race_and_has_its_line():
    def total(out, a):
        cuda.atomic.add(out, 0, a[cuda.threadIdx.x])

    def mixed(out, a):
        cuda.atomic.add(out, 0, a[cuda.threadIdx.x])
        out[0] = 0

    a = np.arange(8, dtype=np.float32)
    out = np.zeros(1, np.float32)
    lens = Lens().run(total, 1, 8, out=out, a=a)
    assert out[0] == a.sum() and lens.races() == []
    assert any("cuda.atomic.add" in row["source"] and row["array"] == "out" for row in lens.table())
    assert Lens().run(mixed, 1, 8, out=out, a=a).races() != []


def test_indices_may_be_given_one_after_the_other():
    def chained(out, x):
        i = cuda.threadIdx.x
        out[0][i] = x[1][i][0]

    x, out = np.arange(12, dtype=np.float32).reshape(2, 3, 2), np.zeros((1, 3), np.float32)
    lens = Lens().run(chained, 1, 3, out=out, x=x)
    assert out.tolist() == [[6, 8, 10]] and lens.outside() == []
    assert {a.index for a in lens.accesses if a.array == "x"} == {6, 8, 10}
    with pytest.raises(TypeError, match="2 integers are needed"):
        Lens().run(lambda out, x: out.__setitem__(0, 1), 1, 1, out=out, x=x)
