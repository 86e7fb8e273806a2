"""`StepTimes`: how long a worker's steps take, by the number of sequences in them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.common.line_fit import LineFit

_KEPT = 0.99
"""Weight of older steps with each new one."""
_LONGEST_S = 1.0
"""A longer time between two messages is a pause, not a step."""
_LEAST_VARIANCE = 0.25
"""Of the number of sequences, below which steps of one worker show nothing of what a sequence costs."""


@dataclass
class StepTimes:
    """The steps of one worker, or of several."""

    line: LineFit = field(default_factory=LineFit)
    """Seconds over sequences."""
    _last_at: float | None = None

    def arrived(self, num_sequences: int, now_s: float) -> None:
        """Tokens of a step have come. now_s: `clock.monotonic()`."""
        last, self._last_at = self._last_at, now_s
        if last is not None and now_s - last < _LONGEST_S and num_sequences:
            self.add(num_sequences, now_s - last)

    def add(self, num_sequences: int, seconds: float) -> None:
        """Count a step."""
        self.line.add(num_sequences, seconds, _KEPT)

    def with_steps_of(self, other: StepTimes) -> StepTimes:
        """The steps of both."""
        return StepTimes(self.line.with_pairs_of(other.line))

    @property
    def are_known(self) -> bool:
        """True after the first step."""
        return self.line.weight > 0

    @property
    def per_sequence_s(self) -> float | None:
        """Seconds by which a further sequence makes a step longer; None if its steps do not show it."""
        if not self.are_known or self.line.spread < _LEAST_VARIANCE * self.line.weight**2:
            return None
        return max(0.0, self.line.slope)

    def predicted_s(self, num_sequences: int, per_sequence_s: float) -> float | None:
        """Seconds of a step with so many sequences; None before the first step."""
        if not self.are_known:
            return None
        line = self.line
        return max(0.0, line.y / line.weight + per_sequence_s * (num_sequences - line.x / line.weight))
