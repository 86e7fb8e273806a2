"""Waiting for the first of several: what becomes of the others."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from pdserve.common.tasks.first_done import first_of


async def fail(error: Exception) -> NoReturn:
    raise error


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        ended.append("cancelled")


async def test_the_others_have_ended_when_it_is_left() -> None:
    ended: list[str] = []
    first, other = asyncio.ensure_future(asyncio.sleep(0, "came")), asyncio.ensure_future(forever(ended))
    async with first_of(first, other):
        assert (first.done(), other.done(), ended) == (True, False, [])
        assert first.result() == "came"
    assert other.cancelled()
    assert ended == ["cancelled"]


async def test_nothing_may_come_in_time() -> None:
    ended: list[str] = []
    late = asyncio.ensure_future(forever(ended))
    async with first_of(late, timeout_s=0.01):
        assert not late.done()
    assert ended == ["cancelled"]


async def test_only_the_error_that_is_asked_for_is_heard() -> None:
    heard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    wanted, beside = (asyncio.ensure_future(fail(ValueError(name))) for name in ("wanted", "beside"))
    with pytest.raises(ValueError, match="wanted"):
        async with first_of(wanted, beside):
            wanted.result()
    assert beside.done()
    del wanted, beside
    await asyncio.sleep(0)
    assert not heard


async def test_cancelled_while_it_waits_it_leaves_nothing_behind() -> None:
    ended: list[str] = []

    async def wait() -> None:
        async with first_of(asyncio.ensure_future(forever(ended))):
            pass

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["cancelled"]
