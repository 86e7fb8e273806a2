"""`FairThreads`: a few threads whose CPU time is shared equally among tenants, for any number of waiting calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdserve.router.admission.fair_queue import FairQueue

T = TypeVar("T")


class FairThreads:
    """Used in one event loop; `close` it. A call is charged to its tenant by its CPU time."""

    def __init__(self, num_threads: int, name: str, *, processor_s: Callable[[], float] = time.thread_time) -> None:
        """name: prefix of the threads' names. processor_s: returns the CPU time of the calling thread, seconds."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._processor_s = processor_s
        self._queue = FairQueue[asyncio.Future[None]]()

    @property
    def num_waiting(self) -> int:
        """Number of waiting calls."""
        return len(self._queue)

    def num_waiting_of(self, tenant: str) -> int:
        """Waiting calls of one tenant."""
        return self._queue.num_of(tenant)

    async def run(self, tenant: str, call: Callable[[], T]) -> T:
        """Result of `call`, which one of the threads makes when it is the tenant's turn. Raises: exceptions of `call`.

        A call that is cancelled while it waits is never made. A call that is cancelled later keeps its thread until it ends.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._queue.append(tenant, id(turn), turn)
        self._dispatch()
        try:
            await turn
        except BaseException:
            if not self._queue.remove(id(turn)):
                self._give_back()
            raise

        def timed() -> tuple[float, T | None, BaseException | None]:
            ended = self._timed(call)
            # nothing waits in a closed loop
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._ended, tenant, ended[0])
            return ended

        # a call that has its thread runs to its end, whether anybody waits for it or not
        _, result, error = await asyncio.shield(loop.run_in_executor(self._threads, timed))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # without an error, the result is that of the call, also if it is None

    def close(self) -> None:
        """Drop waiting calls and end the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _timed(self, call: Callable[[], T]) -> tuple[float, T | None, BaseException | None]:
        """(CPU time in seconds, result or None, exception or None) of a call."""
        started_s = self._processor_s()
        try:
            result, error = call(), None
        except BaseException as raised:
            result, error = None, raised
        return self._processor_s() - started_s, result, error

    def _ended(self, tenant: str, processor_s: float) -> None:
        self._queue.charge(tenant, processor_s)
        self._give_back()

    def _give_back(self) -> None:
        self._num_free += 1
        self._dispatch()

    def _dispatch(self) -> None:
        while self._num_free and (turns := self._queue.first(1)):
            [turn] = turns
            self._queue.take(id(turn), 0.0)
            self._num_free -= 1
            if not turn.done():
                turn.set_result(None)
