"""`first_done` and `first_of`: wait for whatever comes first."""

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
    """Inside, one of them is done, or `timeout_s` is over.

    At the end all are: those that were not are cancelled, and errors that nobody asked for are dropped.
    """
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
