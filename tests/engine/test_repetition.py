"""Loops at the end of an output, against brute force."""

from hypothesis import given
from hypothesis import strategies as st

from minivllm.engine.stop_strings import repeated_pattern_size
from minivllm.sampling.params import RepetitionDetectionParams


def brute_force(ids: list[int], low: int, high: int, count: int) -> int | None:
    for p in range(max(1, low), high + 1):
        if len(ids) >= p * count and ids[len(ids) - p * count :] == ids[-p:] * count:
            return p
    return None


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 4), st.integers(0, 8), st.integers(2, 4))
def test_brute_force(ids: list[int], low: int, more: int, count: int) -> None:
    params = RepetitionDetectionParams(min_pattern_size=low, max_pattern_size=low + more, min_count=count)
    assert repeated_pattern_size(ids, params) == brute_force(ids, low, low + more, count)


def test_off() -> None:
    assert repeated_pattern_size([1] * 100, RepetitionDetectionParams()) is None


def test_ordinary_text_costs_one_comparison_for_each_size() -> None:
    class Counting(list):
        looked = 0

        def __getitem__(self, i):
            Counting.looked += 1
            return super().__getitem__(i)

    params = RepetitionDetectionParams(max_pattern_size=50, min_count=5)
    assert repeated_pattern_size(Counting(range(1000)), params) is None
    assert Counting.looked == 2 * 50
