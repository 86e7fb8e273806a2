"""`OutputQueue`: outputs on their way from an engine's thread or process to the one reader."""

from __future__ import annotations

import asyncio
import contextlib
import queue

from pdserve.common.request.engine_types import EngineCoreOutputs
from pdserve.engine.client.messages import EngineFailed, ForReader


class OutputQueue:
    """To read from in one thread or in one event loop. After the final error every read raises it."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[EngineCoreOutputs | EngineFailed] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()

    def put(self, item: ForReader) -> None:
        """Any thread may call it. Outputs without results are dropped."""
        if not isinstance(item, EngineFailed) and not (isinstance(item, EngineCoreOutputs) and item.has_results):
            return
        self._items.put(item)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: there is no reader
                self._loop.call_soon_threadsafe(self._arrived.set)

    @property
    def is_empty(self) -> bool:
        return self._items.empty()

    def get(self) -> EngineCoreOutputs:
        """The next outputs; blocks. Raises: the final error."""
        return self._checked(self._items.get())

    async def get_async(self) -> EngineCoreOutputs:
        """The same in an event loop."""
        self._loop = asyncio.get_running_loop()
        while self._items.empty():
            self._arrived.clear()
            if self._items.empty():  # nothing was put between the look and `clear`
                await self._arrived.wait()
        return self.get()

    def _checked(self, item: EngineCoreOutputs | EngineFailed) -> EngineCoreOutputs:
        if isinstance(item, EngineFailed):
            self._items.put(item)
            raise item.failure.error()
        return item
