"""OLMo 2."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import LayerNorms, ModelFamily
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Olmo2(ModelFamily):
    """Norms after attention and MLP and none before; queries and keys are normalised over all heads."""

    model_type = "olmo2"
    default_rms_norm_eps = 1e-5
    norms_projection = True
    norms = LayerNorms(
        input=None, attention_post="post_attention_layernorm", mlp=None, mlp_post="post_feedforward_layernorm"
    )

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Olmo2:
        bias = config.boolean("attention_bias", False)
        return cls((None,) * num_layers, qkv_bias=bias, output_bias=bias)
