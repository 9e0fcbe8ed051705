"""Which matmul a layer on a GPU takes, without one: by the number of rows, and why none if none."""

import pytest
import torch
import torch.nn.functional as F
from cuda_weights import WEIGHTS, random_weight

from minivllm.models.linear import cuda as cuda_linear
from minivllm.models.linear.choose import explain_linear_method
from minivllm.models.linear.grouped import GroupedWeight
from minivllm.models.linear.layer import Linear
from minivllm.models.linear.scaled import FP8, ScaledWeight

CPU = torch.device("cpu")


class Ops:
    """Stands for `minivllm_kernels.cuda.ops` on a machine with a GPU; notes what was asked for."""

    def __init__(self):
        self.HALF, self.asked = {torch.bfloat16: "bfloat16", torch.float16: "float16"}, []

    def device_unsupported(self, device):
        return None

    def takes_rows(self, weight, rows, gated):
        return rows <= (64 if weight.shape[0] > 6 and not gated else 16)

    def gemv(self, x, weight):
        self.asked.append(x.shape[0])
        return x @ weight.t()

    def quantized_gemv(self, x, format, words, scales, outputs):
        self.asked.append(x.shape[0])
        assert x.shape[1] == format.features
        return x.new_zeros(x.shape[0], outputs)

    def dequantize(self, format, words, scales, first, size):
        self.asked.append((first, size))
        return torch.ones(size, format.features, dtype=getattr(torch, format.dtype))


@pytest.fixture
def ops(monkeypatch):
    made = Ops()
    monkeypatch.setattr(cuda_linear, "cuda_kernels", lambda: made)
    return made


def layer_of(weight, bias=None):
    layer = Linear(
        weight.shape[1], {"all": weight.shape[0]}, dtype=weight.dtype, device=CPU, bias=bias is not None, method="gemv"
    )
    layer.method.weights["weight"].copy_(weight)
    if bias is not None:
        layer.bias.copy_(bias)
    return layer


def test_the_number_of_rows_decides(ops, monkeypatch):
    weight, x = torch.randn(6, 16).bfloat16(), torch.randn(18, 16).bfloat16()
    product = layer_of(weight)
    for rows in range(19):
        assert torch.equal(product(x[:rows]), x[:rows] @ weight.t())
    assert ops.asked == list(range(1, 17))
    ops.asked.clear()
    weight, x = torch.randn(8, 16).bfloat16(), torch.randn(66, 16).bfloat16()
    for rows in (17, 64, 65, 66):  # a weight that the kernel for more rows takes
        assert torch.equal(layer_of(weight)(x[:rows]), x[:rows] @ weight.t())
    assert ops.asked == [17, 64]
    ops.asked.clear()
    monkeypatch.setattr(cuda_linear, "MOST_ROWS", 0)
    product(x[:1])
    assert ops.asked == []


def test_a_bias_is_added_by_torch(ops):
    weight, bias, x = torch.randn(6, 16).bfloat16(), torch.randn(6).bfloat16(), torch.randn(1, 16).bfloat16()
    assert torch.equal(layer_of(weight, bias)(x), F.linear(x, weight, bias)) and ops.asked == []


@pytest.mark.parametrize(
    "weight, message",
    [
        (torch.zeros(6, 16), "bfloat16 and float16, not float32"),
        (torch.zeros(5, 16).bfloat16(), "not 5 and 16"),
        (torch.zeros(6, 12).bfloat16(), "not 6 and 12"),
    ],
)
def test_weights_that_are_none_for_it(ops, weight, message):
    with pytest.raises(ValueError, match=message):
        layer_of(weight)


def test_the_choice_and_its_reason(ops):
    gpu = torch.device("cuda", 0)
    assert explain_linear_method(None, "gemv", torch.bfloat16, gpu, False) == (
        "gemv",
        "kernels of our own for up to 16 rows, on Hopper 64, and torch's matmul for more",
    )
    assert explain_linear_method(None, "gemv", torch.float32, gpu, False)[0] == "torch"
    assert explain_linear_method(None, "gemv", torch.bfloat16, gpu, True)[0] == "batch_invariant"


def test_without_a_gpu_it_says_so():
    if not torch.cuda.is_available():
        gpu = torch.device("cuda", 0)
        assert "GPU" in cuda_linear.FewRowsLinear().problem(64, 64, torch.bfloat16, gpu)
        assert explain_linear_method(None, "gemv", torch.bfloat16, gpu, False)[0] == "torch"
    with pytest.raises(ValueError, match="the device is cpu"):
        layer_of(torch.zeros(6, 16).bfloat16())


# ---- weights that a checkpoint brings quantized


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_packed_weight_is_the_weight(ops, name, dtype):
    weight = random_weight(name, 38)
    packed = cuda_linear.packed(weight, dtype)
    assert isinstance(packed, cuda_linear.CUDAPackedWeight)
    assert packed.shape == weight.shape and torch.equal(packed.dequantize(), weight.dequantize())
    assert torch.equal(packed[3:5].dequantize(), weight[3:5].dequantize())
    half = weight.shape[1] // 2
    if half % packed.format.group == 0 and packed.order is None:
        assert torch.equal(packed.narrow(1, half, half).dequantize(), weight.narrow(1, half, half).dequantize())
    full = random_weight(name, 64)
    assert cuda_linear.packed(full, dtype).nbytes <= full.nbytes  # nothing but the padding


def unpackable():
    """Weights that no kernel multiplies by, and a part of the reason."""
    q, q8 = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 128, dtype=torch.int8)
    scale = torch.ones(4, 4)
    nan = torch.full((4, 32), torch.nan).to(FP8)
    yield GroupedWeight(q, scale, codes=torch.arange(16.0)), "code book"
    yield GroupedWeight(q, scale, scale / 2), "no whole number"
    yield GroupedWeight(q, scale, -40 * scale), "no whole number"
    yield GroupedWeight(q8, scale, scale), "weights of 8 bits with zero points have no kernel"
    yield GroupedWeight(q, torch.ones(4, 8)), "groups of 16 inputs"
    yield GroupedWeight(q[:, :24], torch.ones(4, 1)), "48 inputs are no multiple of 64"
    yield GroupedWeight(q[:3], scale[:3]), "^an odd number of outputs, 3$"
    yield GroupedWeight(q, scale / 3, -8 * (scale / 3)), "scales of 16 bits"
    yield ScaledWeight(nan, torch.ones(4, 1), 32), "NaN"
    yield ScaledWeight(q8[:, :100], torch.ones(4, 4), 32), "100 inputs"
    large, scale = torch.empty(1 << 18, 1 << 15, dtype=FP8, device="meta"), torch.ones(1 << 18, 1, device="meta")
    yield ScaledWeight(large, scale, 1 << 15), "^a weight of 8589934592 bytes; the kernels take less than 8 GiB$"
    yield GroupedWeight(large[:-2].view(torch.uint8), scale[:-2]), "8589934592 bytes"  # when it is padded


@pytest.mark.parametrize("weight, message", list(unpackable()))
def test_the_rule_says_why_torch_writes_a_weight_out(ops, weight, message):
    with pytest.raises(ValueError, match=message):
        cuda_linear.cuda_format(weight, torch.bfloat16)
    assert cuda_linear.packed(weight, torch.bfloat16) is weight
    good = random_weight("int4", 4)
    with pytest.raises(ValueError, match="^activations are float32, not bfloat16 or float16$"):
        cuda_linear.cuda_format(good, torch.float32)


def test_quantized_layers_take_the_kernel_for_few_rows(ops, monkeypatch):
    parts, a, b = {"a": 64, "b": 32}, random_weight("act-order", 64), random_weight("act-order", 32)
    layer = Linear(128, parts, dtype=torch.bfloat16, device=CPU, bias=True, method="gemv")
    layer.load("a", "weight", a)
    layer.load("b", "weight", b)  # another order: not joined
    layer.bias.fill_(2)
    layer.method.process_weights_after_loading()
    assert torch.equal(layer.weight, torch.cat((a.dequantize(), b.dequantize())).bfloat16())
    assert torch.equal(layer(torch.zeros(3, 128).bfloat16()), torch.full((3, 96), 2.0).bfloat16())
    layer(torch.zeros(64, 128).bfloat16())
    assert ops.asked == [3, 3, 64, 64]
    ops.asked.clear()
    monkeypatch.setattr(cuda_linear, "AT_ONCE", 40 * 128)
    x = torch.randn(65, 128).bfloat16()
    torch.testing.assert_close(layer(x), (x.sum(1, keepdim=True) + 2).expand(65, 96), atol=0.2, rtol=0.02)
    assert ops.asked == [(0, 32), (32, 32), (0, 32)]


def test_fp8_made_at_load_is_packed_on_a_gpu(ops):
    layer, weight = Linear(64, {"all": 32}, dtype=torch.bfloat16, device=CPU, method="fp8"), torch.randn(32, 64)
    layer.load("all", "weight", weight)
    layer.method.process_weights_after_loading()
    assert isinstance(layer.method.value, cuda_linear.CUDAPackedWeight)
    torch.testing.assert_close(layer.weight.float(), weight, rtol=0.07, atol=0.02)
    layer(torch.zeros(2, 64).bfloat16())
    assert ops.asked == [2]
