"""End points of a benchmark: OpenAI completions and chat over HTTP, and `InferenceService` over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
import httpx
import msgspec

from pdserve.common.net.public_server import make_public_channel
from pdserve.common.net.rpc import MAX_STREAMS_PER_CONNECTION
from pdserve.common.request.generation_request import TokenId
from pdserve.common.security.tls import ClientTls
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2

MAX_ERROR_CHARS = 300
MAX_EVENT_BYTES = 16 << 20
"""Limit of one line of a stream."""


class RequestFailed(Exception):
    """A request got no complete answer. `kind` is short and equal for equal failures; `args[0]` has the details."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of a request: token ids, or the alternating texts of client and server."""

    name: str
    """The request's, as its trace has it."""
    token_ids: list[int] | None
    texts: list[str]
    """Empty if there are token ids."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message of a stream."""

    text: str = ""
    has_output: bool = False
    """True if the chunk has tokens: a special token has no text, and the first chunk of a chat may have only a role."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    """Empty where the API does not give them."""


class Endpoint(Protocol):
    """One API of one server."""

    def stream(self, prompt: Prompt, output_tokens: int) -> AsyncIterator[Chunk]:
        """Send one request. Raises: RequestFailed."""
        ...

    async def close(self) -> None: ...


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    role: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: tuple[TokenId, ...] | None = None


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


def tls_options(tls: ClientTls | None) -> dict[str, Any]:
    """Arguments of an httpx client for these certificates."""
    return {} if tls is None else {"verify": tls.context}


class OpenAIEndpoint:
    """`/v1/completions`, or `/v1/chat/completions` where `chat`."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        chat: bool,
        api_key: str | None,
        extra_body: dict[str, Any],
        tls: ClientTls | None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=None, limits=limits, trust_env=False, **tls_options(tls)
        )
        self._chat = chat
        self._body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **extra_body}
        self._decoder = msgspec.json.Decoder(_Event)

    async def close(self) -> None:
        await self._client.aclose()

    async def stream(self, prompt: Prompt, output_tokens: int) -> AsyncIterator[Chunk]:
        body = self._body | {"max_tokens": output_tokens}
        if self._chat:
            roles = ("user", "assistant")
            body["messages"] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(prompt.texts)]
        else:
            body["prompt"] = prompt.token_ids if prompt.token_ids is not None else "".join(prompt.texts)
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        try:
            async with self._client.stream("POST", path, json=body) as reply:
                if reply.status_code != httpx.codes.OK:
                    raise RequestFailed(
                        f"HTTP {reply.status_code}", (await reply.aread())[:MAX_ERROR_CHARS].decode("utf-8", "replace")
                    )
                is_done = False
                async for line in _lines(reply):
                    if line == b"data: [DONE]":
                        is_done = True
                    elif line.startswith(b"data: "):
                        yield self._chunk(line[6:])
                if not is_done:
                    raise RequestFailed("stream ended early", "the stream ended without [DONE]")
        except httpx.HTTPError as error:
            raise RequestFailed(type(error).__name__, str(error)) from error

    def _chunk(self, data: bytes) -> Chunk:
        try:
            event = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailed("unreadable event", f"{error}: {data[:MAX_ERROR_CHARS]!r}") from error
        if event.error is not None:
            raise RequestFailed("error in the stream", str(event.error)[:MAX_ERROR_CHARS])
        text, has_output, token_ids = "", False, tuple[int, ...]()
        if event.choices:
            choice = event.choices[0]
            has_output = True
            token_ids = choice.token_ids or ()
            if (delta := choice.delta) is None:
                text = choice.text or ""
            else:
                text = delta.content or ""
                is_role = delta.role is not None and not (text or delta.reasoning_content or delta.tool_calls)
                has_output = not is_role or choice.finish_reason is not None
        if (usage := event.usage) is None:
            return Chunk(text, has_output, token_ids=token_ids)
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else None
        return Chunk(text, has_output, usage.prompt_tokens, usage.completion_tokens, cached, token_ids)


async def _lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of a stream of server-sent events, as they arrive. Raises: RequestFailed."""
    rest = b""
    async for data in reply.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
        if len(rest) > MAX_EVENT_BYTES:
            raise RequestFailed("unreadable event", f"a line has more than {MAX_EVENT_BYTES} bytes")
    if rest:
        yield rest


class GrpcEndpoint:
    """`InferenceService.Generate` of a router."""

    def __init__(self, address: str, *, api_key: str | None, tls: ClientTls | None, sampling: dict[str, Any]) -> None:
        self._address = address
        self._tls = tls
        self._channels: dict[grpc.aio.Channel, int] = {}
        """Channel -> its open calls, at most `MAX_STREAMS_PER_CONNECTION`, which is the router's limit."""
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._sampling = sampling

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    @contextlib.contextmanager
    def _channel(self) -> Iterator[grpc.aio.Channel]:
        """A channel on which one more call can be open now."""
        free = (channel for channel, num_open in self._channels.items() if num_open < MAX_STREAMS_PER_CONNECTION)
        channel = next(free, None) or make_public_channel(self._address, self._tls)
        self._channels[channel] = self._channels.get(channel, 0) + 1
        try:
            yield channel
        finally:
            self._channels[channel] -= 1

    async def stream(self, prompt: Prompt, output_tokens: int) -> AsyncIterator[Chunk]:
        with self._channel() as channel:
            async for chunk in self._stream_on(channel, prompt, output_tokens):
                yield chunk

    async def _stream_on(self, channel: grpc.aio.Channel, prompt: Prompt, output_tokens: int) -> AsyncIterator[Chunk]:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(
            sampling=request_pb2.SamplingParams(max_tokens=output_tokens, **self._sampling), stream=True
        )
        if prompt.token_ids is not None:
            request.tokens.token_ids.extend(prompt.token_ids)
        else:
            request.text.text = "".join(prompt.texts)
        try:
            async for message in stub.Generate(request, metadata=self._metadata):
                usage = message.usage if message.HasField("usage") else None
                yield Chunk(
                    message.text,
                    bool(message.token_ids or message.text),
                    usage.prompt_tokens if usage else None,
                    usage.completion_tokens if usage else None,
                    usage.cached_tokens if usage else None,
                    tuple(message.token_ids),
                )
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name, error.details() or "") from error
