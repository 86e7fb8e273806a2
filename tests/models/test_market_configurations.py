"""Configurations with the fields of models that people serve: each loads, or is refused with what it needs.

`tools/configurations.py FOLDER` prints the same of real ones.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
UNCONVERTED = [f"model.layers.{layer}.mlp.gate" for layer in range(2)] + ["lm_head"]
NVFP4 = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": UNCONVERTED, "producer": {"name": "modelopt", "version": "0.41.0"},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        }
    },
}  # fmt: skip
PER_TENSOR = {
    "quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt", "version": "0.31.0"},
    "config_groups": {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
        }
    },
}  # fmt: skip
MIXED = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
    "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}, "model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4"},
    },
}  # fmt: skip
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": None,
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax",
                "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64, "in_channels": 3, "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip

PICTURES: dict[str, Any] = {
    "image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303,
    "tie_word_embeddings": False,
}  # fmt: skip

CHUNKS: dict[str, Any] = {
    "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0,
    "intermediate_size_mlp": 128, "no_rope_layers": [], "num_experts_per_tok": 1, "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}  # fmt: skip
HEADS_OF_TWO_SIZES: dict[str, Any] = {
    "model_type": "gemma4_text", "attention_bias": False, "attention_k_eq_v": True, "final_logit_softcapping": 30.0,
    "global_head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"], "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024, "tie_word_embeddings": True, "use_bidirectional_attention": "vision", "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
GEMMA4_PARTS: dict[str, Any] = {
    "audio_config": None, "audio_token_id": 310, "boa_token_id": 311, "boi_token_id": 312, "eoa_token_id": 313,
    "eoa_token_index": 313, "eoi_token_id": 314, "image_token_id": 315, "video_token_id": 316, "tie_word_embeddings": True,
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "patch_size": 16, "use_clipped_linears": False},
    "vision_soft_tokens_per_image": 280, "transformers_version": "5.5.0.dev0",
}  # fmt: skip
OTHER_PARTS: dict[str, Any] = {
    "boi_token_index": 300, "eoi_token_index": 301, "image_token_index": 302, "transformers_version": "4.51.0.dev0",
    "image_processor_config": {"add_global_tile": True, "max_patches": 16, "resize_to_max_canvas": False},
    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 32, "patch_size": 14},
}  # fmt: skip


def text(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return SIZES | {"architectures": [architecture], "model_type": model_type} | fields


def wrapped(architecture: str, model_type: str, inner: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, "text_config": SIZES | inner} | fields


def alone(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """A model without heads, an MLP and positions."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "torch_dtype",
        "hidden_act",
        "initializer_range",
        "use_cache",
    )
    return {name: SIZES[name] for name in names} | {"architectures": [architecture], "model_type": model_type} | fields


LOADS: dict[str, dict[str, Any]] = {
    "dense": text("Qwen3ForCausalLM", "qwen3", attention_bias=False, max_window_layers=2, use_sliding_window=False),
    "dense, fp8 in blocks": text("Qwen3ForCausalLM", "qwen3", quantization_config=BLOCKS | {"modules_to_not_convert": UNCONVERTED}),
    "dense, fp8 per tensor, no method": text("Qwen3ForCausalLM", "qwen3", quantization_config=PER_TENSOR),
    "mixture, fp8 in blocks": text("Qwen3MoeForCausalLM", "qwen3_moe", **EXPERTS, quantization_config=BLOCKS),
    "mixture, NVFP4": text("Qwen3MoeForCausalLM", "qwen3_moe", **EXPERTS, quantization_config=NVFP4),
    "mixture, packed integers": text("Qwen3MoeForCausalLM", "qwen3_moe", **EXPERTS, quantization_config=W4A16),
    "mixture with an empty shared expert": text(
        "Qwen3MoeForCausalLM", "qwen3_moe", **EXPERTS, shared_expert_intermediate_size=0, qkv_bias=False, use_qk_norm=True
    ),
    "mixed forms": text("LlamaForCausalLM", "llama", quantization_config=MIXED),
    "fp8 per channel": text(
        "LlamaForCausalLM", "llama", mlp_bias=False, attention_bias=False, pretraining_tp=1,
        quantization_config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        rope_scaling={
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    ),
    "experts in MXFP4": text(
        "GptOssForCausalLM", "gpt_oss", num_local_experts=4, num_experts_per_tok=2, sliding_window=128, attention_bias=True,
        layer_types=["sliding_attention", "full_attention"], quantization_config={"quant_method": "mxfp4"}, swiglu_limit=7.0,
    ),
    "experts of the first mixtures": text(
        "MixtralForCausalLM", "mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
    "pictures, experts": wrapped(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe",
        EXPERTS
        | {
            "model_type": "qwen3_vl_moe_text",
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        **PICTURES, vision_config=VISION,
    ),
    "several kinds of KV heads, fp8 in blocks": text(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", num_key_value_heads=1, head_dim=24, v_head_dim=16, rope_theta=5000000,
        swa_rope_theta=10000, partial_rotary_factor=0.334, sliding_window=128, sliding_window_size=128, attention_chunk_size=128,
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=24, swa_v_head_dim=16, hybrid_layer_pattern=[0, 1],
        moe_layer_freq=[0, 1], moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=None, num_experts_per_tok=2,
        norm_topk_prob=True, scoring_func="sigmoid", n_group=1, topk_group=1, topk_method="noaux_tc", routed_scaling_factor=None,
        layernorm_epsilon=1e-6, attention_bias=False, attention_value_scale=0.707, add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False, quantization_config=BLOCKS,
    ),
    "heads of two sizes, experts next to MLPs": wrapped(
        "Gemma4ForConditionalGeneration", "gemma4",
        HEADS_OF_TWO_SIZES
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
        **GEMMA4_PARTS,
    ),
    "heads of two sizes, NVFP4": wrapped(
        "Gemma4ForConditionalGeneration", "gemma4",
        HEADS_OF_TWO_SIZES
        | {
            "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
            "expert_intermediate_size": None,
        },
        **GEMMA4_PARTS, quantization_config=NVFP4,
    ),
    "keys of earlier layers, ids in every layer": wrapped(
        "Gemma4ForConditionalGeneration", "gemma4",
        HEADS_OF_TWO_SIZES
        | {
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320, "use_double_wide_mlp": True,
            "attention_k_eq_v": False, "num_global_key_value_heads": None,
        },
        **GEMMA4_PARTS | {"audio_config": {"model_type": "gemma4_audio", "hidden_size": 32}},
    ),
    "chunks, experts in every layer": wrapped(
        "Llama4ForConditionalGeneration", "llama4",
        CHUNKS
        | {
            "interleave_moe_layer_step": 1, "num_local_experts": 4, "use_qk_norm": True,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
        **OTHER_PARTS,
    ),
    "chunks, experts in every second layer": wrapped(
        "Llama4ForConditionalGeneration", "llama4",
        CHUNKS | {"interleave_moe_layer_step": 2, "num_local_experts": 8, "rope_scaling": None, "use_qk_norm": False},
        **OTHER_PARTS,
    ),
    "latent attention, fp8 in blocks": text(
        "DeepseekV3ForCausalLM", "deepseek_v3", num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid",
        topk_method="noaux_tc", num_nextn_predict_layers=1, head_dim=8, quantization_config=BLOCKS,
    ),
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "head_dim": 32,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2, "attn_output_gate": True,
    "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": [],
    "attention_bias": False, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
KDA: dict[str, Any] = {
    "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 3], "full_attn_layers": [4],
}  # fmt: skip
SCANS: dict[str, Any] = {
    "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 4, "ssm_state_size": 16, "conv_kernel": 4, "expand": 2,
    "chunk_size": 128, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "mlp_hidden_act": "relu2", "use_conv_bias": True,
    "use_bias": False, "mlp_bias": False, "attention_bias": False, "time_step_min": 0.001, "time_step_max": 0.1,
    "time_step_floor": 0.0001, "layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-5, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "use_mamba_kernels": True, "num_logits_to_keep": 1, "sliding_window": None,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
LOADS |= {
    "norms over all heads, fp8 in blocks": text(
        "MiniMaxM2ForCausalLM", "minimax_m2", num_local_experts=8, num_experts_per_tok=2, rotary_dim=8, use_qk_norm=True,
        qk_norm_type="per_layer", use_routing_bias=True, scoring_func="sigmoid", shared_intermediate_size=0, use_mtp=True,
        num_mtp_modules=3, mtp_transformer_layers=1, attn_type_list=[1, 1], quantization_config=BLOCKS,
    ),
    "norms over all heads, a rotary factor": text(
        "MiniMaxM2ForCausalLM", "minimax_m2", num_local_experts=8, num_experts_per_tok=2, partial_rotary_factor=0.5,
        quantization_config=NVFP4,
    ),
    "heads rotated in part, experts in groups": text(
        "Glm4MoeForCausalLM", "glm4_moe", **ROUTED, use_qk_norm=True, partial_rotary_factor=0.5, attention_bias=True,
        quantization_config=W4A16,
    ),
    "latent attention, kinds of MLPs": text(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", **ROUTED, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, topk_method="noaux_tc", partial_rotary_factor=1.0, rope_scaling=None, head_dim=8,
        num_key_value_heads=4,
    ),
    "one shared expert with a weight": text(
        "Qwen2MoeForCausalLM", "qwen2_moe", **EXPERTS, shared_expert_intermediate_size=64, max_window_layers=28,
        use_sliding_window=False, sliding_window=32768, rope_scaling=None,
    ),
    "experts counted in names of their own": text(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", moe_num_experts=8, moe_k=2, moe_num_shared_experts=2, moe_layer_start_index=1,
        moe_layer_interval=1, moe_intermediate_size=32, moe_capacity=[8, 8, 8], moe_use_aux_free=True, use_bias=False,
        tie_word_embeddings=True, num_nextn_predict_layers=1,
    ),
    "sigmoids by another name": text(
        "Dots1ForCausalLM", "dots1", **ROUTED, scoring_func="noaux_tc", topk_method="noaux_tc", moe_layer_freq=1,
        sliding_window=None, max_window_layers=62, use_sliding_window=False,
    ),
    "experts in every layer": text(
        "SolarOpenForCausalLM", "solar_open", **ROUTED | {"first_k_dense_replace": 0}, partial_rotary_factor=1.0,
        attention_bias=False, use_qk_norm=False,
    ),
    "latent attention, a norm after experts": text(
        "AXK1ForCausalLM", "axk1", **ROUTED, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1, head_dim=8,
    ),
    "latent attention without experts": text(
        "YoutuForCausalLM", "youtu", num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, rope_interleave=True, embedding_initializer_range=0.02, mlp_bias=False, head_dim=8,
    ),
    "delta nets, gates, experts, fp8 in blocks": text(
        "Qwen3NextForCausalLM", "qwen3_next", **EXPERTS, **DELTA, partial_rotary_factor=0.25, full_attention_interval=2,
        shared_expert_intermediate_size=32, attention_bias=False, rope_scaling=None, quantization_config=BLOCKS,
    ),
    "delta nets, pictures": wrapped(
        "Qwen3_5ForConditionalGeneration", "qwen3_5", DELTA | HYBRID | {"model_type": "qwen3_5_text", "output_gate_type": "swish"},
        **PICTURES, vision_config=VISION | {"deepstack_visual_indexes": []},
    ),
    "delta nets, pictures, experts, NVFP4": wrapped(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe",
        DELTA | HYBRID | {
            "model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32, "router_aux_loss_coef": 0.001, "intermediate_size": None,
        },
        **PICTURES, vision_config=VISION | {"deepstack_visual_indexes": []}, quantization_config=NVFP4,
    ),
    "selective scans, experts": text(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", mamba_n_heads=16, mamba_n_groups=1, mamba_d_state=16, mamba_d_head=8,
        mamba_expand=2, mamba_d_conv=4, mamba_chunk_size=256, mamba_conv_bias=True, mamba_proj_bias=False, num_local_experts=8,
        num_experts_per_tok=2, shared_intermediate_size=64, layer_types=["mamba", "attention"], position_embedding_type="nope",
        embedding_multiplier=12, attention_multiplier=0.0078125, residual_multiplier=0.22, logits_scaling=6, attention_bias=False,
        normalization_function="rmsnorm", router_aux_loss_coef=0.0001, rope_scaling=None, init_method="mup",
    ),
    "selective scans": text(
        "BambaForCausalLM", "bamba", mamba_n_heads=16, mamba_n_groups=1, mamba_d_state=16, mamba_d_head=8, mamba_expand=2,
        mamba_d_conv=4, mamba_chunk_size=256, mamba_conv_bias=True, mamba_proj_bias=False, attn_layer_indices=[1],
        attn_rotary_emb=8, mlp_bias=False, attention_bias=False, num_logits_to_keep=1, rope_scaling=None,
    ),
    "selective scans, experts without gates": text(
        "NemotronHForCausalLM", "nemotron_h", **SCANS, num_hidden_layers=7, hybrid_override_pattern="MEM*EME", n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=64, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, norm_eps=1e-5, quantization_config=NVFP4,
    ),
    "selective scans, experts in a latent size, draft layers": {
        name: value for name, value in text("NemotronHForCausalLM", "nemotron_h", **SCANS).items() if name != "num_hidden_layers"
    } | {
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"], "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "moe_latent_size": 32,
        "moe_shared_expert_overlap": False, "num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"],
        "routed_scaling_factor": 5.0, "time_step_limit": [0.0, 1e308], "mamba_ssm_cache_dtype": "float32",
        "quantization_config": PER_TENSOR,
    },
    "selective scans, MLPs without gates": text(
        "NemotronHForCausalLM", "nemotron_h", **SCANS, num_hidden_layers=6, hybrid_override_pattern="M-MM*-", time_step_rank=8,
        time_step_limit=[0.0, float("inf")], attention_head_dim=16,
    ),
    "delta attention, latent attention, experts": {
        name: value for name, value in text("KimiLinearForCausalLM", "kimi_linear").items() if name != "max_position_embeddings"
    } | {
        "num_hidden_layers": 4, "model_max_length": 4096, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 18,
        "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "mla_use_nope": True, "rope_scaling": None, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1,
        "num_expert_group": 1, "topk_group": 1, "use_grouped_topk": True, "routed_scaling_factor": 2.446,
        "moe_intermediate_size": 32, "num_nextn_predict_layers": 0, "linear_attn_config": KDA,
    },
    "selective scans next to attention": text(
        "FalconH1ForCausalLM", "falcon_h1", attention_bias=False, attention_in_multiplier=1.0, attention_out_multiplier=0.9375,
        embedding_multiplier=5.656854249492381, key_multiplier=0.390625, lm_head_multiplier=0.0390625, mamba_chunk_size=128,
        mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=8, mamba_d_ssm=96, mamba_d_state=16, mamba_expand=2, mamba_n_groups=1,
        mamba_n_heads=12, mamba_norm_before_gate=False, mamba_proj_bias=False, mamba_rms_norm=False, mamba_use_mlp=True,
        mlp_bias=False, mlp_expansion_factor=8, mlp_multipliers=[0.8838834764831844, 0.5859375], num_logits_to_keep=1,
        projectors_bias=False, rope_scaling=None, rope_theta=100000000000.0, ssm_in_multiplier=1.25,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        ssm_out_multiplier=0.23570226039551584,
    ),
    "selective scans of channels, experts": text(
        "JambaForCausalLM", "jamba", attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2,
        mamba_conv_bias=True, mamba_d_conv=4, mamba_d_state=16, mamba_dt_rank=8, mamba_expand=2, mamba_inner_layernorms=True,
        mamba_proj_bias=False, num_experts=8, num_experts_per_tok=2, num_logits_to_keep=1, output_router_logits=False,
        router_aux_loss_coef=0.001, sliding_window=None, use_mamba_kernels=True,
    ),
    "selective scans alone": alone(
        "Mamba2ForCausalLM", "mamba2", chunk_size=256, conv_kernel=4, expand=2, head_dim=16, n_groups=2, norm_before_gate=True,
        num_heads=8, rms_norm=True, state_size=16, time_step_limit=[0.0, float("inf")], time_step_rank=4, use_conv_bias=True,
        time_step_floor=0.0001, time_step_max=0.1, time_step_min=0.001, rescale_prenorm_residual=False, layer_norm_epsilon=1e-5,
        residual_in_fp32=True, use_bias=False,
    ),
    "selective scans of channels alone": alone(
        "MambaForCausalLM", "mamba", conv_kernel=4, d_inner=128, d_model=64, expand=2, fused_add_norm=True, intermediate_size=128,
        layer_norm_epsilon=1e-5, n_layer=2, pad_vocab_size_multiple=8, rescale_prenorm_residual=False, residual_in_fp32=True,
        rms_norm=True, ssm_cfg={}, state_size=16, time_step_floor=0.0001, time_step_init_scheme="random", time_step_max=0.1,
        time_step_min=0.001, time_step_rank=4, time_step_scale=1.0, use_bias=False, use_conv_bias=True,
    ),
    "selective scans of channels alone, with norms": alone(
        "FalconMambaForCausalLM", "falcon_mamba", conv_kernel=4, expand=16, intermediate_size=128, layer_norm_epsilon=1e-5,
        mixer_rms_eps=1e-6, rescale_prenorm_residual=False, residual_in_fp32=True, state_size=16, time_step_floor=0.0001,
        time_step_init_scheme="random", time_step_max=0.1, time_step_min=0.001, time_step_rank=4, time_step_scale=1.0,
        use_bias=False, use_conv_bias=True, use_mambapy=False, tie_word_embeddings=False,
    ),
    "norms over all heads, experts": text(
        "OlmoeForCausalLM", "olmoe", num_experts=8, num_experts_per_tok=2, norm_topk_prob=False, clip_qkv=None,
    ),
    "two attentions per layer, experts without weights": {
        name: value for name, value in SIZES.items() if name not in ("num_hidden_layers", "intermediate_size")
    } | {
        "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "num_layers": 2, "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32, "moe_topk": 4, "n_routed_experts": 8, "zero_expert_num": 4, "zero_expert_type": "identity",
        "routed_scaling_factor": 6.0, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_method": "MLA", "attention_bias": False,
    },
}  # fmt: skip
NEEDS: dict[str, tuple[dict[str, Any], str]] = {
    "attention residuals": (
        wrapped("KimiK3ForConditionalGeneration", "kimi_k3", EXPERTS), "needs attention residuals, and a vision encoder of its own"
    ),
    "a layer of two kinds": (
        text("KimiLinearForCausalLM", "kimi_linear", linear_attn_config=KDA | {"full_attn_layers": [3, 4]}),
        "linear_attn_config: kda_layers must be with full_attn_layers each number from 1 to 2 once",
    ),
    "two names of a field": (
        text("KimiLinearForCausalLM", "kimi_linear", model_max_length=8192),
        "max_position_embeddings must be as model_max_length (8192), not 4096",
    ),
    "a bound of decays": (
        text("KimiLinearForCausalLM", "kimi_linear", linear_attn_config=KDA | {"gate_lower_bound": -5.0}),
        "linear_attn_config: gate_lower_bound is -5.0",
    ),
    "latent attention that rotates next to delta attention": (
        text("KimiLinearForCausalLM", "kimi_linear", mla_use_nope=False), "mla_use_nope must be true"
    ),
    "state spaces": (
        text("Zamba2ForCausalLM", "zamba2", layers_block_type=["mamba", "hybrid"]), "another state than keys and values",
    ),
    "an MLP after an MLP": (
        text("NemotronHForCausalLM", "nemotron_h", **SCANS, num_hidden_layers=4, hybrid_override_pattern="M-E*"),
        "layer 2 (moe) follows no layer with attention or a state",
    ),
    "a pattern of another length": (
        text("NemotronHForCausalLM", "nemotron_h", **SCANS, num_hidden_layers=3, hybrid_override_pattern="M-*-"),
        "num_hidden_layers must be the number of layers of hybrid_override_pattern (4), not 3",
    ),
    "a limit of steps": (
        text("NemotronHForCausalLM", "nemotron_h", **SCANS, hybrid_override_pattern="M*", time_step_limit=[0.001, 0.1]),
        "time_step_limit is [0.001, 0.1]; steps are computed between 0 and infinity",
    ),
    "an index of keys": (text("GlmMoeDsaForCausalLM", "glm_moe_dsa", n_routed_experts=8), "indexed_attention"),
    "layers of different shapes": (
        text("DeciLMForCausalLM", "nemotron-nas", block_configs=[{"attention": {"n_heads_in_group": 8}}]),
        "needs layers of different shapes",
    ),
    "code of the checkpoint": (
        text("StrangeForCausalLM", "strange", auto_map={"AutoModelForCausalLM": "modeling.Strange"}), "StrangeForCausalLM",
    ),
    "an unknown method": (text("Qwen3ForCausalLM", "qwen3", quantization_config={"quant_method": "quark"}), "quantized by quark"),
    "experts in fp4 of their own": (
        text("LlamaForCausalLM", "llama", quantization_config=BLOCKS | {"expert_dtype": "fp4"}), 'expert_dtype is "fp4"',
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusal() -> Any:
    return runpy.run_path(str(Path(__file__).parents[2] / "tools/configurations.py"))["refusal"]


def _folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("name", LOADS)
def test_it_loads(name: str, refusal: Any, tmp_path: Path) -> None:
    assert refusal(_folder(tmp_path, LOADS[name])) is None


@pytest.mark.parametrize("name", NEEDS)
def test_it_is_refused_by_what_it_needs(name: str, refusal: Any, tmp_path: Path) -> None:
    config, needs = NEEDS[name]
    found = refusal(_folder(tmp_path, config))
    assert needs in found
    assert found.startswith("config.json")
    assert "\n" not in found
