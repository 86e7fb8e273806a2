"""`EmbedServicer`: the part of `InferenceService` that answers with embeddings."""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import TypedDict, TypeVar, cast

from pdserve.common.errors import InvalidRequest
from pdserve.common.method_handler import Context
from pdserve.common.net.rpc import metadata_of
from pdserve.common.request.generation_request import verify_client_request_id
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.trace_headers import valid_trace_headers
from pdserve.common.request.wire.params_wire import pooling_from_wire
from pdserve.common.timeline import Timeline
from pdserve.router.grpc_front.whole_answer import room_for, write_whole
from pdserve.router.requests.fields.request_limits import MAX_EMBEDDING_INPUTS
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.requests.usage import Usage
from pdserve.router.tenants.client import ASKING, Client
from pdserve.text.prompt import TextInput, TokenInput, Truncation
from pdserve.v1 import inference_pb2, request_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceServicer

R = TypeVar("R", inference_pb2.EmbedRequest, inference_pb2.ClassifyRequest, inference_pb2.ScoreRequest)
A = TypeVar("A", inference_pb2.EmbedResponse, inference_pb2.ClassifyResponse, inference_pb2.ScoreResponse)
T = TypeVar("T")
CALLER: ContextVar[Client] = ContextVar("caller")
"""The authenticated client of this task's call."""


def caller() -> Client:
    """The client of this task's call; later refusals in this task are attributed to it."""
    client = CALLER.get()
    ASKING.set(client)
    return client


def call_fields(inference: Inference, context: Context, client_request_id: str) -> CallFields:
    """The time of a call is the rest of its own deadline, at most `request_timeout_s`. Raises: InvalidRequest."""
    verify_client_request_id(client_request_id)
    remaining_s, timeout_s = context.time_remaining(), inference.settings.limits.request_timeout_s
    timeout_s = timeout_s if remaining_s is None else min(remaining_s, timeout_s)
    return CallFields(timeout_s, valid_trace_headers(metadata_of(context)), client_request_id)


def truncation_of(
    request: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest,
) -> Truncation | None:
    """Raises: InvalidRequest."""
    return Truncation.of(
        request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None,
        request.truncation_side if request.HasField("truncation_side") else None,
    )


class AnswerFields(TypedDict):
    """Fields that all answers have."""

    request_id: str
    usage: inference_pb2.Usage
    moments: list[request_pb2.Moment]


class EmbedServicer(InferenceServiceServicer):
    """Serves `Embed`. A base class, since one servicer must serve all methods of the generated service; it shares `inference`."""

    def __init__(self, inference: Inference) -> None:
        self.inference = inference

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> None:  # type: ignore[override]
        def build(call: CallFields) -> tuple[list[ClientRequest], None]:
            return input_requests(request, call, pooling_from_wire(request.pooling)), None

        def answer(vectors: list[array[float]], _: None, fields: AnswerFields) -> inference_pb2.EmbedResponse:
            # the server sends bytes unchanged
            return cast("inference_pb2.EmbedResponse", _serialized(vectors, inference_pb2.EmbedResponse(**fields)))

        await self.answered(request, context, "embeddings", "inputs", build, answer)

    async def answered(
        self,
        request: R,
        context: Context,
        operation: str,
        field: str,
        build: Callable[[CallFields], tuple[list[ClientRequest], T]],
        answer: Callable[[list[array[float]], T, AnswerFields], A],
    ) -> None:
        """Write the answer to the context.

        build: the requests, and what `answer` gets in addition to their vectors. field: the client's name of the inputs.
        """
        inference = self.inference
        with inference.telemetry.count_rejections():
            client = caller()
            lora_name = inference.models.lora_name(request.model, client)
            call = call_fields(inference, context, request.client_request_id)._replace(lora_name=lora_name)
            requests, beside = await inference.bodies.in_background_pool(request.ByteSize(), partial(build, call))
            pooled = await inference.embedding(requests, field=field, client=client, operation=operation)
        metadata = tuple(pooled.answer_headers.items())
        context.set_trailing_metadata(metadata)
        async with pooled.results() as vectors:
            fields: AnswerFields = {
                "request_id": pooled.request_id,
                "usage": usage_message(pooled.usage),
                "moments": moment_messages(pooled.timeline),
            }
            num_bytes = sum(vector.itemsize * len(vector) for vector in vectors)
            async with room_for(inference.bodies.unread, num_bytes) as room:
                response = await inference.bodies.in_background_pool(num_bytes, lambda: answer(vectors, beside, fields))
                await context.send_initial_metadata(metadata)
                # here, where the request still counts for its tenant
                await write_whole(context, response, room)


def input_requests(
    request: inference_pb2.EmbedRequest | inference_pb2.ClassifyRequest, call: CallFields, pooling: PoolingParams
) -> list[ClientRequest]:
    """One request per input. Raises: InvalidRequest."""
    if (num_inputs := len(request.inputs)) > MAX_EMBEDDING_INPUTS:
        raise InvalidRequest(f"inputs has {num_inputs} entries, 1 to {MAX_EMBEDDING_INPUTS} are allowed", "inputs")
    truncation = truncation_of(request)
    return [
        ClientRequest(
            prompt=_input(entry, f"inputs[{place}]"),
            field=f"inputs[{place}].{entry.WhichOneof('input')}",
            pooling_params=pooling,
            cache_salt=request.cache_salt or None,
            truncation=truncation,
            **call._asdict(),
        )
        for place, entry in enumerate(request.inputs)
    ]


def _serialized(vectors: list[array[float]], response: inference_pb2.EmbedResponse) -> bytes:
    """The serialized message with the vectors, up to 16 MiB. Each vector is freed after its part is serialized.

    Concatenated protobuf messages are parsed as one message with the entries of all.
    """
    # unlike joined parts, a BytesIO holds the bytes once
    buffer = io.BytesIO()
    buffer.write(response.SerializeToString())
    vectors.reverse()
    while vectors:
        entry = inference_pb2.Embedding(values=vectors.pop())
        buffer.write(inference_pb2.EmbedResponse(embeddings=[entry]).SerializeToString())
    return buffer.getvalue()


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
