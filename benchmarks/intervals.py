"""A median with its interval, which assumes nothing of how times are spread: not that they are normal, say."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from scipy.stats import binom

FEWEST = 6  # values; with fewer, the least and the most are no interval of 95%


@dataclass(frozen=True)
class Interval:
    """The median of some values, and between which of them it would lie in 95 of 100 such measurements."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Interval":
        ordered = sorted(values)
        if len(ordered) < FEWEST:
            raise ValueError(f"an interval needs {FEWEST} values or more, not {len(ordered)}")
        # as many lie below the true median as heads fall in as many tosses of a coin
        cut = int(binom.ppf(0.025, len(ordered), 0.5))
        return cls(ordered[cut - 1], median(ordered), ordered[-cut])

    @property
    def reach(self) -> float:
        """From the median to the farther end."""
        return max(self.high - self.median, self.median - self.low)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratios(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    return Interval.of(over / under for over, under in zip(upper, lower, strict=True))
