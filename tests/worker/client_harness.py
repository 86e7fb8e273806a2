"""`ClientHarness`: an engine under test with the client that workers use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from pdserve.worker.engine_client import EngineClient
from pdserve.worker.engine_host.inproc_host import InprocHost
from tests.support.engine_harness import Harness


class ClientHarness(Harness):
    """A harness whose engine runs in a thread."""

    client: EngineClient
    host: InprocHost


@asynccontextmanager
async def with_client(harness: Harness) -> AsyncIterator[ClientHarness]:
    """Context in which the engine's thread runs."""
    made = cast(ClientHarness, harness)
    made.host = InprocHost(made.core)
    made.client = EngineClient(made.host)
    made.host.start_thread()
    yield made
    await made.host.close()
