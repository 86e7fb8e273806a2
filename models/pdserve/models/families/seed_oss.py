"""Seed-OSS."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelFamily
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class SeedOss(ModelFamily):
    """Llama with biases of queries, keys and values, and another field for that of the output projection."""

    model_type = "seed_oss"
    default_num_kv_heads = 8
    default_head_dim = 128

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> SeedOss:
        return cls(
            (None,) * num_layers,
            qkv_bias=config.boolean("attention_bias", True),
            output_bias=config.boolean("attention_out_bias", False),
            mlp_bias=config.boolean("mlp_bias", False),
        )
