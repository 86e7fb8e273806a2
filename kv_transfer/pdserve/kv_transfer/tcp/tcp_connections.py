"""The connections of a TCP source, in two classes: newcomers, and those whose peers have shown a valid token.

    accepted --admit--> newcomer --settle (first granted read)--> settled --leave--> gone
                           |
                           +-- first_request_s over, or its place is needed: cut off

Any host that reaches the port can make newcomers, so they have places of their own, apart from connections that read; the
oldest is closed for the newest. A peer that reads is a newcomer for the milliseconds of its handshake and first request.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.tcp.tcp_settings import TcpSettings
from pdserve.kv_transfer.tcp.tcp_stream import TcpStream

_MAX_KNOWN = 1024
_V6_PREFIX_BITS = 64


@dataclass(frozen=True, slots=True)
class _Connection:
    thread: threading.Thread
    network: str
    """The network to whose share of the places it counts, see `network_of`."""
    due: float
    """When a newcomer is cut off, by the monotonic clock."""


class SourceConnections:
    """Thread-safe. A stream is shut down under the lock alone, and closed after `leave`: descriptors are used again."""

    def __init__(self, settings: TcpSettings, events: EventThread) -> None:
        self.num_refused = 0
        """Connections that found no place, or lost it to another newcomer; counted up."""
        self._settings = settings
        self._events = events
        self._lock = threading.Lock()
        self._closed = False
        self._expires = False
        self._newcomers: OrderedDict[TcpStream, _Connection] = OrderedDict()
        """By age, the oldest first."""
        self._settled: dict[TcpStream, _Connection] = {}
        self._cut_off: dict[TcpStream, _Connection] = {}
        """Closed connections whose threads are about to end; they hold no place."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Networks from which reads were granted, the latest last. Others' newcomers go before theirs."""

    def __len__(self) -> int:
        with self._lock:
            return len(self._newcomers) + len(self._settled) + len(self._cut_off)

    def admit(self, stream: TcpStream, host: str, thread: threading.Thread) -> bool:
        """A connection was accepted. host: its peer's address. thread: serves it, and is started by this call.

        False after `close`. Raises: RuntimeError when the thread cannot be started; the connection is then not here.
        """
        with self._lock:
            if self._closed:
                return False
            network = network_of(host)
            self._make_room(network)
            due = time.monotonic() + self._settings.first_request_s
            self._newcomers[stream] = _Connection(thread, network, due)
            try:
                thread.start()
            except RuntimeError:
                del self._newcomers[stream]
                raise
            self._expire_later()
            return True

    def settle(self, stream: TcpStream) -> bool:
        """A read over this connection is granted. False: it has lost its place, or there is none; it is shut down."""
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
        """The thread no longer uses the connection; close it."""
        with self._lock:
            for connections in (self._newcomers, self._settled, self._cut_off):
                connections.pop(stream, None)
            stream.close()

    def close(self) -> None:
        """Shut all down, admit none any more, and join the threads. Idempotent."""
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
        """One timer for all, for the oldest: a flood must not pile up timers."""
        if not self._expires and self._newcomers:
            self._expires = True
            oldest = next(iter(self._newcomers.values()))
            self._events.call_later(max(0.0, oldest.due - time.monotonic()), self._expire)

    def _expire(self) -> None:
        with self._lock:
            self._expires = False
            now = time.monotonic()
            while self._newcomers and next(iter(self._newcomers.values())).due <= now:
                self._cut(next(iter(self._newcomers)))
            self._expire_later()


def network_of(host: str) -> str:
    """The unit of a connection's share: an IPv4 address, or the /64 of an IPv6 address, which one machine may have as a whole."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _V6_PREFIX_BITS), strict=False))
