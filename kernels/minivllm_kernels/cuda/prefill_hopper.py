"""CUDA prefill attention for Hopper: wgmma fed by TMA, one persistent block per multiprocessor."""

# Generated from nbs/numba_kernels/cuda/prefill_hopper.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from dataclasses import dataclass
from typing import Any

from minivllm_kernels.cuda.decode import soft_cap
from minivllm_kernels.cuda.planning import (
    FIELDS,
    TILE_CONTEXT,
    TILE_FIRST,
    TILE_FLOOR,
    TILE_QUERIES,
    TILE_ROW,
    TILE_SEQ,
    AttentionShape,
)
from minivllm_kernels.cuda.prefill import U32
from minivllm_kernels.cuda.simt import NEG, CudaKernel, cuda, device, f32, half_ops, i32, i64, kernel, kernel_maker, u32
from minivllm_kernels.cuda.warp import atomic_inc, exp2, fmax, shfl_xor, smem_addr, stg128
from minivllm_kernels.cuda.wgmma import (
    K_MAJOR,
    SWIZZLE,
    after,
    base_descriptor,
    column_descriptor,
    fewer_registers,
    first_lane,
    lds32,
    map_address,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_fence,
    mbarrier_init,
    mbarrier_wait,
    more_registers,
    shfl_word,
    sts32,
    tensor_map,
    tma_load_3d,
    tma_load_4d,
    wgmma_registers,
    wgmma_shared,
    wgmma_wait,
)

__all__ = [
    "HOPPER", "HOPPER_SIGNATURE", "HOPPER_THREADS", "SHARED_LIMIT", "HopperTile", "attention_maps",
    "hopper_unsupported", "query_map", "wgmma_tiles",
]  # fmt: skip

HOPPER = (9, 0)
HOPPER_THREADS = 384  # a warpgroup that copies and two that compute
SHARED_LIMIT = 227 * 1024  # bytes of shared memory that a block can have
HOPPER_SIGNATURE = " ".join(
    ["u32* map map map map"]  # out; tensor maps of q, K, V, and of single rows of V
    + ["i32* i32*"]  # table (of blocks), tiles and after them the counters
    + ["f32 f32 i32"]  # scale (log2(e) included), cap, window (tokens that a query sees)
    + ["i32 i32 i32 i32"]  # t_s, o_s: from one row to the next of the block table, out; KV heads; tiles * KV heads
)


def hopper_unsupported(shape: AttentionShape, cc: tuple[int, int]) -> str | None:
    """Why a card of compute capability `cc` computes prefill of this shape with `mma.sync`; None if with `wgmma`."""
    if cc != HOPPER:
        return f"wgmma is an instruction of compute capability 9.0 alone, and this card has {cc[0]}.{cc[1]}"
    if shape.int8_kv:
        return "wgmma reads K and V as they lie in the cache, and their scales are missing there"
    if shape.fp8_kv:
        return "wgmma reads K and V as they lie in the cache, and multiplies no e4m3 with 16-bit numbers"
    return None


@dataclass(frozen=True)
class HopperTile:
    """Tiles of a shape and where they lie in shared memory. Sizes in bytes unless they count something."""

    shape: AttentionShape
    stages: int = 2  # tiles of K, and of V, that are in shared memory at a time; on an H200 three are no faster

    rows_held = 128  # rows of Q in shared memory: 64 for each computing warpgroup

    @property
    def rows(self) -> int:
        """(query, head) rows of a tile: all heads of a whole number of queries, so that one copy brings them."""
        return self.rows_held // self.shape.group * self.shape.group

    @property
    def keys(self) -> int:
        """Keys at a time: as many scores as the registers hold beside the output."""
        return 64 if self.shape.head_dim > 128 else 128

    @property
    def parts(self) -> int:
        """Pieces of 64 columns that a row is cut into; in the last, columns that no head has are zero."""
        return -(-self.shape.head_dim // 64)

    @property
    def box(self) -> int:
        """Keys that one copy brings: of one cache block."""
        return min(self.shape.block_size, self.keys)

    @property
    def q_part(self) -> int:
        return self.rows_held * SWIZZLE

    @property
    def kv_part(self) -> int:
        return self.keys * SWIZZLE

    @property
    def kv_bytes(self) -> int:
        """A stage of K, or of V."""
        return self.parts * self.kv_part

    @property
    def k_at(self) -> int:
        return self.parts * self.q_part

    @property
    def v_at(self) -> int:
        return self.k_at + self.stages * self.kv_bytes

    @property
    def barriers_at(self) -> int:
        """Barriers of 8 bytes: K full, V full, K empty, V empty (one a stage); Q full, empty; next full, empty (two each)."""
        return self.v_at + self.stages * self.kv_bytes

    @property
    def next_at(self) -> int:
        """Two words, written in turns: the index of the next work item."""
        return self.barriers_at + 8 * (4 * self.stages + 6)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per block, with room to start at a multiple of 1024."""
        return self.next_at + 8 + 1024


@functools.cache  # so that it is compiled once for both sides of a kernel; the same below
def work_of_tile(tile: HopperTile) -> Any:
    """Device function: what a tile needs of the keys, (oldest, newest, first tile of keys, number of them)."""
    G, ROWS, SHIFT = tile.shape.group, tile.rows, tile.keys.bit_length() - 1

    @device
    def work(context, queries, first, floor, window):
        newest = i32(context + min(i32((first + ROWS - 1) // G), i32(queries - 1)))
        oldest = i32(max(floor, i32(context + first // G - window + 1)))
        start = oldest >> SHIFT
        return oldest, newest, start, i32((newest >> SHIFT) + 1 - start)

    return work


@functools.cache
def next_stage(stages: int) -> Any:
    """Device function: the stage after this one, and the parity of its barriers in this round."""
    STAGES = stages

    @device
    def advance(stage, phase):
        stage = i32(stage + 1)
        if stage == STAGES:
            stage = i32(0)
            phase = i32(phase ^ 1)
        return stage, phase

    return advance


@functools.cache
def take_next(tile: HopperTile) -> Any:
    """Device function: wait until the scheduling warp has named the next work item, and return it."""
    FULL = tile.barriers_at + 8 * (4 * tile.stages + 2)
    EMPTY, NEXT = FULL + 16, tile.next_at

    @device
    def take(sa, turn, lane):
        slot = turn & 1
        mbarrier_wait(sa + FULL + 8 * slot, (turn >> 1) & 1)
        index = lds32(sa + NEXT + 4 * slot)
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(sa + EMPTY + 8 * slot)
        return index

    return take


def value_rows(tile: HopperTile) -> Any:
    """Device function: bring the last box of V row by row, and zeros for the tokens that the sequence does not have.

    Their weights are zero, but a block may hold NaN after the end of a sequence, and 0 * NaN is NaN.
    """
    BOX, PARTS, PART, SHIFT = tile.box, tile.parts, tile.kv_part, tile.box.bit_length() - 1
    MASK = tile.shape.block_size // BOX - 1  # of a box's number in its block

    @device
    def bring(to, source, full, kvh, box, block, there, worker):
        token = i32((box & MASK) * BOX)
        for e in range(worker, BOX * PARTS, 64):
            part = i32(e >> SHIFT)
            r = i32(e & (BOX - 1))
            place = block
            if r >= there:
                place = i32(-1)  # outside the array: zeros
            at = to + part * PART + r * SWIZZLE
            tma_load_4d(at, source, full, part * 64, kvh, token + r, place)

    return bring


def producer(tile: HopperTile) -> Any:
    """Device function of the warpgroup that copies: warps 0 and 1 bring K, 2 and 3 V; warp 0 also brings Q and names the next work
    item."""
    G, BOX, KEYS, STAGES, PARTS = tile.shape.group, tile.box, tile.keys, tile.stages, tile.parts
    BOXES, PER_BLOCK, PART, TILE = KEYS // BOX, tile.shape.block_size // BOX, tile.kv_part, tile.kv_bytes
    BOX_SHIFT, BLOCK_SHIFT = BOX.bit_length() - 1, PER_BLOCK.bit_length() - 1  # tokens of a box, boxes of a block
    UNITS = BOXES * PARTS  # copies a stage
    HALF = -(-UNITS // 2)  # of one warp
    K0, BAR, NEXT, Q_PART, Q_BYTES = tile.k_at, tile.barriers_at, tile.next_at, tile.q_part, tile.rows * SWIZZLE * PARTS
    FULL_Q, EMPTY_Q = BAR + 32 * STAGES, BAR + 32 * STAGES + 8
    NEXT_FULL, NEXT_EMPTY = FULL_Q + 16, FULL_Q + 32
    work, take, bring_rows, advance = work_of_tile(tile), take_next(tile), value_rows(tile), next_stage(tile.stages)

    @device
    def produce(sa, tid, q_map, k_map, v_map, row_map, table, tiles, window, t_s, kv_heads, items):
        warp = first_lane(tid // 32)
        lane = tid % 32
        value = i32(warp // 2)
        full = i32(sa + BAR + value * (8 * STAGES))
        empty = i32(full + 16 * STAGES)
        unit = i32(warp % 2 * HALF + lane)
        mine = lane < HALF and unit < UNITS
        stages = i32(sa + K0 + value * (STAGES * TILE))
        to = i32(stages + unit // BOXES * PART + unit % BOXES * (BOX * SWIZZLE))
        column = i32(unit // BOXES * 64)
        source = map_address(k_map)
        if value == 1:
            source = map_address(v_map)
        grid = cuda.gridDim.x
        counter = i32(items // kv_heads * FIELDS)
        stage = i32(STAGES - 1)
        phase = i32(1)
        turn = i32(0)
        index = i32(cuda.blockIdx.x)
        while index < items:
            following = i32(0)
            if warp == 0 and lane == 0:
                following = i32(grid + atomic_inc(tiles, counter))
            item = i32(index // kv_heads * FIELDS)
            kvh = i32(index % kv_heads)
            queries, context, first = tiles[item + TILE_QUERIES], tiles[item + TILE_CONTEXT], tiles[item + TILE_FIRST]
            oldest, newest, start, count = work(context, queries, first, tiles[item + TILE_FLOOR], window)
            pages = i64(tiles[item + TILE_SEQ]) * t_s
            low = oldest >> BOX_SHIFT
            high = newest >> BOX_SHIFT
            there = i32(0)  # tokens of the last box, if it is not full
            if high == i32(context + queries - 1) >> BOX_SHIFT:
                there = i32((context + queries) & (BOX - 1))
            if warp == 0:
                mbarrier_wait(sa + EMPTY_Q, (turn & 1) ^ 1)
                if lane == 0:
                    mbarrier_expect(sa + FULL_Q, Q_BYTES)
                    row = tiles[item + TILE_ROW] + first // G
                    for part in range(PARTS):
                        tma_load_3d(sa + part * Q_PART, map_address(q_map), sa + FULL_Q, part * 64, kvh * G, row)
            tile_box = i32((start + count - 1) * BOXES)
            box = i32(tile_box + unit % BOXES)
            block = table[pages + (min(max(box, low), high) >> BLOCK_SHIFT)]
            for n in range(count):
                stage, phase = advance(stage, phase)
                mbarrier_wait(empty + 8 * stage, phase ^ 1)
                if lane == 0:
                    mbarrier_expect(full + 8 * stage, TILE // 2)
                cuda.syncwarp()
                by_rows = value == 1 and n == 0 and there > 0
                if mine and not (by_rows and box == high):
                    place = block
                    if box < low or box > high:
                        place = i32(-1)  # outside the array: zeros
                    token = (box & (PER_BLOCK - 1)) * BOX
                    tma_load_4d(to + stage * TILE, source, full + 8 * stage, column, kvh, token, place)
                if by_rows:
                    last = table[pages + (high >> BLOCK_SHIFT)]
                    target = stages + stage * TILE + (high - tile_box) * (BOX * SWIZZLE)
                    worker = warp % 2 * 32 + lane
                    bring_rows(target, map_address(row_map), full + 8 * stage, kvh, high, last, there, worker)
                box = i32(box - BOXES)
                block = table[pages + (min(max(box, low), high) >> BLOCK_SHIFT)]
            if warp == 0:
                mbarrier_wait(sa + NEXT_EMPTY + 8 * (turn & 1), ((turn >> 1) & 1) ^ 1)
                if lane == 0:
                    sts32(sa + NEXT + 4 * (turn & 1), following)
                    mbarrier_arrive(sa + NEXT_FULL + 8 * (turn & 1))
                index = i32(first_lane(following))
            else:
                index = i32(take(sa, turn, lane))
            turn = i32(turn + 1)
        if warp == 0 and lane == 0 and atomic_inc(tiles, counter + 1) == grid - 1:
            tiles[counter] = 0  # the last block leaves the counters as it found them
            tiles[counter + 1] = 0

    return produce


@device
def pick(condition, a, b):
    """a or b."""
    x = b
    if condition:
        x = a
    return x


@device
def exchange(w0, w1, w2, w3, t):
    """Four lanes with a word of each of four pieces of 16 bytes: lane t gets piece t whole, for one store of 16 bytes."""
    high = t >= 2
    odd = (t & 1) == 1
    r0 = shfl_word(pick(high, w0, w2), 2)
    r1 = shfl_word(pick(high, w1, w3), 2)
    k0 = pick(high, w2, w0)
    k1 = pick(high, w3, w1)
    even_low = pick(high, r0, k0)  # of the even piece, from the lane of the lower pair, then from that of the upper
    even_high = pick(high, k0, r0)
    odd_low = pick(high, r1, k1)
    odd_high = pick(high, k1, r1)
    low = shfl_word(pick(odd, even_low, odd_low), 1)
    up = shfl_word(pick(odd, even_high, odd_high), 1)
    return (pick(odd, low, even_low), pick(odd, odd_low, low), pick(odd, up, even_high), pick(odd, odd_high, up))


def row_functions(tile: HopperTile) -> tuple[Any, ...]:
    """Device functions cap_all, mask_after, mask_before, softmax, to_words, clear, rescale and store, on the fragments of
    a warpgroup.

    Row r of a lane (0 or 1) is row 8 r + lane / 4 of its warp's 16. Its scores are s[4 j + 2 r + y], of key
    8 j + 2 (lane % 4) + y; its outputs lie in o alike. The scores of 16 keys, packed, are the words of A for them.
    clear and rescale take at most 64 outputs at a time: the compiler unrolls no longer loop, and an index that is not a
    constant would put the array into memory.
    """
    G, D, ROWS = tile.shape.group, tile.shape.head_dim, tile.rows
    W, KEY_TILES, O_TILES, WORDS, SOME = D // 2, tile.keys // 8, D // 8, tile.keys // 4, min(64, D // 2)
    CAP, pack = tile.shape.soft_cap, half_ops(tile.shape.dtype).pack

    @device
    def cap_all(s, scale, cap):
        """The soft cap of all scores, if the shape has one."""
        if CAP:
            for e in range(4 * KEY_TILES):
                s[e] = soft_cap(s[e] * scale, cap)

    @device
    def mask_after(s, start, position):
        """Scores of keys after a row's position become NEG. start: the lane's first key."""
        for r in range(2):
            most = i32(position[r] - start)
            for j in range(KEY_TILES):
                for y in range(2):
                    if 8 * j + y > most:
                        s[4 * j + 2 * r + y] = f32(NEG)

    @device
    def mask_before(s, start, least):
        """Scores of keys before a row's first become NEG."""
        for r in range(2):
            fewest = i32(least[r] - start)
            for j in range(KEY_TILES):
                for y in range(2):
                    if 8 * j + y < fewest:
                        s[4 * j + 2 * r + y] = f32(NEG)

    @device
    def softmax(s, biggest, total, factor, unit):
        """s becomes weights; factor is what the outputs so far must shrink by."""
        for r in range(2):
            m = fmax(s[2 * r], s[2 * r + 1])
            for j in range(1, KEY_TILES):
                m = fmax(m, fmax(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]))
            m = fmax(m, shfl_xor(m, 1))
            m = fmax(m, shfl_xor(m, 2))
            grown = fmax(biggest[r], m * unit)
            factor[r] = exp2(biggest[r] - grown)
            biggest[r] = grown
            part = f32(0.0)
            for j in range(KEY_TILES):
                for y in range(2):
                    e = exp2(s[4 * j + 2 * r + y] * unit - grown)
                    s[4 * j + 2 * r + y] = e
                    part += e
            total[r] = total[r] * factor[r] + part

    @device
    def to_words(s, p):
        for i in range(WORDS):
            p[i] = pack(s[2 * i], s[2 * i + 1])

    @device
    def store(out, o, total, r0, first, t, row0, queries, o_s, kvh):
        """Write the output over the sum of its weights, for all existing rows."""
        for r in range(2):
            total[r] += shfl_xor(total[r], 1)
            total[r] += shfl_xor(total[r], 2)
            row = i32(r0 + 8 * r)
            inverse = f32(1.0) / total[r]
            exists = row < queries * G and row < first + ROWS
            at = (i64(row0) + row // G) * o_s + (kvh * G + row % G) * W
            for j in range(O_TILES // 4):
                e = 16 * j + 2 * r
                words = exchange(
                    pack(o[e] * inverse, o[e + 1] * inverse),
                    pack(o[e + 4] * inverse, o[e + 5] * inverse),
                    pack(o[e + 8] * inverse, o[e + 9] * inverse),
                    pack(o[e + 12] * inverse, o[e + 13] * inverse),
                    t,
                )
                if exists:
                    stg128(out, at + 16 * j + 4 * t, words)
            for j in range(O_TILES // 4 * 4, O_TILES):
                if exists:
                    out[at + 4 * j + t] = pack(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse)

    @device
    def clear(o, start):
        for e in range(SOME):
            o[start + e] = f32(0.0)

    @device
    def rescale(o, factor, start):
        for e in range(SOME):
            o[start + e] *= factor[e // 2 % 2]

    return cap_all, mask_after, mask_before, softmax, to_words, clear, rescale, store


def consumer(tile: HopperTile) -> Any:
    """Device function of the two warpgroups that compute, 64 rows each: from the newest tile of keys to the oldest.

    The scores of the next tile and the output of this one are in flight together, and the softmax runs under the latter.
    """
    shape, G, KEYS, STAGES, TILE = tile.shape, tile.shape.group, tile.keys, tile.stages, tile.kv_bytes
    SN, ON, PN, CAP = KEYS // 2, shape.head_dim // 2, KEYS // 4, shape.soft_cap
    K0, V0, V_COLUMNS = tile.k_at, tile.v_at, column_descriptor(tile.kv_part)
    BAR = tile.barriers_at
    FULL_V, EMPTY_K, EMPTY_V, FULL_Q = (BAR + i * 8 * STAGES for i in range(1, 5))
    STEPS = -(-shape.head_dim // 16)
    qk = wgmma_shared(shape.dtype, KEYS, base_descriptor(tile.q_part, STEPS), base_descriptor(tile.kv_part, STEPS))
    pv = wgmma_registers(shape.dtype, shape.head_dim, [i * SWIZZLE for i in range(KEYS // 16)])
    wait_all_s, wait_older, wait_all = wgmma_wait(0, SN), wgmma_wait(1, SN), wgmma_wait(0, ON)
    work, take, advance = work_of_tile(tile), take_next(tile), next_stage(tile.stages)
    cap_all, mask_after, mask_before, softmax, to_words, clear, rescale, store = row_functions(tile)

    @device
    def consume(sa, tid, me, out, tiles, scale, cap, window, o_s, kv_heads, items):
        lane = tid % 32
        warp = tid % 128 // 32
        column = 2 * (lane % 4)
        s = cuda.local.array(SN, f32)
        o = cuda.local.array(ON, f32)
        p = cuda.local.array(PN, u32)
        biggest = cuda.local.array(2, f32)
        total = cuda.local.array(2, f32)
        factor = cuda.local.array(2, f32)
        position = cuda.local.array(2, i32)
        least = cuda.local.array(2, i32)
        dq = i64((sa + me * (64 * SWIZZLE)) >> 4) | i64(K_MAJOR)
        dk = i64((sa + K0) >> 4) | i64(K_MAJOR)
        dv = i64((sa + V0) >> 4) | i64(V_COLUMNS)
        unit = scale
        if CAP:
            unit = f32(1.0)
        stage = i32(STAGES - 1)
        phase = i32(1)
        turn = i32(0)
        index = i32(cuda.blockIdx.x)
        while index < items:
            item = i32(index // kv_heads * FIELDS)
            queries, context, first = tiles[item + TILE_QUERIES], tiles[item + TILE_CONTEXT], tiles[item + TILE_FIRST]
            floor = tiles[item + TILE_FLOOR]
            _, _, start, count = work(context, queries, first, floor, window)
            top = i32(first + 64 * me)
            r0 = i32(top + warp * 16 + lane // 4)
            for r in range(2):
                position[r] = i32(context + min(i32((r0 + 8 * r) // G), i32(queries - 1)))
                least[r] = i32(max(floor, i32(position[r] - window + 1)))
                biggest[r] = f32(NEG)
                total[r] = f32(0.0)
            lowest = i32(context + top // G)  # all rows of the warpgroup see what lies between safe and lowest
            safe = i32(max(floor, i32(context + min(i32((top + 63) // G), i32(queries - 1)) - window + 1)))
            clear(o, 0)
            if ON > 64:
                clear(o, 64)
            stage, phase = advance(stage, phase)
            mbarrier_wait(sa + FULL_Q, turn & 1)
            mbarrier_wait(sa + BAR + 8 * stage, phase)
            qk(s, dq, dk + stage * (TILE // 16))
            wait_all_s(s)
            if lane == 0:
                mbarrier_arrive(sa + EMPTY_K + 8 * stage)
            cap_all(s, scale, cap)
            base = i32((start + count - 1) * KEYS)
            mask_after(s, i32(base + column), position)
            if base < safe:
                mask_before(s, i32(base + column), least)
            softmax(s, biggest, total, factor, unit)
            to_words(s, p)
            for n in range(1, count):
                before = stage
                before_phase = phase
                stage, phase = advance(stage, phase)
                mbarrier_wait(sa + BAR + 8 * stage, phase)
                qk(s, dq, dk + stage * (TILE // 16))
                mbarrier_wait(sa + FULL_V + 8 * before, before_phase)
                pv(o, p, dv + before * (TILE // 16))
                wait_older(s)
                if lane == 0:
                    mbarrier_arrive(sa + EMPTY_K + 8 * stage)
                cap_all(s, scale, cap)
                base = i32(base - KEYS)
                if base + KEYS - 1 > lowest:
                    mask_after(s, i32(base + column), position)
                if base < safe:
                    mask_before(s, i32(base + column), least)
                softmax(s, biggest, total, factor, unit)
                after(total[0] + total[1])
                wait_all(o)
                if lane == 0:
                    mbarrier_arrive(sa + EMPTY_V + 8 * before)
                rescale(o, factor, 0)
                if ON > 64:
                    rescale(o, factor, 64)
                to_words(s, p)
            if lane == 0:
                mbarrier_arrive(sa + FULL_Q + 8)
            mbarrier_wait(sa + FULL_V + 8 * stage, phase)
            pv(o, p, dv + stage * (TILE // 16))
            wait_all(o)
            if lane == 0:
                mbarrier_arrive(sa + EMPTY_V + 8 * stage)
            store(out, o, total, r0, first, lane % 4, tiles[item + TILE_ROW], queries, o_s, index % kv_heads)
            index = i32(take(sa, turn, lane))
            turn = i32(turn + 1)

    return consume


@kernel_maker
def wgmma_tiles(shape: AttentionShape) -> CudaKernel:
    """Rung 4: warpgroups multiply straight from shared memory. Grid (multiprocessors, 1), or fewer if there is less work."""
    tile = HopperTile(shape)
    STAGES, BAR = tile.stages, tile.barriers_at
    produce, consume = producer(tile), consumer(tile)
    name = f"prefill_wgmma_{shape.name}"

    @kernel(HOPPER_SIGNATURE, HOPPER_THREADS, name, min_blocks=1, shared_bytes=tile.shared_bytes, hopper_only=True)
    def prefill_wgmma(out, q_map, k_map, v_map, row_map, table, tiles, scale, cap, window, t_s, o_s, kv_heads, items):
        shared = cuda.shared.array(0, U32)
        tid = cuda.threadIdx.x
        sa = (i32(smem_addr(shared)) + 1023) & -1024
        group = first_lane(tid // 128)
        if tid == 0:
            for i in range(2 * STAGES):  # full: the two warps that bring it; empty: the eight that read it
                mbarrier_init(sa + BAR + 8 * i, 2)
                mbarrier_init(sa + BAR + 16 * STAGES + 8 * i, 8)
            mbarrier_init(sa + BAR + 32 * STAGES, 1)
            mbarrier_init(sa + BAR + 32 * STAGES + 8, 8)
            for i in range(2):  # said by one warp, read by the eleven others
                mbarrier_init(sa + BAR + 32 * STAGES + 16 + 8 * i, 1)
                mbarrier_init(sa + BAR + 32 * STAGES + 32 + 8 * i, 11)
            mbarrier_fence()
        cuda.syncthreads()
        if group == 0:
            fewer_registers()
            produce(sa, tid, q_map, k_map, v_map, row_map, table, tiles, window, t_s, kv_heads, items)
        else:
            more_registers()
            consume(sa, tid, group - 1, out, tiles, scale, cap, window, o_s, kv_heads, items)

    return prefill_wgmma


@functools.lru_cache(1024)
def attention_maps(
    shape: AttentionShape, keys: int, values: int, blocks: int, kv_heads: int
) -> tuple[bytes, bytes, bytes]:
    """Tensor maps of K, of V, and of single rows of V, for a contiguous cache at two addresses."""
    head = shape.head_dim * 2
    sizes = (shape.head_dim, kv_heads, shape.block_size, blocks)
    strides = (head, kv_heads * head, shape.block_size * kv_heads * head)
    box = (64, 1, HopperTile(shape).box, 1)
    maps = [tensor_map(at, shape.dtype, sizes, strides, box) for at in (keys, values)]
    return maps[0], maps[1], tensor_map(values, shape.dtype, sizes, strides, (64, 1, 1, 1))


def query_map(shape: AttentionShape, q: int, tokens: int, kv_heads: int, q_stride: int) -> bytes:
    """Tensor map of queries [tokens, heads, head_dim] at an address, `q_stride` bytes from one token to the next."""
    heads, tile = kv_heads * shape.group, HopperTile(shape)
    box = (64, shape.group, tile.rows // shape.group)
    return tensor_map(q, shape.dtype, (shape.head_dim, heads, tokens), (shape.head_dim * 2, q_stride), box)
