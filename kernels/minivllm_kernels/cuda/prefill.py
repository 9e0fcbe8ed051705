"""CUDA prefill attention: naive, shared-memory tiles, tensor-core tiles."""

# Generated from nbs/numba_kernels/cuda/prefill.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools
from typing import Any

from numba import types

from minivllm_kernels.cuda.decode import capped, same_half
from minivllm_kernels.cuda.planning import AttentionShape
from minivllm_kernels.cuda.simt import (
    NEG,
    SIM,
    Kernel,
    cp_async16,
    cp_commit,
    cp_wait_older,
    cuda,
    device,
    e4m3_hi,
    e4m3_lo,
    exp2,
    f32,
    fmax,
    half_ops,
    i64,
    kernel,
    ldg64_stream,
    ldg128,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    shfl_xor,
    smem_addr,
    sts128,
    u32,
)

__all__ = [
    "FMA_KEYS", "FMA_ROWS", "NO_WINDOW", "PREFILL_SIGNATURE", "U32", "best_warps", "fma_tiles", "mma_tiles",
    "naive", "tile_keys", "warp_rows",
]  # fmt: skip


# %% nbs/numba_kernels/cuda/prefill.ipynb #code-afb663
PREFILL_SIGNATURE = " ".join(
    ["u32* u32* u32* u32*"]  # out, q, k cache, v cache
    + ["i32* i32*"]  # block table, tiles
    + ["f32 f32 f32 i32"]  # scale (log2(e) included), cap, scale of V, window (tokens that a query sees)
    + ["i32 i32 i32"]  # block table, q, out: from one row to the next
    + ["i64 i32 i32"]  # cache: from one block, token, KV head to the next
)
NO_WINDOW = 1 << 30


# %% nbs/numba_kernels/cuda/prefill.ipynb #naive
@functools.cache
def naive(shape: AttentionShape) -> Kernel:
    """Rung 1: one warp a row. Grid (KV heads, tiles of one row)."""
    W = shape.head_dim // 2
    C = -(-W // 32)
    C2 = 2 * C
    G, BS, CAP = shape.group, shape.block_size, shape.soft_cap
    half = same_half(shape)
    lo, hi, pack = half.lo, half.hi, half.pack

    @kernel(PREFILL_SIGNATURE, threads=32, name=f"prefill_naive_{shape.name}")
    def prefill_naive(out, q, kc, vc, table, tiles, scale, cap, v_scale, window, t_s, q_s, o_s, s_blk, s_tok, s_head):
        kvh = cuda.blockIdx.x
        item = cuda.blockIdx.y * 8
        lane = cuda.threadIdx.x
        seq, row0, context, r, floor = tiles[item], tiles[item + 1], tiles[item + 3], tiles[item + 4], tiles[item + 5]
        if seq < 0:
            return
        row = i64(row0) + r // G
        head = kvh * G + r % G
        position = context + r // G
        qv = cuda.local.array(C2, f32)
        acc = cuda.local.array(C2, f32)
        for c in range(C):
            x = u32(0)
            if lane + 32 * c < W:
                x = q[row * q_s + head * W + lane + 32 * c]
            qv[2 * c] = lo(x)
            qv[2 * c + 1] = hi(x)
            acc[2 * c] = f32(0.0)
            acc[2 * c + 1] = f32(0.0)
        biggest = f32(NEG)
        total = f32(0.0)
        for tok in range(max(floor, position - window + 1), position + 1):
            at = i64(table[i64(seq) * t_s + tok // BS]) * s_blk + (tok % BS) * s_tok + kvh * s_head + lane
            s = f32(0.0)
            for c in range(C):
                if lane + 32 * c < W:
                    x = kc[at + 32 * c]
                    s += qv[2 * c] * lo(x) + qv[2 * c + 1] * hi(x)
            s += shfl_xor(s, 16)
            s += shfl_xor(s, 8)
            s += shfl_xor(s, 4)
            s += shfl_xor(s, 2)
            s += shfl_xor(s, 1)
            s *= scale
            if CAP:
                s = capped(s, cap)
            grown = fmax(biggest, s)
            shrink = exp2(biggest - grown)
            p = exp2(s - grown)
            biggest = grown
            total = total * shrink + p
            for c in range(C):
                if lane + 32 * c < W:
                    x = vc[at + 32 * c]
                    acc[2 * c] = acc[2 * c] * shrink + p * lo(x)
                    acc[2 * c + 1] = acc[2 * c + 1] * shrink + p * hi(x)
        total /= v_scale
        for c in range(C):
            if lane + 32 * c < W:
                out[row * o_s + head * W + lane + 32 * c] = pack(acc[2 * c] / total, acc[2 * c + 1] / total)

    return prefill_naive


# %% nbs/numba_kernels/cuda/prefill.ipynb #fma_tiles
FMA_ROWS = 16
FMA_KEYS = 16


@functools.cache
def fma_tiles(shape: AttentionShape) -> Kernel:
    """Rung 2: tiles through shared memory, ordinary arithmetic. Grid (KV heads, tiles of FMA_ROWS rows)."""
    W = shape.head_dim // 2
    E = W // 8  # words of a row that one thread owns
    E2 = 2 * E
    ROWS, KEYS = FMA_ROWS, FMA_KEYS
    THREADS = ROWS * 8
    SIZE = KEYS * W
    G, BS, CAP = shape.group, shape.block_size, shape.soft_cap
    half = same_half(shape)
    lo, hi, pack = half.lo, half.hi, half.pack

    @kernel(PREFILL_SIGNATURE, threads=THREADS, name=f"prefill_fma_{shape.name}")
    def prefill_fma(out, q, kc, vc, table, tiles, scale, cap, v_scale, window, t_s, q_s, o_s, s_blk, s_tok, s_head):
        shared_k = cuda.shared.array(SIZE, u32)
        shared_v = cuda.shared.array(SIZE, u32)
        kvh = cuda.blockIdx.x
        item = cuda.blockIdx.y * 8
        seq, row0, queries, context, first = (
            tiles[item],
            tiles[item + 1],
            tiles[item + 2],
            tiles[item + 3],
            tiles[item + 4],
        )
        if seq < 0:
            return
        tid = cuda.threadIdx.x
        part = tid % 8
        r = min(first + tid // 8, queries * G - 1)  # rows past the end repeat the last one
        row = i64(row0) + r // G
        head = kvh * G + r % G
        position = context + r // G
        oldest = max(tiles[item + 5], context + first // G - window + 1)  # first key that any row of the tile sees
        newest = context + min((first + ROWS - 1) // G, queries - 1)
        qv = cuda.local.array(E2, f32)
        acc = cuda.local.array(E2, f32)
        for w in range(E):
            x = q[row * q_s + head * W + part * E + w]
            qv[2 * w] = lo(x)
            qv[2 * w + 1] = hi(x)
            acc[2 * w] = f32(0.0)
            acc[2 * w + 1] = f32(0.0)
        biggest = f32(NEG)
        total = f32(0.0)
        for base in range(oldest, newest + 1, KEYS):
            cuda.syncthreads()
            for e in range(tid, SIZE, THREADS):
                tok = min(base + e // W, newest)
                at = i64(table[i64(seq) * t_s + tok // BS]) * s_blk + (tok % BS) * s_tok + kvh * s_head + e % W
                shared_k[e] = kc[at]
                shared_v[e] = vc[at]
            cuda.syncthreads()
            for key in range(KEYS):
                s = f32(0.0)
                for w in range(E):
                    x = shared_k[key * W + part * E + w]
                    s += qv[2 * w] * lo(x) + qv[2 * w + 1] * hi(x)
                s += shfl_xor(s, 1)
                s += shfl_xor(s, 2)
                s += shfl_xor(s, 4)
                s *= scale
                if CAP:
                    s = capped(s, cap)
                if base + key <= position and base + key > position - window:
                    grown = fmax(biggest, s)
                    shrink = exp2(biggest - grown)
                    p = exp2(s - grown)
                    biggest = grown
                    total = total * shrink + p
                    for w in range(E):
                        x = shared_v[key * W + part * E + w]
                        acc[2 * w] = acc[2 * w] * shrink + p * lo(x)
                        acc[2 * w + 1] = acc[2 * w + 1] * shrink + p * hi(x)
        total /= v_scale
        if first + tid // 8 < queries * G:
            for w in range(E):
                out[row * o_s + head * W + part * E + w] = pack(acc[2 * w] / total, acc[2 * w + 1] / total)

    return prefill_fma


# %% nbs/numba_kernels/cuda/prefill.ipynb #tile_keys
U32: Any = types.uint32  # dynamic shared memory wants a numba type, in the simulator too


def tile_keys(shape: AttentionShape) -> int:
    """Keys that rung 3 takes at a time: as many scores as its registers hold."""
    return 32 if SIM or shape.head_dim > 64 else 64


def warp_rows(shape: AttentionShape) -> int:
    """Rows of a warp of rung 3: two tiles of 16, or one where two would not fit in its registers."""
    return 16 if shape.head_dim > 128 else 32


def best_warps(shape: AttentionShape) -> int:
    """Warps a block of rung 3: what was fastest on an H100."""
    return 8 if 64 < shape.head_dim <= 128 else 4


@functools.cache
def mma_tiles(shape: AttentionShape, warps: int) -> Kernel:
    """Rung 3: tensor cores. Grid (KV heads, tiles of warps * warp_rows(shape) rows)."""
    D, G, BS, CAP = shape.head_dim, shape.group, shape.block_size, shape.soft_cap
    SHIFT, MASK = BS.bit_length() - 1, BS - 1
    W = D // 2
    KEYS, RW = tile_keys(shape), warp_rows(shape)
    M = RW // 16  # tiles of 16 rows a warp
    R = 2 * M  # rows a lane has a share of: g and g + 8 of each tile
    ROWS = warps * RW
    PITCH = (W + 4) * 4  # bytes from one row of shared memory to the next
    CHUNKS = D // 8  # 16-byte chunks of a row
    COLUMNS = 8 if D <= 64 else 16 if D <= 128 else 32  # threads a row when loading, a power of two
    QK_STEPS, S_TILES, O_TILES = D // 16, KEYS // 8, D // 8
    PV_STEPS = KEYS // 16
    SN, ON = S_TILES * 4 * M, O_TILES * 4 * M
    THREADS = warps * 32
    LOAD_ROWS = THREADS // COLUMNS
    K0, V0 = ROWS * PITCH, (ROWS + KEYS) * PITCH  # where K and V start in shared memory
    SHARED = (ROWS + 2 * KEYS) * PITCH
    half = half_ops(shape.dtype)
    inner = half_ops("float16") if shape.fp8_kv else half  # every e4m3 is a float16
    lo, hi, pack = half.lo, half.hi, half.pack
    narrow, mma = inner.pack, inner.mma
    PIECE = 2 if shape.fp8_kv else 4  # words of 8 numbers in the cache

    if shape.fp8_kv:

        @device
        def fetch(sa, to, cache, at):
            """Eight numbers from the cache to shared memory, as 16-bit floats."""
            x = ldg64_stream(cache, at)
            sts128(sa, to, e4m3_lo(x[0]), e4m3_hi(x[0]), e4m3_lo(x[1]), e4m3_hi(x[1]))

        @device
        def fetch_q(sa, to, q, at):
            x = ldg128(q, at)
            a = narrow(lo(x[0]), hi(x[0]))
            b = narrow(lo(x[1]), hi(x[1]))
            c = narrow(lo(x[2]), hi(x[2]))
            sts128(sa, to, a, b, c, narrow(lo(x[3]), hi(x[3])))
    else:
        fetch = fetch_q = cp_async16

    @device
    def load(to, cache, base, oldest, newest, table, pages, s_blk, s_tok, off, sa, tid):
        """Start fetching KEYS tokens from `base` on; tokens that nobody sees are replaced by one that is seen."""
        column = tid % COLUMNS
        if column < CHUNKS:
            for i in range(KEYS // LOAD_ROWS):
                r = tid // COLUMNS + i * LOAD_ROWS
                tok = max(min(base + r, newest), oldest)
                at = i64(table[pages + (tok >> SHIFT)]) * s_blk + (tok & MASK) * s_tok + off + column * PIECE
                fetch(sa, to + r * PITCH + column * 16, cache, at)

    @device
    def scores(s, sa, q_at, k_at):
        """S = Q K^T for the warp's rows and the KEYS of the tile."""
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
                    c = mma(a[0], a[1], a[2], a[3], f[2 * h], f[2 * h + 1], s[e], s[e + 1], s[e + 2], s[e + 3])
                    for y in range(4):
                        s[e + y] = c[y]
                    if M == 2:
                        d = mma(b[0], b[1], b[2], b[3], f[2 * h], f[2 * h + 1], s[e + 4], s[e + 5], s[e + 6], s[e + 7])
                        for y in range(4):
                            s[e + 4 + y] = d[y]

    @device
    def values(o, s, sa, v_at, step):
        """O += P V for 16 keys; one call a step, so that every index into the registers is a constant."""
        e = step * 8 * M
        a0 = narrow(s[e], s[e + 1])
        a1 = narrow(s[e + 2], s[e + 3])
        a2 = narrow(s[e + 4 * M], s[e + 4 * M + 1])
        a3 = narrow(s[e + 4 * M + 2], s[e + 4 * M + 3])
        b0 = a0
        b1 = a1
        b2 = a2
        b3 = a3
        if M == 2:
            b0 = narrow(s[e + 4], s[e + 5])
            b1 = narrow(s[e + 6], s[e + 7])
            b2 = narrow(s[e + 12], s[e + 13])
            b3 = narrow(s[e + 14], s[e + 15])
        for j in range(O_TILES // 2):
            f = ldmatrix_x4_trans(sa, v_at + step * (16 * PITCH) + j * 32)
            for h in range(2):
                y = (j * 2 + h) * 4 * M
                c = mma(a0, a1, a2, a3, f[2 * h], f[2 * h + 1], o[y], o[y + 1], o[y + 2], o[y + 3])
                for z in range(4):
                    o[y + z] = c[z]
                if M == 2:
                    d = mma(b0, b1, b2, b3, f[2 * h], f[2 * h + 1], o[y + 4], o[y + 5], o[y + 6], o[y + 7])
                    for z in range(4):
                        o[y + 4 + z] = d[z]

    @kernel(PREFILL_SIGNATURE, THREADS, f"prefill_mma_{shape.name}_w{warps}", shared_bytes=SHARED)
    def prefill_mma(out, q, kc, vc, table, tiles, scale, cap, v_scale, window, t_s, q_s, o_s, s_blk, s_tok, s_head):
        shared = cuda.shared.array(0, U32)
        kvh = cuda.blockIdx.x
        item = cuda.blockIdx.y * 8
        seq, row0, queries, context, first = (
            tiles[item],
            tiles[item + 1],
            tiles[item + 2],
            tiles[item + 3],
            tiles[item + 4],
        )
        if seq < 0:
            return
        tid = cuda.threadIdx.x
        warp = tid // 32
        lane = tid % 32
        g = lane // 4
        t = lane % 4
        sa = smem_addr(shared)
        off = kvh * s_head
        pages = i64(seq) * t_s
        s = cuda.local.array(SN, f32)
        o = cuda.local.array(ON, f32)
        biggest = cuda.local.array(R, f32)  # of rows g, g + 8 (and g + 16, g + 24)
        total = cuda.local.array(R, f32)
        grown = cuda.local.array(R, f32)
        for e in range(ON):
            o[e] = f32(0.0)
        for r in range(R):
            biggest[r] = f32(NEG)
            total[r] = f32(0.0)
        lowest = context + first // G  # positions of the tile's first and last row
        newest = context + min((first + ROWS - 1) // G, queries - 1)
        oldest = max(tiles[item + 5], lowest - window + 1)
        start = oldest // KEYS
        stop = newest // KEYS + 1
        matrix = lane // 8
        lr = lane % 8
        q_at = (warp * RW + (matrix % 2) * 8 + lr) * PITCH + (matrix // 2) * 16
        k_at = K0 + ((matrix // 2) * 8 + lr) * PITCH + (matrix % 2) * 16
        v_at = V0 + ((matrix % 2) * 8 + lr) * PITCH + (matrix // 2) * 16
        column = tid % COLUMNS
        if column < CHUNKS:
            for i in range(ROWS // LOAD_ROWS):
                local = tid // COLUMNS + i * LOAD_ROWS
                r = first + local
                at = (i64(row0) + min(r // G, queries - 1)) * q_s + (kvh * G + r % G) * W + column * 4
                fetch_q(sa, local * PITCH + column * 16, q, at)
        load(K0, kc, start * KEYS, oldest, newest, table, pages, s_blk, s_tok, off, sa, tid)
        cp_commit()
        for tile in range(start, stop):
            base = tile * KEYS
            load(V0, vc, base, oldest, newest, table, pages, s_blk, s_tok, off, sa, tid)
            cp_commit()
            cp_wait_older()  # K is here, V on its way
            cuda.syncthreads()
            scores(s, sa, q_at, k_at)
            cuda.syncthreads()
            if tile + 1 < stop:
                load(K0, kc, base + KEYS, oldest, newest, table, pages, s_blk, s_tok, off, sa, tid)
            cp_commit()
            unit = scale
            if CAP:
                for e in range(SN):
                    s[e] = capped(s[e] * scale, cap)
                unit = f32(1.0)
            if base + KEYS - 1 > lowest or base <= newest - window or base < oldest:  # the mask is for tiles on an edge
                for r in range(R):
                    position = context + min((first + warp * RW + g + 8 * r) // G, queries - 1)
                    least = max(oldest, position - window + 1)
                    for j in range(S_TILES):
                        for y in range(2):
                            key = base + j * 8 + 2 * t + y
                            if key > position or key < least:
                                s[(j * R + r) * 2 + y] = f32(NEG)
            for r in range(R):
                grown[r] = f32(NEG)
            for j in range(S_TILES):
                for r in range(R):
                    grown[r] = fmax(grown[r], fmax(s[(j * R + r) * 2], s[(j * R + r) * 2 + 1]))
            for r in range(R):
                grown[r] = fmax(grown[r], shfl_xor(grown[r], 1))
                grown[r] = fmax(biggest[r], fmax(grown[r], shfl_xor(grown[r], 2)) * unit)
                biggest[r] = exp2(biggest[r] - grown[r])  # for a moment: the factor of what has been added
                total[r] *= biggest[r]
            for j in range(O_TILES):
                for r in range(R):
                    o[(j * R + r) * 2] *= biggest[r]
                    o[(j * R + r) * 2 + 1] *= biggest[r]
            for r in range(R):
                biggest[r] = grown[r]
            for j in range(S_TILES):
                for r in range(R):
                    for y in range(2):
                        e = (j * R + r) * 2 + y
                        s[e] = exp2(s[e] * unit - biggest[r])
                        total[r] += s[e]
            cp_wait_older()  # V is here, the next K on its way
            cuda.syncthreads()
            values(o, s, sa, v_at, 0)
            values(o, s, sa, v_at, 1)
            if PV_STEPS == 4:
                values(o, s, sa, v_at, 2)
                values(o, s, sa, v_at, 3)
            cuda.syncthreads()
        for r in range(R):
            total[r] += shfl_xor(total[r], 1)
            total[r] += shfl_xor(total[r], 2)
            row = first + warp * RW + g + 8 * r
            inverse = v_scale / total[r]
            if row < queries * G:
                at = (i64(row0) + row // G) * o_s + (kvh * G + row % G) * W
                for j in range(O_TILES):
                    e = (j * R + r) * 2
                    out[at + j * 4 + t] = pack(o[e] * inverse, o[e + 1] * inverse)

    return prefill_mma
