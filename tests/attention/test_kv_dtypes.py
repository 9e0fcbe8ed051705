"""A cache of fp8 and of int8: what is stored, and attention over it against float64 on what was stored."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from minivllm.attention import numba_cpu
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
from minivllm.attention.numba_cpu import NumbaCPUBackend, NumbaCPUInvariantBackend
from minivllm.attention.reference import ReferenceBackend
from minivllm.attention.sdpa import SDPABackend
from minivllm.attention.select import select_backend
from minivllm_kernels.cuda import ops

CPU = torch.device("cpu")
BACKENDS = [ReferenceBackend(), SDPABackend(), NumbaCPUBackend(), NumbaCPUInvariantBackend()]
IDS = [backend.name for backend in BACKENDS]


def make_spec(**changes) -> AttentionSpec:
    values = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "scale": 0.4, "block_size": 4, "dtype": torch.float32}
    return AttentionSpec(**{**values, "kv_dtype": FP8, **changes})


def dense(q, k, v, spec) -> torch.Tensor:
    """The last rows of causal attention, in float64. k, v: [n, kv_heads, head_dim]."""
    k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * spec.scale
    last = torch.arange(len(k) - len(q), len(k))[:, None]
    seen = torch.arange(len(k)) <= last
    if spec.sliding_window is not None:
        seen &= torch.arange(len(k)) > last - spec.sliding_window
    if spec.chunk is not None:
        seen &= torch.arange(len(k)) >= last // spec.chunk * spec.chunk
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def stored_rows(backend, cache, where) -> torch.Tensor:
    """float64 [2, tokens, kv_heads, head_dim]: keys and values at these slots."""
    if cache.dtype == torch.int8:
        return stored_in_int8(backend, cache)[:, where]
    if isinstance(backend, NumbaCPUBackend):  # [head_dim, block_size] of keys, [block_size, head_dim] of values
        keys, values = cache[0].transpose(0, 2).double()
        rows = keys.unflatten(-1, (16, 4)).permute(1, 3, 0, 2), values.unflatten(-1, (4, 16)).permute(1, 2, 0, 3)
        return torch.stack(rows).flatten(1, 2)[:, where]
    return cache.flatten(1, 2).double()[:, where]


def stored_in_int8(backend, cache) -> torch.Tensor:
    """float64 [2, slots, kv_heads, head_dim] of a cache with heads of 16 and blocks of 4."""
    if not isinstance(backend, NumbaCPUBackend):
        numbers, scales = int8_parts(cache)
        return (numbers.double() * scales.transpose(-1, -2)[..., None].double()).flatten(1, 2)
    # [blocks, heads, 2, ...]
    codes, scales = cache[0, ..., :64].double(), cache[0, ..., 64:].view(torch.float32).double()
    keys = codes[:, :, 0].unflatten(-1, (16, 4)).transpose(-1, -2) * scales[:, :, 0, :, None]
    values = codes[:, :, 1].unflatten(-1, (4, 16)) * scales[:, :, 1, :, None]
    return torch.stack((keys, values)).transpose(2, 3).flatten(1, 2)


def test_int8_takes_the_nearest_of_255_numbers_for_each_head():
    x = torch.randn(50, 3, 16) * 10.0 ** torch.randint(-6, 6, (50, 3, 1))
    x[0, 0] = 0
    numbers, scales = to_int8(x)
    step = x.abs().amax(-1).double() / 127
    assert (numbers.abs().amax(-1)[x.any(-1)] == 127).all() and not numbers[0, 0].any()
    assert ((numbers * scales[..., None] - x).abs() <= 0.5001 * step[..., None]).all()
    assert to_int8(torch.tensor([1.0, torch.nan]))[1].isnan() and to_int8(torch.zeros(4))[1].isfinite()


def test_what_is_stored():
    x = torch.tensor([0.0, 1.06, 1.07, 448.0, 460.0, 1e30, -torch.inf, 2**-10, 3 * 2**-10])
    assert to_fp8(x, 1.0).double().tolist() == [0, 1, 1.125, 448, 448, 448, -448, 0, 2**-8]
    assert to_fp8(x[:5], 4.0).double().mul(4).tolist() == [0, 1, 1.125, 448, 448]
    assert to_fp8(torch.tensor([torch.nan]), 1.0).isnan().all()


@pytest.mark.parametrize(
    ("kv_dtype", "scales"),
    [(FP8, KVScales()), (FP8, KVScales(0.03, 1.7)), (torch.int8, KVScales())],
    ids=["fp8", "scaled", "int8"],
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": torch.bfloat16}, {"sliding_window": 6}, {"chunk": 5}],
    ids=["f32", "bf16", "window", "chunk"],
)
@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
def test_attention_over_what_was_stored(backend: AttentionBackend, changes, kv_dtype, scales):
    """A ragged mixed batch in shuffled blocks; whatever no request owns is NaN."""
    torch.manual_seed(0)
    spec, backend = make_spec(kv_dtype=kv_dtype, **changes), backend.scaled(scales)
    requests = [(1, 30), (5, 9), (1, 3), (1, 28), (7, 7)]
    table = np.random.default_rng(0).permutation(np.arange(1, 41)).reshape(5, 8).astype(np.int32)
    nothing = torch.nan if kv_dtype == FP8 else -1  # four such bytes are a NaN, too
    cache = backend.new_kv_cache(41, spec, CPU).fill_(nothing)
    assert cache.element_size() == 1 and cache.dtype == kv_dtype
    slots, wanted, qs = [], [], []
    for row, (new, length) in enumerate(requests):
        q = torch.randn(new, 6, 16).to(spec.dtype)
        k, v = (3 * torch.randn(2, length, 2, 16)).to(spec.dtype)
        positions = np.arange(length)
        where = table[row, positions // 4].astype(np.int64) * 4 + positions % 4
        backend.write(k, v, cache, torch.as_tensor(where))
        stored = stored_rows(backend, cache, where)
        if kv_dtype == FP8:
            assert torch.equal(stored, torch.stack([to_fp8(k, scales.k), to_fp8(v, scales.v)]).double())
        else:
            exact = torch.stack((k, v)).double()
            assert ((stored - exact).abs() <= 0.5001 / 127 * exact.abs().amax(-1, keepdim=True)).all()
        wanted.append(dense(q, stored[0] * scales.k, stored[1] * scales.v, spec))
        slots.append(where[length - new :])
        qs.append(q)
    starts = np.cumsum([0, *(new for new, _ in requests)]).astype(np.int32)
    lens = np.array([length for _, length in requests], np.int32)
    plan = backend.plan(AttentionBatch(starts, lens, table, np.concatenate(slots)), spec, CPU)
    got, want = backend.attend(torch.cat(qs), cache, plan).double(), torch.cat(wanted)
    assert (got - want).norm() / want.norm() < (1e-2 if spec.dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("kv_dtype", [FP8, torch.int8], ids=["fp8", "int8"])
@pytest.mark.parametrize("backend", BACKENDS, ids=IDS)
def test_blocks_move_as_bytes(backend, kv_dtype):
    shapes = [backend.kv_cache_shape(n, make_spec(kv_dtype=kv_dtype)) for n in (5, 3)]
    source = torch.arange(math.prod(shapes[0])).to(torch.uint8).view(kv_dtype).view(shapes[0])
    target = torch.zeros(shapes[1], dtype=kv_dtype)
    backend.copy_blocks(source, target, [(4, 1), (1, 2)])
    assert torch.equal(as_bytes(target)[:, [1, 2]], as_bytes(source)[:, [4, 1]]) and not as_bytes(target)[:, 0].any()


def test_every_byte_is_read_as_torch_reads_it_and_every_float_rounded_as_torch_rounds():
    """Through the cache of one token a block: a query of ones and zeros picks out what was stored."""
    spec, backend = make_spec(num_heads=1, num_kv_heads=1, head_dim=256, scale=1.0), NumbaCPUBackend()
    every = torch.arange(256).to(torch.uint8).view(FP8)
    edges = torch.cat((every.float(), every.float() * 1.0626, torch.randn(256) * 2e-3, torch.randn(256) * 300))
    for row in edges.nan_to_num(0).view(-1, 1, 1, 256):
        cache = backend.new_kv_cache(2, spec, CPU)
        backend.write(torch.zeros_like(row), row, cache, torch.tensor([4]))
        batch = AttentionBatch(
            np.array([0, 1], np.int32), np.array([1], np.int32), np.array([[1]], np.int32), np.array([4])
        )
        got = backend.attend(torch.zeros(1, 1, 256), cache, backend.plan(batch, spec, CPU))
        assert torch.equal(got[0, 0], to_fp8(row, 1.0)[0, 0].float())


def test_what_cannot_read_it_is_said(monkeypatch):
    assert select_backend("auto", make_spec(), CPU)[0].name == "numba_cpu"
    monkeypatch.setattr(numba_cpu, "host_is_x86", lambda: True)
    monkeypatch.setattr(numba_cpu, "host_lanes", lambda: 4)
    with pytest.raises(
        ValueError, match="by F16C, which this CPU lacks; attention_backend='sdpa' and 'reference' need"
    ):
        select_backend("numba_cpu", make_spec(), CPU)
    backend, why = select_backend("auto", make_spec(), CPU)
    assert backend.name == "sdpa" and "numba_cpu cannot: its kernels read an fp8 cache by F16C" in why
    assert NumbaCPUBackend().unsupported(make_spec(kv_dtype=None), CPU) is None
    with pytest.raises(
        ValueError, match="kv_dtype must be torch.float8_e4m3fn, torch.int8 or None, got torch.float8_e5m2"
    ):
        make_spec(kv_dtype=torch.float8_e5m2)
    assert NumbaCPUBackend().unsupported(make_spec(kv_dtype=torch.int8), CPU) is None
    with pytest.raises(ValueError, match="block_size x head_dim in whole float32, and 1 x 18 is not"):
        SDPABackend().new_kv_cache(2, make_spec(kv_dtype=torch.int8, head_dim=18, block_size=1), CPU)


def test_older_cards_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    device = torch.device("cuda", 0)
    assert ops.fp8_unsupported(device) == (
        "an fp8 KV cache needs compute capability 8.9 (Ada, Hopper) or later, and cuda:0 has 8.6"
    )
    monkeypatch.setattr(ops, "device_unsupported", lambda device: None)
    spec = make_spec(head_dim=64, block_size=16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="'numba_cuda' cannot run this model on cuda:0: an fp8 KV cache needs"):
        select_backend("numba_cuda", spec, device)
    assert select_backend("auto", replace(spec, kv_dtype=torch.int8), device)[0].name == "numba_cuda"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert select_backend("auto", spec, device)[0].name == "numba_cuda"


def test_scales_belong_to_a_copy():
    backend = SDPABackend()
    assert backend.scaled(KVScales(2.0, 3.0)).scales == (2.0, 3.0) and backend.scales == (1.0, 1.0)
