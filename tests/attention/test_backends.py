"""Every backend against dense float64 attention, over ragged mixed batches in random blocks with poisoned holes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec
from minivllm.attention.reference import ReferenceBackend
from minivllm.attention.sdpa import SDPABackend, alike

CPU = torch.device("cpu")
BACKENDS = [ReferenceBackend(), SDPABackend()]
IDS = [backend.name for backend in BACKENDS]


def make_spec(**changes) -> AttentionSpec:
    values = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "scale": 0.4, "block_size": 4, "dtype": torch.float32}
    return AttentionSpec(**{**values, **changes})


class Case:
    """Requests (queries, length) with random keys and values, and the float64 answer."""

    def __init__(self, spec: AttentionSpec, requests: list[tuple[int, int]], seed: int = 0) -> None:
        self.spec, self.requests = spec, requests
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        tokens = sum(queries for queries, _ in requests)
        self.q = torch.randn(tokens, spec.num_heads, spec.head_dim).to(spec.dtype)
        self.kv = [torch.randn(2, length, spec.num_kv_heads, spec.head_dim).to(spec.dtype) for _, length in requests]

    def expected(self) -> torch.Tensor:
        """Dense attention with an explicit mask, in float64."""
        out, spec, start = [], self.spec, 0
        for (queries, length), kv in zip(self.requests, self.kv, strict=True):
            q = self.q[start : start + queries].double()
            start += queries
            k, v = kv.double().repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=2)
            i = torch.arange(length - queries, length)[:, None]
            j = torch.arange(length)[None]
            mask = j <= i
            if spec.sliding_window is not None:
                mask &= i - j < spec.sliding_window
            if spec.chunk is not None:
                mask &= i // spec.chunk == j // spec.chunk
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
            if spec.soft_cap is not None:
                scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(out)

    def laid_out(self, backend: AttentionBackend, *, hide_unseen: bool = False) -> tuple[AttentionBatch, torch.Tensor]:
        """The batch and the cache, in random blocks. Whatever no request owns is NaN.

        `hide_unseen`: blocks that lie wholly before anything that is still seen are given back, as the cache manager
        does with windows: their entries point to the null block.
        """
        spec, size = self.spec, self.spec.block_size
        counts = [-(-length // size) for _, length in self.requests]
        ids = self.rng.permutation(np.arange(1, sum(counts) + 3))
        table = np.zeros((len(counts), max(counts) + 1), np.int32)
        cache = torch.full(backend.kv_cache_shape(sum(counts) + 3, spec), torch.nan, dtype=spec.dtype)
        slots, taken = [], 0
        for row, (queries, length) in enumerate(self.requests):
            table[row, : counts[row]] = ids[taken : taken + counts[row]]
            taken += counts[row]
            positions = np.arange(length)
            where = table[row][positions // size].astype(np.int64) * size + positions % size
            backend.write(*self.kv[row], cache, torch.as_tensor(where))
            slots.append(where[length - queries :])
            if hide_unseen:
                first = int(spec.first_key(np.array(length - queries)))
                cache[:, table[row, : first // size].astype(np.int64)] = torch.nan
                table[row, : first // size] = 0
        queries = [queries for queries, _ in self.requests]
        lengths = [length for _, length in self.requests]
        starts = np.cumsum([0, *queries]).astype(np.int32)
        return AttentionBatch(starts, np.array(lengths, np.int32), table, np.concatenate(slots)), cache

    def run(self, backend: AttentionBackend, **how) -> torch.Tensor:
        batch, cache = self.laid_out(backend, **how)
        return backend.attend(self.q, cache, backend.plan(batch, self.spec, CPU))


@st.composite
def ragged(draw) -> list[tuple[int, int]]:
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        queries = draw(st.one_of(st.just(1), st.integers(1, 20)))
        requests.append((queries, queries + draw(st.one_of(st.just(0), st.integers(0, 150)))))
    return requests


LOCAL = st.one_of(
    st.just({}),
    st.integers(1, 40).map(lambda n: {"sliding_window": n}),
    st.integers(1, 40).map(lambda n: {"chunk": n}),
)
HEADS = st.sampled_from([(1, 1), (4, 4), (6, 2), (6, 3), (8, 1), (9, 3)])


@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
@settings(max_examples=60, deadline=None)
@given(ragged(), LOCAL, HEADS, st.sampled_from([1, 4, 16]), st.booleans(), st.integers(0, 1000))
def test_equals_dense_float64(backend, requests, local, heads, block_size, hide_unseen, seed):
    spec = make_spec(num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size, **local)
    case = Case(spec, requests, seed)
    torch.testing.assert_close(
        case.run(backend, hide_unseen=hide_unseen).double(), case.expected(), atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
@pytest.mark.parametrize("local", [{}, {"sliding_window": 7}, {"chunk": 8}], ids=["full", "window", "chunk"])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_bfloat16(backend, local, head_dim):
    spec = make_spec(dtype=torch.bfloat16, head_dim=head_dim, scale=head_dim**-0.5, **local)
    case = Case(spec, [(1, 90), (30, 30), (5, 77), (1, 1), (1, 64)])
    result = case.run(backend)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), case.expected(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("cap", [0.5, 5.0])
def test_soft_cap_on_reference(cap):
    case = Case(make_spec(soft_cap=cap, scale=2.0), [(1, 30), (12, 12), (3, 50)])
    torch.testing.assert_close(case.run(ReferenceBackend()).double(), case.expected(), atol=1e-5, rtol=1e-5)
    without = Case(make_spec(scale=2.0), case.requests)
    assert (without.expected() - case.expected()).abs().max() > 0.1


def test_sdpa_refuses_a_soft_cap():
    assert "soft_cap=30.0" in SDPABackend().unsupported(make_spec(soft_cap=30.0), CPU)
    assert SDPABackend().unsupported(make_spec(), CPU) is None
    assert ReferenceBackend().unsupported(make_spec(soft_cap=30.0), CPU) is None


def test_reference_in_float64_is_the_truth():
    case = Case(make_spec(dtype=torch.float64), [(1, 40), (20, 33)])
    exact = case.run(ReferenceBackend(torch.float64))
    torch.testing.assert_close(exact, case.expected(), atol=1e-14, rtol=1e-13)
    assert not torch.equal(exact, case.run(ReferenceBackend(torch.float32)))
    with pytest.raises(ValueError, match="float16"):
        ReferenceBackend(torch.float16)


@pytest.mark.parametrize("local", [{}, {"sliding_window": 7}, {"chunk": 8}], ids=["full", "window", "chunk"])
def test_reference_is_bit_identical_under_permuted_blocks(local):
    case = Case(make_spec(**local), [(1, 90), (30, 30), (5, 77), (1, 1)])
    first = case.run(ReferenceBackend())
    for seed in range(5):
        case.rng = np.random.default_rng(seed)
        assert torch.equal(case.run(ReferenceBackend()), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("local", [{}, {"sliding_window": 7}, {"chunk": 8}], ids=["full", "window", "chunk"])
def test_reference_is_bit_identical_alone_and_in_any_chunks(local, dtype):
    spec = make_spec(head_dim=64, dtype=dtype, **local)
    case = Case(spec, [(40, 90), (1, 200), (30, 30)])
    whole = case.run(ReferenceBackend())
    for queries in (1, 3, 40):
        for end in (90, 73, 60):
            part = Case(spec, [(queries, end)])
            part.kv = [case.kv[0][:, :end]]
            rows = slice(max(end - queries - 50, 0), end - 50)
            if end - 50 < queries:
                continue
            part.q = case.q[rows]
            assert torch.equal(part.run(ReferenceBackend()), whole[rows])


@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
def test_queries_may_be_a_slice_of_a_larger_tensor(backend):
    """The decoder hands over a strided view of its fused QKV matmul."""
    case = Case(make_spec(), [(1, 30), (5, 12), (1, 9)])
    straight = case.run(backend)
    wide = torch.randn(len(case.q), 10, 8)
    wide[:, 2:8] = case.q
    case.q = wide[:, 2:8]
    assert torch.equal(case.run(backend), straight)


@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
def test_write_goes_where_the_slots_say(backend):
    spec = make_spec()
    cache = backend.new_kv_cache(5, spec, CPU)
    k, v = torch.randn(2, 3, 2, 8)
    backend.write(k, v, cache, torch.tensor([4, 19, 6]))
    assert torch.equal(cache[0, 1, 0], k[0]) and torch.equal(cache[1, 1, 0], v[0])
    assert torch.equal(cache[0, 4, 3], k[1]) and torch.equal(cache[1, 1, 2], v[2])
    assert cache.count_nonzero() == 2 * 3 * 2 * 8


@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
def test_copy_blocks(backend):
    spec = make_spec()
    src = torch.randn(backend.kv_cache_shape(5, spec))
    dst = torch.zeros(backend.kv_cache_shape(7, spec))
    backend.copy_blocks(src, dst, [(1, 6), (4, 2)])
    assert torch.equal(dst[:, 6], src[:, 1]) and torch.equal(dst[:, 2], src[:, 4])
    assert dst[:, [0, 1, 3, 4, 5]].count_nonzero() == 0
    before = src.clone()
    backend.copy_blocks(src, src, [(1, 2), (2, 1)])  # read before written: a swap
    assert torch.equal(src[:, [1, 2]], before[:, [2, 1]]) and torch.equal(src[:, [0, 3, 4]], before[:, [0, 3, 4]])
    backend.copy_blocks(src, dst, [])
    with pytest.raises(ValueError, match="written twice"):
        backend.copy_blocks(src, dst, [(1, 2), (3, 2)])


def batch(**changes) -> AttentionBatch:
    good = AttentionBatch(
        query_start_loc=np.array([0, 1, 4], np.int32),
        seq_lens=np.array([9, 3], np.int32),
        block_table=np.array([[1, 2, 3], [4, 0, 0]], np.int32),
        slot_mapping=np.array([12, 16, 17, 18]),
    )
    return replace(good, **changes)


def test_batch_properties():
    good = batch()
    good.check(4)
    assert (good.num_reqs, good.num_tokens, good.query_lens.tolist()) == (2, 4, [1, 3])


@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": np.array([0, 1, 3], np.int32)}, "query_start_loc"),
        ({"query_start_loc": np.array([0, 4], np.int32)}, "query_start_loc"),
        ({"query_start_loc": np.array([0, 0, 4], np.int32)}, "at least one query"),
        ({"seq_lens": np.array([9, 2], np.int32)}, "shorter than"),
        ({"seq_lens": np.array([13, 3], np.int32)}, "too few for a sequence of 13"),
        ({"block_table": np.zeros((1, 3), np.int32)}, "block_table"),
    ],
)
def test_a_batch_that_does_not_add_up(backend, changes, message):
    with pytest.raises(ValueError, match=message):
        backend.plan(batch(**changes), make_spec(), CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "multiple of num_kv_heads"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"sliding_window": 4, "chunk": 4}, "exclude each other"),
        ({"soft_cap": 0.0}, "soft_cap must be above 0"),
        ({"block_size": 0}, "block_size must be at least 1"),
    ],
)
def test_a_spec_that_makes_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        make_spec(**changes)


@given(st.lists(st.integers(1, 20000), max_size=50))
def test_alike_is_a_partition_of_like_lengths(lengths):
    lengths = np.array(lengths, np.int64)
    parts = alike(lengths)
    assert sorted(np.concatenate([*parts, np.array([], np.int64)]).tolist()) == list(range(len(lengths)))
    for part in parts:
        assert (np.diff(part) > 0).all()
        low, high = lengths[part].min(), lengths[part].max()
        assert high <= 1.5 * low or high <= low + 64


def test_alike_lengths_make_one_call_and_unlike_ones_do_not_pad_each_other():
    spec = make_spec()
    same = Case(spec, [(1, n) for n in (40, 41, 50, 44)])
    plan = SDPABackend().plan(same.laid_out(SDPABackend())[0], spec, CPU)
    assert len(plan.decodes) == 1 and plan.decodes[0].rows is None and plan.decodes[0].width == 50
    unlike = Case(spec, [(1, n) for n in (2, 1000, 3)])
    plan = SDPABackend().plan(unlike.laid_out(SDPABackend())[0], spec, CPU)
    assert sorted(call.width for call in plan.decodes) == [3, 1000]
