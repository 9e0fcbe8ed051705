"""Counter-based random numbers with a seed per request."""

# Generated from nbs/sampling/random.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import threading

import numpy as np
import numpy.typing as npt

__all__ = ["RequestSeeds", "as_seed", "mix64", "random_bits", "uniforms"]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: steps of it visit every 64-bit number
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = (np.uint64(shift) for shift in (27, 30, 31, 11))

Uint64s = npt.NDArray[np.uint64]


def mix64(x: Uint64s) -> Uint64s:
    """The finaliser of SplitMix64: a bijection of the 64-bit numbers that flips about half of the bits for any change."""
    x = (x ^ (x >> _S30)) * _MULTIPLY_1
    x = (x ^ (x >> _S27)) * _MULTIPLY_2
    return x ^ (x >> _S31)


def random_bits(seeds: Uint64s, counters: npt.NDArray[np.integer]) -> Uint64s:
    """64 random bits per row from (seed, counter). Two arrays of one shape in, uint64 of that shape out."""
    steps = counters.astype(np.uint64) + np.uint64(1)
    return mix64(mix64(seeds + _GAMMA) + steps * _GAMMA)


def uniforms(seeds: Uint64s, counters: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """One float64 per row in [0, 1), a multiple of 2**-53, from (seed, number of output tokens)."""
    return (random_bits(seeds, counters) >> _S11).astype(np.float64) * np.float64(2.0**-53)


def as_seed(seed: int) -> np.uint64:
    """Any Python integer as a 64-bit seed (modulo 2**64, so negative ones are welcome)."""
    return np.uint64(seed % 2**64)


class RequestSeeds:
    """Seeds for requests that bring none: the k-th call gives the k-th number of the engine's own sequence."""

    def __init__(self, engine_seed: int) -> None:
        self._seed, self._count, self._ready = as_seed(engine_seed), 0, list[int]()
        self._lock = threading.Lock()  # an AsyncLLM reads prompts in several threads

    def __call__(self) -> int:
        """The next seed, an integer in [0, 2**64)."""
        with self._lock:
            if not self._ready:
                counters = np.arange(self._count, self._count + 64)
                self._ready = random_bits(np.full(64, self._seed), counters)[::-1].tolist()
                self._count += 64
            return self._ready.pop()
