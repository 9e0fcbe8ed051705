"""From Hugging Face configs to specs: defaults, spellings, and refusal of what is not implemented."""

import copy
import json

import pytest
import torch
from tiny_models import TINY_MODELS, checkpoint, hf_config, hf_model
from transformers import AutoConfig

from minivllm.models.families.registry import spec_from_config
from minivllm.models.spec import FAMILIES

MINIMAL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
SMOLLM2 = json.loads(
    """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
    "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": true, "vocab_size": 49152}"""
)


def test_smollm2_as_published():
    spec = spec_from_config(SMOLLM2)
    mixer = spec.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, spec.num_layers) == (9, 3, 64, 30)
    assert spec.tie_word_embeddings and spec.norm_eps == 1e-5 and mixer.rope.theta == 100000
    assert spec.num_parameters() == 134_515_008
    assert spec.max_model_len == 8192


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_config_that_says_little_means_what_transformers_takes_it_to_mean(model_type):
    """Old files leave out what is default; the defaults differ from family to family."""
    little = {"model_type": model_type, **MINIMAL}
    full = AutoConfig.for_model(**little).to_dict()
    assert spec_from_config(little) == spec_from_config(full | {"architectures": None})


@pytest.mark.parametrize("name", TINY_MODELS)
def test_weight_shapes_are_those_of_transformers(name):
    model = hf_model(name)
    spec = spec_from_config(model.config.to_dict())
    theirs = {key: tuple(tensor.shape) for key, tensor in spec.unpacked(checkpoint(model).items())}
    assert spec.weight_shapes() == theirs


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name not in ("gemma3", "olmo3", "gpt2", "opt")])
def test_spec_survives_json_and_the_old_spelling_of_rope(name):
    new = json.loads(hf_config(name).to_json_string(use_diff=False))
    old = copy.deepcopy(new)
    parameters = old.pop("rope_parameters")
    old["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    old["rope_scaling"] = (
        None if parameters["rope_type"] == "default" else {"type": parameters.pop("rope_type"), **parameters}
    )
    assert spec_from_config(old) == spec_from_config(new)


def test_gemma3_in_both_spellings():
    new = hf_config("gemma3").to_dict()
    scaled = {"rope_type": "linear", "factor": 8.0}
    new["rope_parameters"] = {
        "full_attention": {**scaled, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    dropped = ("rope_parameters", "layer_types", "_sliding_window_pattern")
    old = {name: value for name, value in new.items() if name not in dropped}
    old |= {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaled, "sliding_window_pattern": 2}
    spec = spec_from_config(new)
    assert spec_from_config(old) == spec
    assert [(layer.mixer.rope.kind, layer.mixer.rope.theta) for layer in spec.layers[:2]] == [
        ("default", 2e4),
        ("linear", 5e5),
    ]
    with pytest.raises(ValueError, match="use_bidirectional_attention=True"):
        spec_from_config(new | {"use_bidirectional_attention": True})


def test_layers_with_and_without_a_window():
    def windows(config):
        return [
            layer.mixer.sliding_window
            for layer in spec_from_config({**MINIMAL, "num_hidden_layers": 4, **config}).layers
        ]

    qwen = {"model_type": "qwen2", "sliding_window": 100, "max_window_layers": 3}
    assert windows(qwen) == [None] * 4
    assert windows(qwen | {"use_sliding_window": True}) == [None, None, None, 100]
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows(qwen | {"use_sliding_window": True, "layer_types": types}) == [100, None, None, 100]
    assert windows({"model_type": "mistral", "sliding_window": 100}) == [100] * 4
    assert windows({"model_type": "mistral", "sliding_window": None}) == [None] * 4
    assert windows({"model_type": "mistral"}) == [4096] * 4


def test_what_the_cache_and_the_backend_are_told():
    spec = spec_from_config(hf_config("qwen2-window").to_dict())
    kinds = [(s.kind, s.window, s.block_size, s.dtype_bytes) for s in spec.kv_cache_specs(16, 2)]
    assert kinds == [("full", None, 16, 2)] * 2 + [("sliding_window", 24, 16, 2)] * 2
    attention = spec.attention_specs(16, torch.bfloat16)
    assert [s.sliding_window for s in attention] == [None, None, 24, 24]
    assert attention[0].scale == 0.25 and attention[0].group_size == 3 and attention[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "bert", "architectures": ["BertModel"]},
            "'BertModel' is not .* architectures: LlamaForCausalLM, Mistral",
        ),
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*awq"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        ({"hidden_act": "mish"}, "activation 'mish' is not supported; supported: silu"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_key_value_heads": 5}, "32 query heads cannot share 5"),
        ({"num_hidden_layers": 0}, "num_layers must be .* at least 1, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be .* got 'many'"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "1 layer_types for 30",
        ),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 30}, "'chunked_attention' is not supported"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 30}, "there is no sliding_window"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias=True"),
    ],
)
def test_refusals_name_field_and_value(change, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config({"model_type": "llama", **MINIMAL, **change})


def test_an_unknown_field_that_is_off_is_no_obstacle_and_none_overrides():
    plain = spec_from_config({"model_type": "llama", **MINIMAL})
    off = {"num_experts": 0, "alibi": False, "quantization_config": None, "extra": {}}
    assert spec_from_config({"model_type": "llama", **MINIMAL, **off}) == plain


def test_architectures_outrank_model_type():
    assert (
        spec_from_config({"model_type": "llama", "architectures": ["Qwen3ForCausalLM"], **MINIMAL})
        .layers[0]
        .mixer.qk_norm
    )
    assert set(FAMILIES) >= {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
