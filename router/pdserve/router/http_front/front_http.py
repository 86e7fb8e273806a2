"""The HTTP front end: OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from pdserve.common import clock
from pdserve.common.errors import InternalError, PdServeError
from pdserve.common.net.health_probe import answer_live, probe_response
from pdserve.common.request.trace_headers import TRACEPARENT
from pdserve.common.telemetry.metrics import CONTENT_TYPE
from pdserve.router.bodies.request_body import read_body
from pdserve.router.http_front.answer_parts import AnswersInParts
from pdserve.router.http_front.debug_http import DebugHttp
from pdserve.router.http_front.error_response import JSON, error_response, json_response
from pdserve.router.http_front.fleet_http import FleetHttp
from pdserve.router.http_front.generation_response import GenerationResponse, asks_for_timeline, call_fields
from pdserve.router.http_front.openapi import OpenApi
from pdserve.router.http_front.pooling_http import PoolingHttp
from pdserve.router.http_front.responses_http import ResponsesHttp
from pdserve.router.http_front.tokenization_http import TokenizationHttp, authenticated
from pdserve.router.http_front.transcription_http import TranscriptionHttp
from pdserve.router.openai.chat_choice_writer import ChatChoiceWriter
from pdserve.router.openai.echo import Echo
from pdserve.router.openai.protocol import ChatBody, CompletionBody
from pdserve.router.openai.response_writer import CompletionResponseWriter, error_json
from pdserve.router.requests.answer_reader import with_visible_markers
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import ClientRequest
from pdserve.router.requests.request_scope import REQUEST_ID_HEADER
from pdserve.router.responses.response_store import ResponseStore
from pdserve.router.telemetry.metric_text import without_label
from pdserve.router.tenants.client import Client
from pdserve.text.tokenization.tokenizer import Tokenizer

_PREFLIGHT_AGE_S = 600
"""Time for which browsers keep the answer to a preflight."""
_PERMISSION = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
"""Permissions of clients for a model, in the form of vLLM."""
_HTTP_ERRORS = {
    404: ("there is no such path", "not_found"),
    405: ("the path does not take this method", "method_not_allowed"),
}


class HttpFront:
    """OpenAI's endpoints over one `Inference`."""

    def __init__(self, inference: Inference, responses: ResponseStore) -> None:
        """responses: where those of `/v1/responses` are kept."""
        self._inference = inference
        self._keys = inference.keys
        self._started_at = int(clock.unix_s())
        described = OpenApi()
        routes = [
            *DebugHttp(inference, self._keys).routes,
            *FleetHttp(inference, self._keys).routes,
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET"], name="ping"),
            Route("/ping", self.health, methods=["POST"], name="ping_by_post"),
            Route("/load", self.load, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/ready", self.ready),
            Route("/live", answer_live),
            Route("/version", self.version),
            *described.routes,
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            *PoolingHttp(inference, self._keys).routes,
            *ResponsesHttp(inference, responses).routes,
            *TokenizationHttp(inference, self._keys).routes,
            *TranscriptionHttp(inference).routes,
        ]
        described.describe(routes)
        self.app = Starlette(
            routes=routes,
            middleware=[
                Middleware(AnswersInParts, budget=lambda: inference.bodies.unread),
                *_cors(inference.settings.cors_origins),
            ],
            exception_handlers={
                PdServeError: _on_error,
                HTTPException: _on_http_exception,
                Exception: _on_exception,
            },
        )

    async def health(self, request: Request) -> Response:
        """Status 200 if a request could be served now."""
        healthy = self._inference.healthy
        content = {
            "status": "ok" if healthy else "unavailable",
            "requests": self._inference.admission.num_requests,
            "workers": self._inference.fleet.counts(),
        }
        return json_response(content, 200 if healthy else 503)

    async def load(self, request: Request) -> Response:
        """Number of requests in the router, in vLLM's shape."""
        await self._authenticate(request)
        return json_response({"server_load": self._inference.admission.num_requests})

    async def ready(self, request: Request) -> Response:
        """Status 200 if a request could be served now."""
        return probe_response(self._inference.healthy)

    async def version(self, request: Request) -> Response:
        """The version of pdserve, in vLLM's shape."""
        await self._authenticate(request)
        return json_response({"version": version("pdserve")})

    async def metrics(self, request: Request) -> Response:
        """Metrics for clients; metrics per API key and per worker need an operator's key. Prometheus has a separate port."""
        client = await self._authenticate(request)
        content = await self._inference.telemetry.exposition(by_key=self._keys.needed and client.sees_all)
        if not client.sees_all:
            content = without_label("worker", content)
        return Response(content, headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        client = await self._authenticate(request)
        models = self._inference.models
        cards = [self._model(name) for name in models.base_names(client)]
        adapters = [self._adapter(name) for name in models.adapters(client)]
        return json_response({"object": "list", "data": cards + adapters})

    async def model(self, request: Request) -> Response:
        client = await self._authenticate(request)
        lora_name = self._inference.models.lora_name(name := request.path_params["model"], client)
        return json_response(self._adapter(lora_name) if lora_name else self._model(name))

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatBody)

    async def _authenticate(self, request: Request) -> Client:
        """The client of the request's key. Raises: Unauthenticated."""
        return await authenticated(self._keys, request)

    async def _generate(self, request: Request, kind: type[CompletionBody] | type[ChatBody]) -> Response:
        inference = self._inference
        with inference.telemetry.count_rejections():
            client = await self._authenticate(request)
            call = call_fields(request, inference.settings.limits.request_timeout_s)

            def build(body: CompletionBody | ChatBody) -> tuple[CompletionBody | ChatBody, list[ClientRequest], str]:
                adapted = call._replace(lora_name=inference.models.lora_name(body.model, client))
                defaults = inference.tokenizer.generation_defaults
                if isinstance(body, CompletionBody):
                    requests = body.requests(defaults, adapted, embeds_len=inference.bodies.embeds_len)
                else:
                    requests = body.requests(defaults, adapted, inference.parsers.forced_calls)
                echoed = body.echoed if isinstance(body, ChatBody) else ""
                return body, [with_visible_markers(request, inference.parsers) for request in requests], echoed

            body, requests, echoed = await read_body(request, kind, inference.bodies, build)
            stream = bool(body.stream)
            generation = inference.generation(requests, stream=stream, client=client)
        answer = CompletionResponseWriter(
            request_id=generation.request_id,
            request=generation.request,
            model=requests[0].lora_name or inference.models.base,
            include_usage=body.include_usage,
            include_timeline=asks_for_timeline(request),
            continuous_usage=body.continuous_usage,
            num_logprobs=body.num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            echo=_echo(body, requests, inference.tokenizer),
            echoed=echoed,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            parsed=ChatChoiceWriter.of(requests[0], inference.parsers, include_reasoning=_includes_reasoning(body)),
        )
        return GenerationResponse(generation, answer, inference.bodies, stream=stream)

    def _model(self, name: str) -> dict[str, Any]:
        """The entry of one of the base model's names, in vLLM's shape."""
        limits = self._inference.limits()
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "pdserve",
            # vLLM's path of the folder; a client needs none
            "root": self._inference.models.base,
            "parent": None,
            "max_model_len": limits.max_model_len if limits else None,
            "permission": [{"id": f"modelperm-{name}", "created": self._started_at, **_PERMISSION}],
        }

    def _adapter(self, name: str) -> dict[str, Any]:
        return self._model(name) | {"root": name, "parent": self._inference.models.base}


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Middleware for pages of other origins; none without `cors_origins`. Preflights need no key."""
    if not origins:
        return []
    exposed = (REQUEST_ID_HEADER, TRACEPARENT, "retry-after")
    # clients in browsers send headers of their own, and none of them gives access: keys are not sent by the browser itself
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=exposed,
            max_age=_PREFLIGHT_AGE_S,
        )
    ]


def _includes_reasoning(body: CompletionBody | ChatBody) -> bool:
    return not isinstance(body, ChatBody) or body.include_reasoning is not False


def _echo(body: CompletionBody | ChatBody, requests: Sequence[ClientRequest], tokenizer: Tokenizer) -> Echo | None:
    if not isinstance(body, CompletionBody) or not body.echo:
        return None
    return Echo(
        [request.prompt for request in requests],
        requests[0].sampling_params.n,
        tokenizer,
        truncated=requests[0].truncation is not None,
        alone=body.echoes_alone,
    )


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, PdServeError) else InternalError("internal error"))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    told, code = _HTTP_ERRORS.get(status, ("the request failed", "invalid_request"))
    allowed = ""
    if status == 405:
        headers = {"Allow": _allowed_methods(request)}
        allowed = f"; it takes {headers['Allow']}"
    message = f"{told}: {request.method} {request.url.path:.200}{allowed}"
    return Response(error_json(status, message, code), status, headers=headers, media_type=JSON)


def _allowed_methods(request: Request) -> str:
    """Methods of all routes with the request's path: Starlette names those of the first."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted(method for route in routes for method in route.methods))


async def _on_exception(request: Request, error: Exception) -> Response:
    return error_response(InternalError("internal error; the router's log has the details"))
