"""`DecodeSession`: a sequence with several inputs, from its first turn to the end of its call.

It holds blocks between turns only until other sequences need them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import msgspec
from google.protobuf.message import Message

from pdserve.common import clock, timeline
from pdserve.common.errors import DeadlineExceeded, Draining, InternalError, InvalidRequest, Overloaded
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest, StreamingUpdate
from pdserve.common.request.wire.decode_wire import admitted_event, output_events
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.common.tasks.first_done import first_of
from pdserve.decode.decode_moments import LOCAL_MOMENTS
from pdserve.worker.engine_client import EngineClient, RequestStream
from pdserve.worker.request_reader import RequestReader
from pdserve.worker.telemetry.call_stats import CallStats
from pdserve.worker.telemetry.worker_telemetry import WorkerTelemetry


@dataclass(eq=False)
class DecodeSession:
    """Serve its `events` once."""

    settings: DecodeSettings
    reader: RequestReader
    engine: EngineClient
    telemetry: WorkerTelemetry
    first: EngineCoreRequest
    """The first turn."""
    _turns: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue, init=False)
    """The next turn, encoded."""
    _stream: RequestStream | None = field(default=None, init=False)
    _record: CallStats | None = field(default=None, init=False)
    """Stats of the running turn."""

    def add_turn(self, data: bytes) -> None:
        """A later turn has arrived. Raises: InvalidRequest if another one waits already."""
        if not self._turns.empty():
            raise InvalidRequest("a turn of a session arrived before the one before it had begun", "turns")
        self._turns.put_nowait(data)

    def end_sequences(self, indexes: Sequence[int], turn: int | None) -> None:
        """The running turn's text is complete. turn: turns before it."""
        for index in indexes:
            self.engine.end_sequence(self.first.request_id, index, turn)

    async def events(self) -> AsyncGenerator[Message, None]:
        """The session's messages to the router. Raises: Overloaded beyond `max_sessions`, DeadlineExceeded when idle, Draining,
        InvalidRequest, and the engine's error that ends it."""
        num_sessions, max_sessions = self.engine.num_sessions, self.settings.limits.max_sessions
        if num_sessions >= max_sessions:
            raise Overloaded(
                f"{num_sessions} sessions are open on this worker, at most {max_sessions} may be (max_sessions)"
            )
        request: EngineCoreRequest = self.first
        update: StreamingUpdate | None = None
        self.engine.num_sessions += 1
        try:
            goes_on = True
            while goes_on:
                record = self._record = self.telemetry.call("decode", request)
                with record:
                    stream = self._begin_turn(update)
                    yield admitted_event(timeline.PREFILL_QUEUED, request.arrival_time)
                    async for output in stream:
                        goes_on = output.awaits_input
                        for event in output_events(output, LOCAL_MOMENTS):
                            yield event
                self._record = None
                record.close()
                if self.engine.draining:
                    raise Draining("the worker is draining")
                if goes_on:
                    request, update = self._read(await self._next(stream))
        finally:
            unfinished, self._record = self._record, None
            self.engine.release(self._stream, None if unfinished is None else unfinished.close)
            self.engine.num_sessions -= 1

    def _begin_turn(self, update: StreamingUpdate | None) -> RequestStream:
        """update: None for the first turn."""
        if self._stream is None or update is None:
            self._stream = self.engine.submit(self.first, self._take, self.settings.stream_interval)
        else:
            self.engine.resume(update)
        return self._stream

    async def _next(self, stream: RequestStream) -> bytes:
        """The next turn, encoded. Raises: DeadlineExceeded when idle, and the engine's error if the session ends meanwhile."""
        reading = asyncio.ensure_future(self._turns.get())
        ended = asyncio.ensure_future(_end(stream))
        idle_s = self.settings.limits.session_idle_timeout_s
        async with first_of(reading, ended, timeout_s=idle_s):
            if ended.done():
                ended.result()
            if reading.done():
                return reading.result()
        raise DeadlineExceeded(f"the session was idle for {idle_s:g} s (session_idle_timeout_s)")

    def _read(self, data: bytes) -> tuple[EngineCoreRequest, StreamingUpdate]:
        """A later turn, for the statistics and for the engine. Raises: InvalidRequest."""
        turn = self.reader.turn(data)
        update = StreamingUpdate(
            request_id=self.first.request_id,
            prompt_token_ids=turn.prompt_token_ids,
            sampling_params=turn.sampling_params,
            arrival_time=clock.monotonic(),
            num_kept_output_tokens=turn.num_kept_output_tokens,
        )
        self.engine.verify_update(update)
        request = msgspec.structs.replace(
            self.first,
            prompt_token_ids=update.prompt_token_ids,
            sampling_params=update.sampling_params,
            arrival_time=update.arrival_time,
            trace_headers=turn.trace_headers or self.first.trace_headers,
        )
        return request, update

    def _take(self, output: EngineCoreOutput) -> None:
        if self._record is not None:
            self._record.take(output)


async def _end(stream: RequestStream) -> None:
    """Wait for the session's end, the only thing that an engine reports between two turns. Raises: its error."""
    await stream.get()
    raise InternalError("the engine went on with a session that awaited input")
