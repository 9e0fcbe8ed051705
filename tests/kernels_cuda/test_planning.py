"""Work lists: every token read once, balanced, and refused when they make no sense."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm_kernels.cuda import planning
from minivllm_kernels.cuda.planning import TILE, AttentionShape, plan_decode, plan_prefill, split_at_chunks


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    st.integers(1, 16),
    st.sampled_from([None, 1, 37, 1000]),
    st.sampled_from([4, 8]),
    st.booleans(),
)
def test_every_token_is_read_once(lens, heads, window, max_warps, invariant):
    lens = np.array(lens)
    first = None if window is None else np.maximum(lens - window, 0)
    plan = plan_decode(lens, heads=heads, first=first, max_warps=max_warps, batch_invariant=invariant)
    seen = [np.zeros(n, int) for n in lens]
    slots = []
    for seq, row, low, high, slot, first_slot, parts, _ in plan.items:
        assert row == seq and low < high
        seen[seq][low:high] += 1
        assert parts <= planning.MAX_PARTS and (slot < 0) == (parts == 1)
        if slot >= 0:
            assert first_slot <= slot < first_slot + parts
            slots.append(slot)
    assert sorted(slots) == list(range(plan.slots)) and plan.warps <= max_warps
    for n, reads, low in zip(lens, seen, np.zeros_like(lens) if first is None else first, strict=True):
        assert (reads[low:n] == 1).all() and not reads[:low].any()
    tiles = -(-plan.items[:, 3] // TILE) - plan.items[:, 2] // TILE
    if len(lens) * heads <= 2 * 3 * 132:
        assert (np.diff(tiles) <= 0).all(), "the heaviest item must come first"


@pytest.mark.parametrize("count", [1, 200, 1023, 1024, 5000, 60_000])
@pytest.mark.parametrize("heads", [1, 8])
def test_many_sequences_fit_the_largest_rung(count, heads):
    """Whatever their lengths: work lists are padded to a rung, and CUDA graphs are captured for it."""
    for seed, longest in enumerate((1, 100, 20_000)):
        lens = np.random.default_rng(seed).integers(1, longest + 1, count)
        lens[0] = longest
        plan = plan_decode(lens, heads=heads)
        assert len(plan.items) <= planning.item_rungs(count, heads)[-1] <= planning.MAX_ITEMS


def test_the_invariant_cut_depends_on_the_own_length_alone():
    def pieces(lens):
        items = plan_decode(lens, heads=8, batch_invariant=True).items
        return sorted((low, high) for seq, _, low, high, *_ in items.tolist() if seq == 0)

    assert pieces([3000]) == pieces([3000, 5, 16000]) == pieces([3000] * 200)
    assert len(pieces([100_000])) <= planning.MAX_PARTS


def test_a_long_sequence_does_not_hold_up_a_ragged_batch():
    rng = np.random.default_rng(0)
    lens = np.exp(rng.uniform(np.log(16), np.log(16384), 64)).astype(int)
    plan = plan_decode(lens, heads=8)
    heaviest = (plan.items[:, 3] - plan.items[:, 2]).max()
    resident = {8: 1, 4: 3, 2: 6}[plan.warps] * 132
    assert heaviest <= 2 * TILE * -(-lens.sum() * 8 // TILE // resident)


def ends_of_items(lens, heads=8, slots=3 * 132):
    """When each block of a plan ends, in tokens, if it goes to the slot that is free first and a slot reads one token at a time."""
    items = plan_decode(lens, heads=heads).items
    free, ends = [0] * slots, []
    for size in np.repeat(items[:, planning.WORK_END] - items[:, planning.WORK_FIRST], heads):
        ends.append(free[0] + int(size))
        heapq.heapreplace(free, ends[-1])
    return np.sort(ends), np.sort(free)


SEVERAL_WAVES = [
    np.full(256, 640),
    np.full(256, 1024),
    np.full(200, 700),
    np.random.default_rng(0).integers(600, 760, 256),
]


@pytest.mark.parametrize("lens", SEVERAL_WAVES)
def test_the_slots_end_together(lens):
    """Hardly later than with work shared out evenly."""
    assert ends_of_items(lens)[1][-1] < 1.07 * lens.sum() * 8 / (3 * 132)


@pytest.mark.parametrize("lens", SEVERAL_WAVES)
def test_blocks_end_at_different_times(lens):
    """In a sixth of the time of a sequence, about half of the slots may end a block. All would if each wave were of equal blocks."""
    ends = ends_of_items(lens)[0]
    within = np.searchsorted(ends, ends + lens.mean() / 6, "right") - np.arange(len(ends))
    before_the_last_wave = ends < ends[-1] - 1.5 * lens.mean()
    assert within[before_the_last_wave].max() < 0.55 * 3 * 132


def test_a_few_short_sequences_are_not_cut():
    """A piece of fewer than eight tiles costs more than it saves."""
    assert plan_decode([7 * TILE] * 256, heads=8).slots == 0
    items = plan_decode([20 * TILE] * 256, heads=8).items
    assert (items[:, planning.WORK_END] - items[:, planning.WORK_FIRST]).min() >= 4 * TILE


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=20),
    st.integers(1, 16),
    st.sampled_from([1, 16, 128]),
)
def test_prefill_tiles_cover_every_row_once(requests, group, tile_rows):
    lens = np.array([n for n, _ in requests])
    ends = lens + [context for _, context in requests]
    rows = np.cumsum([0, *lens])[:-1]
    tiles = plan_prefill(lens, ends, rows=rows, seqs=np.arange(len(lens)), group=group, tile_rows=tile_rows)
    for s, n in enumerate(lens):
        own = tiles[tiles[:, 0] == s]
        assert sorted(own[:, 4]) == list(range(0, n * group, tile_rows))
        assert (own[:, 1] == rows[s]).all() and (own[:, 2] == n).all() and (own[:, 3] == ends[s] - n).all()


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 50))
def test_pieces_of_chunked_attention(new, context, chunk):
    pieces = split_at_chunks(np.array([new]), np.array([new + context]), np.array([7]), chunk)
    seen = []
    for length, end, row, which, floor in zip(*pieces, strict=True):
        assert which == 0 and row - 7 == end - length - context and length > 0
        assert all(position // chunk * chunk == floor for position in range(end - length, end))
        seen += range(end - length, end)
    assert seen == list(range(context, context + new))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("float32", 64, 1, 16), "bfloat16 and float16, not for float32"),
        (("bfloat16", 72, 1, 16), "head_dim 72 is not built"),
        (("bfloat16", 64, 17, 16), "17 query heads"),
        (("bfloat16", 64, 1, 12), "block_size 12"),
    ],
)
def test_shapes_that_are_not_built(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionShape(*arguments)


def test_plans_that_make_no_sense():
    with pytest.raises(ValueError, match="at least one"):
        plan_decode([], heads=1)
    with pytest.raises(ValueError, match="at least one"):
        plan_decode([3, 0], heads=1)
    with pytest.raises(ValueError, match="at most 65535 work items, and 70000 sequences make 70000"):
        plan_decode([1] * 70_000, heads=1)
    with pytest.raises(ValueError, match="between 1 and seq_len"):
        plan_prefill(np.array([4]), np.array([3]), rows=np.zeros(1), seqs=np.zeros(1), group=1, tile_rows=16)
