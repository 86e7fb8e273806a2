"""MiniCPM3: latent attention, an MLP in every layer, and multipliers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.models.config.family_fields import words
from pdserve.models.config.latent_shape import LATENT_FIELDS, LatentShape
from pdserve.models.config.model_config import ModelFamily
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class MiniCPM3(ModelFamily):
    """Embeddings, what layers add to the residual stream, and logits are scaled."""

    model_type = "minicpm3"
    own_fields = LATENT_FIELDS | words("scale_emb scale_depth dim_model_base")
    default_latent = LatentShape(768, 256, 64, 32, 0, rotates_neighbours=False)
    default_rms_norm_eps = 1e-5
    default_tie_word_embeddings = True

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> MiniCPM3:
        hidden_size = config.integer("hidden_size")
        # null is 1 in both
        depth = math.sqrt(num_layers) if config.is_null("scale_depth") else config.number("scale_depth", 1.4)
        base = hidden_size if config.is_null("dim_model_base") else config.number("dim_model_base", 256)
        has_bias = config.boolean("attention_bias", False)
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=config.boolean("mlp_bias", False),
            embedding_multiplier=config.number("scale_emb", 12),
            residual_multiplier=depth / math.sqrt(num_layers),
            logits_scaling=hidden_size / base,
            latent=cls.default_latent.read(config),
        )
