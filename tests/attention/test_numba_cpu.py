"""The compiled CPU backend against dense float64 attention, with poisoned holes; and bit for bit against itself."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention.test_backends import CPU, Case, make_spec, ragged
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.attention.numba_cpu import NumbaCPUBackend, NumbaCPUInvariantBackend
from minivllm_kernels.cpu.compile import compile_kernel

pytest.importorskip("numba")
BACKEND = NumbaCPUBackend()
# Every distinct shape is compiled once, so there are few: the default model's, and one small and odd.
SHAPES = {
    "smollm2": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 16},
    "small": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "block_size": 32},
}
WIDE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 96, "block_size": 32}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
LOCAL = st.one_of(
    st.just({}), st.integers(1, 40).map(lambda n: {"sliding_window": n}), st.integers(1, 40).map(lambda n: {"chunk": n})
)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25, deadline=None)
@given(ragged(), LOCAL, st.booleans(), st.integers(0, 1000))
def test_equals_dense_float64(shape, dtype, requests, local, hide_unseen, seed):
    case = Case(make_spec(**SHAPES[shape], **local, dtype=dtype), requests, seed)
    assert BACKEND.unsupported(case.spec, CPU) is None
    got = case.run(BACKEND, hide_unseen=hide_unseen)
    right(case, got)


def right(case, got, tolerance=1e-5):
    tolerance = tolerance if case.spec.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), case.expected(), atol=tolerance, rtol=tolerance)


@DTYPES
@pytest.mark.parametrize("shape", [SHAPES["smollm2"], WIDE], ids=["smollm2", "wide"])
def test_long_contexts_are_split_and_joined(shape, dtype):
    for requests in ([(1, 1500)], [(1, 700), (5, 1300), (300, 900)], [(2, 1500)]):
        case = Case(make_spec(**shape, dtype=dtype), requests)
        right(case, case.run(BACKEND))


@DTYPES
def test_soft_cap(dtype):
    case = Case(make_spec(**SHAPES["smollm2"], soft_cap=5.0, dtype=dtype), [(1, 90), (7, 40)])
    right(case, case.run(BACKEND), 1e-4)


@DTYPES
def test_an_invariant_row_is_the_same_in_any_chunk(dtype):
    """Also of one token, which the tile unit would not have."""
    spec, backend = make_spec(**SHAPES["smollm2"], dtype=dtype), NumbaCPUInvariantBackend()
    case = Case(spec, [(40, 90)])
    whole = case.run(backend)
    for queries in (1, 3, 17):
        part = Case(spec, [(queries, 90)])
        part.kv, part.q = case.kv, case.q[40 - queries :]
        assert torch.equal(part.run(backend), whole[40 - queries :])


@DTYPES
def test_a_row_is_the_same_alone_in_a_crowd_and_in_other_blocks(dtype):
    spec = make_spec(**SHAPES["smollm2"], dtype=dtype)
    crowd = Case(spec, [(1, 600), (40, 300), (1, 33), (9, 9)])
    together = crowd.run(BACKEND)
    start = 0
    for i, (queries, _) in enumerate(crowd.requests):
        alone = replace_requests(crowd, i, start, queries)
        for seed in (1, 2):
            alone.rng.bit_generator.state = type(crowd)(spec, [(1, 1)], seed).rng.bit_generator.state
            assert torch.equal(alone.run(BACKEND), together[start : start + queries])
        start += queries


def replace_requests(case, i, start, queries):
    alone = Case(case.spec, [case.requests[i]])
    alone.q, alone.kv = case.q[start : start + queries].clone(), [case.kv[i]]
    return alone


@DTYPES
@pytest.mark.parametrize("odd", [{17: -1}, {17: 34, 18: 33}, {17: 150}], ids=["left out", "exchanged", "elsewhere"])
def test_each_token_is_written_to_its_own_slot(dtype, odd):
    """Also among sixteen that fill places side by side but for one."""
    spec = make_spec(**SHAPES["smollm2"], dtype=dtype)
    slots = torch.arange(16, 96)
    for token, slot in odd.items():
        slots[token] = slot
    k, v = (torch.randn(80, 3, 64).to(dtype) for _ in range(2))
    together, alone = (torch.zeros(BACKEND.kv_cache_shape(12, spec), dtype=dtype) for _ in range(2))
    BACKEND.write(k, v, together, slots)
    for i in range(80):
        BACKEND.write(k[i : i + 1], v[i : i + 1], alone, slots[i : i + 1])
    assert torch.equal(together, alone) and alone.abs().sum() > 0


def test_what_it_cannot_do_is_said_in_words():
    spec = make_spec(**SHAPES["smollm2"])
    assert "float16" in (BACKEND.unsupported(replace(spec, dtype=torch.float16), CPU) or "")
    assert BACKEND.unsupported(spec, torch.device("cuda")) is not None
    assert BACKEND.unsupported(replace(spec, block_size=3), CPU) is not None


FROM_DISK = """
import sys
import torch
from attention.test_backends import Case, make_spec
from minivllm.attention.numba_cpu import NumbaCPUBackend
from minivllm_kernels.cpu.compile import compile_kernel

case = Case(make_spec(num_heads=4, num_kv_heads=1, head_dim=256, block_size=16), [(1, 40), (5, 20)])
torch.testing.assert_close(case.run(NumbaCPUBackend()).double(), case.expected(), atol=1e-5, rtol=1e-5)
print("numba" in sys.modules)
"""


def test_a_kernel_from_disk_runs_without_numba():
    """Heads this wide are cleared by a call of the C library, which LLVM must be able to find by itself."""
    exec(FROM_DISK, {})  # the kernel is on disk now
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    loaded = subprocess.run(
        [sys.executable, "-c", FROM_DISK], env=environment, capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == ["False"]


def allocates(args):
    args[3] = len([args[0], args[1]])


def test_a_kernel_that_needs_python_is_refused():
    with pytest.raises(ValueError, match="must not allocate"):
        compile_kernel(allocates)
