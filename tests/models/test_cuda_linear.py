"""Which matmul a layer on a GPU takes, without one: by the number of rows, and why none if none."""

import pytest
import torch
import torch.nn.functional as F

from minivllm.models.linear import cuda as cuda_linear
from minivllm.models.linear.choose import explain_linear_method
from minivllm.models.linear.layer import Linear

CPU = torch.device("cpu")


class Ops:
    """Stands for `minivllm_kernels.cuda.ops` on a machine with a GPU; notes what was asked for."""

    def __init__(self):
        self.HALF, self.asked = {torch.bfloat16: "bfloat16", torch.float16: "float16"}, []

    def device_unsupported(self, device):
        return None

    def gemv(self, x, weight):
        self.asked.append(x.shape[0])
        return x @ weight.t()


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
        "kernels of our own for up to 16 rows, torch's matmul for more",
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
