"""Exact time: integer picoseconds inside, float seconds at the edges.

Sums of floats depend on the order of adding, so two ways to the same instant may differ by an ulp.
Engine and SimPy therefore count whole picoseconds; seconds appear only where people or policies read them.
"""

import math
from fractions import Fraction

PS = 10**12
"""Picoseconds in a second."""


def to_ps(seconds: float | int | str) -> int:
    """Whole picoseconds nearest to `seconds`, read from its decimal digits (0.1 is exactly 10**11).

    A str may be any decimal literal ("12.5", "1e-3"). Raises ValueError for NaN, infinities and text that is no number.
    """
    return round(Fraction(str(seconds)) * PS)


def to_seconds(ps: int) -> float:
    """Float seconds nearest to `ps` picoseconds."""
    return ps / PS


def ceil_ps(seconds: float) -> int:
    """The first picosecond p for which `to_seconds(p) >= seconds`: when an instant handed out as a float has come.

    `to_seconds` rounds to the nearest float, so that is where p / PS passes the middle between `seconds` and the float
    before it, not where it passes `seconds` itself. Raises ValueError or OverflowError for NaN and infinities.
    """
    n, d = seconds.as_integer_ratio()
    p = -(-n * PS // d)
    if to_seconds(p - 1) < seconds:
        return p
    middle = (Fraction(seconds) + Fraction(math.nextafter(seconds, -math.inf))) / 2
    p = math.ceil(middle * PS)
    return p if to_seconds(p) >= seconds else p + 1
