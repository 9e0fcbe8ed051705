"""How a matmul of 17 to 64 rows is dealt out, without a GPU."""

import pytest

from minivllm_kernels.cuda.matmul_hopper import MatmulTile, choose_tile, wgmma_matmul
from minivllm_kernels.cuda.prefill_hopper import HOPPER, SHARED_LIMIT

MEASURED = {  # outputs, features, gated: what was fastest on an H200
    (4096, 1024, False): MatmulTile(32, 1, 9, False),
    (1024, 2048, False): MatmulTile(32, 4, 8, False),
    (6144, 1024, True): MatmulTile(48, 1, 7, True),
    (1024, 3072, False): MatmulTile(32, 4, 8, False),
    (6144, 4096, False): MatmulTile(96, 2, 10, False),
    (4096, 4096, False): MatmulTile(64, 2, 13, False),
    (24576, 4096, True): MatmulTile(96, 1, 5, True),
    (4096, 12288, False): MatmulTile(64, 2, 13, False),
}


@pytest.mark.parametrize("layer, tile", MEASURED.items(), ids=str)
def test_the_rule_gives_the_tiles_that_were_measured(layer, tile):
    assert choose_tile(*layer, HOPPER, 132) == tile


@pytest.mark.parametrize("gated", [False, True])
def test_every_tile_fits_and_reaches_every_output(gated):
    found = 0
    for size in range(64, 40000, 172):
        for features in (64, 520, 1024, 2560, 4096, 14336):
            tile = choose_tile(size, features, gated, HOPPER, 132)
            if tile is None:
                continue
            found += 1
            wgmma_matmul("float16", tile)  # raises if there is no such kernel
            assert tile.blocks(size) // tile.split * tile.width >= size
            assert tile.blocks(size) >= 99 and -(-features // 64) >= 2 * tile.split
            blocks = SHARED_LIMIT // tile.shared_bytes
            assert tile.blocks(size) <= 132 * blocks, "more than fit at once"
            assert tile.stage_bytes % 1024 == 0 and tile.barriers_at % 8 == 0 and tile.sums_at % 16 == 0
    assert found > 300


def test_what_is_left_to_torch():
    for cc in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert choose_tile(4096, 1024, False, cc, 132) is None
    for size, features, gated in (
        (96, 256, False),  # a few blocks only
        (151936, 1024, False),  # many more than fit at once
        (4096, 1004, False),  # a row that does not start at a multiple of 16 bytes
        (4095, 1024, False),
        (4098, 1024, True),
    ):
        assert choose_tile(size, features, gated, HOPPER, 132) is None


@pytest.mark.parametrize(
    "wrong", [MatmulTile(36, 1, 4, False), MatmulTile(32, 3, 4, False), MatmulTile(48, 2, 4, True), MatmulTile(264, 1, 4, False), MatmulTile(32, 1, 1, False)]
)  # fmt: skip
def test_kernels_that_there_are_not(wrong):
    with pytest.raises(ValueError, match="no such kernel"):
        wgmma_matmul("float16", wrong)
