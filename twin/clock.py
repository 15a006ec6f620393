"""Exact time: integer picoseconds inside, float seconds at the edges.

Sums of floats depend on the order of adding, so two ways to the same instant may differ by an ulp.
Engine and SimPy therefore count whole picoseconds; seconds appear only where people or policies read them.
"""

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mypy_extensions import i64  # an int; compiled, one of 64 bits

PS: Final = 10**12
"""Picoseconds in a second."""

EXACT_PS: Final = 1 << 53
"""Whole numbers up to it are floats, too: so many picoseconds are two and a half hours."""

NEVER_PS: Final = (1 << 63) - 1
"""Later than any instant of a run, and the last one that fits into 64 bits. An infinity would make a float of it, which
cannot hold a long run's picoseconds."""


def to_ps(seconds: float | int | str) -> int:
    """Whole picoseconds nearest to `seconds`, read from its decimal digits (0.1 is exactly 10**11).

    A str may be any decimal literal ("12.5", "1e-3"). Raises ValueError for NaN, infinities and text that is no number.
    """
    return round(Fraction(str(seconds)) * PS)


def to_seconds(ps: int) -> float:
    """Float seconds nearest to `ps` picoseconds."""
    return ps / PS if -EXACT_PS < ps < EXACT_PS else quotient(ps, PS)


def quotient(numerator: Any, denominator: Any) -> float:
    """The float nearest to a quotient of whole numbers, as Python's `/` gives it.

    Where Python is compiled (setup.py) and knows that both are ints, it makes floats of them before it divides, which
    beyond EXACT_PS is not the same.
    """
    nearest: float = numerator / denominator
    return nearest


def times(number: int, ps: int) -> int:
    """number * ps. Compiled, a product that is known to fit into 64 bits takes a tenth of the time of any other."""
    if 0 <= number < 1 << 16 and 0 <= ps < 1 << 46:
        n: i64 = number
        return n * ps
    return number * ps


def ceil_ps(seconds: float) -> int:
    """The first picosecond p for which `to_seconds(p) >= seconds`: when an instant handed out as a float has come.

    `to_seconds` rounds to the nearest float, so that is where p / PS passes the middle between `seconds` and the float
    before it, not where it passes `seconds` itself. Raises ValueError or OverflowError for NaN and infinities.
    """
    if 0.0 <= seconds < 9000.0:  # within EXACT_PS
        p = int(seconds * PS) - 2  # the product is off by less than one
        while p / PS < seconds:
            p += 1
        return p
    n, d = seconds.as_integer_ratio()
    p = -(-n * PS // d)
    if quotient(p - 1, PS) < seconds:
        return p
    m, e = math.nextafter(seconds, -math.inf).as_integer_ratio()
    p = -(-(n * e + m * d) * PS // (2 * d * e))
    return p if quotient(p, PS) >= seconds else p + 1
