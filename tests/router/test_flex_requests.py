"""Flex requests: ended while they wait, the last first, where another request would be refused."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from pdserve.common.errors import Overloaded
from pdserve.router.admission.admission import Admission
from pdserve.router.admission.place import Cost
from pdserve.router.tenants.client import ANYBODY
from pdserve.router.tenants.client import Client as Caller
from tests.router.fake_worker import ADMITTED, LANDED, decode_outputs, play
from tests.router.test_admission import Client, Clock, admission, caller, turns
from tests.router.test_service_tier import PROMPTS
from tests.router.test_tenants import headers, keys_file
from tests.support.run.waiting import HANG_S

MADE_ROOM = "made room for one that is not flex"


class Flex(Client):
    """A flex request of one prompt."""

    count = 0

    def __init__(self, door: Admission, **options: Any) -> None:
        Flex.count += 1
        super().__init__(door, flex_id=f"flex{Flex.count}", **options)

    async def ended(self) -> Overloaded:
        """The error with which it was ended."""
        with pytest.raises(Overloaded, match=MADE_ROOM) as caught:
            await self.task
        return caught.value


async def left_nothing(door: Admission, *clients: Client) -> None:
    """All that still runs or waits is served."""
    for client in clients:
        client.done.set()
    await asyncio.gather(*(client.task for client in clients))
    await door.emptied()
    assert (door.num_requests, door.num_running, door.num_queued) == (0, 0, 0)
    for _, account in door.tenants.items():
        assert (account.num_requests, account.num_sequences, account.num_running, account.num_waiting) == (0, 0, 0, 0)
    # with nothing in it, as many enter as before
    assert door.estimated_wait_s(0) is not None


async def test_the_last_to_arrive_makes_room_for_who_is_not_flex() -> None:
    door = admission(1, 2)
    running, first, second = Client(door), Flex(door), Flex(door)
    await turns()
    urgent = Client(door)
    assert door.num_queued == 1
    error = await second.ended()
    assert error.retry_after_s >= 1
    more = Client(door)
    await first.ended()
    await turns()
    assert door.num_queued == 2
    with pytest.raises(Overloaded, match="at most 2 may wait"):
        Client(door)
    await left_nothing(door, running, urgent, more)


async def test_a_flex_request_ends_no_other() -> None:
    door = admission(1, 2)
    clients = [Client(door), Flex(door), Flex(door)]
    await turns()
    with pytest.raises(Overloaded, match="at most 2 may wait"):
        Flex(door)
    await turns()
    assert door.num_queued == 2
    await left_nothing(door, *clients)


async def test_what_runs_or_does_not_wait_yet_is_never_ended() -> None:
    door = admission(1, 1)
    running = Flex(door)
    await turns()
    waiting = Client(door)
    await turns()
    with pytest.raises(Overloaded, match="at most 1 may wait"):
        Client(door)
    await left_nothing(door, running, waiting)
    # entered, and its task has not begun to wait
    door = admission(1, 1)
    first = Client(door)
    await turns()
    preparing = Flex(door)
    with pytest.raises(Overloaded, match="at most 1 may wait"):
        Client(door)
    await left_nothing(door, first, preparing)


async def test_a_request_of_several_prompts_is_ended_as_a_whole_while_all_of_it_waits() -> None:
    door = admission(2, 2)

    def expel() -> None:
        pass

    async def prompt(done: asyncio.Event) -> None:
        async with door.place(Cost(), flex_id="both"):
            await done.wait()

    async def both(done: asyncio.Event) -> list[asyncio.Task[None]]:
        door.enter(2, expel, flex_id="both")
        tasks = [asyncio.create_task(prompt(done)) for _ in range(2)]
        await turns()
        return tasks

    done, first = asyncio.Event(), Client(door)
    await turns()
    tasks, waiting = await both(done), Client(door)
    await turns()
    assert (door.num_running, door.num_queued) == (2, 2)
    with pytest.raises(Overloaded, match="at most 2 may wait"):
        Client(door)
    await first.finish()
    done.set()
    await asyncio.gather(*tasks)
    door.leave(2, expel, flex_id="both")
    second = Client(door)
    await turns()
    tasks = await both(asyncio.Event())
    assert (door.num_running, door.num_queued) == (2, 2)
    third = Client(door)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert MADE_ROOM in str(result)
    door.leave(2, expel, flex_id="both")
    await left_nothing(door, waiting, second, third)


async def test_none_is_ended_in_vain_and_no_more_than_needed() -> None:
    door = admission(1, 4)
    running, plain = Client(door), Client(door)
    flex = [Flex(door) for _ in range(3)]
    await turns()
    with pytest.raises(Overloaded, match="4 more came; at most 4 may wait"):
        Client(door, places=4)
    await turns()
    assert door.num_queued == 4
    wide = Client(door, places=2)
    for each in flex[1:]:
        await each.ended()
    assert not flex[0].task.done()
    await left_nothing(door, running, plain, flex[0], wide)


@pytest.mark.parametrize("limit", ["queue_timeout_s", "deadline"])
async def test_room_is_made_where_the_wait_would_be_too_long(limit: str) -> None:
    clock = Clock()
    door = admission(1, 9, clock=clock, queue_timeout_s=25.0 if limit == "queue_timeout_s" else 99.0)
    timeout_s = None if limit == "queue_timeout_s" else 35.0
    running = Client(door)
    await turns()
    clock.now_s += 10
    # 10 s per request: two may wait, three may not
    flex = [Flex(door) for _ in range(2)]
    await turns()
    with pytest.raises(Overloaded, match="a place would be free in about 30"):
        Flex(door, timeout_s=timeout_s)
    plain = Client(door, timeout_s=timeout_s)
    await flex[1].ended()
    other = Client(door, timeout_s=timeout_s)
    await flex[0].ended()
    with pytest.raises(Overloaded, match="a place would be free in about 30"):
        Client(door, timeout_s=timeout_s)
    await left_nothing(door, running, plain, other)


def hold(door: Admission, client: Caller, count: int = 1, kind: type[Client] = Client) -> list[Client]:
    return [kind(door, client=client) for _ in range(count)]


async def test_a_limit_of_the_key_makes_no_room() -> None:
    door, alice = admission(1, 8, tenants=2), caller("alice", max_queued_requests=1)
    clients = hold(door, caller("bob")) + hold(door, caller("bob"), 2, Flex)
    await turns()
    clients += hold(door, alice, 1, Flex)
    await turns()
    with pytest.raises(Overloaded, match="max_queued_requests of this API key is 1"):
        Client(door, client=alice)
    await turns()
    assert door.num_queued == 3
    await left_nothing(door, *clients)


async def test_a_tenant_gets_the_share_that_it_would_have_without_flex_requests() -> None:
    door, alice, bob = admission(1, 8, tenants=2), caller("alice"), caller("bob")
    running = hold(door, bob)
    await turns()
    flex = hold(door, bob, 4, Flex)
    await turns()
    mine = hold(door, alice, 2)
    await turns()
    assert door.num_queued == 6
    # of 8, 4 are taken without her, and she may have as many as stay free
    with pytest.raises(Overloaded, match="a tenant may have as many as stay free for others, which are 2 of 8"):
        Flex(door, client=alice)
    mine += hold(door, alice, 2)
    await turns()
    assert [each.task.done() for each in flex] == [False, True, True, True]
    with pytest.raises(Overloaded, match="4 requests of tenant alice wait and 1 more came"):
        Client(door, client=alice)
    await turns()
    assert not flex[0].task.done()
    await left_nothing(door, *running, *mine, flex[0])


async def test_a_request_that_leaves_as_it_is_ended() -> None:
    door = admission(1, 1)
    running, flex = Client(door), Flex(door)
    await turns()
    flex.task.cancel()
    plain = Client(door)
    await asyncio.gather(flex.task, return_exceptions=True)
    await turns()
    assert flex.task.cancelled()
    assert door.num_queued == 1
    await left_nothing(door, running, plain)


async def test_one_that_watches_for_workers_is_ended_as_well() -> None:
    door = admission(1, 1)
    running, flex = Client(door), Flex(door, hopeless=asyncio.Event())
    await turns()
    plain = Client(door)
    await flex.ended()
    await left_nothing(door, running, plain)


@pytest.mark.parametrize("seed", range(5))
async def test_random_lives_leave_nothing(seed: int) -> None:
    draw, door = random.Random(seed), admission(3, 6, tenants=2)
    callers, clients = (ANYBODY, caller("alice"), caller("bob")), list[Client]()
    for _ in range(300):
        kind = draw.choice((Client, Flex))
        with contextlib.suppress(Overloaded):
            clients.append(kind(door, client=draw.choice(callers), places=draw.choice((1, 1, 2))))
        await turns(draw.randrange(3))
        assert door.num_queued <= 6
        if clients and draw.random() < 0.3:
            draw.choice(clients).done.set()
        if clients and draw.random() < 0.1:
            draw.choice(clients).task.cancel()
    for client in clients:
        client.done.set()
    for result in await asyncio.gather(*(client.task for client in clients), return_exceptions=True):
        assert result is None or isinstance(result, asyncio.CancelledError) or MADE_ROOM in str(result)
    await left_nothing(door)


def held(cluster: Any) -> asyncio.Event:
    """Answers of three tokens come once this is set."""
    gate = asyncio.Event()

    async def wait(worker: object, call: object) -> None:
        await gate.wait()

    cluster.of("decode").script = play(wait, ADMITTED, LANDED, decode_outputs(1, "bc", "length"))
    return gate


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_a_full_router_ends_flex_requests_over_http(cluster: Any, path: str, policy: str) -> None:
    await cluster.start(max_running_requests=1, max_queued_requests=2, scheduling_policy=policy)
    gate = held(cluster)

    def ask(**fields: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(cluster.http.post(f"/v1/{path}", json={**PROMPTS[path], **fields}))

    running = ask(service_tier="flex")
    await cluster.of("decode").called()
    first = ask(service_tier="flex")
    await cluster.queued(1)
    second = ask(service_tier="flex", stream=True)
    await cluster.queued(2)
    assert (await ask(service_tier="flex")).status_code == 429
    served = [ask()]
    async with asyncio.timeout(HANG_S):
        refused = await second
    assert refused.status_code == 429
    assert float(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "overloaded"
    assert MADE_ROOM in refused.json()["error"]["message"]
    served.append(ask(service_tier="default"))
    assert (await first).status_code == 429
    await cluster.queued(2)
    assert (await ask()).status_code == 429
    gate.set()
    answers = await asyncio.gather(running, *served)
    assert [answer.status_code for answer in answers] == [200] * 3
    tiers = [answer.json()["service_tier"] for answer in answers]
    assert tiers == ["flex", "default" if path == "responses" else None, "default"]


async def test_one_tenant_ends_flex_requests_of_another_over_http(cluster: Any, tmp_path: Any) -> None:
    file = keys_file(tmp_path, alice="", bob="", admin='role = "operator"')
    await cluster.start(api_keys_file=file, max_running_requests=1, max_queued_requests=2)
    gate = held(cluster)

    def ask(name: str, **fields: Any) -> asyncio.Task[Any]:
        body = {"prompt": "hi", "max_tokens": 3, **fields}
        return asyncio.create_task(cluster.http.post("/v1/completions", json=body, headers=headers(name)))

    running = ask("alice")
    await cluster.of("decode").called()
    # two prompts: alone in the queue, they may fill it
    flex = ask("alice", service_tier="flex", prompt=["a", "b"])
    cluster.http.headers.update(headers("admin"))
    await cluster.queued(2)
    mine = ask("bob")
    refused = await flex
    assert refused.status_code == 429
    assert MADE_ROOM in refused.json()["error"]["message"]
    assert "bob" not in refused.text
    gate.set()
    assert [(await each).status_code for each in (running, mine)] == [200, 200]
