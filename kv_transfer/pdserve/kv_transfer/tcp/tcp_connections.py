"""The connections of a TCP source, in two classes: newcomers, and settled ones whose peers have shown a valid token.

    accepted --admit--> newcomer --settle (first granted read)--> settled --leave--> gone
                           |
                           +-- first_request_s over, or its place is needed: cut off

Any host that reaches the port can make newcomers, so they have limits separate from those of settled connections; the oldest is
closed for the newest. A reading peer is a newcomer only for its handshake and first request, some milliseconds.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.common import clock
from pdserve.common.address.peer_address import network_of
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.tcp.tcp_settings import TcpSettings
from pdserve.kv_transfer.tcp.tcp_stream import TcpStream

_MAX_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class _Connection:
    thread: threading.Thread
    network: str
    """The network in whose limit the connection counts, see `network_of`."""
    due: float
    """`clock.monotonic()` at which a newcomer is closed."""


class SourceConnections:
    """Thread-safe. A stream is shut down only under the lock, and closed after `leave`, because descriptors are reused."""

    def __init__(self, settings: TcpSettings, events: EventThread) -> None:
        self.num_refused = 0
        """Number of refused connections, including newcomers that were replaced."""
        self._settings = settings
        self._events = events
        self._lock = threading.Lock()
        self._closed = False
        self._expires = False
        self._newcomers: OrderedDict[TcpStream, _Connection] = OrderedDict()
        """Newcomers, the oldest first."""
        self._settled: dict[TcpStream, _Connection] = {}
        self._cut_off: dict[TcpStream, _Connection] = {}
        """Closed connections whose threads have not ended; they do not count."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Networks with granted reads, the latest last. Newcomers of other networks are replaced first."""

    def __len__(self) -> int:
        with self._lock:
            return len(self._newcomers) + len(self._settled) + len(self._cut_off)

    def admit(self, stream: TcpStream, host: str, thread: threading.Thread) -> bool:
        """Add an accepted connection. host: the peer's address. thread: serves the connection; this call starts it.

        False after `close`. Raises: RuntimeError if the thread cannot be started; the connection is then not added.
        """
        with self._lock:
            if self._closed:
                return False
            network = network_of(host)
            self._make_room(network)
            due = clock.monotonic() + self._settings.first_request_s
            self._newcomers[stream] = _Connection(thread, network, due)
            try:
                thread.start()
            except RuntimeError:
                del self._newcomers[stream]
                raise
            self._expire_later()
            return True

    def settle(self, stream: TcpStream) -> bool:
        """Settle a connection whose read was granted. False if it was closed or exceeds the limit; it is shut down."""
        with self._lock:
            if stream in self._settled:
                return True
            connection = self._newcomers.get(stream)
            if connection is None:
                return False
            if not self._has_place(connection.network):
                self.num_refused += 1
                self._cut(stream)
                return False
            self._settled[stream] = self._newcomers.pop(stream)
            self._known[connection.network] = None
            self._known.move_to_end(connection.network)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            return True

    def leave(self, stream: TcpStream) -> None:
        """Close a connection that its thread no longer uses."""
        with self._lock:
            for connections in (self._newcomers, self._settled, self._cut_off):
                connections.pop(stream, None)
            stream.close()

    def close(self) -> None:
        """Shut all connections down, admit no others, and join the threads. Idempotent."""
        with self._lock:
            self._closed = True
            everything = {**self._newcomers, **self._settled, **self._cut_off}
            for stream in everything:
                stream.shutdown()
        for connection in everything.values():
            connection.thread.join()

    def _has_place(self, network: str) -> bool:
        shares = Counter(connection.network for connection in self._settled.values())
        settings = self._settings
        return shares.total() < settings.max_connections and shares[network] < settings.max_connections_per_host

    def _make_room(self, network: str) -> None:
        settings = self._settings
        same = [stream for stream, newcomer in self._newcomers.items() if newcomer.network == network]
        if len(same) >= settings.max_newcomers_per_host:
            self._refuse(same)
        elif len(self._newcomers) >= settings.max_newcomers:
            unknown = (stream for stream, newcomer in self._newcomers.items() if newcomer.network not in self._known)
            self._refuse([*unknown, *self._newcomers])

    def _refuse(self, oldest_first: Iterable[TcpStream]) -> None:
        self.num_refused += 1
        self._cut(next(iter(oldest_first)))

    def _cut(self, stream: TcpStream) -> None:
        self._cut_off[stream] = self._newcomers.pop(stream)
        stream.shutdown()

    def _expire_later(self) -> None:
        """Start a timer for the oldest newcomer. One timer serves all, so that a flood of connections makes no timers."""
        if not self._expires and self._newcomers:
            self._expires = True
            oldest = next(iter(self._newcomers.values()))
            self._events.call_later(max(0.0, oldest.due - clock.monotonic()), self._expire)

    def _expire(self) -> None:
        with self._lock:
            self._expires = False
            now = clock.monotonic()
            while self._newcomers and next(iter(self._newcomers.values())).due <= now:
                self._cut(next(iter(self._newcomers)))
            self._expire_later()
