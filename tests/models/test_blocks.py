"""Blocks of GGUF files: every type against gguf's own decoder, whole files, damaged ones."""

import gguf
import numpy as np
import pytest
import tiny_gguf as tiny
import torch
from paged import PagedDecoder
from quantized_checkpoints import decoder_of

from minivllm.lora.adapter import LoRAWeights
from minivllm.lora.linear import LoRABatch, LoRALinear
from minivllm.models.gguf import BLOCK_TYPES, convert_gguf
from minivllm.models.hub import resolve_model
from minivllm.models.linear.grouped import StoredLinear
from minivllm.models.linear.layer import Linear
from minivllm.models.loading import load_model
from minivllm.models.quantization.blocks import BLOCKS, GGUFBlocks
from minivllm.models.quantization.formats import Parts

Q = gguf.GGMLQuantizationType
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,), "MXFP4": (),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # fmt: skip
"""Where a block has numbers in half precision."""


def random_rows(name: str, rows: int = 5, blocks: int = 3) -> np.ndarray:
    """Rows of blocks with random bytes, and scales that are numbers."""
    rng, size = np.random.default_rng(len(name)), gguf.GGML_QUANT_SIZES[Q[name]][1]
    raw = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES[name]:
        raw[..., at : at + 2] = rng.standard_normal((rows, blocks, 1)).astype(np.float16).view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(110, 140, (rows, blocks))
    return raw.reshape(rows, -1)


def decode(name, raw):
    return GGUFBlocks({}).decode(Parts("X", {f".weight.{name}": torch.from_numpy(raw)}))[".weight"]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_block_stands_for_what_gguf_makes_of_it(name):
    raw = random_rows(name)
    weight = decode(name, raw)
    want = gguf.quants.dequantize(raw, Q[name])
    assert torch.equal(weight.dequantize(), torch.from_numpy(want))
    assert weight.bits == (4 if "4" in name else 8)
    assert weight.group == (16 if name == "Q6_K" else 32)
    x = torch.randn(3, weight.shape[1])
    halves = [
        weight.narrow(1, i * x.shape[1] // 2, x.shape[1] // 2).apply(part) for i, part in enumerate(x.chunk(2, 1))
    ]
    torch.testing.assert_close(sum(halves), weight.apply(x), rtol=1e-4, atol=1e-3 * float(weight.apply(x).abs().max()))


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("method", ["torch", "cpu"])
def test_a_layer_of_each_type_for_few_rows_and_many_and_under_an_adapter(name, method):
    """Against float64. The CPU's kernel rounds activations, where it has one for the groups of a type."""
    torch.manual_seed(0)
    raw = random_rows(name, rows=24)
    exact = torch.from_numpy(gguf.quants.dequantize(raw, Q[name])).double()
    layer = Linear(exact.shape[1], {"a": 24}, dtype=torch.float32, device=torch.device("cpu"), method=method)
    layer.load("a", "weight", decode(name, raw))
    layer.method.process_weights_after_loading()
    inputs, batch = {rows: torch.randn(rows, exact.shape[1]) for rows in (1, 7, 40)}, LoRABatch(64, torch.device("cpu"))
    plain = {rows: layer(x).double() for rows, x in inputs.items()}
    layer.method = LoRALinear(layer, batch, max_loras=1, max_rank=4, invariant=False)
    pair = LoRAWeights(torch.randn(4, exact.shape[1]), torch.randn(24, 4) * exact.std().float())
    layer.method.set_slot(0, {"a": pair})
    for rows, x in inputs.items():
        want = x.double() @ exact.T
        assert (plain[rows] - want).norm() < (0.03 if method == "cpu" else 1e-5) * want.norm()
        batch.set(np.zeros(rows, np.int64))
        more = x.double() @ pair.a.double().T @ pair.b.double().T
        assert (layer(x).double() - plain[rows] - more).norm() < 1e-5 * (want.norm() + more.norm())


def test_both_lists_of_types_agree():
    assert tuple(BLOCKS) == BLOCK_TYPES


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(
        ValueError, match=r"tensor 'X.weight.Q4_0' has rows of 53 bytes, which are no whole blocks of 18"
    ):
        decode("Q4_0", random_rows("Q4_0")[:, 1:])


KINDS = {
    "self_attn.q_proj": Q.Q8_0,
    "self_attn.k_proj": Q.Q8_0,
    "self_attn.v_proj": Q.Q5_0,
    "self_attn.o_proj": Q.Q4_0,
    "mlp.gate_proj": Q.Q4_1,
    "mlp.up_proj": Q.Q8_0,
    "mlp.down_proj": Q.Q5_1,
}


def mixed_file(folder):
    """A tiny Llama whose parts are of several types, the embedding too."""
    kinds = {f"model.layers.{i}.{name}.weight": kind for i in range(tiny.LAYERS) for name, kind in KINDS.items()}
    kinds["model.embed_tokens.weight"] = Q.Q8_0
    return tiny.write_gguf(folder / "mixed.gguf", "llama", tiny.random_weights(), kinds)


def test_a_gguf_file_stays_quantized_and_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    file = mixed_file(tmp_path)
    convert_gguf(file, tmp_path / "whole")
    decoder, whole = decoder_of(file), decoder_of(tmp_path / "whole")
    qkv = decoder.layers[0].mixer.qkv.method
    assert isinstance(qkv, StoredLinear)
    assert [value.shape[0] for value in qkv.values] == [128]  # Q8_0 and Q5_0 are both 8 bits in groups of 32
    gate_up = decoder.layers[0].mlp.gate_up.method
    assert [value.bits for value in gate_up.values] == [4, 8]
    assert isinstance(decoder.head.method, StoredLinear)  # tied to an embedding that is quantized
    assert torch.equal(decoder.embedding, whole.embedding)
    tokens = [5, 100, 200, 7, 9, 31, 64, 250, 12]
    got, want = [], []
    for model, out in ((decoder, got), (whole, want)):
        paged = PagedDecoder(model)
        paged.add("a", tokens)
        out += [paged.step({"a": 8})["a"], paged.step({"a": 1})["a"]]
    torch.testing.assert_close(torch.cat(got), torch.cat(want), rtol=1e-4, atol=1e-4)
    stored = (resolve_model(file) / "model.safetensors").stat().st_size
    assert stored < (tmp_path / "whole" / "model.safetensors").stat().st_size / 3
    assert load_model(file).facts(16, "float32").weight_bytes < stored


def test_a_file_without_blocks_is_not_quantized(tmp_path, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    assert load_model(tiny.write_gguf(tmp_path / "plain.gguf")).quantization == {}
