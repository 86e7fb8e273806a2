"""The KV cache: groups of layers, and the pool of blocks that they share."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.common.kv_layout import KvLayout
from pdserve.models.dtypes import CACHE_DTYPES


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of all tokens of a sequence are kept."""


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Keys and values of a sequence's last tokens are kept."""

    sliding_window: int
    """Number of tokens, itself included, that a token attends to in the layer with the widest window."""


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec
"""The kind of a group: which keys and values of a sequence its layers need."""


def group_windows(specs: Sequence[KVCacheSpec]) -> tuple[int, ...]:
    """See `KvLayout.group_windows`. specs: of all groups."""
    if len(specs) == 1:
        return ()
    return tuple(spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0 for spec in specs)


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share a block table per sequence: one block has the keys and values of its tokens in all of them."""

    layers: tuple[int, ...]
    """At most `layout.num_layers`; the rest of a block is padding."""
    spec: KVCacheSpec
    layout: KvLayout
    """Equal in all groups, so that any group can use any block of the pool."""


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The cache of one model: groups that share a pool of `num_blocks` blocks, one tensor."""

    num_blocks: int
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]

    @property
    def specs(self) -> tuple[KVCacheSpec, ...]:
        return tuple(group.spec for group in self.kv_cache_groups)


def make_kv_cache(layout: KvLayout, num_blocks: int, device: str | torch.device = "cpu") -> Tensor:
    """Zeros `[num_blocks, *layout.block_shape]`, contiguous. Writes every page of memory, so that no step has to map one."""
    dtype, shape = CACHE_DTYPES[layout.dtype], (num_blocks, *layout.block_shape)
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device).zero_()
    return make_host_memory(num_blocks * layout.block_bytes).view(dtype).view(shape)


def make_host_memory(num_bytes: int) -> Tensor:
    """`[num_bytes]` uint8 zeros in main memory, in huge pages if the kernel has any. Writes every page."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # the keys of one head in one block are a few kilobytes, so with small pages each needs its own TLB entry
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()
