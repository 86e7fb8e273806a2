"""Solar Open."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.expert_shape import ExpertShape
from pdserve.models.families.grouped_mixture import MIXTURE_FIELDS, GroupedMixture
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True, kw_only=True)
class SolarOpen(GroupedMixture):
    """Llama's attention; every layer has experts."""

    model_type = "solar_open"
    own_fields = MIXTURE_FIELDS
    intermediate_size_field = "moe_intermediate_size"
    default_num_kv_heads = 8
    default_head_dim = 128
    default_rms_norm_eps = 1e-5
    default_rope_theta = 1e6
    default_experts = ExpertShape(128, 8, 1280)
    default_dense_layers = 0

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> SolarOpen:
        if config.integer("first_k_dense_replace", 0, minimum=0):
            raise config.error("first_k_dense_replace", "0")
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=config.boolean("attention_bias", False),
            experts=cls.read_experts(config),
            sparse_layers=cls.read_sparse_layers(config, num_layers),
        )
