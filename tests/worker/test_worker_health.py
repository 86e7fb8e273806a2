"""gRPC's health of a worker is its engine's: serving, stuck, serving again, draining."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.common.net.rpc import make_channel
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.decode.decode_servicer import decode_calls
from pdserve.worker import worker as worker_module
from pdserve.worker.worker import Worker
from pdserve.worker.worker_process import make_engine
from tests.support.run.waiting import HANG_S
from tests.support.transfers.worker_pair import door_of

STATES = health_pb2.HealthCheckResponse


async def test_health_follows_the_engine(
    tiny_checkpoints: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "TICK_STILL_S", 0.6)
    settings = DecodeSettings(num_blocks=8, max_model_len=64, connector="tcp", drain_s=0.0)
    engine = await make_engine(settings, tiny_checkpoints("llama"), DEVELOPMENT_KEY)
    worker = Worker(settings, WorkerRole.DECODE, engine, DEVELOPMENT_KEY, {WorkerRole.DECODE: decode_calls})
    go_on = threading.Event()
    try:
        await worker.start()
        async with make_channel(worker.identity.address) as channel, asyncio.timeout(HANG_S):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

            async def told(state: int) -> None:
                async for answer in watch:
                    if answer.status == state:
                        return
                raise AssertionError("the watch ended")

            await told(STATES.SERVING)
            door_of(worker).side.post(lambda _: go_on.wait(HANG_S))
            await told(STATES.NOT_SERVING)
            assert worker.health().status == "stuck"
            stub = health_pb2_grpc.HealthStub(channel)
            states = {
                name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status
                for name in ("live", "ready")
            }
            assert states == {"live": STATES.SERVING, "ready": STATES.NOT_SERVING}
            go_on.set()
            await told(STATES.SERVING)
            await worker.drain()
            await told(STATES.NOT_SERVING)
            assert worker.health().status == "draining"
            watch.cancel()
    finally:
        go_on.set()
        await worker.stop()


async def test_a_host_that_was_never_started_leaves_no_thread_and_no_port(
    tiny_checkpoints: Callable[..., Path],
) -> None:
    settings = DecodeSettings(num_blocks=8, max_model_len=64, connector="tcp")
    before = set(threading.enumerate())
    engine = await make_engine(settings, tiny_checkpoints("llama"), DEVELOPMENT_KEY)
    [accepting] = [thread for thread in threading.enumerate() if thread.name.startswith("tcp-accept")]
    await engine.shutdown()
    accepting.join(HANG_S)
    assert not accepting.is_alive()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("tcp")]
