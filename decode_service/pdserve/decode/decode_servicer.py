"""`DecodeServicer`: the decode call of an attempt, and streaming sessions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from pdserve.common import timeline
from pdserve.common.address.peer_address import verify_peer_address, verify_worker_id
from pdserve.common.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    NeedsPrefill,
    Overloaded,
)
from pdserve.common.method_handler import Context
from pdserve.common.net.rpc import metadata_of
from pdserve.common.request.decode_wire import (
    admitted_event,
    landed_event,
    needs_prefill_event,
    output_events,
    prefilling_locally_event,
    receiving_event,
)
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest, StreamingUpdate
from pdserve.common.request.generation_request import verify_request_id
from pdserve.common.request.sampling_params import MOST_SEQUENCES
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.common.tasks.first_done import first_of
from pdserve.decode.decode_moments import LOCAL_MOMENTS, REMOTE_MOMENTS
from pdserve.decode.pushed_decode import PushedDecode
from pdserve.kv_transfer.control.receiver_transfer import SourceRef
from pdserve.kv_transfer.control.source_transfers import TRANSFER_ID_BYTES
from pdserve.v1 import decode_pb2, decode_pb2_grpc
from pdserve.worker.engine_client import EngineClient, Landing, RequestStream
from pdserve.worker.request_reader import RequestReader, engine_request_id
from pdserve.worker.step_stream.step_call import StepCall
from pdserve.worker.telemetry.call_stats import CallStats
from pdserve.worker.telemetry.worker_telemetry import WorkerTelemetry

_Turns = AsyncIterator[decode_pb2.DecodeTurn]


@dataclass(frozen=True, eq=False)
class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves `DecodeService`."""

    settings: DecodeSettings
    reader: RequestReader
    engine: EngineClient
    telemetry: WorkerTelemetry
    block_bytes: int
    """Bytes of a KV block."""

    async def Session(self, request_iterator: _Turns, context: Context) -> AsyncIterator[decode_pb2.DecodeEvent]:
        engine, settings = self.engine, self.settings
        if engine.num_sessions >= settings.limits.max_sessions:
            # a call that is ended while its first turn is on the way here may lose this answer
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.limits.session_idle_timeout_s):
                    await _next_turn(request_iterator)
            raise Overloaded(
                f"{engine.num_sessions} sessions are open on this worker, at most {settings.limits.max_sessions} may be "
                "(max_sessions)"
            )
        engine.num_sessions += 1
        session = _Session(settings, self.reader, engine, self.telemetry, metadata_of(context))
        try:
            async for event in session.serve(request_iterator):
                yield event
        finally:
            session.close()
            engine.num_sessions -= 1

    async def Generate(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        engine_request, source = self._read(request)
        async with contextlib.aclosing(self._generate(engine_request, source, metadata_of(context))) as events:
            async for event in events:
                yield event

    def begin_decode(self, request: decode_pb2.DecodeRequest, call: StepCall) -> None:
        """Serve `Generate` as a call of a step stream. Raises: PdServeError for a request that cannot be submitted."""
        engine_request, source = self._read(request)
        if engine_request.sampling_params.prompt_logprobs is not None:
            # these are so large that they leave at the router's pace
            call.on_ended_sequences = lambda indexes: self._end_sequences(engine_request.request_id, indexes)
            call.serve(self._generate(engine_request, source, {}))
            return
        record = self.telemetry.call("decode", engine_request, {})
        pushed = PushedDecode(call, self.engine, engine_request, record, self.block_bytes)
        pushed.begin(self.settings.stream_interval, source)

    def _read(self, request: decode_pb2.DecodeRequest) -> tuple[EngineCoreRequest, SourceRef | None]:
        """The request for the engine, and the source of its KV. Raises: as `RequestReader.request`, `EngineClient.verify`."""
        remote = request.HasField("source")
        engine_request = self.reader.request(
            request,
            request.attempt.number,
            remote_prefill=remote,
            prefill_here=request.attempt.prefill_here,
            local_prefill_tokens=(
                request.attempt.local_prefill_tokens if request.attempt.HasField("local_prefill_tokens") else None
            ),
        )
        if engine_request.pooling_params is not None:
            raise InvalidRequest("request.pooling is given: prefill workers compute embeddings", "pooling")
        self.engine.verify(engine_request)
        return engine_request, self._source(request.source, engine_request) if remote else None

    async def _generate(
        self, engine_request: EngineCoreRequest, source: SourceRef | None, metadata: Mapping[str, str]
    ) -> AsyncGenerator[decode_pb2.DecodeEvent, None]:
        remote = source is not None
        record = self.telemetry.call("decode", engine_request, metadata)
        stream = None
        try:
            with record:
                stream = self.engine.submit(engine_request, record.take, self.settings.stream_interval, source)
                moment = timeline.DECODE_QUEUED if remote else timeline.PREFILL_QUEUED
                yield admitted_event(moment, engine_request.arrival_time)
                names = REMOTE_MOMENTS if remote else LOCAL_MOMENTS
                async for event in _events(stream, stream.landed if remote else None, self.block_bytes, names):
                    yield event
        except NeedsPrefill as refusal:
            yield needs_prefill_event(refusal.uncached_tokens)
        finally:
            self.engine.release(stream, record.close)

    async def EndSequences(
        self, request: decode_pb2.EndSequencesRequest, context: Context
    ) -> decode_pb2.EndSequencesResponse:
        verify_request_id(request.request_id)
        if (num := len(request.indexes)) > MOST_SEQUENCES:
            raise InvalidRequest(f"indexes has {num} sequences, at most {MOST_SEQUENCES} are possible", "indexes")
        request_id = engine_request_id(request.request_id, request.attempt, 0)
        turn = request.turn if request.HasField("turn") else None
        self._end_sequences(request_id, request.indexes, turn)
        return decode_pb2.EndSequencesResponse()

    def _end_sequences(self, request_id: str, indexes: Iterable[int], turn: int | None = None) -> None:
        for index in indexes:
            self.engine.end_sequence(request_id, index, turn)

    def _source(self, source: decode_pb2.Source, engine_request: EngineCoreRequest) -> SourceRef:
        """Raises: InvalidRequest."""
        if len(source.transfer_id) != TRANSFER_ID_BYTES:
            raise InvalidRequest(
                f"source.transfer_id has {len(source.transfer_id)} bytes, not {TRANSFER_ID_BYTES}", "source.transfer_id"
            )
        verify_worker_id("source.worker_id", source.worker_id)
        verify_peer_address("source.address", source.address)
        if is_loopback(self.settings.host) and not is_loopback(source.address):
            raise InvalidRequest(
                f"source.address {source.address!r} cannot be reached from a worker on loopback", "source.address"
            )
        return SourceRef(
            source.worker_id, source.epoch, source.address, source.transfer_id, engine_request.request_digest
        )


@dataclass(eq=False)
class _Session:
    """One call's session, from its first turn to the end of the call. It holds blocks between turns only until others need them."""

    settings: DecodeSettings
    reader: RequestReader
    engine: EngineClient
    telemetry: WorkerTelemetry
    metadata: Mapping[str, str]
    """The call's."""
    _request: EngineCoreRequest | None = field(default=None, init=False)
    _stream: RequestStream | None = field(default=None, init=False)
    _record: CallStats | None = field(default=None, init=False)
    """Stats of the running turn."""

    async def serve(self, turns: _Turns) -> AsyncIterator[decode_pb2.DecodeEvent]:
        """Raises: DeadlineExceeded when idle, Draining, InvalidRequest, and the error that ends it in the engine."""
        goes_on = True
        while goes_on and (turn := await self._next(turns)) is not None:
            request, hand_over, headers = self._read(turn)
            record = self._record = self.telemetry.call("decode", request, headers)
            with record:
                stream = self._stream = hand_over()
                yield admitted_event(timeline.PREFILL_QUEUED, request.arrival_time)
                async for output in stream:
                    goes_on = output.awaits_input
                    for event in output_events(output, LOCAL_MOMENTS):
                        yield event
            self._record = None
            record.close()
            if self.engine.draining:
                raise Draining("the worker is draining")

    def close(self) -> None:
        """End it in the engine, in any state."""
        record, self._record = self._record, None
        self.engine.release(self._stream, None if record is None else record.close)

    async def _next(self, turns: _Turns) -> decode_pb2.DecodeTurn | None:
        """The next turn; None when the router has closed its side. Raises: what ends the session meanwhile."""
        reading = asyncio.ensure_future(_next_turn(turns))
        ended = asyncio.ensure_future(_end(self._stream))
        idle_s = self.settings.limits.session_idle_timeout_s
        async with first_of(reading, ended, timeout_s=idle_s):
            if ended.done():
                ended.result()
            if reading.done():
                return reading.result()
        raise DeadlineExceeded(f"the session was idle for {idle_s:g} s (session_idle_timeout_s)")

    def _read(
        self, turn: decode_pb2.DecodeTurn
    ) -> tuple[EngineCoreRequest, Callable[[], RequestStream], Mapping[str, str]]:
        """The next turn's request, a function that submits it, and its trace context. Raises: InvalidRequest."""
        if turn.WhichOneof("turn") not in ("generation_request", "open" if self._request is None else "next"):
            raise InvalidRequest("a session's first message is `open`, and every later one is `next`", "turn")
        engine, stream = self.engine, self._stream
        if self._request is None or stream is None:
            request = self._request = self.reader.request(turn, prefill_here=True, resumable=True)
            engine.verify(request)
            interval = self.settings.stream_interval
            return request, lambda: engine.submit(request, self._take, interval), self.metadata
        said = self.reader.turn(turn)
        update = StreamingUpdate(
            request_id=self._request.request_id,
            prompt_token_ids=said.prompt_token_ids,
            sampling_params=said.sampling_params,
            arrival_time=time.monotonic(),
            num_kept_output_tokens=said.num_kept_output_tokens,
        )
        engine.verify_update(update)
        # only the call's statistics need this copy
        request = msgspec.structs.replace(
            self._request,
            prompt_token_ids=update.prompt_token_ids,
            sampling_params=update.sampling_params,
            arrival_time=update.arrival_time,
        )

        def resume() -> RequestStream:
            engine.resume(update)
            return stream

        return request, resume, said.trace_headers

    def _take(self, output: EngineCoreOutput) -> None:
        if self._record is not None:
            self._record.take(output)


async def _next_turn(turns: _Turns) -> decode_pb2.DecodeTurn | None:
    return await anext(turns, None)


async def _end(stream: RequestStream | None) -> None:
    """Between two turns an engine reports only the session's end. Raises: that; waits forever without a stream."""
    if stream is None:
        await asyncio.Event().wait()
    else:
        await stream.get()
        raise InternalError("the engine went on with a session that awaited input")


async def _events(
    stream: RequestStream,
    landed: asyncio.Future[Landing] | None,
    block_bytes: int,
    names: Mapping[str, tuple[str, ...]],
) -> AsyncIterator[decode_pb2.DecodeEvent]:
    """Yield `Receiving` while that goes on, `Landed` or `PrefillingLocally`, once, as soon as it is known, and all outputs."""
    outputs = aiter(stream)
    if landed is not None:
        first = asyncio.ensure_future(anext(outputs))
        reports: asyncio.Queue[bool] = asyncio.Queue()
        stream.on_receiving = reports.put_nowait
        try:
            while not (first.done() or landed.done()):
                report = asyncio.ensure_future(reports.get())
                try:
                    await asyncio.wait((first, landed, report), return_when=asyncio.FIRST_COMPLETED)
                    if report.done():
                        yield receiving_event(report.result())
                finally:
                    report.cancel()
            if landed.done() and not landed.cancelled():
                num_blocks, connector = landed.result()
                yield landed_event(num_blocks, block_bytes, connector)
            output = await first
        finally:
            first.cancel()
        if output.prefills_locally:
            yield prefilling_locally_event()
            names = LOCAL_MOMENTS
            if not output.new_token_ids and output.finish_reason is None:
                output = await anext(outputs)
        for event in output_events(output, names):
            yield event
    async for output in outputs:
        for event in output_events(output, names):
            yield event
