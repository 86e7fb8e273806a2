"""Prompts for the tiny random checkpoints."""

from __future__ import annotations

import random

_TOKENS = range(3, 300)
"""Tokens of the vocabulary of every tiny checkpoint, without its special ones."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens, the same for the same arguments; of two lengths or seeds, two prompts that share no block."""
    draw = random.Random(f"{length}/{seed}")
    return [draw.choice(_TOKENS) for _ in range(length)]
