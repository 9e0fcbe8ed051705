"""The kernels on a GPU against float64. Skipped, with the reason, where there is none."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_weights import WEIGHTS, random_weight
from quantized_checkpoints import CASES, write_checkpoint

from minivllm.attention.backend import (
    FP8,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVScales,
    as_bytes,
    int8_parts,
    to_fp8,
    to_int8,
)
from minivllm.attention.numba_cuda import NumbaCudaBackend, NumbaCudaInvariantBackend
from minivllm.attention.select import make_backend, select_backend
from minivllm.models.decoder import Decoder
from minivllm.models.linear.cuda import CUDAPackedWeight, CUDAStoredLinear, packed
from minivllm.models.linear.layer import Linear, method_or_torch
from minivllm.models.linear.scaled import ScaledWeight
from minivllm.models.loading import load_model
from minivllm.models.ops.numba_cuda import NumbaCudaOps
from minivllm_kernels.cuda import ops
from minivllm_kernels.cuda.matmul_hopper import MatmulTile
from minivllm_kernels.cuda.prefill_hopper import HOPPER

CUDA = torch.device("cuda", 0)
REASON = ops.device_unsupported(CUDA)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=f"no GPU to run on: {REASON}")]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 8e-4}
NO_SCALES = KVScales()


@pytest.fixture(params=["wgmma", "mma"])
def rung(request, monkeypatch):
    """Each of the two fast rungs of prefill; Hopper alone has the first."""
    if request.param == "mma":
        monkeypatch.setattr(ops, "hopper_unsupported", lambda *_: "the test wants rung 3")
    elif torch.cuda.get_device_capability(CUDA) != HOPPER:
        pytest.skip("wgmma needs compute capability 9.0")
    return request.param


each_rung = pytest.mark.usefixtures("rung")


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


class Case:
    """A step on a paged cache with shuffled blocks and NaN wherever no kernel may look."""

    def __init__(self, spec, query_lens, seq_lens, seed=0, scales=NO_SCALES):
        generator = torch.Generator(CUDA).manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.spec, self.scales, block = spec, scales, spec.block_size
        self.query_lens, self.seq_lens = np.array(query_lens), np.array(seq_lens)
        need = -(-self.seq_lens // block)
        order = rng.permutation(np.arange(1, need.sum() + 1)).astype(np.int32)
        self.table = np.zeros((len(need), need.max()), np.int32)
        for s, (n, end) in enumerate(zip(need, np.cumsum(need))):
            self.table[s, :n] = order[end - n : end]
        size = (2, int(need.sum()) + 1, block, spec.num_kv_heads, spec.head_dim)
        numbers = torch.randn(size, generator=generator, device=CUDA, dtype=torch.float32)
        self.cache = numbers.to(spec.dtype)
        if spec.kv_dtype == torch.int8:
            self.cache = torch.zeros(NumbaCudaBackend().kv_cache_shape(size[1], spec), dtype=torch.int8, device=CUDA)
            AttentionBackend.write(NumbaCudaBackend(), *numbers.flatten(1, 2), self.cache, torch.arange(size[1] * block, device=CUDA))  # fmt: skip
        elif spec.kv_dtype is not None:
            self.cache = torch.stack([as_bytes(to_fp8(x, scale)) for x, scale in zip(numbers, scales)]).view(FP8)
        size = (int(self.query_lens.sum()), spec.num_heads, spec.head_dim)
        self.q = (2 * torch.randn(size, generator=generator, device=CUDA)).to(spec.dtype)
        self.want = self._exact()
        self._poison()

    def batch(self, table=None):
        starts = np.cumsum([0, *self.query_lens]).astype(np.int32)
        slots = np.zeros(starts[-1], np.int64)
        return AttentionBatch(starts, self.seq_lens.astype(np.int32), self.table if table is None else table, slots)

    def _exact(self):
        spec, want = self.spec, torch.empty(self.q.shape, dtype=torch.float64, device=CUDA)
        row = 0
        for s, (new, n) in enumerate(zip(self.query_lens.tolist(), self.seq_lens.tolist())):
            pages = torch.from_numpy(self.table[s, : -(-n // spec.block_size)]).long().to(CUDA)
            k, v = self._stored(pages).flatten(1, 2)[:, :n]
            k, v = k * self.scales.k, v * self.scales.v
            q = self.q[row : row + new].double().unflatten(1, (spec.num_kv_heads, -1))
            score = torch.einsum("tkgd,nkd->tkgn", q, k) * spec.scale
            if spec.soft_cap is not None:
                score = spec.soft_cap * (score / spec.soft_cap).tanh()
            positions = np.arange(n - new, n)
            first = torch.from_numpy(spec.first_key(positions)).to(CUDA)[:, None]
            keys = torch.arange(n, device=CUDA)[None]
            seen = (keys >= first) & (keys <= torch.from_numpy(positions).to(CUDA)[:, None])
            score.masked_fill_(~seen[:, None, None], -torch.inf)
            want[row : row + new] = torch.einsum("tkgn,nkd->tkgd", score.softmax(-1), v).flatten(1, 2)
            row += new
        return want

    def _stored(self, pages):
        if self.spec.kv_dtype == torch.int8:
            numbers, scales = int8_parts(self.cache)
            return numbers[:, pages].double() * scales[:, pages].transpose(-1, -2)[..., None].double()
        return as_bytes(self.cache)[:, pages].view(self.cache.dtype).double()

    def _poison(self):
        block, cache = self.spec.block_size, as_bytes(self.cache)
        nan = 0x7F if self.cache.dtype == FP8 else torch.nan
        if self.cache.dtype == torch.int8:
            cache = int8_parts(self.cache)[1].transpose(-1, -2)
        cache[:, 0] = nan
        for s, n in enumerate(self.seq_lens.tolist()):
            if n % block:
                cache[:, int(self.table[s, n // block]), n % block :] = nan
            oldest = int(self.spec.first_key(np.array(n - self.query_lens[s])))
            self.table[s, : oldest // block] = 0

    def run(self, backend):
        plan = backend.plan(self.batch(), self.spec, CUDA)
        out = torch.full_like(self.q, torch.nan)
        return ops.paged_attention(self.q, self.cache, plan.device_plan, out, *self.scales)


def make_spec(dtype=torch.bfloat16, dim=128, group=4, kv_heads=2, block=16, **extra):
    return AttentionSpec(
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=dim**-0.5,
        block_size=block,
        dtype=dtype,
        **extra,
    )


BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    make_spec(BF16, 64, 3, 3, 16),
    make_spec(FP16, 64, 1, 2, 8),
    make_spec(BF16, 80, 1, 4, 32),
    make_spec(FP16, 80, 5, 2, 16, sliding_window=100),
    make_spec(BF16, 96, 8, 2, 8),
    make_spec(FP16, 96, 2, 1, 64, soft_cap=10.0),
    make_spec(BF16, 128, 4, 8, 16),
    make_spec(FP16, 128, 16, 1, 32),
    make_spec(BF16, 128, 7, 2, 64, sliding_window=333),
    make_spec(BF16, 128, 2, 2, 8, sliding_window=37, soft_cap=30.0),
    make_spec(BF16, 256, 4, 1, 16, sliding_window=64),
    make_spec(FP16, 256, 9, 2, 32),
    make_spec(BF16, 64, 12, 2, 64, chunk=48),
    make_spec(BF16, 128, 4, 2, 128),
    make_spec(FP16, 64, 6, 2, 256, sliding_window=200),
    make_spec(BF16, 256, 2, 1, 128, soft_cap=50.0),
]


def spec_id(spec):
    extra = "".join(f"-{n}{getattr(spec, n)}" for n in ("sliding_window", "chunk", "soft_cap") if getattr(spec, n))
    extra += {None: "", FP8: "-fp8", torch.int8: "-int8"}[spec.kv_dtype]
    return f"{str(spec.dtype)[6:]}-d{spec.head_dim}-g{spec.group_size}-b{spec.block_size}{extra}"


@each_rung
@pytest.mark.parametrize("spec", SHAPES, ids=spec_id)
def test_mixed_batches(spec):
    rng = np.random.default_rng(0)
    cases = [
        ([1] * 5, [1, 2, 17, 400, 1500]),  # decode: few sequences, cut in pieces
        ([1] * 40, rng.integers(1, 700, 40).tolist()),
        ([37, 1, 200, 1, 9], [37, 300, 900, 5, 1000]),  # mixed
        ([700, 3, 128], [700, 2000, 1024]),
    ]
    for query_lens, seq_lens in cases:
        case = Case(spec, query_lens, seq_lens)
        error = relative_error(case.run(NumbaCudaBackend()), case.want)
        assert error < TOLERANCE[spec.dtype], (query_lens, seq_lens, error)


FP8_SHAPES = [
    make_spec(BF16, 64, 3, 3, 16, kv_dtype=FP8),
    make_spec(FP16, 80, 9, 2, 8, sliding_window=100, kv_dtype=FP8),
    make_spec(BF16, 96, 2, 1, 64, soft_cap=10.0, kv_dtype=FP8),
    make_spec(BF16, 128, 4, 8, 16, kv_dtype=FP8),
    make_spec(FP16, 128, 16, 1, 32, chunk=48, kv_dtype=FP8),
    make_spec(BF16, 256, 4, 1, 16, kv_dtype=FP8),
]
needs_fp8 = pytest.mark.skipif(
    REASON is None and ops.fp8_unsupported(CUDA) is not None, reason="needs compute capability 8.9"
)


@needs_fp8
@pytest.mark.parametrize("spec", FP8_SHAPES, ids=spec_id)
def test_an_fp8_cache(spec):
    rng = np.random.default_rng(0)
    cases = [
        ([1] * 5, [1, 2, 17, 400, 1500]),
        ([1] * 40, rng.integers(1, 700, 40).tolist()),
        ([37, 1, 200, 1, 9], [37, 300, 900, 5, 1000]),
    ]
    for scales in (NO_SCALES, KVScales(0.02, 1.7)):
        for query_lens, seq_lens in cases:
            case = Case(spec, query_lens, seq_lens, scales=scales)
            for backend in (NumbaCudaBackend(), NumbaCudaInvariantBackend()):
                got = case.run(backend)
                assert relative_error(got, case.want) < TOLERANCE[spec.dtype], (query_lens, seq_lens, scales)
                assert torch.equal(case.run(backend), got), "the result moves from run to run: a race"


@pytest.mark.parametrize("spec", [replace(spec, kv_dtype=torch.int8) for spec in FP8_SHAPES], ids=spec_id)
def test_an_int8_cache(spec):
    """Values of an int8 cache are weighted in bfloat16, whatever the model's dtype."""
    lens = np.exp(np.random.default_rng(1).uniform(0, np.log(16384), 40)).astype(int).clip(1).tolist()
    for query_lens, seq_lens in (
        ([1] * 5, [1, 2, 17, 400, 1500]),
        ([1] * 40, lens),
        ([37, 1, 200, 1, 9], [37, 300, 900, 5, 1000]),
    ):
        case = Case(spec, query_lens, seq_lens)
        for backend in (NumbaCudaBackend(), NumbaCudaInvariantBackend()):
            got = case.run(backend)
            assert relative_error(got, case.want) < TOLERANCE[BF16], (query_lens, seq_lens)
            assert torch.equal(case.run(backend), got), "the result moves from run to run: a race"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("dim", [80, 256])
def test_writes_to_an_int8_cache_are_those_of_torch(dtype, dim):
    cache = torch.zeros(2, 20, 8, 3, dim + 4, dtype=torch.int8, device=CUDA)
    fused, slots = (100 * torch.randn(100, 12, dim, device=CUDA)).to(dtype), torch.randperm(160, device=CUDA)[:100]
    fused[0, 6], fused[1, 6, 3] = 0, torch.nan
    NumbaCudaBackend().write(fused[:, 6:9], fused[:, 9:], cache, slots)
    numbers, scales = int8_parts(cache)
    for half, x in enumerate((fused[:, 6:9], fused[:, 9:])):
        want, want_scales = to_int8(x)
        got, got_scales = numbers[half, slots // 8, slots % 8], scales[half, slots // 8, :, slots % 8]
        assert torch.equal(got_scales.isnan(), want_scales.isnan()) and got_scales.isnan().any() == (half == 0)
        assert ((got_scales / want_scales - 1).nan_to_num(0).abs() < 1e-6).all()
        apart = (got.int() - want.int()).abs()[~want_scales.isnan()]
        assert apart.max() <= 1 and (apart > 0).float().mean() < 1e-2  # a division that is not rounded to nearest
    others = torch.ones(160, dtype=torch.bool, device=CUDA)
    others[slots] = False
    assert not numbers.flatten(1, 2)[:, others].any() and not scales.transpose(-1, -2).flatten(1, 2)[:, others].any()
    moved = torch.zeros(2, 5, 8, 3, dim + 4, dtype=torch.int8).pin_memory()
    NumbaCudaBackend().copy_blocks(cache, moved, [(3, 4), (7, 0)])
    torch.cuda.synchronize()
    assert torch.equal(moved[:, [4, 0]], cache[:, [3, 7]].cpu())


@needs_fp8
def test_ragged_decode_batches_over_an_fp8_cache():
    for batch in (1, 16, 256):
        lens = np.exp(np.random.default_rng(batch).uniform(0, np.log(16384), batch)).astype(int).clip(1)
        lens[0] = 16384
        case = Case(make_spec(kv_heads=4, kv_dtype=FP8), [1] * batch, lens.tolist())
        got = case.run(NumbaCudaBackend())
        worst = (got.double() - case.want).flatten(1).norm(dim=1) / case.want.flatten(1).norm(dim=1)
        assert worst.max().item() < 3 * TOLERANCE[BF16], batch


@needs_fp8
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_writes_to_an_fp8_cache_are_those_of_torch(dtype):
    scales = KVScales(0.37, 2.5)
    backend = NumbaCudaBackend().scaled(scales)
    cache = torch.zeros(2, 20, 8, 3, 80, dtype=FP8, device=CUDA)
    fused = (100 * torch.randn(100, 12, 80, device=CUDA)).to(dtype)
    fused[0, 6, :4] = torch.tensor([6e4, -6e4, 2.0**-9, torch.nan])
    slots = torch.randperm(160, device=CUDA)[:100]
    want = torch.zeros_like(as_bytes(cache))
    for half, x, scale in ((0, fused[:, 6:9], scales.k), (1, fused[:, 9:], scales.v)):
        want[half].flatten(0, 1)[slots] = as_bytes(to_fp8(x, scale))
    backend.write(fused[:, 6:9], fused[:, 9:], cache, slots)
    got = as_bytes(cache)
    nan = (want & 0x7F) == 0x7F
    assert nan.any() and torch.equal((got & 0x7F) == 0x7F, nan) and torch.equal(got[~nan], want[~nan])
    moved = torch.zeros(2, 5, 8, 3, 80, dtype=FP8).pin_memory()
    backend.copy_blocks(cache, moved, [(3, 4), (7, 0)])
    torch.cuda.synchronize()
    assert torch.equal(as_bytes(moved)[:, [4, 0]], got[:, [3, 7]].cpu())
    with pytest.raises(ValueError, match="k_scale and v_scale must be above 0"):
        backend.scaled(KVScales(0.0, 1.0)).write(fused[:, 6:9], fused[:, 9:], cache, slots)
    with pytest.raises(ValueError, match="1 unless the cache is torch.float8_e4m3fn"):
        backend.write(fused[:, 6:9], fused[:, 9:], cache.to(dtype), slots)


@pytest.mark.parametrize("batch", [1, 2, 3, 16, 64, 256])
def test_ragged_decode_batches(batch):
    rng = np.random.default_rng(batch)
    lens = np.exp(rng.uniform(0, np.log(16384), batch)).astype(int).clip(1)
    lens[0] = 16384
    case = Case(make_spec(kv_heads=4), [1] * batch, lens.tolist())
    got = case.run(NumbaCudaBackend())
    assert relative_error(got, case.want) < TOLERANCE[torch.bfloat16]
    worst = (got.double() - case.want).flatten(1).norm(dim=1) / case.want.flatten(1).norm(dim=1)
    assert worst.max().item() < 3 * TOLERANCE[torch.bfloat16]  # no single row may hide among the others
    for _ in range(5):
        assert torch.equal(case.run(NumbaCudaBackend()), got), "the result moves from run to run: a race"


@each_rung
@pytest.mark.parametrize(
    "kv_dtype", [None, pytest.param(FP8, marks=needs_fp8), torch.int8], ids=["bf16", "fp8", "int8"]
)
def test_prefill_lengths_around_the_tile(kv_dtype):
    for n in (2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129):
        case = Case(make_spec(kv_heads=1, kv_dtype=kv_dtype), [n, n], [n, n + 77])
        assert relative_error(case.run(NumbaCudaBackend()), case.want) < TOLERANCE[torch.bfloat16], n


@each_rung
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_more_prefill_tiles_than_multiprocessors(dim):
    """Work is taken in an order that differs from run to run; the result must not, and the counters must be as before."""
    lens = [1 + 97 * i % 700 for i in range(40)]
    case = Case(make_spec(dim=dim, kv_heads=4), [max(2, n // 2) for n in lens], [n + 1 for n in lens])
    plan = NumbaCudaBackend().plan(case.batch(), case.spec, CUDA)
    got = NumbaCudaBackend().attend(case.q, case.cache, plan)
    worst = (got.double() - case.want).flatten(1).norm(dim=1) / case.want.flatten(1).norm(dim=1)
    assert worst.max().item() < 3 * TOLERANCE[BF16]
    for _ in range(50):
        out = torch.full_like(got, torch.nan)
        assert torch.equal(ops.paged_attention(case.q, case.cache, plan.device_plan, out), got)


@each_rung
@pytest.mark.parametrize("extra", [{}, {"sliding_window": 50}, {"chunk": 40}], ids=["full", "window", "chunk"])
def test_batch_invariant_mode_is_bit_identical(extra):
    spec, backend = make_spec(**extra), NumbaCudaInvariantBackend()
    case = Case(spec, [120, 1, 300, 64], [120, 700, 900, 64])
    got = case.run(backend)
    assert relative_error(got, case.want) < TOLERANCE[spec.dtype]
    row = 0
    for s, new in enumerate(case.query_lens.tolist()):
        for step in (new, 33, 1):  # alone; in chunks; token by token
            for low in range(0, new, step):
                count = min(step, new - low)
                if step == 1 and low % 29:
                    continue
                end = case.seq_lens[s] - new + low + count
                batch = AttentionBatch(
                    np.array([0, count], np.int32),
                    np.array([end], np.int32),
                    case.table[s : s + 1],
                    np.zeros(count, np.int64),
                )
                plan = backend.plan(batch, spec, CUDA)
                alone = backend.attend(case.q[row + low : row + low + count], case.cache, plan)
                assert torch.equal(alone, got[row + low : row + low + count]), (s, step, low)
        row += new


@each_rung
def test_q_may_be_a_view_of_a_fused_product():
    case = Case(make_spec(), [1, 20], [100, 50])
    wide = torch.full((21, 12 * 128), torch.nan, dtype=BF16, device=CUDA)
    view = wide[:, : 8 * 128].view(21, 8, 128)
    view.copy_(case.q)
    plan = NumbaCudaBackend().plan(case.batch(), case.spec, CUDA)
    assert torch.equal(NumbaCudaBackend().attend(view, case.cache, plan), case.run(NumbaCudaBackend()))


def test_a_captured_graph_replays():
    case, backend = Case(make_spec(), [1] * 3, [2000, 50, 700]), NumbaCudaBackend()
    want = case.run(backend)
    plan = backend.plan(case.batch(), case.spec, CUDA)
    q = case.q.clone()
    backend.attend(q, case.cache, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(q, case.cache, plan)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_cache_writes(dtype):
    backend, spec = NumbaCudaBackend(), make_spec(dim=80, kv_heads=3, block=8)
    cache = torch.zeros(2, 20, 8, 3, 80, dtype=dtype, device=CUDA)
    fused = torch.randn(100, 12, 80, device=CUDA).to(dtype)
    slots = torch.randperm(160, device=CUDA)[:100]
    want = cache.clone()
    for half, x in ((0, fused[:, 6:9]), (1, fused[:, 9:])):
        want[half].flatten(0, 1)[slots] = x
    backend.write(fused[:, 6:9], fused[:, 9:], cache, slots)
    assert torch.equal(cache, want)
    assert spec.num_kv_heads == 3


@pytest.mark.parametrize("direction", ["out", "in", "within"])
def test_swap_and_copy(direction):
    there = torch.randn(2, 30, 16, 2, 64, device=CUDA).to(BF16)
    here = torch.randn(2, 12, 16, 2, 64).to(BF16).pin_memory()
    source, target = {"out": (there, here), "in": (here, there), "within": (there, there)}[direction]
    pairs = [(3, 7), (11, 0), (5, 2)]
    want = target.clone()
    for a, b in pairs:
        want[:, b] = source[:, a]
    NumbaCudaBackend().copy_blocks(source, target, pairs)
    torch.cuda.synchronize()
    assert torch.equal(target, want)


def test_copy_within_a_cache_reads_all_before_it_writes():
    cache = torch.randn(2, 6, 16, 1, 64, device=CUDA).to(BF16)
    want = cache.clone()
    want[:, 1], want[:, 2] = cache[:, 0], cache[:, 1]
    NumbaCudaBackend().copy_blocks(cache, cache, [(0, 1), (1, 2)])
    assert torch.equal(cache, want)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("hidden", [576, 1024, 4096, 8192])
def test_norm(dtype, hidden):
    x, residual = (torch.randn(33, hidden, device=CUDA).to(dtype) for _ in range(2))
    weight = torch.randn(hidden, device=CUDA).to(dtype)
    for added in (None, residual):
        total = x.double() if added is None else (x.float() + residual.float()).to(dtype).double()
        out = ops.rms_norm(x, weight, 1e-6, added)
        want = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        assert relative_error(out, want) < TOLERANCE[dtype]
    assert torch.equal(residual.double(), total)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("rows, size", [(1, 151936), (64, 32000), (9, 8)])
def test_argmax_is_the_first_of_equals_or_none(dtype, rows, size):
    x = torch.randn(rows, size, device=CUDA).to(dtype)
    if rows > 4:
        x[0], x[1, 3], x[2, size - 1], x[3, 1:], x[4, [2, 6]] = -torch.inf, torch.nan, torch.inf, -torch.inf, 9.0
    values = x.max(-1).values
    first = (x == values[:, None]).int().argmax(-1)
    assert torch.equal(ops.first_largest(x), torch.where(values.abs() < torch.inf, first, -1))
    cut = x[:, : size - 1]  # no whole pieces of 16 bytes
    ids, largest = NumbaCudaOps().argmax(cut), cut.max(-1).values
    found = largest.abs() < torch.inf
    assert torch.equal(ids >= 0, found)
    assert torch.equal(cut[found].gather(1, ids[found, None])[:, 0], largest[found])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_silu(dtype):
    x = 3 * torch.randn(7, 2 * 1536, device=CUDA).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    assert relative_error(ops.silu_mul(x), torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_rope(dim, norm):
    heads, kv_heads, tokens, block = 6, 2, 19, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=CUDA).to(BF16)
    cache = torch.zeros(2, 10, block, kv_heads, dim, device=CUDA, dtype=BF16)
    weights = [torch.randn(dim, device=CUDA).to(BF16) if norm else None for _ in range(2)]
    angle = torch.arange(500, device=CUDA)[:, None] / 10000 ** (torch.arange(dim // 2, device=CUDA) / (dim // 2))
    table = torch.cat([angle.cos(), angle.sin()], 1).float()
    positions, slots = torch.randint(0, 500, (tokens,), device=CUDA), torch.randperm(160, device=CUDA)[:tokens]
    given = qkv.view(tokens, -1, dim).double()
    q, k, v = given.split([heads, kv_heads, kv_heads], dim=1)
    c, s = table[positions].double()[:, None].chunk(2, dim=-1)
    rotated = []
    for x, weight in ((q, weights[0]), (k, weights[1])):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        a, b = x.chunk(2, dim=-1)
        rotated.append(torch.cat([a * c - b * s, b * c + a * s], -1))
    got = ops.rope_and_cache(
        qkv, cache, table, positions, slots, num_heads=heads, q_weight=weights[0], k_weight=weights[1]
    )
    stored = cache.flatten(1, 2)[:, slots]
    assert relative_error(got, rotated[0]) < TOLERANCE[BF16]
    assert relative_error(stored[0], rotated[1]) < TOLERANCE[BF16]
    assert torch.equal(stored[1].double(), v)
    before = got.clone()
    if ops.fp8_unsupported(CUDA) is None:
        qkv.copy_(given.flatten(1))
        cache, scales = torch.zeros_like(cache, dtype=FP8), KVScales(0.5, 0.013)
        more = {"q_weight": weights[0], "k_weight": weights[1], "k_scale": scales.k, "v_scale": scales.v}
        again = ops.rope_and_cache(qkv, cache, table, positions, slots, num_heads=heads, **more)
        assert torch.equal(again, before)
        halves = as_bytes(cache).flatten(1, 2)[:, slots]
        for half, x, scale in zip(halves, stored, scales):
            assert torch.equal(half, as_bytes(to_fp8(x, scale)))
    qkv.copy_(given.flatten(1))
    cache = torch.zeros(2, 10, block, kv_heads, dim + 4, dtype=torch.int8, device=CUDA)
    again = ops.rope_and_cache(
        qkv, cache, table, positions, slots, num_heads=heads, q_weight=weights[0], k_weight=weights[1]
    )
    assert torch.equal(again, before)
    numbers, scales = int8_parts(cache)
    for half, x in enumerate(stored):
        want, want_scales = to_int8(x)
        assert torch.allclose(scales[half, slots // block, :, slots % block], want_scales, rtol=1e-6)
        assert (numbers[half, slots // block, slots % block].int() - want.int()).abs().max() <= 1


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("size, features", [(1024, 3072), (4096, 1024), (150, 1000), (30002, 576)])
def test_gemv(dtype, size, features):
    """Right for every number of rows, and a row is the same bit for bit alone and with others."""
    weight = (torch.randn(size, features, device=CUDA) / features**0.5).to(dtype)
    wide = torch.full((16, features + 8), torch.nan, device=CUDA, dtype=dtype)
    wide[:, :features] = torch.randn(16, features, device=CUDA)
    x = wide[:, :features]
    exact = x.double() @ weight.double().t()
    alone = torch.cat([ops.gemv(x[i : i + 1], weight, kind="mma") for i in range(16)])
    for rows in range(1, 17):
        got = ops.gemv(x[:rows], weight, kind="mma")
        assert relative_error(got, exact[:rows]) < TOLERANCE[dtype], rows
        assert torch.equal(got, alone[:rows]) and (rows == 1 or torch.equal(got, ops.gemv(x[:rows], weight)))
    assert relative_error(ops.gemv(x[:1], weight), exact[:1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows, size, features", [(1, 3072, 1024), (1, 74, 1000), (5, 3072, 1024), (16, 22, 3080)])
def test_a_gated_gemv_is_the_product_and_then_silu_mul(dtype, rows, size, features):
    weight = (torch.randn(2 * size, features, device=CUDA) / features**0.5).to(dtype)
    x = torch.randn(rows, features, device=CUDA).to(dtype)
    gate, up = ops.gemv(x, weight).double().chunk(2, -1)
    got = ops.gemv(x, weight, gated=True)
    assert got.shape == (rows, size) and relative_error(got, gate.sigmoid() * gate * up) < TOLERANCE[dtype]
    if size % 8 == 0 and rows > 1:
        assert torch.equal(got, ops.silu_mul(ops.gemv(x, weight)))


def gated_or_not(x, weight, gated):
    """float64, of the numbers that the kernel gets."""
    product = x.double() @ weight.double().t()
    if not gated:
        return product
    gate, up = product.chunk(2, -1)
    return gate.sigmoid() * gate * up


def check_many_rows(dtype, size, features, gated, all_rows):
    """Against float64, with NaN behind the last row and between rows; and the same bits again."""
    weight = (torch.randn(size, features, device=CUDA) / features**0.5).to(dtype)
    for rows in all_rows:
        wide = torch.full((rows + 8, features + 24), torch.nan, device=CUDA, dtype=dtype)
        x = wide[:rows, 8 : features + 8]
        x.copy_(torch.randn(rows, features, device=CUDA))
        got = ops.gemv(x, weight, gated)
        assert got.shape == (rows, size // (1 + gated))
        assert relative_error(got, gated_or_not(x, weight, gated)) < (1 + gated) * TOLERANCE[dtype], rows
        assert torch.equal(got, ops.gemv(x, weight, gated)), "the result moves from run to run: a race"


on_hopper = pytest.mark.skipif(
    REASON is None and torch.cuda.get_device_capability(CUDA) != HOPPER, reason="needs compute capability 9.0"
)
MATMULS = [  # of Qwen3-0.6B and 8B
    *((4096, 1024, False), (1024, 2048, False), (6144, 1024, True), (1024, 3072, False)),
    *((6144, 4096, False), (4096, 4096, False), (24576, 4096, True), (4096, 12288, False)),
]


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("size, features, gated", MATMULS)
def test_a_matmul_of_17_to_256_rows(dtype, size, features, gated):
    weight = torch.empty(size, features, dtype=dtype, device=CUDA)
    many = [rows for rows in (65, 96, 127, 128, 129, 192, 255, 256) if ops.takes_rows(weight, rows, gated)]
    assert not ops.takes_rows(weight, 257, gated)
    check_many_rows(dtype, size, features, gated, (17, 31, 32, 33, 48, 64, *many))


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "tile, size, features",
    [
        (MatmulTile(32, 1, 3, False), 150, 1000),  # the last outputs and features are missing
        (MatmulTile(32, 4, 2, False), 1002, 1544),  # parts of a row are of different lengths
        (MatmulTile(48, 1, 5, True), 2 * 74, 520),
        (MatmulTile(96, 2, 4, True), 2 * 1000, 1096),
        (MatmulTile(64, 8, 2, False), 66, 4096),
        (MatmulTile(256, 1, 3, False), 30002, 576),
        (MatmulTile(32, 4, 2, False, 128), 1002, 1544),
        (MatmulTile(96, 2, 4, True, 128), 2 * 1000, 1096),
    ],
    ids=str,
)
def test_tiles_of_odd_sizes(dtype, tile, size, features, monkeypatch):
    """More rows than a tile has make more tiles."""
    monkeypatch.setattr(ops, "choose_tile", lambda *_: tile)
    check_many_rows(dtype, size, features, tile.gated, (17, 40, 64, 65, 130, 300))


@on_hopper
def test_layers_take_it_for_up_to_256_rows():
    layer = Linear(1024, {"gate": 3072, "up": 3072}, dtype=BF16, device=CUDA, method="gemv")
    layer.weight.copy_(torch.randn(6144, 1024, device=CUDA) / 32)
    layer.method.process_weights_after_loading()
    x = torch.randn(257, 1024, device=CUDA).to(BF16)
    for rows in (17, 64, 65, 256):
        assert layer.method.takes(x[:rows]) == (rows <= 64) and layer.method.takes(x[:rows], gated=True)
        assert rows > 64 or torch.equal(layer(x[:rows]), ops.gemv(x[:rows], layer.weight))
        gated = NumbaCudaOps().gated_linear(x[:rows], layer, "silu")
        assert torch.equal(gated, ops.gemv(x[:rows], layer.weight, gated=True))
    assert not layer.method.takes(x) and not layer.method.takes(x, gated=True)
    assert relative_error(layer(x), x.double() @ layer.weight.double().t()) < TOLERANCE[BF16]


@on_hopper
def test_matmuls_among_kernels_that_start_early():
    """In a graph, each reads what the one before wrote, and none begins too soon."""
    up, down = (torch.randn(n, k, 8, device=CUDA).mul(k**-0.5).to(BF16).permute(2, 0, 1).contiguous() for n, k in ((4096, 1024), (1024, 2048)))  # fmt: skip
    x = torch.randn(40, 1024, device=CUDA).to(BF16)

    def layers():
        y = x
        for a, b in zip(up, down):
            y = ops.gemv(ops.silu_mul(ops.gemv(y, a)), b)
        return y

    want = layers()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = layers()
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def test_a_linear_layer_takes_these_products_for_few_rows():
    layer = Linear(256, {"a": 64, "b": 32}, dtype=BF16, device=CUDA, method="gemv")
    layer.weight.copy_(torch.randn(96, 256, device=CUDA) / 16)
    layer.method.process_weights_after_loading()
    x = torch.randn(66, 256, device=CUDA).to(BF16)
    for rows in (*range(19), 64, 65, 66):
        want = x[:rows].double() @ layer.weight.double().t()
        assert layer(x[:rows]).shape == (rows, 96) and (rows == 0 or relative_error(layer(x[:rows]), want) < TOLERANCE[BF16])  # fmt: skip
    assert method_or_torch("gemv", 250, 64, BF16, CUDA) == "torch"
    assert method_or_torch("gemv", 256, 64, BF16, CUDA) == "gemv"


def test_gemv_refuses_what_it_cannot_read():
    x, weight = torch.zeros(2, 64, device=CUDA, dtype=BF16), torch.zeros(32, 64, device=CUDA, dtype=BF16)
    for rows, matrix, message in (
        (x.half(), weight, "bfloat16"),
        (x[:, :32], weight, "shape"),
        (x, weight[:31], "even"),
        (x, weight[:, :32], "shape"),
        (x.repeat(33, 1), weight, "up to 16"),
        (x[:0], weight, "must have rows"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.gemv(rows, matrix)
    with pytest.raises(ValueError, match="multiple of 4"):
        ops.gemv(x, weight[:30], gated=True)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("size, features", [(1000, None), (4096, 4096)])
def test_quantized_gemv(dtype, name, size, features):
    """Right for every number of rows, a row is the same bit for bit alone and with others, and more rows are right, too."""
    weight = random_weight(name, size, features, "cuda:0")
    method = packed(weight, dtype)
    assert isinstance(method, CUDAPackedWeight)
    dense = weight.dequantize()
    x = torch.randn(70, weight.shape[1], device=CUDA, dtype=dtype)
    exact = x.double() @ dense.double().t()
    alone = torch.cat([method.apply(x[i : i + 1]) for i in range(16)])
    for rows in (1, 2, 4, 7, 8, 9, 16, 17, 40, 64, 70):
        got = method.apply(x[:rows])
        assert relative_error(got, exact[:rows]) < (2 if rows > 64 else 1) * TOLERANCE[dtype], rows
        assert rows > 16 or rel_rows(got, alone[:rows], rows)
    written = ops.dequantize(method.format, method.words, method.scales, 16, size - 16)
    ordered = dense if method.order is None else dense[:, method.order]
    assert torch.equal(written, ordered[16:].to(dtype)) and torch.equal(method.dequantize(), dense)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fp8_below_the_smallest_normal_number(dtype):
    """The kernel multiplies them as bf16 or float16 that are too small to be normal there, too."""
    q = torch.randint(0, 256, (64, 256), dtype=torch.uint8, device=CUDA) & 0x87
    weight = ScaledWeight(q.view(torch.float8_e4m3fn), torch.rand(64, 2, device=CUDA) + 0.5, 128)
    method = packed(weight, dtype)
    assert isinstance(method, CUDAPackedWeight)
    for size in (1.0, 2.0**-12) if dtype == BF16 else (1.0,):
        x = size * torch.randn(3, 256, device=CUDA, dtype=dtype)
        exact = x.double() @ weight.dequantize().double().t()
        assert relative_error(method.apply(x), exact) < TOLERANCE[dtype]


def rel_rows(got, alone, rows):
    """Up to 8 rows the very same; more take a kernel that adds in another order."""
    return torch.equal(got, alone) if rows <= 8 else relative_error(got, alone.double()) < 4e-3


@pytest.mark.parametrize("case", CASES)
def test_the_layers_of_quantized_checkpoints(case, tmp_path):
    write_checkpoint(tmp_path / "model", case)
    loaded = load_model(tmp_path / "model")
    decoder = Decoder(loaded.spec, make_backend("sdpa"), BF16, CUDA, "gemv")
    decoder.load_weights(loaded.weights("bfloat16"))
    for linear in decoder.linears():
        assert isinstance(linear.method, CUDAStoredLinear)
        x = torch.randn(20, linear.in_features, device=CUDA, dtype=BF16)
        exact = x.double() @ linear.weight.double().t()  # a weight in bf16, so two roundings
        kernel = all(isinstance(value, CUDAPackedWeight) for value in linear.method.values)
        for rows in (1, 5, 16, 20):
            limit = 2 * TOLERANCE[BF16] if kernel or CASES[case][2] == "none" else 0.06  # torch rounds activations
            assert relative_error(linear(x[:rows]), exact[:rows]) < limit, (case, rows)


def test_quantized_gemv_refuses_what_it_cannot_read():
    weight = random_weight("int4", 64, None, "cuda:0")
    method = packed(weight, BF16)
    x = torch.zeros(1, 128, device=CUDA, dtype=BF16)
    for rows, words, scales, outputs, message in (
        (x.half(), method.words, method.scales, 64, "bfloat16"),
        (x[:, :64], method.words, method.scales, 64, "shape"),
        (x.repeat(65, 1), method.words, method.scales, 64, "1 to 64 rows"),
        (x, method.words, method.scales, 63, "even number"),
        (x, method.words[:-1], method.scales, 64, "words must have shape"),
        (x, method.words, method.scales[:1], 64, "scales must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.quantized_gemv(rows, method.format, words, scales, outputs)
    with pytest.raises(ValueError, match="no 64 outputs from output 16"):
        ops.dequantize(method.format, method.words, method.scales, 16, 64)


def test_auto_takes_these_kernels_and_wrong_tensors_are_refused():
    backend, why = select_backend("auto", make_spec(), CUDA)
    assert backend.name == "numba_cuda" and "fastest" in why
    backend, why = select_backend("auto", make_spec(dim=72), CUDA)
    assert backend.name != "numba_cuda" and "head_dim 72" in why
    case = Case(make_spec(), [1], [10])
    plan = NumbaCudaBackend().plan(case.batch(), case.spec, CUDA).device_plan
    for q, cache, message in (
        (case.q[:, :4], case.cache, "shape"),
        (case.q.half(), case.cache, "torch.bfloat16"),
        (case.q.cpu(), case.cache, "on cuda:0"),
        (case.q, case.cache[:, :, :8].contiguous(), "blocks of 16"),
        (case.q, case.cache.transpose(2, 3), "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(q, cache, plan)
