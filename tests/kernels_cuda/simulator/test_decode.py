"""Decode attention, every rung, against float64 in the simulator."""

import numpy as np
import pytest
from chapter import chapter_cells
from paged_numpy import PagedCase

from minivllm_kernels.cuda import decode, planning
from minivllm_kernels.cuda.planning import AttentionShape

RUNGS = chapter_cells("numba_kernels/cuda/decode", "online_softmax", "one_query", "naive", "fma_parts")
TOLERANCE = {"bfloat16": 4e-3, "float16": 8e-4}


def case_and_plan(shape, lens, *, chunk=10**6, window=None, cap=None, kv_heads=1, scales=(1.0, 1.0)):
    def first_key(position):
        return 0 if window is None else max(0, position - window + 1)

    case = PagedCase(shape, [1] * len(lens), lens, first_key=first_key, cap=cap, kv_heads=kv_heads, scales=scales)
    first = np.array([first_key(n - 1) for n in lens])
    items, slots = planning.cut(np.arange(len(lens)), np.arange(len(lens)), first, np.array(lens), chunk)
    nothing = np.zeros((1, 8), np.int32)
    nothing[:, 0] = -1  # padding items, as a captured graph has them, do nothing
    return case, planning.DecodePlan(np.concatenate([items, nothing]), slots, 1)


@pytest.mark.parametrize("dtype, dim, group, block, cap", [("bfloat16", 80, 3, 8, None), ("float16", 64, 2, 16, 3.0)])
def test_naive(dtype, dim, group, block, cap):
    shape = AttentionShape(dtype, dim, group, block, cap is not None)
    case, plan = case_and_plan(shape, [11, 1], cap=cap)
    assert case.decode_error(RUNGS.naive(shape), group, plan) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "dtype, dim, group, block, window, cap",
    [("float16", 96, 5, 16, None, None), ("bfloat16", 64, 1, 8, 20, 3.0), ("bfloat16", 256, 2, 32, None, None)],
)
def test_fma(dtype, dim, group, block, window, cap):
    shape = AttentionShape(dtype, dim, group, block, cap is not None)
    case, plan = case_and_plan(shape, [37, 5], chunk=1, window=window, cap=cap)
    assert plan.slots
    kernel = RUNGS.fma_split_kv(shape, warps=2)
    assert case.decode_error(kernel, RUNGS.fma_parts(shape), plan) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "dtype, dim, group, block, window, cap, kv_heads, warps",
    [
        ("bfloat16", 64, 2, 16, None, None, 2, 2),
        ("float16", 80, 9, 8, 21, None, 1, 1),
        ("bfloat16", 96, 3, 32, None, 3.0, 1, 1),
        ("bfloat16", 128, 4, 64, 18, None, 1, 1),
        ("float16", 256, 1, 16, None, None, 1, 1),
        ("bfloat16", 64, 16, 16, None, None, 1, 1),
    ],
)
def test_mma(dtype, dim, group, block, window, cap, kv_heads, warps):
    shape = AttentionShape(dtype, dim, group, block, cap is not None)
    case, plan = case_and_plan(shape, [52, 3], chunk=2, window=window, cap=cap, kv_heads=kv_heads)
    kernel = decode.mma_split_kv(shape, warps=warps)
    assert case.decode_error(kernel, kv_heads * decode.mma_parts(shape), plan) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "dtype, dim, group, block, window, cap, kv_heads, warps",
    [
        ("bfloat16", 64, 2, 16, None, None, 2, 2),
        ("float16", 80, 9, 8, 21, None, 1, 1),
        ("bfloat16", 96, 3, 32, None, 3.0, 1, 1),
        ("bfloat16", 256, 1, 64, None, None, 1, 1),
    ],
)
def test_mma_of_an_fp8_cache(dtype, dim, group, block, window, cap, kv_heads, warps):
    shape = AttentionShape(dtype, dim, group, block, cap is not None, fp8_kv=True)
    more = {"window": window, "cap": cap, "kv_heads": kv_heads, "scales": (0.03, 1.7)}
    case, plan = case_and_plan(shape, [52, 3], chunk=2, **more)
    kernel = decode.mma_split_kv(shape, warps=warps)
    assert case.decode_error(kernel, kv_heads * decode.mma_parts(shape), plan) < TOLERANCE[dtype]
    for rung in (RUNGS.naive, RUNGS.fma_split_kv):
        with pytest.raises(ValueError, match="an fp8 or int8 cache is read by the mma kernels only"):
            rung(shape)


@pytest.mark.parametrize(
    "dtype, dim, group, block, window, cap, kv_heads, warps",
    [
        ("bfloat16", 64, 2, 16, None, None, 2, 2),
        ("float16", 80, 9, 8, 21, None, 2, 1),
        ("bfloat16", 96, 3, 32, None, 3.0, 1, 1),
        ("bfloat16", 256, 1, 64, None, None, 1, 1),
    ],
)
def test_mma_of_an_int8_cache(dtype, dim, group, block, window, cap, kv_heads, warps):
    shape = AttentionShape(dtype, dim, group, block, cap is not None, int8_kv=True)
    case, plan = case_and_plan(shape, [52, 3], chunk=2, window=window, cap=cap, kv_heads=kv_heads)
    kernel = decode.mma_split_kv(shape, warps=warps)
    assert case.decode_error(kernel, kv_heads * decode.mma_parts(shape), plan) < TOLERANCE["bfloat16"]
    for rung in (RUNGS.naive, RUNGS.fma_split_kv):
        with pytest.raises(ValueError, match="an fp8 or int8 cache is read by the mma kernels only"):
            rung(shape)


def test_the_case_notices_a_kernel_that_reads_too_far():
    shape = AttentionShape("bfloat16", 64, 1, 16)
    case, plan = case_and_plan(shape, [5])
    plan.items[0, 3] += 1
    assert not case.decode_error(RUNGS.naive(shape), 1, plan) < 1
