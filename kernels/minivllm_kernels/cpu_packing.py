"""One layout for one row and for many.

Question: a library that multiplies many rows wants the weight in an order of its own.
"""

# Generated from nbs/4_kernels/25c_cpu_packing.ipynb by `python -m minivllm.literate export`. Edit the notebook,
# or edit this file and run `python -m minivllm.literate write-back`.
# literate: notebook=bd355c8dafb4 module=50c282db2578

import math

from minivllm_kernels.cpu_kernel import OWN, host_lanes, host_registers, kernel, pack, run
from minivllm_kernels.cpu_products import scratch

__all__ = [
    "BIAS",
    "BLOCK",
    "INPUTS",
    "ITEM",
    "OUT",
    "OUTPUTS",
    "PADDED",
    "ROWS",
    "SCRATCH",
    "SCRATCH_BYTES",
    "WEIGHT",
    "PackedProduct",
    "X",
    "packed_problem",
]


# %% nbs/4_kernels/25c_cpu_packing.ipynb #PackedProduct
"""Arguments of the CPU's product with a packed bf16 weight, and the object that holds them for one weight."""

(X, WEIGHT, BIAS, OUT, ROWS, INPUTS, OUTPUTS, PADDED, BLOCK, SCRATCH, SCRATCH_BYTES) = range(OWN, OWN + 11)
ITEM = 32
"""Outputs of a work item; blocks hold one or several of them."""


def packed_problem(inputs: int, block: int) -> str | None:
    """Why the kernel cannot multiply with such a packed weight, or None."""
    if inputs % 8:
        return f"{inputs} inputs are not a multiple of 8"
    if block % ITEM:
        return f"blocks of {block} outputs are not a multiple of {ITEM}"
    return None


class PackedProduct:
    """x [rows, inputs] times one packed bf16 weight, plus its bias. Rows and results are bf16.

    Args:
        weight: address of [outputs / block][padded / 2][block][2] bf16, outputs padded to whole blocks; the memory must
            outlive this object.
        padded: inputs, padded.
        bias: address of float32 [outputs], or 0.

    Raises:
        ValueError: `packed_problem`.
    """

    AT_ONCE = 64  # rows of a launch; more are done one after the other

    def __init__(self, weight: int, outputs: int, inputs: int, padded: int, block: int, bias: int = 0) -> None:
        if problem := packed_problem(inputs, block):
            raise ValueError(problem)
        self.kernel = kernel("minivllm_kernels.cpu_packed:multiply", math.gcd(host_lanes(), inputs), host_registers())
        self.inputs, self.outputs = inputs, outputs
        self.args = pack(-(-outputs // ITEM), 0, weight, bias, 0, 0, inputs, outputs, padded, block, 0, 0)

    def __call__(self, x: int, out: int, rows: int, threads: int) -> None:
        """Addresses of contiguous x [rows, inputs] and out [rows, outputs]. One thread at a time may call."""
        args = self.args
        for first in range(0, rows, self.AT_ONCE):
            n = min(self.AT_ONCE, rows - first)
            args[SCRATCH_BYTES] = size = -(-4 * (8 * ITEM + -(-n // 8) * 8 * self.inputs) // 64) * 64
            args[SCRATCH] = scratch(threads * size)
            args[X], args[OUT], args[ROWS] = x + first * self.inputs * 2, out + first * self.outputs * 2, n
            run(self.kernel, args, threads)
