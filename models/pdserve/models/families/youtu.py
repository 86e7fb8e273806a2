"""Youtu-LLM."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.latent_shape import LATENT_FIELDS, LatentShape
from pdserve.models.config.model_config import ModelFamily
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Youtu(ModelFamily):
    """Latent attention, and an MLP in every layer."""

    model_type = "youtu"
    own_fields = LATENT_FIELDS
    default_latent = LatentShape(1536, 512, 128, 64, 128, rotates_neighbours=True)
    default_tie_word_embeddings = True

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Youtu:
        bias = config.boolean("attention_bias", False)
        return cls((None,) * num_layers, qkv_bias=bias, output_bias=bias, latent=cls.default_latent.read(config))
