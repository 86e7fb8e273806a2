"""Prompts that take workers down: refused by evidence, to the client that sent them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.common.errors import WorkerLost
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.router.attempts import crash_guard
from pdserve.router.attempts.attempt_failure import AttemptFailed
from pdserve.router.attempts.crash_guard import Company, CrashGuard, DenyList
from pdserve.router.tenants.client import Client
from pdserve.router.workers.worker import WorkerLoad
from tests.router.fake_worker import ADMITTED, decode_outputs, decode_well, play, said

ALICE, BOB = Client(tenant="a", key_name="alice"), Client(tenant="b", key_name="bob")
COSTLY = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))


class World:
    """Workers that die, and requests that were there."""

    def __init__(self) -> None:
        self.back: list[object] = []
        self.deny_list, self.company = DenyList(), Company()
        self.fleet: Any = SimpleNamespace(reconnected=lambda worker: worker in self.back)

    def worker(self, name: str, *, stalled: bool = False, num_running: int = 0) -> Any:
        return SimpleNamespace(key=(name, 1), stalled=stalled, load=WorkerLoad(num_running=num_running))

    def request(self, client: Client = ALICE, sampling: SamplingParams | None = None) -> CrashGuard:
        return CrashGuard(self.deny_list, self.fleet, self.company, client, sampling)

    def dies(
        self, worker: Any, *requests: CrashGuard, digest: bytes = b"a", never_admitted: bool = False
    ) -> list[bool]:
        """Under these requests, all of them there. Which of them are refused."""
        placement: Any = SimpleNamespace(prefill=None, decode=worker)
        stays = [self.company.serving(each, placement) for each in requests]
        for stay in stays:
            stay.__enter__()
        refused = []
        for each, stay in zip(requests, stays, strict=True):
            stay.__exit__(None, None, None)
            try:
                each.count(AttemptFailed(WorkerLost("lost"), worker, died=True, never_admitted=never_admitted), digest)
                refused.append(False)
            except WorkerLost:
                refused.append(True)
        return refused

    def is_refused(self, client: Client, digest: bytes = b"a") -> bool:
        try:
            self.deny_list.check(client, digest)
        except WorkerLost:
            return True
        return False


@pytest.fixture
def world() -> World:
    return World()


def test_crash_guard_wears_off_and_is_bounded(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("pdserve.router.attempts.crash_guard.clock.monotonic", lambda: now[0])
    monkeypatch.setattr(crash_guard, "_MAX_ENTRIES", 2)
    refused = DenyList()
    refused.check(ALICE, b"a")
    for digest in (b"a", b"b", b"c"):
        refused.add(ALICE, digest, lambda: True)
    refused.check(ALICE, b"a")
    now[0] += 59
    with pytest.raises(WorkerLost, match="another 1 s"):
        refused.check(ALICE, b"c")
    now[0] += 2
    refused.check(ALICE, b"c")


def test_crash_guard_is_forgiven_when_it_turns_out_to_be_none():
    guilty = True
    refused = DenyList()
    refused.add(ALICE, b"a", lambda: guilty)
    with pytest.raises(WorkerLost):
        refused.check(ALICE, b"a")
    guilty = False
    refused.check(ALICE, b"a")
    guilty = True
    refused.check(ALICE, b"a")


def test_two_deaths_under_a_prompt_that_was_alone_refuse_it_to_its_client_alone(world):
    request = world.request(ALICE)
    assert world.dies(world.worker("one"), request) == [False]
    assert world.dies(world.worker("two"), request) == [True]
    assert world.is_refused(ALICE)
    assert not world.is_refused(BOB)
    assert not world.is_refused(Client(tenant="a", key_name="another"))


def test_one_alone_and_one_nearly_alone_are_enough(world):
    request = world.request()
    assert world.dies(world.worker("one"), request) == [False]
    assert world.dies(world.worker("two"), request, world.request(BOB)) == [True, False]


def test_a_crowd_is_not_refused_but_goes_apart_until_one_dies_alone(world):
    crowd = [world.request(ALICE if place else BOB) for place in range(5)]
    for name in ("one", "two"):
        assert world.dies(world.worker(name), *crowd) == [False] * 5
    assert all(request.goes_apart for request in crowd)
    assert not world.is_refused(ALICE)
    culprit, *others = crowd
    place = SimpleNamespace(prefill=None, decode=world.worker("three"))
    with world.company.serving(culprit, place):
        assert all(("three", 1) in request.unfit for request in others)
        assert ("three", 1) not in culprit.unfit
        assert ("three", 1) not in world.request().unfit, "who is no suspect may go anywhere"
    assert all(("three", 1) not in request.unfit for request in others)
    bystanders = [world.request() for _ in range(3)]
    assert world.dies(place.decode, culprit, *bystanders) == [True, False, False, False]
    assert world.is_refused(BOB)
    assert not world.is_refused(ALICE)


def test_a_suspect_that_is_over_makes_room_for_the_next(world):
    woken = []
    world.company.on_left = lambda: woken.append(True)
    crowd = [world.request() for _ in range(3)]
    for name in ("one", "two"):
        world.dies(world.worker(name), *crowd)
    assert not woken
    with world.company.serving(crowd[0], SimpleNamespace(prefill=None, decode=world.worker("three"))):
        assert not woken
    assert woken


def test_nothing_of_a_dead_worker_is_kept(world, monkeypatch):
    """Its requests, and with them the workers that had died under each, stayed in memory for as long as the router."""
    for number in range(20):
        world.dies(world.worker(f"w{number}"), world.request())
    assert len(world.company._stays) == 20
    monkeypatch.setattr(crash_guard, "LATELY_S", 0.0)
    living = world.worker("living")
    for _ in range(20):
        with world.company.serving(world.request(), SimpleNamespace(prefill=None, decode=living)):
            pass
    assert set(world.company._stays) == {living.key}


def test_what_a_worker_reports_of_other_routers_counts(world):
    request = world.request()
    for name in ("one", "two"):
        assert world.dies(world.worker(name, num_running=9), request) == [False]
    assert not world.is_refused(ALICE)


def test_a_connection_that_broke_is_no_death(world):
    unplugged = [world.worker(name) for name in ("one", "two", "three")]
    world.back += unplugged
    request = world.request()
    assert [world.dies(worker, request) for worker in unplugged] == [[False]] * 3
    assert request.workers == set()


def test_an_engine_that_moves_again_is_no_death_under_a_plain_prompt(world):
    stalled = [world.worker(name, stalled=True) for name in ("one", "two")]
    request = world.request()
    assert world.dies(stalled[0], request) == [False]
    world.back.append(stalled[0])
    assert world.dies(stalled[1], request) == [False]


def test_for_stalls_costly_requests_are_suspected_first(world):
    costly, plain = world.request(ALICE, COSTLY), [world.request(BOB) for _ in range(6)]
    stalled = [world.worker(name, stalled=True) for name in ("one", "two")]
    world.back += stalled[:1]
    assert world.dies(stalled[0], costly, *plain) == [False] * 7
    assert world.dies(stalled[1], costly, *plain) == [True] + [False] * 6
    assert world.is_refused(ALICE)
    assert not world.is_refused(BOB)


def test_workers_that_had_not_admitted_it_weigh_less(world):
    request = world.request()
    results = [world.dies(world.worker(name), request, never_admitted=True) for name in ("one", "two", "three")]
    assert results == [[False], [False], [True]]


async def test_one_prompt_kills_few_workers_and_takes_no_other_with_it(cluster):
    """Requests share workers with one that kills each worker that admits it."""
    await cluster.start(prefill=0, decode=4, max_attempts=4)
    dying: list[asyncio.Task[None]] = []
    crowd, num_mates = asyncio.Barrier(12), 11

    async def die(worker, call):
        if call.sent.attempt == 0:
            await crowd.wait()
        await asyncio.sleep(0.2)  # the others have been admitted
        dying.append(asyncio.create_task(worker.kill()))
        await asyncio.Event().wait()

    async def slow(worker, call):
        if call.sent.attempt == 0 and not dying:
            await crowd.wait()
        await asyncio.sleep(0.5)

    def choose(worker, call):
        prepared = call.request
        if len(prepared.prompt_token_ids) == 6:
            return play(ADMITTED, die)(worker, call)
        if len(prepared.prompt_token_ids) == 5:
            places = range(len(prepared.output_token_ids), 4)
            rest = [decode_outputs(p, said(1, p), "length" if p == 3 else None) for p in places]
            return play(ADMITTED, slow, *rest)(worker, call)
        return decode_well(worker, call)

    for worker in cluster.workers:
        worker.script = choose
    asked = [cluster.complete(prompt="poison", max_tokens=4)]
    asked += [cluster.complete(prompt=f"mat{n:02}", max_tokens=4) for n in range(num_mates)]
    killer, *mates = await asyncio.gather(*asked)
    assert [mate.status_code for mate in mates] == [200] * num_mates
    assert [mate.json()["choices"][0]["text"] for mate in mates] == [said(4)] * num_mates
    assert killer.status_code == 503
    assert "workers died while they served this request" in killer.json()["error"]["message"]
    await asyncio.gather(*dying)
    assert 2 <= len(dying) <= 3
    again = await cluster.complete(prompt="poison", max_tokens=4)
    assert "refused" in again.json()["error"]["message"]
    for n in range(num_mates):
        assert await cluster.text(prompt=f"mat{n:02}", max_tokens=4) == said(4)
    assert len(dying) <= 3
