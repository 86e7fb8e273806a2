"""`ClientHarness`: an engine under test with the client that workers use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from pdserve.engine.client.inproc_client import InprocClient
from pdserve.worker.engine_client import EngineClient
from tests.support.engine.bare_engine import client_of
from tests.support.engine.engine_harness import Harness


class ClientHarness(Harness):
    """A harness whose engine runs in a thread."""

    client: EngineClient
    door: InprocClient


@asynccontextmanager
async def with_client(harness: Harness) -> AsyncIterator[ClientHarness]:
    """Context in which the engine's thread runs."""
    made = cast(ClientHarness, harness)
    made.door = client_of(made.core)
    made.client = EngineClient(made.door)
    made.door.start(warm_up=False)
    yield made
    await made.client.close()
