"""`StepStreamServicer`: all calls of a router over one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.common.method_handler import Context
from pdserve.common.request.sampling_params import MOST_SEQUENCES
from pdserve.common.request.step_wire import step_outputs
from pdserve.common.security.peer_message import parsed
from pdserve.v1 import step_stream_pb2, step_stream_pb2_grpc
from pdserve.worker.step_stream.step_call import StepCall
from pdserve.worker.step_stream.step_outbox import StepOutbox

log = logging.getLogger(__name__)

_Commands = AsyncIterator[step_stream_pb2.StepCommands]


class CallHandler(NamedTuple):
    """A kind of call that a role serves."""

    parse: Callable[[bytes], Any]
    """`FromString` of the message that begins it."""
    begin: Callable[[Any, StepCall], None]
    """Begins a call and returns at once. Raises: PdServeError, which ends the call."""


class StepStreamServicer(step_stream_pb2_grpc.StepStreamServiceServicer):
    """Serves `StepStreamService`."""

    def __init__(self, handlers: Mapping[str, CallHandler]) -> None:
        """handlers: by the fields of `Submission`."""
        self._handlers = handlers
        self._streams: set[_Stream] = set()
        self._closed = False

    def close(self) -> None:
        """End each stream after what its calls have sent."""
        self._closed = True
        for stream in self._streams:
            stream.outbox.end()

    async def Open(self, request_iterator: _Commands, context: Context) -> AsyncIterator[step_stream_pb2.StepOutputs]:
        stream = _Stream(self._handlers)
        if self._closed:
            stream.outbox.end()
        self._streams.add(stream)
        reader = asyncio.create_task(stream.read(request_iterator), name="step stream reader")
        # a cancelled stream ends its calls at once, even if this generator is suspended
        context.add_done_callback(lambda _: stream.end())  # type: ignore[arg-type]  # the stub asks for a class
        try:
            while (entries := await stream.outbox.take()) is not None:
                yield step_outputs(entries)
        finally:
            reader.cancel()
            self._streams.discard(stream)
            stream.end()


class _Stream:
    """The calls of one stream."""

    def __init__(self, handlers: Mapping[str, CallHandler]) -> None:
        self._handlers = handlers
        self._calls: dict[int, StepCall] = {}
        self.outbox = StepOutbox(on_full=self.end)
        self._last_key = 0

    async def read(self, commands: _Commands) -> None:
        """Apply the router's messages until it closes its side; then the stream ends. An error ends it, too."""
        try:
            async for message in commands:
                self._apply(message)
            self.outbox.end()
        except PdServeError as error:
            self.outbox.fail(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            # the stream has broken; gRPC ends its handler
            self.outbox.end()

    def end(self) -> None:
        """Cancel all calls; repeated calls have no effect."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()

    def _apply(self, commands: step_stream_pb2.StepCommands) -> None:
        """Raises: InvalidRequest for what no router of ours sends."""
        for submission in commands.submissions:
            self._begin(submission)
        for ended in commands.ended_sequences:
            if (num := len(ended.indexes)) > MOST_SEQUENCES:
                raise InvalidRequest(f"indexes has {num} sequences, at most {MOST_SEQUENCES} are possible", "indexes")
            if (call := self._calls.get(ended.key)) is not None:
                call.on_ended_sequences(ended.indexes)
        for key in commands.cancelled:
            if (call := self._calls.pop(key, None)) is not None:
                call.cancel()

    def _begin(self, submission: step_stream_pb2.Submission) -> None:
        key = submission.key
        if key <= self._last_key:
            raise InvalidRequest(
                f"submission.key is {key}, and {self._last_key} came before it: keys rise from 1", "key"
            )
        self._last_key = key
        call = self._calls[key] = StepCall(key, self.outbox, self._forget)
        kind = submission.WhichOneof("message")
        handler = None if kind is None else self._handlers.get(kind)
        try:
            if kind is None or handler is None:
                known = ", ".join(self._handlers)
                raise InvalidRequest(f"submission has {kind or 'no message'}, this worker takes {known}", "submission")
            handler.begin(parsed(f"a {kind} of a step stream", handler.parse, getattr(submission, kind)), call)
        except PdServeError as error:
            call.end(error)
        except Exception as error:
            call.fail(error)

    def _forget(self, key: int) -> None:
        self._calls.pop(key, None)
