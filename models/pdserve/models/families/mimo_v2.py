"""MiMo V2 Flash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.models.config.expert_shape import ExpertShape
from pdserve.models.config.family_fields import words
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.config.rope_of_layer_type import rope_of_layer_type
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.config.sliding_windows import windows_of_types
from pdserve.models.families.grouped_mixture import MIXTURE_FIELDS, GroupedMixture
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import Attention
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.weights.weight_loader import WeightLoader

_MAX_WIDTH = 1 << 14
_ROTARY_FACTOR = 0.334
_KINDS = ("full_attention", "sliding_attention")
_OF_WINDOWED = {
    "swa_num_attention_heads": "num_attention_heads", "swa_head_dim": "head_dim", "swa_v_head_dim": "v_head_dim",
}  # fmt: skip
"""Fields of layers with a window -> the field that they equal."""


@dataclass(frozen=True, kw_only=True)
class MiMoV2(GroupedMixture):
    """Five of six layers have a window, twice as many KV heads as the others, sinks, and a rotary base of their own. Values are
    shorter than keys, and scaled."""

    model_type = "mimo_v2_flash"
    own_fields = MIXTURE_FIELDS | words(
        "v_head_dim layer_types mlp_layer_types hybrid_layer_pattern attention_value_scale sliding_window sliding_window_size "
        "attention_chunk_size swa_num_attention_heads swa_num_key_value_heads swa_head_dim swa_v_head_dim swa_rope_theta "
        "add_swa_attention_sink_bias add_full_attention_sink_bias layernorm_epsilon"
    )
    default_num_kv_heads = 4
    default_head_dim = 192
    default_rms_norm_eps = 1e-5
    default_rope_theta = 5e6
    default_experts = ExpertShape(256, 8, 2048, num_shared=0)
    draft_names = None

    value_dim: int
    value_scale: float

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> MiMoV2:
        num_kv_heads = config.integer("num_key_value_heads", cls.default_num_kv_heads, maximum=_MAX_WIDTH)
        value_dim = config.integer("v_head_dim", 128, maximum=_MAX_WIDTH)
        head_dim = config.integer("head_dim", cls.default_head_dim, maximum=_MAX_WIDTH)
        if value_dim > head_dim:
            raise config.error("v_head_dim", f"at most head_dim ({head_dim})")
        values = {
            "num_attention_heads": config.integer("num_attention_heads"), "head_dim": head_dim, "v_head_dim": value_dim,
        }  # fmt: skip
        for name, other in _OF_WINDOWED.items():
            if config.integer(name, values[other]) != values[other]:
                raise config.error(name, f"{other} ({values[other]})")
        if not config.boolean("add_swa_attention_sink_bias", True):
            raise config.error("add_swa_attention_sink_bias", "true")
        if config.boolean("add_full_attention_sink_bias", False):
            raise config.error("add_full_attention_sink_bias", "false")
        eps = config.number("rms_norm_eps", cls.default_rms_norm_eps)
        if config.number("layernorm_epsilon", eps) != eps:
            raise config.error("layernorm_epsilon", f"rms_norm_eps ({eps})")
        windows = cls._windows(config, num_layers)
        windowed_heads = config.integer("swa_num_key_value_heads", 2 * num_kv_heads, maximum=_MAX_WIDTH)
        if values["num_attention_heads"] % windowed_heads:
            raise config.error(
                "num_attention_heads", f"a multiple of the KV heads of layers with a window ({windowed_heads})"
            )
        return cls(
            sliding_windows=windows,
            qkv_bias=config.boolean("attention_bias", False),
            layer_kv_heads=tuple(num_kv_heads if window is None else windowed_heads for window in windows),
            experts=cls.read_experts(config),
            sparse_layers=cls.read_sparse_layers(config, num_layers),
            value_dim=value_dim,
            value_scale=config.number(
                "attention_value_scale", 1.0 if config.is_null("attention_value_scale") else 0.707
            ),
        )

    @classmethod
    def _windows(cls, config: JsonObject, num_layers: int) -> tuple[int | None, ...]:
        """Of a file of transformers, or as the checkpoint's own code reads it: 1 in `hybrid_layer_pattern` for a window of
        `sliding_window_size` tokens before the token itself."""
        kinds: Sequence[str] = [_KINDS[layer > 0 and (layer + 1) % 6 > 0] for layer in range(num_layers)]
        if (pattern := config.items("hybrid_layer_pattern")) is not None:
            if len(pattern) != num_layers or any(kind not in (0, 1) for kind in pattern):
                raise config.error("hybrid_layer_pattern", f"{num_layers} times 0 or 1")
            kinds = [_KINDS[kind == 1] for kind in pattern]
        windows = windows_of_types(config, kinds, default_window=129)
        if config.has("sliding_window_size") and not config.is_null("sliding_window_size"):
            size = config.integer("sliding_window_size") + 1
            windows = tuple(None if window is None else size for window in windows)
        return windows

    @classmethod
    def read_sparse_layers(cls, config: JsonObject, num_layers: int) -> tuple[bool, ...]:
        found = config.get("moe_layer_freq")
        if not isinstance(found, list):
            return super().read_sparse_layers(config, num_layers)
        if len(found) != num_layers or any(kind not in (0, 1) for kind in found):
            raise config.error("moe_layer_freq", f"{num_layers} times 0 or 1")
        return tuple(kind == 1 for kind in found)

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        theta = config.number("rope_theta", cls.default_rope_theta)
        return cls._rope(config, "full_attention", head_dim, max_positions, theta)

    @classmethod
    def read_local_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        theta = config.number("swa_rope_theta", 10000.0)
        return cls._rope(config, "sliding_attention", head_dim, max_positions, theta)

    @classmethod
    def _rope(cls, config: JsonObject, kind: str, head_dim: int, max_positions: int, theta: float) -> RopeParameters:
        factor = config.number("partial_rotary_factor", _ROTARY_FACTOR)
        return rope_of_layer_type(config, kind, head_dim, max_positions, theta, default_rotary_factor=factor)

    def has_layer_sinks(self, layer: int) -> bool:
        return self.sliding_windows[layer] is not None

    def ignores(self, weight: str, num_layers: int) -> bool:
        return weight.startswith("model.mtp.") or super().ignores(weight, num_layers)

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        place, spec = config.kv_cache_place(index)[1], config.attention_spec(index)
        return SelfAttention.load(
            weights, prefix, place, spec, config.hidden_size,
            order=config.head_order(index), qkv_bias=self.qkv_bias, output_bias=False, value_dim=self.value_dim,
            value_scale=self.value_scale, sinks="attention_sink_bias",
        )  # fmt: skip
