"""`EventThread`: one thread for a connector's callbacks and timers.

A callback within `cancel`, `close` or `read` would run under the caller's locks; on this thread it does not.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable

from pdserve.common import clock

logger = logging.getLogger(__name__)


class EventThread:
    """Runs calls in order of their due times. Thread-safe; starts its thread with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call` on the thread, or in the caller's thread if it is closed."""
        if not self._put(clock.monotonic(), call):
            run_guarded(call)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run `call` after the delay, unless the thread is closed before."""
        self._put(clock.monotonic() + delay_s, call)

    def close(self) -> None:
        """Run due calls, drop others, and end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _put(self, due: float, call: Callable[[], None]) -> bool:
        with self._changed:
            if self._closed:
                return False
            heapq.heappush(self._due, (due, next(self._order), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def _run(self) -> None:
        while (call := self._next()) is not None:
            run_guarded(call)

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while True:
                now = clock.monotonic()
                if self._due and self._due[0][0] <= now:
                    return heapq.heappop(self._due)[2]
                if self._closed:
                    self._due.clear()
                    return None
                self._changed.wait(self._due[0][0] - now if self._due else None)


def run_guarded(call: Callable[[], None]) -> None:
    """Run a callback and log its exceptions, since no caller on a transport thread could handle them."""
    try:
        call()
    except Exception:
        logger.exception("a callback of a connector raised")
