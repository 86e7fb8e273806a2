"""`first_done` and `first_of`: wait for the first of several tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any


async def first_done(*waiting: Awaitable[object], timeout_s: float | None = None) -> None:
    """Returns when one of them is done, or after `timeout_s`; the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in waiting]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def first_of(*waiting: asyncio.Future[Any], timeout_s: float | None = None) -> AsyncIterator[None]:
    """Inside the context one of them is done, or `timeout_s` is over.

    At its end all are done: unfinished ones are cancelled, and their errors are dropped.
    """
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
