"""`FetchServicer`: cached blocks of other workers that a router wants here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.wire.messages import block_source_from_wire
from pdserve.v1.step_stream_pb2 import Fetched, Submission
from pdserve.worker.engine_client import EngineClient, OnEnded
from pdserve.worker.request_reader import RequestReader
from pdserve.worker.source_reader import SourceReader
from pdserve.worker.step_stream.step_call import StepCall


@dataclass(frozen=True, eq=False)
class FetchServicer:
    """Serves `Submission.fetch`, at workers of both roles."""

    reader: RequestReader
    sources: SourceReader
    engine: EngineClient
    on_ended: OnEnded
    """Called after each request."""

    def begin_fetch(self, submission: Submission, call: StepCall) -> None:
        """Raises: as `RequestReader.request` and `EngineClient.verify`; InvalidRequest without a source."""
        source = self.sources.block_source(block_source_from_wire(submission))
        if source is None:
            raise InvalidRequest("block_source is missing: it says where the blocks are", "block_source")
        request = self.reader.request(
            submission.request, submission.attempt, prefill_here=True, block_source=source, fetches_only=True
        )
        self.engine.verify(request)
        call.serve(self._fetch(request))

    async def _fetch(self, request: EngineCoreRequest) -> AsyncGenerator[Fetched, None]:
        stream = None
        try:
            stream = self.engine.submit(request)
            output = await stream.get()
            yield Fetched(num_cached_tokens=output.num_cached_tokens)
        finally:
            self.engine.release(stream, self.on_ended)
