"""Three times more than the fleet can serve: who is let in is served, the rest hears so at once, and then all is well."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.fake_worker import ADMITTED, LANDED, RELEASED, decode_outputs, first, forever, play, said
from tests.support.run.waiting import HANG_S

PLACES, QUEUE = 4, 4
SOME = 3 * (PLACES + QUEUE)


async def test_overload_at_three_times_capacity(cluster):
    await cluster.start(max_running_requests=PLACES, max_queued_requests=QUEUE)
    gate = asyncio.Event()

    async def wait(worker, call):
        await gate.wait()

    cluster.of("prefill").script = play(wait, first(), RELEASED)
    cluster.of("decode").script = play(wait, ADMITTED, LANDED, decode_outputs(1, "bcde", "length"))
    asking = [asyncio.create_task(cluster.complete(prompt=f"{number}")) for number in range(SOME)]
    for number, done in enumerate(asyncio.as_completed(asking), start=1):
        # nothing has been served yet: whoever hears something now was refused without waiting
        response = await done
        assert response.status_code == 429
        assert float(response.headers["retry-after"]) >= 1
        if number == SOME - PLACES - QUEUE:
            break
    await cluster.of("decode").called(PLACES)
    routing = (await cluster.http.get("/debug/routing")).json()
    assert (routing["running"], routing["queued"]) == (PLACES, QUEUE)
    assert len(cluster.of("decode").calls) == PLACES
    gate.set()
    responses = await asyncio.gather(*asking)
    served = [response.json()["choices"][0]["text"] for response in responses if response.status_code == 200]
    assert served == [said(5)] * (PLACES + QUEUE)
    async with asyncio.timeout(HANG_S):
        assert await cluster.text() == said(5)
    assert len(cluster.of("decode").calls) == PLACES + QUEUE + 1


async def test_a_place_comes_too_late(cluster):
    await cluster.start(max_running_requests=1, queue_timeout_s=0.05)
    gate = asyncio.Event()

    async def wait(worker, call):
        await gate.wait()

    cluster.of("decode").script = play(wait, ADMITTED, LANDED, decode_outputs(1, "bcde", "length"))
    asking = asyncio.create_task(cluster.text())
    await cluster.of("decode").called()
    response = await cluster.complete()
    assert response.status_code == 429
    assert "queue_timeout_s" in response.json()["error"]["message"]
    gate.set()
    assert await asking == said(5)


async def queue(cluster, count, **body):
    """This number of requests that wait for a place, the first of them with its call at a worker."""
    asking = [asyncio.create_task(cluster.complete(prompt="0", **body))]
    await cluster.of("decode").called()
    asking += [asyncio.create_task(cluster.complete(prompt=f"{number}", **body)) for number in range(1, count)]
    await cluster.queued(count - 1)
    return asking


@pytest.mark.few(1)
@pytest.mark.parametrize("left", ["nobody", "prefill"])
async def test_who_waits_for_a_place_when_the_last_worker_goes_hears_that_it_is_gone(cluster, monkeypatch, left):
    monkeypatch.setattr("pdserve.router.requests.tasks.placed_task.WAIT_FOR_WORKER_S", 2.0)
    await cluster.start(max_running_requests=1, queue_timeout_s=300)
    cluster.of("decode").script = play(ADMITTED, forever)
    asking = await queue(cluster, 20)
    for role in ("decode", "prefill") if left == "nobody" else ("decode",):
        await cluster.of(role).kill()
    # one after the other they would take twice as long
    async with asyncio.timeout(20):
        responses = await asyncio.gather(*asking)
    errors = {(response.status_code, response.json()["error"]["code"]) for response in responses}
    assert errors == {(503, "worker_lost")}
    assert all("no worker could serve this within 2 s" in response.text for response in responses)
    assert {response.headers["retry-after"] for response in responses} == {"1"}


async def test_who_waits_for_a_place_may_see_the_last_worker_come_back(cluster):
    await cluster.start(max_running_requests=1)
    cluster.of("decode").scripts = [play(ADMITTED, forever)]
    asking = await queue(cluster, 5, max_tokens=5)
    await cluster.of("decode").kill()
    await cluster.live(decode=0)
    await cluster.of("decode").start()
    responses = await asyncio.gather(*asking)
    assert [response.json()["choices"][0]["text"] for response in responses] == [said(5)] * 5


async def test_inputs_wait_for_prefill_workers_alone(cluster, monkeypatch):
    monkeypatch.setattr("pdserve.router.requests.tasks.placed_task.WAIT_FOR_WORKER_S", 0.2)
    await cluster.start(max_running_requests=1, queue_timeout_s=300)
    cluster.of("decode").script = play(ADMITTED, forever)
    [asking] = await queue(cluster, 1, max_tokens=5)
    embedding = [
        asyncio.create_task(cluster.http.post("/v1/embeddings", json={"input": f"{number}"})) for number in range(10)
    ]
    await cluster.queued(10)
    await cluster.of("prefill").kill()
    async with asyncio.timeout(HANG_S):
        responses = await asyncio.gather(*embedding)
    assert {(response.status_code, response.json()["error"]["code"]) for response in responses} == {
        (503, "worker_lost")
    }
    assert "embeddings are computed by prefill workers" in responses[0].text
    assert not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.slow
async def test_a_request_may_hold_more_prompts_than_may_wait(cluster):
    await cluster.start(max_running_requests=4, max_queued_requests=10)
    prompts = {"prompt": [f"{number}" for number in range(128)], "max_tokens": 1}
    response = await cluster.http.post("/v1/completions", json=prompts)
    assert [choice["text"] for choice in response.json()["choices"]] == [said(1)] * 128
    response = await cluster.http.post("/v1/embeddings", json={"input": ["x"] * 2048})
    assert response.status_code == 200, response.text
    assert len(response.json()["data"]) == 2048


async def test_limits_per_api_key(cluster):
    await cluster.start(api_keys=("k1", "k2"), max_requests_per_key=1)
    gate = asyncio.Event()

    async def wait(worker, call):
        await gate.wait()

    cluster.of("decode").script = play(wait, ADMITTED, LANDED, decode_outputs(1, "bcde", "length"))
    ask = {"prompt": "hello", "max_tokens": 5}

    def post(key):
        return cluster.http.post("/v1/completions", json=ask, headers={"authorization": f"Bearer {key}"})

    asking = [asyncio.create_task(post("k1"))]
    await cluster.of("decode").called()
    assert (await post("k1")).status_code == 429
    asking.append(asyncio.create_task(post("k2")))
    await cluster.of("decode").called(2)
    gate.set()
    assert [response.status_code for response in await asyncio.gather(*asking)] == [200, 200]
    assert (await post("k1")).status_code == 200
