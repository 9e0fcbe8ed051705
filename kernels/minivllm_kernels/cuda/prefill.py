"""CUDA prefill attention: tiles on tensor cores."""

# Generated from nbs/numba_kernels/cuda/prefill.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from dataclasses import replace
from typing import Any

from numba import types

from minivllm_kernels.cuda.decode import cache_format, scale_places, soft_cap
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
from minivllm_kernels.cuda.simt import NEG, CudaKernel, cuda, device, f32, half_ops, i64, kernel, kernel_maker
from minivllm_kernels.cuda.warp import (
    SIM,
    as_f32,
    bf16_hi,
    bf16_lo,
    cp_async16,
    cp_commit,
    cp_wait_older,
    e4m3_hi,
    e4m3_lo,
    exp2,
    fmax,
    int8_hi,
    int8_lo,
    ldg128,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    shfl_xor,
    smem_addr,
    sts128,
)

__all__ = [
    "NO_WINDOW", "PREFILL_SIGNATURE", "U32", "best_warps", "mma_tiles", "pitch_of", "tile_keys", "warp_rows",
]  # fmt: skip

PREFILL_SIGNATURE = " ".join(
    ["u32* u32* u32* u32*"]  # out, q, kc and vc (the K and the V cache)
    + ["i32* i32*"]  # table (of blocks), tiles
    + ["f32 f32 f32 i32"]  # scale (log2(e) included), cap, v_scale, window (tokens that a query sees)
    + ["i32 i32 i32"]  # t_s, q_s, o_s: from one row to the next of the block table, q, out
    + ["i64 i32 i32"]  # s_blk, s_tok, s_head: from one block, token, KV head to the next in the cache
)
NO_WINDOW = 1 << 30

U32: Any = types.uint32  # dynamic shared memory wants a numba type, in the simulator too


def tile_keys(shape: AttentionShape) -> int:
    """Keys that rung 3 takes at a time: as many scores as its registers hold."""
    return 32 if SIM or shape.head_dim > 64 else 64


def warp_rows(shape: AttentionShape) -> int:
    """Rows of a warp of rung 3: two tiles of 16, or one where two would not fit in its registers."""
    return 16 if shape.head_dim > 128 else 32


def best_warps(shape: AttentionShape) -> int:
    """Warps per block of rung 3: what was fastest on an H100."""
    return 8 if 64 < shape.head_dim <= 128 else 4


def pitch_of(shape: AttentionShape) -> int:
    """Bytes from one row of shared memory to the next: 16 more than a row has, so that 8 rows lie in different banks."""
    return shape.head_dim * 2 + 16


def tile_loaders(shape: AttentionShape, warps: int) -> tuple[Any, Any]:
    """Device functions load_q and load_kv: from global to shared memory, 16 bytes per thread."""
    D, G = shape.head_dim, shape.group
    SHIFT, MASK = shape.block_size.bit_length() - 1, shape.block_size - 1
    PITCH, CHUNKS, W = pitch_of(shape), D // 8, D // 2  # 16-byte chunks of a row
    COLUMNS = 8 if D <= 64 else 16 if D <= 128 else 32  # threads a row, a power of two
    LOAD_ROWS = warps * 32 // COLUMNS
    Q_STEPS, KV_STEPS = warps * warp_rows(shape) // LOAD_ROWS, tile_keys(shape) // LOAD_ROWS
    format, half = cache_format(shape), half_ops(shape.dtype)
    PIECE, read, query = format.words, format.fetch, format.query
    SCALED, scale_place = format.scaled, scale_places(shape)
    pack, fetch_q = half.pack, cp_async16

    @device
    def times(word, scale):
        return pack(bf16_lo(word) * scale, bf16_hi(word) * scale)

    @device
    def fetch_int8(sa, to, cache, at, scale):
        """Numbers of an int8 cache become those of the model's dtype on the way."""
        x = read(cache, at)
        low = times(int8_lo(x[0]), scale), times(int8_hi(x[0]), scale)
        sts128(sa, to, low[0], low[1], times(int8_lo(x[1]), scale), times(int8_hi(x[1]), scale))

    if shape.fp8_kv:

        @device
        def fetch(sa, to, cache, at):
            x = read(cache, at)
            sts128(sa, to, e4m3_lo(x[0]), e4m3_hi(x[0]), e4m3_lo(x[1]), e4m3_hi(x[1]))

        @device
        def fetch_q(sa, to, q, at):
            x = ldg128(q, at)
            sts128(sa, to, query(x[0]), query(x[1]), query(x[2]), query(x[3]))
    else:
        fetch = cp_async16

    @device
    def load_q(q, row0, first, queries, q_s, kvh, sa, tid):
        """Start fetching the rows of the tile from row `first` on; the last query replaces rows past the end."""
        column = tid % COLUMNS
        if column < CHUNKS:
            for i in range(Q_STEPS):
                local = tid // COLUMNS + i * LOAD_ROWS
                r = first + local
                at = (i64(row0) + min(r // G, queries - 1)) * q_s + (kvh * G + r % G) * W + column * 4
                fetch_q(sa, local * PITCH + column * 16, q, at)

    @functools.partial(device, early=True)  # inlined by LLVM, it spills registers
    def load_kv(to, cache, base, oldest, newest, table, pages, s_blk, s_tok, kv_at, sa, tid):
        """Start fetching the keys from `base` on; tokens that no row sees are replaced by one that is seen."""
        column = tid % COLUMNS
        if column < CHUNKS:
            for i in range(KV_STEPS):
                r = tid // COLUMNS + i * LOAD_ROWS
                tok = max(min(base + r, newest), oldest)
                block = table[pages + (tok >> SHIFT)]
                at = i64(block) * s_blk + (tok & MASK) * s_tok + kv_at + column * PIECE
                if SCALED:
                    scale = as_f32(cache[scale_place(block, tok, s_blk, s_tok, kv_at)])
                    fetch_int8(sa, to + r * PITCH + column * 16, cache, at, scale)
                else:
                    fetch(sa, to + r * PITCH + column * 16, cache, at)

    return load_q, load_kv


def tile_matmuls(shape: AttentionShape) -> tuple[Any, Any]:
    """Device functions qk and pv: the two matmuls of a tile, for the 16 or 32 rows of a warp."""
    M = warp_rows(shape) // 16  # tiles of 16 rows a warp
    PITCH, QK_STEPS, S_TILES, O_TILES = (
        pitch_of(shape),
        shape.head_dim // 16,
        tile_keys(shape) // 8,
        shape.head_dim // 8,
    )
    SN = S_TILES * 4 * M
    format = cache_format(replace(shape, int8_kv=False))
    pack, mma = format.pack, format.mma

    @device
    def add_mma(c, e, a0, a1, a2, a3, b0, b1):
        """c[e : e + 4] += A B."""
        d = mma(a0, a1, a2, a3, b0, b1, c[e], c[e + 1], c[e + 2], c[e + 3])
        for y in range(4):
            c[e + y] = d[y]

    @device
    def qk(s, sa, q_at, k_at):
        """S = Q K^T for the warp's rows and the keys of the tile."""
        for e in range(SN):
            s[e] = f32(0.0)
        for step in range(QK_STEPS):
            a = ldmatrix_x4(sa, q_at + step * 32)
            b = a
            if M == 2:
                b = ldmatrix_x4(sa, q_at + 16 * PITCH + step * 32)
            for j in range(S_TILES // 2):
                f = ldmatrix_x4(sa, k_at + j * (16 * PITCH) + step * 32)
                for h in range(2):
                    e = (j * 2 + h) * 4 * M
                    add_mma(s, e, a[0], a[1], a[2], a[3], f[2 * h], f[2 * h + 1])
                    if M == 2:
                        add_mma(s, e + 4, b[0], b[1], b[2], b[3], f[2 * h], f[2 * h + 1])

    @device
    def pv(o, s, sa, v_at, step):
        """O += P V for 16 keys. One call per step keeps every index into the registers a constant."""
        e = step * 8 * M
        n = 4 * M
        a0 = pack(s[e], s[e + 1])
        a1 = pack(s[e + 2], s[e + 3])
        a2 = pack(s[e + n], s[e + n + 1])
        a3 = pack(s[e + n + 2], s[e + n + 3])
        b0 = a0
        b1 = a1
        b2 = a2
        b3 = a3
        if M == 2:
            b0 = pack(s[e + 4], s[e + 5])
            b1 = pack(s[e + 6], s[e + 7])
            b2 = pack(s[e + 12], s[e + 13])
            b3 = pack(s[e + 14], s[e + 15])
        for j in range(O_TILES // 2):
            f = ldmatrix_x4_trans(sa, v_at + step * (16 * PITCH) + j * 32)
            for h in range(2):
                y = (j * 2 + h) * 4 * M
                add_mma(o, y, a0, a1, a2, a3, f[2 * h], f[2 * h + 1])
                if M == 2:
                    add_mma(o, y + 4, b0, b1, b2, b3, f[2 * h], f[2 * h + 1])

    return qk, pv


def tile_softmax(shape: AttentionShape, warps: int) -> tuple[Any, Any, Any]:
    """Device functions mask, softmax and store, on the fragments of a warp.

    Row r of a lane is row g + 8 r of its warp. Its scores are s[(j * R + r) * 2 + y], of key 8 j + 2 t + y of the tile; its
    output is o in the same order, of dim 8 j + 2 t + y.
    """
    G, W, RW = shape.group, shape.head_dim // 2, warp_rows(shape)
    R, S_TILES, O_TILES = RW // 8, tile_keys(shape) // 8, shape.head_dim // 8
    pack = half_ops(shape.dtype).pack

    @device
    def mask(s, base, row, t, context, queries, oldest, window):
        """Scores of keys that a row does not see become NEG. row: the lane's first."""
        for r in range(R):
            position = context + min((row + 8 * r) // G, queries - 1)
            least = max(oldest, position - window + 1)
            for j in range(S_TILES):
                for y in range(2):
                    key = base + j * 8 + 2 * t + y
                    if key > position or key < least:
                        s[(j * R + r) * 2 + y] = f32(NEG)

    @device
    def softmax(s, o, m, total, m_new, unit):
        """The online softmax: s becomes weights, o and the sums shrink by alpha, m becomes the new maxima."""
        for r in range(R):
            m_new[r] = f32(NEG)
        for j in range(S_TILES):
            for r in range(R):
                m_new[r] = fmax(m_new[r], fmax(s[(j * R + r) * 2], s[(j * R + r) * 2 + 1]))
        for r in range(R):
            m_new[r] = fmax(m_new[r], shfl_xor(m_new[r], 1))
            m_new[r] = fmax(m[r], fmax(m_new[r], shfl_xor(m_new[r], 2)) * unit)
            m[r] = exp2(m[r] - m_new[r])  # for a moment: alpha
            total[r] *= m[r]
        for j in range(O_TILES):
            for r in range(R):
                o[(j * R + r) * 2] *= m[r]
                o[(j * R + r) * 2 + 1] *= m[r]
        for r in range(R):
            m[r] = m_new[r]
        for j in range(S_TILES):
            for r in range(R):
                for y in range(2):
                    e = (j * R + r) * 2 + y
                    s[e] = exp2(s[e] * unit - m[r])
                    total[r] += s[e]

    @device
    def store(out, o, total, row, t, row0, queries, o_s, kvh, v_scale):
        """Write the output over the sum of its weights, for all existing rows."""
        for r in range(R):
            total[r] += shfl_xor(total[r], 1)
            total[r] += shfl_xor(total[r], 2)
            one = row + 8 * r
            inverse = v_scale / total[r]
            if one < queries * G:
                at = (i64(row0) + one // G) * o_s + (kvh * G + one % G) * W
                for j in range(O_TILES):
                    e = (j * R + r) * 2
                    out[at + j * 4 + t] = pack(o[e] * inverse, o[e + 1] * inverse)

    return mask, softmax, store


@kernel_maker
def mma_tiles(shape: AttentionShape, warps: int) -> CudaKernel:
    """Rung 3: tensor cores. Grid (KV heads, tiles of warps * warp_rows(shape) rows)."""
    G, CAP, KEYS, RW, PITCH = shape.group, shape.soft_cap, tile_keys(shape), warp_rows(shape), pitch_of(shape)
    R, ROWS, THREADS, PV_STEPS = RW // 8, warps * RW, warps * 32, KEYS // 16
    SN, ON = KEYS // 8 * R * 2, shape.head_dim // 8 * R * 2
    K0, V0 = ROWS * PITCH, (ROWS + KEYS) * PITCH  # where K and V start in shared memory
    SHARED = (ROWS + 2 * KEYS) * PITCH
    load_q, load_kv = tile_loaders(shape, warps)
    qk, pv = tile_matmuls(shape)
    mask, softmax, store = tile_softmax(shape, warps)

    @kernel(PREFILL_SIGNATURE, THREADS, f"prefill_mma_{shape.name}_w{warps}", shared_bytes=SHARED)
    def prefill_mma(out, q, kc, vc, table, tiles, scale, cap, v_scale, window, t_s, q_s, o_s, s_blk, s_tok, s_head):
        shared = cuda.shared.array(0, U32)
        kvh = cuda.blockIdx.x
        item = cuda.blockIdx.y * FIELDS
        seq, row0, queries = tiles[item + TILE_SEQ], tiles[item + TILE_ROW], tiles[item + TILE_QUERIES]
        context, first = tiles[item + TILE_CONTEXT], tiles[item + TILE_FIRST]
        if seq < 0:
            return
        tid = cuda.threadIdx.x
        warp = tid // 32
        lane = tid % 32
        t = lane % 4
        row = first + warp * RW + lane // 4  # this lane's first
        sa = smem_addr(shared)
        kv_at = kvh * s_head
        pages = i64(seq) * t_s
        s = cuda.local.array(SN, f32)
        o = cuda.local.array(ON, f32)
        m = cuda.local.array(R, f32)
        m_new = cuda.local.array(R, f32)
        total = cuda.local.array(R, f32)
        for e in range(ON):
            o[e] = f32(0.0)
        for r in range(R):
            m[r] = f32(NEG)
            total[r] = f32(0.0)
        lowest = context + first // G  # positions of the tile's first and last row
        newest = context + min((first + ROWS - 1) // G, queries - 1)
        oldest = max(tiles[item + TILE_FLOOR], lowest - window + 1)
        start = oldest // KEYS
        stop = newest // KEYS + 1
        matrix = lane // 8  # of the four that an ldmatrix loads, the one whose row this lane names
        lr = lane % 8
        q_at = (warp * RW + (matrix % 2) * 8 + lr) * PITCH + (matrix // 2) * 16
        k_at = K0 + ((matrix // 2) * 8 + lr) * PITCH + (matrix % 2) * 16
        v_at = V0 + ((matrix % 2) * 8 + lr) * PITCH + (matrix // 2) * 16
        load_q(q, row0, first, queries, q_s, kvh, sa, tid)
        load_kv(K0, kc, start * KEYS, oldest, newest, table, pages, s_blk, s_tok, kv_at, sa, tid)
        cp_commit()
        for tile in range(start, stop):
            base = tile * KEYS
            load_kv(V0, vc, base, oldest, newest, table, pages, s_blk, s_tok, kv_at, sa, tid)
            cp_commit()
            cp_wait_older()  # K is here, V in flight
            cuda.syncthreads()
            qk(s, sa, q_at, k_at)
            cuda.syncthreads()
            if tile + 1 < stop:
                load_kv(K0, kc, base + KEYS, oldest, newest, table, pages, s_blk, s_tok, kv_at, sa, tid)
            cp_commit()
            unit = scale
            if CAP:
                for e in range(SN):
                    s[e] = soft_cap(s[e] * scale, cap)
                unit = f32(1.0)
            if base + KEYS - 1 > lowest or base <= newest - window or base < oldest:  # the mask is for tiles on an edge
                mask(s, base, row, t, context, queries, oldest, window)
            softmax(s, o, m, total, m_new, unit)
            cp_wait_older()  # V is here, the next K in flight
            cuda.syncthreads()
            pv(o, s, sa, v_at, 0)
            pv(o, s, sa, v_at, 1)
            if PV_STEPS == 4:
                pv(o, s, sa, v_at, 2)
                pv(o, s, sa, v_at, 3)
            cuda.syncthreads()
        store(out, o, total, row, t, row0, queries, o_s, kvh, v_scale)

    return prefill_mma
