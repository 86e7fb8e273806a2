"""`VirtualConnector`: a data plane whose blocks have no bytes and take the time of a link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve.common import clock
from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import BlockDigest
from pdserve.kv_transfer.connector import Grant, ReadListener, ReadOrder, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import PoolMemory


@dataclass(frozen=True, slots=True)
class Link:
    """A way of bytes, as a network card, the bus to host memory, or a disk."""

    bytes_per_s: float
    latency_s: float
    """Seconds from a read's begin to its first byte."""

    def seconds(self, num_bytes: int) -> float:
        """Of one read, which waits for no other."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Line:
    """A `Link` in use: its reads share it, one after the other."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_at = 0.0
        """`clock.monotonic()` seconds at which the reads so far have ended."""

    def carry(self, num_bytes: int, after: float = 0.0) -> float:
        """Begin a read now, or at `after` if that is later. Returns when it has ended, `clock.monotonic()` seconds."""
        begins_at = max(max(clock.monotonic(), after) + self._link.latency_s, self._free_at)
        self._free_at = begins_at + num_bytes / self._link.bytes_per_s
        return self._free_at


@dataclass(frozen=True, slots=True)
class VirtualEvent:
    """A `DeviceEvent` whose time is known."""

    at: float
    """`clock.monotonic()` seconds."""

    def synchronize(self) -> None:
        raise RuntimeError("nothing waits for an event of a simulation: its time is known")


def time_of(event: DeviceEvent | None) -> float:
    """`clock.monotonic()` seconds of an event of a simulation; 0 without one."""
    if event is None:
        return 0.0
    assert isinstance(event, VirtualEvent)
    return event.at


@dataclass(frozen=True, slots=True)
class VirtualPool:
    """A `PoolMemory` without memory."""

    block_bytes: int
    num_blocks: int
    address: int = 0
    device_id: None = None

    def divided(self, parts: int) -> VirtualPool:
        return VirtualPool(self.block_bytes // parts, self.num_blocks * parts)

    @property
    def most_lent(self) -> int:
        return self.num_blocks

    @contextmanager
    def lend(self, blocks: Sequence[int], borrower: Hashable = None) -> Iterator[list[memoryview]]:
        yield [memoryview(b"")] * len(blocks)

    def digests(self, blocks: Sequence[int], indexes: Sequence[int], digest: BlockDigest) -> list[int]:
        return [0] * len(blocks)


class VirtualConnector:
    """A `BlockConnector`."""

    def __init__(self, name: str, line: Line) -> None:
        """line: of the rank's network card."""
        self.name = name
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._pool: PoolMemory | None = None

    def serve(self, pool: PoolMemory, landing: PoolMemory | None = None) -> None:
        self._pool = pool

    @property
    def metadata(self) -> bytes:
        return f"virtual {id(self)}".encode()

    def grant(self, token: bytes, parts: int = 1) -> Grant:
        return _Grant()

    def read(self, order: ReadOrder, listener: ReadListener) -> _Read:
        assert self._pool is not None
        num_bytes = len(order.blocks) * self._pool.block_bytes // order.parts
        ends_at = self._line.carry(num_bytes, time_of(order.unused))
        return _Read(self._loop, ends_at, len(order.blocks), listener)

    def close(self) -> None:
        """No effect."""


class _Grant:
    def publish(self, first_index: int, blocks: Sequence[int]) -> None:
        """No effect: readers know the blocks."""

    def close(self, on_fenced: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(on_fenced)


class _Read:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, ends_at: float, num_blocks: int, listener: ReadListener
    ) -> None:
        self._listener = listener
        self._num_blocks = num_blocks
        self._timer = loop.call_at(ends_at, self._end)
        self._has_ended = False

    def _end(self) -> None:
        self._listener.landed(0, self._num_blocks)
        self._over(ReadOutcome.DONE)

    def _over(self, outcome: ReadOutcome, cause: TransferFailed | None = None) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._listener.ended(outcome, cause)

    def cancel(self) -> None:
        self._timer.cancel()
        asyncio.get_running_loop().call_soon(self._over, ReadOutcome.CANCELLED)
