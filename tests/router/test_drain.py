"""An operator's command that a worker drains, through the router."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.test_tenants import headers, keys_file
from tests.support.run.waiting import HANG_S


async def test_a_worker_is_asked_to_drain(cluster):
    await cluster.start(prefill=1, decode=2)
    answer = await cluster.http.post("/workers/decode1/drain", json={})
    assert answer.status_code == 202
    [named] = answer.json()["draining"]
    assert (named["worker_id"], named["num_calls"]) == ("decode1", 0)
    asked = [worker.worker_id for worker in cluster.workers if worker.num_drains]
    assert asked == ["decode1"]
    status = (await cluster.http.get("/debug/status")).json()
    states = {worker["worker_id"]: worker["state"] for worker in status["workers"]}
    assert states["decode1"] == "draining"


@pytest.mark.parametrize(("name", "status"), [("alice", 403), ("ops", 202), (None, 401)])
async def test_only_operators_may(cluster, tmp_path, name, status):
    file = keys_file(tmp_path, alice="", ops='role = "operator"')
    await cluster.start(api_keys_file=file)
    answer = await cluster.http.post("/workers/decode0/drain", json={}, headers=headers(name) if name else {})
    assert answer.status_code == status
    assert sum(worker.num_drains for worker in cluster.workers) == (status == 202)


async def test_without_keys_nobody_may_from_other_machines(cluster):
    await cluster.start(
        prefill=0, decode=0, host="0.0.0.0", insecure=True, no_auth=True, deployment_key="0123456789abcdef"
    )
    answer = await cluster.http.post("/workers/decode0/drain", json={})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"


async def test_an_unknown_worker(cluster):
    await cluster.start()
    answer = await cluster.http.post("/workers/nobody/drain", json={})
    assert answer.status_code == 404
    assert "no worker 'nobody'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers", [{}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}]
)
async def test_a_web_page_cannot_send_it(cluster, headers):
    await cluster.start()
    answer = await cluster.http.post("/workers/decode0/drain", headers=headers, content=b"")
    assert answer.status_code == 415
    assert not any(worker.num_drains for worker in cluster.workers)


async def test_a_worker_that_is_lost_meanwhile(cluster):
    await cluster.start()
    await cluster.of("decode").kill()
    async with asyncio.timeout(HANG_S):
        while (await cluster.http.post("/workers/decode0/drain", json={})).status_code != 404:  # noqa: ASYNC110 - the fleet's state
            await asyncio.sleep(0.01)
    assert (await cluster.http.get("/health")).json()["workers"]["decode"]["live"] == 0
