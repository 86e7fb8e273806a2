"""Calls to workers as routers and peers make them, and a watch by hand."""

from __future__ import annotations

from typing import Any

import grpc.aio

from pdserve.common.kv_events import WorkerKey
from pdserve.common.net.service_channel import ServiceChannel
from pdserve.common.security.call_proof import CallSigner
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY, DeploymentKey
from pdserve.common.security.watch_proof import WatchChallenge
from pdserve.v1 import worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceStub
from tests.support.run.waiting import HANG_S


def signed(channel: grpc.aio.Channel, receiver: WorkerKey, key: DeploymentKey = DEVELOPMENT_KEY) -> ServiceChannel:
    """The channel, with a proof on every call to that life of a worker."""
    return ServiceChannel(channel, CallSigner(key), receiver)


async def identity_of(channel: grpc.aio.Channel, key: DeploymentKey = DEVELOPMENT_KEY) -> worker_pb2.Identity:
    """The worker's identity, after its proof."""
    challenge = WatchChallenge(key, blocks=False)
    call: Any = WorkerServiceStub(channel).Watch(timeout=HANG_S)
    try:
        await call.write(challenge.opening)
        return challenge.read(await call.read())
    finally:
        call.cancel()
