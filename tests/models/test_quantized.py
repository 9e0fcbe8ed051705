"""Weights of 8 and 4 bits: the format against its bound, the matmuls against float64, whole models against transformers."""

import copy

import pytest
import torch
from paged import PagedDecoder, make_decoder
from tiny_models import hf_model, tiny_model_path  # noqa: F401 - a fixture

from minivllm.core.config import GROUP_SIZES, QUANTIZATIONS, WEIGHT_BITS, EngineArgs
from minivllm.models.linear.choose import explain_linear_method
from minivllm.models.linear.layer import Linear
from minivllm.models.linear.quantized import quantize, restore
from minivllm.models.loading import load_model

CPU = torch.device("cpu")
FORMATS = [(8, None), *((4, group) for group in GROUP_SIZES)]
SHAPES = [(96, 64), (33, 100), (5, 24), (100, 72), (320, 576)]


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
    whole = group or -(-shape[1] // 16) * 16
    words, scales = quantize(weight, bits, whole)
    assert words.nbytes == -(-shape[0] // 32) * 32 * -(-shape[1] // 16) * 16 * bits // 8
    error = (restore(words, scales, *shape, whole).double() - weight.double()).abs()
    for first in range(0, shape[1], whole):
        part = weight[:, first : first + whole].double()
        if bits == 8:
            bound = part.abs().amax(1) / 127 / 2
        else:  # step and low are rounded to bf16, by one part in 256 at most
            step, low = (part.amax(1) - part.amin(1)) / 15, part.amin(1).abs()
            bound = step / 2 + 16 * step / 256 + low / 256
        assert (error[:, first : first + whole] <= bound[:, None] * 1.001 + 1e-30).all()


def test_four_bits_are_two_weights_a_byte():
    words, _ = quantize(torch.arange(16.0).repeat(32, 2), 4, 32)
    assert words.shape == (1, 4, 32)
    assert [f"{word & 0xFFFFFFFF:08x}" for word in words[0, :, 7].tolist()] == ["76543210", "fedcba98"] * 2


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
    for shape in SHAPES:
        weight, bias = (torch.randn(shape) / shape[1] ** 0.5).to(dtype), torch.randn(shape[0]).to(dtype)
        layer = layer_of(weight, bias, bits, group, prefix)
        whole = group or -(-shape[1] // 16) * 16
        exact = restore(layer.method.words, layer.method.scales, *shape, whole).double()
        for rows in (1, 3, 8, 40):
            x = torch.randn(rows, shape[1]).to(dtype)
            want = x.double() @ exact.T + bias.double()
            tolerance = 1e-5 if dtype == torch.float32 else 0.01
            torch.testing.assert_close(layer(x).double(), want, rtol=tolerance, atol=4 * tolerance)
        torch.testing.assert_close(layer.weight.double(), exact, rtol=0.004, atol=1e-6)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_row_has_the_same_bits_in_any_company(bits, group):
    layer, x = layer_of(torch.randn(100, 576), None, bits, group), torch.randn(20, 576)
    layer.method.max_rows = 64
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(2, 21):
        assert torch.equal(layer(x[:rows]), alone[:rows])


def test_large_weights_are_written_out_in_pieces(monkeypatch):
    from minivllm.models.linear import quantized

    monkeypatch.setattr(quantized, "AT_ONCE", 64 * 100)
    assert quantized.cut(200, 100) == [(0, 64), (64, 64), (128, 64), (192, 8)]
    layer, x = layer_of(torch.randn(200, 100), None, 8, None), torch.randn(30, 100)
    torch.testing.assert_close(layer(x), x @ layer.weight.T, rtol=1e-4, atol=1e-4)


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
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
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


@pytest.mark.parametrize("kernel", WEIGHT_BITS)
def test_weight_bytes_are_what_the_products_hold(tiny_model_path, kernel):  # noqa: F811
    theirs = hf_model("llama")
    decoder = make_decoder(theirs, "numba_cpu", linear_method=kernel)
    held = 0
    for layer in decoder.layers:
        for linear in (*layer.mixer.linears(), *layer.mlp.linears()):
            rows, columns = linear.weight.shape
            held += rows * columns * WEIGHT_BITS[kernel] / 8
            words, scales = linear.method.words.nbytes, linear.method.scales.nbytes
            assert words + scales <= 2 * rows * columns * WEIGHT_BITS[kernel] / 8  # tiny layers are padded much
    facts = load_model(tiny_model_path("llama"), load_format="dummy").facts(16, "float32", kernel)
    others = 2 * decoder.embedding.numel() * 4 + sum(p.numel() * 4 for n, p in theirs.named_parameters() if "norm" in n)
    assert facts.weight_bytes == pytest.approx(held + others - decoder.embedding.numel() * 3, rel=0.01)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="quantization must be one of 'int8_per_channel_weight_only', 'int4_per_group"):
        EngineArgs(quantization="gptq")
    with pytest.raises(ValueError, match=r'quantization_config\["group_size"\] must be one of 32, 64, 128; got 48'):
        EngineArgs(quantization=QUANTIZATIONS[1], quantization_config={"group_size": 48})
    with pytest.raises(ValueError, match="must be {\"group_size\": n}, got {'size': 32}"):
        EngineArgs(quantization=QUANTIZATIONS[1], quantization_config={"size": 32})
    with pytest.raises(ValueError, match="goes with quantization='int4_per_group_weight_only', not with 'int8"):
        EngineArgs(quantization=QUANTIZATIONS[0], quantization_config={"group_size": 32})
    with pytest.raises(ValueError, match="implemented on the CPU, not on cuda"):
        explain_linear_method("int8", "gemv", torch.bfloat16, torch.device("cuda"), False)
    with pytest.raises(ValueError, match="float32 and bfloat16, not float16"):
        explain_linear_method("int8", "cpu", torch.float16, CPU, False)
    with pytest.raises(ValueError, match="rows that do not depend on the batch"):
        explain_linear_method("int8", "cpu", torch.float32, CPU, True)
    with pytest.raises(ValueError, match="from float32 or bfloat16 on the CPU, not from torch.float16"):
        Linear(32, {"a": 32}, dtype=torch.float16, device=CPU, method="int8")


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
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

    with pytest.raises(ValueError, match="reference, numba_cpu_invariant"):
        LLM(tiny_model_path("qwen3"), quantization=QUANTIZATIONS[0], attention_backend="reference", num_gpu_blocks=40)


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
    assert layer.method.value.q.nbytes == 48 * 64
    with pytest.raises(ValueError, match="quantization='fp8' does not go with an attention backend that is batch-inv"):
        explain_linear_method("fp8", "torch", torch.float32, CPU, True)


def test_the_flag():
    import argparse

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
@pytest.mark.parametrize("quantization", QUANTIZATIONS[:2])
@pytest.mark.parametrize("budget", [8, 512])  # by the kernel for few rows, and by torch
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
