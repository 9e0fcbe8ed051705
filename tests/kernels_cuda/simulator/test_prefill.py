"""Prefill attention, every rung, against float64 in the simulator."""

import numpy as np
import pytest
from chapter import chapter_cells
from paged_numpy import PagedCase

from minivllm_kernels.cuda import planning, prefill
from minivllm_kernels.cuda.planning import AttentionShape

DECODE = chapter_cells("numba_kernels/cuda/decode", "online_softmax", "one_query", "naive")
PREFILL = chapter_cells("numba_kernels/cuda/prefill", "fma_tiles")
TOLERANCE = {"bfloat16": 4e-3, "float16": 8e-4}


def error(rung, tile_rows, shape, query_lens, seq_lens, *, window=None, chunk=None, **more):
    def first_key(position):
        if chunk is not None:
            return position // chunk * chunk
        return 0 if window is None else max(0, position - window + 1)

    case = PagedCase(shape, query_lens, seq_lens, first_key=first_key, **more)
    lens, ends, rows, seqs, floor = case.query_lens, case.seq_lens, case.rows, np.arange(len(seq_lens)), 0
    if chunk is not None:
        lens, ends, rows, which, floor = planning.split_at_chunks(lens, ends, rows, chunk)
        seqs = seqs[which]
    tiles = planning.plan_prefill(lens, ends, rows=rows, seqs=seqs, group=shape.group, tile_rows=tile_rows, floor=floor)
    return case.prefill_error(rung, tiles, window or prefill.NO_WINDOW)


def test_naive():
    """Rung 1 is that of decode, with a work item for each query token."""
    shape, window = AttentionShape("bfloat16", 80, 3, 8), 6
    case = PagedCase(shape, [3, 1], [10, 2], first_key=lambda position: max(0, position - window + 1))
    ends = np.array([8, 9, 10, 2])
    items, slots = planning.cut(np.arange(4), np.array([0, 0, 0, 1]), np.maximum(ends - window, 0), ends, 10**6)
    assert slots == 0
    assert case.decode_error(DECODE.naive(shape), shape.group, planning.DecodePlan(items, 0, 1)) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("dtype, dim, group, block, window", [("float16", 64, 2, 16, None), ("bfloat16", 80, 3, 8, 9)])
def test_fma(dtype, dim, group, block, window):
    shape = AttentionShape(dtype, dim, group, block)
    assert error(PREFILL.fma_tiles(shape), PREFILL.FMA_ROWS, shape, [6, 1], [21, 7], window=window) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "dtype, dim, group, block, extra",
    [
        ("bfloat16", 64, 3, 8, {"window": 9}),
        ("float16", 80, 1, 32, {}),
        ("bfloat16", 96, 7, 16, {"cap": 3.0}),
        ("bfloat16", 128, 2, 64, {"chunk": 12}),
        ("float16", 256, 1, 16, {"kv_heads": 2}),
        ("bfloat16", 64, 3, 8, {"window": 9, "kv_heads": 2, "scales": (0.03, 1.7)}),
        ("float16", 80, 2, 16, {"cap": 3.0, "scales": (2.0, 0.5)}),
        ("bfloat16", 128, 1, 32, {"chunk": 12, "scales": (1.0, 1.0)}),
        ("bfloat16", 64, 3, 8, {"window": 9, "kv_heads": 2, "int8_kv": True}),
        ("float16", 80, 2, 16, {"cap": 3.0, "int8_kv": True}),
        ("bfloat16", 128, 1, 32, {"chunk": 12, "int8_kv": True}),
    ],
)
def test_mma(dtype, dim, group, block, extra):
    kinds = {"fp8_kv": "scales" in extra, "int8_kv": extra.get("int8_kv", False)}
    shape = AttentionShape(dtype, dim, group, block, "cap" in extra, **kinds)
    extra = {name: value for name, value in extra.items() if name != "int8_kv"}
    rung = prefill.mma_tiles(shape, warps=1)
    assert error(rung, prefill.warp_rows(shape), shape, [9, 1], [43, 5], **extra) < TOLERANCE[dtype]
