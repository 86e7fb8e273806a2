"""`HealthServicer`: gRPC's health service, in which a slow watcher does not block others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.common.method_handler import Context


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Replaces grpc's implementation, which writes to watchers under the lock for status changes, so that a watcher that does not
    read would block all others."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": health_pb2.HealthCheckResponse.SERVING}
        self._changed = asyncio.Event()
        self._leaving = False

    def set(self, service: str, status: int) -> None:
        """Set a service's status; no effect after `leave`."""
        if not self._leaving and self._statuses.get(service) != status:
            self._statuses[service] = status
            self._notify()

    def leave(self) -> None:
        """Set all services to NOT_SERVING, permanently."""
        self._leaving = True
        for service in self._statuses:
            self._statuses[service] = health_pb2.HealthCheckResponse.NOT_SERVING
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if (status := self._statuses.get(request.service)) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last_sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last_sent:
                last_sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            await changed.wait()
