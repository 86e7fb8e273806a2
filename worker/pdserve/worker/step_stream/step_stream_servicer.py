"""`StepStreamServicer`: all calls of a router, over its step stream and its bulk stream; both are served alike."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping

from pdserve.common.errors import InternalError, InvalidRequest, PdServeError
from pdserve.common.method_handler import Context
from pdserve.common.request.wire.step_wire import MAX_COMMANDS, MAX_SUBMISSIONS, step_outputs
from pdserve.v1 import step_stream_pb2, step_stream_pb2_grpc
from pdserve.worker.step_stream.step_call import StepCall
from pdserve.worker.step_stream.step_outbox import StepOutbox

log = logging.getLogger(__name__)

_Commands = AsyncIterator[step_stream_pb2.StepCommands]
_TURN_BYTES = 64 << 10
"""Bytes of submissions that are read in one turn of the event loop."""
_CALL_BYTES = 4 << 10
"""Cost of the begin of a call, in bytes of submissions."""


BeginCall = Callable[[step_stream_pb2.Submission, StepCall], None]
"""Begins a call of one kind and returns at once. Raises: PdServeError, which ends the call."""


class StepStreamServicer(step_stream_pb2_grpc.StepStreamServiceServicer):
    """Serves `StepStreamService`."""

    def __init__(self, handlers: Mapping[str, BeginCall]) -> None:
        """handlers: by the kinds of `Submission.call`."""
        self._handlers = handlers
        self._streams: set[_Stream] = set()
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Calls whose large events routers have not read yet."""
        return sum(stream.outbox.num_waiting for stream in self._streams)

    def num_calls(self, kinds: Collection[str]) -> int:
        """Open calls of these kinds."""
        return sum(kind in kinds for stream in self._streams for kind in stream.kinds.values())

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
        # a cancelled stream ends its calls at once, even if this generator is suspended. `context.add_done_callback` would make a
        # cycle of the context and the call, and gRPC counts a call among those of its connection until it is freed
        handler = asyncio.current_task()
        assert handler is not None
        handler.add_done_callback(lambda _: stream.end())
        try:
            while (entries := await stream.outbox.take()) is not None:
                yield step_outputs(entries)
        finally:
            reader.cancel()
            self._streams.discard(stream)
            stream.end()


class _Stream:
    """The calls of one stream."""

    def __init__(self, handlers: Mapping[str, BeginCall]) -> None:
        self._handlers = handlers
        self._calls: dict[int, StepCall] = {}
        self.kinds: dict[int, str] = {}
        """Of the open calls, by their keys."""
        self.outbox = StepOutbox(on_full=self.end)
        self._last_key = 0
        self._has_ended = False

    async def read(self, commands: _Commands) -> None:
        """Apply the router's messages until it closes its side; then the stream ends. An error ends it, too."""
        try:
            async for message in commands:
                await self._apply(message)
                if self._has_ended:
                    return
            self.outbox.end()
        except PdServeError as error:
            self.outbox.fail(error)
            self.end()
        except asyncio.CancelledError:
            raise
        except Exception:
            # the stream has broken; gRPC ends its handler
            self.outbox.end()

    def end(self) -> None:
        """Cancel all calls, and begin no more; repeated calls have no effect."""
        self._has_ended = True
        calls, self._calls, self.kinds = self._calls, {}, {}
        for call in calls.values():
            call.cancel()

    async def _apply(self, commands: step_stream_pb2.StepCommands) -> None:
        """Raises: InvalidRequest for what no router of ours sends."""
        _verify_counts(commands)
        try:
            for key in commands.cancelled:
                if (call := self._calls.get(key)) is not None:
                    self._forget(key)
                    call.cancel()
            for ended in commands.ended_sequences:
                if (call := self._calls.get(ended.key)) is not None:
                    call.on_ended_sequences(ended.indexes, ended.turn if ended.HasField("turn") else None)
        except Exception as error:
            log.exception("a message of a step stream failed")
            raise InternalError(f"the worker failed: {type(error).__name__}") from error
        for migration in commands.migrations:
            if (call := self._calls.get(migration.key)) is not None and call.on_migrate is not None:
                call.on_migrate(migration)
        num_bytes = 0
        for submission in commands.submissions:
            if num_bytes > _TURN_BYTES:
                num_bytes = 0
                await asyncio.sleep(0)
            if self._has_ended:
                return
            num_bytes += _CALL_BYTES + submission.ByteSize()
            self._begin(submission)
        for turn in commands.turns:
            if (call := self._calls.get(turn.key)) is not None:
                if call.on_turn is None:
                    raise InvalidRequest(f"turn.key is {turn.key}, and that call is no session", "key")
                call.on_turn(turn.request)

    def _begin(self, submission: step_stream_pb2.Submission) -> None:
        key = submission.key
        if key <= self._last_key:
            raise InvalidRequest(
                f"submission.key is {key}, and {self._last_key} came before it: keys rise from 1", "key"
            )
        self._last_key = key
        call = self._calls[key] = StepCall(key, self.outbox, self._forget)
        kind = submission.WhichOneof("call")
        handler = None if kind is None else self._handlers.get(kind)
        try:
            if kind is None or handler is None:
                known = ", ".join(self._handlers)
                raise InvalidRequest(f"a submission has {kind or 'no call'}, this worker takes {known}", "call")
            self.kinds[key] = kind
            handler(submission, call)
        except PdServeError as error:
            call.end(error)
        except Exception as error:
            call.fail(error)

    def _forget(self, key: int) -> None:
        self._calls.pop(key, None)
        self.kinds.pop(key, None)


def _verify_counts(commands: step_stream_pb2.StepCommands) -> None:
    """Raises: InvalidRequest for more entries than a message may have."""
    ended = sum(len(ended.indexes) or 1 for ended in commands.ended_sequences)
    for field, count, limit in (
        ("submissions", len(commands.submissions), MAX_SUBMISSIONS),
        ("cancelled", len(commands.cancelled), MAX_COMMANDS),
        ("ended_sequences", ended, MAX_COMMANDS),
        ("turns", len(commands.turns), MAX_COMMANDS),
        ("migrations", len(commands.migrations), MAX_COMMANDS),
    ):
        if count > limit:
            raise InvalidRequest(f"{field} has {count} entries, a message may have at most {limit}", field)
