"""GPU linear kernel for few rows, and cuBLAS for more."""

# Generated from nbs/models/gpu_linear.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import torch
from torch import Tensor

from minivllm.attention.numba_cuda import cuda_ops
from minivllm.models.linear import LinearKernel, torch_kernel

__all__ = ["MOST_ROWS", "SmallProduct", "few_rows", "gemv_kernel", "gpu_problem"]

MOST_ROWS = 16
"""Up to so many rows, a product is that of `minivllm_kernels.cuda.gemv`; beyond, torch's."""


def gpu_problem(dtype: torch.dtype, device: torch.device, size: int = 2, features: int = 8) -> str | None:
    """Why there is no kernel for few rows for a weight [size, features], in words; None if there is one."""
    try:
        ops = cuda_ops()
    except ImportError as error:
        return f'{error}; install the kernels with pip install "minivllm[cuda]"'
    if (reason := ops.device_unsupported(device)) is not None:
        return reason
    if dtype not in ops.HALF:
        return f"the kernels for few rows are built for bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if size % 2 or features % 8:
        return f"the kernels for few rows take an even number of outputs and a multiple of 8 inputs, not {size} and {features}"
    return None


def few_rows(x: Tensor) -> bool:
    """Whether x [T, features] is for our kernels."""
    return 0 < x.shape[0] <= MOST_ROWS


class SmallProduct:
    """A product that is ours for few rows and torch's for more."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.plain = weight, torch_kernel(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        if not few_rows(x):
            return self.plain(x)
        product: Tensor = cuda_ops().gemv(x, self.weight)
        return product


def gemv_kernel(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """The linear kernel `gemv`.

    Raises:
        ValueError: the weight is none for it; says why.
    """
    if (problem := gpu_problem(weight.dtype, weight.device, *weight.shape)) is not None:
        raise ValueError(problem)
    return SmallProduct(weight) if bias is None else torch_kernel(weight, bias)
