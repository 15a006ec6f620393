"""When the tokens of a request came, without a copy for each request: steps of its engine that gave one each."""

from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int; compiled, one of 64 bits

WRITE: Final = Struct("4q").pack_into
STRETCH_BYTES: Final = 32  # four numbers
SPARE: Final = 512
"""Stretches that there is room for from the start, and again each time it is used up."""

STRETCHES: Final = 1 << 16
"""Stretches of steps that are written out together."""


class Timeline:
    """When the steps of one engine were over, in picoseconds, by the number of the step.

    Steps whose durations grow evenly are a few numbers, however many they are.
    """

    __slots__ = ("_end", "_growth", "_next", "_number", "_spare", "_stretches", "first", "last")

    def __init__(self, first: int = 0) -> None:
        self.first = first
        """Number of the first step that is known."""
        self.last: i64 = first - 1
        """Number of the last step that is over."""
        # Of each stretch: number of its first step, when that began, how long it took, growth. Then spare ones.
        self._stretches = array("q")
        self._number = self._spare = 0
        # When the last step was over, and how long one like the last stretch would take after it.
        self._end: i64 = -1
        self._next: i64 = -1
        self._growth: i64 = -1

    def add(self, count: "i64", start_ps: "i64", first_ps: "i64", growth_ps: "i64") -> None:
        """So many more steps are over; the first began at `start_ps` and took `first_ps`, each next one more."""
        if growth_ps != self._growth or first_ps != self._next or start_ps != self._end:
            if not self._spare:
                self._stretches.frombytes(bytes(STRETCH_BYTES * SPARE))
                self._spare = SPARE
            at = STRETCH_BYTES * self._number
            WRITE(self._stretches, at, self.last + 1, start_ps, first_ps, growth_ps)
            self._number += 1
            self._spare -= 1
            self._growth = growth_ps
        self.last += count
        self._end = start_ps + count * first_ps + growth_ps * (count * (count - 1) // 2)
        self._next = first_ps + count * growth_ps

    def end(self, step: "i64") -> "i64":
        """When `step` was over."""
        if step == self.last:
            return self._end
        at = 4 * self._stretch_of(step)
        number, start_ps, first_ps, growth_ps = self._stretches[at : at + 4]
        return _end(start_ps, first_ps, growth_ps, step - number + 1)

    def _stretch_of(self, step: "i64") -> int:
        """Number of the stretch that a step is in; it is asked for the newest ones most."""
        stretches = self._stretches
        low, high = 0, self._number - 1
        back = 1
        while high - back > low and stretches[4 * (high - back)] > step:
            high -= back
            back *= 2
        low = max(low, high - back)
        while low < high:
            middle = (low + high + 1) // 2
            if stretches[4 * middle] > step:
                high = middle - 1
            else:
                low = middle
        return low

    def ends(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """When each of the steps from `first` to `last` was over."""
        found = np.empty(last - first + 1, dtype=np.int64)
        stop = self._stretch_of(last) + 1
        for low in range(self._stretch_of(first), stop, STRETCHES):
            high = min(stop, low + STRETCHES)
            rows = np.frombuffer(self._stretches[4 * low : 4 * high], dtype=np.int64).reshape(-1, 4)
            begin = int(rows[0, 0])
            after = last + 1 if high == stop else self._stretches[4 * high]
            number, start_ps, first_ps, growth_ps = np.ascontiguousarray(rows.T)
            counts = np.diff(number, append=after)
            i = np.arange(begin, after)
            i -= np.repeat(number, counts)
            ends = np.repeat(start_ps + first_ps, counts)
            ends += i * np.repeat(first_ps, counts)
            i *= i + 1
            i >>= 1
            i *= np.repeat(growth_ps, counts)
            ends += i
            skipped = max(0, first - begin)
            found[begin + skipped - first : after - first] = ends[skipped:]
        return found

    def gaps(self, first: "i64", last: "i64") -> "array[int]":
        """The times between the ends of the steps from `first` to `last`."""
        low, high = self._stretch_of(first), self._stretch_of(last)
        numbers = self._stretches[4 * low : 4 * high + 4].tolist()
        found: list[int] = []
        step, end_ps = first, self.end(first)
        for at in range(0, len(numbers), 4):
            number: i64 = numbers[at]
            start_ps: i64 = numbers[at + 1]
            first_ps: i64 = numbers[at + 2]
            growth_ps: i64 = numbers[at + 3]
            stop: i64 = last if at + 4 == len(numbers) else numbers[at + 4] - 1
            if step < number:  # the engine may have been idle before
                found.append(start_ps + first_ps - end_ps)
                step += 1
            if step < stop:
                duration_ps = first_ps + (step + 1 - number) * growth_ps
                if step + 1 == stop:
                    found.append(duration_ps)
                elif growth_ps:
                    end = duration_ps + (stop - step) * growth_ps
                    found.extend(range(duration_ps, end, growth_ps))
                else:
                    found.extend([duration_ps] * (stop - step))
                step = stop
            end_ps = _end(start_ps, first_ps, growth_ps, stop - number + 1)
        return array("q", found)

    def forget(self, before: int) -> None:
        """Nobody will ask again for the steps before number `before`."""
        if self._number:
            gone = self._stretch_of(before)
            del self._stretches[: 4 * gone]
            self._number -= gone
            self.first = self._stretches[0]


def _end(start_ps: "i64", first_ps: "i64", growth_ps: "i64", count: "i64") -> "i64":
    """When `count` steps are over."""
    return start_ps + count * first_ps + growth_ps * (count * (count - 1) // 2)


class StepGaps(Sequence[int]):
    """The gaps between the tokens of one request that got one from each step `first` to `last` of an engine.

    Compares equal to any sequence of the same numbers.
    """

    __slots__ = ("first", "last", "timeline")

    def __init__(self, timeline: Timeline, first: int, last: int) -> None:
        self.timeline = timeline
        self.first = first
        self.last = last

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[int]:
        return iter(self.to_array())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return self.to_array()[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence | array):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self.first, self.last))

    def __reduce__(self) -> tuple[type["array[int]"], tuple[str, list[int]]]:
        return array, ("q", self.to_array().tolist())  # a copy, also in another process

    @property
    def total_ps(self) -> int:
        """Sum of the gaps."""
        return self.timeline.end(self.last) - self.timeline.end(self.first)

    def to_array(self) -> "array[int]":
        """The gaps, each by itself."""
        return self.timeline.gaps(self.first, self.last)


def total_ps(gaps: Sequence[int]) -> int:
    """Sum of gaps, cheaply where they are those of steps."""
    return gaps.total_ps if isinstance(gaps, StepGaps) else sum(gaps)
