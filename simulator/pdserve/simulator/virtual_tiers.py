"""The tiers below the pool under virtual time: the product's `HostBlocks` and `DiskStore` over memory and files without bytes.

Each copy takes the time of its link. Work of a queue begins when what it did before has taken its time, and the engine learns of a
copy when it has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.common import clock
from pdserve.common.device_event import DeviceEvent
from pdserve.engine.runner.pool.segment_files import Buffers, SegmentFile
from pdserve.engine.scheduler_output import CopyEnd, LookupEnd
from pdserve.engine.sequence_blocks import RowPairs
from pdserve.simulator.virtual_time import VirtualTime
from pdserve.simulator.virtual_transfer import Line, Link, VirtualEvent, time_of

HOST_LINK = Link(25e9, 10e-6)
"""Default link between a device and host memory, in each direction: PCIe 4.0 x16."""
DISK_LINK = Link(3e9, 100e-6)
"""Default link of a disk, for reads and writes together: an NVMe drive."""


class VirtualDevice:
    """Steps and copies that run one after the other, in the order in which they were queued."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def queue(self, seconds: float) -> float:
        """Queue work. Returns when it, and all before it, has ended: `clock.monotonic()` seconds."""
        self._free_at = max(self._free_at, clock.monotonic()) + seconds
        return self._free_at


class VirtualQueues:
    """`CopyQueues` in the event loop: work takes the time that it spends."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, deque[Callable[[], object]]] = {}
        """Name of a queue that runs something -> what is to follow."""
        self._ended: list[CopyEnd | LookupEnd] = []
        self._has_ended = asyncio.Event()
        self._is_closed = False

    def put(self, name: str, work: Callable[[], object]) -> None:
        if name in self._waiting:
            self._waiting[name].append(work)
        else:
            self._waiting[name] = deque([work])
            self._loop.call_soon_threadsafe(self._run_next, name)

    def _run_next(self, name: str) -> None:
        waiting = self._waiting[name]
        if not waiting or self._is_closed:
            del self._waiting[name]
            return
        with self._time.apart() as spent:
            waiting.popleft()()
        self._loop.call_later(spent(), self._run_next, name)

    def end(self, end: CopyEnd | LookupEnd) -> None:
        # at the time of the queue, which is ahead of the loop's
        self._loop.call_soon_threadsafe(self._note, end)

    def _note(self, end: CopyEnd | LookupEnd) -> None:
        self._ended.append(end)
        self._has_ended.set()

    def take(self, timeout_s: float) -> list[CopyEnd | LookupEnd]:
        """As of `CopyQueues`, but does not wait: the engine's turn ends, and `until_ended` does."""
        ended, self._ended = self._ended, []
        self._has_ended.clear()
        return ended

    async def until_ended(self, timeout_s: float) -> None:
        """Wait for something to take, at most `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_ended.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        self._is_closed = True


class VirtualTierMemory:
    """A `TierMemory` without bytes. Copies of loads share a line; a block that was read from a store does not wait for them."""

    is_synchronous = False

    def __init__(self, time: VirtualTime, device: VirtualDevice, block_bytes: Sequence[int], link: Link) -> None:
        """device: also computes the steps. block_bytes: by shape."""
        self._time = time
        self._device = device
        self._block_bytes = block_bytes
        self._link = link
        self._line = Line(link)
        self._room = memoryview(bytearray(max(block_bytes)))
        """In place of every block."""

    def _num_bytes(self, pairs: RowPairs) -> int:
        return sum(len(rows) * size for rows, size in zip(pairs, self._block_bytes, strict=True)) if pairs else 0

    def store(self, pairs: RowPairs) -> VirtualEvent:
        num_bytes = self._num_bytes(pairs)
        return VirtualEvent(self._device.queue(self._link.seconds(num_bytes) if num_bytes else 0.0))

    def load(self, pairs: RowPairs, after: DeviceEvent) -> None:
        # of a load from the store only, nothing is left
        if num_bytes := self._num_bytes(pairs):
            self._time.spend_until(self._line.carry(num_bytes, time_of(after)))

    def slot(self, shape: int, row: int, after: DeviceEvent) -> memoryview:
        self._time.spend_until(time_of(after))
        return self.buffer(shape)

    def buffer(self, shape: int) -> memoryview:
        return self._room[: self._block_bytes[shape]]

    def load_buffer(self, shape: int, row: int, after: DeviceEvent) -> None:
        self._time.spend_until(time_of(after))
        self._time.spend(self._link.seconds(self._block_bytes[shape]))


@dataclass(frozen=True, slots=True)
class NoDigest:
    """A `BlockDigest` of blocks without bytes."""

    name: str = "none"

    def of(self, view: memoryview, index: int) -> int:
        return 0


class VirtualFolder:
    """A `SegmentFolder` of an empty disk, whose files have the headers of their records and no blocks."""

    def __init__(self, time: VirtualTime, link: Link, num_ranks: int) -> None:
        """num_ranks: write and read the same at the same time."""
        self.time = time
        self.line = Line(link)
        self.num_ranks = num_ranks

    def __str__(self) -> str:
        return "a simulated disk"

    def open_all(self) -> dict[int, SegmentFile]:
        return {}

    def create(self, number: int) -> SegmentFile:
        return _VirtualFile(self)

    def remove(self, number: int) -> None:
        """No effect: takes no time."""

    def write_index(self, number: int, data: bytes) -> None:
        """No effect: a simulation does not start again."""

    def read_index(self, number: int) -> bytes | None:
        return None

    def spend(self, num_bytes: int) -> None:
        self.time.spend_until(self.line.carry(num_bytes * self.num_ranks))


class _VirtualFile:
    def __init__(self, folder: VirtualFolder) -> None:
        self._folder = folder
        self._headers: dict[int, bytes] = {}
        """By offset."""
        self.size = 0

    def write(self, header: bytes | bytearray, data: memoryview, offset: int) -> int:
        num_bytes = len(header) + len(data)
        self._folder.spend(num_bytes)
        self._headers[offset] = bytes(header)
        self.size = max(self.size, offset + num_bytes)
        return num_bytes

    def read(self, into: Buffers, offset: int) -> int:
        num_bytes = sum(map(len, into))
        self._folder.spend(num_bytes)
        into[0][:] = self._headers[offset]
        return num_bytes
