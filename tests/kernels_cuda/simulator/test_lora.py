"""Shrink and expand in the simulator: every mix of adapters by one grid, and NaN wherever they must not look."""

import numpy as np
import pytest
from paged_numpy import relative_error, to_float, to_half, words

from minivllm_kernels.cuda import lora

TOLERANCE = {"bfloat16": 4e-3, "float16": 8e-4}
MIXES = {"none": [-1, -1], "mixed": [2, -1, 0, 2, 2, 2, 2, 1]}


@pytest.mark.parametrize(("mix", "dtype"), [("none", "float16"), ("mixed", "float16"), ("mixed", "bfloat16")])
def test_each_row_has_the_adapter_of_its_slot(dtype, mix):
    """Two adapters leave a part alone, ranks differ, x and out are views with more between their rows."""
    rng = np.random.default_rng(len(mix))
    slots, rows, features, spans, room = np.array(MIXES[mix]), 9, 72, ((0, 24), (24, 32)), 16
    ranks = np.array([[8, 8], [16, 0], [0, 16]], np.int32)
    outputs, parts = spans[-1][1], len(spans)
    x, out = to_half(np.full((rows, features + 8), np.nan), dtype), to_half(np.full((rows, outputs + 8), np.nan), dtype)
    x[: len(slots), :features] = to_half(rng.standard_normal((len(slots), features)), dtype)
    out[: len(slots), :outputs] = to_half(rng.standard_normal((len(slots), outputs)), dtype)
    a = to_half(rng.standard_normal((3, parts, room, features)) / features**0.5, dtype)
    b = to_half(rng.standard_normal((3, room, outputs)), dtype)
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
    work = np.full((1 + rows, 2), 10**6, np.int32)  # what is behind the end of the list means nothing
    work[0], work[1 : 1 + len(order)] = (len(order), 0), np.stack([order, slots[order]], 1)
    before, want = out.copy(), to_float(out, dtype)
    for row in order:
        for part, (start, end) in enumerate(spans):
            n = ranks[slots[row], part]
            h = to_float(x[row, :features], dtype) @ to_float(a[slots[row], part, :n], dtype).T
            want[row, start:end] += h @ to_float(b[slots[row], :n, start:end], dtype)
    h = np.full((rows, parts * room), np.nan, np.float32)
    tiles = -(-rows // lora.ROWS)
    shared = (work, ranks, parts, room)
    kernel = lora.lora_shrink(dtype, features)
    kernel.simulate((tiles, parts * room // lora.RANKS), h, words(x), words(a), *shared, x.shape[1] // 2)
    part_of, there = np.repeat(np.arange(parts, dtype=np.int32), [3, 1]), words(out)
    more = (part_of, parts, room, outputs, out.shape[1] // 2)
    lora.lora_expand(dtype).simulate((tiles, 1), there, h, words(b), work, ranks, *more)
    got = there.view(np.uint16).reshape(out.shape)
    untouched = np.ones(got.shape, bool)
    for row in order:
        for part, (start, end) in enumerate(spans):
            untouched[row, start:end] = ranks[slots[row], part] == 0
    assert (got[untouched] == before[untouched]).all()
    if len(order):
        assert not untouched.all()
        moved = to_float(got[order, :outputs], dtype)
        assert relative_error(moved, want[order, :outputs]) < TOLERANCE[dtype]


def test_a_row_has_the_same_bits_in_any_batch():
    """Whatever lies in the block beside it."""
    rng, features, outputs, room = np.random.default_rng(0), 136, 16, 8
    x = to_half(rng.standard_normal((5, features)), "bfloat16")
    a, b = (to_half(rng.standard_normal(shape), "bfloat16") for shape in ((2, 1, room, features), (2, room, outputs)))
    found = []
    for slots in ([0, 0, 0, 0, 1], [-1, -1, 0, -1, -1]):
        order = np.argsort(slots, kind="stable")[slots.count(-1) :]
        work = np.array([(len(order), 0), *((row, slots[row]) for row in order)], np.int32)
        h, out = np.zeros((5, room), np.float32), np.zeros((5, outputs // 2), np.uint32)
        shared = (work, np.array([[8], [8]], np.int32))
        lora.lora_shrink("bfloat16", features).simulate((2, 2), h, words(x), words(a), *shared, 1, room, features // 2)
        more = (np.zeros(2, np.int32), 1, room, outputs, outputs // 2)
        lora.lora_expand("bfloat16").simulate((2, 1), out, h, words(b), *shared, *more)
        found.append(out[2].tolist())
    assert found[0] == found[1] and any(found[0])


def test_widths_that_the_kernel_does_not_take():
    with pytest.raises(ValueError, match="multiples of 8"):
        lora.lora_shrink("float16", 100)
