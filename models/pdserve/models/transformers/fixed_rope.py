"""Rotary frequencies that stay as they are: code that computes them from the largest position of the row is switched off.

A row has the tokens of many sequences, and keys in a cache that sequences share cannot be rotated again. So a model whose
frequencies change beyond some length (`longrope`, `dynamic`) serves that length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

_CHANGING = ("longrope", "dynamic")


def original_positions(hf: PreTrainedConfig) -> int | None:
    """Positions up to which the frequencies stay; None: they never change."""
    lengths = []
    for rope in _rope_parameters(hf):
        if not _changes(rope.get("rope_type", rope.get("type"))):
            continue
        positions = rope.get("original_max_position_embeddings") or getattr(
            hf, "original_max_position_embeddings", None
        )
        lengths.append(int(positions or hf.max_position_embeddings))
    return min(lengths, default=None)


def fix_rope(model: PreTrainedModel) -> None:
    """Keep the frequencies that the model was made with."""
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {name: "default" if _changes(of_layer) else of_layer for name, of_layer in kind.items()}
        elif _changes(kind):
            module.rope_type = "default"


def _changes(rope_type: object) -> bool:
    return isinstance(rope_type, str) and any(name in rope_type for name in _CHANGING)


def _rope_parameters(hf: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Rope parameters of the model, or of each of its kinds of layers."""
    rope = getattr(hf, "rope_parameters", None)
    if isinstance(rope, dict):
        yield rope
        yield from (value for value in rope.values() if isinstance(value, dict))
