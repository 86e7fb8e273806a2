"""`HeldBytes`: bounds what the router keeps of its requests until they end, since another attempt may need it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.common.errors import Overloaded


class HeldBytes:
    """Bytes of one kind, of all requests together. Used on the event loop alone."""

    def __init__(self, max_bytes: int, refusal: str) -> None:
        """refusal: the error's text, with `{asked}`, `{held}` and `{limit}` in place of numbers of bytes."""
        self._max_bytes = max_bytes
        self._refusal = refusal
        self.num_bytes = 0
        """Kept now."""

    def take(self, num_bytes: int) -> None:
        """Raises: Overloaded for more than there is room for now; nothing is taken then."""
        if num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded(self._refusal.format(asked=num_bytes, held=self.num_bytes, limit=self._max_bytes))
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """num_bytes: as taken."""
        self.num_bytes -= num_bytes

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Context in which they are taken. Raises: Overloaded as it is entered."""
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give_back(num_bytes)
