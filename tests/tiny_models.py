"""Tiny models with random weights, as Hugging Face folders: config, safetensors, tokenizer, chat template.

Weights are large enough that greedy choices are clear, and biases and norms are random too, so that a matmul, a bias or
a norm left out shows.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB_SIZE = 264
EOS_TOKEN_ID = 257

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

DROP = object()
"""In the place of a size: the family has no such field."""

TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-rope-llama3": ("llama", {"rope_scaling": {"rope_type": "llama3", **_LLAMA3}}),
    "llama-rope-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-rope-dynamic": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
    ),
    "llama-rope-yarn": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 30.0,
            "bos_token_id": 256,
        },
    ),
}
_MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
TINY_MODELS |= {
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2-moe": ("qwen2_moe", {**_MOE, "num_experts": 8, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 2}),
    "qwen3-moe": ("qwen3_moe", {**_MOE, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 12}),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 8, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64,
            "no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 24, "floor_scale": 16, "attn_scale": 0.3,
        },
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 8, "residual_multiplier": 0.3, "attention_multiplier": 0.2}),
}  # fmt: skip
_PLAIN = {"num_key_value_heads": 6, "head_dim": 12}  # hidden_size / num_attention_heads
_LAYER_NORM = {"head_dim": DROP, "num_key_value_heads": 6, "rms_norm_eps": DROP}
_FALCON = {**_LAYER_NORM, "num_key_value_heads": DROP, "intermediate_size": DROP}
_BARE = {name: DROP for name in _SIZES if name not in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
_WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 1.7}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
_LATENT = {
    "num_key_value_heads": 6,
    "head_dim": DROP,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "routed_scaling_factor": 1.5,
}
_ROTARY = {"partial_rotary_factor": 0.5, "rope_type": "default", "rope_theta": 1e4}
TINY_MODELS |= {
    "gpt-oss": ("gpt_oss", {**_WINDOWS, "num_local_experts": 8, "swiglu_limit": 2.0, "rope_parameters": _YARN}),
    "deepseek-v2": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "num_experts_per_tok": 3, "first_k_dense_replace": 1},
    ),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "mlp_bias": True,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}),
    "ministral": ("ministral", _WINDOWS),
    "olmo2": ("olmo2", {**_PLAIN, "num_key_value_heads": 3}),
    "olmo3": ("olmo3", {**_PLAIN, **_WINDOWS}),
    "gemma2": ("gemma2", {**_WINDOWS, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 9.0}),
    "phi3": ("phi3", {**_PLAIN, "num_key_value_heads": 2, "sliding_window": 24}),
    "phi3-longrope": (
        "phi3",
        {
            **_PLAIN,
            "original_max_position_embeddings": 32,  # fewer than the tests' texts have tokens
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.1] * 6,
                "long_factor": [*range(2, 8)],
            },
        },
    ),
    "granite": ("granite", _GRANITE),
    "glm": ("glm", {"rope_parameters": _ROTARY}),
    "glm4": ("glm4", {"rope_parameters": _ROTARY}),
    "cohere": ("cohere", {**_LAYER_NORM, "logit_scale": 0.7}),
    "cohere2": ("cohere2", {**_LAYER_NORM, **_WINDOWS, "logit_scale": 0.7, "head_dim": 16, "num_key_value_heads": 2}),
    "stablelm": (
        "stablelm",
        {**_LAYER_NORM, "num_key_value_heads": 2, "use_qkv_bias": True, "rope_parameters": _ROTARY},
    ),
    "stablelm-parallel": ("stablelm", {**_LAYER_NORM, "use_parallel_residual": True, "rope_parameters": _ROTARY}),
    "starcoder2": ("starcoder2", {**_LAYER_NORM, "num_key_value_heads": 2}),
    "falcon": ("falcon", {**_FALCON, "bias": True}),
    "falcon-new": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-sequential": ("falcon", {**_FALCON, "parallel_attn": False, "multi_query": False}),
    "gpt2": ("gpt2", {**_BARE, "n_embd": 72, "n_layer": 4, "n_head": 6, "n_positions": 256}),
    "opt": ("opt", {**_FALCON, "ffn_dim": 100, "word_embed_proj_dim": 72}),
    "gpt-neox": (
        "gpt_neox",
        {**_LAYER_NORM, "num_key_value_heads": DROP, "rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.34}},
    ),
    "gpt-neox-sequential": (
        "gpt_neox",
        {**_LAYER_NORM, "num_key_value_heads": DROP, "use_parallel_residual": False, "rope_parameters": _ROTARY},
    ),
}
_HYBRID_MAMBA2 = {"n_heads": 9, "d_head": 16, "d_state": 16, "n_groups": 3, "chunk_size": 16}
_MAMBA2 = {"num_heads": 4, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16}
TINY_MODELS |= {
    "mamba2": ("mamba2", {**_BARE, **_MAMBA2, "hidden_size": 16, "num_hidden_layers": 3}),
    "lfm2": (
        "lfm2",
        {
            "rms_norm_eps": DROP,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_multiple_of": 8,
            "conv_bias": True,
        },
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        {
            **_GRANITE,
            **{f"mamba_{name}": size for name, size in _HYBRID_MAMBA2.items()},
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 8,
            "shared_intermediate_size": 40,
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            **_MOE,
            "num_experts": 8,
            "shared_expert_intermediate_size": 64,
            "linear_key_head_dim": 32,  # fewer: products of a key and a query are near 0, and their head's norm magnifies a rounding
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.25},
        },
    ),
}
TINY_MODELS["qwen3-next-attention"] = (
    "qwen3_next",
    {**TINY_MODELS["qwen3-next"][1], "layer_types": ["full_attention"] * 4},
)
_NARROW = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
TINY_MODELS |= {
    "mamba": ("mamba", {**_BARE, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 8, "use_bias": True}),
    "jamba": (
        "jamba",
        {
            **{name: DROP for name in ("head_dim", "max_position_embeddings")},
            **_NARROW,
            "num_hidden_layers": 3,
            "mamba_d_state": 16,
            "mamba_dt_rank": 16,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
        },
    ),
    "bamba": (
        "bamba",
        {
            "head_dim": DROP,
            **_NARROW,
            **{f"mamba_{name}": size for name, size in {**_HYBRID_MAMBA2, "n_heads": 4, "n_groups": 2}.items()},
            "attn_layer_indices": [1],
        },
    ),
}
STATES = ("mamba2", "lfm2", "granite-hybrid", "qwen3-next", "mamba", "jamba", "bamba")
"""With state-space layers."""
FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3", "gemma3")
"""One of each family, for tests that cannot afford all."""
EXPERTS = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granitemoe", "deepseek-v3")
"""Mixtures of experts. In bfloat16 a rounding may choose another expert, so these are compared in float32."""


_NORMS = (
    "norm.weight",
    "norm_f.weight",
    "ln_1.weight",
    "ln_2.weight",
    "ln_f.weight",
    "ln_attn.weight",
    "ln_mlp.weight",
)


_OFFSET_NORMS = ("Gemma", "Qwen3Next")
"""Families whose norms multiply by 1 + weight."""


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill every parameter: matrices with unit gain or so, norms around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            noise *= (
                1.0
                if any(part in name for part in ("embed", "lm_head", "wte", "wpe"))
                else 1.5 / parameter.shape[-1] ** 0.5
            )
        else:
            noise *= 0.3
            noise += 1.0 if name.endswith(_NORMS) and not type(model).__name__.startswith(_OFFSET_NORMS) else 0.0
        parameter.data.copy_(noise)


def hf_config(name: str) -> Any:
    """The transformers config of a tiny model."""
    from transformers import AutoConfig

    model_type, changes = TINY_MODELS[name]
    sizes = {name: value for name, value in {**_SIZES, **changes}.items() if value is not DROP}
    return AutoConfig.for_model(model_type, **sizes)


@cache
def hf_model(name: str, implementation: str = "eager") -> Any:
    """The transformers model, float32, the same weights every time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config(name), attn_implementation=implementation).eval()
    randomise(model)
    return model


@cache
def checkpoint(model: Any, original_format: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of a transformers model, under the names and in the forms that it saves them in."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_original_format=original_format)
        return load_file(f"{folder}/model.safetensors")


@torch.inference_mode()
def next_logits(model: Any, prompts: list[list[int]], outputs: list[list[int]]) -> list[torch.Tensor]:
    """What transformers has for each token of the outputs: its logits [n, vocabulary] before them.

    One call for all, the texts filled up at their ends, which no token before them sees. If each token of an output is the
    argmax of its row, then the output is what transformers generates greedily.
    """
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(map(len, texts))
    logits = model(torch.tensor([text + [0] * (longest - len(text)) for text in texts]), use_cache=False).logits
    return [rows[len(p) - 1 : len(p) + len(o) - 1] for rows, p, o in zip(logits, prompts, outputs, strict=True)]


def logits_equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Within 1e-4, or 1e-5 of the largest where logits are beyond 10: some fifty roundings of float32."""
    return bool((got - want).abs().max() < 1e-5 * max(10, float(want.abs().max())))


def class_name(name: str) -> str:
    """The class in transformers of a model in `TINY_MODELS`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[TINY_MODELS[name][0]]


def tiny_tokenizer() -> Any:
    """One token a byte, `<s>` 256, `</s>` 257, and ChatML's two marks; with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def save_tiny_model(name: str, folder: Path) -> Path:
    """Write the model of this name into `folder`, in Hugging Face layout; gives the folder back."""
    model = hf_model(name)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a name in `TINY_MODELS` to the folder of that model, written once a session."""
    root = tmp_path_factory.mktemp("tiny_models")

    def path(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else save_tiny_model(name, folder)

    return path


_ENCODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
_MODERN = {
    **_ENCODER,
    "num_hidden_layers": 3,
    "local_attention": 16,
    "global_attn_every_n_layers": 2,
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 256),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 257),
    "pad_token_id": 0,
}
_CAUSAL = {**_SIZES, "num_hidden_layers": 2, "pad_token_id": 0}
_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("bert", {**_ENCODER, "hidden_act": "gelu"}),
    "Roberta": ("roberta", {**_ENCODER, "pad_token_id": 1, "type_vocab_size": 1}),
    "XLMRoberta": ("xlm-roberta", {**_ENCODER, "pad_token_id": 1, "type_vocab_size": 1}),
    "ModernBert": ("modernbert", _MODERN),
}
_SMALL_GPT2 = {"vocab_size": VOCAB_SIZE, "bos_token_id": 256, "eos_token_id": EOS_TOKEN_ID}
_BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", _CAUSAL),
    "Mistral": ("mistral", {**_CAUSAL, "sliding_window": 24}),
    "Qwen2": ("qwen2", _CAUSAL),
    "Qwen3": ("qwen3", _CAUSAL),
    "Gemma2": ("gemma2", {**_CAUSAL, **_WINDOWS, "layer_types": _WINDOWS["layer_types"][:2]}),
    "GPT2": ("gpt2", {**_SMALL_GPT2, "n_embd": 72, "n_layer": 2, "n_head": 6, "n_positions": 256}),
}
POOLING_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{base}{kind}": how
    for table, kinds in ((_ENCODERS, ("Model", "ForMaskedLM")), (_BASES, ("Model",)))
    for base, how in table.items()
    for kind in (*kinds, "ForSequenceClassification", "ForTokenClassification")
}
"""Models that predict no tokens, by their class in transformers."""


@cache
def hf_pooling_model(name: str, **changes: Any) -> Any:
    """The transformers model of this class, float32, the same weights every time. changes: of its config."""
    import transformers

    model_type, sizes = POOLING_MODELS[name]
    config = transformers.AutoConfig.for_model(
        model_type, **{key: value for key, value in {**sizes, "num_labels": 3, **changes}.items() if value is not DROP}
    )
    if "GPT2" in name:
        config.pad_token_id = 0
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
    randomise(model)
    return model


def pair_tokenizer() -> Any:
    """As `tiny_tokenizer`, with marks around a text, `<s> a </s>`, and around two, `<s> a </s> b </s>`, of two token types."""
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    marks = [("<s>", 256), ("</s>", EOS_TOKEN_ID)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s>:0 $A:0 </s>:0 $B:1 </s>:1", special_tokens=marks
    )
    return tokenizer


def save_pooling_model(name: str, folder: Path, **changes: Any) -> Path:
    """As `save_tiny_model`, for a class of `POOLING_MODELS`."""
    hf_pooling_model(name, **changes).save_pretrained(folder)
    pair_tokenizer().save_pretrained(folder)
    return folder
