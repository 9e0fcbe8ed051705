"""The persistent batch against plain Python lists, through random lives of requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.runtime.input_batch import BlockTable, InputBatch

MAX_SEQS, MAX_LEN = 5, 60


class ListBatch:
    """The same, the slow and obvious way."""

    def __init__(self, block_sizes):
        self.block_sizes = block_sizes
        self.tokens, self.computed, self.blocks = {}, {}, {}

    def prepare(self, scheduled):
        ids, positions, starts, lens = [], [], [0], []
        slots = [[] for _ in self.block_sizes]
        for name, n in scheduled.items():
            first = self.computed[name]
            for position in range(first, first + n):
                ids.append(self.tokens[name][position])
                positions.append(position)
                for g, size in enumerate(self.block_sizes):
                    slots[g].append(self.blocks[name][g][position // size] * size + position % size)
            starts.append(starts[-1] + n)
            lens.append(first + n)
        return ids, positions, starts, lens, slots


@given(data=st.data(), block_sizes=st.sampled_from([[4], [3, 6], [16, 16]]))
def test_equals_lists_through_random_lives(data, block_sizes):
    batch, lists = InputBatch(MAX_SEQS, MAX_LEN, block_sizes), ListBatch(block_sizes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for step in range(data.draw(st.integers(1, 12))):
        for name in [r for r in lists.tokens if rng.random() < 0.2]:
            batch.drop(name)
            for held in (lists.tokens, lists.computed, lists.blocks):
                del held[name]
        while len(lists.tokens) < MAX_SEQS and rng.random() < 0.7:
            name, length = f"{step}-{len(lists.tokens)}", int(rng.integers(1, MAX_LEN // 2))
            lists.tokens[name] = rng.integers(0, 1000, length).tolist()
            lists.computed[name] = int(rng.integers(0, length))
            lists.blocks[name] = [[int(b) for b in rng.integers(1, 99, -(-length // size))] for size in block_sizes]
            batch.add(name, lists.tokens[name], lists.computed[name], tuple(lists.blocks[name]))
        ready = [r for r in lists.tokens if lists.computed[r] < len(lists.tokens[r])]
        chosen = [r for r in rng.permutation(ready) if rng.random() < 0.8]
        scheduled = {str(r): int(rng.integers(1, len(lists.tokens[r]) - lists.computed[r] + 1)) for r in chosen}
        if not scheduled:
            continue
        got = batch.prepare(scheduled)
        ids, positions, starts, lens, slots = lists.prepare(scheduled)
        assert got.request_ids == list(scheduled)
        assert got.token_ids.tolist() == ids and got.token_ids.dtype == np.int64
        assert got.positions.tolist() == positions and got.positions.dtype == np.int64
        for g, size in enumerate(block_sizes):
            attention = got.attention[g]
            attention.check(size)
            assert attention.query_start_loc.tolist() == starts and attention.query_start_loc.dtype == np.int32
            assert attention.seq_lens.tolist() == lens and attention.seq_lens.dtype == np.int32
            assert attention.slot_mapping.tolist() == slots[g] and attention.slot_mapping.dtype == np.int64
            for row, name in enumerate(scheduled):
                held = lists.blocks[name][g]
                assert attention.block_table[row, : len(held)].tolist() == held
        ends = [lists.computed[r] + n == len(lists.tokens[r]) for r, n in scheduled.items()]
        assert got.samples.tolist() == ends
        assert got.last_token.tolist() == [s - 1 for s in starts[1:]]

        batch.num_computed[got.rows] += got.counts
        for name, n in scheduled.items():
            lists.computed[name] += n
        sampled = [r for r, end in zip(scheduled, ends, strict=True) if end]
        new = rng.integers(0, 1000, len(sampled))
        batch.append_tokens(got.rows[got.samples], new)
        for name, token in zip(sampled, new.tolist(), strict=True):
            lists.tokens[name].append(token)
            for g, size in enumerate(block_sizes):
                if len(lists.blocks[name][g]) * size < len(lists.tokens[name]):
                    lists.blocks[name][g].append(int(rng.integers(1, 99)))
                    batch.append_blocks(
                        name, tuple(lists.blocks[name][h][-1:] if h == g else [] for h in range(len(block_sizes)))
                    )


def test_rows_are_used_again_and_a_taken_name_is_refused():
    batch = InputBatch(2, 8, [4])
    for i in range(10):
        batch.add(f"r{i}", [1, 2, 3], 0, ([1],))
        assert f"r{i}" in batch and len(batch) == 1
        with pytest.raises(ValueError, match="already has a row"):
            batch.add(f"r{i}", [1], 0, ([2],))
        batch.drop(f"r{i}")
    assert len(batch) == 0
    batch.drop("never there")


def test_a_row_that_is_full_keeps_its_tokens():
    """The last sampled token of a request at max_model_len has no place; the request ends with it."""
    batch = InputBatch(2, 4, [4])
    batch.add("full", [1, 2, 3, 4], 3, ([1],))
    batch.add("other", [5], 0, ([2],))
    step = batch.prepare({"full": 1, "other": 1})
    batch.append_tokens(step.rows, np.array([9, 6]))
    assert batch.token_ids[step.rows[0]].tolist() == [1, 2, 3, 4]
    assert batch.token_ids[step.rows[1], :2].tolist() == [5, 6]


def test_more_blocks_than_the_longest_request_may_have():
    table = BlockTable(1, 8, 4)
    table.append(0, [1, 2])
    with pytest.raises(IndexError, match="has 2 blocks and gets 1; at most 2 fit"):
        table.append(0, [3])
