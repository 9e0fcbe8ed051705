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

from minivllm.attention.numba_cpu import NumbaCPUBackend
from minivllm_kernels.cpu_kernel import compile_kernel

pytest.importorskip("numba")
BACKEND = NumbaCPUBackend()
# Every distinct shape is compiled once, so there are few: the default model's, and one small and odd.
SHAPES = {
    "smollm2": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "block_size": 16},
    "small": {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "block_size": 32},
}
LOCAL = st.one_of(
    st.just({}), st.integers(1, 40).map(lambda n: {"sliding_window": n}), st.integers(1, 40).map(lambda n: {"chunk": n})
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25, deadline=None)
@given(ragged(), LOCAL, st.booleans(), st.integers(0, 1000))
def test_equals_dense_float64(shape, dtype, requests, local, hide_unseen, seed):
    case = Case(make_spec(**SHAPES[shape], **local, dtype=dtype), requests, seed)
    assert BACKEND.unsupported(case.spec, CPU) is None
    got = case.run(BACKEND, hide_unseen=hide_unseen)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), case.expected(), atol=tolerance, rtol=tolerance)


def test_long_contexts_are_split_and_joined():
    for requests in ([(1, 1500)], [(1, 700), (5, 1300), (300, 900)]):
        case = Case(make_spec(**SHAPES["smollm2"]), requests)
        torch.testing.assert_close(case.run(BACKEND).double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_soft_cap():
    case = Case(make_spec(**SHAPES["smollm2"], soft_cap=5.0), [(1, 90), (7, 40)])
    torch.testing.assert_close(case.run(BACKEND).double(), case.expected(), atol=1e-4, rtol=1e-4)


def test_a_row_is_the_same_alone_in_a_crowd_and_in_other_blocks():
    spec = make_spec(**SHAPES["smollm2"])
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
from minivllm_kernels.cpu_kernel import compile_kernel

case = Case(make_spec(num_heads=4, num_kv_heads=1, head_dim=256, block_size=16), [(1, 40), (30, 90)])
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
