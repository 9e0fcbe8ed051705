"""Quantized checkpoints that we write: read again, by us and by gguf; what cannot be written."""

import json

import gguf
import numpy as np
import pytest
import tiny_gguf as tiny
import torch
from paged import PagedDecoder, make_decoder
from quantized_checkpoints import PROMPTS, decoder_of, linears, small_model
from safetensors.torch import load_file
from tiny_models import hf_model
from tokenizers import Tokenizer

from minivllm.attention.select import make_backend
from minivllm.cli import main
from minivllm.models.decoder import Decoder
from minivllm.models.gguf import convert_gguf
from minivllm.models.linear.grouped import GroupedWeight
from minivllm.models.linear.scaled import ScaledWeight
from minivllm.models.loading import CheckpointError, load_model
from minivllm.models.quantization.gptq import calibrate, gptq
from minivllm.models.quantization.writers import linear_names, round_groups, write_compressed, write_gguf


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small Llama as transformers saves it."""
    folder = tmp_path_factory.mktemp("plain")
    small_model().save_pretrained(folder)
    return folder


def logits(decoder):
    paged = PagedDecoder(decoder)
    paged.add("a", PROMPTS["a"])
    return paged.step({"a": len(PROMPTS["a"])})["a"]


def test_rounding_goes_to_the_nearest_number_of_each_group():
    weight = torch.randn(6, 64) * torch.logspace(-3, 2, 6)[:, None]
    weight[0] = 0
    for bits, top in ((4, 7), (8, 127)):
        rounded = round_groups(weight, 32, bits)
        step = weight.unflatten(1, (2, 32)).abs().amax(-1) / top
        assert ((rounded.dequantize() - weight).unflatten(1, (2, 32)).abs() <= step[..., None] / 2 * 1.0001).all()


def correlated(tokens, inputs=64):
    """Activations that are mixes of few directions, some inputs louder than others."""
    directions = torch.randn(8, inputs, generator=torch.Generator().manual_seed(1))
    mixed = torch.randn(tokens, 8) @ directions + 0.2 * torch.randn(tokens, inputs)
    return mixed * torch.logspace(-1, 1, inputs)[torch.randperm(inputs, generator=torch.Generator().manual_seed(2))]


def test_gptq_is_least_squares_after_each_input_that_was_rounded():
    """Against float64: the inputs that are left are solved for anew, from the activations themselves."""
    torch.manual_seed(0)
    x, weight, damp = correlated(300, 16).double(), torch.randn(3, 16), 0.01
    hessian = x.T @ x
    rounded = gptq(weight, hessian.float(), 8, damp)
    scale = rounded.scale.double().repeat_interleave(8, 1)
    assert torch.equal(rounded.scale, round_groups(weight, 8).scale)
    penalty = (damp * hessian.diagonal().mean()).sqrt() * torch.eye(16).double()  # damping, as rows of activations
    rows = torch.cat((x, penalty))
    order = hessian.diagonal().argsort(descending=True).tolist()
    exact, w = weight.double(), weight.double().clone()
    for place, i in enumerate(order):
        w[:, i] = (w[:, i] / scale[:, i]).round().clamp(-8, 7) * scale[:, i]
        left, done = order[place + 1 :], order[: place + 1]
        if left:
            error = rows[:, done] @ (w - exact)[:, done].T
            w[:, left] = exact[:, left] - torch.linalg.lstsq(rows[:, left], error).solution.T
    torch.testing.assert_close(rounded.dequantize().double(), w, rtol=1e-6, atol=1e-6)


def test_gptq_errs_less_in_outputs_that_it_has_not_seen_and_as_much_where_inputs_are_alone():
    torch.manual_seed(0)
    weight, seen, later = torch.randn(48, 64), correlated(1000), correlated(200)
    weight[5, :32] = 0  # a group of zeros
    errors = [
        (later @ (rounded.dequantize() - weight).T).norm()
        for rounded in (gptq(weight, seen.T @ seen, 32), round_groups(weight, 32))
    ]
    assert errors[0] < 0.5 * errors[1]
    alone = gptq(weight, torch.diag(torch.rand(64) + 0.5), 32)
    assert torch.equal(alone.q, round_groups(weight, 32).q)
    with pytest.raises(ValueError, match="GPTQ needs inputs: none but zeros were seen"):
        gptq(weight, torch.zeros(64, 64), 32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gptq_rounds_what_a_checkpoint_keeps_in_4_bits_and_no_router(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    hf_model("mixtral").save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    decoder = Decoder(loaded.spec, make_backend("sdpa"), torch.float32, torch.device(device))
    decoder.load_weights(loaded.weights("float32"))
    gates = [linear for linear in decoder.linears() if any(part.endswith(".gate") for part in linear.parts)]
    before = [gate.weight.clone() for gate in gates]

    def read():
        for linear in decoder.linears():
            linear(torch.randn(20, linear.in_features, device=device))

    found = calibrate(decoder, read, 4, stages=1)
    assert gates and found.keys() == linear_names(decoder.spec).keys()
    assert all(torch.equal(gate.weight, weight) for gate, weight in zip(gates, before, strict=True))
    assert {linear.weight.device.type for linear in decoder.linears()} == {device}


@pytest.mark.parametrize(("format", "kind", "step"), [("int4", GroupedWeight, 1 / 7), ("int8", ScaledWeight, 1 / 127),
                                                      ("fp8", ScaledWeight, 1 / 16)])  # fmt: skip
def test_what_is_written_is_read_again_within_half_a_step(plain, tmp_path, format, kind, step):
    write_compressed(load_model(plain), tmp_path / "out", format)
    decoder = decoder_of(tmp_path / "out")
    values = [value for linear in decoder.linears() for value in linear.method.values]
    assert {type(value) for value in values} == {kind}
    down = torch.from_numpy(linears()["model.layers.1.mlp.down_proj"])
    error = decoder.layers[1].mlp.down.weight.double() - down
    bound = down.abs().amax(1, keepdim=True) * step / 2 if format != "fp8" else down.abs() * step + 1e-4
    assert (error.abs() <= bound * 1.001).all()
    assert 0 < (logits(decoder) - logits(decoder_of(plain))).norm() < 0.5 * logits(decoder).norm()
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group = written["config_groups"]["group_0"]
    assert (group["weights"]["group_size"], bool(group["input_activations"])) == (
        (64, False) if format == "int4" else (None, True)
    )


@pytest.fixture
def bpe(tmp_path):
    """A tiny Llama with a byte-level BPE tokenizer."""
    folder = tmp_path / "bpe"
    convert_gguf(tiny.write_gguf(tmp_path / "m.gguf"), folder)
    return folder


@pytest.mark.parametrize("format", ["gguf-q8_0", "gguf-q4_0"])
def test_a_gguf_file_holds_the_model_and_its_tokenizer(bpe, tmp_path, format):
    file = tmp_path / "out" / "m.gguf"
    write_gguf(load_model(bpe), file, format)
    convert_gguf(file, tmp_path / "again")
    first, again = (load_file(folder / "model.safetensors") for folder in (bpe, tmp_path / "again"))
    assert first.keys() == again.keys()
    kind = gguf.GGMLQuantizationType[format.removeprefix("gguf-").upper()]
    for name, tensor in first.items():
        array = tensor.numpy()
        if name in linear_names(load_model(bpe).spec):
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        elif array.ndim == 2:
            kind8 = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind8), kind8)
        assert np.array_equal(again[name].numpy(), array), name
    own, other = (
        {k: v for k, v in json.loads((f / "config.json").read_text()).items()} for f in (bpe, tmp_path / "again")
    )
    assert own == other
    text = "the 12 abab <|im_start|>x  <think>"
    tokens = [Tokenizer.from_file(str(f / "tokenizer.json")).encode(text).ids for f in (bpe, tmp_path / "again")]
    assert tokens[0] == tokens[1]


def test_the_command_writes_and_refuses(plain, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["quantize", str(plain), str(out), "--format", "int4", "--group-size", "32"]) == 0
    assert "MB of weights" in capsys.readouterr().out
    for more, said in (
        ([str(plain), str(out), "--format", "fp8"], "is not empty"),
        ([str(out), str(tmp_path / "b"), "--format", "fp8"], r"is quantized already (compressed-tensors)"),
        ([str(plain), str(tmp_path / "c"), "--format", "int4", "--group-size", "48"], "no group size of (48,) divides"),
        (
            [str(plain), str(tmp_path / "d"), "--format", "int8", "--group-size", "32"],
            "--group-size goes with --format int4",
        ),
    ):
        assert main(["quantize", *more]) == 2
        assert said in capsys.readouterr().err


def test_the_command_calibrates(bpe, tmp_path, capsys):
    text, short = tmp_path / "text.txt", tmp_path / "short.txt"
    text.write_text("the 12 abab x " * 200)
    short.write_text("the")
    command = ["quantize", str(bpe), str(tmp_path / "near"), "--format", "int4", "--group-size", "16"]
    assert main(command) == 0
    command[2] = str(tmp_path / "gptq")
    assert main([*command, "--calibration", str(short)]) == 2
    assert "a calibration text needs at least 127" in capsys.readouterr().err
    assert main([*command, "--calibration", str(text)]) == 0
    assert main(["quantize", str(bpe), str(tmp_path / "c"), "--format", "fp8", "--calibration", str(text)]) == 2
    assert "--calibration goes with --format int4, not with fp8" in capsys.readouterr().err
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("near", "gptq")]
    assert configs[0] == configs[1]
    tokens = Tokenizer.from_file(str(bpe / "tokenizer.json")).encode(text.read_text()).ids[:100]
    found = []
    for folder in (bpe, tmp_path / "near", tmp_path / "gptq"):
        paged = PagedDecoder(decoder_of(folder))
        paged.add("a", tokens)
        found.append(paged.step({"a": len(tokens)})["a"])
    whole, near, calibrated = found
    assert 0 < (calibrated - whole).norm() < 0.8 * (near - whole).norm()


def test_an_expert_that_reads_nothing_is_named():
    decoder = make_decoder(hf_model("mixtral"))
    with pytest.raises(
        ValueError, match=r"no token of the calibration text reached model\.layers\.0\..*: take a longer"
    ):
        calibrate(decoder, lambda: None, 16)


def test_a_model_that_gguf_cannot_hold_is_refused(plain, tmp_path):
    model = load_model(plain, hf_overrides={"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    with pytest.raises(CheckpointError, match="stretched rotations or windows is not implemented"):
        write_gguf(model, tmp_path / "x" / "m.gguf", "gguf-q8_0")
