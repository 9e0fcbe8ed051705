"""Weights in groups of 4 and 8 bits: what they stand for, cutting, joining, and the layer that multiplies by them."""

import pytest
import torch

from minivllm.models.linear.grouped import GroupedWeight, StoredLinear, join, pack_nibbles, unpack_nibbles
from minivllm.models.linear.layer import Linear, Shard

CPU = torch.device("cpu")
CODES = torch.linspace(-1, 1, 16) ** 3
KINDS = ["4 bits", "4 bits, low", "codes", "8 bits", "8 bits, low", "ordered"]


def grouped(kind, outputs=12, inputs=64, group=16, seed=0):
    """A weight of a kind, and the same in float64 by a formula of its own."""
    torch.manual_seed(seed)
    q = torch.randint(0, 16, (outputs, inputs)) if "8" not in kind else torch.randint(-128, 128, (outputs, inputs))
    scale = torch.randn(outputs, inputs // group)
    low = torch.randn(outputs, inputs // group) if "low" in kind or kind == "ordered" else None
    order = torch.randperm(inputs) if kind == "ordered" else None
    codes = CODES if kind == "codes" else None
    number = codes[q].double() if codes is not None else q.double() - (8 if kind == "4 bits" else 0)
    exact = torch.empty(outputs, inputs, dtype=torch.float64)
    for column in range(inputs):
        at = column if order is None else int(order[column])
        exact[:, at] = number[:, column] * scale[:, column // group].double()
        if low is not None:
            exact[:, at] += low[:, column // group].double()
    stored = q.to(torch.int8) if "8" in kind else pack_nibbles(q.to(torch.uint8))
    return GroupedWeight(stored, scale, low, codes, order), exact


def test_two_numbers_of_four_bits_are_a_byte_the_first_one_in_its_low_bits():
    q = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(q).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(pack_nibbles(q)), q)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grouped_weight_stands_for_scale_times_number_plus_low(kind):
    weight, exact = grouped(kind)
    assert weight.shape == (12, 64)
    assert weight.group == 16
    torch.testing.assert_close(weight.dequantize().double(), exact, rtol=1e-6, atol=1e-5)
    x = torch.randn(5, 64)
    torch.testing.assert_close(weight.apply(x).double(), x.double() @ exact.T, rtol=1e-5, atol=1e-3)
    arranged = x if weight.order is None else x[:, weight.order]
    assert torch.equal(weight.arrange(x), arranged)


def cut(weight, rank, size, dim=0):
    length = weight.shape[dim] // size
    return weight.narrow(dim, rank * length, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_shards_laid_side_by_side_or_added_up_are_the_whole(kind, size):
    weight, exact = grouped(kind, outputs=16)
    x = torch.randn(3, 64)
    want = x.double() @ exact.T
    beside = [cut(weight, rank, size).apply(x) for rank in range(size)]
    torch.testing.assert_close(torch.cat(beside, 1).double(), want, rtol=1e-5, atol=1e-3)
    total, nbytes = 0, 0
    for rank, part in enumerate(x.split(64 // size, 1)):
        shard = cut(weight, rank, size, dim=1)
        assert shard.shape == (16, 64 // size)
        total = total + shard.apply(part)
        arranged = shard.arrange(part) @ GroupedWeight(shard.q, shard.scale, shard.low, shard.codes).dequantize().T
        torch.testing.assert_close(arranged, shard.apply(part), rtol=1e-5, atol=1e-4)
        nbytes += shard.nbytes
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-3)


def test_what_cannot_be_cut_or_made_is_refused():
    weight, _ = grouped("4 bits")
    with pytest.raises(
        ValueError, match="12 outputs of a quantized a cannot be split among 5 ranks equally, and .* padded"
    ):
        layer_of({"a": weight}, share=Shard(4, 5, "outputs"))
    with pytest.raises(ValueError, match="weights of 4 bits in groups of 16 cannot be cut at input 3"):
        weight.narrow(1, 3, 5)
    q, scale = weight.q, weight.scale
    for wrong, match in (
        ({"q": q.float()}, "uint8 or int8"),
        ({"scale": scale[:5]}, "do not divide 12 x 64"),
        ({"scale": torch.ones(12, 7)}, "do not divide 12 x 64"),
        ({"low": scale[:, :1]}, r"low must have the shape of scale, \(12, 4\)"),
        ({"low": scale, "codes": CODES}, "codes are 16 numbers"),
        ({"order": torch.arange(7)}, "order must have 64 numbers"),
    ):
        with pytest.raises(ValueError, match=match):
            GroupedWeight(**{"q": q, "scale": scale} | wrong)


def test_neighbours_of_one_kind_become_one_weight():
    a, b = grouped("4 bits")[0], grouped("4 bits", seed=1)[0]
    ordered, other = grouped("ordered")[0], grouped("ordered", seed=1)[0]
    dense = torch.randn(3, 64)
    values = join([a, b, ordered, ordered, other, grouped("8 bits")[0], dense, dense, a])
    assert [tuple(value.shape) for value in values] == [(n, 64) for n in (24, 24, 12, 12, 6, 12)]
    assert torch.equal(values[0].dequantize(), torch.cat((a.dequantize(), b.dequantize())))


def layer_of(values, method="torch", share=None, bias=None):
    rows = {name: value.shape[0] for name, value in values.items()}
    inputs = next(iter(values.values())).shape[1]
    if share is not None and share.by == "outputs":
        rows = {name: -(-n // share.size) for name, n in rows.items()}
    elif share is not None:
        inputs //= share.size
    how = {"bias": bias is not None, "dtype": torch.float32, "device": CPU, "method": method, "shard": share}
    layer = Linear(inputs, rows, **how)
    for name, value in values.items():
        layer.load(name, "weight", value)
        if bias is not None:
            layer.load(name, "bias", bias[name])
    layer.method.process_weights_after_loading()
    return layer


@pytest.mark.parametrize("method", ["torch", "batch_invariant", "cpu", "cpu_invariant"])
def test_a_fused_layer_may_have_parts_of_several_kinds(method):
    torch.manual_seed(0)
    values = {kind: grouped(kind, group=8) for kind in KINDS}  # for which no kernel rounds the activations
    parts = {kind: value for kind, (value, _) in values.items()} | {"whole": torch.randn(8, 64)}
    exact = torch.cat([*(exact for _, exact in values.values()), parts["whole"].double()])
    for order in (list(parts), list(reversed(parts))):
        bias = {name: torch.randn(parts[name].shape[0]) for name in order}
        layer = layer_of({name: parts[name] for name in order}, method, bias=bias)
        assert isinstance(layer.method, StoredLinear)
        rows = {name: exact[12 * i : 12 * i + 12] for i, name in enumerate(parts)}
        want = torch.cat([rows[name] for name in order])
        torch.testing.assert_close(layer.weight.double(), want, rtol=1e-6, atol=1e-5)
        x = torch.randn(21, 64)
        out = x.double() @ want.T + torch.cat(list(bias.values())).double()
        torch.testing.assert_close(layer(x).double(), out, rtol=1e-4, atol=1e-3)
        if "invariant" in method:
            assert all(torch.equal(layer(x[i : i + 1])[0], layer(x)[i]) for i in range(21))


def test_ranks_load_their_share_of_a_quantized_layer():
    torch.manual_seed(0)
    kinds = ("4 bits, low", "ordered")
    values = {kind: grouped(kind)[0] for kind in kinds} | {"whole": torch.randn(8, 64)}
    bias = {name: torch.randn(value.shape[0]) for name, value in values.items()}
    x, whole = torch.randn(4, 64), layer_of(values, bias=bias)
    beside = [layer_of(values, share=Shard(rank, 2, "outputs"), bias=bias)(x) for rank in (0, 1)]
    parts = [torch.cat(pair, 1) for pair in zip(*(out.split([6, 6, 4], 1) for out in beside), strict=True)]
    torch.testing.assert_close(torch.cat(parts, 1), whole(x), rtol=1e-4, atol=1e-4)
    summed = sum(
        layer_of(values, share=Shard(rank, 2, "inputs"), bias=bias)(x[:, 32 * rank : 32 * rank + 32]) for rank in (0, 1)
    )
    torch.testing.assert_close(summed, whole(x), rtol=1e-4, atol=1e-3)
    # a layer gives its weight back as a tensor when another method is wanted
    whole.use("torch")
    torch.testing.assert_close(whole(x), summed, rtol=1e-4, atol=1e-3)
