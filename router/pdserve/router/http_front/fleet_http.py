"""Commands of an operator to the workers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.errors import Forbidden, UnsupportedMediaType
from pdserve.common.security.deployment_key import is_loopback
from pdserve.router.http_front.error_response import json_response
from pdserve.router.http_front.tokenization_http import authenticated
from pdserve.router.requests.inference import Inference
from pdserve.router.tenants.api_keys import ApiKeys


class FleetHttp:
    """For keys of operators; without keys, only where nobody else reaches the router."""

    def __init__(self, inference: Inference, keys: ApiKeys) -> None:
        self._inference = inference
        self._may_anybody = not inference.settings.asks_for_keys and is_loopback(inference.settings.host)
        self._keys = keys
        self.routes = [Route("/workers/{worker_id}/drain", self.drain, methods=["POST"])]

    async def drain(self, request: Request) -> Response:
        """Have a worker drain: its running requests move to other workers, and its process ends. Status 202 when it has begun.

        Raises: NotFound, Forbidden; UnsupportedMediaType without a JSON content type, with which no web page of another origin can
        send it.
        """
        client = await authenticated(self._keys, request)
        if not (client.sees_all and (client.key_name or self._may_anybody)):
            raise Forbidden("only an API key with the role operator may drain a worker")
        declared = request.headers.get("content-type", "")
        if declared.partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaType(f"content-type is {declared!r:.80}, application/json is needed")
        workers = await self._inference.fleet.drain(request.path_params["worker_id"])
        named = [
            {
                "worker_id": worker.identity.worker_id,
                "epoch": f"{worker.identity.epoch:016x}",
                "num_calls": worker.num_in_flight,
            }
            for worker in workers
        ]
        return json_response({"draining": named}, 202)
