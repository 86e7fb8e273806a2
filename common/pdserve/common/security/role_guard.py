"""`RoleGuard`: the interceptor of a worker's server that lets each method be called only by the roles that need it.

    router                     StepStreamService, WorkerService
    any worker                 KvSourceService
    any role                   health, reflection

A caller's roles are those of the certificate that it has shown in the handshake (`common/security/tls_roles.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from pdserve.common.address.peer_address import peer_host
from pdserve.common.errors import PdServeError, PermissionDenied
from pdserve.common.method_handler import Context, HandlerInterceptor, behaviour_of, remade
from pdserve.common.security.tls import ServerTls
from pdserve.common.security.tls_roles import WORKERS, ServiceRole

log = logging.getLogger(__name__)

_ROUTERS = (ServiceRole.ROUTER,)
CALLERS: dict[str, tuple[ServiceRole, ...]] = {
    "pdserve.v1.StepStreamService": _ROUTERS,
    "pdserve.v1.WorkerService": _ROUTERS,
    "pdserve.v1.KvSourceService": WORKERS,
    "grpc.health.v1.Health": tuple(ServiceRole),
    "grpc.reflection.v1alpha.ServerReflection": tuple(ServiceRole),
}
"""Service -> roles that may call its methods; a service that is not listed may not be called."""
_MAX_WARNED = 1024

Abort = Callable[[Context, PdServeError], Awaitable[Any]]


class CallerRoles:
    """Checks of a caller's certificate for servicers, if roles are required."""

    def __init__(self, tls: ServerTls | None) -> None:
        """tls: the server's; without it, or with `tls_roles` `ignore`, callers are not asked for roles."""
        self._tls = tls

    def verify(self, context: Context, allowed: tuple[ServiceRole, ...], worker_id: str | None = None) -> None:
        """Raises: PermissionDenied when the caller has none of these roles, or not that of the worker `worker_id`."""
        peers = None if self._tls is None else self._tls.current.peers
        if peers is None:
            return
        if (objection := peers.objection(_uris(context), allowed, worker_id)) is not None:
            raise PermissionDenied(f"the caller may not do this: {objection}")


class RoleGuard(HandlerInterceptor):
    """Runs after the interceptor that turns errors into statuses, before those that read messages."""

    def __init__(self, callers: CallerRoles, abort: Abort) -> None:
        """abort: ends a call with an error's status; for services that are not ours."""
        self._callers = callers
        self._abort = abort
        self._warned: set[str] = set()

    def replaced(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        method = details.method
        allowed = CALLERS.get(method.strip("/").partition("/")[0], ())

        async def verify(context: Context) -> None:
            try:
                self._callers.verify(context, allowed)
            except PermissionDenied as error:
                self._warn(context, method, error)
                await self._abort(context, error)

        return _guarded(handler, verify)

    def _warn(self, context: Context, method: str, error: PermissionDenied) -> None:
        """Once for each host and method."""
        what = f"{peer_host(context.peer())} called {method}"
        if what not in self._warned:
            if len(self._warned) >= _MAX_WARNED:
                self._warned.clear()
            self._warned.add(what)
            log.warning("%s and was refused: %s", what, error.message)


def _guarded(handler: Any, verify: Callable[[Context], Awaitable[None]]) -> Any:
    behaviour = behaviour_of(handler)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        await verify(context)
        async for response in behaviour(request, context):
            yield response

    async def answer(request: Any, context: Context) -> Any:
        await verify(context)
        return await behaviour(request, context)

    # health writes its stream itself, in a coroutine
    is_stream = handler.response_streaming and not inspect.iscoroutinefunction(behaviour)
    return remade(handler, stream if is_stream else answer, parse=handler.request_deserializer)


def _uris(context: Context) -> list[str]:
    """URIs of the caller's certificate, which the handshake has verified."""
    return [uri.decode("utf-8", "replace") for uri in context.auth_context().get("peer_uri", ())]
