"""Kubernetes' resource quantities ("500m", "4Gi", "1e3") as integers in thousandths, both ways."""

import re
from fractions import Fraction

_SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "P": Fraction(10**15),
    "E": Fraction(10**18), "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40),
    "Pi": Fraction(2**50), "Ei": Fraction(2**60),
}  # fmt: skip

_FORM = re.compile(
    r"(?P<number>[+-]?(\d+\.?\d*|\.\d+))((?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<power>[+-]?\d{1,2}))?"
)


def exact(written: object) -> Fraction:
    """The number a quantity stands for. Raises ValueError for what is none."""
    text = str(written)
    found = _FORM.fullmatch(text)
    if found is None or isinstance(written, bool):
        raise ValueError(f"{text!r} is no quantity; write a number such as 5, 500m or 4Gi")
    value = Fraction(found["number"]) * _SUFFIXES[found["suffix"] or ""]
    return value * Fraction(10) ** int(found["power"]) if found["power"] else value


def milli(written: object) -> int:
    """Thousandths of a quantity, rounded up as Kubernetes does. Raises ValueError for what is none."""
    value = exact(written) * 1000
    return -(-value.numerator // value.denominator)


def quantity(thousandths: int) -> str:
    """The shortest form of so many thousandths: 5000 -> "5", 1500 -> "1500m"."""
    whole, rest = divmod(thousandths, 1000)
    return f"{thousandths}m" if rest else str(whole)
