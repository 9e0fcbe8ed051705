"""Linear method of a GPU: a kernel of our own for few rows, torch for more."""

# Generated from nbs/models/linear/cuda.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from types import ModuleType

import torch
from torch import Tensor

from minivllm.models.linear.unquantized import TorchLinear

MOST_ROWS = 16
"""Up to this many rows a matmul is that of `minivllm_kernels.cuda.gemv`; beyond, torch's."""


def cuda_kernels() -> ModuleType:
    """The kernels behind torch calls. Raises ImportError if numba is not installed."""
    from minivllm_kernels.cuda import ops

    return ops


class FewRowsLinear(TorchLinear):
    """Our kernel for few rows, torch's matmul for more, and for a layer with a bias."""

    capturable = True

    def problem(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """See `LinearMethod`."""
        try:
            ops = cuda_kernels()
        except ImportError as error:
            return f'{error}; install the kernels with pip install "minivllm[cuda]"'
        if (reason := ops.device_unsupported(device)) is not None:
            return reason
        if dtype not in ops.HALF:
            return f"the kernels are built for bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if outputs % 2 or inputs % 8:
            return f"the kernels take an even number of outputs and a multiple of 8 inputs, not {outputs} and {inputs}"
        return None

    def takes(self, x: Tensor) -> bool:
        """Whether the matmul with x [T, inputs] is our kernel's."""
        return 0 < x.shape[0] <= MOST_ROWS and "bias" not in self.weights

    def apply(self, x: Tensor) -> Tensor:
        """See `LinearMethod`."""
        if not self.takes(x):
            return super().apply(x)
        out: Tensor = cuda_kernels().gemv(x, self.weights["weight"])
        return out
