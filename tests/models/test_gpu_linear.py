"""Which product a layer on a GPU takes, without one: by the number of rows, and why none if none."""

import pytest
import torch

from minivllm.models import gpu_linear
from minivllm.models.linear import choose_kernel, explain_choice, kernel_names, make_kernel

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
    monkeypatch.setattr(gpu_linear, "cuda_ops", lambda: made)
    return made


def test_the_number_of_rows_decides(ops, monkeypatch):
    weight, x = torch.randn(6, 16).bfloat16(), torch.randn(18, 16).bfloat16()
    product = make_kernel("gemv", weight, None)
    for rows in range(19):
        assert torch.equal(product(x[:rows]), x[:rows] @ weight.t())
    assert ops.asked == list(range(1, 17))
    ops.asked.clear()
    monkeypatch.setattr(gpu_linear, "MOST_ROWS", 0)
    product(x[:1])
    assert ops.asked == []


def test_a_bias_is_added_by_torch(ops):
    weight, bias, x = torch.randn(6, 16).bfloat16(), torch.randn(6).bfloat16(), torch.randn(1, 16).bfloat16()
    assert torch.equal(make_kernel("gemv", weight, bias)(x), torch.addmm(bias, x, weight.t())) and ops.asked == []


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
        make_kernel("gemv", weight, None)


def test_the_choice_and_its_reason(ops):
    gpu = torch.device("cuda", 0)
    assert "gemv" in kernel_names() and choose_kernel(torch.zeros(6, 16).bfloat16()) != "gemv"
    assert explain_choice(torch.bfloat16, gpu, False) == (
        "gemv",
        "kernels of our own for up to 16 rows, torch's product for more",
    )
    assert explain_choice(torch.float32, gpu, False)[0] == "torch"
    assert explain_choice(torch.bfloat16, gpu, True)[0] == "batch_invariant"


def test_without_a_gpu_it_says_so():
    if not torch.cuda.is_available():
        assert "GPU" in gpu_linear.gpu_problem(torch.bfloat16, torch.device("cuda", 0))
        assert explain_choice(torch.bfloat16, torch.device("cuda", 0), False)[0] == "torch"
    with pytest.raises(ValueError, match="the device is cpu"):
        make_kernel("gemv", torch.zeros(6, 16).bfloat16(), None)
