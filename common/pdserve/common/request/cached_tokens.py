"""`CachedTokens`: where a worker had the cached tokens of a prompt from."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import msgspec


class CachedTokens(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Prompt tokens that a worker did not have to compute, by the source of their blocks. The names of the fields are those of the
    sources in metrics, spans and views."""

    pool: int = 0
    """The worker's own prefix cache."""
    host: int = 0
    """Its host memory."""
    store: int = 0
    """The store below host memory."""
    peer: int = 0
    """Another worker's prefix cache."""

    @property
    def total(self) -> int:
        return self.pool + self.host + self.store + self.peer

    def by_source(self) -> dict[str, int]:
        """Source -> tokens, with those that are 0."""
        return {source: getattr(self, source) for source in CACHED_SOURCES}

    @property
    def span_attributes(self) -> dict[str, int]:
        """Attribute of a span -> tokens, for the sources that had some."""
        return {
            f"pdserve.prompt.cached_tokens.{source}": number for source, number in self.by_source().items() if number
        }

    def first(self, num_tokens: int) -> CachedTokens:
        """The part of at most so many tokens; a sequence's blocks are looked for in the order of the fields."""
        if self.total <= num_tokens:
            return self
        kept = {}
        for source, number in self.by_source().items():
            kept[source] = min(number, num_tokens)
            num_tokens -= kept[source]
        return CachedTokens(**kept)

    @classmethod
    def sum(cls, parts: Iterable[CachedTokens]) -> CachedTokens:
        """Of several prompts."""
        several = tuple(parts)
        return cls(*(sum(map(attrgetter(source), several)) for source in CACHED_SOURCES))


CACHED_SOURCES: tuple[str, ...] = CachedTokens.__struct_fields__
PROMPT_TOKEN_SOURCES = (*CACHED_SOURCES, "transfer", "computed")
"""Sources of all prompt tokens of a worker: those of cached ones, the transfer of a prefill call, and its own computation."""
NOTHING_CACHED = CachedTokens()
