"""`ProcessClient`: an engine in a process of its own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, StreamingUpdate
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.clients import engine_connection
from pdserve.engine.clients.engine_connection import EngineConnection
from pdserve.engine.clients.frames import (
    AbortRequests,
    AddRequest,
    EndSequence,
    FinishSession,
    Load,
    ResumeRequest,
)
from pdserve.engine.output_stream import refused_outputs
from pdserve.engine.request_messages import ENCODING_ERRORS, encode, unsendable


class ProcessClient:
    """An `EngineCoreClient`. The process ends with `close`, with this object, and with this process however that ends."""

    def __init__(self, folder: Path, settings: WorkerSettings) -> None:
        """Start the process and load the model there. Raises: as `LoadedEngine`; WorkerLost when the process ended meanwhile."""
        self._connection = EngineConnection(engine_connection.start_program)
        self._close = weakref.finalize(self, self._connection.close)
        self._connection.send(encode(Load(str(folder), settings)))
        try:
            self.info = self._connection.loaded.result()
        except BaseException:
            self._close()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        self._connection.require_running()
        try:
            self._connection.send(encode(AddRequest(request.request_id, msgspec.Raw(encode(request)))))
        except ENCODING_ERRORS as error:
            self._connection.outputs.put(refused_outputs(request.request_id, unsendable(request, error)))

    def resume_request(self, update: StreamingUpdate) -> None:
        self._connection.require_running()
        self._connection.send(encode(ResumeRequest(update)))

    def finish_session(self, request_id: str) -> None:
        self._connection.send(encode(FinishSession(request_id)))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._connection.send(encode(AbortRequests(list(request_ids))))

    def end_sequence(self, request_id: str, index: int) -> None:
        self._connection.send(encode(EndSequence(request_id, index)))

    def get_output(self) -> EngineCoreOutputs:
        return self._connection.outputs.get()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._connection.outputs.get_async()

    def utility(self, name: str, *args: Any) -> Any:
        return self._connection.call(name, args).result()

    async def utility_async(self, name: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self._connection.call(name, args))

    @property
    def process_id(self) -> int:
        return self._connection.process_id

    def close(self) -> None:
        self._close()
