"""Copies blocks within the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(kv_cache: Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """kv_cache[target] = kv_cache[source] for each (source, target); all sources are read before any target is written.

    kv_cache: `[num_blocks, ...]`. Raises: ValueError for a target that is listed twice.
    """
    sources, targets = zip(*copies, strict=True)
    if len({*targets}) < len(targets):
        raise ValueError(f"a block is copied to twice: {copies}")
    read, written = torch.tensor((sources, targets)).to(kv_cache.device)
    kv_cache[written] = kv_cache[read]
