"""How a matmul of 17 to 256 rows is dealt out, without a GPU."""

import pytest

from minivllm_kernels.cuda.matmul_hopper import MatmulTile, choose_tile, wgmma_matmul
from minivllm_kernels.cuda.prefill_hopper import HOPPER, SHARED_LIMIT

MEASURED = {  # of up to 64 rows; outputs, features, gated: what was fastest on an H200
    (4096, 1024, False): MatmulTile(32, 1, 9, False),
    (1024, 2048, False): MatmulTile(32, 4, 8, False),
    (6144, 1024, True): MatmulTile(48, 1, 7, True),
    (1024, 3072, False): MatmulTile(32, 4, 8, False),
    (6144, 4096, False): MatmulTile(96, 2, 10, False),
    (4096, 4096, False): MatmulTile(64, 2, 13, False),
    (24576, 4096, True): MatmulTile(96, 1, 5, True),
    (4096, 12288, False): MatmulTile(64, 2, 13, False),
}


WIDE = {  # of up to 128, and up to 256 rows: width and split, None where cuBLAS was faster
    (4096, 1024, False): (None, None),
    (1024, 2048, False): ((16, 2), (32, 2)),
    (6144, 1024, True): ((48, 1), (96, 1)),
    (1024, 3072, False): ((16, 2), (32, 2)),
    (6144, 4096, False): (None, None),
    (4096, 4096, False): ((64, 2), None),
    (24576, 4096, True): ((192, 1), None),
    (4096, 12288, False): ((64, 2), None),
}


@pytest.mark.parametrize("layer, tile", MEASURED.items(), ids=str)
def test_the_rule_gives_the_tiles_that_were_measured(layer, tile):
    assert choose_tile(*layer, 17, HOPPER, 132) == choose_tile(*layer, 64, HOPPER, 132) == tile


@pytest.mark.parametrize("layer, wide", WIDE.items(), ids=str)
def test_the_rule_for_more_rows(layer, wide):
    for rows, want in zip((65, 128, 129, 256), (wide[0], wide[0], wide[1], wide[1])):
        tile = choose_tile(*layer, rows, HOPPER, 132)
        assert (tile and (tile.width, tile.split)) == want
        assert tile is None or (tile.rows == 128 and tile.grid(layer[0], rows)[1] == (2 if rows > 128 else 1))


def test_rows_of_x_are_shared_out_among_its_tiles():
    tile = MatmulTile(32, 2, 4, False, 128)
    for rows in range(1, 257):
        each, tiles = tile.copied(rows), tile.grid(64, rows)[1]
        assert each % 8 == 0 and each <= 128 and (tiles - 1) * each < rows <= tiles * each


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows, least", [(64, 300), (128, 90), (256, 2)])
def test_every_tile_fits_and_reaches_every_output(gated, rows, least):
    found = 0
    for size in range(64, 40000, 172):
        for features in (64, 520, 1024, 2560, 4096, 14336):
            tile = choose_tile(size, features, gated, rows, HOPPER, 132)
            if tile is None:
                continue
            found += 1
            wgmma_matmul("float16", tile)  # raises if there is no such kernel
            blocks, tiles = tile.grid(size, rows)
            assert blocks // tile.split * tile.width >= size and tiles * tile.rows >= rows
            assert blocks * tiles >= 99 and -(-features // 64) >= 2 * tile.split
            assert blocks * tiles <= 132 * (SHARED_LIMIT // tile.shared_bytes), "more than fit at once"
            assert tile.stage_bytes % 1024 == 0 and tile.barriers_at % 8 == 0 and tile.sums_at % 16 == 0
    assert found > least


def test_what_is_left_to_torch():
    for cc in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert choose_tile(4096, 1024, False, 64, cc, 132) is None
    for size, features, gated in (
        (96, 256, False),  # a few blocks only
        (151936, 1024, False),  # many more than fit at once
        (4096, 1004, False),  # a row that does not start at a multiple of 16 bytes
        (4095, 1024, False),
        (4098, 1024, True),
    ):
        assert choose_tile(size, features, gated, 64, HOPPER, 132) is None
    assert choose_tile(1024, 3072, False, 257, HOPPER, 132) is None


@pytest.mark.parametrize(
    "wrong", [MatmulTile(36, 1, 4, False), MatmulTile(32, 3, 4, False), MatmulTile(48, 2, 4, True), MatmulTile(264, 1, 4, False), MatmulTile(32, 1, 1, False), MatmulTile(32, 1, 4, False, 96)]
)  # fmt: skip
def test_kernels_that_there_are_not(wrong):
    with pytest.raises(ValueError, match="no such kernel"):
        wgmma_matmul("float16", wrong)
