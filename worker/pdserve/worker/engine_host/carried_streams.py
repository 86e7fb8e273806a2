"""Control streams of peers in the process of the engine, whose messages the worker's process carries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from pdserve.kv_transfer.control.attach_servicer import AttachServicer
from pdserve.worker.engine_host.host_frames import AttachEvent, AttachMessage, CloseAttach, OpenAttach

log = logging.getLogger(__name__)


class CarriedStreams:
    """One task per stream. Used in the asyncio thread."""

    def __init__(self, servicer: AttachServicer, send: Callable[[AttachEvent], None]) -> None:
        self._servicer = servicer
        self._send = send
        self._inboxes: dict[int, asyncio.Queue[bytes | None]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: OpenAttach | AttachMessage | CloseAttach) -> None:
        """Handle what the worker's process has sent of a stream; a stream that has ended is passed over."""
        number = message.stream_id
        match message:
            case OpenAttach():
                self._inboxes[number] = asyncio.Queue()
                self._tasks[number] = asyncio.create_task(self._serve(message), name="carried attach")
            case AttachMessage():
                if (inbox := self._inboxes.get(number)) is not None:
                    inbox.put_nowait(message.message)
            case CloseAttach():
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()

    async def close(self) -> None:
        """End all streams; waits."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, opened: OpenAttach) -> None:
        number = opened.stream_id
        try:
            events = self._servicer.serve_carried(opened.opening, _messages(self._inboxes[number]), opened.host)
            async with contextlib.aclosing(events):
                async for event in events:
                    self._send(AttachEvent(number, event))
        except Exception:
            log.exception("a control stream failed")
        finally:
            del self._inboxes[number], self._tasks[number]
            self._send(AttachEvent(number, None))


async def _messages(inbox: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (message := await inbox.get()) is not None:
        yield message
