"""`head_is_embedding`: a checkpoint that is said to be tied, and has an output head all the same."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 4096
"""Compared at a time: neither weight is held twice."""


def head_is_embedding(head: Tensor, embedding: Tensor, dtype: torch.dtype) -> bool:
    """True where both are the same numbers in the dtype that they are served in.

    Both `[V, H]`, of any dtype. transformers compares them too, and leaves them apart where they differ, whatever
    `tie_word_embeddings` says.
    """
    return all(
        torch.equal(head[start : start + _ROWS].to(dtype), embedding[start : start + _ROWS].to(dtype))
        for start in range(0, len(head), _ROWS)
    )
