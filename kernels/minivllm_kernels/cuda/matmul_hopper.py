"""CUDA matmul of 17 to 256 rows for Hopper: wgmma, TMA, and clusters that share long rows."""

# Generated from nbs/numba_kernels/cuda/matmul_hopper.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from dataclasses import dataclass, replace
from typing import Any

from minivllm_kernels.cuda.pointwise import silu_word
from minivllm_kernels.cuda.prefill import U32
from minivllm_kernels.cuda.prefill_hopper import HOPPER, SHARED_LIMIT, next_stage
from minivllm_kernels.cuda.simt import CudaKernel, cuda, device, f32, half_ops, i32, i64, kernel, kernel_maker
from minivllm_kernels.cuda.warp import smem_addr
from minivllm_kernels.cuda.wgmma import (
    K_MAJOR,
    SWIZZLE,
    cluster_address,
    cluster_arrive,
    cluster_store,
    cluster_wait,
    first_lane,
    lds128,
    map_address,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_fence,
    mbarrier_init,
    mbarrier_wait,
    tensor_map,
    tma_load_2d,
    wgmma_add,
    wgmma_wait,
)

__all__ = [
    "MATMUL_ROWS", "MATMUL_SIGNATURE", "STEP", "MatmulTile", "choose_tile", "matmul_maps",
    "wgmma_matmul",
]  # fmt: skip

MATMUL_ROWS, STEP = 256, 64  # the most rows of x; features that a stage holds
MATMUL_SIGNATURE = "u32* map map i32 i32 i32 i32 i32"
"""out; tensor maps of x and of the weight; rows; outputs; words from one row of out to the next; steps of 64 features; rows of x for a block."""


@dataclass(frozen=True)
class MatmulTile:
    """How a matmul is dealt out, and where things lie in shared memory.

    width: rows of the weight that a block multiplies. split: blocks of a cluster, which share the features of those rows. stages: length
    of the ring. rows: of x, 64 for each warpgroup that computes.
    """

    width: int
    split: int
    stages: int
    gated: bool
    rows: int = 64

    @property
    def consumers(self) -> int:
        """Threads that compute. After them comes a warp of which one thread copies."""
        return 2 * self.rows

    @property
    def outputs(self) -> int:
        """Outputs per block. In a gated tile each needs one row of the gate and one of up."""
        return self.width // 2 if self.gated else self.width

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: 64 features of the weight's rows, then of x's rows."""
        return (self.width + self.rows) * SWIZZLE

    @property
    def sums_at(self) -> int:
        """Where the sums of other blocks arrive."""
        return self.stages * self.stage_bytes

    @property
    def barriers_at(self) -> int:
        """Barriers of 8 bytes: full, then empty, of each stage; and one for sums."""
        return self.sums_at + (self.width * self.rows * 4 if self.split > 1 else 0)

    @property
    def sums_barrier_at(self) -> int:
        return self.barriers_at + 16 * self.stages

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, with the bytes that may be left out to start at a multiple of 1024."""
        return self.sums_barrier_at + 8 + 1024

    def grid(self, size: int, rows: int) -> tuple[int, int]:
        """Blocks for a weight of `size` rows, and for `rows` of x."""
        return -(-size // self.width) * self.split, -(-rows // self.rows)

    def copied(self, rows: int) -> int:
        """Rows of x per block, a multiple of 8. Blocks get equal numbers, because writing zeros for rows past the end takes longer than reading rows."""
        tiles = -(-rows // self.rows)
        return -(-rows // (8 * tiles)) * 8


def producer(tile: MatmulTile) -> tuple[Any, Any]:
    """Device functions of the thread that copies: start fills all stages, go_on brings the steps after those."""
    STAGES, STAGE, FULL, WEIGHT = tile.stages, tile.stage_bytes, tile.barriers_at, tile.width * SWIZZLE
    EMPTY, HALVES, HALF = FULL + 8 * STAGES, 2 if tile.gated else 1, tile.outputs * SWIZZLE
    advance = next_stage(tile.stages)

    @device
    def bring(sa, stage, x_map, w_map, x_row, row, size, step, copied):
        full = sa + FULL + 8 * stage
        to = sa + stage * STAGE
        mbarrier_expect(full, WEIGHT + copied * SWIZZLE)
        for half in range(HALVES):
            tma_load_2d(to + half * HALF, map_address(w_map), full, step * STEP, row + half * size)
        tma_load_2d(to + WEIGHT, map_address(x_map), full, step * STEP, x_row)

    @device
    def start(sa, x_map, w_map, x_row, row, size, begin, count, copied):
        for s in range(min(count, STAGES)):
            bring(sa, s, x_map, w_map, x_row, row, size, begin + s, copied)

    @device
    def go_on(sa, x_map, w_map, x_row, row, size, begin, count, copied):
        stage = i32(0)
        phase = i32(0)
        for n in range(STAGES, count):
            mbarrier_wait(sa + EMPTY + 8 * stage, phase)
            bring(sa, stage, x_map, w_map, x_row, row, size, begin + n, copied)
            stage, phase = advance(stage, phase)

    return start, go_on


def consumer(dtype: str, tile: MatmulTile) -> Any:
    """Device function of the warpgroups that compute: the sums of a block, in registers."""
    FULL, WEIGHT, STAGE, ACC = tile.barriers_at, tile.width * SWIZZLE // 16, tile.stage_bytes // 16, tile.width // 2
    EMPTY, advance, add = FULL + 8 * tile.stages, next_stage(tile.stages), wgmma_add(dtype, tile.width)
    wait_older, wait_all, GROUP = wgmma_wait(1, ACC), wgmma_wait(0, ACC), 64 * SWIZZLE // 16

    @device
    def consume(acc, sa, group, lane, count):
        base = i64((sa & 0x3FFFF) >> 4) | i64(K_MAJOR)  # the bits above say which block of the cluster
        x_base = base + (WEIGHT + group * GROUP)
        stage = i32(0)
        phase = i32(0)
        before = i32(0)
        for n in range(count):
            mbarrier_wait(sa + FULL + 8 * stage, phase)
            add(acc, x_base + stage * STAGE, base + stage * STAGE, i32(n))
            wait_older(acc)
            if n > 0 and lane == 0:
                mbarrier_arrive(sa + EMPTY + 8 * before)
            before = stage
            stage, phase = advance(stage, phase)
        wait_all(acc)

    return consume


def finisher(dtype: str, tile: MatmulTile) -> tuple[Any, Any]:
    """Device functions push (a thread's sums to the blocks of the cluster that finish them) and finish (add them up and write).

    A thread has sums of rows r and r + 8, r = 16 warp + lane / 4, in pieces of 8 columns: two neighbours of each. A block finishes an equal share
    of the pieces; of a gated tile, the same ones of both halves. What a thread sends lies where the thread with its number reads.
    """
    S, SUMS, DONE, P, GATED = tile.split, tile.sums_at, tile.sums_barrier_at, tile.width // 8 // tile.split, tile.gated
    Q, HALF, PIECE = P // 2 if GATED else P, tile.width // 16 if GATED else 0, 16 * tile.consumers
    pack, silu = half_ops(dtype).pack, silu_word(dtype)

    @device
    def push(acc, sa, tid, part):
        for other in range(S):
            to = cluster_address(sa + SUMS + part * (P * PIECE) + tid * 16, i32(other))
            done = cluster_address(sa + DONE, i32(other))
            for i in range(P):
                e = 4 * (i // Q * HALF + other * Q + i % Q)
                cluster_store(to + i * PIECE, done, acc[e], acc[e + 1], acc[e + 2], acc[e + 3])

    @device
    def gather(acc, sa, tid):
        mbarrier_wait(sa + DONE, i32(0))
        for i in range(P):
            at = sa + SUMS + i * PIECE + tid * 16
            a = lds128(at)
            for other in range(1, S):
                b = lds128(at + other * (P * PIECE))
                a = (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
            for y in range(4):
                acc[4 * i + y] = a[y]

    @device
    def finish(out, acc, sa, tid, part, x_row, count, first, size, out_s):
        if S > 1:
            gather(acc, sa, tid)
        row = (tid >> 5 << 4) + (tid >> 2 & 7)
        for i in range(Q):
            n = first + (part * Q + i) * 8 + 2 * (tid & 3)
            if n < size:
                for h in range(2):
                    e = 4 * i + 2 * h
                    word = pack(acc[e], acc[e + 1])
                    if GATED:
                        word = silu(word, pack(acc[e + 4 * Q], acc[e + 4 * Q + 1]))
                    if row + 8 * h < count:
                        out[i64(x_row + row + 8 * h) * out_s + (n >> 1)] = word

    return push, finish


@kernel_maker
def wgmma_matmul(dtype: str, tile: MatmulTile) -> CudaKernel:
    """out [rows, N] = x [rows, features] @ weight.T for even N, gated or not as in `gemv.fma_gemv`. Sums are float32.

    Each block of a cluster takes some of the steps, so there must be `tile.split` of them. It starts when the previous
    kernel has ended, and the next one starts when it has. Grid: `tile.grid`.
    """
    S, STAGES, FULL, DONE = tile.split, tile.stages, tile.barriers_at, tile.sums_barrier_at
    OUTPUTS, ACC, LOG, WARP_BYTES = tile.outputs, tile.width // 2, S.bit_length() - 1, tile.width * 64
    ROWS, COPIES, WARPS = tile.rows, tile.consumers, tile.consumers // 32
    if (
        S not in (1, 2, 4, 8)
        or tile.outputs % (8 * S)
        or not 0 < tile.width <= 256
        or STAGES < 2
        or ROWS not in (64, 128)
    ):
        raise ValueError(
            f"no such kernel: {tile} (width to 256; split 1, 2, 4, 8; whole pieces of 8 outputs for each block of a cluster; 2 stages or more; 64 or 128 rows)"
        )
    start, go_on = producer(tile)
    consume, (push, finish) = consumer(dtype, tile), finisher(dtype, tile)
    name = f"wgmma_matmul_{dtype}_{tile.width}x{S}_s{STAGES}_r{ROWS}" + ("_gated" if tile.gated else "")

    @kernel(MATMUL_SIGNATURE, COPIES + 32, name, 1, tile.shared_bytes, hopper_only=True, cluster=S)
    def matmul(out, x_map, w_map, rows, size, out_s, steps, copied):
        shared = cuda.shared.array(0, U32)
        tid = cuda.threadIdx.x
        warp = first_lane(tid >> 5)
        sa = (i32(smem_addr(shared)) + 1023) & -1024
        part = cuda.blockIdx.x & (S - 1)
        first = (cuda.blockIdx.x >> LOG) * OUTPUTS
        x_row = cuda.blockIdx.y * copied
        count = min(rows - x_row, copied)
        begin = steps * part >> LOG
        mine = (steps * (part + 1) >> LOG) - begin
        acc = cuda.local.array(ACC, f32)
        if tid == COPIES:
            for i in range(STAGES):
                mbarrier_init(sa + FULL + 8 * i, 1)
                mbarrier_init(sa + FULL + 8 * STAGES + 8 * i, WARPS)
            if S > 1:
                mbarrier_init(sa + DONE, 1)
                mbarrier_expect(sa + DONE, (count + 15 >> 4) * WARP_BYTES)
            mbarrier_fence()
            start(sa, x_map, w_map, x_row, first, size, begin, mine, copied)
        cuda.syncthreads()
        if S > 1:
            cluster_arrive()
        if warp < WARPS:
            consume(acc, sa, warp >> 2, tid & 31, mine)
        elif tid == COPIES:
            go_on(sa, x_map, w_map, x_row, first, size, begin, mine, copied)
        cuda.syncwarp()
        if S > 1:
            cluster_wait()  # the others have set up their barriers
        if warp < WARPS and warp * 16 < count:
            if S > 1:
                push(acc, sa, tid, part)
            finish(out, acc, sa, tid, part, x_row, count, first, size, out_s)

    return matmul


def matmul_maps(
    dtype: str, tile: MatmulTile, x: int, weight: int, rows: int, size: int, features: int, stride: int
) -> tuple[bytes, bytes]:
    """Tensor maps of x [rows, features], `stride` bytes from one row to the next, and of a contiguous weight [size, features], at two addresses."""
    return (
        tensor_map(x, dtype, (features, rows), (stride,), (STEP, tile.copied(rows))),
        tensor_map(weight, dtype, (features, size), (2 * features,), (STEP, tile.outputs)),
    )


LONG_ROW = 4096  # features from which on a block had better keep a multiprocessor to itself
LEAST_WIDTH, LEAST_LONG = 32, 56  # of a tile: x, which every tile reads, has as many rows
MOST_WIDTH, AT_ONCE = 256, 128  # of what a multiprocessor computes, and of one block of it


def _with_ring(tile: MatmulTile, steps: int, room: int) -> MatmulTile:
    """The tile with as many stages as `room` bytes hold, 16 at most."""
    empty, one = (replace(tile, stages=stages).shared_bytes for stages in (0, 1))
    return replace(tile, stages=min(-(-steps // tile.split), (room - empty) // (one - empty), 16))


def _few_rows(size: int, features: int, gated: bool, multiprocessors: int) -> MatmulTile | None:
    """Nearly every multiprocessor gets a block, with the fewest that share a row; very many outputs make two for each."""
    steps, long = -(-features // STEP), features >= LONG_ROW
    least = LEAST_LONG if long else LEAST_WIDTH
    split = next((n for n in (1, 2, 4, 8) if -(-size * n // multiprocessors) >= least), None)
    if split is None or steps < 2 * split:
        return None
    piece = split * (16 if gated else 8)
    width = -(-size * split // (multiprocessors * piece)) * piece
    if width > MOST_WIDTH or 4 * -(-size // width) * split < 3 * multiprocessors:
        return None
    alone = long and width <= AT_ONCE
    if width > AT_ONCE:
        width = -(-width // (2 * piece)) * piece
    return _with_ring(MatmulTile(width, split, 0, gated), steps, SHARED_LIMIT if alone else SHARED_LIMIT // 2 - 512)


def _many_rows(size: int, features: int, gated: bool, rows: int, multiprocessors: int) -> MatmulTile | None:
    """One or two tiles of x. Nearly every multiprocessor gets a block. Two blocks share the features of a row, except in a gated weight."""
    steps, tiles, split = -(-features // STEP), -(-rows // 128), 1 if gated else 2
    piece = 16 if gated else 8 * split
    width = -(-size * split * tiles // (multiprocessors * piece)) * piece
    blocks = -(-size // width) * split * tiles
    if 4 * blocks < 3 * multiprocessors or steps < 2 * split or width > (MOST_WIDTH if tiles == 1 else AT_ONCE):
        return None
    if (not gated and width * STEP > features) or (tiles > 1 and features >= LONG_ROW):
        return None  # sending sums, or the arithmetic, took longer than torch does
    return _with_ring(MatmulTile(width, split, 0, gated, 128), steps, SHARED_LIMIT)


@functools.cache
def choose_tile(
    size: int, features: int, gated: bool, rows: int, cc: tuple[int, int], multiprocessors: int
) -> MatmulTile | None:
    """How a matmul of `rows` rows by a weight [size, features] is divided among blocks. None if torch is the better choice or the card has no kernel."""
    if cc != HOPPER or size % (4 if gated else 2) or features % 8 or rows > MATMUL_ROWS:
        return None
    if rows <= 64:
        return _few_rows(size, features, gated, multiprocessors)
    return _many_rows(size, features, gated, rows, multiprocessors)
