"""Ended gRPC calls are freed at once: what is left until garbage collection counts among the streams of its connection."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.v1 import inference_pb2, request_pb2
from tests.router.test_grpc import ask
from tests.support.run.waiting import eventually
from tests.support.transfers.calls_in_memory import num_calls_in_memory

NUM_CALLS = 10


def _bad():
    return inference_pb2.GenerateRequest(sampling=request_pb2.SamplingParams(temperature=-1.0))


async def _answered(cluster):
    async for _ in cluster.grpc.Generate(ask(stream=True)):
        pass


async def _refused(cluster):
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in cluster.grpc.Generate(_bad()):
            pass


async def _cancelled(cluster):
    call = cluster.grpc.Generate(ask(stream=True, max_tokens=50))
    await call.read()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call.code()


async def _unary(cluster):
    await cluster.grpc.GetModel(inference_pb2.GetModelRequest())


async def _health(cluster):
    await health_pb2_grpc.HealthStub(cluster.channel).Check(health_pb2.HealthCheckRequest())


async def _no_such_service(cluster):
    with pytest.raises(grpc.aio.AioRpcError):
        await health_pb2_grpc.HealthStub(cluster.channel).Check(health_pb2.HealthCheckRequest(service="x" * 5000))


async def _session(cluster):
    async def turns():
        yield ask(stream=True)

    async for _ in cluster.grpc.Session(turns()):
        pass


async def _session_refused(cluster):
    ended = asyncio.Event()

    async def turns():
        yield _bad()
        await ended.wait()

    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in cluster.grpc.Session(turns()):
            pass
    ended.set()


ENDS = [_answered, _refused, _cancelled, _unary, _health, _no_such_service, _session, _session_refused]


@pytest.mark.few(3)
@pytest.mark.parametrize("end", ENDS)
async def test_an_ended_call_is_freed_without_garbage_collection(cluster, end):
    await cluster.start()
    await end(cluster)
    gc.collect()
    await asyncio.sleep(0.05)
    gc.disable()
    try:
        before = num_calls_in_memory()
        for _ in range(NUM_CALLS):
            await end(cluster)
        await eventually(lambda: num_calls_in_memory() <= before + 2, lambda: (num_calls_in_memory(), before))
    finally:
        gc.enable()
