"""`BodyThread`: what is linear in a client's body, or in an answer, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdserve.common.errors import PdServeError

T = TypeVar("T")
ON_LOOP_BYTES = 16 << 10
"""A body of at most this size is handled in the event loop: it takes less than 2 ms there, and no change of threads."""


class BodyThread:
    """One thread, so that the memory of one body at a time is in use. `close` it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, num_bytes: int, call: Callable[[], T]) -> T:
        """Result of `call`, made in the thread if `num_bytes` is above `ON_LOOP_BYTES`. Raises: what `call` raises."""
        if num_bytes <= ON_LOOP_BYTES:
            return call()
        outcome = await asyncio.get_running_loop().run_in_executor(self._thread, _outcome, call)
        if isinstance(outcome, PdServeError):
            raise outcome
        return outcome


def _outcome(call: Callable[[], T]) -> T | PdServeError:
    """An error without its frames: they hold what was decoded, which is freed here and not in the event loop."""
    try:
        return call()
    except PdServeError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
