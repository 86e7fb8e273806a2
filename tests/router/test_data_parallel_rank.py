"""A request that prefers a data parallel rank is placed on a decode worker of the rank, if one is ready, else on another."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.generation_request import MAX_DATA_PARALLEL_RANK
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.placement.placement import POLICIES, PlacementRules, choose
from pdserve.router.workers.announced_identity import verify_identity
from pdserve.v1 import inference_pb2
from tests.router.candidates import seen, worker
from tests.support.run.waiting import HANG_S

HEADER = "X-data-parallel-rank"


async def fleet(cluster: Any, *ranks: int | None) -> list[Any]:
    """Decode workers of these ranks, known to a router."""
    workers = []
    for number, rank in enumerate(ranks):
        made = cluster.worker("decode", worker_id=f"decode-{number}")
        made.data_parallel_rank = rank
        workers.append(await made.start())
    await cluster.start(prefill=0, decode=0)
    await cluster.live(decode=len(ranks))
    return workers


async def placed(cluster: Any) -> dict[str, Any]:
    """The last placement."""
    return (await cluster.http.get("/debug/routing")).json()["placements"][0]


def turn(rank: int | None = None) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text="hey"), data_parallel_rank=rank)
    request.sampling.max_tokens = 3
    return request


@pytest.mark.few(2)
@pytest.mark.parametrize("rank", [0, 1, MAX_DATA_PARALLEL_RANK])
async def test_each_front_end_reaches_the_rank(cluster, rank):
    ranks = [None, 0, 1, MAX_DATA_PARALLEL_RANK]
    workers = await fleet(cluster, *ranks)
    wanted = workers[ranks.index(rank)]
    chat = {"messages": [{"role": "user", "content": "hey"}], "max_tokens": 3}
    for path, body in (
        ("/v1/completions", {"prompt": "hey", "max_tokens": 3}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": "hey", "max_output_tokens": 3}),
    ):
        for fields, headers in (({"data_parallel_rank": rank}, {}), ({}, {HEADER: str(rank)})):
            answer = await cluster.http.post(path, json=body | fields, headers=headers)
            assert answer.status_code == 200, answer.text
            assert (await placed(cluster))["decode"] == wanted.worker_id, (path, fields)
    async for _ in cluster.grpc.Generate(turn(rank)):
        pass
    decision = await placed(cluster)
    assert (decision["decode"], decision["data_parallel_rank"], decision["has_its_rank"]) == (
        wanted.worker_id, rank, True,
    )  # fmt: skip
    assert len(wanted.calls) == 7


async def test_another_worker_serves_while_the_rank_is_not_there_or_not_ready(cluster):
    other, own = await fleet(cluster, 0, 1)
    ask = {"prompt": "hey", "max_tokens": 3}
    assert (await cluster.complete(**ask, data_parallel_rank=5)).status_code == 200
    assert (await placed(cluster))["has_its_rank"] is False
    await own.kill()
    await cluster.live(decode=1)
    assert (await cluster.complete(**ask, data_parallel_rank=1)).status_code == 200
    decision = await placed(cluster)
    assert (decision["decode"], decision["has_its_rank"]) == (other.worker_id, False)
    own.report(max_waiting=2, num_waiting=2)
    await own.start()
    await cluster.live(decode=2)
    assert (await cluster.complete(**ask, data_parallel_rank=1)).status_code == 200
    decision = await placed(cluster)
    assert (decision["decode"], decision["has_its_rank"]) == (other.worker_id, False)
    assert {"role": "decode", "worker": own.worker_id, "why": "full, as it reports"} in decision["left_out"]
    own.report(num_waiting=0)
    async with asyncio.timeout(HANG_S):
        while not (await placed(cluster))["has_its_rank"]:
            assert (await cluster.complete(**ask, data_parallel_rank=1)).status_code == 200
    assert (await cluster.complete(**ask)).status_code == 200
    decision = await placed(cluster)
    assert (decision["data_parallel_rank"], decision["has_its_rank"]) == (None, None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("-1", "x-data-parallel-rank is '-1', a number from 0 to 65535 is needed"),
        ("one", "x-data-parallel-rank is 'one'"),
        ("", "x-data-parallel-rank is ''"),
        ("1" * 10, "x-data-parallel-rank is '1111111111'"),
        ("65536", "x-data-parallel-rank must be from 0 to 65535, not 65536"),
    ],
)
async def test_an_impossible_header_is_refused_by_name(cluster, value, message):
    [alone] = await fleet(cluster, None)
    answer = await cluster.http.post("/v1/completions", json={"prompt": "x"}, headers={HEADER: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, HEADER.lower())
    assert message in answer.json()["error"]["message"]
    assert not alone.calls


async def test_an_impossible_field_is_refused_by_name(cluster):
    [alone] = await fleet(cluster, None)
    for rank in (-1, MAX_DATA_PARALLEL_RANK + 1):
        answer = await cluster.complete(data_parallel_rank=rank)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "data_parallel_rank")
        assert f"from 0 to {MAX_DATA_PARALLEL_RANK}, not {rank}" in answer.json()["error"]["message"]
    body = {"prompt": "x", "data_parallel_rank": 1}
    answer = await cluster.http.post("/v1/completions", json=body, headers={HEADER: "2"})
    assert answer.status_code == 400
    assert "data_parallel_rank is 1, and the header X-data-parallel-rank 2" in answer.text
    with pytest.raises(grpc.aio.AioRpcError, match="data_parallel_rank must be from 0") as refused:
        async for _ in cluster.grpc.Generate(turn(1 << 20)):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not alone.calls


async def test_a_sessions_first_turn_alone_may_name_a_rank(cluster):
    _, own = await fleet(cluster, 0, 1)
    call = cluster.grpc.Session()
    await call.write(turn(1))
    while not (await call.read()).finish_reason:
        pass
    assert len(own.calls) == 1
    await call.write(turn(0))
    with pytest.raises(grpc.aio.AioRpcError, match="data_parallel_rank may only come with a session's first message"):
        await call.read()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rank_comes_after_readiness_and_sampler(policy):
    def chosen(**rules: Any) -> str:
        found = choose(candidates, WorkerRole.DECODE, PlacementRules(policy=policy, data_parallel_rank=1, **rules))
        assert found is not None
        return found.worker.identity.worker_id

    candidates = [seen(worker("a")), seen(worker("b", sampler_version=3)), seen(worker("c", data_parallel_rank=1))]
    assert chosen() == "c"
    assert chosen(sampler_version=3) == "b"
    assert chosen(blamed={("c", 1)}) != "c"
    # a preference for decode workers changes nothing for prefill
    assert choose(candidates, WorkerRole.PREFILL, PlacementRules(policy=policy)) is choose(
        candidates, WorkerRole.PREFILL, PlacementRules(policy=policy, data_parallel_rank=1)
    )


def test_a_workers_impossible_rank_is_refused():
    verify_identity(worker("a", data_parallel_rank=MAX_DATA_PARALLEL_RANK).identity)
    with pytest.raises(InvalidRequest, match="its data_parallel_rank is 65536, 0 to 65535 is needed"):
        verify_identity(worker("a", data_parallel_rank=MAX_DATA_PARALLEL_RANK + 1).identity)
