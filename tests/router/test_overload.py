"""Three times more than the fleet can serve: who is let in is served, the rest hears so at once, and then all is well."""

from __future__ import annotations

import asyncio

from fake_worker import ADMITTED, LANDED, RELEASED, decode_outputs, first, play, said

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
    async with asyncio.timeout(1):
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
