"""`DecodeSession`: a streaming session of a decode worker. Turn after turn continues one sequence of its engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from pdserve.common import timeline
from pdserve.common.errors import DeadlineExceeded, Draining, InternalError, InvalidRequest
from pdserve.common.first_done import first_of
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest, StreamingUpdate
from pdserve.common.request.wire import moments_to_wire, outputs_to_wire
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.output_stream import OutputStream
from pdserve.v1 import decode_pb2, prefill_pb2
from pdserve.worker.call_stats import CallStats
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.kv_transfer_manager import KvTransferManager
from pdserve.worker.request_reader import RequestReader
from pdserve.worker.worker_telemetry import WorkerTelemetry

Turns = AsyncIterator[decode_pb2.DecodeTurn]

LOCAL_MOMENTS = {
    "queued": (timeline.PREFILL_QUEUED,),
    "scheduled": (timeline.PREFILL_STARTED,),
    "first_token": (timeline.PREFILL_COMPUTED, timeline.DECODE_STARTED),
    "finished": (timeline.DECODE_FINISHED,),
}
"""The engine's moment -> those of the timeline, where the prompt is prefilled here."""


@dataclass(eq=False)
class DecodeSession:
    """One call's session, from its first turn to the end of the call. It holds blocks between turns only until others need them."""

    settings: DecodeSettings
    reader: RequestReader
    engine: EngineClient
    kv_transfers: KvTransferManager
    telemetry: WorkerTelemetry
    metadata: Mapping[str, str]
    """The call's."""
    _request: EngineCoreRequest | None = field(default=None, init=False)
    _stream: OutputStream | None = field(default=None, init=False)
    _record: CallStats | None = field(default=None, init=False)
    """Stats of the running turn."""

    async def serve(self, turns: Turns) -> AsyncIterator[decode_pb2.DecodeEvent]:
        """Raises: DeadlineExceeded when idle, Draining, InvalidRequest, and the error that ends it in the engine."""
        goes_on = True
        while goes_on and (turn := await self._next(turns)) is not None:
            request, hand_over, headers = self._read(turn)
            record = self._record = self.telemetry.call("decode", request, headers)
            with record:
                stream = self._stream = hand_over()
                moments = moments_to_wire({timeline.PREFILL_QUEUED: request.arrival_time})
                yield decode_pb2.DecodeEvent(admitted=prefill_pb2.Admitted(moments=moments))
                async for output in stream:
                    goes_on = output.awaits_input
                    yield decode_pb2.DecodeEvent(outputs=outputs_to_wire(output, LOCAL_MOMENTS))
            self._record = None
            record.close()
            if self.engine.draining:
                raise Draining("the worker is draining")

    def close(self) -> None:
        """End it in the engine, in any state."""
        record, self._record = self._record, None
        if self._stream is not None:
            self.engine.release(self._stream, None if record is None else record.close)
        elif record is not None:
            record.close()

    async def _next(self, turns: Turns) -> decode_pb2.DecodeTurn | None:
        """The next turn; None when the router has closed its side. Raises: what ends the session meanwhile."""
        reading = asyncio.ensure_future(next_turn(turns))
        ended = asyncio.ensure_future(_end(self._stream))
        idle_s = self.settings.session_idle_timeout_s
        async with first_of(reading, ended, timeout_s=idle_s):
            if ended.done():
                ended.result()
            if reading.done():
                return reading.result()
        raise DeadlineExceeded(f"the session was idle for {idle_s:g} s (session_idle_timeout_s)")

    def _read(
        self, turn: decode_pb2.DecodeTurn
    ) -> tuple[EngineCoreRequest, Callable[[], OutputStream], Mapping[str, str]]:
        """The next turn's request, a function that submits it, and its trace context. Raises: InvalidRequest."""
        if turn.WhichOneof("turn") not in ("generation_request", "open" if self._request is None else "next"):
            raise InvalidRequest("a session's first message is `open`, and every later one is `next`", "turn")
        engine, stream = self.engine, self._stream
        if self._request is None or stream is None:
            request = self._request = self.reader.request(turn, prefill_here=True, resumable=True)
            engine.verify(request)
            self.kv_transfers.verify_new(request.request_id)
            interval = self.settings.stream_interval
            return request, lambda: engine.submit(request, self._take, interval), self.metadata
        said = self.reader.turn(turn)
        update = StreamingUpdate(
            request_id=self._request.request_id,
            prompt_token_ids=said.prompt_token_ids,
            sampling_params=said.sampling_params,
            arrival_time=time.monotonic(),
        )
        engine.core.verify_update(update)
        # for the turn's record alone: the engine has the sequence
        request = msgspec.structs.replace(
            self._request,
            prompt_token_ids=update.prompt_token_ids,
            sampling_params=update.sampling_params,
            arrival_time=update.arrival_time,
        )

        def resume() -> OutputStream:
            engine.resume(update)
            return stream

        return request, resume, said.trace_headers

    def _take(self, output: EngineCoreOutput) -> None:
        if self._record is not None:
            self._record.take(output)


async def next_turn(turns: Turns) -> decode_pb2.DecodeTurn | None:
    return await anext(turns, None)


async def _end(stream: OutputStream | None) -> None:
    """Between two turns an engine reports only the session's end. Raises: that; waits forever without a stream."""
    if stream is None:
        await asyncio.Event().wait()
    else:
        await stream.get()
        raise InternalError("the engine went on with a session that awaited input")
