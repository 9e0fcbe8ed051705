"""The counter-based generator: exact values, independence of the batch, and statistics."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats

from minivllm.sampling.random import RequestSeeds, as_seed, mix64, random_bits, uniforms

N = 100_000


def split_mix_64(state: int, index: int) -> int:
    """SplitMix64 as published, in Python integers: the output number `index` from a state."""
    mask = 2**64 - 1
    z = (state + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_is_split_mix_64() -> None:
    # the published test vector of SplitMix64 with state 1234567
    assert [split_mix_64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    for seed in (0, 1, 7, 2**64 - 1):
        start = split_mix_64(seed, 0)
        bits = random_bits(np.full(5, seed, np.uint64), np.arange(5))
        assert bits.tolist() == [split_mix_64(start, i) for i in range(5)]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    seeds, counters = np.arange(500, dtype=np.uint64), np.arange(500) % 7
    order = np.random.default_rng(0).permutation(500)
    together = uniforms(seeds, counters)
    assert np.array_equal(uniforms(seeds[order], counters[order]), together[order])
    assert np.array_equal([uniforms(seeds[i : i + 1], counters[i : i + 1])[0] for i in range(500)], together)


def test_range_and_grid() -> None:
    u = uniforms(np.full(N, 3, np.uint64), np.arange(N))
    assert u.min() >= 0
    assert u.max() < 1
    assert np.array_equal(u * 2**53, np.floor(u * 2**53))


def test_mix64_is_a_bijection_on_a_sample() -> None:
    assert len(np.unique(mix64(np.arange(N, dtype=np.uint64)))) == N


def sequences() -> dict[str, np.ndarray]:
    zero = np.zeros(N, np.int64)
    return {
        "counter": uniforms(np.full(N, 42, np.uint64), np.arange(N)),
        "seed": uniforms(np.arange(N, dtype=np.uint64), zero),
        "even seeds": uniforms(np.arange(0, 2 * N, 2, dtype=np.uint64), zero),
        "high seed bits": uniforms(np.arange(N, dtype=np.uint64) << np.uint64(40), zero),
        "diagonal": uniforms(np.arange(N, dtype=np.uint64), np.arange(N)),
    }


@pytest.mark.parametrize("name", list(sequences()))
def test_statistics(name: str) -> None:
    u = sequences()[name]
    assert stats.chisquare(np.histogram(u, 256, (0, 1))[0]).pvalue > 1e-3
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    pairs = np.histogram2d(u[:-1:2], u[1::2], bins=32, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3
    triples = np.histogramdd(u[: N // 3 * 3].reshape(-1, 3), bins=8, range=[(0, 1)] * 3)[0]
    assert stats.chisquare(triples.ravel()).pvalue > 1e-3
    low = (u * 2**20) % 1.0  # the lower bits, on their own
    assert stats.chisquare(np.histogram(low, 256, (0, 1))[0]).pvalue > 1e-3
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 4 / np.sqrt(N)


def test_request_seeds_repeat_and_differ() -> None:
    first, again, other = RequestSeeds(0), RequestSeeds(0), RequestSeeds(1)
    seeds = [first() for _ in range(1000)]
    assert seeds == [again() for _ in range(1000)]
    assert seeds == random_bits(np.full(1000, as_seed(0)), np.arange(1000)).tolist()
    assert len(set(seeds) | {other() for _ in range(1000)}) == 2000


def test_threads_draw_different_seeds() -> None:
    draw, interval = RequestSeeds(0), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            seeds = [seed for some in pool.map(lambda _: [draw() for _ in range(1000)], range(8)) for seed in some]
    finally:
        sys.setswitchinterval(interval)
    assert sorted(seeds) == sorted(random_bits(np.full(8000, as_seed(0)), np.arange(8000)).tolist())


def test_any_integer_is_a_seed() -> None:
    assert as_seed(-1) == 2**64 - 1
    assert as_seed(2**64) == 0
