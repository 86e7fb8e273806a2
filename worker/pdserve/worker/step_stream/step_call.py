"""`StepCall`: one call of a router's stream, as the servicer of its role sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from pdserve.common.errors import InternalError, PdServeError
from pdserve.common.request.step_wire import StepEvent, end_event
from pdserve.worker.step_stream.step_outbox import LARGE_BYTES, StepOutbox

log = logging.getLogger(__name__)


def _nothing(_: Sequence[int]) -> None:
    pass


class StepCall:
    """Until `end`, or until the router cancels the call or its stream ends. Later outputs and events are dropped."""

    def __init__(self, key: int, outbox: StepOutbox, on_ended: Callable[[int], None]) -> None:
        """on_ended: called with the key when the servicer ends the call."""
        self._key = key
        self._outbox = outbox
        self._on_ended = on_ended
        self.has_ended = False
        self.on_cancel: Callable[[], object] | None = None
        """Set by the servicer: called once, if the router cancels the call before its end."""
        self.on_ended_sequences: Callable[[Sequence[int]], None] = _nothing
        """Set by the servicer: called with sequences whose texts are complete."""

    def tokens(self, index: int, first_position: int, token_ids: list[int]) -> None:
        """Send new tokens of a sequence, which has nothing else to report."""
        if not self.has_ended:
            self._outbox.tokens(self._key, index, first_position, token_ids)

    def event(self, message: Message) -> None:
        """Send an event."""
        if not self.has_ended:
            self._outbox.event(StepEvent(self._key, message.SerializeToString()))

    def end(self, error: PdServeError | None = None) -> None:
        """End the call; repeated calls have no effect. error: None if it ends well."""
        if not self.has_ended:
            self.has_ended = True
            self._outbox.event(end_event(self._key, error))
            self._on_ended(self._key)

    def cancel(self) -> None:
        """The router has ended the call, or its stream has ended."""
        if not self.has_ended:
            self.has_ended = True
            if self.on_cancel is not None:
                self.on_cancel()

    def serve(self, events: AsyncGenerator[Any, None]) -> None:
        """Send these events in a task of their own, large ones at the pace of the router, then end the call with their error, if
        any."""
        task = asyncio.create_task(self._serve(events), name="call of a step stream")
        _SERVING.add(task)
        task.add_done_callback(_SERVING.discard)
        self.on_cancel = task.cancel

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


_SERVING: set[asyncio.Task[None]] = set()
"""Tasks of `serve`, which the loop itself references weakly."""
