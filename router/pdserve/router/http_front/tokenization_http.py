"""`/tokenize` and `/detokenize`, in vLLM's formats; they have limits and do not delay generations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.common.errors import Cancelled, DeadlineExceeded, InvalidRequest
from pdserve.common.request.sampling_params import verify_token_ids
from pdserve.common.tasks.first_done import first_of
from pdserve.router.bodies.request_body import read_body
from pdserve.router.http_front.generation_response import until_disconnect
from pdserve.router.http_front.stored_answer import StoredAnswer
from pdserve.router.requests.fields.chat_fields import ChatFields
from pdserve.router.requests.fields.tools import ToolBody
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import Limits
from pdserve.router.tenants.api_keys import ApiKeys
from pdserve.router.tenants.client import Client
from pdserve.text.parsers.tool_call_parser import HERMES_CALLS
from pdserve.text.prompt import ChatInput, max_text_bytes, verify_text_bytes
from pdserve.text.tokenization.tokenizer import Tokenizer

MAX_TOKENS = 5 << 17
"""Most tokens to detokenize, unless the model's length is larger; the library temporarily takes about 60 bytes per token."""
_DETOKENIZED_BYTES, _TOKENIZED_BYTES = 40, 16
"""Memory per token, and per character, of a request and its answer."""
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
        with self._inference.telemetry.count_rejections():
            client = await authenticated(self._keys, request)
            body = await read_body(
                request, TokenizeBody, self._inference.bodies, lambda body: self._verified(body, client)
            )
            limits = self._inference.limits()
        num_bytes = _TOKENIZED_BYTES * len(body.prompt or "")
        return self._answer(request, client, num_bytes, lambda: self._tokenized(body, limits))

    def _tokenized(self, body: TokenizeBody, limits: Limits | None) -> bytes:
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
        with self._inference.telemetry.count_rejections():
            client = await authenticated(self._keys, request)
            body = await read_body(
                request, DetokenizeBody, self._inference.bodies, lambda body: self._verified(body, client)
            )
            limits = self._inference.limits()
        num_bytes = _DETOKENIZED_BYTES * len(body.tokens)
        return self._answer(request, client, num_bytes, lambda: self._detokenized(body, limits))

    def _detokenized(self, body: DetokenizeBody, limits: Limits | None) -> bytes:
        tokenizer = self._inference.tokenizer
        verify_token_ids("tokens", body.tokens, limits.vocab_size if limits else tokenizer.vocab_size)
        return msgspec.json.encode({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

    def _answer(self, request: Request, client: Client, num_bytes: int, answer: Callable[[], bytes]) -> Response:
        """The response with the result of `answer`, for which there is room before it is made. num_bytes: of all that it takes."""

        async def load() -> bytes:
            with self._inference.telemetry.count_rejections():
                return await self._aside(request, client, answer)

        bodies, timeout_s = self._inference.bodies, self._inference.settings.request_timeout_s
        return StoredAnswer(bodies.unread, max(_LEAST_BYTES, num_bytes), timeout_s, load)

    async def _aside(self, request: Request, client: Client, answer: Callable[[], bytes]) -> bytes:
        """Result of `answer`. Raises: exceptions of `answer`; Overloaded; DeadlineExceeded; Cancelled if the client
        disconnected."""
        timeout_s = self._inference.settings.request_timeout_s
        answering = asyncio.ensure_future(self._inference.preparation.in_background_pool(answer, client))
        leaving = asyncio.ensure_future(until_disconnect(request.receive))
        async with first_of(answering, leaving, timeout_s=timeout_s):
            if answering.done():
                return answering.result()
            if leaving.done():
                raise Cancelled("the client left")
        raise DeadlineExceeded(f"the request was not done within {timeout_s:g} s")


def _any_number(num_tokens: int) -> None:
    """Accept any number of tokens: a client may ask by how much a text is too long."""
