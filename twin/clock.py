"""Exact time: integer picoseconds inside, float seconds at the edges.

Sums of floats depend on the order of adding, so two ways to the same instant may differ by an ulp.
Engine and SimPy therefore count whole picoseconds; seconds appear only where people or policies read them.
"""

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
    """The first picosecond p for which `to_seconds(p) >= seconds` holds in real arithmetic.

    Used for wake-up instants handed out by a policy as floats. Raises ValueError or OverflowError for NaN and infinities.
    """
    n, d = seconds.as_integer_ratio()
    return -(-n * PS // d)
