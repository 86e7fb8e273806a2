"""`TokenBucket`: a rate in tokens per minute, with one minute's tokens to spend at once."""

from __future__ import annotations

from collections.abc import Callable


class TokenBucket:
    """The level may become negative: a running request is charged as its tokens arrive."""

    def __init__(self, tokens_per_minute: int, clock: Callable[[], float]) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._size = tokens_per_minute
        self._level = float(tokens_per_minute)
        self._filled_s = clock()

    @property
    def size(self) -> int:
        """Tokens per minute; may be set, which does not refill the bucket."""
        return self._size

    @size.setter
    def size(self, tokens_per_minute: int) -> None:
        self._fill()
        self._size = tokens_per_minute
        self._level = min(self._level, tokens_per_minute)

    @property
    def level(self) -> float:
        """Tokens that may be spent now; below 0: a debt."""
        self._fill()
        return self._level

    def spend(self, tokens: float) -> None:
        """tokens: below 0 gives back."""
        self._fill()
        self._level = min(float(self._size), self._level - tokens)

    def wait_s(self, tokens: float) -> float:
        """Seconds until the bucket has so many tokens, or is full if it cannot hold them; 0: now."""
        missing = min(max(tokens, 1.0), self._size) - self.level
        # a full bucket must count as full despite rounding
        return missing * 60.0 / self._size if missing > 1e-6 else 0.0

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(float(self._size), self._level + (now - self._filled_s) * self._size / 60.0)
        self._filled_s = now
