"""`PoolingServicer`: the part of `InferenceService` that answers with classes and scores."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pdserve.common.method_handler import Context
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.router.grpc_front.embed_servicer import AnswerFields, EmbedServicer, input_requests
from pdserve.router.requests.best_label import best_label
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.requests.scoring import ScoredPairs
from pdserve.v1 import inference_pb2


class PoolingServicer(EmbedServicer):
    """Serves `Classify` and `Score`. A base class, as `EmbedServicer`."""

    async def Classify(self, request: inference_pb2.ClassifyRequest, context: Context) -> None:  # type: ignore[override]
        pooling = PoolingParams(task="classify", use_activation=_use_activation(request) is not False)

        def build(call: CallFields) -> tuple[list[ClientRequest], None]:
            return input_requests(request, call, pooling), None

        def answer(vectors: Sequence[array[float]], _: None, fields: AnswerFields) -> inference_pb2.ClassifyResponse:
            labels = self.inference.tokenizer.labels
            classifications = [_classification(each, labels) for each in vectors]
            return inference_pb2.ClassifyResponse(classifications=classifications, **fields)

        await self.answered(request, context, "classify", "inputs", build, answer)

    async def Score(self, request: inference_pb2.ScoreRequest, context: Context) -> None:  # type: ignore[override]
        by_head = await self.inference.scores_by_head()

        def build(call: CallFields) -> tuple[list[ClientRequest], ScoredPairs]:
            pairs = ScoredPairs.of(list(request.text_1), list(request.text_2), ("text_1", "text_2"))
            requests = pairs.requests(
                call,
                by_head=by_head,
                use_activation=_use_activation(request),
                cache_salt=request.cache_salt or None,
                truncate_prompt_tokens=(
                    request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
                ),
                truncation_side=request.truncation_side if request.HasField("truncation_side") else None,
            )
            return requests, pairs

        def answer(
            vectors: Sequence[array[float]], pairs: ScoredPairs, fields: AnswerFields
        ) -> inference_pb2.ScoreResponse:
            return inference_pb2.ScoreResponse(scores=pairs.scores(vectors), **fields)

        await self.answered(request, context, "score", "text_2", build, answer)


def _use_activation(request: inference_pb2.ClassifyRequest | inference_pb2.ScoreRequest) -> bool | None:
    return request.use_activation if request.HasField("use_activation") else None


def _classification(probs: array[float], labels: Sequence[str]) -> inference_pb2.Classification:
    best, label = best_label(probs, labels)
    return inference_pb2.Classification(index=best, label=label, probs=probs)
