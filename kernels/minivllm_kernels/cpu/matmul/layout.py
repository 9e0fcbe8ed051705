"""Weight layouts of the CPU matmuls: row-major, packed bf16, quantized; the objects that launch them."""

# Generated from nbs/numba_kernels/cpu/matmul/layout.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import ctypes
import functools
import itertools
import math
import sys
from array import array
from collections.abc import Sequence

import numpy as np

from minivllm_kernels.cpu.compile import (
    COUNT,
    OWN,
    Kernel,
    host_is_x86,
    host_lanes,
    host_machine,
    host_registers,
    kernel,
    pack,
)
from minivllm_kernels.cpu.program import LAUNCHER, Program

"""How weights lie in memory for the CPU's matmuls, and an object for each layout that launches its kernel."""

X, OUT, ROWS, SCRATCH, SCRATCH_BYTES, GROUPS, ITEMS, INPUTS, OUTPUTS, WEIGHT, BIAS, SCALES = range(OWN, OWN + 12)
"""Arguments of every matmul kernel: addresses of the rows and of the results, number of rows; address of the scratch memory and its bytes per
thread; address of the arguments of each group (0: these are the only group) and work items of a group; inputs and
outputs; addresses of weight, bias and scales (0: none). Those of one kernel follow at `EXTRA`."""
EXTRA = OWN + 12
TILE_ROWS = (1, 2, 4, 8)
"""Rows that a tile of registers is made for."""
ITEM = 32
"""Outputs of a work item, where weights are quantized or AMX multiplies. Elsewhere a packed bf16 weight is dealt out in whole blocks."""


class Matmul:
    """x [rows, inputs] times one weight [outputs, inputs], plus its bias. Base class of all layouts.

    Args:
        kernel: the compiled matmul.
        items: work items of a launch.
        x_bits, out_bits: bits of a number in the rows and in the results: 32 (float32) or 16 (bf16).
        own: addresses of weight, bias and scales (0: none), then the kernel's further arguments. The memory must outlive this object.
    """

    ROWS_PER_LAUNCH = 64  # more rows are several launches

    def __init__(
        self, kernel: Kernel, items: int, outputs: int, inputs: int, x_bits: int, out_bits: int, *own: int
    ) -> None:
        self.kernel, self.inputs, self.outputs = kernel, inputs, outputs
        self.x_bytes, self.out_bytes = x_bits // 8, out_bits // 8
        self.args = pack(items, 0, 0, 0, 0, 0, 0, 0, inputs, outputs, *own)
        self.sum_floats, self.row_floats = 8 * ITEM, inputs  # scratch: sums of eight rows, then each row as float32

    def __call__(self, x: int, out: int, rows: int, threads: int) -> None:
        """Launch. `x` and `out` are addresses of contiguous [rows, inputs] and [rows, outputs]. Not thread-safe."""
        args = self.args
        self.cut(threads)
        for first in range(0, rows, self.ROWS_PER_LAUNCH):
            args[ROWS] = min(self.ROWS_PER_LAUNCH, rows - first)
            args[X] = x + first * self.inputs * self.x_bytes
            args[OUT] = out + first * self.outputs * self.out_bytes
            self.reserve(args, args[ROWS], threads)
            LAUNCHER.run(self.kernel, args, threads)

    def cut(self, threads: int, groups: int = 1) -> None:
        """Set the work items, for this many threads and groups. Here they are always the same."""

    def reserve(self, args: "array[int]", rows: int, threads: int) -> None:
        """Give a launch with these arguments the scratch memory for at most this many rows."""
        size = -(-4 * (self.sum_floats + -(-rows // 8) * 8 * self.row_floats) // 64) * 64
        args[SCRATCH], args[SCRATCH_BYTES] = LAUNCHER.scratch(threads * size), size


class GroupedMatmul:
    """Matmuls by several weights of one shape, each for its own rows, in one launch: the experts of a layer.

    Work items are those of all groups, so that threads share them equally however many rows each group has.

    Args:
        matmuls: one for each group, with the same kernel and sizes.

    Raises:
        ValueError: their kernels or sizes differ.
    """

    def __init__(self, matmuls: Sequence[Matmul]) -> None:
        self._first = first = matmuls[0]
        for matmul in matmuls:
            matmul.cut(1)  # what a call before this one may have left
        self._groups = np.zeros((len(matmuls), Program.WIDTH), np.int64)
        self._groups[:, : len(first.args)] = [m.args for m in matmuls]
        same = [INPUTS, OUTPUTS, *range(EXTRA, Program.WIDTH)]
        if any(m.kernel is not first.kernel for m in matmuls) or (self._groups[:, same] != self._groups[0, same]).any():
            raise ValueError("the matmuls of a group must have the same kernel and sizes")

    def __call__(self, x: int, out: int, counts: np.ndarray, threads: int) -> None:
        """Launch. `x` and `out` are addresses of contiguous rows, sorted by group; counts: int64, rows of each group."""
        first, limit = self._first, Matmul.ROWS_PER_LAUNCH
        pieces = -(-counts // limit)  # of at most `limit` rows
        group = np.repeat(np.arange(len(counts)), pieces)
        before = limit * (np.arange(len(group)) - (pieces.cumsum() - pieces)[group])
        start = (counts.cumsum() - counts)[group] + before
        first.cut(threads, len(group))
        table = self._groups[group]
        table[:, EXTRA : len(first.args)] = first.args[EXTRA:]
        table[:, ROWS] = rows = np.minimum(counts[group] - before, limit)
        table[:, X] = x + start * first.inputs * first.x_bytes
        table[:, OUT] = out + start * first.outputs * first.out_bytes
        args = first.args[:]
        args[ITEMS], args[COUNT], args[GROUPS] = args[COUNT], args[COUNT] * len(group), table.ctypes.data
        first.reserve(args, int(rows.max(initial=0)), threads)
        LAUNCHER.run(first.kernel, args, threads)


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

    def cut(self, threads: int, groups: int = 1) -> None:
        """See `Matmul`. The outputs are cut by the number of threads."""
        chunk = chunk_outputs(self.outputs * groups, threads)
        self.args[COUNT], self.args[CHUNK], self.sum_floats = -(-self.outputs // chunk), chunk, 8 * row_stride(chunk)


PADDED, BLOCK, CONFIGS, AT_ONCE = range(EXTRA, EXTRA + 4)
"""Further arguments of the packed matmul: inputs with padding, outputs of a block, address of `tile_configs`, and how many items a
thread claims at once. Neighbours lie one after the other in memory."""
TILE = 16
"""Rows of an AMX tile register, and pairs of bf16 in a row of it."""


@functools.cache
def host_tiles() -> bool:
    """Whether this machine multiplies tiles of bf16 (Intel's AMX), and Linux lets this process do so."""
    if "+amx-bf16" not in host_machine()[2].split(",") or not sys.platform.startswith("linux"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def host_dots() -> bool:
    """Whether this machine has dot products of pairs of bf16 (AVX-512 BF16: AMD from Zen 4 on, Intel from Cooper Lake on)."""
    return "+avx512bf16" in host_machine()[2].split(",")


def prefetch_distance() -> tuple[int, int]:
    """(cache that weights are prefetched into, bytes ahead), see `simd.ask_for`.

    Measured: an AMD Zen 4 reads memory 1.2 times as fast through its second cache, which waits for more lines at once than the first.
    """
    return (3, 2048) if host_tiles() else (2, 4096)


@functools.cache
def tile_configs() -> np.ndarray:
    """uint8 [33, 64]: AMX tile configurations for 0 to 32 rows, in two tiles of rows. See `amx`."""
    configs = np.zeros((2 * TILE + 1, 64), np.uint8)
    configs[:, 0] = 1
    for n, config in enumerate(configs):
        upper, lower = min(n, TILE), max(n - TILE, 0)
        config[48:56] = (upper, upper, lower, lower, upper, lower, 16, 16)
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
        dots: use dot products of pairs, see `host_dots`; unless `tiles`.

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
        dots: bool = False,
    ) -> None:
        if problem := packed_problem(inputs, block):
            raise ValueError(problem)
        if tiles and inputs % (2 * TILE):
            raise ValueError(f"{inputs} inputs are not a multiple of {2 * TILE}")
        if tiles:
            compiled = kernel("minivllm_kernels.cpu.matmul.amx:matmul", out_bits)
        elif dots:
            compiled = kernel("minivllm_kernels.cpu.matmul.bf16_dots:matmul", out_bits)
        else:
            lanes = math.gcd(host_lanes(), inputs)
            compiled = kernel("minivllm_kernels.cpu.matmul.packed:matmul", out_bits, lanes, host_registers(), block)
        extra, item = (padded, block, tile_configs().ctypes.data, 1), ITEM if tiles else block
        super().__init__(compiled, -(-outputs // item), outputs, inputs, 16, out_bits, weight, bias, 0, *extra)
        # tiles and dots read the rows where they lie; tiles have sums of two tiles of rows
        self.sum_floats = 2 * TILE * ITEM if tiles else 8 * block
        self.row_floats = 0 if tiles or dots else inputs

    def cut(self, threads: int, groups: int = 1) -> None:
        """See `Matmul`. Many items are claimed several at once, up to 8, and 16 times by each thread at least."""
        self.args[AT_ONCE] = min(max(self.args[COUNT] * groups // (16 * threads), 1), 8)


ROUNDED, ROW_BYTES, SHIFT, CODES, ROWS_BYTES = range(AT_ONCE + 1, AT_ONCE + 6)
"""Further arguments of the quantized matmul, after `PADDED`, `BLOCK` (unused), `CONFIGS` and `AT_ONCE` (unused): address of the rounded rows, 0 if each
thread rounds them; bytes of a rounded row; how often the number of a group is halved to find its scale; address of the code book; bytes of
a block of `TILE` rounded rows."""
SPAN = 32
"""Inputs whose dot products fit into 16 bits; a group has a multiple of them, or half as many (of 4 bits)."""
PLAIN, PAIRS, FOURS = range(3)
"""What a CPU has for dot products of bytes: nothing, sums of two products in 16 bits (AVX2), sums of four in 32 bits (VNNI)."""
PANEL = 192
"""Inputs of an item whose weights are written out at once, for all rows: what the first cache has room for beside the rows."""
FEW = 8
"""Up to this many rows are rounded by each thread, and multiplied by the vector units."""


def host_unit() -> int:
    """What this machine has for dot products of bytes."""
    features = host_machine()[2].split(",")
    if "+avx512vnni" in features or ("+avxvnni" in features and host_lanes() == 8):
        return FOURS
    return PAIRS if "+avx512bw" in features or "+avx2" in features else PLAIN


def group_problem(group: int, bits: int) -> str | None:
    """Why the kernel cannot multiply by weights of so many bits in such groups, or None."""
    if group == SPAN or (group >= SPAN and group % (2 * SPAN) == 0) or (group, bits) == (SPAN // 2, 4):
        return None
    return f"groups of {group} inputs are neither {SPAN} (of 4 bits: {SPAN // 2}) nor a multiple of {2 * SPAN}"


class QuantizedMatmul(Matmul):
    """Matmul by a weight of whole numbers: weight[n, k] = (u - zero) * step [+ low], with a step, and a low, for each group of inputs.

    Rows are rounded to 8 bits, with a step for each `group` inputs of a row, and multiplied as whole numbers; but see `tiles`.

    Args:
        words: address of int32 [outputs / ITEM][padded / fields][ITEM], `fields = 32 / bits` neighbouring inputs of an output in a
            word. Of 8 bits: the first in the lowest byte. Of 4 bits: the first four in the low halves of the bytes, the next in the high
            ones. Outputs padded to whole items, inputs to whole groups. The memory must outlive this object.
        scales: address of [outputs / ITEM][scale groups][parts][ITEM]: steps, then lows; float16 or float32.
        bits: 8 or 4; `zero` is 128 for 8 bits and for a code book, 8 for 4 bits, and 0 for 4 bits with lows.
        group: inputs of a row that are rounded together: 32, 64, or a multiple of 64; of 4 bits also 16, which `tiles` do not take.
        shift: a scale is for `2 ** shift` groups; 31 or more: for the whole row.
        parts: 1 for steps alone, 2 for steps and lows.
        scale_bits: 16 or 32.
        x_bits, out_bits: of rows and results: 16 (bf16) or 32 (float32). Results are rounded as the rows are.
        bias: address of float32 [outputs], or 0.
        codes: address of 16 bytes, the numbers that 4 bits stand for, plus 128; 0 if they stand for themselves.
        tiles: let the tile unit, where there is one, multiply many rows of bf16 as they are: a row's rounding then depends on the batch.

    Raises:
        ValueError: formats or sizes that no kernel is made for.
    """

    ROWS_PER_LAUNCH = 128

    def __init__(
        self,
        words: int,
        scales: int,
        outputs: int,
        inputs: int,
        *,
        bits: int,
        group: int,
        shift: int,
        parts: int,
        scale_bits: int,
        x_bits: int,
        out_bits: int,
        bias: int = 0,
        codes: int = 0,
        tiles: bool = True,
    ) -> None:
        if (bits, x_bits, out_bits) not in itertools.product((8, 4), (16, 32), (16, 32)) or scale_bits not in (16, 32):
            raise ValueError(
                f"no kernel for weights of {bits} bits, scales of {scale_bits}, rows of {x_bits} and results of {out_bits};"
                " weights have 8 or 4 bits, the others 16 or 32"
            )
        if problem := group_problem(group, bits):
            raise ValueError(problem)
        padded, zero = -(-inputs // group) * group, 128 if bits == 8 or codes else 0 if parts == 2 else 8
        form = bits, int(codes != 0), parts, scale_bits, group, zero, x_bits, out_bits, host_unit()
        machine, name = (host_lanes(), host_registers()), "minivllm_kernels.cpu.matmul.quantized"
        self._round = f"{name}:round_rows", x_bits, group, zero, host_lanes()
        by_tiles = tiles and host_tiles() and x_bits == 16 and inputs % SPAN == group % SPAN == 0
        self._by_tiles = (f"{name}:matmul_by_tiles", *form[:6], out_bits, host_unit()) if by_tiles else None
        self._items, tail = -(-outputs // ITEM), 4 * group if padded > inputs else 0
        row_bytes = 64 * (
            -(-(padded + tail) // 64) | 1
        )  # an odd number of lines, so that rows lie in different sets of a cache
        self.rows_bytes = TILE * (row_bytes + 12 * (padded // group))
        extra = padded, 0, tile_configs().ctypes.data, 1, 0, row_bytes, shift, codes, self.rows_bytes
        few = kernel(f"{name}:matmul", *form, *machine)
        super().__init__(few, self._items, outputs, inputs, x_bits, out_bits, words, bias, scales, *extra)

    def __call__(self, x: int, out: int, rows: int, threads: int) -> None:
        """See `Matmul`. Many rows are rounded by a separate kernel, which all threads share."""
        args = self.args
        for first in range(0, rows, self.ROWS_PER_LAUNCH):
            n = min(self.ROWS_PER_LAUNCH, rows - first)
            args[ROWS], args[X] = n, x + first * self.inputs * self.x_bytes
            args[OUT] = out + first * self.outputs * self.out_bytes
            places = -(-n // TILE) * TILE
            if n <= FEW:
                self._launch(self.kernel, 0, 32 * ITEM + self.rows_bytes, threads)
            elif self._by_tiles is None:
                self._launch(self.kernel, places, 32 * ITEM, threads)
            else:
                self._launch(kernel(*self._by_tiles), 0, (2 * PANEL + 4 * places) * ITEM, threads)

    def _launch(self, matmul: Kernel, places: int, size: int, threads: int) -> None:
        """Round the rows to this many places, if any, and multiply with `size` bytes of memory for each thread."""
        args, size = self.args, -(-size // 64) * 64
        rounded = places // TILE * self.rows_bytes
        room = LAUNCHER.scratch(rounded + threads * size)
        args[ROUNDED], args[COUNT] = room if places else 0, places
        if places:
            LAUNCHER.run(kernel(*self._round), args, threads)
        args[SCRATCH], args[SCRATCH_BYTES] = room + rounded, size
        args[COUNT] = self._items
        LAUNCHER.run(matmul, args, threads)


SCALE_BLOCK, TOGETHER, STEP = range(EXTRA, EXTRA + 3)
"""Further arguments of the scaled matmul: inputs that share a scale of the weight, and of a row; address of a float32, the step of every row."""


class ScaledMatmul(Matmul):
    """Matmul by a weight of 8 bits, fp8 or whole numbers, each times its scale. Rows stay as they are, or are rounded to that format first.

    Args:
        weight: address of bytes [outputs / ITEM][inputs][ITEM], outputs padded to whole items; the memory must outlive this object.
        scales: address of float32 [outputs / ITEM][blocks][ITEM]; for fp8 256 times what they are, see `simd.from_fp8`.
        step: address of a float32, the step by which all rows are rounded; 0 if each group of numbers finds its own.
        bias: address of float32 [outputs], or 0.
        block: inputs that share a scale: an even number that divides them.
        whole: whole numbers (int8), not fp8 (e4m3).
        together: numbers of a row that are rounded together; 0 if rows are not rounded.
        bits: of the rows and the results, which are rounded alike: 32 (float32) or 16 (bf16).

    Raises:
        ValueError: `scaled_problem`.
    """

    def __init__(
        self, weight: int, scales: int, step: int, bias: int, outputs: int, inputs: int, block: int, whole: bool,
        together: int, bits: int,
    ) -> None:  # fmt: skip
        if problem := scaled_problem(inputs, block, together, whole):
            raise ValueError(problem)
        lanes = math.gcd(host_lanes(), together or inputs)
        form = -8 if whole else 8, int(together > 0), bits, lanes, host_lanes(), host_registers()
        compiled = kernel("minivllm_kernels.cpu.matmul.scaled:matmul", *form)
        own = weight, bias, scales, block, together, step
        super().__init__(compiled, -(-outputs // ITEM), outputs, inputs, bits, bits, *own)


def scaled_problem(inputs: int, block: int, together: int, whole: bool) -> str | None:
    """Why the kernel cannot multiply with such a weight, or None."""
    if not whole and host_is_x86() and host_lanes() == 4:
        return "its kernel reads fp8 by F16C, which this CPU lacks"
    for size in (block, together or inputs):
        if size < 2 or size % 2 or inputs % size:
            return f"{inputs} inputs in groups of {size}: groups must be even, and divide the inputs"
    return None
