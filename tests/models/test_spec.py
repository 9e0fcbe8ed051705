"""From Hugging Face configs to specs: defaults, spellings, and refusal of what is not implemented."""

import copy
import dataclasses
import json

import pytest
import torch
from published_configs import PUBLISHED
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
MODEL_TYPES = tuple(dict.fromkeys(model_type for model_type, _ in TINY_MODELS.values()))
OWN_NAMES = {
    "gpt2": {"n_embd": 256, "n_layer": 30, "n_head": 32, "n_positions": 2048, "vocab_size": 1000},
    "falcon": {name: value for name, value in MINIMAL.items() if name != "intermediate_size"},
    "opt": {name: value for name, value in MINIMAL.items() if name != "intermediate_size"}
    | {"word_embed_proj_dim": 256},
    "mamba": {"hidden_size": 256, "vocab_size": 1000},
    "mamba2": {"hidden_size": 256, "num_heads": 8, "vocab_size": 1000},
    "granitemoehybrid": MINIMAL | {"mamba_n_heads": 8},
    "deepseek_v2": MINIMAL | {"num_experts_per_tok": 6},
}
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
    little = {"model_type": model_type, **OWN_NAMES.get(model_type, MINIMAL)}
    full = AutoConfig.for_model(**little).to_dict()
    assert spec_from_config(little) == spec_from_config(full | {"architectures": None})


def test_every_causal_family_is_among_them():
    """Encoders are in tests/engine/test_encoders.py, models that read pictures in tests/multimodal/test_models.py."""
    causal = {name for name in FAMILIES if name.endswith(("ForCausalLM", "LMHeadModel"))}
    little = [{"model_type": model_type, **OWN_NAMES.get(model_type, MINIMAL)} for model_type in MODEL_TYPES]
    assert {spec_from_config(config).family for config in little} == causal


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_as_transformers_reads_them(name):
    config = copy.deepcopy(PUBLISHED[name])
    spec = spec_from_config(config)
    assert config == PUBLISHED[name] and spec_from_config(AutoConfig.for_model(**config).to_dict()) == spec


def test_lengths_of_published_models():
    lengths = {name: spec_from_config(config).max_model_len for name, config in PUBLISHED.items()}
    assert lengths["tiiuae/falcon-7b"] == 2048 and lengths["openai/gpt-oss-20b"] == 32 * 4096
    assert lengths["CohereForAI/c4ai-command-r-v01"] == 131072


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bigcode/starcoder2-15b", {"mlp_type": "gated"}, "mlp_type='gated' is not supported"),
        ("bigcode/starcoder2-15b", {"norm_type": "rms_norm"}, "norm_type='rms_norm' is not supported"),
        ("facebook/opt-125m", {"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001 is not supported"),
        ("openai/gpt-oss-20b", {"experts_per_token": 2}, "experts_per_token=2 is not supported; supported: 4"),
        ("mistralai/Mixtral-8x7B-v0.1", {"num_experts": 4}, "num_experts=4 is not supported; supported: 8"),
        ("Qwen/Qwen3-30B-A3B", {"n_routed_experts": 4}, "n_routed_experts=4 is not supported; supported: 128"),
        ("microsoft/Phi-3-mini-4k-instruct", {"rope_scaling": {"type": "longrope"}}, "rope type 'longrope'"),
        ("facebook/opt-125m", {"do_layer_norm_before": False}, "do_layer_norm_before=False is not supported"),
    ],
)
def test_a_change_of_a_published_model_that_matters_is_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config(PUBLISHED[name] | change)


def test_a_number_of_experts_is_read_from_the_familys_own_field():
    mixtral = {"model_type": "mixtral", **MINIMAL, "num_local_experts": 4}
    assert spec_from_config(mixtral).layers[0].mlp.num_experts == 4
    assert spec_from_config(mixtral | {"num_experts": 4}) == spec_from_config(mixtral)
    assert (
        spec_from_config({"model_type": "qwen3_moe", **MINIMAL, "num_local_experts": 16}).layers[0].mlp.num_experts
        == 16
    )


def test_a_null_rotated_part_is_the_familys():
    part = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": None}
    plain = spec_from_config({"model_type": "glm", **MINIMAL})
    assert spec_from_config({"model_type": "glm", **MINIMAL, "partial_rotary_factor": None}) == plain
    assert spec_from_config({"model_type": "glm", **MINIMAL, "rope_parameters": part}) == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel": True, "residual_scale": 0.5}, "parallel and have a residual_scale"),
        ({"parallel": True, "mlp_post_norm": "x"}, "parallel and have a residual_scale or post norms"),
        ({"mixer_post_norm": "x", "residual_scale": 0.5}, "residual_scale=0.5 and post norms"),
        ({"mlp_post_norm": "x", "residual_scale": 0.5}, "residual_scale=0.5 and post norms"),
    ],
)
def test_fields_of_a_layer_that_exclude_each_other(fields, message):
    layer = spec_from_config({"model_type": "llama", **MINIMAL}).layers[0]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(layer, **fields)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_weight_shapes_are_those_of_transformers(name):
    model = hf_model(name)
    spec = spec_from_config(model.config.to_dict())
    theirs = {key: tuple(tensor.shape) for key, tensor in spec.unpacked(checkpoint(model).items())}
    assert spec.weight_shapes() == theirs


@pytest.mark.parametrize("name", TINY_MODELS)
def test_spec_survives_json(name):
    config = hf_config(name)
    assert spec_from_config(json.loads(config.to_json_string(use_diff=False))) == spec_from_config(config.to_dict())


@pytest.mark.parametrize(
    "name", [name for name in TINY_MODELS if name not in ("gpt2", "opt", "mamba2", "mamba", "jamba")]
)
def test_spec_survives_the_old_spelling_of_rope(name):
    new = hf_config(name).to_dict()
    old = copy.deepcopy(new)
    parameters = old.pop("rope_parameters")
    local = parameters.get("sliding_attention", parameters)
    parameters = parameters.get("full_attention", parameters)  # one for each kind of layer
    if (theta := local["rope_theta"]) != parameters["rope_theta"]:
        old["rope_local_base_freq"] = theta
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
            {"model_type": "t5", "architectures": ["T5EncoderModel"]},
            "'T5EncoderModel' is not .* architectures: LlamaForCausalLM, Mistral",
        ),
        ({"model_type": "t5"}, "model_type 't5' is not supported"),
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
