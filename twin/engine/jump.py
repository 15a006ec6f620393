"""When the boundaries between steps come: sums of arithmetic progressions, exactly, and none of them written down."""

from math import sqrt
from typing import TYPE_CHECKING, Final

from twin.clock import times
from twin.compiled import mypyc_attr
from twin.metrics.token_times import Timeline

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int; compiled, one of 64 bits

END_OF_TIME: Final = 9.2e18
"""Picoseconds, later than any instant of a run; they still fit into 64 bits."""

MANY_STEPS: Final = 1 << 16
"""Cubes of so few fit into 64 bits."""

LONG_PS: Final = 1 << 46
"""More than a minute; so many steps of that length are still within 64 bits."""

EARLY_PS: Final = 1 << 62
"""Half of what fits into 64 bits, 53 days."""


@mypyc_attr(acyclic=True)
class Piece:
    """Steps `before` + 1 to `last` of a jump, each taking `growth` longer than the one before it."""

    __slots__ = ("before", "first", "growth", "last", "start", "stop")

    def __init__(
        self, before: "i64", count: "i64", start: "i64", first: "i64", growth: "i64"
    ) -> None:
        self.before = before
        self.last = before + count
        self.start = start
        self.first = first
        self.growth = growth
        self.stop = start + count * first + growth * (count * (count - 1) // 2)
        """When the last one is over."""

    def end(self, step: "i64") -> "i64":
        """When `step`, or the one before them all, is over."""
        if step == self.last:
            return self.stop
        i = step - self.before
        return self.start + i * self.first + self.growth * (i * (i - 1) // 2)

    def find(self, instant_ps: "i64", least: "i64") -> "i64":
        """The earliest step from `least` on that is not over before an instant; there must be one."""
        step = least
        if self.end(step) < instant_ps:
            # Where a parabola reaches it; as a float, that may be off by a step.
            ahead, growth = float(instant_ps - self.start), float(self.growth)
            slope = float(self.first) - growth / 2
            guess = self.before + int(
                2 * ahead / (slope + sqrt(slope * slope + 2 * growth * ahead))
            )
            step = max(least, min(guess, self.last))
            while step > least and self.end(step - 1) >= instant_ps:
                step -= 1
            while self.end(step) < instant_ps:
                step += 1
        return step

    def sum_ends(self, step: "i64", stride: "i64", n: "i64") -> "tuple[i64, i64]":
        """How long after `start` `n` steps are over, every `stride`-th one from `step` on, added up.

        Returns how many times `first` and how many times `growth` that is.
        """
        i = step - self.before
        pairs = n * (n - 1) // 2
        grown = n * (i * (i - 1) // 2) + (stride * i + stride * (stride - 1) // 2) * pairs
        grown += stride * stride * (pairs * (n - 2) // 3)
        return n * i + stride * pairs, grown


@mypyc_attr(acyclic=True)
class Jump:
    """Steps one after another from an instant on. Step k, from 1 on, is over at `end(k)`; the first begins at
    `end(0)`.
    """

    __slots__ = ("_end", "_pieces", "_start", "steps")

    def __init__(self, start_ps: "i64") -> None:
        self.steps: i64 = 0
        self._start = self._end = start_ps
        self._pieces: list[Piece] = []

    def add(self, count: int, first_ps: int, growth_ps: int) -> bool:
        """More steps, the first of which takes `first_ps`; whether they are over before the end of time.

        Otherwise some of them are left out, or, if it is one, it ends about there.
        """
        is_short = count < MANY_STEPS and first_ps + count * growth_ps < LONG_PS
        if is_short and self._end < EARLY_PS:
            if count:
                self._append(count, first_ps, growth_ps)
            return True
        asked, room = count, END_OF_TIME - float(self._end)
        while (
            count > 1 and float(count) * (float(first_ps) + float(count) * float(growth_ps)) > room
        ):
            count //= 2
        if float(first_ps) > room:
            first_ps = int(room)
        left = count
        while left > 0:
            number = min(left, MANY_STEPS)
            self._append(number, first_ps, growth_ps)
            left -= number
            first_ps += number * growth_ps
        return count == asked

    def _append(self, count: "i64", first_ps: "i64", growth_ps: "i64") -> None:
        piece = Piece(self.steps, count, self._end, first_ps, growth_ps)
        self._pieces.append(piece)
        self.steps = piece.last
        self._end = piece.stop

    def end(self, step: "i64") -> "i64":
        """When `step` is over."""
        for piece in self._pieces:
            if step <= piece.last:
                return piece.end(step)
        raise IndexError(step)

    def find(self, instant_ps: "i64", least: "i64") -> "i64":
        """The earliest step from `least` on that is not over before an instant; the one after the last if all are."""
        for piece in self._pieces:
            if least <= piece.last and piece.stop >= instant_ps:
                return piece.find(instant_ps, max(least, piece.before + 1))
        return self.steps + 1

    def sum_delays(self, first: "i64", last: "i64", until: "i64", stride: "i64" = 1) -> int:
        """How long before step `until` every `stride`-th step from `first` to `last` is over, added up."""
        total, until_ps = 0, self.end(until)
        short: i64 = 0
        is_short = self.steps < MANY_STEPS and self._end - self._start < LONG_PS
        for piece in self._pieces:
            stop = min(piece.last, last)
            if first <= stop:
                n = (stop - first) // stride + 1
                delay_ps = until_ps - piece.start
                steps, grown = piece.sum_ends(first, stride, n)
                if is_short:
                    short += n * delay_ps - steps * piece.first - grown * piece.growth
                else:
                    total += times(n, delay_ps)
                    total -= times(steps, piece.first) + times(grown, piece.growth)
                first += n * stride
        return total + short

    def note(self, timeline: Timeline, first: "i64", last: "i64") -> None:
        """The steps from `first` to `last` are over."""
        for piece in self._pieces:
            before, stop = max(first, piece.before + 1) - 1, min(last, piece.last)
            if before < stop:
                duration_ps = piece.first + (before - piece.before) * piece.growth
                timeline.add(stop - before, piece.end(before), duration_ps, piece.growth)
