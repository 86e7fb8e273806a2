"""One of several router processes: python -m pdserve.router.router_process FD, where FD is its end of the parent's socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import sys
from pathlib import Path

import uvloop

from pdserve.common.address.descriptors import raise_descriptor_limit
from pdserve.common.errors import ConfigError, PdServeError
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.telemetry.logging_setup import configure_logging
from pdserve.router.process_link import ProcessLink
from pdserve.router.processes.router_child import FAILED, IS_STARTING, READY, START, ProcessStart
from pdserve.router.service import serve_process

log = logging.getLogger(__name__)


async def serve(connected: socket.socket) -> None:
    """Serve until the parent ends this process, or has ended itself."""
    shutdown = Shutdown()
    with shutdown.on_signals():
        link = ProcessLink(connected, {})
        link.on_lost = shutdown.stop.set
        try:
            start = await link.call(START, None, ProcessStart)
        except PdServeError:
            # the parent has ended
            return
        settings = start.settings
        configure_logging(f"router-{start.number}", settings.log_level, settings.log_format)
        raise_descriptor_limit()

        def ready(http: str, grpc: str) -> None:
            # exempt loaded objects from garbage collection; a full collection over them would stop every stream for 0.1 s
            gc.freeze()
            log.info("process %d listens", start.number)
            link.send(READY, None)

        async def is_starting() -> bool:
            with contextlib.suppress(PdServeError):
                return await link.call(IS_STARTING, None, bool)
            return False

        try:
            await serve_process(
                settings, model_folder=Path(start.model_folder), ready=ready, shutdown=shutdown,
                is_starting=is_starting, parent=link,
            )  # fmt: skip
        except ConfigError as error:
            link.send(FAILED, error.message)
            # until the parent has read it
            await asyncio.sleep(0)
        finally:
            link.close()


if __name__ == "__main__":
    uvloop.run(serve(socket.socket(fileno=int(sys.argv[1]))))
