"""Mean and percentiles of durations: exact, whatever their number.

Durations come as whole picoseconds. Sums and interpolations are done in integers and turned into
seconds by one division at the end, so that a figure does not depend on the order of the samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from twin.clock import PS

Durations: TypeAlias = npt.NDArray[np.int64]
"""Picoseconds, one entry a sample."""

PERCENTS = (50, 90, 95, 99)

STATS = (*(f"p{q}" for q in PERCENTS), "mean")
"""The statistics given of every latency, under the names that objectives use. A mean can fall while everybody waits
longer (more requests dilute a few slow ones), so it comes last."""


@dataclass(frozen=True, slots=True)
class Stats:
    """One latency of one group of requests, in seconds. None where there is no sample."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    count: int
    """Samples it rests on."""

    def to_dict(self) -> dict[str, float | None]:
        """The statistics by name, without the number of samples."""
        return {name: getattr(self, name) for name in STATS}


def stats(samples_ps: Durations) -> Stats:
    """Mean and percentiles of `samples_ps` (picoseconds, >= 0, any order) in seconds."""
    n = len(samples_ps)
    if n == 0:
        return Stats(None, None, None, None, None, 0)
    lows = [_rank(q, n)[0] for q in PERCENTS]
    part = np.partition(samples_ps, sorted({*lows, *(min(low + 1, n - 1) for low in lows)}))
    p50, p90, p95, p99 = (_percentile(lambda i: int(part[i]), n, q) for q in PERCENTS)
    return Stats(_mean(samples_ps), p50, p90, p95, p99, count=n)


def percentile(samples_ps: Durations, q: int) -> float:
    """The `q`-th percentile (whole percent, 0 to 100) of at least one sample, in seconds.

    With the samples sorted as x[0] .. x[n-1] and h = q / 100 * (n - 1) it is
    x[floor(h)] + (h - floor(h)) * (x[floor(h) + 1] - x[floor(h)]): numpy's default, and type 7 of
    Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996).
    """
    ordered = np.sort(samples_ps)
    return _percentile(lambda i: int(ordered[i]), len(ordered), q)


def _rank(q: int, n: int) -> tuple[int, int]:
    """Whole part of h = q / 100 * (n - 1), and its fraction in hundredths."""
    return divmod(q * (n - 1), 100)


def _percentile(sorted_at: Callable[[int], int], n: int, q: int) -> float:
    low, hundredths = _rank(q, n)
    x = sorted_at(low)
    step = sorted_at(low + 1) - x if hundredths else 0
    return (100 * x + hundredths * step) / (100 * PS)


def _mean(samples_ps: Durations) -> float:
    # A plain int64 sum overflows at 106 days of picoseconds, which a busy run adds up to.
    high = int((samples_ps >> 32).sum())
    low = int((samples_ps & 0xFFFFFFFF).sum())
    return ((high << 32) + low) / (len(samples_ps) * PS)
