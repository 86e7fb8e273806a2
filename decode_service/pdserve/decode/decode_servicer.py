"""`DecodeServicer`: begins the calls of a decode worker.

The life of a request here:

1. A router's `Submission` arrives in its step stream. `RequestReader` decodes and checks it, and computes block hashes and digest.
2. `EngineClient.verify` refuses requests that the engine cannot serve. The call of a refused request ends with the error.
3. `PushedDecode` submits the request. From then on the engine's outputs go to the call without a task in between.
4. With a source: the engine reserves blocks, and the transfer manager attaches to the prefill worker, reads the blocks as they are
   published and verifies them. `Receiving` reports a long transfer, `Landed` its end. If enough of the prompt is in the engine's
   cache, it prefills the rest itself (`PrefillingLocally`).
5. Without a source it prefills here, or refuses a prompt that is too long for that (`NeedsPrefill`).
6. Each step's tokens go into the stream's outbox and leave in one message with those of other calls.
7. Sequences end by themselves, or when the router reports that their text is complete; after the last one the call ends.
8. An error, the deadline, a cancelled call or the end of the stream ends the call at any point. The engine then drops the request;
   when nothing of it is left there, the call's statistics are closed.

A session (`DecodeSession`) repeats 2, 5, 6 and 7 for each of its turns, and never has a source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.common.errors import InternalError, InvalidRequest
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.wire.messages import block_source_from_wire
from pdserve.common.settings.worker_settings import DecodeSettings, WorkerSettings
from pdserve.decode.decode_session import DecodeSession
from pdserve.decode.pushed_decode import PushedDecode
from pdserve.kv_transfer.control.receiver_transfer import SourceRef
from pdserve.v1 import decode_pb2
from pdserve.v1.step_stream_pb2 import Submission
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.request_reader import RequestReader
from pdserve.worker.source_reader import SourceReader, verify_transfer_id
from pdserve.worker.step_stream.step_call import StepCall
from pdserve.worker.step_stream.step_stream_servicer import BeginCall
from pdserve.worker.telemetry.worker_telemetry import WorkerTelemetry
from pdserve.worker.worker import Worker


@dataclass(frozen=True, eq=False)
class DecodeServicer:
    """Serves `Submission.decode` and `Submission.session`."""

    settings: DecodeSettings
    reader: RequestReader
    sources: SourceReader
    engine: EngineClient
    telemetry: WorkerTelemetry
    block_bytes: int
    """Bytes of a KV block."""

    def begin_decode(self, submission: Submission, call: StepCall) -> None:
        """Raises: as `RequestReader.request` and `EngineClient.verify`; InvalidRequest for a source that cannot be one."""
        decode = submission.decode
        remote = decode.HasField("source")
        request = self.reader.request(
            submission.request,
            submission.attempt,
            remote_prefill=remote,
            without_draft_head=decode.source.without_draft_head,
            prefill_here=decode.prefill_here,
            local_prefill_tokens=decode.local_prefill_tokens if decode.HasField("local_prefill_tokens") else None,
            block_source=self.sources.block_source(block_source_from_wire(submission)),
        )
        _verify_samples(request)
        self.engine.verify(request)
        source = self._source(decode.source, request) if remote else None
        pushed = PushedDecode(call, self.engine, request, self.telemetry.call("decode", request), self.block_bytes)
        pushed.begin(self.settings.stream_interval, source)

    def begin_session(self, submission: Submission, call: StepCall) -> None:
        """Raises: as `RequestReader.request` and `EngineClient.verify`."""
        request = self.reader.request(submission.request, submission.attempt, prefill_here=True, resumable=True)
        _verify_samples(request)
        self.engine.verify(request)
        session = DecodeSession(self.settings, self.reader, self.engine, self.telemetry, request)
        call.on_turn, call.on_ended_sequences = session.add_turn, session.end_sequences
        call.serve(session.events())

    def _source(self, source: decode_pb2.Source, request: EngineCoreRequest) -> SourceRef:
        """Raises: InvalidRequest."""
        verify_transfer_id("source.transfer_id", source.transfer_id)
        self.sources.verify("source", source.worker_id, source.address)
        return SourceRef(
            source.worker_id,
            source.epoch,
            source.address,
            source.transfer_id,
            request.request_digest,
            request.without_draft_head,
        )


def _verify_samples(request: EngineCoreRequest) -> None:
    """Raises: InvalidRequest."""
    if request.pooling_params is not None:
        raise InvalidRequest("request.pooling_params is given: prefill workers compute embeddings", "pooling_params")


def decode_calls(worker: Worker, settings: WorkerSettings) -> Mapping[str, BeginCall]:
    """The calls that routers make at a decode worker. settings: in this role."""
    if not isinstance(settings, DecodeSettings):
        raise InternalError(f"a decode worker needs DecodeSettings, not {type(settings).__name__}")
    servicer = DecodeServicer(
        settings,
        worker.reader,
        worker.sources,
        worker.engine,
        worker.telemetry,
        worker.identity.layout.mean_block_bytes,
    )
    return {"decode": servicer.begin_decode, "session": servicer.begin_session}
