"""Commands of an operator to the workers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.errors import Forbidden, UnsupportedMediaType
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.bodies.request_body import read_body
from pdserve.router.http_front.error_response import json_response
from pdserve.router.http_front.tokenization_http import authenticated
from pdserve.router.requests.inference import Inference
from pdserve.router.tenants.api_keys import ApiKeys
from pdserve.router.workers.worker import RemoteWorker

ROLE_PATH = "/workers/{worker_id}/role"


class RoleBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a change of role."""

    role: Literal["prefill", "decode"]
    force: bool = False
    """Also if no other live worker has the role that this one gives up."""


class FleetHttp:
    """For keys of operators; without keys, only where nobody else reaches the router."""

    def __init__(self, inference: Inference, keys: ApiKeys) -> None:
        self._inference = inference
        self._may_anybody = not inference.settings.asks_for_keys and is_loopback(inference.settings.host)
        self._keys = keys
        self.routes = [
            Route("/workers/{worker_id}/drain", self.drain, methods=["POST"]),
            Route(ROLE_PATH, self.set_role, methods=["POST"]),
        ]

    async def drain(self, request: Request) -> Response:
        """Have a worker drain: its running requests move to other workers, and its process ends. Status 202 when it has begun.

        Raises: NotFound; as `_verify_operator`.
        """
        await self._verify_operator(request, "drain a worker")
        workers = await self._inference.fleet.drain(request.path_params["worker_id"])
        return json_response({"draining": [_named(worker) for worker in workers]}, 202)

    async def set_role(self, request: Request) -> Response:
        """Have a worker take a role: what it decodes moves to other workers, and its cache stays. Status 202 when it has the role.

        Raises: NotFound; InvalidRequest for a wrong field, and with the worker's reason if it cannot take the role; Draining; as
        `_verify_operator`.
        """
        await self._verify_operator(request, "change a worker's role")
        body = await read_body(request, RoleBody, self._inference.bodies, lambda body: body)
        worker_id, role = request.path_params["worker_id"], WorkerRole(body.role)
        workers = await self._inference.fleet.set_role(worker_id, role, force=body.force)
        return json_response({"workers": [{**_named(worker), "role": body.role} for worker in workers]}, 202)

    async def _verify_operator(self, request: Request, operation: str) -> None:
        """Raises: Forbidden; UnsupportedMediaType without a JSON content type, with which no web page of another origin can send
        it."""
        client = await authenticated(self._keys, request)
        if not (client.sees_all and (client.key_name or self._may_anybody)):
            raise Forbidden(f"only an API key with the role operator may {operation}")
        declared = request.headers.get("content-type", "")
        if declared.partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaType(f"content-type is {declared!r:.80}, application/json is needed")


def _named(worker: RemoteWorker) -> dict[str, Any]:
    """For JSON."""
    return {
        "worker_id": worker.identity.worker_id,
        "epoch": f"{worker.identity.epoch:016x}",
        "num_calls": worker.num_in_flight,
    }
