"""`head_is_embedding`: for checkpoints with `tie_word_embeddings` that also have an output head."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 4096
"""Rows compared at a time, so that neither weight is in memory twice."""


def head_is_embedding(head: Tensor, embedding: Tensor, dtype: torch.dtype) -> bool:
    """True if both have the same numbers in the served dtype.

    Both `[V, H]`, of any dtype. transformers compares them too, and does not tie them if they differ, even if `tie_word_embeddings`
    is true.
    """
    return all(
        torch.equal(head[start : start + _ROWS].to(dtype), embedding[start : start + _ROWS].to(dtype))
        for start in range(0, len(head), _ROWS)
    )
