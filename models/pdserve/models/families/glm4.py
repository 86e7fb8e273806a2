"""GLM-4-0414, the dense models."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import LayerNorms, ModelFamily
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Glm4(ModelFamily):
    """Norms before and after attention and MLP; half of each head is rotated, in pairs of neighbours; gate and up are fused."""

    model_type = "glm4"
    default_num_kv_heads = 2
    default_head_dim = 128
    default_rms_norm_eps = 1.5625e-7
    default_rotary_factor = 0.5
    rotates_part = True
    rotates_neighbours = True
    has_fused_mlp = True
    norms = LayerNorms(
        input="input_layernorm",
        attention_post="post_self_attn_layernorm",
        mlp="post_attention_layernorm",
        mlp_post="post_mlp_layernorm",
    )

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Glm4:
        return cls((None,) * num_layers, qkv_bias=config.boolean("attention_bias", True))
