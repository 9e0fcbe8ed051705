"""Packed int8 and int4 weight layout with scales, and the matmul object that owns it."""

# Generated from nbs/numba_kernels/cpu/matmul/quantized_layout.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import numpy as np

from minivllm_kernels.cpu.compile import COUNT, OWN, host_lanes, host_registers, kernel, pack, run
from minivllm_kernels.cpu.matmul.layout import ITEM
from minivllm_kernels.cpu.program import NOW, Launcher

__all__ = [
    "BIAS", "BLOCK", "FACTORS", "FIRST", "GROUP", "INPUTS", "OUT", "OUTPUTS", "PADDED", "ROWS", "SCALES",
    "SCALE_BITS", "SCRATCH", "SCRATCH_BYTES", "STRIDE", "UNIT", "WIDE", "WORDS", "QuantizedProduct", "X",
    "padded",
]  # fmt: skip

"""Arguments of the CPU's product with a quantized weight, and the object that holds them for one weight."""

(
    X,
    WORDS,
    SCALES,
    BIAS,
    FACTORS,
    OUT,
    ROWS,
    INPUTS,
    PADDED,
    GROUP,
    OUTPUTS,
    FIRST,
    STRIDE,
    WIDE,
    SCRATCH,
    SCRATCH_BYTES,
) = range(OWN, OWN + 16)
BLOCK = ITEM
"""Outputs that lie next to each other, and of a work item."""
UNIT = 16
"""Inputs are padded to a multiple of this."""
SCALE_BITS = {8: 32, 4: 16}
"""Bits of a scale, by the bits of a weight: a row of 8-bit weights has one, a row of 4-bit weights many."""


def padded(inputs: int) -> int:
    """Inputs of a stored weight."""
    return -(-inputs // UNIT) * UNIT


class QuantizedProduct:
    """x [rows, inputs] times one weight of whole numbers, plus its bias: weight[n, k] = u * step + low, one step and low a group.

    Args:
        words: address of int32 [outputs / BLOCK][padded / fields][BLOCK]: `fields = 32 / bits` neighbouring inputs of an
            output in a word, the first one in the lowest bits. Outputs padded to whole blocks.
        scales: address of [outputs / BLOCK][groups][2][BLOCK]: the steps, then the lows; float32 for 8 bits, bf16 for 4.
        bits: 8 or 4.
        group: inputs with a step and a low of their own; a multiple of `UNIT`, or all of the padded inputs. The last group may be shorter.
        x_bits: of rows and results: 16 (bf16) or 32 (float32).
        bias: address of float32 [outputs], or 0.

    The memory must outlive this object.

    Raises:
        ValueError: formats or sizes that no kernel is made for.
    """

    AT_ONCE = 64  # rows of a launch; more are done one after the other

    def __init__(
        self, words: int, scales: int, bits: int, group: int, outputs: int, inputs: int, x_bits: int, bias: int = 0
    ) -> None:
        if bits not in SCALE_BITS or x_bits not in (16, 32):
            raise ValueError(
                f"weights of {bits} bits cannot be multiplied with rows of {x_bits}; known: 8 or 4, with 16 or 32"
            )
        if group % UNIT or group < UNIT:
            raise ValueError(f"groups of {group} inputs are not a multiple of {UNIT}")
        self.kernel = kernel(
            "minivllm_kernels.cpu.matmul.quantized:multiply", bits, x_bits, host_lanes(), host_registers()
        )
        self.bits, self.x_bits, self.group = bits, x_bits, group
        self.inputs, self.outputs, self.padded = inputs, outputs, padded(inputs)
        fields = 32 // bits
        powers = [2.0 ** -(bits * (k % fields)) if (k + 1) % fields else 1.0 for k in range(UNIT)]
        self.factors = np.array(powers, np.float32)  # what `cpu_vector.field` multiplies with, taken back
        own = (
            0,
            words,
            scales,
            bias,
            self.factors.ctypes.data,
            0,
            0,
            inputs,
            self.padded,
            group,
            outputs,
            0,
            0,
            0,
            0,
            0,
        )
        self.args = pack(-(-outputs // BLOCK), *own)
        self.wide_args = pack(0, *own)

    def __call__(self, x: int, out: int, rows: int, threads: int, on: Launcher = NOW) -> None:
        """Addresses of contiguous x [rows, inputs] and out [rows, outputs]. One thread at a time may call."""
        args, size = self.args, self.x_bits // 8
        groups = -(-self.padded // self.group)
        for first in range(0, rows, self.AT_ONCE):
            n = min(self.AT_ONCE, rows - first)
            own = 4 * (8 * BLOCK + -(-n // 8) * 8 * (self.padded + groups))
            args[SCRATCH_BYTES] = own = -(-own // 64) * 64
            args[SCRATCH] = on.scratch(threads * own)
            args[X], args[OUT], args[ROWS] = x + first * self.inputs * size, out + first * self.outputs * size, n
            on.run(self.kernel, args, threads)

    def widen(self, out: int, first: int, outputs: int, stride: int, wide: int, threads: int) -> None:
        """Write outputs `first` to `first + outputs`, both multiples of `BLOCK`, as numbers of `x_bits`.

        Args:
            out: address of float32 [padded, stride], an output a column; or of bf16 [outputs / wide][stride / 2][wide][2], where
                `stride` is a number of inputs, at least `padded`.
            wide: for bf16, outputs of a block, a multiple of `BLOCK`.
        """
        args = self.wide_args
        args[COUNT], args[OUT], args[FIRST], args[STRIDE], args[WIDE] = (
            outputs // BLOCK,
            out,
            first // BLOCK,
            stride,
            wide,
        )
        run(kernel("minivllm_kernels.cpu.matmul.quantized:widen", self.bits, self.x_bits, host_lanes()), args, threads)
