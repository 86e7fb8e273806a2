"""`background_task`: runs a task for the life of a service, and restarts it when it fails."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Literal, get_args

from pdserve.common import clock

log = logging.getLogger(__name__)

HEALTHY_AFTER_S = 30.0
"""Run time after which a failure begins again with the first wait."""


class RestartBackoff:
    """Waits that double from `first_s` to `longest_s`, in seconds."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def wait_s(self, ran_s: float) -> float:
        """The wait after a failure. ran_s: time since the last start."""
        wait_s = self._first_s if ran_s >= HEALTHY_AFTER_S else self._next_s
        self._next_s = min(self._longest_s, 2 * wait_s)
        return wait_s


TaskName = Literal[
    "watch",
    "ticks",
    "directory",
    "health",
    "publisher",
    "api_keys",
    "certificates",
    "loop_lag",
    "usage",
    "adapters",
    "connections",
    "memory",
    "rebalancing",
    "cache_moves",
    "role_switching",
]
"""The bounded set of names that logs and metrics show."""
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
RESTARTS: Counter[TaskName] = Counter()
"""Restarts in this process, by task."""


def background_task(name: TaskName, run: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Run `run()` in a task of its own until it returns or the task is cancelled.

    An exception that it raises is a bug: it is logged with its traceback and counted in `RESTARTS`, and `run` is called
    again after a wait that doubles from `FIRST_BACKOFF_S` to `LONGEST_BACKOFF_S`.
    """
    return asyncio.create_task(_keep(name, run), name=name)


async def _keep(name: TaskName, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    backoff = RestartBackoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
    while True:
        began = clock.monotonic()
        try:
            await run()
            return
        except Exception:
            wait_s = backoff.wait_s(clock.monotonic() - began)
            RESTARTS[name] += 1
            log.exception("the background task %s failed; it starts again in %g s", name, wait_s)
        await asyncio.sleep(wait_s)
