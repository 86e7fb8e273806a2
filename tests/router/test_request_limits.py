"""`max_logprobs` and `max_n_sequences` of router and workers: the smaller one counts, and an error names field, value and limit."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from pdserve.v1 import inference_pb2, request_pb2
from tests.router.conftest import Cluster
from tests.router.fake_worker import ADMITTED, decode_outputs, play

CHAT = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}


async def started(cluster: Cluster, *, ours: dict[str, Any], theirs: dict[str, Any]) -> Cluster:
    """theirs: of the decode worker; the prefill worker has the defaults."""
    await cluster.worker("prefill").start()
    worker = cluster.worker("decode")
    for name, value in theirs.items():
        setattr(worker, name, value)
    await worker.start()
    return await cluster.start(prefill=0, decode=0, **ours)


def refusals(most_logprobs: int, most_sequences: int) -> list[tuple[str, dict[str, Any], str, str]]:
    over = most_logprobs + 1
    within = f"must be from 0 to {most_logprobs}, not {over}"
    return [
        ("completions", {"prompt": "x", "logprobs": over}, "logprobs", f"logprobs {within}"),
        ("completions", {"prompt": "x", "prompt_logprobs": over}, "prompt_logprobs", f"prompt_logprobs {within}"),
        ("chat/completions", CHAT | {"top_logprobs": over}, "top_logprobs", f"top_logprobs {within}"),
        (
            "responses",
            {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": over},
            "top_logprobs",
            f"top_logprobs {within}",
        ),
        (
            "completions",
            {"prompt": "x", "n": most_sequences + 1},
            "n",
            f"n must be from 1 to {most_sequences}, not {most_sequences + 1}",
        ),
        (
            "completions",
            {"prompt": ["x", "y"], "best_of": most_sequences + 1},
            "best_of",
            f"best_of must be at least n (1) and at most {most_sequences}, not {most_sequences + 1}",
        ),
    ]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"max_logprobs": 3, "max_n_sequences": 2}, {}),
        ({"max_logprobs": 500, "max_n_sequences": 100}, {"max_logprobs": 3, "max_n_sequences": 2}),
        ({"max_logprobs": 3, "max_n_sequences": 100}, {"max_logprobs": 500, "max_n_sequences": 2}),
    ],
)
async def test_the_smaller_limit_counts_and_is_named(
    cluster: Cluster, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    await started(cluster, ours=ours, theirs=theirs)
    for path, body, field, message in refusals(3, 2):
        response = await cluster.http.post(f"/v1/{path}", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["message"]) == (400, field, message)
    for sampling in (request_pb2.SamplingParams(logprobs=4), request_pb2.SamplingParams(n=3)):
        request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=[5]), sampling=sampling)
        call: Any = cluster.grpc.Generate(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "must be from" in str(caught.value.details())
    assert not any(worker.calls for worker in cluster.workers)


async def test_larger_limits_let_more_through(cluster: Cluster) -> None:
    limits: dict[str, Any] = {"max_logprobs": 40, "max_n_sequences": 20}
    prefill, decode = cluster.worker("prefill"), cluster.worker("decode")
    for worker in (prefill, decode):
        worker.max_logprobs, worker.max_n_sequences = 40, 20
        await worker.start()
    await cluster.start(prefill=0, decode=0, local_prefill="always", **limits)
    logprobs = request_pb2.Logprobs(
        width=41, token_ids=[7, *range(40)], logprobs=[-9.0, *(-float(place) for place in range(40))], sampled_ranks=[8]
    )
    decode.script = play(ADMITTED, decode_outputs(0, token_ids=[7], finish="length", logprobs=logprobs))
    response = await cluster.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "logprobs": 40})
    assert response.status_code == 200, response.text
    [top] = response.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top) == 40
    for path, body, field, message in refusals(40, 20):
        error = (await cluster.http.post(f"/v1/{path}", json=body)).json()["error"]
        assert (error["param"], error["message"]) == (field, message)
