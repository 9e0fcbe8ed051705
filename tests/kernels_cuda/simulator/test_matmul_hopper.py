"""The parts of the matmul in plain Python: how a ring is filled and read, and how the blocks of a cluster exchange sums."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from minivllm_kernels.cuda import matmul_hopper
from minivllm_kernels.cuda.matmul_hopper import MatmulTile

TILES = [
    MatmulTile(32, 1, 4, False),
    MatmulTile(32, 4, 4, False),
    MatmulTile(48, 1, 4, True),
    MatmulTile(96, 2, 4, True),
    MatmulTile(64, 8, 4, False),
    MatmulTile(48, 1, 4, True, 128),
    MatmulTile(32, 2, 4, False, 128),
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
    """What a thread has of sums [rows, width] after wgmma."""
    row, column = tid // 32 * 16 + tid % 32 // 4, tid % 4 * 2
    pieces = range(0, sums.shape[1], 8)
    return [sums[row + 8 * h, piece + column + y] for piece in pieces for h in (0, 1) for y in (0, 1)]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_sum_is_written_once_where_it_belongs(tile, monkeypatch):
    rows, size, before = tile.rows - 3, tile.outputs - 2, 5  # rows of an earlier tile
    rng, cluster = np.random.default_rng(0), Cluster(monkeypatch)
    push, finish = matmul_hopper.finisher("float16", tile)
    parts = rng.integers(-8, 9, (tile.split, tile.rows, tile.width)).astype(np.float32)
    held = {}
    for part, tid in np.ndindex(tile.split, tile.consumers):
        held[part, tid] = fragment(parts[part], tid)
        if tile.split > 1:
            push(held[part, tid], 0, tid, part)
    out = np.full((before + rows, size // 2 + 1), 0xFFFFFFFF, np.uint32)
    for (part, tid), sums in held.items():
        cluster.block = part
        finish(out.reshape(-1), sums, 0, tid, part, before, rows, 0, size, out.shape[1])
    want = parts.sum(0)
    if tile.gated:
        gate, up = np.split(want, 2, -1)
        want = (gate / (1 + np.exp(-gate))).astype(np.float16).astype(np.float32) * up
    assert np.allclose(out[before:].view(np.float16)[:, :size], want[:rows, :size], rtol=2e-3, atol=1e-3)
    assert (out[:, size // 2 :] == 0xFFFFFFFF).all() and (out[:before] == 0xFFFFFFFF).all(), (
        "an output that there is not"
    )


class Barriers:
    """mbarriers of a block: a phase ends when all arrivals and all bytes are there."""

    def __init__(self, counts):
        self.changed, self.counts = threading.Condition(), counts
        self.pending = {at: [count, 0] for at, count in counts.items()}
        self.phases = dict.fromkeys(counts, 0)

    def settle(self, at, arrivals, size):
        with self.changed:
            self.pending[at][0] -= arrivals
            self.pending[at][1] += size
            assert self.pending[at][0] >= 0, "more arrivals than the barrier counts"
            if self.pending[at] == [0, 0]:
                self.pending[at] = [self.counts[at], 0]
                self.phases[at] += 1
                self.changed.notify_all()

    def wait(self, at, parity):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phases[at] % 2 != parity, 20), "a wait without end"


@pytest.mark.parametrize("tile, steps", [(MatmulTile(16, 1, 2, False), 7), (MatmulTile(32, 1, 3, True), 2), (MatmulTile(16, 1, 5, True), 12), (MatmulTile(16, 1, 3, False, 128), 6)], ids=str)  # fmt: skip
def test_the_ring_brings_every_step_once_and_in_order(tile, steps, monkeypatch):
    """One thread copies, and the first lanes of the warps multiply. Shared memory is a dictionary, a map a matrix."""
    rng, size, row, copied, x_row = np.random.default_rng(0), 40, 8, tile.rows - 40, 16
    x, weight = (rng.integers(-4, 5, (n, 64 * steps)).astype(np.float32) for n in (x_row + copied, 2 * size))
    warps = tile.consumers // 32
    full, empty, memory = tile.barriers_at, tile.barriers_at + 8 * tile.stages, {}
    barriers = Barriers(
        {full + 8 * s: 1 for s in range(tile.stages)} | {empty + 8 * s: warps for s in range(tile.stages)}
    )
    weight_bytes = tile.width * 128

    def load(to, source, barrier, column, first):
        box = source[first : first + (copied if source is x else tile.outputs), column : column + 64]
        memory[to] = box
        barriers.settle(barrier, 0, -2 * box.size)

    def stage_at(descriptor):
        return (descriptor & 0x3FFF) * 16

    def add(sums, a, b, more):
        halves = [memory[stage_at(b) + half * tile.outputs * 128] for half in range(1 + tile.gated)]
        group, rest = divmod(stage_at(a) - stage_at(b) - weight_bytes, 64 * 128)
        assert rest == 0
        sums += memory[stage_at(b) + weight_bytes][64 * group :][:64] @ np.concatenate(halves).T

    fakes = {
        "map_address": lambda matrix: matrix,
        "tma_load_2d": load,
        "mbarrier_expect": lambda at, size: barriers.settle(at, 1, size),
        "mbarrier_arrive": lambda at: barriers.settle(at, 1, 0),
        "mbarrier_wait": lambda at, parity: barriers.wait(at, int(parity)),
        "wgmma_add": lambda dtype, n: add,
        "wgmma_wait": lambda groups, count: lambda sums: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(matmul_hopper, name, fake)
    start, go_on = matmul_hopper.producer(tile)
    consume = matmul_hopper.consumer("float16", tile)
    arguments = (0, x, weight, x_row, row, size, 1, steps - 1, copied)  # all steps but the first
    start(*arguments)
    with ThreadPoolExecutor(warps + 1) as pool:
        rows = [min(copied - 64 * (warp // 4), 64) for warp in range(warps)]
        sums = [np.zeros((count, tile.width), np.float32) for count in rows]
        done = [pool.submit(go_on, *arguments)]
        done += [pool.submit(consume, one, 0, warp // 4, 0, steps - 1) for warp, one in enumerate(sums)]
        for one in done:
            one.result()
    taken = weight[[*range(row, row + tile.outputs), *range(size + row, size + row + tile.outputs)][: tile.width]]
    for warp, one in enumerate(sums):
        assert np.array_equal(one, x[x_row + 64 * (warp // 4) :][:64, 64:] @ taken[:, 64:].T)
