"""gRPC's health service of a router: statuses, watchers, and one that does not read."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from pdserve.router.grpc_front.health_servicer import HealthServicer
from tests.support.run.waiting import HANG_S

NO_CONTEXT: Any = None
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


async def test_a_watcher_that_does_not_read_holds_up_nobody():
    servicer = HealthServicer()
    mute, attentive = (servicer.Watch(HealthCheckRequest(), NO_CONTEXT) for _ in range(2))
    for watching in (mute, attentive):
        assert (await anext(watching)).status == SERVING
    for status in (NOT_SERVING, SERVING, NOT_SERVING):
        async with asyncio.timeout(HANG_S):
            servicer.set("", status)
            assert (await anext(attentive)).status == status
            assert (await servicer.Check(HealthCheckRequest(), NO_CONTEXT)).status == status
    # it missed what is over
    assert (await anext(mute)).status == NOT_SERVING


async def test_what_is_not_known_may_come():
    servicer = HealthServicer()
    watching = servicer.Watch(HealthCheckRequest(service="later"), NO_CONTEXT)
    assert (await anext(watching)).status == HealthCheckResponse.SERVICE_UNKNOWN
    servicer.set("later", SERVING)
    assert (await anext(watching)).status == SERVING


async def test_a_router_that_leaves_serves_nothing_any_more():
    servicer = HealthServicer()
    servicer.set("ready", SERVING)
    servicer.leave()
    servicer.set("ready", SERVING)
    for service in ("", "ready"):
        assert (await servicer.Check(HealthCheckRequest(service=service), NO_CONTEXT)).status == NOT_SERVING
