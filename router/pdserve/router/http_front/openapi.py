"""`/openapi.json` and `/docs`: the endpoints and the bodies that they parse, as OpenAPI 3.1 and as a page.

The schemas are made from the types that decode requests. Both answers are the same for every deployment, contain no state, and are
served without a key.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.router.http_front.error_response import json_response
from pdserve.router.http_front.fleet_http import ROLE_PATH, RoleBody
from pdserve.router.http_front.page_response import page_response
from pdserve.router.http_front.tokenization_http import DetokenizeBody, TokenizeBody
from pdserve.router.openai.embeddings import EmbeddingBody
from pdserve.router.openai.no_op_fields import IGNORED, NO_OP, RESPONSES_IGNORED, RESPONSES_NO_OP
from pdserve.router.openai.pooling_bodies import RERANK_PATHS, SCORE_PATHS, ClassifyBody, RerankBody, ScoreBody
from pdserve.router.openai.protocol import ChatBody, CompletionBody
from pdserve.router.openai.transcription_body import TranscriptionBody
from pdserve.router.responses.responses_body import ResponsesBody

BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/embeddings": EmbeddingBody,
    "/classify": ClassifyBody,
    **dict.fromkeys(SCORE_PATHS, ScoreBody),
    **dict.fromkeys(RERANK_PATHS, RerankBody),
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    ROLE_PATH: RoleBody,
}
"""Path -> type that decodes its body."""
FORMS: Mapping[str, type[msgspec.Struct]] = {"/v1/audio/transcriptions": TranscriptionBody}
"""Path -> type with the fields of its `multipart/form-data` body."""
OPEN_PATHS = ("/", "/health", "/ping", "/ready", "/live", "/openapi.json", "/docs")
"""Paths that need no API key."""
STREAMED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/audio/transcriptions")
"""Paths that answer with server-sent events if the body requests them."""
PROBE_PATHS = ("/health", "/ping", "/ready")
"""Paths whose answer has the same form with status 503."""
MEDIA_TYPES = {
    "/": "text/html",
    "/docs": "text/html",
    "/metrics": "text/plain",
    "/ready": "text/plain",
    "/live": "text/plain",
}
"""Path -> type of its answer, if that is not JSON."""
ANSWERS: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/completions": ("id", "object", "created", "model", "choices", "usage"),
    "/v1/responses": ("id", "object", "created_at", "model", "status", "output", "usage"),
    "/v1/embeddings": ("id", "object", "created", "model", "data", "usage"),
    "/classify": ("id", "object", "created", "model", "data", "usage"),
    **dict.fromkeys(SCORE_PATHS, ("id", "object", "created", "model", "data", "usage")),
    **dict.fromkeys(RERANK_PATHS, ("id", "model", "results", "usage")),
    "/v1/models": ("object", "data"),
    "/v1/models/{model}": ("id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"),
    "/v1/audio/transcriptions": ("text", "usage"),
    "/tokenize": ("count", "max_model_len", "tokens", "token_strs"),
    "/detokenize": ("prompt",),
    "/health": ("status", "requests", "workers"),
    "/ping": ("status", "requests", "workers"),
    "/load": ("server_load",),
    "/version": ("version",),
}
"""Path -> fields that every answer has; answers of other paths are described by `docs/`."""
_QUESTION = "What is the capital of France?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]
EXAMPLES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 16, "temperature": 0.0},
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0.0, "stop": "."},
    "/v1/responses": {"input": "What is the capital of France?", "max_output_tokens": 16, "temperature": 0.0},
    "/v1/embeddings": {"input": ["Paris", "Rome"], "encoding_format": "float"},
    "/classify": {"input": ["Paris", "Rome"]},
    ROLE_PATH: {"role": "prefill"},
    **{path: {"text_1": _QUESTION, "text_2": ["Paris", "Rome"]} for path in SCORE_PATHS},
    **{path: {"query": _QUESTION, "documents": ["Paris", "Rome"], "top_n": 1} for path in RERANK_PATHS},
    "/tokenize": {"messages": _MESSAGES},
    "/detokenize": {"tokens": [17, 4]},
}
"""Path -> a body that is answered with 200, by a model of the kind that serves the path."""
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_REF = "#/components/schemas/"
_STYLE = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td,th{text-align:left;padding:.2em 1em .2em 0}"


def openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """The description of these routes."""
    _, schemas = msgspec.json.schema_components([*BODIES.values(), *FORMS.values()], ref_template=_REF + "{name}")
    for title, schema in schemas.items():
        own = title == ResponsesBody.__name__
        ignored, neutral = (RESPONSES_IGNORED, RESPONSES_NO_OP) if own else (IGNORED, NO_OP)
        for name, field in schema.get("properties", {}).items():
            if name in ignored:
                field["description"] = "accepted, without effect"
            elif name in neutral:
                field["description"] = "accepted only with a value that changes nothing"
    for kind in FORMS.values():
        schemas[kind.__name__]["properties"]["file"] = {"type": "string", "format": "binary"}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(path, route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": "v1"},
        "paths": paths,
        "components": {
            "schemas": schemas | {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": route.name, "responses": _responses(path)}
    if path not in OPEN_PATHS:
        operation["security"] = [{"key": []}, {}]
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if (kind := BODIES.get(path)) is not None:
        content = {"application/json": {"schema": {"$ref": _REF + kind.__name__}, "example": EXAMPLES[path]}}
        operation["requestBody"] = {"required": True, "content": content}
    if (form := FORMS.get(path)) is not None:
        content = {"multipart/form-data": {"schema": {"$ref": _REF + form.__name__}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(path: str) -> dict[str, Any]:
    schema = {"schema": {"type": "object", "required": list(ANSWERS[path])}} if path in ANSWERS else {}
    answer: dict[str, Any] = {
        "description": "the answer",
        "content": {MEDIA_TYPES.get(path, "application/json"): schema},
    }
    if path in STREAMED_PATHS:
        answer["content"]["text/event-stream"] = {}
    error = {"description": "an error", "content": {"application/json": {"schema": {"$ref": _REF + "Error"}}}}
    responses = {"200": answer, "4XX": error, "5XX": error}
    return responses | {"503": answer} if path in PROBE_PATHS else responses


def page(description: Mapping[str, Any]) -> str:
    """The description as HTML, which needs neither scripts nor other files."""
    parts = [f"<!doctype html><meta charset=utf-8><title>pdserve</title><style>{_STYLE}</style><h1>pdserve</h1>"]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            if "requestBody" in operation:
                [content] = operation["requestBody"]["content"].values()
                parts.append(_table(description, content["schema"]))
    return "\n".join(parts)


def _table(description: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    schema = description["components"]["schemas"][schema["$ref"].removeprefix(_REF)]
    rows = [
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(_kind(field))}"
        f"<td>{'required' if name in schema.get('required', ()) else html.escape(field.get('description', ''))}"
        for name, field in schema["properties"].items()
    ]
    return "<table><tr><th>field<th>type<th>" + "".join(rows) + "</table>"


def _kind(field: Mapping[str, Any]) -> str:
    """A field's type in words."""
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"] if option != {"type": "null"})
    if "$ref" in field:
        return str(field["$ref"]).removeprefix(_REF)
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    inner = f" of {_kind(field['items'])}" if isinstance(field.get("items"), Mapping) and field["items"] else ""
    return f"{field.get('type', 'any')}{inner}"


class OpenApi:
    """The two routes. `describe` them and all others once."""

    def __init__(self) -> None:
        self._routes: tuple[Route, ...] = ()
        self.routes = [Route("/openapi.json", self.description), Route("/docs", self.docs)]

    def describe(self, routes: Iterable[Route]) -> None:
        """Set the routes that both answers describe."""
        self._routes = tuple(routes)

    @functools.cached_property
    def _answers(self) -> tuple[Response, Response]:
        made = openapi(self._routes)
        return json_response(made), page_response(page(made))

    async def description(self, request: Request) -> Response:
        return self._answers[0]

    async def docs(self, request: Request) -> Response:
        return self._answers[1]
