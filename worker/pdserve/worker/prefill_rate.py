"""`PrefillRate`: how fast an engine computes prompts, as it has lately."""

from __future__ import annotations

import time
from collections.abc import Callable

HALF_LIFE_S = 2.0
"""Of what is measured, in seconds spent on prefill."""
KEPT_S = 15.0
"""A rate older than this says nothing: a worker that was stopped for a moment, measured slow and therefore avoided would
never be measured again."""


class PrefillRate:
    """Prompt tokens a second of the steps that compute any, the latest weighing most; others' tokens count as time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = 0.0
        self._seconds = 0.0
        self._measured_at = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Steps that took `seconds` computed so many prompt tokens. Harmless when they computed none."""
        if num_tokens <= 0 or seconds <= 0:
            return
        if not self._is_known:
            self._tokens = self._seconds = 0.0
        keep = 0.5 ** (seconds / HALF_LIFE_S)
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._measured_at = self._clock()

    @property
    def tokens_per_s(self) -> float:
        """0 where nothing is known."""
        return self._tokens / self._seconds if self._is_known else 0.0

    @property
    def _is_known(self) -> bool:
        return self._seconds > 0 and self._clock() - self._measured_at < KEPT_S
