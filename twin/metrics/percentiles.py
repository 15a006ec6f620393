"""Mean and percentiles of durations: exact, whatever their number.

Durations come as whole picoseconds. Sums and interpolations are done in integers and turned into
seconds by one division at the end, so that a figure does not depend on the order of the samples.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from twin.clock import PS

Durations: TypeAlias = npt.NDArray[np.int64]
"""Picoseconds, one entry a sample."""

Weights: TypeAlias = npt.NDArray[np.int64]
"""How often each duration occurred."""

Part: TypeAlias = tuple[Durations, Weights | None]
"""Durations and how often each occurred; None = once."""

Parts: TypeAlias = Iterable[Part]
"""Many durations, part by part, as often as one asks."""

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


class Spread(Protocol):
    """How the values of one duration of one group of requests are spread."""

    def add(self, parts: Parts) -> None:
        """More values."""

    def stats(self) -> Stats:
        """Mean and percentiles."""

    def percentile(self, q: int) -> float | None:
        """The `q`-th percentile in seconds; None without a value."""

    def curve(self, shares: Sequence[float]) -> Sequence[float]:
        """Percentiles that need not be whole, for charts; empty without a value."""


class Samples:
    """The values themselves: every figure is exact. They are looked up when they are needed, not kept."""

    def __init__(self) -> None:
        self._parts: list[Parts] = []

    def add(self, parts: Parts) -> None:
        """More values."""
        self._parts.append(parts)

    def stats(self) -> Stats:
        """Mean and percentiles."""
        each = self._each()
        first, second = next(each, None), next(each, None)
        if first is not None and first[1] is None and second is None:
            return stats(first[0])
        return pooled_stats(self._each)

    def percentile(self, q: int) -> float | None:
        """The `q`-th percentile in seconds; None without a value."""
        values = self._all()
        return percentile(values, q) if len(values) else None

    def curve(self, shares: Sequence[float]) -> Sequence[float]:
        """Percentiles that need not be whole, for charts; empty without a value."""
        values = self._all()
        found: list[float] = (
            np.percentile(seconds_of(values), shares).tolist() if len(values) else []
        )
        return found

    def _each(self) -> Iterator[Part]:
        return (part for parts in self._parts for part in parts)

    def _all(self) -> Durations:
        found = [v if w is None else np.repeat(v, w) for v, w in self._each()]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def stats(samples_ps: Durations) -> Stats:
    """Mean and percentiles of `samples_ps` (picoseconds, >= 0, any order) in seconds."""
    n = len(samples_ps)
    if n == 0:
        return Stats(None, None, None, None, None, 0)
    lows = [_rank(q, n)[0] for q in PERCENTS]
    part = np.partition(samples_ps, sorted({*lows, *(min(low + 1, n - 1) for low in lows)}))
    p50, p90, p95, p99 = (_percentile(lambda i: int(part[i]), n, q) for q in PERCENTS)
    return Stats(_mean(samples_ps), p50, p90, p95, p99, count=n)


def seconds_of(values_ps: Durations) -> npt.NDArray[np.float64]:
    """The float nearest to each value in seconds, as `twin.clock.to_seconds` gives it."""
    found = values_ps / PS
    # Above, a value is not a float, and would be rounded twice.
    for place in np.flatnonzero(values_ps > 2**53).tolist():
        found[place] = int(values_ps[place]) / PS
    return found


FINE_BITS = 10
"""Binary digits by which `pooled_stats` tells classes of values apart in its first pass, and by which more in each."""

FEW = 1 << 20
"""Values that may be in memory together."""


def pooled_stats(parts: Callable[[], Parts]) -> Stats:
    """`stats` of the values (>= 0) of all parts together, without having them in memory together.

    The first pass counts values by class, further ones by finer classes within those in which a percentile lies, until
    these hold few values; the last one looks at these.
    """
    counts = np.zeros(classes(FINE_BITS), dtype=np.int64)
    total, number = 0, 0
    held: list[Part] = []  # for the passes that follow, where they are few
    for values, weights in parts():
        counts += count_classes(values, weights, FINE_BITS)
        total += exact_sum(values, weights)
        number += len(values)
        if number <= FEW:
            held.append((values, weights))
        else:
            held.clear()
    if number <= FEW:
        parts = held.__iter__
    n = int(counts.sum())
    if n == 0:
        return Stats(None, None, None, None, None, 0)
    lows = [_rank(q, n)[0] for q in PERCENTS]
    ranks = np.array(sorted({*lows, *(min(low + 1, n - 1) for low in lows)}))
    found = dict(zip(ranks.tolist(), _values_at(ranks, counts, parts), strict=True))
    p50, p90, p95, p99 = (_percentile(found.__getitem__, n, q) for q in PERCENTS)
    return Stats(total / (n * PS), p50, p90, p95, p99, count=n)


def _values_at(ranks: Weights, counts: Weights, parts: Callable[[], Parts]) -> list[int]:
    """The values of these ranks (ascending, from 0 on); `counts` tells how many values each class of FINE_BITS has."""
    bits = FINE_BITS
    names = np.arange(len(counts)) + (
        (1023 << bits) - 1
    )  # the leading bits of the floats in each class
    names[0] = 0
    homes, below, held = _homes(ranks, names, counts, counts.cumsum() - counts)
    while held.sum() > FEW and bits + FINE_BITS <= 52:
        bits += FINE_BITS
        finer = np.zeros(len(homes) << FINE_BITS, dtype=np.int64)
        for values, weights in parts():
            home, inside = _home_of(values, homes, bits - FINE_BITS)
            digits = _leading(values[inside], bits) & ((1 << FINE_BITS) - 1)
            place = (home[inside] << FINE_BITS) + digits
            times = None if weights is None else weights[inside]
            finer += np.bincount(place, times, len(finer)).astype(np.int64, copy=False)
        in_home = finer.reshape(len(homes), -1)
        starts = in_home.cumsum(axis=1) - in_home + below[:, None]
        names = (homes[:, None] << FINE_BITS) + np.arange(1 << FINE_BITS)
        homes, below, held = _homes(ranks, names.ravel(), finer, starts.ravel())
    kept = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    for values, weights in parts():
        _, inside = _home_of(values, homes, bits)
        values = values[inside]
        times = np.ones_like(values) if weights is None else weights[inside]
        kept = _merged(np.concatenate((kept[0], values)), np.concatenate((kept[1], times)))
    reached = kept[1].cumsum()
    home = np.searchsorted(below, ranks, "right") - 1
    # Ranks among what was kept: less by what lies below and was not.
    skipped = below - (held.cumsum() - held)
    places = np.searchsorted(reached, ranks - skipped[home], "right")
    found: list[int] = kept[0][places].tolist()
    return found


def _merged(values: Durations, weights: Weights) -> tuple[Durations, Weights]:
    """Each value once, in order."""
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return values[starts], np.add.reduceat(weights, starts) if len(starts) else weights


def _homes(
    ranks: Weights, names: Weights, counts: Weights, starts: Weights
) -> tuple[Weights, Weights, Weights]:
    """Of the classes in which the ranks lie: names, how many values are below each, how many it has."""
    filled = np.flatnonzero(counts)
    homes = filled[np.unique(np.searchsorted(starts[filled], ranks, "right") - 1)]
    return names[homes], starts[homes], counts[homes]


def _home_of(values: Durations, homes: Weights, bits: int) -> tuple[Weights, npt.NDArray[np.bool_]]:
    """(position among `homes`, whether the value is of that class at all) by value."""
    names = _leading(values, bits)
    home = np.minimum(np.searchsorted(homes, names), len(homes) - 1)
    return home, homes[home] == names


def _leading(values: Durations, bits: int) -> Weights:
    """The leading bits of each value (>= 0) as a float: its magnitude and `bits` digits, in the order of the values."""
    found: Weights = values.astype(np.float64).view(np.int64) >> (52 - bits)
    return found


def class_of(values: Durations, bits: int) -> Durations:
    """The class of each value (>= 0): its binary magnitude and the `bits` digits after the first.

    Classes are numbered from 0 in the order of their values; 0 is a class of its own.
    """
    return np.maximum(_leading(values, bits) - ((1023 << bits) - 1), 0)


def classes(bits: int) -> int:
    """How many classes there are up to the largest value of 64 bits."""
    return (64 << bits) + 1


def class_middles(bits: int) -> Durations:
    """The middle of each class: no value in it differs from it by more than a share of 2 ** -(bits + 1)."""
    first = (1023 << bits) - 1
    edges = ((np.arange(classes(bits) + 1) + first) << (52 - bits)).view(np.float64)
    middles = (edges[:-1] + edges[1:]) / 2
    # The first holds 0 alone. Below 2 ** bits a class holds a single number, its lower edge, or none.
    whole = np.where(edges[1:] - edges[:-1] <= 1, np.ceil(edges[:-1]), middles)
    whole[0] = 0
    return np.minimum(whole, float(2**63 - 1024)).astype(np.int64)


def count_classes(values: Durations, weights: Weights | None, bits: int) -> Weights:
    """How many of the values lie in each class."""
    found = np.bincount(class_of(values, bits), weights, classes(bits))
    return found.astype(np.int64, copy=False)


def exact_sum(values: Durations, weights: Weights | None = None) -> int:
    """The sum, each value taken as often as it occurred. At most 2 ** 31 of them are looked at together."""
    # A plain int64 sum overflows at 106 days of picoseconds, which a busy run adds up to.
    high, low = values >> 32, values & 0xFFFFFFFF
    if weights is None:
        return (int(high.sum()) << 32) + int(low.sum())
    return (int(high @ weights) << 32) + int(low @ weights)


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
    return exact_sum(samples_ps) / (len(samples_ps) * PS)
