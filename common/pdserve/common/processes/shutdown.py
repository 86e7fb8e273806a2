"""`Shutdown`: the request to end a service. The first SIGTERM or SIGINT begins its drain, the second ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class Shutdown:
    """Two events of one process, and the line by which it says what its drain waits for."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first signal: take nothing new, and let open requests finish."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the second signal: end open requests."""
    announce: Callable[[str], None] = log.info

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Signals to this process set the events. Used in the main thread, with a running event loop."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    def announce_drain(self, num_requests: int, drain_s: float) -> None:
        """Say what is waited for; no line if no request is open. drain_s: limit of the wait, seconds."""
        if num_requests:
            requests = "1 request" if num_requests == 1 else f"{num_requests} requests"
            self.announce(f"draining {requests}, at most {drain_s:g} s; Ctrl-C again stops now")
