"""The pool of KV blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.common.kv_layout import KvLayout
from pdserve.models.dtypes import TORCH_DTYPES


def make_kv_cache(layout: KvLayout, num_blocks: int, device: str | torch.device = "cpu") -> Tensor:
    """Zeros `[num_blocks, L, 2, Hkv, bs, D]`, contiguous. Writes every page, so that no step has to map one."""
    dtype = TORCH_DTYPES[layout.dtype]
    return torch.empty((num_blocks, *layout.block_shape), dtype=dtype, device=device).zero_()
