"""Linear layers: every method against float64, fused parts, packing, shards, and the choice of a method."""

import pytest
import torch
import torch.nn.functional as F

from minivllm.models.linear import cpu as cpu_linear
from minivllm.models.linear import layer as linear_layer
from minivllm.models.linear.choose import explain_linear_method
from minivllm.models.linear.layer import (
    QUANTIZED,
    Linear,
    Shard,
    TorchLinear,
    linear_method_names,
    make_linear_method,
    method_or_torch,
)
from minivllm_kernels.cpu.matmul import layout
from minivllm_kernels.cpu.matmul.layout import host_tiles

run = layout.LAUNCHER.run
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", [name for name in linear_method_names() if name not in (*QUANTIZED, "fp8", "gemv")])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 15, 16, 17, 50, 70])
def test_every_method_multiplies(method, rows, dtype):
    layer = Linear(24, {"a": 10, "b": 7}, bias=True, dtype=dtype, device=CPU, method=method)
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((17, 24), (17,), (rows, 24)))
    for name, load in layer.targets():
        part, kind = name.split(".")
        load((weight if kind == "weight" else bias)[slice(10) if part == "a" else slice(10, 17)])
    layer.method.process_weights_after_loading()
    want, close = x.double() @ weight.double().T + bias.double(), 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(layer(x).double(), want, rtol=close, atol=5 * close)
    assert torch.equal(layer.weight, weight) and torch.equal(layer.part("b"), weight[10:])


def loaded(inputs, parts, weight, method="cpu", **kwargs):
    """A layer with a weight."""
    layer = Linear(inputs, parts, dtype=weight.dtype, device=CPU, method=method, **kwargs)
    layer.method.weights["weight"].copy_(weight)
    layer.method.process_weights_after_loading()
    return layer


def test_a_packed_weight_is_kept_once_and_can_be_loaded_again():
    weight = torch.randn(96, 64).bfloat16()
    layer = loaded(64, {"a": 96}, weight)
    if "weight" in layer.method.weights:
        pytest.skip("nothing is packed on this machine")
    # oneDNN's blocks are 32 rows with a tile unit, and 64 rows, which it fills up, without one
    assert layer.method.memory.numel() == (weight.numel() if host_tiles() else 128 * 64)
    layer.part("a").mul_(2)
    layer.use("cpu")
    assert torch.equal(layer.weight, 2 * weight)


@pytest.mark.parametrize("rows", [1, 40, 70])
def test_wide_results_are_the_same_numbers(rows):
    """Rounded as ever; float32 at once from a method that can."""
    torch.manual_seed(rows)
    weight, x, results = torch.randn(96, 64).bfloat16(), torch.randn(rows, 64).bfloat16(), {}
    for out_dtype in (None, torch.float32):
        layer = loaded(64, {"a": 96}, weight, out_dtype=out_dtype)
        results[out_dtype] = layer(x)
    packed = "weight" not in layer.method.weights
    assert results[torch.float32].dtype == (torch.float32 if packed else torch.bfloat16)
    assert torch.equal(results[torch.float32].float(), results[None].float())


@pytest.mark.parametrize("shape", [(960, 576), (100, 48), (33, 1536)])
def test_the_packed_order_is_the_one_that_onednn_uses(shape):
    if not cpu_linear.onednn_packs():
        pytest.skip("oneDNN packs no bf16 weights on this machine")
    weight = torch.randn(shape).bfloat16()
    block = cpu_linear.onednn_block(*shape)
    assert block is not None, "a new oneDNN? The numba kernel cannot read its order any more"
    assert torch.equal(loaded(shape[1], {"a": shape[0]}, weight).weight, weight)


def test_what_a_method_cannot_multiply_with_is_torchs_or_an_error():
    assert method_or_torch("cpu", 33, 57, torch.float32, CPU) == "torch"
    assert method_or_torch("cpu", 64, 64, torch.float16, CPU) == "torch"
    assert method_or_torch("cpu", 64, 64, torch.float32, CPU) == "cpu"
    with pytest.raises(ValueError, match="'cpu' cannot be used: 33 inputs are not a multiple of 4"):
        Linear(33, {"a": 57}, dtype=torch.float32, device=CPU, method="cpu")


SIZES = [(576, 960), (1536, 576), (72, 100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("method", "inside", "outside"),
    [(method, *size) for method in ("batch_invariant", "cpu_invariant") for size in SIZES]
    + [("batch_invariant", 33, 57)],
)
def test_invariant_methods_give_a_row_the_same_bits_in_any_company(method, dtype, inside, outside):
    layer = loaded(inside, {"all": outside}, torch.randn(outside, inside).to(dtype), method)
    x = torch.randn(70, inside).to(dtype)
    whole = layer(x)
    for start, end in ((0, 1), (5, 6), (15, 17), (31, 70), (3, 20)):
        assert torch.equal(layer(x[start:end]), whole[start:end])
        assert torch.equal(layer(x[start:end].clone()), whole[start:end])
    order = torch.randperm(70)
    assert torch.equal(layer(x[order]), whole[order])


def test_a_method_can_be_registered_and_unknown_ones_are_refused(monkeypatch):
    class Twice(TorchLinear):
        def apply(self, x):
            return 2 * F.linear(x, self.weight, self.bias)

    monkeypatch.setattr(linear_layer, "_METHODS", dict(linear_layer._METHODS))
    linear_layer.register_linear_method("twice", Twice)
    layer = loaded(4, {"a": 3}, torch.randn(3, 4), "torch")
    x = torch.randn(2, 4)
    once = layer(x)
    layer.use("twice")
    assert layer.method_name == "twice" and torch.equal(layer(x), 2 * once)
    with pytest.raises(ValueError, match="exists already"):
        linear_layer.register_linear_method("twice", Twice)
    with pytest.raises(
        ValueError, match="no linear method 'fast'; known in this process: torch, batch_invariant, .*int8, .*, twice"
    ):
        make_linear_method("fast")
    with pytest.raises(ValueError, match="has no bias"):
        layer.part("a", "bias")


@pytest.mark.parametrize("method", ["torch", "cpu", "batch_invariant"])
@pytest.mark.parametrize("by", ["outputs", "inputs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_together_are_the_whole_layer(method, by, dtype):
    """Column-parallel results are laid side by side, part by part; row-parallel ones are added up, with one bias."""
    parts, size, x = {"q": 64, "k": 32}, 4, torch.randn(5, 64).to(dtype)
    whole = Linear(64, parts, bias=True, dtype=dtype, device=CPU, method=method)
    inputs, mine = (64, {"q": 16, "k": 8}) if by == "outputs" else (16, parts)
    how = {"bias": True, "dtype": dtype, "device": CPU, "method": method}
    ranks = [Linear(inputs, mine, shard=Shard(rank, size, by), **how) for rank in range(size)]
    tensors = {
        "q.weight": torch.randn(64, 64),
        "k.weight": torch.randn(32, 64),
        "q.bias": torch.randn(64),
        "k.bias": torch.randn(32),
    }
    for layer in (whole, *ranks):
        for name, load in layer.targets():
            load(tensors[name].to(dtype))
        layer.method.process_weights_after_loading()
    if by == "outputs":
        outs = [rank(x).split([16, 8], 1) for rank in ranks]
        got = torch.cat([out[0] for out in outs] + [out[1] for out in outs], 1)
    else:
        got = sum(rank(part).double() for rank, part in zip(ranks, x.chunk(size, 1), strict=True))
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got.double(), whole(x).double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("by", "dim"), [("outputs", 0), ("inputs", 1)])
def test_shards_that_do_not_come_out_even_are_filled_up_with_zeros(by, dim):
    weight, shards = torch.randn(30, 30), []
    for rank in range(4):
        sizes = (30, {"k": 8}) if by == "outputs" else (8, {"k": 30})
        layer = Linear(*sizes, dtype=torch.float32, device=CPU, shard=Shard(rank, 4, by))
        layer.load("k", "weight", weight)
        shards.append(layer.weight)
    together = torch.cat(shards, dim)
    assert together.shape[dim] == 32 and torch.equal(together.narrow(dim, 0, 30), weight)
    assert not together.narrow(dim, 30, 2).any()


def test_the_choice_is_explained():
    cpu, why = explain_linear_method(None, "cpu", torch.float32, CPU, False)
    assert cpu == "cpu" and "numba" in why and "torch" in why
    assert explain_linear_method(None, "cpu", torch.float16, CPU, False) == (
        "torch",
        "the weight is float16, not float32 or bfloat16",
    )
    assert explain_linear_method(None, "cpu", torch.float32, CPU, True)[0] == "batch_invariant"
    assert explain_linear_method(None, "torch", torch.float32, CPU, False)[0] == "torch"


@pytest.mark.parametrize(
    ("method", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ("cpu_invariant", torch.bfloat16)]
)
@pytest.mark.parametrize("counts", [[3, 0, 40, 1, 0, 0, 9], [0, 0, 2, 0, 0, 0, 0], [70, 300, 0, 65, 1, 1, 64]])
@pytest.mark.parametrize("threads", [1, 3])
def test_several_layers_at_once_are_each_by_itself(method, dtype, counts, threads, monkeypatch):
    """One launch for all layers, of which some have no rows and some more than a launch of one layer takes."""
    torch.manual_seed(0)
    weights, x = torch.randn(len(counts), 104, 64).to(dtype), torch.randn(sum(counts), 64).to(dtype)
    layers = [Linear(64, {"a": 60, "b": 44}, bias=True, dtype=dtype, device=CPU, method=method) for _ in counts]
    for layer, weight in zip(layers, weights, strict=True):
        layer.method.weights["weight"].copy_(weight)
        layer.method.weights["bias"].copy_(torch.randn(104))
        layer.method.process_weights_after_loading()
        layer.method.max_rows = 1000  # also where torch is the faster one
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    alone = torch.cat([layer(rows) for layer, rows in zip(layers, x.split(counts), strict=True)])
    launches = []
    monkeypatch.setattr(layout.LAUNCHER, "run", lambda *args: launches.append(1) or run(*args))
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    together = layers[0].method.together([layer.method for layer in layers])(x, ends)
    assert torch.equal(together, alone) and len(launches) == 1
    for layer, weight, rows, got in zip(layers, weights, x.split(counts), together.split(counts), strict=True):
        close = 1e-5 if dtype == torch.float32 else 1e-2
        want = rows.double() @ weight.double().T + layer.bias.double()
        torch.testing.assert_close(got.double(), want, rtol=close, atol=10 * close)


def test_layers_at_once_with_many_rows_are_multiplied_as_each_would_be():
    torch.manual_seed(0)
    layers = [loaded(64, {"a": 32}, torch.randn(32, 64)) for _ in range(3)]
    x, counts = torch.randn(40, 64), [17, 0, 23]  # more than 16: torch is faster
    got = layers[0].method.together([layer.method for layer in layers])(
        x, torch.tensor([17, 17, 40], dtype=torch.int32)
    )
    assert torch.equal(got, torch.cat([layer(rows) for layer, rows in zip(layers, x.split(counts), strict=True)]))


def test_layers_of_other_shapes_or_methods_are_not_multiplied_at_once():
    one, other, wide = (
        loaded(64, {"a": n}, torch.randn(n, 64), name) for n, name in ((32, "cpu"), (32, "torch"), (48, "cpu"))
    )
    assert one.method.together([one.method, other.method]) is None
    assert other.method.together([other.method, other.method]) is None
    with pytest.raises(ValueError, match="the same kernel and sizes"):
        one.method.together([one.method, wide.method])
