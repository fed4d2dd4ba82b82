"""Tiny random Hugging Face MoE models, one a router family, for the recorder's tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 61
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENT_ATTENTION = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}

# name -> (model class, config class, what differs from BASE)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {"shared_expert_intermediate_size": 16, "norm_topk_prob": False, "num_experts_per_tok": 3},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_key_value_heads": 4}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {**LATENT_ATTENTION, **GROUPED, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT_ATTENTION, **GROUPED}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**GROUPED, "n_group": 1, "topk_group": 1}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {"rotary_dim": 8}),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 24,
            "num_hidden_layers": 4,
            "attention_chunk_size": 128,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {"num_dense_layers": 1, "layer_types": ["full_attention", "conv", "full_attention"]},
    ),
    "hunyuan": (
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Config",
        {"moe_topk": 2, "num_shared_expert": 1},
    ),
    "longcat": (
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {
            **LATENT_ATTENTION,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 24,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 8,
            "zero_expert_num": 2,
            "moe_topk": 4,
        },
    ),
    "jetmoe": ("JetMoeForCausalLM", "JetMoeConfig", {"kv_channels": 8}),
    "dbrx": (
        "DbrxForCausalLM",
        "DbrxConfig",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 16,
                "moe_num_experts": 8,
                "moe_top_k": 2,
                "hidden_size": 32,
            },
        },
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            "layers_block_type": ["full_attention", "moe", "mamba", "moe"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
        },
    ),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        "AfmoeConfig",
        {"num_dense_layers": 1, "global_attn_every_n_layers": 2},
    ),
    "flex_olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", {"num_key_value_heads": 4}),
}


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny model of one architecture in evaluation mode, every weight random.

    Correction biases are random too, and the routers' weights large, so that ids computed again
    from logits alone would be wrong where the rule is not plain top-k.
    """
    model_class, config_class, differs = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**{**BASE, **differs, **changes})
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, weights in (*model.named_parameters(), *model.named_buffers()):
            if "bias" in path and ("correction" in path or "expert_bias" in path):
                weights.normal_(0, 0.3, generator=generator)
            elif "tid2eid" in path:
                order = torch.rand(weights.shape[0], 8, generator=generator).argsort(dim=1)
                weights.copy_(order[:, : weights.shape[1]])
            elif isinstance(weights, torch.nn.Parameter) and "norm" not in path:
                router = ".gate." in path or ".router." in path
                weights.normal_(0, 0.5 if router else 0.15, generator=generator)
    return model.eval()
