"""MiniMax M2."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import FeedForward
from pdserve.models.layers.routing import load_grouped_router
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader

_ONLY = {"scoring_func": "sigmoid", "qk_norm_type": "per_layer"}
"""Fields of published configurations with the one value that transformers computes, which does not read them."""


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2(ModelFamily):
    """Queries and keys are normalised over all heads, and rotated in part; each layer has a mixture of experts."""

    model_type = "minimax_m2"
    own_fields = EXPERT_FIELDS | words(
        "rotary_dim scoring_func qk_norm_type use_routing_bias attn_type_list use_mtp num_mtp_modules mtp_transformer_layers"
    )
    default_num_kv_heads = 8
    default_head_dim = 128
    default_rope_theta = 5e6
    rotates_part = True
    norms_projection = True
    has_draft_layers = True

    num_experts: int
    top_k: int
    """Experts per token."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> MiniMaxM2:
        num_experts, top_k = read_experts(config, default_experts=256, default_top_k=8)
        if num_experts == 0:
            raise config.error("num_local_experts", "at least 1")
        for name, value in _ONLY.items():
            if config.text(name, value) != value:
                raise config.error(name, f'"{value}"')
        if not config.boolean("use_routing_bias", True):
            raise config.error("use_routing_bias", "true")
        if any(kind != 1 for kind in config.items("attn_type_list") or []):
            raise config.error("attn_type_list", "1 for each layer: other layers have linear attention")
        return cls(sliding_windows=(None,) * num_layers, num_experts=num_experts, top_k=top_k)

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        factor = config.integer("rotary_dim", head_dim) / head_dim
        return RopeParameters.from_config(
            config, head_dim, max_positions, default_theta=cls.default_rope_theta, default_rotary_factor=factor,
            may_be_partial=True,
        )  # fmt: skip

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        prefix = f"{prefix.removesuffix('mlp')}block_sparse_moe"
        router = load_grouped_router(
            weights, f"{prefix}.gate", config.hidden_size, self.num_experts, self.top_k,
            bias=f"{prefix}.e_score_correction_bias", normalise=True,
        )  # fmt: skip
        return SparseMlp.load(
            weights, prefix, config.hidden_size, config.intermediate_size,
            num_experts=self.num_experts, router=router, projections=("w1", "w3", "w2"),
        )  # fmt: skip
