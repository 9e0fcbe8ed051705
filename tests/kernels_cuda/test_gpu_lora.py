"""Adapters of a layer on a GPU against float64: few rows by our kernels, many by grouped matmuls, any mix by one graph."""

import numpy as np
import pytest
import torch

from minivllm.lora.adapter import LoRAWeights
from minivllm.lora.linear import FEW_ROWS, LoRABatch, LoRALinear
from minivllm.models.linear.layer import Linear
from minivllm_kernels.cuda import ops

CUDA = torch.device("cuda", 0)
REASON = ops.device_unsupported(CUDA)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=f"no GPU to run on: {REASON}")]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
INPUTS, PARTS, SLOTS, ROOM = 1040, {"q": 1024, "k": 64, "v": 80}, 5, 24


class Adapted:
    """A layer with five adapters of several ranks; the last has nothing for k, and the fourth nothing at all."""

    def __init__(self, dtype, method="gemv"):
        torch.manual_seed(0)
        self.dtype, how = dtype, {"dtype": dtype, "device": CUDA}
        self.layer = Linear(INPUTS, PARTS, method=method, **how)
        self.layer.method.weights["weight"].normal_(0, INPUTS**-0.5)
        self.layer.method.process_weights_after_loading()
        self.base, self.batch = self.layer.method, LoRABatch(2048, CUDA)
        self.method = self.layer.method = LoRALinear(self.layer, self.batch, SLOTS, ROOM, invariant=False)
        self.adapters = [{}] * SLOTS
        for slot, rank in enumerate((24, 5, 16, 0, 8)):
            self.load(slot, rank, "" if rank == 0 else "qv" if rank == 8 else "qkv")

    def load(self, slot, rank, parts):
        weights = {
            part: LoRAWeights(torch.randn(rank, INPUTS) / INPUTS**0.5, torch.randn(PARTS[part], rank)) for part in parts
        }
        self.adapters[slot] = {p: LoRAWeights(w.a.to(self.dtype), w.b.to(self.dtype)) for p, w in weights.items()}
        self.method.set_slot(slot, self.adapters[slot])

    def want(self, x, slots):
        want = self.base.apply(x).double()
        starts = dict(zip(PARTS, np.cumsum([0, *PARTS.values()])))
        for slot, adapter in enumerate(self.adapters):
            rows = torch.from_numpy(np.flatnonzero(slots == slot)).to(CUDA)
            for part, w in adapter.items():
                more = x[rows].double() @ w.a.to(CUDA).double().T @ w.b.to(CUDA).double().T
                want[rows, starts[part] : starts[part] + PARTS[part]] += more
        return want


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 64, FEW_ROWS, FEW_ROWS + 1, 1500])
def test_every_row_has_its_adapter(dtype, rows):
    made, rng = Adapted(dtype), np.random.default_rng(rows)
    x = torch.randn(rows, INPUTS, device=CUDA).to(dtype)
    base = made.base.apply(x)
    for slots in (np.full(rows, 2), rng.integers(-1, SLOTS, rows), np.sort(rng.integers(-1, SLOTS, rows))):
        made.batch.set(slots)
        got = made.layer(x)
        assert error(got, made.want(x, slots)) < TOLERANCE[dtype]
        off = torch.from_numpy((slots < 0) | (slots == 3)).to(CUDA)
        assert torch.equal(got[off], base[off])
    made.batch.set(np.full(rows, -1))
    assert torch.equal(made.layer(x), base)


@pytest.mark.parametrize("rows", [9, 400])
def test_a_slot_that_is_filled_again_holds_nothing_of_before(rows):
    made, x = Adapted(torch.bfloat16), torch.randn(rows, INPUTS, device=CUDA).bfloat16()
    slots = np.arange(rows) % SLOTS
    made.load(0, 3, "v")
    made.load(2, 24, "qk")
    made.batch.set(slots)
    assert error(made.layer(x), made.want(x, slots)) < TOLERANCE[torch.bfloat16]


def test_over_an_fp8_base():
    made, x = Adapted(torch.bfloat16, "fp8"), torch.randn(20, INPUTS, device=CUDA).bfloat16()
    slots = np.arange(20) % (SLOTS + 1) - 1
    made.batch.set(slots)
    assert error(made.layer(x), made.want(x, slots)) < TOLERANCE[torch.bfloat16]


def test_one_graph_serves_every_mix_and_every_load():
    made, x = Adapted(torch.bfloat16), torch.randn(8, INPUTS, device=CUDA).bfloat16()
    made.batch.set(np.zeros(8, int))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made.layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.layer(x)
    for slots in ([0, 1, 2, 3, 4, -1, -1, 0], [4] * 8, [-1, -1, 2, -1, -1, -1, -1, -1], [1, 0, 1, 0, 1, 0, 1, 0]):
        made.load(0, 16, "qv")
        made.batch.set(np.array(slots))
        graph.replay()
        eager = made.layer(x)
        assert torch.equal(out, eager) and error(out, made.want(x, np.array(slots))) < TOLERANCE[torch.bfloat16]


def test_a_row_has_the_same_bits_whatever_is_beside_it():
    made, x = Adapted(torch.float16), torch.randn(200, INPUTS, device=CUDA).half()
    rng, found = np.random.default_rng(0), []
    for _ in range(3):
        slots = rng.integers(-1, SLOTS, 200)
        slots[77] = 2
        made.batch.set(slots)
        out = torch.zeros(200, sum(PARTS.values()), device=CUDA, dtype=torch.float16)
        made.method._kernels.add(x, out)
        found.append(out[77].clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and found[0].any()


def test_wrong_tensors_are_refused():
    def zeros(*shape, dtype=torch.bfloat16):
        return torch.zeros(shape, dtype=dtype, device=CUDA)

    ints = {"dtype": torch.int32}
    right = {
        "out": zeros(4, 32), "x": zeros(4, 64), "a": zeros(2, 1, 8, 64), "b": zeros(2, 8, 32), "work": zeros(5, 2, **ints),
        "ranks": zeros(2, 1, **ints), "part_of": zeros(4, **ints),
    }  # fmt: skip
    ops.add_lora(**right)
    for name, wrong, message in (
        ("x", zeros(4, 32), "shape"),
        ("x", zeros(4, 64, dtype=torch.float32), "torch.float32"),
        ("out", zeros(4, 32, dtype=torch.float16), "torch.bfloat16"),
        ("b", zeros(2, 16, 32), "shape"),
        ("work", zeros(4, 2, **ints), "a pair of `work` for each row"),
        ("ranks", zeros(2, 1, dtype=torch.int64), "torch.int32"),
        ("part_of", zeros(3, **ints), "shape"),
        ("out", zeros(8, 32)[::2, :].T.contiguous().T, "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.add_lora(**right | {name: wrong})
