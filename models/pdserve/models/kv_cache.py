"""The KV cache: groups of layers, and the pool of blocks that they share."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.common.kv_layout import BlockShape, KvLayout
from pdserve.models.dtypes import CACHE_DTYPES


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of all tokens of a sequence are kept."""

    shape: int = 0
    """Of the group's blocks: the index in `KvLayout.shapes`."""


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Keys and values of a sequence's last tokens are kept."""

    sliding_window: int
    """Number of tokens, itself included, that a token attends to in the layer with the widest window."""
    shape: int = 0
    """As of `FullAttentionSpec`."""

    @property
    def reach(self) -> int:
        """Tokens that a token attends to at most, itself included."""
        return self.sliding_window


@dataclass(frozen=True, slots=True)
class ChunkedLocalAttentionSpec:
    """Keys and values of a sequence's tokens in the current chunk of positions are kept."""

    attention_chunk_size: int
    """Positions of a chunk; the first chunk begins at 0."""
    shape: int = 0
    """As of `FullAttentionSpec`."""

    @property
    def reach(self) -> int:
        """As of `SlidingWindowSpec`."""
        return self.attention_chunk_size


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state after a sequence's last token is kept, and some after earlier ones."""

    shape: int = 0
    """As of `FullAttentionSpec`."""


@dataclass(frozen=True, slots=True)
class DraftHeadSpec:
    """Keys and values that the draft head has of all tokens of a sequence. Always the last group, and left out of transfers to or
    from a worker without this head."""

    shape: int = 0
    """As of `FullAttentionSpec`."""


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec | StateSpec | DraftHeadSpec
"""The kind of a group: which keys and values, or states, of a sequence its layers need."""
STATE_WINDOW = 2
"""The next token needs the block at the last one, as if it attended to that one and itself."""


def group_windows(specs: Sequence[KVCacheSpec]) -> tuple[int, ...]:
    """See `KvLayout.group_windows`. specs: of all groups. An only group has none: a transfer moves all of its blocks."""
    if len(specs) == 1 and not isinstance(specs[0], StateSpec):
        return (0,)
    return tuple(_window(spec) for spec in specs)


def group_chunks(specs: Sequence[KVCacheSpec]) -> tuple[int, ...]:
    """See `KvLayout.group_chunks`. specs: of all groups. An only group has none, as of `group_windows`."""
    chunks = [spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else 0 for spec in specs]
    return tuple(chunks) if len(specs) > 1 and any(chunks) else ()


def _window(spec: KVCacheSpec) -> int:
    if isinstance(spec, StateSpec):
        return STATE_WINDOW
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share a block table per sequence: one block has the keys and values of its tokens in all of them."""

    layers: tuple[int, ...]
    """At most `shape.num_layers`; the rest of a block is padding."""
    spec: KVCacheSpec
    shape: BlockShape
    """Groups of one shape can use any block of its pool."""


def shapes_of(groups: Sequence[KVCacheGroupSpec]) -> tuple[BlockShape, ...]:
    """Different shapes, in the order of `KvLayout.shapes`."""
    return tuple(dict.fromkeys(group.shape for group in groups))


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The cache of one model: its groups, and a pool of blocks for each shape, one tensor."""

    layout: KvLayout
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    num_blocks: tuple[int, ...]
    """Per shape of the layout."""

    @property
    def specs(self) -> tuple[KVCacheSpec, ...]:
        return tuple(group.spec for group in self.kv_cache_groups)


def make_kv_cache(shape: BlockShape, num_blocks: int, device: str | torch.device = "cpu") -> Tensor:
    """Zeros `[num_blocks, *shape.dims]`, contiguous. Writes every page of memory, so that no step has to map one."""
    dtype, dims = CACHE_DTYPES[shape.dtype], (num_blocks, *shape.dims)
    if torch.device(device).type != "cpu":
        return torch.empty(dims, dtype=dtype, device=device).zero_()
    return make_host_memory(num_blocks * shape.block_bytes).view(dtype).view(dims)


def make_kv_caches(
    groups: Sequence[KVCacheGroupSpec], num_blocks: Sequence[int], device: str | torch.device = "cpu"
) -> tuple[Tensor, ...]:
    """Per group, the pool of its shape. num_blocks: by shape."""
    pools = {
        shape: make_kv_cache(shape, count, device) for shape, count in zip(shapes_of(groups), num_blocks, strict=True)
    }
    return tuple(pools[group.shape] for group in groups)


def pools_of(kv_caches: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Different ones of the caches of KV cache groups, by shape."""
    return tuple({id(kv_cache): kv_cache for kv_cache in kv_caches}.values())


def make_host_memory(num_bytes: int) -> Tensor:
    """`[num_bytes]` uint8 zeros in main memory, in huge pages if the kernel has any. Writes every page."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # the keys of one head in one block are a few kilobytes, so with small pages each needs its own TLB entry
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()
