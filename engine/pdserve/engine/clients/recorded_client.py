"""`RecordedClient`: an `EngineCoreClient` whose requests and outputs stat loggers see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, StreamingUpdate
from pdserve.engine.clients.engine_core_client import EngineCoreClient
from pdserve.engine.engine_info import EngineInfo
from pdserve.engine.stats.stat_recorder import StatRecorder


class RecordedClient:
    """Passes everything on to another client."""

    def __init__(self, client: EngineCoreClient, recorder: StatRecorder) -> None:
        self.client = client
        self.recorder = recorder
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self.client.info

    def add_request(self, request: EngineCoreRequest) -> None:
        self.recorder.add_request(request)
        self.client.add_request(request)

    def resume_request(self, update: StreamingUpdate) -> None:
        self.recorder.resume_request(update)
        self.client.resume_request(update)

    def finish_session(self, request_id: str) -> None:
        self.client.finish_session(request_id)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.client.abort_requests(request_ids)

    def end_sequence(self, request_id: str, index: int) -> None:
        self.client.end_sequence(request_id, index)

    def get_output(self) -> EngineCoreOutputs:
        return self._recorded(self.client.get_output())

    async def get_output_async(self) -> EngineCoreOutputs:
        return self._recorded(await self.client.get_output_async())

    def _recorded(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        self.recorder.record(outputs)
        return outputs

    def utility(self, name: str, *args: Any) -> Any:
        return self.client.utility(name, *args)

    async def utility_async(self, name: str, *args: Any) -> Any:
        return await self.client.utility_async(name, *args)

    def close(self) -> None:
        self.client.close()
        if not self._closed:
            self._closed = True
            self.recorder.log()
