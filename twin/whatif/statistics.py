"""Is a difference between two configurations more than chance? Intervals for paired and for unpaired replications.

A difference is relative (the ratio of the two, on the scale of logarithms, on which latencies are nearly symmetric)
where every value is above 0, else absolute. Intervals are Student's t; `level` is already corrected by the caller.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

EQUAL = 0.01
"""Differences whose whole interval lies within this share are called equal."""


@dataclass(frozen=True, slots=True)
class Difference:
    """B against A."""

    before: float
    """Mean of A's values."""
    after: float
    change: float
    """Best estimate: 0.12 = 12 % more if relative, else after - before."""
    low: float
    high: float
    is_relative: bool
    pairs: int
    """Replications that it rests on."""

    @property
    def is_found(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0

    @property
    def is_equal(self) -> bool:
        """Whether even the ends of the interval are too small to matter."""
        if self.is_relative:
            return self.low >= -EQUAL and self.high <= EQUAL
        span = EQUAL * max(abs(self.before), abs(self.after))
        return -span <= self.low and self.high <= span

    @property
    def could_hide(self) -> float:
        """The largest difference that the interval leaves open."""
        return max(abs(self.low), abs(self.high))


def paired(
    before: Sequence[float | None], after: Sequence[float | None], level: float
) -> Difference | None:
    """The difference of replications that share their seeds one by one. None with fewer than two complete pairs."""
    both = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    if len(both) < 2:
        return None
    a, b = (np.array(values, dtype=np.float64) for values in zip(*both, strict=True))
    is_relative = bool((a > 0).all() and (b > 0).all())
    gaps = np.log(b / a) if is_relative else b - a
    n = len(gaps)
    mean, spread = float(gaps.mean()), float(gaps.std(ddof=1)) / math.sqrt(n)
    # Equal differences differ by rounding at most.
    if spread <= 1e-12 * max(1.0, abs(mean)):
        spread, mean = 0.0, 0.0 if abs(mean) <= 1e-12 else mean
    half = spread * float(student.ppf(0.5 + level / 2, n - 1)) if spread else 0.0
    return _difference(a, b, mean, half, is_relative, n)


def unpaired(
    before: Sequence[float | None], after: Sequence[float | None], level: float
) -> Difference | None:
    """The difference of replications that have nothing in common (Welch). None with fewer than two of either."""
    a, b = (
        np.array([v for v in side if v is not None], dtype=np.float64) for side in (before, after)
    )
    if len(a) < 2 or len(b) < 2:
        return None
    is_relative = bool((a > 0).all() and (b > 0).all())
    x, y = (np.log(a), np.log(b)) if is_relative else (a, b)
    va, vb = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    mean, half = float(y.mean() - x.mean()), 0.0
    if va + vb > 1e-24 * max(1.0, mean * mean):
        freedom = (va + vb) ** 2 / (va**2 / (len(x) - 1) + vb**2 / (len(y) - 1))
        half = math.sqrt(va + vb) * float(student.ppf(0.5 + level / 2, freedom))
    return _difference(a, b, mean, half, is_relative, min(len(a), len(b)))


def _difference(
    a: "np.ndarray", b: "np.ndarray", mean: float, half: float, is_relative: bool, n: int
) -> Difference:
    ends = (mean, mean - half, mean + half)
    if is_relative:
        ends = tuple(math.expm1(min(end, 700.0)) for end in ends)  # type: ignore[assignment]
    return Difference(float(a.mean()), float(b.mean()), *ends, is_relative, n)


def interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """Bounds for the mean of independent values; both the mean where there is one value, or all are equal."""
    x = np.array(values, dtype=np.float64)
    if len(x) < 2 or not x.std():
        return float(x.mean()), float(x.mean())
    half = (
        float(x.std(ddof=1)) / math.sqrt(len(x)) * float(student.ppf(0.5 + level / 2, len(x) - 1))
    )
    return float(x.mean()) - half, float(x.mean()) + half
