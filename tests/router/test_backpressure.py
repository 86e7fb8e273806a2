"""Workers without room: what they refuse is placed elsewhere, waits, and is no failure of theirs or of the request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pdserve.common.errors import Overloaded
from pdserve.common.processes.shutdown import Shutdown
from pdserve.common.settings.api_key_file import key_hash
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.service import run_router
from pdserve.v1 import inference_pb2, request_pb2
from tests.router.fake_worker import (
    Call,
    FakeWorker,
    decode_well,
    play,
    said,
)
from tests.support.engine.settings_with import settings_with
from tests.support.run.waiting import HANG_S

FULL = Overloaded("7 requests wait on this worker, at most 7 may (max_waiting)")


async def metric(cluster, line):
    text = (await cluster.http.get("/metrics")).text
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_refused_request_goes_elsewhere_and_is_no_failed_attempt(cluster, role):
    counts = {"prefill": 1, "decode": 1, role: 3}
    await cluster.start(**counts, max_attempts=1, policy="round_robin")
    workers = [worker for worker in cluster.workers if worker.role == role]
    for worker in workers[:2]:
        worker.script = play(FULL)
    for _ in range(3):
        assert await cluster.text() == said(5)
    health = (await cluster.http.get("/health")).json()
    assert health["workers"][role]["live"] == 3
    assert await metric(cluster, 'pdserve_attempts_total{outcome="overloaded"}') > 0
    assert await metric(cluster, 'pdserve_errors_total{code="overloaded"}') == 0


async def test_where_all_are_full_a_request_waits_for_room(cluster):
    await cluster.start(max_attempts=1)
    cluster.of("decode").scripts = [play(FULL)] * 6
    assert await cluster.text(max_tokens=50) == said(50)
    assert len(cluster.of("decode").calls) == 7


async def test_who_waits_for_room_too_long_gets_429(cluster):
    await cluster.start(queue_timeout_s=0.2)
    cluster.of("decode").script = play(FULL)
    response = await cluster.complete(max_tokens=200)
    assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
    assert float(response.headers["retry-after"]) >= 1
    # nothing of it was counted against the prompt
    cluster.of("decode").script = decode_well
    assert await cluster.text() == said(5)


async def test_inputs_go_elsewhere_too(cluster):
    await cluster.start(prefill=2, decode=0, max_attempts=1, policy="round_robin")
    full, _ = cluster.workers
    full.scripts = [play(FULL)] * 8
    # a script of embeddings is taken from `scripts` alone
    for _ in range(2):
        response = await cluster.http.post("/v1/embeddings", json={"input": "hello"})
        assert response.status_code == 200, response.text


async def test_a_worker_that_reports_a_full_queue_is_avoided(cluster):
    await cluster.start(decode=2)
    full, _ = (worker for worker in cluster.workers if worker.role == "decode")
    full.report(num_waiting=3, num_remote_kv=4, max_waiting=7)
    async with asyncio.timeout(HANG_S):
        while True:
            await cluster.text()
            [placement, *_] = (await cluster.http.get("/debug/routing")).json()["placements"]
            if {"role": "decode", "worker": full.worker_id, "why": "full, as it reports"} in placement["left_out"]:
                break
    before = len(full.calls)
    for _ in range(4):
        assert await cluster.text() == said(5)
    assert len(full.calls) == before


class Narrow:
    """A decode script with so many places; more are refused, as a worker with a full queue does."""

    def __init__(self, places):
        self.places, self.busy, self.most, self.num_refused = places, 0, 0, 0

    async def __call__(self, worker: FakeWorker, call: Call) -> AsyncIterator[Any]:
        if self.busy >= self.places:
            self.num_refused += 1
            raise FULL
        self.busy += 1
        self.most = max(self.most, self.busy)
        try:
            async for event in decode_well(worker, call):
                yield event
        finally:
            self.busy -= 1


async def test_two_routers_that_each_fill_the_fleet_are_served_in_turn(cluster, model_folder):
    await cluster.start(max_attempts=1, max_running_requests=8)
    narrow = cluster.of("decode").script = Narrow(8)
    cluster.of("decode").step_s = 0.005
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    addresses: dict[str, Any] = {role: (cluster.of(role).address,) for role in ("prefill", "decode")}
    second = asyncio.create_task(
        run_router(
            settings_with(RouterSettings, port=0, grpc_port=0, max_attempts=1, max_running_requests=8, **addresses),
            model_folder=model_folder,
            ready=lambda http, grpc: ready.set_result(http),
            shutdown=Shutdown(stop=stop),
        )
    )
    url = f"http://{await ready}"
    async with asyncio.timeout(HANG_S):
        while (await cluster.http.get(f"{url}/health")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    body = {"max_tokens": 5}
    asking = [
        cluster.http.post(f"{base}/v1/completions", json=body | {"prompt": f"{number}"})
        for number in range(24)
        for base in ("", url)
    ]
    responses = await asyncio.gather(*asking)
    stop.set()
    await second
    assert {response.status_code for response in responses} == {200}
    assert {response.json()["choices"][0]["text"] for response in responses} == {said(5)}
    assert narrow.most == 8
    assert narrow.num_refused > 0


# ---- sessions

NO_SESSION = Overloaded("4 sessions are open on this worker, at most 4 may be (max_sessions)")


def turn(max_tokens=2):
    return inference_pb2.GenerateRequest(
        text=inference_pb2.TextPrompt(text="hi"),
        sampling=request_pb2.SamplingParams(max_tokens=max_tokens),
        stream=True,
    )


async def answered(call):
    """One turn's text."""
    await call.write(turn())
    text = ""
    while True:
        response = await call.read()
        assert response is not grpc.aio.EOF
        text += response.text
        if response.finish_reason:
            return text


async def refused(call, *, unread=False):
    """unread: the router refuses before it reads a turn; gRPC's client would report a write that comes later as its own."""

    async def ask():
        if not unread:
            await call.write(turn())
        await call.read()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask()
    return caught.value.code(), caught.value.details()


async def no_room(worker, call):
    await anext(call.turns)
    raise NO_SESSION
    yield


async def test_a_refused_session_finds_another_worker(cluster):
    await cluster.start(decode=3, policy="round_robin")
    decodes = [worker for worker in cluster.workers if worker.role == "decode"]
    for worker in decodes[:2]:
        worker.session_script = no_room
    calls = []
    for _ in range(3):
        call = cluster.grpc.Session()
        assert await answered(call) == said(2)
        assert await answered(call) == said(2)
        calls.append(call)
    assert len(decodes[2].calls) == 3
    for call in calls:
        call.cancel()


async def test_a_session_that_no_worker_takes_is_refused(cluster):
    await cluster.start(decode=2)
    for worker in cluster.workers:
        worker.session_script = no_room
    code, details = await refused(cluster.grpc.Session())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_sessions" in details
    assert sum(len(worker.calls) for worker in cluster.workers if worker.role == "decode") == 2


async def test_a_worker_that_reports_all_of_its_sessions_is_avoided(cluster):
    await cluster.start(decode=2)
    full, other = (worker for worker in cluster.workers if worker.role == "decode")
    full.session_script = no_room
    full.report(num_sessions=4, max_sessions=4)
    other.report(num_sessions=3, max_sessions=4)
    calls = []
    for _ in range(3):
        calls.append(cluster.grpc.Session())
        assert await answered(calls[-1]) == said(2)
    assert len(full.calls) <= 1, "before its report came"
    for call in calls:
        call.cancel()


def keyed(tmp_path, **entries):
    path = tmp_path / "keys.toml"
    path.write_text(
        "".join(f'[[keys]]\nname = "{name}"\nsha256 = "{key_hash(name)}"\n{more}\n' for name, more in entries.items())
    )
    return str(path)


def of(name):
    return {"metadata": (("authorization", f"Bearer {name}"),)}


async def test_sessions_count_between_turns(cluster, tmp_path):
    await cluster.start(api_keys_file=keyed(tmp_path, alice="max_sessions = 1", bob="max_sessions = 0"))
    one = cluster.grpc.Session(**of("alice"))
    assert await answered(one) == said(2)
    code, details = await refused(cluster.grpc.Session(**of("alice")), unread=True)
    assert (code, "max_sessions of this API key is 1" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert (await refused(cluster.grpc.Session(**of("bob")), unread=True))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await answered(one) == said(2)
    await one.done_writing()
    assert await one.read() is grpc.aio.EOF
    two = cluster.grpc.Session(**of("alice"))
    assert await answered(two) == said(2)
    two.cancel()


async def test_one_tenant_cannot_hold_all_sessions(cluster, tmp_path):
    await cluster.start(api_keys_file=keyed(tmp_path, greedy="", quiet="", ops='role = "operator"'))
    cluster.of("decode").report(max_sessions=4)

    async def reported():
        headers = {"authorization": "Bearer ops"}
        return (await cluster.http.get("/debug/routing", headers=headers)).json()["max_sessions"]

    async with asyncio.timeout(HANG_S):
        while await reported() != 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    greedy = [cluster.grpc.Session(**of("greedy")) for _ in range(2)]
    for call in greedy:
        assert await answered(call) == said(2)
    code, details = await refused(cluster.grpc.Session(**of("greedy")), unread=True)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "a tenant may have as many as stay free" in details
    quiet = cluster.grpc.Session(**of("quiet"))
    assert await answered(quiet) == said(2)
    for call in (*greedy, quiet):
        call.cancel()
