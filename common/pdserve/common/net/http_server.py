"""`HttpServer`: uvicorn as every service runs it, and the sockets that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Coroutine, Iterator
from typing import Any, cast

import uvicorn

from pdserve.common.address.host_address import host_and_port
from pdserve.common.errors import ConfigError
from pdserve.common.net.connection_gate import ConnectionGate, ConnectionLimits, ConnectionPlace
from pdserve.common.net.http_connection import HEADER_TIMEOUT_S, GuardedConnection
from pdserve.common.security.tls import ServerTls

BACKLOG = 2048
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_PAUSE_S = 0.05
_UNSENT_BYTES = 64 << 10
"""Bytes of a connection that the system takes beyond those under way to the client; by default 4 MiB, which no limit counts."""
_LOOK_EVERY_S = 1.0
_CUT_S = 1.0
"""Seconds in which requests that a stop cuts off end."""


class HttpServer(uvicorn.Server):
    """`serve(sockets=[...])` until `stop`. Signals are the service's, and `stop` is an event, not a flag that is polled."""

    def __init__(
        self,
        app: Any,
        keep_alive_s: float,
        grace_s: float,
        tls: ServerTls | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        """app: ASGI. keep_alive_s: time after which an idle connection is closed. grace_s: time for open responses after `stop`.

        tls: None for no encryption. limits: connections at a time; None: those of `ConnectionLimits`.
        """
        config = uvicorn.Config(
            app,
            http=GuardedConnection,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            # nothing then needs the server's tick
            date_header=False,
            timeout_keep_alive=round(keep_alive_s),
            timeout_graceful_shutdown=max(1, round(grace_s)),
            backlog=BACKLOG,
        )
        config.load()
        # uvicorn would read the files again, into a context of its own making
        config.ssl = tls.context if tls is not None else None
        super().__init__(config)
        self.listening = asyncio.Event()
        """Set once connections are taken; stopped before that, the server would leave its socket open."""
        self.gate = ConnectionGate(limits or ConnectionLimits())
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections itself: uvicorn leaves this to the loop, which accepts all without counting."""
        await self.lifespan.startup()
        self.servers = []
        for bound in sockets or ():
            self._spawn(self._accept(bound))
        self._spawn(self._look_at_connections())
        self.started = True
        self.listening.set()

    async def main_loop(self) -> None:
        await self._stopped.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().shutdown(sockets)
        # what is left has been cancelled, and its clients are still to be told
        if cut := set(self.server_state.tasks):
            await asyncio.wait(cut, timeout=_CUT_S)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Until it ends, or the server does."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(bound)
            except OSError as error:
                # no descriptor is left, or the client has left meanwhile
                if error.errno in _NO_DESCRIPTOR:
                    self.gate.make_room()
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            place = self.gate.enter(str(address[0]))
            if place is None:
                accepted.close()
                continue
            self._connect(accepted, place)

    def _connect(self, accepted: socket.socket, place: ConnectionPlace) -> None:
        """Begin to read, after a handshake with TLS, which may take as long as a header."""

        def make_protocol() -> GuardedConnection:
            return GuardedConnection(self.config, self.server_state, self.lifespan.state, place=place)

        async def connect() -> None:
            ssl = self.config.ssl
            # clients that fail to shake hands, or leave meanwhile, are no news
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    make_protocol, accepted, ssl=ssl, ssl_handshake_timeout=None if ssl is None else HEADER_TIMEOUT_S
                )

        def connected(_: asyncio.Task[None]) -> None:
            if not place.is_open:
                place.leave()
                accepted.close()

        task = self._spawn(connect())
        place.end = task.cancel
        task.add_done_callback(connected)

    async def _look_at_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = loop.time()
            for connection in list(self.server_state.connections):
                cast(GuardedConnection, connection).look(now)


def listening_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket that listens on host:port; port 0 draws a free one. Raises: ConfigError naming the address.

    reuse_port: other processes of this user may listen on the same port; the kernel divides new connections among them.
    """
    bound = bound_socket(host, port, reuse_port=reuse_port)
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host_and_port(host, port)}: {error.strerror}") from error
    bound.setblocking(False)
    return bound


def bound_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket that is bound to host:port and does not listen; port 0 draws a free one.

    Until it is closed the port is kept from all but servers that set SO_REUSEADDR, as ours do. reuse_port: as for
    `listening_socket`.
    Raises: ConfigError naming the address, also if another process listens there.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host_and_port(host, port)}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
        # connections inherit it: what a client does not read then waits where it is counted
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host_and_port(host, port)}: {error.strerror}") from error
    return bound
