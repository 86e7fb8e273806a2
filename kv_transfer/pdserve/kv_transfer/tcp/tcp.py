"""Blocks over TCP: the connector for every network, and the fallback of faster connectors.

tcp.py              TcpConnector: composes a source and a block reader
tcp_source.py       accepts, answers from the pool      pull/read_grants.py       which peer may read which blocks; fences
tcp_connections.py  places for connections              pull/block_reader.py      finds a peer's connections
tcp_connection.py   asks, receives into the pool        pull/peer_connections.py  reader threads of a peer, digests
tcp_stream.py       sockets                             pull/read_queue.py        windows, round robin, states of a read
tls_stream.py       TLS over a socket                   tcp_settings.py           settings, the peers' address
tcp_frames.py       the bytes on the connection
"""

from __future__ import annotations

from pdserve.common.errors import ConfigError
from pdserve.kv_transfer.connector import BlockRead, Grant, ReadListener, ReadOrder
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.memory.pool_memory import HostPool, PoolMemory
from pdserve.kv_transfer.pull.block_reader import BlockReader
from pdserve.kv_transfer.tcp.tcp_connection import TcpConnection
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress, TcpSettings
from pdserve.kv_transfer.tcp.tcp_source import TcpSource
from pdserve.kv_transfer.totals import Totals


class TcpConnector:
    """A `BlockConnector` over TCP. `TcpSettings` has all limits."""

    name = "tcp"

    def __init__(self, settings: TcpSettings | None = None) -> None:
        self._settings = settings or TcpSettings()
        self._events = EventThread("tcp-events")
        self._started: tuple[TcpSource, BlockReader[TcpAddress]] | None = None

    def serve(self, pool: PoolMemory, landing: PoolMemory | None = None) -> None:
        """As `BlockConnector.serve`; blocks land in memory of the host."""
        if self._started is not None:
            raise RuntimeError("a connector serves once")
        settings, into = self._settings, landing or pool
        if not isinstance(into, HostPool):
            raise ConfigError("the connector tcp writes memory of the host, and there is none to receive into")
        settings.check_peers_host()
        limits = settings.limits(pool.block_bytes, settings.sockets_per_peer)
        source = TcpSource(pool, settings, self._events)
        reads = BlockReader[TcpAddress](
            "tcp-read",
            into,
            limits,
            self._events,
            lambda address, parts: TcpConnection(address, into.divided(parts), settings),
        )
        self._started = (source, reads)

    @property
    def metadata(self) -> bytes:
        """A `TcpAddress` as JSON."""
        return TcpAddress(self._settings.peers_host, self._source.port).to_metadata()

    @property
    def read_counters(self) -> Totals:
        return self._reads.counters

    @property
    def source_counters(self) -> Totals:
        return self._source.counters

    @property
    def num_connections(self) -> int:
        """Number of connections from peers to this source."""
        return self._source.num_connections

    @property
    def num_refused_connections(self) -> int:
        """Number of refused connections, including new ones that were replaced by newer ones."""
        return self._source.num_refused_connections

    def grant(self, token: bytes, parts: int = 1) -> Grant:
        """As `BlockConnector.grant`."""
        return self._source.grant(token, parts)

    def read(self, order: ReadOrder, listener: ReadListener) -> BlockRead:
        """As `BlockConnector.read`."""
        return self._reads.read(lambda: TcpAddress.from_metadata(order.metadata), order, listener)

    def close(self) -> None:
        """As `BlockConnector.close`. Takes up to `connect_timeout_s` while a connection is being made, and as long again for TLS
        and for resolving a name.
        """
        if self._started is not None:
            source, reads = self._started
            reads.close()
            source.close()
        self._events.close()

    @property
    def _source(self) -> TcpSource:
        return self._require_started()[0]

    @property
    def _reads(self) -> BlockReader[TcpAddress]:
        return self._require_started()[1]

    def _require_started(self) -> tuple[TcpSource, BlockReader[TcpAddress]]:
        if self._started is None:
            raise RuntimeError("serve() comes first")
        return self._started
