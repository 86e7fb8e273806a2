"""`StepStream`: calls of this router at one worker, over one gRPC stream with one message per step of its engine.

A worker has two: the step stream, and the bulk stream for large messages. A stream is opened with its first call, and again with
the first call after it broke. What breaks it ends each of its calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, MutableSequence
from typing import Any, Protocol, TypeVar

import grpc.aio
from google.protobuf.message import Message

from pdserve.common.errors import InternalError, PeerError, WorkerLost
from pdserve.common.net.service_channel import STEP_STREAM, ServiceChannel, warn_of
from pdserve.common.request.wire.step_wire import (
    MAX_COMMANDS,
    MAX_SUBMISSIONS,
    Columns,
    columns_of,
    end_from_wire,
    max_step_bytes,
)
from pdserve.router.workers.call_failure import CallFailed, next_message, said_by_worker
from pdserve.v1 import prefill_pb2, step_stream_pb2

log = logging.getLogger(__name__)
T = TypeVar("T", bound=Message)

_MESSAGE_BYTES = 256 << 10
"""Bytes of submissions and turns in one message, unless it has only one of them; workers take at least 1 MiB."""
_ANY_LENGTH = 1 << 20
"""Tokens, of a worker whose length is not given."""


class StepListener(Protocol):
    """Gets the output of one call. Called in the asyncio thread; must not raise."""

    def tokens(self, index: int, first_position: int, token_ids: list[int]) -> None:
        """New tokens of a sequence."""

    def event(self, message: bytes) -> None:
        """Another event, serialized."""

    def ended(self, failure: CallFailed | None) -> None:
        """The call has ended; None: well. Called once, and last."""


class StepStream:
    """Used in the asyncio thread."""

    def __init__(
        self,
        channel: ServiceChannel,
        worker: str,
        max_model_len: int = _ANY_LENGTH,
        max_bytes: int | None = None,
    ) -> None:
        """worker: name for messages. max_model_len: of the worker, in tokens; bounds what it may send. max_bytes: of a message;
        None for those of a step stream."""
        self._channel = channel
        self._worker = worker
        self._max_model_len = max_model_len
        self._max_bytes = max_step_bytes(max_model_len) if max_bytes is None else max_bytes
        self._connection: _Connection | None = None
        self.on_step: Callable[[int], None] | None = None
        """Called with the number of sequences for which a message has tokens."""

    def submit(self, submission: step_stream_pb2.Submission, listener: StepListener) -> SubmittedCall:
        """Begin a call. submission: without a key, which it gets here."""
        if self._connection is None or self._connection.has_ended:
            self._connection = _Connection(
                self._channel, self._worker, self._max_model_len, self._max_bytes, lambda: self.on_step
            )
        return self._connection.submit(submission, listener)

    def close(self) -> None:
        """End the stream with its calls, if it is open."""
        if self._connection is not None:
            self._connection.close()


class SubmittedCall:
    """One call of a stream, for the caller."""

    __slots__ = ("_connection", "_key")

    def __init__(self, connection: _Connection, key: int) -> None:
        self._connection = connection
        self._key = key

    def cancel(self) -> None:
        """End the call at both ends; its listener hears nothing more. Repeated calls have no effect."""
        self._connection.cancel(self._key)

    def end_sequence(self, index: int, turn: int | None = None) -> None:
        """Request the end of a sequence whose text is complete. turn: of a session, the number of turns before."""
        self._connection.end_sequence(self._key, index, turn)

    def migrate(self, index: int, transfer_id: bytes, receiver: prefill_pb2.Receiver) -> None:
        """Request the end of a sequence that another worker, the receiver of that transfer, continues."""
        self._connection.migrate(self._key, index, transfer_id, receiver)

    def send_turn(self, request: bytes) -> None:
        """Send the next turn of a session. request: encoded."""
        self._connection.send_turn(self._key, request)


class _Connection:
    """One stream, from its first call to its end."""

    def __init__(
        self,
        channel: ServiceChannel,
        worker: str,
        max_model_len: int,
        max_bytes: int,
        on_step: Callable[[], Callable[[int], None] | None],
    ) -> None:
        """on_step: returns that of the stream now."""
        self._on_step = on_step
        self._channel = channel
        self._worker = worker
        self._max_model_len = max_model_len
        self._method = dataclasses.replace(STEP_STREAM, max_response_bytes=max_bytes)
        self._keys = itertools.count(1)
        self._listeners: dict[int, StepListener] = {}
        self._unsent: dict[int, step_stream_pb2.Submission] = {}
        self._ended_sequences: list[step_stream_pb2.EndedSequences] = []
        self._migrations: list[step_stream_pb2.Migrate] = []
        self._turns: dict[int, step_stream_pb2.Turn] = {}
        """Key -> the next turn of that session, of which there is one at a time."""
        self._cancelled: dict[int, None] = {}
        """Keys of calls to cancel; one that ends meanwhile is removed."""
        self._has_commands = asyncio.Event()
        self._call: Any = None
        self.has_ended = False
        self._tasks = [asyncio.create_task(self._run(), name="step stream")]

    def submit(self, submission: step_stream_pb2.Submission, listener: StepListener) -> SubmittedCall:
        """See `StepStream.submit`."""
        key = submission.key = next(self._keys)
        self._listeners[key] = listener
        self._unsent[key] = submission
        self._has_commands.set()
        return SubmittedCall(self, key)

    def cancel(self, key: int) -> None:
        """See `SubmittedCall.cancel`."""
        self._turns.pop(key, None)
        if self._listeners.pop(key, None) is not None and self._unsent.pop(key, None) is None:
            self._cancelled[key] = None
            self._has_commands.set()

    def end_sequence(self, key: int, index: int, turn: int | None) -> None:
        """See `SubmittedCall.end_sequence`."""
        if key in self._listeners:
            self._ended_sequences.append(step_stream_pb2.EndedSequences(key=key, indexes=[index], turn=turn))
            self._has_commands.set()

    def migrate(self, key: int, index: int, transfer_id: bytes, receiver: prefill_pb2.Receiver) -> None:
        """See `SubmittedCall.migrate`."""
        if key in self._listeners:
            migrate = step_stream_pb2.Migrate(key=key, index=index, transfer_id=transfer_id, receiver=receiver)
            self._migrations.append(migrate)
            self._has_commands.set()

    def send_turn(self, key: int, request: bytes) -> None:
        """See `SubmittedCall.send_turn`."""
        if key in self._listeners:
            self._turns[key] = step_stream_pb2.Turn(key=key, request=request)
            self._has_commands.set()

    def close(self) -> None:
        """End the stream; its calls fail."""
        self._tasks[0].cancel()
        # a task that is cancelled before its first step runs nothing
        self._end(CallFailed(WorkerLost(f"the stream of worker {self._worker} was closed"), died=True))

    async def _run(self) -> None:
        failure = CallFailed(WorkerLost(f"the stream of worker {self._worker} was closed"), died=True)
        try:
            first = self._take()
            self._call = self._channel.stream_stream(self._method, first)
            self._tasks.append(asyncio.create_task(self._write(first), name="step stream writer"))
            while (message := await next_message(self._call, "the stream")) is not None:
                self._deliver(message)
            failure = CallFailed(WorkerLost(f"worker {self._worker} ended its stream"), died=False, is_answer=True)
        except CallFailed as error:
            failure = error
        except PeerError as error:
            failure = CallFailed(error, died=False, is_answer=True)
        except Exception as error:
            log.exception("the stream of worker %s failed in the router", self._worker)
            failure = CallFailed(InternalError(f"the router failed: {type(error).__name__}"), died=False)
        finally:
            self._end(failure)

    def _end(self, failure: CallFailed) -> None:
        self.has_ended = True
        for task in self._tasks[1:]:
            task.cancel()
        if self._call is not None:
            self._call.cancel()
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            try:
                listener.ended(failure)
            except Exception:
                # the other calls must end, too
                log.exception("a call to worker %s could not be ended", self._worker)

    def _take(self) -> bytes:
        """Serialize commands that are not sent yet, as many as a message may have: see `step_wire` and `_MESSAGE_BYTES`."""
        ended, self._ended_sequences = self._ended_sequences[:MAX_COMMANDS], self._ended_sequences[MAX_COMMANDS:]
        migrations, self._migrations = self._migrations[:MAX_COMMANDS], self._migrations[MAX_COMMANDS:]
        cancelled = list(itertools.islice(self._cancelled, MAX_COMMANDS))
        for key in cancelled:
            del self._cancelled[key]
        commands = step_stream_pb2.StepCommands(ended_sequences=ended, cancelled=cancelled, migrations=migrations)
        num_bytes = _move(self._unsent, commands.submissions, MAX_SUBMISSIONS, 0)
        if not self._unsent:
            _move(self._turns, commands.turns, MAX_COMMANDS, num_bytes)
        if not (self._unsent or self._turns or self._ended_sequences or self._migrations or self._cancelled):
            self._has_commands.clear()
        return commands.SerializeToString()

    async def _write(self, first: bytes) -> None:
        # the stream has ended then; `read` raises the cause
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            await self._call.write(first)
            while True:
                await self._has_commands.wait()
                await self._call.write(self._take())

    def _deliver(self, outputs: step_stream_pb2.StepOutputs) -> None:
        """Raises: PeerError."""
        try:
            columns = columns_of(outputs, self._max_model_len)
        except PeerError as error:
            warn_of(f"worker {self._worker}", error)
            raise
        if (on_step := self._on_step()) is not None:
            on_step(len(columns.keys))
        at = 0
        for event in outputs.events:
            self._deliver_tokens(columns, at, event.num_before)
            at = event.num_before
            if event.WhichOneof("event") == "end":
                self._cancelled.pop(event.key, None)
                if (listener := self._listeners.pop(event.key, None)) is not None:
                    cause = end_from_wire(event.end)
                    listener.ended(None if cause is None else said_by_worker(cause))
            elif (listener := self._listeners.get(event.key)) is not None:
                listener.event(event.message)
        self._deliver_tokens(columns, at, len(columns.keys))

    def _deliver_tokens(self, columns: Columns, start: int, stop: int) -> None:
        listeners = self._listeners
        keys, indexes, first_positions, token_ids = columns
        for at in range(start, stop):
            if (listener := listeners.get(keys[at])) is not None:
                listener.tokens(indexes[at], first_positions[at], token_ids[at])


def _move(unsent: dict[int, T], sent: MutableSequence[T], most: int, num_bytes: int) -> int:
    """Move the first entries into a message, a large one without others. num_bytes: of entries that it has already.

    Returns: those that it has then.
    """
    for key in list(itertools.islice(unsent, most)):
        size = unsent[key].ByteSize()
        if num_bytes and num_bytes + size > _MESSAGE_BYTES:
            break
        num_bytes += size
        sent.append(unsent.pop(key))
    return num_bytes
