"""`StateSpec`: what one kind of layer keeps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Layers with equal specs share one plan per step."""

    num_heads: int
    """Parts of a state that ranks share."""
    head_size: int
    """Numbers of a head's state in one layer, float32."""
    kv_cache_group: int = 0
    """Number of the KV cache group whose block tables the layers use."""
