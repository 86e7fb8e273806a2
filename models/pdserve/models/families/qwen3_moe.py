"""Qwen3, the models with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.expert_shape import MAX_EXPERT_SIZE
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.sliding_windows import WINDOW_FIELDS, window_of_all_layers
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import FeedForward
from pdserve.models.layers.routing import load_router
from pdserve.models.layers.sparse_mlp import SparseMlp
from pdserve.models.weights.weight_loader import WeightLoader


def read_sparse_layers(config: JsonObject, num_layers: int, num_experts: int) -> tuple[bool, ...]:
    """Per layer: True if it has experts. Raises: ConfigError."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.items("mlp_only_layers") or []
    if any(isinstance(layer, bool) or not isinstance(layer, int) for layer in dense):
        raise config.error("mlp_only_layers", "a list of layer numbers")
    dense_layers = set(dense)
    return tuple(
        num_experts > 0 and layer not in dense_layers and (layer + 1) % step == 0 for layer in range(num_layers)
    )


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(ModelFamily):
    """Attention as in Qwen3; most layers have a mixture of experts instead of the MLP. Windows are in all layers or in none."""

    model_type = "qwen3_moe"
    own_fields = (
        WINDOW_FIELDS
        | EXPERT_FIELDS
        | words("moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers")
    )
    default_num_kv_heads = 4
    qk_norm = True

    num_experts: int
    """0: every layer has an MLP."""
    top_k: int
    """Experts per token."""
    expert_size: int
    """Inner size I of an expert."""
    normalise: bool
    """True: the routing weights of a token add up to 1."""
    sparse_layers: tuple[bool, ...]
    """Per layer: True if it has experts."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen3Moe:
        num_experts, top_k = read_experts(config, default_experts=128, default_top_k=8)
        has_windows = config.boolean("use_sliding_window", False)
        bias = config.boolean("attention_bias", False)
        return cls(
            sliding_windows=window_of_all_layers(config, num_layers) if has_windows else (None,) * num_layers,
            qkv_bias=bias,
            output_bias=bias,
            num_experts=num_experts,
            top_k=top_k,
            expert_size=config.integer("moe_intermediate_size", 768, maximum=MAX_EXPERT_SIZE),
            normalise=config.boolean("norm_topk_prob", False),
            sparse_layers=read_sparse_layers(config, num_layers, num_experts),
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        sizes = {} if all(self.sparse_layers) else super().inner_sizes(intermediate_size)
        return sizes | ({"moe_intermediate_size": self.expert_size} if any(self.sparse_layers) else {})

    def has_experts(self, layer: int) -> bool:
        """A draft head has them if any layer does."""
        return self.sparse_layers[layer] if layer < len(self.sparse_layers) else any(self.sparse_layers)

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        if not self.has_experts(index):
            return super().load_mlp(weights, prefix, config, index)
        return self.load_experts(weights, prefix, config)

    def load_experts(self, weights: WeightLoader, prefix: str, config: ModelConfig) -> SparseMlp:
        """Raises: ConfigError."""
        router = load_router(
            weights, prefix, config.hidden_size, self.num_experts, self.top_k, normalise=self.normalise
        )
        return SparseMlp.load(
            weights, prefix, config.hidden_size, self.expert_size,
            num_experts=self.num_experts, router=router,
        )  # fmt: skip
