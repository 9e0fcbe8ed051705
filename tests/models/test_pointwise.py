"""The fused kernels between a decoder's products against float64, and a model with them against one without."""

import pytest
import torch
import torch.nn.functional as F

from minivllm.models import cpu_pointwise
from minivllm.models.layers import QKNorm
from minivllm.models.rope import apply_rope

pytest.importorskip("numba")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROWS = pytest.mark.parametrize("rows", [1, 3, 400])


def close(got, want):
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@DTYPES
@ROWS
@pytest.mark.parametrize("size", [576, 20])
def test_add_norm(dtype, rows, size):
    x, stream, weight = (torch.randn(s).to(dtype) for s in ((rows, size), (rows, size), (size,)))
    want = (x + stream).double()
    want *= (want.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    joined = x + stream
    out, same = cpu_pointwise.add_norm(x, stream, weight, 1e-3)
    assert same is stream and torch.equal(stream, joined)
    close(out, want)
    first, kept = cpu_pointwise.add_norm(joined, None, weight, 1e-3)
    assert kept is joined and torch.equal(first, out)


@DTYPES
@ROWS
def test_gated_silu_from_far_below_to_far_above(dtype, rows):
    both = torch.randn(rows, 2 * 48)
    both[0, :8] = torch.tensor([-300.0, -100.0, -89.0, -79.0, 0.0, 79.0, 100.0, 300.0])
    both = both.to(dtype)
    gate, up = both.double().chunk(2, -1)
    close(cpu_pointwise.gated_silu(both), F.silu(gate) * up)


@DTYPES
@ROWS
@pytest.mark.parametrize("dim", [64, 8])
def test_rotate(dtype, rows, dim):
    heads, cos, sin = (torch.randn(s).to(dtype) for s in ((rows, 5, dim), (rows, 1, dim), (rows, 1, dim)))
    q, k = cpu_pointwise.rotate(heads, cos, sin, 3, 1)
    want = apply_rope(heads[:, :4].double(), cos.double(), sin.double())
    close(q, want[:, :3])
    close(k, want[:, 3:])


@DTYPES
@ROWS
def test_rotate_heads_that_are_normed_first(dtype, rows):
    heads, cos, sin, weight = (torch.randn(s).to(dtype) for s in ((rows, 5, 64), (rows, 1, 64), (rows, 1, 64), (4, 64)))
    norm = QKNorm(3, 1, 64, 1e-3, dtype=dtype, device=torch.device("cpu"))
    norm.weight.copy_(weight)
    q, k = cpu_pointwise.rotate(heads, cos, sin, 3, 1, norm)
    normed = F.rms_norm(heads[:, :4].double(), (64,), None, 1e-3) * weight.double()
    want = apply_rope(normed, cos.double(), sin.double())
    close(q, want[:, :3])
    close(k, want[:, 3:])


@DTYPES
def test_a_row_is_the_same_in_any_company(dtype):
    x, stream, weight, both = (torch.randn(s).to(dtype) for s in ((500, 576), (500, 576), (576,), (500, 3072)))
    alone = cpu_pointwise.add_norm(x[7:8], stream[7:8].clone(), weight, 1e-5)[0]
    assert torch.equal(cpu_pointwise.add_norm(x, stream, weight, 1e-5)[0][7:8], alone)
    assert torch.equal(cpu_pointwise.gated_silu(both)[7:8], cpu_pointwise.gated_silu(both[7:8]))
