"""What the config.json files of published models say: all fields but names and versions of tools."""

from typing import Any

_SLIDING = ["sliding_attention", "full_attention"]
_AUTO_MAP = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}


def _config(model_type: str, architecture: str, sizes: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    """sizes: of the vocabulary, hidden states and MLP; layers, query heads and, if the file says them, key-value heads."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    common = {"architectures": [architecture], "model_type": model_type, "initializer_range": 0.02, "use_cache": True}
    return common | dict(zip((*names, "num_key_value_heads"), sizes, strict=False)) | fields


def _yarn(factor: float, **fields: Any) -> dict[str, Any]:
    return {"beta_fast": 32, "beta_slow": 1, "factor": factor, "original_max_position_embeddings": 4096} | fields


PUBLISHED: dict[str, dict[str, Any]] = {
    "openai/gpt-oss-20b": _config(
        "gpt_oss", "GptOssForCausalLM", (201088, 2880, 2880, 24, 64, 8), attention_bias=True, attention_dropout=0.0,
        eos_token_id=200002, experts_per_token=4, head_dim=64, hidden_act="silu", initial_context_length=4096,
        layer_types=_SLIDING * 12, max_position_embeddings=131072, num_experts_per_tok=4, num_local_experts=32,
        output_router_logits=False, pad_token_id=199999, rms_norm_eps=1e-05, rope_theta=150000,
        rope_scaling=_yarn(32.0, rope_type="yarn", truncate=False), router_aux_loss_coef=0.9, sliding_window=128,
        swiglu_limit=7.0, tie_word_embeddings=False,
    ),
    "facebook/opt-125m": {
        "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2,
        "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
        "model_type": "opt", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "prefix": "</s>",
        "torch_dtype": "float16", "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim": 768,
    },
    "HuggingFaceTB/SmolLM3-3B": _config(
        "smollm3", "SmolLM3ForCausalLM", (128256, 2048, 11008, 36, 16, 4), attention_bias=False, attention_dropout=0.0,
        bos_token_id=128000, eos_token_id=128012, hidden_act="silu", layer_types=["full_attention"] * 36,
        max_position_embeddings=65536, max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9, pad_token_id=128004, pretraining_tp=2, rms_norm_eps=1e-06, rope_scaling=None,
        rope_theta=5000000.0, sliding_window=None, use_sliding_window=False, torch_dtype="bfloat16",
    ),
    "CohereForAI/c4ai-command-r-v01": _config(
        "cohere", "CohereForCausalLM", (256000, 8192, 22528, 40, 64, 64), attention_bias=False, attention_dropout=0.0,
        bos_token_id=5, eos_token_id=255001, hidden_act="silu", layer_norm_eps=1e-05, logit_scale=0.0625,
        max_position_embeddings=8192, model_max_length=131072, pad_token_id=0, rope_theta=8000000.0,
        torch_dtype="float16",
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": _config(
        "cohere2", "Cohere2ForCausalLM", (256000, 4096, 14336, 32, 32, 8), attention_bias=False, attention_dropout=0.0,
        bos_token_id=5, eos_token_id=255001, head_dim=128, hidden_act="silu", layer_norm_eps=1e-05, layer_switch=4,
        logit_scale=0.25, max_position_embeddings=132096, order_of_interleaved_layers="local_attn_first",
        pad_token_id=0, position_embedding_type="rope_gptj", rope_scaling=None, rope_theta=50000, rotary_pct=1.0,
        sliding_window=4096, sliding_window_pattern=4, use_embedding_sharing=True, use_gated_activation=True,
        use_parallel_block=True, use_parallel_embedding=True, torch_dtype="bfloat16",
    ),
    "bigcode/starcoder2-15b": _config(
        "starcoder2", "Starcoder2ForCausalLM", (49152, 6144, 24576, 40, 48, 4), attention_dropout=0.0, bos_token_id=0,
        eos_token_id=0, hidden_act="gelu_pytorch_tanh", max_position_embeddings=16384, mlp_type="default",
        norm_epsilon=1e-05, norm_type="layer_norm", rms_norm_eps=1e-05, rope_theta=100000, sliding_window=4096,
        tie_word_embeddings=False, torch_dtype="float32", use_bias=True,
    ),
    "tiiuae/falcon-7b": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "auto_map": _AUTO_MAP, "bias": False, "bos_token_id": 11, "eos_token_id": 11,
        "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
        "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 65024,
    },
    "tiiuae/falcon-40b": {
        "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0, "auto_map": _AUTO_MAP, "bias": False, "bos_token_id": 11, "eos_token_id": 11,
        "hidden_dropout": 0.0, "hidden_size": 8192, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
        "model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_attention_heads": 128,
        "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True, "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": 65024,
    },
    "microsoft/Phi-3-mini-4k-instruct": _config(
        "phi3", "Phi3ForCausalLM", (32064, 3072, 8192, 32, 32, 32), attention_bias=False, attention_dropout=0.0,
        auto_map=_AUTO_MAP, bos_token_id=1, embd_pdrop=0.0, eos_token_id=32000, hidden_act="silu",
        max_position_embeddings=4096, original_max_position_embeddings=4096, pad_token_id=32000, resid_pdrop=0.0,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0, sliding_window=2047, tie_word_embeddings=False,
        torch_dtype="bfloat16",
    ),
    "deepseek-ai/DeepSeek-V2-Lite": _config(
        "deepseek_v2", "DeepseekV2ForCausalLM", (102400, 2048, 10944, 27, 16, 16), attention_bias=False,
        attention_dropout=0.0, auto_map=_AUTO_MAP, aux_loss_alpha=0.001, bos_token_id=100000, eos_token_id=100001,
        first_k_dense_replace=1, hidden_act="silu", kv_lora_rank=512, max_position_embeddings=163840,
        moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2,
        norm_topk_prob=False, num_experts_per_tok=6, pretraining_tp=1, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, rms_norm_eps=1e-06, rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax",
        rope_scaling=_yarn(40, mscale=0.707, mscale_all_dim=0.707, type="yarn"), seq_aux=True,
        tie_word_embeddings=False, topk_group=1, topk_method="greedy", torch_dtype="bfloat16", v_head_dim=128,
    ),
    "deepseek-ai/DeepSeek-V3": _config(
        "deepseek_v3", "DeepseekV3ForCausalLM", (129280, 7168, 18432, 61, 128, 128), attention_bias=False,
        attention_dropout=0.0, auto_map=_AUTO_MAP, aux_loss_alpha=0.001, bos_token_id=0, eos_token_id=1, ep_size=1,
        first_k_dense_replace=3, hidden_act="silu", kv_lora_rank=512, max_position_embeddings=163840,
        moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1, pretraining_tp=1, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-06, rope_theta=10000, routed_scaling_factor=2.5,
        rope_scaling=_yarn(40, mscale=1.0, mscale_all_dim=1.0, type="yarn"), scoring_func="sigmoid", seq_aux=True,
        tie_word_embeddings=False, topk_group=4, topk_method="noaux_tc", torch_dtype="bfloat16", v_head_dim=128,
    ),
    "mistralai/Mixtral-8x7B-v0.1": _config(
        "mixtral", "MixtralForCausalLM", (32000, 4096, 14336, 32, 32, 8), attention_dropout=0.0, bos_token_id=1,
        eos_token_id=2, hidden_act="silu", max_position_embeddings=32768, num_experts_per_tok=2, num_local_experts=8,
        output_router_logits=False, rms_norm_eps=1e-05, rope_theta=1000000.0, router_aux_loss_coef=0.02,
        sliding_window=None, tie_word_embeddings=False, torch_dtype="bfloat16",
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": _config(
        "qwen2_moe", "Qwen2MoeForCausalLM", (151936, 2048, 5632, 24, 16, 16), attention_dropout=0.0,
        bos_token_id=151643, decoder_sparse_step=1, eos_token_id=151643, hidden_act="silu",
        max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408, norm_topk_prob=False,
        num_experts=60, num_experts_per_tok=4, output_router_logits=False, rms_norm_eps=1e-06, rope_theta=1000000.0,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632, sliding_window=32768,
        tie_word_embeddings=False, torch_dtype="bfloat16", use_sliding_window=False,
    ),
    "Qwen/Qwen3-30B-A3B": _config(
        "qwen3_moe", "Qwen3MoeForCausalLM", (151936, 2048, 6144, 48, 32, 4), attention_bias=False,
        attention_dropout=0.0, bos_token_id=151643, decoder_sparse_step=1, eos_token_id=151645, head_dim=128,
        hidden_act="silu", max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[],
        moe_intermediate_size=768, norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        output_router_logits=False, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000.0,
        router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, torch_dtype="bfloat16",
        use_sliding_window=False,
    ),
    "EleutherAI/gpt-neox-20b": _config(
        "gpt_neox", "GPTNeoXForCausalLM", (50432, 6144, 24576, 44, 64), attention_probs_dropout_prob=0, bos_token_id=0,
        eos_token_id=0, hidden_act="gelu_fast", hidden_dropout_prob=0, layer_norm_eps=1e-05,
        max_position_embeddings=2048, rotary_emb_base=10000, rotary_pct=0.25, tie_word_embeddings=False,
        torch_dtype="float16",
    ),
    "stabilityai/stablelm-2-1_6b": _config(
        "stablelm", "StableLmForCausalLM", (100352, 2048, 5632, 24, 32, 32), bos_token_id=100257, eos_token_id=100257,
        hidden_act="silu", layer_norm_eps=1e-05, max_position_embeddings=4096, partial_rotary_factor=0.25,
        rope_theta=10000, tie_word_embeddings=False, torch_dtype="float16", use_qkv_bias=True,
    ),
}  # fmt: skip
