"""`ConnectionGate`: chooses the connections that an HTTP server keeps when there are more than its limit."""

from __future__ import annotations

import collections
from collections.abc import Callable

import msgspec

from pdserve.common.address.peer_address import network_of


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Connections of one server at a time."""

    total: int = 1024
    per_address: int = 512
    """Connections of one IPv4 address, or of one /64 of IPv6."""


class ConnectionPlace:
    """One accepted connection."""

    __slots__ = ("end", "gate", "is_open", "network")

    def __init__(self, gate: ConnectionGate, network: str) -> None:
        self.gate = gate
        self.network = network
        self.is_open = False
        """Set when its protocol has it, which then reports its end."""
        self.end: Callable[[], object] = _nothing
        """Closes it at once; only the gate calls this."""

    def waits(self) -> None:
        """The connection waits for a complete header, or is idle between two requests."""
        self.gate._waiting[self] = None
        self.gate._waiting_of[self.network][self] = None

    def serves(self) -> None:
        """A request is being read or answered: the connection is not closed in favour of others."""
        self.gate._forget(self)

    def leave(self) -> None:
        """The connection is closed. Harmless the second time."""
        self.gate._leave(self)


class ConnectionGate:
    """Used in one event loop.

    When it is full, a new connection replaces the one that has waited longest without a request,
    of its own address if that has its full share: so silent connections do not exclude others.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.num_refused = 0
        """Connections that found no place, or lost it to a newcomer; counted up."""
        self._places: dict[ConnectionPlace, None] = {}
        self._by_network: collections.Counter[str] = collections.Counter()
        self._waiting: dict[ConnectionPlace, None] = {}
        self._waiting_of: collections.defaultdict[str, dict[ConnectionPlace, None]] = collections.defaultdict(dict)

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, host: str) -> ConnectionPlace | None:
        """A place for a connection from this address; None if it is full and no connection can be closed."""
        network = network_of(host)
        if self._by_network[network] >= self.limits.per_address:
            self._close_first(self._waiting_of[network])
        elif len(self._places) >= self.limits.total:
            self._close_first(self._waiting)
        if self._by_network[network] >= self.limits.per_address or len(self._places) >= self.limits.total:
            self.num_refused += 1
            self._tidy(network)
            return None
        place = ConnectionPlace(self, network)
        self._places[place] = None
        self._by_network[network] += 1
        place.waits()
        return place

    def make_room(self) -> None:
        """Close the connection that has waited for longest, for the descriptor that it has."""
        self._close_first(self._waiting)

    def _close_first(self, waiting: dict[ConnectionPlace, None]) -> None:
        if (place := next(iter(waiting), None)) is None:
            return
        self.num_refused += 1
        self._leave(place)
        place.end()

    def _forget(self, place: ConnectionPlace) -> None:
        self._waiting.pop(place, None)
        self._waiting_of[place.network].pop(place, None)

    def _leave(self, place: ConnectionPlace) -> None:
        if place not in self._places:
            return
        del self._places[place]
        self._by_network[place.network] -= 1
        self._forget(place)
        self._tidy(place.network)

    def _tidy(self, network: str) -> None:
        if not self._by_network[network]:
            del self._by_network[network]
            self._waiting_of.pop(network, None)


def _nothing() -> None:
    pass
