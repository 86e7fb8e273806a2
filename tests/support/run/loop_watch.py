"""`LoopWatch`: how long single callbacks keep the event loop's thread busy, and the peak of the process' memory."""

from __future__ import annotations

import asyncio
import gc
import mmap
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from tests.support.run.process_memory import MemoryWatch

T = TypeVar("T")

LOOP_S = 0.05
"""CPU time of one callback on the event loop's thread, at most: others wait for so long."""
_OLDEST_GENERATION = 2


def seconds_per_touch(num_bytes: int = 16 << 20) -> float:
    """CPU time of the first touch of a page of memory now: 3 us, and up to 30 where the host must find one."""
    with mmap.mmap(-1, num_bytes) as memory:
        began = time.thread_time()
        for start in range(0, num_bytes, mmap.PAGESIZE):
            memory[start] = 1
        return (time.thread_time() - began) / (num_bytes // mmap.PAGESIZE)


class LoopWatch:
    """Inside the context each callback of this thread's loops is measured, in CPU seconds of the thread.

    Less what the kernel takes for memory that the callback touches first: 60 to 95 % of the time in which gRPC copies a
    message of 16 MiB, and more than 0.2 s on a virtual machine whose host is short of memory. Less what full garbage
    collections take: they look at what the tests before have left, 0.1 s after some thousand tests; services freeze what
    they have once they serve.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.callback = ""
        """The one that took longest."""
        self._left_out_s = 0.0
        self._grown_bytes: int | None = None
        self._touch_s = 0.0
        self._collecting_since: float | None = None
        self._thread_id = 0

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != _OLDEST_GENERATION or threading.get_ident() != self._thread_id:
            return
        if phase == "start":
            self._collecting_since = time.thread_time()
        elif self._collecting_since is not None:
            self._left_out_s += time.thread_time() - self._collecting_since
            self._collecting_since = None

    def __enter__(self) -> LoopWatch:
        self._touch_s = seconds_per_touch()
        handles: Any = asyncio.Handle
        self._run = run = handles._run
        mine = self._thread_id = threading.get_ident()

        def measured(handle: Any) -> None:
            if threading.get_ident() != mine:
                run(handle)
                return
            # a running callback drops what it was called with
            callback = handle._callback
            self._left_out_s = 0.0
            num_touched = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            began = time.thread_time()
            run(handle)
            took_s = time.thread_time() - began - self._left_out_s
            num_touched = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - num_touched
            took_s -= num_touched * self._touch_s
            if took_s > self.longest_s:
                self.longest_s, self.callback = took_s, repr(callback)[:400]

        handles._run = measured
        gc.callbacks.append(self._on_collection)
        self._memory = MemoryWatch().__enter__()
        return self

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Leave out what a test does inside the context, in the running callback and for its own sake."""
        left_out_s, began = self._left_out_s, time.thread_time()
        try:
            yield
        finally:
            # full collections inside are part of it
            self._left_out_s = left_out_s + time.thread_time() - began

    @property
    def grown_bytes(self) -> int:
        """The peak of memory in the context, beyond that at its beginning."""
        return self._memory.grown_bytes if self._grown_bytes is None else self._grown_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._on_collection)
        self._grown_bytes = self._memory.grown_bytes
        handles: Any = asyncio.Handle
        handles._run = self._run


TRIES = 3


async def watched(ask: Callable[[], Awaitable[T]]) -> tuple[T, LoopWatch]:
    """Await `ask()` and watch the loop, up to `TRIES` times until no callback takes `LOOP_S`; the last answer and watch."""
    for remaining in reversed(range(TRIES)):
        with LoopWatch() as watch:
            answer = await ask()
        if watch.longest_s < LOOP_S or not remaining:
            break
    return answer, watch
