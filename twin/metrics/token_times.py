"""When the tokens of a request came, without a copy for each request: steps of its engine that gave one each."""

from array import array
from collections.abc import Iterator, Sequence
from typing import overload


class Timeline:
    """When the steps of one engine were over, in picoseconds, by the number of the step."""

    __slots__ = ("ends_ps", "first")

    def __init__(self) -> None:
        self.ends_ps = array("q")
        self.first = 0
        """Number of the step whose end is ends_ps[0]."""

    @property
    def last(self) -> int:
        """Number of the last step that is over."""
        return self.first + len(self.ends_ps) - 1

    def end(self, step: int) -> int:
        """When `step` was over."""
        return self.ends_ps[step - self.first]

    def forget(self, before: int) -> None:
        """Nobody will ask again for the steps before number `before`."""
        count = min(before - self.first, len(self.ends_ps))
        if count > 0:
            del self.ends_ps[:count]
            self.first += count


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

    @property
    def total_ps(self) -> int:
        """Sum of the gaps."""
        return self.timeline.end(self.last) - self.timeline.end(self.first)

    def to_array(self) -> "array[int]":
        """The gaps, each by itself."""
        start = self.first - self.timeline.first
        ends = self.timeline.ends_ps[start : start + len(self) + 1]
        return array("q", map(int.__sub__, ends[1:], ends))


def total_ps(gaps: Sequence[int]) -> int:
    """Sum of gaps, cheaply where they are those of steps."""
    return gaps.total_ps if isinstance(gaps, StepGaps) else sum(gaps)
