"""dots.llm1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pdserve.models.config.expert_shape import ExpertShape
from pdserve.models.config.family_fields import words
from pdserve.models.config.sliding_windows import windows_of_types
from pdserve.models.families.grouped_mixture import MIXTURE_FIELDS, GroupedMixture
from pdserve.models.json_object import JsonObject


@dataclass(frozen=True, kw_only=True)
class Dots1(GroupedMixture):
    """Qwen3's attention, with windows from `max_window_layers` on."""

    model_type = "dots1"
    own_fields = MIXTURE_FIELDS | words("sliding_window layer_types")
    default_num_kv_heads = 32
    qk_norm = True
    routing: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "scoring_func": ("sigmoid", "noaux_tc"),
        "topk_method": ("noaux_tc",),
    }
    default_experts = ExpertShape(0, 0, 1408, num_shared=0, normalise=False)
    default_dense_layers = 0

    @classmethod
    def read(cls, config: JsonObject, num_layers: int) -> Dots1:
        first = num_layers if config.is_null("sliding_window") else config.integer("max_window_layers", 62, minimum=0)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
        bias = config.boolean("attention_bias", False)
        return cls(
            sliding_windows=windows_of_types(config, kinds),
            qkv_bias=bias,
            output_bias=bias,
            experts=cls.read_experts(config),
            sparse_layers=cls.read_sparse_layers(config, num_layers),
        )
