"""A sampled text goes on where its sampler is, if it can; a counter tells where it could not."""

from __future__ import annotations

import pytest

from pdserve.common.errors import Draining
from tests.router.fake_worker import ADMITTED, decode_outputs, play, said

COUNTER = "pdserve_resumes_with_other_sampler_total"
SAMPLED = {"temperature": 0.8, "max_tokens": 8}


async def fleet(cluster, *samplers, role="decode", **options):
    """Workers with these samplers, each by what it says in its identity."""
    for number, version in enumerate(samplers):
        worker = cluster.worker(role, worker_id=f"{role}-{number}", **options)
        worker.sampler_version = version
        await worker.start()


def breaks_once(cluster, num_tokens=3):
    """The first of each two decode calls ends after that many tokens; returns the samplers that were asked.

    Its worker says that it leaves, and is passed over until it reports again: wait for that before the next request.
    """
    asked = []

    async def script(worker, call):
        asked.append(worker.sampler_version)
        begun = len(call.request.output_token_ids)
        texts = (decode_outputs(position, said(1, position)) for position in range(begun, num_tokens))
        events = play(ADMITTED, *texts, Draining("leaving")) if len(asked) % 2 else None
        if events is None:
            rest = [decode_outputs(p, said(1, p), "length" if p == 7 else None) for p in range(begun, 8)]
            events = play(ADMITTED, *rest)
        async for event in events(worker, call):
            yield event

    for worker in cluster.workers:
        worker.script = script
    return asked


async def counted(cluster):
    lines = (await cluster.http.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(COUNTER))


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["kv_aware", "round_robin", "least_loaded"])
async def test_the_next_attempt_goes_to_the_same_sampler(cluster, policy):
    await fleet(cluster, 1, 2, 1, 2)
    await cluster.start(prefill=0, decode=0, policy=policy)
    asked = breaks_once(cluster)
    for number in range(6):
        await cluster.live(decode=4)
        response = await cluster.complete(prompt=f"prompt {number}", **SAMPLED)
        assert response.json()["choices"][0]["text"] == said(8)
    assert len(asked) == 12
    assert asked[::2] == asked[1::2]
    assert await counted(cluster) == 0


async def test_without_one_the_attempt_goes_on_and_is_counted(cluster):
    await fleet(cluster, 1, 2)
    await cluster.start(prefill=0, decode=0)
    asked = breaks_once(cluster)
    assert (await cluster.complete(**SAMPLED)).json()["choices"][0]["text"] == said(8)
    assert sorted(asked) == [1, 2]
    assert await counted(cluster) == 1


async def test_before_the_first_token_and_for_greedy_requests_it_does_not_matter(cluster):
    await fleet(cluster, 1, 2)
    await cluster.start(prefill=0, decode=0)
    for params, num_tokens in ((SAMPLED, 0), (SAMPLED | {"temperature": 0.0}, 3)):
        asked = breaks_once(cluster, num_tokens)
        await cluster.live(decode=2)
        assert (await cluster.complete(**params)).json()["choices"][0]["text"] == said(8)
        assert sorted(asked) == [1, 2]
    assert await counted(cluster) == 0


async def test_prefill_and_decode_of_two_samplers_are_counted(cluster):
    await fleet(cluster, 1, role="prefill")
    await fleet(cluster, 2)
    await cluster.start(prefill=0, decode=0)
    assert (await cluster.complete(**SAMPLED | {"temperature": 0.0})).status_code == 200
    assert await counted(cluster) == 0
    assert (await cluster.complete(**SAMPLED)).status_code == 200
    assert await counted(cluster) == 1
