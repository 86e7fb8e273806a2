"""`BodyBudget`: bytes of bodies in reading, waiting in turn, and slow senders that give up their room to others."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.common.errors import DeadlineExceeded, Overloaded
from pdserve.common.net import body_budget
from pdserve.common.net.body_budget import BodyBudget
from tests.support.run.waiting import HANG_S, eventually


async def forever() -> bytes:
    await asyncio.Event().wait()
    return b""


async def body() -> bytes:
    return b"x"


async def test_room_is_held_until_the_context_ends() -> None:
    budget = BodyBudget(100)
    async with budget.room(60) as room, budget.room(40):
        assert await room.read(body(), 1.0) == b"x"
        assert budget.used_bytes == 100
    assert budget.used_bytes == 0
    async with budget.room(1000):
        assert budget.used_bytes == 100


async def test_who_comes_when_it_is_full_waits_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, order = BodyBudget(100), list[int]()
    ends = [asyncio.Event() for _ in range(3)]

    async def hold(number: int, num_bytes: int) -> None:
        async with budget.room(num_bytes):
            order.append(number)
            await ends[number].wait()

    tasks = []
    for number, num_bytes in enumerate((80, 90, 10)):
        tasks.append(asyncio.create_task(hold(number, num_bytes)))
        await asyncio.sleep(0)
    # the third would fit, but the second came before it
    assert order == [0]
    ends[0].set()
    await tasks[0]
    await eventually(lambda: order == [0, 1, 2])
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)
    assert budget.used_bytes == 0


async def test_a_room_grows_before_others_get_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, order = BodyBudget(100), list[str]()

    async def enter() -> None:
        async with budget.room(40):
            order.append("entered")

    async def grow(room: body_budget.BodyRoom) -> None:
        await room.grow(60)
        order.append("grown")

    async with budget.room(30) as growing:
        await growing.grow(20)
        assert budget.used_bytes == 30
        async with budget.room(45):
            entering = asyncio.create_task(enter())
            await asyncio.sleep(0)
            growth = asyncio.create_task(grow(growing))
            await asyncio.sleep(0)
            assert order == []
        await asyncio.gather(growth, entering)
        assert order == ["grown", "entered"]
        assert budget.used_bytes == 60
        # more than the whole counts as the whole
        await growing.grow(1000)
        assert budget.used_bytes == 100
    assert budget.used_bytes == 0
    monkeypatch.setattr(body_budget, "MAX_WAIT_S", 0.05)
    async with budget.room(50), budget.room(50) as growing:
        with pytest.raises(Overloaded):
            await growing.grow(51)
        assert budget.used_bytes == 100
    assert budget.used_bytes == 0


async def test_who_gives_up_waiting_leaves_the_turn_to_the_next() -> None:
    budget = BodyBudget(100)
    async with budget.room(100):
        waiting = [asyncio.create_task(budget.room(50).__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
    async with asyncio.timeout(HANG_S):
        await waiting[1]
    assert budget.used_bytes == 50


async def test_a_slow_body_gives_up_its_room_once_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "FAIR_SHARE_S", 0.2)
    monkeypatch.setattr(body_budget, "_LOOK_AGAIN_S", 0.01)
    budget = BodyBudget(100)

    async def slow() -> None:
        async with budget.room(60) as room:
            await room.read(forever(), None)

    first, second = asyncio.create_task(slow()), asyncio.create_task(slow())
    await asyncio.sleep(0.3)
    # the second waits, so the first has to go after its share of time, and then nobody waits any more
    with pytest.raises(Overloaded, match="too slowly while other requests waited"):
        await first
    await asyncio.sleep(0.3)
    assert not second.done()
    async with asyncio.timeout(HANG_S), budget.room(90):
        with pytest.raises(Overloaded):
            await second
    assert budget.used_bytes == 0


async def test_what_is_built_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_budget, "FAIR_SHARE_S", 0.0)
    monkeypatch.setattr(body_budget, "MAX_WAIT_S", 0.05)
    monkeypatch.setattr(body_budget, "_LOOK_AGAIN_S", 0.01)
    budget = BodyBudget(100)
    async with budget.room(100) as room:
        await room.read(body(), None)
        with pytest.raises(Overloaded, match="fill the 100 bytes"):
            await budget.room(1).__aenter__()
    async with budget.room(100):
        assert budget.used_bytes == 100


async def test_a_body_has_its_own_deadline() -> None:
    budget = BodyBudget(100)
    async with budget.room(10) as room:
        with pytest.raises(DeadlineExceeded, match=r"did not come within 0\.01 s"):
            await room.read(forever(), 0.01)
    assert budget.used_bytes == 0


async def test_room_that_is_not_needed_goes_to_others() -> None:
    budget = BodyBudget(100)
    async with budget.room(100) as room:
        waiting = asyncio.create_task(budget.room(60).__aenter__())
        await asyncio.sleep(0)
        room.shrink(40)
        async with asyncio.timeout(HANG_S):
            await waiting
        room.shrink(50)
        assert budget.used_bytes == 100
    assert budget.used_bytes == 60
