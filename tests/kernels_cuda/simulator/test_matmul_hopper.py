"""How the blocks of a cluster exchange sums, in plain Python: the fragments of all threads, stores to other blocks as a dictionary."""

import numpy as np
import pytest

from minivllm_kernels.cuda import matmul_hopper
from minivllm_kernels.cuda.matmul_hopper import MATMUL_ROWS, MatmulTile

TILES = [
    MatmulTile(32, 1, 4, False),
    MatmulTile(32, 4, 4, False),
    MatmulTile(48, 1, 4, True),
    MatmulTile(96, 2, 4, True),
    MatmulTile(64, 8, 4, False),
]
BLOCK = 1 << 24  # the address of a byte in the shared memory of a block is its number times this, and the byte


class Cluster:
    """Shared memory of the blocks of a cluster, in pieces of 16 bytes."""

    def __init__(self, monkeypatch):
        self.pieces, self.block = {}, 0
        fakes = {
            "cluster_address": lambda at, block: block * BLOCK + at,
            "cluster_store": self.store,
            "lds128": lambda at: self.pieces[self.block * BLOCK + at],
            "mbarrier_wait": lambda *_: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(matmul_hopper, name, fake)

    def store(self, at, done, *four):
        assert done // BLOCK == at // BLOCK, "the barrier of another block"
        assert at not in self.pieces, "two sums at one place"
        self.pieces[at] = four


def fragment(sums, tid):
    """What a thread has of sums [64, width] after wgmma."""
    row, column = tid // 32 * 16 + tid % 32 // 4, tid % 4 * 2
    pieces = range(0, sums.shape[1], 8)
    return [sums[row + 8 * h, piece + column + y] for piece in pieces for h in (0, 1) for y in (0, 1)]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_sum_is_written_once_where_it_belongs(tile, monkeypatch):
    rows, size = MATMUL_ROWS - 3, tile.outputs - 2
    rng, cluster = np.random.default_rng(0), Cluster(monkeypatch)
    push, finish = matmul_hopper.finisher("float16", tile)
    parts = rng.integers(-8, 9, (tile.split, MATMUL_ROWS, tile.width)).astype(np.float32)
    held = {}
    for part, tid in np.ndindex(tile.split, 128):
        held[part, tid] = fragment(parts[part], tid)
        if tile.split > 1:
            push(held[part, tid], 0, tid, part)
    out = np.full((rows, size // 2 + 1), 0xFFFFFFFF, np.uint32)
    for (part, tid), sums in held.items():
        cluster.block = part
        finish(out.reshape(-1), sums, 0, tid, part, 0, rows, size, out.shape[1])
    want = parts.sum(0)
    if tile.gated:
        gate, up = np.split(want, 2, -1)
        want = (gate / (1 + np.exp(-gate))).astype(np.float16).astype(np.float32) * up
    assert np.allclose(out.view(np.float16)[:, :size], want[:rows, :size], rtol=2e-3, atol=1e-3)
    assert (out[:, size // 2 :] == 0xFFFFFFFF).all(), "an output that there is not"
