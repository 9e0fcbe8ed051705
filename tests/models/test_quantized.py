"""Weights of 8 and 4 bits: the format against its bound, the matmuls against float64, whole models against transformers."""

import argparse
import copy
import math

import pytest
import torch
from paged import PagedDecoder, make_decoder
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm.core.config import GROUP_SIZES, INTEGER_BITS, QUANTIZATIONS, WEIGHT_BITS, EngineArgs
from minivllm.models.linear import layer as linear_layer
from minivllm.models.linear.choose import explain_linear_method
from minivllm.models.linear.grouped import GroupedWeight
from minivllm.models.linear.layer import Linear, TorchLinear, register_quantization
from minivllm.models.linear.quantized import CPUScaledWeight, PackedWeight, quantize
from minivllm.models.linear.scaled import FP8, LARGEST, ScaledWeight, round_to, scale_of
from minivllm.models.loading import load_model
from minivllm_kernels.cpu.matmul.layout import FEW, host_tiles

CPU = torch.device("cpu")
INT8, INT4 = "int8_per_channel_weight_only", "int4_per_group_weight_only"
FORMATS = [(8, None), *((4, group) for group in GROUP_SIZES)]
SHAPES = [(96, 64), (33, 100), (5, 24), (100, 150), (320, 576)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def awkward_weight(outputs, inputs):
    """Rows of very different sizes; one of zeros, one constant, one with a number far out."""
    weight = torch.randn(outputs, inputs) * torch.logspace(-4, 2, outputs)[:, None]
    weight[0], weight[1] = 0, 0.3
    weight[2, 5] = 1000
    return weight


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_comes_back_to_half_a_step(shape, bits, group):
    weight = awkward_weight(*shape)
    value, whole = quantize(weight, bits, group), group or shape[1]
    error = (value.dequantize().double() - weight.double()).abs()
    for first in range(0, shape[1], whole):
        part = weight[:, first : first + whole].double()
        if bits == 8:
            bound = part.abs().amax(1) / 127 / 2
        else:  # scale and low are rounded to float16, by one part in 2048 at most
            step, low = (part.amax(1) - part.amin(1)) / 15, part.amin(1).abs()
            bound = step / 2 + 16 * step / 2048 + low / 2048
        assert (error[:, first : first + whole] <= bound[:, None] * 1.001 + 1e-30).all()
    packed = PackedWeight(value, torch.float32)
    assert torch.equal(packed.dequantize(), value.dequantize()) and packed.shape == value.shape == shape
    unit = group or (32 if 0 < shape[1] % 64 <= 32 else 64)  # whole groups; of 8 bits, what is rounded together
    unit = min(unit, 64)
    assert packed.words.nbytes == -(-shape[0] // 32) * 32 * -(-shape[1] // unit) * unit * bits // 8


def test_four_bits_are_two_weights_a_byte():
    """Four inputs in the low halves of the bytes, the next four in the high ones: a mask gives what a dot product takes."""
    words = PackedWeight(quantize(torch.arange(16.0).repeat(32, 2), 4, 32), torch.float32).words
    assert words.shape == (1, 4, 32)
    assert [f"{word & 0xFFFFFFFF:08x}" for word in words[0, :, 7].tolist()] == ["73625140", "fbead9c8"] * 2


def test_a_large_weight_is_rounded_in_pieces(monkeypatch):
    from minivllm.models.linear import quantized

    weight = torch.randn(200, 100)
    whole = [quantize(weight, bits, group) for bits, group in FORMATS]
    monkeypatch.setattr(quantized, "AT_ONCE", 64 * 100)
    for value, (bits, group) in zip(whole, FORMATS, strict=True):
        assert torch.equal(quantize(weight, bits, group).dequantize(), value.dequantize())


def rounded(x, group):
    """Activations as the kernel has them: whole numbers times a step for each group of a row."""
    parts = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    step = (parts.abs().amax(2, keepdim=True) / 127).clamp(min=1e-300)
    return ((parts / step).round() * step).flatten(1)[:, : x.shape[1]]


def layer_of(weight, bias, bits, group, prefix=""):
    """A layer with a quantized weight."""
    method = prefix + ("int8" if bits == 8 else f"int4_{group}")
    kind = {"dtype": weight.dtype, "device": CPU, "bias": bias is not None}
    layer = Linear(weight.shape[1], {"all": weight.shape[0]}, method=method, **kind)
    layer.method.weights["weight"].copy_(weight)
    if bias is not None:
        layer.bias.copy_(bias)
    layer.method.process_weights_after_loading()
    return layer


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("prefix", ["", "torch_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmuls_equal_float64_for_few_rows_and_many(dtype, prefix, bits, group):
    for shape in SHAPES[1:4]:
        weight, bias = (torch.randn(shape) / shape[1] ** 0.5).to(dtype), torch.randn(shape[0]).to(dtype)
        layer = layer_of(weight, bias, bits, group, prefix)
        exact = layer.method.value.dequantize().double()
        columns = -(-shape[1] // (group or 1)) * (group or 1)
        unit = 32 if group == 32 or (columns <= (group or columns) and 0 < columns % 64 <= 32) else 64
        for rows in (1, 3, 40):
            x = torch.randn(rows, shape[1]).to(dtype)
            want = (x.double() if prefix else rounded(x, unit)) @ exact.T + bias.double()
            tolerance = 1e-5 if dtype == torch.float32 else 0.01
            torch.testing.assert_close(layer(x).double(), want, rtol=tolerance, atol=4 * tolerance)
            close = x.double() @ exact.T + bias.double()
            assert (layer(x).double() - close).norm() <= 0.01 * close.norm()  # and what rounding activations costs
        torch.testing.assert_close(layer.weight.double(), exact, rtol=0.004, atol=1e-6)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize(
    ("prefix", "dtype", "most"),
    [
        ("invariant_", torch.float32, 140),
        ("invariant_", torch.bfloat16, 140),
        ("", torch.float32, 140),
        ("", torch.bfloat16, FEW),  # more rows are those of the tile unit, where there is one
    ],
)
def test_a_row_has_the_same_bits_in_any_company(prefix, dtype, most, bits, group):
    layer = layer_of(torch.randn(100, 576).to(dtype), None, bits, group, prefix)
    same_bits_in_any_company(layer, torch.randn(most, 576).to(dtype))


def same_bits_in_any_company(layer, x):
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in (2, 3, 7, 8, 9, 16, 17, 33, 140):  # by each kind of tile, and in several launches
        if rows <= len(x):
            assert torch.equal(layer(x[:rows]), alone[:rows])


@pytest.mark.skipif(not host_tiles(), reason="this CPU has no tile unit")
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_the_tile_unit_leaves_activations_as_they_are(bits, group):
    for outputs, inputs in ((100, 64), (32, 480)):  # a part of a panel, and several
        layer = layer_of(torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs).bfloat16(), bits, group)
        weight = layer.method.value.dequantize()
        for rows in (9, 16, 33, 70, 140):
            x = torch.randn(rows, inputs).bfloat16()
            want, half = x.double() @ weight.double().T + layer.bias.double(), weight.bfloat16().double()
            least = (
                x.double() @ (weight.double() - half).T
            ).norm() / want.norm()  # what rounding the weight to bf16 costs
            error = (layer(x).double() - want).norm() / want.norm()
            assert error <= 1.2 * least + 0.002, (rows, error, least)


def test_rows_of_zeros_and_numbers_that_are_not_finite():
    layer, x = layer_of(torch.randn(40, 64), None, 4, 32), torch.randn(12, 64)
    x[1], x[2, 5], x[3, 40], x[4] = 0, torch.nan, torch.inf, 1e-38
    for rows in (12, 5):
        out = layer(x[:rows])
        assert (out[1] == 0).all() and out[2].isnan().all() and not out[3].isfinite().any()
        assert (out[4].abs() < 1e-35).all() and out[[0, *range(5, rows)]].isfinite().all()


def test_a_layer_lets_the_weight_go_and_gives_it_back():
    layer = Linear(64, {"a": 32, "b": 64}, dtype=torch.float32, device=CPU, method="int8")
    weight = torch.randn(96, 64)
    layer.part("a").copy_(weight[:32])
    layer.part("b").copy_(weight[32:])
    layer.method.process_weights_after_loading()
    assert layer.method.weights == {}
    assert 0 < (layer.weight - weight).abs().max() <= weight.abs().max() / 127 / 2 * 1.001


def with_weights_of(decoder, model):
    """A transformers model with the quantized weights of our decoder, so that both compute the same function."""
    model = copy.deepcopy(model)
    names, state = decoder.spec.names, model.state_dict()
    state[names.head] = decoder.head.weight
    for i, layer in enumerate(decoder.layers):
        for linear in (*layer.mixer.linears(), *layer.mlp.linears()):
            weights = linear.weight.split(list(linear.parts.values()))
            state |= {
                names.layer.format(i) + f"{name}.weight": w for name, w in zip(linear.parts, weights, strict=True)
            }
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # no longer tied
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen3", "gemma3"])
@pytest.mark.parametrize("method", ["int8", "int4_32", "torch_int8", "torch_int4_32"])
def test_a_quantized_model_is_transformers_with_the_same_weights(name, method):
    theirs = hf_model(name)
    decoder = make_decoder(theirs, "sdpa" if "torch" in method else "numba_cpu", linear_method=method)
    assert {layer.mlp.down.method_name for layer in decoder.layers} == {method}
    assert decoder.head.method_name == ("torch_int8" if "torch" in method else "int8")
    paged, tokens = PagedDecoder(decoder), [5, 100, 200, 7, 9, 31, 64, 250, 12, 13, 77]
    paged.add("a", tokens)
    got = torch.cat((paged.step({"a": 10})["a"], paged.step({"a": 1})["a"]))  # many rows, and one
    with torch.inference_mode():
        want = with_weights_of(decoder, theirs)(torch.tensor([tokens])).logits[0]
        plain = theirs(torch.tensor([tokens])).logits[0]
    if "torch" in method:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    else:  # activations are rounded too
        assert (got - want).norm() < 0.06 * want.norm()
    assert (got - plain).abs().max() > 0.01  # and it did change something


def test_layers_are_quantized_as_soon_as_they_are_whole():
    theirs = hf_model("llama")
    decoder = make_decoder(theirs, "numba_cpu", linear_method="int8")
    fresh = type(decoder)(decoder.spec, decoder.backend, torch.float32, CPU, "int8")
    kernels = []

    def weights():
        for item in theirs.state_dict().items():
            yield item
            kernels.append([layer.mlp.down.method.weights for layer in fresh.layers].count({}))

    fresh.load_weights(weights())
    assert kernels == sorted(kernels) and set(kernels) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("kernel", INTEGER_BITS)
def test_weight_bytes_are_what_the_products_hold(tiny_model_path, kernel):  # noqa: F811
    theirs = hf_model("llama")
    decoder = make_decoder(theirs, "numba_cpu", linear_method=kernel)
    held = 0
    for layer in decoder.layers:
        for linear in (*layer.mixer.linears(), *layer.mlp.linears()):
            rows, columns = linear.weight.shape
            held += rows * columns * WEIGHT_BITS[kernel] / 8
            group = int(kernel.partition("_")[2] or 64)
            rows, columns = math.ceil(rows / 32) * 32, math.ceil(columns / group) * group  # the kernel's items
            assert linear.method.value.nbytes <= rows * (
                columns * WEIGHT_BITS[kernel] / 8 + 4
            )  # one group: float32 scales
    facts = load_model(tiny_model_path("llama"), load_format="dummy").facts(16, "float32", kernel)
    others = 2 * decoder.embedding.numel() * 4 + sum(p.numel() * 4 for n, p in theirs.named_parameters() if "norm" in n)
    assert facts.weight_bytes == pytest.approx(held + others - decoder.embedding.numel() * 3, rel=0.01)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="quantization must be one of 'int8_per_channel_weight_only', 'int4_per_group"):
        EngineArgs(quantization="gptq")
    with pytest.raises(ValueError, match=r'quantization_config\["group_size"\] must be one of 32, 64, 128; got 48'):
        EngineArgs(quantization=INT4, quantization_config={"group_size": 48})
    with pytest.raises(ValueError, match="must be {\"group_size\": n}, got {'size': 32}"):
        EngineArgs(quantization=INT4, quantization_config={"size": 32})
    with pytest.raises(ValueError, match="goes with quantization='int4_per_group_weight_only', not with 'int8"):
        EngineArgs(quantization=INT8, quantization_config={"group_size": 32})
    with pytest.raises(ValueError, match="implemented on the CPU, not on cuda"):
        explain_linear_method("int8", "gemv", torch.bfloat16, torch.device("cuda"), False)
    with pytest.raises(ValueError, match="float32 and bfloat16, not float16"):
        explain_linear_method("int8", "cpu", torch.float16, CPU, False)
    with pytest.raises(ValueError, match="attention_backend='reference', which asks for rows that do not depend"):
        explain_linear_method("int8", "torch", torch.float32, CPU, True)
    assert explain_linear_method("int8", "cpu", torch.float32, CPU, True)[0] == "invariant_int8"
    with pytest.raises(ValueError, match="from float32 or bfloat16 on the CPU, not from torch.float16"):
        Linear(32, {"a": 32}, dtype=torch.float16, device=CPU, method="int8")


@pytest.mark.parametrize("quantization", (INT8, INT4, "fp8"))
def test_an_engine_explains_and_generates(tiny_model_path, quantization):  # noqa: F811
    from minivllm import LLM, SamplingParams

    with LLM(tiny_model_path("qwen3"), quantization=quantization, num_gpu_blocks=40) as llm:
        rows = [line.split() for line in llm.config.explain().splitlines()]
        assert ["quantization", quantization] in [row[:2] for row in rows]
        kernel = EngineArgs(quantization=quantization).linear_kernel
        assert ["linear_kernel", kernel] in [row[:2] for row in rows]
        assert {linear.method_name for linear in llm.llm_engine.core.executor.runner.model.linears()} == {kernel}
        out = llm.generate(
            ["ab", "abcdefgh"], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False
        )
        assert [len(one.outputs[0].token_ids) for one in out] == [5, 5]


def test_the_reference_backend_refuses(tiny_model_path):  # noqa: F811
    from minivllm import LLM

    with pytest.raises(ValueError, match="attention_backend='reference'"):
        LLM(tiny_model_path("qwen3"), quantization=INT8, attention_backend="reference", num_gpu_blocks=40)


def test_fp8_rounds_weights_and_each_token():
    weight, bias, x = torch.randn(48, 64), torch.randn(48), torch.randn(7, 64) * torch.logspace(-2, 2, 7)[:, None]
    layer = Linear(64, {"all": 48}, bias=True, dtype=torch.float32, device=CPU, method="fp8")
    layer.load("all", "weight", weight)
    layer.load("all", "bias", bias)
    layer.method.process_weights_after_loading()
    rounded = layer.weight.double()
    assert ((rounded - weight).abs() <= weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 448 / 512).all()
    scale = x.double().abs().amax(1, keepdim=True) / 448
    want = ((x / scale.float()).to(torch.float8_e4m3fn).double() * scale) @ rounded.T + bias.double()
    torch.testing.assert_close(layer(x).double(), want, rtol=1e-4, atol=1e-3)
    assert layer.method.value.words.nbytes == 64 * 64  # whole items of 32 outputs
    with pytest.raises(
        ValueError, match="quantization='fp8' cannot be used: it does not go with an attention .*batch-inv"
    ):
        explain_linear_method("fp8", "torch", torch.float32, CPU, True)


class Halves(TorchLinear):
    """Weights in half-floats."""

    def problem(self, inputs, outputs, dtype, device):
        """See `LinearMethod`."""
        return None if dtype == torch.float32 else f"halves of float32, not of {dtype}"

    def process_weights_after_loading(self):
        """See `LinearMethod`."""
        if "weight" in self.weights:
            self.half = self.weights.pop("weight").half()

    def apply(self, x):
        """See `LinearMethod`."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    @property
    def weight(self):
        return self.weights["weight"] if "weight" in self.weights else self.half.float()


def test_a_quantization_of_ones_own(tiny_model_path, monkeypatch):  # noqa: F811
    from minivllm import LLM, SamplingParams
    from minivllm.engine.arguments import add_engine_arguments

    with pytest.raises(ValueError, match="must be one of 'int8_per_.*', 'fp8'; got 'halves'"):
        EngineArgs(quantization="halves")
    for registry in (WEIGHT_BITS, QUANTIZATIONS, linear_layer._METHODS):
        monkeypatch.setitem(registry, "halves", None)  # taken out again after the test
    del linear_layer._METHODS["halves"]
    register_quantization("halves", Halves, bits=16)
    with pytest.raises(ValueError, match="exists already"):
        register_quantization("halves", Halves, bits=16)
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert "halves" in next(line for line in parser.format_help().splitlines() if "{int8_per_channel" in line)
    path, greedy = tiny_model_path("qwen3"), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    with LLM(path, quantization="halves", dtype="float32", num_gpu_blocks=40) as llm:
        model = llm.llm_engine.core.executor.runner.model
        assert {type(linear.method) for linear in model.linears()} == {Halves} and model.head.method_name != "halves"
        assert not any("weight" in linear.method.weights for linear in model.linears())
        weights = sum(linear.method.half.numel() for linear in model.linears())
        found = llm.generate("abc", greedy, use_tqdm=False)[0].outputs[0]
        for linear in model.linears():
            linear.use("torch")  # keeps the weight
        again = llm.generate("abc", greedy, use_tqdm=False)[0].outputs[0]
    assert found.token_ids == again.token_ids
    assert found.cumulative_logprob == pytest.approx(again.cumulative_logprob, abs=1e-4)
    loaded = load_model(path)
    whole, half = (loaded.facts(16, "float32", kernel).weight_bytes for kernel in (None, "halves"))
    assert whole - half == 2 * weights
    with pytest.raises(ValueError, match="quantization='halves' cannot be used: halves of float32, not of torch.bf"):
        LLM(path, quantization="halves", dtype="bfloat16", num_gpu_blocks=40)


def test_the_flag():
    from minivllm.engine.arguments import add_engine_arguments, engine_args_from

    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    flags = ["--quantization", "int4_per_group_weight_only", "--quantization-config", '{"group_size": 128}']
    assert engine_args_from(parser.parse_args(flags)).linear_kernel == "int4_128"
    with pytest.raises(SystemExit):
        parser.parse_args(["--quantization", "int3"])


TEXT = (
    "A library lends books. Whoever borrows one brings it back within four weeks, so that others can read it too."
    " Once upon a time there was a king who had three daughters, and the youngest was so fair that the sun itself marvelled."
    " def total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n    return result\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [INT8, INT4])
@pytest.mark.parametrize("budget", [8, 512])  # by vectors, and by tiles where there are any
def test_smollm2_mostly_chooses_the_same_tokens(llm, quantization, budget):
    from minivllm import LLM, SamplingParams

    def choices(engine):
        """The likeliest token after every token of the text, and its log-probability."""
        out = engine.generate(TEXT, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)[0]
        best = [max(found.items(), key=lambda item: item[1].logprob) for found in out.prompt_logprobs[1:]]
        return [token for token, _ in best], torch.tensor([found.logprob for _, found in best])

    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "max_model_len": 256, "num_gpu_blocks": 40}
    with LLM("smollm2", dtype="float32", quantization=quantization, **sizes) as quantized:
        (theirs, p), (ours, q) = choices(llm), choices(quantized)
    assert len(ours) > 70
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 0.9 * len(ours)
    assert 1e-4 < (p - q).abs().mean() < 0.1


# ---- weights that a checkpoint brings


NF4 = (-1, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1)
MXFP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
KINDS = {  # bits, group, and what else it has
    "symmetric": (4, 32, {}),
    "with lows": (4, 128, {"low": True}),
    "8 bits": (8, 32, {}),
    "8 bits with lows": (8, 64, {"low": True}),
    "NF4": (4, 64, {"codes": torch.tensor(NF4)}),
    "MXFP4": (4, 32, {"codes": torch.tensor(MXFP4)}),
    "NVFP4": (4, 16, {"codes": torch.tensor(MXFP4)}),
    "in another order": (4, 64, {"order": True}),
    "8 bits in another order": (8, 32, {"order": True}),
}


def grouped_of(kind, outputs=72, inputs=256):
    bits, group, more = KINDS[kind]
    q = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    q = q if bits == 4 else torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
    scale, low = (torch.rand(2, outputs, inputs // group) + 0.5).half()
    order = torch.randperm(inputs) if "order" in more else None
    return GroupedWeight(q, scale / 256, -low if "low" in more else None, more.get("codes"), order)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoints_weight_is_multiplied_as_it_came(kind):
    weight, bias = grouped_of(kind), torch.randn(72)
    layer = Linear(256, {"a": 40, "b": 32}, bias=True, dtype=torch.float32, device=CPU, method="cpu")
    layer.bias.copy_(bias)
    layer.load("a", "weight", weight[:40])
    layer.load("b", "weight", weight[40:])
    layer.method.process_weights_after_loading()
    (packed,) = layer.method.values
    assert isinstance(packed, PackedWeight)
    exact = packed.dequantize().double()
    torch.testing.assert_close(
        exact, weight.dequantize().double(), rtol=1e-3, atol=0.004 / 128 if kind == "NF4" else 1e-6
    )
    for rows in (1, 20):
        x = torch.randn(rows, 256)
        seen = rounded(weight.arrange(x), min(weight.group, 64))
        if weight.order is not None:
            seen = torch.empty_like(seen).index_copy_(1, weight.order, seen)
        torch.testing.assert_close(layer(x).double(), seen @ exact.T + bias.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["in another order", "8 bits in another order"])
def test_a_share_of_inputs_in_another_order_is_multiplied_as_it_came(kind, dtype):
    """Of each group a share has as many columns of 32 as hold its inputs; places left over belong to none."""
    weight, rows = grouped_of(kind), torch.randn(70, 256).to(dtype)
    for first in (0, 96):
        x, share = rows[:, first : first + 96], weight.narrow(1, first, 96)
        exact = share.dequantize().double()
        assert torch.equal(share.dequantize(), weight.dequantize()[:, first : first + 96])
        held = (weight.order.view(-1, weight.group) - first).ge(0) & (weight.order.view(-1, weight.group) - first).lt(
            96
        )
        assert share.columns == sum(-(-n // 32) * 32 for n in held.sum(1).tolist())
        packed = PackedWeight(share, dtype, tiles=False)
        seen = rounded(share.arrange(x), 32)[:, (at := share.order.argsort()[:96])]
        assert torch.equal(share.order[at], torch.arange(96))
        want, tolerance = seen @ exact.T, 1e-5 if dtype == torch.float32 else 0.01
        for n in (1, 5, 70):
            torch.testing.assert_close(packed.apply(x[:n]).double(), want[:n], rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["invariant_int8", "invariant_int4_32"])
def test_a_stored_weight_has_the_same_bits_in_any_company(method, dtype):
    """What has a kernel, what torch writes out, and a part that was not quantized."""
    by_torch = GroupedWeight(torch.randint(-128, 128, (24, 256)).to(torch.int8), *torch.rand(2, 24, 16))
    parts = {"a": grouped_of("with lows"), "b": by_torch, "c": torch.randn(40, 256).to(dtype)}
    sizes = {name: part.shape[0] for name, part in parts.items()}
    layer = Linear(256, sizes, bias=True, dtype=dtype, device=CPU, method=method)
    layer.bias.copy_(torch.randn(136))
    for name, part in parts.items():
        layer.load(name, "weight", part)
    layer.method.process_weights_after_loading()
    assert isinstance(layer.method.values[0], PackedWeight)
    same_bits_in_any_company(layer, torch.randn(140, 256).to(dtype))


def test_what_has_no_kernel_is_written_out():
    weight = GroupedWeight(torch.randint(-128, 128, (32, 64)).to(torch.int8), *torch.rand(2, 32, 4))
    with pytest.raises(ValueError, match=r"groups of 16 inputs are neither 32 \(of 4 bits: 16\) nor a multiple of 64"):
        PackedWeight(weight, torch.float32)
    layer = Linear(64, {"a": 32, "b": 8}, bias=True, dtype=torch.float32, device=CPU, method="cpu")
    layer.bias.copy_(torch.arange(40.0))
    layer.load("a", "weight", weight)
    layer.load("b", "weight", torch.ones(8, 64))
    layer.method.process_weights_after_loading()
    x, whole = torch.randn(3, 64), torch.cat((weight.dequantize(), torch.ones(8, 64)))
    torch.testing.assert_close(layer(x), x @ whole.T + torch.arange(40.0), rtol=1e-4, atol=1e-3)


SCALED = [(block, activations) for block in (256, 32, 16) for activations in ("none", "token", "group", "static")]


@pytest.mark.parametrize("format", [FP8, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_with_scales_are_multiplied_as_they_came(format, dtype):
    """float64 has the same numbers, rounded alike; each row has the same bits in any company."""
    for block, activations in SCALED:
        blocks = torch.randn(72, 256).unflatten(1, (-1, block))
        scale, bias = scale_of(blocks, format), torch.randn(72)
        q = round_to(blocks, format, scale).flatten(1)
        fixed = torch.tensor([2.5 / LARGEST[format]]) if activations == "static" else None  # some numbers are beyond it
        weight = ScaledWeight(q, scale.squeeze(-1), block, activations, fixed)
        layer = Linear(256, {"all": 72}, bias=True, dtype=dtype, device=CPU, method="invariant_int8")
        layer.bias.copy_(bias)
        layer.load("all", "weight", weight)
        layer.method.process_weights_after_loading()
        (packed,) = layer.method.values
        assert isinstance(packed, CPUScaledWeight) and torch.equal(packed.dequantize(), weight.dequantize())
        x = torch.randn(70, 256).to(dtype)
        want = weight.round_activations(x.float()).double() @ weight.dequantize().double().T + layer.bias.double()
        tolerance = 1e-5 if dtype == torch.float32 else 0.01
        torch.testing.assert_close(layer(x).double(), want, rtol=tolerance, atol=tolerance * want.abs().max().item())
        for rows in (1, 3, 9):
            assert torch.equal(layer(x[:rows]), layer(x)[:rows])


def test_small_groups_of_eight_bits_have_a_kernel_too():
    """Q6_K has a scale for every 16 inputs. Rows that are not numbers make results that are none."""
    weight = GroupedWeight(torch.randint(-32, 32, (40, 64)).to(torch.int8), torch.rand(40, 4))
    layer = Linear(64, {"all": 40}, dtype=torch.float32, device=CPU, method="cpu")
    layer.load("all", "weight", weight)
    layer.method.process_weights_after_loading()
    assert isinstance(layer.method.values[0], CPUScaledWeight)
    x = torch.randn(5, 64)
    torch.testing.assert_close(layer(x), x @ weight.dequantize().T, rtol=1e-4, atol=1e-3)
    x[2, 7] = torch.nan
    assert layer(x).isnan().any(1).tolist() == [False, False, True, False, False]
    odd = ScaledWeight(torch.zeros(8, 9, dtype=torch.int8), torch.ones(8, 3), 3)
    with pytest.raises(ValueError, match="9 inputs in groups of 3: groups must be even, and divide the inputs"):
        CPUScaledWeight(odd, torch.float32)
