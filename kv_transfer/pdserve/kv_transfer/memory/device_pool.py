"""`DevicePool`: a KV pool on a device, whose blocks leave and arrive through memory of the host or of the device.

    source    pool --lend--> pinned slots --TCP-->                 pool --NIXL-->
    receiver  --TCP or NIXL--> ring --move_in--> pool              (`landing_ring.py`)

A block is one run of bytes, so neighbouring blocks are one copy. Copies and digests use streams of their own: they neither wait for
later steps nor delay them. `xxh3_64` is computed on the device; `gmac`, for which there is no kernel, on the host.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pdserve.common.device_event import DeviceEvent
from pdserve.common.security.block_digest import XXH3_64, BlockDigest
from pdserve.kv_transfer.memory.device_digests import DigestBlocks, can_digest
from pdserve.kv_transfer.memory.pool_memory import HostPool, NoRoom, number_runs, part_bytes

LEND_SHARE = 16
"""One call of `lend` should ask for at most one part in 16 of the slots."""
BORROWER_SHARE = 4
"""One borrower holds at most one part in 4 of the slots."""
DIGESTED_BYTES = 64 << 20
"""Bytes that one call digests on a device, at most: its kernels need a sixteenth as much memory there."""


class DevicePool:
    """A `PoolMemory` on a device."""

    def __init__(
        self,
        kv_cache: Tensor,
        num_slots: int,
        num_digest_slots: int,
        slot_wait_s: float,
        digest_blocks: DigestBlocks | None = None,
    ) -> None:
        """kv_cache: `[num_blocks, ...]`, contiguous. num_slots: blocks of host memory, pinned for CUDA, through which blocks are
        lent. num_digest_slots: the same for digests on the host, which therefore wait for no peer. slot_wait_s: longest wait for
        slots. digest_blocks: computes xxh3_64 on the device; None: it is computed on the host."""
        self._slot_wait_s = slot_wait_s
        self._divided: dict[int, DevicePool] = {}
        self._dividing = threading.Lock()
        self._blocks = kv_cache.view(kv_cache.shape[0], -1)
        self.num_blocks = kv_cache.shape[0]
        self.block_bytes = self._blocks[0].nbytes
        self._slots = HostSlots(host_rows(kv_cache, num_slots), slot_wait_s)
        self._digest_slots = HostSlots(host_rows(kv_cache, num_digest_slots), slot_wait_s)
        self._in, self._out = _SideStream(kv_cache.device), _SideStream(kv_cache.device)
        # a digest is short, and a receiver waits for it: it goes before kernels of a step that have not begun
        self._digesting = _SideStream(kv_cache.device, priority=-1)
        self._digest_blocks = digest_blocks

    @property
    def address(self) -> int:
        return self._blocks.data_ptr()

    @property
    def device_id(self) -> int | None:
        return self._blocks.device.index or 0

    def divided(self, parts: int) -> DevicePool:
        """As `PoolMemory.divided`; each number of parts has as much host memory of its own as the whole pool."""
        if parts == 1:
            return self
        part_bytes(self.block_bytes, parts)
        with self._dividing:
            if parts not in self._divided:
                self._divided[parts] = DevicePool(
                    self._blocks.view(self.num_blocks * parts, -1),
                    self.num_slots * parts,
                    self._digest_slots.memory.num_blocks * parts,
                    self._slot_wait_s,
                    self._digest_blocks if can_digest(self.block_bytes // parts) else None,
                )
            return self._divided[parts]

    @property
    def num_slots(self) -> int:
        """Most blocks that can be lent at once."""
        return self._slots.memory.num_blocks

    @property
    def num_free_slots(self) -> int:
        """Blocks that can be lent now."""
        return self._slots.num_free

    @property
    def most_lent(self) -> int:
        """As `PoolMemory.most_lent`."""
        return max(1, self.num_slots // LEND_SHARE)

    def new_ring(self, num_slots: int, *, pinned: bool) -> Tensor:
        """Memory for a `LandingRing`, `[num_slots, ...]`. pinned: memory of the host instead of the device."""
        if pinned:
            return host_rows(self._blocks, num_slots)
        return torch.zeros_like(self._blocks[:1]).repeat(num_slots, 1)

    @contextmanager
    def lend(self, blocks: Sequence[int], borrower: Hashable = None) -> Iterator[list[memoryview]]:
        """As `PoolMemory.lend`: copies the blocks to pinned slots. Raises: also ValueError for more blocks than slots."""
        self._verify(blocks)
        if len(blocks) > self.num_slots:
            raise ValueError(f"{len(blocks)} blocks cannot be lent at once, at most {self.num_slots} can")
        with self._copied(self._slots, blocks, borrower) as views:
            yield views

    def digests(self, blocks: Sequence[int], indexes: Sequence[int], digest: BlockDigest) -> list[int]:
        """As `PoolMemory.digests`."""
        self._verify(blocks)
        if self._digest_blocks is not None and digest.name == XXH3_64:
            return self._digests_there(self._digest_blocks, blocks)
        at_once = self._digest_slots.memory.num_blocks
        found: list[int] = []
        for first in range(0, len(blocks), at_once):
            part = slice(first, first + at_once)
            with self._copied(self._digest_slots, blocks[part]) as views:
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

    def _digests_there(self, digest_blocks: DigestBlocks, blocks: Sequence[int]) -> list[int]:
        """xxh3_64 of these blocks, computed on the device."""
        at_once = max(1, DIGESTED_BYTES // self.block_bytes)
        found: list[int] = []
        for first in range(0, len(blocks), at_once):
            with self._digesting.use():
                found += digest_blocks(self._blocks, blocks[first : first + at_once]).cpu().tolist()
        return [value % (1 << 64) for value in found]

    @contextmanager
    def _copied(self, slots: HostSlots, blocks: Sequence[int], borrower: Hashable = None) -> Iterator[list[memoryview]]:
        """Copies of these blocks in slots of the host, while the context lasts."""
        numbers = slots.take(len(blocks), borrower)
        try:
            self._out.copy(slots.rows, numbers, self._blocks, blocks)
            yield slots.memory.views(numbers)
        finally:
            slots.give_back(numbers, borrower)

    def _verify(self, blocks: Sequence[int]) -> None:
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.num_blocks:
            raise IndexError(f"blocks {min(blocks)} to {max(blocks)} are not all in the pool of {self.num_blocks}")


class HostSlots:
    """Blocks of host memory that are taken one group at a time. Thread-safe."""

    def __init__(self, rows: Tensor, wait_s: float) -> None:
        """rows: `[num_slots, ...]`, on the host."""
        self.rows = rows
        self.memory = host_pool(rows)
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._free = list(range(self.memory.num_blocks - 1, -1, -1))
        self._share = max(1, self.memory.num_blocks // BORROWER_SHARE)
        self._held: Counter[Hashable] = Counter()
        """Slots by borrower."""

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)

    def take(self, count: int, borrower: Hashable = None) -> list[int]:
        """`count` slots, in ascending order. Raises: NoRoom after `wait_s`.

        A borrower, unless it is None, has no more than its share, or one group; half of the slots are for borrowers that have none.
        """

        def has_room() -> bool:
            num_left = len(self._free) - count
            if borrower is None or not self._held[borrower]:
                return num_left >= 0
            return self._held[borrower] + count <= self._share and num_left >= self.memory.num_blocks // 2

        with self._changed:
            if not self._changed.wait_for(has_room, self._wait_s):
                held = f", of which this peer holds {self._held[borrower]}" if self._held[borrower] else ""
                raise NoRoom(
                    f"{count} of {self.memory.num_blocks} blocks of host memory{held}, were not free within "
                    f"{self._wait_s:g} s"
                )
            if borrower is not None:
                self._held[borrower] += count
            return sorted(self._free.pop() for _ in range(count))

    def give_back(self, slots: Sequence[int], borrower: Hashable = None) -> None:
        with self._changed:
            self._free.extend(reversed(slots))
            if borrower is not None:
                self._held[borrower] -= len(slots)
                if not self._held[borrower]:
                    del self._held[borrower]
            self._changed.notify_all()


class _SideStream:
    """Work on a device during the engine's, one call after the other."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        """priority: as of `torch.cuda.Stream`, lower numbers first."""
        self._lock = threading.Lock()
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority) if is_cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def use(self) -> Iterator[None]:
        """Work that is launched in this context goes to the stream; on leaving it is done."""
        with self._lock, torch.inference_mode(), torch.cuda.stream(self._stream):
            yield
            if self._stream is not None:
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                done.record(self._stream)
                done.synchronize()

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
        with self.use():
            position = 0
            for first, count in number_runs(of):
                for start, length in number_runs(to[position : position + count]):
                    target[start : start + length].copy_(origin[first : first + length], non_blocking=True)
                    first += length
                position += count


def host_rows(like: Tensor, count: int) -> Tensor:
    """Zeros `[count, ...]` in host memory with blocks as in `like` `[n, ...]`, pinned if that is on CUDA."""
    row = like[:1].flatten(1)
    return torch.zeros((count, row.shape[1]), dtype=row.dtype, pin_memory=like.is_cuda)


def host_pool(kv_cache: Tensor) -> HostPool:
    """The bytes of blocks `[num_blocks, ...]` in host memory, for the data plane."""
    data = kv_cache.flatten().view(torch.uint8).numpy().data
    return HostPool(memoryview(data), kv_cache[0].nbytes, kv_cache.shape[0])
