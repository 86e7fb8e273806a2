"""Falcon-H1: in each layer attention and Mamba 2 next to each other, and then an MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pdserve.models.config.family_fields import words
from pdserve.models.config.mamba2_shape import FALCON_FIELDS, Mamba2Shape
from pdserve.models.config.model_config import ModelConfig, ModelFamily
from pdserve.models.config.state_shape import StateShape
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.mamba2 import Mamba2
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.layers.side_mixer import SideMixer
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, kw_only=True)
class FalconH1(ModelFamily):
    """A layer of the checkpoint is two here: Mamba 2 with a state, and attention with keys, which have the same input."""

    regroups_layers = True
    model_type = "falcon_h1"
    own_fields = FALCON_FIELDS.names | words(
        "mamba_rms_norm mamba_norm_before_gate mamba_use_mlp mlp_expansion_factor "
        "embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier "
        "ssm_in_multiplier ssm_out_multiplier ssm_multipliers mlp_multipliers layer_types layers_block_type"
    )
    attentions_per_layer = 2
    default_num_kv_heads = 8
    default_rms_norm_eps = 1e-5
    final_norm_name: ClassVar[str] = "model.final_layernorm.weight"
    default_mamba: ClassVar[Mamba2Shape] = Mamba2Shape(state_size=256, num_groups=1)

    mamba: Mamba2Shape
    attention_multipliers: tuple[float, float]
    """Of the attention's input and of its output."""
    mamba_multipliers: tuple[float, float]
    """The same of Mamba 2."""
    inner_multipliers: tuple[float, ...]
    """Of the gates, x, b, c and steps of Mamba 2."""
    mlp_multipliers: tuple[float, ...]
    """Of the MLP's gate and of its output."""

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> FalconH1:
        for name in ("layer_types", "layers_block_type"):
            if any(kind != "hybrid" for kind in config.items(name) or ()):
                raise config.error(name, 'a list of "hybrid"')
        if not config.boolean("mamba_use_mlp", True):
            raise config.error("mamba_use_mlp", "true")
        bias, mamba = config.boolean("attention_bias", False), cls._mamba(config)
        head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
        states = StateShape.of((True, False) * (num_layers // 2), mamba.num_runs, mamba.run_size)
        return cls(
            sliding_windows=(None,) * num_layers,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=config.boolean("mlp_bias", False),
            # a factor of all keys is one of all scores
            attention_scale=head_dim**-0.5 * config.number("key_multiplier", 1.0),
            embedding_multiplier=config.number("embedding_multiplier", 1.0),
            logits_scaling=1 / config.number("lm_head_multiplier", 1.0),
            states=states,
            mamba=mamba,
            attention_multipliers=(
                config.number("attention_in_multiplier", 1.0), config.number("attention_out_multiplier", 1.0),
            ),
            mamba_multipliers=(config.number("ssm_in_multiplier", 1.0), config.number("ssm_out_multiplier", 1.0)),
            inner_multipliers=_numbers(config, "ssm_multipliers", 5),
            mlp_multipliers=_numbers(config, "mlp_multipliers", 2),
        )  # fmt: skip

    @classmethod
    def _mamba(cls, config: JsonObject) -> Mamba2Shape:
        is_first = config.boolean("mamba_norm_before_gate", True)
        return replace(
            cls.default_mamba.read(config, FALCON_FIELDS),
            norm=("before_gate" if is_first else "after_gate") if config.boolean("mamba_rms_norm", False) else None,
        )

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        return super().inner_sizes(intermediate_size) | self.mamba.shared_sizes(FALCON_FIELDS.num_heads)

    def load_layer(
        self, weights: WeightLoader, config: ModelConfig, index: int, prefix: str | None = None
    ) -> DecoderLayer | SideMixer:
        layer, half = divmod(index, self.attentions_per_layer)
        prefix = prefix or f"model.layers.{layer}"
        if half == 0:
            into, out = self.mamba_multipliers
            return SideMixer(
                self.load_norm(weights, f"{prefix}.input_layernorm.weight", config),
                Mamba2.load(
                    weights, f"{prefix}.mamba", config.kv_cache_place(index)[1], config.state_spec(index), self.mamba,
                    config.hidden_size, config.rms_norm_eps, input_multiplier=into, multipliers=self.inner_multipliers,
                ),
                out,
            )  # fmt: skip
        attention = self.load_attention(weights, f"{prefix}.self_attn", config, index)
        mlp = self.load_mlp(weights, f"{prefix}.feed_forward", config, index)
        assert isinstance(attention, SelfAttention)
        assert isinstance(mlp, Mlp)
        into, out = self.attention_multipliers
        gate, down = self.mlp_multipliers
        return DecoderLayer(
            input_norm=None,
            attention=replace(attention, input_multiplier=into),
            mlp_norm=self.load_norm(weights, f"{prefix}.pre_ff_layernorm.weight", config),
            mlp=replace(mlp, gate_multiplier=gate),
            attention_multiplier=out,
            mlp_multiplier=down,
            joins_mixer=True,
        )


def _numbers(config: JsonObject, name: str, length: int) -> tuple[float, ...]:
    """Factors of parts, 1 without the field. Raises: ConfigError."""
    return config.numbers(name, length) if config.has(name) else (1.0,) * length
