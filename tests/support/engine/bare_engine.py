"""The client of an engine that a test has made itself."""

from __future__ import annotations

import asyncio
from typing import cast

from pdserve.engine.client.engine_side import EngineTransfers
from pdserve.engine.client.inproc_client import InprocClient
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.engine_thread import ENGINE_FAILED, in_event_loop


class BareEngine:
    """An `EngineSource` of one engine, without a model folder."""

    num_threads = 1
    cpu_core = None
    info = cast(EngineInfo, None)

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def make_core(self) -> EngineCore:
        return self._core

    def close(self) -> None:
        self._core.scheduler.grammars.close()


def client_of(core: EngineCore, transfers: EngineTransfers | None = None) -> InprocClient:
    """A client as workers use it, in this event loop; not started."""
    call_soon = in_event_loop(asyncio.get_running_loop())
    return InprocClient(BareEngine(core), call_soon, transfers, lambda _: ENGINE_FAILED)
