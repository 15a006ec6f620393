"""When requests come: gaps between arrivals, stretched and squeezed by a rate that may change with time.

A process is two things. The *gaps* say how regular arrivals are at a rate of one; the *rate* says how fast that clock
runs. With L(t) the integral of the rate up to t, the k-th arrival is at the t with L(t) = g1 + ... + gk (a renewal
process by time change; with exponential gaps, the non-homogeneous Poisson process).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, pairwise
from math import cos, pi, sqrt
from random import Random
from typing import Any, NamedTuple

from twin.clock import PS
from twin.compiled import remade
from twin.workload.gaps import Equal, Gaps

HORIZON_PS = 10**9 * PS
"""How long a rate is held after its last point: longer than any run."""

SINE_PIECES = 288
"""Straight lines that stand for one period of a sine: one for each 5 minutes of a day."""


# --- rates ----------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A stretch of time in which the rate goes in a straight line."""

    length_ps: int
    start: float
    """Arrivals per second at its beginning."""
    end: float
    """Arrivals per second at its end."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate that changes with time."""

    written: tuple[Piece, ...]
    held: float | None
    """The rate for ever after the written pieces; None = they start again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    @property
    def period_ps(self) -> int:
        """After how long it starts again; 0 = never."""
        return 0 if self.held is not None else sum(piece.length_ps for piece in self.written)

    @property
    def pieces_in_period(self) -> int:
        """Pieces of one period."""
        return len(self.written)

    @property
    def mean(self) -> float:
        """Arrivals per second over a long time."""
        if self.held is not None:
            return self.held
        return sum((p.start + p.end) / 2 * p.length_ps for p in self.written) / self.period_ps

    def pieces(self, rng: Random) -> Iterator[Piece]:
        """The pieces one after another."""
        if self.held is None:
            yield from cycle(self.written)
        else:
            yield from self.written
            yield Piece(HORIZON_PS, self.held, self.held)


def points_curve(points: tuple[tuple[int, float], ...], repeat_ps: int | None) -> Curve:
    """Straight lines between (ps, rate) points, the first at 0, the last rate held.

    With `repeat_ps` it starts again there, after a last line back to the first rate.
    """
    if repeat_ps is not None and repeat_ps > points[-1][0]:
        points = (*points, (repeat_ps, points[0][1]))
    pieces = tuple(Piece(t1 - t0, r0, r1) for (t0, r0), (t1, r1) in pairwise(points))
    return Curve(pieces, points[-1][1] if repeat_ps is None else None)


def steps_curve(steps: tuple[tuple[int, float], ...], repeat_ps: int | None) -> Curve:
    """(ps, rate) steps, the first at 0: each rate holds until the next, the last for ever or until `repeat_ps`."""
    last_ps, last = steps[-1]
    pieces = [Piece(t1 - t0, rate, rate) for (t0, rate), (t1, _) in pairwise(steps)]
    if repeat_ps is None:
        return Curve(tuple(pieces), last)
    return Curve((*pieces, Piece(repeat_ps - last_ps, last, last)), None)


def sine_curve(mean: float, amplitude: float, period_ps: int, peak_ps: int) -> Curve:
    """mean * (1 + amplitude * cos(2 pi (t - peak) / period)), in SINE_PIECES straight lines a period.

    The lines lie below the true rate by at most amplitude * (pi / SINE_PIECES)**2 / 2, 0.006 % of the mean.
    """
    edges = [i * period_ps // SINE_PIECES for i in range(SINE_PIECES + 1)]
    rates = [
        max(0.0, mean * (1 + amplitude * cos(2 * pi * (t - peak_ps) / period_ps))) for t in edges
    ]
    rates[-1] = rates[0]
    pieces = (Piece(edges[i + 1] - edges[i], rates[i], rates[i + 1]) for i in range(SINE_PIECES))
    return Curve(tuple(pieces), None)


@dataclass(frozen=True, slots=True)
class Bursts:
    """A rate that jumps between two values: quiet, burst, quiet, ... (a Markov-modulated process if not regular)."""

    rate: float
    """Arrivals per second outside bursts; 0 = none."""
    burst_rate: float
    """Arrivals per second inside a burst."""
    burst_ps: int
    """Length of a burst, the mean of it if not regular."""
    pause_ps: int
    """From the end of a burst to the next, the mean of it if not regular. A run begins with a pause."""
    regular: bool
    """True: all bursts and pauses are equal; False: their lengths are exponential."""

    period_ps = 0
    pieces_in_period = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    @property
    def mean(self) -> float:
        """Arrivals per second over a long time."""
        both = self.burst_ps + self.pause_ps
        return (self.rate * self.pause_ps + self.burst_rate * self.burst_ps) / both

    def pieces(self, rng: Random) -> Iterator[Piece]:
        """The pieces one after another."""
        quiet, loud = self.rate, self.burst_rate
        while True:
            pause, burst = self.pause_ps, self.burst_ps
            if not self.regular:
                pause, burst = (max(1, round(rng.expovariate(1.0) * ps)) for ps in (pause, burst))
            yield Piece(pause, quiet, quiet)
            yield Piece(burst, loud, loud)


# --- processes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Renewal:
    """Independent gaps at a rate."""

    gaps: Gaps
    rate: float | Curve | Bursts
    """Arrivals per second."""
    tick_ps: int = 0
    """Instants are put back to the last multiple of it, as a log with coarse stamps has them; 0 = not."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    @property
    def mean_rate(self) -> float:
        """Arrivals per second."""
        return self.rate if isinstance(self.rate, float) else self.rate.mean

    def instants(self, rng: Random, rate_rng: Random | None = None) -> Iterator[int]:
        """Picoseconds from the start of the run, ascending; without end unless the rate ends at 0.

        `rate_rng` is asked by rates that are themselves random. Every gap is rounded to a picosecond once, and the next
        starts from there; equal gaps at a plain rate are exact: the k-th comes at k / rate.
        """
        if not isinstance(self.rate, float):
            exact = self._on_curve(rng, self.rate, rate_rng or rng)
        elif isinstance(self.gaps, Equal):
            exact = _evenly(self.rate)
        else:
            exact = self._at_rate(rng, self.rate)
        if not self.tick_ps:
            return exact
        tick_ps = self.tick_ps
        return (now - now % tick_ps for now in exact)

    def _at_rate(self, rng: Random, rate: float) -> Iterator[int]:
        gap = self.gaps.drawn(rng)
        now = 0
        while True:
            now += round(gap() / rate * PS)
            yield now

    def _on_curve(self, rng: Random, rate: Curve | Bursts, rate_rng: Random) -> Iterator[int]:
        gap = self.gaps.drawn(rng)
        begin = 0
        left = 0.0 if isinstance(self.gaps, Equal) else gap()
        period_ps, pieces = rate.period_ps, rate.pieces_in_period
        per_period = rate.mean * (period_ps / PS)
        for number, (length_ps, start, end) in enumerate(rate.pieces(rate_rng)):
            if period_ps and number % pieces == 0 and left > per_period:
                periods = int(left / per_period)
                begin += periods * period_ps
                left -= periods * per_period
            seconds = length_ps / PS
            slope = (end - start) / seconds
            at_ps = 0
            while True:
                at = at_ps / PS
                now = start + slope * at
                rest = (now + end) / 2 * (seconds - at)
                if left >= rest:
                    left -= rest
                    break
                root = sqrt(max(now * now + 2 * slope * left, 0.0))
                step = 2 * left / (now + root) if left else 0.0
                at_ps = min(at_ps + round(step * PS), length_ps)
                yield begin + at_ps
                left = gap()
            begin += length_ps


def _evenly(rate: float) -> Iterator[int]:
    over, under = (PS / Fraction(str(rate))).as_integer_ratio()
    number = 0
    while True:
        yield (2 * number * over + under) // (2 * under)
        number += 1


@dataclass(frozen=True, slots=True)
class Batches:
    """Jobs handed in all at once, at given instants."""

    at_ps: tuple[int, ...]
    """Ascending."""
    size: int
    """Requests (conversations) at each instant."""
    every_ps: int | None
    """The instants repeat with this period; None = they come once."""

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    @property
    def mean_rate(self) -> float | None:
        """Per second over a long time; None if they come once."""
        return self.size * len(self.at_ps) * PS / self.every_ps if self.every_ps else None

    def instants(self, rng: Random, rate_rng: Random | None = None) -> Iterator[int]:
        """Picoseconds from the start of the run, ascending."""
        begin = 0
        while True:
            for at_ps in self.at_ps:
                for _ in range(self.size):
                    yield begin + at_ps
            if self.every_ps is None:
                return
            begin += self.every_ps
