"""`EmbedServicer`: the part of `InferenceService` that answers with embeddings."""

from __future__ import annotations

from typing import Any

import grpc.aio

from pdserve.common.errors import InvalidRequest
from pdserve.common.prepared_request import verify_client_request_id
from pdserve.common.rpc import MAX_MESSAGE_BYTES, metadata_of
from pdserve.common.timeline import Timeline
from pdserve.common.trace_headers import valid_trace_headers
from pdserve.common.wire import pooling_from_wire
from pdserve.router.client import Client
from pdserve.router.failed_attempts import peer_address
from pdserve.router.inference import Inference
from pdserve.router.preparation import EmbeddingRequest
from pdserve.router.request_run import Usage
from pdserve.router.unknown_fields import refuse_unknown_fields
from pdserve.text.prompt import TextInput, TokenInput
from pdserve.v1 import inference_pb2, request_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceServicer

REQUEST_ID_KEY = "x-request-id"
MAX_NUMBERS = MAX_MESSAGE_BYTES // 4 - 16_384
"""In the embeddings of one answer: its message takes 4 bytes each, and some for what is around them."""
Context = grpc.aio.ServicerContext[Any, Any]


class EmbedServicer(InferenceServiceServicer):
    """Serves `Embed`."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._keys = inference.keys

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:
        with self._inference.telemetry.refusals():
            metadata = metadata_of(context)
            client = await self._client(context)
            refuse_unknown_fields(request)
            self._inference.check_model(request.model)
            embedding = self._inference.embedding(
                self._embedding_requests(request, metadata, context.time_remaining()), field="inputs", client=client
            )
        vectors = await embedding.results()
        await context.send_initial_metadata(((REQUEST_ID_KEY, embedding.request_id),))
        return inference_pb2.EmbedResponse(
            request_id=embedding.request_id,
            embeddings=[inference_pb2.Embedding(values=vector) for vector in vectors],
            usage=usage_message(embedding.usage),
            moments=moment_messages(embedding.timeline),
        )

    async def _client(self, context: Context) -> Client:
        """Whose key the call shows. Raises: Unauthenticated."""
        authorization = metadata_of(context).get("authorization")
        return await self._keys.authenticate(authorization, peer_address(context.peer()))

    def _embedding_requests(
        self, request: inference_pb2.EmbedRequest, metadata: dict[str, str], remaining_s: float | None
    ) -> list[EmbeddingRequest]:
        verify_client_request_id(request.client_request_id)
        pooling = pooling_from_wire(request.pooling)
        num_numbers = pooling.num_dimensions(self._inference.hidden_size()) * len(request.inputs)
        if num_numbers > MAX_NUMBERS:
            raise InvalidRequest(
                f"inputs has {len(request.inputs)} entries: embeddings of {num_numbers} numbers do not fit into one "
                f"message, {MAX_NUMBERS} do",
                "inputs",
            )
        return [
            EmbeddingRequest(
                prompt=_input(entry, f"inputs[{place}]"),
                field=f"inputs[{place}].{entry.WhichOneof('input')}",
                pooling=pooling,
                cache_salt=request.cache_salt or None,
                timeout_s=self._timeout_s(remaining_s),
                trace_headers=valid_trace_headers(metadata),
                client_request_id=request.client_request_id,
            )
            for place, entry in enumerate(request.inputs)
        ]

    def _timeout_s(self, remaining_s: float | None) -> float:
        """remaining_s: of the call's deadline; None for a call without one."""
        timeout_s = self._inference.settings.request_timeout_s
        return timeout_s if remaining_s is None else min(remaining_s, timeout_s)


def _input(entry: inference_pb2.EmbedInput, field: str) -> TextInput | TokenInput:
    match entry.WhichOneof("input"):
        case "text":
            return TextInput(entry.text.text)
        case "tokens":
            return TokenInput(list(entry.tokens.token_ids))
        case _:
            raise InvalidRequest(f"{field} is missing: one of text and tokens is needed", "inputs")


def usage_message(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def moment_messages(timeline: Timeline) -> list[request_pb2.Moment]:
    return [request_pb2.Moment(name=name, unix_ns=unix_ns) for name, unix_ns in timeline.moments_unix_ns.items()]
