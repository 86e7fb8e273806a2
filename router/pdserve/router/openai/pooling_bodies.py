"""`/classify`, `/v1/score` and `/v1/rerank`, as vLLM serves them: bodies, and their answers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.router.openai.answer_head import AnswerHead
from pdserve.router.openai.caller_fields import verify_caller
from pdserve.router.openai.pooled_inputs import PooledInputs
from pdserve.router.requests.best_label import best_label
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.requests.scoring import ScoredPairs, verify_num_texts

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")
_encode = msgspec.json.Encoder().encode


class ClassifyBody(PooledInputs, forbid_unknown_fields=True, kw_only=True):
    add_special_tokens: bool | None = None
    use_activation: bool | None = None

    def requests(self, call: CallFields) -> list[ClientRequest]:
        """One request per input. Raises: InvalidRequest."""
        pooling = PoolingParams(task="classify", use_activation=self.use_activation is not False)
        return self.pooled_by(pooling, call, add_special_tokens=self.add_special_tokens is not False)


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    user: str | None = None
    use_activation: bool | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def pairs(self) -> ScoredPairs:
        """Raises: InvalidRequest."""
        verify_caller(self)
        texts = [[given] if isinstance(given, str) else given for given in (self.text_1, self.text_2)]
        return ScoredPairs.of(texts[0], texts[1], ("text_1", "text_2"))


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    model: str | None = None
    user: str | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def pairs(self) -> ScoredPairs:
        """The query with each document. Raises: InvalidRequest."""
        verify_caller(self)
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequest(f"top_n must be at least 0, not {self.top_n}", "top_n")
        if not self.query:
            raise InvalidRequest("query is empty, at least one token is needed", "query")
        verify_num_texts(self.documents, "documents")
        return ScoredPairs.of([self.query], self.texts, ("query", "documents"))

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


def classify_parts(vectors: Sequence[array[float]], head: AnswerHead, labels: Sequence[str]) -> Iterator[bytes]:
    """The body of the answer. labels: see `best_label`."""
    data = []
    for index, probs in enumerate(vectors):
        _, label = best_label(probs, labels)
        data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    yield _encode(head.fields("classify") | {"data": data})


def score_parts(vectors: Sequence[array[float]], head: AnswerHead, pairs: ScoredPairs) -> Iterator[bytes]:
    """The body of the answer."""
    scores = enumerate(pairs.scores(vectors))
    data = [{"index": index, "object": "score", "score": score} for index, score in scores]
    yield _encode(head.fields("score") | {"data": data})


def rerank_parts(
    vectors: Sequence[array[float]], head: AnswerHead, pairs: ScoredPairs, body: RerankBody
) -> Iterator[bytes]:
    """The body of the answer: the best first, equal ones in the order of the request."""
    ranked = sorted(enumerate(pairs.scores(vectors)), key=lambda scored: -scored[1])
    texts, shows_texts = body.texts, body.return_documents is not False
    results = []
    for index, score in ranked[: body.top_n or None]:
        document = {"document": {"text": texts[index]}} if shows_texts else {}
        results.append({"index": index, **document, "relevance_score": score})
    yield _encode(head.fields("rerank", listed=False) | {"results": results})
