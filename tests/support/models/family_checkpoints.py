"""Random checkpoints of odd shapes for each model family, made with the family's own classes in `transformers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.support.models.checkpoints import make_other_family, save_tokenizer

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "wide_heads": {
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "hidden_size": 36, "vocab_size": 321,
        "intermediate_size": 44, "num_hidden_layers": 3, "tie_word_embeddings": False,
    },
    "one_kv_head_tied": {
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24, "hidden_size": 40, "vocab_size": 203,
        "tie_word_embeddings": True, "max_shard_size": "30KB",
    },
    "many_kv_heads": {
        "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 5,
    },
}  # fmt: skip
"""Head sizes, numbers of heads and layers, vocabularies, tied embeddings, shards; fields of the configuration in `transformers`."""

_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [2.0, 2.1, 2.2, 2.3, 3.5, 4.7, 5.0, 6.5],
}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 5}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
_SMALL_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1, "n_shared_experts": 2,
}  # fmt: skip
_ALL_SPARSE: dict[str, Any] = {name: value for name, value in _SMALL_EXPERTS.items() if name != "first_k_dense_replace"}
_NUMBERED_EXPERTS: dict[str, Any] = {
    "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 20, "moe_num_shared_experts": 2,
}  # fmt: skip
_ZERO_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 4, "expert_ffn_hidden_size": 20, "routed_scaling_factor": 3.0,
}  # fmt: skip
_YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0,
    "mscale_all_dim": 0.8, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_MIMO: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 16, "sliding_window": 19,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "mlp_layer_types": None,
}  # fmt: skip
_CHUNKED: dict[str, Any] = {
    "no_rope_layer_interval": 3,
    "intermediate_size_mlp": 72,
    "floor_scale": 7,
    "attn_scale": 0.5,
}
_GEMMA4: dict[str, Any] = {
    "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 16, "mamba_n_groups": 1, "mamba_d_state": 12, "mamba_expand": 2, "mamba_chunk_size": 16}
_NEMOTRON = {
    "mamba_num_heads": 16, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28, "time_step_min": 1e-30,
}  # fmt: skip
"""transformers raises the steps of a prompt to `time_step_min`, and those of single tokens not; with this it raises none."""
_KIMI = {
    "num_experts": 8, "num_experts_per_token": 3, "moe_intermediate_size": 20, "num_shared_experts": 2, "linear_num_heads": 4,
    "linear_head_dim": 8,
}  # fmt: skip
_PURE_MAMBA = {"state_size": 12, "expand": 2, "layer_norm_epsilon": 1e-5}
_FOUR_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
_DELTA_SHAPE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_DELTA = {**_DELTA_SHAPE, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 12}
_DELTA_ROPE = {
    "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}  # fmt: skip
OPTIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "deepseek_v2": [
        {**_LATENT, **_SMALL_EXPERTS, "topk_method": "greedy"},
        {
            **_LATENT,
            **_SMALL_EXPERTS,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "rope_parameters": _YARN,
        },
        {
            **_LATENT,
            **_SMALL_EXPERTS,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "mlp_bias": True,
            "attention_bias": True,
        },
    ],
    "deepseek_v3": [
        {**_LATENT, **_SMALL_EXPERTS, "n_group": 4, "topk_group": 2},
        {
            **_LATENT,
            **_SMALL_EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
        },
        {
            **_LATENT,
            **_SMALL_EXPERTS,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": _YARN,
            "rope_interleave": False,
            "attention_bias": True,
            "kv_lora_rank": 33,
            "qk_nope_head_dim": 7,
        },
    ],
    "mimo_v2_flash": [
        {**_MIMO, "layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4},
        {
            **_MIMO,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "attention_bias": True,
            "attention_value_scale": None,
            "n_group": 2,
            "routed_scaling_factor": 1.3,
        },
    ],
    "minicpm3": [
        {**_LATENT, "scale_emb": 3, "dim_model_base": 32},
        {
            **_LATENT,
            "q_lora_rank": None,
            "v_head_dim": None,
            "scale_depth": None,
            "dim_model_base": None,
            "attention_bias": True,
        },
    ],
    "minimax_m2": [
        {**_EXPERTS, "rotary_dim": 8},
        {
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
        {"num_local_experts": 3, "num_experts_per_tok": 3},
    ],
    "glm4_moe": [
        {**_SMALL_EXPERTS, "use_qk_norm": True},
        {**_SMALL_EXPERTS, "n_group": 4, "topk_group": 2, "attention_bias": True, "routed_scaling_factor": 2.5},
        {
            **_SMALL_EXPERTS,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        },
    ],
    "glm4_moe_lite": [
        {**_LATENT, **_SMALL_EXPERTS},
        {
            **_LATENT,
            **_SMALL_EXPERTS,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "routed_scaling_factor": 2.5,
        },
        {**_LATENT, **_SMALL_EXPERTS, "n_group": 2, "topk_group": 1, "rope_interleave": False, "attention_bias": True},
    ],
    "longcat_flash": [
        {**_LATENT, **_ZERO_EXPERTS},
        {
            **_LATENT,
            **_ZERO_EXPERTS,
            "zero_expert_num": 0,
            "moe_topk": 2,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
        },
        {**_LATENT, **_ZERO_EXPERTS, "n_routed_experts": 2, "zero_expert_num": 9, "rope_parameters": _YARN},
    ],
    "lfm2": [
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_hidden_layers": 4,
            "block_auto_adjust_ff_dim": False,
        },
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "num_hidden_layers": 3,
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_multiple_of": 8,
        },
    ],
    "granitemoehybrid": [
        {
            **_MAMBA,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "head_dim": None,
        },
        {
            **_MAMBA,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "mamba_n_heads": 12,
            "mamba_n_groups": 3,
            "mamba_d_conv": 2,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "hidden_size": 48,
            "head_dim": None,
        },
    ],
    "bamba": [
        {**_MAMBA, **_FOUR_HEADS, "attn_layer_indices": [2], "num_hidden_layers": 4},
        {
            **_MAMBA,
            **_FOUR_HEADS,
            "attn_layer_indices": [0, 3],
            "num_hidden_layers": 4,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ],
    "kimi_linear": [
        {
            **_LATENT,
            **_KIMI,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 4,
        },
        {
            **_LATENT,
            **_KIMI,
            "q_lora_rank": None,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "linear_num_heads": 6,
            "linear_head_dim": 10,
            "linear_conv_kernel_dim": 2,
            "num_expert_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.3,
        },
        {
            **_LATENT,
            **_KIMI,
            "q_lora_rank": None,
            "linear_num_heads": 3,
            "moe_renormalize": False,
            "num_hidden_layers": 5,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ],
    "nemotron_h": [
        {
            **_NEMOTRON,
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "linear_attention",
                "mlp",
                "linear_attention",
                "moe",
            ],
            "moe_latent_size": 24,
            "routed_scaling_factor": 1.5,
        },
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "linear_attention", "moe", "full_attention", "moe"],
            "mamba_num_heads": 12,
            "n_groups": 3,
            "conv_kernel": 2,
            "use_conv_bias": False,
            "use_bias": True,
            "mlp_bias": True,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
        {**_NEMOTRON, "layers_block_type": ["full_attention", "mlp", "linear_attention", "full_attention"]},
        {
            **_NEMOTRON,
            "layers_block_type": ["full_attention", "moe", "linear_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 4,
            "n_groups": 4,
            "moe_latent_size": 16,
            "mlp_bias": True,
        },
    ],
    "falcon_h1": [
        {
            **_MAMBA,
            "mamba_d_ssm": 96,
            "embedding_multiplier": 5.7,
            "lm_head_multiplier": 0.3,
            "key_multiplier": 0.4,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.35, 0.25, 0.6, 0.5, 0.7],
            "mlp_multipliers": [0.9, 0.6],
        },
        {
            **_MAMBA,
            "mamba_n_heads": 12,
            "mamba_n_groups": 3,
            "mamba_d_ssm": 48,
            "mamba_d_conv": 2,
            "mamba_rms_norm": True,
            "mamba_proj_bias": True,
            "projectors_bias": False,
            "attention_bias": True,
            "attention_in_multiplier": 1.3,
            "ssm_in_multiplier": 0.8,
        },
        {
            **_MAMBA,
            "mamba_n_heads": 8,
            "mamba_d_ssm": 32,
            "mamba_conv_bias": False,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
            "mlp_bias": True,
            "mlp_multipliers": [1.2, 1.0],
        },
    ],
    "mamba2": [
        {**_PURE_MAMBA, "hidden_size": 64, "num_heads": 16, "head_dim": 8, "n_groups": 2},
        {
            **_PURE_MAMBA,
            "hidden_size": 48,
            "num_heads": 6,
            "head_dim": 16,
            "n_groups": 1,
            "conv_kernel": 2,
            "use_conv_bias": False,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        {
            **_PURE_MAMBA,
            "hidden_size": 40,
            "num_heads": 24,
            "head_dim": 5,
            "expand": 3,
            "n_groups": 3,
            "vocab_size": 203,
            "num_hidden_layers": 5,
            "max_shard_size": "30KB",
        },
    ],
    "mamba": [
        {**_PURE_MAMBA, "hidden_size": 64},
        {**_PURE_MAMBA, "conv_kernel": 2, "use_conv_bias": False, "use_bias": True, "tie_word_embeddings": True},
        {**_PURE_MAMBA, "hidden_size": 40, "expand": 3, "time_step_rank": 7, "num_hidden_layers": 5},
    ],
    "falcon_mamba": [
        {**_PURE_MAMBA, "hidden_size": 64, "mixer_rms_eps": 1e-4},
        {**_PURE_MAMBA, "conv_kernel": 3, "use_bias": True, "time_step_rank": 5, "tie_word_embeddings": False},
    ],
    "jamba": [
        {
            "mamba_d_state": 12,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
        {
            "mamba_d_state": 7,
            "mamba_d_conv": 2,
            "mamba_dt_rank": 5,
            "mamba_expand": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "expert_layer_period": 3,
            "expert_layer_offset": 2,
            "num_experts": 3,
            "num_experts_per_tok": 3,
        },
        {
            "mamba_d_state": 9,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "num_experts": 1,
            "num_experts_per_tok": 1,
        },
    ],
    "qwen3_5_text": [
        {**_DELTA_SHAPE, "num_hidden_layers": 4, "rope_parameters": _DELTA_ROPE, "head_dim": 16},
        {
            **_DELTA_SHAPE,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "rope_parameters": {**_DELTA_ROPE, "mrope_section": [1, 1, 1]},
        },
        {
            **_DELTA_SHAPE,
            "head_dim": 32,
            "linear_num_key_heads": 1,
            "linear_value_head_dim": 6,
            "attention_bias": True,
            "rope_parameters": {**_DELTA_ROPE, "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5},
        },
    ],
    "qwen3_5_moe_text": [
        {
            **_DELTA,
            "num_hidden_layers": 4,
            "rope_parameters": _DELTA_ROPE,
            "head_dim": 16,
            "num_experts": 7,
            "num_experts_per_tok": 2,
        },
        {
            **_DELTA,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 32,
            "linear_num_key_heads": 1,
            "rope_parameters": {**_DELTA_ROPE, "mrope_section": [2, 1, 1]},
            "num_experts": 4,
            "num_experts_per_tok": 4,
        },
    ],
    "qwen3_next": [
        {
            **_DELTA,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
        },
        {
            **_DELTA,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
        {
            **_DELTA,
            "head_dim": 32,
            "num_hidden_layers": 5,
            "linear_num_key_heads": 1,
            "linear_value_head_dim": 6,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "num_experts": 5,
            "num_experts_per_tok": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ],
    "qwen2_moe": [
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
        },
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 2,
        },
        {
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 12,
            "mlp_only_layers": [1],
            "qkv_bias": False,
        },
    ],
    "ernie4_5_moe": [
        {**_NUMBERED_EXPERTS, "tie_word_embeddings": False},
        {**_NUMBERED_EXPERTS, "moe_layer_interval": 2, "moe_num_shared_experts": 0, "moe_layer_start_index": 0},
        {**_NUMBERED_EXPERTS, "moe_layer_end_index": 2, "moe_num_shared_experts": 1, "moe_k": 1},
    ],
    "dots1": [
        {**_SMALL_EXPERTS, "sliding_window": None},
        {
            **_SMALL_EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "sliding_window": 11,
            "max_window_layers": 1,
        },
        {**_SMALL_EXPERTS, "attention_bias": True, "routed_scaling_factor": 2.5, "sliding_window": 600},
    ],
    "axk1": [
        {**_LATENT, **_SMALL_EXPERTS, "n_group": 4, "topk_group": 2},
        {
            **_LATENT,
            **_SMALL_EXPERTS,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_hidden_layers": 3,
            "norm_topk_prob": False,
            "rope_parameters": _YARN,
        },
    ],
    "youtu": [
        {**_LATENT, "tie_word_embeddings": False},
        {**_LATENT, "q_lora_rank": None, "attention_bias": True, "rope_interleave": False, "rope_parameters": _YARN},
    ],
    "solar_open": [
        _ALL_SPARSE,
        {**_ALL_SPARSE, "n_group": 4, "topk_group": 2, "attention_bias": True, "norm_topk_prob": False},
    ],
    "olmoe": [
        {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": None},
        {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True, "head_dim": None},
    ],
    "llama": [{}, {"attention_bias": True, "mlp_bias": True}],
    "mistral": [{"sliding_window": None}, {"sliding_window": 19}],
    "mixtral": [
        _EXPERTS,
        {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 21},
        {"num_local_experts": 16, "num_experts_per_tok": 1},
    ],
    "qwen2": [{}, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}],
    "qwen3": [{}, {"attention_bias": True}],
    "qwen3_moe": [{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}],
    "granite": [
        {"embedding_multiplier": 12, "attention_multiplier": 0.0625, "residual_multiplier": 0.22, "logits_scaling": 8},
        {"embedding_multiplier": 1.7, "attention_multiplier": 0.2, "residual_multiplier": 1.3, "attention_bias": True},
        {"residual_multiplier": 0.5, "mlp_bias": True},
    ],
    "llama4_text": [
        {**_CHUNKED, "attention_chunk_size": 13, "num_local_experts": 5, "num_experts_per_tok": 1, "use_qk_norm": True},
        {
            **_CHUNKED,
            "attention_chunk_size": 9,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "interleave_moe_layer_step": 2,
            "attention_bias": True,
        },
        {
            **_CHUNKED,
            "attention_chunk_size": 24,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "moe_layers": [0, 2],
            "no_rope_layers": [0, 1, 1, 0, 1],
            "num_hidden_layers": 5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            **_CHUNKED,
            "attention_chunk_size": 5,
            "num_local_experts": 4,
            "attn_temperature_tuning": False,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 1, 0],
            "num_hidden_layers": 3,
        },
    ],
    "smollm3": [
        {},
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 17},
        {"no_rope_layers": [0, 1, 1, 0, 1], "attention_bias": True, "mlp_bias": True},
    ],
    "seed_oss": [{}, {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}],
    "gemma2": [
        {"sliding_window": 13, "query_pre_attn_scalar": 20},
        {"sliding_window": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 7.0, "attention_bias": True},
        {"sliding_window": 30, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ],
    "gemma3_text": [
        {
            "sliding_window": 13,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 25.0,
        },
        {"sliding_window": 9, "layer_types": _MIXED, "attention_bias": True},
        {
            "sliding_window": 30,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ],
    "gemma4_text": [
        {
            **_GEMMA4,
            "sliding_window": 13,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
        },
        {
            **_GEMMA4,
            "sliding_window": 9,
            "layer_types": [*_MIXED[:2], "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "global_head_dim": 20,
            "final_logit_softcapping": 7.0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 18,
        },
        {
            **_GEMMA4,
            "sliding_window": 30,
            "global_head_dim": 48,
            "attention_k_eq_v": True,
            "attention_bias": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 20,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "factor": 8.0,
                    "rope_theta": 5000.0,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        {
            **_GEMMA4,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "global_head_dim": 40,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 330,
        },
    ],
    "glm4": [
        {},
        {"attention_bias": False, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}},
    ],
    "olmo2": [{}, {"attention_bias": True}],
    "phi3": [
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 256},
        {},
        {"sliding_window": 15, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ],
    "gpt_oss": [
        {**_EXPERTS, "sliding_window": 13},
        {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 6, "swiglu_limit": 2.0},
        {
            "num_local_experts": 9,
            "num_experts_per_tok": 4,
            "sliding_window": 30,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ],
    "ministral": [
        {"sliding_window": 23},
        {"sliding_window": 11, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"sliding_window": 1},
    ],
}
"""Family (`model_type`) -> fields of its own, tried in turn with the shapes. The first combination is the family's plain case."""


WHOLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma4": (
        "gemma4_text",
        {
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
                "num_key_value_heads": 2, "position_embedding_size": 16,
            },
            "audio_config": None,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
                "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24, "patch_size": 14,
            },
        },
    ),
}  # fmt: skip
"""Models with other parts that are not computed -> their language model, and fields of their configuration."""


def cases(family: str) -> list[dict[str, Any]]:
    """Fields of the configuration: each shape and each option at least once; of a model with other parts, of its language model."""
    family, _ = WHOLES.get(family, (family, None))
    options, shapes = OPTIONS[family], list(SHAPES.values())
    longer, shorter = (shapes, options) if len(shapes) >= len(options) else (options, shapes)
    return [_completed({**one, **other}) for one, other in zip(longer, cycle(shorter), strict=False)]


def _completed(fields: dict[str, Any]) -> dict[str, Any]:
    """Of latent attention there are keys for every head, and configurations call the rotated part a head.

    head_dim None: heads have all of the hidden size, which some families need.
    """
    if fields.get("head_dim", 0) is None:
        return fields | {"head_dim": fields.get("hidden_size", 64) // fields.get("num_attention_heads", 4)}
    if "qk_rope_head_dim" not in fields:
        return fields
    return fields | {
        "num_key_value_heads": fields.get("num_attention_heads", 4),
        "head_dim": fields["qk_rope_head_dim"],
    }


def make_family(
    folder: Path, family: str, fields: Mapping[str, Any], dtype: str = "float32", kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Write a checkpoint into `folder`, in shards of the size that `fields` may have, and return the model.

    kind: one of transformers' auto classes.
    """
    shard_size = fields.get("max_shard_size", "5GB")
    # classes of configurations change what they are given
    others = {name: deepcopy(value) for name, value in fields.items() if name != "max_shard_size"}
    whole = None
    if family in WHOLES:
        kind, whole = AutoModelForImageTextToText, (family, WHOLES[family][1])
        family, _ = WHOLES[family]
    return make_other_family(
        folder, family, max_shard_size=shard_size, dtype=getattr(torch, dtype), kind=kind, whole=whole, **others
    )


def make_windowed_model(folder: Path) -> Path:
    """A checkpoint of Gemma 3 with its tokenizer: 4 layers, one of them without a window of 13 tokens; returns its folder."""
    folder.mkdir(exist_ok=True)
    make_family(folder, "gemma3_text", cases("gemma3_text")[0])
    save_tokenizer(folder)
    return folder


def make_latent_model(folder: Path, family: str = "deepseek_v3") -> Path:
    """A checkpoint of a family with latent attention, and its tokenizer; returns its folder."""
    folder.mkdir(exist_ok=True)
    make_family(folder, family, cases(family)[0])
    save_tokenizer(folder)
    return folder


def make_mixed_model(folder: Path) -> Path:
    """A checkpoint of MiMo V2, whose layers with a window have twice the KV heads of the others, and its tokenizer; returns its
    folder."""
    folder.mkdir(exist_ok=True)
    make_family(folder, "mimo_v2_flash", cases("mimo_v2_flash")[0])
    save_tokenizer(folder)
    return folder


def make_chunked_model(folder: Path) -> Path:
    """A checkpoint of Llama 4 with its tokenizer: 4 layers, three of them with chunks of 13 positions; returns its folder."""
    folder.mkdir(exist_ok=True)
    make_family(folder, "llama4_text", cases("llama4_text")[0])
    save_tokenizer(folder)
    return folder


def make_gemma4_model(folder: Path) -> Path:
    """A checkpoint of Gemma 4 with its tokenizer: layers without a window have one KV head of 40 numbers, others two of 16; three
    of six layers use keys of earlier ones, and all read ids of tokens; returns its folder."""
    folder.mkdir(exist_ok=True)
    fields = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": False}
    make_family(folder, "gemma4_text", {**OPTIONS["gemma4_text"][3], **fields})
    save_tokenizer(folder)
    return folder


def make_state_model(folder: Path, family: str = "lfm2") -> Path:
    """A checkpoint of a family with states in some layers, and its tokenizer; returns its folder."""
    folder.mkdir(exist_ok=True)
    make_family(folder, family, cases(family)[0])
    save_tokenizer(folder)
    return folder
