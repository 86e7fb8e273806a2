"""Results of `embed`, with vLLM's names."""

from __future__ import annotations

import msgspec


class EmbeddingOutput(msgspec.Struct, kw_only=True):
    """One prompt's vector."""

    embedding: list[float]

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
