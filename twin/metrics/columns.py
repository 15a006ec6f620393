"""A block of records as columns, and the durations that metrics are made of."""

from array import array
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from twin.metrics.percentiles import Durations, Part, Parts
from twin.metrics.records import OUTCOMES
from twin.metrics.token_times import Timeline

NONE: Final = -1
"""Stands in a column for None; in a column of durations, for a request that has none."""

EXPLICIT: Final = -1
"""Stands for a timeline where gaps are listed one by one."""

Numbers: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = npt.NDArray[np.int64]
"""Positions of some records of a block, ascending."""

STEPS = 1 << 18
"""Steps whose gaps are looked at together."""

Name = TypeVar("Name")


class Names(dict[Name, int], Generic[Name]):
    """Numbers for names, from 0 on in the order in which they are first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[Name] = []

    def __missing__(self, name: Name) -> int:
        self[name] = number = len(self.names)
        self.names.append(name)
        return number


KEPT_STEPS = 3_000_000
"""Steps whose ends are kept, 8 bytes each."""


class Columns:
    """Records in the order they were added; docs/metrics.md defines the durations.

    As long as it is in use, nothing can be added to the table it comes from.
    """

    def __init__(
        self,
        rows: npt.NDArray[np.void],
        gaps: "array[int]",
        tiers: Names[str],
        reasons: Names[str],
        timelines: Names[Timeline],
    ) -> None:
        self._rows = rows
        self._gaps = gaps
        self.tiers = tiers.names
        """By the number in column `tier`."""
        self.reasons = reasons.names
        self._timelines = timelines.names
        self._durations: dict[str, Durations] = {}
        self._ends: dict[Timeline, tuple[int, Durations]] = {}
        self._room = KEPT_STEPS

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> Numbers:
        """A column by the name of the record's attribute."""
        return self._rows[name]

    @cached_property
    def completed(self) -> npt.NDArray[np.bool_]:
        """Which requests completed."""
        return np.asarray(self._rows["outcome"] == OUTCOMES.index("completed"))

    def of_tiers(self) -> Iterator[tuple[str, Rows]]:
        """The tiers that have a record, with theirs."""
        column = self._rows["tier"]
        for number in _different(column):
            yield self.tiers[number], np.flatnonzero(column == number)

    def durations(self, latency: str) -> Durations:
        """Picoseconds by request, NONE where it has no such duration; for itl its longest gap."""
        if latency not in self._durations:
            self._durations[latency] = self._duration(latency)
        return self._durations[latency]

    def samples(self, latency: str, rows: Rows) -> Parts:
        """All values of a latency that these requests have: for itl every gap, else one a request at most."""
        return _Gaps(self, rows) if latency == "itl" else _Values(self, latency, rows)

    def _duration(self, latency: str) -> Durations:
        rows = self._rows
        match latency:
            case "ttft":
                return _between(rows["arrival_ps"], rows["first_token_ps"])
            case "tpot":
                return self._mean_gaps()
            case "itl":
                return self._longest_gaps()
            case "e2e":
                ends = np.where(self.completed, rows["finish_ps"], NONE)
                return _between(rows["arrival_ps"], ends)
            case "queue":
                return _between(rows["arrival_ps"], rows["first_scheduled_ps"])
            case _:
                return _between(rows["first_scheduled_ps"], rows["first_token_ps"])

    # --- gaps between tokens --------------------------------------------------------------

    def with_gaps(self, rows: Rows) -> Iterator[tuple[Timeline | None, Rows]]:
        """Those of some records that have gaps, by timeline; None if their gaps are listed."""
        kept = rows[self._rows["itl_count"][rows] > 0]
        column = self._rows["itl_timeline"][kept]
        for number in _different(column):
            timeline = None if number == EXPLICIT else self._timelines[number]
            yield timeline, kept[column == number]

    @property
    def everybody(self) -> Rows:
        """The positions of all records."""
        return np.arange(len(self), dtype=np.int64)

    def listed(self, rows: Rows) -> Durations:
        """The gaps of records whose gaps are listed, in their order."""
        every = np.frombuffer(self._gaps, dtype=np.int64)
        has = self._rows["itl_timeline"] == EXPLICIT
        wanted = np.zeros(len(self), dtype=np.bool_)
        wanted[rows] = True
        if (wanted | ~has).all():
            return every
        result: Durations = every[np.repeat(wanted[has], self._rows["itl_count"][has])]
        return result

    def steps(self, timeline: Timeline, rows: Rows) -> tuple[Numbers, Numbers, Durations]:
        """(first, last, ends): request i has a token of each step first[i] to last[i], and step k ended at ends[k]."""
        first = self["itl_start"][rows]
        last = first + self["itl_count"][rows]
        base = int(first.min())
        return first - base, last - base, self._ends_of(timeline, base, int(last.max()))

    def _ends_of(self, timeline: Timeline, first: int, last: int) -> Durations:
        """When its steps from `first` to `last` were over; few of them are worked out once for all that ask."""
        begin, ends = self._ends.get(timeline, (0, None))
        if ends is None and (number := timeline.last + 1 - timeline.first) <= self._room:
            self._room -= number
            begin, ends = timeline.first, timeline.ends(timeline.first, timeline.last)
            self._ends[timeline] = begin, ends
        if ends is None or not begin <= first <= last < begin + len(ends):
            return timeline.ends(first, last)
        return ends[first - begin : last - begin + 1]

    def _mean_gaps(self) -> Durations:
        """To the nearest picosecond."""
        found = np.full(len(self), NONE, dtype=np.int64)
        for timeline, rows in self.with_gaps(self.everybody):
            n = self["itl_count"][rows]
            if timeline is None:
                total = np.add.reduceat(self.listed(rows), _starts(n))
            else:
                first, last, ends = self.steps(timeline, rows)
                total = ends[last] - ends[first]
            found[rows] = (2 * total + n) // (2 * n)
        return found

    def _longest_gaps(self) -> Durations:
        found = np.full(len(self), NONE, dtype=np.int64)
        for timeline, rows in self.with_gaps(self.everybody):
            if timeline is None:
                starts = _starts(self["itl_count"][rows])
                found[rows] = np.maximum.reduceat(self.listed(rows), starts)
            else:
                first, last, ends = self.steps(timeline, rows)
                # Between each two of its ranges reduceat looks at another, of which nothing is kept.
                ranges = np.column_stack((first, last)).ravel()
                gaps = np.append(np.diff(ends), 0)
                found[rows] = np.maximum.reduceat(gaps, ranges)[::2]
        return found


class _Values:
    """The values of a latency, one a request."""

    def __init__(self, columns: Columns, latency: str, rows: Rows) -> None:
        self._columns, self._latency, self._rows = columns, latency, rows

    def __iter__(self) -> Iterator[Part]:
        values = self._columns.durations(self._latency)[self._rows]
        yield values[values != NONE], None


class _Gaps:
    """All gaps of some requests. Those of one engine's steps are told once, with how many requests had each."""

    def __init__(self, columns: Columns, rows: Rows) -> None:
        self._columns, self._rows = columns, rows

    def __iter__(self) -> Iterator[Part]:
        columns = self._columns
        for timeline, rows in columns.with_gaps(self._rows):
            if timeline is None:
                yield columns.listed(rows), None
            else:
                for gaps, times, _ in gaps_of_steps(*columns.steps(timeline, rows)):
                    yield gaps, times


def gaps_of_steps(
    first: Numbers, last: Numbers, ends: Durations
) -> Iterator[tuple[Durations, Numbers, Numbers]]:
    """(gaps, how many requests had each, when it ended), from what `Columns.steps` gives, without what nobody had.

    They come STEPS at a time, so that the steps of a long run are never in memory twice.
    """
    had = np.zeros(len(ends) + 1, dtype=np.int32)
    np.add.at(had, first + 1, 1)
    np.subtract.at(had, last + 1, 1)
    np.cumsum(had, out=had)
    for start in range(1, len(ends), STEPS):
        own = had[start : min(start + STEPS, len(ends))].astype(np.int64)
        seen = np.flatnonzero(own)
        at = ends[start - 1 : start + STEPS]
        yield np.diff(at)[seen], own[seen], at[1:][seen]


def _different(column: Numbers) -> list[int]:
    """The numbers (>= -1) that occur in a column, ascending."""
    found: list[int] = (np.flatnonzero(np.bincount(column + 1)) - 1).tolist()
    return found


def _between(start_ps: Any, end_ps: Any) -> Durations:
    return np.where((start_ps == NONE) | (end_ps == NONE), NONE, end_ps - start_ps)


def _starts(counts: Numbers) -> Numbers:
    """Where each of several runs of these lengths begins."""
    return counts.cumsum() - counts
