"""LFM2: short convolutions in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import LayerNorms, ModelConfig, ModelFamily
from pdserve.models.config.state_shape import StateShape, layers_without, state_layers
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention, FeedForward
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.layers.short_conv import ShortConv
from pdserve.models.weights.weight_loader import WeightLoader

_MAX_LENGTH = 1 << 8


@dataclass(frozen=True, kw_only=True)
class Lfm2(ModelFamily):
    """A layer with a convolution keeps its last columns per sequence, and no keys."""

    model_type = "lfm2"
    own_fields = words(
        "layer_types full_attn_idxs conv_L_cache conv_bias conv_dim conv_dim_out conv_use_xavier_init norm_eps block_ff_dim "
        "block_dim block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim block_use_swiglu block_use_xavier_init "
        "block_mlp_init_scale block_out_init_scale block_norm_eps use_pos_enc tie_embedding num_heads"
    )
    default_num_kv_heads = 8
    default_rms_norm_eps = 1e-5
    default_rope_theta = 1e6
    default_tie_word_embeddings = True
    qk_norm = True
    norms = LayerNorms("operator_norm", "ffn_norm")
    final_norm_name: ClassVar[str] = "model.embedding_norm.weight"
    norm_eps_field: ClassVar[str] = "norm_eps"

    conv_length: int
    conv_bias: bool
    mlp_size: int

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Lfm2:
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        length = config.integer("conv_L_cache", 3, minimum=2, maximum=_MAX_LENGTH)
        is_state = state_layers(config, num_layers, ("conv",), ("full_attention",))
        if is_state is None:
            is_state = layers_without(config, num_layers, "full_attn_idxs") or (False,) * num_layers
        return cls(
            sliding_windows=(None,) * num_layers,
            states=StateShape.of(is_state, heads, hidden // heads * (length - 1)),
            conv_length=length,
            conv_bias=config.boolean("conv_bias", False),
            mlp_size=cls._mlp_size(config),
        )

    @staticmethod
    def _mlp_size(config: JsonObject) -> int:
        size = config.integer("block_ff_dim", config.integer("intermediate_size", 12288))
        if not config.boolean("block_auto_adjust_ff_dim", True):
            return size
        size = int(2 * size / 3)
        if config.is_null("block_ffn_dim_multiplier"):
            return size
        size = int(config.number("block_ffn_dim_multiplier", 1.0) * size)
        multiple = config.integer("block_multiple_of", 256)
        return -(-size // multiple) * multiple

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        return {self.intermediate_size_field: self.mlp_size}

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        place, hidden = config.kv_cache_place(index)[1], config.hidden_size
        if config.has_state(index):
            name = prefix.replace(".self_attn", ".conv")
            spec = config.state_spec(index)
            return ShortConv.load(weights, name, place, spec, hidden, self.conv_length, bias=self.conv_bias)
        return SelfAttention.load(
            weights, prefix, place, config.attention_spec(index), hidden,
            order=config.head_order(index), qkv_bias=False, output_bias=False, qk_norm_eps=config.rms_norm_eps,
            norm_names=("q_layernorm", "k_layernorm"), output="out_proj",
        )  # fmt: skip

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        return Mlp.load(
            weights, prefix.replace(".mlp", ".feed_forward"), config.hidden_size, self.mlp_size,
            bias=False, activation=self.activations[0], projections=("w1", "w3", "w2"),
        )  # fmt: skip
