"""CPU matmul by an unpacked weight: checks, scratch memory, work items, launch."""

# Generated from nbs/numba_kernels/cpu/matmul/plain.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import math

from minivllm_kernels.cpu.compile import COUNT, OWN, host_lanes, host_registers, kernel, pack
from minivllm_kernels.cpu.program import NOW, Launcher

__all__ = [
    "BIAS", "CHUNK", "INPUTS", "OUT", "OUTPUTS", "ROWS", "SCALES", "SCRATCH", "SCRATCH_BYTES", "TILES",
    "WEIGHT", "Product", "X", "chunk_outputs", "product_problem", "row_stride", "tile_outputs",
]  # fmt: skip

"""Arguments of the CPU's few-row matrix product, and the object that holds them for one weight."""

(X, WEIGHT, BIAS, SCALES, OUT, ROWS, INPUTS, OUTPUTS, CHUNK, SCRATCH, SCRATCH_BYTES) = range(OWN, OWN + 11)
TILES = (1, 2, 4, 8)
"""Rows that a tile of registers is made for."""


def tile_outputs(rows: int, registers: int) -> int:
    """Outputs of a tile: as many as leave registers for the weights and the rows."""
    return {1: 8, 2: 6, 4: 4, 8: 3}[rows] if registers >= 32 else {1: 4, 2: 4, 4: 2, 8: 1}[rows]


def chunk_outputs(outputs: int, threads: int) -> int:
    """Outputs of a work item: about eight items a thread, in multiples of 8, at most 256."""
    return min(max(-(-outputs // (8 * threads * 8)) * 8, 8), 256)


def product_problem(inputs: int, outputs: int, w_bits: int) -> str | None:
    """Why the kernel cannot multiply with a weight of [outputs, inputs], or None."""
    unit = 8 if w_bits == 16 else 4
    if inputs % unit:
        return f"{inputs} inputs are not a multiple of {unit}"
    if outputs < 8:
        return f"{outputs} outputs are fewer than 8"
    return None


def row_stride(chunk: int) -> int:
    """float32 numbers from one row of a chunk's sums to the next: tiles may stick out on both sides."""
    return chunk + 16


class Product:
    """x [rows, inputs] times one weight, plus its bias.

    Args:
        weight: address of contiguous [outputs, inputs]; the memory must outlive this object.
        w_bits: 32 (float32), 16 (bf16) or 8 (int8).
        x_bits: of the rows and results: the weight's, or for int8 either.
        bias, scales: addresses of float32 [outputs], or 0.

    Raises:
        ValueError: no kernel for these sizes or formats.
    """

    AT_ONCE = 64  # rows of a launch; more are done one after the other

    def __init__(
        self, weight: int, outputs: int, inputs: int, w_bits: int, x_bits: int, bias: int = 0, scales: int = 0
    ) -> None:
        if problem := product_problem(inputs, outputs, w_bits):
            raise ValueError(problem)
        if w_bits not in (8, x_bits) or x_bits not in (16, 32):
            raise ValueError(f"weights of {w_bits} bits cannot be multiplied with rows of {x_bits}")
        lanes = math.gcd(host_lanes(), inputs // 2 if w_bits == 16 else inputs)
        self.kernel = kernel("minivllm_kernels.cpu.matmul.gemv:multiply", w_bits, x_bits, lanes, host_registers())
        self.inputs, self.outputs, self.x_bytes = inputs, outputs, x_bits // 8
        self.args = pack(0, 0, weight, bias, scales, 0, 0, inputs, outputs, 0, 0, 0)

    def __call__(self, x: int, out: int, rows: int, threads: int, on: Launcher = NOW) -> None:
        """Addresses of contiguous x [rows, inputs] and out [rows, outputs]. One thread at a time may call."""
        args, chunk = self.args, chunk_outputs(self.outputs, threads)
        args[COUNT], args[CHUNK] = -(-self.outputs // chunk), chunk
        for first in range(0, rows, self.AT_ONCE):
            n = min(self.AT_ONCE, rows - first)
            size = 4 * (8 * row_stride(chunk) + -(-n // 8) * 8 * self.inputs)
            args[SCRATCH_BYTES] = size = -(-size // 64) * 64
            args[SCRATCH] = on.scratch(threads * size)
            args[X], args[OUT] = x + first * self.inputs * self.x_bytes, out + first * self.outputs * self.x_bytes
            args[ROWS] = n
            on.run(self.kernel, args, threads)
