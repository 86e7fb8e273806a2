"""`HttpServer`: uvicorn as every service runs it, and the sockets that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from pdserve.common.errors import ConfigError
from pdserve.common.host_address import host_and_port
from pdserve.common.tls import ServerTls

BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """`serve(sockets=[...])` until `stop`. Signals are the service's, and `stop` is an event, not a flag that is polled."""

    def __init__(self, app: Any, keep_alive_s: float, grace_s: float, tls: ServerTls | None = None) -> None:
        """app: ASGI. keep_alive_s: how long an idle connection stays. grace_s: what open answers have after `stop`.

        tls: None speaks in the clear.
        """
        config = uvicorn.Config(
            app,
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
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        await self._stopped.wait()


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket bound to host:port; port 0 draws a free one. Raises: ConfigError naming the address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host_and_port(host, port)}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on {host_and_port(host, port)}: {error.strerror}") from error
    bound.setblocking(False)
    return bound
