"""`/v1/responses`: OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdserve.common.errors import InvalidRequest
from pdserve.common.net.body_budget import BodyRoom
from pdserve.router.bodies.request_body import body_bytes, parse_body, shown, verify_num_values
from pdserve.router.http_front.error_response import json_response
from pdserve.router.http_front.generation_response import GenerationResponse, asks_for_timeline, call_fields
from pdserve.router.http_front.stored_answer import StoredAnswer
from pdserve.router.http_front.tokenization_http import authenticated
from pdserve.router.openai.chat_choice_writer import ChatChoiceWriter
from pdserve.router.requests.answer_reader import with_visible_markers
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.responses.input_items import as_items, page_of_items
from pdserve.router.responses.response_store import (
    ResponseStore,
    StoredResponse,
    is_response_id,
    most_bytes,
    not_stored,
)
from pdserve.router.responses.responses_body import ResponsesBody
from pdserve.router.responses.responses_writer import ResponsesWriter, fixed_fields
from pdserve.router.tenants.client import Client

_LIMIT = re.compile(r"[1-9][0-9]?|100")
_CONTINUED_AT_ONCE = 4
"""Stored conversations that are decoded at the same time, since their size is not that of the body that names them."""


class _Prepared(NamedTuple):
    """A body and what is made of it once."""

    body: ResponsesBody
    request: ClientRequest
    fixed: bytes
    """The fields of the response that repeat the body."""
    conversation: bytes
    """The input after that of earlier responses, a JSON list; empty if the response is not to be stored."""
    num_items: int


class ResponsesHttp:
    """The endpoints of responses over one `Inference`."""

    def __init__(self, inference: Inference, store: ResponseStore) -> None:
        self._inference = inference
        self._keys = inference.keys
        self._store = store
        self._continued = asyncio.Semaphore(_CONTINUED_AT_ONCE)
        self.routes = [
            Route("/v1/responses", self.create, methods=["POST"]),
            # further paths of OpenAI's, which would be ids
            *(Route(f"/v1/responses/{name}", _no_path) for name in ("input_tokens", "compact")),
            Route("/v1/responses/{id}", self.retrieve, methods=["GET"]),
            Route("/v1/responses/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/input_items", self.input_items, methods=["GET"]),
        ]

    async def create(self, request: Request) -> Response:
        inference = self._inference
        with inference.telemetry.count_rejections():
            client = await authenticated(self._keys, request)
            prepared = await self._prepared(request, client)
            stream = bool(prepared.body.stream)
            generation = inference.generation([prepared.request], stream=stream, client=client)
        answer = ResponsesWriter(
            generation.request_id,
            generation.request,
            prepared.fixed,
            parsed=ChatChoiceWriter.of(prepared.request, inference.parsers, include_reasoning=True),
            include_timeline=asks_for_timeline(request),
        )

        async def keep() -> None:
            stored = answer.stored(prepared.conversation, prepared.num_items)
            await self._store.put(client.tenant, answer.response_id, stored)

        before_end = keep if prepared.conversation else None
        return GenerationResponse(generation, answer, inference.bodies, stream=stream, before_end=before_end)

    async def retrieve(self, request: Request) -> Response:
        _verify_query(request, {"stream": ("false",)})
        client, response_id = await authenticated(self._keys, request), request.path_params["id"]

        async def load(_: BodyRoom) -> bytes:
            return (await self._stored(client, response_id)).response

        return self._answer(load)

    async def delete(self, request: Request) -> Response:
        client = await authenticated(self._keys, request)
        response_id = request.path_params["id"]
        if not is_response_id(response_id) or not await self._store.delete(client.tenant, response_id):
            raise not_stored(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        _verify_query(request, {"order": ("asc", "desc"), "limit": None, "after": None})
        client, response_id = await authenticated(self._keys, request), request.path_params["id"]
        limit = request.query_params.get("limit", "20")
        if not _LIMIT.fullmatch(limit):
            raise InvalidRequest(f"limit is {shown(limit)}, 1 to 100 is needed", "limit")
        is_newest_first = request.query_params.get("order", "desc") == "desc"
        after = request.query_params.get("after")

        def page(stored: StoredResponse) -> bytes:
            items = msgspec.json.decode(stored.items)[: stored.num_input]
            return msgspec.json.encode(
                page_of_items(response_id, items, limit=int(limit), after=after, is_newest_first=is_newest_first)
            )

        async def load(_: BodyRoom) -> bytes:
            stored = await self._stored(client, response_id)
            return await self._inference.bodies.in_background_pool(len(stored.items), lambda: page(stored))

        return self._answer(load)

    def _answer(self, load: Callable[[BodyRoom], Awaitable[bytes]]) -> StoredAnswer:
        settings = self._inference.settings
        return StoredAnswer(
            self._inference.bodies.unread, most_bytes(settings), settings.limits.request_timeout_s, load
        )

    async def _prepared(self, request: Request, client: Client) -> _Prepared:
        """Raises: errors of `body_bytes`; InvalidRequest; NotFound for a response that is not stored."""
        bodies, call = self._inference.bodies, call_fields(request, self._inference.settings.limits.request_timeout_s)
        async with body_bytes(request, bodies) as data, contextlib.AsyncExitStack() as context:
            body = await bodies.in_background_pool(len(data), lambda: self._parsed(data, client))
            previous = None
            if body.previous_response_id is not None:
                await context.enter_async_context(self._continued)
                previous = await self._previous(client, body.previous_response_id)
            num_bytes = len(data) + (len(previous.items) if previous is not None else 0)
            return await bodies.in_background_pool(num_bytes, lambda: self._built(body, call, previous))

    def _parsed(self, data: bytes, client: Client) -> ResponsesBody:
        bodies = self._inference.bodies
        body = parse_body(data, ResponsesBody, bodies.model_len, bodies.ignored)
        self._inference.models.lora_name(body.model, client)
        body.verify()
        return body

    async def _previous(self, client: Client, response_id: str) -> StoredResponse:
        """Raises: NotFound; PeerError; InvalidRequest if the conversation is longer than a body may be."""
        stored = await self._stored(client, response_id)
        self._verify_num_bytes(len(stored.items))
        return stored

    def _verify_num_bytes(self, num_bytes: int) -> None:
        if num_bytes > (limit := self._inference.bodies.max_request_bytes):
            raise InvalidRequest(
                f"the conversation of previous_response_id and input have {num_bytes} bytes, at most {limit} are allowed "
                "(max_request_bytes)",
                "previous_response_id",
            )

    def _built(self, body: ResponsesBody, call: CallFields, previous: StoredResponse | None) -> _Prepared:
        """Raises: InvalidRequest."""
        inference = self._inference
        before: list[dict[str, Any]] = msgspec.json.decode(previous.items) if previous is not None else []
        asked = body.request(
            inference.tokenizer.generation_defaults,
            call._replace(lora_name=inference.models.lora_name(body.model)),
            before,
            inference.bodies.ignored,
            inference.parsers.forced_calls,
        )
        items, conversation = as_items(body.input), b""
        if previous is not None or body.store is not False:
            conversation = msgspec.json.encode(items)
        if previous is not None:
            conversation = previous.items[:-1] + b"," + conversation[1:]
            self._verify_num_bytes(len(conversation))
            # a request that continues it decodes all of it
            verify_num_values(conversation, inference.bodies.model_len, "previous_response_id")
        return _Prepared(
            body,
            with_visible_markers(asked, inference.parsers),
            fixed_fields(body, asked, asked.lora_name or inference.models.base),
            conversation if body.store is not False else b"",
            len(before) + len(items),
        )

    async def _stored(self, client: Client, response_id: str) -> StoredResponse:
        """Raises: NotFound; PeerError if the store cannot be reached."""
        stored = await self._store.get(client.tenant, response_id) if is_response_id(response_id) else None
        if stored is None:
            raise not_stored(response_id)
        return stored


class _NoPath:
    """Takes any method, as an endpoint that is a function would not."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(404)


_no_path = _NoPath()


def _verify_query(request: Request, known: dict[str, Collection[str] | None]) -> None:
    """known: parameter -> its values; None for any. Raises: InvalidRequest for another parameter or value."""
    for name, value in request.query_params.items():
        if name not in known:
            raise InvalidRequest(f"{shown(name)} is not a parameter of {request.url.path:.120}", name[:80])
        if (values := known[name]) is not None and value not in values:
            raise InvalidRequest(f"{name} is {shown(value)}, only {' and '.join(values)} are served", name)
