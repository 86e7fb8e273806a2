"""gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.kernels.layers.gated_activations import ClampedSwiglu
from pdserve.models.config.expert_counts import EXPERT_FIELDS, read_experts
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.config.sliding_windows import windows_of_types
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import FeedForward
from pdserve.models.layers.stacked_experts import load_stacked_experts
from pdserve.models.weights.weight_loader import WeightLoader

_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True)
class GptOss(ModelFamily):
    """Attention with sinks and biases, windows in every second layer, and experts with biases and a clamped activation, which may
    be stored in MXFP4."""

    model_type = "gpt_oss"
    own_fields = EXPERT_FIELDS | words(
        "sliding_window layer_types swiglu_alpha swiglu_limit experts_per_token initial_context_length"
    )
    default_num_kv_heads = 8
    default_head_dim = 64
    default_rms_norm_eps = 1e-5
    default_rope_theta = 150000.0
    has_sinks = True

    num_experts: int
    top_k: int
    """Experts per token."""
    gate: ClampedSwiglu

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> GptOss:
        num_experts, top_k = read_experts(config, default_experts=128, default_top_k=4)
        if num_experts == 0:
            raise config.error("num_local_experts", "at least 1")
        if config.integer("experts_per_token", top_k) != top_k:
            raise config.error("experts_per_token", f"num_experts_per_tok ({top_k})")
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
        bias = config.boolean("attention_bias", True)
        return cls(
            sliding_windows=windows_of_types(config, kinds, default_window=128),
            qkv_bias=bias,
            output_bias=bias,
            num_experts=num_experts,
            top_k=top_k,
            gate=ClampedSwiglu(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)),
        )

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        scaling = config.child("rope_scaling")
        if config.has("rope_parameters") or (scaling is not None and scaling.names):
            return super().read_rope(config, head_dim, max_positions)
        theta = config.number("rope_theta", cls.default_rope_theta)
        rope = JsonObject({"rope_parameters": _DEFAULT_ROPE | {"rope_theta": theta}}, config.where)
        return super().read_rope(rope, head_dim, max_positions)

    def loading_refusal(self, quantization: str | None, load_format: str) -> str | None:
        if quantization is not None:
            return f"quantization is {quantization!r}, which the experts of gpt-oss do not support"
        return None

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        return load_stacked_experts(
            weights, prefix, config.hidden_size, config.intermediate_size,
            num_experts=self.num_experts, top_k=self.top_k, router="router", gate=self.gate, in_turn=True, bias=True,
        )  # fmt: skip
