"""OLMoE."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import FeedForward
from pdserve.models.layers.routing import load_router
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class Olmoe(ModelFamily):
    """Queries and keys are normalised over all heads; each layer has a mixture of experts."""

    model_type = "olmoe"
    own_fields = EXPERT_FIELDS | {"norm_topk_prob"}
    default_rms_norm_eps = 1e-5
    norms_projection = True

    num_experts: int
    top_k: int
    """Experts per token."""
    normalise: bool
    """True: the routing weights of a token add up to 1."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Olmoe:
        num_experts, top_k = read_experts(config, default_experts=64, default_top_k=8)
        if num_experts == 0:
            raise config.error("num_experts", "at least 1")
        bias = config.boolean("attention_bias", False)
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=bias,
            output_bias=bias,
            num_experts=num_experts,
            top_k=top_k,
            normalise=config.boolean("norm_topk_prob", False),
        )

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        hidden = config.hidden_size
        router = load_router(weights, prefix, hidden, self.num_experts, self.top_k, normalise=self.normalise)
        return SparseMlp.load(
            weights, prefix, hidden, config.intermediate_size, num_experts=self.num_experts, router=router
        )
