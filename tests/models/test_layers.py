"""Norms, MLP and products, each against its formula."""

import pytest
import torch
import torch.nn.functional as F

from minivllm.models import cpu_linear, linear
from minivllm.models.layers import ACTIVATIONS, GatedMLP, QKNorm, RMSNorm
from minivllm.models.linear import QUANTIZED, Linear, kernel_names, register_kernel

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["auto", *(name for name in kernel_names() if name not in (*QUANTIZED, "gemv"))])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 15, 16, 17, 50, 70])
def test_every_kernel_computes_the_product(kernel, rows, dtype):
    layer = Linear(24, {"a": 10, "b": 7}, bias=True, dtype=dtype, device=CPU)
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((17, 24), (17,), (rows, 24)))
    layer.part("a").copy_(weight[:10])
    layer.part("b").copy_(weight[10:])
    layer.bias.copy_(bias)
    layer.prepare(kernel)
    want, close = x.double() @ weight.double().T + bias.double(), 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(layer(x).double(), want, rtol=close, atol=5 * close)
    assert torch.equal(layer.weight, weight) and torch.equal(layer.part("b"), weight[10:])


def test_a_packed_weight_is_kept_once_and_can_be_loaded_again():
    layer = Linear(64, {"a": 96}, bias=False, dtype=torch.bfloat16, device=CPU)
    weight = torch.randn(96, 64).bfloat16()
    layer.part("a").copy_(weight)
    layer.prepare()
    if not hasattr(layer._run, "unpack"):
        pytest.skip("nothing is packed on this machine")
    assert layer._weight is None and layer._run.memory.numel() == weight.numel()
    layer.part("a").mul_(2)
    layer.prepare()
    assert torch.equal(layer.weight, 2 * weight)


@pytest.mark.parametrize("rows", [1, 40, 70])
def test_wide_results_are_the_same_numbers(rows):
    """Rounded as ever; float32 at once from a kernel that can."""
    torch.manual_seed(rows)
    layer = Linear(64, {"a": 96}, bias=False, dtype=torch.bfloat16, device=CPU)
    layer.part("a").copy_(torch.randn(96, 64))
    x, results = torch.randn(rows, 64).bfloat16(), {}
    for wide in (False, True):
        layer.prepare(wide=wide)
        results[wide] = layer(x)
    assert results[True].dtype == (torch.float32 if hasattr(layer._run, "widened") else torch.bfloat16)
    assert torch.equal(results[True].float(), results[False].float())
    if hasattr(layer._run, "widened"):
        assert torch.equal(cpu_linear.launch_product(layer._run, x), results[True])
        with pytest.raises(
            ValueError, match="gives torch.float32, and its results were to be written to torch.bfloat16"
        ):
            cpu_linear.launch_product(layer._run, x, torch.empty(rows, 96, dtype=torch.bfloat16))


@pytest.mark.parametrize("shape", [(960, 576), (100, 48), (33, 1536)])
def test_the_packed_order_is_the_one_that_onednn_uses(shape):
    if not cpu_linear.onednn_packs():
        pytest.skip("oneDNN packs no bf16 weights on this machine")
    weight = torch.randn(shape).bfloat16()
    block = cpu_linear.onednn_block(*shape)
    assert block is not None, "a new oneDNN? The numba product cannot read its order any more"
    assert torch.equal(cpu_linear.Packed(weight, None, 4).unpack(), weight)


def test_auto_is_torch_where_the_cpu_kernels_cannot_be():
    layer = Linear(33, {"a": 57}, bias=False, dtype=torch.float32, device=CPU)
    layer.prepare()
    assert layer.kernel == "torch"
    with pytest.raises(ValueError, match="33 inputs are not a multiple of 4"):
        layer.prepare("cpu")
    assert linear.choose_kernel(torch.empty(64, 64, dtype=torch.float16)) == "torch"
    assert linear.choose_kernel(torch.empty(64, 64)) == "cpu"


SIZES = [(576, 960), (1536, 576), (72, 100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "inside", "outside"),
    [(kernel, *size) for kernel in ("batch_invariant", "cpu_invariant") for size in SIZES]
    + [("batch_invariant", 33, 57)],
)
def test_invariant_kernels_give_a_row_the_same_bits_in_any_company(kernel, dtype, inside, outside):
    layer = Linear(inside, {"all": outside}, bias=False, dtype=dtype, device=CPU)
    layer.weight.copy_(torch.randn(outside, inside))
    layer.prepare(kernel)
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
    with pytest.raises(
        ValueError,
        match="no linear kernel 'fast'; known: auto, torch, batch_invariant, .*int8, .*, twice",
    ):
        layer.prepare("fast")
    with pytest.raises(ValueError, match="has no bias"):
        layer.part("a", "bias")


def test_the_choice_is_explained():
    cpu, why = linear.explain_choice(torch.float32, CPU, False)
    assert cpu == "cpu" and "numba" in why and "torch" in why
    assert linear.explain_choice(torch.float16, CPU, False) == (
        "torch",
        "the weight is float16, not float32 or bfloat16",
    )
    assert linear.explain_choice(torch.float32, CPU, True)[0] == "batch_invariant"
