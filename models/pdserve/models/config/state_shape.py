"""`StateShape`: sizes of layers that keep a state per sequence in place of keys and values per token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateShape:
    """Of all ranks."""

    layers: tuple[bool, ...]
    """Per layer: True for a state."""
    num_heads: int
    """Parts that ranks share."""
    head_size: int
    """Numbers of a head's state in one layer."""
