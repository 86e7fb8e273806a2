"""`PoolingServicer`: the part of `InferenceService` that answers with classes and scores."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from pdserve.common.method_handler import Context
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.router.grpc_front.embed_servicer import (
    EmbedServicer,
    call_fields,
    caller,
    input_requests,
    moment_messages,
    usage_message,
)
from pdserve.router.requests.best_label import best_label
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.requests.scoring import ScoredPairs
from pdserve.v1 import inference_pb2

R = TypeVar("R", inference_pb2.ClassifyRequest, inference_pb2.ScoreRequest)
A = TypeVar("A", inference_pb2.ClassifyResponse, inference_pb2.ScoreResponse)
T = TypeVar("T")
_NUMBER_BYTES = 8
"""Bytes by which the time of an answer is estimated, per number in it."""


class PoolingServicer(EmbedServicer):
    """Serves `Classify` and `Score`. A base class, as `EmbedServicer`."""

    async def Classify(
        self, request: inference_pb2.ClassifyRequest, context: Context
    ) -> inference_pb2.ClassifyResponse:
        pooling = PoolingParams(task="classify", use_activation=_use_activation(request) is not False)

        def build(call: CallFields) -> tuple[list[ClientRequest], None]:
            return input_requests(request, call, pooling), None

        def answer(vectors: Sequence[array[float]], _: None) -> inference_pb2.ClassifyResponse:
            labels = self.inference.tokenizer.labels
            return inference_pb2.ClassifyResponse(classifications=[_classification(each, labels) for each in vectors])

        return await self._answered(request, context, "classify", "inputs", build, answer)

    async def Score(self, request: inference_pb2.ScoreRequest, context: Context) -> inference_pb2.ScoreResponse:
        by_head = await self.inference.scores_by_head()

        def build(call: CallFields) -> tuple[list[ClientRequest], ScoredPairs]:
            pairs = ScoredPairs.of(list(request.text_1), list(request.text_2), ("text_1", "text_2"))
            use_activation = _use_activation(request)
            salt = request.cache_salt or None
            return pairs.requests(call, by_head=by_head, use_activation=use_activation, cache_salt=salt), pairs

        def answer(vectors: Sequence[array[float]], pairs: ScoredPairs) -> inference_pb2.ScoreResponse:
            return inference_pb2.ScoreResponse(scores=pairs.scores(vectors))

        return await self._answered(request, context, "score", "text_2", build, answer)

    async def _answered(
        self,
        request: R,
        context: Context,
        operation: str,
        field: str,
        build: Callable[[CallFields], tuple[list[ClientRequest], T]],
        answer: Callable[[Sequence[array[float]], T], A],
    ) -> A:
        """build: the requests, and what `answer` gets beside their vectors. field: the client's name of the inputs."""
        inference = self.inference
        with inference.telemetry.count_rejections():
            client = caller()
            lora_name = inference.models.lora_name(request.model, client)
            call = call_fields(inference, context, request.client_request_id)._replace(lora_name=lora_name)
            requests, beside = await inference.bodies.in_background_pool(request.ByteSize(), partial(build, call))
            pooled = await inference.embedding(requests, field=field, client=client, operation=operation)
        metadata = tuple(pooled.answer_headers.items())
        context.set_trailing_metadata(metadata)
        vectors = await pooled.results()
        num_bytes = _NUMBER_BYTES * sum(map(len, vectors))
        response = await inference.bodies.in_background_pool(num_bytes, lambda: answer(vectors, beside))
        response.MergeFrom(
            type(response)(
                request_id=pooled.request_id,
                usage=usage_message(pooled.usage),
                moments=moment_messages(pooled.timeline),
            )
        )
        await context.send_initial_metadata(metadata)
        return response


def _use_activation(request: inference_pb2.ClassifyRequest | inference_pb2.ScoreRequest) -> bool | None:
    return request.use_activation if request.HasField("use_activation") else None


def _classification(probs: array[float], labels: Sequence[str]) -> inference_pb2.Classification:
    best = best_label(probs, labels)
    return inference_pb2.Classification(index=best.index, label=best.label, probs=probs)
