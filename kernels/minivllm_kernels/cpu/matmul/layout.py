"""Packed bf16 weight layout shared with oneDNN, and the matmul object that owns it."""

# Generated from nbs/numba_kernels/cpu/matmul/layout.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import functools
import math
import sys

import numpy as np

from minivllm_kernels.cpu.compile import OWN, host_lanes, host_machine, host_registers, kernel, pack
from minivllm_kernels.cpu.program import NOW, Launcher

__all__ = [
    "BIAS", "BLOCK", "CONFIGS", "INPUTS", "ITEM", "OUT", "OUTPUTS", "PADDED", "ROWS", "SCRATCH",
    "SCRATCH_BYTES", "TILE", "WEIGHT", "PackedProduct", "X", "host_tiles", "packed_problem", "tile_configs",
]  # fmt: skip

"""Arguments of the CPU's product with a packed bf16 weight, and the object that holds them for one weight."""

(X, WEIGHT, BIAS, OUT, ROWS, INPUTS, OUTPUTS, PADDED, BLOCK, SCRATCH, SCRATCH_BYTES, CONFIGS) = range(OWN, OWN + 12)
ITEM = 32
"""Outputs of a work item; blocks hold one or several of them."""


TILE = 16
"""Rows of a tile register, and pairs of bf16 in a row of it."""


@functools.cache
def host_tiles() -> bool:
    """Whether this machine multiplies tiles of bf16 (Intel's AMX), and Linux lets this process do so."""
    if "+amx-bf16" not in host_machine()[2].split(",") or not sys.platform.startswith("linux"):
        return False
    arch_prctl, ask, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, ask, tile_data) == 0


@functools.cache
def tile_configs() -> np.ndarray:
    """uint8 [33, 64]: what the tile unit is told for 0 to 32 rows, in two tiles of rows. See `cpu_tiles`."""
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


class PackedProduct:
    """x [rows, inputs] times one packed bf16 weight, plus its bias. Rows are bf16, results are rounded to it.

    Args:
        weight: address of [outputs / block][padded / 2][block][2] bf16, outputs padded to whole blocks; the memory must
            outlive this object.
        padded: inputs, padded.
        bias: address of float32 [outputs], or 0.
        tiles: by the tile unit, see `host_tiles`; inputs must be a multiple of 32.
        out_bits: 32 for results that are written as float32, rounded all the same.

    Raises:
        ValueError: `packed_problem`.
    """

    AT_ONCE = 64  # rows of a launch; more are done one after the other

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
        self.inputs, self.outputs, self.tiles, self.out_bytes = inputs, outputs, tiles, out_bits // 8
        if tiles:
            self.kernel = kernel("minivllm_kernels.cpu.matmul.amx:multiply", out_bits)
        else:
            lanes = math.gcd(host_lanes(), inputs)
            self.kernel = kernel("minivllm_kernels.cpu.matmul.bf16:multiply", out_bits, lanes, host_registers())
        configs = tile_configs().ctypes.data
        self.args = pack(-(-outputs // ITEM), 0, weight, bias, 0, 0, inputs, outputs, padded, block, 0, 0, configs)

    def __call__(self, x: int, out: int, rows: int, threads: int, on: Launcher = NOW) -> None:
        """Addresses of contiguous x [rows, inputs] and out [rows, outputs]. One thread at a time may call."""
        args = self.args
        for first in range(0, rows, self.AT_ONCE):
            n = min(self.AT_ONCE, rows - first)
            widened = 0 if self.tiles else -(-n // 8) * 8 * self.inputs
            sums = 2 * TILE if self.tiles else 8
            args[SCRATCH_BYTES] = size = -(-4 * (sums * ITEM + widened) // 64) * 64
            args[SCRATCH] = on.scratch(threads * size)
            args[X], args[OUT] = x + first * self.inputs * 2, out + first * self.outputs * self.out_bytes
            args[ROWS] = n
            on.run(self.kernel, args, threads)
