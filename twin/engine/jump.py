"""When the boundaries between equal steps come, without visiting each: sums of arithmetic progressions, exactly."""

from array import array
from itertools import accumulate, islice
from math import isqrt

Run = tuple[int, int, int]
"""(number of steps, duration of the first, growth from one to the next), picoseconds."""


class Jump:
    """A stretch of consecutive steps from the instant `start_ps` on, given as runs."""

    __slots__ = ("runs", "start_ps")

    def __init__(self, start_ps: int, runs: list[Run]) -> None:
        self.start_ps = start_ps
        self.runs = runs

    def end(self, steps: int) -> int:
        """When the first `steps` steps are over."""
        at = self.start_ps
        for count, first, growth in self.runs:
            n = count if count < steps else steps
            at += n * first + growth * (n * (n - 1) // 2)
            steps -= n
            if not steps:
                break
        return at

    def first_boundary(self, instant_ps: int) -> int:
        """How many steps are over at the first boundary at or after `instant_ps`: at least 1.

        The stretch must reach that far.
        """
        left = instant_ps - self.start_ps
        before = 0
        for count, first, growth in self.runs:
            total = count * first + growth * (count * (count - 1) // 2)
            if total >= left:
                return max(1, before + _steps_to_reach(left, first, growth))
            left -= total
            before += count
        raise AssertionError("the stretch ends before the instant")

    def after(self, steps: int) -> "Jump":
        """What is left when the first `steps` steps are over."""
        runs, left = [], steps
        for count, first, growth in self.runs:
            n = min(count, left)
            if count > n:
                runs.append((count - n, first + n * growth, growth))
            left -= n
        return Jump(self.end(steps), runs)

    def write_ends(self, ends_ps: "array[int]", steps: int) -> None:
        """Append when each of the first `steps` steps is over."""
        at = self.start_ps
        for count, first, growth in self.runs:
            n = count if count < steps else steps
            if n == 1:
                ends_ps.append(at + first)
            elif growth:
                durations = range(first, first + n * growth, growth)
                ends_ps.extend(islice(accumulate(durations, initial=at), 1, None))
            else:
                ends_ps.extend(range(at + first, at + n * first + 1, first))
            steps -= n
            if not steps:
                break
            at = ends_ps[-1]


def _steps_to_reach(left: int, first: int, growth: int) -> int:
    """The fewest steps n with n*first + growth*n*(n-1)/2 >= left."""
    if left <= 0:
        return 0
    if not growth:
        return -(-left // first)
    # growth/2 n^2 + (first - growth/2) n - left = 0, solved from below and corrected upwards
    half = 2 * first - growth
    n = (isqrt(half * half + 8 * growth * left) - half) // (2 * growth)
    n = max(n - 1, 0)
    while n * first + growth * (n * (n - 1) // 2) < left:
        n += 1
    return n
