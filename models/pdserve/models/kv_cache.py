"""The KV cache: groups of layers, and a pool of blocks for each."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pdserve.common.kv_layout import KvLayout
from pdserve.models.dtypes import CACHE_DTYPES


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers whose keys and values lie in one tensor, with one block table per sequence."""

    layers: tuple[int, ...]
    kind: Literal["full_attention", "sliding_window"]
    window: int | None
    """Tokens of a sequence whose keys and values are kept, up to its last; None: all."""
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The cache of one model. Each group has `num_blocks` blocks in a tensor of its own."""

    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]


def make_kv_cache(layout: KvLayout, num_blocks: int, device: str | torch.device = "cpu") -> Tensor:
    """Zeros `[num_blocks, *layout.block_shape]`, contiguous. Writes every page, so that no step has to map one."""
    dtype, shape = CACHE_DTYPES[layout.dtype], (num_blocks, *layout.block_shape)
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device).zero_()
    return make_host_memory(num_blocks * layout.block_bytes).view(dtype).view(shape)


def make_host_memory(num_bytes: int) -> Tensor:
    """`[num_bytes]` uint8 zeros in main memory, in huge pages where the kernel has some. Writes every page."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # one head's keys of one block are a few kilobytes: with small pages each is another entry of the TLB
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()
