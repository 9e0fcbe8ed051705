"""Norms, MLP and products, each against its formula."""

import pytest
import torch
import torch.nn.functional as F

from minivllm.models import linear
from minivllm.models.layers import ACTIVATIONS, GatedMLP, QKNorm, RMSNorm
from minivllm.models.linear import Linear, kernel_names, register_kernel

CPU = torch.device("cpu")


def rms(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_rms_norm(dtype, weight_dtype):
    norm = RMSNorm(40, 1e-2, dtype=weight_dtype, device=CPU)
    norm.weight.copy_(torch.rand(40))
    x = (torch.randn(7, 40) * 100).to(dtype)
    assert norm(x).dtype == dtype
    tolerance = 1e-6 if dtype == weight_dtype == torch.float32 else 1e-2
    torch.testing.assert_close(norm(x).double(), rms(x, norm.weight, 1e-2), rtol=tolerance, atol=tolerance)


def test_rms_norm_adds_to_the_residual_stream():
    norm = RMSNorm(8, 1e-5, dtype=torch.float32, device=CPU)
    norm.weight.fill_(1)
    x, y = torch.randn(2, 3, 8)
    total = x + y
    first, stream = norm.add(x, None)
    assert stream is x and torch.equal(first, norm(x))
    second, stream = norm.add(y, stream)
    assert stream is x and torch.equal(stream, total) and torch.equal(second, norm(total))


def test_qk_norm_is_a_norm_of_each_head_with_its_own_kind_of_weight():
    norm = QKNorm(4, 2, 8, 1e-6, dtype=torch.float32, device=CPU)
    q_weight, k_weight = torch.rand(2, 8)
    norm.q_weight.copy_(q_weight)
    norm.k_weight.copy_(k_weight)
    qk = torch.randn(5, 6, 8)
    want = torch.cat((rms(qk[:, :4], q_weight, 1e-6), rms(qk[:, 4:], k_weight, 1e-6)), 1)
    torch.testing.assert_close(norm(qk).double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(activation, bias):
    from transformers.activations import ACT2FN

    mlp = GatedMLP(12, 20, activation, bias=bias, dtype=torch.float32, device=CPU)
    weights = [torch.randn(20, 12), torch.randn(20, 12), torch.randn(12, 20)]
    biases = [torch.randn(20), torch.randn(20), torch.randn(12)] if bias else [None] * 3
    for layer, part, w, b in zip(
        (mlp.gate_up, mlp.gate_up, mlp.down), ("gate", "up", "down"), weights, biases, strict=True
    ):
        layer.part(part).copy_(w)
        if bias:
            layer.part(part, "bias").copy_(b)
    x = torch.randn(5, 12)
    inner = ACT2FN[activation](F.linear(x, weights[0], biases[0])) * F.linear(x, weights[1], biases[1])
    torch.testing.assert_close(mlp(x), F.linear(inner, weights[2], biases[2]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kernel", kernel_names())
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
def test_every_kernel_computes_the_product(kernel, rows):
    layer = Linear(24, {"a": 10, "b": 7}, bias=True, dtype=torch.float32, device=CPU)
    layer.weight.copy_(torch.randn(17, 24))
    layer.bias.copy_(torch.randn(17))
    layer.prepare(kernel)
    x = torch.randn(rows, 24)
    want = x.double() @ layer.weight.double().T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.part("b"), layer.weight[10:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inside", "outside"), [(576, 960), (1536, 576), (72, 100), (33, 57)])
def test_batch_invariant_kernel_gives_a_row_the_same_bits_in_any_company(dtype, inside, outside):
    layer = Linear(inside, {"all": outside}, bias=False, dtype=dtype, device=CPU)
    layer.weight.copy_(torch.randn(outside, inside))
    layer.prepare("batch_invariant")
    x = torch.randn(70, inside).to(dtype)
    whole = layer(x)
    for start, end in ((0, 1), (5, 6), (15, 17), (31, 70), (3, 20)):
        assert torch.equal(layer(x[start:end]), whole[start:end])
        assert torch.equal(layer(x[start:end].clone()), whole[start:end])
    order = torch.randperm(70)
    assert torch.equal(layer(x[order]), whole[order])


def test_a_kernel_can_be_registered_and_unknown_ones_are_refused(monkeypatch):
    monkeypatch.setattr(linear, "_KERNELS", dict(linear._KERNELS))
    register_kernel("twice", lambda weight, bias: lambda x: 2 * F.linear(x, weight, bias))
    layer = Linear(4, {"a": 3}, bias=False, dtype=torch.float32, device=CPU)
    layer.weight.copy_(torch.randn(3, 4))
    x = torch.randn(2, 4)
    once = layer(x)
    layer.prepare("twice")
    assert layer.kernel == "twice" and torch.equal(layer(x), 2 * once)
    with pytest.raises(ValueError, match="exists already"):
        register_kernel("twice", lambda weight, bias: None)
    with pytest.raises(ValueError, match="no linear kernel 'fast'; known: auto, torch, batch_invariant, twice"):
        layer.prepare("fast")
    with pytest.raises(ValueError, match="has no bias"):
        layer.part("a", "bias")
