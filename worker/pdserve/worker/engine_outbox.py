"""`EngineOutbox`: carries the engine's messages about KV blocks from the engine thread to the asyncio thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pdserve.engine.scheduler.kv_messages import OutOfEngine

log = logging.getLogger(__name__)


class EngineOutbox:
    """A `KvOutbox`. Made before the engine, which sends messages, and before the subscriber, which needs the engine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message: Callable[[OutOfEngine], None] | None = None

    def subscribe(self, on_message: Callable[[OutOfEngine], None]) -> None:
        """Call `on_message` in the asyncio thread with each message. One subscriber, before the engine starts."""
        self._on_message = on_message

    def send(self, message: OutOfEngine) -> None:
        """Called by the engine thread; returns at once. Raises: RuntimeError without a subscriber."""
        if self._on_message is None:
            raise RuntimeError(f"{type(message).__name__} was sent before anything subscribed")
        try:
            self._loop.call_soon_threadsafe(self._on_message, message)
        except RuntimeError:
            log.debug("the event loop has closed; %s is lost with the process", type(message).__name__)
