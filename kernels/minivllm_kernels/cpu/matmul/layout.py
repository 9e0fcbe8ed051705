"""Weight layouts of the CPU matmuls: row-major, packed bf16, quantized; the objects that launch them."""

# Generated from nbs/numba_kernels/cpu/matmul/layout.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import functools
import math
import sys

import numpy as np

from minivllm_kernels.cpu.compile import (
    COUNT,
    OWN,
    Kernel,
    host_lanes,
    host_machine,
    host_registers,
    kernel,
    pack,
    run,
)
from minivllm_kernels.cpu.program import LAUNCHER

__all__ = [
    "BIAS", "BLOCK", "CHUNK", "CONFIGS", "EXTRA", "FACTORS", "FIRST", "GROUP", "INPUTS", "ITEM", "OUT",
    "OUTPUTS", "PADDED", "ROWS", "SCALES", "SCALE_BITS", "SCRATCH", "SCRATCH_BYTES", "STRIDE", "TILE",
    "TILE_ROWS", "UNIT", "WEIGHT", "WIDE", "Matmul", "PackedMatmul", "QuantizedMatmul", "RowMajorMatmul", "X",
    "chunk_outputs", "host_tiles", "packed_problem", "padded", "row_major_problem", "row_stride",
    "tile_configs", "tile_outputs",
]  # fmt: skip

"""How weights lie in memory for the CPU's matmuls, and an object for each layout that launches its kernel."""

X, OUT, ROWS, SCRATCH, SCRATCH_BYTES, INPUTS, OUTPUTS, WEIGHT, BIAS, SCALES = range(OWN, OWN + 10)
"""Arguments of every matmul kernel: addresses of the rows and of the results, number of rows; address of the scratch memory and
its bytes a thread; inputs and outputs; addresses of weight, bias and scales (0: none). Those of one kernel follow at `EXTRA`."""
EXTRA = OWN + 10
TILE_ROWS = (1, 2, 4, 8)
"""Rows that a tile of registers is made for."""
ITEM = 32
"""Outputs of a work item of the packed layouts."""


class Matmul:
    """x [rows, inputs] times one weight [outputs, inputs], plus its bias. Base of the three layouts.

    Args:
        kernel: the compiled matmul.
        items: work items of a launch.
        x_bits, out_bits: of the rows and the results: 32 (float32) or 16 (bf16).
        own: addresses of weight, bias and scales (0: none), then the kernel's further arguments. The memory must outlive this object.
    """

    ROWS_PER_LAUNCH = 64  # more rows are several launches

    def __init__(
        self, kernel: Kernel, items: int, outputs: int, inputs: int, x_bits: int, out_bits: int, *own: int
    ) -> None:
        self.kernel, self.inputs, self.outputs = kernel, inputs, outputs
        self.x_bytes, self.out_bytes = x_bits // 8, out_bits // 8
        self.args = pack(items, 0, 0, 0, 0, 0, inputs, outputs, *own)
        self.sum_floats, self.row_floats = 8 * ITEM, inputs  # scratch: sums of eight rows, then each row as float32

    def __call__(self, x: int, out: int, rows: int, threads: int) -> None:
        """Launch. `x` and `out` are addresses of contiguous [rows, inputs] and [rows, outputs]. Not thread-safe."""
        args = self.args
        for first in range(0, rows, self.ROWS_PER_LAUNCH):
            n = min(self.ROWS_PER_LAUNCH, rows - first)
            size = -(-4 * (self.sum_floats + -(-n // 8) * 8 * self.row_floats) // 64) * 64
            args[SCRATCH], args[SCRATCH_BYTES], args[ROWS] = LAUNCHER.scratch(threads * size), size, n
            args[X] = x + first * self.inputs * self.x_bytes
            args[OUT] = out + first * self.outputs * self.out_bytes
            LAUNCHER.run(self.kernel, args, threads)


CHUNK = EXTRA
"""Further argument of the row-major matmul: outputs of a work item."""


def tile_outputs(rows: int, registers: int) -> int:
    """Outputs of a tile: as many as leave registers for the weights and the rows."""
    return {1: 8, 2: 6, 4: 4, 8: 3}[rows] if registers >= 32 else {1: 4, 2: 4, 4: 2, 8: 1}[rows]


def chunk_outputs(outputs: int, threads: int) -> int:
    """Outputs of a work item: about eight items a thread, in multiples of 8, at most 256."""
    return min(max(-(-outputs // (8 * threads * 8)) * 8, 8), 256)


def row_major_problem(inputs: int, outputs: int, bits: int) -> str | None:
    """Why the kernel cannot multiply with a weight of [outputs, inputs], or None."""
    unit = 8 if bits == 16 else 4
    if inputs % unit:
        return f"{inputs} inputs are not a multiple of {unit}"
    if outputs < 8:
        return f"{outputs} outputs are fewer than 8"
    return None


def row_stride(chunk: int) -> int:
    """float32 numbers from one row of a chunk's sums to the next: tiles may stick out on both sides."""
    return chunk + 16


class RowMajorMatmul(Matmul):
    """Matmul by a weight as it is loaded, [outputs, inputs].

    Args:
        weight: address of contiguous [outputs, inputs]; the memory must outlive this object.
        bits: of the weight, the rows and the results: 32 (float32) or 16 (bf16).
        bias: address of float32 [outputs], or 0.

    Raises:
        ValueError: no kernel for these sizes.
    """

    def __init__(self, weight: int, outputs: int, inputs: int, bits: int, bias: int = 0) -> None:
        if problem := row_major_problem(inputs, outputs, bits):
            raise ValueError(problem)
        lanes = math.gcd(host_lanes(), inputs // 2 if bits == 16 else inputs)
        compiled = kernel("minivllm_kernels.cpu.matmul.gemv:matmul", bits, lanes, host_registers())
        super().__init__(compiled, 0, outputs, inputs, bits, bits, weight, bias, 0, 0)

    def __call__(self, x: int, out: int, rows: int, threads: int) -> None:
        """See `Matmul`. The outputs are cut by the number of threads."""
        chunk = chunk_outputs(self.outputs, threads)
        self.args[COUNT], self.args[CHUNK], self.sum_floats = -(-self.outputs // chunk), chunk, 8 * row_stride(chunk)
        super().__call__(x, out, rows, threads)


PADDED, BLOCK, CONFIGS = range(EXTRA, EXTRA + 3)
"""Further arguments of the packed matmul: inputs with padding, outputs of a block, address of `tile_configs`."""
TILE = 16
"""Rows of an AMX tile register, and pairs of bf16 in a row of it."""


@functools.cache
def host_tiles() -> bool:
    """Whether this machine multiplies tiles of bf16 (Intel's AMX), and Linux lets this process do so."""
    if "+amx-bf16" not in host_machine()[2].split(",") or not sys.platform.startswith("linux"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


@functools.cache
def tile_configs() -> np.ndarray:
    """uint8 [33, 64]: AMX tile configurations for 0 to 32 rows, in two tiles of rows. See `amx`."""
    configs = np.zeros((2 * TILE + 1, 64), np.uint8)
    configs[:, 0] = 1
    for n, config in enumerate(configs):
        upper, lower = min(n, TILE), max(n - TILE, 0)
        config[48:56] = (upper, upper, lower, lower, upper, lower, TILE, TILE)
        config[16:32:2] = 64 * (config[48:56] > 0)  # bytes of a row; a register that is not used has none
    return configs


def packed_problem(inputs: int, block: int) -> str | None:
    """Why the kernel cannot multiply with such a packed weight, or None."""
    if inputs % 8:
        return f"{inputs} inputs are not a multiple of 8"
    if block % ITEM:
        return f"blocks of {block} outputs are not a multiple of {ITEM}"
    return None


class PackedMatmul(Matmul):
    """Matmul of bf16 rows by a packed bf16 weight. Results are rounded to bf16.

    Args:
        weight: address of [outputs / block][padded / 2][block][2] bf16, outputs padded to whole blocks; the memory must
            outlive this object.
        padded: inputs, padded.
        bias: address of float32 [outputs], or 0.
        tiles: use AMX, see `host_tiles`; inputs must be a multiple of 32.
        out_bits: 32 for results that are written as float32, rounded all the same.

    Raises:
        ValueError: `packed_problem`.
    """

    def __init__(
        self,
        weight: int,
        outputs: int,
        inputs: int,
        padded: int,
        block: int,
        bias: int = 0,
        tiles: bool = False,
        out_bits: int = 16,
    ) -> None:
        if problem := packed_problem(inputs, block):
            raise ValueError(problem)
        if tiles and inputs % (2 * TILE):
            raise ValueError(f"{inputs} inputs are not a multiple of {2 * TILE}")
        if tiles:
            compiled = kernel("minivllm_kernels.cpu.matmul.amx:matmul", out_bits)
        else:
            lanes = math.gcd(host_lanes(), inputs)
            compiled = kernel("minivllm_kernels.cpu.matmul.packed:matmul", out_bits, lanes, host_registers())
        extra = padded, block, tile_configs().ctypes.data
        super().__init__(compiled, -(-outputs // ITEM), outputs, inputs, 16, out_bits, weight, bias, 0, *extra)
        if tiles:  # sums of two tiles of rows; the rows are read where they lie
            self.sum_floats, self.row_floats = 2 * TILE * ITEM, 0


GROUP, FACTORS, FIRST, STRIDE, WIDE = range(PADDED + 1, PADDED + 6)
"""Further arguments of the quantized matmul, after `PADDED`: inputs of a group, address of the factors on the rows. For
`dequantize`: first block, numbers from one input to the next, outputs of a block of the result."""
UNIT = 16
"""Inputs are padded to a multiple of this."""
SCALE_BITS = {8: 32, 4: 16}
"""Bits of a scale, by the bits of a weight: a row of 8-bit weights has one, a row of 4-bit weights many."""


def padded(inputs: int) -> int:
    """Inputs of a stored quantized weight."""
    return -(-inputs // UNIT) * UNIT


class QuantizedMatmul(Matmul):
    """Matmul by a weight of whole numbers: weight[n, k] = u * step + low, with one step and one low for each group of inputs.

    Args:
        words: address of int32 [outputs / ITEM][padded / fields][ITEM]: `fields = 32 / bits` neighbouring inputs of an
            output in a word, the first one in the lowest bits. Outputs padded to whole items. The memory must outlive this object.
        scales: address of [outputs / ITEM][groups][2][ITEM]: the steps, then the lows; float32 for 8 bits, bf16 for 4.
        bits: 8 or 4.
        group: inputs of a group; a multiple of `UNIT`, or all of the padded inputs. The last group may be shorter.
        x_bits: of rows and results: 16 (bf16) or 32 (float32).
        bias: address of float32 [outputs], or 0.

    Raises:
        ValueError: formats or sizes that no kernel is made for.
    """

    def __init__(
        self, words: int, scales: int, bits: int, group: int, outputs: int, inputs: int, x_bits: int, bias: int = 0
    ) -> None:
        if bits not in SCALE_BITS or x_bits not in (16, 32):
            raise ValueError(
                f"weights of {bits} bits cannot be multiplied with rows of {x_bits}; known: 8 or 4, with 16 or 32"
            )
        if group % UNIT or group < UNIT:
            raise ValueError(f"groups of {group} inputs are not a multiple of {UNIT}")
        machine = host_lanes(), host_registers()
        compiled = kernel("minivllm_kernels.cpu.matmul.quantized:matmul", bits, x_bits, *machine)
        self._dequantize = "minivllm_kernels.cpu.matmul.quantized:dequantize", bits, x_bits, host_lanes()
        fields = 32 // bits
        powers = [2.0 ** -(bits * (k % fields)) if (k + 1) % fields else 1.0 for k in range(UNIT)]
        self.factors = np.array(powers, np.float32)  # undo the power of two that `simd.field` leaves in a field
        extra = padded(inputs), group, self.factors.ctypes.data, 0, 0, 0
        items = -(-outputs // ITEM)
        super().__init__(compiled, items, outputs, inputs, x_bits, x_bits, words, bias, scales, *extra)
        self.row_floats = padded(inputs) + -(-padded(inputs) // group)  # and a row's sum over each group
        self._dequantize_args = self.args[:]

    def dequantize(self, out: int, first: int, outputs: int, stride: int, wide: int, threads: int) -> None:
        """Write outputs `first` to `first + outputs`, both multiples of `ITEM`, as numbers of `x_bits`.

        Args:
            out: address of float32 [padded, stride], an output a column; or of bf16 [outputs / wide][stride / 2][wide][2], where
                `stride` is a number of inputs, at least `padded`.
            wide: for bf16, outputs of a block, a multiple of `ITEM`.
        """
        args = self._dequantize_args
        args[COUNT], args[OUT], args[FIRST] = outputs // ITEM, out, first // ITEM
        args[STRIDE], args[WIDE] = stride, wide
        run(kernel(*self._dequantize), args, threads)
