"""`LineFit`: a straight line through measurements of which recent ones weigh more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LineFit:
    """Weighted sums over pairs (x, y)."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    x_squared: float = 0.0
    product: float = 0.0

    def add(self, x: float, y: float, keep: float) -> None:
        """keep: factor of the weights of earlier pairs."""
        self.weight = keep * self.weight + 1.0
        self.x = keep * self.x + x
        self.y = keep * self.y + y
        self.x_squared = keep * self.x_squared + x * x
        self.product = keep * self.product + x * y

    def with_pairs_of(self, other: LineFit) -> LineFit:
        """The sums of both."""
        return LineFit(
            self.weight + other.weight,
            self.x + other.x,
            self.y + other.y,
            self.x_squared + other.x_squared,
            self.product + other.product,
        )

    @property
    def spread(self) -> float:
        """Variance of x, times the square of the weight."""
        return self.weight * self.x_squared - self.x * self.x

    @property
    def slope(self) -> float:
        """Of the line; `spread` must not be 0."""
        return (self.weight * self.product - self.x * self.y) / self.spread
