"""`/classify`, `/v1/score` and `/v1/rerank`, as vLLM serves them: bodies, and their answers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.router.openai.answer_head import AnswerHead
from pdserve.router.openai.caller_fields import verify_caller
from pdserve.router.openai.no_op_fields import SCORE_NO_OP, verify_neutral
from pdserve.router.openai.pooled_inputs import PooledInputs
from pdserve.router.requests.best_label import best_label
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.router.requests.scoring import ScoredPairs, verify_num_texts

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")
PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""vLLM's names of the two lists of texts."""
_PAIRED = tuple(dict.fromkeys(name for names in PAIR_NAMES for name in names))
_encode = msgspec.json.Encoder().encode


class ClassifyBody(PooledInputs, forbid_unknown_fields=True, kw_only=True):
    add_special_tokens: bool | None = None
    use_activation: bool | None = None

    def requests(self, call: CallFields) -> list[ClientRequest]:
        """One request per input. Raises: InvalidRequest."""
        pooling = PoolingParams(task="classify", use_activation=self.use_activation is not False)
        return self.pooled_by(pooling, call, add_special_tokens=self.add_special_tokens is not False)


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Texts by one of `PAIR_NAMES`."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    model: str | None = None
    encoding_format: str | None = None
    """Sent by vLLM's examples. Scores are numbers in any case."""
    user: str | None = None
    use_activation: bool | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def pairs(self) -> ScoredPairs:
        """Raises: InvalidRequest."""
        verify_caller(self)
        verify_neutral(self, SCORE_NO_OP)
        names = self._names()
        texts = [
            [given] if isinstance(given, str) else given or [] for given in (getattr(self, name) for name in names)
        ]
        return ScoredPairs.of(texts[0], texts[1], names)

    def _names(self) -> tuple[str, str]:
        """The pair of fields that is given. Raises: InvalidRequest for none, a part of one, or several."""
        given = [name for name in _PAIRED if getattr(self, name) is not None]
        for names in PAIR_NAMES:
            if given == list(names):
                return names
        if len(given) == 1:
            others = [second if first in given else first for first, second in PAIR_NAMES if {first, second} & {*given}]
            raise InvalidRequest(f"{' or '.join(others)} is missing, {given[0]} needs it", others[0])
        told = f"{', '.join(given)} are given" if given else "no texts are given"
        pairs = ", or ".join(map(" and ".join, PAIR_NAMES))
        raise InvalidRequest(f"{told}: one pair of fields is needed, {pairs}", given[-1] if given else "text_1")


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
