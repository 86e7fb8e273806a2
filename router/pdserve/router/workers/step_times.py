"""`StepTimes`: how long a worker's steps take, by the number of sequences in them."""

from __future__ import annotations

from dataclasses import dataclass

_KEPT = 0.99
"""Weight of older steps with each new one."""
_LONGEST_S = 1.0
"""A longer time between two messages is a pause, not a step."""
_LEAST_VARIANCE = 0.25
"""Of the number of sequences, below which steps of one worker show nothing of what a sequence costs."""


@dataclass
class StepTimes:
    """Decayed sums over the steps of one worker, or of several."""

    weight: float = 0.0
    num: float = 0.0
    """Sequences."""
    seconds: float = 0.0
    num_squared: float = 0.0
    product: float = 0.0
    _last_at: float | None = None

    def arrived(self, num_sequences: int, now_s: float) -> None:
        """Tokens of a step have come. now_s: `time.monotonic()`."""
        last, self._last_at = self._last_at, now_s
        if last is not None and now_s - last < _LONGEST_S and num_sequences:
            self.add(num_sequences, now_s - last)

    def add(self, num_sequences: int, seconds: float) -> None:
        """Count a step."""
        self.weight = self.weight * _KEPT + 1
        self.num = self.num * _KEPT + num_sequences
        self.seconds = self.seconds * _KEPT + seconds
        self.num_squared = self.num_squared * _KEPT + num_sequences * num_sequences
        self.product = self.product * _KEPT + num_sequences * seconds

    def with_steps_of(self, other: StepTimes) -> StepTimes:
        """The sums of both."""
        return StepTimes(
            self.weight + other.weight,
            self.num + other.num,
            self.seconds + other.seconds,
            self.num_squared + other.num_squared,
            self.product + other.product,
        )

    @property
    def per_sequence_s(self) -> float | None:
        """Seconds by which a further sequence makes a step longer; None if its steps do not show it."""
        if not self.weight:
            return None
        mean = self.num / self.weight
        variance = self.num_squared / self.weight - mean * mean
        if variance < _LEAST_VARIANCE:
            return None
        return max(0.0, (self.product / self.weight - mean * self.seconds / self.weight) / variance)

    def predicted_s(self, num_sequences: int, per_sequence_s: float) -> float | None:
        """Seconds of a step with so many sequences; None before the first step."""
        if not self.weight:
            return None
        at_mean = self.seconds / self.weight
        return max(0.0, at_mean + per_sequence_s * (num_sequences - self.num / self.weight))
