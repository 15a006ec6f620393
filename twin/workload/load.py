"""How much is asked for when: requests and tokens by second, however long a trace is."""

from array import array
from dataclasses import dataclass
from math import sqrt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from twin.clock import PS, to_seconds
from twin.compiled import remade

Counts: TypeAlias = npt.NDArray[np.int64]

MOST_BINS = 1 << 20
"""Beyond them, bins are joined by twos."""


@dataclass(frozen=True)
class Slice:
    """What is asked for in a part of the time."""

    from_s: float
    to_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / (self.to_s - self.from_s)


@dataclass(frozen=True)
class Cost:
    """What one replica needs for the tokens of saturated traffic, in seconds of its time."""

    prompt_token_s: float
    output_token_s: float

    def __reduce__(self) -> tuple[Any, ...]:
        return remade(self)

    def of(self, part: Slice) -> float:
        """Share of one replica's time that the requests of a slice need."""
        need_s = self.prompt_token_s * part.prompt_tokens + self.output_token_s * part.output_tokens
        return need_s / (part.to_s - part.from_s)


COUNT = (1.0, 0.0, 0.0)
"""Weights under which the busiest part of the time is the one with most requests."""


class Load:
    """Requests and tokens in bins of equal width from the first request on: a second each, or more if it lasts long."""

    def __init__(self, bin_ps: int = PS) -> None:
        self.bin_ps = bin_ps
        self._start_ps: int | None = None
        self.first_ps = self.last_ps = 0
        self.requests = self.prompt_tokens = self.output_tokens = 0
        self._columns = (array("q"), array("q"), array("q"))

    def add(self, at_ps: int, prompt_tokens: int, output_tokens: int) -> None:
        """One request."""
        if self._start_ps is None:
            self._start_ps = at_ps // self.bin_ps * self.bin_ps
            self.first_ps = at_ps
        self.last_ps = at_ps
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        at_ps -= self._start_ps
        requests, prompt, output = self._columns
        at = at_ps // self.bin_ps
        while at >= len(requests):
            if at >= MOST_BINS:
                self._join()
                requests, prompt, output = self._columns
                at = at_ps // self.bin_ps
                continue
            missing = bytes(8 * (at + 1 - len(requests)))
            for column in self._columns:
                column.frombytes(missing)
        requests[at] += 1
        prompt[at] += prompt_tokens
        output[at] += output_tokens

    def _join(self) -> None:
        self.bin_ps *= 2
        self._columns = tuple(array("q", _sums(column, 2).tobytes()) for column in self._columns)  # type: ignore[assignment]

    @property
    def window_ps(self) -> int:
        """Width of the windows among which a busiest one is looked for: a minute, less if time is short."""
        span_ps = self.last_ps - self.first_ps
        return PS * (60 if span_ps >= 600 * PS else 10 if span_ps >= 100 * PS else 1)

    def slices(self, width_ps: int, to_ps: int | None = None) -> list[Slice]:
        """The time up to `to_ps` (None = the last request) in slices of whole bins of about this width.

        The last one may be shorter.
        """
        start_ps = self._start_ps or 0
        from_ps, to_ps = self.first_ps, self.last_ps + 1 if to_ps is None else to_ps
        first, end = (from_ps - start_ps) // self.bin_ps, -(-(to_ps - start_ps) // self.bin_ps)
        times = max(1, round(width_ps / self.bin_ps))
        sums = [_sums(column[first:end], times) for column in self._columns]
        return [
            Slice(
                to_seconds(start_ps + (first + i * times) * self.bin_ps),
                to_seconds(start_ps + min(first + (i + 1) * times, end) * self.bin_ps),
                *(int(column[i]) for column in sums),
            )
            for i in range(len(sums[0]))
        ]

    def busiest(self, weights: tuple[float, float, float] = COUNT) -> Slice:
        """The window of window_ps with most in it: `weights` for each request, prompt token and output token.

        Windows lie side by side from the first request on; the last may reach beyond the end.
        """
        times = max(1, round(self.window_ps / self.bin_ps))
        sums = [_sums(column, times) for column in self._columns]
        work = sum(weight * column for weight, column in zip(weights, sums, strict=True))
        at = int(np.argmax(work))
        from_ps = (self._start_ps or 0) + at * times * self.bin_ps
        return Slice(
            to_seconds(from_ps),
            to_seconds(from_ps + times * self.bin_ps),
            *(int(column[at]) for column in sums),
        )

    def dispersion(self, width_ps: int) -> float | None:
        """Index of dispersion of counts: variance over mean of the requests in whole windows of this width.

        1 for Poisson arrivals, more for bursty ones. None for a width that is no multiple of a bin, and with fewer than
        20 windows.
        """
        times, rest = divmod(width_ps, self.bin_ps)
        windows = (self.last_ps - self.first_ps) // width_ps if not rest else 0
        if windows < 20:
            return None
        counts = _sums(self._columns[0][: windows * times], times)
        mean = float(counts.mean())
        return float(counts.var()) / mean if mean else None


def _sums(column: "array[int]", times: int) -> Counts:
    """Sums of each `times` entries, the last of what is left."""
    values: Counts = np.array(column, dtype=np.int64)
    padded = np.zeros(-(-len(values) // times) * times, dtype=np.int64)
    padded[: len(values)] = values
    result: Counts = padded.reshape(-1, times).sum(axis=1)
    return result


class Gaps:
    """Spread of the gaps between arrivals, exact."""

    __slots__ = ("_last_ps", "_square", "_sum", "count")

    def __init__(self) -> None:
        self._last_ps: int | None = None
        self._sum = self._square = self.count = 0

    def add(self, at_ps: int) -> None:
        """The next arrival."""
        if self._last_ps is not None:
            gap = at_ps - self._last_ps
            self._sum += gap
            self._square += gap * gap
            self.count += 1
        self._last_ps = at_ps

    @property
    def cv(self) -> float | None:
        """Standard deviation over mean: 1 for Poisson arrivals, 0 for equal gaps. None without two gaps."""
        if self.count < 2 or not self._sum:
            return None
        return sqrt(max(self.count * self._square - self._sum**2, 0)) / self._sum
