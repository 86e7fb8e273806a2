"""`StepCall`: one call of a router's stream, as the servicer of its role sees it.

Small outputs go to the stream's outbox at once. Large ones wait until the router has read enough of those before them, and so does
what the call sends after them; outputs of other calls pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message

from pdserve.common.errors import InternalError, PdServeError
from pdserve.common.request.wire.step_wire import StepEvent, StepTokens, end_event
from pdserve.v1 import step_stream_pb2
from pdserve.worker.step_stream.step_outbox import LARGE_BYTES, StepOutbox

log = logging.getLogger(__name__)


def _nothing(_: Sequence[int], turn: int | None) -> None:
    pass


class _Waiting(NamedTuple):
    """Outputs of a call that leave at the pace of the router."""

    entries: Iterable[StepTokens | StepEvent]
    num_bytes: int
    """In memory; 0 for events that are made as they leave."""


class StepCall:
    """Until `end`, or until the router cancels the call or its stream ends. Later outputs and events are dropped."""

    def __init__(self, key: int, outbox: StepOutbox, on_ended: Callable[[int], None]) -> None:
        """on_ended: called with the key after the servicer has ended the call, when all that it sent is in the outbox."""
        self._key = key
        self._outbox = outbox
        self._on_ended = on_ended
        self._waiting: deque[_Waiting] | None = None
        """None while nothing waits."""
        self._task: asyncio.Task[None] | None = None
        """Sends what waits."""
        self.has_ended = False
        self.on_cancel: Callable[[], object] | None = None
        """Set by the servicer: called once, if the router cancels the call before its end."""
        self.on_ended_sequences: Callable[[Sequence[int], int | None], None] = _nothing
        """Set by the servicer: called with sequences whose texts are complete and, of a session, the number of turns before."""
        self.on_migrate: Callable[[step_stream_pb2.Migrate], None] | None = None
        """Set by the servicer of a decode call: called with a sequence for another worker to continue. Raises: InvalidRequest."""
        self.on_turn: Callable[[bytes], None] | None = None
        """Set by the servicer of a session: called with each later turn's request, encoded. Raises: PdServeError."""

    def tokens(self, index: int, first_position: int, token_ids: list[int]) -> None:
        """Send new tokens of a sequence, which has nothing else to report."""
        if self._waiting is not None:
            self._wait(StepTokens(self._key, index, first_position, token_ids))
        elif not self.has_ended:
            self._outbox.tokens(self._key, index, first_position, token_ids)

    def event(self, message: Message) -> None:
        """Send an event."""
        if self.has_ended:
            return
        event = StepEvent(self._key, message.SerializeToString())
        if self._waiting is not None or len(event.message) > LARGE_BYTES:
            self._wait(event)
        else:
            self._outbox.event(event)

    def events(self, messages: Iterator[Message]) -> None:
        """Send events that may be large together; each is made as it leaves."""
        if not self.has_ended:
            self._append(_Waiting((StepEvent(self._key, message.SerializeToString()) for message in messages), 0))

    def end(self, error: PdServeError | None = None) -> None:
        """End the call; repeated calls have no effect. error: None if it ends well."""
        if self.has_ended:
            return
        event = end_event(self._key, error)
        if self._waiting is not None:
            self._wait(event)
            self.has_ended = True
        else:
            self.has_ended = True
            self._outbox.event(event)
            self._on_ended(self._key)

    def cancel(self) -> None:
        """The router has ended the call, or its stream has ended. What waits is dropped."""
        if self._task is not None:
            self._task.cancel()
            self._drop()
        if not self.has_ended:
            self.has_ended = True
            if self.on_cancel is not None:
                self.on_cancel()

    def serve(self, events: AsyncGenerator[Any, None]) -> None:
        """Send these events in a task of their own, large ones at the pace of the router, then end the call with their error, if
        any."""
        self.on_cancel = _started(self._serve(events)).cancel

    async def _serve(self, events: AsyncGenerator[Any, None]) -> None:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    message = event.SerializeToString()
                    if len(message) > LARGE_BYTES:
                        # small ones of other calls pass it
                        await self._outbox.room()
                    if not self.has_ended:
                        self._outbox.event(StepEvent(self._key, message))
            self.end()
        except PdServeError as error:
            self.end(error)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the call because of a bug."""
        log.error("a call of a step stream failed", exc_info=error)
        self.end(InternalError("internal error; the service's log has the details"))

    def _wait(self, entry: StepTokens | StepEvent) -> None:
        if not self.has_ended:
            self._append(_Waiting((entry,), self._outbox.hold(entry)))

    def _append(self, waiting: _Waiting) -> None:
        if self._waiting is not None:
            self._waiting.append(waiting)
        elif not self.has_ended:
            self._waiting = deque((waiting,))
            self._outbox.begin_waiting()
            self._task = _started(self._send_waiting(self._waiting))

    async def _send_waiting(self, queue: deque[_Waiting]) -> None:
        try:
            while queue:
                entries, num_bytes = queue[0]
                for entry in entries:
                    if isinstance(entry, StepEvent) and len(entry.message) > LARGE_BYTES:
                        await self._outbox.room()
                    self._outbox.add(entry)
                    if self._waiting is not queue:
                        return
                queue.popleft()
                self._outbox.release(num_bytes)
        except Exception as error:
            # a message could not be made
            self._drop()
            self.has_ended = False
            self.fail(error)
            if self.on_cancel is not None:
                self.on_cancel()
            return
        self._waiting = self._task = None
        self._outbox.end_waiting()
        if self.has_ended:
            self._on_ended(self._key)

    def _drop(self) -> None:
        if (waiting := self._waiting) is not None:
            self._waiting = self._task = None
            self._outbox.release(sum(each.num_bytes for each in waiting))
            self._outbox.end_waiting()


_SERVING: set[asyncio.Task[None]] = set()
"""Tasks of calls, which the loop itself references weakly."""


def _started(coroutine: Any) -> asyncio.Task[None]:
    task = asyncio.create_task(coroutine, name="call of a step stream")
    _SERVING.add(task)
    task.add_done_callback(_SERVING.discard)
    return task
