"""`/tokenize` and `/detokenize`, in vLLM's formats, with limits that keep them from delaying generation."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.errors import Cancelled, DeadlineExceeded, InvalidRequest
from pdserve.common.net.body_budget import BodyRoom
from pdserve.common.request.sampling_params import verify_token_ids
from pdserve.common.tasks.first_done import first_of
from pdserve.router.bodies.request_body import most_bytes, read_body
from pdserve.router.http_front.generation_response import until_disconnect
from pdserve.router.http_front.stored_answer import StoredAnswer
from pdserve.router.requests.fields.chat_fields import ChatFields
from pdserve.router.requests.fields.tools import ToolBody
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import ServedLimits
from pdserve.router.tenants.api_keys import ApiKeys
from pdserve.router.tenants.client import Client
from pdserve.text.parsers.tool_call_parser import HERMES_CALLS
from pdserve.text.prompt import ChatInput, max_text_bytes, verify_text_bytes
from pdserve.text.tokenization.tokenizer import Tokenizer

MAX_TOKENS = 5 << 17
"""Most tokens to detokenize, or the model's length if that is larger; the library temporarily takes about 60 bytes per token."""
_DETOKENIZED_BYTES, _TOKEN_BYTES = 10, 40
"""Memory of token ids and their answer, per byte of the body, then per token once they are parsed; `_TEXT_BYTES` refines it."""
_TOKENIZED_BYTES = 16
"""Memory per byte of a body with a text, and of its answer."""
_TEXT_BYTES = 3
"""Memory per byte of the detokenized text, which exists also as JSON."""
_FEW_TOKENS = 1 << 12
_LEAST_BYTES = 1024
MAX_TOKEN_STRS = 1 << 18
"""Most tokens for which strings are returned: a string takes more than 50 bytes of memory, a token's id 8."""

_OF_MESSAGES = ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "tools")
"""Fields of `TokenizeBody` that need messages."""


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt; false for messages, whose template adds them."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    tools: list[ToolBody] | None = None
    """For the chat template, as in a chat."""
    return_token_strs: bool | None = None

    def verify(self, model_len: int) -> None:
        """Raises: InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            given = "neither is given" if self.prompt is None else "both are given"
            raise InvalidRequest(f"one of prompt and messages is needed, {given}", "prompt")
        if self.messages is None:
            for field in _OF_MESSAGES:
                if getattr(self, field) is not None:
                    raise InvalidRequest(f"{field} needs messages, but prompt is given", field)
        else:
            self._chat(self.messages)

    def _chat(self, messages: list[dict[str, Any]]) -> ChatInput:
        """Raises: InvalidRequest."""
        given = {field: getattr(self, field) for field in (*_OF_MESSAGES, "add_special_tokens")}
        prompt, _ = ChatFields(messages=messages, **given).prompt(HERMES_CALLS)
        return prompt

    def token_ids(self, tokenizer: Tokenizer, max_bytes: int) -> list[int]:
        """Token ids of prompt or messages. max_bytes: limit of the text. Raises: InvalidRequest, also for errors of the chat
        template."""
        if self.messages is None:
            prompt = self.prompt or ""
            verify_text_bytes(prompt, max_bytes, "prompt")
            add_special_tokens = self.add_special_tokens is not False
            return tokenizer.encode(prompt, add_special_tokens=add_special_tokens, count=_any_number)
        chat = self._chat(self.messages)
        _, token_ids = tokenizer.encode_chat(
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            variables=chat.template_variables,
            tools=chat.tools or None,
            add_special_tokens=chat.add_special_tokens,
            verify=lambda text: verify_text_bytes(text, max_bytes, "messages"),
            count=_any_number,
        )
        return token_ids


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None

    def verify(self, model_len: int) -> None:
        """Raises: InvalidRequest."""
        if len(self.tokens) > (most := max(MAX_TOKENS, model_len)):
            raise InvalidRequest(
                f"tokens has {len(self.tokens)} entries, at most {most} are detokenized at once", "tokens"
            )


B = TypeVar("B", TokenizeBody, DetokenizeBody)
T = TypeVar("T")


async def authenticated(keys: ApiKeys, request: Request) -> Client:
    """The client of the request's key. Raises: Unauthenticated, InvalidRequest."""
    address = request.client.host if request.client is not None else ""
    return await keys.authenticate(request.headers.getlist("authorization"), address)


class TokenizationHttp:
    """Endpoints that need no worker."""

    def __init__(self, inference: Inference, keys: ApiKeys) -> None:
        self._inference = inference
        self._keys = keys
        self.routes = [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    def _verified(self, body: B, client: Client) -> B:
        """Raises: NotFound, InvalidRequest."""
        self._inference.models.lora_name(body.model, client)
        body.verify(self._inference.bodies.model_len)
        return body

    async def tokenize(self, request: Request) -> Response:
        client = await self._client(request)

        async def load(room: BodyRoom) -> bytes:
            reading = read_body(
                request, TokenizeBody, self._inference.bodies, lambda body: self._verified(body, client)
            )
            body = await room.read(reading, None)
            limits = self._inference.limits()
            return await self._aside(request, client, lambda: self._tokenized(body, limits))

        return self._answer(request, client, _TOKENIZED_BYTES, load)

    def _tokenized(self, body: TokenizeBody, limits: ServedLimits | None) -> bytes:
        tokenizer = self._inference.tokenizer
        token_ids = body.token_ids(tokenizer, max_text_bytes(self._inference.bodies.model_len))
        if body.return_token_strs and len(token_ids) > MAX_TOKEN_STRS:
            raise InvalidRequest(
                f"return_token_strs is true, but there are {len(token_ids)} tokens, at most {MAX_TOKEN_STRS} are returned "
                "as strings",
                "return_token_strs",
            )
        return msgspec.json.encode(
            {
                "count": len(token_ids),
                "max_model_len": limits.max_model_len if limits else None,
                "tokens": token_ids,
                "token_strs": tokenizer.token_strings(token_ids) if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        client = await self._client(request)

        async def load(room: BodyRoom) -> bytes:
            reading = read_body(
                request, DetokenizeBody, self._inference.bodies, lambda body: self._token_ids(body, client)
            )
            token_ids = await room.read(reading, None)
            room.shrink(_TOKEN_BYTES * len(token_ids))
            if len(token_ids) > _FEW_TOKENS:
                num_bytes = await self._aside(request, client, lambda: self._num_text_bytes(token_ids))
                await room.grow(_TEXT_BYTES * num_bytes)
            return await self._aside(request, client, lambda: self._detokenized(token_ids))

        return self._answer(request, client, _DETOKENIZED_BYTES, load)

    def _token_ids(self, body: DetokenizeBody, client: Client) -> array[int]:
        """The body's token ids at 4 bytes each while they wait; a list takes ten times as much. Raises: as `_verified`."""
        tokens = self._verified(body, client).tokens
        limits = self._inference.limits()
        verify_token_ids("tokens", tokens, limits.vocab_size if limits else self._inference.tokenizer.vocab_size)
        return array("I", tokens)

    def _num_text_bytes(self, token_ids: array[int]) -> int:
        """Bytes of the text of all tokens. Raises: InvalidRequest if they exceed `max_answer_bytes`."""
        piece = self._inference.tokenizer.token_piece
        num_bytes = sum(count * len(piece(token_id)) for token_id, count in Counter(token_ids).items())
        if num_bytes > (most := self._inference.settings.limits.max_answer_bytes):
            raise InvalidRequest(
                f"tokens has a text of {num_bytes} bytes, at most {most} are answered (max_answer_bytes)", "tokens"
            )
        return num_bytes

    def _detokenized(self, token_ids: array[int]) -> bytes:
        return msgspec.json.encode({"prompt": self._inference.tokenizer.decode(token_ids, skip_special_tokens=False)})

    async def _client(self, request: Request) -> Client:
        """Raises: Unauthenticated."""
        with self._inference.telemetry.count_rejections():
            return await authenticated(self._keys, request)

    def _answer(
        self, request: Request, client: Client, bytes_each: int, load: Callable[[BodyRoom], Awaitable[bytes]]
    ) -> Response:
        """The response with the result of `load`, whose memory is reserved before the body is read, as the parsed body is larger.
        bytes_each: memory per byte of the body, for all that is held."""
        bodies, counted = self._inference.bodies, self._inference.telemetry.count_rejections

        async def counted_load(room: BodyRoom) -> bytes:
            with counted(client):
                return await load(room)

        with counted(client):
            num_bytes = bytes_each * most_bytes(request, bodies)
        return StoredAnswer(bodies.aside, max(_LEAST_BYTES, num_bytes), bodies.timeout_s, counted_load)

    async def _aside(self, request: Request, client: Client, answer: Callable[[], T]) -> T:
        """Result of `answer`. Raises: exceptions of `answer`; Overloaded; DeadlineExceeded; Cancelled if the client
        disconnected."""
        timeout_s = self._inference.settings.limits.request_timeout_s
        answering = asyncio.ensure_future(self._inference.preparation.in_background_pool(answer, client))
        leaving = asyncio.ensure_future(until_disconnect(request.receive))
        async with first_of(answering, leaving, timeout_s=timeout_s):
            if answering.done():
                return answering.result()
            if leaving.done():
                raise Cancelled("the client left")
        raise DeadlineExceeded(f"the request was not done within {timeout_s:g} s")


def _any_number(num_tokens: int) -> None:
    """Accept any number of tokens: a client may want to learn by how much a text is too long."""
