"""`ConnectionWatch`: bounds the connections of one address to a gRPC server. `close_connection`: closes that of one call.

gRPC accepts connections itself, counts them in all only, and lets a server neither list nor close them. The watch finds them among
this process's sockets and shuts down the newest of an address that has more than its share; gRPC then closes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.common.address.peer_address import network_of, peer_host

LOOK_EVERY_S = 0.5
_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class _Socket:
    """A descriptor's target when it was looked at."""

    target: str
    """`socket:[INODE]`; another socket under the same number has another inode."""
    network: str | None
    """Address of the client, as a unit of limits; None if it is no connection of the server, or was shut down."""


class ConnectionWatch:
    """Watches one port; `run` it while the server serves."""

    def __init__(self, port: int, per_address: int) -> None:
        """port: where the server listens. per_address: connections of one IPv4 address, or of one /64 of IPv6."""
        self._port = port
        self._per_address = per_address
        self._known: dict[int, _Socket] = {}
        """Sockets by descriptor, the longest open first."""
        self.num_refused = 0
        """Connections that were shut down; counted up."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # in a thread, since a process may have thousands of descriptors
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Shut down what is beyond the limit now."""
        known: dict[int, _Socket] = {}
        new: dict[int, _Socket] = {}
        for descriptor, target in _open_sockets():
            seen = self._known.get(descriptor)
            if seen is not None and seen.target == target:
                known[descriptor] = seen
            else:
                new[descriptor] = _Socket(target, self._network(descriptor, target))
        self._known = {number: seen for number, seen in self._known.items() if number in known} | new
        self._refuse_newest()

    def _refuse_newest(self) -> None:
        counts: Counter[str] = Counter()
        for descriptor, seen in list(self._known.items()):
            if seen.network is None:
                continue
            counts[seen.network] += 1
            if counts[seen.network] <= self._per_address:
                continue
            # it counts no more, though gRPC may take a moment to close it
            self._known[descriptor] = _Socket(seen.target, None)
            with contextlib.suppress(OSError), _borrowed(descriptor, seen.target) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                self.num_refused += 1

    def _network(self, descriptor: int, target: str) -> str | None:
        with contextlib.suppress(OSError), _borrowed(descriptor, target) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == self._port:
                return network_of(str(connection.getpeername()[0]))
        return None


async def close_connection(peer: str) -> None:
    """Shut down the connection of a call, and with it all calls on it: gRPC cannot reset one whose client does not read.

    peer: as `ServicerContext.peer` gives it.
    """
    await asyncio.to_thread(_shut_down, peer)


def _shut_down(peer: str) -> None:
    host, port = peer_host(peer), peer.rpartition(":")[2]
    for descriptor, target in _open_sockets():
        with contextlib.suppress(OSError), _borrowed(descriptor, target) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = connection.getpeername()
            if str(address[1]) == port and _same_host(str(address[0]), host):
                connection.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> Iterator[tuple[int, str]]:
    """Descriptors of this process's sockets, with their targets."""
    for path in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = str(path.readlink())
            if target.startswith("socket:"):
                yield int(path.name), target


def _same_host(one: str, other: str) -> bool:
    return one.partition("%")[0].removeprefix("::ffff:") == other.removeprefix("::ffff:")


def _borrowed(descriptor: int, target: str) -> socket.socket:
    """A duplicate of a descriptor that another thread may close, and open for another file, at any time.

    Raises: OSError if it is not this socket any more.
    """
    copy = os.dup(descriptor)
    try:
        if str((_DESCRIPTORS / str(copy)).readlink()) == target:
            return socket.socket(fileno=copy)
        raise OSError("the descriptor was closed")
    except OSError:
        os.close(copy)
        raise
