"""CUDA decode attention: split-KV on tensor cores."""

# Generated from nbs/numba_kernels/cuda/decode.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from dataclasses import dataclass
from typing import Any

from minivllm_kernels.cuda.planning import (
    FIELDS,
    TILE,
    WORK_END,
    WORK_FIRST,
    WORK_FIRST_SLOT,
    WORK_PARTS,
    WORK_ROW,
    WORK_SEQ,
    WORK_SLOT,
    AttentionShape,
)
from minivllm_kernels.cuda.simt import (
    NEG,
    CudaKernel,
    cuda,
    device,
    f32,
    half_ops,
    i32,
    i64,
    kernel,
    kernel_maker,
    u32,
)
from minivllm_kernels.cuda.warp import (
    as_f32,
    atomic_arrive,
    e4m3_hi,
    e4m3_lo,
    exp2,
    fmax,
    grid_release,
    grid_wait,
    int8_hi,
    int8_lo,
    ldcg2,
    ldg64_stream,
    ldg128,
    ldg128_stream,
    movmatrix,
    prefetch_l2,
    prmt,
    shfl_xor,
)

__all__ = [
    "CacheFormat", "cache_format", "fragment_loaders", "loads_of_row", "max_warps", "mma_parts",
    "mma_split_kv", "scale_places", "soft_cap",
]  # fmt: skip

DECODE_SIGNATURE = " ".join(
    ["u32* u32* u32* u32*"]  # out, q, kc and vc (the K and the V cache): words of two 16-bit floats
    + ["i32* i32*"]  # table (of blocks), work (items)
    + ["f32* f32* i32*"]  # p_o and p_ml: partial outputs, their (max, sum); count: of arrivals
    + ["f32 f32 f32"]  # scale, cap, v_scale
    + ["i32 i32 i32"]  # t_s, q_s, o_s: from one row to the next of the block table (entries), q and out (words)
    + ["i64 i32 i32"]  # s_blk, s_tok, s_head: words from one block, token, KV head to the next in the cache
)


@device
def soft_cap(score, cap):
    """cap * tanh(score * ln(2) / 2): the scale of the caller makes up for the factor."""
    return cap - cap * (f32(2.0) / (f32(1.0) + exp2(score)))


def merge_streams(shape: AttentionShape, parts: int, streams: int, threads: int, stats: int, pitch: int) -> Any:
    """A device function: join the softmaxes of a block's `streams` and write the result, or the block's partial.

    Of head h and stream x, the maximum and the sum are at x * stats + h, the output at (x * H + h) * pitch, for the H heads that a block has room for.
    """
    D, W, G, H = shape.head_dim, shape.head_dim // 2, shape.group, -(-shape.group // parts)
    PARTS, STREAMS, THREADS, STATS, PITCH = parts, streams, threads, stats, pitch
    pack = half_ops(shape.dtype).pack

    @device
    def merge(out, p_o, p_ml, s_o, s_max, s_sum, out_at, slot, head0, heads, v_scale):
        for e in range(cuda.threadIdx.x, heads * W, THREADS):
            h = e // W
            d = (e % W) * 2
            m = f32(NEG)
            for x in range(STREAMS):
                m = fmax(m, s_max[x * STATS + h])
            total = f32(0.0)
            a0 = f32(0.0)
            a1 = f32(0.0)
            for x in range(STREAMS):
                weight = exp2(s_max[x * STATS + h] - m)
                total += weight * s_sum[x * STATS + h]
                a0 += weight * s_o[(x * H + h) * PITCH + d]
                a1 += weight * s_o[(x * H + h) * PITCH + d + 1]
            total /= v_scale
            if slot < 0:
                out[out_at + (head0 + h) * W + d // 2] = pack(a0 / total, a1 / total)
            else:
                at = i64(slot) * (cuda.gridDim.x // PARTS * G) + head0 + h
                p_o[at * D + d] = a0
                p_o[at * D + d + 1] = a1
                if d == 0:
                    p_ml[at * 2] = m
                    p_ml[at * 2 + 1] = total

    return merge


MERGED_AHEAD = 8  # partials that a thread reads at a time when they are merged


def merge_partials(shape: AttentionShape, warps: int) -> Any:
    """A device function for the last block of a cut sequence: join the partials of all blocks.

    A thread weighs the partials of its two numbers itself, so that it waits for their maxima and their outputs at once.
    """
    D, W, THREADS = shape.head_dim, shape.head_dim // 2, warps * 32
    AHEAD, KEPT = MERGED_AHEAD, 2 * MERGED_AHEAD
    pack = half_ops(shape.dtype).pack

    @device
    def merge(out, p_o, p_ml, out_at, first_slot, parts, head0, heads, all_heads):
        stats = cuda.local.array(KEPT, f32)
        kept = cuda.local.array(KEPT, f32)
        for e in range(cuda.threadIdx.x, heads * W, THREADS):
            h = e // W
            d = (e % W) * 2
            m = f32(NEG)
            total = f32(0.0)
            a0 = f32(0.0)
            a1 = f32(0.0)
            first = i64(first_slot) * all_heads + head0 + h
            for begin in range(0, parts, AHEAD):
                for x in range(AHEAD):
                    at = first + min(begin + x, parts - 1) * all_heads
                    ml, o = ldcg2(p_ml, at * 2), ldcg2(p_o, at * D + d)
                    stats[2 * x] = ml[0]
                    stats[2 * x + 1] = ml[1]
                    kept[2 * x] = o[0]
                    kept[2 * x + 1] = o[1]
                before = m
                for x in range(AHEAD):
                    m = fmax(m, stats[2 * x])
                alpha = exp2(before - m)
                total *= alpha
                a0 *= alpha
                a1 *= alpha
                for x in range(AHEAD):
                    if begin + x < parts:
                        weight = exp2(stats[2 * x] - m)
                        total += weight * stats[2 * x + 1]
                        a0 += weight * kept[2 * x]
                        a1 += weight * kept[2 * x + 1]
            out[out_at + (head0 + h) * W + d // 2] = pack(a0 / total, a1 / total)

    return merge


def block_finish(shape: AttentionShape, parts: int, streams: int, warps: int, stats: int, pitch: int) -> Any:
    """A device function for the end of a block: merge its streams; the last block of a cut sequence merges all partials.

    arrived: an int32 in shared memory, for the number of blocks that arrived before.
    """
    G, PARTS = shape.group, parts
    merge_block = merge_streams(shape, parts, streams, warps * 32, stats, pitch)
    merge_blocks = merge_partials(shape, warps)

    @device
    def finish(out, p_o, p_ml, count, work, item, s_o, s_max, s_sum, arrived, o_s, head0, heads, v_scale):
        slot, out_at = work[item + WORK_SLOT], i64(work[item + WORK_ROW]) * o_s
        merge_block(out, p_o, p_ml, s_o, s_max, s_sum, out_at, slot, head0, heads, v_scale)
        if slot >= 0:
            first_slot = work[item + WORK_FIRST_SLOT]
            parts = work[item + WORK_PARTS]
            counter = i64(first_slot) * cuda.gridDim.x + cuda.blockIdx.x
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                arrived[0] = atomic_arrive(count, counter)
            cuda.syncthreads()
            if arrived[0] == parts - 1:
                if cuda.threadIdx.x == 0:
                    count[counter] = 0  # ready for the next launch
                merge_blocks(out, p_o, p_ml, out_at, first_slot, parts, head0, heads, cuda.gridDim.x // PARTS * G)

    return finish


@dataclass(frozen=True)
class CacheFormat:
    """How K and V lie in the cache, and how they become operands of an mma.

    Attributes:
        words: 32-bit words that hold 8 numbers in the cache.
        scaled: each token and head has a scale. Scores and weights are multiplied by it.
        fetch: device function (cache, at): loads these words.
        operands: device function (words, i): the 8 numbers from words[i] on, as four words of two 16-bit floats.
        query: device function (word of q): the same as an operand.
        pack: two float32 to a word of an operand. mma: the matmul of such operands.
    """

    words: int
    fetch: Any
    operands: Any
    query: Any
    pack: Any
    mma: Any
    scaled: bool = False


def cache_format(shape: AttentionShape) -> CacheFormat:
    """The format of a shape's cache.

    e4m3 is multiplied as float16 and int8 as bfloat16, which hold each of their numbers; the weights of an int8 cache's values may be
    tiny, and bfloat16 has room for that too.
    """
    half = half_ops(shape.dtype)
    if not (shape.fp8_kv or shape.int8_kv):
        return CacheFormat(4, ldg128_stream, _same_words, _same_word, half.pack, half.mma)
    lo, hi, as_multiplied = half.lo, half.hi, half_ops("bfloat16" if shape.int8_kv else "float16")
    pack = as_multiplied.pack

    @device
    def query(word):
        return pack(lo(word), hi(word))

    operands = _words_of_int8 if shape.int8_kv else _words_of_e4m3
    return CacheFormat(2, ldg64_stream, operands, query, pack, as_multiplied.mma, shape.int8_kv)


@device
def _words_of_e4m3(x, i):
    return e4m3_lo(x[i]), e4m3_hi(x[i]), e4m3_lo(x[i + 1]), e4m3_hi(x[i + 1])


@device
def _words_of_int8(x, i):
    return int8_lo(x[i]), int8_hi(x[i]), int8_lo(x[i + 1]), int8_hi(x[i + 1])


@device
def _same_words(x, i):
    return x[i], x[i + 1], x[i + 2], x[i + 3]


@device
def _same_word(word):
    return word


def mma_parts(shape: AttentionShape) -> int:
    """Blocks of `mma_split_kv` that share a work item and a KV head: an mma has room for 8 query heads."""
    return -(-shape.group // 8)


def max_warps(shape: AttentionShape) -> int:
    """Warps that a block of `mma_split_kv` may have: their outputs meet in 48 KB of shared memory."""
    return 4 if shape.head_dim > 128 else 8


def loads_of_row(shape: AttentionShape) -> tuple[int, int]:
    """Loads of 8 numbers per lane: for a row of K, which 4 lanes share, and for a row of V, which 8 lanes share."""
    return -(-shape.head_dim // 32), -(-shape.head_dim // 64)


def scale_places(shape: AttentionShape) -> Any:
    """A device function: where an int8 cache has the scale of a token, in words. kv_at: where the KV head's first row in a block lies."""
    BS, MASK, HEAD = shape.block_size, shape.block_size - 1, shape.head_dim // 4

    @device
    def scale_place(block, tok, s_blk, s_tok, kv_at):
        return i64(block) * s_blk + BS * s_tok + kv_at // HEAD * BS + (tok & MASK)

    return scale_place


def fragment_loaders(shape: AttentionShape) -> tuple[Any, Any, Any]:
    """Device functions find_blocks, load_k and load_v: from the block table and the cache to a lane's registers.

    A tile is 16 tokens from `tile` on. `last` is the last token of the work item: it replaces the tokens after it.
    """
    D, (KJ, VH) = shape.head_dim, loads_of_row(shape)
    SHIFT, MASK = shape.block_size.bit_length() - 1, shape.block_size - 1  # token -> block, token -> offset
    ONE_BLOCK = shape.block_size % TILE == 0  # the 16 tokens of a tile lie in one block
    KFULL, VFULL = D % 32 == 0, D % 64 == 0
    format = cache_format(shape)
    PIECE, fetch, SCALED, scale_place = format.words, format.fetch, format.scaled, scale_places(shape)

    @device
    def load_scales(x, at, cache, blocks, tile, last, g, s_blk, s_tok, kv_at):
        """The scales of tokens g and g + 8, behind the words of the tile."""
        for r in range(2):
            block = blocks[0] if r == 0 else blocks[1]
            x[at + r] = cache[scale_place(block, min(tile + g + 8 * r, last), s_blk, s_tok, kv_at)]

    @device
    def find_blocks(table, pages, tile, last):
        """The blocks of the first and the last 8 tokens of a tile."""
        block0 = table[pages + (min(tile, last) >> SHIFT)]
        block1 = block0
        if not ONE_BLOCK:
            block1 = table[pages + (min(tile + 8, last) >> SHIFT)]
        return block0, block1

    @device
    def load_k(k, kc, blocks, tile, last, g, t, s_blk, s_tok, kv_at):
        """8 numbers of tokens g and g + 8 for each 32 dims."""
        for r in range(2):
            block = blocks[0] if r == 0 else blocks[1]
            tok = min(tile + g + 8 * r, last)
            at = i64(block) * s_blk + kv_at + (tok & MASK) * s_tok + t * PIECE
            for j in range(KJ):
                if KFULL or j * 32 + t * 8 < D:
                    x = fetch(kc, at + j * 4 * PIECE)
                    for w in range(PIECE):
                        k[(j * 2 + r) * PIECE + w] = x[w]
                else:
                    for w in range(PIECE):
                        k[(j * 2 + r) * PIECE + w] = u32(0)
        if SCALED:
            load_scales(k, KJ * 2 * PIECE, kc, blocks, tile, last, g, s_blk, s_tok, kv_at)

    @device
    def load_v(v, vc, blocks, tile, last, g, t, s_blk, s_tok, kv_at):
        """8 numbers of tokens 2t, 2t+1, 2t+8, 2t+9 for each 64 dims."""
        for r in range(4):
            block = blocks[0] if r < 2 else blocks[1]
            tok = min(tile + 2 * t + (r & 1) + 8 * (r >> 1), last)
            at = i64(block) * s_blk + kv_at + (tok & MASK) * s_tok + g * PIECE
            for h in range(VH):
                if VFULL or h * 64 + g * 8 < D:
                    x = fetch(vc, at + h * 8 * PIECE)
                    for w in range(PIECE):
                        v[(h * 4 + r) * PIECE + w] = x[w]
                else:
                    for w in range(PIECE):
                        v[(h * 4 + r) * PIECE + w] = u32(0)
        if SCALED:
            load_scales(v, VH * 4 * PIECE, vc, blocks, tile, last, g, s_blk, s_tok, kv_at)

    return find_blocks, load_k, load_v


def tile_prefetcher(shape: AttentionShape) -> Any:
    """A device function: let a warp bring a tile's K and V into L2. `blocks` and the other arguments: see `fragment_loaders`."""
    MASK = shape.block_size - 1
    ROW = shape.head_dim * (1 if shape.fp8_kv or shape.int8_kv else 2) // 4  # words
    LINES = -(-ROW // 32)

    @device
    def prefetch(kc, vc, blocks, tile, last, lane, s_blk, s_tok, kv_at):
        for e in range(lane, TILE * LINES, 32):
            row = e // LINES
            block = blocks[0] if row < 8 else blocks[1]
            tok = min(tile + row, last)
            at = i64(block) * s_blk + kv_at + (tok & MASK) * s_tok + e % LINES * 32
            prefetch_l2(kc, at)
            prefetch_l2(vc, at)

    return prefetch


def tile_matmuls(shape: AttentionShape) -> tuple[Any, Any, Any]:
    """Device functions load_q_fragments, qk (the scores of a tile) and pv (add its weighted values to the output)."""
    D, (KJ, VH) = shape.head_dim, loads_of_row(shape)
    KFULL = D % 32 == 0
    format = cache_format(shape)
    PIECE, operands, query, mma, pack = format.words, format.operands, format.query, format.mma, format.pack
    SCALED, KS, VS = format.scaled, KJ * 2 * PIECE, VH * 4 * PIECE

    @device
    def load_q_fragments(qf, q, at, on, t):
        """A lane's part of head g, if the block has that head (`on`)."""
        for j in range(KJ):
            if on and (KFULL or j * 32 + t * 8 < D):
                x = ldg128(q, at + j * 16 + t * 4)
                for w in range(4):
                    qf[j * 4 + w] = query(x[w])
            else:
                for w in range(4):
                    qf[j * 4 + w] = u32(0)

    @device
    def qk(k, qf):
        """Scores of token g and heads 2t, 2t + 1, then of token g + 8 and the same heads."""
        c = (f32(0.0), f32(0.0), f32(0.0), f32(0.0))
        for j in range(KJ):
            a = operands(k, j * 2 * PIECE)
            b = operands(k, (j * 2 + 1) * PIECE)
            c = mma(a[0], b[0], a[1], b[1], qf[j * 4], qf[j * 4 + 1], c[0], c[1], c[2], c[3])
            c = mma(a[2], b[2], a[3], b[3], qf[j * 4 + 2], qf[j * 4 + 3], c[0], c[1], c[2], c[3])
        if SCALED:
            a, b = as_f32(k[KS]), as_f32(k[KS + 1])
            c = (c[0] * a, c[1] * a, c[2] * b, c[3] * b)
        return c

    @device
    def pv(o, v, s0, s1, s2, s3, alpha0, alpha1):
        """o = o * alpha + V^T P; `prmt` pairs the numbers of two tokens."""
        if SCALED:
            s0 *= as_f32(v[VS])
            s1 *= as_f32(v[VS])
            s2 *= as_f32(v[VS + 1])
            s3 *= as_f32(v[VS + 1])
        p0, p1 = movmatrix(pack(s0, s1)), movmatrix(pack(s2, s3))
        for h in range(VH):
            v0 = operands(v, (h * 4 + 0) * PIECE)
            v1 = operands(v, (h * 4 + 1) * PIECE)
            v2 = operands(v, (h * 4 + 2) * PIECE)
            v3 = operands(v, (h * 4 + 3) * PIECE)
            for w in range(4):
                e = (h * 4 + w) * 4
                a0 = prmt(v0[w], v1[w], u32(0x5410))
                a1 = prmt(v0[w], v1[w], u32(0x7632))
                a2 = prmt(v2[w], v3[w], u32(0x5410))
                a3 = prmt(v2[w], v3[w], u32(0x7632))
                c0, c1 = o[e] * alpha0, o[e + 1] * alpha1
                d = mma(a0, a1, a2, a3, p0, p1, c0, c1, o[e + 2] * alpha0, o[e + 3] * alpha1)
                for y in range(4):
                    o[e + y] = d[y]

    return load_q_fragments, qk, pv


@device
def over_tokens_max(x0, x1):
    """The maxima of this lane's two heads, over all lanes that hold tokens of them."""
    for step in range(3):
        x0 = fmax(x0, shfl_xor(x0, 4 << step))
        x1 = fmax(x1, shfl_xor(x1, 4 << step))
    return x0, x1


@device
def over_tokens_sum(x0, x1):
    """The sums of this lane's two heads, over all lanes that hold tokens of them."""
    for step in range(3):
        x0 += shfl_xor(x0, 4 << step)
        x1 += shfl_xor(x1, 4 << step)
    return x0, x1


@device
def softmax_of_tile(s0, s1, s2, s3, m0, m1):
    """The online softmax of a tile: (weights of the four scores, new maxima of the two heads, their alphas)."""
    x0, x1 = over_tokens_max(fmax(s0, s2), fmax(s1, s3))
    x0 = fmax(m0, x0)
    x1 = fmax(m1, x1)
    return exp2(s0 - x0), exp2(s1 - x1), exp2(s2 - x0), exp2(s3 - x1), x0, x1, exp2(m0 - x0), exp2(m1 - x1)


def warp_store(shape: AttentionShape, pitch: int) -> Any:
    """A device function: leave a warp's maxima, sums and outputs in shared memory, as `merge_streams` wants them."""
    D, H, VH, PITCH = shape.head_dim, -(-shape.group // mma_parts(shape)), loads_of_row(shape)[1], pitch
    VFULL = D % 64 == 0

    @device
    def store_warp(s_o, s_max, s_sum, o, m0, m1, sum0, sum1, warp, g, t):
        if g == 0:
            s_max[warp * 8 + 2 * t] = m0
            s_max[warp * 8 + 2 * t + 1] = m1
            s_sum[warp * 8 + 2 * t] = sum0
            s_sum[warp * 8 + 2 * t + 1] = sum1
        for h in range(VH):
            for w in range(4):
                e = (h * 4 + w) * 4
                d = 8 * (g + 8 * h) + 2 * w
                if VFULL or d < D:
                    if 2 * t < H:
                        s_o[(warp * H + 2 * t) * PITCH + d] = o[e]
                        s_o[(warp * H + 2 * t) * PITCH + d + 1] = o[e + 2]
                    if 2 * t + 1 < H:
                        s_o[(warp * H + 2 * t + 1) * PITCH + d] = o[e + 1]
                        s_o[(warp * H + 2 * t + 1) * PITCH + d + 1] = o[e + 3]

    return store_warp


SOON = 2  # tiles that a warp brings into L2 before the previous kernel has ended


@kernel_maker
def mma_split_kv(shape: AttentionShape, warps: int = 4) -> CudaKernel:
    """Split-KV on tensor cores (rung 3 of the chapter). Grid (KV heads * mma_parts, items). The last block of a cut sequence merges."""
    D, G, CAP, PARTS = shape.head_dim, shape.group, shape.soft_cap, mma_parts(shape)
    W, H = D // 2, -(-G // PARTS)
    KJ, VH = loads_of_row(shape)
    format = cache_format(shape)
    EXTRA = 2 * format.scaled
    QN, KN, VN, ON = KJ * 4, KJ * 2 * format.words + EXTRA, VH * 4 * format.words + EXTRA, VH * 16
    PREFETCH, FLOOR = D <= 128, ~(15 if shape.block_size % TILE == 0 else 7)
    PITCH, STRIDE, THREADS = D + 4, warps * TILE, warps * 32
    W8, SO = warps * 8, warps * H * PITCH
    # warps per multiprocessor: its registers hold no more
    RESIDENT = (16 if format.words == 2 else 12) if PREFETCH else 8
    # smaller blocks that start early crowd some multiprocessors and leave others idle
    EARLY = warps == 8 or not PREFETCH
    find_blocks, load_k, load_v = fragment_loaders(shape)
    load_q_fragments, qk, pv = tile_matmuls(shape)
    store_warp, prefetch = warp_store(shape, PITCH), tile_prefetcher(shape)
    finish = block_finish(shape, PARTS, warps, warps, 8, PITCH)

    @kernel(DECODE_SIGNATURE, THREADS, f"decode_mma_{shape.name}_w{warps}", min_blocks=max(1, RESIDENT // warps))
    def decode_mma(
        out, q, kc, vc, table, work, p_o, p_ml, count, scale, cap, v_scale, t_s, q_s, o_s, s_blk, s_tok, s_head
    ):
        s_o = cuda.shared.array(SO, f32)
        s_max = cuda.shared.array(W8, f32)
        s_sum = cuda.shared.array(W8, f32)
        arrived = cuda.shared.array(1, i32)
        item = cuda.blockIdx.y * FIELDS
        seq, row = work[item + WORK_SEQ], work[item + WORK_ROW]
        first, end = work[item + WORK_FIRST], work[item + WORK_END]
        if EARLY:
            grid_release()
        if seq < 0:
            return
        kvh = cuda.blockIdx.x // PARTS
        head0 = kvh * G + (cuda.blockIdx.x % PARTS) * H
        heads = min(H, (kvh + 1) * G - head0)
        kv_at = kvh * s_head
        tid = cuda.threadIdx.x
        warp = tid // 32
        g = tid % 32 // 4
        t = tid % 4
        last = end - 1
        pages = i64(seq) * t_s
        qf = cuda.local.array(QN, u32)
        k = cuda.local.array(KN, u32)
        v = cuda.local.array(VN, u32)
        o = cuda.local.array(ON, f32)
        for x in range(ON):
            o[x] = f32(0.0)
        tile = (first & FLOOR) + warp * TILE
        blocks = find_blocks(table, pages, tile, last)
        if EARLY:
            # no kernel of the step writes the block table, and L2 sees the new tokens that one writes
            for soon in range(tile, min(end, tile + SOON * STRIDE), STRIDE):
                prefetch(kc, vc, find_blocks(table, pages, soon, last), soon, last, tid % 32, s_blk, s_tok, kv_at)
            grid_wait()
        load_q_fragments(qf, q, i64(row) * q_s + (head0 + g) * W, g < heads, t)
        m0 = f32(NEG)  # of head 2t, over the tokens of this warp so far
        m1 = f32(NEG)  # of head 2t + 1
        sum0 = f32(0.0)  # of this lane's own tokens; summed over the lanes at the end
        sum1 = f32(0.0)
        if PREFETCH and tile < end:
            load_k(k, kc, blocks, tile, last, g, t, s_blk, s_tok, kv_at)
            load_v(v, vc, blocks, tile, last, g, t, s_blk, s_tok, kv_at)
            blocks = find_blocks(table, pages, tile + STRIDE, last)
        while tile < end:
            ahead = tile + STRIDE
            if not PREFETCH:
                load_k(k, kc, blocks, tile, last, g, t, s_blk, s_tok, kv_at)
            c = qk(k, qf)
            blocks_ahead = blocks
            if not PREFETCH:
                load_v(v, vc, blocks, tile, last, g, t, s_blk, s_tok, kv_at)
                blocks = find_blocks(table, pages, ahead, last)
            elif ahead < end:
                blocks = find_blocks(table, pages, ahead + STRIDE, last)
                load_k(k, kc, blocks_ahead, ahead, last, g, t, s_blk, s_tok, kv_at)
            s0 = c[0] * scale  # token g, heads 2t and 2t + 1
            s1 = c[1] * scale
            s2 = c[2] * scale  # token g + 8
            s3 = c[3] * scale
            if CAP:
                s0 = soft_cap(s0, cap)
                s1 = soft_cap(s1, cap)
                s2 = soft_cap(s2, cap)
                s3 = soft_cap(s3, cap)
            if tile + g >= end or tile + g < first:
                s0 = f32(NEG)
                s1 = f32(NEG)
            if tile + g + 8 >= end or tile + g + 8 < first:
                s2 = f32(NEG)
                s3 = f32(NEG)
            s0, s1, s2, s3, m0, m1, alpha0, alpha1 = softmax_of_tile(s0, s1, s2, s3, m0, m1)
            sum0 = sum0 * alpha0 + s0 + s2
            sum1 = sum1 * alpha1 + s1 + s3
            pv(o, v, s0, s1, s2, s3, alpha0, alpha1)
            if PREFETCH and ahead < end:
                load_v(v, vc, blocks_ahead, ahead, last, g, t, s_blk, s_tok, kv_at)
            tile = ahead
        sum0, sum1 = over_tokens_sum(sum0, sum1)
        store_warp(s_o, s_max, s_sum, o, m0, m1, sum0, sum1, warp, g, t)
        cuda.syncthreads()
        finish(out, p_o, p_ml, count, work, item, s_o, s_max, s_sum, arrived, o_s, head0, heads, v_scale)

    return decode_mma
