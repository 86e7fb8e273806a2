"""The HTTP front end: OpenAI's API."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.errors import Cancelled, InternalError, InvalidRequest, PdServeError
from pdserve.common.metrics import CONTENT_TYPE
from pdserve.common.rpc import MAX_MESSAGE_BYTES
from pdserve.common.trace_headers import valid_trace_headers
from pdserve.router.api_keys import ApiKeys
from pdserve.router.generation_response import JSON, GenerationResponse, error_response
from pdserve.router.inference import Inference
from pdserve.router.openai_answer import Answer, error_json
from pdserve.router.openai_protocol import ChatBody, CompletionBody, parse_body
from pdserve.router.openai_tool_answer import ToolAnswer

TIMELINE_HEADER = "x-pdserve-timeline"


class HttpFront:
    """OpenAI's endpoints over one `Inference`."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._keys = ApiKeys(inference.settings.api_keys)
        self._started_at = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
                Route("/debug/routing", self.debug_routing, methods=["GET"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{model:path}", self.model, methods=["GET"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            ],
            exception_handlers={
                PdServeError: _on_error,
                HTTPException: _on_http_exception,
                Exception: _on_exception,
            },
        )

    async def health(self, request: Request) -> Response:
        """200 while some request could be served."""
        healthy = self._inference.healthy
        content = {
            "status": "ok" if healthy else "unavailable",
            "requests": self._inference.admission.num_requests,
            "workers": self._inference.fleet.counts(),
        }
        return _json(content, 200 if healthy else 503)

    async def debug_routing(self, request: Request) -> Response:
        """The last placements, newest first, and why they came out so."""
        self._authenticate(request)
        inference = self._inference
        return _json(
            {
                "policy": inference.settings.policy,
                "local_prefill": inference.settings.local_prefill,
                "transfer_bytes_per_s": inference.placer.bandwidth.bytes_per_s,
                "running": inference.admission.num_running,
                "queued": inference.admission.num_queued,
                "placements": inference.placer.log.content(),
            }
        )

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self._inference.telemetry.exposition(), headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        self._authenticate(request)
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._authenticate(request)
        self._inference.check_model(request.path_params["model"])
        return _json(self._model())

    async def completions(self, request: Request) -> Response:
        with self._inference.telemetry.refusals():
            client = self._authenticate(request)
            body = parse_body(await _read_body(request), CompletionBody)
            return self._respond(request, body, client, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        with self._inference.telemetry.refusals():
            client = self._authenticate(request)
            body = parse_body(await _read_body(request), ChatBody)
            return self._respond(request, body, client, chat=True)

    def _authenticate(self, request: Request) -> str:
        """A name for the key. Raises: Unauthenticated."""
        return self._keys.check(request.headers.get("authorization"))

    def _respond(self, request: Request, body: CompletionBody | ChatBody, client: str, *, chat: bool) -> Response:
        inference = self._inference
        inference.check_model(body.model)
        requests = body.requests(
            inference.tokenizer.generation_defaults,
            inference.settings.request_timeout_s,
            valid_trace_headers(request.headers),
        )
        stream = bool(body.stream)
        generation = inference.generation(requests, stream=stream, client=client)
        fields: dict[str, Any] = {
            "request_id": generation.request_id,
            "model": inference.model,
            "include_usage": body.include_usage,
            "num_logprobs": body.num_logprobs,
            "include_timeline": request.headers.get(TIMELINE_HEADER) == "1",
        }
        tools = body.tool_use if isinstance(body, ChatBody) else None
        if tools is not None and tools.tools:
            answer: Answer = ToolAnswer(max_calls=tools.max_calls, **fields)
        else:
            answer = Answer(chat=chat, **fields)
        return GenerationResponse(generation, answer, stream=stream)

    def _model(self) -> dict[str, Any]:
        limits = self._inference.limits()
        return {
            "id": self._inference.model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "pdserve",
            "max_model_len": limits.max_model_len if limits else None,
        }


async def _read_body(request: Request) -> bytes:
    """Raises: InvalidRequest for more than one message may have; Cancelled when the client left meanwhile."""
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > MAX_MESSAGE_BYTES:
                raise InvalidRequest(f"the body has more than {MAX_MESSAGE_BYTES} bytes")
    except ClientDisconnect as error:
        raise Cancelled("the client left before its request was complete") from error
    return bytes(data)


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type=JSON)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, PdServeError) else InternalError("internal error"))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    told = {404: "there is no such path", 405: "the path does not take this method"}.get(status, "the request failed")
    message = f"{told}: {request.method} {request.url.path}"
    return Response(error_json(status, message, "not_found"), status, headers=headers, media_type=JSON)


async def _on_exception(request: Request, error: Exception) -> Response:
    return error_response(InternalError("internal error; the router's log has the details"))
