"""Qwen3-VL, the dense models: text and images."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.models.config.mrope import read_mrope, without_mrope
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.families.qwen3 import Qwen3
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Qwen3VL(Qwen3):
    """Qwen3 with M-RoPE, whose axes take turns, and a vision encoder, whose inner layers add to the first layers (deepstack)."""

    model_type = "qwen3_vl"
    own_fields = Qwen3.own_fields | {"vision_config"}
    default_rope_theta = 500000.0
    has_images = True

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        rope = super().read_rope(without_mrope(config), head_dim, max_positions)
        return replace(rope, mrope=read_mrope(config, head_dim // 2, (24, 20, 20), is_interleaved=True))
