"""Numbers of experts, as families with mixtures of experts write them in config.json."""

from __future__ import annotations

from pdserve.models.config.family_fields import words
from pdserve.models.json_object import JsonObject

EXPERT_FIELDS = words("num_experts num_local_experts num_experts_per_tok")
_MAX_EXPERTS = 1 << 14


def read_experts(config: JsonObject, *, default_experts: int, default_top_k: int) -> tuple[int, int]:
    """(experts of a layer, experts per token); no experts: 0. Raises: ConfigError."""
    num_experts = _num_experts(config, default_experts)
    top_k = config.integer("num_experts_per_tok", default_top_k)
    if top_k > num_experts > 0:
        raise config.error("num_experts_per_tok", f"at most num_experts ({num_experts})")
    return num_experts, top_k


def _num_experts(config: JsonObject, default: int) -> int:
    """`num_experts`, or `num_local_experts`: transformers reads both names and writes the second."""
    numbers = [
        config.integer(name, minimum=0, maximum=_MAX_EXPERTS)
        for name in ("num_experts", "num_local_experts")
        if config.has(name)
    ]
    if len(set(numbers)) > 1:
        raise config.error("num_local_experts", f"num_experts ({numbers[0]})")
    return numbers[0] if numbers else default
