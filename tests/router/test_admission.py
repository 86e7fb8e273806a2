"""Admission: limits at the door, places in order of arrival, refusal of who would wait too long."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from pdserve.common.errors import Draining, InvalidRequest, Overloaded, WorkerLost
from pdserve.common.settings.api_key_file import UNLIMITED, KeyLimits
from pdserve.router.admission.admission import MAX_OVERTAKES, Admission
from pdserve.router.admission.place import AdmissionLimits, Capacity, Cost, Place
from pdserve.router.tenants.client import ANYBODY
from pdserve.router.tenants.client import Client as Caller
from tests.support.run.waiting import HANG_S


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def caller(tenant: str, **limits: Any) -> Caller:
    """Whose one key has these limits."""
    return Caller(key_name=tenant, tenant=tenant, limits=KeyLimits(**limits) if limits else UNLIMITED)


class Client:
    """One request: enters at once, then holds a place until `done` is set."""

    def __init__(
        self,
        admission: Admission,
        *,
        blocks: int = 0,
        client: Caller = ANYBODY,
        places: int = 1,
        tokens: int = 1,
        max_tokens: int = 0,
        timeout_s: float | None = None,
        priority: int = 0,
        hopeless: asyncio.Event | None = None,
        flex_id: str = "",
    ):
        """hopeless: set when a place would be of no use any more."""
        self._admission, self._priority, self._hopeless, self._caller = admission, priority, hopeless, client
        self._flex_id = flex_id
        self._cost = Cost(num_blocks=blocks, num_places=places, num_tokens=tokens, max_tokens=max_tokens)
        self.held: Place | None = None
        self.done, self.placed = asyncio.Event(), asyncio.Event()
        admission.enter(1, self._expel, client=client, num_sequences=places, timeout_s=timeout_s, flex_id=flex_id)
        self.task = asyncio.create_task(self._run())
        # also when it is cancelled before it begins
        self.task.add_done_callback(
            lambda _: admission.leave(1, self._expel, client=client, num_sequences=places, flex_id=flex_id)
        )

    async def _run(self) -> None:
        raise_when_no_worker = None if self._hopeless is None else self._raise_when_no_worker
        async with self._admission.place(
            self._cost, self._priority, raise_when_no_worker, client=self._caller, flex_id=self._flex_id
        ) as self.held:
            self.placed.set()
            await self.done.wait()

    async def _raise_when_no_worker(self) -> None:
        assert self._hopeless is not None
        await self._hopeless.wait()
        raise WorkerLost("nobody is there")

    def _expel(self) -> None:
        self.task.cancel()

    async def finish(self) -> None:
        self.done.set()
        await self.task


def admission(running=2, queued=2, *, blocks=None, sessions=0, tenants=1, clock=None, **limits):
    capacity = Capacity(num_requests=running, num_blocks=blocks, num_sessions=sessions)
    return Admission(
        AdmissionLimits(max_queued_requests=queued, **limits),
        lambda: capacity,
        num_tenants=lambda: tenants,
        clock=clock or Clock(),
    )


async def turns(count=5):
    """Lets every task that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_places_go_by_order_of_arrival_and_the_rest_is_refused_at_once():
    door = admission(2, 2)
    clients = [Client(door) for _ in range(4)]
    await turns()
    assert [client.placed.is_set() for client in clients] == [True, True, False, False]
    with pytest.raises(Overloaded, match=r"2 of them run, and 1 more came; at most 2 may wait") as refused:
        Client(door)
    assert refused.value.retry_after_s == 1
    await clients[1].finish()
    await turns()
    assert [client.placed.is_set() for client in clients] == [True, True, True, False]
    for client in clients:
        await client.finish()
    await door.emptied()
    assert (door.num_requests, door.num_running, door.num_queued) == (0, 0, 0)


async def test_places_go_by_priority_and_equals_by_arrival():
    door = admission(1, 9)
    clients = {name: Client(door, priority=int(name[1:])) for name in ("a0", "b5", "c-1", "d5", "e-1", "f2")}
    order: list[str] = []
    while len(order) < len(clients):
        await turns()
        (placed,) = [name for name, client in clients.items() if client.placed.is_set() and name not in order]
        order.append(placed)
        await clients[placed].finish()
    assert order == ["a0", "c-1", "e-1", "f2", "b5", "d5"]


async def test_a_prompt_that_does_not_fit_is_passed_a_bounded_number_of_times():
    door = admission(99, 99, blocks=10)
    first, large = (Client(door, blocks=count) for count in (6, 9))
    small = []
    for _ in range(MAX_OVERTAKES + 3):
        small.append(Client(door, blocks=1))
        await turns()
        if small[-1].placed.is_set():
            await small[-1].finish()
    assert [client.placed.is_set() for client in small] == [True] * MAX_OVERTAKES + [False] * 3
    assert not large.placed.is_set()
    await first.finish()
    await turns()
    assert [client.placed.is_set() for client in (large, *small[MAX_OVERTAKES:])] == [True, True, False, False]
    for client in (large, *small[MAX_OVERTAKES:]):
        await client.finish()
    whole = Client(door, blocks=99)
    await asyncio.wait_for(whole.placed.wait(), HANG_S)
    await whole.finish()


async def test_who_leaves_the_queue_lets_the_next_pass():
    door = admission(9, 9, blocks=10)
    first, large = (Client(door, blocks=count) for count in (6, 9))
    passing = [Client(door) for _ in range(MAX_OVERTAKES)]
    await turns()
    for client in passing:
        await client.finish()
    small = Client(door, blocks=1)
    await turns()
    assert not small.placed.is_set()
    large.task.cancel()
    await turns()
    assert small.placed.is_set()
    for client in (first, small):
        await client.finish()
    assert (door.num_running, door.num_queued) == (0, 0)


async def test_more_capacity_is_used_when_it_comes():
    capacity = [1]
    door = Admission(AdmissionLimits(max_queued_requests=9), lambda: Capacity(num_requests=capacity[0]))
    clients = [Client(door) for _ in range(3)]
    await turns()
    assert door.num_running == 1
    capacity[0] = 3
    door.recheck()
    await turns()
    assert door.num_running == 3
    for client in clients:
        await client.finish()


async def test_without_any_capacity_one_may_still_try():
    door = Admission(AdmissionLimits(max_queued_requests=9), lambda: Capacity(num_requests=0))
    only = Client(door)
    await asyncio.wait_for(only.placed.wait(), HANG_S)
    await only.finish()


async def test_a_wait_that_is_too_long_ends_as_overload():
    door = admission(1, 5, queue_timeout_s=0.01)
    first = Client(door)
    await turns()
    second = Client(door)
    with pytest.raises(Overloaded, match=r"no place became free within 0\.01 s"):
        await second.task
    assert door.num_queued == 0
    await first.finish()


async def test_whom_no_place_would_help_leaves_the_queue_with_its_own_error():
    door, gone = admission(1, 9, blocks=10), asyncio.Event()
    first = Client(door, blocks=6, hopeless=gone)
    await turns()
    hopeless = [Client(door, blocks=9, hopeless=gone) for _ in range(3)]
    other = Client(door, blocks=9)
    await turns()
    assert (door.num_running, door.num_queued) == (1, 4)
    gone.set()
    for client in hopeless:
        with pytest.raises(WorkerLost, match="nobody is there"):
            await client.task
    # who has a place keeps it, and who may still hope waits on
    assert (first.task.done(), other.task.done(), door.num_running, door.num_queued) == (False, False, 1, 1)
    await first.finish()
    await other.finish()
    await door.emptied()
    assert (door.num_running, door.num_queued) == (0, 0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_place_that_is_granted_beside_the_end_of_all_hope_is_not_lost(leaves):
    door, gone = admission(1, 9), asyncio.Event()
    first, second = Client(door), Client(door, hopeless=gone)
    await turns()
    first.done.set()
    gone.set()
    await turns(3)
    if leaves:
        second.task.cancel()
    second.done.set()
    await asyncio.wait((first.task, second.task))
    await door.emptied()
    assert (door.num_running, door.num_queued) == (0, 0)
    last = Client(door)
    await asyncio.wait_for(last.placed.wait(), HANG_S)
    await last.finish()


async def test_who_could_not_be_done_in_time_is_refused_at_the_door():
    clock = Clock()
    door = admission(2, 100, clock=clock)
    first = [Client(door) for _ in range(2)]
    await turns()
    clock.now_s += 4
    for client in first:
        await client.finish()
    # a place is held for 4 s, and there are 2: 2 s for each that waits
    assert door.estimated_wait_s(3) == pytest.approx(6)
    busy = [Client(door, timeout_s=5) for _ in range(2)]
    await turns()
    Client(door, timeout_s=6.1).task.cancel()
    await turns()
    with pytest.raises(Overloaded, match=r"about 2\.0 s, the request's deadline is in 5\.9 s") as refused:
        Client(door, timeout_s=5.9)
    assert refused.value.retry_after_s == pytest.approx(2)
    for client in busy:
        await client.finish()
    # nobody has to wait: whatever the past was like
    alone = Client(door, timeout_s=0.1)
    await asyncio.wait_for(alone.placed.wait(), HANG_S)
    await alone.finish()


async def test_who_would_wait_longer_than_the_queue_allows_is_refused_at_the_door():
    clock = Clock()
    door = admission(1, 100, clock=clock, queue_timeout_s=10)
    running = Client(door)
    await turns()
    clock.now_s += 6
    # nobody was done yet: those that run have held their places for 6 s
    waiting = Client(door)
    await turns()
    with pytest.raises(Overloaded, match=r"about 12\.0 s, queue_timeout_s is 10"):
        Client(door)
    await running.finish()
    await waiting.finish()


async def test_while_every_worker_is_away_nobody_is_refused_by_a_guess():
    clock, capacity = Clock(), Capacity(num_requests=4)
    door = Admission(AdmissionLimits(max_queued_requests=9, queue_timeout_s=30.0), lambda: capacity, clock=clock)
    first = Client(door)
    await turns()
    clock.now_s += 20.0
    await first.finish()
    running = [Client(door) for _ in range(4)]
    await turns()
    # they restart: how soon places will be free says nothing about how soon a worker will
    capacity = Capacity(num_requests=0)
    late = Client(door, timeout_s=25.0)
    for client in (*running, late):
        await client.finish()


async def test_the_prompts_of_one_request_may_be_more_than_may_wait_but_not_behind_others():
    door = admission(2, 3)
    door.enter(9, lambda: None)
    with pytest.raises(Overloaded, match="9 requests are in the router"):
        Client(door)
    door.leave(9, lambda: None)
    first = [Client(door) for _ in range(3)]
    await turns()
    # one of them waits already
    with pytest.raises(Overloaded, match="3 requests are in the router, 2 of them run, and 9 more came"):
        door.enter(9, lambda: None)
    for client in first:
        await client.finish()
    await door.emptied()


async def test_limits_per_key():
    door = admission(9, 9, max_requests_per_key=2)
    a, b = caller("a"), caller("b")
    clients = [Client(door, client=a) for _ in range(2)]
    with pytest.raises(Overloaded, match=r"2 sequences of tenant a .* max_requests_per_key is 2"):
        Client(door, client=a)
    # it would be too many however often it came
    with pytest.raises(InvalidRequest, match="3 sequences came in one request; max_requests_per_key is 2"):
        door.enter(3, lambda: None, client=a)
    other, nobody = Client(door, client=b), [Client(door) for _ in range(3)]
    await clients[0].finish()
    again = Client(door, client=a)
    for client in (clients[1], other, again, *nobody):
        await client.finish()
    await door.emptied()


async def test_the_door_closes_and_those_inside_may_be_expelled():
    door = admission(1, 5)
    inside = [Client(door) for _ in range(2)]
    await turns()
    door.close()
    with pytest.raises(Draining):
        Client(door)
    door.expel()
    await door.emptied()
    assert all(client.task.cancelled() for client in inside)
    assert (door.num_running, door.num_queued) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_random_histories_lose_no_place(seed):
    draw, door = random.Random(seed), admission(3, 4, blocks=12)
    alive: list[Client] = []
    hopeless: list[asyncio.Event] = []
    for _ in range(200):
        what = draw.random()
        try:
            if what < 0.5:
                hopeless.append(asyncio.Event())
                alive.append(Client(door, blocks=draw.randrange(9), hopeless=hopeless[-1]))
            elif hopeless and what < 0.6:
                hopeless.pop(draw.randrange(len(hopeless))).set()
            elif alive and what < 0.8:
                await turns(draw.randrange(3))
                alive.pop(draw.randrange(len(alive))).done.set()
            elif alive:
                alive.pop(draw.randrange(len(alive))).task.cancel()
        except Overloaded:
            assert door.num_requests >= 3
        if draw.random() < 0.5:
            await turns()
            assert door.num_running <= 3
            assert door.num_requests >= door.num_running + door.num_queued
            assert door.num_queued == 0 or door.num_running > 0
    for client in alive:
        client.done.set()
    await asyncio.wait_for(door.emptied(), HANG_S)
    assert (door.num_running, door.num_queued) == (0, 0)
