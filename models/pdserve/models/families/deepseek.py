"""DeepSeek V2 and V3, and models with their code, such as Kimi K2: latent attention and many small experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from pdserve.models.config.expert_shape import ExpertShape
from pdserve.models.config.latent_shape import LATENT_FIELDS, LatentShape
from pdserve.models.families.grouped_mixture import MIXTURE_FIELDS, GroupedMixture
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True, kw_only=True)
class DeepSeekV3(GroupedMixture):
    """V3 and R1."""

    model_type = "deepseek_v3"
    other_model_types = frozenset({"kimi_k2"})
    own_fields = LATENT_FIELDS | MIXTURE_FIELDS
    default_latent = LatentShape(1536, 512, 128, 64, 128, rotates_neighbours=True)
    default_experts = ExpertShape(256, 8, 2048, num_groups=8, kept_groups=4, scale=2.5)
    default_dense_layers = 3

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> DeepSeekV3:
        latent = cls.default_latent.read(config)
        has_bias = config.boolean("attention_bias", False)
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=config.boolean("mlp_bias", False),
            latent=latent,
            experts=cls.read_experts(config),
            sparse_layers=cls.read_sparse_layers(config, num_layers),
        )


@dataclass(frozen=True, kw_only=True)
class DeepSeekV2(DeepSeekV3):
    """V2 and V2 Lite: routing weights are softmax probabilities, which are not normalised."""

    model_type = "deepseek_v2"
    other_model_types = frozenset()
    default_experts = ExpertShape(256, 8, 2048, num_groups=0, kept_groups=0)
    default_dense_layers = 0
    routing: ClassVar[Mapping[str, tuple[str, ...]]] = {"scoring_func": ("softmax",)}
    has_routing_bias = False

    @classmethod
    def read_experts(cls, config: JsonObject, *, has_groups: bool = True) -> ExpertShape:
        method = config.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise config.error("topk_method", "greedy or group_limited_greedy")
        found = super().read_experts(config, has_groups=has_groups and method != "greedy")
        return replace(found, normalise=False)
