"""Drafts of the device in the simulator, against plain Python."""

import device_drafts as oracle
import numpy as np
import pytest

from minivllm_kernels.cuda import drafts
from minivllm_kernels.cuda.planning import WORK_END, WORK_FIRST, WORK_ROW, WORK_SEQ, plan_decode

ROWS, LONGEST, K, VOCAB = 5, 300, 4, 50


def known_tokens(rng):
    """Rows of few different tokens, so that n-grams are found; and guesses, some of them missing."""
    ids, counts = rng.integers(0, 4, (ROWS, LONGEST), np.int32), rng.integers(1, 250, ROWS)
    guesses = rng.integers(0, 4, (ROWS, K), np.int32)
    guesses[rng.integers(ROWS)] = drafts.NOT_DRAFTED
    return ids, counts, guesses


@pytest.mark.parametrize("lookup", [None, (1, 3), (2, 4), (5, 5)])
@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_verify_accepts_and_guesses(lookup, synthetic, seed):
    rng = np.random.default_rng(seed)
    ids, counts, guesses = known_tokens(rng)
    rows, drafted = rng.permutation(ROWS)[:3], np.array([K, 0, 2])
    first = np.cumsum(drafted + 1) - drafted - 1
    requests = np.array([*zip(rows, first, drafted, strict=True), (-1, 7, 9)], np.int32)
    tokens = rng.integers(0, 4, int(drafted.sum()) + 3)
    for row, at, n in requests[:3].tolist():  # a beginning is confirmed
        right = rng.integers(0, n + 1)
        tokens[at : at + right] = guesses[row, :right].clip(0)
    luck = rng.integers(0, 2, ids.shape, np.int32) if synthetic else None
    want = [x.copy() for x in (tokens, ids, counts, guesses)]
    compared, expected = np.full(len(tokens), 99), np.full(len(tokens), 99)
    oracle.verify_drafts(want[0], expected, requests, *want[1:], luck, vocab_size=VOCAB, lookup=lookup)
    sizes, given = (LONGEST, K, int(synthetic), VOCAB), np.zeros((1, 1), np.int32) if luck is None else luck
    kernel = drafts.verify_drafts(lookup)
    kernel.simulate((4, 1), tokens, compared, requests, ids, counts, guesses, given, *sizes)
    for name, got, right in zip(
        ("tokens", "ids", "counts", "guesses"), (tokens, ids, counts, guesses), want, strict=True
    ):
        np.testing.assert_array_equal(got, right, name)
    np.testing.assert_array_equal(compared, expected)


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_find_their_places(block_size, seed):
    """Work items end at the true position, and each placed token gets its id, position and slot; others stay."""
    rng = np.random.default_rng(seed)
    ids, counts, guesses = known_tokens(rng)
    counts += 1
    rows, behind = np.array([3, 3, 3, 1, 0, 0]), np.array([0, 1, 2, 0, -1, 1], np.int32)
    known = counts[rows] - 1 + behind
    planned = known + np.where(behind < 0, 1, rng.integers(0, K + 1, len(rows)))  # as if more had been accepted
    plan = plan_decode(planned + 1, heads=2, multiprocessors=4)
    words = rng.permutation(400).astype(np.int32)
    start = 7 + np.arange(len(rows)) * 40  # of each token's row of the block table
    items = np.concatenate([plan.items, np.full((5, 8), -1, np.int32)])
    used = items[: len(plan.items)]
    used[:, WORK_SEQ] = start[used[:, WORK_ROW]]
    before, token_ids, positions, slots = items.copy(), np.full(6, -5), planned.copy(), np.full(6, -6)
    kernel = drafts.place_tokens(block_size)
    grid = -(-len(items) // drafts.THREADS), 1
    state = ids, counts, guesses
    for row in (3, 0):  # twice: at first as if fewer tokens were known
        counts[row] -= 1
    kernel.simulate(grid, token_ids, positions, slots, behind, rows, items, words, *state, len(items), LONGEST, K)
    for row in (3, 0):
        counts[row] += 1
    kernel.simulate(grid, token_ids, positions, slots, behind, rows, items, words, *state, len(items), LONGEST, K)
    for t, row in enumerate(rows):
        mine = used[used[:, WORK_ROW] == t]
        if behind[t] < 0:
            assert (token_ids[t], positions[t], slots[t]) == (-5, planned[t], -6)
            np.testing.assert_array_equal(mine, before[: len(used)][used[:, WORK_ROW] == t])
            continue
        token = ids[row, known[t]] if behind[t] == 0 else max(0, guesses[row, behind[t] - 1])
        block = words[start[t] + known[t] // block_size]
        assert (token_ids[t], positions[t], slots[t]) == (token, known[t], block * block_size + known[t] % block_size)
        assert mine[:, WORK_END].max() <= known[t] + 1
        covered = {x for first, end in mine[:, [WORK_FIRST, WORK_END]] for x in range(first, end)}
        assert covered == set(range(known[t] + 1))
