"""The ladder of batch sizes, and the padded work lists of a decode step. No GPU needed."""

import numpy as np
import pytest

from minivllm.runtime.decode_graphs import graph_ladder, rung

planning = pytest.importorskip("minivllm_kernels.cuda.planning")


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 20, 256])
def test_every_batch_has_the_smallest_rung_that_holds_it(largest):
    ladder = graph_ladder(largest)
    assert ladder == tuple(sorted(set(ladder))) and ladder[-1] == largest
    for rows in range(1, largest + 1):
        assert rung(ladder, rows) == min(n for n in ladder if n >= rows)
        assert rung(ladder, rows) < rows + 8
    assert rung(ladder, largest + 1) is None


def test_a_ladder_needs_a_row():
    with pytest.raises(ValueError, match="at least one row, got 0"):
        graph_ladder(0)


@pytest.mark.parametrize("heads", [1, 3, 8, 16, 32])
@pytest.mark.parametrize("max_warps", [4, 8])
def test_no_plan_has_more_work_items_than_the_last_rung(heads, max_warps):
    rng = np.random.default_rng(heads + max_warps)
    for _ in range(60):
        count = int(rng.integers(1, 257))
        lens = rng.integers(1, int(2 ** rng.uniform(1, 15)), count)
        multiprocessors = int(rng.choice([20, 108, 132]))
        plan = planning.plan_decode(lens, heads=heads, multiprocessors=multiprocessors, max_warps=max_warps)
        padded = count + int(rng.integers(0, 8))
        assert len(plan.items) <= planning.item_rungs(padded, heads, multiprocessors, max_warps)[-1]
