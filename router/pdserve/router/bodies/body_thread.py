"""`BodyThread`: a thread for work that is linear in the size of a client's body or answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdserve.common.errors import PdServeError

T = TypeVar("T")
ON_LOOP_BYTES = 16 << 10
"""Largest body that is handled in the event loop, which takes less than 2 ms."""


class BodyThread:
    """A single thread, so that only one body at a time takes memory for decoding. `close` it."""

    def __init__(self, name: str = "bodies") -> None:
        """name: of the thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def run(self, num_bytes: int, call: Callable[[], T]) -> T:
        """Result of `call`, made in the thread if `num_bytes` is above `ON_LOOP_BYTES`. Raises: exceptions of `call`."""
        if num_bytes <= ON_LOOP_BYTES:
            return call()
        outcome = await asyncio.get_running_loop().run_in_executor(self._thread, _outcome, call)
        if not isinstance(outcome, PdServeError):
            return outcome
        try:
            raise outcome
        finally:
            # else the error and this frame keep each other, and `call` with the body, until the next full collection
            del outcome


def _outcome(call: Callable[[], T]) -> T | PdServeError:
    """(result, error) of a call. The error has no traceback, whose frames would keep the decoded body alive."""
    try:
        return call()
    except PdServeError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
