"""No body stops the event loop, or fills the router: each at the limit, and built to cost as much as it can."""

from __future__ import annotations

import asyncio
import http.client
from collections import deque

import grpc
import pytest
import worst_bodies
from loop_watch import LoopWatch
from worst_bodies import Worst

from pdserve.common.rpc import ERROR_CODE_KEY

LOOP_S = 0.05
"""Processor time of the longest callback, at most."""


def names(bodies: list[Worst]) -> list[str]:
    return [f"{worst.path.rpartition('/')[2]}: {worst.name}" for worst in bodies]


def ask(address: str, worst: Worst) -> tuple[int, bytes]:
    """In a thread: the client's own work does not count."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("POST", worst.path, worst.body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


async def _start(cluster):
    """The fakes run on the same loop: their records of calls would count as memory and garbage of the router."""
    await cluster.start(prefill=1, decode=1)
    for worker in cluster.workers:
        worker.calls = deque(maxlen=16)


@pytest.mark.parametrize("worst", worst_bodies.HTTP, ids=names(worst_bodies.HTTP))
async def test_no_body_stops_the_event_loop(cluster, worst):
    assert len(worst.body) <= worst_bodies.LIMIT or worst.status == 413
    await _start(cluster)
    await asyncio.to_thread(ask, cluster.addresses[0], Worst("first", worst_bodies.COMPLETIONS, b'{"prompt":"a"}'))
    with LoopWatch() as watch:
        status, answer = await asyncio.to_thread(ask, cluster.addresses[0], worst)
        grown = watch.grown_bytes
    assert status == worst.status, answer[:300]
    assert len(answer) < 1000 or status == 200
    assert watch.longest_s < LOOP_S, watch.callback
    assert grown < worst.max_grown_bytes


def call(address: str, worst: Worst) -> tuple[grpc.StatusCode, str | None, str]:
    """In a thread; bytes as they are."""
    with grpc.insecure_channel(address) as channel:
        method = f"/pdserve.v1.InferenceService/{worst.path}"
        try:
            if worst.path == "Embed":
                channel.unary_unary(method)(worst.body, timeout=60)
            elif worst.path == "Session":
                list(channel.stream_stream(method)(iter([worst.body]), timeout=60))
            else:
                list(channel.unary_stream(method)(worst.body, timeout=60))
        except grpc.RpcError as error:
            code = next((value for key, value in error.trailing_metadata() if key == ERROR_CODE_KEY), None)
            return error.code(), code, error.details()
    return grpc.StatusCode.OK, None, ""


@pytest.mark.parametrize("worst", worst_bodies.GRPC, ids=names(worst_bodies.GRPC))
async def test_no_message_stops_the_event_loop(cluster, worst):
    assert len(worst.body) <= worst_bodies.LIMIT
    await _start(cluster)
    await asyncio.to_thread(call, cluster.addresses[1], Worst("first", "Generate", worst_bodies._TEXT))
    with LoopWatch() as watch:
        status, code, details = await asyncio.to_thread(call, cluster.addresses[1], worst)
        grown = watch.grown_bytes
    if worst.status == 200:
        assert status is grpc.StatusCode.OK, details
    else:
        assert status is grpc.StatusCode.INVALID_ARGUMENT, details
        assert code in ("invalid_request", "prompt_too_long"), details
    assert watch.longest_s < LOOP_S, watch.callback
    assert grown < worst.max_grown_bytes
