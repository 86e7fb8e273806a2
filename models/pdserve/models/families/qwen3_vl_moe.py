"""Qwen3-VL, the models with mixtures of experts: text and images."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.model_config import ModelConfig
from pdserve.models.families.qwen3_moe import Qwen3Moe
from pdserve.models.families.qwen3_vl import Qwen3VL
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import FeedForward
from pdserve.models.layers.stacked_experts import load_stacked_experts
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class Qwen3VLMoe(Qwen3Moe, Qwen3VL):
    """The layers of Qwen3-MoE, whose experts are stored in one tensor per projection, with positions and images of Qwen3-VL."""

    model_type = "qwen3_vl_moe"
    own_fields = Qwen3Moe.own_fields | {"vision_config"}
    default_num_kv_heads = 16

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Qwen3VLMoe:
        found = super().read(config, num_layers)
        assert isinstance(found, cls)
        return found

    def loading_refusal(self, quantization: str | None, load_format: str) -> str | None:
        if quantization is not None:
            return f"quantization is {quantization!r}, which the stacked experts of {self.model_type} do not support"
        return super().loading_refusal(quantization, load_format)

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        if not self.sparse_layers[index]:
            return super().load_mlp(weights, prefix, config, index)
        # transformers norms the weights of a token whatever norm_topk_prob says
        return load_stacked_experts(
            weights, prefix, config.hidden_size, self.expert_size,
            num_experts=self.num_experts, top_k=self.top_k, router="gate",
        )  # fmt: skip
