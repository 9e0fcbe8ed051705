"""What of the Hopper kernel can be checked without a GPU: when it is chosen, its layout, its descriptors, its work."""

import itertools
import re
import struct

import numpy as np
import pytest

from minivllm_kernels.cuda import prefill_hopper, simt, wgmma
from minivllm_kernels.cuda.launch import Layout
from minivllm_kernels.cuda.planning import BLOCK_SIZES, HEAD_DIMS, AttentionShape, plan_prefill, split_at_chunks
from minivllm_kernels.cuda.prefill_hopper import HopperTile, hopper_unsupported

SHAPES = [
    AttentionShape("bfloat16", dim, group, block)
    for dim, group, block in itertools.product(HEAD_DIMS, (1, 2, 3, 4, 7, 8, 12, 16), BLOCK_SIZES)
]


@pytest.mark.parametrize(
    "cc, fp8, reason",
    [
        ((9, 0), False, None),
        ((8, 0), False, "9.0 alone, and this card has 8.0"),
        ((8, 9), False, "this card has 8.9"),
        ((10, 0), False, "this card has 10.0"),
        ((12, 0), False, "this card has 12.0"),
        ((9, 0), True, "e4m3"),
    ],
)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_one_rule_says_which_rung(cc, fp8, reason, dim):
    found = hopper_unsupported(AttentionShape("float16", dim, 5, 16, fp8_kv=fp8), cc)
    assert found is None if reason is None else reason in found


def test_a_kernel_of_hopper_is_refused_elsewhere():
    kernel = prefill_hopper.wgmma_tiles(SHAPES[0])
    with pytest.raises(ValueError, match=r"runs on compute capability 9\.0 only, not on 8\.9"):
        kernel.ptx((8, 9))


def test_every_shape_fits():
    for shape in SHAPES:
        tile = HopperTile(shape)
        assert tile.shared_bytes <= prefill_hopper.SHARED_LIMIT, shape
        assert 112 < tile.rows <= 128 and tile.rows % shape.group == 0
        assert tile.keys % tile.box == 0 and shape.block_size % tile.box == 0
        boxes = tile.keys // tile.box * tile.parts
        assert -(-boxes // 2) <= 32, "a lane brings one box"
        for at in (tile.k_at, tile.v_at, tile.kv_part, tile.q_part):
            assert at % 1024 == 0, "the swizzle repeats every 1024 bytes"
        assert tile.barriers_at % 8 == 0 and tile.next_at == tile.barriers_at + 8 * (4 * tile.stages + 6)


def test_the_swizzle_spreads_a_column_over_all_banks():
    places = np.array([[wgmma.swizzled(row, column) for column in range(64)] for row in range(16)])
    assert sorted(places.flat) == list(range(0, 16 * 128, 2))
    assert np.array_equal(places[8:] - places[:8], np.full((8, 64), 1024)), "it repeats after 8 rows"
    for column in range(64):
        assert len({place // 16 % 8 for place in places[:8, column]}) == 8
    # the hardware's rule: bits 4 to 6 of the address change by bits 7 to 9
    plain = np.arange(16)[:, None] * 128 + np.arange(64) * 2
    assert np.array_equal(places, plain ^ (plain >> 7 & 7) << 4)


def fields(descriptor):
    return {
        "address": (descriptor & 0x3FFF) << 4,
        "lead": (descriptor >> 16 & 0x3FFF) << 4,
        "stride": (descriptor >> 32 & 0x3FFF) << 4,
        "swizzle": descriptor >> 62,
    }


def test_descriptors():
    tile = HopperTile(AttentionShape("bfloat16", 128, 4, 16))
    assert fields(wgmma.K_MAJOR) == {"address": 0, "lead": 16, "stride": 1024, "swizzle": 1}
    columns = wgmma.column_descriptor(tile.kv_part) | (tile.v_at + 1024) >> 4
    assert fields(columns) == {"address": tile.v_at + 1024, "lead": 128 * 128, "stride": 1024, "swizzle": 1}
    last = wgmma.K_MAJOR | prefill_hopper.SHARED_LIMIT >> 4
    assert fields(last)["address"] == prefill_hopper.SHARED_LIMIT, "the largest address is cut"


@pytest.mark.parametrize("dim, part", [(64, 16384), (80, 16384), (96, 16384), (128, 8192), (256, 8192)])
def test_a_step_of_16_columns_starts_where_these_columns_lie(dim, part):
    for i, step in enumerate(wgmma.base_descriptor(part, dim // 16)):
        column = 16 * i
        assert 16 * step == column // 64 * part + wgmma.swizzled(0, column % 64)


@pytest.mark.parametrize("n, steps", [(64, 4), (128, 8), (256, 16)])
def test_operands_of_a_chain(n, steps):
    """Accumulators come first, the tied ones again, then A if it is in registers, then the descriptors."""
    shared = wgmma.wgmma_text("bfloat16", n, [0] * steps, [0] * steps)
    registers = wgmma.wgmma_text("float16", n, [0] * steps)
    for text, last in ((shared, n // 2 + 1), (registers, n + 4 * steps)):
        assert max(map(int, re.findall(r"\$(\d+)", text))) == last
        assert text.count("wgmma.mma_async") == steps and text.count("commit_group") == 1
    assert f"m64n{n}k16.f32.bf16.bf16" in shared and f"m64n{n}k16.f32.f16.f16" in registers
    assert re.findall(r", (no|yes), 1, 1", shared) == ["no"] + ["yes"] * (steps - 1), "the first starts from zero"
    assert re.findall(r"(no|yes), 1, 1, (\d)", registers) == [("yes", "1")] * steps, "V is read across"


EXTRA = [{}, {"window": 50}, {"window": 1}, {"window": 700}, {"chunk": 48}]


@pytest.mark.parametrize("extra", EXTRA, ids=str)
@pytest.mark.parametrize("group", [1, 4, 7])
def test_tiles_of_keys_hold_all_that_a_tile_sees_and_no_more(group, extra):
    rng = np.random.default_rng(group)
    tile = HopperTile(AttentionShape("bfloat16", 128, group, 16))
    work = getattr(prefill_hopper.work_of_tile(tile), "py_func", prefill_hopper.work_of_tile(tile))
    new = rng.integers(1, 300, 12)
    lens, rows, floor = new + rng.integers(0, 500, 12), np.cumsum([0, *new[:-1]]), 0
    window = extra.get("window", 1 << 30)
    if "chunk" in extra:
        new, lens, rows, _, floor = split_at_chunks(new, lens, rows, extra["chunk"])
    tiles = plan_prefill(new, lens, rows=rows, seqs=rows, group=group, tile_rows=tile.rows, floor=floor)
    for _, _, queries, context, first, low, *_ in tiles.tolist():
        seen = set()
        for row in range(first, min(first + tile.rows, queries * group)):
            position = context + row // group
            seen |= set(range(max(low, position - window + 1), position + 1))
        oldest, newest, start, count = map(int, work(context, queries, first, low, window))
        assert (oldest, newest) == (min(seen), max(seen))
        assert count > 0 and start == min(seen) // tile.keys and start + count - 1 == max(seen) // tile.keys


def test_tensor_maps_describe_the_cache(monkeypatch):
    asked = []
    monkeypatch.setattr(prefill_hopper, "tensor_map", lambda *given: asked.append(given) or b"")
    for shape in SHAPES:
        asked.clear()
        cache = np.empty((2, 11, shape.block_size, 3, shape.head_dim), np.uint16)
        prefill_hopper.attention_maps.__wrapped__(shape, 0, cache.strides[0], 11, 3)
        prefill_hopper.query_map(shape, 64, 9, 3, 8192)
        (k, v, one, q), strides = asked, cache.strides
        assert [k[0], v[0], one[0], q[0]] == [0, strides[0], strides[0], 64]
        for _, dtype, sizes, steps, box in (k, v, one):
            assert dtype == shape.dtype and sizes == (shape.head_dim, 3, shape.block_size, 11)
            assert steps == (strides[3], strides[2], strides[1]) and all(step % 16 == 0 for step in steps)
            assert box[0] * 2 == wgmma.SWIZZLE and max(box) <= 256
        assert (k[4][2], one[4][2]) == (min(shape.block_size, HopperTile(shape).keys), 1)
        assert q[2:4] == ((shape.head_dim, 3 * shape.group, 9), (shape.head_dim * 2, 8192))
        assert q[4][1] * q[4][2] == HopperTile(shape).rows


def test_a_map_travels_with_the_launch():
    text = ".visible .entry f(\n\t.param .u64 .ptr .align 1 f_param_0,\n\t.param .u64 f_param_1\n)\n{\nld.param.u64 \t%rd7, [f_param_1];\n"
    changed = simt._map_by_value(text, 1)
    assert ".param .align 64 .b8 f_param_1[128]" in changed and ".param .u64 .ptr .align 1 f_param_0" in changed
    assert "mov.b64 %rd7, f_param_1;\n\tcvta.param.u64 %rd7, %rd7;" in changed and "ld.param" not in changed
    with pytest.raises(ValueError, match="no pointer as parameter 2"):
        simt._map_by_value(text, 2)
    layout = Layout("u32* map i32")
    assert layout.offsets == [0, 128, 256] and layout.size == 260
    packed = struct.pack(layout.format, 7, bytes(range(128)), -1)
    assert packed[128:256] == bytes(range(128)) and packed[256:] == b"\xff" * 4
    assert len(prefill_hopper.HOPPER_SIGNATURE.split()) == 14
