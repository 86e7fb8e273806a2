"""Workers that change their role, as a router sees them: what is placed where, and what becomes of what runs."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.common.errors import InvalidRequest, Overloaded
from pdserve.v1 import worker_pb2
from tests.router.fake_worker import ADMITTED, decode_outputs, forever, play, said
from tests.router.test_tenants import headers, keys_file
from tests.support.run.waiting import HANG_S, eventually

LONG = "x" * 40


async def roles(cluster):
    status = (await cluster.http.get("/debug/status")).json()
    return {worker["worker_id"]: worker["role"] for worker in status["workers"]}


def named(cluster, worker_id):
    return next(worker for worker in cluster.workers if worker.worker_id == worker_id)


async def switch(cluster, worker_id, role, **body):
    answer = await cluster.http.post(f"/workers/{worker_id}/role", json={"role": role, **body})
    assert answer.status_code == 202, answer.text
    async with asyncio.timeout(HANG_S):
        while (await roles(cluster))[worker_id] != role:  # noqa: ASYNC110 - the fleet's state
            await asyncio.sleep(0.01)
    return answer.json()


def kinds(worker):
    return [call.sent.WhichOneof("call") for call in worker.calls]


async def test_an_operator_changes_a_role_and_prompts_go_there(cluster):
    await cluster.start(prefill=1, decode=2, policy="round_robin")
    before = [named(cluster, name).epoch for name in ("decode0", "decode1")]
    answer = await switch(cluster, "decode1", "prefill")
    [told] = answer["workers"]
    assert (told["worker_id"], told["role"], told["num_calls"]) == ("decode1", "prefill", 0)
    assert [request.role for request in named(cluster, "decode1").roles_asked] == [worker_pb2.ROLE_PREFILL]
    for letter in "wxyz":
        assert await cluster.text(prompt=letter * 40) == said(5)
    assert kinds(named(cluster, "decode0")) == ["decode"] * 4
    assert kinds(named(cluster, "decode1")) == ["prefill"] * 2
    sources = {call.sent.decode.source.worker_id for call in named(cluster, "decode0").calls}
    assert sources == {"prefill0", "decode1"}
    counts = (await cluster.http.get("/health")).json()["workers"]
    assert [counts[role]["live"] for role in ("prefill", "decode")] == [2, 1]
    assert [counts[role]["addresses"] for role in ("prefill", "decode")] == [2, 1]
    await switch(cluster, "decode1", "decode")
    named(cluster, "decode1").calls.clear()
    for letter in "abcd":
        assert await cluster.text(prompt=letter * 40) == said(5)
    assert kinds(named(cluster, "decode1")) == ["decode"] * 2
    assert [named(cluster, name).epoch for name in ("decode0", "decode1")] == before


async def test_a_worker_that_is_known_only_after_its_change(cluster):
    """A router that starts later, or connects again: the address is that of a prefill worker, and the worker decodes."""
    worker = await cluster.worker("prefill", worker_id="changed").start()
    worker.report(role=worker_pb2.ROLE_DECODE)
    await cluster.start(prefill=1, decode=0, wait=False)
    await cluster.live(prefill=1, decode=1)
    assert await cluster.text(prompt=LONG) == said(5)
    assert kinds(worker) == ["decode"]
    await worker.kill()
    await cluster.live(prefill=1, decode=0)
    worker.report(role=worker_pb2.ROLE_PREFILL)
    await worker.start()
    await cluster.live(prefill=2, decode=0)


async def test_a_worker_is_introduced_to_those_that_are_peers_now(cluster):
    await cluster.start(prefill=1, decode=2)
    other = named(cluster, "decode0")
    await eventually(lambda: {met.worker_id for met in other.met} == {"prefill0"})
    await switch(cluster, "decode1", "prefill")
    await eventually(lambda: {met.worker_id for met in other.met} == {"prefill0", "decode1"})
    await eventually(lambda: {met.worker_id for met in named(cluster, "decode1").met} == {"prefill0", "decode0"})


async def test_a_prefill_that_runs_ends_where_it_is(cluster):
    await cluster.start(prefill=2, decode=1)
    for worker in cluster.workers:
        worker.step_s = 0.1
    asking = asyncio.create_task(cluster.text(prompt=LONG))
    busy = await eventually(lambda: next((each for each in cluster.workers[:2] if each.calls), None))
    await switch(cluster, busy.worker_id, "decode")
    assert await asking == said(5)
    assert kinds(busy) == ["prefill"]


@pytest.mark.parametrize("returns", [False, True])
async def test_without_another_decode_worker_sequences_stay(cluster, returns):
    await cluster.start(prefill=1, decode=1)
    worker = named(cluster, "decode0")
    go_on = asyncio.Event()
    rest = [decode_outputs(place, said(place + 1)[-1], "length" if place == 4 else None) for place in range(1, 5)]
    worker.scripts = [play(ADMITTED, decode_outputs(0, said(1)), lambda *_: go_on.wait(), *rest)]
    asking = asyncio.create_task(cluster.text(prompt="x"))
    await worker.called()
    await switch(cluster, "decode0", "prefill", force=True)
    if returns:
        await switch(cluster, "decode0", "decode")
        # a worker that comes finds nobody who wants to leave
        await cluster.worker("decode", worker_id="new").start()
    go_on.set()
    assert await asking == said(5)
    assert len(worker.calls) == 1


async def test_the_last_of_a_role_is_kept_unless_forced(cluster):
    await cluster.start(prefill=1, decode=1)
    for name, role in (("decode0", "prefill"), ("prefill0", "decode")):
        answer = await cluster.http.post(f"/workers/{name}/role", json={"role": role})
        assert answer.status_code == 400
        error = answer.json()["error"]
        own = name[:-1]
        assert (
            error["message"] == f"role is '{role}', and {name} is the only {own} worker that is live: force is needed"
        )
        assert (error["param"], error["code"]) == ("role", "invalid_request")
    assert not any(worker.roles_asked for worker in cluster.workers)
    # it has the role already
    answer = await cluster.http.post("/workers/decode0/role", json={"role": "decode"})
    assert answer.status_code == 202
    await switch(cluster, "prefill0", "decode", force=True)
    assert await cluster.text(prompt=LONG) == said(5)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (InvalidRequest("role is prefill, which this worker cannot take: dtype differs", "role"), 400, "dtype differs"),
        (Overloaded("the worker's role was changed 1.0 s ago"), 429, "1.0 s ago"),
    ],
)
async def test_a_refusal_of_the_worker_is_told(cluster, error, status, told):
    await cluster.start(prefill=1, decode=2)
    named(cluster, "decode1").role_error = error
    answer = await cluster.http.post("/workers/decode1/role", json={"role": "prefill"})
    assert answer.status_code == status
    assert told in answer.json()["error"]["message"]
    assert (await roles(cluster))["decode1"] == "decode"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "role"),
        ({"role": "router"}, "role"),
        ({"role": 1}, "role"),
        ({"role": "prefill", "force": "yes"}, "force"),
        ({"role": "prefill", "dwell": 3}, "dwell"),
    ],
)
async def test_wrong_fields_are_named(cluster, body, field):
    await cluster.start(prefill=1, decode=2)
    answer = await cluster.http.post("/workers/decode1/role", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert not named(cluster, "decode1").roles_asked


@pytest.mark.parametrize(("name", "status"), [("alice", 403), ("ops", 202), (None, 401)])
async def test_only_operators_may(cluster, tmp_path, name, status):
    file = keys_file(tmp_path, alice="", ops='role = "operator"')
    await cluster.start(prefill=1, decode=2, api_keys_file=file)
    body = {"role": "prefill"}
    answer = await cluster.http.post("/workers/decode0/role", json=body, headers=headers(name) if name else {})
    assert answer.status_code == status
    assert sum(len(worker.roles_asked) for worker in cluster.workers) == (status == 202)


async def test_an_unknown_worker_and_a_web_page(cluster):
    await cluster.start(prefill=1, decode=2)
    answer = await cluster.http.post("/workers/nobody/role", json={"role": "prefill"})
    assert answer.status_code == 404
    assert "no worker 'nobody'" in answer.json()["error"]["message"]
    answer = await cluster.http.post(
        "/workers/decode0/role", headers={"content-type": "text/plain"}, content=b'{"role": "prefill"}'
    )
    assert answer.status_code == 415
    assert not any(worker.roles_asked for worker in cluster.workers)


@pytest.mark.parametrize("said_role", [0, 99])
async def test_a_role_that_is_not_told_or_not_known_is_that_of_the_start(cluster, said_role):
    await cluster.start(prefill=1, decode=2)
    await switch(cluster, "decode1", "prefill")
    named(cluster, "decode1").report(role=said_role)
    await cluster.live(prefill=1, decode=2)
    assert (await roles(cluster))["decode1"] == "decode"
    assert await cluster.text(prompt=LONG) == said(5)


async def test_roles_that_change_all_the_time_lose_no_request(cluster):
    """Whatever a worker says, and however often."""
    await cluster.start(prefill=2, decode=2)
    for worker in cluster.workers:
        worker.step_s = 0.002

    async def flap():
        turn = 0
        while True:
            turn += 1
            for worker in (cluster.workers[0], cluster.workers[2]):
                worker.report(role=worker_pb2.ROLE_PREFILL if turn % 2 else worker_pb2.ROLE_DECODE)
            await asyncio.sleep(0.005)

    flapping = asyncio.create_task(flap())
    try:
        answers = await asyncio.gather(*(cluster.text(prompt=f"{number:040d}", max_tokens=20) for number in range(60)))
    finally:
        flapping.cancel()
    assert set(answers) == {said(20)}
    await cluster.idle()


async def test_what_is_open_at_a_worker_is_shown(cluster):
    await cluster.start(prefill=1, decode=2)
    worker = named(cluster, "decode1")
    worker.scripts = [play(forever)]
    worker.report(num_other_calls=3)

    async def shown():
        status = (await cluster.http.get("/debug/status")).json()
        return {each["worker_id"]: each["num_other_calls"] for each in status["workers"]}

    async with asyncio.timeout(HANG_S):
        while (await shown())["decode1"] != 3:  # noqa: ASYNC110 - the fleet's state
            await asyncio.sleep(0.01)
    assert (await shown())["decode0"] == 0
