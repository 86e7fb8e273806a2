"""A small client of `InferenceService` for the commands."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc

from pdserve.cli.not_reached import NotReached
from pdserve.common.net.public_server import make_public_channel
from pdserve.common.net.rpc import failed_to_shake_hands, from_rpc_error
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.wire.messages import finish_reason_from_wire, moments_from_wire
from pdserve.common.security.tls import ClientTls
from pdserve.common.timeline import Timeline
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2

_NO_CONNECTION = re.compile("failed to connect to all addresses|.*(DNS resolution failed|Domain name not found)")
"""gRPC's text for a connection that was never made; its status is the same as for a lost connection."""


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """One message of a chat."""

    role: str
    content: str
    image_url: str | None = None
    """A picture that precedes the content."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The output that one message of the stream adds."""

    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    timeline: Timeline = field(default_factory=Timeline)


class GrpcClient:
    """`async with GrpcClient(address) as client: async for delta in client.chat([...])`"""

    def __init__(self, address: str, api_key: str | None = None, tls: ClientTls | None = None) -> None:
        self._address = address
        self._channel = make_public_channel(address, tls)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    async def __aenter__(self) -> GrpcClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._channel.close()

    def chat(self, turns: Sequence[ClientMessage], **sampling: float | int | None) -> AsyncIterator[Delta]:
        """Continue a conversation. sampling: fields of `SamplingParams`; None is absent."""
        prompt = inference_pb2.ChatPrompt(messages=map(_message, turns))
        return self._generate(inference_pb2.GenerateRequest(chat=prompt, stream=True), sampling)

    def generate(self, prompt: str, **sampling: float | int | None) -> AsyncIterator[Delta]:
        """Continue a text without a chat template."""
        request = inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text=prompt), stream=True)
        return self._generate(request, sampling)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, sampling: dict[str, float | int | None]
    ) -> AsyncIterator[Delta]:
        """Raises: the router's `PdServeError`; NotReached if no connection was made."""
        for name, value in sampling.items():
            if value is not None:
                setattr(request.sampling, name, value)
        try:
            async for response in self._stub.Generate(request, metadata=self._metadata, timeout=600):
                yield _delta(response)
        except grpc.aio.AioRpcError as error:
            received = from_rpc_error(error)
            if failed_to_shake_hands(received.message):
                hint = "does the router speak TLS, with a certificate of the CA in --ca-file?"
                raise NotReached(f"{received.message}; {hint}") from error
            if received.message.endswith("Connection refused"):
                raise NotReached(f"no router answers at {self._address}: Connection refused") from error
            if _NO_CONNECTION.match(received.message):
                raise NotReached(f"no router answers at {self._address}: {received.message}") from error
            raise received from error


def _message(turn: ClientMessage) -> inference_pb2.ChatMessage:
    if turn.image_url is None:
        return inference_pb2.ChatMessage(role=turn.role, content=turn.content)
    parts = [inference_pb2.ContentPart(image_url=turn.image_url), inference_pb2.ContentPart(text=turn.content)]
    return inference_pb2.ChatMessage(role=turn.role, parts=parts)


def _delta(response: inference_pb2.GenerateResponse) -> Delta:
    timeline = Timeline()
    timeline.merge(moments_from_wire(response.moments))
    finished = response.finish_reason != request_pb2.FINISH_REASON_UNSPECIFIED
    return Delta(
        text=response.text,
        finish_reason=finish_reason_from_wire(response.finish_reason) if finished else None,
        num_prompt_tokens=response.usage.prompt_tokens,
        num_output_tokens=response.usage.completion_tokens,
        num_cached_tokens=response.usage.cached_tokens,
        timeline=timeline,
    )
