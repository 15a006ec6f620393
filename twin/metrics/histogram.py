"""Mean and percentiles of durations in memory that does not grow with their number."""

from collections.abc import Callable, Sequence

import numpy as np

from twin.clock import PS
from twin.metrics.percentiles import (
    PERCENTS,
    Parts,
    Stats,
    class_middles,
    class_of,
    classes,
    exact_sum,
)

BITS = 7

BOUND = 0.005
"""A percentile is off by at most this share of itself: the middle of a class is, by 2 ** -(BITS + 1) = 0.4 %."""


class LogHistogram:
    """Values counted by classes, each a little wider than the one below; the sum is kept exactly.

    Values may be negative. Histograms add up: the one of two parts is the one of the whole.
    """

    def __init__(self) -> None:
        self._zero = classes(BITS) - 1
        self._counts = np.zeros(2 * self._zero + 1, dtype=np.int64)
        """By class: those of negative values, the farthest from 0 first, 0, those of positive values."""
        self._sum = 0

    def add(self, parts: Parts) -> None:
        """More values."""
        for values, weights in parts:
            places = self._zero + np.sign(values) * class_of(np.abs(values), BITS)
            found = np.bincount(places, weights, len(self._counts))
            self._counts += found.astype(np.int64, copy=False)
            self._sum += exact_sum(values, weights)

    def merge(self, other: "LogHistogram") -> None:
        """Take in the values of another."""
        self._counts += other._counts
        self._sum += other._sum

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogHistogram):
            return NotImplemented
        return self._sum == other._sum and bool((self._counts == other._counts).all())

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return int(self._counts.sum())

    def stats(self) -> Stats:
        """The exact mean; percentiles within BOUND."""
        n = len(self)
        if not n:
            return Stats(None, None, None, None, None, 0)
        at = self._ranked()
        p50, p90, p95, p99 = (_quantile(at, n, q) for q in PERCENTS)
        return Stats(self._sum / (n * PS), p50, p90, p95, p99, count=n)

    def percentile(self, q: int) -> float | None:
        """The `q`-th percentile in seconds, within BOUND; None without a value."""
        n = len(self)
        return _quantile(self._ranked(), n, q) if n else None

    def curve(self, shares: Sequence[float]) -> Sequence[float]:
        """Percentiles that need not be whole, within BOUND; empty without a value."""
        n, at = len(self), self._ranked()
        return [_quantile(at, n, share) for share in shares] if n else []

    def _ranked(self) -> Callable[[int], float]:
        """A function that gives the value of a rank, from 0 on, as the middle of its class, in picoseconds."""
        above = class_middles(BITS)
        middles = np.concatenate((-above[:0:-1], above))
        reached = self._counts.cumsum()
        return lambda rank: float(middles[np.searchsorted(reached, rank, "right")])


def _quantile(at: Callable[[int], float], n: int, percent: float) -> float:
    """Between the values of two neighbouring ranks as in `percentiles.percentile`."""
    place = percent * (n - 1) / 100
    low = int(place)
    x, rest = at(low), place - low
    return (x + rest * (at(low + 1) - x) if rest else x) / PS
