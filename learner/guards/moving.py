"""A moving mean and deviation."""

import math
from dataclasses import dataclass

MEMORY = 20
"""Values that a moving mean remembers: the weight of a new one is 1/MEMORY, more before it has seen as many."""
WARM_UP = 10
"""Values before the mean counts as known."""


@dataclass(slots=True)
class Moving:
    """Exponential moving mean and variance (West 1979); plain ones until MEMORY values have come."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    @property
    def is_known(self) -> bool:
        """Whether enough values have come to compare with."""
        return self.count >= WARM_UP

    def add(self, value: float) -> None:
        """Take in a finite value."""
        self.count = min(self.count + 1, MEMORY)
        share, difference = 1 / self.count, value - self.mean
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference**2)

    def distance(self, value: float, noise: float) -> float:
        """A value less the mean, in deviations; `noise` is the variance that the value has by itself."""
        deviation = math.sqrt(self.variance + noise)
        return (value - self.mean) / deviation if deviation else 0.0
