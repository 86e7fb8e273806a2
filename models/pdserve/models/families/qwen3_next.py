"""Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.expert_shape import MAX_EXPERT_SIZE
from pdserve.models.config.family_fields import words
from pdserve.models.families.delta_nets import DeltaNets
from pdserve.models.families.qwen2_moe import Qwen2Moe
from pdserve.models.families.qwen3_moe import read_sparse_layers
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(DeltaNets, Qwen2Moe):
    """Gated delta nets, and the experts of Qwen2-MoE."""

    model_type = "qwen3_next"
    own_fields = (
        EXPERT_FIELDS
        | DeltaNets.delta_fields
        | words(
            "moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers shared_expert_intermediate_size"
        )
    )
    default_num_kv_heads = 2
    qk_norm = True

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen3Next:
        num_experts, top_k = read_experts(config, default_experts=512, default_top_k=10)
        return cls(
            **cls.read_layers(config, num_layers),
            num_experts=num_experts,
            top_k=top_k,
            expert_size=config.integer("moe_intermediate_size", 512, maximum=MAX_EXPERT_SIZE),
            normalise=config.boolean("norm_topk_prob", True),
            sparse_layers=read_sparse_layers(config, num_layers, num_experts),
            shared_size=config.integer("shared_expert_intermediate_size", 512, maximum=MAX_EXPERT_SIZE),
        )
