"""Limits of a tenant over several routers that share a real Redis, and what happens without it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import Overloaded
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.registry.redis_connection import make_redis
from pdserve.common.registry.redis_url import parse_redis_url
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.api_key_file import KeyLimits, key_hash
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.service import run_router
from pdserve.router.tenants import fleet_usage
from pdserve.router.tenants.client import Client
from pdserve.router.tenants.fleet_usage import LEASE_S, MAX_AGE_S, FleetUsage
from pdserve.router.tenants.tenant_account import TenantAccounts
from tests.router.fake_worker import ADMITTED, forever, play
from tests.support.engine.settings_with import settings_with
from tests.support.processes.redis_server import RedisServer, redis_server
from tests.support.run.waiting import HANG_S, eventually

KEY = DeploymentKey(b"0123456789abcdef")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


class Router:
    """The accounts of one, and what it tells."""

    def __init__(self, server: RedisServer, key: DeploymentKey = KEY) -> None:
        self.now_s = 0.0
        self.accounts = TenantAccounts(None, lambda: self.now_s)
        redis = make_redis(parse_redis_url(server.url))
        self.usage = FleetUsage(redis, "test", "pdserve", key, self.accounts, clock=lambda: self.now_s)

    async def close(self):
        await self.usage._redis.aclose()


@pytest.fixture
async def routers(server):
    made = [Router(server), Router(server)]
    yield made
    for router in made:
        await router.close()


def alice(**limits):
    return Client(key_name="alice", tenant="alice", limits=KeyLimits(**limits))


async def beat(*routers, times=3):
    """A router finds the others at its second beat at the latest, and reads what they tell at the next."""
    for _ in range(times):
        for router in routers:
            await router.usage.exchange()


async def test_what_others_have_counts(routers):
    here, there = routers
    account = there.accounts["alice"]
    account.num_sequences, account.num_running, account.num_sessions = 3, 1, 2
    await beat(here, there)
    found = here.usage.elsewhere("alice")
    assert (found.num_sequences, found.num_waiting, found.num_sessions) == (3, 2, 2)
    assert here.usage.elsewhere("bob").num_sequences == 0
    assert there.usage.elsewhere("alice").num_sequences == 0
    here.accounts.check_sequences(alice(max_sequences=4), 1)
    with pytest.raises(Overloaded, match=r"3 sequences of tenant alice .* 2 more came"):
        here.accounts.check_sequences(alice(max_sequences=4), 2)
    with pytest.raises(Overloaded, match="2 sessions of tenant alice"):
        here.accounts.check_sessions(alice(max_sessions=2), 0, 0, is_shared=True)
    with pytest.raises(Overloaded, match="2 sequences of tenant alice wait"):
        here.accounts.check_waiting(alice(max_queued_requests=2), 0, 1)
    account.num_sequences = account.num_running = account.num_sessions = 0
    await beat(there, here)
    here.accounts.check_sequences(alice(max_sequences=4), 4)


async def test_tokens_that_others_spend_are_spent_here(routers):
    here, there = routers
    who = alice(tokens_per_minute=1000)
    for router in routers:
        router.accounts.check_tokens(who, 1)
    # what was spent before this router knew the other does not count
    there.accounts["alice"].spend(500)
    await beat(here, there)
    here.accounts.check_tokens(who, 1000)
    there.accounts["alice"].spend(900)
    await beat(there, here, times=1)
    here.accounts.check_tokens(who, 100)
    with pytest.raises(Overloaded, match="tokens_per_minute"):
        here.accounts.check_tokens(who, 101)
    # and what is given back is given back
    there.accounts["alice"].spend(-900)
    await beat(there, here, times=1)
    here.accounts.check_tokens(who, 1000)
    assert here.accounts["alice"].tokens_used == 0


async def test_a_router_that_died_holds_nothing_after_its_lease(routers):
    here, there = routers
    there.accounts["alice"].num_sequences = 3
    await beat(there, here)
    here.now_s += fleet_usage.LEASE_S - 0.1
    await here.usage.exchange()
    assert here.usage.elsewhere("alice").num_sequences == 3
    here.now_s += 0.2
    await here.usage.exchange()
    assert here.usage.elsewhere("alice").num_sequences == 0


async def test_what_others_write_counts_for_nothing(server, routers):
    here, there = routers
    stranger = Router(server, DeploymentKey(b"another key, also long enough"))
    stranger.accounts["alice"].num_sequences = 100
    there.accounts["alice"].num_sequences = 3
    await beat(here, there, stranger)
    sealed = server.do("HGET", f"{{pdserve}}:usage:{there.usage.router_id}", "usage")
    for router_id, value in (
        ("a" * 32, sealed),  # another's numbers once more
        ("b" * 32, b""),
        ("c" * 32, b"\xff" * 2_000_000),
        ("d" * 32, sealed[:16] + b"\x00" + sealed[17:]),
        ("no id", sealed),
        ("\u00e9" * 16, sealed),
    ):
        server.do("ZADD", "{pdserve}:routers", 9e9, router_id)
        server.do("HSET", f"{{pdserve}}:usage:{router_id}", "usage", value)
    await beat(here)
    assert here.usage.elsewhere("alice").num_sequences == 3
    # neither do old numbers that are written again
    there.accounts["alice"].num_sequences = 0
    await beat(there, here, times=1)
    server.do("HSET", f"{{pdserve}}:usage:{there.usage.router_id}", "usage", sealed)
    await beat(here)
    assert here.usage.elsewhere("alice").num_sequences == 0
    await stranger.close()


@pytest.mark.few(7)
@pytest.mark.parametrize("away_s", [LEASE_S + 1, MAX_AGE_S + 1, 10 * MAX_AGE_S, 1e6], ids=str)
@pytest.mark.parametrize("knew_it", [True, False], ids=["it was known", "the reader is new"])
async def test_reports_of_a_router_that_left_do_not_count_again(server, routers, away_s, knew_it):
    here, there = routers
    there.accounts["alice"].num_sequences = 3
    kept = []
    for _ in range(4):
        await beat(*((there, here) if knew_it else (there,)), times=1)
        kept.append(server.do("HGET", f"{{pdserve}}:usage:{there.usage.router_id}", "usage"))
    assert here.usage.elsewhere("alice").num_sequences == (3 if knew_it else 0)
    server.do("DEL", f"{{pdserve}}:usage:{there.usage.router_id}")
    here.now_s += away_s
    here.usage._wall_clock = lambda: time.time() + away_s
    await beat(here)
    # to a reader that starts anew each beat is new once, for as long as two clocks may differ
    counts = [3 if not knew_it and away_s < MAX_AGE_S else 0] * len(kept)
    for sealed, counted in zip((*kept, *kept), (*counts, *[0] * len(kept)), strict=True):
        server.do("ZADD", "{pdserve}:routers", 9e9, there.usage.router_id)
        server.do("HSET", f"{{pdserve}}:usage:{there.usage.router_id}", "usage", sealed)
        await beat(here)
        assert here.usage.elsewhere("alice").num_sequences == counted
        here.now_s += LEASE_S + 1
        await beat(here)
        assert here.usage.elsewhere("alice").num_sequences == 0, "a beat counts once"


@pytest.mark.parametrize("shift_s", [-1e9, -2 * MAX_AGE_S, 2 * MAX_AGE_S, 1e18, float("nan"), float("inf")], ids=str)
async def test_a_report_of_another_time_counts_for_nothing(routers, shift_s):
    here, there = routers
    there.accounts["alice"].num_sequences = 3
    there.usage._wall_clock = lambda: time.time() + shift_s
    await beat(here, there)
    assert here.usage.elsewhere("alice").num_sequences == 0
    there.usage._wall_clock = time.time
    await beat(here, there)
    assert here.usage.elsewhere("alice").num_sequences == 3


ODD_NUMBERS = (-1, 2**31 + 1, 2**63, float("nan"), float("inf"), 1e300, "x", None, [1] * 1000)


@pytest.mark.few(33)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field in fleet_usage._Numbers.__struct_fields__
        for value in ODD_NUMBERS
        # tokens may be given back, and many
        if (field, value) not in (("tokens_used", -1), ("tokens_used", 2**31 + 1))
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_report_with_a_number_that_is_none_counts_for_nothing(routers, field, value):
    """From a router that has the key."""
    here, there = routers
    numbers = fleet_usage._Numbers(1, 0, 0, 1.0)
    setattr(numbers, field, value)
    there.usage._own = lambda: {there.usage._digest("alice"): numbers}
    await beat(here, there)
    assert here.usage.elsewhere("alice").num_sequences == 0
    assert not here.accounts["alice"].tokens_used


@pytest.mark.few(32)
@pytest.mark.parametrize("field", fleet_usage._Report.__struct_fields__)
@pytest.mark.parametrize("value", [*ODD_NUMBERS, {}, {"x": 1}], ids=lambda value: str(value)[:20])
async def test_a_report_with_a_wrong_field_breaks_nothing(server, routers, field, value):
    here, there = routers
    report = fleet_usage._Report(5, {there.usage._digest("alice"): fleet_usage._Numbers(1, 0, 0, 1.0)}, time.time())
    setattr(report, field, value)
    await beat(here, there, times=1)
    sealed = there.usage._sealed(report, there.usage.router_id)
    server.do("HSET", f"{{pdserve}}:usage:{there.usage.router_id}", "usage", sealed)
    await beat(here)
    assert here.usage.elsewhere("alice").num_sequences in (0, 1)


@pytest.mark.slow
async def test_routers_without_number_are_not_read(server, routers):
    here, _ = routers
    for number in range(1000):
        server.do("ZADD", "{pdserve}:routers", 9e9, f"{number:032x}")
    await beat(here, times=3)
    assert len(here.usage._ids) <= fleet_usage.MAX_ROUTERS


async def test_without_redis_each_router_holds_its_own_limits(server, caplog, monkeypatch):
    monkeypatch.setattr(fleet_usage, "BEAT_S", 0.02)
    monkeypatch.setattr(fleet_usage, "LEASE_S", 0.2)
    monkeypatch.setattr("pdserve.common.registry.redis_connection.OPERATION_S", 0.3)
    loop = asyncio.get_running_loop()
    here, there = Router(server), Router(server)
    for router in (here, there):
        router.usage._clock = loop.time
    there.accounts["alice"].num_sequences = 3
    running = [asyncio.create_task(router.usage.run()) for router in (here, there)]

    async def until(look):
        await eventually(look)

    await until(lambda: here.usage.elsewhere("alice").num_sequences == 3)
    with caplog.at_level(logging.WARNING):
        server.kill()
        await until(lambda: here.usage.elsewhere("alice").num_sequences == 0)
        here.accounts["alice"].num_sequences = 2
        with pytest.raises(Overloaded):
            here.accounts.check_sequences(alice(max_sequences=2), 1)
        await until(lambda: "limits hold for each router by itself" in caplog.text)
        await asyncio.sleep(0.5)
        # once for each of the two
        assert sum("limits hold for each router by itself" in record.message for record in caplog.records) <= 2
        server.start()
        await until(lambda: here.usage.elsewhere("alice").num_sequences == 3)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    # who leaves takes its numbers along
    assert server.do("ZCARD", "{pdserve}:routers") == 0


async def test_two_routers_hold_a_tenant_to_one_limit(cluster, server, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_usage, "BEAT_S", 0.02)
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nname = "alice"\nsha256 = "{key_hash("alice")}"\nmax_sequences = 3\n')
    shared = {"api_keys_file": str(file), "redis": server.url, "deployment_key": "0123456789abcdef"}
    for role in ("prefill", "decode"):
        cluster.worker(role, key=DeploymentKey(b"0123456789abcdef"))
        await cluster.of(role).start()
    await cluster.start(prefill=0, decode=0, **shared)
    cluster.of("decode").script = play(ADMITTED, forever)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    addresses: dict[str, Any] = {role: (cluster.of(role).address,) for role in ("prefill", "decode")}
    second = asyncio.create_task(
        run_router(
            settings_with(RouterSettings, port=0, grpc_port=0, **addresses, **shared),
            model_folder=model_folder,
            ready=lambda http, grpc: ready.set_result(http),
            shutdown=Shutdown(stop=stop),
        )
    )
    url = f"http://{await ready}"

    async def status(base, n):
        body = {"prompt": "x", "max_tokens": 2, "n": n}
        headers = {"authorization": "Bearer alice"}
        return (await cluster.http.post(f"{base}/v1/completions", json=body, headers=headers)).status_code

    async with asyncio.timeout(HANG_S):
        while (await cluster.http.get(f"{url}/health")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        held = asyncio.create_task(status("", 2))
        await cluster.of("decode").called(1)
        # three more could never run there; two more may not while the other router has two
        assert await status(url, 4) == 400
        waiting = None
        while waiting is None:
            task = asyncio.create_task(status(url, 2))
            await asyncio.wait((task,), timeout=1.0)
            if task.done():
                assert task.result() == 429
                break
            # it came before the numbers did
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    stop.set()
    await second
