"""GLM-4.5, 4.6 and 4.7, and GLM-4.7 Flash with latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.expert_shape import ExpertShape
from pdserve.models.config.latent_shape import LATENT_FIELDS, LatentShape
from pdserve.models.families.deepseek import DeepSeekV3
from pdserve.models.families.grouped_mixture import MIXTURE_FIELDS, GroupedMixture
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(GroupedMixture):
    """Half of each head is rotated; queries and keys are normalised in some models."""

    model_type = "glm4_moe"
    own_fields = MIXTURE_FIELDS | {"use_qk_norm"}
    default_num_kv_heads = 8
    default_rms_norm_eps = 1e-5
    default_rotary_factor = 0.5
    rotates_part = True
    default_experts = ExpertShape(128, 8, 1408)

    use_qk_norm: bool

    @property
    def has_qk_norm(self) -> bool:
        return self.use_qk_norm

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Glm4Moe:
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=config.boolean("attention_bias", False),
            experts=cls.read_experts(config),
            sparse_layers=cls.read_sparse_layers(config, num_layers),
            use_qk_norm=config.boolean("use_qk_norm", False),
        )


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLite(DeepSeekV3):
    """DeepSeek V3 with other sizes."""

    model_type = "glm4_moe_lite"
    other_model_types = frozenset()
    own_fields = LATENT_FIELDS | MIXTURE_FIELDS | {"mlp_layer_types"}
    default_rms_norm_eps = 1e-5
    default_latent = LatentShape(768, 512, 192, 64, 256, rotates_neighbours=True)
    default_experts = ExpertShape(64, 4, 1536, scale=1.8)
    default_dense_layers = 1
