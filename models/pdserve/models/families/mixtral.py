"""Mixtral."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.sliding_windows import window_of_all_layers
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import FeedForward
from pdserve.models.layers.routing import load_router
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class Mixtral(ModelFamily):
    """Mistral's attention; each layer has a mixture of experts, whose routing weights add up to 1."""

    model_type = "mixtral"
    own_fields = EXPERT_FIELDS | {"sliding_window"}
    default_num_kv_heads = 8
    default_rms_norm_eps = 1e-5
    default_rope_theta = 1e6

    num_experts: int
    top_k: int
    """Experts per token."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Mixtral:
        num_experts, top_k = read_experts(config, default_experts=8, default_top_k=2)
        if num_experts == 0:
            raise config.error("num_local_experts", "at least 1")
        windows = window_of_all_layers(config, num_layers, default=None)
        return cls(sliding_windows=windows, num_experts=num_experts, top_k=top_k)

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        prefix = f"{prefix.removesuffix('mlp')}block_sparse_moe"
        router = load_router(weights, prefix, config.hidden_size, self.num_experts, self.top_k, normalise=True)
        return SparseMlp.load(
            weights, prefix, config.hidden_size, config.intermediate_size,
            num_experts=self.num_experts, router=router, projections=("w1", "w3", "w2"),
        )  # fmt: skip
