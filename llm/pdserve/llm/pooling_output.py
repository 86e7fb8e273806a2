"""Results of pooling, with vLLM's names: the general types, and those of embeddings, classes and scores."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

import msgspec

T = TypeVar("T")


class PoolingOutput(msgspec.Struct, kw_only=True):
    """One prompt's pooled hidden states."""

    data: list[float]
    """`[D]`: the vector, as the request's `PoolingParams` ask for it."""


class PoolingRequestOutput(msgspec.Struct, Generic[T], kw_only=True):
    """A prompt and what was made of its hidden states."""

    request_id: str
    prompt: str | None
    """The tokenized text; None for token ids, and for a pair of texts."""
    prompt_token_ids: list[int]
    outputs: T
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens that needed no computing."""

    def fields_but_outputs(self) -> dict[str, Any]:
        """Field -> value."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "outputs"}


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """One prompt's vector."""

    embedding: list[float]

    @classmethod
    def from_base(cls, pooling_output: PoolingOutput) -> Self:
        return cls(embedding=pooling_output.data)

    @property
    def hidden_size(self) -> int:
        """Numbers in it."""
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, kw_only=True):
    """One prompt's classes."""

    probs: list[float]
    """`[C]`: by label, after the head's activation; without `use_activation` the head's numbers."""

    @classmethod
    def from_base(cls, pooling_output: PoolingOutput) -> Self:
        return cls(probs=pooling_output.data)

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


class ScoringOutput(msgspec.Struct, kw_only=True):
    """The score of one pair of texts."""

    score: float

    @classmethod
    def from_base(cls, pooling_output: PoolingOutput) -> Self:
        """Raises: ValueError for more than one number."""
        [score] = pooling_output.data
        return cls(score=score)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput], kw_only=True):
    """A prompt and its embedding."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls(**request_output.fields_but_outputs(), outputs=EmbeddingOutput.from_base(request_output.outputs))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput], kw_only=True):
    """A prompt and its classes."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls(
            **request_output.fields_but_outputs(), outputs=ClassificationOutput.from_base(request_output.outputs)
        )


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput], kw_only=True):
    """A pair of texts, as one prompt or as two one after the other, and its score."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput[PoolingOutput]) -> Self:
        return cls(**request_output.fields_but_outputs(), outputs=ScoringOutput.from_base(request_output.outputs))
