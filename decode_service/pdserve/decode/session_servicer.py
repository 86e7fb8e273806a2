"""`SessionServicer`: streaming sessions of a decode worker. Turn after turn continues one sequence of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import msgspec

from pdserve.common import timeline
from pdserve.common.errors import DeadlineExceeded, Draining, InternalError, InvalidRequest, Overloaded
from pdserve.common.first_done import first_of
from pdserve.common.net.rpc import metadata_of
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest, StreamingUpdate
from pdserve.common.request.wire import moments_to_wire, outputs_to_wire
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.output_stream import OutputStream
from pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2
from pdserve.worker.call_stats import CallStats
from pdserve.worker.worker import Worker

StarvationGuard = AsyncIterator[decode_pb2.DecodeTurn]


LOCAL_MOMENTS = {
    "queued": (timeline.PREFILL_QUEUED,),
    "scheduled": (timeline.PREFILL_STARTED,),
    "first_token": (timeline.PREFILL_COMPUTED, timeline.DECODE_STARTED),
    "finished": (timeline.DECODE_FINISHED,),
}
"""The engine's moment -> those of the timeline, where the prompt is prefilled here."""


class SessionServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves `DecodeService.Session`. Bounded in number; an idle session holds blocks only until other sequences need them."""

    def __init__(self, worker: Worker) -> None:
        settings = worker.settings
        if not isinstance(settings, DecodeSettings):
            raise InternalError(f"sessions need DecodeSettings, not {type(settings).__name__}")
        self._worker = worker
        self._settings = settings
        self._engine = worker.engine
        self._engine.max_sessions = settings.max_sessions

    async def Session(
        self, request_iterator: StarvationGuard, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[decode_pb2.DecodeEvent]:
        if self._engine.num_sessions >= self._settings.max_sessions:
            # a call that is ended while its first turn is on the way here may lose this answer
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.session_idle_timeout_s):
                    await _next(request_iterator)
            raise Overloaded(
                f"{self._engine.num_sessions} sessions are open on this worker, at most {self._settings.max_sessions} may be "
                "(max_sessions)"
            )
        self._engine.num_sessions += 1
        session = _Session(self._worker, self._settings, metadata_of(context))
        try:
            async for event in session.serve(request_iterator):
                yield event
        finally:
            session.close()
            self._engine.num_sessions -= 1


class _Session:
    """One of them, from its first turn to the end of the call."""

    def __init__(self, worker: Worker, settings: DecodeSettings, metadata: Mapping[str, str]) -> None:
        self._worker = worker
        self._idle_timeout_s = settings.session_idle_timeout_s
        self._stream_interval = settings.stream_interval
        self._metadata = metadata
        self._request: EngineCoreRequest | None = None
        self._stream: OutputStream | None = None
        self._record: CallStats | None = None
        """Stats of the running turn."""

    async def serve(self, turns: StarvationGuard) -> AsyncIterator[decode_pb2.DecodeEvent]:
        """Raises: DeadlineExceeded when idle, Draining, InvalidRequest, and the error that ends it in the engine."""
        goes_on = True
        while goes_on and (turn := await self._next(turns)) is not None:
            request, hand_over, headers = self._read(turn)
            record = self._record = self._worker.telemetry.call("decode", request, headers)
            with record:
                stream = self._stream = hand_over()
                moments = moments_to_wire({timeline.PREFILL_QUEUED: request.arrival_time})
                yield decode_pb2.DecodeEvent(admitted=prefill_pb2.Admitted(moments=moments))
                async for output in stream:
                    goes_on = output.awaits_input
                    yield decode_pb2.DecodeEvent(outputs=outputs_to_wire(output, LOCAL_MOMENTS))
            self._record = None
            record.close()
            if self._worker.engine.draining:
                raise Draining("the worker is draining")

    def close(self) -> None:
        """End it in the engine, in any state."""
        record, self._record = self._record, None
        if self._stream is not None:
            self._worker.engine.release(self._stream, None if record is None else record.close)
        elif record is not None:
            record.close()

    async def _next(self, turns: StarvationGuard) -> decode_pb2.DecodeTurn | None:
        """The next turn; None when the router has closed its side. Raises: what ends the session meanwhile."""
        reading = asyncio.ensure_future(_next(turns))
        ended = asyncio.ensure_future(_end(self._stream))
        async with first_of(reading, ended, timeout_s=self._idle_timeout_s):
            if ended.done():
                ended.result()
            if reading.done():
                return reading.result()
        raise DeadlineExceeded(f"the session was idle for {self._idle_timeout_s:g} s (session_idle_timeout_s)")

    def _read(
        self, turn: decode_pb2.DecodeTurn
    ) -> tuple[EngineCoreRequest, Callable[[], OutputStream], Mapping[str, str]]:
        """The next turn's request, a function that submits it, and its trace context. Raises: InvalidRequest."""
        if turn.WhichOneof("turn") not in ("generation_request", "open" if self._request is None else "next"):
            raise InvalidRequest("a session's first message is `open`, and every later one is `next`", "turn")
        engine, stream = self._worker.engine, self._stream
        if self._request is None or stream is None:
            request = self._request = self._worker.reader.request(turn, prefill_here=True, resumable=True)
            self._worker.verify_new(request)
            return request, lambda: engine.submit(request, self._take, self._stream_interval), self._metadata
        said = self._worker.reader.turn(turn)
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


async def _next(turns: StarvationGuard) -> decode_pb2.DecodeTurn | None:
    return await anext(turns, None)


async def _end(stream: OutputStream | None) -> None:
    """Between two turns an engine reports only the session's end. Raises: that; waits forever without a stream."""
    if stream is None:
        await asyncio.Event().wait()
    else:
        await stream.get()
        raise InternalError("the engine went on with a session that awaited input")
