"""`PrefillRate`: how long an engine takes to compute prompts, as it has lately.

    seconds of a step = step_s + prompt tokens / tokens_per_s

Both are fitted to what steps took, so that a worker whose prompts are mostly cached is not taken for a slow one: its steps
compute few tokens and cost what a step costs. What was measured at start, on steps of several sizes, stays part of the
fit: without it, steps of one size would not tell the two apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HALF_LIFE_S = 2.0
"""Of what is measured, in seconds spent on prefill."""
KEPT_S = 15.0
"""What is older says nothing: a worker that was stopped for a moment, measured slow and therefore avoided would never be
measured again."""
FASTEST = 2.0
"""Tokens are not believed to be computed more than so many times as fast as they were at start: that is noise."""
LEAST_SHARE = 0.1
"""Of what steps took at start, tokens are believed to be at least this part, however little larger steps took more."""

Sample = tuple[int, float]
"""Prompt tokens of a step, and its seconds."""


@dataclass(slots=True)
class _Sums:
    """Of samples with weights: what a straight line is fitted to."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float, keep: float = 1.0) -> None:
        """keep: what the samples before are worth from now on."""
        self.weight = keep * self.weight + 1.0
        self.tokens = keep * self.tokens + num_tokens
        self.seconds = keep * self.seconds + seconds
        self.tokens_squared = keep * self.tokens_squared + num_tokens**2
        self.tokens_seconds = keep * self.tokens_seconds + num_tokens * seconds

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.weight + other.weight,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.tokens_squared + other.tokens_squared,
            self.tokens_seconds + other.tokens_seconds,
        )

    @property
    def all_s(self) -> float:
        """Seconds of a token, if a step cost nothing beside its tokens."""
        return self.seconds / self.tokens

    def token_s(self, least: float) -> float:
        """Seconds of a token: the slope, at least `least`, and no more than leaves a step nothing."""
        spread = self.weight * self.tokens_squared - self.tokens**2
        all_s = self.all_s
        if spread <= 1e-6 * self.tokens**2:
            return all_s
        slope = (self.weight * self.tokens_seconds - self.tokens * self.seconds) / spread
        return min(max(slope, least), all_s)


class PrefillRate:
    """Fitted to the steps that compute prompt tokens, the latest weighing most; others' tokens count as a step's own time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at_start = _Sums()
        self._lately = _Sums()
        self._measured_at = 0.0

    def calibrate(self, samples: Sequence[Sample]) -> None:
        """What steps of several sizes took at start."""
        for num_tokens, seconds in samples:
            self._at_start.add(num_tokens, seconds)

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of `seconds` computed so many prompt tokens. Harmless when it computed none."""
        if num_tokens <= 0 or seconds <= 0:
            return
        if not self._is_fresh:
            self._lately = _Sums()
        self._lately.add(num_tokens, seconds, keep=0.5 ** (seconds / HALF_LIFE_S))
        self._measured_at = self._clock()

    @property
    def tokens_per_s(self) -> float:
        """0 where nothing is known."""
        return 1.0 / self._token_s if self._known.weight else 0.0

    @property
    def step_s(self) -> float:
        """What a step takes beside its prompt tokens; 0 where nothing is known."""
        known = self._known
        return max(0.0, (known.seconds - self._token_s * known.tokens) / known.weight) if known.weight else 0.0

    @property
    def _token_s(self) -> float:
        if not self._at_start.weight:
            return self._known.all_s
        at_start = self._at_start.token_s(least=LEAST_SHARE * self._at_start.all_s)
        return self._known.token_s(least=at_start / FASTEST) if self._is_fresh else at_start

    @property
    def _known(self) -> _Sums:
        return self._at_start + self._lately if self._is_fresh else self._at_start

    @property
    def _is_fresh(self) -> bool:
        return self._lately.weight > 0 and self._clock() - self._measured_at < KEPT_S
