"""A.X K1."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.models.config.expert_shape import ExpertShape
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.families.deepseek import DeepSeekV3
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.weights.weight_loader import WeightLoader

_POST_NORM = "post_mlp_layernorm.weight"


@dataclass(frozen=True, kw_only=True)
class AXK1(DeepSeekV3):
    """DeepSeek V3 with a norm after the experts."""

    model_type = "axk1"
    other_model_types = frozenset()
    own_fields = DeepSeekV3.own_fields | {"mlp_layer_types"}
    default_experts = ExpertShape(192, 8, 2048, num_groups=8, kept_groups=4, scale=2.5)
    default_dense_layers = 1
    may_lack_routing_bias = True
    draft_names = None

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> AXK1:
        if config.is_null("q_lora_rank"):
            raise config.error("q_lora_rank", "a number")
        found = super().read(config, num_layers)
        assert isinstance(found, cls)
        return found

    def ignores(self, weight: str, num_layers: int) -> bool:
        """Checkpoints have the norm in layers without experts, too."""
        unused = {
            f"model.layers.{layer}.{_POST_NORM}" for layer, is_sparse in enumerate(self.sparse_layers) if not is_sparse
        }
        return weight in unused or super().ignores(weight, num_layers)

    def load_layer(
        self, weights: WeightLoader, config: ModelConfig, index: int, prefix: str | None = None
    ) -> DecoderLayer:
        layer = super().load_layer(weights, config, index, prefix)
        assert isinstance(layer, DecoderLayer)
        if not self.sparse_layers[index]:
            return layer
        return replace(layer, mlp_post_norm=self.load_norm(weights, f"model.layers.{index}.{_POST_NORM}", config))
