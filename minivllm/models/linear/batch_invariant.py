"""Linear method of torch whose rows are the same in any batch."""

# Generated from nbs/models/linear/batch_invariant.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import torch.nn.functional as F
from torch import Tensor

from minivllm.models.linear.base import LinearMethod

_TILE = 16


def matmul_by_tiles(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, inputs] times weight [outputs, inputs] in tiles of 16 rows, the last one padded.

    A BLAS picks its loops by the shape of the whole matmul, so a row can round differently alone and in company.
    Here every matmul has one shape. The price is up to 16 times the arithmetic for one row.
    """
    rows = x.shape[0]
    out = x.new_empty(rows, weight.shape[0])
    for start in range(0, rows, _TILE):
        tile = x[start : start + _TILE]
        n = tile.shape[0]
        padded = F.pad(tile, (0, 0, 0, _TILE - n)) if n < _TILE else tile.contiguous()
        out[start : start + n] = F.linear(padded, weight, bias)[:n]
    return out


class BatchInvariantLinear(LinearMethod):
    """The matmul in tiles of 16 rows: each row's result is the same in any batch."""

    capturable = True

    def apply(self, x: Tensor) -> Tensor:
        return matmul_by_tiles(x, self.weights["weight"], self.weights.get("bias"))
