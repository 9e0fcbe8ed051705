"""The one-shot all-reduce in the simulator: each rank is a process, and they do wait for each other."""

import multiprocessing
import time
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from paged_numpy import to_float, to_half, words

from minivllm_kernels.cuda import all_reduce
from minivllm_kernels.cuda.all_reduce import MOST_RANKS, buffer_bytes, one_shot, region_pieces, split_pieces

THREADS, HIDDEN = 4, 16
SIZES = (1, 6, 3, 1)  # tokens of each sum: blocks come and go
ROOM = region_pieces(max(SIZES) * HIDDEN * 4, THREADS)


def inputs(dtype: str, ranks: int) -> list[np.ndarray]:
    """float32 [ranks, tokens, HIDDEN] for each sum, numbers that `dtype` has."""
    rng = np.random.default_rng(ranks)
    numbers = [rng.standard_normal((ranks, tokens, HIDDEN)).astype(np.float32) for tokens in SIZES]
    return numbers if dtype == "float32" else [to_float(to_half(x, dtype), dtype) for x in numbers]


def slow_down(load, seconds: float):
    def slow(address):
        time.sleep(seconds)
        return load(address)

    return slow


def rank_process(rank: int, ranks: int, dtype: str, names: list[str], polls: int, results) -> None:
    memory = [SharedMemory(name) for name in names]
    addresses = np.array([np.frombuffer(m.buf, np.uint8).ctypes.data for m in memory])
    kernel = one_shot(dtype, ranks, THREADS, polls)
    if rank == 1:  # it still reads when the others have begun the next sum
        all_reduce.load_there = slow_down(all_reduce.load_there, 0.03)
    try:
        outputs = []
        for numbers in inputs(dtype, ranks):
            x = numbers[rank].copy() if dtype == "float32" else to_half(numbers[rank], dtype)
            pieces = x.nbytes // 16
            blocks, each = split_pieces(pieces, THREADS)
            time.sleep(0.02 * (rank == 0 and len(outputs) == 2))  # and once it is the first to come
            kernel.simulate((blocks, 1), words(x), addresses, rank, pieces, each, ROOM)
            outputs.append(x)
        results.put((rank, outputs))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        results.put((rank, str(error)))
    results.close()
    results.join_thread()


def run_ranks(dtype: str, ranks: int, started: int, polls: int = 1 << 26) -> dict:
    """What each rank has in the end, if only the first `started` of them run. Each sees the buffers at addresses of its own."""
    context = multiprocessing.get_context("fork")
    memory = [SharedMemory(create=True, size=buffer_bytes(ROOM)) for _ in range(ranks)]
    results, names = context.Queue(), [m.name for m in memory]
    try:
        processes = [
            context.Process(target=rank_process, args=(rank, ranks, dtype, names, polls, results))
            for rank in range(started)
        ]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=120) for _ in processes)
        for process in processes:
            process.join()
        return found
    finally:
        for m in memory:
            m.close()
            m.unlink()


@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 2), ("float16", 3), ("float32", 2)])
def test_ranks_that_come_at_any_time_get_the_same_sum(dtype, ranks):
    found = run_ranks(dtype, ranks, ranks)
    for i, numbers in enumerate(inputs(dtype, ranks)):
        total = numbers[0].copy()
        for rank in range(1, ranks):
            total += numbers[rank]
        want = total if dtype == "float32" else to_half(total, dtype)
        for rank in range(ranks):
            np.testing.assert_array_equal(found[rank][i], want)


def test_a_rank_that_never_comes_is_an_error():
    assert run_ranks("float16", 2, 1, polls=20)[0].endswith("a rank waited too long for another")


def test_the_pieces_are_shared_out():
    assert split_pieces(1) == (1, 1) and split_pieces(512) == (1, 512) and split_pieces(513) == (2, 257)
    for most in (1 << 13, 1 << 20, 3 << 20):
        for pieces in (1, 511, 1024, most // 16):
            blocks, each = split_pieces(pieces)
            assert blocks * each >= pieces > (blocks - 1) * each and each <= region_pieces(most) and blocks <= 128
    with pytest.raises(ValueError, match=f"for 2 to {MOST_RANKS} ranks, not for 9"):
        one_shot("bfloat16", 9)
