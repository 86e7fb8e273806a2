"""`DevicePool`: a KV pool on a device, whose blocks leave and arrive through memory of the host or of the device.

    source    pool --lend, digests--> pinned slots --TCP-->        pool --NIXL-->
    receiver  --TCP or NIXL--> ring --move_in--> pool              (`landing_ring.py`)

A block is one run of bytes, so neighbouring blocks are one copy. Copies use streams of their own: they neither wait for later steps
nor delay them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pdserve.common.device_event import DeviceEvent
from pdserve.kv_transfer.block_digest import BlockDigest
from pdserve.kv_transfer.memory.pool_memory import HostPool, NoRoom, number_runs

_DIGEST_SHARE = 4
"""Digests use at most one part in 4 of the slots at once, so that sends go on meanwhile."""


class DevicePool:
    """A `PoolMemory` on a device."""

    def __init__(self, kv_cache: Tensor, num_slots: int, slot_wait_s: float) -> None:
        """kv_cache: `[num_blocks, ...]`, contiguous. num_slots: blocks of host memory, pinned for CUDA, through which blocks leave.
        slot_wait_s: longest wait for slots."""
        self._blocks = kv_cache.view(kv_cache.shape[0], -1)
        self.num_blocks = kv_cache.shape[0]
        self.block_bytes = self._blocks[0].nbytes
        self._slots = SendSlots(host_rows(kv_cache, num_slots), slot_wait_s)
        self._in, self._out = _CopyStream(kv_cache.device), _CopyStream(kv_cache.device)

    @property
    def address(self) -> int:
        return self._blocks.data_ptr()

    @property
    def device_id(self) -> int | None:
        return self._blocks.device.index or 0

    @property
    def num_slots(self) -> int:
        """Most blocks that can be lent at once."""
        return self._slots.memory.num_blocks

    def new_ring(self, num_slots: int, *, pinned: bool) -> Tensor:
        """Memory for a `LandingRing`, `[num_slots, ...]`. pinned: memory of the host instead of the device."""
        if pinned:
            return host_rows(self._blocks, num_slots)
        return torch.zeros_like(self._blocks[:1]).repeat(num_slots, 1)

    @contextmanager
    def lend(self, blocks: Sequence[int]) -> Iterator[list[memoryview]]:
        """As `PoolMemory.lend`: copies the blocks to pinned slots. Raises: also ValueError for more blocks than slots."""
        self._verify(blocks)
        slots = self._slots.take(len(blocks))
        try:
            self._out.copy(self._slots.rows, slots, self._blocks, blocks)
            yield self._slots.memory.views(slots)
        finally:
            self._slots.give_back(slots)

    def digests(self, blocks: Sequence[int], indexes: Sequence[int], digest: BlockDigest) -> list[int]:
        """As `PoolMemory.digests`."""
        at_once = max(1, self.num_slots // _DIGEST_SHARE)
        found: list[int] = []
        for first in range(0, len(blocks), at_once):
            part = slice(first, first + at_once)
            with self.lend(blocks[part]) as views:
                size = self.block_bytes
                copies = (view[start : start + size] for view in views for start in range(0, len(view), size))
                found += [digest.of(copy, index) for copy, index in zip(copies, indexes[part], strict=True)]
        return found

    def move_in(
        self, ring: Tensor, slots: Sequence[int], blocks: Sequence[int], unused: DeviceEvent | None = None
    ) -> None:
        """Copy slots of a ring to blocks; complete for every kernel launched after this returns.

        unused: the event of the last step that may write these blocks for an earlier owner; the copy waits for it.
        """
        self._in.copy(self._blocks, blocks, ring, slots, unused)

    def _verify(self, blocks: Sequence[int]) -> None:
        if len(blocks) > self.num_slots:
            raise ValueError(f"{len(blocks)} blocks cannot be lent at once, at most {self.num_slots} can")
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise IndexError(f"blocks {min(blocks)} to {max(blocks)} are not all in the pool of {self.num_blocks}")


class SendSlots:
    """Blocks of host memory that are lent one group at a time. Thread-safe."""

    def __init__(self, rows: Tensor, wait_s: float) -> None:
        """rows: `[num_slots, ...]`, on the host."""
        self.rows = rows
        self.memory = host_pool(rows)
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._free = list(range(self.memory.num_blocks - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        """`count` slots, in ascending order. Raises: NoRoom after `wait_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._free) >= count, self._wait_s):
                raise NoRoom(
                    f"{count} of {self.memory.num_blocks} blocks of host memory were not free within {self._wait_s:g} s"
                )
            return sorted(self._free.pop() for _ in range(count))

    def give_back(self, slots: Sequence[int]) -> None:
        with self._changed:
            self._free.extend(reversed(slots))
            self._changed.notify_all()


class _CopyStream:
    """Copies of blocks in one direction, one call after the other."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(
        self,
        target: Tensor,
        to: Sequence[int],
        origin: Tensor,
        of: Sequence[int],
        after: DeviceEvent | None = None,
    ) -> None:
        """`target[to[i]] = origin[of[i]]`, done when this returns."""
        if after is not None:
            after.synchronize()
        with self._lock, torch.inference_mode(), torch.cuda.stream(self._stream):
            position = 0
            for first, count in number_runs(of):
                for start, length in number_runs(to[position : position + count]):
                    target[start : start + length].copy_(origin[first : first + length], non_blocking=True)
                    first += length
                position += count
            if self._stream is not None:
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(self._stream)
                done.synchronize()


def host_rows(like: Tensor, count: int) -> Tensor:
    """Zeros `[count, ...]` in host memory with blocks as in `like` `[n, ...]`, pinned if that is on CUDA."""
    row = like[:1].flatten(1)
    return torch.zeros((count, row.shape[1]), dtype=row.dtype, pin_memory=like.is_cuda)


def host_pool(kv_cache: Tensor) -> HostPool:
    """The bytes of blocks `[num_blocks, ...]` in host memory, for the data plane."""
    data = kv_cache.flatten().view(torch.uint8).numpy().data
    return HostPool(memoryview(data), kv_cache[0].nbytes, kv_cache.shape[0])
