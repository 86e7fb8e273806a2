"""`serving_metrics`: a router's `metrics_port`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from pdserve.common.address.host_address import host_and_port
from pdserve.common.net.http_server import listening_socket
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.tasks.first_done import first_done
from pdserve.common.telemetry.metrics import metrics_server

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def serving_metrics(settings: RouterSettings, text: Callable[[], Awaitable[bytes]]) -> AsyncIterator[None]:
    """Serve `/metrics` inside the context. Raises: ConfigError for a port that cannot be used."""
    bound = listening_socket(settings.metrics_at, settings.metrics_port)
    log.info("metrics http://%s/metrics", host_and_port(settings.metrics_at, bound.getsockname()[1]))
    server = metrics_server(text)
    task = asyncio.create_task(server.serve(sockets=[bound]))
    await first_done(server.listening.wait(), asyncio.shield(task))
    try:
        yield
    finally:
        server.stop()
        await task
