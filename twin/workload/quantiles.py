"""Distributions written as points: straight lines between (probability, value) pairs."""

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from math import sqrt

Points = tuple[tuple[float, float], ...]
"""(probability, value) from probability 0 to 1, both ascending; a value that stays over two points is an atom."""


def inverse_cdf(points: Points) -> Callable[[float], float]:
    """The function from a probability in [0, 1] to the value there."""
    marks = [p for p, _ in points]
    values = [value for _, value in points]
    slopes = [(b - a) / (q - p) if q > p else 0.0 for (p, a), (q, b) in pairwise(points)]
    last = len(slopes) - 1

    def at(u: float) -> float:
        i = bisect_right(marks, u) - 1
        if i > last:
            i = last
        return values[i] + (u - marks[i]) * slopes[i]

    return at


def moments(points: Points) -> tuple[float, float]:
    """(mean, standard deviation over mean), exactly those of the straight lines; the mean must not be 0."""
    mean = square = 0.0
    for (p, a), (q, b) in pairwise(points):
        mean += (q - p) * (a + b) / 2
        square += (q - p) * (a * a + a * b + b * b) / 3
    return mean, sqrt(max(square - mean * mean, 0.0)) / mean
