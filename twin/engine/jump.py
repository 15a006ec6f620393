"""When the boundaries between equal steps come: sums of arithmetic progressions, exactly."""

from collections.abc import Iterable
from itertools import accumulate, islice

Run = tuple[int, int, int]
"""(number of steps, duration of the first, growth from one to the next), picoseconds."""


def add_ends(ends_ps: list[int], runs: Iterable[Run]) -> None:
    """Append when each step of `runs` is over, the first one beginning at the last instant there is."""
    at = ends_ps[-1]
    for count, first, growth in runs:
        if growth and count > 1:
            durations = range(first, first + count * growth, growth)
            ends_ps += islice(accumulate(durations, initial=at), 1, None)
        else:
            ends_ps += range(at + first, at + count * first + 1, first)
        at = ends_ps[-1]
