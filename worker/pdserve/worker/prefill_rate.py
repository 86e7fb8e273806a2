"""`PrefillRate`: the recent speed at which an engine computes prompts.

    seconds of a step = constant cost + prompt tokens / tokens_per_s

Both terms are fitted to the durations of steps. Without the constant, a worker with mostly cached prompts would seem slow, since
its steps compute few tokens and take little longer than the constant. If all steps have the same size, the terms cannot be
separated, and the whole time counts for tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.common import clock
from pdserve.common.line_fit import LineFit

HALF_LIFE_S = 2.0
"""Half-life of measurements, in seconds spent on prefill."""
KEPT_S = 15.0
"""Seconds after which a rate is forgotten. Otherwise a worker that was suspended, and so measured as slow, would be avoided and
never be measured again."""
LEAST_SHARE = 0.1
"""Least part of a step's time that counts for tokens, even if noise made larger steps hardly longer."""
LEAST_SPREAD = 0.05
"""Least spread of step sizes, as variance over the square of their mean, for which a line is fitted."""


class PrefillRate:
    """A rate fitted to steps with prompt tokens; recent steps weigh more. Decode tokens of a step count as constant cost."""

    def __init__(self, clock: Callable[[], float] = clock.monotonic) -> None:
        self._clock = clock
        self._sums = LineFit()
        self._measured_at = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record a step of `seconds` with `num_tokens` prompt tokens; no effect for 0 tokens."""
        if num_tokens <= 0 or seconds <= 0:
            return
        if not self._is_known:
            self._sums = LineFit()
        self._sums.add(num_tokens, seconds, 0.5 ** (seconds / HALF_LIFE_S))
        self._measured_at = self._clock()

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second; 0 if unknown."""
        return 1.0 / self._token_s if self._is_known else 0.0

    @property
    def _token_s(self) -> float:
        """Seconds per token: the line's slope, or the total time per token if sizes differ too little for a line."""
        sums = self._sums
        all_s = sums.y / sums.x
        if sums.spread <= LEAST_SPREAD * sums.x**2:
            return all_s
        return min(max(sums.slope, LEAST_SHARE * all_s), all_s)

    @property
    def _is_known(self) -> bool:
        return self._sums.weight > 0 and self._clock() - self._measured_at < KEPT_S
