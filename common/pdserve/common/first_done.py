"""`first_done`: wait for whatever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


async def first_done(*waiting: Awaitable[object], timeout_s: float | None = None) -> None:
    """Returns when one of them is done, or after `timeout_s`; the others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in waiting]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
