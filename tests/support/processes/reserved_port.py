"""A loopback port that no other process is given, before its server listens and while it is away."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Servers that set SO_REUSEADDR, as gRPC's and Redis do, can listen on it; without one, connections are refused.

    A port that was drawn and closed again would be drawn by the next of the many sockets that tests run beside this one open.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
