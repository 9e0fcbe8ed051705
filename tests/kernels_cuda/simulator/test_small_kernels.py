"""Warp primitives, cache kernels and pointwise kernels in the simulator."""

import numpy as np
import pytest
import torch
from cuda_weights import WEIGHTS, random_weight
from paged_numpy import from_fp8, relative_error, to_float, to_fp8, to_half, to_int8, words

from minivllm.models.linear.cuda import CUDAPackedWeight, cuda_format
from minivllm_kernels.cuda import cache, gemv, pointwise, quantized, simt, warp, warp_sim
from minivllm_kernels.cuda.simt import cuda
from minivllm_kernels.cuda.warp import fmax, ldmatrix_x4, ldmatrix_x4_trans, movmatrix, shfl_xor, smem_addr

TOLERANCE = {"bfloat16": 4e-3, "float16": 8e-4}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pack_and_unpack_agree_with_rounding(dtype):
    ops = simt.half_ops(dtype)
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    for a, b in x.reshape(-1, 2):
        word = ops.pack(a, b)
        pair = to_float(to_half(np.array([a, b]), dtype), dtype)
        assert (ops.lo(word), ops.hi(word)) == tuple(pair)
    assert np.isnan(ops.lo(ops.pack(np.float32(np.nan), np.float32(0))))


def test_e4m3_is_torchs():
    codes = np.arange(256, dtype=np.uint8)
    pairs = codes.view(np.uint16)
    read = np.array([warp.e4m3_lo(x) for x in pairs], np.uint32).view(np.float16)
    np.testing.assert_array_equal(read, from_fp8(codes))
    read = np.array([warp.e4m3_hi(int(x) << 16) for x in pairs], np.uint32).view(np.float16)
    np.testing.assert_array_equal(read, from_fp8(codes))
    finite = np.sort(from_fp8(codes[np.isfinite(from_fp8(codes))]))
    middle = (finite[1:] + finite[:-1]) / 2  # ties go to even
    x = np.concatenate([finite, middle, middle * 1.0001, middle * 0.9999, [1e9, -1e9, np.inf, -0.0, 464, 500, 2**-11]])
    x = np.append(x, np.random.default_rng(0).standard_normal(1000 + len(x) % 2)).astype(np.float32)
    written = np.array([warp.pack_e4m3(a, b) for a, b in x.reshape(-1, 2)], np.uint16).view(np.uint8)
    np.testing.assert_array_equal(written, to_fp8(x))
    assert warp.pack_e4m3(np.float32(np.nan), np.float32(1)) == 0x387F


def test_int8_is_rounded_to_even_and_read_exactly():
    every = np.arange(-128, 128).astype(np.int8)
    for read, shift in ((warp.int8_lo, 0), (warp.int8_hi, 16)):
        pairs = np.array([read(int(x) << shift) for x in every.view(np.uint16)], np.uint32)
        np.testing.assert_array_equal(to_float(pairs.view(np.uint16), "bfloat16"), every)
    x = np.array([0.5, 1.5, -2.5, 126.6, -127.4, 300, -300, np.nan], np.float32)
    got = np.array([warp.pack_int8(a, b) for a, b in x.reshape(-1, 2)], np.uint16).view(np.int8)
    assert got.tolist() == [0, 2, -2, 127, -127, 127, -128, 0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mma_is_a_matrix_product(dtype):
    mma, seen = simt.half_ops(dtype).mma, {}
    rng = np.random.default_rng(1)
    a, b = (to_half(rng.standard_normal(s), dtype) for s in ((16, 16), (16, 8)))
    bw = np.ascontiguousarray(b.T)
    d = np.zeros((16, 8), np.float32)

    def product(out, a_words, b_words):
        lane = cuda.threadIdx.x
        g, t = lane // 4, lane % 4
        x = [a_words[(g + r) * 8 + t + c] for c in (0, 4) for r in (0, 8)]
        y = [b_words[g * 8 + t + c] for c in (0, 4)]
        c = mma(*x, *y, np.float32(1), np.float32(1), np.float32(1), np.float32(1))
        for i in range(4):
            out[(g + 8 * (i // 2)) * 8 + 2 * t + i % 2] = c[i]
        seen[lane] = True

    simt.kernel("f32* u32* u32*", 32, "product")(product).simulate((1, 1), d, words(a), words(bw))
    assert len(seen) == 32
    assert relative_error(d, to_float(a, dtype) @ to_float(b, dtype) + 1) < 1e-5


def test_matrices_move_and_transpose():
    tile = np.arange(16 * 16, dtype=np.uint16).reshape(16, 16)
    out = np.zeros((3, 32, 4), np.uint32)

    def move(out, source):
        shared = cuda.shared.array(128, simt.u32)
        lane = cuda.threadIdx.x
        for i in range(4):
            shared[lane * 4 + i] = source[lane * 4 + i]
        cuda.syncthreads()
        at = (lane % 16) * 32 + (lane // 16) * 16
        plain, turned = ldmatrix_x4(smem_addr(shared), at), ldmatrix_x4_trans(smem_addr(shared), at)
        for i in range(4):
            out[lane * 4 + i] = plain[i]
            out[128 + lane * 4 + i] = turned[i]
        out[256 + lane * 4] = movmatrix(plain[0])

    simt.kernel("u32* u32*", 32, "move")(move).simulate((1, 1), out, words(tile))
    halves = out.view(np.uint16).reshape(3, 32, 4, 2)
    for i, (r, c) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        part = tile[r : r + 8, c : c + 8]
        assert (halves[0, :, i].reshape(8, 8) == part).all()
        assert (halves[1, :, i].reshape(8, 8) == part.T).all()
    assert (halves[2, :, 0].reshape(8, 8) == tile[:8, :8].T).all()


def test_pointers_are_checked():
    def beyond(out):
        out[cuda.threadIdx.x - 1] = 0

    kernel = simt.kernel("u32*", 1, "beyond")(beyond)
    with pytest.raises(IndexError, match="-1 outside an array of 4"):
        kernel.simulate((1, 1), np.zeros(4, np.uint32))
    with pytest.raises(ValueError, match="contiguous"):
        kernel.simulate((1, 1), np.zeros((4, 4), np.uint32)[:, :2])
    with pytest.raises(TypeError, match="takes 1 arguments"):
        kernel.simulate((1, 1))


def test_a_divergent_shuffle_is_an_error(monkeypatch):
    monkeypatch.setattr(warp_sim, "WAIT_SECONDS", 0.2)

    def diverge(out):
        if cuda.threadIdx.x < 16:
            out[0] = fmax(shfl_xor(1.0, 1), 0.0)

    with pytest.raises(Exception, match="tid="):
        simt.kernel("f32*", 32, "diverge")(diverge).simulate((1, 1), np.zeros(1, np.float32))


def test_reshape_and_cache():
    rng = np.random.default_rng(2)
    tokens, heads, w, block = 5, 3, 32, 8
    k, v = rng.integers(0, 2**32, (2, tokens, heads, w), dtype=np.uint32)
    kc, vc = np.zeros((2, 3, block, heads, w), np.uint32)
    slots = np.array([5, 17, -1, 0, 23])
    strides = (1.0, 1.0, heads * w, heads * w, heads * w, w, block * heads * w, heads * w, w)
    cache.reshape_and_cache(block, threads=32).simulate((tokens, 1), k, v, kc, vc, slots, *strides)
    for got, given in ((kc, k), (vc, v)):
        want = np.zeros_like(got).reshape(-1, heads, w)
        want[slots[slots >= 0]] = given[slots >= 0]
        assert (got.reshape(want.shape) == want).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reshape_and_cache_to_fp8(dtype):
    rng = np.random.default_rng(2)
    tokens, heads, dim, block = 3, 2, 80, 8
    x = to_half(rng.standard_normal((2, tokens, heads, dim)) * 100, dtype)
    x[0, 0, 0, :4] = to_half(np.array([6e4, -6e4, np.inf, 2**-9]), dtype)
    caches = np.zeros((2, 3 * block, heads, dim), np.uint8)
    slots, scales = np.array([5, -1, 23]), (np.float32(0.25), np.float32(1.5))
    w, kv_w = dim // 2, dim // 4
    strides = (heads * w, heads * w, heads * w, w, block * heads * kv_w, heads * kv_w, kv_w)
    kernel = cache.reshape_and_cache(block, 32, dtype)
    inverses = [1 / s for s in scales]
    kernel.simulate((tokens, 1), words(x[0]), words(x[1]), *map(words, caches), slots, *inverses, *strides)
    for got, given, inverse in zip(caches, x, inverses):
        want = np.zeros_like(got)
        want[slots[slots >= 0]] = to_fp8(to_float(given, dtype).astype(np.float32) * inverse)[slots >= 0]
        assert (got == want).all()
    assert list(from_fp8(caches[0, 5, 0, :3])) == [448, -448, 448]


def int8_rows(half, heads, block):
    """What a cache of int8 holds: whole numbers [tokens, heads, dim] and scales [tokens, heads]. half: uint16 [blocks, words]."""
    numbers, scales = np.split(half.view(np.uint8), [-4 * heads * block], axis=1)
    scales = np.ascontiguousarray(scales).view(np.float32).reshape(-1, heads, block).swapaxes(1, 2)
    return numbers.view(np.int8).reshape(len(half) * block, heads, -1), scales.reshape(-1, heads)


@pytest.mark.parametrize("dtype, dim", [("bfloat16", 80), ("float16", 256)])
def test_reshape_and_cache_to_int8(dtype, dim):
    tokens, heads, block, slots = 3, 3, 8, np.array([5, -1, 23])
    x = to_half(np.random.default_rng(2).standard_normal((2, tokens, heads, dim)) * 100, dtype)
    x[0, 0, 1], x[1, 2, 0, 7] = 0, to_half(np.array([np.nan]), dtype)[0]
    caches = np.zeros((2, 3, block * heads * (dim + 4) // 2), np.uint16)
    kernel, w = cache.reshape_and_cache_int8(dtype, heads, dim, block), dim // 2
    grid = tokens, -(-2 * heads * cache.head_lanes(dim) // cache.INT8_THREADS)
    kernel.simulate(grid, words(x[0]), words(x[1]), *map(words, caches), slots, heads * w, heads * w)
    for got, given in zip(caches, x):
        numbers, scales = int8_rows(got, heads, block)
        assert not numbers[[i for i in range(24) if i not in slots]].any() and scales[slots[slots >= 0]].all()
        given = to_float(given, dtype).astype(np.float32)
        for token, slot in ((0, 5), (2, 23)):
            for head in range(heads):
                row = given[token, head]
                if np.isnan(row).any():
                    assert np.isnan(scales[slot, head])
                elif row.any():
                    want, scale = to_int8(row)
                    assert scales[slot, head] == scale and np.abs(numbers[slot, head] - want).max() <= 1  # of a half
                    assert (numbers[slot, head] != want).mean() < 0.02
                else:
                    assert not numbers[slot, head].any() and 0 < scales[slot, head] < 1e-30


def test_copy_blocks():
    rng = np.random.default_rng(3)
    source = rng.integers(0, 2**32, (2, 6, 64), dtype=np.uint32)
    target = rng.integers(0, 2**32, (2, 4, 64), dtype=np.uint32)
    want = target.copy()
    pairs = np.array([[5, 0], [1, 3], [1, 2]])
    want[:, pairs[:, 1]] = source[:, pairs[:, 0]]
    cache.copy_blocks(threads=32).simulate((2, 3), source, target, pairs, 6 * 64, 4 * 64, 64)
    assert (target == want).all()


@pytest.mark.parametrize("dtype, hidden, add", [("bfloat16", 576, 1), ("float16", 40, 0), ("bfloat16", 264, 0)])
def test_norm(dtype, hidden, add):
    rng = np.random.default_rng(4)
    x, residual, weight = (to_half(rng.standard_normal(s), dtype) for s in ((2, hidden), (2, hidden), (hidden,)))
    out, kept = np.zeros(hidden, np.uint32), words(residual).copy()
    kernel = pointwise.add_rms_norm(dtype, hidden)
    kernel.simulate((2, 1), out, kept, words(x), words(weight), 1e-5, add, hidden // 2, hidden // 2)
    z = to_float(kept.view(np.uint16), dtype).reshape(2, -1) if add else to_float(x, dtype)
    if add:
        exact = to_float(x, dtype) + to_float(residual, dtype)
        assert relative_error(z, exact) < TOLERANCE[dtype]
    else:
        assert (kept == words(residual)).all()
    want = z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-5) * to_float(weight, dtype)
    assert relative_error(to_float(out.view(np.uint16), dtype).reshape(2, -1), want) < TOLERANCE[dtype]


def test_silu():
    x = to_half(4 * np.random.default_rng(5).standard_normal((3, 96)), "float16")
    out = np.zeros(3 * 24, np.uint32)
    pointwise.silu_mul("float16", 48).simulate((3, 1), out, words(x))
    gate, up = np.split(to_float(x, "float16"), 2, axis=1)
    want = gate / (1 + np.exp(-gate)) * up
    assert relative_error(to_float(out.view(np.uint16), "float16").reshape(3, 48), want) < TOLERANCE["float16"]


@pytest.mark.parametrize(
    "dtype, dim, heads, kv_heads, norm, kind",
    [
        ("bfloat16", 80, 3, 1, True, None), ("float16", 256, 1, 1, False, None), ("bfloat16", 80, 1, 2, True, "fp8"),
        ("bfloat16", 80, 1, 2, True, "int8"), ("float16", 256, 1, 1, False, "int8"),
    ],
)  # fmt: skip
def test_rope(dtype, dim, heads, kv_heads, norm, kind):
    rng = np.random.default_rng(6)
    qkv = to_half(rng.standard_normal((2, heads + 2 * kv_heads, dim)), dtype)
    weights = [to_half(rng.standard_normal(dim), dtype) for _ in range(2)]
    positions, slots = np.array([3, 11]), np.array([4, 19])
    angle = np.arange(20)[:, None] / 10000 ** (np.arange(dim // 2) / (dim // 2))[None]
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    fp8, int8 = kind == "fp8", kind == "int8"
    kc, vc = np.zeros((2, 3 * 8 * kv_heads * (dim // (4 if kind else 2) + int8)), np.uint32)
    work = words(qkv).copy()
    w = dim // (4 if kind else 2)
    kernel = pointwise.rope_and_cache(dtype, heads, kv_heads, dim, 8, norm, kind)
    grid = pointwise.rope_grid(2, heads + 2 * kv_heads, dim)
    strides = (8 * kv_heads * (w + int8), kv_heads * w, w)
    scales = (0.5, 0.125) if fp8 else (1.0, 1.0)
    inverses = [1 / s for s in scales]
    kernel.simulate(grid, work, kc, vc, *map(words, weights), words(table), positions, slots, 1e-6, *inverses, *strides)
    exact = to_float(qkv, dtype)
    for part, weight in ((slice(0, heads), weights[0]), (slice(heads, heads + kv_heads), weights[1])):
        x = exact[:, part]
        if norm:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * to_float(weight, dtype)
        c, s = np.cos(angle[positions])[:, None], np.sin(angle[positions])[:, None]
        a, b = np.split(x, 2, axis=-1)
        exact[:, part] = np.concatenate([a * c - b * s, b * c + a * s], -1)
    got = to_float(work.view(np.uint16), dtype).reshape(exact.shape)
    assert relative_error(got[:, :heads], exact[:, :heads]) < TOLERANCE[dtype]
    k, v = exact[:, heads : heads + kv_heads], exact[:, heads + kv_heads :]
    if fp8:
        stored = [from_fp8(x.view(np.uint8)).reshape(-1, kv_heads, dim)[slots] * s for x, s in zip((kc, vc), scales)]
        assert relative_error(stored[0], k) < 0.04  # half of 2 ** -3, for numbers of any size
        assert (stored[1] == from_fp8(to_fp8(v / scales[1])) * scales[1]).all()
    elif int8:
        stored = [n * s[..., None] for n, s in (int8_rows(x.reshape(3, -1), kv_heads, 8) for x in (kc, vc))]
        for got, want in zip(stored, (k, v)):
            assert (np.abs(got[slots] - want).max(-1) / np.abs(want).max(-1)).max() < (
                0.5 + 0.01 + 127 * 2**-9 * (want is k)
            ) / 127
    else:
        stored = [to_float(x.view(np.uint16), dtype).reshape(-1, kv_heads, dim)[slots] for x in (kc, vc)]
        assert relative_error(stored[0], k) < TOLERANCE[dtype]
        assert (stored[1] == v).all()


FMA_CASES = [  # features, rows, size, (split, gated)
    (264, 1, 6, (1, False)),  # a row ends within a warp's reach
    (256, 1, 10, (4, False)),  # some warps have nothing to do
    (520, 1, 14, (2, True)),
    (4360, 1, 4, (1, True)),  # more than a thread holds at once
]
MMA_CASES = [  # features, rows, size, (rows built for, split, gated)
    (64, 1, 18, (8, 1, False)),
    (200, 8, 34, (8, 2, True)),
    (1032, 5, 16, (8, 4, False)),
    (136, 11, 70, (16, 1, False)),
    (512, 16, 10, (16, 8, True)),
    (1096, 9, 4, (16, 2, False)),
    (2056, 2, 18, (8, 16, False)),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [*FMA_CASES, *MMA_CASES], ids=str)
def test_gemv(dtype, case):
    features, rows, size, built = case
    rng = np.random.default_rng(features)
    gated = built[-1]
    x = to_half(rng.standard_normal((rows, features + 8)), dtype)
    weight = to_half(rng.standard_normal(((1 + gated) * size, features)) / features**0.5, dtype)
    x[:, features:] = to_half(np.full((rows, 8), np.nan), dtype)  # x is a view: more lies between its rows
    out = to_half(np.full((rows + 3, size + 2), np.nan), dtype)
    if case in FMA_CASES:
        kernel, blocks = gemv.fma_gemv(dtype, features, *built), -(-size * built[0] // (2 * gemv.FMA_WARPS))
    else:
        kernel, blocks = (
            gemv.mma_gemv(dtype, features, *built),
            -(-len(weight) * built[1] // (16 * gemv.mma_warps(built[1]))),
        )
    kernel.simulate((blocks, 1), words(out), words(x), words(weight), rows, size, features // 2 + 4, size // 2 + 1)
    got = to_float(out, dtype)
    want = to_float(x[:, :features], dtype).astype(np.float64) @ to_float(weight, dtype).astype(np.float64).T
    if gated:
        want = want[:, :size] / (1 + np.exp(-want[:, :size])) * want[:, size:]
    assert relative_error(got[:rows, :size], want) < (1 + gated) * TOLERANCE[dtype]
    assert np.isnan(got[rows:]).all() and np.isnan(got[:, size:]).all()


def test_gemv_kernels_that_there_are_not():
    for wrong in ({"features": 12}, {"split": 3}, {"split": 8}):
        with pytest.raises(ValueError, match="no such kernel"):
            gemv.fma_gemv(**{"dtype": "float16", "features": 64, "split": 1} | wrong)
    for wrong in ({"features": 12}, {"rows": 4}, {"split": 3}):
        with pytest.raises(ValueError, match="no such kernel"):
            gemv.mma_gemv(**{"dtype": "float16", "features": 64, "rows": 8, "split": 1} | wrong)
    for kind, rows in (("auto", 17), ("fma", 2), ("naive", 1)):
        with pytest.raises(ValueError, match="no such kernel"):
            gemv.choose_gemv("float16", 64, 64, rows, 132, kind=kind)


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("gated", [False, True])
def test_the_choice_of_a_gemv_reaches_every_output_and_fills_the_card(rows, gated):
    for size in (24, 1024, 4096, 6144, 151936):
        chosen = gemv.choose_gemv("float16", 64, size, rows, 132, gated=gated)
        warps, splits = chosen.blocks * chosen.kernel.threads // 32, (2, 4) if rows == 1 else (4, 8, 16)
        tasks, most = size // (4 if gated else 2) if rows == 1 else -(-size // 16), splits[-1]
        assert warps % tasks < most and warps // tasks in splits
        assert warps >= 132 * (16 if rows == 1 else 6) or warps // tasks == most


@pytest.mark.parametrize(
    "features, size, split",
    [(2048, 1024, 16), (2048, 2048, 8), (1024, 4096, 4), (4096, 4096, 8), (4096, 6144, 4)],
)
def test_more_warps_share_long_rows_of_few_outputs(features, size, split):
    for rows in (2, 16):  # the same number, so that a row has the same bits in any company
        name = gemv.choose_gemv("bfloat16", features, size, rows, 132).kernel.name
        assert name == f"mma_gemv_bfloat16_k{features}_r{8 if rows == 2 else 16}_s{split}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_argmax_is_the_first_of_equals_or_none(dtype, monkeypatch):
    monkeypatch.setattr(pointwise, "LARGEST_THREADS", 64)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, 8 * 131)).astype(np.float32).round(1)  # many equals
    x[0], x[1, 5], x[2, -1], x[3, 1:], x[4] = -np.inf, np.nan, np.inf, -np.inf, -0.0
    bits = x if dtype == "float32" else to_half(x, dtype)
    want = (x if dtype == "float32" else to_float(bits, dtype)).argmax(-1)
    out, pieces = np.zeros(7, np.int64), x.shape[1] * bits.itemsize // 16
    pointwise.first_largest.__wrapped__(dtype).simulate((7, 1), out, words(bits), pieces, 4 * pieces)
    assert out.tolist() == [-1, -1, -1, *want[3:]]


@pytest.mark.parametrize("features, split", [(4096, 2), (8192, 2), (14336, 4)])
def test_four_warps_share_long_rows(features, split):
    assert gemv.choose_gemv("bfloat16", features, 8192, 1, 132).kernel.name == f"fma_gemv_bfloat16_k{features}_s{split}"


TILINGS = {  # rows of the kernel, rows, outputs, blocks; tiling
    "int4": (8, 3, 50, 2, (1, 2, 4, 1)),
    "int4 with zero points": (16, 11, 98, 2, (3, 2, 4, 1)),
    "int4 in groups of 32": (8, 5, 20, 2, (1, 2, 4, 1)),
    "int4 by outputs": (8, 8, 38, 1, (2, 2, 4, 1)),
    "int4 by outputs with zero points": (8, 3, 98, 2, (2, 2, 4, 1)),  # two tiles a block, each with its own zero points
    "act-order": (8, 2, 16, 1, (1, 4, 2, 1)),
    "int8": (8, 1, 34, 1, (2, 2, 8, 1)),
    "fp8 in blocks": (16, 16, 34, 2, (1, 2, 4, 2)),
    "fp8 by outputs": (8, 7, 98, 2, (2, 2, 4, 1)),
}


def u32(tensor):
    return tensor.view(torch.int32).numpy().view(np.uint32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_quantized_gemv(name, dtype):
    built, rows, size, blocks, tiling = TILINGS[name]
    weight, kind, tiling = random_weight(name, size), getattr(torch, dtype), quantized.Tiling(*tiling)
    packed = CUDAPackedWeight(weight, cuda_format(weight, kind))
    features = packed.format.features
    wide, out = (torch.full(shape, torch.nan, dtype=kind) for shape in ((rows, features + 8), (rows + 2, size + 2)))
    x = torch.randn(rows, features, dtype=kind)
    wide[:, :features] = x if packed.order is None else x[:, packed.order]
    given = u32(out), u32(wide), u32(packed.words), u32(packed.scales)
    numbers = rows, size, features // 2 + 4, size // 2 + 1
    quantized.quantized_gemv(packed.format, built, tiling).simulate((blocks, 1), *given, *numbers)
    want = x.double() @ weight.dequantize().double().T
    assert relative_error(out[:rows, :size].double().numpy(), want.numpy()) < TOLERANCE[dtype]
    assert out[rows:].isnan().all() and out[:, size:].isnan().all()


@pytest.mark.parametrize("cc, most", [((8, 0), 164), ((8, 6), 100), ((8, 9), 100), ((9, 0), 228), ((12, 0), 100)])
def test_the_blocks_of_the_chosen_tiling_fit_a_multiprocessor(cc, most):
    """most: KiB of its shared memory, of which each block costs one more than it uses."""
    zeros = {"group": 32, "scale": "float16", "zeros": True}
    for kind, more in (
        ("int4", zeros),
        ("int8", {"group": 32, "scale": "float32"}),
        ("fp8", {"group": 128, "scale": "float32"}),
    ):
        format = quantized.Format(kind, "bfloat16", 4096, **more)
        for outputs in (2, 32, 4096, 6144, 24576, 151936):
            for rows in (1, 8, 9, 16):
                tiling = quantized.choose_tiling(format, outputs, rows, 132, cc)
                plan = quantized.Plan(format, 8 if rows <= 8 else 16, tiling)
                assert tiling.blocks * (plan.shared_bytes + 1024) <= most << 10
                assert 16 * tiling.tiles <= -(-outputs // 32) * 32
                groups, blocks = -(-outputs // (16 * tiling.tiles)), tiling.grid(outputs, 132)
                most_tiles = -(-groups // (132 * tiling.blocks))  # of a block, if there are as many as fit
                assert blocks <= 132 * tiling.blocks and -(-groups // blocks) == most_tiles
                assert blocks == 1 or -(-groups // (blocks - 1)) > most_tiles


@pytest.mark.parametrize(
    "kind, rows, tiles", [("int4", 8, (2, 3, 4, 3, 4)), ("int4", 16, (2, 3, 2, 2, 2)), ("fp8", 16, (2, 3, 2, 3, 2))]
)
def test_no_block_has_many_more_outputs_than_others(kind, rows, tiles):
    format = quantized.Format(kind, "bfloat16", 4096, 128, "bfloat16")
    for outputs, most in zip((4096, 6144, 14336, 24576, 28672), tiles):
        tiling = quantized.choose_tiling(format, outputs, rows, 132, (9, 0))
        turns = -(-outputs // (16 * tiling.tiles * tiling.grid(outputs, 132)))
        ideal = outputs / 16 / (132 * tiling.blocks)
        assert tiling.tiles == most and turns * most <= 1.2 * ideal


@pytest.mark.parametrize("name", ["int4 with zero points", "int4 in groups of 32", "int8", "fp8 in blocks"])
def test_dequantize(name):
    weight = random_weight(name, 40)
    packed = CUDAPackedWeight(weight, cuda_format(weight, torch.bfloat16))
    format, out = packed.format, torch.full((19, packed.format.features), torch.nan, dtype=torch.bfloat16)
    grid = 2, -(-format.features // (4 * format.step))
    quantized.dequantize(format).simulate(grid, u32(out), u32(packed.words), u32(packed.scales), 16, 18)
    assert torch.equal(out[:18], weight.dequantize()[16:34].bfloat16()) and out[18].isnan().all()


def test_formats_that_there_are_not():
    for wrong in ({"features": 96}, {"group": 48}, {"group": 96}, {"kind": "int5"}, {"zeros": True}):
        with pytest.raises(ValueError, match="no such kernel"):
            quantized.Format(
                **{"kind": "int4", "dtype": "bfloat16", "features": 192, "group": 64, "scale": "float32"} | wrong
            )
    for wrong, said in (({"kind": "int3"}, "kind must be one of int4, int8, fp8; got 'int3'"), ({"group": 0}, "group must be at least 1; got 0"),
                        ({"dtype": "float32"}, "dtype must be one of bfloat16, float16; got 'float32'"),
                        ({"scale": "int8"}, "scale must be one of float32, bfloat16, float16; got 'int8'")):  # fmt: skip
        with pytest.raises(ValueError, match=f"no such kernel: {said}"):
            quantized.Format(
                **{"kind": "int4", "dtype": "bfloat16", "features": 192, "group": 64, "scale": "float32"} | wrong
            )
    with pytest.raises(ValueError, match="no such kernel"):
        format = quantized.Format("fp8", "bfloat16", 64, 64, "float32")
        quantized.quantized_gemv(format, 4, quantized.Tiling(1, 1, 2, 1))
