"""CUDA matmul of 17 to 64 rows for Hopper: wgmma, TMA, and clusters that share long rows."""

# Generated from nbs/numba_kernels/cuda/matmul_hopper.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from dataclasses import dataclass
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
    "MATMUL_ROWS", "MATMUL_SIGNATURE", "STEP", "MatmulTile", "choose_tile", "matmul_maps", "padded_rows",
    "wgmma_matmul",
]  # fmt: skip

MATMUL_ROWS, STEP = 64, 64  # the most rows of x; features that a stage holds
MATMUL_SIGNATURE = "u32* map map i32 i32 i32 i32 i32"
"""out; tensor maps of x and of the weight; rows; outputs; words from one row of out to the next; steps of 64 features; `padded_rows`."""
THREADS = 160  # a warpgroup that computes, and a warp of which one thread copies


@dataclass(frozen=True)
class MatmulTile:
    """How a matmul is dealt out, and where things lie in shared memory.

    width: rows of the weight that a block multiplies. split: blocks of a cluster, which share the features of those rows. stages: length
    of the ring.
    """

    width: int
    split: int
    stages: int
    gated: bool

    @property
    def outputs(self) -> int:
        """Outputs per block. In a gated tile each needs one row of the gate and one of up."""
        return self.width // 2 if self.gated else self.width

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: 64 features of the weight's rows, then of x's rows."""
        return (self.width + MATMUL_ROWS) * SWIZZLE

    @property
    def sums_at(self) -> int:
        """Where the sums of other blocks arrive."""
        return self.stages * self.stage_bytes

    @property
    def barriers_at(self) -> int:
        """Barriers of 8 bytes: full, then empty, of each stage; and one for sums."""
        return self.sums_at + (self.width * MATMUL_ROWS * 4 if self.split > 1 else 0)

    @property
    def sums_barrier_at(self) -> int:
        return self.barriers_at + 16 * self.stages

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, with the bytes that may be left out to start at a multiple of 1024."""
        return self.sums_barrier_at + 8 + 1024

    def blocks(self, size: int) -> int:
        """Blocks for a weight of `size` rows."""
        return -(-size // self.width) * self.split


def producer(tile: MatmulTile) -> tuple[Any, Any]:
    """Device functions of the thread that copies: start fills all stages, go_on brings the steps after those."""
    STAGES, STAGE, FULL, WEIGHT = tile.stages, tile.stage_bytes, tile.barriers_at, tile.width * SWIZZLE
    EMPTY, HALVES, HALF = FULL + 8 * STAGES, 2 if tile.gated else 1, tile.outputs * SWIZZLE
    advance = next_stage(tile.stages)

    @device
    def bring(sa, stage, x_map, w_map, row, size, step, padded):
        full = sa + FULL + 8 * stage
        to = sa + stage * STAGE
        mbarrier_expect(full, WEIGHT + padded * SWIZZLE)
        for half in range(HALVES):
            tma_load_2d(to + half * HALF, map_address(w_map), full, step * STEP, row + half * size)
        tma_load_2d(to + WEIGHT, map_address(x_map), full, step * STEP, 0)

    @device
    def start(sa, x_map, w_map, row, size, begin, count, padded):
        for s in range(min(count, STAGES)):
            bring(sa, s, x_map, w_map, row, size, begin + s, padded)

    @device
    def go_on(sa, x_map, w_map, row, size, begin, count, padded):
        stage = i32(0)
        phase = i32(0)
        for n in range(STAGES, count):
            mbarrier_wait(sa + EMPTY + 8 * stage, phase)
            bring(sa, stage, x_map, w_map, row, size, begin + n, padded)
            stage, phase = advance(stage, phase)

    return start, go_on


def consumer(dtype: str, tile: MatmulTile) -> Any:
    """Device function of the warpgroup that computes: the sums of a block, in registers."""
    FULL, WEIGHT, STAGE, ACC = tile.barriers_at, tile.width * SWIZZLE // 16, tile.stage_bytes // 16, tile.width // 2
    EMPTY, advance, add = FULL + 8 * tile.stages, next_stage(tile.stages), wgmma_add(dtype, tile.width)
    wait_older, wait_all = wgmma_wait(1, ACC), wgmma_wait(0, ACC)

    @device
    def consume(acc, sa, lane, count):
        base = i64((sa & 0x3FFFF) >> 4) | i64(K_MAJOR)  # the bits above say which block of the cluster
        stage = i32(0)
        phase = i32(0)
        before = i32(0)
        for n in range(count):
            mbarrier_wait(sa + FULL + 8 * stage, phase)
            add(acc, base + (stage * STAGE + WEIGHT), base + stage * STAGE, i32(n))
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
    Q, HALF = (P // 2, tile.width // 16) if GATED else (P, 0)
    pack, silu = half_ops(dtype).pack, silu_word(dtype)

    @device
    def push(acc, sa, tid, part):
        for other in range(S):
            to = cluster_address(sa + SUMS + part * (P * 2048) + tid * 16, i32(other))
            done = cluster_address(sa + DONE, i32(other))
            for i in range(P):
                e = 4 * (i // Q * HALF + other * Q + i % Q)
                cluster_store(to + i * 2048, done, acc[e], acc[e + 1], acc[e + 2], acc[e + 3])

    @device
    def gather(acc, sa, tid):
        mbarrier_wait(sa + DONE, i32(0))
        for i in range(P):
            at = sa + SUMS + i * 2048 + tid * 16
            a = lds128(at)
            for other in range(1, S):
                b = lds128(at + other * (P * 2048))
                a = (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
            for y in range(4):
                acc[4 * i + y] = a[y]

    @device
    def finish(out, acc, sa, tid, part, first, count, size, out_s):
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
                        out[i64(row + 8 * h) * out_s + (n >> 1)] = word

    return push, finish


@kernel_maker
def wgmma_matmul(dtype: str, tile: MatmulTile) -> CudaKernel:
    """out [rows, N] = x [rows, features] @ weight.T for up to 64 rows and even N, gated or not as in `gemv.fma_gemv`. Sums are float32.

    Each block of a cluster takes some of the steps, so there must be `tile.split` of them. It starts when the previous
    kernel has ended, and the next one starts when it has. Grid (tile.blocks(rows of the weight), 1).
    """
    S, STAGES, FULL, DONE = tile.split, tile.stages, tile.barriers_at, tile.sums_barrier_at
    OUTPUTS, ACC, LOG, WARP_BYTES = tile.outputs, tile.width // 2, S.bit_length() - 1, tile.width * 64
    if S not in (1, 2, 4, 8) or tile.outputs % (8 * S) or not 0 < tile.width <= 256 or STAGES < 2:
        raise ValueError(
            f"no such kernel: {tile} (width to 256; split 1, 2, 4, 8; whole pieces of 8 outputs for each block of a cluster; 2 stages or more)"
        )
    start, go_on = producer(tile)
    consume, (push, finish) = consumer(dtype, tile), finisher(dtype, tile)
    name = f"wgmma_matmul_{dtype}_{tile.width}x{S}_s{STAGES}" + ("_gated" if tile.gated else "")

    @kernel(MATMUL_SIGNATURE, THREADS, name, 1, tile.shared_bytes, hopper_only=True, cluster=S)
    def matmul(out, x_map, w_map, count, size, out_s, steps, padded):
        shared = cuda.shared.array(0, U32)
        tid = cuda.threadIdx.x
        warp = first_lane(tid >> 5)
        sa = (i32(smem_addr(shared)) + 1023) & -1024
        part = cuda.blockIdx.x & (S - 1)
        first = (cuda.blockIdx.x >> LOG) * OUTPUTS
        begin = steps * part >> LOG
        mine = (steps * (part + 1) >> LOG) - begin
        acc = cuda.local.array(ACC, f32)
        if tid == 128:
            for i in range(STAGES):
                mbarrier_init(sa + FULL + 8 * i, 1)
                mbarrier_init(sa + FULL + 8 * STAGES + 8 * i, 4)
            if S > 1:
                mbarrier_init(sa + DONE, 1)
                mbarrier_expect(sa + DONE, (count + 15 >> 4) * WARP_BYTES)
            mbarrier_fence()
            start(sa, x_map, w_map, first, size, begin, mine, padded)
        cuda.syncthreads()
        if S > 1:
            cluster_arrive()
        if warp < 4:
            consume(acc, sa, tid & 31, mine)
        elif tid == 128:
            go_on(sa, x_map, w_map, first, size, begin, mine, padded)
        cuda.syncwarp()
        if S > 1:
            cluster_wait()  # the others have set up their barriers
        if warp < 4 and warp * 16 < count:
            if S > 1:
                push(acc, sa, tid, part)
            finish(out, acc, sa, tid, part, first, count, size, out_s)

    return matmul


def padded_rows(rows: int) -> int:
    """Rows of x that a copy brings, whole pieces of 8: for rows beyond x the copy writes zeros, which takes longer than reading rows does."""
    return -(-rows // 8) * 8


def matmul_maps(
    dtype: str, tile: MatmulTile, x: int, weight: int, rows: int, size: int, features: int, stride: int
) -> tuple[bytes, bytes]:
    """Tensor maps of x [rows, features], `stride` bytes from one row to the next, and of a contiguous weight [size, features], at two addresses."""
    return (
        tensor_map(x, dtype, (features, rows), (stride,), (STEP, padded_rows(rows))),
        tensor_map(weight, dtype, (features, size), (2 * features,), (STEP, tile.outputs)),
    )


LONG_ROW = 4096  # features from which on a block had better keep a multiprocessor to itself
LEAST_WIDTH, LEAST_LONG = 32, 56  # of a tile: x, which every tile reads, has as many rows
MOST_WIDTH, AT_ONCE = 256, 128  # of what a multiprocessor computes, and of one block of it


@functools.cache
def choose_tile(size: int, features: int, gated: bool, cc: tuple[int, int], multiprocessors: int) -> MatmulTile | None:
    """How a matmul with a weight [size, features] is dealt out. None if torch is the better choice or the card has no kernel.

    Nearly every multiprocessor gets a block, with the fewest that share a row; very many outputs make two for each.
    """
    steps, long = -(-features // STEP), features >= LONG_ROW
    if cc != HOPPER or size % (4 if gated else 2) or features % 8:
        return None
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
    empty, one = (MatmulTile(width, split, stages, gated).shared_bytes for stages in (0, 1))
    room = (SHARED_LIMIT if alone else SHARED_LIMIT // 2 - 512) - empty
    return MatmulTile(width, split, min(-(-steps // split), room // (one - empty), 16), gated)
