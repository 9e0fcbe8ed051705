"""Quantized checkpoints of a tiny Llama, written by the published layouts, and the float64 weights that they stand for.

Packing is done here number by number, in numpy, with nothing of the package.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from minivllm.attention.select import make_backend
from minivllm.models.decoder import Decoder
from minivllm.models.loading import load_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
PROMPTS = {"a": [5, 100, 200, 7, 9, 31, 64, 250, 12, 13, 77], "b": [1, 2], "c": list(range(40, 60))}


@cache
def small_model() -> Any:
    """A Llama of two layers, in transformers."""
    from tiny_models import randomise
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, vocab_size=264, num_hidden_layers=2, max_position_embeddings=256)
    model = LlamaForCausalLM(config).eval()
    randomise(model)
    return model


def linears() -> dict[str, np.ndarray]:
    """The weights of the layers' matmuls, by the name of the module."""
    state = small_model().state_dict()
    found = {name.removesuffix(".weight"): w for name, w in state.items() if "proj.weight" in name}
    return {name: weight.double().numpy() for name, weight in found.items()}


def round_groups(w: np.ndarray, group: int, bits: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole numbers from 0, scales in float16 and zero points of each group of inputs."""
    each = w.reshape(w.shape[0], -1, group)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scale = (np.abs(each).max(-1) / (middle - 1)).astype(np.float16)
        zero = np.full(scale.shape, middle)
    else:
        low, high = np.minimum(each.min(-1), 0), np.maximum(each.max(-1), 0)
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.rint(-low / scale), 1, top).astype(int)
    q = np.clip(np.rint(each / scale[..., None].astype(float)) + zero[..., None], 0, top).astype(int)
    return q.reshape(w.shape), scale, zero


def value_of(q: np.ndarray, scale: np.ndarray, zero: np.ndarray, group: np.ndarray) -> np.ndarray:
    """float64 weights. group: of each input."""
    return (q - zero[:, group]) * scale.astype(float)[:, group]


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows of numbers as int32, the first number of a word in its lowest bits; or number `order[i]` at place i."""
    count = 32 // bits
    rows, columns = numbers.shape
    out = np.zeros((rows, -(-columns // count)), np.uint32)
    for column in range(columns):
        place = column % count if order is None else order.index(column % count)
        out[:, column // count] |= (numbers[:, column] << bits * place).astype(np.uint32)
    return torch.from_numpy(out.view(np.int32))


def half(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).half()


Written = tuple[dict[str, torch.Tensor], np.ndarray]
"""The tensors of a module by the ends of their names, and its weight in float64."""


def gptq(w: np.ndarray, bits: int, group: int, symmetric: bool, act_order: bool, version: int) -> Written:
    group = w.shape[1] if group == -1 else group
    place = np.arange(w.shape[1]) // group
    if act_order:
        place = place[np.random.default_rng(len(w)).permutation(len(place))]
    gathered = np.argsort(place, kind="stable")
    q, scale, zero = round_groups(w[:, gathered], group, bits, symmetric)
    q = q[:, np.argsort(gathered)]
    tensors = {
        ".qweight": words(q, bits).T.contiguous(),
        ".qzeros": words(zero.T - (version == 1), bits),
        ".scales": half(scale.T),
        ".g_idx": torch.from_numpy(place.astype(np.int32)),
    }
    return tensors, value_of(q, scale, zero, place)


def awq(w: np.ndarray, group: int) -> Written:
    q, scale, zero = round_groups(w, group, 4, False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {".qweight": words(q.T, 4, order), ".qzeros": words(zero.T, 4, order), ".scales": half(scale.T)}
    return tensors, value_of(q, scale, zero, np.arange(w.shape[1]) // group)


def packed(w: np.ndarray, bits: int, group: int, symmetric: bool) -> Written:
    group = w.shape[1] if group == -1 else group
    q, scale, zero = round_groups(w, group, bits, symmetric)
    tensors = {
        ".weight_packed": words(q, bits),
        ".weight_scale": half(scale),
        ".weight_shape": torch.tensor(w.shape),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = words(zero.T, bits).T.contiguous()
    return tensors, value_of(q, scale, zero, np.arange(w.shape[1]) // group)


def eight(w: np.ndarray, dtype: torch.dtype, per: str, static: bool = False, name: str = ".weight_scale") -> Written:
    """A byte each. per: channel, tensor, or block (32 outputs by 32 inputs)."""
    limit = 127 if dtype == torch.int8 else 448
    if per == "block":
        scale = np.abs(w.reshape(w.shape[0] // 32, 32, -1, 32)).max((1, 3)) / limit
        whole = scale.repeat(32, 0).repeat(32, 1)
    else:
        scale = np.abs(w).max(1, keepdims=True) / limit
        scale = scale if per == "channel" else scale.max(keepdims=True)[0]
        whole = np.broadcast_to(scale, w.shape)
    scale = torch.from_numpy(scale).float()
    whole = torch.from_numpy(np.ascontiguousarray(whole)).float()
    q = torch.from_numpy(w).float() / whole
    q = q.round().to(dtype) if dtype == torch.int8 else q.to(dtype)
    tensors = {".weight": q, name: scale} | ({".input_scale": torch.tensor([0.05])} if static else {})
    return tensors, (q.double() * whole.double()).numpy()


FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def float4(w: np.ndarray, nv: bool) -> Written:
    each = w.reshape(w.shape[0], -1, 16 if nv else 32)
    largest = np.abs(each).max(-1)
    if nv:
        above = np.array([448 * 6 / largest.max()], np.float32)
        stored = torch.from_numpy(largest / 6 * above).to(torch.float8_e4m3fn)
        scale = (stored.float() / torch.from_numpy(above)).double().numpy()
        more = {".weight_global_scale": torch.from_numpy(above)}
    else:
        exponent = np.floor(np.log2(largest)).astype(int) - 2
        stored, scale, more = torch.from_numpy((exponent + 127).astype(np.uint8)), 2.0**exponent, {}
    q = np.abs((each / scale[..., None])[..., None] - FLOAT4).argmin(-1)
    pairs = q.reshape(w.shape[0], -1, 2)
    tensors = {".weight_packed": torch.from_numpy((pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8))}
    return tensors | {".weight_scale": stored} | more, (FLOAT4[q] * scale[..., None]).reshape(w.shape)


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def nf4(w: np.ndarray) -> Written:
    """Blocks of 64 of the weight laid flat, the first number of a byte in its high bits."""
    each, codes = w.reshape(-1, 64), np.array(NF4)
    absmax = np.abs(each).max(1).astype(np.float32)
    q = np.abs((each / absmax[:, None])[..., None] - codes).argmin(-1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w.shape)}
    pairs = q.reshape(-1, 2)
    tensors = {
        ".weight": torch.from_numpy((pairs[:, 0] << 4 | pairs[:, 1]).astype(np.uint8))[:, None],
        ".weight.absmax": torch.from_numpy(absmax),
        ".weight.quant_map": torch.tensor(NF4),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, (codes[q] * absmax[:, None]).reshape(w.shape)


def llm_int8(w: np.ndarray) -> Written:
    largest = np.abs(w).max(1).astype(np.float32)
    q = np.rint(w / largest[:, None] * 127).astype(np.int8)
    tensors = {".weight": torch.from_numpy(q), ".SCB": torch.from_numpy(largest)}
    return tensors | {".weight_format": torch.tensor(0, dtype=torch.uint8)}, q * (largest[:, None].astype(float) / 127)


def _group(format: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None} | weights
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": scheme}}


def _activations(type: str, dynamic: bool, strategy: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": type, "symmetric": True, "dynamic": dynamic, "strategy": strategy}


INT4 = {"num_bits": 4}
FP8, INT8 = torch.float8_e4m3fn, torch.int8
FLOAT = {"type": "float"}
BLOCK = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
TOKEN = {kind: _activations(kind, True, "token") for kind in ("int", "float")}

CASES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], Written], str]] = {
    "gptq": (GPTQ4, lambda w: gptq(w, 4, 32, True, False, 1), "none"),
    "gptq act-order": (GPTQ4 | {"sym": False, "desc_act": True}, lambda w: gptq(w, 4, 32, False, True, 1), "none"),
    "gptq 8 bits": (GPTQ4 | {"bits": 8, "desc_act": True}, lambda w: gptq(w, 8, 32, True, True, 1), "none"),
    "gptq_v2 8 bits": (
        GPTQ4 | {"bits": 8, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, 8, -1, False, False, 2),
        "none",
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        lambda w: awq(w, 32),
        "none",
    ),
    "packed": (_group("pack-quantized", INT4), lambda w: packed(w, 4, -1, True), "none"),
    "packed with zero points": (
        _group("pack-quantized", INT4 | {"symmetric": False, "strategy": "group", "group_size": 32}),
        lambda w: packed(w, 4, 32, False),
        "none",
    ),
    "packed 8 bits": (
        _group("pack-quantized", {"strategy": "group", "group_size": 64}),
        lambda w: packed(w, 8, 64, True),
        "none",
    ),
    "int8": (_group("int-quantized", {}), lambda w: eight(w, INT8, "channel"), "none"),
    "W8A8": (_group("int-quantized", {}, TOKEN["int"]), lambda w: eight(w, INT8, "channel"), "token"),
    "fp8 per channel": (_group("float-quantized", FLOAT, TOKEN["float"]), lambda w: eight(w, FP8, "channel"), "token"),
    "fp8 static": (
        _group("float-quantized", FLOAT | {"strategy": "tensor"}, _activations("float", False, "tensor")),
        lambda w: eight(w, FP8, "tensor", True),
        "static",
    ),
    "fp8 blocks": (
        _group(
            "float-quantized",
            FLOAT | {"strategy": "block", "block_structure": [32, 32]},
            _activations("float", True, "group"),
        ),
        lambda w: eight(w, FP8, "block"),
        "group",
    ),
    "nvfp4": (
        _group("nvfp4-pack-quantized", FLOAT | INT4 | {"strategy": "tensor_group"}),
        lambda w: float4(w, True),
        "none",
    ),
    "mxfp4": (_group("mxfp4-pack-quantized", FLOAT | INT4 | {"strategy": "group"}), lambda w: float4(w, False), "none"),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4, "none"),
    "int8 of bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, "none"),
    "fp8 of DeepSeek": (BLOCK, lambda w: eight(w, FP8, "block", name=".weight_scale_inv"), "group"),
}
"""For each format its `quantization_config`, its writer, and how its activations are rounded."""


def write_checkpoint(folder: Path, case: str) -> dict[str, np.ndarray]:
    """A folder in a format; gives the float64 weights that it stands for."""
    config, write, _ = CASES[case]
    state = {name: t.clone() for name, t in small_model().state_dict().items() if name.endswith(".weight")}
    exact = {}
    for module, weight in linears().items():
        tensors, exact[module] = write(weight)
        del state[f"{module}.weight"]
        state |= {module + kind: tensor.contiguous() for kind, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    described = small_model().config.to_dict() | {"quantization_config": config, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(described))
    return exact


@cache
def gpt_oss() -> Any:
    """A GPT-OSS of one layer and four experts, in transformers."""
    from tiny_models import randomise
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = SIZES | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    more = {"vocab_size": 264, "max_position_embeddings": 256, "layer_types": ["full_attention"], "pad_token_id": None}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **more, rope_parameters=rope, attn_implementation="eager")).eval()
    randomise(model)
    return model


def write_gpt_oss(folder: Path) -> dict[str, torch.Tensor]:
    """A folder with MXFP4 experts; gives the logits of transformers in float32, which holds such weights exactly."""
    import copy

    exact, state = copy.deepcopy(gpt_oss()), {n: t.clone() for n, t in gpt_oss().state_dict().items()}
    for name, parameter in exact.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            whole = parameter.detach().transpose(1, 2)
            tensors, dense = float4(whole.double().flatten(0, 1).numpy(), False)
            parameter.data = torch.from_numpy(dense).float().view(whole.shape).transpose(1, 2).contiguous()
            del state[name]
            state[f"{name}_blocks"] = tensors[".weight_packed"].view(*whole.shape[:2], -1, 16)
            state[f"{name}_scales"] = tensors[".weight_scale"].view(*whole.shape[:2], -1)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    described = gpt_oss().config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(described))
    with torch.inference_mode():
        return {name: exact(torch.tensor([tokens])).logits[0].double() for name, tokens in PROMPTS.items()}


def decoder_of(folder: Path, backend: str = "sdpa", dtype: torch.dtype = torch.float32, **overrides: Any) -> Decoder:
    """Our decoder with the weights of a folder or file."""
    loaded = load_model(folder, **overrides)
    decoder = Decoder(loaded.spec, make_backend(backend), dtype, torch.device("cpu"))
    decoder.load_weights(loaded.weights(str(dtype).removeprefix("torch.")))
    return decoder


def round_like(x: torch.Tensor, how: str, dtype: torch.dtype) -> torch.Tensor:
    """Activations [..., inputs] rounded to a byte, in float64."""
    limit = 127 if dtype == torch.int8 else 448
    each = x.unflatten(-1, (-1, 32)) if how == "group" else x
    scale = 0.05 if how == "static" else (each.abs().amax(-1, keepdim=True) / limit).clamp(min=1e-12)
    scaled = (each / scale).clamp(-limit, limit)
    rounded = scaled.round() if dtype == torch.int8 else scaled.float().to(dtype).double()
    return (rounded * scale).reshape(x.shape)


@torch.inference_mode()
def exact_logits(case: str, exact: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """transformers in float64 with these weights, and with activations rounded as the format says."""
    import copy

    model, how = copy.deepcopy(small_model()).double(), CASES[case][2]
    dtype = INT8 if case == "W8A8" else FP8
    for name, weight in exact.items():
        linear = model.get_submodule(name)
        linear.weight.copy_(torch.from_numpy(weight))
        if how != "none":
            linear.register_forward_pre_hook(lambda _, args: (round_like(args[0], how, dtype),))
    return {name: model(torch.tensor([tokens])).logits[0] for name, tokens in PROMPTS.items()}
