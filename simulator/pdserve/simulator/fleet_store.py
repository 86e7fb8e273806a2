"""`FleetStore`: a store of blocks that the workers of a simulation share, and `SharedStore`, a worker's way to it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from pdserve.engine.runner.pool.mooncake_store import MAX_BLOCK_BYTES
from pdserve.simulator.virtual_time import VirtualTime
from pdserve.simulator.virtual_transfer import Line

Key = tuple[bytes, bytes]
"""Which workers can use a block, and its name."""


class FleetStore:
    """Names and sizes in the memory that all workers add. When it is full, the least recently used blocks are given up."""

    def __init__(self) -> None:
        self._max_bytes = 0
        self._num_bytes = 0
        self._blocks: OrderedDict[Key, int] = OrderedDict()
        """Key -> bytes, last used last."""

    def add_segment(self, num_bytes: int) -> None:
        """A worker adds memory."""
        self._max_bytes += num_bytes

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def fits(self, num_bytes: int) -> bool:
        return num_bytes <= self._max_bytes

    def put(self, key: Key, num_bytes: int) -> None:
        """A block that fits, which is there from now on."""
        self.remove(key)
        self._blocks[key] = num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, given_up = self._blocks.popitem(last=False)
            self._num_bytes -= given_up

    def use(self, key: Key) -> int | None:
        """The size of a block, which is used now; None if it is not there."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def remove(self, key: Key) -> None:
        self._num_bytes -= self._blocks.pop(key, 0)

    def clear(self, context: bytes) -> None:
        """Remove the blocks of some workers."""
        for key in [key for key in self._blocks if key[0] == context]:
            self.remove(key)


class SharedStore:
    """A `BlockStore`. A call takes a message to the store and one back, and the time of the bytes on the worker's network card, in
    which each rank has its part of a block on a card of its own."""

    def __init__(
        self,
        fleet: FleetStore,
        time: VirtualTime,
        context: bytes,
        num_ranks: int,
        latency_s: float,
        inward: Line,
        outward: Line,
    ) -> None:
        """context: of workers whose blocks are alike. latency_s: of a message. inward, outward: of rank 0, both ways."""
        self._fleet = fleet
        self._time = time
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._num_ranks = num_ranks
        self._latency_s = latency_s
        self._inward, self._outward = inward, outward

    def _ask(self) -> None:
        self._time.spend(2 * self._latency_s)

    def names(self) -> list[bytes]:
        return []

    def find(self, names: Sequence[bytes]) -> list[bytes]:
        self._ask()
        return [name for name in names if (self._context, name) in self._fleet]

    def write(self, name: bytes, data: memoryview, digest: int) -> list[bytes]:
        num_bytes = len(data) * self._num_ranks
        if len(data) > MAX_BLOCK_BYTES:
            return [name]
        if self.find([name]):
            return []
        if not self._fleet.fits(num_bytes):
            return [name]
        self._time.spend_until(self._outward.carry(len(data)))
        self._ask()
        # others find it when its last byte is there, which is later than the loop's time
        self._loop.call_soon_threadsafe(self._fleet.put, (self._context, name), num_bytes)
        return []

    def read(self, name: bytes, into: memoryview) -> int | None:
        self._ask()
        if self._fleet.use((self._context, name)) is None:
            return None
        self._time.spend_until(self._inward.carry(len(into)))
        return 0

    def forget(self, name: bytes) -> None:
        self._fleet.remove((self._context, name))

    def clear(self) -> None:
        self._ask()
        self._fleet.clear(self._context)

    def close(self) -> None:
        """No effect."""
