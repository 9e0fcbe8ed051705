"""CUDA decode attention: naive, split-KV on CUDA cores, split-KV on tensor cores."""

# Generated from nbs/numba_kernels/cuda/decode.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import functools

from minivllm_kernels.cuda.planning import MAX_PARTS, TILE, AttentionShape
from minivllm_kernels.cuda.simt import (
    NEG,
    Half,
    Kernel,
    atomic_inc,
    cuda,
    device,
    e4m3_hi,
    e4m3_lo,
    exp2,
    f32,
    fmax,
    grid_release,
    half_ops,
    i32,
    i64,
    kernel,
    ldcg2,
    ldg64_stream,
    ldg128,
    ldg128_stream,
    movmatrix,
    prmt,
    shfl_xor,
    u32,
)

__all__ = [
    "FMA_HEADS", "capped", "combine", "fma_parts", "fma_split_kv", "max_warps", "mma_parts", "mma_split_kv",
    "naive", "same_half",
]  # fmt: skip


# %% nbs/numba_kernels/cuda/decode.ipynb #code-9f2c43
DECODE_SIGNATURE = " ".join(
    ["u32* u32* u32* u32*"]  # out, q, k cache, v cache: words of two 16-bit floats
    + ["i32* i32*"]  # block table, work items
    + ["f32* f32* i32*"]  # partial outputs, their (max, sum), arrivals
    + ["f32 f32 f32"]  # scale, cap, scale of V
    + ["i32 i32 i32"]  # words or entries from one row to the next: block table, q, out
    + ["i64 i32 i32"]  # words from one block, token, KV head to the next in the cache
)


# %% nbs/numba_kernels/cuda/decode.ipynb #capped
@device
def capped(score, cap):
    """cap * tanh(score / 2 ln 2): the caller's scale brings the factor."""
    return cap - cap * (f32(2.0) / (f32(1.0) + exp2(score)))


# %% nbs/numba_kernels/cuda/decode.ipynb #naive
def same_half(shape: AttentionShape) -> Half:
    """The operations of Q, K and V alike. Rungs 1 and 2 know no other cache."""
    if shape.fp8_kv:
        raise ValueError("an fp8 cache is read by the mma kernels only")
    return half_ops(shape.dtype)


@functools.cache
def naive(shape: AttentionShape) -> Kernel:
    """Rung 1: one warp a (work item, query head). Grid (query heads, items); items must be whole sequences."""
    W = shape.head_dim // 2
    C = -(-W // 32)  # words a lane owns
    C2 = 2 * C
    G, BS, CAP = shape.group, shape.block_size, shape.soft_cap
    half = same_half(shape)
    lo, hi, pack = half.lo, half.hi, half.pack

    @kernel(DECODE_SIGNATURE, threads=32, name=f"decode_naive_{shape.name}")
    def decode_naive(
        out, q, kc, vc, table, work, part_o, part_ml, count, scale, cap, v_scale, t_s, q_s, o_s, s_blk, s_tok, s_head
    ):
        head = cuda.blockIdx.x
        item = cuda.blockIdx.y * 8
        lane = cuda.threadIdx.x
        seq, row, first, end = work[item], work[item + 1], work[item + 2], work[item + 3]
        if seq < 0:
            return
        qv = cuda.local.array(C2, f32)
        acc = cuda.local.array(C2, f32)
        for c in range(C):
            x = u32(0)
            if lane + 32 * c < W:
                x = q[i64(row) * q_s + head * W + lane + 32 * c]
            qv[2 * c] = lo(x)
            qv[2 * c + 1] = hi(x)
            acc[2 * c] = f32(0.0)
            acc[2 * c + 1] = f32(0.0)
        biggest = f32(NEG)
        total = f32(0.0)
        for tok in range(first, end):
            at = i64(table[i64(seq) * t_s + tok // BS]) * s_blk + (tok % BS) * s_tok + (head // G) * s_head + lane
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
                out[i64(row) * o_s + head * W + lane + 32 * c] = pack(acc[2 * c] / total, acc[2 * c + 1] / total)

    return decode_naive


# %% nbs/numba_kernels/cuda/decode.ipynb #fma_parts
FMA_HEADS = 4  # query heads a block of rung 2 takes: more would not fit in its registers


def fma_parts(shape: AttentionShape) -> int:
    """Blocks of rung 2 that share a work item and a KV head."""
    return -(-shape.group // FMA_HEADS)


@functools.cache
def fma_split_kv(shape: AttentionShape, warps: int = 4) -> Kernel:
    """Rung 2: split-KV on the ordinary cores. Grid (KV heads * fma_parts, items); `combine` follows if items were cut."""
    D, G, BS, CAP = shape.head_dim, shape.group, shape.block_size, shape.soft_cap
    W = D // 2
    LANES = 8 if D <= 64 else 16 if D <= 128 else 32  # lanes a token, a power of two; some idle when D/8 is none
    AT_ONCE = 32 // LANES
    STREAMS = warps * AT_ONCE  # independent softmaxes of a block
    PARTS = fma_parts(shape)
    H = -(-G // PARTS)
    H8, SH, SHD = H * 8, STREAMS * H, STREAMS * H * D
    STEP, THREADS = warps * AT_ONCE, warps * 32
    half = same_half(shape)
    lo, hi, pack = half.lo, half.hi, half.pack

    @kernel(DECODE_SIGNATURE, threads=THREADS, name=f"decode_fma_{shape.name}_w{warps}")
    def decode_fma(
        out, q, kc, vc, table, work, part_o, part_ml, count, scale, cap, v_scale, t_s, q_s, o_s, s_blk, s_tok, s_head
    ):
        shared_o = cuda.shared.array(SHD, f32)
        shared_max = cuda.shared.array(SH, f32)
        shared_sum = cuda.shared.array(SH, f32)
        item = cuda.blockIdx.y * 8
        seq, row, first, end, slot = work[item], work[item + 1], work[item + 2], work[item + 3], work[item + 4]
        if seq < 0:
            return
        kvh = cuda.blockIdx.x // PARTS
        head0 = kvh * G + (cuda.blockIdx.x % PARTS) * H
        heads = min(H, (kvh + 1) * G - head0)
        tid = cuda.threadIdx.x
        lane = tid % 32
        c = lane % LANES
        stream = tid // LANES
        on = c * 8 < D
        qv = cuda.local.array(H8, f32)
        acc = cuda.local.array(H8, f32)
        biggest = cuda.local.array(H, f32)
        total = cuda.local.array(H, f32)
        for h in range(H):
            biggest[h] = f32(NEG)
            total[h] = f32(0.0)
            x = ldg128(q, i64(row) * q_s + (head0 + min(h, heads - 1)) * W + min(c * 4, W - 4))
            for w in range(4):
                qv[h * 8 + 2 * w] = lo(x[w]) if on else f32(0.0)
                qv[h * 8 + 2 * w + 1] = hi(x[w]) if on else f32(0.0)
                acc[h * 8 + 2 * w] = f32(0.0)
                acc[h * 8 + 2 * w + 1] = f32(0.0)
        for base in range(first + (tid // 32) * AT_ONCE, end, STEP):  # the same trips for all lanes of a warp
            tok = base + lane // LANES
            inside = tok < end
            tok = min(tok, end - 1)
            at = i64(table[i64(seq) * t_s + tok // BS]) * s_blk + (tok % BS) * s_tok + kvh * s_head + min(c * 4, W - 4)
            k = ldg128(kc, at)
            v = ldg128(vc, at)
            for h in range(H):
                s = f32(0.0)
                for w in range(4):
                    s += qv[h * 8 + 2 * w] * lo(k[w])
                    s += qv[h * 8 + 2 * w + 1] * hi(k[w])
                s += shfl_xor(s, 1)
                s += shfl_xor(s, 2)
                s += shfl_xor(s, 4)
                if LANES >= 16:
                    s += shfl_xor(s, 8)
                if LANES == 32:
                    s += shfl_xor(s, 16)
                s *= scale
                if CAP:
                    s = capped(s, cap)
                grown = fmax(biggest[h], s) if inside else biggest[h]
                shrink = exp2(biggest[h] - grown)
                p = exp2(s - grown) if inside else f32(0.0)
                biggest[h] = grown
                total[h] = total[h] * shrink + p
                for w in range(4):
                    acc[h * 8 + 2 * w] = acc[h * 8 + 2 * w] * shrink + p * lo(v[w])
                    acc[h * 8 + 2 * w + 1] = acc[h * 8 + 2 * w + 1] * shrink + p * hi(v[w])
        for h in range(H):
            if on:
                for w in range(8):
                    shared_o[(stream * H + h) * D + c * 8 + w] = acc[h * 8 + w]
            if c == 0:
                shared_max[stream * H + h] = biggest[h]
                shared_sum[stream * H + h] = total[h]
        cuda.syncthreads()
        for e in range(tid, heads * W, THREADS):
            h = e // W
            d = (e % W) * 2
            top = f32(NEG)
            for x in range(STREAMS):
                top = fmax(top, shared_max[x * H + h])
            den = f32(0.0)
            a0 = f32(0.0)
            a1 = f32(0.0)
            for x in range(STREAMS):
                weight = exp2(shared_max[x * H + h] - top)
                den += weight * shared_sum[x * H + h]
                a0 += weight * shared_o[(x * H + h) * D + d]
                a1 += weight * shared_o[(x * H + h) * D + d + 1]
            den /= v_scale
            if slot < 0:
                out[i64(row) * o_s + (head0 + h) * W + d // 2] = pack(a0 / den, a1 / den)
            else:
                at = i64(slot) * (cuda.gridDim.x // PARTS * G) + head0 + h
                part_o[at * D + d] = a0
                part_o[at * D + d + 1] = a1
                if d == 0:
                    part_ml[at * 2] = top
                    part_ml[at * 2 + 1] = den

    return decode_fma


# %% nbs/numba_kernels/cuda/decode.ipynb #combine
@functools.cache
def combine(shape: AttentionShape) -> Kernel:
    """Join the partials that rung 2 left. Grid (query heads, items); the same arguments as the rung."""
    W = shape.head_dim // 2
    D = shape.head_dim
    pack = half_ops(shape.dtype).pack

    @kernel(DECODE_SIGNATURE, threads=W, name=f"decode_combine_{shape.name}")
    def decode_combine(
        out, q, kc, vc, table, work, part_o, part_ml, count, scale, cap, v_scale, t_s, q_s, o_s, s_blk, s_tok, s_head
    ):
        head = cuda.blockIdx.x
        heads = cuda.gridDim.x
        item = cuda.blockIdx.y * 8
        row, slot, first_slot, parts = work[item + 1], work[item + 4], work[item + 5], work[item + 6]
        if work[item] < 0 or slot < 0 or slot != first_slot:
            return
        d = cuda.threadIdx.x * 2
        top = f32(NEG)
        for x in range(parts):
            top = fmax(top, part_ml[((first_slot + x) * heads + head) * 2])
        den = f32(0.0)
        a0 = f32(0.0)
        a1 = f32(0.0)
        for x in range(parts):
            at = i64(first_slot + x) * heads + head
            weight = exp2(part_ml[at * 2] - top)
            den += weight * part_ml[at * 2 + 1]
            a0 += weight * part_o[at * D + d]
            a1 += weight * part_o[at * D + d + 1]
        out[i64(row) * o_s + head * W + d // 2] = pack(a0 / den, a1 / den)

    return decode_combine


# %% nbs/numba_kernels/cuda/decode.ipynb #mma_parts
def mma_parts(shape: AttentionShape) -> int:
    """Blocks of rung 3 that share a work item and a KV head: an mma has room for 8 query heads."""
    return -(-shape.group // 8)


def max_warps(shape: AttentionShape) -> int:
    """Warps that a block of rung 3 may have: their outputs meet in 48 KB of shared memory."""
    return 4 if shape.head_dim > 128 else 8


@functools.cache
def mma_split_kv(shape: AttentionShape, warps: int = 4) -> Kernel:
    """Rung 3: split-KV on tensor cores. Grid (KV heads * mma_parts, items). The last block of a cut sequence combines."""
    D, G, BS, CAP = shape.head_dim, shape.group, shape.block_size, shape.soft_cap
    W = D // 2
    SHIFT, MASK = BS.bit_length() - 1, BS - 1  # token -> block, token -> offset
    ONE_BLOCK = BS % TILE == 0  # the 16 tokens of a tile lie in one block
    PARTS = mma_parts(shape)
    H = -(-G // PARTS)
    KJ, VH = -(-D // 32), -(-D // 64)  # 16-byte loads a lane: of a K row, of a V row
    KFULL, VFULL = D % 32 == 0, D % 64 == 0
    PREFETCH = D <= 128
    PITCH = D + 4
    PIECE = 2 if shape.fp8_kv else 4  # words of 8 numbers in the cache
    QN, KN, VN, ON = KJ * 4, KJ * 2 * PIECE, VH * 4 * PIECE, VH * 16
    W8, SO, SWEIGHTS = warps * 8, warps * H * PITCH, H * MAX_PARTS
    STRIDE, THREADS = warps * TILE, warps * 32
    WARPS = (16 if shape.fp8_kv else 12) if PREFETCH else 8  # of a multiprocessor: its registers hold no more
    half = half_ops(shape.dtype)
    inner = half_ops("float16") if shape.fp8_kv else half  # every e4m3 is a float16
    lo, hi, pack = half.lo, half.hi, half.pack
    narrow, mma = inner.pack, inner.mma

    if shape.fp8_kv:
        fetch = ldg64_stream

        @device
        def halves(x, i):
            """Eight numbers as four words of two 16-bit floats."""
            return e4m3_lo(x[i]), e4m3_hi(x[i]), e4m3_lo(x[i + 1]), e4m3_hi(x[i + 1])

        @device
        def query(word):
            return narrow(lo(word), hi(word))
    else:
        fetch = ldg128_stream

        @device
        def halves(x, i):
            return x[i], x[i + 1], x[i + 2], x[i + 3]

        @device
        def query(word):
            return word

    @device
    def load_k(k, kc, block0, block1, tile, last, g, t, s_blk, s_tok, off):
        """8 numbers of tokens g and g + 8 for each 32 dims; past the end, the last token again."""
        for r in range(2):
            block = block0 if r == 0 else block1
            tok = min(tile + g + 8 * r, last)
            at = i64(block) * s_blk + off + (tok & MASK) * s_tok + t * PIECE
            for j in range(KJ):
                if KFULL or j * 32 + t * 8 < D:
                    x = fetch(kc, at + j * 4 * PIECE)
                    for w in range(PIECE):
                        k[(j * 2 + r) * PIECE + w] = x[w]
                else:
                    for w in range(PIECE):
                        k[(j * 2 + r) * PIECE + w] = u32(0)

    @device
    def load_v(v, vc, block0, block1, tile, last, g, t, s_blk, s_tok, off):
        """8 numbers of tokens 2t, 2t+1, 2t+8, 2t+9 for each 64 dims."""
        for r in range(4):
            block = block0 if r < 2 else block1
            tok = min(tile + 2 * t + (r & 1) + 8 * (r >> 1), last)
            at = i64(block) * s_blk + off + (tok & MASK) * s_tok + g * PIECE
            for h in range(VH):
                if VFULL or h * 64 + g * 8 < D:
                    x = fetch(vc, at + h * 8 * PIECE)
                    for w in range(PIECE):
                        v[(h * 4 + r) * PIECE + w] = x[w]
                else:
                    for w in range(PIECE):
                        v[(h * 4 + r) * PIECE + w] = u32(0)

    @kernel(
        DECODE_SIGNATURE,
        THREADS,
        f"decode_mma_{shape.name}_w{warps}",
        min_blocks=max(1, WARPS // warps),
    )
    def decode_mma(
        out, q, kc, vc, table, work, part_o, part_ml, count, scale, cap, v_scale, t_s, q_s, o_s, s_blk, s_tok, s_head
    ):
        shared_o = cuda.shared.array(SO, f32)
        shared_max = cuda.shared.array(W8, f32)
        shared_sum = cuda.shared.array(W8, f32)
        weights = cuda.shared.array(SWEIGHTS, f32)
        arrived = cuda.shared.array(1, i32)
        item = cuda.blockIdx.y * 8
        seq, row, first, end, slot = work[item], work[item + 1], work[item + 2], work[item + 3], work[item + 4]
        grid_release()
        if seq < 0:
            return
        kvh = cuda.blockIdx.x // PARTS
        head0 = kvh * G + (cuda.blockIdx.x % PARTS) * H
        heads = min(H, (kvh + 1) * G - head0)
        off = kvh * s_head
        tid = cuda.threadIdx.x
        warp = tid // 32
        lane = tid % 32
        g = lane // 4
        t = lane % 4
        last = end - 1
        pages = i64(seq) * t_s
        qf = cuda.local.array(QN, u32)
        k = cuda.local.array(KN, u32)
        v = cuda.local.array(VN, u32)
        o = cuda.local.array(ON, f32)
        for x in range(ON):
            o[x] = f32(0.0)
        for j in range(KJ):
            if g < heads and (KFULL or j * 32 + t * 8 < D):
                x = ldg128(q, i64(row) * q_s + (head0 + g) * W + j * 16 + t * 4)
                for w in range(4):
                    qf[j * 4 + w] = query(x[w])
            else:
                for w in range(4):
                    qf[j * 4 + w] = u32(0)
        max0 = f32(NEG)  # of head 2t, over the tokens of this warp so far
        max1 = f32(NEG)  # of head 2t + 1
        sum0 = f32(0.0)  # of this lane's own tokens; summed over the lanes at the end
        sum1 = f32(0.0)
        tile = (first & ~(15 if ONE_BLOCK else 7)) + warp * TILE
        block0 = table[pages + (min(tile, last) >> SHIFT)]
        block1 = block0
        if not ONE_BLOCK:
            block1 = table[pages + (min(tile + 8, last) >> SHIFT)]
        if PREFETCH and tile < end:
            load_k(k, kc, block0, block1, tile, last, g, t, s_blk, s_tok, off)
            load_v(v, vc, block0, block1, tile, last, g, t, s_blk, s_tok, off)
            block0 = table[pages + (min(tile + STRIDE, last) >> SHIFT)]
            block1 = block0
            if not ONE_BLOCK:
                block1 = table[pages + (min(tile + STRIDE + 8, last) >> SHIFT)]
        while tile < end:
            ahead = tile + STRIDE
            if not PREFETCH:
                load_k(k, kc, block0, block1, tile, last, g, t, s_blk, s_tok, off)
            c = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
            for j in range(KJ):
                a = halves(k, j * 2 * PIECE)
                b = halves(k, (j * 2 + 1) * PIECE)
                c = mma(a[0], b[0], a[1], b[1], qf[j * 4], qf[j * 4 + 1], c[0], c[1], c[2], c[3])
                c = mma(a[2], b[2], a[3], b[3], qf[j * 4 + 2], qf[j * 4 + 3], c[0], c[1], c[2], c[3])
            next0 = block0
            next1 = block1
            if not PREFETCH:
                load_v(v, vc, block0, block1, tile, last, g, t, s_blk, s_tok, off)
                block0 = table[pages + (min(ahead, last) >> SHIFT)]
                block1 = block0
                if not ONE_BLOCK:
                    block1 = table[pages + (min(ahead + 8, last) >> SHIFT)]
            elif ahead < end:
                block0 = table[pages + (min(ahead + STRIDE, last) >> SHIFT)]
                block1 = block0
                if not ONE_BLOCK:
                    block1 = table[pages + (min(ahead + STRIDE + 8, last) >> SHIFT)]
                load_k(k, kc, next0, next1, ahead, last, g, t, s_blk, s_tok, off)
            s0 = c[0] * scale  # token g, heads 2t and 2t + 1
            s1 = c[1] * scale
            s2 = c[2] * scale  # token g + 8
            s3 = c[3] * scale
            if CAP:
                s0 = capped(s0, cap)
                s1 = capped(s1, cap)
                s2 = capped(s2, cap)
                s3 = capped(s3, cap)
            if tile + g >= end or tile + g < first:
                s0 = f32(NEG)
                s1 = f32(NEG)
            if tile + g + 8 >= end or tile + g + 8 < first:
                s2 = f32(NEG)
                s3 = f32(NEG)
            x0 = fmax(s0, s2)
            x1 = fmax(s1, s3)
            x0 = fmax(x0, shfl_xor(x0, 4))
            x1 = fmax(x1, shfl_xor(x1, 4))
            x0 = fmax(x0, shfl_xor(x0, 8))
            x1 = fmax(x1, shfl_xor(x1, 8))
            x0 = fmax(max0, fmax(x0, shfl_xor(x0, 16)))
            x1 = fmax(max1, fmax(x1, shfl_xor(x1, 16)))
            shrink0 = exp2(max0 - x0)
            shrink1 = exp2(max1 - x1)
            max0 = x0
            max1 = x1
            s0 = exp2(s0 - max0)
            s1 = exp2(s1 - max1)
            s2 = exp2(s2 - max0)
            s3 = exp2(s3 - max1)
            sum0 = sum0 * shrink0 + s0 + s2
            sum1 = sum1 * shrink1 + s1 + s3
            p0 = movmatrix(narrow(s0, s1))
            p1 = movmatrix(narrow(s2, s3))
            for h in range(VH):
                v0 = halves(v, (h * 4 + 0) * PIECE)
                v1 = halves(v, (h * 4 + 1) * PIECE)
                v2 = halves(v, (h * 4 + 2) * PIECE)
                v3 = halves(v, (h * 4 + 3) * PIECE)
                for w in range(4):
                    e = (h * 4 + w) * 4
                    d = mma(
                        prmt(v0[w], v1[w], u32(0x5410)),
                        prmt(v0[w], v1[w], u32(0x7632)),
                        prmt(v2[w], v3[w], u32(0x5410)),
                        prmt(v2[w], v3[w], u32(0x7632)),
                        p0,
                        p1,
                        o[e] * shrink0,
                        o[e + 1] * shrink1,
                        o[e + 2] * shrink0,
                        o[e + 3] * shrink1,
                    )
                    o[e] = d[0]
                    o[e + 1] = d[1]
                    o[e + 2] = d[2]
                    o[e + 3] = d[3]
            if PREFETCH and ahead < end:
                load_v(v, vc, next0, next1, ahead, last, g, t, s_blk, s_tok, off)
            tile = ahead
        sum0 += shfl_xor(sum0, 4)
        sum1 += shfl_xor(sum1, 4)
        sum0 += shfl_xor(sum0, 8)
        sum1 += shfl_xor(sum1, 8)
        sum0 += shfl_xor(sum0, 16)
        sum1 += shfl_xor(sum1, 16)
        if g == 0:
            shared_max[warp * 8 + 2 * t] = max0
            shared_max[warp * 8 + 2 * t + 1] = max1
            shared_sum[warp * 8 + 2 * t] = sum0
            shared_sum[warp * 8 + 2 * t + 1] = sum1
        for h in range(VH):
            for w in range(4):
                e = (h * 4 + w) * 4
                d = 8 * (g + 8 * h) + 2 * w
                if VFULL or d < D:
                    if 2 * t < H:
                        shared_o[(warp * H + 2 * t) * PITCH + d] = o[e]
                        shared_o[(warp * H + 2 * t) * PITCH + d + 1] = o[e + 2]
                    if 2 * t + 1 < H:
                        shared_o[(warp * H + 2 * t + 1) * PITCH + d] = o[e + 1]
                        shared_o[(warp * H + 2 * t + 1) * PITCH + d + 1] = o[e + 3]
        cuda.syncthreads()
        all_heads = cuda.gridDim.x // PARTS * G
        for e in range(tid, heads * W, THREADS):
            h = e // W
            d = (e % W) * 2
            top = f32(NEG)
            for x in range(warps):
                top = fmax(top, shared_max[x * 8 + h])
            den = f32(0.0)
            a0 = f32(0.0)
            a1 = f32(0.0)
            for x in range(warps):
                weight = exp2(shared_max[x * 8 + h] - top)
                den += weight * shared_sum[x * 8 + h]
                a0 += weight * shared_o[(x * H + h) * PITCH + d]
                a1 += weight * shared_o[(x * H + h) * PITCH + d + 1]
            den /= v_scale
            if slot < 0:
                out[i64(row) * o_s + (head0 + h) * W + d // 2] = pack(a0 / den, a1 / den)
            else:
                at = i64(slot) * all_heads + head0 + h
                part_o[at * D + d] = a0
                part_o[at * D + d + 1] = a1
                if d == 0:
                    part_ml[at * 2] = top
                    part_ml[at * 2 + 1] = den
        if slot < 0:
            return
        first_slot = work[item + 5]
        parts = work[item + 6]
        cuda.threadfence()
        cuda.syncthreads()
        if tid == 0:
            arrived[0] = atomic_inc(count, i64(first_slot) * cuda.gridDim.x + cuda.blockIdx.x)
        cuda.syncthreads()
        if arrived[0] != parts - 1:
            return
        cuda.threadfence()
        if tid == 0:
            count[i64(first_slot) * cuda.gridDim.x + cuda.blockIdx.x] = 0  # ready for the next launch
        for h in range(warp, heads, warps):  # one warp a head: the weight of each partial, two a lane
            at = (i64(first_slot) * all_heads + head0 + h) * 2
            ma = f32(NEG)
            mb = f32(NEG)
            la = f32(0.0)
            lb = f32(0.0)
            if lane < parts:
                x = ldcg2(part_ml, at + lane * all_heads * 2)
                ma = x[0]
                la = x[1]
            if lane + 32 < parts:
                x = ldcg2(part_ml, at + (lane + 32) * all_heads * 2)
                mb = x[0]
                lb = x[1]
            top = fmax(ma, mb)
            top = fmax(top, shfl_xor(top, 1))
            top = fmax(top, shfl_xor(top, 2))
            top = fmax(top, shfl_xor(top, 4))
            top = fmax(top, shfl_xor(top, 8))
            top = fmax(top, shfl_xor(top, 16))
            ma = exp2(ma - top)
            mb = exp2(mb - top)
            den = la * ma + lb * mb
            den += shfl_xor(den, 1)
            den += shfl_xor(den, 2)
            den += shfl_xor(den, 4)
            den += shfl_xor(den, 8)
            den += shfl_xor(den, 16)
            weights[h * MAX_PARTS + lane] = ma / den
            weights[h * MAX_PARTS + lane + 32] = mb / den
        cuda.syncthreads()
        step = all_heads * D
        for e in range(tid, heads * W, THREADS):
            h = e // W
            d = (e % W) * 2
            a0 = f32(0.0)
            a1 = f32(0.0)
            at = (i64(first_slot) * all_heads + head0 + h) * D + d
            x = 0
            while x + 4 <= parts:  # four loads in flight
                v0 = ldcg2(part_o, at)
                v1 = ldcg2(part_o, at + step)
                v2 = ldcg2(part_o, at + 2 * step)
                v3 = ldcg2(part_o, at + 3 * step)
                w0 = weights[h * MAX_PARTS + x]
                w1 = weights[h * MAX_PARTS + x + 1]
                w2 = weights[h * MAX_PARTS + x + 2]
                w3 = weights[h * MAX_PARTS + x + 3]
                a0 += w0 * v0[0] + w1 * v1[0] + w2 * v2[0] + w3 * v3[0]
                a1 += w0 * v0[1] + w1 * v1[1] + w2 * v2[1] + w3 * v3[1]
                at += 4 * step
                x += 4
            while x < parts:
                v0 = ldcg2(part_o, at)
                a0 += weights[h * MAX_PARTS + x] * v0[0]
                a1 += weights[h * MAX_PARTS + x] * v0[1]
                at += step
                x += 1
            out[i64(row) * o_s + (head0 + h) * W + d // 2] = pack(a0, a1)

    return decode_mma
