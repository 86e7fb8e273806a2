"""`TierMemory`: the bytes of an engine's pool and of its host-memory tier, and how they get from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pdserve.common.device_event import DeviceEvent
from pdserve.engine.runner.device.device_runtime import DeviceRuntime, TimedEvent, make_runtime
from pdserve.engine.sequence_blocks import BlockCounts, RowPairs
from pdserve.models.kv_cache import make_host_memory, pools_of

Copies = Sequence[tuple[Tensor, Tensor, Sequence[tuple[int, int]]]]
"""(from, to, pairs of their rows), by shape of blocks."""


def make_host_caches(pools: Sequence[Tensor], num_slots: BlockCounts) -> tuple[Tensor, ...]:
    """Slots for blocks of each pool `[num_blocks, ...]`: zeros `[num_slots, ...]` in main memory, pinned for a GPU. A pool without
    bytes has slots without.

    pools, num_slots: by shape of blocks.
    """
    caches = []
    for pool, count in zip(pools, num_slots, strict=True):
        num_bytes = count * pool[0].numel() * pool.element_size()
        if pool.is_meta:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        elif pool.device.type == "cpu":
            memory = make_host_memory(num_bytes)
        else:
            memory = make_runtime(pool.device).host_memory(num_bytes)
        caches.append(memory.view(pool.dtype).view(count, *pool.shape[1:]))
    return tuple(caches)


class TierMemory(Protocol):
    """Pool, slots, and per shape a buffer for one block. An event is reached after all work that was queued before it.

    The engine thread calls `store`, one queue `load`, and another one all others.
    """

    @property
    def is_synchronous(self) -> bool:
        """True if steps and stores have ended when their calls return, as on a CPU."""

    def store(self, pairs: RowPairs) -> DeviceEvent:
        """Queue copies (row of the pool, slot), by shape, after the steps so far. Returns the event after them.

        pairs: empty without any."""

    def load(self, pairs: RowPairs, after: DeviceEvent) -> None:
        """Copy (slot, row of the pool), by shape, after an event; returns when that has ended."""

    def slot(self, shape: int, row: int, after: DeviceEvent) -> memoryview:
        """The bytes of a slot after an event."""

    def buffer(self, shape: int) -> memoryview:
        """Room for a block that is read."""

    def load_buffer(self, shape: int, row: int, after: DeviceEvent) -> None:
        """Copy the buffer of a shape to a row of the pool, as `load`."""


class TensorMemory:
    """Implements `TierMemory`."""

    def __init__(
        self, kv_caches: Sequence[Tensor], host_caches: Sequence[Tensor], runtime: DeviceRuntime | None = None
    ) -> None:
        """kv_caches: by KV cache group. host_caches: by shape of blocks. runtime: default: the pools' device's."""
        self._pools = pools_of(kv_caches)
        self._host_caches = host_caches
        self._runtime = runtime or make_runtime(kv_caches[0].device)
        self._buffers: dict[int, Tensor] = {}

    @property
    def is_synchronous(self) -> bool:
        return self._runtime.is_synchronous

    @torch.inference_mode()
    def store(self, pairs: RowPairs) -> TimedEvent:
        if pairs:
            _copy_all(list(zip(self._pools, self._host_caches, pairs, strict=True)))
        return self._runtime.event()

    def load(self, pairs: RowPairs, after: DeviceEvent) -> None:
        self._copy_beside(list(zip(self._host_caches, self._pools, pairs, strict=True)), after)

    def slot(self, shape: int, row: int, after: DeviceEvent) -> memoryview:
        after.synchronize()
        return _bytes_of(self._host_caches[shape][row])

    def buffer(self, shape: int) -> memoryview:
        if shape not in self._buffers:
            block = self._pools[shape][0]
            self._buffers[shape] = self._runtime.host_memory(block.numel() * block.element_size())
        return _bytes_of(self._buffers[shape])

    def load_buffer(self, shape: int, row: int, after: DeviceEvent) -> None:
        pool = self._pools[shape]
        source = self._buffers[shape].view(pool.dtype).view(1, *pool.shape[1:])
        self._copy_beside([(source, pool, [(0, row)])], after)

    def _copy_beside(self, copies: Copies, after: DeviceEvent) -> None:
        self._runtime.copy_beside(after, partial(_copy_all, copies))


def _copy_all(copies: Copies) -> None:
    # a block is one run of bytes on both sides; torch releases the interpreter lock for each
    for source, target, pairs in copies:
        for source_row, target_row in pairs:
            target[target_row].copy_(source[source_row], non_blocking=True)


def _bytes_of(memory: Tensor) -> memoryview:
    """The bytes of contiguous main memory."""
    return memory.reshape(-1).view(torch.uint8).numpy().data
