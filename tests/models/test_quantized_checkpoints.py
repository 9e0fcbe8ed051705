"""Quantized checkpoints of every format: logits against float64, memory, damaged files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from paged import PagedDecoder
from quantized_checkpoints import CASES, PROMPTS, decoder_of, exact_logits, linears, write_checkpoint, write_gpt_oss
from safetensors.torch import load_file, save_file
from thread_ranks import on_ranks

from minivllm.attention.select import make_backend
from minivllm.core.config import EngineArgs
from minivllm.lora.adapter import LoRAWeights
from minivllm.lora.linear import LoRAModel
from minivllm.models.decoder import Decoder
from minivllm.models.linear.grouped import RepackedWeight, StoredLinear
from minivllm.models.linear.scaled import ScaledWeight
from minivllm.models.loading import CheckpointError, load_model
from minivllm.models.quantization import formats
from minivllm.models.quantization.codes import BitsAndBytes
from minivllm.models.quantization.compressed import CompressedTensors
from minivllm.models.quantization.formats import AWQ, GPTQ, Parts
from minivllm.runtime.executor import plan_engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from a case to its folder and its float64 weights, written once."""
    root, written = tmp_path_factory.mktemp("quantized"), {}

    def get(case):
        if case not in written:
            written[case] = write_checkpoint(root / case.replace(" ", "-"), case)
        return root / case.replace(" ", "-"), written[case]

    return get


BY_GATHER = ("gptq act-order", "gptq 8 bits", "nvfp4")  # inputs in another order; groups of 16 in 4 bits
BACKENDS = [(case, "sdpa") for case in CASES] + [(case, "numba_cpu") for case in BY_GATHER]
"""With torch, and the odd ones with the kernels of a CPU as well, which round activations."""


def logits_of(decoder):
    """Three prompts of different lengths in one batch, in two steps."""
    paged = PagedDecoder(decoder)
    for name, tokens in PROMPTS.items():
        paged.add(name, tokens)
    first = paged.step({name: len(tokens) - 1 for name, tokens in PROMPTS.items()})
    last = paged.step(dict.fromkeys(PROMPTS, 1))
    return {name: torch.cat((first[name], last[name])).double() for name in PROMPTS}


@pytest.mark.parametrize("case", ["gptq", "fp8 per channel"])
def test_a_scale_that_is_no_number_is_found_before_weights_change(folders, case):
    folder, _ = folders(case)
    decoder, weights = decoder_of(folder), dict(load_model(folder).weights("float32"))
    decoder.check_weights(weights.items())
    name, weight = next((n, w) for n, w in weights.items() if not isinstance(w, torch.Tensor))
    weight.scale[-1, -1] = torch.nan
    with pytest.raises(ValueError, match=f"tensor '{name}' has values that are no finite numbers"):
        decoder.check_weights(weights.items())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_float64_with_the_weights_that_the_file_stands_for(folders, case):
    folder, exact = folders(case)
    decoder, want = decoder_of(folder), exact_logits(case, exact)
    for layer in (*decoder.linears(), decoder.layers[0].mlp.down):
        assert isinstance(layer.method, StoredLinear)
        assert layer.method.weights == {}
    down = torch.from_numpy(exact["model.layers.0.mlp.down_proj"])
    torch.testing.assert_close(decoder.layers[0].mlp.down.weight.double(), down, rtol=1e-6, atol=1e-7)
    got = logits_of(decoder)
    if CASES[case][2] == "none":
        for name in PROMPTS:
            torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-3)
        return
    # a number half way between two may be rounded up here and down there: by one step of a byte, now and then
    error = torch.cat([(got[name] - want[name]).flatten() for name in PROMPTS])
    plain = torch.cat([(got[name] - logits_of_whole(folder)[name]).flatten() for name in PROMPTS])
    assert error.abs().median() < 0.02 * plain.abs().median()
    assert error.square().mean() < 0.1 * plain.square().mean()


def logits_of_whole(folder):
    """The same with activations that are not rounded."""
    decoder = decoder_of(folder)
    for linear in decoder.linears():
        values = linear.method.values
        assert all(isinstance(value, ScaledWeight) and value.activations != "none" for value in values)
        linear.use("torch")
    return logits_of(decoder)


@pytest.mark.parametrize(
    ("case", "backend"),
    [("gptq act-order", "reference"), ("fp8 per channel", "reference")] + [(case, "numba_cpu") for case in BY_GATHER],
)
def test_quantized_weights_go_with_other_backends(folders, case, backend):
    folder, _ = folders(case)
    got, plain = logits_of(decoder_of(folder, backend)), logits_of(decoder_of(folder))
    for name in PROMPTS:
        error = (got[name] - plain[name]).norm() / plain[name].norm()
        assert error < (0.06 if backend == "numba_cpu" else 1e-4)  # the CPU's kernel rounds activations


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_captured_since_kernels_compute_all_of_it(folders, case):
    decoder = decoder_of(folders(case)[0], "numba_cpu")
    logits_of(decoder)
    assert decoder.captured.problem is None and decoder.captured.refused == {}
    values = [value for linear in decoder.linears() for value in linear.method.values]
    assert all(isinstance(value, RepackedWeight) for value in values)


def test_bfloat16_differs_by_its_own_rounding(folders):
    folder, exact = folders("gptq")
    got, want = logits_of(decoder_of(folder, dtype=torch.bfloat16)), exact_logits("gptq", exact)
    for name in PROMPTS:
        assert (got[name] - want[name]).norm() < 0.03 * want[name].norm()


def test_a_quantized_model_takes_the_memory_of_its_file(folders):
    folder, _ = folders("packed with zero points")
    decoder = decoder_of(folder)
    values = [value for linear in decoder.linears() for value in linear.method.values]
    weights = sum(value.shape.numel() for value in values)
    assert sum(value.q.nbytes for value in values) == weights // 2
    facts = load_model(folder).facts(16, "float32")
    files = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert facts.weight_bytes == files


def test_the_plan_says_what_is_quantized_and_refuses_to_do_it_twice(folders):
    folder, _ = folders("awq")
    plan = plan_engine(EngineArgs(model=str(folder), device="cpu", dtype="float32"))
    assert "what the checkpoint quantized (awq) is multiplied as it is" in plan.machine.linear_kernel_why
    with pytest.raises(ValueError, match=r"the checkpoint is quantized already \(awq\): leave out quantization"):
        plan_engine(EngineArgs(model=str(folder), device="cpu", quantization="int8_per_channel_weight_only"))


def test_a_plugin_may_add_a_format(folders, tmp_path, monkeypatch):
    """Under a `quant_method` that no module of the package knows."""
    monkeypatch.setattr(formats, "FORMATS", dict(formats.FORMATS))
    folder = shutil.copytree(folders("awq")[0], tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "mine"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quant_method='mine' is not implemented; implemented: gptq, awq"):
        decoder_of(folder)
    formats.register_format("mine")(formats.AWQ)
    got, want = logits_of(decoder_of(folder)), logits_of(decoder_of(folders("awq")[0]))
    assert all(torch.equal(got[name], want[name]) for name in PROMPTS)


def adapted(decoder):
    """Logits of a prompt under an adapter of every linear layer."""
    torch.manual_seed(3)
    lora, tokens = LoRAModel(decoder, max_loras=1, max_rank=8, max_rows=64), PROMPTS["c"]
    for linear in decoder.linears():
        sizes = linear.parts.items()
        pairs = {n: LoRAWeights(torch.randn(8, linear.in_features) / 8, torch.randn(m, 8) / 8) for n, m in sizes}
        linear.method.set_slot(0, pairs)
    lora.batch.set(np.zeros(len(tokens), np.int64))
    paged = PagedDecoder(decoder)
    paged.add("c", tokens)
    return paged.step({"c": len(tokens)})["c"]


@pytest.mark.parametrize(("case", "backend"), BACKENDS)
def test_adapters_are_added_to_a_quantized_model(folders, case, backend):
    folder, _ = folders(case)
    whole, stored = decoder_of(folder), decoder_of(folder, backend)
    plain = logits_of(stored)["c"]
    for linear in whole.linears():
        linear.use("torch")
    got, want = adapted(stored), adapted(whole)
    assert all(isinstance(linear.method.innermost, StoredLinear) for linear in stored.linears())
    if CASES[case][2] == "none" and backend == "sdpa":
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert (got - want).norm() < 0.2 * (want - plain).norm()  # activations that are rounded, and no more


@pytest.mark.parametrize(("case", "backend"), BACKENDS)
def test_two_ranks_give_what_one_gives(folders, case, backend):
    folder, _ = folders(case)
    want, shapes = logits_of(decoder_of(folder)), []

    def run(group):
        loaded = load_model(folder)
        decoder = Decoder(loaded.spec, make_backend(backend), torch.float32, torch.device("cpu"), group=group)
        decoder.load_weights(loaded.weights("float32"))
        values = [value for linear in decoder.linears() for value in linear.method.values]
        assert all(isinstance(value, RepackedWeight) == (backend == "numba_cpu") for value in values)
        shapes.append([tuple(value.shape) for value in values])
        return logits_of(decoder)

    for got in on_ranks(2, run):
        for name in PROMPTS:
            if CASES[case][2] in ("none", "static") and backend == "sdpa":
                torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-3)
            # the scale of a token is of the inputs that a rank has
            assert (got[name] - want[name]).norm() < 0.1 * want[name].norm()
    assert shapes[0] == shapes[1] and sum(a * b for a, b in shapes[0]) == sum(w.size for w in linears().values()) // 2


def test_a_quantized_weight_that_ranks_would_have_to_pad_is_refused_by_name(folders):
    folder, _ = folders(next(iter(CASES)))
    loaded = load_model(folder)

    def run(group):
        decoder = Decoder(loaded.spec, make_backend("sdpa"), torch.float32, torch.device("cpu"), group=group)
        with pytest.raises(ValueError, match=r"'model.layers.0.mlp.down_proj.weight': ") as caught:
            decoder.load_weights(loaded.weights("float32"))
        return str(caught.value)

    first, _, last = on_ranks(3, run)  # 128 inputs: 43, 43 and 42
    assert "cannot be cut at input 0, or 43 later" in first
    assert "128 inputs of a quantized mlp.down_proj cannot be split among 3 ranks equally" in last


def test_the_experts_of_gpt_oss_stay_four_bits(tmp_path):
    want = write_gpt_oss(tmp_path)
    decoder = decoder_of(tmp_path)
    for expert in decoder.layers[0].mlp.experts:
        assert [value.bits for linear in expert.linears() for value in linear.method.values] == [4, 4]
    got = logits_of(decoder)
    for name in PROMPTS:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=2e-3)


def test_damaged_experts_are_refused_by_the_name_of_the_tensor(tmp_path):
    write_gpt_oss(tmp_path)
    state, prefix = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.experts.down_proj"
    for change, message in (
        ({f"{prefix}_scales": None}, f"tensor '{prefix}_scales' is missing"),
        (
            {f"{prefix}_blocks": state[f"{prefix}_blocks"][..., :8].contiguous()},
            f"'{prefix}_blocks' must have shape .experts",
        ),
        (
            {f"{prefix}_scales": state[f"{prefix}_scales"][:, 1:].contiguous()},
            f"'{prefix}_scales' must have shape .4, 64, 2",
        ),
    ):
        save_file({n: t for n, t in (state | change).items() if t is not None}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            decoder_of(tmp_path)


LIBRARY = load_file(Path(__file__).parent / "bitsandbytes_0_50.safetensors")
"""Weights that bitsandbytes 0.50.2 wrote, each with `=exact`, what it made of them again."""


@pytest.mark.parametrize("name", ["nf4", "nf4-nested", "fp4", "int8"])
def test_weights_that_bitsandbytes_wrote(name):
    own = {key.removeprefix(f"bitsandbytes-{name}"): tensor for key, tensor in LIBRARY.items()}
    parts = Parts("X", {kind: tensor for kind, tensor in own.items() if kind.startswith(".")})
    weight = BitsAndBytes({}).decode(parts)[".weight"]
    assert torch.equal(weight.dequantize().half(), own["=exact"].half())


PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
BYTE = PACKED | {"num_bits": 8, "strategy": "channel", "group_size": None}
FLOAT = {"type": "float"}
COMPRESSED = {  # as they were given to the library
    "packed": ("pack-quantized", PACKED),
    "packed-asym": ("pack-quantized", PACKED | {"symmetric": False}),
    "packed-8": ("pack-quantized", BYTE),
    "int8": ("int-quantized", BYTE),
    "fp8-channel": ("float-quantized", BYTE | FLOAT),
    "fp8-tensor": ("float-quantized", BYTE | FLOAT | {"strategy": "tensor"}),
    "fp8-block": ("float-quantized", BYTE | FLOAT | {"strategy": "block", "block_structure": [16, 32]}),
    "mxfp4": ("mxfp4-pack-quantized", PACKED | FLOAT),
    "nvfp4": ("nvfp4-pack-quantized", PACKED | FLOAT | {"strategy": "tensor_group", "group_size": 16}),
}
COMPRESSORS = load_file(Path(__file__).parent / "compressed_tensors_0_17.safetensors")
"""Random weights that compressed-tensors 0.17.0 compressed, each with `=exact`, what it made of them again, in bfloat16."""


@pytest.mark.parametrize("name", COMPRESSED)
def test_weights_that_compressed_tensors_wrote(name):
    kind, weights = COMPRESSED[name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    tensors = {key.removeprefix(name): t for key, t in COMPRESSORS.items() if key.startswith(f"{name}.")}
    found = CompressedTensors({"format": kind, "config_groups": {"group_0": group}}).decode(Parts("X", tensors))
    assert torch.equal(found[".weight"].dequantize().bfloat16(), COMPRESSORS[f"{name}=exact"])


GPTQMODEL = load_file(Path(__file__).parent / "gptqmodel_7_6.safetensors")
"""Random weights that gptqmodel 7.6.0 packed, each with `=exact`, what its own layer makes of them, in float16."""
PACKERS = {
    "gptq": GPTQ({"bits": 4, "group_size": 32}),
    "gptq-act-order": GPTQ({"bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq"}),
    "gptq-8": GPTQ({"bits": 8, "group_size": 32, "desc_act": True}),
    "gptq_v2": GPTQ({"bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}),
    "awq": AWQ({"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
}


@pytest.mark.parametrize("name", PACKERS)
def test_weights_that_gptqmodel_wrote(name):
    tensors = {key.removeprefix(name): t for key, t in GPTQMODEL.items() if key.startswith(f"{name}.")}
    weight = PACKERS[name].decode(Parts("X", tensors))[".weight"].dequantize()
    assert torch.equal(weight.half(), GPTQMODEL[f"{name}=exact"])


PREFIX = "model.layers.1.mlp.down_proj"
DAMAGE = {
    "missing zeros of packed weights": (
        "packed with zero points",
        lambda t: t.pop(".weight_zero_point"),
        "tensor 'X.weight_zero_point' is missing",
    ),
    "missing scale of 8 packed bits": ("packed 8 bits", lambda t: t.pop(".weight_scale"), "'X.weight_scale' is missing"),
    "missing scale of W8A8": ("W8A8", lambda t: t.pop(".weight_scale"), "tensor 'X.weight_scale' is missing"),
    "missing scale of DeepSeek": ("fp8 of DeepSeek", lambda t: t.pop(".weight_scale_inv"), "'X.weight_scale_inv' is missing"),
    "missing exponents": ("mxfp4", lambda t: t.pop(".weight_scale"), "tensor 'X.weight_scale' is missing"),
    "short scales of awq": (
        "awq",
        lambda t: t.update({".scales": t[".scales"][1:].contiguous()}),
        r"'X.scales' must have shape \(4, 64\), it has \(3, 64\)",
    ),
    "zeros of another version": (
        "gptq_v2 8 bits",
        lambda t: t.update({".qzeros": t[".qzeros"][:, ::2].contiguous()}),
        r"'X.qzeros' must have shape \(1, 16\), it has \(1, 8\)",
    ),
    "missing scales": ("gptq", lambda t: t.pop(".scales"), r"tensor 'X.scales' is missing: X has .g_idx, .qweight, .qz"),
    "missing zeros": ("awq", lambda t: t.pop(".qzeros"), "tensor 'X.qzeros' is missing"),
    "missing shape": ("packed", lambda t: t.pop(".weight_shape"), "tensor 'X.weight_shape' is missing"),
    "missing scale of fp8": ("fp8 per channel", lambda t: t.pop(".weight_scale"), "tensor 'X.weight_scale' is missing"),
    "missing input scale": ("fp8 static", lambda t: t.pop(".input_scale"), "tensor 'X.input_scale' is missing"),
    "missing global scale": ("nvfp4", lambda t: t.pop(".weight_global_scale"), "'X.weight_global_scale' is missing"),
    "short zeros": (
        "gptq",
        lambda t: t.update({".qzeros": t[".qzeros"][:, 1:].contiguous()}),
        r"'X.qzeros' must have shape \(4, 8\), it has \(4, 7\)",
    ),
    "short scales": (
        "fp8 blocks",
        lambda t: t.update({".weight_scale": t[".weight_scale"][1:].contiguous()}),
        r"'X.weight_scale' must have shape \(2, 4\), it has \(1, 4\)",
    ),
    "wrong type": (
        "packed",
        lambda t: t.update({".weight_packed": t[".weight_packed"].long()}),
        "'X.weight_packed' must be int32, it is int64",
    ),
    "missing map": ("nf4", lambda t: t.pop(".weight.quant_map"), "tensor 'X.weight.quant_map' is missing"),
    "missing state": (
        "nf4",
        lambda t: t.pop(".weight.quant_state.bitsandbytes__nf4"),
        "tensor 'X.weight.quant_state.bitsandbytes__nf4' is missing",
    ),
    "a state that is no JSON": (
        "nf4",
        lambda t: t[".weight.quant_state.bitsandbytes__nf4"].fill_(0),
        "'X.weight.quant_state.bitsandbytes__nf4' is not the description of a weight",
    ),
    "short absmax": (
        "nf4",
        lambda t: t.update({".weight.absmax": t[".weight.absmax"][1:].clone()}),
        "'X.weight.absmax' must have 128 numbers, it has 127",
    ),
    "missing scale of int8": ("int8 of bitsandbytes", lambda t: t.pop(".SCB"), "tensor 'X.SCB' is missing"),
    "another order": (
        "int8 of bitsandbytes",
        lambda t: t[".weight_format"].fill_(1),
        "'X.weight_format' must be 0, rows one after the other",
    ),
    "wrong groups": (
        "gptq act-order",
        lambda t: t[".g_idx"].zero_(),
        "'X.g_idx' must name each of 4 groups 32 times",
    ),
    "a group that is not there": ("gptq", lambda t: t[".g_idx"].fill_(9), "'X.g_idx' must name each of 4 groups"),
    "wrong width": (
        "gptq",
        lambda t: t.update({".qweight": t[".qweight"][:8].contiguous()}),
        r"tensor 'X.scales' must have shape \(2, 64\), it has \(4, 64\)",
    ),
    "wrong width of whole rows": (
        "packed",
        lambda t: t.update({".weight_packed": t[".weight_packed"][:, :8].contiguous(), ".weight_shape": torch.tensor([64, 64])}),
        r"tensor 'X.weight' must have shape \(64, 128\), got \(64, 64\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(folders, tmp_path, damage):
    case, change, message = DAMAGE[damage]
    folder, _ = folders(case)
    state = load_file(folder / "model.safetensors")
    own = {name.removeprefix(PREFIX): state.pop(name) for name in list(state) if name.startswith(PREFIX)}
    change(own)
    save_file(state | {PREFIX + kind: tensor for kind, tensor in own.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=message.replace("X", PREFIX)):
        decoder_of(tmp_path)


SETTINGS = [
    ("gptq", {"quant_method": "quip"}, "quant_method='quip' is not implemented; implemented: gptq, awq, compressed"),
    ("gptq", {"bits": 3}, "bits=3 is not implemented; implemented: 4, 8"),
    ("gptq", {"group_size": 48}, "tensor 'model.*' cannot be read: a group size of 48 does not divide (64|128) inputs"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not implemented; implemented: 'gptq'"),
    ("awq", {"version": "gemv"}, "version='gemv' is not implemented"),
    ("awq", {"zero_point": False}, "zero_point=False is not implemented"),
    ("packed", {"format": "marlin-24"}, "format='marlin-24' is not implemented"),
    ("packed", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme=.* is not implemented"),
    ("packed", {"config_groups": {}}, "config_groups must name at least one group"),
    ("fp8 of DeepSeek", {"fmt": "e5m2"}, "fmt='e5m2' is not implemented"),
    ("fp8 of DeepSeek", {"weight_block_size": [128]}, r"weight_block_size=\[128\]"),
]


@pytest.mark.parametrize(("case", "change", "message"), SETTINGS)
def test_a_setting_that_is_not_implemented_is_named(folders, case, change, message):
    overrides = {"quantization_config": CASES[case][0] | change}
    with pytest.raises(CheckpointError, match=message):
        decoder_of(folders(case)[0], hf_overrides=overrides)


def test_modules_that_no_group_names_and_dummy_weights_are_refused(folders):
    config = json.loads(json.dumps(CASES["packed"][0]))
    config["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*", "gate_proj"]
    with pytest.raises(
        CheckpointError, match="no group of config_groups has 'model.layers.*_proj', which is quantized"
    ):
        decoder_of(folders("packed")[0], hf_overrides={"quantization_config": config})
    with pytest.raises(CheckpointError, match="dummy weights of a quantized model are not implemented"):
        load_model(folders("packed")[0], load_format="dummy")
    with pytest.raises(CheckpointError, match="quantization_config must be a JSON object"):
        load_model(folders("packed")[0], hf_overrides={"quantization_config": [1]})
