"""`LoopWatch`: how long single callbacks keep the event loop's thread busy, and the peak of the process' memory."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from tests.support.process_memory import MemoryWatch

T = TypeVar("T")

LOOP_S = 0.05
"""Processor time of one callback on the event loop's thread, at most: others wait for so long."""


class LoopWatch:
    """Inside the context each callback of this thread's loops is measured, in processor seconds of the thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.callback = ""
        """The one that took longest."""
        self._left_out_s = 0.0
        self._grown_bytes: int | None = None

    def __enter__(self) -> LoopWatch:
        handles: Any = asyncio.Handle
        self._run = run = handles._run
        mine = threading.get_ident()

        def measured(handle: Any) -> None:
            if threading.get_ident() != mine:
                run(handle)
                return
            # a running callback drops what it was called with
            callback = handle._callback
            began = time.thread_time()
            run(handle)
            took_s = time.thread_time() - began - self._left_out_s
            self._left_out_s = 0.0
            if took_s > self.longest_s:
                self.longest_s, self.callback = took_s, repr(callback)[:400]

        handles._run = measured
        # the next full collection then finds little; what the tests have loaded is frozen (`tests/conftest.py`)
        gc.collect()
        self._memory = MemoryWatch().__enter__()
        return self

    def leave_out(self, seconds: float) -> None:
        """Leave out time that a test has spent in the running callback for its own sake."""
        self._left_out_s += seconds

    @property
    def grown_bytes(self) -> int:
        """The peak of memory in the context, beyond that at its beginning."""
        return self._memory.grown_bytes if self._grown_bytes is None else self._grown_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._grown_bytes = self._memory.grown_bytes
        handles: Any = asyncio.Handle
        handles._run = self._run


TRIES = 3


async def watched(ask: Callable[[], Awaitable[T]]) -> tuple[T, LoopWatch]:
    """Await `ask()` and watch the loop meanwhile, up to `TRIES` times until no callback takes `LOOP_S`; the last answer and watch.

    A virtual machine's memory costs its host time when it is touched first, some 20 us per page, which counts as the thread's.
    """
    for remaining in reversed(range(TRIES)):
        with LoopWatch() as watch:
            answer = await ask()
        if watch.longest_s < LOOP_S or not remaining:
            break
    return answer, watch
