"""`ScoredPairs`: pairs of texts, as requests to a cross-encoder or for embeddings, and their scores."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.router.requests.fields.request_limits import MAX_EMBEDDING_INPUTS
from pdserve.router.requests.preparation import CallFields, ClientRequest
from pdserve.text.prompt import PairInput, Prompt, TextInput, Truncation
from pdserve.text.scored_pairs import cosine_similarity, paired


def verify_num_texts(texts: Sequence[object], name: str) -> None:
    """name: the client's. Raises: InvalidRequest for too many."""
    if len(texts) > MAX_EMBEDDING_INPUTS:
        raise InvalidRequest(f"{name} has {len(texts)} entries, 1 to {MAX_EMBEDDING_INPUTS} are allowed", name)


class ScoredPairs(msgspec.Struct, frozen=True):
    """The pairs of one client's request."""

    pairs: list[tuple[str, str]]
    names: tuple[str, str]
    """The client's, of the two lists of texts."""

    @classmethod
    def of(cls, first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> ScoredPairs:
        """Text by text, or the only first one with each of the others. Raises: InvalidRequest."""
        for name, texts in zip(names, (first, second), strict=True):
            verify_num_texts(texts, name)
        return cls(paired(first, second, names), names)

    def requests(
        self,
        call: CallFields,
        *,
        by_head: bool,
        use_activation: bool | None,
        cache_salt: str | None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
    ) -> list[ClientRequest]:
        """by_head: one request per pair for a cross-encoder; False: one per different text, for its embedding.

        truncate_prompt_tokens: of each request; the default side of a pair is the right one, as in transformers.
        Raises: InvalidRequest for `use_activation` without a head.
        """
        fields: dict[str, Any] = {"cache_salt": cache_salt or None, **call._asdict()}
        if by_head:
            pooling = PoolingParams(task="score", use_activation=use_activation is not False)
            truncation = Truncation.of(truncate_prompt_tokens, truncation_side or "right")
            pairs: list[tuple[Prompt, str]] = [
                (PairInput(*pair, truncation), f"{self.names[1]}[{place}]") for place, pair in enumerate(self.pairs)
            ]
            return [
                ClientRequest(prompt=prompt, field=field, pooling_params=pooling, **fields) for prompt, field in pairs
            ]
        if use_activation is False:
            raise InvalidRequest(
                "use_activation is false, and the model has no classification head: scores are cosines of embeddings",
                "use_activation",
            )
        fields["truncation"] = Truncation.of(truncate_prompt_tokens, truncation_side)
        return [
            ClientRequest(prompt=TextInput(text), field=field, pooling_params=PoolingParams(), **fields)
            for text, field in self._fields_of_texts().items()
        ]

    def _fields_of_texts(self) -> dict[str, str]:
        """Each different text -> the client's name of its first place."""
        fields: dict[str, str] = {}
        for place, pair in enumerate(self.pairs):
            for name, text in zip(self.names, pair, strict=True):
                fields.setdefault(text, f"{name}[{place}]")
        return fields

    def scores(self, vectors: Sequence[array[float]]) -> list[float]:
        """One per pair. vectors: results of `requests`, in their order: of one number each, or embeddings."""
        if len(vectors[0]) == 1 and len(vectors) == len(self.pairs):
            return [vector[0] for vector in vectors]
        by_text = dict(zip(self._fields_of_texts(), vectors, strict=True))
        return [cosine_similarity(by_text[first], by_text[second]) for first, second in self.pairs]
