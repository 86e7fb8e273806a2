"""`LocalConnector`: moves blocks within one process, with simulated faults."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import BlockRead, BlockToRead, Grant, ReadListener, ReadOrder
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.memory.pool_memory import HostPool, PoolMemory
from pdserve.kv_transfer.pull.block_reader import BlockReader, ReadSettings
from pdserve.kv_transfer.pull.connection import ConnectionBroken
from pdserve.kv_transfer.pull.read_grants import InFlightSend, ReadGrants, ReadRefusal
from pdserve.kv_transfer.totals import Totals

_IDLE_CLOSE_S = 60.0
_FENCE_AFTER_S = 1.0


class LocalSource:
    """The source side of a `LocalConnector`, with its simulated faults. Fields change under `LocalNetwork.changed`."""

    def __init__(self, pool: PoolMemory, grants: ReadGrants) -> None:
        self.pool = pool
        self.grants = grants
        self.is_closed = False
        self.blocks_to_serve: int | None = None
        """Blocks to send before it stops responding; None: no limit."""
        self.blocks_to_flip = 0
        """Blocks to deliver with one bit changed."""


class LocalNetwork:
    """Connectors that can reach each other. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards the sources; notified when one of them continues or ends, or when a connection is interrupted."""
        self._sources: dict[str, LocalSource] = {}
        self._numbers = itertools.count()

    def join(self, source: LocalSource) -> str:
        """Make a source reachable; returns its address."""
        with self.changed:
            address = f"local:{next(self._numbers)}"
            self._sources[address] = source
            return address

    def leave(self, address: str) -> None:
        """End a source and break its reads. Idempotent."""
        with self.changed:
            source = self._sources.pop(address, None)
            if source is not None:
                source.is_closed = True
                self.changed.notify_all()

    def find(self, address: str) -> LocalSource:
        """The source at this address. Raises: TransferFailed if there is none."""
        with self.changed:
            source = self._sources.get(address)
        if source is None:
            raise TransferFailed(f"there is no source at {address!r} in this process")
        return source


class LocalConnector:
    """A `BlockConnector` whose peers are the members of one `LocalNetwork`. The receiver's thread copies the bytes.

    read_stall_s: seconds without a block after which a read fails. request_bytes: most bytes copied before another read from the
    same source has its turn.
    """

    name = "local"

    def __init__(self, network: LocalNetwork, *, read_stall_s: float = 1.0, request_bytes: int = 1 << 20) -> None:
        self._network = network
        self._read_stall_s = read_stall_s
        self._request_bytes = request_bytes
        self._events = EventThread("local-events")
        self._started: tuple[str, LocalSource, BlockReader[str]] | None = None

    def serve(self, pool: PoolMemory, landing: PoolMemory | None = None) -> None:
        """As `BlockConnector.serve`; blocks land in memory of the host."""
        if self._started is not None:
            raise RuntimeError("a connector serves once")
        into = landing or pool
        assert isinstance(into, HostPool)
        settings = ReadSettings(
            request_bytes=self._request_bytes,
            longest_request_bytes=self._request_bytes,
            read_window_bytes=self._request_bytes,
            idle_close_s=_IDLE_CLOSE_S,
        )
        limits = settings.limits(pool.block_bytes, max_readers=1)
        source = LocalSource(pool, ReadGrants(pool.num_blocks, self._events, _FENCE_AFTER_S))

        def connect(address: str, parts: int) -> _LocalWire:
            return _LocalWire(self._network, address, into.divided(parts), self._read_stall_s)

        reads = BlockReader[str]("local-read", into, limits, self._events, connect)
        self._started = (self._network.join(source), source, reads)

    @property
    def metadata(self) -> bytes:
        """The address within the network, in ASCII."""
        return self._require_started()[0].encode()

    @property
    def read_counters(self) -> Totals:
        return self._require_started()[2].counters

    def grant(self, token: bytes, parts: int = 1) -> Grant:
        """As `BlockConnector.grant`."""
        return self._require_started()[1].grants.open(token, parts)

    def read(self, order: ReadOrder, listener: ReadListener) -> BlockRead:
        """As `BlockConnector.read`."""
        reads = self._require_started()[2]
        return reads.read(lambda: _address(order.metadata), order, listener)

    def close(self) -> None:
        """As `BlockConnector.close`."""
        if self._started is not None:
            address, source, reads = self._started
            self._network.leave(address)
            reads.close()
            source.grants.close()
        self._events.close()

    def pause(self) -> None:
        """As a source, stop responding like a stopped process; deadlines of readers continue."""
        self.serve_only(0)

    def serve_only(self, num_blocks: int) -> None:
        """As a source, serve `num_blocks` more blocks, then stop responding."""
        self._set_blocks_to_serve(num_blocks)

    def resume(self) -> None:
        """End `pause` and `serve_only`."""
        self._set_blocks_to_serve(None)

    def flip_bits(self, num_blocks: int) -> None:
        """As a source, change one bit in each of the next blocks that are sent."""
        with self._network.changed:
            self._require_started()[1].blocks_to_flip = num_blocks

    def _set_blocks_to_serve(self, num_blocks: int | None) -> None:
        with self._network.changed:
            self._require_started()[1].blocks_to_serve = num_blocks
            self._network.changed.notify_all()

    def _require_started(self) -> tuple[str, LocalSource, BlockReader[str]]:
        if self._started is None:
            raise RuntimeError("serve() comes first")
        return self._started


class _LocalWire:
    """A `Connection` that copies from a member's pool."""

    def __init__(self, network: LocalNetwork, address: str, pool: HostPool, read_stall_s: float) -> None:
        self._network = network
        self._address = address
        self._pool = pool
        self._read_stall_s = read_stall_s
        self._source = network.find(address)
        self._is_interrupted = False

    def fetch(self, token: bytes, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        """As `Connection.fetch`."""
        sending = self._begin(token, blocks)
        if isinstance(sending, ReadRefusal):
            raise TransferFailed(
                f"{self._address} refused to send blocks {blocks[0].index} to {blocks[-1].index}: {sending.explanation}"
            )
        try:
            for count, (block, number) in enumerate(zip(blocks, sending.blocks, strict=True), 1):
                flipped = self._wait_for_block(block.index)
                target = self._pool.block(block.local_block)
                with self._source.pool.divided(sending.grant.parts).lend([number]) as [view]:
                    target[:] = view
                target[0] ^= flipped
                yield count
        finally:
            self._source.grants.end(sending)

    def interrupt(self) -> bool:
        """As `Connection.interrupt`; called by both sides."""
        # the flag is read before each block; a reader that waits for a stopped source is woken
        self._is_interrupted = True
        with self._network.changed:
            self._network.changed.notify_all()
        return True

    def close(self) -> None:
        """Nothing is held."""

    def _begin(self, token: bytes, blocks: Sequence[BlockToRead]) -> InFlightSend | ReadRefusal:
        sending = self._source.grants.begin(token, blocks[0].index, len(blocks), self.interrupt)
        if (
            isinstance(sending, ReadRefusal)
            or self._source.pool.block_bytes == self._pool.block_bytes * sending.grant.parts
        ):
            return sending
        self._source.grants.end(sending)
        return ReadRefusal.WRONG_BLOCK_BYTES

    def _wait_for_block(self, index: int) -> int:
        """Wait until the source serves one more block; returns a mask of the bits to change in its first byte."""
        source = self._source
        with self._network.changed:
            if not self._network.changed.wait_for(self._may_go_on, self._read_stall_s):
                raise ConnectionBroken(
                    f"reading block {index} from {self._address}: nothing for {self._read_stall_s:g} s"
                )
            if self._is_interrupted or source.is_closed:
                why = "cut off" if self._is_interrupted else "closed by the peer"
                raise ConnectionBroken(f"reading block {index} from {self._address}: {why}")
            if source.blocks_to_serve is not None:
                source.blocks_to_serve -= 1
            if not source.blocks_to_flip:
                return 0
            source.blocks_to_flip -= 1
            return 1

    def _may_go_on(self) -> bool:
        return self._is_interrupted or self._source.is_closed or self._source.blocks_to_serve != 0


def _address(metadata: bytes) -> str:
    try:
        return metadata.decode("ascii")
    except UnicodeDecodeError as error:
        raise TransferFailed("the source's metadata is no local address") from error
