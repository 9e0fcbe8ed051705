"""What stands between matmuls: torch's ops against their formulas, the kernels of numba against float64, and who runs what."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from paged import PagedDecoder, make_decoder
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm.attention.backend import AttentionBackend
from minivllm.models.layers import QKNorm, RMSNorm
from minivllm.models.ops.select import make_layer_ops
from minivllm.models.ops.torch import ACTIVATIONS
from minivllm.models.rope import Rope, RopeSpec, Rotation, apply_rope

pytest.importorskip("numba")
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROWS = pytest.mark.parametrize("rows", [1, 3, 400])
OPS = pytest.mark.parametrize("ops", ["torch", "numba_cpu"])


def close(got, want):
    tolerance = 1e-5 if got.dtype == torch.float32 else 1e-2
    # torch's chains of operations round more than once
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=3 * tolerance)


def rms(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@OPS
@DTYPES
@ROWS
@pytest.mark.parametrize("size", [576, 20])
def test_add_rms_norm(ops, dtype, rows, size):
    ops = make_layer_ops(ops)
    x, stream, weight = (torch.randn(s).to(dtype) for s in ((rows, size), (rows, size), (size,)))
    joined = x + stream
    want = rms(joined, weight, 1e-3)
    out, same = ops.add_rms_norm(x, stream, weight, 1e-3)
    assert same is stream and torch.equal(stream, joined)
    close(out, want)
    first, kept = ops.add_rms_norm(joined, None, weight, 1e-3)
    assert kept is joined and torch.equal(first, out)


@OPS
@DTYPES
@ROWS
@pytest.mark.parametrize("size", [576, 20])
def test_add_into_rows_that_lie_apart(ops, dtype, rows, size):
    ops, out = make_layer_ops(ops), torch.full((rows, 3 * size), 7.0).to(dtype)
    x, stream = (torch.randn(rows, size).to(dtype) for _ in range(2))
    want = out.clone()
    want[:, size : 2 * size] = x + stream
    ops.add_into(x, stream, out[:, size : 2 * size])
    assert torch.equal(out, want)
    want[:, :size] = x
    ops.add_into(x, None, out[:, :size])
    assert torch.equal(out, want)


@OPS
@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_a_norm_with_a_weight_of_its_own_dtype_or_a_wider_one(ops, dtype, offset):
    norm = RMSNorm(40, 1e-2, make_layer_ops(ops), dtype=dtype, device=CPU, offset=offset)
    kept = torch.rand(40)
    norm.load(kept)
    assert torch.equal(norm.weight, (kept + 1 if offset else kept).to(norm.weight.dtype))
    x = (torch.randn(7, 40) * 100).to(dtype)
    want = rms(x, norm.weight, 1e-2)
    for got in (norm(x), norm.add(x, torch.zeros_like(x))[0]):
        assert got.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_qk_norm_is_a_norm_of_each_head_with_its_own_kind_of_weight():
    norm = QKNorm(4, 2, 8, 1e-6, dtype=torch.float32, device=CPU)
    q_weight, k_weight = torch.rand(2, 8)
    norm.load(norm.q_weight, q_weight)
    norm.load(norm.k_weight, k_weight)
    qk = torch.randn(5, 6, 8)
    want = torch.cat((rms(qk[:, :4], q_weight, 1e-6), rms(qk[:, 4:], k_weight, 1e-6)), 1)
    torch.testing.assert_close(norm(qk).double(), want, rtol=1e-6, atol=1e-6)


@OPS
@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_linear(ops, dtype, activation):
    from transformers.activations import ACT2FN

    both = torch.randn(5, 48).to(dtype)
    gate, up = both.double().chunk(2, -1)
    got = make_layer_ops(ops).gated_linear(torch.zeros(5, 1, dtype=dtype), lambda x: both, activation)
    close(got, ACT2FN[activation](gate) * up)


@OPS
@DTYPES
@ROWS
def test_the_gate_of_silu_from_far_below_to_far_above(ops, dtype, rows):
    both = torch.randn(rows, 2 * 48)
    both[0, :8] = torch.tensor([-300.0, -100.0, -89.0, -79.0, 0.0, 79.0, 100.0, 300.0])
    both = both.to(dtype)
    gate, up = both.double().chunk(2, -1)
    close(make_layer_ops(ops).gated_linear(both, lambda x: x, "silu"), F.silu(gate) * up)


class Written(AttentionBackend):
    """Keeps what is written."""

    unsupported = plan = attend = None

    def write(self, k, v, kv_cache, slot_mapping):
        self.written = k, v, slot_mapping


@OPS
@DTYPES
@ROWS
@pytest.mark.parametrize("dim", [64, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache(ops, dtype, rows, dim, normed):
    qkv, weight = torch.randn(rows, 5 * dim).to(dtype), torch.randn(4, dim).to(dtype)
    positions, slots, backend = torch.randint(0, 900, (rows,)), torch.arange(rows), Written()
    rotation = Rotation(Rope(RopeSpec(dim=dim, max_position=1000), CPU), positions, dtype)
    norm, heads = None, qkv.view(rows, 5, dim).double()
    if normed:
        norm = QKNorm(3, 1, dim, 1e-3, dtype=dtype, device=CPU)
        norm.weight.copy_(weight)
        heads = torch.cat((rms(heads[:, :4], weight, 1e-3), heads[:, 4:]), 1)
    layer = SimpleNamespace(num_heads=3, head_dim=dim, qk_norm=norm, backend=backend)
    q = make_layer_ops(ops).rope_and_cache(layer, qkv, None, slots, rotation)
    want = apply_rope(heads[:, :4], *(table.double() for table in rotation.cos_sin))
    k, v, where = backend.written
    close(q, want[:, :3])
    close(k, want[:, 3:])
    assert torch.equal(v, qkv.view(rows, 5, dim)[:, 4:]) and where is slots


@OPS
def test_layers_without_positions(ops):
    qkv, backend = torch.randn(3, 40), Written()
    layer = SimpleNamespace(num_heads=3, head_dim=8, qk_norm=None, backend=backend)
    q = make_layer_ops(ops).rope_and_cache(layer, qkv, None, torch.arange(3), None)
    assert torch.equal(q, qkv.view(3, 5, 8)[:, :3]) and torch.equal(backend.written[0], qkv.view(3, 5, 8)[:, 3:4])


@DTYPES
def test_a_row_is_the_same_in_any_company(dtype):
    ops = make_layer_ops("numba_cpu")
    x, stream, weight, both = (torch.randn(s).to(dtype) for s in ((500, 576), (500, 576), (576,), (500, 3072)))
    alone = ops.add_rms_norm(x[7:8], stream[7:8].clone(), weight, 1e-5)[0]
    assert torch.equal(ops.add_rms_norm(x, stream, weight, 1e-5)[0][7:8], alone)
    gated = ops.gated_linear(both, lambda x: x, "silu")
    assert torch.equal(gated[7:8], ops.gated_linear(both[7:8], lambda x: x, "silu"))


@OPS
@DTYPES
@pytest.mark.parametrize(("rows", "top"), [(1, 1), (5, 3), (400, 8)])
@pytest.mark.parametrize("size", [48, 20])
def test_tokens_are_sorted_by_expert_and_put_back(ops, dtype, rows, top, size):
    x, weights, ops = torch.randn(rows, size).to(dtype), torch.rand(rows, top), make_layer_ops(ops)
    ids = torch.stack([torch.randperm(11)[:top] for _ in range(rows)])
    sorted_rows, places, counts = ops.moe_permute(x, ids, 11)
    assert counts.tolist() == ids.flatten().bincount(minlength=11).tolist()
    assert torch.equal(sorted_rows, x[torch.tensor(sorted(range(rows * top), key=lambda i: ids.flatten()[i])) // top])
    assert torch.equal(sorted_rows[places], x[:, None].expand(-1, top, -1))
    outputs = sorted_rows * torch.arange(11).repeat_interleave(counts)[:, None].to(dtype)
    want = torch.einsum("tkn,tk->tn", outputs[places].double(), weights.double())
    close(ops.moe_unpermute(outputs, places, weights), want)


@OPS
@pytest.mark.parametrize("size", [3, 16, 1024, 1027])
def test_argmax_is_the_first_of_equals_or_none(ops, size):
    argmax = make_layer_ops(ops).argmax
    logits = torch.randn(9, size).round(decimals=1)
    logits[0] = -torch.inf
    logits[1] = -0.0
    for row, odd in ((2, torch.nan), (3, -torch.nan), (4, torch.inf)):
        logits[row, size - 1] = odd
    logits[5, 1:] = -torch.inf
    want = torch.from_numpy(logits.numpy().argmax(-1))
    want[torch.tensor([0, 2, 3, 4])] = -1
    assert torch.equal(argmax(logits), want)
    assert len(argmax(logits.t().contiguous().t()[:0])) == 0


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "granite"])  # plain logits, capped ones, scaled ones
def test_compute_argmax_is_the_argmax_of_the_logits(family):
    decoder = make_decoder(hf_model(family), "sdpa", dtype=torch.bfloat16)
    hidden = torch.randn(50, decoder.spec.hidden_size).bfloat16()
    assert torch.equal(decoder.compute_argmax(hidden), decoder.compute_logits(hidden).argmax(-1))
    hidden[3, 0] = torch.nan
    assert (decoder.compute_argmax(hidden) == -1).nonzero().flatten().tolist() == [3]


def test_unknown_ops_are_refused():
    with pytest.raises(ValueError, match="no layer ops 'fast'; known: torch, numba_cpu, numba_cuda"):
        make_layer_ops("fast")


# ---- one switch: torch from end to end


def called_modules(function):
    """Names of the modules whose Python functions a call enters."""
    seen = set()
    sys.setprofile(lambda frame, event, arg: seen.add(frame.f_globals.get("__name__", "")))
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_torch_backend_runs_no_kernel_of_ours(backend, dtype):
    """Matmul, norm, rotation, gate, attention and argmax, from loading to the token; and the same test sees those of numba."""

    def run(name):
        decoder = make_decoder(hf_model("qwen3"), name, dtype=dtype)
        paged = PagedDecoder(decoder)
        paged.add("r", list(range(40)))
        for count in (30, 1):
            decoder.ops.argmax(paged.step({"r": count})["r"])

    ours = {name for name in called_modules(lambda: run(backend)) if name.startswith("minivllm")}
    assert "minivllm.models.ops.torch" in ours
    assert [name for name in ours if name.startswith("minivllm_kernels") or ".numba_" in name] == []
    numba = called_modules(lambda: run("numba_cpu"))
    assert {"minivllm_kernels.cpu.compile", "minivllm_kernels.cpu.program"} <= numba


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_an_engine_with_a_torch_backend_runs_no_kernel_of_ours(backend, tiny_model_path):  # noqa: F811
    from minivllm import LLM, SamplingParams

    with LLM(tiny_model_path("llama"), device="cpu", attention_backend=backend, num_gpu_blocks=40) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        called = called_modules(lambda: llm.generate(["ab", "abcd"], params, use_tqdm=False))
    assert "minivllm.sampling.sampler" in called
    assert [name for name in called if name.startswith("minivllm_kernels")] == []
