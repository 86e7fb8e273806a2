"""`BlockReader`: the receiver's side of connectors: finds a peer's connections, and refuses invalid reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.kv_transfer.connector import BlockRead, BlockToRead, ReadListener, ReadOrder, ReadOutcome
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.pull.connection import Connection
from pdserve.kv_transfer.pull.peer_connections import PeerConnections, PeerLimits
from pdserve.kv_transfer.pull.read_grants import TOKEN_BYTES
from pdserve.kv_transfer.totals import Totals

Address = TypeVar("Address", bound=Hashable)

_MAX_INDEX = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """Settings that connectors share."""

    connect_timeout_s: float = 2.0
    """Seconds for a connection to a peer."""
    read_stall_s: float = 3.0
    """Seconds without progress after which a read fails."""
    request_bytes: int = 1 << 20
    """Most bytes in one window, at least one block; a short read may wait for one window per connection."""
    longest_request_bytes: int = 8 << 20
    """Most bytes in one window while windows arrive within milliseconds (`ReadQueue`)."""
    read_window_bytes: int = 16 << 20
    """Most bytes in flight for one read."""
    idle_close_s: float
    """Seconds without reads after which a connection is closed."""

    def __post_init__(self) -> None:
        if not 1 <= self.request_bytes <= self.longest_request_bytes <= self.read_window_bytes:
            raise ConfigError(
                "request_bytes must be at least 1, longest_request_bytes at least that, read_window_bytes at least both"
            )
        if min(self.connect_timeout_s, self.read_stall_s) <= 0:
            raise ConfigError("connect_timeout_s and read_stall_s must be above 0")

    def limits(self, block_bytes: int, max_readers: int) -> PeerLimits:
        """The limits for one peer in whole blocks, at least one block each."""
        return PeerLimits(
            max_readers=max_readers,
            window_blocks=max(1, self.request_bytes // block_bytes),
            longest_window_blocks=max(1, self.longest_request_bytes // block_bytes),
            in_flight_blocks=max(1, self.read_window_bytes // block_bytes),
            idle_close_s=self.idle_close_s,
        )


class CompletedRead:
    """A read that failed before it began."""

    def cancel(self) -> None:
        """No effect, since the read has ended."""


@dataclass(eq=False)
class BlockReader(Generic[Address]):
    """Reads of one connector into one pool. Thread-safe."""

    _name: str
    """Prefix of the reader threads' names."""
    _pool: PoolMemory
    _limits: PeerLimits
    """For whole blocks."""
    _events: EventThread
    _connect: Callable[[Address, int], Connection]
    """(address, parts) -> a connection for the pool divided into `parts`, made within a bounded time; or raises TransferFailed."""
    _max_resting: int | None = None
    """Most peers whose idle connections are kept, without the last one used; None: no limit, they close after their idle time."""
    counters: Totals = field(default_factory=Totals, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _closed: bool = field(default=False, init=False)
    _peers: dict[tuple[Address, int], PeerConnections] = field(default_factory=dict, init=False)
    """(address, parts per block) -> connections."""

    def read(self, find_address: Callable[[], Address], order: ReadOrder, listener: ReadListener) -> BlockRead:
        """As `BlockConnector.read`. find_address: reads the peer's metadata, or raises TransferFailed."""
        if order.unused is not None:
            raise ValueError("bytes are written as they arrive: only a ring can wait for a step")
        try:
            address = find_address()
            verify_read(order.token, order.blocks, self._pool.num_blocks * order.parts)
        except TransferFailed as error:
            return self._ended(listener, ReadOutcome.FAILED, error)
        if not order.blocks:
            return self._ended(listener, ReadOutcome.DONE)
        with self._lock:
            if self._closed:
                return self._ended(listener, ReadOutcome.CANCELLED)
            connections = self._connections(address, order.parts)
            self._trim(connections)
            return connections.read(order.token, tuple(order.blocks), listener, order.digest)

    def close_idle(self, address: Address) -> None:
        """Close this peer's idle connections; a later read makes new ones. Returns at once."""
        with self._lock:
            for (known, _), connections in self._peers.items():
                if known == address:
                    connections.close_idle()

    def close(self) -> None:
        """End all reads with CANCELLED and join all reader threads. Idempotent."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
            self._peers.clear()
        for connections in peers:
            connections.close()

    def _connections(self, address: Address, parts: int) -> PeerConnections:
        connections = self._peers.get((address, parts))
        if connections is None:
            # restarted workers have new ports; drop idle entries, so that those of ended workers do not accumulate
            self._peers = {known: old for known, old in self._peers.items() if not old.is_idle}
            connections = self._peers[address, parts] = PeerConnections(
                str(address),
                self._pool.divided(parts),
                self._limits.for_parts(parts),
                self.counters,
                lambda: self._connect(address, parts),
                self._events.call_soon,
                f"{self._name}-{address}" if parts == 1 else f"{self._name}-{address}/{parts}",
            )
        return connections

    def _trim(self, used: PeerConnections) -> None:
        """Close the idle connections of the least recently read peers beyond `max_resting`."""
        if self._max_resting is None or len(self._peers) <= self._max_resting:
            return
        resting = sorted(
            (connections for connections in self._peers.values() if connections is not used and connections.is_resting),
            key=lambda connections: connections.used_at,
        )
        for connections in resting[: max(0, len(resting) - self._max_resting)]:
            connections.close_idle()

    def _ended(
        self, listener: ReadListener, outcome: ReadOutcome, cause: TransferFailed | None = None
    ) -> CompletedRead:
        self._events.call_soon(lambda: listener.ended(outcome, cause))
        return CompletedRead()


def verify_read(token: bytes, blocks: Sequence[BlockToRead], num_blocks: int) -> None:
    """Check a read into a pool of `num_blocks` blocks. Raises: TransferFailed."""
    if len(token) != TOKEN_BYTES:
        raise TransferFailed(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")
    for block in blocks:
        if not 0 <= block.local_block < num_blocks or not 0 <= block.index < _MAX_INDEX:
            raise TransferFailed(f"index {block.index} cannot be read into block {block.local_block}")
