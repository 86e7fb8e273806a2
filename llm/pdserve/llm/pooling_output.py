"""Results of pooling, with vLLM's names: the general types, and those of an embedding."""

from __future__ import annotations

from typing import Self

import msgspec


class PoolingOutput(msgspec.Struct, kw_only=True):
    """One prompt's pooled hidden states."""

    data: list[float]
    """`[D]`: the vector, as the request's `PoolingParams` ask for it."""


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """A prompt and its pooled hidden states."""

    request_id: str
    prompt: str | None
    """The tokenized text; None for token ids."""
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens that needed no computing."""


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


class EmbeddingRequestOutput(msgspec.Struct, kw_only=True):
    """A prompt and its embedding."""

    request_id: str
    prompt: str | None
    """The tokenized text; None for token ids."""
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0
    """Prompt tokens that needed no computing."""

    @classmethod
    def from_base(cls, request_output: PoolingRequestOutput) -> Self:
        fields = {name: getattr(request_output, name) for name in request_output.__struct_fields__}
        return cls(**fields | {"outputs": EmbeddingOutput.from_base(request_output.outputs)})
