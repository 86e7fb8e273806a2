"""`StoredAnswer`: answers of stored responses share a budget of bytes, whatever their clients read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pdserve.common.errors import NotFound, Overloaded
from pdserve.common.net import body_budget
from pdserve.common.net.body_budget import BodyBudget, BodyRoom
from pdserve.router.http_front.stored_answer import StoredAnswer
from tests.support.run.waiting import HANG_S, eventually

KIB = 1 << 10
MOST = 1024 * KIB


class Reader:
    """A client that reads the parts it is allowed."""

    def __init__(self, num_parts: int | None = None) -> None:
        """num_parts: None for all."""
        self.received = b""
        self.is_complete = False
        self._left = num_parts

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if self._left == 0:
                await asyncio.Event().wait()
            self._left = None if self._left is None else self._left - 1
            self.received += message["body"]
            self.is_complete = not message["more_body"]


def body_of(num_bytes: int) -> Callable[[BodyRoom], Awaitable[bytes]]:
    async def load(_: BodyRoom) -> bytes:
        return b"x" * num_bytes

    return load


async def sent(budget: BodyBudget, reader: Reader, num_bytes: int) -> None:
    await StoredAnswer(budget, MOST, 60.0, body_of(num_bytes))({}, None, reader.send)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_bytes", [0, 1, 64 * KIB, 64 * KIB + 1, 1000 * KIB])
async def test_a_body_arrives_whole(num_bytes: int) -> None:
    budget, reader = BodyBudget(MOST), Reader()
    await sent(budget, reader, num_bytes)
    assert (len(reader.received), reader.is_complete, budget.used_bytes) == (num_bytes, True, 0)


async def test_unread_answers_count_and_the_slowest_goes_when_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "FAIR_SHARE_S", 0.1)
    monkeypatch.setattr(body_budget, "_LOOK_AGAIN_S", 0.01)
    budget, slow, next_one = BodyBudget(MOST), Reader(1), Reader()
    first = asyncio.create_task(sent(budget, slow, 1000 * KIB))
    await eventually(lambda: budget.used_bytes == 1000 * KIB)
    async with asyncio.timeout(HANG_S):
        await sent(budget, next_one, 100)
        await first
    assert next_one.is_complete
    assert not slow.is_complete
    assert budget.used_bytes == 0


async def test_an_error_and_a_full_budget_are_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(_: BodyRoom) -> bytes:
        raise NotFound("no")

    budget, reader = BodyBudget(MOST), Reader()
    with pytest.raises(NotFound):
        await StoredAnswer(budget, MOST, 60.0, missing)({}, None, reader.send)  # type: ignore[arg-type]
    assert budget.used_bytes == 0
    monkeypatch.setattr(body_budget, "MAX_WAIT_S", 0.05)
    async with budget.room(MOST):
        with pytest.raises(Overloaded):
            await sent(budget, reader, 1)
