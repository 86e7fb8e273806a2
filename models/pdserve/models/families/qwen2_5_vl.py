"""Qwen2.5-VL: text and images."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.models.config.mrope import read_mrope, without_mrope
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.families.qwen2 import Qwen2
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True)
class Qwen2_5_VL(Qwen2):  # noqa: N801
    """Qwen2.5 with M-RoPE, whose axes have a part of a head each, and a vision encoder."""

    model_type = "qwen2_5_vl"
    own_fields = Qwen2.own_fields | {"vision_config"}
    default_num_kv_heads = 8
    default_rms_norm_eps = 1e-5
    default_rope_theta = 1e6
    has_images = True

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        rope = super().read_rope(without_mrope(config), head_dim, max_positions)
        return replace(rope, mrope=read_mrope(config, head_dim // 2, (16, 24, 24), is_interleaved=False))
