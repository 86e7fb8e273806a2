"""`EngineWatchdog`: ends a worker whose engine hangs, so that its supervisor restarts it.

Routers and peers stop using such a worker within seconds, but its process would keep its port, its memory, and blocks that peers
wait for.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LOCKED_FACTOR = 2
"""If the engine holds the GIL, no Python thread can check it; after this multiple of the limit, a timer of the interpreter ends the
process."""


class EngineWatchdog:
    """A thread that checks the engine's tick. Time in which this process was suspended does not count."""

    def __init__(
        self,
        tick: Callable[[], int],
        stuck_exit_s: float,
        kill: Callable[[], None],
        end: Callable[[int], None] | None = None,
    ) -> None:
        """stuck_exit_s: above 0. kill: `EngineCoreClient.kill`. end: called last, with the exit status; default `os._exit`."""
        self._tick = tick
        self._stuck_exit_s = stuck_exit_s
        self._kill = kill
        self._end = end or os._exit
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it. May be called without a start, and again."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        look_every_s = min(LOOK_EVERY_S, self._stuck_exit_s / 4)
        last, still_s = self._tick(), 0.0
        try:
            while True:
                # a C thread of the interpreter, which does not need the GIL
                faulthandler.dump_traceback_later(LOCKED_FACTOR * self._stuck_exit_s, exit=True)
                if self._stopped.wait(look_every_s):
                    return
                tick = self._tick()
                # each check counts for one interval, also if the last one was longer ago
                still_s = 0.0 if tick != last else still_s + look_every_s
                last = tick
                if still_s >= self._stuck_exit_s:
                    self._give_up(still_s)
                    return
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _give_up(self, still_s: float) -> None:
        log.critical(
            "the engine has made no progress for %g s (engine_stuck_exit_s): all threads' stacks are on standard error, "
            "and the worker ends with status 1",
            still_s,
        )
        self._kill()
        self._end(1)
