"""`PoolingHttp`: endpoints that answer with embeddings, classes and scores."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.router.bodies.request_body import read_body
from pdserve.router.http_front.embedding_response import EmbeddingResponse
from pdserve.router.http_front.generation_response import call_fields
from pdserve.router.http_front.tokenization_http import authenticated
from pdserve.router.openai.answer_head import AnswerHead
from pdserve.router.openai.embeddings import EmbeddingBody, embeddings_parts
from pdserve.router.openai.pooling_bodies import (
    RERANK_PATHS,
    SCORE_PATHS,
    ClassifyBody,
    RerankBody,
    ScoreBody,
    classify_parts,
    rerank_parts,
    score_parts,
)
from pdserve.router.requests.inference import Inference
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.requests.scoring import ScoredPairs
from pdserve.router.tenants.api_keys import ApiKeys

B = TypeVar("B", EmbeddingBody, ClassifyBody, ScoreBody, RerankBody)
Parts = Callable[[Sequence["array[float]"], AnswerHead], Iterator[bytes]]


class Pooled(NamedTuple):
    """A body as requests."""

    requests: list[ClientRequest]
    parts: Parts
    """Writes the answer."""
    field: str
    """The client's name of the inputs."""


class PoolingHttp:
    """Routes over one `Inference`."""

    def __init__(self, inference: Inference, keys: ApiKeys) -> None:
        self._inference = inference
        self._keys = keys
        self.routes = [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/classify", self.classify, methods=["POST"]),
            *(Route(path, self.score, methods=["POST"], name=_name(path)) for path in SCORE_PATHS),
            *(Route(path, self.rerank, methods=["POST"], name=_name(path)) for path in RERANK_PATHS),
        ]

    async def embeddings(self, request: Request) -> Response:
        def build(body: EmbeddingBody, fields: CallFields, by_head: bool) -> Pooled:
            parts = partial(embeddings_parts, encoding_format=body.encoding_format)
            return Pooled(body.requests(fields), parts, "input")

        return await self._answer(request, EmbeddingBody, "embeddings", build)

    async def classify(self, request: Request) -> Response:
        inference = self._inference

        def build(body: ClassifyBody, fields: CallFields, by_head: bool) -> Pooled:
            parts = partial(classify_parts, labels=inference.tokenizer.labels)
            return Pooled(body.requests(fields), parts, "input")

        return await self._answer(request, ClassifyBody, "classify", build)

    async def score(self, request: Request) -> Response:
        def build(body: ScoreBody, fields: CallFields, by_head: bool) -> Pooled:
            pairs = body.pairs()
            requests = _scored(body, pairs, fields, by_head=by_head)
            return Pooled(requests, partial(score_parts, pairs=pairs), pairs.names[1])

        return await self._answer(request, ScoreBody, "score", build, is_scored=True)

    async def rerank(self, request: Request) -> Response:
        def build(body: RerankBody, fields: CallFields, by_head: bool) -> Pooled:
            pairs = body.pairs()
            requests = _scored(body, pairs, fields, by_head=by_head)
            return Pooled(requests, partial(rerank_parts, pairs=pairs, body=body), pairs.names[1])

        return await self._answer(request, RerankBody, "rerank", build, is_scored=True)

    async def _answer(
        self,
        request: Request,
        kind: type[B],
        operation: str,
        build: Callable[[B, CallFields, bool], Pooled],
        *,
        is_scored: bool = False,
    ) -> Response:
        """build: makes the requests of a body. Its last argument is True if the answer is scores (`is_scored`) and those are of a
        classification head.
        """
        inference = self._inference
        with inference.telemetry.count_rejections():
            client = await authenticated(self._keys, request)
            call = call_fields(request, inference.settings.limits.request_timeout_s)
            by_head = is_scored and await inference.scores_by_head()

            def built(body: B) -> Pooled:
                return build(body, call._replace(lora_name=inference.models.lora_name(body.model, client)), by_head)

            requests, parts, field = await read_body(request, kind, inference.bodies, built)
            pooled = await inference.embedding(requests, field=field, client=client, operation=operation)
        model = requests[0].lora_name or inference.models.base
        return EmbeddingResponse(
            pooled,
            # usage is known when all vectors are
            lambda vectors: parts(vectors, AnswerHead(pooled.request_id, model, pooled.usage)),
            inference.bodies,
        )


def _scored(
    body: ScoreBody | RerankBody, pairs: ScoredPairs, fields: CallFields, *, by_head: bool
) -> list[ClientRequest]:
    return pairs.requests(
        fields, by_head=by_head, use_activation=body.use_activation, cache_salt=body.cache_salt,
        truncate_prompt_tokens=body.truncate_prompt_tokens, truncation_side=body.truncation_side,
    )  # fmt: skip


def _name(path: str) -> str:
    """Name of a route, by which `/openapi.json` distinguishes the paths of one endpoint."""
    return path.strip("/").replace("/", "_")
